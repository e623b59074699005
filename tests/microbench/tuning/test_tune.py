"""Tuning, as far as it goes without a GPU: the grid, the record that survives a kill, the table made of it."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from flopcast.errors import DataError, UsageError
from flopcast.kernels import matmul, matmul_table
from flopcast.kernels.matmul_configs import GLUON, from_key, shared_memory_limit
from flopcast.kernels.matmul_law import proposals
from flopcast.kernels.shapes import Gemm
from flopcast.microbench.tuning import check, record, shapes, tune
from flopcast.microbench.tuning import table as tuning_table
from studies.kernels import pairs
from studies.kernels.tiles import LEFT_TO_THE_LAW

REPORTS = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200"
FAST, SLOW = "tma/128x128x64/w8s6/g8/k1/c1p1", "tma/64x64x64/w4s4/g8/stream/c1p3"
H200 = (9, 0)


def timed(config: str, seconds: float, *, m: int = 1024, layout: str = "nt", **more: Any) -> dict[str, Any]:
    place = {"layout": layout, "m": m, "n": 1024, "k": 1024}
    return {"kind": "time", **place, "config": config, "round": 2, "status": "ok", "seconds": seconds, **more}


def test_the_grid_is_the_three_products_of_every_layer() -> None:
    grid = shapes.grid()
    assert len(grid) == len(set(grid)) == 4 * (9 * 3 + 3) * 3
    for layout, expected in {"nt": (8192, 3072, 1024), "nn": (8192, 1024, 3072), "tn": (3072, 1024, 8192)}.items():
        shape = shapes.layer(layout, 8192, 3072, 1024)
        assert (shape.m, shape.n, shape.k) == expected
        assert shape in grid
    assert {shape.flops for shape in grid} == {
        2 * t * n * k for t in shapes.TOKENS for w in shapes.WIDTHS for n, k in ((w, w), (3 * w, w))
    } | {2 * t * shapes.VOCABULARY * k for t in shapes.TOKENS for k in shapes.VOCABULARY_WIDTHS}


@pytest.mark.parametrize("size", [(1024, 256, 256), (256, 256, 16384), (16384, 8192, 8192), (17, 8, 24)])
def test_what_is_tried_fits_and_differs(size: tuple[int, int, int]) -> None:
    shape = Gemm(m=size[0], n=size[1], k=size[2], layout="tn")
    found = proposals(shape, 132, H200, tune.PROPOSALS)
    assert 8 <= len(found) <= tune.PROPOSALS
    assert len({config.key for config in found}) == len(found)
    assert all(config.shared_bytes(2) <= shared_memory_limit(H200) for config in found)
    kernels = {check.kernel_of(config) for config in found}
    assert all(from_key(key) for key in kernels)


def test_a_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / record.RECORDS
    record.append(path, timed(FAST, 1e-5))
    record.append(path, timed(SLOW, 2e-5))
    path.write_text(path.read_text()[:-20])
    record.mend(path)
    record.append(path, timed("cublas", 3e-5))
    assert [row["config"] for row in record.rows(path)] == [FAST, "cublas"]
    assert record.rows(tmp_path / "none.jsonl") == []


def test_wrong_lines_are_told_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / record.RECORDS
    for row in (
        timed(FAST, 1e-5), {**timed(FAST, 1e-5), "m": 0}, timed("fast", 1e-5), {"kind": "time"}, {"kind": "odd"}, [],
        {**timed(FAST, 1e-5), "seconds": -1}, {"kind": "check", "kernel": FAST, "layout": "nt", "status": "ok"},
    ):  # fmt: skip
        record.append(path, row)
    said: list[str] = []
    assert [row["kind"] for row in record.rows(path, said.append)] == ["time", "check"]
    (told,) = said
    assert "6 of 8 rows are wrong and left out: line 2: m is 0: valid is an integer from 1 to" in told
    assert "and 3 more" in told
    path.write_bytes(b"\x1f\x8b torn")
    with pytest.raises(DataError, match="cannot be read"):
        record.rows(path)


def test_the_table_holds_the_fastest_that_is_right(tmp_path: Path) -> None:
    records = [
        timed(FAST, 1.0e-5), timed(SLOW, 2.0e-5), timed("cublas", 0.9e-5),
        timed(FAST, 0.5e-5, m=2048), timed(FAST, 0.5e-5, m=2048, status="wrong"), timed(SLOW, 2.0e-5, m=2048),
        timed("cublas", 1e-5, m=2048),
        timed(SLOW, 0.1e-5, m=4096, round=1), timed("cublas", 1e-5, m=4096),
        timed(SLOW, 0.1e-5, m=8192),
        {"kind": "check", "kernel": FAST, "layout": "nt", "status": "ok"},
    ]  # fmt: skip
    document = tuning_table.table(records, "NVIDIA H200", 132, H200)
    path = tmp_path / "matmul_table.json"
    tuning_table.write_table(document, path)
    table = matmul_table.read(path)
    chosen = {place: config.key for place, config in table.choices["nt"].items()}
    # 4096 got no second round, 8192 was cut short
    assert chosen == {(1024, 1024, 1024): FAST, (2048, 1024, 1024): SLOW}
    assert math.isclose(tuning_table.ratios(records)["nt", 1024, 1024, 1024], 0.9)
    assert "least 0.500, 2 shapes" in tuning_table.summary(records)
    assert tuning_table.summary([]) == "no shape is timed yet"
    # done again: the later session counts, whole
    again = [*records, timed(SLOW, 1.5e-5), timed("cublas", 1.2e-5)]
    assert tuning_table.best(again)["nt", 1024, 1024, 1024] == (SLOW, 1.5e-5)
    assert math.isclose(tuning_table.ratios(again)["nt", 1024, 1024, 1024], 0.8)


def test_a_shape_done_again_tries_what_its_record_lacks() -> None:
    shape = Gemm(m=1024, n=1024, k=1024)
    options = proposals(shape, 132, H200, 200)
    first = next(config.key for config in options if config.kind in GLUON)
    records = [timed(FAST, 1e-5), timed(SLOW, 9e-6), timed("cublas", 8e-6), timed(first, 1.0, round=1)]
    found = [
        config.key
        for config in tuning_table.again(options, tuning_table.configurations(records)["nt", 1024, 1024, 1024])
    ]
    assert found[:2] == [SLOW, FAST]  # the fastest of the last time compete again
    assert len(found) == len(set(found))
    assert first not in found
    assert tuning_table.AGAIN <= len(found) - 2 <= tuning_table.AGAIN + 3
    untimed = [config for config in options if config.kind in GLUON and config.key != first]
    assert found[2] == untimed[0].key


def test_the_shipped_table_holds_what_was_right_on_its_device() -> None:
    """Every choice was timed there, for that very shape, after its bit-exact check; and for most it was the fastest."""
    records = []
    for name in ("first", "second", "third", "fourth", "fifth", "sixth", "seventh"):
        with gzip.open(REPORTS / "matmul-kernels" / f"{name}_tuning.jsonl.gz", "rt") as file:
            records += [json.loads(line) for line in file]
    seen = {
        (row["layout"], row["m"], row["n"], row["k"], row["config"])
        for row in records
        if row["kind"] == "time" and row["status"] == "ok" and row["round"] == 2
    }
    (table,) = matmul_table.tables()
    assert table.device == "NVIDIA H200"
    chosen = {
        (layout, *place, config.key) for layout, choices in table.choices.items() for place, config in choices.items()
    }
    assert len(chosen) == len(shapes.grid()) + len(shapes.of_models()) - len(LEFT_TO_THE_LAW)
    assert chosen <= seen
    assert not any(row["status"] == "wrong" for row in records)


def test_small_integers_multiply_exactly() -> None:
    shape = Gemm(m=24, n=40, k=4096, layout="tn")
    a, b = check.small_integers(shape, "cpu")
    exact = matmul.matmul_reference(a, b, "tn")
    assert torch.equal(matmul.matmul_torch(a.float(), b.float(), "tn").double(), exact)
    assert torch.equal(check.exact_product((a, b), "tn"), exact.bfloat16())
    assert exact.abs().max() > 256  # beyond what bf16 counts: the rounding is checked too
    assert check.rounding(exact.bfloat16(), exact.float(), 0.0) <= 1
    lost = exact - a[-1:].mT.double() @ b[-1:].double() * 64
    assert check.rounding(lost.bfloat16(), exact.float(), 0.0) > 1


def test_the_benchmarks_rows_are_summed_up_and_drawn(tmp_path: Path) -> None:
    measured = pairs.read_rows(REPORTS / "kernels.csv")
    products = [row["key"] for row in measured if row["kernel"] == "matmul"]
    assert len(products) == len(set(products)) == len(shapes.grid())
    text = "\n".join(pairs.summarise(measured))
    assert "ok     matmul / cuBLAS, m, n, k >= 1024: 1.004 (to reach 1.00), least 0.882 (to reach 0.80)" in text
    again = tmp_path / "kernels.csv"
    pairs.append(again, measured[:2])
    pairs.append(again, [{**measured[2], "status": "error", "reason": "launch", "ratio": ""}])
    assert pairs.read_rows(again)[:2] == measured[:2]
    assert "2 pairs timed, 1 not" in "\n".join(pairs.summarise(pairs.read_rows(again)))
    pairs.plot(measured, tmp_path / "kernels.png")
    assert (tmp_path / "kernels.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about having no GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="on a GPU"):
        tune.tune_matmul(tmp_path, 10.0, print)
