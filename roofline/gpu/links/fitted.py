"""How long a collective takes on a link that was not measured: the law with what was fitted of it to published tables.

`python -m studies.links` fits it, and reports/links says how far it is off on machines that it was not fitted to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import exp
from typing import Annotated, NamedTuple

from flopcast.bounds import Deviation, Valid
from flopcast.decode import load
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.links.choice import Regime
from flopcast.roofline.gpu.links.law import Collective, Terms, blocks, key_of, line_seconds, seconds

FILE = DATA / "collectives.json"
FEW_HOSTS = 8  # beyond them latencies that no table of this size tells decide up to 1 GiB
LARGE = 1024 * 1024  # bytes from which the link bounds a collective, and below which its latency does


class CollectiveTime(NamedTuple):
    """A collective's seconds on the GPUs, launch excluded; `sigma`: the standard deviation of their logarithm; `basis`:
    measured, interpolated, extrapolated or projected; the regime, None where it is not known; the thread blocks held,
    so many multiprocessors; the link or the profile that says so; and the least that the link's line rate allows."""

    seconds: float
    sigma: float
    basis: str
    regime: Regime | None
    blocks: int
    source: str
    least: float = 0.0

    @property
    def low(self) -> float:
        """The lower end of the 90% interval."""
        return min(self.seconds, max(self.seconds * exp(-Z_90 * self.sigma), self.least))

    @property
    def high(self) -> float:
        """The upper end of the 90% interval."""
        return self.seconds * exp(Z_90 * self.sigma)


def _is_whole(terms: Mapping[str, Terms]) -> bool:
    kinds, algorithms, protocols = ("nvlink", "pcie"), ("ring", "p2p"), ("LL", "Simple")
    return {f"{kind} {one}/{protocol}" for kind in kinds for one in algorithms for protocol in protocols} <= set(terms)


_WHERE = ("network", "network many", "nvlink", "pcie", "pcie crowded")
CLASSES = (*(f"{where} {size}" for where in _WHERE for size in ("large", "small")), "broadcast")


def _has_all_classes(sigma: Mapping[str, float]) -> bool:
    return set(CLASSES) <= set(sigma)


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Terms by `law.key_of`, and deviations of log seconds by `class_of`."""

    terms: Annotated[Mapping[str, Terms], Valid(_is_whole, "terms of both kinds of link")]
    sigma: Annotated[Mapping[str, Deviation], Valid(_has_all_classes, "one of each class")]
    source: str

    def terms_of(self, asked: Collective, regime: Regime) -> Terms:
        """A regime's terms; where no table had it, those of the same protocol in a ring, or in an exchange of all."""
        alike = "p2p" if regime.algorithm == "p2p" else "ring"
        kind = asked.group.link.kind
        for key in (key_of(asked, regime), f"{kind} {alike}/{regime.protocol}", f"{kind} {alike}/Simple"):
            found = self.terms.get(key)
            if found is not None:
                return found
        raise KeyError(key_of(asked, regime))


def class_of(asked: Collective) -> str:
    """Which deviation is a collective's: of several hosts or of many, over NVLink, over PCI Express between two GPUs
    or more, by size; a broadcast's, of which no table has any."""
    group = asked.group
    if asked.kind == "broadcast" and group.nodes == 1 and group.link.kind == "nvlink":
        return "broadcast"
    if group.nodes > 1:
        where = "network many" if group.nodes > FEW_HOSTS else "network"
    else:
        where = "pcie crowded" if group.link.kind == "pcie" and group.gpus > 2 else group.link.kind
    return f"{where} {'large' if asked.bytes >= LARGE else 'small'}"


@cache
def fitted() -> Fitted:
    """What ships."""
    return load(Fitted, FILE, "a law of collectives", hint="`python -m studies.links TABLES --write` makes it")


def projected(asked: Collective, known: Fitted | None = None) -> CollectiveTime:
    """The time of a collective by its link's datasheet."""
    known = known or fitted()
    regime = asked.regime
    found = seconds(asked, regime, known.terms_of(asked, regime))
    sigma, held = known.sigma[class_of(asked)], blocks(asked, regime)
    return CollectiveTime(found, sigma, "projected", regime, held, asked.group.link.name, line_seconds(asked, regime))
