"""Calls made longer, shorter or deeper than recorded: the same kernel, and a call that torch can make."""

import json
from functools import cache

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flopcast.kernels import aten
from flopcast.kernels.shapes import Call, Operand
from flopcast.roofline.gpu import suites
from flopcast.roofline.stream.lowering.describe import describe
from studies.suites.calls import PLANS, call_cases, deepened, made_from, scaled, spread

shipped = cache(suites.load)  # read once for all tests


def rows(*shape: int, dtype: str = "fp32") -> Operand:
    stride = [1]
    for size in reversed(shape[1:]):
        stride.insert(0, stride[0] * size)
    return Operand(shape, tuple(stride), dtype)


MEAN = Call("aten.mean.dim", (rows(4, 256, 1024),), (rows(4, 256, 1),), '[{"t":0},[-1],true]')
LOOKUP = Call(
    "aten.embedding.default",
    (rows(151936, 1024), rows(4, 256, dtype="int64")),
    (rows(4, 256, 1024),),
    '[{"t":0},{"t":1}]',
)


def test_a_call_is_made_longer_along_its_leading_dimension() -> None:
    found = scaled(MEAN, 3, 2)
    assert found is not None
    assert [o.shape for o in (*found.inputs, *found.outputs)] == [(6, 256, 1024), (6, 256, 1)]
    assert describe(found).variant == describe(MEAN).variant
    assert scaled(MEAN, 1, 8) is None  # no half a sequence


def test_a_lookup_keeps_its_table() -> None:
    found = scaled(LOOKUP, 2, 1)
    assert found is not None
    assert [o.shape for o in (*found.inputs, *found.outputs)] == [(151936, 1024), (8, 256), (8, 256, 1024)]


def test_a_loss_keeps_a_target_a_row() -> None:
    logits, targets, scalar = rows(1024, 32000), rows(1024, dtype="int64"), Operand((), (), "fp32")
    forward = Call(
        "aten.nll_loss_forward.default", (logits, targets), (scalar, scalar), '[{"t":0},{"t":1},null,1,-100]'
    )
    backward = Call(
        "aten.nll_loss_backward.default",
        (scalar, logits, targets, scalar),
        (logits,),
        '[{"t":0},{"t":1},{"t":2},null,1,-100,{"t":3}]',
    )
    for call in (forward, backward):
        found = scaled(call, 3, 8)
        assert found is not None
        assert [o.shape for o in (*found.inputs, *found.outputs) if o.shape][:2] == [(384, 32000), (384,)]
        operands = aten.operands(found, "cpu")
        expected = aten.reference(operands, found)
        error, tolerance = aten.check(aten.prepare(found, "torch", operands)(), expected, operands, found)
        assert error <= tolerance


def test_the_loss_is_held_out_too() -> None:
    """The sizes of a step's loss are the same for every width: what judges it are those between."""
    held = [case for case in shipped("standard") if case.role == "holdout"]
    classes = {describe(case.shape).op_class for case in held}
    assert classes >= {"gemm", "attention", "pointwise", "copy", "reduction", "loss", "optimizer", "embedding"}


def test_what_names_its_sizes_is_left_alone() -> None:
    padded = Call("aten.slice_backward.default", (rows(16, 64),), (rows(16, 128),), '[{"t":0},[16,128],1,0,64,1]')
    assert scaled(padded, 2, 1) is None
    column = Call("aten.mul.Tensor", (rows(16, 64), rows(16)), (rows(16, 64),), '[{"t":0},{"t":1}]')
    assert scaled(column, 2, 1) is None


def test_an_optimizer_gets_the_tensors_of_more_layers() -> None:
    weights = (rows(100, 8), rows(8, 8), rows(8, 16), rows(8))
    call = Call("aten._foreach_add_.List", weights + weights, (), '[{"ts":[0,4]},{"ts":[4,4]}]', written=(0, 1, 2, 3))
    found = deepened(call, 2)
    assert found is not None
    assert [o.shape for o in found.inputs[:6]] == [(100, 8), (8, 8), (8, 16), (8, 8), (8, 16), (8,)]
    assert found.inputs[:6] == found.inputs[6:]
    assert json.loads(found.args) == [{"ts": [0, 6]}, {"ts": [6, 6]}]
    assert found.written == (0, 1, 2, 3, 4, 5)
    tensors = aten.operands(found, "cpu")
    before = tensors[0].clone()
    aten.prepare(found, "torch", tensors)()
    torch.testing.assert_close(tensors[0], before + tensors[6])


def test_spread_takes_both_ends_and_what_lies_far_between() -> None:
    assert spread([(0.0,), (0.1,), (5.0,), (9.9,), (10.0,)], 3) == [0, 2, 4]
    assert spread([(0.0,), (1.0,)], 0) == []


@pytest.mark.parametrize("role", ["fit", "holdout"])
def test_every_made_call_of_the_suite_can_be_made(role: str) -> None:
    """On fake tensors, from the calls of the shipped suite; two of each variant."""
    recorded = [describe(case.shape) for case in shipped("standard") if isinstance(case.shape, Call)]
    made: dict[str, list[Call]] = {}
    for work in recorded:
        for call in made_from(work, role):
            made.setdefault(work.variant, []).append(call)
    assert sum(map(len, made.values())) > 500
    with FakeTensorMode():
        for calls in made.values():
            for call in {calls[0], calls[-1]}:
                tensors = aten.operands(call, "cpu")
                returned = aten.prepare(call, "torch", tensors)()
                found = returned if isinstance(returned, (list, tuple)) else [returned]
                if not call.written:
                    shapes = [tuple(t.shape) for t in found if isinstance(t, torch.Tensor)]
                    assert shapes == [o.shape for o in call.outputs], call.key


def test_fit_and_holdout_have_no_call_in_common() -> None:
    cases = [case for case in shipped("standard") if isinstance(case.shape, Call)]
    works = [describe(case.shape) for case in dict.fromkeys(cases)]
    fit = call_cases(works, PLANS["standard", "fit"], "fit")
    held = call_cases(
        works, PLANS["standard", "holdout"], "holdout", without={c.shape for c in fit if isinstance(c.shape, Call)}
    )
    assert held
    assert not {c.shape for c in fit} & {c.shape for c in held}
    assert len(set(fit)) == len(fit)
