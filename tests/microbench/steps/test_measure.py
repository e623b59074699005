"""How long kernels of a step take, where one is launched before the one before it has ended."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopcast.kernels.shapes import Gemm
from flopcast.microbench.steps.measure import seconds_alone
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from studies.kernels.pairs import read_rows

# Kernels of three steps on Triton's products, [name, microseconds] as the profiler told them.
RECORDED = Path("reports/nvidia-h200/steps-on-kernels/products/recorded.json.gz")
PAIRS = Path("reports/nvidia-h200/kernels.csv")


def test_a_kernel_launched_ahead_counts_from_the_end_of_the_one_before_it() -> None:
    found = seconds_alone([(7, 0, 100), (7, 40, 150), (20, 60, 90), (7, 120, 140), (7, 160, 170)])
    assert found == pytest.approx([100e-9, 50e-9, 30e-9, 0.0, 10e-9])


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 100)), min_size=1, max_size=20))
def test_kernels_of_a_stream_take_as_long_as_it_is_busy(given_spans: list[tuple[int, int]]) -> None:
    spans = sorted((start, start + length) for start, length in given_spans)
    busy = {at for start, end in spans for at in range(start, end)}
    assert sum(seconds_alone([(7, *span) for span in spans])) == pytest.approx(len(busy) * 1e-9)


def test_gradients_of_inputs_were_recorded_with_the_product_before_them(root: Path) -> None:
    """Of a width of 1,024 twice what they take by themselves, timed beside cuBLAS's; less the kernel before, what they
    do."""
    timed = {row["key"]: float(row["seconds"]) for row in read_rows(root / PAIRS) if row["kernel"] == "matmul"}
    recorded = json.loads(gzip.decompress((root / RECORDED).read_bytes()))
    (key,) = (key for key in recorded if "/w1024d5" in key and key.endswith("triton/triton"))
    run = Run(batch=8, seq=1024, optimizer="adamw-fused", matmul="triton", attention="triton")
    profile = find_profile("nvidia-h200")
    stream = get_stream(make_config(width=1024, depth=5), traced_of(run, profile))
    products = [op for op in PricedStep(stream, run, profile).ops if op.work is not None and op.work.op_class == "gemm"]
    launched = [i for i, (name, _) in enumerate(recorded[key]) if "matmul" in name or "cutlass" in name]
    assert len(launched) == len(products)
    ahead = 0
    for op, place in zip(products, launched, strict=True):
        assert op.work is not None
        shape = op.work.shape
        seconds, before = (recorded[key][number][1] * 1e-6 for number in (place, place - 1))
        if isinstance(shape, Gemm) and shape.layout == "nn" and shape.k in (1024, 3072):
            assert seconds > 1.85 * timed[shape.key]
            assert seconds - before == pytest.approx(timed[shape.key], rel=0.13)
            ahead += 1
    assert ahead == 25
