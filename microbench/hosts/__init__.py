"""Measures the host cost of a training step, on tiny models of several depths, and of calls of Triton's operators."""
