"""What a profile is asked for, and its answer."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from flopcast.roofline.stream.lowering.variants import Variant


class WorkLike(Protocol):
    """What is asked for: `lower.Work`, or anything with these."""

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


Request = tuple[WorkLike, str, str]  # work, backend, cache


class Estimate(NamedTuple):
    """One execution's kernel time. `sigma`: standard deviation of its logarithm. `source`: the surface or
    rule used."""

    seconds: float
    sigma: float
    basis: str
    source: str
