"""Makes the op streams of compiled steps: the model compiled for the GPU in processes of their own, and read.

The layers of a compiled model are not marked, so that a model of alike layers is compiled at two depths, side by side:
what the deeper one launches more is a layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from flopcast.errors import DataError, UsageError
from flopcast.microbench.recipe.settings import EXPERTS, TORCH_MODES
from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.layers import Stretch, fold
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_rank import to_rank
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.library.code import Codes, Layers, compiled_once, keep_layers, kept_code, layers_of
from flopcast.roofline.stream.lowering.classes import PRODUCTS, op_class
from flopcast.roofline.stream.model.models import Config, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream, from_json
from flopcast.roofline.stream.ops.to_buckets import with_buckets
from flopcast.roofline.stream.tracer.compiler.apart import output_code
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

SHALLOW = FOLDED_DEPTH - 1


def as_eager(traced: Traced) -> Traced:
    """The same step, not compiled."""
    return replace(traced, mode="eager", device=traced.device.partition(" ")[0])


def compiled_now(config: Config, traced: Traced, eager: Callable[[], Stream], *, is_folded: bool) -> dict[str, Stream]:
    """Compiles a step; its streams by mode, that of `traced` and, where the same code is theirs, the other's. `eager`
    makes its eager stream, meanwhile. `is_folded`: whether `config` stands for models of any depth; the stream of
    layers that turn out not to be alike has no depth. Raises UsageError for what torch cannot compile, DataError for
    generated code that cannot be read."""
    if (whole := whole_of(config, traced)) is not None:
        return {traced.mode: _whole(whole, traced.mode)}
    asked = replace(asked_of(traced), config=config)
    try:
        return _compiled(asked, eager, is_folded=is_folded)
    except _ProductsOutside:
        if traced.phase != "train":
            raise
        return {traced.mode: _whole(replace(asked, is_whole=True), traced.mode)}


def whole_of(config: Config, traced: Traced) -> Asked | None:
    """What the compiler is asked for a step of a config of which it is known that products run outside of its graphs:
    transformers runs experts one by one where weights are not bf16. None for any other."""
    if traced.phase != "train" or traced.precision == "bf16" or not any(config.get(name) for name in EXPERTS):
        return None
    return replace(asked_of(traced), config=config, is_whole=True)


def _whole(asked: Asked, mode: str, known: Codes | None = None) -> Stream:
    with compiled_once(asked, known) as result:
        code = result()
    found = _with_graphs(from_json(code.recorded, "the recorded step"), code, mode)
    return found if _are_alike(found) else replace(found, depth=None)


def _are_alike(stream: Stream) -> bool:
    """Whether it is known which ops are a layer's, and all layers make the same calls."""
    calls: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for op in stream.ops:
        if op.layer is not None and op.phase != "optimizer":
            calls[op.layer].append((op.phase, op.name))
    return len(calls) == stream.depth and all(calls[layer] == calls[0] for layer in calls)


def compiled_module_now(
    source: str, traced: Traced, sizes: Mapping[str, int], eager: Callable[[], Stream], known: Codes | None = None
) -> Stream:
    """As `compiled_now`, of a module's factory ("package.module:factory"), whole. `known`: what the caller keeps of the
    same source."""
    asked = replace(asked_of(traced), module=source, sizes=sizes)
    try:
        return _compiled(asked, eager, known=known)[traced.mode]
    except _ProductsOutside:
        return _whole(replace(asked, is_whole=True), traced.mode, known)


def compiled_rank_now(config: Config, traced: Traced) -> Stream:
    """Compiles a step on several GPUs; the stream of one rank. Raises UsageError and DataError as `compiled_now`."""
    return rank_stream(output_code(replace(asked_of(traced), config=config)), traced)


def compiled_module_rank_now(source: str, traced: Traced, sizes: Mapping[str, int]) -> Stream:
    """As `compiled_rank_now`, of a module's factory."""
    return rank_stream(output_code(replace(asked_of(traced), module=source, sizes=sizes)), traced)


def rank_stream(code: OutputCode, traced: Traced) -> Stream:
    """The stream of a rank's step from what was compiled and recorded of it."""
    _check(code)
    recorded = from_json(code.recorded, "the recorded step of a rank")
    if traced.layout.reduces_gradients:
        recorded = with_buckets(recorded)
    return _with_graphs(recorded, code, traced.mode)


def compiled_own_now(source: str, traced: Traced, sizes: Mapping[str, int], known: Codes | None = None) -> Stream:
    """The stream of a step that calls torch.compile by itself: of a step function, or of a module that its factory
    compiles. `traced`: as for a compiled step; the mode is the step's own, which the stream's meta says. Raises
    UsageError and DataError as `compiled_now`."""
    asked = replace(asked_of(traced), module=source, sizes=sizes, is_own=True)
    with compiled_once(asked, known) as result:
        code = result()
    recorded = from_json(code.recorded, "the recorded step")
    return _with_graphs(recorded, code, recorded.meta["mode"])


def _with_graphs(recorded: Stream, code: OutputCode, mode: str) -> Stream:
    found = to_rank(recorded, read_output_code(code.text))
    return replace(found, meta=_meta_of(found, code, mode, _notes_on_pads(code)))


def _meta_of(found: Stream, code: OutputCode, mode: str, notes: Sequence[str]) -> dict[str, Any]:
    """A compiled stream's meta, with what it says of its code."""
    notes = [*found.meta.get("notes", ()), *notes]
    return {
        **found.meta, "mode": mode, "breaks": [asdict(one) for one in code.breaks], "waits": list(code.waits),
        "torch": code.torch.partition("+")[0], "triton": code.triton, "notes": notes,
        "unsure_pads": [list(sizes) for sizes in code.unsure_pads],
    }  # fmt: skip


def depths_of(asked: Asked) -> list[Asked]:
    """A config's step at the depths of which any other is made: SHALLOW and FOLDED_DEPTH, or FOLDED_DEPTH alone where
    its code is kept and where the layers lie in it is known."""
    shallow, deep = (replace(asked, config=with_depth(asked.config or {}, n)) for n in (SHALLOW, FOLDED_DEPTH))
    code = kept_code(deep)
    is_known = code is not None and layers_of(read_output_code(code.text)) is not None
    return [deep] if is_known else [shallow, deep]


def asked_of(traced: Traced) -> Asked:
    """What the compiler is asked for, but for the model."""
    _, capability, sm_count = traced.device.split()
    gpu = {"capability": [int(part) for part in capability.split(".")], "sm_count": int(sm_count)}
    return Asked(**{**traced.settings, "cache": Asked.cache}, rank=traced.rank, gpu=gpu)


def _compiled(
    asked: Asked, eager: Callable[[], Stream], *, is_folded: bool = False, known: Codes | None = None
) -> dict[str, Stream]:
    """The code for capture is also that without, where no graph is cut into parts for it."""
    step = cache(eager)

    def codes_in(mode: str) -> list[OutputCode]:
        one = replace(asked, mode=mode)
        with ExitStack() as stack:
            waiting = [
                stack.enter_context(compiled_once(each, known)) for each in (depths_of(one) if is_folded else [one])
            ]
            step()
            return [result() for result in waiting]

    codes = codes_in("compile-graphs")
    is_shared = all(graph.captured in ((), ((0, len(graph.launches)),)) for graph in read_output_code(codes[-1].text))
    if asked.mode == "compile" and not is_shared:
        codes = codes_in(asked.mode)
    return {
        mode: stream_of(codes, step(), mode, is_folded=is_folded)
        for mode in (TORCH_MODES if is_shared else (asked.mode,))
    }


def find_layers(shallow: OutputCode, deep: Sequence[Graph]) -> Layers | None:
    """Where a layer lies in the graphs of FOLDED_DEPTH layers, by those of SHALLOW ones; None where layers are not
    alike."""
    with suppress(DataError):
        found = {one.graph.label: one.layer for one in fold(read_output_code(shallow.text), deep, SHALLOW)}
        keep_layers(deep, found)
        return found
    return None


def stream_of(codes: Sequence[OutputCode], eager: Stream, mode: str, *, is_folded: bool = False) -> Stream:
    """The stream of a step in `mode` from its code, of any depth (`is_folded`) from those of `depths_of`."""
    code = codes[-1]
    graphs = read_output_code(code.text)
    layers = None
    if is_folded:
        layers = layers_of(graphs) if len(codes) == 1 else find_layers(codes[0], graphs)
    stretches = {
        label: [Stretch(start, stop, FOLDED_DEPTH - SHALLOW) for start, stop in layer]
        for label, layer in (layers or {}).items()
    }
    depth = None if is_folded and layers is None else eager.depth
    _check(code)
    called = [graphs[number] for number in code.calls]
    if mode == "compile":
        called = [replace(graph, captured=()) for graph in called]
    found = to_stream(called, eager, stretches, code.waited_after)
    notes = [*_notes_on_rest(code), *_notes_on_pads(code)]
    return replace(found, depth=depth, meta=_meta_of(found, code, mode, notes))


class _ProductsOutside(UsageError):
    """Products run outside of the graphs."""


def _check(code: OutputCode) -> None:
    """Raises UsageError for a step whose products do not all run in graphs."""
    names = [name for name in code.outside if op_class(name, "") in (*PRODUCTS, "custom")]
    if names:
        where = next((found.where for found in code.breaks if found.where), "")
        raise _ProductsOutside(
            f"{', '.join(names)} run{'s' * (len(names) == 1)} outside of the compiled graphs: what a step does there "
            f"is not modelled; use --mode eager{f', or keep the graph whole ({where})' * bool(where)}"
        )


# 22.6 ms where 14 products were left as they are, 16.1 where one was (reports/nvidia-h100-sxm/pads.json)
_PADS = (
    "whether inductor pads a product of {} x {} x {}{} depends on timings while it compiles, with what the host takes "
    "to launch: a slow host left 14 of 18 such products as they are, quick ones 1 to 3, and a model 1,023 wide took "
    "the GPU 1.4 times as long; so did a GPT-2 that left the gradient of 50,257 tokens' weights, a close call. The "
    "forecast has the mean of what hosts did with those below 0.2 ms and pads the others; its interval reaches from "
    "all padded to none; sizes in multiples of 8 leave none to pad"
)


def _notes_on_pads(code: OutputCode) -> list[str]:
    if not code.unsure_pads:
        return []
    first, *others = code.unsure_pads
    return [_PADS.format(*(f"{size:,}" for size in first), f" (and of {len(others)} other sizes)" * bool(others))]


def _notes_on_rest(code: OutputCode) -> list[str]:
    left = {name: count for name, count in code.outside.items() if name.rpartition(".")[2] not in _MADE}
    if not left:
        return []
    said = ", ".join(f"{count} {name}" if count > 1 else name for name, count in sorted(left.items()))
    return [f"outside of the compiled graphs, and not in the forecast: {said}"]


# By autograd, of gradients of the graphs' results, and before a prefill: the stream has them.
_MADE = ("ones_like", "zeros", "zeros_like", "new_zeros", "fill_", "zero_", "full", "full_like", "_foreach_zero_")
