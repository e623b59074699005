"""How torch divides reductions among blocks: against kernels that an H200 (132 SMs, torch 2.11) ran."""

import numpy as np
import pytest

from flopcast.roofline.gpu.laws.reduction import loss_turns, plan, planes
from flopcast.roofline.stream.lowering.variants import CallVariant


def one(variant: str, results: int, count: int) -> tuple[float, float]:
    found = plan(CallVariant(*variant.split("|")), np.array([float(results)]), np.array([float(count)]), 132.0)
    return float(found.loads[0]), float(found.merged[0])


@pytest.mark.parametrize(
    ("results", "count", "is_divided"),
    [(128, 512, False), (128, 768, False), (128, 1024, True), (256, 2048, True), (768, 256, False),
     (5120, 512, False), (1536, 1024, True), (5120, 1024, True)],
)  # fmt: skip
def test_columns_are_divided_among_blocks_from_1024_rows(results, count, is_divided):
    """Where they are, a second kernel (a memset of the semaphores) was measured: 25.7 us became 7.2."""
    assert (one("sum|fp32>fp32|col", results, count)[1] > 0) == is_divided


def test_loads_follow_one_another_where_blocks_do_not_share():
    """17.9 us at 512 rows and 25.7 at 768 of 128 columns: 0.49 us a load."""
    assert one("sum|fp32>fp32|col", 128, 512) == (32.0, 0.0)
    assert one("sum|fp32>fp32|col~", 128, 768) == (48.0, 0.0)
    assert one("sum|fp32>fp32|row", 768, 5120) == (40.0, 0.0)


def test_partial_sums_grow_with_the_blocks_until_the_device_is_full():
    merged = [one("sum|fp32>fp32|col", 128, count)[1] for count in (1536, 65536, 131072, 262144, 524288)]
    assert merged == [6.0, 256.0, 512.0, 528.0, 528.0]


@pytest.mark.parametrize(
    ("rows", "count", "steps"), [(8, 4096, 4), (12, 4096, 8), (64, 4096, 16), (32, 1024, 4), (1, 4096, 1)]
)
def test_scans_go_over_a_row_in_steps(rows, count, steps):
    """10.5, 16.2, 27.2 and 9.7 us: 1.4 us a step; a single row is scanned in one pass."""
    assert one("cumsum|bool>int64|row", rows, count) == (float(steps), 0.0)


def test_one_element_is_copied():
    assert one("all|bool>bool|all", 1, 1) == (0.0, 0.0)
    assert one("all|bool>bool|all", 1, 16)[0] == 1.0


def test_a_loss_takes_a_thread_to_sixteen_rows():
    """Cold 13.3 us for 768 rows and 20.9 for 640: 12 turns of 64 threads, 20 of 32."""
    rows = np.array([16.0, 128.0, 640.0, 768.0, 1024.0, 2560.0, 16384.0, 65536.0])
    assert loss_turns(rows).tolist() == [1.0, 4.0, 20.0, 12.0, 16.0, 20.0, 16.0, 64.0]


@pytest.mark.parametrize(
    ("batch", "channels", "side", "rounds", "loads", "blocks"),
    [
        (32, 64, 56, 1, 32 * 7, 64 * 32 * 512),  # statistics 95 us: 224 loads of 0.42
        (128, 2048, 7, 4, 4 * 16, 2048 * 128 * 64),  # 46 us: 4 rounds; the result, a block a plane, 159
        (512, 2048, 7, 4, 4 * 64, 2048 * 128 * 64),  # 143; at most 256k blocks lay it out: 169, not 4 x 159
        (64, 1024, 14, 2, 2 * 32, 1024 * 64 * 64),
        (16, 512, 28, 1, 16 * 2, 512 * 16 * 256),
    ],
)
def test_batch_norms_take_a_block_a_channel(batch, channels, side, rounds, loads, blocks):
    places = float(side * side)
    sizes = (np.array([value]) for value in (batch * places, float(channels), places))
    found = planes(*sizes, 132.0)
    assert [float(part[0]) for part in found] == [rounds, loads, pytest.approx(blocks / (132 * 2048))]
