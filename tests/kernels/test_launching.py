"""Calls that are replayed launch what they launch as written, whatever the operands' kinds."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest


def test_a_replayed_call_launches_what_an_ordinary_one_does(run_script: Callable[..., str]) -> None:
    """On 82 calls of 18 operations: other dtypes, sizes and strides that 16 does not divide or that are 1, operands
    that begin elsewhere, views, copies, other options, in both orders and at other addresses."""
    pytest.importorskip("triton")
    pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
    told = re.findall(r"^(.+): (\d+) of (\d+) calls replayed", run_script("replayed_launches.py"), re.MULTILINE)
    assert len(told) == 18
    # what is copied first, lies elsewhere, or takes more than launches is not replayed
    assert {name: int(calls) - int(replayed) for name, replayed, calls in told if replayed != calls} == {
        "rms_norm": 1, "rms_norm_backward": 1, "add_rms_norm": 1, "swiglu_backward": 1, "rope": 1,
    }  # fmt: skip


@pytest.mark.gpu
def test_on_a_gpu_replayed_calls_give_the_same_bits() -> None:
    """Of calls in bf16, of operands that lie elsewhere at every call; products in shapes of all ways to share them."""
    import torch
    from torch import Tensor

    from flopcast.kernels import attention, cross_entropy, matmul, rmsnorm, rope, rotary, swiglu

    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(size, device="cuda", generator=generator).to(dtype)

    single = torch.float32
    x, y, weight = normal(512, 1024, dtype=single), normal(512, 1024), normal(1024, dtype=single)
    tables = rope.tables(256, 128, "cuda")
    heads = normal(2, 256, 16, 128), normal(2, 256, 8, 128)
    target = torch.randint(0, 4096, (512,), device="cuda", generator=generator)
    q, k, v = (normal(2, 320, n, 128).transpose(1, 2) for n in (16, 8, 8))
    o, lse = attention.forward(q, k, v)
    rstd = torch.rsqrt(x.pow(2).mean(-1) + 1e-6)
    calls: list[tuple[Any, ...]] = [
        (rmsnorm.rms_norm_op, x, weight, 1e-6, torch.bfloat16),
        (rmsnorm.rms_norm_backward_op, y, x, weight, rstd),
        (rmsnorm.add_rms_norm_op, y, x, weight, 1e-6, torch.bfloat16),
        (rmsnorm.add_rms_norm_backward_op, y, normal(512, 1024, dtype=single), x, weight, rstd, torch.bfloat16),
        (swiglu.swiglu_op, y, normal(512, 1024)),
        (swiglu.swiglu_backward_op, y, normal(512, 1024), normal(512, 1024)),
        (rope.rope_qk_norm_op, *heads, normal(128), normal(128), *tables, 1e-6, torch.bfloat16),
        (rope.rope_qk_norm_backward_op, *map(torch.randn_like, heads), *heads, normal(128), normal(128), *tables, 1e-6),
        (rotary.rotary_op, *heads, *tables, torch.bfloat16),
        (cross_entropy.cross_entropy_op, normal(512, 4096), target, -100, "mean"),
        (cross_entropy.cross_entropy_with_gradient_op, normal(512, 4096), target, -100, "mean"),
        (attention.attention_forward_op, q, k, v, True, 128**-0.5, 0, None),
        (attention.attention_backward_op, torch.randn_like(q), q, k, v, o, lse, True, 128**-0.5, 0, None, False),
    ]
    for m, n, k_ in ((128, 128, 4096), (640, 768, 256), (8192, 1024, 1024), (2048, 4096, 64), (136, 152, 72)):
        calls.append((matmul.matmul_op, normal(m, k_), normal(n, k_), "nt", False))
        calls.append((matmul.matmul_op, normal(m, k_), normal(k_, n), "nn", False))
        calls.append((matmul.matmul_op, normal(k_, m), normal(k_, n), "tn", False))
    for operator, *operands in calls:
        replayed = operator.replayed
        want = replayed.function(*operands)
        for _ in range(4):
            fresh = [x.clone() if isinstance(x, Tensor) else x for x in operands]
            got = replayed(*fresh)
            pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True)
            assert all(torch.equal(one, other) for one, other in pairs), (operator.name, operands[-2:])
        assert hasattr(replayed.plans[replayed._key(*fresh)], "source"), (operator.name, replayed.refused)
