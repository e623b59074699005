"""The measurement files: one JSON line a measurement, appended and resumed, and of which kernels a row is. No torch."""
