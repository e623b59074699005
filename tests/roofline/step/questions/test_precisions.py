"""The precisions of a step side by side, and kernels in fp16 by their twins in bf16."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.precisions import precisions_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import parse_variant, twin_of
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream


def test_each_precision_is_forecast_or_says_why_not() -> None:
    stream = get_stream(load_config("qwen3-0.6b"), Run().traced_on("cuda"))

    def stream_of(run: Run) -> Stream | None:
        return replace(stream, meta={**stream.meta, "precision": run.precision}) if run.precision == "tf32" else None

    found = {one.name: one for one in precisions_of(PricedStep(stream, Run(), find_profile("nvidia-h200")), stream_of)}
    assert list(found) == ["fp32", "tf32", "autocast-fp16", "autocast-bf16", "bf16", "fp8"]
    assert "no layer that trains in it" in found["fp8"].reason
    assert found["bf16"].reason.endswith("--what-if")
    own = found["autocast-bf16"].forecast
    assert own is not None
    assert own.precision == "autocast-bf16"
    tf32 = found["tf32"].forecast
    assert tf32 is not None
    assert tf32.peak_flops_per_second == pytest.approx(own.peak_flops_per_second / 2)


def test_a_kernel_in_fp16_that_was_not_measured_runs_as_its_twin_by_the_ratio_of_their_roofs() -> None:
    measured = find_profile("nvidia-h200")
    without = {key: surface for key, surface in measured.surfaces.items() if "fp16" not in str(key.variant).split("/")}
    assert len(without) < len(measured.surfaces)
    profile = replace(measured, surfaces=without)
    half, brain = (describe(Gemm(m=4096, n=2048, k=1536, dtype=dtype)) for dtype in ("fp16", "bf16"))
    found, twin = profile.estimate([(half, "torch", "cold"), (brain, "torch", "cold")])
    roofs = [profile.ceilings[f"matrix_sustained/{dtype}"].value for dtype in ("bf16", "fp16")]
    assert found.seconds == pytest.approx(twin.seconds * roofs[0] / roofs[1])
    assert (found.basis, found.sigma > twin.sigma) == ("extrapolated", True)
    assert twin_of(parse_variant("add|fp16+fp32>fp32|a,a>a")) == parse_variant("add|bf16+fp32>fp32|a,a>a")
    assert measured.estimate([(half, "torch", "cold")])[0].seconds == pytest.approx(found.seconds, rel=0.05)
    assert twin_of(parse_variant("nt/bf16")) is None
