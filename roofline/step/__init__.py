"""Forecasts what a training step costs.

`device_work` times each operation from the profile; `simulation` models the host enqueuing and the device draining the
queue; `memory`, `power_limit` and `uncertainty` add peak memory, clock and interval. `priced_step` puts them together,
and `forecast` is the resulting record; `measured_model` and `coverage` say what was measured for one model. The room
`questions` answers by many such forecasts: explanations, sweeps, the largest batch.
"""
