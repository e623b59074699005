"""Streams of steps on several GPUs come from the same place as others: traced once, for any depth, and cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.files import cache_folder
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.stream.library import streams
from flopcast.roofline.stream.library.stored import shipped_path, stream_key
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.model.models import Config, depth_of, load_config, make_config, n_params, with_depth
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import FOLDED_PARALLEL, Stream
from flopcast.roofline.stream.ops.to_buckets import to_buckets, with_buckets
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

pytestmark = pytest.mark.usefixtures("cache_of_the_module")

CONFIG = make_config(width=256, depth=6, heads=4, kv_heads=2, head_dim=64, vocab=1024)


def run(parallel: str, **options: Any) -> Run:
    return Run(**{"batch": 2, "seq": 64, "optimizer": "adamw-fused", "parallel": parallel, **options})


def asked(parallel: str, **options: Any) -> Traced:
    made = run(parallel, **options)
    made.check()
    return made.traced_on("cuda")


def calls(stream: Stream) -> list[tuple[Any, ...]]:
    return [
        (op.name, op.phase, op.layer, op.kind, op.lane, op.waits,
         *(stream.tensors[i].operand for i in (*op.inputs, *op.outputs) if "as_strided" not in op.name))
        for op in stream.ops
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("hsdp=2x2", {"clip": 1.0}), ("tp=2", {}), ("tp=2,fsdp=2", {}), ("cp=2,fsdp=2", {"accumulate": 2}),
        ("zero1=2", {"clip": 1.0}), ("fsdp=2", {"finetune": "last=2"}), ("ddp=2", {"optimizer": "muon"}),
        ("fsdp=2", {"finetune": "lora", "clip": 1.0}), ("ddp=2", {"finetune": "lora"}),
        ("ddp=2", {"finetune": "qlora"}),
    ],
)  # fmt: skip  # and in test_trace_rank.py fsdp and ddp
def test_a_rank_at_any_depth_is_that_of_a_whole_trace(layout: str, options: dict[str, Any]) -> None:
    if options.get("finetune") in ("lora", "qlora"):
        pytest.importorskip("peft")
    traced, deep = asked(layout, **options), with_depth(CONFIG, FOLDED_PARALLEL + 1)
    known: dict[tuple[int, Traced], Stream] = {}

    def once(config: Config, traced: Traced) -> Stream:
        """Of ZeRO-1, and where layers are frozen, all layers are traced for `get_stream` too."""
        key = depth_of(config), traced
        if key not in known:
            known[key] = trace_now(config, traced)
        return known[key]

    stream, whole = get_stream(deep, traced, trace=once), once(deep, traced)
    if layout.startswith(("ddp", "zero1")):
        whole = to_buckets(whole)
    assert stream.depth == FOLDED_PARALLEL + 1
    assert stream.n_params == whole.n_params
    assert collectives(stream)
    assert calls(stream) == calls(whole)


@pytest.mark.parametrize(("layout", "rank"), [("fsdp=2,pp=2", 0), ("ddp=2,pp=2", 2)])
def test_a_stage_of_replicas_at_any_depth_is_that_of_a_whole_trace(layout: str, rank: int) -> None:
    """Of the first stage the last layer gathers its own parameters too, of which no layer before shows an example. A
    stage reduces its gradients after the last micro-batch, the first layer's first."""
    deep, traced = with_depth(CONFIG, 10), replace(asked(layout, accumulate=2, seq=16), rank=rank)
    found = to_depth(trace_now(streams.folded(deep, traced), traced), 5)
    if layout == "ddp=2,pp=2":
        found, want = to_buckets(found), with_buckets(trace_rank(deep, traced))  # torch's own
    else:
        want = trace_now(deep, traced)
        assert in_order(found) == in_order(want)
    assert calls(found) == calls(want)
    assert found.n_params == want.n_params


@pytest.mark.parametrize("layout", ["ddp=2", "fsdp=2"])
def test_many_micro_batches_of_a_rank_are_as_all_of_them_traced(layout: str) -> None:
    """Written out from four: the same calls, waits and blocks of memory."""
    tiny = with_depth(CONFIG, 1)
    traced = asked(layout, accumulate=5, seq=16)
    found, want = get_stream(tiny, traced), trace_now(tiny, traced)
    want = to_buckets(want) if layout == "ddp=2" else want
    assert calls(found) == calls(want)
    assert in_order(found) == in_order(want)
    assert found.meta == want.meta
    assert peak_bytes(found) == peak_bytes(want)


def in_order(stream: Stream) -> list[list[int]]:
    """The blocks of memory that each operation uses and frees, numbered as they come."""
    numbers: dict[int, int] = {}
    found = []
    for op in stream.ops:
        used = [stream.tensors[tensor].storage for tensor in (*op.inputs, *op.outputs)]
        freed = sorted(op.freed, key=lambda storage: numbers.get(storage, 0))
        found.append([numbers.setdefault(storage, len(numbers)) for storage in (*used, *freed)])
    return found


def test_ranks_send_of_qlora_what_they_send_of_lora() -> None:
    """The gradients of adapters, and the one buffer of the model: no scales of 4-bit weights."""
    pytest.importorskip("peft")
    lora, qlora = (get_stream(with_depth(CONFIG, 2), asked("ddp=2", finetune=way)) for way in ("lora", "qlora"))
    sent = [[(one.kind, one.bytes, one.dtype) for one in collectives(stream)] for stream in (lora, qlora)]
    assert sent[0] == sent[1]


def test_a_pipeline_is_all_its_stages() -> None:
    traced = asked("pp=2", accumulate=2)
    last = get_stream(CONFIG, traced)
    (first,) = last.stages_before
    assert (last.n_params, last.depth) == (n_params(CONFIG), 6)
    for rank, stage in enumerate((first, last)):
        assert calls(stage) == calls(trace_now(CONFIG, replace(traced, rank=rank)))
    sent = [[(c.peer, c.is_sent) for c in collectives(stage) if c.kind == "send_recv"] for stage in (first, last)]
    assert sent[0].count((1, True)) == sent[0].count((1, False)) == 2
    assert sent[1].count((0, True)) == sent[1].count((0, False)) == 2
    assert peak_bytes(first) > peak_bytes(last) / 2


@pytest.mark.parametrize("layout", ["ddp=2", "fsdp=2"])
def test_a_rank_is_traced_once(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = get_stream(CONFIG, asked(layout))
    assert any(cache_folder("streams").rglob("*.json.gz"))

    def no_tracing(*_: Any) -> Any:
        raise AssertionError("traced again")

    monkeypatch.setattr(streams, "trace_now", no_tracing)
    assert get_stream(CONFIG, asked(layout)) == first
    assert get_stream(with_depth(CONFIG, 9), asked(layout)).depth == 9
    with pytest.raises(AssertionError, match="traced again"):
        get_stream(CONFIG, asked(layout.replace("=2", "=4")))


def test_the_batch_of_a_rank_is_varied() -> None:
    varied, few = asked("fsdp=2", batch=7), with_depth(CONFIG, 3)
    assert calls(get_stream(few, varied, vary="batch")) == calls(trace_now(few, varied))


def test_steps_of_one_gpu_keep_their_keys() -> None:
    folded = streams.folded(load_config("qwen3-0.6b"), Traced())
    assert shipped_path(stream_key(folded, Traced())).is_file()


def refused(function: Callable[[], Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        function()


def test_what_cannot_be_is_refused_with_what_can() -> None:
    refused(run("fsdp").check, "'fsdp' is no part of a layout; valid are ddp=8")
    refused(run("zero1=2,pp=2").check, "pp and zero1 are not modelled together; valid together are zero2, fsdp")
    refused(run("fsdp=1").check, "fsdp=1 is one GPU: valid are two and more")
    refused(run("hsdp=1x4").check, "hsdp=1x4 has one replica: give fsdp=4")
    refused(run("tp=2", mode="compile").check, "mode compile with parallel tp=2.* valid with it are ddp=N, zero1=N")
    refused(run("ddp=2", mode="compile-graphs").check, "mode compile-graphs with parallel ddp=2: a CUDA graph reads")
    refused(run("pp=2", accumulate=2, clip=1.0).check, "clip 1.0 with parallel pp=2: .* each trainer sums it")
    refused(run("fsdp=2", optimizer="muon").check, "optimizer 'muon' with parallel fsdp=2.*of ddp=N alone")
    refused(lambda: run("ddp=2").traced_on("cpu"), "parallel ddp=2 on processors")
    refused(lambda: get_stream(CONFIG, asked("tp=3")), "tp=3 does not divide heads 4 .* valid are 1, 2")


def test_tokens_are_those_of_all_data_parallel_ranks() -> None:
    assert run("fsdp=8").tokens == 8 * 2 * 64
    assert run("hsdp=2x4").tokens == 8 * 2 * 64
    assert run("tp=2").tokens == 2 * 64
