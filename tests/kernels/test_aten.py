"""Recorded calls are made again right, and a wrong result is caught."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

from flopcast.kernels import aten
from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.gpu import suites
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import KernelKind
from studies.suites.beside import attention_of_one, product_of_4_bits

Replayed = tuple[Call, tuple[torch.Tensor, ...], list[torch.Tensor], Any]


def smallest_of_each_kind() -> list[Call]:
    """One call of each variant that the processor's suite measures, the smallest."""
    kinds: dict[KernelKind, Call] = {}
    for case in suites.load("cpu-quick"):
        if isinstance(case.shape, Call):
            work = describe(case.shape)
            known = kinds.get(KernelKind(work.op_class, work.variant))
            if known is None or case.shape.bytes < known.bytes:
                kinds[KernelKind(work.op_class, work.variant)] = case.shape
    return list(kinds.values())


CALLS = smallest_of_each_kind()


def replay(call: Call, seed: int = 0) -> Replayed:
    operands = aten.operands(call, "cpu", seed)
    expected = aten.reference(operands, call)
    return call, operands, expected, aten.prepare(call, "torch", operands)()


def name_of(call: Call) -> str:
    return str(describe(call).variant)


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_every_kind_of_call_is_right(call: Call) -> None:
    call, operands, expected, out = replay(call)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance
    assert expected or not (call.outputs or call.written)


@pytest.mark.parametrize("call", CALLS, ids=name_of)
def test_a_wrong_result_is_caught(call: Call) -> None:
    """All results 10% off, or one truth value turned."""
    call, operands, expected, out = replay(call)
    results = (
        [operands[i] for i in call.written] if call.written else [out] if isinstance(out, torch.Tensor) else list(out)
    )
    wrong = [t for t in results if isinstance(t, torch.Tensor) and t.numel()]
    for tensor in wrong:
        if tensor.is_floating_point() and tensor.count_nonzero():
            tensor.mul_(1.1)
        elif tensor.dtype == torch.bool:
            tensor.logical_not_()
        else:
            tensor.add_(1)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error > tolerance


def contiguous(*shape: int, dtype: str = "fp32") -> Operand:
    return Operand(shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype)


def test_a_nan_is_caught() -> None:
    call = Call("aten.neg.default", (contiguous(8),), (contiguous(8),), '[{"t":0}]')
    call, operands, expected, out = replay(call)
    out[3] = float("nan")
    assert aten.check(out, expected, operands, call)[0] == float("inf")


@pytest.mark.parametrize("stride", [(16, 1), (1, 8), (0, 1), (40, 2)])
def test_strides_are_as_recorded(stride: tuple[int, int]) -> None:
    operand = Operand((8, 16), stride, "bf16")
    call = Call("aten.neg.default", (operand,), (contiguous(8, 16, dtype="bf16"),), '[{"t":0}]')
    (tensor,) = aten.operands(call, "cpu")
    assert (tuple(tensor.shape), tensor.stride(), tensor.dtype) == ((8, 16), stride, torch.bfloat16)
    call, operands, expected, out = replay(call)
    assert aten.check(out, expected, operands, call)[0] == 0  # negation is exact


def test_operands_depend_on_the_seed_alone() -> None:
    call = Call("aten.mul.Tensor", (contiguous(64), contiguous(64)), (contiguous(64),), '[{"t":0},{"t":1}]')
    first, again, other = (aten.operands(call, "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("op", ["aten.rsqrt.default", "aten.log.default", "aten.reciprocal.default"])
def test_roots_and_logarithms_get_what_they_can_take(op: str) -> None:
    call, operands, expected, out = replay(Call(op, (contiguous(1000),), (contiguous(1000),), '[{"t":0}]'))
    assert torch.isfinite(out).all()
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance


def test_look_ups_stay_inside_the_table() -> None:
    table, ids = contiguous(10, 4), contiguous(3, 5, dtype="int64")
    call = Call("aten.embedding.default", (table, ids), (contiguous(3, 5, 4),), '[{"t":0},{"t":1}]')
    call, operands, expected, out = replay(call)
    assert int(operands[1].max()) < 10
    assert aten.check(out, expected, operands, call)[0] == 0


def test_gradients_of_a_table_go_to_its_rows() -> None:
    gradient, ids = contiguous(3, 5, 4), contiguous(3, 5, dtype="int64")
    args = '[{"t":0},{"t":1},10,-1,false]'
    call = Call("aten.embedding_dense_backward.default", (gradient, ids), (contiguous(10, 4),), args)
    call, operands, expected, out = replay(call)
    assert 0 <= int(operands[1].min()) <= int(operands[1].max()) < 10
    assert float(out.sum()) == pytest.approx(float(operands[0].sum()), rel=1e-4)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance


ADAMW = {
    "lr": 0.001,
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "eps": 1e-8,
    "amsgrad": False,
    "maximize": False,
}


def fused_adamw(sizes: list[int]) -> Call:
    count = len(sizes)
    tensors = [contiguous(size) for _ in range(4) for size in sizes]
    steps = [contiguous() for _ in sizes]
    lists = [{"ts": [i * count, count]} for i in range(4)]
    return Call(
        "aten._fused_adamw_.default",
        (*tensors, *steps),
        (),
        json.dumps([*lists, [], {"ts": [4 * count, count]}]),
        json.dumps(ADAMW),
        written=tuple(range(4 * count)),
    )


def test_attention_of_one_token_is_torch_s_own() -> None:
    """A trace holds a stand-in for SDPA: over a cache of fewer heads it runs, and rightly."""
    call = attention_of_one(2, 6, 3, 33, 16)
    _, operands, expected, out = replay(call)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance
    assert out.shape == (2, 6, 1, 16)
    query, key, value = (x.double() for x in operands)
    scores = query @ key.repeat_interleave(2, 1).mT / 4
    torch.testing.assert_close(expected[0], scores.softmax(-1) @ value.repeat_interleave(2, 1))


def test_a_gradient_scalers_calls_keep_their_scalars_in_fp32() -> None:
    """CUDA's kernels refuse them in another dtype, the reference's too."""
    scalar = Operand((), (), "fp32")
    call = Call(
        "aten._amp_update_scale_.default", (scalar, Operand((), (), "int32"), scalar), (),
        args='[{"t":0},{"t":1},{"t":2},2.0,0.5,2000]', written=(0, 1),
    )  # fmt: skip
    made = aten.operands(call, "cpu")
    expected = aten.reference(made, call)
    assert expected[0].dtype == torch.float32
    error, tolerance = aten.check(aten.prepare(call, "torch", made)(), expected, made, call)
    assert error <= tolerance


def test_fused_adamw_is_adamw() -> None:
    """Against torch.optim's own loop over tensors, from the same moments and step counts."""
    call = fused_adamw([1000, 37])
    operands = aten.operands(call, "cpu")
    expected = aten.reference(operands, call)
    before = [tensor.clone() for tensor in operands]
    out = aten.prepare(call, "torch", operands)()
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance
    for i in range(2):
        parameter, gradient, mean, square, step = (before[j * 2 + i].clone() for j in range(5))
        weight = torch.nn.Parameter(parameter)
        weight.grad = gradient
        adamw = torch.optim.AdamW([weight], lr=0.001, weight_decay=0.01, foreach=False)
        adamw.state[weight] = {"step": step - 1, "exp_avg": mean, "exp_avg_sq": square}  # the loop counts first
        adamw.step()
        assert torch.allclose(operands[i], weight.detach(), rtol=1e-5)


def test_multi_tensor_calls_write_in_place() -> None:
    call = Call("aten._foreach_add_.Scalar", (contiguous(8), contiguous(9)), (), '[{"ts":[0,2]},2.5]', written=(0, 1))
    operands = aten.operands(call, "cpu")
    before = [tensor.clone() for tensor in operands]
    expected = aten.reference(operands, call)
    assert all(torch.equal(a, b) for a, b in zip(operands, before, strict=True))  # the reference left them alone
    out = aten.prepare(call, "torch", operands)()
    assert all(torch.equal(a, b + 2.5) for a, b in zip(operands, before, strict=True))
    assert aten.check(out, expected, operands, call)[0] < 1e-7


def test_calls_without_operands_run_on_the_device_asked_for() -> None:
    call = Call("aten.arange.default", (), (contiguous(7, dtype="int64"),), "[7]")
    call, operands, expected, out = replay(call)
    assert out.tolist() == list(range(7))
    assert out.device == operands[0].device
    assert aten.check(out, expected, operands, call)[0] == 0


def test_another_backend_is_refused() -> None:
    call = Call("aten.neg.default", (contiguous(8),), (contiguous(8),), '[{"t":0}]')
    with pytest.raises(ValueError, match=r"backend 'triton' of aten\.neg\.default: valid is torch"):
        aten.prepare(call, "triton", aten.operands(call, "cpu"))


def test_decoded_arguments() -> None:
    checks: list[tuple[str, Callable[[Any], bool]]] = [
        ('[{"t":0},{"f":"-inf"}]', lambda out: bool((out == float("-inf")).all())),
        ('[{"t":0},2]', lambda out: bool((out == 2).all())),
    ]
    for args, holds in checks:
        call = Call("aten.full_like.default", (contiguous(4),), (contiguous(4),), args)
        assert holds(aten.prepare(call, "torch", aten.operands(call, "cpu"))())
    cast = Call(
        "aten._to_copy.default", (contiguous(4),), (contiguous(4, dtype="bf16"),), '[{"t":0}]', '{"dtype":{"d":"bf16"}}'
    )
    assert aten.prepare(cast, "torch", aten.operands(cast, "cpu"))().dtype == torch.bfloat16


def dropout(dtype: str = "fp32", share: float = 0.1) -> Call:
    operand = contiguous(64, 512, dtype=dtype)
    return Call(
        "aten.native_dropout.default",
        (operand,),
        (operand, contiguous(64, 512, dtype="bool")),
        f'[{{"t":0}},{share},true]',
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_dropout_is_held_against_its_own_mask(dtype: str) -> None:
    call, operands, expected, (out, mask) = replay(dropout(dtype))
    error, tolerance = aten.check((out, mask), expected, operands, call)
    assert error <= tolerance
    assert aten.check((operands[0], mask), expected, operands, call)[0] > tolerance, "not scaled"
    assert aten.check((out, mask.logical_not()), expected, operands, call)[0] > tolerance
    all_kept = operands[0] / 0.9, torch.ones_like(mask)
    assert not aten.check(all_kept, expected, operands, call)[0] <= tolerance, "nothing was dropped"


def test_a_draw_is_held_against_its_probability() -> None:
    rows = contiguous(64, 512, dtype="bf16")
    call = Call("aten.bernoulli_.float", (rows,), (), '[{"t":0},0.8]', written=(0,))
    call, operands, expected, out = replay(call)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance
    operands[0].mul_(2)
    assert aten.check(out, expected, operands, call)[0] > tolerance, "neither zeros nor ones"
    operands[0].fill_(1)
    assert not aten.check(out, expected, operands, call)[0] <= tolerance, "all ones"


def grouped(a: Operand, b: Operand, out: Operand) -> Call:
    ends = contiguous(b.shape[0] if len(b.shape) == 3 else out.shape[0], dtype="int32")
    return Call("aten._grouped_mm.default", (a, b, ends), (out,), '[{"t":0},{"t":1},{"t":2}]')


GROUPED = {
    "forward": grouped(contiguous(160, 32), contiguous(5, 32, 48), contiguous(160, 48)),
    "of weights": grouped(Operand((32, 160), (1, 32), "fp32"), contiguous(160, 48), contiguous(5, 32, 48)),
    "in bf16": grouped(
        contiguous(160, 32, dtype="bf16"),
        Operand((5, 32, 48), (1536, 1, 32), "bf16"),
        contiguous(160, 48, dtype="bf16"),
    ),
}


def test_groups_are_as_even_as_a_router_makes_them() -> None:
    """Rows cut anywhere leave one group several times the mean, and its product is most of the call."""
    call = grouped(contiguous(16_384, 8), contiguous(32, 8, 8), contiguous(16_384, 8))
    ends = aten.operands(call, "cpu")[2]
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert sizes.sum() == 16_384
    assert 512 < sizes.max() <= 2 * 512


@pytest.mark.parametrize("call", GROUPED.values(), ids=GROUPED)
def test_grouped_products_have_valid_groups_and_are_right(call: Call) -> None:
    call, operands, expected, out = replay(call)
    ends = operands[2].tolist()
    assert ends == sorted(ends)
    assert (ends[0] >= 0, ends[-1]) == (True, 160)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance
    out[0] *= 1.5
    assert aten.check(out, expected, operands, call)[0] > tolerance


def test_infinities_are_right_where_they_belong() -> None:
    call = Call("aten.scalar_tensor.default", (), (contiguous(),), '[{"f":"-inf"}]', '{"dtype":{"d":"fp32"}}')
    call, operands, expected, out = replay(call)
    assert aten.check(out, expected, operands, call)[0] == 0
    for wrong in (float("inf"), 1.0):
        assert aten.check(torch.tensor(wrong), expected, operands, call)[0] == float("inf")


def test_places_are_written_once_unless_values_add_up() -> None:
    numbers = contiguous(512, dtype="int64")
    arguments = '[{"t":0},{"ts":[1,1]},{"t":2}]'
    put = Call("aten.index_put_.default", (numbers, numbers, numbers), (numbers,), arguments, written=(0,))
    call, operands, expected, out = replay(put)
    assert sorted(operands[1].tolist()) == list(range(512))
    assert aten.check(out, expected, operands, call)[0] == 0
    adds = replace(put, args=arguments[:-1] + ",true]")
    call, operands, expected, out = replay(adds)
    assert len(set(operands[1].tolist())) < 512
    assert aten.check(out, expected, operands, call)[0] == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_of_a_pooling_go_where_its_maxima_were(dtype: str) -> None:
    image, pooled = contiguous(2, 3, 12, 12, dtype=dtype), contiguous(2, 3, 6, 6, dtype=dtype)
    call = Call(
        "aten.max_pool2d_with_indices_backward.default",
        (pooled, image, replace(pooled, dtype="int64")),
        (image,),
        '[{"t":0},{"t":1},[3,3],[2,2],[1,1],[1,1],false,{"t":2}]',
    )
    call, operands, expected, out = replay(call)
    maxima = torch.nn.functional.max_pool2d(operands[1].float(), 3, 2, 1)
    at = operands[1].float().flatten(2).gather(2, operands[2].flatten(2)).view_as(maxima)
    assert torch.equal(at, maxima)
    error, tolerance = aten.check(out, expected, operands, call)
    assert error <= tolerance


def test_a_product_of_4_bits_is_checked_by_the_weights_that_it_unpacks() -> None:
    """On CUDA alone torch has the kernel: one stands in that takes numbers of 4 bits as they lie."""

    def unpacked(rows: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
        n, k = scales.shape[1], rows.shape[1]
        numbers = torch.stack([packed.reshape(n, -1) >> 4 * i & 15 for i in range(8)], 2).reshape(n, k)
        scale, zero = scales.transpose(0, 1).repeat_interleave(group, 1).unbind(2)
        return rows @ ((numbers - 8) * scale + zero).to(rows.dtype).t()

    call = product_of_4_bits(5, 64, 256)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_weight_int4pack_mm", unpacked, "CPU")
        call, operands, expected, out = replay(call)
        assert len(operands[1].unique()) > operands[1].numel() // 2, "random bits, not small numbers"
        error, tolerance = aten.check(out, expected, operands, call)
        assert error <= tolerance
        wrong, _ = aten.check(out * 1.1, expected, operands, call)
        assert wrong > tolerance


def test_casts_to_e4m3_and_from_int8_are_right() -> None:
    for source, target in (("bf16", "fp8"), ("int8", "bf16")):
        operand = Operand((64, 96), (96, 1), source)
        call = Call(
            "aten._to_copy.default", (operand,), (replace(operand, dtype=target),), '[{"t":0}]',
            f'{{"dtype":{{"d":"{target}"}}}}',
        )  # fmt: skip
        call, operands, expected, out = replay(call)
        error, tolerance = aten.check(out, expected, operands, call)
        assert error <= tolerance
