"""Steps on several GPUs: what sending costs them, and what it and the kernels beside it lose to each other."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.links.library import find_interconnect
from flopcast.roofline.gpu.profile.host import NO_HOST, PROCESS_SPREAD, default_host
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.communication import Fabric, calls_around, slowed, slowest_host_factor
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.simulation import Span
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.model.models import load_config, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.collectives import Collective
from flopcast.roofline.stream.ops.op_stream import Stream

CONFIG = make_config(width=256, depth=2, heads=4, kv_heads=2, vocab=4096)
LAYOUTS = ("ddp", "zero2", "fsdp", "tp")
SENT = Collective(0, "all_reduce", 2**26, 2, 1, "fp32", 1)


@cache
def traced(layout: str) -> Stream:
    return get_stream(CONFIG, run_of(layout).traced_on("cuda"), trace=trace_now)


def run_of(layout: str, link: str = "auto") -> Run:
    return Run(batch=2, seq=128, optimizer="adamw-fused", parallel=f"{layout}=2", link=link)


@cache
def h200() -> Profile:
    """One for all: what a profile computes of its kernels when it first forecasts them takes seconds."""
    return find_profile("nvidia-h200")


def priced(layout: str, link: str = "auto") -> PricedStep:
    return PricedStep(traced(layout), run_of(layout, link), h200())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_told_apart(layout: str) -> None:
    step = priced(layout)
    found, shares = step.forecast(), step.timeline.shares
    assert 0 < shares.exposed <= shares.communication <= found.step_seconds
    assert found.step_seconds_low < found.step_seconds < found.step_seconds_high
    assert found.link == "nvidia-h200"
    assert found.num_gpus == 2
    assert found.device_seconds == pytest.approx(sum(share.seconds for share in found.breakdown))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slower_link_is_a_slower_step(layout: str) -> None:
    """With no host in the way; the datasheet's link is said to be projected."""
    fast, slow = (replace(priced(layout, link), host=NO_HOST) for link in ("auto", "pcie4"))
    assert slow.timeline.step_seconds() > fast.timeline.step_seconds()
    assert slow.timeline.shares.exposed > fast.timeline.shares.exposed
    assert any("pcie4 is projected" in warning for warning in slow.warnings)


def test_python_around_calls_is_the_hosts() -> None:
    """FSDP's and DTensor's Python is most of what they cost a host that DistributedDataParallel's C++ does not."""
    host = {layout: priced(layout).timeline.host_seconds for layout in LAYOUTS}
    assert host["tp"] > 1.5 * host["ddp"]
    assert host["fsdp"] > host["zero2"] > 1.1 * host["ddp"]


def test_the_slowest_of_more_ranks_is_slower() -> None:
    """At the median of draws; one rank is as slow as itself."""
    factors = [slowest_host_factor(ranks) for ranks in (1, 2, 3, 4, 8, 64, 1024)]
    assert factors[0] == 1.0
    assert factors == sorted(set(factors))
    drawn = np.exp(PROCESS_SPREAD * np.random.default_rng(0).standard_normal((100_000, 4)).max(axis=1))
    assert slowest_host_factor(4) == pytest.approx(float(np.median(drawn)), rel=2e-3)


def test_a_step_of_several_ranks_takes_the_slowest_ones_host() -> None:
    for layout in ("ddp", "tp"):
        both, shipped = priced(layout).host_costs, default_host()
        assert both.forward["launch"] == pytest.approx(shipped.forward["launch"] * slowest_host_factor(2))
        entered = (host.graph_costs("compile").entry("forward") for host in (both, shipped))
        assert next(entered) == pytest.approx(next(entered) * slowest_host_factor(2))


def test_collectives_run_on_their_lanes_and_are_waited_for() -> None:
    ops = priced("fsdp").ops
    sent = [number for number, op in enumerate(ops) if op.collective is not None]
    assert {ops[number].lane for number in sent} == {2, 3}  # gathers, and scatters
    waited = {other for op in ops for other in op.waits}
    assert set(sent) <= waited
    assert all(ops[other].launches for other in waited)


# --- beside each other


def kernel(seconds: float, lane: int = 0) -> TimedOp:
    return TimedOp("forward", "launch", 0.0, seconds=seconds, launches=1, lane=lane)


def beside(ops: list[TimedOp], *when: tuple[float, float]) -> list[float]:
    """Seconds of ops that ran so, by the shipped link and GPU."""
    fabric, profile = Fabric(find_interconnect("nvidia-h200"), 2), h200()
    spans = [Span(number, start, end) for number, (start, end) in enumerate(when)]
    return slowed(ops, spans, lambda op, sent: fabric.beside(op, sent, profile))


def test_what_runs_by_itself_keeps_its_time() -> None:
    ops = [kernel(1e-3), replace(kernel(1e-3, 1), collective=SENT)]
    assert beside(ops, (0, 1e-3), (1e-3, 2e-3)) == [1e-3, 1e-3]


def test_a_kernel_and_a_collective_slow_each_other() -> None:
    """A memory-bound kernel takes 1.17 times as long beside an H200's all-reduce."""
    ops = [kernel(1e-3), replace(kernel(1e-3, 1), collective=SENT)]
    both, half = beside(ops, (0, 1e-3), (0, 1e-3)), beside(ops, (0, 1e-3), (0.5e-3, 1.5e-3))
    assert both[0] == pytest.approx(1.17e-3, rel=0.02)
    assert both[1] > 1.1e-3
    assert ops[0].seconds < half[0] < both[0]


def test_two_kernels_share_the_gpu() -> None:
    assert beside([kernel(1e-3), kernel(1e-3, 1)], (0, 2e-3), (0, 2e-3)) == [2e-3, 2e-3]


def test_a_group_of_one_sends_nothing() -> None:
    """As the shards of hsdp=8x1."""
    fabric = Fabric(find_interconnect("nvidia-h200"), per_host=8)
    assert fabric.time(SENT._replace(ranks=1)).seconds == 0.0
    assert fabric.time(SENT).seconds > 0.0
    beside = fabric.beside(kernel(1e-3), SENT._replace(ranks=1), h200())
    assert (beside.kernel, beside.collective) == (1.0, 1.0)


def test_hosts_of_a_group() -> None:
    fabric = Fabric(find_interconnect("nvidia-h200"), per_host=4)
    inside, across, far = SENT._replace(ranks=4), SENT._replace(ranks=8), SENT._replace(ranks=2, stride=4)
    assert [fabric.hosts(sent) for sent in (inside, across, far)] == [1, 2, 2]


def test_tensor_parallel_costs_the_host_by_any_names_of_the_modules_that_it_divides() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128}
    config = {"model_type": "gpt_neox", **sizes, "vocab_size": 256, "max_position_embeddings": 64}
    stream = trace_now(config, Run(batch=1, seq=16, parallel="tp=2").traced_on("cuda"))
    around = [stream.ops[number] for number in calls_around(stream)]
    names = {op.module.rpartition(".")[2] for op in around if op.phase != "optimizer"}
    assert names == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


@pytest.mark.parametrize("layout", ["fsdp=2", "tp=2", "cp=2", "cp=2,fsdp=1"])
def test_python_runs_around_a_layers_calls_in_every_phase_that_the_layout_changes(layout: str) -> None:
    """Twice as many layers have twice the calls around them, in forward and backward; DTensors cost the optimizer."""
    config = {**load_config("qwen3-0.6b"), "hidden_size": 64, "head_dim": 32, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256}
    run = Run(batch=2, seq=64, optimizer="adamw-fused", parallel=layout).traced_on("cuda")
    found: list[Counter[str]] = []
    for depth in (1, 2, 3):
        stream = trace_now({**config, "num_hidden_layers": depth}, run)
        calls = Counter[str]()
        for number, count in calls_around(stream).items():
            calls[stream.ops[number].phase] += count
        found.append(calls)
    one, two, three = found
    for phase in ("forward", "backward"):
        assert two[phase] > one[phase]
        assert three[phase] - two[phase] == pytest.approx(two[phase] - one[phase])
    assert bool(one["optimizer"]) == (layout != "cp=2")
