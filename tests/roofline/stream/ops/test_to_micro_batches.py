"""A step of many micro-batches is forecast from four, and comes out as if all had been traced and simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.microbench import zoo
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.priced_step import PricedStep, forecast, traced_of
from flopcast.roofline.step.questions.explain import explain_step
from flopcast.roofline.step.simulation import Simulation
from flopcast.roofline.stream.library import modules
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_micro_batches import TRACED, times_run, to_micro_batches
from flopcast.roofline.stream.tracer import trace as tracer
from flopcast.roofline.validation.baselines import roofline

Tracing = Callable[..., Stream]
RUN = Run(batch=2, seq=32)

microseconds = st.integers(0, 100).map(lambda n: n * 1e-6)
items = st.builds(
    lambda host, device, launches, kind: TimedOp(
        "forward", kind, host, seconds=device, launches=launches if device else 0
    ),
    microseconds,
    microseconds,
    st.integers(1, 3),
    st.sampled_from(["launch"] * 9 + ["sync"]),
)
some_items = st.lists(items, max_size=15)


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Where two JSON documents differ, numbers by more than 1e-6 of their value."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [line for key in one for line in differences(one[key], other[key], f"{at}/{key}")]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [line for i, pair in enumerate(zip(one, other, strict=True)) for line in differences(*pair, f"{at}/{i}")]
    if isinstance(one, float) and isinstance(other, float):
        return [] if math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-12) else [f"{at}: {one} {other}"]
    return [] if one == other else [f"{at}: {one} {other}"]


@given(
    some_items, st.lists(items, min_size=1, max_size=25), some_items, st.integers(1, 120),
    st.sampled_from([2, 10, 100, 1021]), st.sampled_from([0.3, 1.0, 3.0]),
)  # fmt: skip
def test_what_runs_several_times_is_simulated_as_if_written_out(
    before: list[TimedOp], block: list[TimedOp], after: list[TimedOp], count: int, queue_depth: int, host_factor: float
) -> None:
    several = [
        replace(
            item,
            count=count,
            host_seconds=item.host_seconds * count,
            seconds=item.seconds * count,
            launches=item.launches * count,
        )
        for item in block
    ]
    speeds = {"gap_seconds": 1e-6, "sync_seconds": 1e-5, "host_factor": host_factor}
    want = Simulation([*before, *block * count, *after], queue_depth).run(**speeds).step
    assert Simulation([*before, *several, *after], queue_depth).run(**speeds).step == pytest.approx(
        want, rel=1e-9, abs=1e-15
    )


@pytest.mark.parametrize(
    ("depth", "options"),
    [(3, {}), (1, {"checkpoint": "full"}), (1, {"optimizer": "adamw-fused"}), (1, {"fused": "triton"})],
    ids=str,
)  # layers once: what micro-batches repeat is all of them
def test_many_micro_batches_are_as_all_of_them_traced(
    tiny: dict[str, Any], profile: Profile, depth: int, options: dict[str, str]
) -> None:
    run, tiny = replace(RUN, accumulate=TRACED + 2, **options), {**tiny, "num_hidden_layers": depth}
    every = trace_now(tiny, traced_of(run, profile))
    short = get_stream(tiny, traced_of(run, profile))
    assert len(short.ops) < len(every.ops)
    assert sum(times_run(short)) == sum(times_run(every)) == len(every.ops)
    want, got = (explain_step(PricedStep(stream, run, profile)).to_json() for stream in (every, short))
    assert not differences(got, want)
    assert roofline(short, find_profile("nvidia-h200")) == pytest.approx(roofline(every, find_profile("nvidia-h200")))


def test_one_trace_serves_any_number_of_micro_batches(
    tiny: dict[str, Any], profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    deep = {**tiny, "num_hidden_layers": 6}
    found = {n: forecast(deep, replace(RUN, accumulate=n), profile) for n in (64, 128, 1024)}
    assert len(list(tmp_path.rglob("*.json.gz"))) == 1
    assert found[1024].flops_counted == 16 * found[64].flops_counted
    assert found[1024].tokens_per_second * found[1024].step_seconds == pytest.approx(1024 * 2 * 32)
    more = found[128].step_seconds - found[64].step_seconds
    assert found[1024].step_seconds - found[128].step_seconds == pytest.approx(14 * more)
    assert found[1024].peak_bytes == found[64].peak_bytes
    larger = replace(RUN, batch=6, accumulate=128)
    by_line = get_stream(deep, traced_of(larger, profile), vary="batch")
    assert times_run(by_line) == times_run(get_stream(deep, traced_of(replace(RUN, accumulate=128), profile)))


def test_many_micro_batches_of_a_module(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    def mlp() -> tuple[torch.nn.Module, Any]:
        return zoo.mlp(batch=8, width=16, depth=3)

    def explained() -> Any:
        run = Run(accumulate=11)
        stream = modules.module_stream(mlp, run, profile.device["type"])
        return len(stream.ops), explain_step(PricedStep(stream, modules.run_of_stream(stream, run), profile)).to_json()

    length, found = explained()
    monkeypatch.setattr(tracer, "TRACED", 1024)
    every, want = explained()
    assert length < every / 2
    assert not differences(found, want)


def test_micro_batches_that_differ_are_traced_one_by_one(
    tiny: dict[str, Any], traced: Tracing, profile: Profile
) -> None:
    for count in (2, 3):
        with pytest.raises(NotDerivable, match=f"{count} runs of forward and backward"):
            to_micro_batches(traced(tiny, accumulate=count), 8)
    four = traced(tiny, accumulate=TRACED)
    last = max(i for i, op in enumerate(four.ops) if op.phase == "forward")
    other = replace(four, ops=(*four.ops[:last], four.ops[last]._replace(args="[7]"), *four.ops[last + 1 :]))
    with pytest.raises(NotDerivable, match="other calls"):
        to_micro_batches(other, 8)

    class Counting(torch.nn.Module):
        """Does something else in each forward."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.layer(x) * self.calls  # type: ignore[no-any-return]

    stream = modules.module_stream(Counting(), Run(accumulate=7), profile.device["type"], batch=torch.randn(2, 8))
    assert sum(op.phase == "forward" and op.name == "aten.mul.Tensor" for op in stream.ops) == 7
    assert set(times_run(stream)) == {1}


@pytest.mark.parametrize(("option", "value"), [("accumulate", 8), ("checkpoint", "full"), ("optimizer", "adamw-fused")])
def test_a_step_function_is_not_asked_for_what_it_does_itself(profile: Profile, option: str, value: Any) -> None:
    model = torch.nn.Linear(8, 8)

    def step() -> None:
        for _ in range(TRACED):
            model(torch.randn(2, 8)).sum().backward()

    assert modules.module_stream(step, Run(), profile.device["type"]).meta["unit"] == "steps"
    with pytest.raises(UsageError, match=f"{option} {value} of .*step, .*leave {option} out"):
        modules.module_stream(step, replace(Run(), **{option: value}), profile.device["type"])
