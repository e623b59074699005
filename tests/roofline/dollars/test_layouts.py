"""The search for layouts: which there are, what each is given to do, and which comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import exp, hypot
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.dollars import layouts
from flopcast.roofline.dollars.layouts import (
    Workload,
    check_gpus,
    forecast_runs,
    layouts_on,
    ranked,
    seconds_of,
    try_all,
)
from flopcast.roofline.dollars.points import Ranged
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.uncertainty import spreads
from flopcast.roofline.stream.model.models import make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.terminal.several_gpus import print_ranking

pytestmark = pytest.mark.usefixtures("cache_of_the_module")

CONFIG = make_config(width=256, depth=3, heads=2, kv_heads=2, head_dim=128, vocab=1024)


@cache
def h200() -> Profile:
    """One for all: what a profile computes of its kernels when it first forecasts them takes seconds."""
    return find_profile("nvidia-h200")


def workload(sequences: int, memory: float | None = None) -> Workload:
    profile = h200()
    if memory is not None:
        device: Mapping[str, Any] = {**profile.device, "memory_bytes": memory}
        profile = replace(profile, device=device)
    return Workload(
        model=CONFIG, run=Run(seq=64, optimizer="adamw-fused"), sequences=sequences, profile=profile, host=None
    )


@pytest.mark.parametrize("gpus", [2, 8, 12, 64])
def test_every_layout_has_all_gpus_once(gpus: int) -> None:
    found = list(layouts_on(gpus))
    assert len(found) == len(set(found))
    assert {Layout.parse(text).world for text in found} == {gpus}
    assert {f"{kind}={gpus}" for kind in ("ddp", "zero1", "zero2", "fsdp")} <= set(found)
    assert ("tp=8" in found) == (gpus == 8)
    assert all(Layout.parse(text).tp <= 8 for text in found)
    assert list(layouts_on(1)) == ["none"]


def test_layouts_do_the_same_work_and_the_fastest_comes_first() -> None:
    work = workload(4)
    tried = try_all(work, ["fsdp=2", "ddp=2"])
    found = ranked(work, 2, tried)
    times = [one.seconds for one in found.fitting]
    assert times == sorted(times)
    assert 1 <= found.undecided <= 2
    for one in found.fitting:
        assert one.run.batch * one.run.accumulate * one.run.layout.data == 4
        assert one.forecast is not None
        assert one.forecast.parallel == one.run.parallel
    record = found.to_json()
    assert record["num_gpus"] == 2
    assert [one["step_seconds"] for one in record["fitting"]] == times

    plenty = tried[1].forecast
    assert plenty is not None
    scarce = workload(4, memory=plenty.needed_bytes - 1)
    tried = try_all(scarce, ["ddp=2"])
    how = [(one.run.batch, one.run.accumulate, one.run.checkpoint) for one in tried]
    assert how[:3] == [(2, 1, "none"), (1, 2, "none"), (2, 1, "full")]  # in smaller parts, or recomputed
    assert not tried[0].fits
    found = ranked(scarce, 2, tried)
    assert found.fitting
    assert not found.too_large  # the layout fits, run in another way
    assert ranked(scarce, 2, tried[:1]).too_large == (tried[0],)


def test_it_says_whether_the_first_two_are_decided(capsys: pytest.CaptureFixture[str]) -> None:
    work = workload(16)
    tried = try_all(work, ["ddp=2", "tp=4"])
    first = tried[-1]
    assert first.forecast is not None
    slower = replace(first, run=replace(first.run, parallel="fsdp=2"))
    for high, low, said in ((1.2, 0.9, "not decided which is the fastest: ddp=2, or fsdp=2, +5.0% (-10.0% to +20.0%)"),
                            (1.2, 1.01, "fastest: ddp=2; next fsdp=2, +5.0% (+1.0% to +20.0%): decided")):  # fmt: skip
        found = replace(ranked(work, 2, tried), fitting=(first, slower), lead=Ranged(1.05, low, high))
        print_ranking(replace(found, undecided=1 + (low < 1)), work)
        printed = " ".join(capsys.readouterr().out.split())
        assert said in printed
        assert "- left out 1: tp=4 does not divide heads 2 and kv_heads 2 and ffn" in printed
        assert "valid" not in printed
    assert ranked(work, 2, [first]).lead is None


def test_layouts_share_the_host_and_not_what_steps_err_beyond_it() -> None:
    work = workload(4)
    ddp, fsdp = try_all(work, ["ddp=2", "fsdp=2"])
    assert ddp.forecast is not None
    assert ddp.forecast.bound == "host"
    first, other = seconds_of(work, ddp), seconds_of(work, fsdp)
    ratio = other.over(first)
    own = hypot(*(2 * [spreads().host_same_run]))
    assert ratio.high / ratio.value > exp(Z_90 * own)  # each step's own error, and that of the calls of fsdp
    assert ratio.high / ratio.value < other.high / other.value  # the host's is the same in both
    assert first.over(first).high < ratio.high / ratio.value


def test_more_micro_batches_are_not_tried_where_the_host_alone_would_take_longer() -> None:
    two_layers = replace(workload(8), model=with_depth(CONFIG, 2))
    (few,) = try_all(two_layers, ["pp=2"])
    assert (few.run.batch, few.run.accumulate) == (4, 2)
    (twice,) = forecast_runs(two_layers, [replace(few.run, batch=2, accumulate=4)])
    assert few.forecast is not None
    assert few.forecast.host_seconds < few.seconds <= few.least_of_twice <= twice.seconds
    slow = replace(few, least_of_twice=0.9 * few.seconds)
    following = layouts._next(two_layers, layouts._Trial(few.run, 2), slow)
    assert [(trial.run.batch, trial.run.accumulate) for trial in following] == [(2, 4)]


def test_a_layout_has_one_row_the_fastest() -> None:
    work = workload(16)
    (one,) = try_all(work, ["ddp=2"])
    assert one.forecast is not None
    slower = replace(one, forecast=replace(one.forecast, step_seconds=2 * one.seconds))
    found = ranked(work, 2, [slower, one])
    assert found.fitting == (one,)
    assert found.tried == 1


def test_a_dense_model_has_no_experts_to_lay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def none_tried(_work: Workload, layouts_: list[str], *_: Any) -> list[Any]:
        asked.extend(layouts_)
        return []

    monkeypatch.setattr(layouts, "try_all", none_tried)
    layouts.ranking(workload(16), 8)
    assert "ddp=8" in asked
    assert not any("ep=" in layout for layout in asked)
    layouts.ranking(replace(workload(16), model={**CONFIG, "num_experts": 8}), 8)
    assert "ep=8" in asked


def test_what_cannot_be_divided_is_refused_in_words() -> None:
    (found,) = try_all(workload(3), ["ddp=2"])
    assert (found.forecast, "3 sequences per step do not divide among 2 GPUs" in found.reason) == (None, True)
    (found,) = try_all(workload(4), ["tp=4"])
    assert "tp=4 does not divide heads 2" in found.reason
    for gpus, nodes in ((0, 0), (8, 3), (5000, 0)):
        with pytest.raises(UsageError, match="valid are"):
            check_gpus(gpus, nodes)
