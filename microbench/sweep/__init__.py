"""Measures the cases of a suite, each checked before it is timed, and the ceilings and costs of the machine itself."""
