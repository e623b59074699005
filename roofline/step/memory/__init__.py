"""Forecasts the memory of a step.

`lifetimes` follows the storages of a stream through `allocator`, which deals out blocks as torch's does, and adds what
kernels take while they run (`scratch`); `peak` says how much is held at most, and of what it consists; `needed` says
what a GPU must have for it.
"""
