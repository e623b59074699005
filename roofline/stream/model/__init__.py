"""Describes a model and how its step is run: configs, ladders of widths, batch, precision, optimizer, backends."""
