"""Kernel records split into calls and summarised; on a GPU, against what is known to be launched."""

from __future__ import annotations

import pytest
import torch

from flopcast.microbench.timing import cupti
from flopcast.microbench.timing.cupti import DeviceEvent

MARK = "void at::cuda::spin_kernel(long)"


def timeline(*names: str) -> list[DeviceEvent]:
    return [DeviceEvent(name, 100 * i, 10 + i) for i, name in enumerate(names)]


def test_events_between_marker_pairs_belong_to_calls() -> None:
    events = timeline("randn", MARK, "a", "b", MARK, "flush", MARK, "a", "b", MARK, "flush", MARK, MARK)
    groups = cupti.split_at_markers(reversed(events), calls=3)
    assert groups is not None
    assert [[event.name for event in group] for group in groups] == [["a", "b"], ["a", "b"], []]


def test_lost_records_are_noticed() -> None:
    assert cupti.split_at_markers(timeline(MARK, "a", MARK, MARK, "a"), calls=2) is None
    assert cupti.split_at_markers([], calls=1) is None


def test_medians_per_kernel_over_the_most_common_sequence() -> None:
    calls = [
        [DeviceEvent("a", 0, 10), DeviceEvent("b", 1, 100)],
        [DeviceEvent("a", 0, 30), DeviceEvent("b", 1, 300)],
        [DeviceEvent("other", 0, 5)],
        [DeviceEvent("a", 0, 20), DeviceEvent("b", 1, 200)],
    ]
    times = cupti.summarise(calls)
    assert times.kernels == (("a", pytest.approx(20e-9)), ("b", pytest.approx(200e-9)))
    assert times.seconds == pytest.approx(220e-9)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_of_real_calls() -> None:
    from flopcast.microbench.timing.cuda_timer import CudaTimer
    from flopcast.microbench.timing.policy import QUICK

    device = torch.device("cuda", 0)
    timer = CudaTimer(device, QUICK)
    with torch.cuda.stream(timer.stream):
        a = torch.randn(1 << 24, device=device)
        calls = [
            (lambda: a.add_(1), True),
            (lambda: (a.mul_(2), a.sum()), False),
            (lambda: None, True),
            (a.zero_, True),
        ]
        times = cupti.profile_calls(calls, flush=timer.flush, device=device, stream=timer.stream, repeats=3)
    add, two, nothing, fill = times
    assert nothing is None
    assert add is not None
    assert len(add.kernels) == 1
    assert "elementwise" in add.kernels[0][0]
    # 128 MiB moved: between 8 TB/s and 100 GB/s on any part
    assert 16e-6 < add.seconds < 1.4e-3
    assert two is not None
    assert len(two.kernels) >= 2
    assert fill is not None
