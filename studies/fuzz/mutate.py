"""Damages real files as users, disks and other programs do: fields missing or of another type, numbers that are none,
text that is none, files torn, of another kind or too deep."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

Damage = Callable[[Random, bytes], bytes]

HUGE = 10**5000  # more digits than Python writes or reads as one integer
DEEP = 50_000  # levels; Python's own parsers end at a thousand
VALUES: tuple[Any, ...] = (
    None, True, False, "", "x", "wide", "1", -1, 0, 1, 0.5, -0.5, 3, 1e-300, 1e30, 1e300, -1e300, 2**63, 2**200,
    float("nan"), float("inf"), float("-inf"), [], {}, [1], [[]], {"a": 1}, [None], "\x1b[31mred", "=1+1", "\x00",
    "\ud800", "[bold]", "<script>", "../../x", "9" * 5000, "x" * 100_000, [1] * 1000, "2026-02-30", "1e999",
)  # fmt: skip
CELLS = ("", " ", "x", "-1", "0", "1e400", "nan", "inf", "-inf", "1e-320", "99999999999999999999", "9" * 5000, "=1+1",
         "true", "1,5", '"', "\x1b[31m", "\x00", "\udcff", "x" * 100_000, "2026-02-30", "0x10", "1_000", "１",
         "4;5")  # fmt: skip
TOML = ("nan", "inf", "-1", "-inf", "true", "[]", "{}", "1e400", "9" * 5000, "2026-02-30", '"x"', '""',
        "1979-05-27T07:32:00Z", "[" * 2000 + "]" * 2000, "0x", "'" + "x" * 100_000 + "'", "=", "")  # fmt: skip


def damaged_json(random: Random, content: bytes) -> bytes:
    """A JSON document with one value missing, changed or doubled; one time in six damaged as `damaged_bytes` does."""
    if random.random() < 1 / 6:
        return damaged_bytes(random, content)
    document = json.loads(content)
    holder: list[Any] = [document]
    _damage_within(random, holder)
    return _written(holder[0])


def damaged_lines(random: Random, content: bytes) -> bytes:
    """A file of one JSON document a line, with one line damaged, doubled or missing."""
    if random.random() < 1 / 6:
        return damaged_bytes(random, content)
    lines = content.splitlines()
    at = random.randrange(len(lines))
    choice = random.random()
    if choice < 0.05:
        del lines[at]
    elif choice < 0.1:
        lines.insert(at, lines[at])
    else:
        lines[at] = damaged_json(random, lines[at])
    return b"\n".join(lines) + b"\n"


def damaged_csv(random: Random, content: bytes) -> bytes:
    """A table with one cell, heading, row or column changed."""
    if random.random() < 1 / 6:
        return damaged_bytes(random, content)
    rows = list(csv.reader(io.StringIO(content.decode())))
    row = random.randrange(len(rows))
    column = random.randrange(len(rows[row]))
    choice = random.random()
    if choice < 0.7:
        rows[row][column] = random.choice(CELLS)
    elif choice < 0.8:
        for cells in rows:
            del cells[column : column + 1]
    elif choice < 0.85:
        rows[row].append("more")
    elif choice < 0.9:
        del rows[row][column:]
    elif choice < 0.95:
        rows[0][column] = random.choice(rows[0])
    else:
        rows.insert(row, rows[row])
    written = io.StringIO()
    csv.writer(written, quoting=csv.QUOTE_MINIMAL).writerows(rows)
    return written.getvalue().encode(errors="surrogateescape")


def damaged_toml(random: Random, content: bytes) -> bytes:
    """A TOML file with one value changed or one line missing or doubled."""
    if random.random() < 1 / 6:
        return damaged_bytes(random, content)
    lines = content.decode().splitlines()
    at = random.choice([number for number, line in enumerate(lines) if "=" in line])
    choice = random.random()
    if choice < 0.8:
        lines[at] = re.sub("=.*", lambda _: f"= {random.choice(TOML)}", lines[at], count=1)
    elif choice < 0.9:
        del lines[at]
    else:
        lines.insert(at, lines[at])
    return ("\n".join(lines) + "\n").encode()


def packed(damage: Damage) -> Damage:
    """The same damage of a gzipped file: of its content, or one time in eight of its bytes."""

    def damaged(random: Random, content: bytes) -> bytes:
        if random.random() < 1 / 8:
            return damaged_bytes(random, content)
        return gzip.compress(damage(random, gzip.decompress(content)), mtime=0)

    return damaged


def damaged_bytes(random: Random, content: bytes) -> bytes:
    """Any file: torn, empty, with another byte, of another encoding, compressed and torn, or of another kind."""
    at = random.randrange(len(content) + 1)
    packed = gzip.compress(content, mtime=0)
    return random.choice(
        (
            lambda: b"",
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + bytes([random.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + b"\x00\xff\xfe\x1b[31m" + content[at:],
            lambda: b"\xff\xfe" + content.decode(errors="replace").encode("utf-16-le"),
            lambda: b"\xef\xbb\xbf" + content,
            lambda: packed,
            lambda: packed[: random.randrange(2, len(packed))],
            lambda: packed[:-8] + b"\x00" * 8,
            lambda: b"[" * DEEP + b"]" * DEEP,
            lambda: b'{"a":' * DEEP + b"1" + b"}" * DEEP,
            lambda: b"\x89PNG\r\n\x1a\n" + bytes(random.randrange(256) for _ in range(64)),
            lambda: b"null\n",
            lambda: b"9" * 5000,
            lambda: content.replace(b"\n", b"\r\n"),
        )
    )()


def _damage_within(random: Random, holder: Any) -> None:
    """Changes one value somewhere below `holder`, a list of the one document."""
    place: Any = 0
    while True:
        inner = holder[place]
        keys = list(inner) if isinstance(inner, Mapping) else list(range(len(inner))) if isinstance(inner, list) else []
        if not keys or (inner is not holder and random.random() < 0.15):
            break
        holder, place = inner, random.choice(keys)
    choice = random.random()
    value = holder[place]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if choice < 0.2:
        del holder[place]
        if not holder:
            holder.extend([None]) if isinstance(holder, list) else None
    elif choice < 0.4 and is_number:
        holder[place] = value * random.choice((-1, 0, 1e-30, 1e30, 1e300, 1e6, 1e-6)) or -1
    elif choice < 0.45:
        holder[place] = HUGE
    elif choice < 0.5 and isinstance(holder, list):
        holder.insert(place, value)
    elif choice < 0.55 and isinstance(holder, dict):
        holder[random.choice(("x", "\x1b[31m", "", "x" * 1000, "=1"))] = holder.pop(place)
    else:
        holder[place] = random.choice(VALUES)


def _written(document: Any) -> bytes:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(document).encode()
    finally:
        sys.set_int_max_str_digits(limit)


def arguments_of(random: Random, command: Sequence[str]) -> list[str]:
    """A command line with one value changed, or an option missing or doubled."""
    words = list(command)
    values = [place for place, word in enumerate(words) if place and not word.startswith("--")]
    at = random.choice(values)
    choice = random.random()
    if choice < 0.85:
        words[at] = random.choice(
            (*CELLS[:-1], "None", "9" * 30, "1,2", "*", "-", "a=b", "nvidia-h200", "/dev/null", ".")
        )
        words[at] = words[at].replace("\x00", "?")  # an argument cannot hold it
    elif choice < 0.92:
        del words[at]
    else:
        words.insert(at, words[at])
    return words
