"""From seconds to dollars: cost curves over model sizes, where they cross, break-even prices, plans."""
