"""Projected profiles against published tables and against the GPU when it was measured."""
