"""Steps on several GPUs that others published, beside their forecasts."""
