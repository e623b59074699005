"""Compiles one rank's step of a layout over several GPUs, and records what surrounds its graphs.

DistributedDataParallel and `fully_shard` run as `tracer/parallel` has them run, on a process group of ranks that are
not there; here with the tensors of `fake_cuda`, of which compilers make code for a GPU. Two steps run first, in which
all is compiled; what the third one calls is recorded, a graph as one op (`compiled/to_rank.GRAPH`).
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.parallel_step import ParallelStep, mesh_of
from flopcast.roofline.stream.compiled.output_code import is_forward
from flopcast.roofline.stream.compiled.to_rank import GRAPH
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.compiler.experts import one_by_one
from flopcast.roofline.stream.tracer.compiler.homes import place_by_parameters
from flopcast.roofline.stream.tracer.compiler.inductor import Kept
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.lanes import Lanes
from flopcast.roofline.stream.tracer.parallel.ddp import fake_reducers
from flopcast.roofline.stream.tracer.parallel.world import fake_world, followed_streams, real_meshes, unseen_shapes
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.recorder import Recorder
from flopcast.roofline.stream.tracer.unmodelled import Topic, modelled


@contextlib.contextmanager
def as_rank(layout: Layout, rank: int) -> Iterator[tuple[DeviceMesh, Lanes]]:
    """Within the context this process is one rank of a layout; inside a mode of fake tensors."""
    # FSDP asks parameters whether they are on meta, where C++ is told that they are (`fake_cuda`)
    DTensor.device = property(lambda tensor: tensor._local_tensor.device)  # type: ignore[assignment]
    TorchInGraphFunctionVariable._get_handlers()  # by function, one each: before streams are answered by one for two
    with (
        fake_world(layout.world, rank), modelled(Topic.SEVERAL_GPUS), real_meshes(), unseen_shapes(), fake_reducers(),
        followed_streams() as lanes,
        replaced(ConvertFrameAssert, "__call__", _outside_of_modes(ConvertFrameAssert.__call__)),
    ):  # fmt: skip
        with unset_fake_temporarily():  # it computes with its ranks
            mesh = mesh_of(layout, "cuda")
        yield mesh, lanes


def _outside_of_modes(compiles: Callable[..., Any]) -> Callable[..., Any]:
    """Has dynamo compile frames of DistributedDataParallel's module outside of the caller's modes, as it does others.
    On a GPU a step is in none, so that torch need not leave them; here it is in that of fake tensors, by which an input
    that autograd computed, such as logits behind a graph break, would become one of the step's and not of dynamo's."""

    @functools.wraps(compiles)
    def compiled(*args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return compiles(*args, **named)

    return compiled


def record_rank(step: ParallelStep, lanes: Lanes, kept: Kept, meta: Mapping[str, Any]) -> Stream:
    """Compiles a rank's step and returns it as it was recorded; its graphs are those of `kept`."""
    kept.shares = True
    with one_by_one():
        step.warm_up()
        return record_compiled(step, kept, meta, first=lambda: None, lanes=lanes)


def record_compiled(
    step: Any, kept: Kept, meta: Mapping[str, Any], *, first: Callable[[], Any] | None = None,
    lanes: Lanes | None = None,
) -> Stream:  # fmt: skip
    """Returns a step that was compiled into the graphs of `kept` as it is recorded, each call of a graph as one op.
    `first` and `lanes` are for `record_step`."""
    try:
        kept.calls.clear()
        kept.run = functools.partial(_noted, [is_forward(code) for code in kept.graphs])
        return record_step(step, meta, first=first, is_host=_is_host, lanes=lanes, place=place_by_parameters)
    finally:
        kept.run, kept.shares = Kept.run, False


def _is_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _noted(are_forward: Sequence[bool], number: int, inputs: list[Any], make: Callable[[Any], list[Any]]) -> list[Any]:
    """Runs a graph and tells the recorders of it. The forward of a micro-batch begins with a graph where hooks of
    modules, which tell of it else, are compiled away."""
    given = [value for value in inputs if isinstance(value, torch.Tensor)]
    recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
    with contextlib.ExitStack() as stack:
        for recorder in recorders:
            stack.callback(functools.partial(setattr, recorder, "is_paused", recorder.is_paused))
            recorder.is_paused = True
        results = make(inputs)
    for recorder in recorders:
        if recorder.phase == "optimizer" and are_forward[number]:
            recorder.phase = "forward"
        recorder.note(GRAPH, given, [one for one in results if isinstance(one, torch.Tensor)], json.dumps([number]))
    return results
