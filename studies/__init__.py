"""What only makes evidence or remakes shipped data; not in the wheel, and the product imports none of it. Run from the
repository's root as `python -m studies.NAME`: `kernels/` the Triton kernels beside the libraries, `widths/`
penalties against real steps, `projection/` projections against what was measured, `claims/` the source article's
claims, `suites/` the makers of the suites, `shipped/` those of streams, intervals and hosts.
"""
