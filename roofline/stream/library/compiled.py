"""Makes the op streams of compiled steps: the model compiled for the GPU in processes of their own, and read.

The layers of a compiled model are not marked, so that a model of alike layers is compiled at two depths, side by side:
what the deeper one launches more is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

from flopcast.errors import DataError, UsageError
from flopcast.roofline.stream.compiled.layers import Stretch, fold
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.lowering.classes import PRODUCTS, op_class
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.tracer.compiler.apart import compiling
from flopcast.roofline.stream.tracer.compiler.asked import MODES, Asked, OutputCode

SHALLOW = FOLDED_DEPTH - 1


def as_eager(traced: Traced) -> Traced:
    """The same step, not compiled."""
    return replace(traced, mode="eager", device=traced.device.partition(" ")[0])


def compiled_now(config: Config, traced: Traced, eager: Callable[[], Stream], *, is_folded: bool) -> dict[str, Stream]:
    """Compiles a step; its streams by mode, that of `traced` and, where the same code is theirs, the other's. `eager`
    makes its eager stream, meanwhile. `is_folded`: whether `config` stands for models of any depth; the stream of
    layers that turn out not to be alike has no depth. Raises UsageError for what torch cannot compile, DataError for
    generated code that cannot be read."""
    depths = (SHALLOW, FOLDED_DEPTH) if is_folded else (depth_of(config),)
    return _compiled([replace(asked_of(traced), config=with_depth(config, depth)) for depth in depths], eager)


def compiled_module_now(source: str, traced: Traced, sizes: Mapping[str, int], eager: Callable[[], Stream]) -> Stream:
    """As `compiled_now`, of a module's factory ("package.module:factory"), whole."""
    return _compiled([replace(asked_of(traced), module=source, sizes=sizes)], eager)[traced.mode]


def asked_of(traced: Traced) -> Asked:
    """What the compiler is asked for, but for the model."""
    _, capability, sm_count = traced.device.split()
    gpu = {"capability": [int(part) for part in capability.split(".")], "sm_count": int(sm_count)}
    return Asked(
        batch=traced.batch, seq=traced.seq, precision=traced.precision, checkpoint=traced.checkpoint, mode=traced.mode,
        gpu=gpu,
    )  # fmt: skip


def _compiled(asked: Sequence[Asked], eager: Callable[[], Stream]) -> dict[str, Stream]:
    """The code for capture is also that without, where no graph is cut into parts for it."""
    with ExitStack() as stack:
        waiting = [stack.enter_context(compiling(replace(one, mode="compile-graphs"))) for one in asked]
        step = eager()
        codes = [result() for result in waiting]
    mode = asked[0].mode
    is_shared = all(graph.captured in ((), ((0, len(graph.launches)),)) for graph in read_output_code(codes[-1].text))
    if mode == "compile" and not is_shared:
        with ExitStack() as stack:
            waiting = [stack.enter_context(compiling(one)) for one in asked]
            codes = [result() for result in waiting]
    return {one: stream_of(codes, step, one) for one in (MODES if is_shared else (mode,))}


def stream_of(codes: Sequence[OutputCode], eager: Stream, mode: str) -> Stream:
    """The stream of a step in `mode` from its code, or from those of SHALLOW and FOLDED_DEPTH layers."""
    graphs = [read_output_code(code.text) for code in codes]
    stretches: dict[str, Sequence[Stretch]] = {}
    depth = eager.depth
    if len(codes) > 1:
        try:
            folded = fold(graphs[0], graphs[1], SHALLOW)
            stretches = {one.graph.label: one.stretches(FOLDED_DEPTH) for one in folded}
        except DataError:  # layers that are not alike
            depth = None
    code = codes[-1]
    _check(code)
    called = [graphs[-1][number] for number in code.calls]
    if mode == "compile":
        called = [replace(graph, captured=()) for graph in called]
    found = to_stream(called, eager, stretches, code.waited_after)
    meta = {
        **found.meta, "mode": mode, "breaks": [asdict(one) for one in code.breaks], "waits": list(code.waits),
        "torch": code.torch.partition("+")[0], "triton": code.triton,
        "notes": [*found.meta.get("notes", ()), *_notes(code)],
    }  # fmt: skip
    return replace(found, depth=depth, meta=meta)


def _check(code: OutputCode) -> None:
    """Raises UsageError for a step whose products do not all run in graphs."""
    names = [name for name in code.outside if op_class(name, "") in (*PRODUCTS, "custom")]
    if names:
        where = next((found.where for found in code.breaks if found.where), "")
        raise UsageError(
            f"{', '.join(names)} run{'s' * (len(names) == 1)} outside of the compiled graphs: what a step does there "
            f"is not modelled; use --mode eager{f', or keep the graph whole ({where})' * bool(where)}"
        )


def _notes(code: OutputCode) -> list[str]:
    left = {name: count for name, count in code.outside.items() if name.rpartition(".")[2] not in _MADE}
    if not left:
        return []
    said = ", ".join(f"{count} {name}" if count > 1 else name for name, count in sorted(left.items()))
    return [f"outside of the compiled graphs, and not in the forecast: {said}"]


# By autograd, of gradients of the graphs' results: the stream has them.
_MADE = ("ones_like", "zeros", "zeros_like", "new_zeros", "fill_", "zero_", "full", "full_like")
