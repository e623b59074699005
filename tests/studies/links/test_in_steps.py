"""Collectives are found in recorded steps: what nothing ran beside, by the rank that came last."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from studies.links.in_steps import found_in, layer_parameters
from studies.parallel.steps import MODELS, Kernel, Measured, Step

REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def _measured(rank: int, step: Step, kernels: list[Kernel]) -> Measured:
    return Measured(
        step=asdict(step), config=MODELS[step.model], rank=rank, ranks=2, gpu="NVIDIA H200", torch="2.11", nccl="2.28",
        step_seconds=[1.0], host_seconds=[1.0], peak_bytes=1, reserved_bytes=1, used_bytes=1, kernels=[kernels],
    )  # fmt: skip


def test_a_collective_lasts_from_when_the_later_rank_begins() -> None:
    """Rank 0 waits for rank 1 in each; two of the layer's three have a product beside their end."""
    step = Step("w640-d6", "tp={n}", 8, 1024)
    sent = [0.0, 1e-3, 2e-3]
    early = [Kernel(REDUCE, 17, start, 250e-6) for start in sent]
    late = [Kernel(REDUCE, 17, start + 200e-6, 50e-6) for start in sent]
    product = Kernel("nvjet_sm90_tst_128x128", 7, 1.24e-3, 100e-6)
    found = list(found_in([_measured(0, step, [*early, product]), _measured(1, step, late)]))
    assert not found  # fewer than the layers
    many = [Kernel(REDUCE, 17, 1e-3 * i, 250e-6) for i in range(9)]
    short = [Kernel(REDUCE, 17, 1e-3 * i + 200e-6, 50e-6) for i in range(9)]
    (one,) = found_in([_measured(0, step, [*many, product]), _measured(1, step, short)])
    assert (one.kind, one.dtype, one.bytes, one.times) == ("all_reduce", "bf16", 8 * 1024 * 640 * 2, 8)
    assert one.seconds == pytest.approx(50e-6)


def test_fsdp_gathers_layers() -> None:
    step = Step("w640-d6", "fsdp={n}", 8, 1024)
    kernels = [Kernel(GATHER, 30, 1e-3 * i, 40e-6) for i in range(6)]
    embedding = Kernel(GATHER, 30, 1.0, 400e-6)
    (one,) = found_in([_measured(rank, step, [*kernels, embedding]) for rank in (0, 1)])
    assert (one.kind, one.bytes, one.times) == ("all_gather", 2 * layer_parameters(dict(MODELS["w640-d6"])), 6)
