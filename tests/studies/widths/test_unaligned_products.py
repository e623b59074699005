"""The study's own run, tiny and by the wall clock: each row says what of it was compared with a reference."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import OperationRow, select
from studies.widths import unaligned_products


def test_a_sample_is_checked_and_rows_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unaligned_products, "CHECKED", 3)
    assert unaligned_products.main([str(tmp_path), "--smoke", "--device", "cpu"]) == 0
    rows = select(records.read(tmp_path).rows, OperationRow)
    checked = [row for row in rows if row["checked"] == "itself"]
    assert 0 < len(checked) < len(rows)
    assert {row["checked"] for row in rows} == {"itself", "sample"}
    for row in checked:
        assert (row["relative_error"] or 0.0) <= (row["tolerance"] or 0.0)
    assert all(row["relative_error"] is None for row in rows if row["checked"] == "sample")


def test_a_wrong_result_is_a_row_of_its_own_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flopcast.kernels import matmul

    monkeypatch.setattr(unaligned_products, "CHECKED", 1)
    monkeypatch.setattr(matmul, "check", lambda *_: (1.0, 0.01))
    unaligned_products.main([str(tmp_path), "--smoke", "--device", "cpu"])
    rows = select(records.read(tmp_path).rows, OperationRow)
    assert any(row["status"] == "incorrect" and "above the tolerance" in (row["reason"] or "") for row in rows)
