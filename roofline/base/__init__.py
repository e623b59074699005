"""What every room uses and no room owns: numbers with a deviation, units in words, CSV files, the shipped data."""
