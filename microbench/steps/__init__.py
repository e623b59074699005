"""Real training steps, timed and profiled by component: what forecasts are validated on."""
