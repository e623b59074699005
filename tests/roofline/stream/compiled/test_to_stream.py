"""The op stream of a compiled step, made of what inductor generated on an H200, against that step's records."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from functools import cache

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.step.memory.peak import Target, peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.compiled.layers import fold
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER, eager_stream, graphs_of, run_of
from studies.compiled.steps import Compared, compared

BY_NAME = {case.name: case for case in CASES}
NAMES = ("mlp", "qwen3-0.6b-l2", "llama-3.2-1b-l2")
H200 = Target(capability=(9, 0), sm_count=132)


@cache
def streams(name: str) -> tuple[Stream, Stream]:
    """The compiled step's and the eager one's."""
    eager = eager_stream(BY_NAME[name])
    return to_stream(graphs_of(FOLDER, name), eager), eager


@cache
def found(name: str) -> Compared:
    return compared(BY_NAME[name], find_profile("nvidia-h200"))


def with_small_activations(stream: Stream) -> Stream:
    return replace(
        stream,
        storages=tuple(s._replace(bytes=s.bytes // 1000) if s.kind == "activation" else s for s in stream.storages),
    )


def flops(stream: Stream) -> int:
    return sum(work.flops for work in describe_ops(stream) if work is not None)


@pytest.mark.parametrize("name", NAMES)
def test_every_launch_is_an_op_and_the_optimizer_stays(name: str) -> None:
    compiled, eager = streams(name)
    launches = sum(len(graph.launches) for graph in graphs_of(FOLDER, name))
    made = [op for op in compiled.ops if op.name == "aten.full.default"]  # gradients of the results
    assert sum(op.phase != "optimizer" for op in compiled.ops) == launches + len(made)
    ours, theirs = ([op for op in stream.ops if op.phase == "optimizer"] for stream in (compiled, eager))
    assert ours[0]._replace(freed=()) == theirs[0]._replace(freed=())
    assert ours[1:] == theirs[1:]


def test_nothing_of_the_backward_is_left_for_the_optimizer() -> None:
    stream, _ = streams("qwen3-0.6b-l2")
    last = {"gradient", "parameter", "state", "buffer", "input", "host"}
    live: set[int] = set()
    for op in stream.ops:
        live -= set(op.freed)
        if op.phase == "optimizer":
            break
        live |= {stream.tensors[i].storage for i in (*op.inputs, *op.outputs)}
    assert {stream.storages[i].kind for i in live} <= last


@pytest.mark.parametrize("name", ["mlp", "qwen3-0.6b-l2"])
def test_compiling_leaves_the_products_as_they_are(name: str) -> None:
    """But for what is computed again, or not causal any more: attention takes a mask."""
    compiled, eager = streams(name)
    assert flops(compiled) == pytest.approx(flops(eager), rel=0.05)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_made_before_it_is_read_and_freed_once(name: str) -> None:
    stream, _ = streams(name)
    live = {i for i, storage in enumerate(stream.storages) if storage.kind != "activation"}
    freed: set[int] = set()
    for op in stream.ops:
        assert freed.isdisjoint(op.freed)
        freed |= set(op.freed)
        live -= set(op.freed)
        if op.phase != "optimizer":
            assert {stream.tensors[i].storage for i in op.inputs} <= live
        live |= {stream.tensors[i].storage for i in op.outputs}


@pytest.mark.parametrize(
    ("name", "most"), [("mlp", 0.002), ("qwen3-0.6b-l2", 0.002), ("llama-3.2-1b-l2", 0.002), ("gpt2-l2", 0.002)]
)
def test_peak_memory_is_what_was_allocated_on_the_gpu(name: str, most: float) -> None:
    assert abs(found(name).bytes_error or 0.0) <= most
    compiled, eager = streams(name)
    assert peak_bytes(compiled, H200) < peak_bytes(eager, H200)


@pytest.mark.parametrize(("name", "most"), [("llama-3.2-1b-l2", 0.002), ("gpt2-l2", 0.002)])
def test_captured_graphs_hold_copies_of_what_they_read(name: str, most: float) -> None:
    """Of the batch, and of the zeros that autograd makes for the logits' gradient: 2.1 GB of Llama's, none of GPT-2's,
    whose loss is another graph. Peaks as allocated on the GPU."""
    record = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))["timed"]["compile-graphs"]
    graphs = [replace(graph, captured=((0, len(graph.launches)),)) for graph in graphs_of(FOLDER, name)]
    stream = to_stream(graphs, streams(name)[1])
    assert peak_bytes(stream, replace(H200, is_captured=True)) == pytest.approx(record["peak_bytes"], rel=most)
    copies = [op for op in stream.ops if op.name == "aten.copy_.default"]
    assert copies[0].phase == "forward"


@pytest.mark.parametrize(("name", "most"), [("mlp", 0.045), ("qwen3-0.6b-l2", 0.01), ("llama-3.2-1b-l2", 0.01)])
def test_products_and_optimizer_take_the_time_that_they_took(name: str, most: float) -> None:
    one = found(name)
    assert one.forecast["gemm"] == pytest.approx(one.measured["gemm"], rel=most)
    assert one.forecast["optimizer"] == pytest.approx(one.measured["optimizer"], rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_generated_kernels_are_priced_with_the_step(name: str) -> None:
    one = found(name)
    assert one.forecast["generated"] == pytest.approx(one.measured["generated"], rel=0.05)
    step = PricedStep(streams(name)[0], run_of(BY_NAME[name]), find_profile("nvidia-h200"))
    generated = step.by_class["generated"]
    assert all(op.sigma > 0 and op.basis == "interpolated" and op.launches == 1 for op in generated)
    assert sum(op.seconds for op in generated) == pytest.approx(one.forecast["generated"])
    elsewhere = PricedStep(streams(name)[0], run_of(BY_NAME[name]), find_profile("nvidia-a100-80gb-sxm"))
    assert {op.basis for op in elsewhere.by_class["generated"]} == {"extrapolated"}
    assert elsewhere.device_sigma > step.device_sigma


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_launches_around_the_generated_kernels_is_priced(name: str) -> None:
    """Sums of a mixed-order reduction's parts, zeros for gradients that nothing uses."""
    one = found(name)
    for group in ("reduction", "elementwise"):
        if one.measured.get(group):
            assert one.forecast[group] == pytest.approx(one.measured[group], rel=0.1)


def test_three_layers_of_which_one_runs_26_times_are_a_model_of_28() -> None:
    """Time, memory and launches of the whole model's own code, which inductor took a minute and a half to make."""
    whole = BY_NAME["qwen3-0.6b-8x1024"]
    two, three = (graphs_of(FOLDER, name) for name in ("qwen3-0.6b-l2", "qwen3-0.6b-l3"))
    eager = eager_stream(whole)
    stretches = {one.graph.label: one.stretches(3) for one in fold(two, three, 2)}
    shallow = eager_stream(replace(whole, layers=3))
    profile, run = find_profile("nvidia-h200"), run_of(whole)
    folded, full = (
        PricedStep(stream, run, profile)
        for stream in (
            to_depth(to_stream(three, shallow, stretches), 28), to_stream(graphs_of(FOLDER, whole.name), eager),
        )
    )  # fmt: skip
    assert folded.parameters == full.parameters
    assert len(folded.stream.ops) < len(full.stream.ops) / 5
    assert folded.peak_bytes == pytest.approx(full.peak_bytes, rel=1e-4)  # what is left of blocks lies elsewhere
    # with small activations, as of few tokens, the optimizer's gradients and states are the peak: each is there once
    optimizers = [peak_bytes(with_small_activations(step.stream)) for step in (folded, full)]
    assert optimizers[0] == pytest.approx(optimizers[1], rel=1e-3)
    assert optimizers[1] == pytest.approx(16 * full.stream.n_params, rel=0.01)
    assert folded.flops == full.flops
    assert sum(op.launches for op in folded.ops) == sum(op.launches for op in full.ops)
    assert folded.timeline.device_seconds == pytest.approx(full.timeline.device_seconds, rel=1e-6)
    assert folded.device_sigma == pytest.approx(full.device_sigma, rel=0.02)
    assert folded.timeline.step_seconds() == pytest.approx(full.timeline.step_seconds(), rel=1e-6)


def test_gradients_of_convolutions_that_run_channels_last_are_copied() -> None:
    """The first convolution's and those of 3 x 3 of a ResNet-50: a window of one element lies either way. The last
    convolution's backward copies what it is given, as the profile has it."""
    compiled, _ = streams("resnet50")
    backward = [op for op in compiled.ops if op.phase == "backward"]
    before, *cloned = (op for op in backward if op.name == "aten.clone.default")
    assert backward[backward.index(before) + 1].name == "aten.convolution_backward.default"
    shapes = [compiled.tensors[op.inputs[0]].operand.shape for op in cloned]
    assert len(shapes) == 17
    assert all(len(shape) == 4 and shape[2] > 1 for shape in shapes)


def test_a_wait_between_graphs_stops_the_host_where_it_stands() -> None:
    """A value is read after the forward: the host cannot enqueue the backward beside it, and the step is longer.
    Without a power limit, which holds a device that waits less."""
    name = "mlp"
    waiting = to_stream(graphs_of(FOLDER, name), eager_stream(BY_NAME[name]), waited_after=(1,))
    (place,) = (i for i, op in enumerate(waiting.ops) if op.kind == "sync")
    (_, _, last), (_, first, _) = waiting.meta["graphs"]
    assert last < place < first
    profile = find_profile("nvidia-h200")
    endless = replace(profile, device={**profile.device, "power_limit_w": None})
    free, stopped = (
        PricedStep(stream, run_of(BY_NAME[name]), endless).interval.value for stream in (streams(name)[0], waiting)
    )
    assert stopped > 1.05 * free
