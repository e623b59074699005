"""Projects the ceilings of a measured GPU (the source) onto one that was not measured (the target).

A sweep of copies or reads over sizes ("copy/<bytes>", "l2_read/<bytes>") shows latencies, then L2, then memory. The
source's rate at each size gives the share of bytes that came from memory. The target's L2 has another capacity, so its
share at a size is the source's at the size that is the same fraction of the source's L2. The time that the source takes
besides moving bytes is counted in clock cycles, of which the target takes equally many.
"""

from __future__ import annotations

from dataclasses import replace
from math import exp, hypot, log

import numpy as np

from flopcast.roofline.base.numbers import Z_90, Number
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.catalogue.power import burst_rate
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.rates import cycles, l2_rate, matrix_ratio, memory_rate, sigmas, sustained_rate

# The kind of projection (of `rates.SIGMA`) whose deviation a ceiling takes; the others take that of "memory".
KINDS = {"matrix_": "gemm", "copy/": "hot", "l2_": "hot"}


def project_ceiling(name: str, measured: Profile, source: GpuSpec, target: GpuSpec) -> Number | None:
    """Projects a ceiling of the measured profile onto the target; None where one of the GPUs lacks the dtype. Those of
    the host keep their value, with a wider interval."""
    number = measured.ceilings[name]
    note = f"projected from {measured.gpu} ({number.source})"
    if number.value <= 0:  # a gap too small to be measured
        return replace(number, basis="extrapolated", source=note)
    factor = _factor(name, measured, source, target)
    if factor is None:
        return None
    kind = next((kind for start, kind in KINDS.items() if name.startswith(start)), "memory")
    value, sigma = number.value * factor, sigmas(source, target)[kind]
    down = hypot(log(number.value / number.low), Z_90 * sigma) if number.low > 0 else Z_90 * sigma
    up = hypot(log(number.high / number.value), Z_90 * sigma)
    return Number(value, value * exp(-down), value * exp(up), "extrapolated", note)


def _factor(name: str, measured: Profile, source: GpuSpec, target: GpuSpec) -> float | None:
    """The ratio of the target's value of a ceiling to the source's; None where one of the GPUs lacks the dtype."""
    value = measured.ceilings[name].value
    if name.startswith("matrix_"):
        rate = burst_rate if name.startswith("matrix_burst") else sustained_rate
        return matrix_ratio(rate, name.rsplit("/", 1)[-1], source, target)
    if name.startswith("hbm_"):
        return memory_rate(value, source, target) / value
    if name.startswith(("copy/", "l2_read/")):
        return sweep_rate(name, measured, source, target) / value
    if name.startswith("l2_"):
        return l2_rate(target) / l2_rate(source)
    return cycles(source, target) if name.startswith("kernel_floor") else 1.0


def sweep_rate(name: str, measured: Profile, source: GpuSpec, target: GpuSpec) -> float:
    """bytes/s on the target of the ceiling `name` of the measured profile."""
    kind, size = name.split("/")[0], float(name.split("/")[1])
    sizes, seconds = _sweep(kind, measured)
    rates = sizes / seconds
    beyond = float(rates[-1])  # of the greatest size: memory
    within = max(float(rates[sizes <= source.l2_bytes].max(initial=0.0)), beyond)
    # 1 / rate = share of memory / beyond + the rest / within; small sizes are slow for lack of work instead
    share = np.clip((1.0 / rates - 1.0 / within) / max(1.0 / beyond - 1.0 / within, 1e-30), 0.0, 1.0)
    share = np.maximum.accumulate(np.where(sizes < source.l2_bytes / 2.0, 0.0, share))

    def moving(part: float, inner: float, outer: float) -> float:
        return size * ((1.0 - part) / inner + part / outer)

    logs = np.log(sizes)
    own = moving(float(np.interp(np.log(size), logs, share)), within, beyond)
    waiting = max(size / measured.ceilings[name].value - own, 0.0)
    # the size that is the same fraction of the source's L2
    alike = np.log(size * source.l2_bytes / target.l2_bytes)
    inner, outer = within * l2_rate(target) / l2_rate(source), memory_rate(beyond, source, target)
    return size / (waiting * cycles(source, target) + moving(float(np.interp(alike, logs, share)), inner, outer))


def _sweep(kind: str, measured: Profile) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, seconds) of a kind of sweep, by size."""
    found = sorted(
        (float(name.split("/")[1]), number.value)
        for name, number in measured.ceilings.items()
        if name.startswith(f"{kind}/")
    )
    sizes, rates = np.array(found).T
    return sizes, sizes / rates
