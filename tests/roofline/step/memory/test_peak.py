"""Peak memory: what `torch.cuda.max_memory_allocated` read on an H200, and what must hold for any model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Operand
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import build
from flopcast.roofline.step.memory.allocator import rounded
from flopcast.roofline.step.memory.lifetimes import summed_in_place
from flopcast.roofline.step.memory.needed import needed_bytes
from flopcast.roofline.step.memory.peak import Target, peak_bytes, reserved_bytes
from flopcast.roofline.stream.library.streams import trace_now
from flopcast.roofline.stream.model.models import make_config, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef
from flopcast.roofline.stream.ops.to_depth import to_depth

Tracing = Callable[..., Stream]
MIB = 1024**2
H200 = Target(capability=(9, 0), sm_count=132)


@pytest.mark.parametrize("name", ["w256d4", "w1024d3", "w1024d3_8x1024f", "w1024d3u_2x2048", "q06b"])
def test_peaks_of_an_h200(name: str, golden: ModuleType, traced: Tracing) -> None:
    record = golden.read(name)
    meta = record["meta"]
    stream = traced(meta["config"], batch=meta["batch"], seq=meta["seq"], optimizer=meta["optimizer"])
    assert peak_bytes(stream, H200) == pytest.approx(record["peak_bytes"], rel=0.01)


def test_more_of_anything_needs_more(tiny: dict[str, Any], traced: Tracing) -> None:
    by_depth = [peak_bytes(to_depth(traced(tiny), depth)) for depth in (2, 3, 5, 9)]
    assert by_depth == sorted(set(by_depth))
    by_batch = [peak_bytes(traced(tiny, batch=batch)) for batch in (2, 8)]
    assert by_batch == sorted(set(by_batch))
    by_seq = [peak_bytes(traced(tiny, seq=seq)) for seq in (32, 64)]
    assert by_seq == sorted(set(by_seq))


@pytest.mark.parametrize("depth", [4, 7])
@pytest.mark.parametrize(
    "run",
    [
        {"precision": "autocast-bf16"},
        {"precision": "bf16"},  # a layer's input is its residual, and freed two layers on
        {"finetune": "lora"},
        {"finetune": "lora", "checkpoint": "full"},
        {"finetune": "lora", "base_dtype": "fp32", "lora_targets": "q_proj,v_proj", "accumulate": 2},
        {"finetune": "qlora"},
        {"finetune": "qlora", "optimizer": "adamw8bit", "lora_rank": 64, "clip": 1.0},
        {"finetune": "qlora", "checkpoint": "full"},
    ],
    ids=str,
)
def test_layers_that_were_unfolded_need_what_traced_ones_do(
    tiny: dict[str, Any], traced: Tracing, run: dict[str, Any], depth: int
) -> None:
    """To less than the smallest of a layer's residuals, whose storages must be matched with one another for this."""
    if "finetune" in run:
        pytest.importorskip("peft")
    how = {"folded": False, "batch": 16, "seq": 128, "optimizer": "adamw-fused", **run}
    unfolded, whole = to_depth(traced(tiny, **how), depth), traced(with_depth(tiny, depth), **how)
    assert peak_bytes(unfolded) == pytest.approx(peak_bytes(whole), abs=1024)


@pytest.mark.parametrize("precision", ["autocast-bf16", "bf16"])
def test_layers_behind_a_frozen_embedding_need_what_traced_ones_do(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """The first layer has no gradient of its input to compute: its calls are fewer than the others'."""

    def with_frozen_embedding(model: Any, *_: Any) -> Any:
        model.get_input_embeddings().requires_grad_(False)
        return model

    monkeypatch.setattr("flopcast.roofline.stream.tracer.trace.fine_tuned", with_frozen_embedding)
    how = Traced(batch=16, seq=128, optimizer="adamw-fused", precision=precision)
    untied = {**tiny, "tie_word_embeddings": False}
    folded = trace_now(untied, how)
    calls = Counter(op.layer for op in folded.ops if op.phase == "backward")
    assert calls[0] < calls[1] == calls[2]
    for depth in (4, 7):
        whole = peak_bytes(trace_now(with_depth(untied, depth), how))
        assert peak_bytes(to_depth(folded, depth)) == pytest.approx(whole, abs=1024)


def test_at_least_weights_and_optimizer(tiny: dict[str, Any], traced: Tracing) -> None:
    """fp32 weights, gradients and two moments: 16 bytes a parameter, whatever else."""
    for optimizer in ("adamw", "adamw-fused"):
        stream = traced(tiny, optimizer=optimizer)
        assert peak_bytes(stream) > 16 * stream.n_params


def test_workspaces_by_generation() -> None:
    assert Target((9, 0)).workspace_bytes == 64 * MIB
    assert Target((9, 0), is_captured=True).workspace_bytes == 32 * MIB
    assert 16 * MIB < Target((8, 0)).workspace_bytes < 17 * MIB
    assert Target().workspace_bytes == 0


def small(sizes: list[int], kinds: list[str], freed: tuple[int, ...] = ()) -> Stream:
    """One op a storage, each making it; a last one frees `freed` and makes nothing."""
    operands = [Operand((size,), (1,), "uint8") for size in sizes]
    ops = [Op("aten.empty.memory_format", "forward", (), (i,)) for i in range(len(sizes))]
    return Stream(
        ops=(*ops, Op("aten.empty.memory_format", "forward", (), (), freed=freed)),
        tensors=tuple(TensorRef(operand, i) for i, operand in enumerate(operands)),
        storages=tuple(Storage(size, kind) for size, kind in zip(sizes, kinds, strict=True)),
        n_params=0,
    )


def test_lifetimes() -> None:
    assert peak_bytes(small([512, 1024], ["activation", "activation"])) == 1536
    assert peak_bytes(small([512, 1024], ["host", "activation"])) == 1024
    assert peak_bytes(small([100, 1], ["parameter", "activation"])) == 1024  # each block rounded up to 512
    assert peak_bytes(small([512], ["activation"]), H200) == 512 + 64 * MIB
    stream = small([4096, 512, 4096], ["activation"] * 3)
    reused = replace(stream, ops=(stream.ops[0], stream.ops[1], stream.ops[2]._replace(freed=(0,)), stream.ops[3]))
    assert peak_bytes(reused) == 4608  # the first is gone when the third is made
    assert peak_bytes(stream) == 8704


@given(sizes=st.lists(st.integers(0, 10**6), min_size=1, max_size=20), data=st.data())
def test_peak_is_between_the_largest_and_the_sum(sizes: list[int], data: st.DataObject) -> None:
    kinds = data.draw(st.lists(st.sampled_from(["activation", "parameter"]), min_size=len(sizes), max_size=len(sizes)))
    peak = peak_bytes(small(sizes, kinds))
    assert peak == sum(rounded(size) for size in sizes)
    assert all(rounded(size) - size < 512 and rounded(size) % 512 == 0 for size in sizes)


@given(sizes=st.lists(st.integers(0, 10**8), min_size=1, max_size=20))
def test_a_gpu_must_hold_more_than_the_peak(sizes: list[int]) -> None:
    stream = small(sizes, ["activation"] * len(sizes))
    needed = needed_bytes(stream, Layout())
    assert peak_bytes(stream) + 600 * MIB <= needed <= reserved_bytes(stream) + 600 * MIB
    assert needed_bytes(stream, Layout(kind="ddp", shards=2)) == reserved_bytes(stream) + 1613 * MIB


def test_gradients_of_tied_embeddings_are_summed_in_place(traced: Tracing) -> None:
    """An H200 read 15,409,454,592 bytes (width 2560, 6 layers, 4 x 256 tokens, fused AdamW); with a third gradient of
    the embeddings for their sum, as a recorder sees it, it would have been 1.56 GB more."""
    stream = traced(make_config(width=2560, depth=6), batch=4, seq=256, optimizer="adamw-fused")
    assert peak_bytes(stream, H200) == pytest.approx(15_409_454_592, rel=0.005)


@pytest.mark.parametrize(("precision", "in_place"), [("autocast-bf16", True), ("bf16", False), ("fp32", False)])
def test_autograd_sums_in_place_where_the_first_gradient_is_no_view(
    tiny: dict[str, Any], traced: Tracing, precision: str, in_place: bool
) -> None:
    """Of tied embeddings: the head's gradient comes first, transposed, which autocast casts."""
    size = [tiny["vocab_size"], tiny["hidden_size"]]
    step = build(tiny, "cpu", Recipe(batch=2, seq=16, precision=precision))
    step.run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        step.run()
    sums = {event.name for event in profiler.events() if event.name in SUMS and event.input_shapes[:2] == [size, size]}
    assert sums == {SUMS[in_place]}
    stream = traced(tiny, precision=precision)
    (number,) = (
        number for number, op in enumerate(stream.ops)
        if op.name == "aten.add.Tensor" and list(stream.tensors[op.outputs[0]].operand.shape) == size
    )  # fmt: skip
    assert bool(summed_in_place(stream, number, stream.ops[number + 1])) is in_place


SUMS = ("aten::add", "aten::add_")
