"""The exceptions that flopcast raises on purpose.

FlopcastError               any fault; the command line prints its message
├── UsageError              bad input: exit code 2
│   └── DataError           a file that is malformed, foreign, or of a newer schema
└── RunError                the run could not be finished: exit code 1

A message says what is wrong, the value, what is valid, and what to do next.
"""


class FlopcastError(Exception):
    """Any fault that flopcast foresees. `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(FlopcastError):
    """The request cannot be done as asked."""

    exit_code = 2


class DataError(UsageError):
    """A file that cannot be used: malformed, foreign, or written by a newer flopcast."""


class RunError(FlopcastError):
    """The run failed although the request was fine."""
