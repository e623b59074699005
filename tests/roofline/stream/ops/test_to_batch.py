"""Streams of any batch from two traces, what fits into memory, and sweeps that use both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.step.questions.largest_batch import largest_batch
from flopcast.roofline.step.questions.many_gpus import gpu_of
from flopcast.roofline.step.questions.sweep import sweep
from flopcast.roofline.stream.library import prefetch
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES, to_batch

Tracing = Callable[..., Stream]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_another_batch_is_as_traced(tiny: dict[str, Any], traced: Tracing, golden: ModuleType, optimizer: str) -> None:
    low, high = (traced(tiny, batch=batch, optimizer=optimizer) for batch in (2, 3))
    want = traced(tiny, batch=6, optimizer=optimizer)
    got = to_batch(low, high, 6)
    assert golden.ops_of(got) == golden.ops_of(want)
    assert peak_bytes(got) == peak_bytes(want)
    assert [op.freed for op in got.ops] == [op.freed for op in want.ops]
    assert got.meta["batch"] == 6


def test_unfolded_afterwards(tiny: dict[str, Any], traced: Tracing, golden: ModuleType) -> None:
    deep = {**tiny, "num_hidden_layers": 5}
    got = get_stream(deep, Traced(batch=6, seq=32), vary="batch")
    assert golden.ops_of(got) == golden.ops_of(traced(deep, batch=6))


def test_streams_that_are_not_of_one_line(tiny: dict[str, Any], traced: Tracing) -> None:
    low = traced(tiny, batch=2)
    with pytest.raises(NotDerivable):
        to_batch(low, replace(traced(tiny, batch=3), ops=traced(tiny, batch=3).ops[:-1]), 4)
    with pytest.raises(NotDerivable):
        to_batch(low, traced(tiny, batch=3, optimizer="adamw-fused"), 4)


def test_the_largest_batch_fits_and_the_next_does_not(tiny: dict[str, Any], profile: Profile) -> None:
    run = Run(seq=32)
    small = replace(profile, device={**profile.device, "memory_bytes": 2 * 10**9})
    most = largest_batch(tiny, run, small)
    assert most > 100
    assert forecast(tiny, replace(run, batch=most), small).fits
    assert not forecast(tiny, replace(run, batch=most + 1), small).fits
    none = replace(profile, device={**profile.device, "memory_bytes": 10**6})
    assert largest_batch(tiny, run, none) == 0
    endless = replace(profile, device={**profile.device, "memory_bytes": 10**18})
    with pytest.raises(UsageError, match="no limit to plan with"):
        largest_batch(tiny, run, endless)


def test_a_sweep_is_as_one_forecast_each(
    tiny: dict[str, Any], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two traces for four batches, and the same numbers as by a trace each."""
    shape = {"width": "64", "heads": "4", "kv_heads": "2", "head_dim": "16", "vocab": "512", "seq": "48"}
    rows = [{**shape, "depth": str(depth), "batch": str(batch)} for depth in (3, 4) for batch in (4, 5, 6, 7)]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile.save(tmp_path / "test-gpu.json")
    gpu = gpu_of(str(tmp_path / "test-gpu.json"))
    found = sweep([*rows, {**shape, "depth": "0"}], [gpu], lambda gpu: None)
    assert len(list(tmp_path.rglob("*.json.gz"))) == len(BATCHES)
    assert "depth" in found[-1]["reason"]
    assert "step_seconds" not in found[-1]
    monkeypatch.undo()
    for row, one in ((rows[i], found[i]) for i in (1, 7)):
        config = {**tiny, "num_hidden_layers": int(row["depth"])}
        want = forecast(config, Run(batch=int(row["batch"]), seq=48), profile)
        assert one["step_seconds"] == pytest.approx(want.step_seconds, rel=1e-12)
        assert one["peak_bytes"] == want.peak_bytes


def test_traces_are_made_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What several processes left in the cache is what a caller gets, and errors are the caller's."""
    asked: list[int] = []
    monkeypatch.setattr(prefetch, "get_stream", lambda config, traced: asked.append(traced.batch))
    prefetch.trace_into_cache({}, Traced(batch=5))
    assert asked == [5]

    def refuse(config: Any, traced: Traced) -> Stream:
        raise UsageError("cannot be traced")

    monkeypatch.setattr(prefetch, "get_stream", refuse)
    prefetch.trace_into_cache({}, Traced())  # the caller asks again and is told
