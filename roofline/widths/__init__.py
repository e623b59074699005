"""Which widths to choose: what a width costs beside its aligned neighbour, and shapes of equal parameters."""
