"""Lets inductor generate code for a GPU that is not there, and keeps the code in place of loading it.

For a process of its own: nothing is undone. What inductor would ask the GPU itself, by running something there, is
answered here:

- Constants are folded on the host.
- `pad_mm` times a product as it is and padded to what tensor cores read best, where a dimension is not a multiple of 8
  (4 in fp32): `padding` compares them by bytes and FLOPs.
- Triton's choice among a kernel's configurations, made at the first launch, is not made: it changes no code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor import compile_fx, constant_folding, ir, output_code
from torch._inductor.codecache import compiled_fx_graph_hash
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card
from flopcast.roofline.stream.tracer.compiler.padding import rule_for

_CPU = torch.device("cpu")


@dataclass
class Kept:
    """The code of the graphs, in the order of their compilation, and their numbers in that of their calls. `shares`:
    whether a graph that is another anew is compiled once, as inductor's cache of graphs has it: of 34 graphs that
    DistributedDataParallel makes of eight layers 12 are different."""

    graphs: list[str] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    is_running: bool = False  # whether a graph runs
    shares: bool = False
    # m, k, n of products that are padded as a quick host would
    unsure: list[tuple[int, int, int]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)  # what was compiled, by the key of inductor's cache
    # who is to run a graph, given its number, its inputs and what makes its results of them
    run: Callable[[int, list[Any], Callable[[Any], list[Any]]], list[Any]] = lambda _number, inputs, make: make(inputs)

    def forget(self) -> None:
        """Begins anew, for another step."""
        for held in (self.graphs, self.calls, self.unsure, self.known):
            held.clear()


def keep_code(card: Card) -> Kept:
    """Makes inductor generate for a GPU and keep what it generates; graphs run by making their results alone."""
    kept = Kept()
    torch._inductor.config.force_disable_caches = True
    torch._inductor.config.compile_threads = 1  # no pool of processes, which would compile kernels

    def to_module(graph: Any) -> Any:
        number = len(kept.graphs)
        kept.graphs.append(graph.codegen()[0].value)
        graph.cache_key = graph.cache_path = ""
        graph.cache_linemap = []
        make = _results_of(graph)

        def call(inputs: Any) -> list[Any]:
            kept.calls.append(number)
            kept.is_running = True
            try:
                return kept.run(number, inputs, make)
            finally:
                kept.is_running = False

        return SimpleNamespace(call=call, runner=None, __file__="")

    GraphLowering._compile_to_module = to_module  # type: ignore[method-assign, assignment]
    compile_fx.fx_codegen_and_compile = _once(compile_fx.fx_codegen_and_compile, kept)
    compile_fx.get_input_idxs_to_check = lambda *_: ()  # looks at addresses
    # captures what runs, which nothing does; graphs are generated for capture all the same
    for name in ("cudagraph_post_compile", "cudagraph_partition_post_compile"):
        setattr(output_code, name, lambda *_, **__: None)
    pad_mm._should_pad = rule_for(card, kept.unsure.append)  # type: ignore[assignment]
    folder, uniform = constant_folding.ConstantFolder, joint_graph.UniformValueConstantFolder
    folder.run = _on_host(folder.run)  # type: ignore[method-assign]
    uniform.__init__ = _on_host(uniform.__init__)  # type: ignore[method-assign]
    return kept


def _once(own: Callable[..., Any], kept: Kept) -> Callable[..., Any]:
    """Makes what compiles a graph take what is known of one like it, where graphs are shared."""

    def compiled(graph: Any, inputs: Any, to_check: Any, **options: Any) -> Any:
        if not kept.shares:
            return own(graph, inputs, to_check, **options)
        settings = {name: value for name, value in options.items() if name != "compile_region_name"}
        key, _ = compiled_fx_graph_hash(graph, inputs, settings, to_check)  # type: ignore[arg-type]
        if key not in kept.known:
            kept.known[key] = own(graph, inputs, to_check, **options)
        return copy.copy(kept.known[key])  # what follows changes it

    return compiled


def _results_of(graph: Any) -> Callable[[Any], list[Any]]:
    """Makes a function of a graph's inputs that returns its results, of the sizes and strides that inductor chose."""
    makers = [_maker(graph, result) for result in graph.graph_outputs]
    expected = list(graph.graph_inputs.values())

    def make(inputs: Any) -> list[Any]:
        kept = list(inputs)
        known = _symbols(expected, kept)
        return [maker(kept, known) for maker in makers]

    return make


def _maker(graph: Any, result: Any) -> Callable[[list[Any], Mapping[Any, int]], Any]:
    """Makes a function of a graph's inputs, and of the sizes that its symbols stand for, that returns one result."""
    if isinstance(result, ir.NoneAsConstantBuffer):
        return lambda *_: None
    if isinstance(result, ir.ShapeAsConstantBuffer):
        number = result.expr
        return lambda _, known: _number(number, known)
    place = _input_of(graph, result)
    if place is not None:
        return lambda inputs, _: inputs[place]
    sizes, strides, dtype, device = result.get_size(), result.get_stride(), result.get_dtype(), result.get_device()

    def make(_: list[Any], known: Mapping[Any, int]) -> torch.Tensor:
        shape, apart = ([_number(one, known) for one in numbers] for numbers in (sizes, strides))
        return torch.empty_strided(shape, apart, dtype=dtype, device=device)

    return make


def _symbols(expected: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, int]:
    """What the symbols of a graph that is compiled for any size stand for, by its inputs."""
    found: dict[Any, int] = {}
    for wanted, given in zip(expected, inputs, strict=True):
        if isinstance(given, torch.Tensor):
            names = (*wanted.get_size(), *wanted.get_stride())
            found.update(zip(names, (*given.shape, *given.stride()), strict=True))
        elif isinstance(given, int):
            found[wanted] = given
    return {name: number for name, number in found.items() if getattr(name, "is_symbol", False)}


def _number(size: Any, known: Mapping[Any, int]) -> int:
    """A size; 1 for each of its unknowns, which are numbers that the graph reads back, such as an expert's tokens."""
    symbols = getattr(size, "free_symbols", ())
    return int(size.subs({symbol: known.get(symbol, 1) for symbol in symbols}) if symbols else size)


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
