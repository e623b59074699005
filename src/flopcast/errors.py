"""The exceptions that flopcast raises on purpose.

FlopcastError               any fault; the command line prints its message
├── UsageError              bad input: exit code 2
│   └── DataError           a file that is malformed, foreign, or of a newer schema
└── RunError                the run could not be finished: exit code 1

A message says what is wrong, the value, what is valid, and what to do next. Values come from files and options: a
message is `shortened`, whatever the value was.
"""

import re

INTERRUPTED = 130  # the exit code that shells give a command ended by Ctrl-C

LONGEST_WORD, LONGEST_MESSAGE = 400, 4000  # characters; a path is one word
_LONG_WORDS = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
# what turns the order of the characters after it around: a name can look like another
_TURNS = {code: f"\\u{code:04x}" for code in (0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))}
_ESCAPED = _CONTROLS | _TURNS


def visible(text: str) -> str:
    """A text with what a terminal obeys as escapes: a name in a file may begin \\x1b[31m."""
    return text if text.isprintable() else text.translate(_ESCAPED)


def shortened(text: str) -> str:
    """A text with the middle of long words and of a long whole left out, and without what a terminal obeys."""
    text = _LONG_WORDS.sub(lambda found: _ends(found[0], 80, 40), text)
    return visible(_ends(text, LONGEST_MESSAGE - 500, 400))


def _ends(text: str, first: int, last: int) -> str:
    return f"{text[:first]}[...]{text[-last:]}" if len(text) > first + last + 100 else text


class FlopcastError(Exception):
    """Any fault that flopcast foresees. `exit_code` is what the command line returns."""

    exit_code = 1

    def __str__(self) -> str:
        return shortened(super().__str__())


class UsageError(FlopcastError):
    """The request cannot be done as asked."""

    exit_code = 2


class DataError(UsageError):
    """A file that cannot be used: malformed, foreign, or written by a newer flopcast."""


class RunError(FlopcastError):
    """The run failed although the request was fine."""
