"""Fits the law of contention to kernels that were timed beside collectives, and both by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.links.contention import BOUNDS, NOT_WAVES, Beside, Contention, bound_of, contended

MOST_CALM = 0.9
TILE = (128, 256)  # of the suite's products, as cuBLAS 12 and 13 choose on a Hopper


def fit_contention(rows: Sequence[Beside], multiprocessors: int) -> Contention | None:
    """The parameters by the rows whose blocks are known; None where a bound has none. How long a collective waits is
    read off products and attention, since what memory bounds slows collectives by more than any wait: the rest is
    theirs. No product slows them more than another, whatever it reads: the one that reads fastest says what is calm."""
    known = [row for row in rows if 0 < row.channels < multiprocessors]
    of: dict[str, list[Beside]] = {bound: [row for row in known if bound_of(row.work) == bound] for bound in BOUNDS}
    if not all(of.values()):
        return None
    nothing: dict[str, float] = dict.fromkeys(BOUNDS, 0.0)
    waited = _waited([*of["matrix"], *of["attention"]])
    tail = max(0.0, float(np.median([_tail(row, multiprocessors) for row in of["matrix"]])))
    lost: dict[str, float] = {
        bound: max(0.0, _lost(of[bound], multiprocessors)) for bound in BOUNDS if bound != "matrix"
    }
    slowed: dict[str, float] = {bound: max(0.0, _slowed(of[bound], waited)) for bound in BOUNDS}
    bandwidth = max(_bytes(row.work) / row.alone_seconds for row in of["memory"])
    calm = min(max(_bytes(row.work) / row.alone_seconds / bandwidth for row in of["matrix"]), MOST_CALM)
    found = Contention(multiprocessors, bandwidth, calm, tail, waited, lost, slowed, nothing, nothing)
    off = {bound: np.log([foretold(found, row) for row in some]) for bound, some in of.items()}
    took = {
        bound: np.log([(row.beside_seconds, row.collective_beside_seconds) for row in some])
        for bound, some in of.items()
    }
    sigmas = {bound: np.sqrt(np.mean((off[bound] - took[bound]) ** 2, axis=0)) for bound in of}
    of_kernel, of_collective = ({bound: float(two[i]) for bound, two in sigmas.items()} for i in (0, 1))
    return replace(found, sigma=of_kernel, collective_sigma=of_collective)


def foretold(known: Contention, row: Beside) -> tuple[float, float]:
    """Seconds of a row's kernel and of its collective beside each other, by the law."""
    bound = bound_of(row.work)
    found = contended(known, bound, row.channels, multiprocessors=known.multiprocessors, seconds=row.alone_seconds,
                      blocks=_blocks(row.work))  # fmt: skip
    return row.alone_seconds * found.kernel, row.collective_alone_seconds * found.collective + found.delay


def _blocks(work: str) -> int:
    """Of a product's name: "product-4096x4096x4096"."""
    kind, _, sizes = work.partition("-")
    if kind != "product":
        return 0
    m, n, _ = map(int, sizes.split("x"))
    return ceil(m / TILE[0]) * ceil(n / TILE[1])


def _bytes(work: str) -> float:
    """What a product of bf16, or a kernel that memory bounds, reads and writes: "copy-256MiB" each once."""
    kind, _, sizes = work.partition("-")
    if kind == "product":
        m, n, k = map(int, sizes.split("x"))
        return 2.0 * (m * k + k * n + m * n)
    return 2.0 * 1024**2 * float(sizes.rpartition("-")[2].removesuffix("MiB"))


def _tail(row: Beside, multiprocessors: int) -> float:
    """Waves beside the collective, less the blocks over the multiprocessors that are left."""
    blocks = _blocks(row.work)
    a_wave = (row.alone_seconds - NOT_WAVES) / ceil(blocks / multiprocessors)
    return (row.beside_seconds - NOT_WAVES) / a_wave - blocks / (multiprocessors - row.channels)


def _lost(rows: Sequence[Beside], multiprocessors: int) -> float:
    more = [row.beside_seconds / row.alone_seconds - 1 for row in rows]
    parts = [row.channels / (multiprocessors - row.channels) for row in rows]
    return float(np.median(np.array(more) / np.array(parts)))


def _slowed(rows: Sequence[Beside], waited: float) -> float:
    alone, took, kernel = _seconds(rows)
    return float(np.median((took - waited * kernel) / alone - 1))


def _waited(rows: Sequence[Beside]) -> float:
    """By least squares of the relative excess, which a factor and a part of the kernel's time explain, neither below
    0; at most the kernel's whole time."""
    from scipy.optimize import lsq_linear

    alone, took, kernel = _seconds(rows)
    found = lsq_linear(np.stack([alone / took, kernel / took], axis=1), (took - alone) / took, bounds=(0, [np.inf, 1]))
    return float(found.x[1])


def _seconds(rows: Sequence[Beside]) -> tuple[Array, Array, Array]:
    """Seconds of the collectives alone and beside, and of the kernels alone."""
    fields = [(row.collective_alone_seconds, row.collective_beside_seconds, row.alone_seconds) for row in rows]
    alone, took, kernel = np.array(fields).T
    return alone, took, kernel
