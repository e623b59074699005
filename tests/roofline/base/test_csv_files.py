"""Tables: what is written is read back, and no spreadsheet runs a cell of it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import RunError, UsageError
from flopcast.roofline.base.csv_files import format_cell, parse_csv, read_rows, write_rows

HOSTILE = [
    "=1+1", "+A1", "-A1", "@SUM(A1)", '=HYPERLINK("http://x")', "-2+3+cmd|' /C calc'!A0", "\t=1", "'=1", "''@x",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_cell_that_a_spreadsheet_would_run_is_quoted_and_comes_back(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    write_rows(path, ["name", text], [{"name": text, text: 1.5}])
    with path.open(newline="") as file:
        header, cells = csv.reader(file)
    assert header[1][0] == cells[0][0] == "'"
    columns, (row,) = read_rows(path)
    assert columns == ["name", text]
    assert row["name"] == text


@pytest.mark.parametrize("text", ["-1.5", "+3", "-1e-6", "a=b", "w256", "", "it's", "'quoted'", "-inf"])
def test_numbers_and_plain_texts_stay_as_they_are(text: str) -> None:
    assert format_cell(text) == text


cells = st.text(st.characters(exclude_categories=["Cs", "Cc", "Z"]) | st.sampled_from("=+-@' "), max_size=8)


@given(cells.map(str.strip).filter(bool))
def test_any_text_comes_back(text: str) -> None:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([["column", "other"], [format_cell(text), "x"]])
    assert parse_csv(Path("a.csv"), out.getvalue()).rows == [(2, [text, "x"])]


def test_a_full_disk_is_an_error_that_names_the_file() -> None:
    with pytest.raises(RunError, match="no room to write /dev/full"):
        write_rows(Path("/dev/full"), ["a"], [{"a": 1}])
    with pytest.raises(UsageError, match=r"/proc/no/a.csv cannot be written: .*; choose another --out"):
        write_rows(Path("/proc/no/a.csv"), ["a"], [{"a": 1}])
