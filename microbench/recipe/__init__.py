"""Defines one training step of a real model, and how it is planned, built and patched, for the tracer, the calibration
and the validation.
"""
