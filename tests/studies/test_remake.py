"""The list of tables that follow from the shipped profile: its commands exist, and so do the files that they write."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from studies.imports import ROOT
from studies.remake import PAGES, Page

WRITTEN = {file for page in PAGES for file in page.writes}
# What needs a GPU's rows that are not committed, somebody else's tables, or minutes of a compiler.
ELSEWHERE = {
    "reports/nvidia-h200/compiled-steps/without-a-gpu.md": "studies.compiled.make",
    "reports/parallel/published.md": "studies.published",
    "reports/links/README.md": "studies.links",
    "reports/projection/README.md": "studies.projection.check",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.command[0])
def test_commands_and_files_exist(page: Page) -> None:
    assert find_spec(page.command[0]) is not None
    assert all((ROOT / file).exists() for file in page.writes)


def test_no_table_that_a_study_makes_is_forgotten() -> None:
    """A committed table that begins by naming its command is in the list, or among those that need more than it."""
    tables = [*(ROOT / "reports").glob("*/*.md"), *(ROOT / "reports").glob("*/*/*.md")]
    made = {
        path.relative_to(ROOT).as_posix()
        for path in tables
        if re.search(r"[Mm]ade by `python -m studies|\A#[^\n]*\n+`python -m studies", path.read_text(encoding="utf-8"))
    }
    assert len(made) >= 8
    assert made <= WRITTEN | set(ELSEWHERE)
    assert all(find_spec(module) is not None for module in ELSEWHERE.values())


def test_the_list_is_told_by_words() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "studies.remake", "--list", "parallel"], cwd=ROOT, capture_output=True, text=True
    )
    assert "reports/parallel/timeline.md" in found.stdout
    assert "reports/economics" not in found.stdout
    unknown = subprocess.run(
        [sys.executable, "-m", "studies.remake", "nothing-has-this"], cwd=ROOT, capture_output=True, text=True
    )
    assert unknown.returncode == 2
    assert "nothing-has-this" in unknown.stderr
