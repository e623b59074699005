"""Remakes the table of matmul configurations: proposes, compiles, checks, times, keeps a record."""
