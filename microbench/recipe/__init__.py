"""One training step of a real model: as it is planned, built, patched, and called by tracer, calibration and
validation.
"""
