"""What the law of matmul tiles leaves over: regression trees on sizes and configurations, fitted to timings on an H200.

The law (`matmul_law`) says what a product takes and why; the trees say by what factor timings differed from it: how
waves, parts of k and rows that begin within sectors add up in each kernel, for which there is no formula. Trees are
complete, all of one depth; a factor is that of the leaves that a configuration comes to, one in each tree. Numbers are
in `data/trees_nvidia_h200.json`, made by `python -m studies.kernels.tile_law`. numpy, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopcast.decode import load

Array = NDArray[np.float64]
Places = NDArray[np.intp]
FOLDER = Path(__file__).parent / "data"


class Grown(NamedTuple):
    """Complete trees as arrays. Of each tree the inputs that its nodes ask for and the limits that they ask about, a
    level after the other, [trees, 2^depth - 1], and the values of its leaves, [trees, 2^depth]."""

    inputs: Places
    limits: Array
    leaves: Array

    def __call__(self, rows: Array) -> Array:
        """The sum of the trees' values at each row of inputs, [rows]: up to a limit to the left, above to the right."""
        # by places in flat arrays: indices of two dimensions take more than twice as long
        count, nodes = self.inputs.shape
        trees = np.arange(count)[:, None]
        first = trees * nodes
        place = np.repeat(first, len(rows), axis=1)
        each = np.arange(len(rows))[None, :] * rows.shape[1]
        asked, limits, values = self.inputs.ravel(), self.limits.ravel(), rows.ravel()
        for _ in range(self.leaves.shape[1].bit_length() - 1):
            above = values.take(asked.take(place) + each) > limits.take(place)
            place = 2 * place - first + 1 + above
        found: Array = self.leaves.ravel().take(place + trees - nodes).sum(axis=0)  # a leaf more than nodes a tree
        return found


@dataclass(frozen=True, kw_only=True)
class Trees:
    """As `Grown`, of the logarithm of a factor; inputs by their place among `matmul_law.inputs`."""

    device: str
    inputs: tuple[tuple[int, ...], ...]
    limits: tuple[tuple[float, ...], ...]
    leaves: tuple[tuple[float, ...], ...]

    @cached_property
    def grown(self) -> Grown:
        return Grown(np.array(self.inputs, np.intp), np.array(self.limits, float), np.array(self.leaves, float))


@lru_cache(maxsize=1)
def fitted() -> Trees:
    return load(
        Trees,
        FOLDER / "trees_nvidia_h200.json",
        "trees of matmul tiles",
        hint="`python -m studies.kernels.tile_law` makes them",
    )
