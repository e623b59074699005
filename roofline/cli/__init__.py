"""The command line, one file a command: `gpu/` what a GPU does, `step/` what a step costs, `choose/` what to take."""
