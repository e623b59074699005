"""Experts that transformers runs one by one, outside of the graphs of a compiled model.

In fp32 a compiled mixture of experts does not call torch's grouped product but an operator of transformers' own
(`integrations/moe.py`), a loop over experts that first reads from the GPU how many rows each has. Inductor cannot trace
its backward, which reads them too, so that the graph breaks there: the operator runs eagerly between graphs. Fake
tensors hold no numbers of rows. Here each expert gets as many, and what the loop does is recorded: zeros for its
result, the wait for the numbers, a slice of every operand per expert, and its products as one grouped product, which in
fp32 is what torch's own loop over groups runs (`lowering/grouped`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch._guards import CompileContext, TracingContext
from torch._library import custom_ops
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.recorder import COMPOSED, Recorder

NAME = "transformers::grouped_mm_fallback"
_GROUPED, _ARGS = "aten._grouped_mm.default", '[{"t":0},{"t":1},{"t":2}]'


def is_compiling() -> bool:
    """Whether a compiler runs what runs now."""
    return CompileContext.try_get() is not None or TracingContext.try_get() is not None


@contextmanager
def one_by_one() -> Iterator[None]:
    """Within the context the operator of transformers is recorded as what it does, of experts with as many rows each;
    compilers trace it as it is."""
    with suppress(ImportError):
        import transformers.integrations.moe  # noqa: F401  # it registers the operator
    definition: Any = custom_ops.OPDEFS.get(NAME)
    if definition is None:  # another transformers
        yield
        return
    own = definition._backward_fn

    forwards, backwards = map(torch.compiler.disable, (_forward, _backward))  # dynamo would look at what a step calls

    def backward(context: Any, grad: torch.Tensor) -> Any:
        return own(context, grad) if is_compiling() else backwards(context, grad)

    operator = torch.ops.transformers.grouped_mm_fallback.default
    COMPOSED[operator] = forwards
    try:
        with replaced(definition, "_backward_fn", backward):
            yield
    finally:
        del COMPOSED[operator]


def _forward(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(rows), weights.shape[2], device=rows.device, dtype=rows.dtype)
    for place, own in _experts(rows, ends):
        _ = rows[own], weights[place], out[own]
    _note((rows, weights, ends), out)
    return out


def _backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    (rows, weights), ends = context.saved_tensors, context.offs
    grad_rows, grad_weights = torch.zeros_like(rows), torch.zeros_like(weights)
    for place, own in _experts(rows, ends):
        _ = grad[own], weights[place].T, grad_rows[own], rows[own].T, grad[own], grad_weights[place]
    _note((grad, weights.transpose(-2, -1), ends), grad_rows)
    _note((rows.transpose(0, 1), grad, ends), grad_weights)
    return grad_rows, grad_weights, None


def _experts(rows: torch.Tensor, ends: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Reads where the rows of each expert end, for which the host waits once, and yields experts with their rows, which
    are as many for each; of those that get none nothing runs."""
    torch.ops.aten._local_scalar_dense.default(ends[0])
    count = len(ends)
    for place in range(count):
        start, stop = (len(rows) * end // count for end in (place, place + 1))
        if stop > start:
            yield place, slice(start, stop)


def _note(operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Tells the recorder of the products of all experts."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder) and not mode.is_paused:
            mode.note(_GROUPED, operands, [out], _ARGS)
