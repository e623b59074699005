"""Fits a profile to measured rows: one time per row, a surface per kind of kernel, host costs, spread of cards."""
