"""The commands about a step: predict, explain, sweep, validate."""
