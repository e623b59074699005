"""The command line, one file per command: `gpu/` what a GPU does, `step/` what a step costs, `choose/` what to take."""
