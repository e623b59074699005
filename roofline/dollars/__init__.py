"""Turns forecast seconds into dollars: cost curves over model sizes, their crossovers, break-even prices, plans."""
