"""Output in terminals and logs whose encoding lacks some characters: those alone are replaced, by what reads alike."""

from __future__ import annotations

import codecs
import io
import sys
import unicodedata

REPLACED = "flopcast.replaced"  # the name of the error handler, as codecs know it
_ALIKE = {"±": "+-", "µ": "u", "μ": "u", "…": "...", "–": "-", "—": "-", "×": "x", "≥": ">=", "≤": "<=", "→": "->",
          "─": "-", "━": "-", "│": "|", "┃": "|"}  # fmt: skip
_BOX = range(0x2500, 0x2580)


def replaced(fault: UnicodeError) -> tuple[str, int]:
    """What stands in place of characters that cannot be encoded, and where encoding continues (an error handler of
    `codecs`): a letter without its accent, else an escape such as \\u4e2d."""
    if not isinstance(fault, UnicodeEncodeError):
        raise fault
    return "".join(map(_alike, fault.object[fault.start : fault.end])), fault.end


def _alike(character: str) -> str:
    if found := _ALIKE.get(character):
        return found
    if ord(character) in _BOX:
        return "+"
    plain = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return plain or character.encode("ascii", "backslashreplace").decode()


def never_fail_to_encode() -> None:
    """Makes stdout and stderr replace what their encoding lacks: half of a surrogate pair, as a file name may hold, is
    in none."""
    codecs.register_error(REPLACED, replaced)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=REPLACED)
