"""What a step costs. `device_work` times each operation by the profile, `simulation` lets the host enqueue and the
device drain; `memory`, `power_limit` and `uncertainty` add the peak, the clock and the interval; `priced_step` puts
them together, `forecast` is the record that comes out. `explain` and `alternatives` say why and what would help;
`sweep` and `kernel_times` answer tables; `measured_model` and `coverage` say what was measured for one model.
"""
