"""CSV in, CSV out: cells, rows that cannot be done, and what bounds an operation."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.roofline.base import csv_files
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.catalogue.prices import Price, parse_override
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.step.questions import kernel_times, many_gpus
from flopcast.roofline.step.questions import sweep as step_sweep
from flopcast.roofline.stream.library import modules
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


@pytest.fixture(scope="module")
def step(h200: Profile) -> Forecast:
    return forecast(make_config(width=512, depth=4), Run(), h200)


# --- cells --------------------------------------------------------------------------------------------------


@given(st.integers())
def test_integers_are_read_as_they_were_written(value: int) -> None:
    assert csv_files.parse_cell("width", csv_files.format_cell(value), int) == value


@given(st.booleans())
def test_booleans_are_read_as_they_were_written(value: bool) -> None:
    assert csv_files.parse_cell("tied", csv_files.format_cell(value), bool) is value


@given(st.text())
def test_text_is_read_as_it_was_written(value: str) -> None:
    assert csv_files.parse_cell("config", csv_files._plain(csv_files.format_cell(value)), str) == value


@given(st.floats())
def test_floats_keep_seven_digits_and_what_is_no_number_is_nothing(value: float) -> None:
    cell = csv_files.format_cell(value)
    if math.isfinite(value):
        assert float(cell) == pytest.approx(value, rel=1e-6)
    else:
        assert cell == ""


def test_nothing_is_an_empty_cell() -> None:
    assert csv_files.format_cell(None) == ""


@pytest.mark.parametrize(("cell", "value"), [("8", 8), ("8.0", 8), ("-3", -3), ("+5", 5)])
def test_a_whole_number_as_pandas_writes_it_beside_a_gap_is_one(cell: str, value: int) -> None:
    assert csv_files.parse_cell("heads", cell, int) == value


@pytest.mark.parametrize("cell", ["8.5", "eight", "1e3", ".0", "nan", "inf", "0x10", "8.00.0"])
def test_what_is_no_whole_number_is_refused(cell: str) -> None:
    with pytest.raises(UsageError, match=f"heads is '{cell}': valid is an integer"):
        csv_files.parse_cell("heads", cell, int)


@pytest.mark.parametrize(("cell", "value"), [("true", True), ("FALSE", False), ("True", True)])
def test_booleans_in_any_case(cell: str, value: bool) -> None:
    assert csv_files.parse_cell("tied", cell, bool) is value


@pytest.mark.parametrize("cell", ["1", "yes", "t"])
def test_other_words_are_no_booleans(cell: str) -> None:
    with pytest.raises(UsageError, match="valid are true and false"):
        csv_files.parse_cell("tied", cell, bool)


# --- files --------------------------------------------------------------------------------------------------


def read(folder: Path, text: str | bytes) -> tuple[list[str], list[csv_files.Row]]:
    path = folder / "in.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return csv_files.read_rows(path)


def test_a_table_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    """Byte order mark, CRLF, blanks after commas, blank lines, quotes."""
    text = b'\xef\xbb\xbfname, width ,batch\r\n"a, b", 512,4\r\n\r\nc,256\r\n'
    assert read(tmp_path, text) == (
        ["name", "width", "batch"],
        [{"name": "a, b", "width": "512", "batch": "4"}, {"name": "c", "width": "256", "batch": ""}],
    )


def test_a_row_of_empty_cells_keeps_its_place(tmp_path: Path) -> None:
    assert len(read(tmp_path, "width,batch\n512,4\n,\n256,4\n")[1]) == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("width,width\n1,2\n", "'width' are named twice"),
        ("width,batch\n", "holds a header and no rows"),
        ("width;batch\n512;4\n", "line 1: cells are separated by semicolons"),
        (b"\xff\xfew\x00", "is in UTF-16 or UTF-32: save it as UTF-8"),
        (b"name,width\na,512\nM\xfcnchen,512\n", "line 3: byte 0xfc is not UTF-8"),
        ('name,width\na,512\n"b,512\nc,512\n', "line 3: a quote is opened and not closed .*down to line 4"),
        ('name,width\n"a,512\nb,512\nc","512"\n', "line 2: a quote is opened .*down to line 4"),
        ('name,width\n"a,512\n"b",512\n', "line 2: a quote is opened"),
        ('name,width\n"a"b,512\n', "line 2: not CSV .*write a quote twice"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        read(tmp_path, text)


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "a" / "out.csv"
    csv_files.write_rows(path, ["n", "fits", "mfu", "reason"], [{"n": 3, "fits": True, "mfu": 0.25, "more": 1}])
    assert csv_files.read_rows(path) == (
        ["n", "fits", "mfu", "reason"],
        [{"n": "3", "fits": "true", "mfu": "0.25", "reason": ""}],
    )


cells = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Zs", "Zl", "Zp"]), min_size=1)


@given(st.lists(st.lists(cells, min_size=2, max_size=2), min_size=1, max_size=4))
def test_any_text_survives_the_file(tmp_path_factory: pytest.TempPathFactory, table: list[list[str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.csv"
    csv_files.write_rows(path, ["a", "b"], [dict(zip("ab", row, strict=True)) for row in table])
    assert [list(row.values()) for row in csv_files.read_rows(path)[1]] == table


# --- sweep --------------------------------------------------------------------------------------------------


H200 = many_gpus.Gpu("nvidia-h200", "nvidia-h200", "cuda")
L4 = many_gpus.Gpu("nvidia-l4", "nvidia-l4", "cuda")


def sweep(*rows: csv_files.Row, price: Price | None = None) -> list[dict[str, Any]]:
    return step_sweep.sweep(rows, [H200], lambda gpu: price)


def test_a_row_is_forecast_as_alone(step: Forecast) -> None:
    (found,) = sweep({"name": "x", "width": "512"})
    assert found["name"] == "x"
    assert {name: found[name] for name in ("step_seconds", "n_params", "depth", "peak_bytes", "fits")} == {
        "step_seconds": step.step_seconds, "n_params": step.n_params, "depth": 4,
        "peak_bytes": step.peak_bytes, "fits": True,
    }  # fmt: skip
    assert found["price_usd_per_hour"] is found["usd_per_step"] is found["reason"] is None


def test_rows_that_cannot_be_done_stay_in_place_and_cost_the_others_nothing() -> None:
    rows: list[csv_files.Row] = [
        {"width": "512", "heads": "6", "kv_heads": "4"},
        {"width": "512"},
        {"width": "512", csv_files.EXTRA: "4, true"},
        {"width": "512", "mode": "max-autotune"},
        {"config": "qwen9"},
        {"width": "8"},
        {"width": "512", "precision": "fp8"},
    ]
    seen: list[tuple[int, int]] = []
    found = step_sweep.sweep(rows, [H200], lambda gpu: None, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (7, 7)
    assert [bool(row.get("step_seconds")) for row in found] == [False, True, *[False] * 5]
    said = ("kv_heads 4", None, "beyond the last column: 4, true", "takes the GPU itself", "qwen9", "0 layers", "'fp8'")
    for row, part in zip(found, said, strict=True):
        assert part is None if row["reason"] is None else part is not None and part in row["reason"]


def test_what_is_not_known_well_is_a_warning_and_no_reason(h200: Profile) -> None:
    """`reason` marks what was not done: a forecast with a warning is one."""
    bare = replace(h200, surfaces={})
    stream = get_stream(make_config(width=512, depth=4), Run().traced_on("cuda"))
    (found,) = many_gpus.forecast_steps([many_gpus.Step(stream, Run())], bare)
    assert isinstance(found, Forecast)
    row = step_sweep.scalars(found)
    assert "no measured kind" in row["warnings"]
    assert row["reason"] is None


@given(st.floats(0.01, 100), st.floats(0.01, 100))
def test_a_dearer_hour_never_makes_a_cheaper_step(step: Forecast, one: float, two: float) -> None:
    cheap, dear = (
        step_sweep.scalars(replace(step, price=parse_override(f"nvidia-h200={usd}"))) for usd in sorted((one, two))
    )
    assert cheap["usd_per_step"] <= dear["usd_per_step"]
    assert cheap["flops_per_usd"] >= dear["flops_per_usd"]
    assert cheap["step_seconds"] == dear["step_seconds"]
    assert cheap["usd_per_step"] * cheap["flops_per_usd"] == pytest.approx(step.flops_counted)


# --- kernels ------------------------------------------------------------------------------------------------


def test_what_is_left_out_takes_its_default(h200: Profile) -> None:
    short, long = kernel_times.kernels(
        [
            {"m": "512", "n": "512", "k": "512"},
            {"op": "gemm", "m": "512", "n": "512", "k": "512", "layout": "nt", "dtype": "bf16", "backend": "torch",
             "cache": "cold"},
        ],
        h200,
    )  # fmt: skip
    assert {k: short[k] for k in kernel_times.KERNELS_OUT} == {k: long[k] for k in kernel_times.KERNELS_OUT}
    (attention,) = kernel_times.kernels(
        [{"op": "attention", "batch": "1", "heads": "4", "seq": "256", "head_dim": "128"}], h200
    )
    assert attention["seconds"] > 0


def test_halves_of_the_attention_matrix_count_once(h200: Profile) -> None:
    sizes = {"op": "attention", "batch": "2", "heads": "8", "seq": "1024", "head_dim": "128"}
    causal, full = kernel_times.kernels([{**sizes, "causal": "true"}, {**sizes, "causal": "false"}], h200)
    assert full["tflops"] * full["seconds"] == pytest.approx(2 * causal["tflops"] * causal["seconds"])


def test_a_launch_is_not_in_it_but_the_gap_of_a_graph_is(h200: Profile) -> None:
    def seconds(gap: float) -> float:
        number = Number(gap, gap, gap, "measured")
        profile = replace(h200, ceilings={**h200.ceilings, "graph_gap": number})
        return float(kernel_times.kernels([{"m": "64", "n": "64", "k": "64"}], profile)[0]["seconds"])

    assert seconds(1e-6) - seconds(0.0) == pytest.approx(1e-6)


@pytest.mark.parametrize("size", ["0", "-1", "1.5", "x", "", str(10**30)])
def test_sizes_that_cannot_be_are_refused(h200: Profile, size: str) -> None:
    (row,) = kernel_times.kernels([{"m": size, "n": "64", "k": "64"}], h200)
    assert row["reason"].startswith("m is ")
    assert "seconds" not in row


def part(ceilings: dict[str, float], peaks: dict[str, float], h200: Profile) -> Profile:
    """A part of these roofs alone."""
    return replace(
        h200,
        surfaces={},
        ceilings={name: Number(x, x, x, "measured") for name, x in ceilings.items()},
        peaks={name: Number(x, x, x, "datasheet") for name, x in peaks.items()},
    )


@pytest.mark.parametrize(
    ("m", "n", "k", "bound"), [(4096, 4096, 4096, "matrix"), (1, 4096, 4096, "memory"), (16, 16, 16, "launch")]
)
def test_the_slowest_roof_bounds(h200: Profile, m: int, n: int, k: int, bound: str) -> None:
    roofs = {"hbm_copy": 1e12, "kernel_floor": 1e-6, "matrix_burst/bf16": 1e14}
    row = {"m": str(m), "n": str(n), "k": str(k)}
    assert kernel_times.kernels([row], part(roofs, {"bf16": 2e14}, h200))[0]["bound"] == bound


def test_a_dtype_without_a_roof_is_held_against_the_highest(h200: Profile) -> None:
    """A rate of nothing would call every operation bound by the matrix units."""
    bare = part({"hbm_copy": 1e12, "kernel_floor": 1e-6}, {"bf16": 1e14}, h200)
    rows = [{"m": str(m), "n": str(m), "k": str(m), "dtype": "fp16"} for m in (16, 4096)]
    assert [row["bound"] for row in kernel_times.kernels(rows, bare)] == ["launch", "matrix"]


def test_triton_needs_a_gpu(h200: Profile) -> None:
    processor = replace(h200, device={**h200.device, "type": "cpu"})
    row = {"m": "64", "n": "64", "k": "64", "backend": "triton"}
    assert kernel_times.kernels([row], processor)[0]["reason"] == "backend triton needs a GPU"


def test_a_written_table_of_kernels_holds_no_nan(tmp_path: Path, h200: Profile) -> None:
    found = kernel_times.kernels([{"m": "1", "n": "1", "k": "1"}, {"m": "no", "n": "1", "k": "1"}], h200)
    csv_files.write_rows(tmp_path / "out.csv", ["m", *kernel_times.KERNELS_OUT], found)
    with (tmp_path / "out.csv").open() as file:
        one, two = csv.DictReader(file)
    assert all(math.isfinite(float(one[name])) for name in ("seconds", "seconds_low", "seconds_high", "tflops"))
    assert [two[name] for name in kernel_times.KERNELS_OUT[:-1]] == [""] * 6


# --- several GPUs, and a module's batches ---------------------------------------------------------------------

MLP = Module("flopcast.microbench.zoo:mlp", sizes={"width": 256, "depth": 2})


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    traced: list[int] = []
    trace = modules.module_stream

    def counted(*arguments: Any, **options: Any) -> Any:
        stream = trace(*arguments, **options)
        traced.append(stream.meta["batch"])
        return stream

    monkeypatch.setattr(modules, "module_stream", counted)
    return traced


def test_a_module_is_traced_thrice_for_all_gpus_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    batches = (4, 8, 16, 32, 64)
    rows = [{"batch": str(batch)} for batch in batches]
    found = step_sweep.sweep(rows, [H200, L4], lambda gpu: None, module=replace(MLP, _traced={}))
    assert sorted(traced) == [2, 3, 64]
    assert [(row["batch"], row["gpu"]) for row in found] == [
        (str(batch), gpu) for batch in batches for gpu in ("nvidia-h200", "nvidia-l4")
    ]
    module = replace(MLP, sizes={**MLP.sizes, "batch": 16})
    stream = module.stream(Run(), "cuda")
    for gpu, row in zip((H200, L4), found[4:6], strict=True):
        (alone,) = many_gpus.forecast_steps([many_gpus.Step(stream, Run(batch=16, seq=1))], find_profile(gpu.name))
        assert isinstance(alone, Forecast)
        assert row["step_seconds"] == pytest.approx(alone.step_seconds, rel=1e-9)
        assert (row["peak_bytes"], row["unit"]) == (alone.peak_bytes, "samples")


def test_a_module_that_changes_at_some_batch_is_traced_at_each(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Chunked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.linear(part) for part in x.split(8)]) if len(x) > 8 else self.linear(x)

    def factory(batch: int = 4) -> Any:
        return Chunked(), torch.randn(batch, 64)

    traced = count_traces(monkeypatch)
    stream_of = Module(factory).at_batches(Run(), "cuda", [4, 6, 8, 24])
    products = [sum(op.name == "aten.addmm.default" for op in stream_of(batch).ops) for batch in (4, 8, 24)]
    assert products == [1, 1, 3]
    assert set(traced) == {2, 3, 4, 8, 24}


def test_processes_side_by_side_answer_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"width": "512"}, {"width": "512", "optimizer": "adamw-fused"}, {"width": "8"}]
    here = step_sweep.sweep(rows, [H200, L4], lambda gpu: None)
    monkeypatch.setattr(many_gpus, "MANY_GPUS", 2)
    monkeypatch.setattr(many_gpus.os, "cpu_count", lambda: 2)
    seen: list[tuple[int, int]] = []
    apart = step_sweep.sweep(rows, [H200, L4], lambda gpu: None, progress=lambda *done: seen.append(done))
    assert seen[-1] == (6, 6)
    assert [list(row) for row in apart] == [list(row) for row in here]
    for one, other in zip(here, apart, strict=True):
        for name, value in one.items():
            assert other[name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)


def test_where_no_process_can_start_this_one_forecasts(monkeypatch: pytest.MonkeyPatch) -> None:
    from concurrent.futures import ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    def refuse(*arguments: Any) -> Any:
        raise BrokenProcessPool("no process")

    monkeypatch.setattr(many_gpus, "MANY_GPUS", 2)
    monkeypatch.setattr(many_gpus.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(ProcessPoolExecutor, "submit", refuse)
    found = step_sweep.sweep([{"width": "512"}], [H200, L4], lambda gpu: None)
    assert all(row["step_seconds"] > 0 for row in found)
