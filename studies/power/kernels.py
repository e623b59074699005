"""Measures each of some kernels after a rest, in a row by itself, and in turn with large products.

    python -m studies.power.kernels OUT [--seconds 150]      OUT/kernels.jsonl, a line each, on a GPU

After a rest of a second and a half kernels run at the clock that they reach by themselves; after two seconds in a row
the power limit holds it. In turn with products, 6 ms of them and 6 ms of the kernel, all run at the clock that the
limit then holds: how much longer each takes tells by what share it goes by the clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from flopcast.microbench.steps.measure import rest
from studies.command import parser_of
from studies.power.watch import Watch, seconds_of

SECONDS, BLOCK_SECONDS = 1.0, 6e-3
PRODUCT = "product 8192x4096x4096"
Run = Callable[[], Any]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no kernel after so many seconds")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.seconds
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    watch, product = Watch(), _product(8192, 4096, 4096)
    with (given.out / "kernels.jsonl").open("w") as file:
        for name, run in {PRODUCT: product, **_kernels()}.items():
            if time.monotonic() < end:
                file.write(json.dumps(measured(name, run, product, watch)) + "\n")
                file.flush()
                print(name, flush=True)


def measured(name: str, run: Run, product: Run, watch: Watch) -> dict[str, Any]:
    number, products = (max(1, round(BLOCK_SECONDS / seconds_of(one))) for one in (run, product))

    def alone(times: int = 1) -> None:
        for _ in range(number * times):
            run()

    def in_turn(times: int = 1) -> None:
        for _ in range(times):
            for _ in range(products):
                product()
            alone()

    rest()
    row: dict[str, Any] = {"name": name, "rested": watch.profiled(lambda: alone(2))._asdict()}
    row["in_a_row"] = asdict(watch.in_a_row(alone, SECONDS))
    row["in_a_row_kernels"] = watch.profiled(lambda: alone(3))._asdict()
    if name != PRODUCT:
        row["in_turn"] = asdict(watch.in_a_row(in_turn, SECONDS))
        row["in_turn_kernels"] = watch.profiled(lambda: in_turn(3))._asdict()
    return row


def _kernels() -> dict[str, Run]:
    """Products, attention, kernels that inductor generates and torch's own, by what they are called in the table."""
    labels = torch.randint(0, 32000, (8192,), device="cuda")
    large, small = (_matrices(3, side, columns) for side, columns in ((8192, 8192), (1024, 4096)))
    parameters = [torch.randn(2048, 6144, device="cuda", requires_grad=True) for _ in range(6)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return {
        "product 8192x3072x1024": _product(8192, 3072, 1024),
        "product 4096x32000x2048": _product(4096, 32000, 2048),
        "product 1024x2048x2048": _product(1024, 2048, 2048),
        "product in fp16": _product(8192, 4096, 4096, torch.float16),
        "product in tf32": _product(4096, 4096, 4096, torch.float32),
        "attention, heads of 128": _attention(4, 16, 2048, 128),
        "attention, heads of 64": _attention(4, 32, 2048, 64),
        "attention of 12,288 tokens": _attention(1, 16, 12288, 128),
        "attention backward, heads of 128": _attention_backward(4, 16, 2048, 128),
        "attention backward, heads of 64": _attention_backward(4, 32, 2048, 64),
        "loss": _trained(lambda x: F.cross_entropy(x.float(), labels), _leaf(8192, 32000)),
        "SwiGLU": _trained(lambda x, y: F.silu(x) * y, _leaf(16384, 6144), _leaf(16384, 6144)),
        "GELU": _trained(lambda x: F.gelu(x, approximate="tanh"), _leaf(16384, 4096)),
        "RMSNorm": _trained(_rms_norm, _leaf(16384, 2048), _leaf(2048)),
        "fused AdamW": torch.optim.AdamW(parameters, fused=True).step,
        "sum of two, 400 MB": lambda: torch.add(large[0], large[1], out=large[2]),
        "sum of two in the L2": lambda: torch.add(small[0], small[1], out=small[2]),
    }


def _matrices(number: int, rows: int, columns: int) -> list[torch.Tensor]:
    return [torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) for _ in range(number)]


def _leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def _product(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Run:
    a, b = torch.randn(m, k, device="cuda", dtype=dtype), torch.randn(k, n, device="cuda", dtype=dtype)
    out = torch.empty(m, n, device="cuda", dtype=dtype)
    return lambda: torch.mm(a, b, out=out)


def _attention(*shape: int) -> Run:
    q, k, v = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _attention_backward(*shape: int) -> Run:
    q, k, v = (_leaf(*shape) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def _trained(function: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Run:
    """Forward and backward, compiled."""
    compiled = torch.compile(function)

    def run() -> None:
        out = compiled(*leaves)
        torch.autograd.grad(out, leaves, torch.ones_like(out))

    return run


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


if __name__ == "__main__":
    main()
