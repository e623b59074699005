"""Triton's attention on Hopper: tiles by the kernels' own table, dealt to programs as the kernels deal them."""

from math import ceil

import numpy as np
import pytest

from flopcast.kernels.attention_config import config_for
from flopcast.kernels.attention_schedule import deal_tiles, even_section
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.fit import priors
from flopcast.roofline.gpu.fit import surface as fit_surface
from flopcast.roofline.gpu.fit.surface import Points
from flopcast.roofline.gpu.laws import attention, attention_triton
from flopcast.roofline.gpu.laws.attention_triton import Sizes
from flopcast.roofline.stream.lowering.variants import AttentionVariant

H200 = {"name": "NVIDIA H200", "capability": [9, 0], "sm_count": 132}
VARIANT = {direction: AttentionVariant(direction, True, "bf16", 128) for direction in ("fwd", "bwd")}


def told(direction: str, head_dim: int = 128, causal: bool = True) -> dict[str, float]:
    return attention_triton.parameters("NVIDIA H200", (9, 0), direction, head_dim, causal)


def sizes(heads: int, seq: int, group: int) -> Sizes:
    return Sizes(*(np.array([float(x)]) for x in (heads, seq, group)))


def by_hand(kernel: str, heads: int, seq: int, group: int, programs: int) -> tuple[float, float]:
    """(work, tiles) of the program with most to do, tile by tile as the kernels number and take them."""
    shape = Attention(batch=1, heads=heads, kv_heads=heads // group, seq=seq, head_dim=128)
    tile = getattr(config_for(shape, (9, 0), tma=True, device="NVIDIA H200"), kernel)
    if kernel == "dkdv":
        pairs, shared, sharing, rows, step = heads // group, group * seq, 1, 128, tile.block_m
        steps = [group * (ceil(seq / step) - i * 128 // step) for i in range(ceil(seq / 128))]
    else:
        rows, step = 64 if tile.pack else 128, tile.block_n
        pairs, sharing = (heads // 2, max(1, group // 2)) if tile.pack else (heads, group)
        shared = seq
        steps = [ceil(min((i + 1) * rows, seq) / step) for i in reversed(range(ceil(seq / rows)))]
    at_once = pairs
    if tile.onepass:
        at_once = even_section(pairs, seq, 128, tile.l2_mib << 20)
        programs = min(programs, pairs * len(steps))
        dealt_out = deal_tiles(pairs, len(steps), True, at_once, programs)
        loads = [(sum(steps[i % len(steps)] for i in own), len(own)) for own in dealt_out]
        return max(loads)[0] * 128 * step, max(loads)[1]
    if tile.l2_mib:
        at_once = min(pairs, sharing * max(1, (tile.l2_mib << 20) // (shared * 512)))
    order = []
    for first in range(0, pairs, at_once):
        for length in steps:
            order += [length] * min(at_once, pairs - first)
    taken: list[list[int]] = [[] for _ in range(min(programs, len(order)))]
    for i, length in enumerate(order):
        turn, place = divmod(i, len(taken))
        taken[place if turn % 2 == 0 else len(taken) - 1 - place].append(length)
    most = max(taken, key=lambda own: sum(own) + 0.5 * len(own))
    return sum(most) * 128 * step, len(most)


@pytest.mark.parametrize("kernel", ["forward", "dkdv", "dq"])
@pytest.mark.parametrize(
    ("heads", "seq", "group"), [(64, 1024, 2), (7, 197, 1), (96, 256, 3), (300, 640, 4), (16, 8192, 2), (40, 1000, 5)]
)
def test_programs_take_the_tiles_that_the_kernels_give_them(kernel: str, heads: int, seq: int, group: int) -> None:
    direction = "fwd" if kernel == "forward" else "bwd"
    params = {**told(direction), "sm_count": 132.0}
    work, tiles, mean = attention_triton.loads(kernel, VARIANT[direction], params, sizes(heads, seq, group))
    assert (work[0], tiles[0]) == by_hand(kernel, heads, seq, group, 132)
    assert mean[0] <= work[0]


@pytest.mark.parametrize("seq", [64, 197, 256, 362, 363, 512, 700, 1448, 1449, 3000, 16384])
@pytest.mark.parametrize(("head_dim", "causal"), [(128, True), (128, False), (64, True), (64, False)])
def test_a_length_takes_the_tile_of_the_kernels_table(seq: int, head_dim: int, causal: bool) -> None:
    shape = Attention(batch=1, heads=2, kv_heads=1, seq=seq, head_dim=head_dim, causal=causal)
    config = config_for(shape, (9, 0), tma=True, device="NVIDIA H200")
    for direction in ("fwd", "bwd"):
        params = told(direction, head_dim, causal)
        for kernel in attention_triton.kernels_of(direction):
            tile = getattr(config, kernel)
            if tile.onepass:
                tile = getattr(config_for(shape, (9, 0), tma=True, device="NVIDIA H200", deterministic=True), kernel)
            _, step, pack, l2_mib = next(e for e in attention_triton._table(kernel, params) if seq < e[0])
            assert step == (tile.block_m if kernel == "dkdv" else tile.block_n)
            assert (pack, l2_mib) == (tile.pack, tile.l2_mib)


@pytest.mark.parametrize("device", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("group", [1, 2, 4, 7])
def test_the_same_backwards_take_one_pass_as_in_the_kernels(device: str, group: int) -> None:
    params = attention_triton.parameters(device, (9, 0), "bwd", 128, True)
    for seq in (1024, 1448, 1449, 2047, 2048, 4096, 6000, 7168, 16384, 32768):
        shape = Attention(batch=1, heads=group, kv_heads=1, seq=seq, head_dim=128)
        tile = config_for(shape, (9, 0), tma=True, device=device).dkdv
        assert attention_triton.in_one_pass(params, sizes(group, seq, group))[0] == tile.onepass
        assert not config_for(shape, (9, 0), tma=True, device=device, deterministic=True).dkdv.onepass
    assert "onepass.tokens" not in attention_triton.parameters(device, (9, 0), "bwd", 64, True)
    assert "onepass.tokens" not in attention_triton.parameters(device, (9, 0), "bwd", 128, False)


def test_other_parts_run_other_kernels() -> None:
    assert attention_triton.parameters("NVIDIA A100", (8, 0), "fwd", 128, True) == {}
    assert not attention_triton.has_tiles(attention.schedule_of("triton", "fwd", 128))
    assert not attention_triton.has_tiles(attention.schedule_of("sdpa-flash", "fwd", 128, True, H200))
    assert attention_triton.has_tiles(attention.schedule_of("triton", "bwd", 64, False, H200))


def test_no_call_takes_less_than_one_of_fewer_heads() -> None:
    """A tile's time and a step's add up over what the busiest program runs."""
    for direction, variant in VARIANT.items():
        prior = priors.attention_prior(
            989e12, 132.0, 2e-6, 4e12, attention.schedule_of("triton", direction, 128, True, H200)
        )
        params = {**prior.fixed, **{name: belief.value for name, belief in prior.law.items()}}
        heads = np.arange(2.0, 400.0, 2.0)
        features = np.column_stack([np.log2(heads), np.ones(len(heads)), np.full(len(heads), 10.0)])
        ones = np.ones(len(heads))
        seconds = attention.log_seconds(variant, params, features, ones, ones)
        assert (np.diff(seconds) >= -1e-12).all()
        assert seconds[-1] - seconds[0] > 1.0


def test_a_few_calls_tell_the_law() -> None:
    """Twelve calls made of known parameters: those between and beyond are told within 3%."""
    variant = VARIANT["bwd"]
    schedule = attention.schedule_of("triton", "bwd", 128, True, H200)
    prior = priors.attention_prior(989e12, 132.0, 2e-6, 4e12, schedule)
    true = {**prior.fixed, **{name: belief.value for name, belief in prior.law.items()}}
    true |= {"efficiency": 0.7, "dq_efficiency": 0.8, "prologue": 3e-6, "dq_prologue": 2e-6}
    true |= {"onepass_efficiency": 0.6, "onepass_prologue": 4e-6}

    def points(rows: list[tuple[int, int, int]]) -> Points:
        features = np.log2(np.array(rows, float))
        shapes = [
            Attention(batch=1, heads=h, kv_heads=h // g, seq=s, head_dim=128, direction="bwd") for h, g, s in rows
        ]
        bytes_, flops = (np.array([float(getattr(s, name)) for s in shapes]) for name in ("bytes", "flops"))
        seconds = np.exp(attention.log_seconds(variant, true, features, bytes_, flops))
        return Points(features, bytes_, flops, seconds, np.full(len(rows), 0.005))

    few = [(8, 2, 256), (16, 2, 512), (32, 4, 1024), (64, 2, 768), (128, 2, 1024), (56, 7, 1536), (128, 2, 2048),
           (192, 3, 197), (256, 1, 1536), (16, 2, 4096), (16, 2, 8192), (64, 4, 3072)]  # fmt: skip
    surface = fit_surface.fit_surface("attention", variant, points(few), prior)
    others = points([(64, 2, 1024), (32, 2, 6144), (40, 5, 640), (128, 8, 512), (32, 2, 16384)])
    found = surface.predict(others.features, others.bytes, others.flops)
    assert np.abs(np.log(found.seconds / others.seconds)).max() < 0.03
