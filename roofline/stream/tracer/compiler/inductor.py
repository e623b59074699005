"""Lets inductor generate code for a GPU that is not there, and keeps the code in place of loading it.

For a process of its own: nothing is undone. What inductor would ask the GPU itself, by running something there, is
answered here:

- Constants are folded on the host.
- `pad_mm` times a product as it is and padded to what tensor cores read best, where a dimension is not a multiple of 8
  (4 in fp32): `padding` compares them by bytes and FLOPs.
- Triton's choice among a kernel's configurations, made at the first launch, is not made: it changes no code.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor import compile_fx, constant_folding, ir, output_code
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card
from flopcast.roofline.stream.tracer.compiler.padding import rule_for

_CPU = torch.device("cpu")


def keep_code(card: Card, found: Callable[[str], None]) -> None:
    """Makes inductor generate for a GPU, give each graph's code to `found`, and run graphs by making their results
    alone."""
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # no pool of processes, which would compile kernels

    def to_module(graph: Any) -> Any:
        found(graph.codegen()[0].value)
        graph.cache_key = graph.cache_path = ""
        graph.cache_linemap = []
        make = _results_of(graph)
        return SimpleNamespace(call=make, runner=None, __file__="")

    GraphLowering._compile_to_module = to_module  # type: ignore[method-assign, assignment]
    compile_fx.get_input_idxs_to_check = lambda *_: ()  # looks at addresses
    # captures what runs, which nothing does; graphs are generated for capture all the same
    for name in ("cudagraph_post_compile", "cudagraph_partition_post_compile"):
        setattr(output_code, name, lambda *_, **__: None)
    pad_mm._should_pad = rule_for(card)  # type: ignore[assignment]
    folder, uniform = constant_folding.ConstantFolder, joint_graph.UniformValueConstantFolder
    folder.run = _on_host(folder.run)  # type: ignore[method-assign]
    uniform.__init__ = _on_host(uniform.__init__)  # type: ignore[method-assign]


def _results_of(graph: Any) -> Callable[[Any], list[Any]]:
    """Makes a function of a graph's inputs that returns its results, of the sizes and strides that inductor chose."""
    makers = [_maker(graph, result) for result in graph.graph_outputs]

    def make(inputs: Any) -> list[Any]:
        kept = list(inputs)
        return [maker(kept) for maker in makers]

    return make


def _maker(graph: Any, result: Any) -> Callable[[list[Any]], Any]:
    """Makes a function of a graph's inputs that returns one of its results."""
    if isinstance(result, ir.NoneAsConstantBuffer):
        return lambda _: None
    if isinstance(result, ir.ShapeAsConstantBuffer):
        number = _number(result.expr)
        return lambda _: number
    place = _input_of(graph, result)
    if place is not None:
        return lambda inputs: inputs[place]
    sizes, strides = (tuple(map(_number, numbers)) for numbers in (result.get_size(), result.get_stride()))
    dtype, device = result.get_dtype(), result.get_device()
    return lambda _: torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def _number(size: Any) -> int:
    """A size, 1 for each of its unknowns: counts that a step reads back, as of the tokens that an expert gets."""
    unknown = getattr(size, "free_symbols", ())
    return int(size.subs(dict.fromkeys(unknown, 1)) if unknown else size)


def _input_of(graph: Any, result: Any) -> int | None:
    """Returns the place of the input that a graph returns as it is, None for any other result."""
    while isinstance(result, (ir.TensorBox, ir.StorageBox)):
        result = result.data
    if not isinstance(result, ir.InputBuffer) or result.get_name() not in graph.graph_input_names:
        return None
    place: int = graph.graph_input_names.index(result.get_name())
    return place


class _OnHost(TorchDispatchMode):
    """Makes what is to be on the GPU on the host."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prims.device_put.default:
            return args[0].clone()
        if getattr(kwargs.get("device"), "type", "") == "cuda":
            kwargs = {**kwargs, "device": _CPU}
        return func(*args, **kwargs)


def _on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnHost():  # type: ignore[no-untyped-call]
            return function(*args, **kwargs)

    return run
