"""A profile: the performance of one GPU, measured or projected, and the software used. One JSON file.

Read without torch, pandas or scipy. `Profile.estimate` times pieces of device work; where nothing alike was
measured it answers from what comes nearest, says so ("extrapolated") and widens the error bar.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np

from flopcast import files
from flopcast.bounds import Valid, Within
from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.json_files import read_json
from flopcast.microbench.records.machine import Device
from flopcast.roofline.base.numbers import Number
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.laws import gemm
from flopcast.roofline.gpu.profile.conv_1x1 import Conv1x1
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.passes import DEFAULT_CLOCK_MHZ, DEFAULT_SM_COUNT, Rates
from flopcast.roofline.gpu.profile.provenance import Provenance
from flopcast.roofline.gpu.profile.request import Estimate, Request, WorkLike, arrays_of
from flopcast.roofline.gpu.profile.surface import Prediction, Surface
from flopcast.roofline.gpu.profile.unmeasured import Fallback
from flopcast.roofline.stream.lowering.grouped import IMBALANCE, is_group_by_group, product_of
from flopcast.roofline.stream.lowering.variants import GemmVariant, KernelKind, SurfaceKey

SCHEMA = 1
_HINT = "`flopcast fit DIR` makes one"
PROFILES = DATA / "profiles"
ProfileBasis = Literal["measured", "projected", "published"]
PROFILE_BASES: tuple[str, ...] = get_args(ProfileBasis)
Rate = Annotated[Number, Valid(lambda rate: rate.value > 0, "a rate above 0")]

# A prediction is "measured" where that very shape was, and "extrapolated" where its residual's correlation with that of
# the most alike of the measured points is less than this: there the answer is the law's alone.
_FAR = 0.1
# Added to the deviation of log seconds of products of few rows that the law of the others answers for: it was 9% fast
# at the median of an H200's 170, and up to 43% slow.
FEW_ROWS_SIGMA = 0.2
THREADS_FROM = 2000  # requests: 10,000 products take 1.4 s of a processor, all ops of a step 20 ms


@dataclass(frozen=True)
class Profile:
    """What is known of one GPU (or processor) and its host.

    `peaks`: dense FLOP/s by dtype. `ceilings`: what was reached (`fit.rows.ceilings_of` has the names).
    `launch_counts`: kernels that one call launches, a mean, of profiles whose surfaces do not say. `aliases`: backend
    names that stand for another ("sdpa": the one torch picks).
    """

    gpu: str
    basis: Annotated[str, ProfileBasis]
    device: Device
    peaks: dict[str, Rate]
    ceilings: dict[str, Number]
    surfaces: dict[SurfaceKey, Surface]
    launch_counts: dict[KernelKind, Annotated[float, Within(0.0, 1e6)]] = field(default_factory=dict)
    host: HostCosts | None = None
    stack: dict[str, Any] = field(default_factory=dict)
    provenance: Annotated[dict[str, Any], Provenance] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)

    def ceiling(self, name: str, default: float) -> float:
        number = self.ceilings.get(name)
        return default if number is None else number.value

    @property
    def default_attention(self) -> str:
        """The backend that torch's SDPA picks by itself on this device."""
        return self.aliases.get("sdpa", "sdpa-flash" if self.device.get("type") != "cpu" else "sdpa-cpu")

    @property
    def capability(self) -> tuple[int, int] | None:
        """The GPU's compute capability, None where it has none or it is not known."""
        found = self.device.get("capability")
        return (found[0], found[1]) if found else None

    @property
    def l2_bytes(self) -> float:
        """Size of the last-level cache, 0 where unknown."""
        return float(self.device.get("l2_bytes") or 0.0)

    def blocks(self, work: WorkLike, backend: str = "torch") -> int:
        """Thread blocks of a matrix product, of which each has a multiprocessor to itself; 0 for other work, and where
        no name of a kernel told."""
        surface = self.surfaces.get(SurfaceKey(backend, work.op_class, work.variant, "cold"))
        if surface is None or len(surface.features[0]) != len(work.features):
            return 0
        if surface.kind != "gemm" or not isinstance(surface.variant, GemmVariant):
            return 0
        return round(float(gemm.blocks(surface.variant, surface.params, np.array([work.features], float))[0]))

    # --- time of device work

    def estimate(self, requests: Sequence[Request]) -> list[Estimate]:
        """One estimate per request, in order. Kernel time only: a launch on the host, and the gap between
        kernels, is not in it. Never raises for a work that was not measured: it falls back
        (`unmeasured.py`)."""
        out: list[Estimate | None] = [None] * len(requests)
        conv_1x1 = self._conv_1x1.estimates(requests, self.estimate)
        groups: dict[SurfaceKey, list[int]] = {}
        missing: list[int] = []
        one_by_one: list[tuple[int, GemmVariant]] = []
        few: set[int] = set()
        for i, (work, backend, cache) in enumerate(requests):
            if i in conv_1x1:
                out[i] = conv_1x1[i]
                continue
            key = self._key_of(work, backend, cache)
            surface = self.surfaces.get(key)
            if key.variant != work.variant:
                few.add(i)
            if is_group_by_group(work.variant) and (surface is None or work.features not in surface.measured):
                one_by_one.append((i, work.variant))
            elif surface is None or len(surface.features[0]) != len(work.features):
                missing.append(i)
            else:
                groups.setdefault(key, []).append(i)
        for key, members, found in self._predict(requests, groups):
            name = str(key)
            if not np.isfinite(found.seconds + found.sigma).all():
                raise DataError(
                    f"the profile of {self.gpu!r} gives no time for {name}: the parameters of that surface are wrong;"
                    " fit it anew with `flopcast fit DIR`"
                )
            for i, seconds, sigma, likeness, launches in zip(
                members, *(column.tolist() for column in found), strict=True
            ):
                basis = "interpolated" if likeness > _FAR else "extrapolated"
                if requests[i][0].features in self.surfaces[key].measured:
                    basis = "measured"
                if self.basis != "measured" or key in self.projected_kinds:  # another GPU's points, scaled
                    basis = "published" if key in self._refined else "extrapolated"
                out[i] = Estimate(seconds, sigma, basis, name, round(launches))
        if missing:
            for i, (seconds, sigma, source) in zip(
                missing, self._fallback.estimate([requests[i] for i in missing]), strict=True
            ):
                out[i] = Estimate(seconds, sigma, "extrapolated", source)
        products = [product_of(variant, requests[i][0].features) for i, variant in one_by_one]
        if products:
            each = self.estimate(
                [(product, requests[i][1], "cold") for (i, _), (product, _) in zip(one_by_one, products, strict=True)]
            )
            for (i, _), one, (_, number) in zip(one_by_one, each, products, strict=True):
                sigma = math.hypot(one.sigma, IMBALANCE)
                out[i] = Estimate(
                    number * one.seconds, sigma, one.basis, f"{number} of {one.source}", number * one.launches
                )
        found_all = [
            estimate._replace(sigma=math.hypot(estimate.sigma, FEW_ROWS_SIGMA)) if i in few else estimate
            for i, estimate in enumerate(out)
            if estimate is not None
        ]
        if self.launch_counts:
            found_all = [
                one if one.launches else one._replace(launches=self._mean_launches(work))
                for one, (work, _, _) in zip(found_all, requests, strict=True)
            ]
        if not self._card_sigmas:
            return found_all
        return [
            estimate
            if i in conv_1x1
            else estimate._replace(
                sigma=math.hypot(estimate.sigma, self._card_sigmas.get(f"{work.op_class}/{cache}", 0.0))
            )
            for i, (estimate, (work, _, cache)) in enumerate(zip(found_all, requests, strict=True))
        ]

    def _mean_launches(self, work: WorkLike) -> int:
        return round(self.launch_counts.get(KernelKind(work.op_class, work.variant), 0))

    def _key_of(self, work: WorkLike, backend: str, cache: str) -> SurfaceKey:
        """The surface that answers for work, if any does: of products of few rows without one that of the others."""
        key = SurfaceKey(self.aliases.get(backend, backend), work.op_class, work.variant, cache)
        if key not in self.surfaces and isinstance(work.variant, GemmVariant) and work.variant.form == "few":
            return replace(key, variant=replace(work.variant, form=""))
        return key

    def _predict(
        self, requests: Sequence[Request], groups: Mapping[SurfaceKey, Sequence[int]]
    ) -> Iterator[tuple[SurfaceKey, Sequence[int], Prediction]]:
        """(surface, requests, prediction); many requests are divided among threads, since numpy's loops release the
        interpreter's lock."""

        def predict(part: tuple[SurfaceKey, Sequence[int]]) -> tuple[SurfaceKey, Sequence[int], Prediction]:
            key, members = part
            return key, members, self.surfaces[key].predict(*arrays_of([requests[i][0] for i in members]))

        total, processors = sum(map(len, groups.values())), os.cpu_count() or 1
        if total < THREADS_FROM or processors == 1:
            yield from map(predict, groups.items())
            return
        from concurrent.futures import ThreadPoolExecutor

        size = total // (2 * processors)
        parts = [(key, at[i : i + size]) for key, at in groups.items() for i in range(0, len(at), size)]
        with ThreadPoolExecutor(processors) as pool:
            yield from pool.map(predict, sorted(parts, key=lambda part: -len(part[1])))

    @cached_property
    def projected_kinds(self) -> frozenset[SurfaceKey]:
        """Of a measured profile, the surfaces that come from another GPU's (`projection.complete`)."""
        return frozenset(map(SurfaceKey.parse, (self.provenance.get("projected_kinds") or {}).get("surfaces") or ()))

    @property
    def own_surfaces(self) -> dict[SurfaceKey, Surface]:
        """The surfaces without those taken from another GPU."""
        return {key: found for key, found in self.surfaces.items() if key not in self.projected_kinds}

    @cached_property
    def _refined(self) -> frozenset[SurfaceKey]:
        """Surfaces whose parameters were fitted to published times of this GPU (`published_fit.py`)."""
        found = self.provenance.get("published") or {}
        return frozenset(map(SurfaceKey.parse, found.get("rows") or ())) if self.basis == "published" else frozenset()

    @property
    def card_spread(self) -> Mapping[str, Any]:
        """By how much cards of this GPU differ, {"classes": by "class/cache"} (`fit.cards.spread`); where one card was
        measured the spread of another GPU's cards, to be multiplied by "times" (`projection.complete`); empty where
        neither is known."""
        return self.provenance.get("gpus") or self.provenance.get("cards_lent") or {}

    @cached_property
    def _card_sigmas(self) -> dict[str, float]:
        """Deviation of log seconds from card to card by "class/cache", where several cards were measured."""
        times = self.card_spread.get("times", 1.0)
        classes = self.card_spread.get("classes") or {}
        return {name: times * float(found["sigma"]) for name, found in classes.items()}

    @cached_property
    def _conv_1x1(self) -> Conv1x1:
        return Conv1x1(self.surfaces)

    @cached_property
    def _fallback(self) -> Fallback:
        return Fallback(
            self.surfaces,
            Rates(
                peaks={dtype: number.value for dtype, number in self.peaks.items()},
                ceilings={name: number.value for name, number in self.ceilings.items()},
                clock_mhz=self.device.get("clock_mhz") or DEFAULT_CLOCK_MHZ,
                sm_count=self.device.get("sm_count") or DEFAULT_SM_COUNT,
            ),
            self.aliases,
        )

    # --- files

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the fields."""
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def to_json(self) -> dict[str, Any]:
        surfaces = {str(key): surface.to_json() for key, surface in self.surfaces.items()}
        plain = {name: getattr(self, name) for name in ("stack", "provenance", "aliases")}
        return {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "basis": self.basis,
            "device": self.device,
            "launch_counts": {str(kind): count for kind, count in self.launch_counts.items()},
            **plain,
            "peaks": {name: asdict(number) for name, number in self.peaks.items()},
            "ceilings": {name: asdict(number) for name, number in self.ceilings.items()},
            "host": None if self.host is None else asdict(self.host),
            "surfaces": surfaces,
        }

    def save(self, path: Path | str) -> None:
        """Writes the profile whole or not at all; gzip where the name ends in .gz. The same profile gives the same
        bytes. Raises UsageError when it cannot be written, RunError without room."""
        text = json.dumps(self.to_json(), separators=(",", ":"), allow_nan=False) + "\n"
        with files.write_errors(Path(path)):
            files.write(Path(path), text)

    @classmethod
    def load(cls, path: Path | str) -> Profile:
        """Raises DataError when the file is missing, malformed, or of a newer schema."""
        path = Path(path)
        record = read_json(path, "a profile", hint=_HINT)
        return cls.from_json(record, str(path))

    @classmethod
    def from_json(cls, record: Any, name: str = "profile") -> Profile:
        """Raises DataError, naming what is wrong."""
        profile = decode(cls, record, name, "a profile", hint=_HINT, schema=SCHEMA)
        for key, surface in profile.surfaces.items():
            if surface.variant != key.variant:
                raise DataError(f"{name} is not a profile: its surface {str(key)!r} is of variant {surface.variant}")
            if surface.has_base and key.with_cache("cold") not in profile.surfaces:
                raise DataError(f"{name} is not a profile: its surface {str(key)!r} is there without the cold one")
        return replace(profile, surfaces=_with_bases(profile.surfaces))

    def with_host(self, host: HostCosts | None) -> Profile:
        """This GPU's profile with another host."""
        return replace(self, host=host)


def _with_bases(surfaces: dict[SurfaceKey, Surface]) -> dict[SurfaceKey, Surface]:
    return {
        key: replace(s, base=surfaces[key.with_cache("cold")]).solved(s.weights) if s.has_base else s
        for key, s in surfaces.items()
    }
