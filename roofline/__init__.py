"""What measurements mean: from a GPU's profile and a model's operations to the cost of a step. The rooms, ground first:

    base/        numbers with deviations, units, CSV files, the shipped data
    stream/      what a step launches: the traced operations, their shapes, how one trace serves other sizes
    gpu/         what a GPU does: datasheets, laws, fits, profiles measured and projected, hosts, suites
    step/        what a step costs: device work, the simulated timeline, memory, power, interval, forecast, explain
    validation/  how it is checked: forecasts beside real steps, two runs or two GPUs compared
    dollars/     what it costs in dollars: curves, crossovers, plans
    widths/      which widths to choose
    views/       what a person sees: figures, tables of the terminal, the page
    cli/         the command line, one file a command
    api.py       the same from Python

Imports go down this list only (`studies/house.py`, held by `tests/test_imports.py`).
"""
