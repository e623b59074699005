"""How far the shipped links are off where they were not fitted: sizes and a dtype that a run left out, and collectives
of real steps of the same host and NCCL."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from flopcast.roofline.gpu.links.fit import fit_links
from flopcast.roofline.gpu.links.library import SHIPPED, find_interconnect, interconnect_of
from flopcast.roofline.gpu.links.profile import LinkProfile, Point

RESULTS = Path(__file__).resolve().parents[4] / "reports" / "nvidia-h200" / "links"
MIB = 1024 * 1024
H200 = LinkProfile.load(SHIPPED / "nvidia-h200.json")
Wanted = Callable[[Point], bool]


def test_what_ships_is_fitted_to_the_rows_of_the_report() -> None:
    of_two, of_four = fit_links(RESULTS), fit_links(RESULTS / "four")
    assert [point for point in H200.points if point.gpus == 2] == of_two.points
    assert [point for point in H200.points if point.gpus == 4] == [p for p in of_four.points if p.gpus == 4]
    assert len(H200.points) == 504
    assert H200.contention is not None


def _errors(kept: Sequence[Point], left_out: Sequence[Point]) -> list[float]:
    link = interconnect_of(replace(H200, points=kept))
    times = [link.time(point.kind, point.bytes, point.gpus, dtype=point.dtype) for point in left_out]
    return [abs(time.seconds / point.seconds - 1) for time, point in zip(times, left_out, strict=True)]


@pytest.mark.parametrize(
    ("is_left_out", "most", "worst"),
    [
        (lambda point: point.bytes.bit_length() % 2 == 0, 0.015, 0.10),
        (lambda point: point.bytes.bit_length() % 2 == 1 and 1024 < point.bytes < 1024 * MIB, 0.025, 0.10),
        (lambda point: point.dtype == "fp32", 0.005, 0.05),
    ],
)
def test_half_of_a_run_tells_the_other_half(is_left_out: Wanted, most: float, worst: float) -> None:
    of_two = [point for point in H200.points if point.gpus == 2]
    kept = [point for point in of_two if not is_left_out(point)]
    errors = _errors(kept, [point for point in of_two if is_left_out(point) and point.bytes >= MIB])
    assert median(errors) < most
    assert max(errors) < worst
    small = _errors(kept, [point for point in of_two if is_left_out(point) and point.bytes < MIB])
    assert median(small) < 0.03
    assert max(small) < 0.08


@pytest.mark.parametrize(("parity", "most"), [(0, 0.02), (1, 0.03)])
def test_every_other_size_of_four_tells_the_others(parity: int, most: float) -> None:
    """Less exactly than of two: NCCL goes from LL to LL128 and on to Simple between them."""

    def is_left_out(point: Point) -> bool:
        return point.bytes.bit_length() % 2 == parity and 1024 < point.bytes < 1024 * MIB

    of_four = [point for point in H200.points if point.gpus == 4]
    errors = _errors([p for p in of_four if not is_left_out(p)], [p for p in of_four if is_left_out(p)])
    assert median(errors) < most
    assert max(errors) < 0.16


@pytest.mark.parametrize(
    ("kinds", "most", "worst"),
    [
        (("all_reduce", "all_gather", "reduce_scatter"), 0.09, 0.36),
        (("all_to_all",), 0.06, 0.15),
        (("broadcast",), 0.14, 0.25),
        (("send_recv",), 0.05, 0.10),
    ],
)
@pytest.mark.parametrize("name", ["nvidia-h200", "nvidia-h100-sxm"])
def test_the_law_tells_collectives_of_four_to_which_it_was_not_fitted(
    name: str, kinds: Sequence[str], most: float, worst: float
) -> None:
    of_four = [p for p in LinkProfile.load(SHIPPED / f"{name}.json").points if p.gpus == 4 and p.kind in kinds]
    link = replace(find_interconnect("nvlink4"), nvls=False)
    large = [point for point in of_four if point.bytes >= MIB]
    errors = [abs(link.time(point.kind, point.bytes, 4).seconds / point.seconds - 1) for point in large]
    assert median(errors) < most
    assert max(errors) < worst


def test_collectives_of_real_steps_take_as_long() -> None:
    """As `python -m studies.links.in_steps` found them: 1,600 all-reduces of tensor parallel steps, and the all-gathers
    and reduce-scatters of FSDP's layers, which gather in place and so save a copy."""
    link = find_interconnect("nvidia-h200")
    with (RESULTS / "in_steps.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = [link.time(row["kind"], int(row["bytes"]), 2, dtype=row["dtype"]) for row in rows]  # type: ignore[arg-type]
    errors = [abs(time.seconds / float(row["seconds"]) - 1) for time, row in zip(times, rows, strict=True)]
    assert len(errors) >= 20
    assert median(errors) < 0.03
    assert max(errors) < 0.10
    reduced = [error for error, row in zip(errors, rows, strict=True) if row["kind"] == "all_reduce"]
    assert median(reduced) < 0.01
    assert max(reduced) < 0.05
