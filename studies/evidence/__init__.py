"""Makes the tables of `docs/accuracy.md`, the evidence beside them, and shows that the tests see wrong constants."""
