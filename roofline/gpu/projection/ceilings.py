"""Copies and reads by size ("copy/<bytes>", "l2_read/<bytes>") on a GPU that was not measured. Plain arithmetic.

A sweep over sizes shows latencies, then L2, then memory. On the source each size says which share of its bytes
came from memory; the target's L2 holds another size, so its share at a size is the source's at the size that is the
same part of the source's L2. What the source takes besides moving its bytes is so many clock cycles.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.gemm_before_hopper import cycles, l2_rate


def sweep_rate(
    name: str,
    measured: Profile,
    source: GpuSpec,
    target: GpuSpec,
    memory_rate: Callable[[float, GpuSpec, GpuSpec], float],
) -> float:
    """bytes/s on the target of the ceiling `name` of the measured profile."""
    kind, size = name.split("/")[0], float(name.split("/")[1])
    sizes, seconds = _sweep(kind, measured)
    rates = sizes / seconds
    beyond = float(rates[-1])  # of the greatest size: memory
    within = max(float(rates[sizes <= source.l2_bytes].max(initial=0.0)), beyond)
    # 1 / rate = share of memory / beyond + the rest / within; small sizes are slow for want of work instead
    share = np.clip((1.0 / rates - 1.0 / within) / max(1.0 / beyond - 1.0 / within, 1e-30), 0.0, 1.0)
    share = np.maximum.accumulate(np.where(sizes < source.l2_bytes / 2.0, 0.0, share))

    def moving(part: float, inner: float, outer: float) -> float:
        return size * ((1.0 - part) / inner + part / outer)

    logs = np.log(sizes)
    own = moving(float(np.interp(np.log(size), logs, share)), within, beyond)
    waiting = max(size / measured.ceilings[name].value - own, 0.0)
    # the size that is the same part of the source's L2
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
