"""Measures what a step costs the host: tiny models of several depths, and calls of Triton's operators."""
