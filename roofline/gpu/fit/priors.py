"""Priors of a kind of kernel: of its law's parameters, and of the residual that the law leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flopcast.roofline.gpu.laws import attention, attention_triton, gemm
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.gpu.profile.surface import Surface


class Belief(NamedTuple):
    """The prior of a parameter: its value, and the standard deviation of its logarithm (of its logit for `quantised`,
    of the value itself for the misalignment penalties)."""

    value: float
    sd: float


@dataclass(frozen=True)
class Prior:
    """The prior of a surface. `law`: beliefs by parameter; `fixed`: parameters that are known; `hyper`: the residual's
    hyper-parameters, of which `levels` is kept as given; `is_learnt`: its amplitude, white part and
    scale are those of a surface of more points."""

    law: Mapping[str, Belief]
    fixed: Mapping[str, float]
    hyper: Residual
    is_learnt: bool = False

    def learnt_from(self, surface: Surface, sd: float) -> Prior:
        """This prior moved to another surface's parameters, `sd` times as wide."""
        law = {name: Belief(surface.params[name], belief.sd * sd) for name, belief in self.law.items()}
        own = surface.residual
        hyper = replace(self.hyper, amplitude=own.amplitude, white=own.white, sigma_scale=max(1.0, own.sigma_scale))
        if len(own.lengths) == len(hyper.lengths):
            hyper = replace(hyper, lengths=own.lengths)
        return replace(self, law=law, hyper=hyper, is_learnt=True)


def typical(laws: Sequence[Mapping[str, float]], name: str, least: float, most: float = 0.7) -> Belief:
    """The prior of a parameter from fitted laws of the same kind: their median, and the standard deviation of their
    logarithms, bounded by `least` and `most`."""
    values = np.log([params[name] for params in laws])
    return Belief(float(np.exp(np.median(values))), float(np.clip(values.std(), least, most)))


def memory_prior(floor: Belief, bandwidth: Belief, inputs: int) -> Prior:
    """The prior of kernels that move bytes: `floor` in seconds, `bandwidth` in bytes per second."""
    hyper = Residual(
        lengths=(3.0,) * inputs, amplitude=0.05, white=0.015, levels=(min(floor.sd, 0.5), min(bandwidth.sd, 0.35))
    )
    return Prior({"floor": floor, "bandwidth": bandwidth}, {}, hyper)


def gemm_prior(
    peak: float, sm_count: float, floor: float, bandwidth: float, l2_bytes: float, inputs: int, sizes: int = 3
) -> Prior:
    """The prior of matrix products: `peak` in FLOP/s, `floor` in seconds, `bandwidth` in bytes per second.

    Of the law's `inputs`, the first `sizes` are sizes. The inner loop is expected to reach 80% of the peak, 40 and 30%
    where rows are not aligned to 16 bytes; small tiles wait for their loads.
    """
    efficiency = dict(zip(gemm.TILE_NAMES, (0.8, 0.8, 0.4, 0.3), strict=True))
    law = {name: Belief(value, 1.0) for name, value in efficiency.items()}
    law |= {
        "prologue": Belief(1e-6, 1.0),
        "epilogue": Belief(1e-6, 1.0),
        "fade": Belief(0.02, 1.0),
        "floor": Belief(floor, 0.5),
        "bandwidth": Belief(bandwidth, 0.2),
        "l2_bandwidth": Belief(3.0 * bandwidth, 0.5),
        "absorbed": Belief(0.5, 1.5),
        "split": Belief(2e-6, 1.0),
        "split_bandwidth": Belief(2.5 * bandwidth, 0.5),
        "quantised": Belief(0.73, 1.5),
    }
    lengths = (3.0,) * sizes + (2.0,) * (inputs - sizes)
    hyper = Residual(lengths, amplitude=0.12, white=0.03, levels=(0.1,))
    return Prior(law, {"peak": peak, "sm_count": sm_count, "l2_bytes": max(l2_bytes, 1.0)}, hyper)


def tuned_prior(peak: float, sm_count: float, table: int) -> Prior:
    """Prior of Triton's products (`laws/gemm_triton.py`): their cost model ranks configurations to a few percent."""
    law = {"scale": Belief(1.0, 0.15), "partial": Belief(0.2, 0.15)}
    hyper = Residual((3.0,) * 3 + (2.0,) * 2, amplitude=0.05, white=0.03, levels=(0.05,))
    return Prior(law, {"peak": peak, "sm_count": sm_count, "table": float(table)}, hyper)


def attention_prior(
    peak: float, sm_count: float, floor: float, bandwidth: float, schedule: Mapping[str, float] | None = None
) -> Prior:
    """The prior of attention, forward or backward, in the units of `gemm_prior`; `schedule`: from
    `attention.schedule_of`."""
    schedule = schedule or attention.schedule_of("", "fwd", 128)
    law = {
        "efficiency": Belief(0.5, 0.9),
        "prologue": Belief(1e-6, 1.0),
        "floor": Belief(3.0 * floor, 0.7),
        "bandwidth": Belief(bandwidth, 0.3),
        "fade": Belief(0.005, 1.0),
        "uneven": Belief(0.0, 0.1),
    }
    if schedule["follows"]:
        law["follow_floor"] = Belief(1.5 * floor, 0.5)
        law["follow_bandwidth"] = Belief(bandwidth, 0.3)
        law["sum_bandwidth"] = Belief(0.7 * bandwidth, 0.5)
    if schedule["splits"]:
        law |= {"merge": Belief(2.0 * floor, 0.5), "merge_row": Belief(8e-10, 0.7)}
    if attention_triton.has_tiles(schedule):  # the time per tile replaces that of blocks that end late
        law["prologue"] = Belief(2e-6, 1.0)
        if "dq.0.below" in schedule:
            law |= {"dq_efficiency": Belief(0.5, 0.9), "dq_prologue": Belief(2e-6, 1.0)}
            law["follow_bandwidth"] = Belief(bandwidth, 0.3)
        if "onepass.tokens" in schedule:
            law |= {"onepass_efficiency": Belief(0.5, 0.9), "onepass_prologue": Belief(2e-6, 1.0)}
    jumps = (4 if schedule.get("rounds") else 2) - ("forward.0.below" in schedule)
    hyper = Residual((3.0,) * 3 + (2.0,) * jumps, amplitude=0.05, white=0.015, levels=(0.05,))
    return Prior(law, {"peak": peak, "sm_count": sm_count, **schedule}, hyper)
