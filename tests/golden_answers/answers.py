"""What the command line answers, kept word for word, so that a change of the code that should change no answer can show
that it changes none.

    python tests/golden_answers/answers.py              compares all byte for byte; exit 1 where one differs
    python tests/golden_answers/answers.py --fast       the quick cases alone
    python tests/golden_answers/answers.py widths l40s  the cases with one of these words in their command
    python tests/golden_answers/answers.py --update     writes those answers that are others than the kept ones

An answer is what one command of cases.toml leaves: its exit code, stdout, stderr and the files that it wrote. All run
in this process, each in a folder and with a cache of its own, so that none finds what another worked out.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import math
import os
import re
import runpy
import shlex
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

# Words wrap, and sums are made, alike in every terminal: read when rich, numpy and torch are first imported.
SETTINGS = {"COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "MPLBACKEND": "Agg"}  # fmt: skip

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER / "answers"  # a file a command, so that a diff shows what a change says otherwise
CASES: dict[str, Any] = tomllib.loads((FOLDER / "cases.toml").read_text(encoding="utf-8"))
QUICK: tuple[str, ...] = tuple(CASES["quick"])
ALL: tuple[str, ...] = (*QUICK, *CASES["more"])

Answer = dict[str, str]
LONG = 150_000  # characters that are kept as they are
HASHED = "sha256 of all"
# Sums are made in another order on other processors: numbers this near are the same (a time within a picosecond).
RELATIVE, ABSOLUTE = 1e-6, 1e-12
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.IGNORECASE)


def answer(command: str) -> Answer:
    """Part -> text of what `flopcast COMMAND` leaves: "exit code", "stdout", "stderr" and each file it wrote."""
    with _folder_of_its_own() as folder:
        given = {name: text.lstrip("\n") for name, text in CASES["files"].items()}
        for name, text in given.items():
            (folder / name).write_text(text, encoding="utf-8")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = _run(shlex.split(command))
        found = {"exit code": str(code), "stdout": out.getvalue(), "stderr": err.getvalue()}
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in given and not name.startswith(("cache/", "__pycache__/")):
                found[name] = path.read_text(encoding="utf-8")
        assert str(folder) not in "".join(found.values()), f"a path of this machine in the answer of {command}"
        is_priced = "--price" in shlex.split(command)
        return {part: _kept(_without_day(text) if is_priced else text) for part, text in found.items() if text}


def _without_day(text: str) -> str:
    """The text with TODAY for today's date where it is a whole value, between quotes or commas: a price of the command
    line is of the day. Dates in words are those of measurements, and stay."""
    return re.sub(rf'(?<=[",]){date.today().isoformat()}(?=[",])', "TODAY", text)


def _kept(text: str) -> str:
    """The text, of a long one (a roofline's JSON has 7 MB of points) a part of its lines and a hash of all."""
    if len(text) <= LONG:
        return text
    lines = text.splitlines(keepends=True)
    some = lines[:400] + lines[400::997]  # a prime, so that each field of a list's records has its turn
    return "".join([*some, f"{HASHED} {len(lines)} lines: {hashlib.sha256(text.encode()).hexdigest()}\n"])


def _run(arguments: Sequence[str]) -> int:
    """The exit code of `python -m flopcast`, run in this process: wherever the command line lies in the package."""
    argv = sys.argv
    sys.argv = ["flopcast", *arguments]
    try:
        runpy.run_module("flopcast", run_name="__main__", alter_sys=True)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv = argv
    return 0


@contextlib.contextmanager
def _folder_of_its_own() -> Iterator[Path]:
    """A temporary folder, made the working one, with a cache inside."""
    cache = os.environ.get("XDG_CACHE_HOME")
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        try:
            yield Path(name)
        finally:
            if cache is None:
                del os.environ["XDG_CACHE_HOME"]
            else:
                os.environ["XDG_CACHE_HOME"] = cache


def golden() -> dict[str, Answer]:
    """Command -> the answer that is kept of it."""
    found = {}
    for path in sorted(GOLDEN.glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        command = kept.pop("command")
        found[command] = {part: "".join(lines) for part, lines in kept.items()}
    return found


def differing_lines(kept: Answer, found: Answer, *, relative: float = 0.0, absolute: float = 0.0) -> list[str]:
    """Each line in which two answers differ, as "part, line N: 'kept' is now 'found'": in a word, or in a number by
    more than the tolerance."""
    lines = []
    for part in dict.fromkeys((*kept, *found)):
        both = kept.get(part, "").splitlines(), found.get(part, "").splitlines()
        for number, (one, other) in enumerate(zip_longest(*both), start=1):
            if relative and one and other and one.startswith(HASHED) and other.startswith(HASHED):
                continue  # of numbers that may differ a little
            if one != other and (one is None or other is None or not _is_close(one, other, relative, absolute)):
                lines.append(f"{part}, line {number}: {one!r} is now {other!r}")
    return lines


def is_another(kept: Answer, found: Answer) -> bool:
    """Whether an answer says something else than the one that is kept, beyond what processors differ in."""
    return bool(differing_lines(kept, found, relative=RELATIVE, absolute=ABSOLUTE))


def _is_close(one: str, other: str, relative: float, absolute: float) -> bool:
    numbers = zip(NUMBER.findall(one), NUMBER.findall(other), strict=False)
    return NUMBER.split(one) == NUMBER.split(other) and all(
        math.isclose(float(a), float(b), rel_tol=relative, abs_tol=absolute) for a, b in numbers
    )


def _difference(kept: Answer, found: Answer, most: int = 24) -> str:
    """A short unified diff of what differs."""
    lines: list[str] = []
    for part in dict.fromkeys((*kept, *found)):
        both = kept.get(part, "").splitlines(), found.get(part, "").splitlines()
        lines += difflib.unified_diff(*both, f"kept {part}", f"found {part}", n=1, lineterm="")
    if not lines and kept != found:
        lines = ["(line ends differ)"]
    return "\n".join([f"    {line[:200]}" for line in lines[:most]] + ["    ..."] * (len(lines) > most))


def _write(answers: Mapping[str, Answer]) -> None:
    """One file for each command, and none of a command that is no longer asked."""
    GOLDEN.mkdir(exist_ok=True)
    for path in set(GOLDEN.glob("*.json")) - {_path(command) for command in answers}:
        path.unlink()
    for command, parts in answers.items():
        kept = {"command": command} | {part: text.splitlines(keepends=True) for part, text in parts.items()}
        _path(command).write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def _path(command: str) -> Path:
    """The command in the letters of a file's name; a hash keeps apart those that differ in others."""
    words = re.sub(r"[^A-Za-z0-9.]+", "-", command).strip("-")[:80]
    return GOLDEN / f"{words}-{hashlib.sha256(command.encode()).hexdigest()[:6]}.json"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="run the cases whose command holds one of these, or is one of these")
    parser.add_argument("--fast", action="store_true", help="run the quick cases alone")
    parser.add_argument("--update", action="store_true", help="write the answers in place of comparing them")
    parser.add_argument("--times", action="store_true", help="print the seconds of each case")
    options = parser.parse_args()
    chosen = [
        command
        for command in (QUICK if options.fast else ALL)
        if not options.words or any(word == command if word in ALL else word in command for word in options.words)
    ]
    kept = golden()
    found, differing, begun = {}, 0, time.monotonic()
    for command in chosen:
        started = time.monotonic()
        found[command] = answer(command)
        if options.times:
            print(f"{time.monotonic() - started:6.2f} s  {command}", flush=True)
        if not options.update and found[command] != kept.get(command):
            differing += 1
            why = _difference(kept[command], found[command]) if command in kept else "    (no answer is kept)"
            print(f"DIFFERS: flopcast {command}\n{why}", flush=True)
    others = [command for command in chosen if is_another(kept.get(command, {}), found[command])]
    if options.update:
        kept |= {command: found[command] for command in others}
        _write({command: kept[command] for command in ALL if command in kept})
    verb = f"compared, {len(others)} written" if options.update else f"compared, {differing} differ"
    print(f"{len(chosen)} answers {verb}, {time.monotonic() - begun:.0f} s")
    return int(differing > 0)


if __name__ == "__main__":
    os.environ |= SETTINGS
    os.environ.pop("FORCE_COLOR", None)
    raise SystemExit(main())
