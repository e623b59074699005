"""Checks forecasts against real steps by component and against baselines, and compares two runs, cards or GPUs."""
