"""Measures devices, hosts and training steps. `records/` reads and writes the measurement files; `recipe/` is the
training step that is traced, calibrated and run; `timing/` times one call on a device; `sweep/` measures a suite's
cases and the ceilings; `hosts/` measures the host cost of a step, `steps/` real steps; `collectives/` what joins GPUs;
`tuning/` regenerates the table of kernel configurations. `bench.py` measures one device, `fanout.py` all GPUs of a
host. `zoo.py` has modules to be named on a command line.
"""
