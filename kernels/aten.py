"""Any other ATen call of a step: made again, exactly as recorded, on random operands.

Element-wise kernels, casts, reductions, the loss, embeddings and optimizers run at speeds that depend on
dtypes, strides and broadcasts; replaying the recorded call measures what the step launches and nothing else.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from flopcast.kernels.shapes import Call, Operand

BACKENDS = ("torch",)
ATTENTION = "flopcast.attention.default"  # what a trace holds in place of torch's SDPA; here torch picks who runs it
FUSED_BACKENDS = ("triton",)  # of the operators of `fused`

_DTYPES = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8,
    "uint8": torch.uint8, "bool": torch.bool, "complex64": torch.complex64, "fp8": torch.float8_e4m3fn,
}  # fmt: skip

# Relative error (norm) allowed against float64, by the coarsest dtype involved: a few units in the last place
# for element-wise calls, with room for sums over thousands of elements.
TOLERANCE = {"fp8": 4e-2, "bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-4, "tf32": 2e-3, "fp64": 1e-10}

# Arguments that must be positive (roots, logarithms, denominators).
_POSITIVE = ("rsqrt", "sqrt", "log", "addcdiv", "reciprocal", "div", "adamw", "adam", "pow")


def _packet(shape: Call) -> str:
    return shape.op.split(".")[1]


def _index_bound(shape: Call) -> int:
    """Exclusive upper bound of the integers that the call looks up, so that every one is valid."""
    name = _packet(shape)
    if name == "embedding_dense_backward":
        return int(json.loads(shape.args)[2])
    if name == "nll_loss_backward":
        return shape.inputs[1].shape[-1]
    if name == "nll_loss_forward":
        return shape.inputs[0].shape[-1]
    if name.startswith("cross_entropy"):
        return next(o.shape[1] for o in shape.inputs if len(o.shape) == 2)
    if name.startswith(("scatter", "gather")):  # beyond it CUDA's assertion ends the process's context
        return shape.inputs[0].shape[int(json.loads(shape.args)[1])]
    return next((o.shape[0] for o in shape.inputs if o.shape and o.dtype.startswith(("fp", "bf"))), 2)


def operands(shape: Call, device: torch.device | str, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Random tensors with the recorded sizes, strides and dtypes: randn; 0.5 to 1.5 if it must be positive.

    A call without operands (a fill) gets one empty tensor, which says the device.
    """
    if not shape.inputs:
        return (torch.empty(0, device=device),)
    generator = torch.Generator(device=device).manual_seed(seed)
    positive = any(word in _packet(shape) for word in _POSITIVE)

    def make(operand: Operand) -> torch.Tensor:
        extent = 1 + sum((size - 1) * step for size, step in zip(operand.shape, operand.stride, strict=True))
        extent = 0 if operand.numel == 0 else extent
        dtype = _DTYPES[operand.dtype]
        if operand.dtype == "bool":
            base = torch.randint(0, 2, (extent,), generator=generator, device=device).to(dtype)
        elif not dtype.is_floating_point:
            base = torch.randint(0, max(1, _index_bound(shape)), (extent,), generator=generator, device=device).to(
                dtype
            )
        elif positive or not operand.shape:
            base = (torch.rand((extent,), generator=generator, device=device) + 0.5).to(dtype)
        else:
            base = torch.randn((extent,), generator=generator, device=device).to(dtype)
        return base.as_strided(operand.shape, operand.stride)

    made = tuple(make(operand) for operand in shape.inputs)
    _make_valid(shape, made, generator)
    return made


def _make_valid(shape: Call, made: Sequence[torch.Tensor], generator: torch.Generator) -> None:
    """Overwrites the operands for which a call assumes what random numbers do not fulfil."""
    name = _packet(shape)
    if name == "_grouped_mm" and len(made) > 2:
        # the ends of the groups along the dimension they share, the last one its size; each chunk of 16 rows is in a
        # random group, as an untrained router deals out tokens
        ends, rows = made[2], made[0].shape[0 if made[1].ndim == 3 else 1]
        chosen = torch.randint(0, len(ends), (rows // 16,), generator=generator, device=ends.device)
        ends.copy_(torch.bincount(chosen, minlength=len(ends)).cumsum(0) * 16)
        ends[-1] = rows
    elif name == "_weight_int4pack_mm":  # all bits, as weights of 4 have them
        made[1].copy_(torch.randint(-(2**31), 2**31, made[1].shape, generator=generator, device=made[1].device))
    elif name == "max_pool2d_with_indices_backward":
        # where in its window each result came from: random places lie in none
        sizes = [value for value in json.loads(shape.args) if not isinstance(value, dict)]
        made[2].copy_(torch.ops.aten.max_pool2d_with_indices(made[1].float(), *sizes)[1])
    elif name == "index_put_" and not _adds(shape):
        # written twice, a place keeps either value: every place at most once, as far as there are places
        for dimension, position in enumerate(_positions(json.loads(shape.args)[1])):
            index = made[position]
            if index.dtype == torch.bool or not index.is_contiguous():
                continue
            bound = made[0].shape[dimension]
            places = torch.randperm(bound, generator=generator, device=index.device)
            count = min(bound, index.numel())
            index.view(-1)[:count] = places[:count]


def _adds(shape: Call) -> bool:
    """Whether an `index_put_` adds up what it writes."""
    arguments = json.loads(shape.args)
    return bool(arguments[3] if len(arguments) > 3 else json.loads(shape.kwargs).get("accumulate", False))


def _positions(value: Any) -> list[int]:
    """The positions of the operands that an argument names."""
    match value:
        case {"t": position}:
            return [position]
        case {"ts": [first, count]}:
            return list(range(first, first + count))
        case list():
            return [position for item in value for position in _positions(item)]
    return []


def _decode(value: Any, tensors: Sequence[torch.Tensor], in_fp64: bool) -> Any:
    match value:
        case {"t": position}:
            return tensors[position]
        case {"ts": [first, count]}:
            return list(tensors[first : first + count])
        case {"rs": [number, count]}:
            return [number] * count
        case {"d": name}:
            dtype = _DTYPES[name]
            return torch.float64 if in_fp64 and dtype.is_floating_point else dtype
        case {"m": name}:
            return getattr(torch, name, None)
        case {"f": text}:
            return float(text)
        case list():
            return [_decode(item, tensors, in_fp64) for item in value]
    return value


def _resolve(op: str) -> Any:
    namespace, name, overload = op.split(".")
    if namespace == "flopcast":
        importlib.import_module("flopcast.kernels.fused")  # registers them
    return getattr(getattr(getattr(torch.ops, namespace), name), overload)


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, mask: torch.Tensor | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:  # fmt: skip
    """torch's SDPA of [batch, heads, tokens, head_dim], keys and values with as many heads as queries or fewer."""
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _bind(shape: Call, tensors: Sequence[torch.Tensor], in_fp64: bool) -> Callable[[], Any]:
    if shape.op == ATTENTION:
        arguments = _decode(json.loads(shape.args), tensors, in_fp64)
        return lambda: _attend(*arguments)
    function = _resolve(shape.op)
    args = _decode(json.loads(shape.args), tensors, in_fp64)
    kwargs = {name: _decode(value, tensors, in_fp64) for name, value in json.loads(shape.kwargs).items()}
    if not shape.inputs and any(a.name == "device" for a in function._schema.arguments):
        kwargs["device"] = tensors[0].device
    if shape.op.startswith("flopcast."):
        from flopcast.kernels.fused import held_call, twin_of

        if in_fp64:
            function = twin_of(shape.op)
        elif (held := held_call(shape.op)) is not None:
            return held(*args, **kwargs)
    return lambda: function(*args, **kwargs)


def prepare(shape: Call, backend: str, operands: Sequence[torch.Tensor]) -> Callable[[], Any]:
    """The call, ready to be made; one in place changes `operands`. Raises ValueError for another backend."""
    valid = FUSED_BACKENDS if shape.op.startswith("flopcast.") and shape.op != ATTENTION else BACKENDS
    if backend not in valid:
        raise ValueError(f"backend {backend!r} of {shape.op}: valid is {valid[0]}")
    return _bind(shape, operands, in_fp64=False)


def reference(operands: Sequence[torch.Tensor], shape: Call) -> list[torch.Tensor]:
    """What the call returns or writes, in float64. Take it before the call, which may write in place."""
    # A fused optimizer takes its step counts, scalars, as fp32 whatever the parameters are: CUDA's kernel reads the
    # first four bytes at their address, which of a float64 are zeros, and divides by 1 - beta^0. A gradient scaler's
    # calls refuse scalars of another dtype.
    if _packet(shape) == "native_dropout":  # what is dropped is drawn anew each time: `check` asks the call's own mask
        return [_upcast(operands[0])]
    if _packet(shape) == "_grouped_mm":  # refuses float64
        return [_grouped_products([_upcast(operand) for operand in operands])]
    if _packet(shape) == "_weight_int4pack_mm":  # its weights, as the kernel itself unpacks them
        rows, packed, scales = operands
        one = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        function = torch.ops.aten._weight_int4pack_mm.default
        return [_upcast(rows) @ _upcast(function(one, packed, json.loads(shape.args)[2], scales))]
    fp32_scalars = _packet(shape).startswith(("_fused_adam", "_amp_"))
    copies = [tensor.clone() if fp32_scalars and tensor.ndim == 0 else _upcast(tensor) for tensor in operands]
    return _results(_bind(shape, copies, in_fp64=True)(), copies, shape)


def _grouped_products(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """`_grouped_mm` group by group: of a[rows, k] and b[groups, k, n] the rows' products, of a[m, k] and b[k, n], or
    a[groups, m, k] and b[k, n], the groups' or columns'."""
    a, b, ends = operands
    limits = [0, *ends.tolist()]
    spans = [slice(*pair) for pair in itertools.pairwise(limits)]
    if a.ndim == 2 and b.ndim == 3:
        return torch.cat([a[span] @ b[i] for i, span in enumerate(spans)])
    if a.ndim == 3:
        return torch.cat([a[i] @ b[:, span] for i, span in enumerate(spans)], dim=1)
    return torch.stack([a[:, span] @ b[span] for span in spans])


def _upcast(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in float64 with the same strides."""
    wide = torch.float64 if tensor.is_floating_point() else tensor.dtype
    extent = (
        1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    return tensor.as_strided((extent,), (1,)).to(wide, copy=True).as_strided(tensor.shape, tensor.stride())


def _results(returned: Any, tensors: Sequence[torch.Tensor], shape: Call) -> list[torch.Tensor]:
    if shape.written:
        return [tensors[i] for i in shape.written]
    found = returned if isinstance(returned, (list, tuple)) else [returned]
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


def check(out: Any, expected: list[torch.Tensor], operands: Sequence[torch.Tensor], shape: Call) -> tuple[float, float]:
    """(relative error in norm of the worst result, tolerance). A NaN gives an infinite error."""
    found = _results(out, operands, shape)
    if _packet(shape) == "native_dropout":
        expected = _kept(found[1], expected[0], float(json.loads(shape.args)[1]))
    elif _packet(shape) == "bernoulli_":  # drawn anew each time, too
        expected = [_drawn(found[0], float(json.loads(shape.args)[1]))]
    names = [o.dtype for o in (*shape.inputs, *shape.outputs) if o.dtype in TOLERANCE]
    tolerance = max((TOLERANCE[name] for name in names), default=0.0)
    worst = 0.0
    for result, want in zip(found, expected, strict=True):
        got = result.double() if result.dtype == torch.float8_e4m3fn else result  # which nothing is compared with
        difference = (got.double() - want.double()).where(got != want, 0.0)  # infinities that are equal are right
        scale = float(want.double().where(want.isfinite(), 0.0).norm())
        error = float(difference.norm())
        relative = error / scale if scale > 0 else error
        worst = max(worst, relative) if relative == relative else float("inf")
    return worst, tolerance


# Deviations of the binomial distribution that the share of what is drawn may be off: one in 10^9 by chance.
SHARE_DEVIATIONS = 6.0


def _kept(mask: torch.Tensor, wide: torch.Tensor, dropped: float) -> list[torch.Tensor]:
    """[the result of a dropout with this mask, the mask]; the result is NaN if the mask keeps another share of the
    elements than it should."""
    scale = 1.0 / (1.0 - dropped) if _has_share(mask, 1.0 - dropped) else float("nan")
    return [wide * mask * scale, mask]


def _drawn(result: torch.Tensor, probability: float) -> torch.Tensor:
    """What was drawn, made zeros and ones; NaN if there are not as many ones as there should be."""
    ones = (result != 0).to(result.dtype)
    return ones if _has_share(ones, probability) else ones * float("nan")


def _has_share(ones: torch.Tensor, probability: float) -> bool:
    deviation = (probability * (1.0 - probability) / max(ones.numel(), 1)) ** 0.5
    off = abs(float(ones.double().mean()) - probability) if ones.numel() else 0.0
    return bool(off <= SHARE_DEVIATIONS * deviation)
