"""What one rank of a step on several GPUs launches: collectives by closed forms, lanes, waits, and unfolded depths."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.stream.model.models import make_config, n_params
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import FOLDED_PARALLEL, Stream, from_json, to_json
from flopcast.roofline.stream.ops.to_buckets import BUCKET_EACH as EACH
from flopcast.roofline.stream.ops.to_buckets import to_buckets
from flopcast.roofline.stream.ops.to_depth import to_depth

RANKS = 8
BF16, FP32 = 2, 4


def config(depth: int) -> dict[str, object]:
    return make_config(width=256, depth=depth, heads=4, kv_heads=2, head_dim=64, vocab=1024)


@cache
def traced(layout: str, depth: int = FOLDED_PARALLEL, bucket_mib: float | None = None) -> Stream:
    from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

    run = Traced(batch=2, seq=128, optimizer="adamw-fused", parallel=layout)
    return trace_rank(config(depth), run, bucket_mib)


def sent(stream: Stream, kind: str, phase: str) -> list[tuple[int, str]]:
    """(bytes, dtype) of the collectives of a kind in a phase."""
    return [(c.bytes, c.dtype) for c in collectives(stream) if c.kind == kind and stream.ops[c.op].phase == phase]


def per_layer(stream: Stream) -> tuple[int, int]:
    """Parameters of one layer, and of all that is in none."""
    assert stream.depth is not None
    layer = int(stream.meta["layer_params"])
    return layer, stream.n_params - layer * stream.depth


def test_fsdp_gathers_each_layer_twice_and_scatters_its_gradients_once() -> None:
    stream = traced(f"fsdp={RANKS}")
    layer, rest = per_layer(stream)
    assert stream.n_params == n_params(config(FOLDED_PARALLEL))
    layers = [(layer * BF16, "bf16")] * FOLDED_PARALLEL
    assert sent(stream, "all_gather", "forward") == [(rest * BF16, "bf16"), *layers]
    assert sent(stream, "all_gather", "backward") == layers  # the root keeps its own
    assert sent(stream, "reduce_scatter", "backward") == [(layer * FP32, "fp32")] * FOLDED_PARALLEL + [
        (rest * FP32, "fp32")
    ]
    assert {(c.ranks, c.stride) for c in collectives(stream)} == {(RANKS, 1)}


def test_zero2_gathers_once() -> None:
    stream = traced(f"zero2={RANKS}")
    assert len(sent(stream, "all_gather", "forward")) == FOLDED_PARALLEL + 1
    assert sent(stream, "all_gather", "backward") == []
    assert sum(size for size, _ in sent(stream, "reduce_scatter", "backward")) == stream.n_params * FP32


def test_a_rank_holds_its_shard_of_parameters_gradients_and_states() -> None:
    stream = traced(f"fsdp={RANKS}")
    held = {kind: sum(s.bytes for s in stream.storages if s.kind == kind) for kind in ("parameter", "gradient")}
    shard = stream.n_params * FP32 // RANKS  # every size divides
    assert held == {"parameter": shard, "gradient": shard}
    states = sum(s.bytes for s in stream.storages if s.kind == "state" and s.bytes > FP32)
    assert states == 2 * shard


def test_ddp_reduces_every_gradient_once_in_buckets() -> None:
    stream = to_buckets(traced(f"ddp={RANKS}", bucket_mib=EACH))
    found = [size for size, _ in sent(stream, "all_reduce", "backward")]
    assert sum(found) == stream.n_params * FP32
    assert found[0] >= 2**20 > found[0] - 768 * 256 * FP32  # closed by the gradient that filled it
    assert sum(s.bytes for s in stream.storages if s.kind == "bucket") == stream.n_params * FP32


def test_buckets_are_those_that_torch_makes() -> None:
    own, joined = traced("ddp=2"), to_buckets(traced("ddp=2", bucket_mib=EACH))
    assert [c[:7] for c in collectives(own)] == [c[:7] for c in collectives(joined)]
    assert ops_of(own) == ops_of(joined)


def ops_of(stream: Stream) -> list[tuple[object, ...]]:
    """Every op with where it runs and what it waits for. Views of gradients come in the order of buckets."""
    is_view = "aten.as_strided.default"
    return [
        (op.name, op.phase, op.layer, op.module, op.kind, op.lane, op.waits, len(op.freed),
         *(stream.tensors[i].operand for i in (*op.inputs, *op.outputs) if op.name != is_view))
        for op in stream.ops
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "bucket_mib", "finish"),
    [("fsdp=8", None, lambda stream: stream), ("ddp=8", EACH, to_buckets)],
)  # fmt: skip
def test_four_layers_stand_for_six(layout: str, bucket_mib: float | None, finish: Callable[[Stream], Stream]) -> None:
    unfolded = finish(to_depth(traced(layout, bucket_mib=bucket_mib), 6))
    whole = finish(traced(layout, 6, bucket_mib))
    assert ops_of(unfolded) == ops_of(whole)
    assert peak_bytes(unfolded) == pytest.approx(peak_bytes(whole), abs=1024)  # a buffer that no op touches
    assert unfolded.n_params == whole.n_params


def test_many_ranks_launch_what_few_do() -> None:
    few, many = traced(f"fsdp={RANKS}"), traced("fsdp=128")
    assert [op.name for op in few.ops] == [op.name for op in many.ops]
    assert {c.ranks for c in collectives(many)} == {128}


def test_gathering_and_scattering_have_lanes_of_their_own() -> None:
    stream = traced(f"fsdp={RANKS}")
    of_kind = {
        kind: {c.lane for c in collectives(stream) if c.kind == kind} for kind in ("all_gather", "reduce_scatter")
    }
    assert all(len(lanes) == 1 and 0 not in lanes for lanes in of_kind.values())
    assert of_kind["all_gather"] != of_kind["reduce_scatter"]
    copies = [op for op in stream.ops if op.name == "fsdp.split_with_sizes_copy.default"]
    gathers = [i for i, op in enumerate(stream.ops) if op.name == "c10d._allgather_base_.default"]
    # each layer computes once what was gathered for it is there
    assert all(op.lane == 0 and set(op.waits) & set(gathers) for op in copies)
    # in the backward the next layer is gathered before this one computes
    first = next(i for i in gathers if stream.ops[i].phase == "backward")
    assert stream.ops[first].layer is None


def test_the_optimizer_waits_for_all_gradients() -> None:
    for stream in (traced(f"fsdp={RANKS}"), traced("ddp=2")):
        last = max(c.op for c in collectives(stream))
        following = next(op for op in stream.ops[last + 1 :] if op.phase == "optimizer")
        assert any(wait >= last for wait in following.waits)


def test_a_rank_is_kept_in_a_file() -> None:
    stream = traced(f"fsdp={RANKS}")
    kept = from_json(to_json(stream))
    assert kept == stream
    record = to_json(stream)
    record["ops"][5][-1] = [7]
    with pytest.raises(UsageError, match="op 5 waits for one that does not come before it"):
        from_json(record)


@pytest.mark.parametrize("layout", ["ep=2,pp=2", "pp=2,tp=2", "cp=2,tp=2", "zero1=2,pp=2"])
def test_parts_that_are_not_put_together_are_refused(layout: str) -> None:
    with pytest.raises(UsageError, match="valid together are zero2, fsdp or hsdp with tp"):
        traced(layout)


def test_tensor_parallel_reduces_activations_in_every_layer() -> None:
    stream = traced("tp=2")
    tokens, width, head_dim = 2 * 128, 256, 64
    # forward: after o and down. Backward: before q, k, v, gate and up, each by itself. Norms of heads: q's and k's.
    assert sent(stream, "all_reduce", "forward") == [(tokens * width * BF16, "bf16")] * 2 * FOLDED_PARALLEL
    assert sent(stream, "all_reduce", "backward") == [(tokens * width * FP32, "fp32")] * 5 * FOLDED_PARALLEL
    assert sent(stream, "all_reduce", "optimizer") == [(head_dim * FP32, "fp32")] * 2 * FOLDED_PARALLEL
    assert all(c.lane != 0 for c in collectives(stream))


def test_who_uses_a_reduced_activation_waits_for_it() -> None:
    stream = traced("tp=2")
    for sum_ in collectives(stream):
        (made,) = {stream.tensors[i].storage for i in stream.ops[sum_.op].inputs}  # a copy, in which it sums
        user = next(
            op for op in stream.ops[sum_.op + 1 :]
            if op.kind == "launch" and made in {stream.tensors[i].storage for i in op.inputs}
        )  # fmt: skip
        assert user.lane == 0
        assert any(wait >= sum_.op for wait in user.waits)


def test_a_world_does_not_go_on_with_the_groups_of_the_one_before() -> None:
    """DTensor keeps what it worked out for meshes that are alike to it."""
    from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

    small = make_config(width=128, depth=2, heads=2, kv_heads=2, head_dim=64, vocab=512)
    for layout in ("tp=2,hsdp=2x2", "tp=2,fsdp=4"):
        stream = trace_rank(small, Traced(batch=2, seq=32, optimizer="adamw-fused", parallel=layout))
    divided = [one for one in collectives(stream) if "functional" in stream.ops[one.op].name]
    assert {(one.ranks, one.stride) for one in divided} <= {(2, 1), (4, 2)}
    assert (2, 1) in {(one.ranks, one.stride) for one in divided}


@pytest.mark.parametrize(
    ("layout", "accumulate", "rank"), [("ddp=2", 3, 0), ("fsdp=2,pp=2", 3, 0), ("ddp=2,pp=2", 2, 2)]
)
def test_a_step_is_steady_after_the_fewest_micro_batches(
    layout: str, accumulate: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the two whole steps that real ranks run first: neither states nor buckets nor what is sent differ."""
    from flopcast.microbench.recipe.parallel_step import ParallelStep
    from flopcast.microbench.recipe.pipeline_step import PipelineStep
    from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

    run = Traced(batch=1, seq=16, accumulate=accumulate, parallel=layout, rank=rank)
    settled = trace_rank(config(2), run)
    for kind in (ParallelStep, PipelineStep):
        monkeypatch.setattr(kind, "settle", kind.warm_up)
    assert trace_rank(config(2), run) == settled


def test_parts_of_parameters_are_those_that_torch_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    from flopcast.roofline.stream.tracer.parallel.trace import trace_rank
    from flopcast.roofline.stream.tracer.parallel.world import parts_of_one_rank

    own = _fsdp_param._chunk_with_empty
    for size, count in ((12, 4), (10, 4), (3, 8), (1, 2)):
        tensor = torch.arange(2 * size).view(size, 2)
        with parts_of_one_rank():
            found = _fsdp_param._chunk_with_empty(tensor, count, 0)
        for number, part in enumerate(own(tensor, count, 0)):
            assert torch.equal(found[number], part), (size, count, number)

    def all_made(*_: object) -> None:
        raise AssertionError("the parts of all ranks are made")

    monkeypatch.setattr(_fsdp_param, "_chunk_with_empty", all_made)
    assert collectives(trace_rank(config(1), Traced(batch=1, seq=16, parallel="fsdp=64")))
