"""How a step scales: layouts by number of GPUs, what a doubling is worth, and where it pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.dollars.layouts import Workload
from flopcast.roofline.dollars.scaling import STRONG, WEAK, check_pattern, layouts_of, next_batch, scaling
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.views.terminal.several_gpus import print_scaling

pytestmark = pytest.mark.usefixtures("cache_of_the_module")

CONFIG = make_config(width=256, depth=3, heads=2, kv_heads=2, head_dim=128, vocab=1024)


@pytest.mark.parametrize(
    ("pattern", "gpus", "per_host", "found"),
    [
        ("auto", 1, 1, ["none"]),
        ("auto", 8, 8, ["ddp=8", "fsdp=8"]),
        ("auto", 16, 8, ["ddp=16", "fsdp=16", "hsdp=2x8"]),
        ("fsdp", 4, 4, ["fsdp=4"]),
        ("tp=2,fsdp", 8, 8, ["tp=2,fsdp=4"]),
        ("tp=2,fsdp", 2, 2, ["tp=2"]),
        ("tp=4,fsdp", 2, 2, []),
        ("hsdp", 16, 8, ["hsdp=2x8"]),
    ],
)
def test_the_open_part_takes_the_gpus_that_are_left(pattern: str, gpus: int, per_host: int, found: list[str]) -> None:
    check_pattern(pattern)
    assert list(layouts_of(pattern, gpus, per_host)) == found


@pytest.mark.parametrize("pattern", ["ddp=8", "ddp,fsdp", "zero", "", "pp=2:fsdp,ddp"])
def test_a_pattern_without_one_open_part_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="valid"):
        check_pattern(pattern)


def test_a_small_step_gains_nothing_from_a_second_gpu_and_a_large_one_does(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(seq=64, optimizer="adamw-fused")
    work = Workload(model=CONFIG, run=run, sequences=4, profile=find_profile("nvidia-h200"))
    strong, weak = (scaling(work, kind, 2, "ddp") for kind in (STRONG, WEAK))
    assert [point.sequences for point in strong.points] == [4, 4]
    assert [point.sequences for point in weak.points] == [4, 8]
    for found in (strong, weak):
        one, two = found.points
        assert one.efficiency == 1.0
        assert one.per_second is not None
        assert two.per_second is not None
        (doubling,) = found.doublings
        assert doubling.gain == pytest.approx(two.per_second / one.per_second - 1)
        assert doubling.low < doubling.gain < doubling.high
        assert two.efficiency == pytest.approx((1 + doubling.gain) / 2)
    assert strong.last == 1  # the host bounds both
    turning = next_batch(work, strong)
    assert turning is not None
    assert turning.value is None or (turning.value > 4 and turning.value % 2 == 0)
    record = strong.to_json()
    assert record["stops_paying_after"] == 1
    assert [point["num_gpus"] for point in record["points"]] == [1, 2]

    first, second = weak.points
    assert second.best is not None
    sharded = replace(second.best, run=replace(second.best.run, parallel="fsdp=2"))
    for efficiency, is_told in ((1.08, True), (0.97, False)):
        shown = replace(weak, points=(first, replace(second, best=sharded, efficiency=efficiency)))
        print_scaling(work, [shown], [], {})
        assert ("fsdp=2 does more per GPU than one GPU" in " ".join(capsys.readouterr().out.split())) == is_told
