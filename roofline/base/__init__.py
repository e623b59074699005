"""Helpers that every package uses and none owns: numbers with an interval, units in words, CSV files, shipped data."""
