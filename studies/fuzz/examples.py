"""Draws examples: a damaged file and a command that reads it, or a command whose words are damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from unittest.mock import patch

from flopcast.roofline.cli.gpu import report
from flopcast.roofline.views.page import assemble
from studies.fuzz.corpus import COMMANDS, TARGETS, make
from studies.fuzz.mutate import arguments_of
from studies.fuzz.outcome import Outcome, outcome

WORDS = "command line"  # the name of the target that is no file
NAMES = (*(target.name for target in TARGETS), WORDS)


@dataclass(frozen=True)
class Example:
    """What was run, and how it ended."""

    name: str
    command: str
    outcome: Outcome


class Examples:
    """Examples in one folder, which holds the real files between two of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make(folder)
        self._files = {target.name: (folder / target.path).read_bytes() for target in TARGETS}
        self._stream = next((Path(os.environ["XDG_CACHE_HOME"]) / "flopcast" / "streams").rglob("*.json.gz"))
        self._whole_stream = self._stream.read_bytes()

    def one(self, random: Random, name: str) -> Example:
        """One example of a target."""
        if name == WORDS:
            words = arguments_of(random, random.choice(COMMANDS).split())
            return self._run(name, [*words, *(("--json",) if "--json" not in words else ())])
        target = next(target for target in TARGETS if target.name == name)
        path = self.folder / target.path
        command = random.choice(target.commands)
        with self._damaged(path, target.damage(random, self._files[name]), is_stream=name == "stream"):
            words = [word.replace("FILE", str(path)).replace("DIR", str(self.folder)) for word in command.split()]
            return self._run(name, words)

    def _run(self, name: str, words: list[str]) -> Example:
        out = self.folder / "out"
        words = [word.replace("OUT", str(out / "made")) if word.startswith("OUT") else word for word in words]
        out.mkdir()
        here = Path.cwd()
        os.chdir(out)  # what a damaged option names as a file to write lands here
        try:
            with self._quick_pages():
                found = outcome(words, [out / "made.csv", out / "made" / "validation.csv"])
        finally:
            os.chdir(here)
            shutil.rmtree(out)
        return Example(name, " ".join(words)[:300], found)

    @contextlib.contextmanager
    def _quick_pages(self) -> Iterator[None]:
        """Leaves out what takes half a minute of a page and reads no damaged file: its figures, and what standard
        models cost on every GPU."""
        page = self.folder / "pages" / "gpu" / "report.html"
        with (
            patch.object(assemble, "build_report", lambda *_, **__: page),
            patch.object(assemble, "print_summary", lambda *_: None),
            patch.object(report, report.standard_gpus_of_all.__name__, tuple),
        ):
            yield

    @contextlib.contextmanager
    def _damaged(self, path: Path, content: bytes, *, is_stream: bool) -> Iterator[None]:
        whole = path.read_bytes()
        path.write_bytes(content)
        if is_stream:
            self._stream.write_bytes(content)
        try:
            yield
        finally:
            path.write_bytes(whole)
            self._stream.write_bytes(self._whole_stream)
