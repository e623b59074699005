"""Graph sizes; on a GPU, the choice of timer and what it reads."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.microbench.timing.cuda_timer import CudaTimer, graph_calls
from flopcast.microbench.timing.policy import QUICK, WARM_UP_CAP

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@given(sets=st.integers(1, 256), estimate=st.floats(0, 200e-6))
def test_graphs_are_whole_rounds_and_long_enough(sets: int, estimate: float) -> None:
    calls = graph_calls(sets, estimate, QUICK)
    assert calls % sets == 0
    assert sets <= calls <= max(sets, QUICK.max_graph_calls)
    if calls + sets <= QUICK.max_graph_calls:
        assert calls * max(estimate, 1e-7) >= QUICK.graph_seconds * 0.999


@pytest.fixture(scope="module")
def timer() -> CudaTimer:
    made = CudaTimer(torch.device("cuda", 0), QUICK)
    made.warm_up()
    return made


@pytest.mark.gpu
@needs_cuda
def test_short_calls_are_replayed_in_graphs_and_cold_is_slower(timer: CudaTimer) -> None:
    with torch.cuda.stream(timer.stream):
        a = torch.randn(1 << 21, device=timer.device)  # 8 MiB in, 8 MiB out
        cold = timer.time(lambda operands: lambda: operands[0] + 1, (a,), "cold")
        hot = timer.time(lambda operands: lambda: operands[0] + 1, (a,), "hot")
    assert cold.timer == hot.timer == "graph"
    assert cold.sets > 1 == hot.sets
    assert cold.seconds > hot.seconds > 1e-6


@pytest.mark.gpu
@needs_cuda
def test_long_calls_are_timed_by_events(timer: CudaTimer) -> None:
    with torch.cuda.stream(timer.stream):
        a = torch.randn(8192, 8192, device=timer.device, dtype=torch.bfloat16)
        timing = timer.time(lambda operands: lambda: operands[0] @ operands[0], (a,), "cold")
    assert timing.timer == "events"
    assert timing.seconds > QUICK.event_threshold_seconds
    assert timing.reading.clock_mhz is None or timing.reading.clock_mhz > 100


@pytest.mark.gpu
@needs_cuda
def test_calls_that_synchronise_fall_back_to_events_and_leave_the_device_usable(timer: CudaTimer) -> None:
    with torch.cuda.stream(timer.stream):
        a = torch.randn(1000, device=timer.device)
        timing = timer.time(lambda operands: lambda: operands[0].sum().item(), (a,), "hot")
        assert timing.timer == "events"
        assert timing.warnings
        after = timer.time(lambda operands: lambda: operands[0].add_(1), (a,), "hot")
    assert after.timer == "graph"


@pytest.mark.gpu
@needs_cuda
def test_backward_passes_can_be_captured(timer: CudaTimer) -> None:
    with torch.cuda.stream(timer.stream):
        x = torch.randn(512, 512, device=timer.device, requires_grad=True)

        def prepare(operands):  # type: ignore[no-untyped-def]
            [leaf] = operands
            loss = (leaf * leaf).sum()
            return lambda: torch.autograd.grad(loss, leaf, retain_graph=True)

        assert timer.time(prepare, (x,), "cold").timer == "graph"


@pytest.mark.gpu
@needs_cuda
def test_warm_up_ends_with_the_clock_at_work() -> None:
    made = CudaTimer(torch.device("cuda", 0), QUICK)
    start = time.monotonic()
    made.warm_up()
    assert QUICK.warm_up_seconds <= time.monotonic() - start < WARM_UP_CAP * QUICK.warm_up_seconds + 1.0
    with torch.cuda.stream(made.stream):
        a = torch.randn(8192, 8192, device=made.device, dtype=torch.bfloat16)
        reading = made.time(lambda operands: lambda: operands[0] @ operands[0], (a,), "hot").reading
    assert "gpu_idle" not in reading.throttle_reasons
