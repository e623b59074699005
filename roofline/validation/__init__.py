"""How it is checked: forecasts beside real steps by component, baselines, and two runs, cards or GPUs compared."""
