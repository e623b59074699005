"""Produces evidence and regenerates shipped data; not in the wheel, and the product imports none of it. Run from the
repository's root as `python -m studies.NAME`: `kernels/` compares the Triton kernels with the libraries', `widths/`
width penalties with real steps, `projection/` projections with measurements, `claims/` checks the source article's
claims, `suites/` makes the suites, `shipped/` makes the streams, intervals and hosts, `evidence/` the tables
of `docs/accuracy.md` and the bounds of the tests; `mutations.py` shows what those see of wrong constants.
"""
