"""`cost`: its tables, figure and sentences, as scripts and people meet them."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.roofline.cli.shared import options
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream

H200 = "nvidia-h200"
Command = Callable[..., Any]


COST = ("cost", "--gpus", f"{H200},nvidia-l4", "--widths", "512,1024")


def test_cost_keeps_its_shape(flopcast: Command) -> None:
    found = flopcast(*COST, "--json").document
    assert set(found) >= {"ladder", "points", "crossovers", "break_even", "best"}
    assert found["ladder"] == [{"width": 512, "depth": 4}, {"width": 1024, "depth": 5}]
    assert [(p["gpu"], p["width"]) for p in found["points"]] == [
        (H200, 512), (H200, 1024), ("nvidia-l4", 512), ("nvidia-l4", 1024)
    ]  # fmt: skip
    assert {p["profile_basis"] for p in found["points"] if p["gpu"] == "nvidia-l4"} == {"projected"}
    for point in found["points"]:
        assert point["flops_per_usd_low"] <= point["flops_per_usd"] <= point["flops_per_usd_high"]
        assert point["price_provider"] == "RunPod Secure Cloud"
        assert point["price_date"]
    assert all(row["sentence"] for row in found["crossovers"])
    assert {row["gpu"] for row in found["best"]} <= {H200, "nvidia-l4"}


def test_cost_prints_the_ladder_the_prices_and_the_comparison(flopcast: Command) -> None:
    found = flopcast(*COST)
    for part in ("512 x 4", "1024 x 5", "projected", "measured", "RunPod Secure Cloud"):
        assert part in found.out
    sentences = [row["sentence"] for row in flopcast(*COST, "--json").document["crossovers"]]
    assert [f"- {s}" in " ".join(found.out.split()) for s in sentences] == [True]
    assert found.err == ""


def test_cost_crosses_where_prices_make_it(flopcast: Command) -> None:
    """At the price ratio that breaks even between two sizes, the curves cross there."""
    even = flopcast(*COST, "--json").document["break_even"]
    ratios = [row["ratio"] for row in even if row["gpu_a"] == H200 and row["gpu_b"] == "nvidia-l4"]
    middle = math.sqrt(ratios[0] * ratios[-1])
    found = flopcast(*COST, "--price", f"{H200}={middle}", "--price", "nvidia-l4=1", "--json").document
    row = found["crossovers"][0]
    sizes = [point["n_params"] for point in found["points"] if point["gpu"] == H200]
    assert row["status"] in ("crossover", "not separable at these prices")
    assert sizes[0] <= row["n_params"] <= sizes[-1]


def test_cost_does_not_depend_on_the_order_of_widths_or_on_repeats(flopcast: Command) -> None:
    straight = flopcast("cost", "--gpus", H200, "--widths", "512,1024")
    mixed = flopcast("cost", "--gpus", f"{H200},{H200}", "--widths", "1024,512,1024")
    assert mixed.out == straight.out


def test_cost_writes_its_tables_and_figure(flopcast: Command, tmp_path: Path) -> None:
    out = tmp_path / "a" / "b"
    result = flopcast("cost", "--gpus", f"{H200},nvidia-l4", "--widths", 512, "--out", out, "--json")
    assert result.code == 0
    assert {"cost.csv", "cost.png", "crossovers.csv"} <= {path.name for path in out.iterdir()}
    assert all(str(path) in result.err for path in out.iterdir())
    points = result.document["points"]
    with (out / "cost.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["gpu"] for row in rows] == [point["gpu"] for point in points]
    assert [float(row["usd_per_step"]) for row in rows] == pytest.approx(
        [point["usd_per_step"] for point in points], rel=1e-6
    )
    assert (out / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_hosts_says_whose_host_feeds_each(flopcast: Command) -> None:
    widths = {}
    for hosts in ("own", "same"):
        found = flopcast(*COST, "--hosts", hosts, "--json").document
        assert found["hosts"] == hosts
        widths[hosts] = found["break_even"][0]["high"] / found["break_even"][0]["low"]
    assert widths["same"] < widths["own"]
    assert "one host feeds all of them" in flopcast(*COST, "--host", H200).out


def test_cost_says_what_another_host_would_change(flopcast: Command) -> None:
    found = flopcast(*COST, "--json").document
    cases = {(row["host_factor"], row["batch"]) for row in found["what_if"]}
    assert cases == {(1.0, 4), (0.0, 4), (0.5, 4), (2.0, 4)}
    at = {row["host_factor"]: row["flops_per_usd"] for row in found["what_if"] if row["n_params"] < 1e8}
    assert at[2.0] <= at[1.0] <= at[0.5] <= at[0.0]
    out = " ".join(flopcast(*COST).out.split())
    for part in ("no host", "host at 2 x its cost", "--mode forecasts compiled steps", "Break-even price ratio"):
        assert part in out


def test_curves_of_compiled_steps_are_by_their_own_streams(
    flopcast: Command, monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    """Of the mode that was asked for; here every width is a recorded compiled step, of two layers of Qwen3-0.6B."""
    run = Run(batch=4, seq=256)
    eager = get_stream(with_depth(load_config("qwen3-0.6b"), 2), run.traced_on("cuda"))
    recorded = root / "reports" / "nvidia-h200" / "compiled-steps" / "qwen3-0.6b-l2-4x256.code.gz"
    compiled = to_stream(read_output_code(gzip.decompress(recorded.read_bytes()).decode()), eager)
    asked = []

    def stream_of(config: object, traced: Traced, **_: object) -> Stream:
        asked.append((traced.mode, traced.device))
        return eager if traced.mode == "eager" else compiled

    monkeypatch.setattr("flopcast.roofline.dollars.curves.get_stream", stream_of)
    steps = {
        mode: flopcast("cost", "--gpus", H200, "--widths", "1024", "--mode", mode, "--json").document["points"]
        for mode in ("eager", "compile")
    }
    assert asked == [("eager", "cuda"), ("compile", "cuda 9.0 132")]
    (eager_point,), (point,) = steps["eager"], steps["compile"]
    assert point["step_seconds"] < eager_point["step_seconds"]
    assert point["flops_per_usd"] > eager_point["flops_per_usd"]


def test_a_model_too_large_for_one_gpu_leaves_a_gap_there(flopcast: Command) -> None:
    command = ("cost", "--gpus", f"{H200},nvidia-l4", "--widths", "512,4096")
    assert "no memory" in flopcast(*command).out
    found = flopcast("cost", "--gpus", "nvidia-l4", "--widths", "4096", "--json").document
    (point,) = found["points"]
    assert (point["fits"], point["flops_per_usd"], point["reason"]) == (False, None, "out of memory")


def test_a_price_older_than_a_year_or_none_decides_nothing(flopcast: Command) -> None:
    gpus = (H200, "nvidia-l40s", "nvidia-a10g")
    command = ("cost", "--gpus", ",".join(gpus), "--widths", "512,1024", "--on", "2026-11-15")
    found = flopcast(*command, "--json")
    points = {row["gpu"]: row for row in found.document["points"]}
    assert {gpu: points[gpu]["unranked"] for gpu in gpus} == {
        H200: None, "nvidia-l40s": "its price is 518 days old", "nvidia-a10g": "no price"
    }  # fmt: skip
    assert points["nvidia-a10g"]["usd_per_step"] is points["nvidia-a10g"]["price_date"] is None
    assert points["nvidia-a10g"]["step_seconds"] > 0
    assert points["nvidia-l40s"]["flops_per_usd"] > points[H200]["flops_per_usd"]  # by its price it would lead
    assert {row["gpu"] for row in found.document["best"]} == {H200}
    assert found.document["crossovers"] == []
    assert {(row["better"], row["price_ratio"]) for row in found.document["break_even"]} == {(None, None)}
    assert "Modal on-demand, 2026-05-07" in found.err  # what other providers offer
    said = flopcast(*command).out
    assert "not ranked: nvidia-l40s, its price is 518 days old" in said
    assert "about 2025-06-15, 518 days old" in " ".join(said.split())
    in_time = flopcast(*command[:-1], "2025-07-01", "--json").document
    assert {row["gpu"] for row in in_time["best"]} == {"nvidia-l40s"}


# --- whole numbers ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(), min_size=1))
def test_numbers_with_commas_are_read_back(numbers: list[int]) -> None:
    assert options.whole_numbers("--widths", ", ".join(map(str, numbers))) == numbers
