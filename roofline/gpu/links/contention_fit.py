"""Fits the law of contention to kernels that were timed beside collectives, and both by themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flopcast.roofline.gpu.links.contention import Beside, Bound, Contention, Share, bound_of


def fit_contention(rows: Sequence[Beside], multiprocessors: int) -> Contention | None:
    """The parameters by the rows whose blocks are known; None without two rows of each class. How long a collective
    waits is read off the kernels that matrix products bound, since what memory bounds slows collectives by more than
    any wait: the rest is theirs."""
    classes: dict[Bound, list[Beside]] = {"matrix": [], "memory": []}
    for row in rows:
        if 0 < row.channels < multiprocessors:
            classes[bound_of(row.work)].append(row)
    matrix, memory = classes["matrix"], classes["memory"]
    if len(matrix) < 2 or len(memory) < 2:
        return None
    waited = _waited(matrix)
    return Contention(
        multiprocessors, max(row.channels for row in (*matrix, *memory)), waited,
        _share(matrix, multiprocessors, waited), _share(memory, multiprocessors, waited),
    )  # fmt: skip


def _share(rows: Sequence[Beside], multiprocessors: int, waited: float) -> Share:
    part = np.array([row.channels / (multiprocessors - row.channels) for row in rows])
    factors = np.array([row.beside_seconds / row.alone_seconds for row in rows])
    lost = max(0.0, float(np.median((factors - 1) / part)))
    alone, took, kernel = _seconds(rows)
    slowed = max(0.0, float(np.median((took - waited * kernel) / alone - 1)))
    found = (1 + slowed) * alone + waited * kernel
    return Share(lost, slowed, _deviation(factors / (1 + lost * part)), _deviation(took / found))


def _waited(rows: Sequence[Beside]) -> float:
    """By least squares of the relative excess, which a factor and a part of the kernel's time explain, neither below
    0; at most the kernel's whole time."""
    from scipy.optimize import lsq_linear

    alone, took, kernel = _seconds(rows)
    found = lsq_linear(np.stack([alone / took, kernel / took], axis=1), (took - alone) / took, bounds=(0, [np.inf, 1]))
    return float(found.x[1])


def _seconds(rows: Sequence[Beside]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds of the collectives alone and beside, and of the kernels alone."""
    fields = [(row.collective_alone_seconds, row.collective_beside_seconds, row.alone_seconds) for row in rows]
    alone, took, kernel = np.array(fields).T
    return alone, took, kernel


def _deviation(ratios: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.log(ratios) ** 2)))
