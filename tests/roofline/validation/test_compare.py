"""What got slower: runs of one kind of card agree, one class slowed is found, and the exit code says so."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.compare import compare
from flopcast.roofline.validation.compare_sides import Side, folder_side, profile_side

Command = Callable[..., Any]


@pytest.fixture(scope="module")
def measured(root: Path) -> Path:
    folder = root / "reports" / "nvidia-h200"
    if not (folder / "measurements-repeat").is_dir():
        pytest.skip("no measurements beside the code")
    return folder


@pytest.fixture(scope="module")
def first_card(measured: Path) -> Path:
    cards = measured / "measurements"
    return cards / "gpu0" if (cards / "gpu0").is_dir() else cards


@pytest.fixture(scope="module")
def runs(measured: Path, first_card: Path) -> tuple[Side, Side]:
    """Two runs of one card."""
    return folder_side(measured / "measurements-repeat"), folder_side(first_card)


def slowed(side: Side, op_class: str, factor: float, every: int = 1) -> Side:
    """Every so many rows of one class slower."""
    hit = [key for key, timing in side.timings.items() if timing.group.partition(",")[0] == op_class]
    slow = {key: replace(side.timings[key], seconds=side.timings[key].seconds * factor) for key in hit[::every]}
    return replace(side, timings={**side.timings, **slow})


def test_runs_and_cards_of_one_kind_have_not_regressed(measured: Path, runs: tuple[Side, Side]) -> None:
    sides = [*runs]
    if (second := measured / "measurements" / "gpu1").is_dir():
        sides.append(folder_side(second))
    for a, b in permutations(sides, 2):
        found = compare(a, b)
        assert found.regressed == []
        assert sum(change.rows for change in found.changes) > 5000
    itself = compare(sides[0], sides[0])
    assert {change.verdict for change in itself.changes} == {"same"}
    assert not itself.rows


@pytest.mark.parametrize("op_class", ["reduction", "cat", "fill", "pointwise", "gemm", "optimizer"])
def test_a_class_slowed_by_a_tenth_is_found_and_nothing_else(runs: tuple[Side, Side], op_class: str) -> None:
    before, after = runs[0], slowed(runs[1], op_class, 1.1)
    found = compare(before, after)
    assert {change.group.partition(",")[0] for change in found.regressed} == {op_class}
    change = next(change for change in found.changes if change.group == op_class)
    assert change.change == pytest.approx(0.1, abs=0.03)
    assert 0 < change.noise < 0.1
    assert compare(after, before).regressed == []
    assert compare(before, after, tolerance=0.2).regressed == []


def test_the_exit_code_of_a_regression_is_3(flopcast: Command, first_card: Path, tmp_path: Path) -> None:
    """One row in thirty, and every softmax, of a real run."""
    thin, slow = tmp_path / "thin", tmp_path / "slow"
    for folder in (thin, slow):
        folder.mkdir()
        shutil.copy(first_card / "machine.json", folder)
    with (
        gzip.open(first_card / "measurements.jsonl.gz", "rt") as lines,
        (thin / "measurements.jsonl").open("w") as plain,
        (slow / "measurements.jsonl").open("w") as slower,
    ):
        for number, line in enumerate(lines):
            row = json.loads(line)
            if number % 30 and "softmax" not in row["key"]:
                continue
            plain.write(line)
            if "softmax" in row["key"]:
                row["samples"] = [value * 1.1 for value in row["samples"]]
                for name in ("seconds", "kernel_seconds"):
                    row[name] = row[name] and row[name] * 1.1
            slower.write(json.dumps(row) + "\n")
    said = flopcast("compare", thin, slow)
    assert said.code == 3
    assert "regressed beyond 3.0%: softmax" in said.err
    assert "REGRESSED" in said.out
    assert "same" in flopcast("compare", thin, thin).out
    document = flopcast("compare", slow, thin, "--json").document
    assert document["regressed"] == []
    assert next(c for c in document["classes"] if c["group"] == "softmax")["verdict"] == "faster"
    assert {"a", "b", "tolerance", "differences", "rows", "steps", "unmatched"} <= set(document)


def test_of_two_gpus_the_slower_has_not_regressed(flopcast: Command) -> None:
    """Their kinds of kernel are compared as measured on both: what was lent to one is no measurement of it."""
    said = flopcast("compare", "nvidia-h200", "nvidia-h100-sxm")
    assert said.code == 3
    assert "SLOWER" in said.out
    assert "REGRESSED" not in said.out
    assert "slower on the other GPU beyond 3.0%" in said.err
    groups = {c["group"] for c in flopcast("compare", "nvidia-h100-sxm", "nvidia-h200", "--json").document["classes"]}
    assert "softmax" in groups
    assert not any(group.startswith(("conv", "fused")) for group in groups)


def test_a_part_of_a_class_is_found_though_the_median_stays(runs: tuple[Side, Side]) -> None:
    found = compare(runs[0], slowed(runs[1], "attention", 1.3, every=8))
    assert found.regressed
    assert {change.group.partition(",")[0] for change in found.regressed} == {"attention"}
    assert max(change.slower for change in found.regressed) >= 5
    assert all(change.change < 0.03 for change in found.regressed)
    assert all(row.noise > 0 for row in found.rows)


def test_profiles_say_what_a_step_costs_and_how_the_stacks_differ() -> None:
    ours = find_profile("nvidia-h200")
    newer = replace(
        ours,
        stack={**ours.stack, "torch": "9.9"},
        ceilings={**ours.ceilings, "matrix_burst/bf16": Number(6e14, 5.9e14, 6.1e14, "measured")},
    )
    found = compare(profile_side(ours, "ours"), profile_side(newer, "newer"))
    assert found.differences == [("torch", ours.stack["torch"], "9.9")]
    assert [change.group for change in found.regressed] == ["ceiling, matrix burst"]  # one dtype of several


def test_one_card_lies_apart_from_none_and_a_gap_below_zero_is_no_time() -> None:
    """A profile of one card has one factor a class, whose deviation is no number."""
    ours = find_profile("nvidia-h200")
    gap = Number(-1e-7, -2e-7, 0.0, "measured")
    alone = replace(
        ours,
        device={**ours.device, "uuid": "another"},
        ceilings={**ours.ceilings, "kernel_gap": gap},
        provenance={"gpus": {"classes": {"gemm/cold": {"factors": {"gpu0": 1.0}}, "copy/cold": {}}}},
    )
    found = compare(profile_side(alone, "alone"), profile_side(ours, "ours"))
    assert all(change.noise > 0 for change in found.changes)
    assert {change.verdict for change in found.changes} == {"same"}
    assert found.unmatched == (0, 1)  # the gap


def test_what_was_measured_for_one_alone_is_counted_though_it_is_estimated_for_the_other() -> None:
    ours, other = find_profile("nvidia-h200"), find_profile("nvidia-l4")
    copies = {key: surface for key, surface in ours.surfaces.items() if key.op_class == "copy"}
    a = profile_side(replace(ours, surfaces=copies), "copies")
    b = profile_side(other, "l4")
    scalars = {key: one for key, one in b.timings.items() if key.startswith(("scalar/", "host/"))}
    found = compare(a, replace(b, timings={**scalars, "its own": next(iter(a.timings.values()))}))
    assert "estimates" in found.warnings[0]
    assert sum(change.rows for change in found.changes) == len(a.timings) - found.unmatched[0]
    assert found.unmatched == (
        len([k for k in a.timings if k.startswith(("scalar/", "host/")) and k not in scalars]),
        1 + len(scalars.keys() - a.timings.keys()),
    )


def test_another_gpu_is_compared_and_its_doubt_is_noise(flopcast: Command) -> None:
    said = flopcast("compare", "nvidia-h200", "nvidia-l4", "--json")
    assert said.code == 3
    document = said.document
    assert any("nvidia-l4 is projected, not measured" in warning for warning in document["warnings"])
    assert {"what": "name", "a": "NVIDIA H200", "b": "NVIDIA L4"} in document["differences"]
    assert all(step["b"][0] > 2 * step["a"][0] for step in document["steps"])
    assert all(step["b"][1] < step["b"][0] < step["b"][2] for step in document["steps"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nvidia-h200", "nvidia-h300"), "nvidia-h300"),
        (("nvidia-h200", "nvidia-h200", "--tolerance", "-1"), "--tolerance is -1"),
    ],
)
def test_bad_use_is_said(flopcast: Command, arguments: tuple[str, ...], words: str) -> None:
    said = flopcast("compare", *arguments)
    assert said.code == 2
    assert words in said.err


def test_an_empty_folder_and_nothing_in_common_are_refused(
    flopcast: Command, tmp_path: Path, runs: tuple[Side, Side]
) -> None:
    assert flopcast("compare", tmp_path, "nvidia-h200").code == 2
    with pytest.raises(DataError, match="in common"):
        compare(runs[0], replace(runs[1], timings={}))
