"""Registers functions on tensors as operators of torch, at the least cost to the host per call.

    @operator("flopcast::scaled")
    def scaled_op(x: Tensor, factor: float) -> Tensor: ...

    @scaled_op.register_fake                       # shapes, strides, dtypes, for torch.compile and fake tensors
    def _(x: Tensor, factor: float) -> Tensor: ...

    scaled_op.register_autograd(backward, setup_context=save)        # as of torch.library.custom_op

A call goes one of two ways.

Directly, if nothing but autograd looks on (`unobserved`): through a `torch.autograd.Function` where a gradient is
wanted, else at once, to the function's recording (`launching`). Without gradients a norm's call takes 5.7 us so, and 15
through the dispatcher, the driver's part not counted.

Through torch's dispatcher, if torch.compile traces, a mode is on (fake tensors, FLOP counting, the tracer of steps),
functorch transforms, or a tensor is of a class of its own: as `torch.library.custom_op`, but for two things that it
does at every call: it looks for results that alias operands, and it wraps arguments, context and gradients once more
for operators with keyword-only arguments and lists (40 us, here 26 us). Code that torch.compile made calls the function
past it too (`_tell_inductor`): what it calls through the dispatcher is slower than what it replaces.

An operator must return new tensors only and change none; what changes an operand is registered as `custom_op`, which
also tells autograd of it.

A Triton kernel behind such an operator is opaque to torch.compile, as it is behind `custom_op`. `triton_op` with
`wrap_triton` would let inductor see it, but it takes neither the launches of Gluon kernels nor the interpreter, and
inductor fuses nothing with a kernel of a user either way.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch._C import _any_requires_grad as any_requires_grad
from torch._C import _are_functorch_transforms_active as transforming
from torch._C import _AutoDispatchBelowAutograd as BelowAutograd
from torch._C import _get_tracing_state as tracing_state
from torch._C import _len_torch_dispatch_stack as dispatch_modes
from torch._C import _len_torch_function_stack as function_modes
from torch._C import is_grad_enabled
from torch._compile import _disable_dynamo as untraced  # torch.compiler.disable imports the compiler at once: 2.5 s
from torch.compiler import is_dynamo_compiling

from flopcast.kernels.launching import Replayed

Fake = TypeVar("Fake", bound=Callable[..., Any])
SetUp = Callable[[Any, tuple[Any, ...], Any], None]

_LIBRARIES: dict[str, torch.library.Library] = {}  # by namespace; an operator lives as long as its library


def unobserved() -> bool:
    """Whether nothing but autograd wants to see which operators are called (0.15 us)."""
    return not (dispatch_modes() or function_modes() or transforming()) and tracing_state() is None


def _tell_inductor(name: str) -> None:
    """Lets the code that inductor writes call an operator, by its `name` there, past the dispatcher (a norm's call: 5.7
    us for 15), by inductor's registry of custom code for operators (torch 2.11 to 2.13), if inductor is at work."""
    registry = sys.modules.get("torch._inductor.codegen.custom_extern_kernel_codegen")
    table = getattr(registry, "CUSTOM_EXTERN_KERNEL_CODEGEN", None)
    if table is not None and name not in table:
        table[name] = registry.CustomCodegen(python=_write_call)  # type: ignore[union-attr]


def _write_call(node: Any, writeline: Callable[[Any], None]) -> None:
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    node.python_kernel_name += ".directly"
    writeline(ExternKernelAllocLine(V.graph.wrapper_code, node))


class Operator:
    """An operator of torch that is called like the function it was made of; `overload` is what graphs hold."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        namespace, _, short = name.partition("::")
        self.name = name
        self.replayed = Replayed(function)
        self._library = _LIBRARIES.setdefault(namespace, torch.library.Library(namespace, "FRAGMENT"))
        self._library.define(
            short + torch.library.infer_schema(function, mutates_args=()), tags=(torch.Tag.needs_exact_strides,)
        )
        self.overload = getattr(getattr(torch.ops, namespace), short).default
        self.overload.directly = self._from_compiled_code
        self._backward: Callable[..., Any] = self._refuse
        self._setup_context: SetUp | None = None
        self._plain, self._run = self.replayed.plain, self.replayed.of_plain
        # torch.autograd.Function.apply is this one and 2.5 us for functorch's transforms, which `unobserved` looks for.
        self._apply = super(torch.autograd.Function, self._function(self._run)).apply  # type: ignore[misc]
        # Where torch.compile is at work around a call, it must not trace the launch of a kernel.
        self._library.impl(short, untraced(self.replayed), "CompositeExplicitAutograd")
        self._library.impl(short, untraced(self._differentiable()), "Autograd")

    def __call__(self, *args: Any) -> Any:
        if is_dynamo_compiling() or not unobserved() or not self._plain(*args):
            return self.overload(*args)
        if is_grad_enabled() and any_requires_grad(*args):
            return self._apply(*args)
        return self._run(*args)

    def register_fake(self, function: Fake) -> Fake:
        def fake(*args: Any) -> Any:
            _tell_inductor(f"torch.ops.{self.name.replace('::', '.')}.default")
            return function(*args)

        torch.library.register_fake(self.name, fake, lib=self._library)
        return function

    def _from_compiled_code(self, *args: Any) -> Any:
        """As `overload` where autograd is done with, without torch's dispatcher where nobody looks on."""
        return self._run(*args) if unobserved() and self._plain(*args) else self.overload(*args)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: SetUp) -> None:
        """`setup_context(ctx, arguments, results)` keeps what `backward(ctx, *gradients of the results)` needs, which
        gives one gradient, or None, per argument."""
        self._backward, self._setup_context = backward, setup_context

    def _function(self, run: Callable[..., Any]) -> type[torch.autograd.Function]:
        """`run` with the operator's backward."""
        call = self

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> Any:
                results = run(*args)
                if call._setup_context is not None:
                    call._setup_context(ctx, args, results)
                return results

            @staticmethod
            def backward(ctx: Any, *gradients: Any) -> Any:
                return call._backward(ctx, *gradients)

        Differentiable.__name__ = f"{self.name.partition('::')[2]}_autograd"
        return Differentiable

    def _differentiable(self) -> Callable[..., Any]:
        """What runs where torch's dispatcher is concerned with autograd."""
        overload = self.overload

        def below(*args: Any) -> Any:
            if unobserved() and self._plain(*args):  # then the dispatcher's next stop is the function: 4 us less
                return self._run(*args)
            with BelowAutograd():
                return overload(*args)

        differentiable = self._function(below)

        def run(*args: Any) -> Any:
            if is_grad_enabled() and any_requires_grad(*args):
                return differentiable.apply(*args)
            return below(*args)

        return run

    def _refuse(self, ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(f"{self.name} has no gradient: these kernels are differentiated once")


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """The decorator that registers a function as the operator `name` ("namespace::name"), its annotations as schema. It
    changes none of its operands, and its results are new tensors."""
    return lambda function: Operator(name, function)
