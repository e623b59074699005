"""The timer of a device."""

from __future__ import annotations

import torch

from flopcast.microbench.timing.timer import CpuTimer, Timer, TimingPolicy


def make_timer(device: torch.device, policy: TimingPolicy) -> Timer:
    if device.type == "cuda":
        from flopcast.microbench.timing.cuda_timer import CudaTimer

        return CudaTimer(device, policy)
    return CpuTimer(policy)
