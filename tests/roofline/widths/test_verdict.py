"""The verdict of `widths`: one sentence that says which sizes to take, and what that gains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.widths.penalties import Penalty, Point, rule_of
from flopcast.roofline.widths.verdict import Verdict, verdict


def point(seconds: float = 1.0, n_params: int = 100, **sizes: Any) -> Point:
    return Point(
        axis="hidden", value=1, config=make_config(**{"width": 1024, "depth": 4, **sizes}), n_params=n_params,
        step_seconds=seconds, step_seconds_low=seconds, step_seconds_high=seconds, device_seconds=seconds,
        device_seconds_low=seconds, device_seconds_high=seconds, host_seconds=0.0, bound="memory", flops=1, tokens=1,
        peak_bytes=1, fits=True, extrapolated=0.0, layout_seconds={}, layout_flops={}, errors={},
    )  # fmt: skip


def penalty(axis: str, value: int, device: float) -> Penalty:
    return Penalty(
        axis=axis, value=value, multiple=value & -value, below=0, above=0, step=device / 2, device=device,
        device_low=device - 0.01, device_high=device + 0.02, layouts={},
    )  # fmt: skip


def of(center: Point, found: Mapping[str, list[Penalty]], heads: list[Point] | None = None) -> Verdict:
    rules = {axis: rule_of(axis, some) for axis, some in found.items()}
    return verdict(center, found, rules, heads or [], "step")


HIDDEN = [penalty("hidden", 1001, 0.5), penalty("hidden", 1000, 0.25), penalty("hidden", 1008, 0.0)]


def test_a_size_off_the_multiple_is_moved_to_the_nearest() -> None:
    found = of(point(width=1000, heads=8), {"hidden": HIDDEN})
    (choice,) = found.choices
    assert (choice.multiple, choice.recommended, choice.keeps) == (16, 1008, False)
    assert found.sentence == (
        "Take hidden size 1,008, a multiple of 16, in place of 1,000, which loses 25.0% of kernel time (90%: 24.0% to "
        "27.0%) and 12.5% of the step."
    )
    assert found.to_json()["sizes"][0]["device_high"] == pytest.approx(0.27)


def test_a_gain_that_may_be_nothing_is_no_reason_to_change() -> None:
    weak = [*HIDDEN[::2], penalty("hidden", 1000, 0.008), *(penalty("hidden", n, 0.5) for n in (1016, 1032))]
    found = of(point(width=1000, heads=8), {"hidden": weak})
    (choice,) = found.choices
    assert (choice.nearest % choice.multiple, choice.recommended, choice.keeps) == (0, 1000, True)
    assert found.sentence == (
        "Hidden size 1,000 may stay: no multiple of 16, it loses -0.2% to 2.8% of kernel time (90%), "
        "which may be nothing."
    )
    unsure = [replace(one, device_low=-0.05) for one in HIDDEN]
    kept = of(point(width=1024), {"hidden": unsure}).sentence
    assert kept.endswith("loses -5.0% to 39.5% of kernel time at the median (90%), which may be nothing.")


def test_a_vocabulary_is_padded_never_cut() -> None:
    words = [penalty("vocab", 1009, 0.5), penalty("vocab", 1024, 0.0), penalty("vocab", 992, 0.1)]
    (choice,) = of(point(vocab=1009), {"vocab": words}).choices
    assert (choice.multiple, choice.recommended) == (64, 1024)


def test_sizes_that_keep_to_their_multiples_are_kept() -> None:
    ffn = [penalty("ffn", 3001, 0.1), penalty("ffn", 3004, 0.2), penalty("ffn", 3008, 0.0)]
    found = of(point(width=1024, ffn=3072), {"hidden": HIDDEN, "ffn": ffn})
    assert all(choice.keeps and not choice.device for choice in found.choices)
    assert found.sentence == (
        "Keep hidden size 1,024 and ffn size 3,072, multiples of 16 and 8: a hidden size that is none loses 37.5% of "
        "kernel time at the median (90%: 36.5% to 39.5%) and 18.8% of the step."
    )
    alone = of(point(width=1024), {"hidden": [penalty("hidden", 1001, 0.0)]}).sentence
    assert alone == "Keep hidden size 1,024: none near loses anything."


def test_heads_alone_have_a_verdict_of_their_own() -> None:
    few, many = point(1.0), point(0.9, heads=16)
    assert of(few, {}, [many, few]).sentence == (
        "Take 16/8 heads of 128 in place of 8/4 heads of 128: the step takes 10.0% less time per parameter."
    )
    assert of(few, {}, [few]).sentence.startswith("Keep 8/4 heads of 128")


def test_the_verdict_comes_first(flopcast: Callable[..., Any]) -> None:
    command = ("widths", "--gpu", "nvidia-h200", "--around", 1004, "--depth", 4, "--vocab", 32768, "--batch", 8,
               "--seq", 1024, "--axis", "hidden", "--no-shapes", "--span", 64)  # fmt: skip
    document = flopcast(*command, "--json").document
    says = document["verdict"]["says"]
    (size,) = document["verdict"]["sizes"]
    assert (size["asked"], size["recommended"] % size["multiple"], size["keeps"]) == (1004, 0, False)
    assert size["device_low"] < size["device"] < size["device_high"]
    assert says.startswith(f"Take hidden size {size['recommended']:,}, a multiple of {size['multiple']}, in place of ")
    assert " ".join(flopcast(*command).out.split()).startswith(says)
