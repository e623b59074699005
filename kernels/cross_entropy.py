"""Cross-entropy over a large vocabulary: torch, torch.compile and Triton kernels that never widen all logits.

    loss = mean over rows not ignored of log-sum-exp(logits[row]) - logits[row, target[row]]

There are three directions: "fwd" makes the loss alone; "bwd" the gradient, from the logits and the saved log-sum-exp;
"both" makes loss and gradient in one kernel, which reads the logits from memory once where fwd and bwd read them twice.
`cross_entropy` uses "both" in training: the gradient is made for an upstream gradient of 1 and, where the upstream one
turns out to be another, scaled in place on the device, without waiting for it. `linear_cross_entropy` takes the last
hidden states and the output matrix, and holds the logits of some rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling
from torch.utils.flop_counter import register_flop_formula

from flopcast.kernels.cross_entropy_config import WHOLE_ROWS as WHOLE_ROWS
from flopcast.kernels.cross_entropy_config import VocabConfig as VocabConfig
from flopcast.kernels.cross_entropy_config import candidates as candidates
from flopcast.kernels.cross_entropy_config import config_for as config_for
from flopcast.kernels.cross_entropy_launch import IGNORE_INDEX as IGNORE_INDEX
from flopcast.kernels.cross_entropy_launch import backward as backward
from flopcast.kernels.cross_entropy_launch import forward as forward
from flopcast.kernels.cross_entropy_launch import linear_loss_and_gradients
from flopcast.kernels.cross_entropy_launch import loss_and_gradient as loss_and_gradient
from flopcast.kernels.launching import Replayed
from flopcast.kernels.operators import operator, unobserved
from flopcast.kernels.references import require_known, torch_dtype, worst
from flopcast.kernels.rowwise import BACKENDS, Outputs, autocast_dtype, compiled_function, load_triton, multiprocessors
from flopcast.kernels.shapes import CrossEntropy

CHUNK_ROWS = 4096  # of linear_cross_entropy: 1.2 GB of bf16 logits over a vocabulary of 151,936


# --- Registration ---


@operator("flopcast::cross_entropy")
def cross_entropy_op(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor, Tensor]:
    return forward(logits, target, ignore_index, reduction)


@operator("flopcast::cross_entropy_backward")
def cross_entropy_backward_op(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, ignore_index: int
) -> Tensor:
    return backward(dloss, logits, target, lse, count, ignore_index)


@operator("flopcast::cross_entropy_with_gradient")
def cross_entropy_with_gradient_op(
    logits: Tensor, target: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor, Tensor]:
    return loss_and_gradient(logits, target, ignore_index, reduction)


@operator("flopcast::linear_cross_entropy")
def linear_cross_entropy_op(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduction: str, chunk_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    return linear_loss_and_gradients(hidden, weight, target, ignore_index, reduction, chunk_rows)


@torch.library.custom_op("flopcast::scale_", mutates_args=("x",))
def scale_op(x: Tensor, factor: Tensor) -> None:
    """x *= factor, a tensor of one number; nothing is read or written when that is 1."""
    module = load_triton("cross_entropy", x)
    if x.numel():
        module.scale(x, factor.contiguous(), 4 * multiprocessors(x.device))


_scale = Replayed(scale_op._init_fn)


def _scale_in_place(x: Tensor, factor: Tensor) -> None:
    """`scale_op`, directly where nothing but autograd looks on."""
    if is_dynamo_compiling() or not (unobserved() and _scale.plain(x, factor)):
        scale_op(x, factor)
    else:
        _scale.of_plain(x, factor)
        increment_version(x)


@cross_entropy_op.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    kind = torch.float32
    return (
        logits.new_empty((), dtype=kind),
        logits.new_empty(logits.shape[:1], dtype=kind),
        logits.new_empty((1,), dtype=kind),
    )


@cross_entropy_backward_op.register_fake
def _(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, ignore_index: int) -> Tensor:
    return logits.new_empty(logits.shape)


@cross_entropy_with_gradient_op.register_fake
def _(logits: Tensor, target: Tensor, ignore_index: int, reduction: str) -> tuple[Tensor, Tensor]:
    return logits.new_empty((), dtype=torch.float32), logits.new_empty(logits.shape)


@linear_cross_entropy_op.register_fake
def _(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduction: str, chunk_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    return loss, hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


@scale_op.register_fake
def _(x: Tensor, factor: Tensor) -> None:
    return None


@register_flop_formula(torch.ops.flopcast.linear_cross_entropy)
def _linear_flops(hidden: Any, weight: Any, *args: Any, **kwargs: Any) -> int:
    """Three products: logits and both gradients, all made in the forward."""
    return int(3 * 2 * hidden[0] * hidden[1] * weight[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, target, ctx.ignore_index, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, target, *output[1:])


def _gradient(ctx: Any, dloss: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return None, None, None, None
    return cross_entropy_backward_op(dloss, *ctx.saved_tensors, ctx.ignore_index), None, None, None


def _save_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.rest = len(inputs) - len(output) + 1
    ctx.set_materialize_grads(False)  # else the gradient's own is filled with zeros: 300 MB per 1,024 tokens
    ctx.save_for_backward(*output[1:])


def _scaled_gradients(ctx: Any, dloss: Tensor | None, *unused: Any) -> tuple[Tensor | None, ...]:
    """The saved gradients times dloss, scaled in place: torch's version check refuses a second backward of the graph.

    Under torch.compile they are scaled out of place, because its partitioner takes no writes to what the forward saved.
    """
    gradients = ctx.saved_tensors
    if dloss is None:
        return (*[None] * len(gradients), *[None] * ctx.rest)
    if isinstance(dloss, FunctionalTensor):
        return (*((gradient * dloss).to(gradient.dtype) for gradient in gradients), *[None] * ctx.rest)
    for gradient in gradients:
        _scale_in_place(gradient, dloss)
    return (*gradients, *[None] * ctx.rest)


cross_entropy_op.register_autograd(_gradient, setup_context=_save)
cross_entropy_with_gradient_op.register_autograd(_scaled_gradients, setup_context=_save_gradients)
linear_cross_entropy_op.register_autograd(_scaled_gradients, setup_context=_save_gradients)


def cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
    *, gradient_at_forward: bool = True,
) -> Tensor:  # fmt: skip
    """Differentiable Triton cross-entropy, an fp32 scalar, of logits [rows, vocab] and target [rows]; `reduction` is
    "mean" or "sum".

    With `gradient_at_forward` the gradient is made together with the loss, which saves one read of the logits; the
    backward may then run once. Without it, and always under torch.compile, the backward makes the gradient from the
    saved log-sum-exp.
    """
    wanted = gradient_at_forward and torch.is_grad_enabled() and logits.requires_grad
    if wanted and not torch.compiler.is_compiling():
        loss: Tensor = cross_entropy_with_gradient_op(logits, target, ignore_index, reduction)[0]
    else:
        loss = cross_entropy_op(logits, target, ignore_index, reduction)[0]
    return loss


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
    chunk_rows: int = CHUNK_ROWS,
) -> Tensor:  # fmt: skip
    """Differentiable cross-entropy, an fp32 scalar, of the logits hidden [rows, k] @ weight[vocab, k]^T.

    The logits of at most `chunk_rows` rows exist at a time. Both gradients are made in the forward; the backward may
    run once. Under autocast the operands are cast as those of a linear layer.
    """
    dtype = autocast_dtype(hidden)
    if dtype is not None:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    loss: Tensor = linear_cross_entropy_op(hidden, weight, target, ignore_index, reduction, chunk_rows)[0]
    return loss


# --- torch twin and the benchmark interface ---


def cross_entropy_torch(logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """The loss as transformers' ForCausalLMLoss computes it, from an fp32 copy of all logits."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, target, ignore_index=ignore_index)


def operands(shape: CrossEntropy, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """(standard-normal logits [rows, vocab]; random target [rows], of which every 16th is ignored). Raises ValueError
    on sizes below 1 and on an unknown direction."""
    if min(shape.rows, shape.vocab) < 1:
        raise ValueError(f"{shape.key}: rows and vocab must be at least 1")
    require_known("direction", shape.direction, ("fwd", "bwd", "both"))
    generator = torch.Generator(device=device).manual_seed(seed)
    logits = torch.randn((shape.rows, shape.vocab), dtype=torch_dtype(shape.dtype), device=device, generator=generator)
    target = torch.randint(0, shape.vocab, (shape.rows,), device=device, generator=generator)
    target[15::16] = IGNORE_INDEX
    return logits, target


def prepare(shape: CrossEntropy, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call that runs one direction once: (loss,), (gradient,) or (loss, gradient). Errors as `rmsnorm.prepare`."""
    require_known("cross-entropy backend", backend, BACKENDS)
    if backend == "triton":
        return triton_call(shape, operands, None)
    logits, target = operands
    run = compiled_function(cross_entropy_torch) if backend == "compile" else cross_entropy_torch
    if shape.direction == "fwd":

        def loss() -> Outputs:
            with torch.no_grad():
                return (run(logits, target),)

        return loss
    leaf = logits.detach().requires_grad_()
    if shape.direction == "bwd":
        saved = run(leaf, target)
        one = torch.ones_like(saved)
        return lambda: torch.autograd.grad(saved, leaf, one, retain_graph=True)

    def both() -> Outputs:
        value = run(leaf, target)
        return value.detach(), *torch.autograd.grad(value, leaf)

    return both


def triton_call(shape: CrossEntropy, operands: Sequence[Tensor], config: VocabConfig | None) -> Callable[[], Outputs]:
    """As `prepare` for backend triton, with the given configuration (None: the default one)."""
    logits, target = operands
    if shape.direction == "both":
        return lambda: loss_and_gradient(logits, target, config=config)
    if shape.direction == "fwd":
        return lambda: (forward(logits, target, config=config)[0],)
    loss, lse, count = forward(logits, target)
    one = torch.ones_like(loss)
    return lambda: (backward(one, logits, target, lse, count, config=config),)


def _by_definition(operands: Sequence[Tensor], shape: CrossEntropy, rounded: bool) -> Outputs:
    """What `prepare`'s call returns, by the definition, a block of rows at a time.

    Computed in fp64 for fp32 logits and in fp32 for 16-bit ones; `rounded` rounds as torch's twin does, which computes
    in fp32 and returns the gradient in the logits' dtype.
    """
    logits, target = operands
    wide = torch.float32 if rounded or logits.dtype != torch.float32 else torch.float64
    count = (target != IGNORE_INDEX).sum()
    loss = torch.zeros((), dtype=torch.float64, device=logits.device)
    gradient = torch.empty(logits.shape, dtype=logits.dtype if rounded else wide, device=logits.device)
    rows = max(1, (1 << 28) // shape.vocab)
    for start in range(0, shape.rows, rows):
        part, of_part = logits[start : start + rows].to(wide), target[start : start + rows]
        kept = of_part != IGNORE_INDEX
        at = of_part.clamp(min=0)[:, None]
        log_p = torch.log_softmax(part, -1)
        loss += -(log_p.gather(1, at)[:, 0] * kept).sum()
        p = log_p.exp_()
        p.scatter_add_(1, at, -torch.ones_like(at, dtype=wide))
        gradient[start : start + rows] = p * (kept / count.to(wide))[:, None]
    loss = (loss / count).to(wide)
    return {"fwd": (loss,), "bwd": (gradient,), "both": (loss, gradient)}[shape.direction]


def reference(operands: Sequence[Tensor], shape: CrossEntropy) -> Outputs:
    """By the definition, in fp64 for fp32 logits, in fp32 for 16-bit ones; holds rows x vocab elements of it."""
    return _by_definition(operands, shape, rounded=False)


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: CrossEntropy) -> tuple[float, float]:
    """(relative error, tolerance) of the worst output, by `references.worst`.

    Most elements of the gradient are 1/vocab of its largest, so all but those of the targets are checked once more
    against their own size.
    """
    error, tolerance = worst(out, ref, _by_definition(operands, shape, rounded=True))
    if shape.direction == "fwd" or not error <= tolerance:
        return error, tolerance
    target = operands[1].clamp(min=0)[:, None]
    got, want = (g[-1].clone().scatter_(1, target, 0.0) for g in (out, ref))
    return max((error, tolerance), worst((got,), (want,), (want.to(got.dtype),)), key=lambda pair: pair[0] / pair[1])
