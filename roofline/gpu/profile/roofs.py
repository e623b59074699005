"""The roofs of a part, where they meet, and the points below them: what `flopcast roofline` and its figures show.

A roof is a rate that nothing measured here goes beyond for long: of the matrix units by dtype (burst: from cool;
sustained: after seconds of load), of memory (read, write, copy), of the last-level cache, and the time of the
shortest kernel, which bounds small work. A ridge point is the arithmetic intensity (FLOP per byte) from which the
matrix units bound rather than the bytes. Datasheet peaks are references: a rate above one is a warning, since
parts run above the clock that their datasheet counts with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from flopcast.kernels.shapes import shape_from_json
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec, load_specs, spec_of_device
from flopcast.roofline.gpu.catalogue.device import live_peaks
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant

if TYPE_CHECKING:
    from flopcast.roofline.base.numbers import Number
    from flopcast.roofline.gpu.profile.profile import Profile


DTYPES = ("fp8", "int8", "bf16", "fp16", "tf32", "fp32", "fp64")
BANDWIDTHS = ("hbm_read", "hbm_write", "hbm_copy")
# The shortest kernel of an H200 takes 1.1 us: below this nothing ran.
LEAST_KERNEL_SECONDS = 1e-7
# Working sets below this many bytes tell of the shortest kernel, not of the cache.
LEAST_CACHE_SET = 4 << 20
# A rate above a datasheet peak by less than this is clock and rounding.
PEAK_TOLERANCE = 0.01


@dataclass(frozen=True)
class MatrixRoof:
    """FLOP/s that products of one dtype reach, and the FLOP per byte from which they do.

    `ridge_memory`, `ridge_cache`: sustained (else burst) rate over the copy bandwidth of memory and of the cache.
    `peak`: the datasheet's; `share`: the better of burst and sustained of it.
    """

    dtype: str
    burst: Number | None
    sustained: Number | None
    peak: Number | None
    ridge_memory: float | None
    ridge_cache: float | None

    @property
    def best(self) -> Number:
        """The higher of burst and sustained, with which points are compared."""
        found = [n for n in (self.burst, self.sustained) if n is not None]
        return max(found, key=lambda number: number.value)

    @property
    def lasting(self) -> Number:
        """Sustained where it was measured, else burst."""
        return self.sustained or self.best

    @property
    def share(self) -> float | None:
        return None if self.peak is None else self.best.value / self.peak.value


@dataclass(frozen=True)
class Point:
    """One measured kernel (of a projection: scaled). `bytes`: each operand once; `flops` 0 where none are counted."""

    op_class: str
    backend: str
    variant: Variant
    cache: str
    bytes: float
    flops: float
    seconds: float
    features: tuple[float, ...]
    basis: str

    @property
    def flops_per_second(self) -> float:
        return self.flops / self.seconds

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flops / self.bytes

    @property
    def dtype(self) -> str:
        """The dtype of products and attention, from the variant; "" for other classes."""
        if not self.flops:
            return ""
        return self.variant.dtypes if self.variant.dtypes in DTYPES else ""

    @property
    def is_unaligned(self) -> bool:
        """Whether rows do not start at multiples of 16 bytes, which other, slower kernels serve."""
        return isinstance(self.variant, GemmVariant) and not self.variant.is_aligned

    def to_json(self) -> dict[str, Any]:
        record = vars(self) | {"variant": str(self.variant), "class": self.op_class, "dtype": self.dtype}
        del record["op_class"], record["features"]
        return record


@dataclass(frozen=True)
class Roofs:
    """All of it. `working_sets`: (bytes of the working set, copy bytes/s), small to large; `cache`: the best of
    those that the cache holds, or the cache's copy where there was no sweep; `reference_bandwidth`: datasheet."""

    gpu: str
    basis: str
    matrix: tuple[MatrixRoof, ...]
    bandwidths: dict[str, Number]
    cache: Number | None
    working_sets: tuple[tuple[float, Number], ...]
    cache_reads: tuple[tuple[float, Number], ...]
    floor: Number | None
    cache_bytes: float
    reference_bandwidth: float | None
    warnings: tuple[str, ...]

    @property
    def copy(self) -> Number | None:
        return self.bandwidths.get("hbm_copy")

    def of(self, dtype: str) -> MatrixRoof | None:
        return next((roof for roof in self.matrix if roof.dtype == dtype), None)


def spec_of(profile: Profile) -> GpuSpec | None:
    """The datasheet of the profile's part, None where it is not known."""
    return load_specs().get(profile.gpu) or spec_of_device(str(profile.device.get("name")))


def peaks_of(profile: Profile) -> dict[str, Number]:
    """Reference peaks by dtype: the profile's and, of dtypes that it lacks, as the device's architecture has them."""
    return {**live_peaks(profile.device), **profile.peaks}


def roofs_of(profile: Profile) -> Roofs:
    """The roofs of a profile, measured or projected; what was not measured is None or left out."""
    ceilings = profile.ceilings
    copy = ceilings.get("hbm_copy")
    working_sets = _sweep(profile, "copy/")
    cache_reads = _sweep(profile, "l2_read/")
    cache = _cache_roof(profile, working_sets)
    matrix = []
    for dtype in DTYPES:
        burst, sustained = ceilings.get(f"matrix_burst/{dtype}"), ceilings.get(f"matrix_sustained/{dtype}")
        lasting = sustained or burst
        if lasting is None:
            continue
        peak = profile.peaks.get(dtype)
        matrix.append(
            MatrixRoof(
                dtype,
                burst,
                sustained,
                None if peak is None or peak.basis == "measured" else peak,
                None if copy is None else lasting.value / copy.value,
                None if cache is None else lasting.value / cache.value,
            )
        )
    spec = spec_of(profile)
    reference = None if spec is None else spec.bandwidth_bytes_per_second
    bandwidths = {name: ceilings[name] for name in BANDWIDTHS if name in ceilings}
    return Roofs(
        gpu=profile.gpu,
        basis=profile.basis,
        matrix=tuple(matrix),
        bandwidths=bandwidths,
        cache=cache,
        working_sets=working_sets,
        cache_reads=cache_reads,
        floor=ceilings.get("kernel_floor"),
        cache_bytes=profile.l2_bytes,
        reference_bandwidth=reference,
        warnings=tuple(_above_datasheet(matrix, bandwidths, reference, profile.basis != "measured")),
    )


def _sweep(profile: Profile, prefix: str) -> tuple[tuple[float, Number], ...]:
    """(working set, bytes/s) of the scalars `prefix<bytes>`. Not of a projection, which keeps its source's."""
    if profile.basis != "measured":
        return ()
    found = [
        (float(name.removeprefix(prefix)), number)
        for name, number in profile.ceilings.items()
        if name.startswith(prefix) and name.removeprefix(prefix).isdigit()
    ]
    return tuple(sorted(found, key=lambda pair: pair[0]))


def _cache_roof(profile: Profile, working_sets: Iterable[tuple[float, Number]]) -> Number | None:
    held = [number for size, number in working_sets if LEAST_CACHE_SET <= size <= profile.l2_bytes]
    plain = profile.ceilings.get("l2_copy")
    return max([*held, *([plain] if plain else [])], key=lambda number: number.value, default=None)


def _above_datasheet(
    matrix: Iterable[MatrixRoof], bandwidths: dict[str, Number], reference: float | None, is_projected: bool
) -> Iterable[str]:
    why = "the part runs above the clock that the datasheet counts with, or the peak is wrong"
    if is_projected:
        why = "a projection, which measurements of the part itself would correct"
    for roof in matrix:
        if roof.share is not None and roof.share > 1 + PEAK_TOLERANCE and roof.peak is not None:
            yield f"{roof.dtype} products reach {roof.share:.0%} of the {roof.peak.basis} peak: {why}"
    for name, number in bandwidths.items():
        if reference and number.value > reference * (1 + PEAK_TOLERANCE):
            yield (
                f"{name} reads {number.value / reference:.0%} of the datasheet's bandwidth: a cache served part of it, "
                "or the datasheet is wrong"
            )


def points_of(profile: Profile) -> list[Point]:
    """Every point of the profile's surfaces: measured kernels, or (projected) another part's, scaled."""
    basis = "measured" if profile.basis == "measured" else "extrapolated"
    points = []
    for key, surface in profile.own_surfaces.items():
        rows = zip(surface.bytes, surface.flops, surface.seconds, surface.features, strict=True)
        points += [
            Point(key.op_class, key.backend, key.variant, key.cache, moved, flops, seconds, features, basis)
            for moved, flops, seconds, features in rows
        ]
    return points


def points_of_rows(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The same of measurement rows (`measurements.jsonl`), held-out ones too: kernel times as they were read."""
    points = []
    for row in rows:
        seconds = row.get("kernel_seconds") or row.get("seconds")
        if row.get("shape") and seconds and row["status"] == "ok":
            backend = row.get("backend", "torch")
            work = describe(shape_from_json(row["shape"]), backend)
            basis = "measured, power-throttled" if row.get("throttled") else "measured"
            points.append(
                Point(work.op_class, backend, work.variant, row.get("cache", "cold"), float(work.bytes),
                      float(work.flops), float(seconds), work.features, basis)
            )  # fmt: skip
    return points


@dataclass(frozen=True)
class Best:
    """The best that one class reached with one backend, by the rate that bounds it."""

    op_class: str
    backend: str
    cache: str
    points: int
    rate: float
    unit: str
    share: float | None
    of: str


def best_points(roofs: Roofs, points: Iterable[Point]) -> list[Best]:
    """By class, backend, dtype (of products) and cache: how many points, and the best of them against its roof.

    Calls that launch nothing (views: their profile reads 0.3 ns) have no rate."""
    groups: dict[tuple[str, str, str, str], list[Point]] = {}
    for point in points:
        if point.seconds < LEAST_KERNEL_SECONDS:
            continue
        groups.setdefault((point.op_class, point.backend, point.dtype, point.cache), []).append(point)
    found = []
    for (op_class, backend, dtype, cache), members in sorted(groups.items()):
        if dtype:
            rate = max(p.flops_per_second for p in members)
            roof = roofs.of(dtype)
            share = None if roof is None else rate / roof.best.value
            of, unit = f"{dtype} burst", "FLOP/s"
        else:
            rate = max(p.bytes_per_second for p in members)
            bound = roofs.copy if cache == "cold" else roofs.cache
            share = None if bound is None else rate / bound.value
            of, unit = ("memory copy" if cache == "cold" else "cache copy"), "B/s"
        found.append(Best(op_class, backend, cache, len(members), rate, unit, share, of))
    return found


def to_json(profile: Profile, roofs: Roofs, points: Iterable[Point]) -> dict[str, Any]:
    """What `roofline --json` prints: SI units throughout."""

    def number(found: Number | None) -> dict[str, Any] | None:
        return None if found is None else asdict(found)

    points = list(points)
    return {
        "gpu": profile.gpu,
        "basis": profile.basis,
        "ceilings": {name: asdict(n) for name, n in profile.ceilings.items()},
        "peaks": {name: asdict(n) for name, n in peaks_of(profile).items()},
        "matrix": [
            {
                "dtype": roof.dtype,
                "burst_flops_per_second": number(roof.burst),
                "sustained_flops_per_second": number(roof.sustained),
                "peak_flops_per_second": number(roof.peak),
                "share_of_peak": roof.share,
                "ridge_memory_flops_per_byte": roof.ridge_memory,
                "ridge_cache_flops_per_byte": roof.ridge_cache,
            }
            for roof in roofs.matrix
        ],
        "bandwidths": {name: asdict(n) for name, n in roofs.bandwidths.items()},
        "cache_bytes_per_second": number(roofs.cache),
        "working_sets": [{"bytes": size, "bytes_per_second": n.value} for size, n in roofs.working_sets],
        "cache_reads": [{"bytes": size, "bytes_per_second": n.value} for size, n in roofs.cache_reads],
        "kernel_floor_seconds": number(roofs.floor),
        "datasheet_bytes_per_second": roofs.reference_bandwidth,
        "best": [asdict(best) for best in best_points(roofs, points)],
        "points": [point.to_json() for point in points],
        "warnings": list(roofs.warnings),
    }
