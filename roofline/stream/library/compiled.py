"""Makes the op streams of compiled steps: the model compiled for the GPU in processes of their own, and read.

The layers of a compiled model are not marked, so that a model of alike layers is compiled at two depths, side by side:
what the deeper one launches more is a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

from flopcast.errors import DataError
from flopcast.roofline.stream.compiled.layers import Stretch, fold
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.tracer.compiler.apart import compiling
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

SHALLOW = FOLDED_DEPTH - 1


def as_eager(traced: Traced) -> Traced:
    """The same step, not compiled."""
    return replace(traced, mode="eager", device=traced.device.partition(" ")[0])


def compiled_now(config: Config, traced: Traced, eager: Callable[[], Stream], *, is_folded: bool) -> Stream:
    """Compiles a step. `eager` makes its eager stream, meanwhile. `is_folded`: whether `config` stands for models of
    any depth; the stream of layers that turn out not to be alike has no depth. Raises UsageError for what torch cannot
    compile, DataError for generated code that cannot be read."""
    depths = (SHALLOW, FOLDED_DEPTH) if is_folded else (depth_of(config),)
    return _compiled([replace(asked_of(traced), config=with_depth(config, depth)) for depth in depths], eager)


def compiled_module_now(source: str, traced: Traced, sizes: Mapping[str, int], eager: Callable[[], Stream]) -> Stream:
    """As `compiled_now`, of a module's factory ("package.module:factory"), whole."""
    return _compiled([replace(asked_of(traced), module=source, sizes=sizes)], eager)


def asked_of(traced: Traced) -> Asked:
    """What the compiler is asked for, but for the model."""
    _, capability, sm_count = traced.device.split()
    gpu = {"capability": [int(part) for part in capability.split(".")], "sm_count": int(sm_count)}
    return Asked(
        batch=traced.batch, seq=traced.seq, precision=traced.precision, checkpoint=traced.checkpoint, mode=traced.mode,
        gpu=gpu,
    )  # fmt: skip


def _compiled(asked: Sequence[Asked], eager: Callable[[], Stream]) -> Stream:
    with ExitStack() as stack:
        waiting = [stack.enter_context(compiling(one)) for one in asked]
        step = eager()
        codes = [result() for result in waiting]
    return stream_of(codes, step, asked[0].mode)


def stream_of(codes: Sequence[OutputCode], eager: Stream, mode: str) -> Stream:
    """The stream of a step from its code, or from those of SHALLOW and FOLDED_DEPTH layers."""
    graphs = [read_output_code(code.text) for code in codes]
    stretches: dict[str, Sequence[Stretch]] = {}
    depth = None
    if len(codes) == 1:
        depth = eager.depth
    else:
        shallow, deep = graphs
        with suppress(DataError):  # layers that are not alike
            stretches = {one.graph.label: one.stretches(FOLDED_DEPTH) for one in fold(shallow, deep, SHALLOW)}
            depth = eager.depth
    code = codes[-1]
    found = to_stream([graphs[-1][number] for number in code.calls], eager, stretches, code.waited_after)
    meta = {
        **found.meta, "mode": mode, "breaks": [asdict(one) for one in code.breaks], "waits": list(code.waits),
        "torch": code.torch.partition("+")[0], "triton": code.triton,
    }  # fmt: skip
    return replace(found, depth=depth, meta=meta)
