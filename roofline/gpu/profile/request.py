"""The types of a request to a profile and of its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.stream.lowering.variants import Variant


class WorkLike(Protocol):
    """The work whose time is asked for: `describe.Work`, or anything with these properties."""

    @property
    def op_class(self) -> str: ...
    @property
    def variant(self) -> Variant: ...
    @property
    def features(self) -> tuple[float, ...]: ...
    @property
    def bytes(self) -> int: ...
    @property
    def flops(self) -> int: ...


def arrays_of(works: Sequence[WorkLike]) -> tuple[Array, Array, Array]:
    """features[works, sizes], bytes[works], flops[works], as a surface takes them."""
    return (
        np.array([work.features for work in works], float),
        np.array([work.bytes for work in works], float),
        np.array([work.flops for work in works], float),
    )


Request = tuple[WorkLike, str, str]  # work, backend, cache


class Estimate(NamedTuple):
    """One execution's kernel time. `sigma`: standard deviation of its logarithm. `source`: the surface or
    rule used. `launches`: how many kernels it is; 0 where nothing measured tells."""

    seconds: float
    sigma: float
    basis: str
    source: str
    launches: int = 0
