"""A link as it was measured on a host: the times of its collectives, what launching them costs the host, what kernels
lose beside them, copies between host and device. `fit.py` makes it of the rows of `bench --suite collectives`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import exp, hypot, log, log2
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from flopcast import files
from flopcast.bounds import Count, Deviation, NonNegative, Seconds, Size, Valid
from flopcast.decode import load
from flopcast.roofline.gpu.links.choice import Kind, Regime
from flopcast.roofline.gpu.links.contention import Beside, Contention
from flopcast.roofline.gpu.links.fitted import LARGE, CollectiveTime, class_of, fitted, projected
from flopcast.roofline.gpu.links.law import Collective, blocks, seconds

SCHEMA = 1
# Of another day, host or process. From 1 MiB on, 22 sizes in real steps of the measured host, 2,614 collectives in all,
# are 3.7% off (root of the mean square; reports/nvidia-h200/links/in_steps.csv); published tables of one GPU by two
# versions of NCCL agree to 0.5% (median), below 1 MiB to 2.1%.
ANOTHER_DAY, ANOTHER_DAY_SMALL = 0.035, 0.04
FROM_OTHERS = 0.10  # a kind or a number of GPUs that was not measured, by the law from those that were
# Of how far the law is off among some GPUs, so much is carried over to twice or half as many. Published times among 4
# A100s and 4 B300s, by those among 2: the median error is 4.4 and 5.8% from 1 MiB on, 6.3 and 6.6% with all of it, 5.9
# and 4.8% with none; below 1 MiB 5.2 and 3.2%, 6.1 and 3.9%, 6.5 and 4.5%. Among 8 none is as good as a quarter.
CARRIED_OVER = 0.5

Fabric = Annotated[str, Literal["", "nvlink3", "nvlink4", "nvlink5", "pcie4", "pcie5"]]


def _is_regime(text: str) -> bool:
    return not text or bool(Regime.parse(text))


class Point(NamedTuple):
    """A collective that was measured, among `gpus` on `nodes` hosts: its whole bytes, median seconds on the GPUs, the
    deviation of their logarithm between samples, the regime as NCCL logged it ("" where it did not), and its channels
    (0: not known)."""

    kind: Kind
    dtype: str
    gpus: Size
    nodes: Size
    bytes: Size
    seconds: Seconds
    sigma: Deviation
    regime: Annotated[str, Valid(_is_regime, "an algorithm and a protocol, or nothing")]
    channels: Count


class HostCost(NamedTuple):
    """Host seconds of a collective launched from Python, and of one node of a replayed CUDA graph (None: not
    measured)."""

    kind: Kind
    gpus: Size
    python_seconds: NonNegative
    captured_seconds: NonNegative | None


class Copy(NamedTuple):
    """A copy between host and device, by one GPU while `gpus` of them do it at once."""

    direction: Annotated[str, Literal["to_device", "to_host"]]
    pinned: bool
    gpus: Size
    bytes: Size
    seconds: Seconds


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """What was measured of one host. `link`: the datasheet's link, "" for one that is not known. `nvls`: whether NCCL
    was free to use it. `contention`: fitted to `beside`. `backend`: "nccl", or "gloo" for processors, which only tests
    take."""

    schema: Annotated[int, range(1, SCHEMA + 1)] = SCHEMA
    kind: Annotated[str, Literal["link"]] = "link"
    name: str
    gpu: str
    link: Fabric
    backend: Annotated[str, Literal["nccl", "gloo"]]
    nccl: str
    nvls: bool
    points: Annotated[Sequence[Point], Valid(bool, "one point at least")]
    host: Sequence[HostCost] = ()
    beside: Sequence[Beside] = ()
    contention: Contention | None = None
    copies: Sequence[Copy] = ()
    date: str = ""
    stack: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def _curves(self) -> dict[tuple[str, str, int, int], list[Point]]:
        curves: dict[tuple[str, str, int, int], list[Point]] = {}
        for point in sorted(self.points, key=lambda point: point.bytes):
            curves.setdefault((point.kind, point.dtype, point.gpus, point.nodes), []).append(point)
        return curves

    def measured_gpus(self) -> list[int]:
        """The numbers of a host's GPUs that were measured."""
        return sorted({point.gpus for point in self.points if point.nodes == 1})

    def time(self, asked: Collective, dtype: str = "bf16") -> CollectiveTime:
        """The time of a collective: as measured where the number of GPUs and hosts was, else by the law, within a host
        bent to what was measured there."""
        group = asked.group
        curve = self._curve(asked.kind, dtype, group.gpus, group.nodes)
        if curve is not None:
            return self._on(curve, asked)
        return projected(asked) if group.nodes > 1 or not self.measured_gpus() else self._from_others(asked, dtype)

    def _curve(self, kind: str, dtype: str, gpus: int, nodes: int = 1) -> list[Point] | None:
        """The measured curve; of another dtype where this one's is missing, since a byte is a byte to the link."""
        if (kind, dtype, gpus, nodes) in self._curves:
            return self._curves[kind, dtype, gpus, nodes]
        alike = (curve for (k, _, *where), curve in self._curves.items() if (k, where) == (kind, [gpus, nodes]))
        return next(alike, None)

    def _on(self, curve: Sequence[Point], asked: Collective) -> CollectiveTime:
        above = next((i for i, point in enumerate(curve) if point.bytes >= asked.bytes), len(curve))
        if above < len(curve) and curve[above].bytes == asked.bytes:
            return self._answer(asked, curve[above].seconds, curve[above], "measured")
        if above == 0:  # less than the smallest: its latency
            return self._answer(asked, curve[0].seconds, curve[0], "extrapolated")
        low = curve[above - 1]
        if above == len(curve):
            return self._answer(asked, _carried_on(low, asked), low, "extrapolated", 0.05)
        high = curve[above]
        if _regime(low, asked) == _regime(high, asked):
            share = log(asked.bytes / low.bytes) / log(high.bytes / low.bytes)
            # the law's curve, bent so that it goes through both
            between = exp(log(_carried_on(low, asked)) * (1 - share) + log(_carried_on(high, asked)) * share)
            return self._answer(asked, between, high if share > 0.5 else low, "interpolated", 0.01)
        # Another algorithm or protocol somewhere between: each carried on to here, and NCCL's own model says which. The
        # deviation spans both.
        near = high if str(asked.regime) == _regime(high, asked) else low
        apart = abs(log(_carried_on(high, asked) / _carried_on(low, asked)))
        return self._answer(asked, _carried_on(near, asked), near, "interpolated", apart / 2)

    def _answer(self, asked: Collective, found: float, near: Point, basis: str, more: float = 0.0) -> CollectiveTime:
        day = ANOTHER_DAY if asked.bytes >= LARGE else ANOTHER_DAY_SMALL
        regime = Regime.parse(near.regime) if near.regime else None
        held = near.channels or blocks(asked, regime)
        return CollectiveTime(found, hypot(near.sigma, day, more), basis, regime, held, self.name)

    def _from_others(self, asked: Collective, dtype: str) -> CollectiveTime:
        """The law, times a part of how far it is off for what was measured: the same kind with the next number of GPUs,
        else the all-reduce or any other. NVSwitch's sums are another machine than rings: of those, the law alone."""
        by_law = projected(asked)
        if by_law.regime is not None and by_law.regime.algorithm == "nvls" and not self.nvls:
            return by_law
        kinds = sorted({kind for kind, *_ in self._curves}, key=lambda kind: (kind != asked.kind, kind))
        gpus = min(self.measured_gpus(), key=lambda n: (abs(log(n / asked.group.gpus)), n))
        for kind in kinds:
            curve = self._curve(kind, dtype, gpus)
            if curve is not None:
                alike = Collective(curve[0].kind, asked.bytes, replace(asked.group, gpus=gpus))
                off = self._on(curve, alike).seconds / projected(alike).seconds
                sigma = min(fitted().sigma[class_of(asked)], hypot(FROM_OTHERS, abs(log(off)) / 2))
                carried = off**CARRIED_OVER ** abs(log2(asked.group.gpus / gpus))
                return by_law._replace(seconds=by_law.seconds * carried, sigma=sigma, basis="extrapolated",
                                       source=self.name)  # fmt: skip
        return by_law

    # --- files

    def save(self, path: Path) -> None:
        """Writes the profile whole or not at all. Raises UsageError when it cannot be written, RunError without
        room."""
        record = asdict(self)
        with files.write_errors(path):
            files.write(path, json.dumps(record, indent=None, separators=(",", ":"), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> LinkProfile:
        """Raises DataError when the file is missing, malformed, of a newer schema, or no link."""
        return load(cls, path, "a link", hint="`flopcast bench --suite collectives` and `flopcast fit` make one",
                    schema=SCHEMA)  # fmt: skip


def copy_seconds(copies: Sequence[Copy], direction: str, size: float, *, pinned: bool, gpus: int = 1) -> float:
    """The seconds of a copy between host and device: between the measured sizes in proportion, below the smallest and
    beyond the largest on the line through the two next to it. Raises ValueError for fewer than two measured."""
    line = sorted((c.bytes, c.seconds) for c in copies if (c.direction, c.pinned, c.gpus) == (direction, pinned, gpus))
    if len(line) < 2:
        raise ValueError(f"copies {direction} of {gpus} GPUs: measured at {len(line)} sizes, two are needed")
    above = next((i for i, (bytes_, _) in enumerate(line) if bytes_ >= size), len(line) - 1)
    (low, first), (high, second) = line[max(above - 1, 0)], line[max(above, 1)]
    return max(first + (size - low) * (second - first) / (high - low), first * size / low if size < low else 0.0)


def _regime(point: Point, asked: Collective) -> str:
    """The regime of a measured point: as NCCL logged it; of sends, of which it logs none, what it takes by its rule."""
    if point.regime or asked.kind not in ("all_to_all", "send_recv"):
        return point.regime
    return str(Collective(asked.kind, point.bytes, asked.group).regime)


def _carried_on(point: Point, asked: Collective) -> float:
    """The seconds of a measured point at another size, by the law in its regime."""
    here = Collective(asked.kind, point.bytes, asked.group)
    regime = Regime.parse(point.regime) if point.regime else here.regime
    terms = fitted().terms_of(here, regime)
    return point.seconds * seconds(asked, regime, terms) / seconds(here, regime, terms)
