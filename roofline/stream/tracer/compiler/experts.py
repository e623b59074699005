"""Experts that transformers runs one by one, outside of the graphs of a compiled model.

In fp32 a compiled mixture of experts does not call torch's grouped product but an operator of transformers' own
(`integrations/moe.py`), a loop over experts that first reads from the GPU how many rows each has. Inductor cannot trace
its backward, which reads them too, so that the graph breaks there: the operator runs eagerly between graphs. Fake
tensors hold no numbers of rows. Here each expert gets as many, and what the loop does is recorded: zeros for its
result, the wait for the numbers, a call of each expert's product, with how many views it takes (ONE_CALL), and after
the first the kernels of all as one grouped product, which in fp32 is what torch's own loop over groups runs
(`lowering/grouped`): the GPU works from there on, while the host calls the other experts' products.

A checkpointed layer runs eagerly as a whole where its graph breaks, and there transformers calls torch's grouped
product, which multiplies in fp32 on a GPU though torch's rule for fake tensors refuses to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import _meta_registrations
from torch._functorch import aot_autograd
from torch._guards import CompileContext, TracingContext
from torch._inductor import compile_fx
from torch._library import custom_ops
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from flopcast.roofline.stream.lowering.grouped import ONE_CALL
from flopcast.roofline.stream.tracer.cuda_operators import RESULTS
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
        with (
            replaced(definition, "_backward_fn", backward),
            replaced(_meta_registrations, "_meta_grouped_mm_common", _grouped_mm_rule),
            replaced(compile_fx, "compile_fx", _refusing(operator, compile_fx.compile_fx)),
        ):
            yield
    finally:
        del COMPOSED[operator]


_torch_rule: Callable[..., torch.Tensor] = _meta_registrations._meta_grouped_mm_common


def _grouped_mm_rule(a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    """Makes the result of a grouped product: of other types than bf16 too where no compiler asks."""
    found: torch.Tensor | None = None
    if not is_compiling():
        found = RESULTS[torch.ops.aten._grouped_mm.default](a, b, options.get("offs"))
    return _torch_rule(a, b, *args, **options) if found is None else found


def _refusing(operator: Any, own: Callable[..., Any]) -> Callable[..., Any]:
    """Makes what compiles a graph of dynamo's fail at once where it would when it traces the gradient of `operator`,
    and as it would: half of the time went into tracing such graphs."""

    def compiled(graph: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        calls = [node for node in graph.graph.nodes if node.target in (operator, operator.overloadpacket)]
        if torch.is_grad_enabled() and any(call.meta["example_value"].requires_grad for call in calls):
            next(aot_autograd.AOT_COUNTER)  # graphs that fail are numbered
            raise DataDependentOutputException(torch.ops.aten._local_scalar_dense.default)
        return own(graph, *args, **options)

    return compiled


# How many views the calls of the loops take of their operands: slices of rows and of the result, an expert's weights,
# and in the backward what they transpose.
_FORWARD_VIEWS, _BACKWARD_VIEWS = 3, 4


def _forward(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(len(rows), weights.shape[2], device=rows.device, dtype=rows.dtype)
    for number in range(_experts(rows, ends)):
        _note(number, _FORWARD_VIEWS, (rows, weights, ends), out)
    return out


def _backward(context: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    (rows, weights), ends = context.saved_tensors, context.offs
    grad_rows, grad_weights = torch.zeros_like(rows), torch.zeros_like(weights)
    rows_first, weights_first = rows.transpose(0, 1), weights.transpose(-2, -1)
    for number in range(_experts(rows, ends)):
        _note(number, _BACKWARD_VIEWS, (grad, weights_first, ends), grad_rows)
        _note(number, _BACKWARD_VIEWS, (rows_first, grad, ends), grad_weights)
    return grad_rows, grad_weights, None


def _experts(rows: torch.Tensor, ends: torch.Tensor) -> int:
    """Reads where the rows of each expert end, for which the host waits once, and returns how many experts have rows;
    for those that have none nothing runs."""
    torch.ops.aten._local_scalar_dense.default(ends[0])
    return min(len(ends), len(rows))


def _note(number: int, views: int, operands: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Tells the recorder that an expert's product is called, and after the first one of the kernels of all."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Recorder) and not mode.is_paused:
            mode.note(ONE_CALL, (), (), f"[{views}]")
            if number == 0:
                mode.note(_GROUPED, operands, [out], _ARGS)
