"""Makes the timer of a device."""

from __future__ import annotations

import torch

from flopcast.microbench.timing.cpu_timer import CpuTimer
from flopcast.microbench.timing.cuda_timer import CudaTimer
from flopcast.microbench.timing.policy import TimingPolicy
from flopcast.microbench.timing.timer import Timer


def make_timer(device: torch.device, policy: TimingPolicy) -> Timer:
    return CudaTimer(device, policy) if device.type == "cuda" else CpuTimer(policy)
