"""Baseline estimates of the same steps, which a forecast has to improve on.

- `roofline`: each call takes the longer of FLOPs / datasheet peak (products, convolutions, attention) and bytes /
  datasheet bandwidth; the times of the calls are summed. Neither host time nor efficiency is modelled.
- `six_n`: 6 x parameters x tokens at 40% of the datasheet peak, the rule of thumb of training budgets.
- `torch`: torch's own RuntimeEstimator, as `microbench.steps.torch_estimate` ran it on the machine of the steps.

Each also with one factor, as someone has it who timed a few steps of his own (`calibrated`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.gpu.catalogue.datasheets import load_specs, spec_of_device
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.validation.step_comparison import Part, StepComparison

UTILISATION = 0.4  # of the peak, in `six_n`


def bandwidth(profile: Profile) -> float | None:
    """Datasheet bytes/s of the profile's GPU; None for a GPU without a datasheet here, and for a CPU."""
    spec = load_specs().get(profile.gpu) or spec_of_device(str(profile.device.get("name", "")))
    return None if spec is None else spec.bandwidth_bytes_per_second


def roofline(stream: Stream, profile: Profile) -> float | None:
    """Seconds per step by datasheet rates alone; None where the GPU has no datasheet here."""
    rate = bandwidth(profile)
    if rate is None:
        return None
    seconds = 0.0
    for op, times in zip(stream.ops, times_run(stream), strict=True):
        lowered = lower(stream, op)
        if lowered is None:
            continue
        work = describe(*lowered)
        peak = profile.peaks.get(work.matrix_dtype or "")
        compute = 0.0 if peak is None else work.flops / peak.value
        seconds += times * max(compute, work.bytes / rate)
    return seconds


def six_n(n_params: int, tokens: int, peak_flops_per_second: float) -> float:
    """Seconds of 6 x parameters x tokens FLOPs at 40% of the peak."""
    return 6 * n_params * tokens / (UTILISATION * peak_flops_per_second)


def calibrated(rows: Sequence[StepComparison], method: str) -> list[Part]:
    """The step of each row by a method times one factor: the median, over those of `rows` that are of other models, of
    measured seconds over estimated ones. Without other models there is no estimate.

    Steps of one config at several batches are of one model. Where `rows` are all bound by the device, the factor is of
    such steps only, which is the most that one factor can do.
    """
    models = [canonical_json([row.plan.config, row.plan.module]) for row in rows]
    ratios = [
        None if not (part := row.baselines[method]).measured or not part.forecast else part.measured / part.forecast
        for row in rows
    ]
    found = []
    for row, model in zip(rows, models, strict=True):
        others = [ratio for ratio, other in zip(ratios, models, strict=True) if ratio is not None and other != model]
        part = row.baselines[method]
        scaled = None if part.forecast is None or not others else part.forecast * median(others)
        found.append(replace(part, forecast=scaled))
    return found
