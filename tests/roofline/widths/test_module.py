"""Widths of a user's module: its factory is traced at each."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flopcast.roofline.gpu.library.profiles import find_host
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths.module import answer_of_module, widths_near
from flopcast.roofline.widths.penalties import power_of_two

ENCODER = """import torch
def encoder(width=256, batch=32, seq=64):
    layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return layer, torch.randn(batch, seq, width), lambda out: out.square().mean()
"""


@pytest.mark.parametrize("own", [1, 100, 777, 1024, 4000])
def test_every_class_of_width_is_tried_between_aligned_ones(own: int) -> None:
    found = widths_near(own)
    assert own in found
    assert 11 <= len(found) <= 12
    assert {power_of_two(value) for value in found} >= {1, 2, 4, 8, 16, 32}
    aligned = [value for value in found if value % 64 == 0]
    assert len(aligned) == 3
    assert all(aligned[0] <= value <= aligned[-1] for value in found if value >= 64)


@pytest.mark.parametrize(("width", "batch"), [(200, 64), (777, 2048)])
def test_an_odd_width_is_never_faster_per_parameter_than_the_aligned_one_beside_it(
    h200: Profile, width: int, batch: int
) -> None:
    module = Module("flopcast.microbench.zoo:mlp", sizes={"batch": batch, "depth": 2})
    found = answer_of_module(module, Run(), h200, around=width, host=find_host("none"))
    points = {point.value: point for point in found.points["width"]}
    odd = [value for value in points if value % 2]
    assert len(odd) >= 2
    for value in odd:
        beside = min((other for other in points if other % 64 == 0), key=lambda other: abs(other - value))
        assert points[value].seconds_per_parameter > points[beside].seconds_per_parameter
    assert all(penalty.device_low > 0 for penalty in found.penalties["width"] if penalty.multiple == 1)
    assert found.rules["width"].multiple >= 8
    assert found.run.batch == batch


def test_the_verdict_of_a_module_comes_first_and_what_its_factory_refuses_is_said(
    flopcast: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(ENCODER)
    ask = ("widths", "--gpu", "H200", "--module", "nets.py:encoder", "--batch", 16, "--host", "none")
    document = flopcast(*ask, "--json").document
    taken = [192, 224, 248, 256, 264, 272, 320]
    assert [point["value"] for point in document["points"]] == taken
    assert sorted(document["refused"]) == ["254", "255", "257", "260"]
    assert (document["model"], document["run"]["batch"]) == (
        {"module": "nets.py:encoder", "width": 256, "unit": "samples"},
        16,
    )
    assert document["rules"][0]["multiple"] >= 8  # it takes no smaller one
    (size,) = document["verdict"]["sizes"]
    assert (size["axis"], size["asked"], size["recommended"]) == ("width", 256, 256)

    found = flopcast(*ask, "--out", "widths.csv")
    shown = " ".join(found.out.split())
    assert shown.startswith(document["verdict"]["says"])
    assert "around width 256 of nets.py:encoder" in shown
    assert "batch 16" in shown
    assert not any(word in shown for word in ("hidden size", "heads"))
    assert "the factory refuses them: 254, 255, 257, 260" in found.err
    assert "embed_dim must be divisible by num_heads" in found.err
    assert [int(row["width"]) for row in csv.DictReader(Path("widths.csv").read_text().splitlines())] == taken
