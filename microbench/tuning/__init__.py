"""Regenerates the table of matmul configurations: proposes, compiles, checks and times them, and keeps a record."""
