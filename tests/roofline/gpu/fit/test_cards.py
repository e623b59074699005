"""Several GPUs of one kind: the median card's rows, the spread by class, and what is never mixed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Gemm, shape_to_json
from flopcast.microbench.records import records
from flopcast.microbench.records.kernel_sources import fingerprint
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS
from flopcast.roofline.gpu.fit import cards
from flopcast.roofline.gpu.fit.rows import fit
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey

SHAPES = [Gemm(m=m, n=n, k=k, layout="nt") for m in (256, 1024, 4096) for n in (512, 2048) for k in (512, 1024, 4096)]
DEVICE = {
    "type": "cuda", "name": "NVIDIA H200", "uuid": "GPU-0", "sm_count": 132, "clock_mhz": 1980,
    "memory_bytes": 150 * 10**9, "l2_bytes": 60 * 2**20, "capability": [9, 0], "power_limit_w": 700.0,
    "driver": "580",
}  # fmt: skip
GAP = 1e-6
STACK = {"flopcast": "0.1.0", "torch": "2.11.0", "cudnn": 91900}


def seconds_of(shape: Gemm) -> float:
    return 3e-6 + shape.flops / 6e14


def row(shape: Gemm, seconds: float, gap: float = GAP, **fields: Any) -> dict[str, Any]:
    """A kernel of `seconds`, which a graph launches `gap` after the one before."""
    samples = [seconds + gap] * 5
    return {
        **EMPTY_FIELDS, "key": shape.key, "backend": "torch", "cache": "cold", "suite": "quick", "role": "fit",
        "shape": shape_to_json(shape), "seconds": seconds + gap, "kernel_seconds": seconds, "samples": samples,
        "n": 5, "timer": "graph", "kernels": [["k", seconds]], **fields,
    }  # fmt: skip


def value(key: str, number: float, samples: tuple[float, ...] = (), **fields: Any) -> dict[str, Any]:
    return {
        **EMPTY_FIELDS, "key": key, "backend": "torch", "cache": "cold", "shape": None, "value": number,
        "samples": list(samples), **fields,
    }  # fmt: skip


def measure(folder: Path, index: int, rows: list[dict[str, Any]], **device: Any) -> Path:
    """A folder as a bench of card `index` leaves it."""
    stack = device.pop("stack", STACK)
    described = {**DEVICE, "uuid": f"GPU-{index}", **device}
    machine = {"schema": 1, "machine": f"m{index}", "device": described, "host": {"cpu": "c"}, "stack": stack}
    with Recorder(folder, machine) as recorder:
        for one in rows:
            recorder.append(one)
    return folder


def make_cards(out: Path, factors: Mapping[str, float], gaps: Sequence[float] = (), **others: Any) -> Path:
    """gpu0, gpu1, ... whose kernels take factor times the usual, in processes of such gaps between kernels."""
    for index, (name, factor) in enumerate(factors.items()):
        gap = gaps[index] if gaps else GAP
        rows = [row(shape, factor * seconds_of(shape), gap) for shape in SHAPES]
        rows.append(value("scalar/hbm_copy", 4e12 / factor, (4e12 / factor,) * 5))
        measure(out / name, index, rows, **others)
    return out


def test_a_folder_of_one_card_is_read_as_it_is(tmp_path: Path) -> None:
    folder = measure(tmp_path / "one", 0, [row(SHAPES[0], 1e-5)])
    found = cards.read_folder(folder)
    assert [{k: v for k, v in one.items() if k != "taken_seconds"} for one in found.rows] == (
        records.read(folder).latest()
    )
    assert (found.home, found.cards) == (folder, {})
    assert cards.card_folders(folder) == {}


def test_times_are_the_median_of_the_cards_and_what_each_read_is_kept(tmp_path: Path) -> None:
    found = cards.read_folder(make_cards(tmp_path, {"gpu0": 1.00, "gpu1": 1.10, "gpu2": 1.02}))
    first = next(one for one in found.rows if one["key"] == SHAPES[0].key)
    assert first["seconds"] == pytest.approx(1.02 * seconds_of(SHAPES[0]) + GAP)
    assert first["kernel_seconds"] == pytest.approx(1.02 * seconds_of(SHAPES[0]))
    assert np.median(first["samples"]) == pytest.approx(first["seconds"])
    assert first["by_card"] == pytest.approx(
        {f"gpu{i}": f * seconds_of(SHAPES[0]) for i, f in enumerate((1.0, 1.1, 1.02))}
    )
    copy = next(one for one in found.rows if one["key"] == "scalar/hbm_copy")
    assert copy["value"] == pytest.approx(4e12 / 1.02)


def test_two_cards_meet_in_the_middle(tmp_path: Path) -> None:
    found = cards.read_folder(make_cards(tmp_path, {"gpu0": 1.0, "gpu1": 1.04}))
    assert [one["taken_seconds"] for one in found.rows if one.get("shape")] == pytest.approx(
        [1.02 * seconds_of(shape) for shape in SHAPES]
    )


def test_a_process_of_a_wider_gap_is_no_slower_card(tmp_path: Path) -> None:
    """A graph's kernels follow 0.2 us later in a process that has trained: the cards' kernels are the same."""
    apart = cards.read_folder(
        make_cards(tmp_path / "apart", {"gpu0": 1.0, "gpu1": 1.0, "gpu2": 1.03}, gaps=(1e-6, 1.2e-6, 1e-6))
    )
    gemm = cards.spread(apart)["classes"]["gemm/cold"]
    assert gemm["factors"] == pytest.approx({"gpu0": 1.0, "gpu1": 1.0, "gpu2": 1.03}, rel=1e-6)
    assert [one["taken_seconds"] for one in apart.rows if one.get("shape")] == pytest.approx(
        [seconds_of(shape) for shape in SHAPES]
    )
    alike = cards.read_folder(make_cards(tmp_path / "alike", {"gpu0": 1.0, "gpu1": 1.0, "gpu2": 1.03}))
    shapes = [describe(shape) for shape in SHAPES]
    one, other = (fit(tmp_path / name)[0] for name in ("apart", "alike"))
    for work in shapes:
        [a], [b] = (profile.estimate([(work, "torch", "cold")]) for profile in (one, other))
        assert a.seconds == pytest.approx(b.seconds, rel=1e-6)
    assert cards.spread(alike)["classes"]["gemm/cold"]["sigma"] == pytest.approx(gemm["sigma"], rel=1e-6)


def test_cards_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    out = make_cards(tmp_path, {f"gpu{i}": 1.0 for i in range(11)})
    assert list(cards.card_folders(out)) == [f"gpu{i}" for i in range(11)]
    (out / "gpu11").mkdir()  # begun, nothing measured yet
    (out / "gpu-old").mkdir()
    assert len(cards.card_folders(out)) == 11


def test_runs_of_one_card_are_read_as_one(tmp_path: Path) -> None:
    """A suite and another that holds some of it, run by processes of unlike gaps between kernels."""
    shapes, seconds = SHAPES[:3], 1e-5
    measure(tmp_path / "gpu0" / "run0", 0, [row(shape, seconds, 1e-6) for shape in shapes])
    more = [row(shapes[0], 1.02 * seconds, 1.4e-6), *(row(shape, seconds, 1.4e-6) for shape in SHAPES[3:8])]
    measure(tmp_path / "gpu0" / "run1", 0, more)
    for folder in (tmp_path / "gpu0", tmp_path):
        found = cards.read_folder(folder)
        taken = {one["key"]: one["taken_seconds"] for one in found.rows}
        assert taken == pytest.approx({s.key: seconds for s in SHAPES[:8]} | {shapes[0].key: 1.01 * seconds})
        assert found.home.name == "run0"
    assert set(cards.read_folder(tmp_path).cards) == {"gpu0"}
    assert "gpus" not in fit(tmp_path / "gpu0")[0].provenance
    measure(tmp_path / "gpu0" / "run2", 1, [row(shapes[0], seconds)])
    with pytest.raises(DataError, match=r"run2.*machine m1.*never mixed"):
        cards.read_folder(tmp_path)


def test_a_row_that_one_card_lacks_is_the_others(tmp_path: Path) -> None:
    a, b = row(SHAPES[0], 1e-5), row(SHAPES[1], 2e-5)
    measure(tmp_path / "gpu0", 0, [a, b])
    measure(tmp_path / "gpu1", 1, [{**a, "status": "oom", "seconds": None, "kernel_seconds": None}])
    found = {one["key"]: one for one in cards.read_folder(tmp_path).rows}
    assert found[SHAPES[0].key]["kernel_seconds"] == 1e-5
    assert found[SHAPES[1].key]["by_card"] == pytest.approx({"gpu0": 2e-5})
    measure(tmp_path / "gpu2", 2, [])
    lost = {**row(SHAPES[2], 1e-5), "status": "incorrect", "seconds": None, "kernel_seconds": None}
    measure(tmp_path / "gpu1", 1, [lost])
    found = {one["key"]: one for one in cards.read_folder(tmp_path).rows}
    assert found[SHAPES[2].key]["status"] == "incorrect"


def test_a_card_that_throttled_marks_the_row(tmp_path: Path) -> None:
    measure(tmp_path / "gpu0", 0, [row(SHAPES[0], 1e-5)])
    measure(tmp_path / "gpu1", 1, [row(SHAPES[0], 1.2e-5, throttled=True)])
    assert [one["throttled"] for one in cards.read_folder(tmp_path).rows] == [True]


def test_the_host_is_told_by_the_card_that_had_it_to_itself(tmp_path: Path) -> None:
    host = [value("host/qwen3-adamw/depth2/forward", 3e-3, (4e-3, 3e-3, 2.9e-3), rounds=1)]
    measure(tmp_path / "gpu0", 0, [*host, value("scalar/launch", 5e-6), value("scalar/hbm_copy", 4e12)])
    measure(tmp_path / "gpu1", 1, [value("scalar/launch", 9e-6), value("scalar/hbm_copy", 4.2e12)])
    found = {one["key"]: one for one in cards.read_folder(tmp_path).rows}
    assert found["scalar/launch"]["value"] == 5e-6
    assert found["scalar/hbm_copy"]["value"] == pytest.approx(4.1e12)
    assert found["host/qwen3-adamw/depth2/forward"]["samples"] == [4e-3, 3e-3, 2.9e-3], "in their order"


def test_the_spread_names_the_slowest_card_class_by_class(tmp_path: Path) -> None:
    found = cards.read_folder(make_cards(tmp_path, {"gpu0": 1.00, "gpu1": 1.06, "gpu2": 1.02}))
    spread = cards.spread(found)
    gemm = spread["classes"]["gemm/cold"]
    assert gemm["rows"] == len(SHAPES)
    assert gemm["factors"] == pytest.approx({"gpu0": 1 / 1.02, "gpu1": 1.06 / 1.02, "gpu2": 1.0})
    assert (gemm["slowest"], spread["slowest"]) == ("gpu1", "gpu1")
    assert gemm["slowest_factor"] == spread["slowest_factor"] == pytest.approx(1.06 / 1.02)
    assert gemm["sigma"] == pytest.approx(float(np.log([1.0, 1.06, 1.02]).std(ddof=1)))
    assert gemm["median"] == gemm["p90"] == pytest.approx(0.06)
    assert [card["uuid"] for card in spread["cards"].values()] == ["GPU-0", "GPU-1", "GPU-2"]
    assert spread["cards"]["gpu1"]["factor"] == pytest.approx(1.06 / 1.02)
    assert json.dumps(spread)


def test_one_odd_row_is_named_and_does_not_make_the_class(tmp_path: Path) -> None:
    make_cards(tmp_path, {"gpu0": 1.0, "gpu1": 1.0})
    odd = tmp_path / "gpu1" / records.MEASUREMENTS
    lines = [json.loads(line) for line in odd.read_text().splitlines()]
    for name in ("seconds", "kernel_seconds"):
        lines[3][name] *= 2
    odd.write_text("".join(json.dumps(line) + "\n" for line in lines))
    gemm = cards.spread(cards.read_folder(tmp_path))["classes"]["gemm/cold"]
    assert gemm["worst"][0] == [f"{SHAPES[3].key}/torch/cold", pytest.approx(1.0)]
    assert gemm["median"] == pytest.approx(0.0, abs=1e-12)
    assert gemm["sigma"] < 0.5 * np.log(2) / np.sqrt(2 * len(SHAPES))


def test_a_profile_of_cards_is_the_median_with_intervals_as_wide_as_they_differ(tmp_path: Path) -> None:
    make_cards(tmp_path / "cards", {"gpu0": 1.00, "gpu1": 1.10})
    make_cards(tmp_path / "same", {"gpu0": 1.05, "gpu1": 1.05})
    (apart, _), (same, _) = fit(tmp_path / "cards"), fit(tmp_path / "same")
    work = describe(SHAPES[0])
    [wide], [narrow] = (profile.estimate([(work, "torch", "cold")]) for profile in (apart, same))
    between = float(np.log([1.0, 1.1]).std(ddof=1))
    assert wide.seconds == pytest.approx(narrow.seconds, rel=1e-3)
    assert wide.sigma == pytest.approx(np.hypot(narrow.sigma, between), rel=1e-2)
    assert apart.provenance["gpus"]["classes"]["gemm/cold"]["slowest"] == "gpu1"
    kept = Profile.from_json(json.loads(json.dumps(apart.to_json())))
    assert kept.estimate([(work, "torch", "cold")]) == [wide]
    projected = replace(apart, provenance={"source": apart.provenance})  # a projection has deviations of its own
    assert projected.estimate([(work, "torch", "cold")])[0].sigma == pytest.approx(narrow.sigma, rel=1e-2)


def test_a_single_card_of_its_own_folder_has_no_spread(tmp_path: Path) -> None:
    make_cards(tmp_path, {"gpu0": 1.0})
    profile, _ = fit(tmp_path)
    assert "gpus" not in profile.provenance
    alone, _ = fit(tmp_path / "gpu0")
    assert profile.surfaces == alone.surfaces


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ({"name": "NVIDIA L4"}, "name (NVIDIA H200 and NVIDIA L4)"),
        ({"power_limit_w": 500.0}, "power_limit_w (700.0 and 500.0)"),
        ({"driver": "590"}, "driver (580 and 590)"),
        ({"stack": {**STACK, "torch": "2.12"}}, "torch (2.11.0 and 2.12)"),
    ],
)
def test_cards_of_two_kinds_or_stacks_are_not_mixed(tmp_path: Path, device: dict[str, Any], said: str) -> None:
    measure(tmp_path / "gpu0", 0, [row(SHAPES[0], 1e-5)])
    measure(tmp_path / "gpu1", 1, [row(SHAPES[0], 1e-5)], **device)
    with pytest.raises(DataError) as fault:
        cards.read_folder(tmp_path)
    for part in (said, str(tmp_path / "gpu0"), str(tmp_path / "gpu1"), "one by one"):
        assert part in str(fault.value)


def test_a_file_pasted_together_from_two_machines_is_refused(tmp_path: Path) -> None:
    """bench never makes one, a person with `cat` might."""
    first = measure(tmp_path / "a", 0, [row(SHAPES[0], 1e-5)])
    second = measure(tmp_path / "b", 1, [row(SHAPES[1], 1e-5)])
    with (first / records.MEASUREMENTS).open("ab") as file:
        file.write((second / records.MEASUREMENTS).read_bytes())
    with pytest.raises(DataError, match=r"machine m1.*machine m0.*never mixed"):
        cards.read_folder(first)


def test_a_card_of_rows_that_no_other_has_is_not_of_the_spread(tmp_path: Path) -> None:
    """Products of unaligned widths on a fourth card, more than any of the others measured, and one that they did."""
    out = make_cards(tmp_path, {"gpu0": 1.00, "gpu1": 1.10, "gpu2": 1.02})
    others = [Gemm(m=129 + i, n=131, k=67) for i in range(3 * len(SHAPES))]
    measure(out / "gpu3", 3, [row(shape, 1e-4) for shape in [*others, SHAPES[0]]])
    gpus = fit(out)[0].provenance["gpus"]
    assert gpus["classes"]["gemm/cold"]["rows"] == len(SHAPES)
    assert gpus["cards"]["gpu3"]["factor"] is None


def test_a_card_of_a_few_rows_makes_the_median_and_not_the_spread(tmp_path: Path) -> None:
    """Triton's kernels measured again on a fourth card: theirs alone, of the sources that lie here."""
    out = make_cards(tmp_path, {"gpu0": 1.00, "gpu1": 1.10, "gpu2": 1.02})
    now = fingerprint("gemm")
    again = [row(shape, 0.5 * seconds_of(shape), backend="triton", kernels_of=now) for shape in SHAPES[:3]]
    old = [row(shape, seconds_of(shape), backend="triton", kernels_of="0" * 12) for shape in SHAPES]
    measure(out / "gpu3", 3, [*old, *again, row(SHAPES[0], 1e-3)])
    found = cards.read_folder(out)
    triton = [r for r in found.rows if r["backend"] == "triton"]
    assert [r["key"] for r in triton] == [shape.key for shape in SHAPES[:3]]
    assert any("15 rows were left out (gemm 15)" in text for text in found.warnings)
    profile, report = fit(out)
    assert len(profile.surfaces[SurfaceKey.parse("triton/gemm/nt/bf16/cold")].seconds) == 3
    assert any("left out (gemm 15)" in text for text in report.warnings)
    gpus = profile.provenance["gpus"]
    assert gpus["classes"]["gemm/cold"]["rows"] == len(SHAPES)
    assert set(gpus["classes"]["gemm/cold"]["factors"]) == {"gpu0", "gpu1", "gpu2"}
    assert gpus["cards"]["gpu3"]["factor"] is None
