"""Penalties of widths, forecast and then measured on real steps."""
