"""Counts FLOPs by the rule of thumb 6N: of each parameter, for each token, two in the forward and four in the backward.

Two corrections make it the work that a step is asked to do:

- a frozen parameter has no gradient of its own: it counts two in the forward and two in the backward where a gradient
  passes through it on the way to what is trained (some layer below it), none where nothing does;
- of experts those count that a token is sent through: of a bank of matrices the share that its products multiply. Where
  one compiled layer stands for several, their banks share what its products multiply.

Lookups count as products, as the rule has it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from flopcast.kernels.shapes import DTYPE_BYTES
from flopcast.roofline.stream.compiled.generated_kernel import NAMESPACE
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.ops.op_stream import Op, Stream, packet
from flopcast.roofline.stream.ops.to_micro_batches import times_run

# Calls whose result is their operand again, in another dtype or place: what autocast makes of a parameter.
_COPIES = ("aten._to_copy", "aten.clone", "aten.contiguous")
# Products of one matrix per expert.
_PACKED = {"uint8": 2, "int32": 8}  # weights of 4 bits in a number
_BANKED = ("aten._grouped_mm", "aten.bmm", "aten.baddbmm")


@dataclass(frozen=True)
class Parameters:
    """How many parameters a step trains, how many a token passes (`active`), and FLOPs of the step by 6N."""

    trained: int
    active: int
    flops_6n: int


@dataclass
class _Use:
    """What a step does with one parameter. `product_flops`: of the forward's products of a bank of matrices."""

    numel: int
    in_forward: bool = False
    in_backward: bool = False
    product_flops: int = 0


def count_parameters(stream: Stream, tokens: int) -> Parameters:
    """Counts the parameters of a step of `tokens` tokens. Trained is what the step writes; of one that writes no
    parameter, as one without an optimizer, all."""
    parameters = {i for i, storage in enumerate(stream.storages) if storage.kind == "parameter"}
    written = {stream.tensors[op.inputs[i]].storage for op in stream.ops for i in op.written} & parameters
    frozen = parameters - written if written else set()
    banks = {ref.storage for ref in stream.tensors if len(ref.operand.shape) == 3} & parameters
    n_params = stream.n_params
    is_inference = all(op.phase == "forward" for op in stream.ops) and not stream.meta.get("forward_only")
    if is_inference:  # two for what a token passes
        uses = _uses(stream, banks)
        active = n_params - sum(use.numel for use in uses.values()) + sum(_active(uses, banks, tokens).values())
        return Parameters(0, active, 2 * active * tokens)
    if not frozen and not banks:
        return Parameters(n_params, n_params, 6 * n_params * tokens)
    uses = _uses(stream, frozen | banks)
    if stream.meta.get("graphs"):
        _as_their_like(stream, uses, frozen, written)
    passed = _active(uses, banks, tokens)
    lacking = 0  # of 6 FLOPs for each parameter and token
    for storage, use in uses.items():
        each = 6 if storage not in frozen else 2 * use.in_forward + 2 * use.in_backward
        lacking += 6 * use.numel - each * passed[storage]
    return Parameters(
        trained=n_params - sum(uses[storage].numel for storage in frozen),
        active=n_params - sum(use.numel - passed[storage] for storage, use in uses.items()),
        flops_6n=(6 * n_params - lacking) * tokens,
    )


def _active(uses: Mapping[int, _Use], banks: Container[int], tokens: int) -> dict[int, int]:
    """By storage the parameters that a token passes: all, but of a bank those that products multiply. Banks that no
    forward reads are of layers that a compiled one stands for: with those of their size that products multiply they
    share these products."""
    alike: dict[int, list[int]] = defaultdict(list)
    for storage, use in uses.items():
        if storage in banks and (use.product_flops or not use.in_forward):
            alike[use.numel].append(storage)
    active = {storage: use.numel for storage, use in uses.items()}
    for numel, storages in alike.items():
        if flops := sum(uses[storage].product_flops for storage in storages):
            active.update(dict.fromkeys(storages, min(numel, round(flops / (2 * tokens * len(storages))))))
    return active


def _uses(stream: Stream, parameters: set[int]) -> dict[int, _Use]:
    """Returns what the step does with each of these storages, through casts and views as well."""
    own = [ref for ref in stream.tensors if ref.storage in parameters]
    own.sort(key=lambda ref: (len(ref.operand.shape), DTYPE_BYTES[ref.operand.dtype]))  # generated kernels read bytes
    dtypes = {ref.storage: ref.operand.dtype for ref in own}
    uses = {storage: _Use(_held(stream.storages[storage].bytes, dtypes.get(storage, "fp32"))) for storage in parameters}
    stands_for = {storage: storage for storage in parameters}
    for op, times in zip(stream.ops, times_run(stream), strict=True):
        if op.kind == "view" or op.phase == "optimizer":
            continue
        copied = None
        for index in op.inputs:
            ref = stream.tensors[index]
            owner = stands_for.get(ref.storage)
            if owner is None:
                continue
            if _is_copy(op):
                copied = owner
            elif not op.is_recomputed:
                use = uses[owner]
                use.in_forward |= op.phase == "forward"
                use.in_backward |= op.phase == "backward"
                if op.phase == "forward" and len(ref.operand.shape) == 3 and packet(op.name) in _BANKED:
                    use.product_flops += _flops(stream, op) * times
        for made in {stream.tensors[index].storage for index in op.outputs} - parameters:
            if copied is None:
                stands_for.pop(made, None)  # generated code uses memory again
            else:
                stands_for[made] = copied
    return uses


def _as_their_like(stream: Stream, uses: dict[int, _Use], frozen: set[int], written: set[int]) -> None:
    """Corrects, of a compiled step, what is known of frozen parameters. Generated kernels read bytes, so that their
    number is what the written ones leave of all. One that nothing reads is of a layer that a compiled one stands for,
    and is used as another of its size."""
    of_written = sum(use.numel for use in _uses(stream, written).values())
    bytes_frozen = sum(stream.storages[storage].bytes for storage in frozen)
    known = {stream.storages[i].bytes: uses[i] for i in frozen if uses[i].in_forward or uses[i].in_backward}
    for storage in frozen:
        size = stream.storages[storage].bytes
        use = uses[storage]
        alike = use if use.in_forward or use.in_backward else known.get(size, use)
        uses[storage] = replace(alike, numel=round(size * (stream.n_params - of_written) / bytes_frozen))


def _is_copy(op: Op) -> bool:
    """Whether a call makes its operand again: one of these, or a generated kernel that reads nothing else."""
    return packet(op.name) in _COPIES or (op.name.startswith(f"{NAMESPACE}.") and len(op.inputs) == 1)


def _held(size: int, dtype: str) -> int:
    """How many parameters of the model so many bytes hold."""
    return size // DTYPE_BYTES[dtype] * _PACKED.get(dtype, 1)


def _flops(stream: Stream, op: Op) -> int:
    lowered = lower(stream, op)
    return 0 if lowered is None else describe(*lowered).flops
