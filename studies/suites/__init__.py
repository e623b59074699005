"""Makes the suites that ship: cases drawn and taken from real steps, some of them held out of the fit.

    python -m studies.suites [NAME ...]

`plans.py` says what each suite holds, `build.py` traces the steps, `gemms.py`, `attention.py` and `calls.py` draw
around them, `duration.py` says how long measuring a suite takes.
"""
