"""Measures the host cost of the operators whose kernels are Triton's: seconds to enqueue a call, forward and backward.

An ATen call passes through the dispatcher in C++; a torch custom operator also runs Python in forward and backward
(autograd's formula, the choice of a configuration, Triton's launcher), so that it costs the host several times as much.
Operands are small, and fewer calls than the launch queue holds are enqueued in a row on an idle device: the device
keeps up, and only the host is timed.

Rows have the key host_op/<operator> and a value in seconds per call; `base_seconds` is that of an ATen call that
launches equivalent work, timed alternately with it: F.silu and its backward for memory-bound operators, torch's own
product and attention for the others.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.hosts.host import host_fields
from flopcast.microbench.recipe.patches import patched
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import Fields, OperatorRow, merged
from flopcast.microbench.sweep.work import Stopwatch, Summary, first_line, status_of
from flopcast.microbench.timing.timer import synchronise

PREFIX = "host_op/"
CALLS = 20  # in a row: each launches at most three kernels, the queue holds about 1,024
ROUNDS = 15
WARM_UP = 2

Forward = Callable[[], Any]
Backward = Callable[[Any], Any] | None

# Forward operator -> its backward operator.
PAIRS = {
    "rms_norm": "rms_norm_backward",
    "add_rms_norm": "add_rms_norm_backward",
    "rope_qk_norm": "rope_qk_norm_backward",
    "swiglu": "swiglu_backward",
    "cross_entropy_with_gradient": "scale_",
    "attention": "attention_backward",
    "mm": "",
}
BASE = {"attention": "sdpa", "mm": "torch_mm"}  # the others': "silu"


def run_operators(
    *, recorder: Recorder, device: torch.device, suite: str, retry: Collection[str] = (),
    rounds: int = ROUNDS, clock: Callable[[], float] = time.perf_counter,
) -> Summary:  # fmt: skip
    """Measures and records what the folder lacks; an operator that does not run here gets a row that says so."""
    watch = Stopwatch(clock=clock)
    wanted = [name for pair in PAIRS.items() for name in pair if name]
    if all(recorder.is_done(PREFIX + name, retry=retry) for name in wanted):
        return Summary(skipped=len(wanted))
    rows = operator_rows(device, rounds=rounds, clock=clock)
    for row in rows:
        recorder.append({**row, "suite": suite})
    return Summary(Counter(row["status"] for row in rows), seconds=watch.seconds)


def operator_rows(
    device: torch.device, *, rounds: int = ROUNDS, clock: Callable[[], float] = time.perf_counter
) -> list[OperatorRow]:
    """Returns one row per operator. All are timed in turn, round by round, so that a slowdown of the host affects all
    of them alike."""
    samples: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, Fields] = {}
    calls: dict[str, tuple[Forward, Backward]] = {}
    for name, make in _makers(device).items():
        try:
            made = make()
            for _ in range(WARM_UP):
                with _kernels(name, device):
                    _sample(*made, device, clock)
            calls[name] = made
        except Exception as error:
            failed[name] = {"status": status_of(error), "reason": first_line(error)}
    with no_garbage_collection():
        for _ in range(rounds):
            for name, call in calls.items():
                with _kernels(name, device):
                    forward, backward = _sample(*call, device, clock)
                samples[name].append(forward)
                samples[f"{name}/backward"].append(backward)
    rows = []
    for name, reverse in PAIRS.items():
        base = BASE.get(name, "silu")
        for operator, part in ((name, ""), (reverse, "/backward")):
            if operator:
                fault = failed.get(name) or failed.get(base) or {}
                values, others = ([], []) if fault else (samples[name + part], samples[base + part])
                fields = host_fields(PREFIX + operator, values, backend="triton")
                base_seconds = statistics.median(others) if others else None
                rows.append(merged(OperatorRow, fields, fault, {"base_seconds": base_seconds, "rounds": rounds}))
    return rows


def _kernels(name: str, device: torch.device) -> AbstractContextManager[Any]:
    """A context with Triton's kernel in place of aten::mm, as `patches` runs a step; an empty one for the other
    operators."""
    return patched("triton", "sdpa", device.type) if name == "mm" else nullcontext()


def _sample(
    forward: Forward, backward: Backward, device: torch.device, clock: Callable[[], float]
) -> tuple[float, float]:
    """Host seconds per forward call and per backward call; 0 where there is no backward."""
    synchronise(device)
    start = clock()
    results = [forward() for _ in range(CALLS)]
    middle = clock()
    synchronise(device)
    if backward is None:
        return (middle - start) / CALLS, 0.0
    again = clock()
    for result in results:
        backward(result)
    end = clock()
    synchronise(device)
    return (middle - start) / CALLS, (end - again) / CALLS


def _makers(device: torch.device) -> dict[str, Callable[[], tuple[Forward, Backward]]]:
    """Functions that make, for each operator and each base call on operands of its own, a pair (forward, backward of
    what forward returned)."""
    from flopcast.kernels import attention, cross_entropy, rmsnorm, rope, swiglu

    half = torch.float16 if device.type == "cpu" else torch.bfloat16  # Triton's interpreter has no bf16

    def leaf(*size: int, dtype: torch.dtype = half) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device).requires_grad_()

    def differentiated(function: Callable[..., Any], *inputs: Tensor) -> tuple[Forward, Backward]:
        """Makes the pair as in training: output gradients are given, and every leaf that requires one gets a
        gradient."""
        first = function(*inputs)
        outputs = first if isinstance(first, tuple) else (first,)
        seeds = [torch.ones_like(x) for x in outputs]
        leaves = [x for x in inputs if x.requires_grad]

        def backward(found: Any) -> Any:
            return torch.autograd.grad(found if isinstance(found, tuple) else (found,), leaves, seeds)

        return lambda: function(*inputs), backward

    tables = rope.tables(16, 128, device)
    target = torch.zeros(16, dtype=torch.int64, device=device)
    weight = leaf(256, dtype=torch.float32)
    # weights of their own, as in a model: a call whose operands are one tensor is not replayed (`kernels.launching`)
    of_q, of_k = leaf(128, dtype=torch.float32), leaf(128, dtype=torch.float32)
    makers: dict[str, Callable[[], tuple[Forward, Backward]]] = {
        "silu": lambda: differentiated(F.silu, leaf(16, 256)),
        "rms_norm": lambda: differentiated(rmsnorm.rms_norm, leaf(16, 256, dtype=torch.float32), weight),
        "add_rms_norm": lambda: differentiated(
            rmsnorm.add_rms_norm, leaf(16, 256), leaf(16, 256, dtype=torch.float32), weight
        ),
        "rope_qk_norm": lambda: differentiated(
            rope.rope_qk_norm, leaf(1, 16, 2, 128), leaf(1, 16, 1, 128), of_q, of_k, *tables
        ),
        "swiglu": lambda: differentiated(swiglu.swiglu, leaf(16, 768), leaf(16, 768)),
        "cross_entropy_with_gradient": lambda: differentiated(
            lambda logits: cross_entropy.cross_entropy(logits, target), leaf(16, 1024)
        ),
        "attention": lambda: differentiated(attention.attention, *_heads(leaf)),
        "sdpa": lambda: differentiated(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), *_heads(leaf)
        ),
        "torch_mm": lambda: _product(leaf(64, 64).detach(), leaf(64, 64).detach()),
        "mm": lambda: _product(leaf(64, 64).detach(), leaf(64, 64).detach()),
    }
    return makers


def _heads(leaf: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(1, 2, 64, 128), leaf(1, 1, 64, 128), leaf(1, 1, 64, 128)


def _product(a: Tensor, b: Tensor) -> tuple[Forward, Backward]:
    return lambda: torch.mm(a, b), None
