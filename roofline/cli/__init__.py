"""The command line, one file per command: `gpu/` for GPUs, `step/` for a step's cost, `choose/` for choices."""
