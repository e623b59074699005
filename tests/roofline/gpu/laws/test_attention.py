"""Attention's schedule: what flash launches as its source says, and blocks dealt out to SMs as counted by hand."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.laws import attention
from flopcast.roofline.gpu.laws.attention import dealt, flash_splits, schedule_of
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import parse_variant

MEASURED = (
    Path(__file__).resolve().parents[4] / "reports" / "nvidia-h200" / "measurements" / "gpu0" / "measurements.jsonl.gz"
)
BASE = {
    "peak": 1e15, "sm_count": 132.0, "efficiency": 0.5, "prologue": 1e-6, "floor": 3e-6, "bandwidth": 4e12,
    "fade": 0.0, "uneven": 0.1, "follow_floor": 1e-6, "follow_bandwidth": 4e12, "sum_bandwidth": 2e12,
    "merge": 2e-6, "merge_row": 8e-10,
}  # fmt: skip


def seconds(shape: Attention, backend: str) -> float:
    work = describe(shape, backend)
    params = {**BASE, **schedule_of(backend, shape.direction, shape.head_dim)}
    features = np.array([work.features])
    sizes = np.array([float(work.bytes)]), np.array([float(work.flops)])
    return float(np.exp(attention.log_seconds(work.variant, params, features, *sizes))[0])


def test_flash_splits_the_keys_where_it_was_seen_to() -> None:
    rows = [json.loads(line) for line in gzip.decompress(MEASURED.read_bytes()).splitlines()]
    seen = {}
    for row in rows:
        shape = row.get("shape") or {}
        if row["backend"] == "sdpa-flash" and shape.get("direction") == "fwd" and row.get("kernels"):
            size = shape["batch"] * shape["heads"], shape["seq"], shape["head_dim"]
            seen[size] = "splitkv" in row["kernels"][0][0]
    assert len(set(seen.values())) == 2
    assert {size: flash_splits(*size, 132) > 1 for size in seen} == seen


@pytest.mark.parametrize(("heads", "rounds"), [(1, 1), (66, 1), (67, 2), (132, 2), (133, 3)])
def test_blocks_of_one_length_run_in_rounds(heads: int, rounds: int) -> None:
    """Two blocks a head on 132 SMs."""
    assert dealt((5, 5), heads, 132, 1, 0.5) == pytest.approx(rounds * 5.5)


def test_a_causal_call_waits_for_its_longest_block() -> None:
    assert dealt((1, 2, 3, 4), 2, 132, 1, 0.0) == 4.0
    assert dealt((1, 2, 3, 4), 1, 2, 1, 0.0) == 6.0  # 1 then 3, 2 then 4
    assert dealt((4, 3, 2, 1), 1, 2, 1, 0.0) == 5.0  # the longest first


def test_two_blocks_on_an_sm_share_it() -> None:
    """Paces 0.8 and 0.533 while both run, 1 for the one that is left."""
    assert dealt((3, 1), 1, 1, 2, 0.0) == pytest.approx(1.875 + (3 - 0.8 * 1.875))
    assert dealt((1, 3), 1, 1, 2, 0.0) == pytest.approx(1.25 + (3 - 1.25 * 1.6 / 3))
    # all SMs alike: as many blocks on each of seven as on one
    assert dealt((5,), 35, 7, 2, 0.5) == dealt((5,), 5, 1, 2, 0.5)


def test_a_masked_step_of_flash_takes_longer() -> None:
    """Blocks of 128 queries over steps of 64 keys: the last two of a causal block are masked, three where a head's
    last block is part empty; without a mask none is."""
    params = schedule_of("sdpa-flash", "fwd", 128)
    more = params["masked"]
    assert attention._lengths(parse_variant("fwd/causal/bf16/d128"), params, 256) == (2 + 2 * more, 4 + 2 * more)
    assert attention._lengths(parse_variant("fwd/causal/bf16/d128"), params, 197) == (2 + 2 * more, 4 + 3 * more)
    assert attention._lengths(parse_variant("fwd/full/bf16/d128"), params, 256) == (4, 4)
    schedule = schedule_of("sdpa-flash", "bwd", 128)
    assert attention._lengths(parse_variant("bwd/causal/bf16/d128"), schedule, 256) == (4, 2)


def test_the_residual_knows_part_empty_blocks_and_rounds_apart() -> None:
    """264 places on 132 SMs: 33 heads of 8 blocks fill them once; a profile of before has two inputs less."""
    params = {**BASE, **schedule_of("sdpa-flash", "fwd", 128)}
    features = np.array([describe(shape, "sdpa-flash").features for shape in (
        Attention(batch=1, heads=33, kv_heads=33, seq=1024, head_dim=128),
        Attention(batch=2, heads=33, kv_heads=33, seq=1000, head_dim=128),
    )])  # fmt: skip
    found = attention.inputs(parse_variant("fwd/causal/bf16/d128"), params, features)
    assert found[:, -2:] == pytest.approx(np.array([[0.0, 0.0], [2.0, 1.0]]))
    before = {name: value for name, value in params.items() if name not in attention.LATER}
    assert attention.inputs(parse_variant("fwd/causal/bf16/d128"), before, features).shape == (2, found.shape[1] - 2)


def test_a_lone_block_does_not_share_its_sm() -> None:
    lone, shared = dealt((8,), 132, 132, 2, 0.0), dealt((8,), 264, 132, 2, 0.0)
    assert lone == 8.0
    assert lone < shared < 2 * lone


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([1, 2]), st.floats(0, 2))
@settings(max_examples=40, deadline=None)
def test_no_schedule_beats_the_mean_or_its_longest_block(heads: int, blocks: int, resident: int, start: float) -> None:
    lengths = tuple(range(1, blocks + 1))
    found = dealt(lengths, heads, 8, resident, start)
    work = heads * (sum(lengths) + start * blocks)
    assert found >= (blocks + start) * (1 - 1e-9)
    assert found >= work / 8 / resident * (1 - 1e-9)
    assert found <= work + 1e-9


@pytest.mark.parametrize("backend", ["sdpa-cudnn", "sdpa-flash", "triton"])
def test_one_block_more_than_places_costs_a_round(backend: str) -> None:
    """Backward, 2 blocks of 128 keys a head: 66 heads fill 132 SMs."""
    full, more = (
        seconds(Attention(batch=1, heads=heads, kv_heads=heads, seq=256, head_dim=128, direction="bwd"), backend)
        for heads in (66, 67)
    )
    even = seconds(Attention(batch=1, heads=64, kv_heads=64, seq=256, head_dim=128, direction="bwd"), backend)
    assert more - full > 5 * (full - even) / 2


def test_shared_key_heads_cost_two_sums_backward() -> None:
    own, shared = (
        seconds(Attention(batch=1, heads=16, kv_heads=kv, seq=1024, head_dim=128, direction="bwd"), "sdpa-cudnn")
        for kv in (16, 8)
    )
    numel = 16 * 1024 * 128
    assert shared - own == pytest.approx(2e-6 + 4 * numel * 1.5 / 2e12, rel=0.2)
