"""Turns forecast seconds into dollars: cost curves over model sizes, their crossovers, break-even prices, plans; which
layout over several GPUs is the fastest, and how a step scales."""
