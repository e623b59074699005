"""Answers questions about steps by the forecast of each.

`explain` says where the time of one goes and `alternatives` what would shorten it; `largest_batch` searches for what
fits; `many_gpus` forecasts many steps on many GPUs side by side, and `sweep` a table of them; `kernel_times` answers
a table of single operations.
"""
