"""Eager calls past torch's dispatcher beside those through it, in Triton's interpreter; test_launching.py runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.kernels import attention, cross_entropy, matmul, matmul_chosen, rmsnorm, rope, rotary, swiglu

HALF = torch.float16


def normal(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size).to(dtype)


def operations() -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """(name, operator, operands)."""
    x, y, weight = normal(4, 16), normal(4, 16), normal(16)
    tables = rope.tables(5, 16, "cpu")
    q, k, v = (normal(1, 5, n, 16).transpose(1, 2) for n in (4, 2, 2))
    target = torch.tensor([1, -100, 3, 0])
    yield "rms_norm", rmsnorm.rms_norm_op, (x, weight, 1e-6, None)
    yield "rms_norm in another dtype", rmsnorm.rms_norm_op, (x, weight, 1e-6, HALF)
    yield "add_rms_norm", rmsnorm.add_rms_norm_op, (x, y, weight, 1e-6, None)
    yield "add_rms_norm of two dtypes", rmsnorm.add_rms_norm_op, (x.to(HALF), y, weight, 1e-6, HALF)
    yield "swiglu", swiglu.swiglu_op, (x, y)
    yield "swiglu of a view", swiglu.swiglu_op, (normal(16, 4).T, y)
    yield "rope_qk_norm", rope.rope_qk_norm_op, (
        normal(1, 5, 4, 16), normal(1, 5, 2, 16), weight, normal(16), *tables, 1e-6, None,
    )  # fmt: skip
    yield "rotary", rotary.rotary_op, (normal(1, 5, 4, 16), normal(1, 5, 2, 16), *tables, None)
    yield "cross_entropy", cross_entropy.cross_entropy_op, (x, target, -100, "mean")
    yield "cross_entropy with gradient", cross_entropy.cross_entropy_with_gradient_op, (x, target, -100, "sum")
    yield "attention", attention.attention_forward_op, (q, k, v, True, 0.25, 3, None)
    yield "matmul", matmul.matmul_op, (x, y, "nt", False)
    yield "chosen_matmul", matmul_chosen.chosen_matmul_op, (x, y, "nt", "torch")


OPERATIONS = list(operations())
each = pytest.mark.parametrize(("operator", "operands"), [x[1:] for x in OPERATIONS], ids=[x[0] for x in OPERATIONS])


def leaves(operands: tuple[Any, ...]) -> tuple[list[Any], list[Tensor]]:
    """Operands of which those of floating point, but tables, want gradients; and these."""
    made = [
        x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in operands
    ]
    return made, [x for x in made if isinstance(x, Tensor) and x.requires_grad]


def outcome(call: Callable[..., Any], operands: tuple[Any, ...], used: int) -> list[Tensor | None]:
    """Results of a call, and gradients of its first `used` results by its operands."""
    made, wanted = leaves(operands)
    results = call(*made)
    outs = results if isinstance(results, tuple) else (results,)
    kept = [x.detach().clone() for x in outs]  # a loss's gradient is scaled in place
    torch.manual_seed(3)
    gradients = [torch.randn_like(x) for x in outs[:used]]
    return [*kept, *torch.autograd.grad(outs[:used], wanted, gradients, allow_unused=True)]


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [func.__name__.split(".")[0]] if func.namespace == "flopcast" else []
        return func(*args, **(kwargs or {}))


@each
def test_both_ways_agree_bit_for_bit(operator: Any, operands: tuple[Any, ...]) -> None:
    results = {"rms_norm": 1, "add_rms_norm": 2, "rope_qk_norm": 2, "rotary": 2}.get(operator.name.split("::")[1], 1)
    for _ in range(3):  # as written, watched, and as the recording says, where there is one
        direct, dispatched = outcome(operator, operands, results), outcome(operator.overload, operands, results)
        assert len(direct) == len(dispatched)
        for one, other in zip(direct, dispatched, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
                assert torch.equal(one, other)


@each
def test_who_looks_on_sees_the_operator(operator: Any, operands: tuple[Any, ...]) -> None:
    made, _ = leaves(operands)
    with Seen() as seen:
        operator(*made)
    assert seen.names == [operator.name.split("::")[1]]
    with FakeTensorMode() as mode:
        faked = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in operands))
    real = operator(*operands)
    pairs = zip(*((x if isinstance(x, tuple) else (x,)) for x in (faked, real)), strict=True)
    assert all((one.shape, one.dtype, one.stride()) == (two.shape, two.dtype, two.stride()) for one, two in pairs)


@each
def test_gradients_only_where_they_are_wanted(operator: Any, operands: tuple[Any, ...]) -> None:
    made, _ = leaves(operands)

    def first(results: Any) -> Any:
        return results[0] if isinstance(results, tuple) else results

    assert first(operator(*made)).requires_grad
    assert not first(operator(*operands)).requires_grad
    with torch.no_grad():
        assert not first(operator(*made)).requires_grad
    with torch.inference_mode():
        assert first(operator(*made)).is_inference()


@pytest.mark.parametrize("index", [0, 4, 10, 11])
def test_a_second_derivative_is_refused_or_right(index: int) -> None:
    name, operator, operands = OPERATIONS[index]
    made, wanted = leaves(operands)
    results = operator(*made)
    out = results[0] if isinstance(results, tuple) else results
    gradients = torch.autograd.grad(out.sum(), wanted, create_graph=True)
    if name == "matmul":  # its backward is made of products that are differentiable themselves
        torch.autograd.grad(gradients[0].pow(2).sum(), wanted, allow_unused=True)
        return
    with pytest.raises(NotImplementedError, match="differentiated once"):
        torch.autograd.grad(gradients[0].pow(2).sum(), wanted)


def test_a_loss_whose_gradient_was_scaled_in_place_is_not_differentiated_again() -> None:
    logits = normal(4, 16).requires_grad_()
    loss = cross_entropy.cross_entropy(logits, torch.tensor([1, 2, 3, 0]))
    (3 * loss).backward(retain_graph=True)
    once = logits.grad
    want = torch.autograd.grad(3 * torch.nn.functional.cross_entropy(logits, torch.tensor([1, 2, 3, 0])), logits)[0]
    assert once is not None
    assert torch.allclose(once, want, atol=1e-6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_tensor_of_a_class_of_its_own_goes_through_the_dispatcher() -> None:
    class Named(Tensor):
        calls: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            cls.calls.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    x, y = normal(4, 16), normal(4, 16)
    out = swiglu.swiglu(x.as_subclass(Named), y)
    assert type(out) is Named
    assert any("swiglu" in call for call in Named.calls)
    assert torch.equal(out.as_subclass(Tensor), swiglu.swiglu(x, y))


@pytest.mark.parametrize("layout", matmul.LAYOUTS)
def test_products_that_are_torchs_both_ways_are_differentiated_by_torch(layout: str) -> None:
    m, n, k = 3, 4, 5
    a = normal(*((m, k) if layout[0] == "n" else (k, m)))
    b = normal(*((k, n) if layout[1] == "n" else (n, k)))
    want = outcome(lambda a, b: matmul_chosen.chosen_matmul_op(a, b, layout, "torch"), (a, b), 1)
    found = outcome(lambda a, b: matmul_chosen.chosen_matmul(a, b, layout, "torch"), (a, b), 1)
    for one, other in zip(found, want, strict=True):
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other)
    by_torch = matmul_chosen.chosen_matmul(a.requires_grad_(), b, layout, "torch")
    assert "chosen" not in str(by_torch.grad_fn)
    with torch.autocast("cpu", torch.bfloat16):
        assert matmul_chosen.chosen_matmul(a, b, layout, "torch").dtype == torch.bfloat16
    with pytest.raises(ValueError, match="do not fit"):
        matmul_chosen.chosen_matmul(a, normal(7, 9), layout, "torch")


def test_compiled_code_calls_the_function_past_the_dispatcher() -> None:
    from torch._inductor.utils import run_and_get_code

    x, y = normal(4, 16).requires_grad_(), normal(4, 16).requires_grad_()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return swiglu.swiglu(x * 2, y) + 1

    def both(call: Callable[..., Tensor]) -> list[Tensor]:
        out = call(x, y)
        return [out, *torch.autograd.grad(out.square().sum(), (x, y))]

    results, codes = run_and_get_code(lambda: both(torch.compile(function, fullgraph=True)))
    assert all(torch.allclose(one, other) for one, other in zip(results, both(function), strict=True))
    code = "\n".join(codes)
    assert "= torch.ops.flopcast.swiglu.default.directly(" in code
    assert "= torch.ops.flopcast.swiglu_backward.default.directly(" in code
    with Seen() as seen:
        swiglu.swiglu_op.overload.directly(x.detach(), y.detach())
    assert seen.names == ["swiglu"]
