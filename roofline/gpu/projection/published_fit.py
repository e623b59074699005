"""Refines a projected profile with published times of the GPU's own operations. numpy only.

The laws' parameters are fitted, each with the projection as its prior (standard deviation of its logarithm
`PRIOR_SIGMA`, of a tile's own factor `TILE_SIGMA`), to a sample of the rows, robustly: an error counts by its square
up to about `ROBUST` in log seconds and linearly beyond. What the rows do not cover is scaled along:

products     other layouts and cache states of the same width by the same ratios; unaligned ones by what is the chip's
             (`SHARED`), other chips of the same name (an A100 of other memory and power) by the ratios of all
attention    flash forward of other head sizes and masks by the ratios of `CARRIED`; backward not at all

The rows themselves are not kept: a profile holds the parameters, and the standard deviation of the rows from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

import numpy as np

from flopcast.bounds import Count, Deviation
from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention
from flopcast.roofline.base.numbers import Z_90, Number
from flopcast.roofline.gpu.catalogue.datasheets import GpuSpec
from flopcast.roofline.gpu.laws.gemm_before_hopper import TILE_NAMES
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.laws.memory import SPILL_SHARE
from flopcast.roofline.gpu.laws.smooth import Array
from flopcast.roofline.gpu.profile.gaussian_process import Residual
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.surface import Surface
from flopcast.roofline.gpu.projection.published_tables import Timed
from flopcast.roofline.stream.lowering.variants import AttentionVariant, GemmVariant, SurfaceKey

PRIOR_SIGMA, TILE_SIGMA = 0.5, 0.1
ROBUST, NOISE = 0.1, 0.16  # log seconds; NOISE: a row's standard deviation, relative to the priors
ROUNDS, STEP, LONGEST = 9, 1e-3, 0.5
LEAST_ROWS, MOST_ROWS = 20, {"gemm": 2000, "attention": 700}
LEAST_SIGMA = 0.05  # two stacks' times of the same products on the same GPU differ by 6% (A100) to 16% (L40S)
FAINT = 1e-3

FITTED = {
    "tiles": (
        "reach", "throttle", "l2_bandwidth", "shared_bandwidth", "prologue", "epilogue", "floor", "bandwidth", "split",
        "split_bandwidth", "sharpness", "absorbed", "quantised", *TILE_NAMES,
    ),
    "gemm": ("peak", "l2_bandwidth", "prologue", "epilogue", "floor", "bandwidth", "split"),
    "attention": ("efficiency", "prologue", "floor", "bandwidth"),
}  # fmt: skip
ADDITIVE = frozenset(TILE_NAMES)
AT_MOST_ONE = frozenset(["absorbed", "quantised"])
SHARED = ("throttle", "bandwidth", "floor", "absorbed", "l2_bandwidth", "shared_bandwidth")
CARRIED = ("efficiency", "prologue", "floor")
WIDE = ("bf16", "fp16")
STORES = 2  # kernels of a server's call beside attention: keys and values into its cache
STORE_SURFACE = SurfaceKey.parse("torch/embedding/embedding|fp32+int64>fp32/cold")  # rows gathered: the nearest kind
SQUARE_SURFACE = SurfaceKey.parse("torch/gemm/nt/bf16/cold")


class FitRecord(TypedDict):
    """A law's parameters before and after the fit, the remaining deviation of log seconds, and the number of rows.

    `is_serving`: whether of a server's kernels, whose pace but not whose schedule torch's share."""

    surface: str
    is_serving: bool
    rows: Count
    sigma: Deviation
    before: dict[str, float]
    after: dict[str, float]


class Record(TypedDict):
    """What `refine` found and `apply` puts into a profile; `data/published` ships some. `held_out`: which
    shapes were left out of the fit."""

    gpu: str
    source: str
    held_out: str
    fits: list[FitRecord]


def refine(
    profile: Profile, spec: GpuSpec, rows: Sequence[Timed], source: str, *, hold_out: bool = False
) -> tuple[Profile, Record]:
    """Returns the refined profile, and the record of the fit for `apply`. `hold_out`: fit only one half of the shapes.

    Raises UsageError for a measured profile, and where no surface has `LEAST_ROWS` rows."""
    if profile.basis == "measured":
        raise UsageError(
            f"the profile of {profile.gpu} is measured: published tables cannot refine it; give another --gpu"
        )
    groups: dict[tuple[SurfaceKey, bool], list[Timed]] = {}
    for row in rows:
        if not (hold_out and row.is_held_out):
            groups.setdefault((_key(row), row.is_serving), []).append(row)
    fits = [
        fit_surface(profile, spec, key, members)
        for (key, _), members in groups.items()
        if key in profile.surfaces and len(members) >= LEAST_ROWS
    ]
    if not fits:
        counts = ", ".join(f"{len(members)} of {key}" for (key, _), members in groups.items())
        raise UsageError(
            f"{counts or 'no rows'}: a fit needs {LEAST_ROWS} rows of one kind of operation that the profile has"
        )
    held_out = "shapes whose key has an odd SHA-256 (`published.Timed.is_held_out`)" if hold_out else ""
    record = Record(gpu=profile.gpu, source=source, held_out=held_out, fits=fits)
    return apply(profile, record), record


def _key(row: Timed) -> SurfaceKey:
    """The key of the surface that such calls belong to; operands of tables count as cold."""
    return SurfaceKey(row.work.backend, row.work.op_class, row.work.variant, "cold")


def fit_surface(profile: Profile, spec: GpuSpec, key: SurfaceKey, rows: Sequence[Timed]) -> FitRecord:
    surface = profile.surfaces[key]
    start = serving_params(surface, spec) if rows[0].is_serving else dict(surface.params)
    every = max(1, -(-len(rows) // MOST_ROWS[key.op_class]))
    some = sorted(rows, key=lambda row: row.work.shape.key)[::every]
    features, bytes_, flops = columns(some)
    seconds = np.array([row.seconds for row in some])

    def logs(params: Mapping[str, float]) -> Array:
        if rows[0].is_serving:
            return serving_logs(profile, key, params, some)
        return LAWS[surface.kind].log_seconds(surface.variant, params, features, bytes_, flops)

    names = [key for key in FITTED[surface.kind] if key in start]
    after = fit_params(logs, start, names, np.log(seconds))
    left = np.abs(logs(after) - np.log(seconds))
    return FitRecord(
        surface=str(key),
        is_serving=rows[0].is_serving,
        rows=len(rows),
        sigma=round(max(float(np.quantile(left, 0.9)) / Z_90, LEAST_SIGMA), 4),
        before={name: _rounded(start[name]) for name in names},
        after={name: _rounded(after[name]) for name in names},
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def columns(rows: Sequence[Timed]) -> tuple[Array, Array, Array]:
    return (
        np.array([row.work.features for row in rows], float),
        np.array([row.work.bytes for row in rows], float),
        np.array([row.work.flops for row in rows], float),
    )


def serving_params(surface: Surface, spec: GpuSpec) -> dict[str, float]:
    """Derives the law's parameters for a server's forward kernel from those of torch's flash.

    FlashAttention 3's kernels for GPUs before Hopper pack the query heads of a key head, and run blocks of 128 rows by
    64 keys, two on an SM, or (GA102, Ada) by 128 keys in eight warps, alone (its hopper/tile_size.h,
    flash_fwd_launch_template.h); prefill does not split keys."""
    params = {**surface.params, "packs": 1.0, "splits": 0.0, "block": 128.0, "advance": 64.0, "resident": 2.0}
    if spec.capability in ((8, 6), (8, 9)):
        # one block has the pace of two that share an SM
        params |= {"advance": 128.0, "resident": 1.0, "efficiency": surface.params["efficiency"] * 4.0 / 3.0}
    return params


def serving_logs(profile: Profile, key: SurfaceKey, params: Mapping[str, float], rows: Sequence[Timed]) -> Array:
    """log seconds of a server's calls by the law of `params`, the cold ones of surface `key`; tables time one set of
    tensors again and again, so that those which fit in L2 are found there."""
    surface = profile.surfaces[key]
    features, bytes_, flops = columns(rows)
    hot = profile.surfaces.get(key.with_cache("hot"))
    gain = 1.0 if hot is None else hot.params["bandwidth"] / surface.params["bandwidth"]
    fits = bytes_ <= SPILL_SHARE * profile.l2_bytes
    seconds = np.empty(len(rows))
    for some, bandwidth in ((fits, params["bandwidth"] * gain), (~fits, params["bandwidth"])):
        if some.any():
            given = {**params, "bandwidth": bandwidth}
            law = LAWS[surface.kind].log_seconds(surface.variant, given, features[some], bytes_[some], flops[some])
            seconds[some] = np.exp(law)
    seconds += store_seconds(profile, rows)
    return np.asarray(np.log(seconds))


def store_seconds(profile: Profile, rows: Sequence[Timed]) -> Array:
    """Seconds of a server's calls besides attention: they copy keys and values once, to a cache larger than any L2."""
    store = profile.surfaces.get(STORE_SURFACE)
    if store is None:
        return np.zeros(len(rows))
    shapes = [row.work.shape for row in rows]
    sizes = [2.0 * s.batch * s.kv_heads * s.seq * s.head_dim if isinstance(s, Attention) else 0.0 for s in shapes]
    return np.asarray(STORES * (store.params["floor"] + 2.0 * np.array(sizes) / store.params["bandwidth"]))


def fit_params(
    logs: Callable[[Mapping[str, float]], Array], start: Mapping[str, float], names: Sequence[str], target: Array
) -> dict[str, float]:
    """Fits parameters by robust Levenberg-Marquardt with priors, on their logarithms (tiles' factors as they are)."""
    is_additive = np.array([name in ADDITIVE for name in names])
    first = np.array([start[n] if n in ADDITIVE else np.log(max(start[n], 1e-30)) for n in names])
    prior = np.where(is_additive, TILE_SIGMA, PRIOR_SIGMA)

    def params(at: Array) -> dict[str, float]:
        found = dict(start)
        for name, value in zip(names, at.tolist(), strict=True):
            found[name] = value if name in ADDITIVE else float(np.exp(value))
            if name in AT_MOST_ONE:
                found[name] = min(found[name], 1.0)
        return found

    def loss(off: Array, at: Array) -> float:
        own = 2.0 * ROBUST**2 * (np.sqrt(1.0 + (off / ROBUST) ** 2) - 1.0)
        return float(own.sum() / NOISE**2 + (((at - first) / prior) ** 2).sum())

    at, damping = first, 1e-2
    off = logs(params(at)) - target
    for _ in range(ROUNDS):
        slopes = np.stack([(logs(params(at + d)) - target - off) / STEP for d in np.eye(len(at)) * STEP], 1)
        weight = 1.0 / np.sqrt(1.0 + (off / ROBUST) ** 2) / NOISE**2
        curvature = (slopes * weight[:, None]).T @ slopes + np.diag(1.0 / prior**2)
        gradient = (slopes * weight[:, None]).T @ off + (at - first) / prior**2
        for _ in range(6):
            move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), -gradient)
            there = at + np.clip(move, -LONGEST, LONGEST)
            off_there = logs(params(there)) - target
            if loss(off_there, there) < loss(off, at):
                at, off, damping = there, off_there, damping / 5.0
                break
            damping *= 5.0
        else:
            break
    return params(at)


# --- what was fitted, put into a profile --------------------------------------------------------------------


def apply(profile: Profile, record: Record) -> Profile:
    """A projected profile with the parameters of `record` (`refine`).

    On the GPU of the record the fitted values themselves; on another of the same chip the projection by their ratios,
    which stays an extrapolation."""
    own = record["gpu"] == profile.gpu
    surfaces, sigma, published = dict(profile.surfaces), dict(profile.provenance["sigma"]), {}
    for fit in record["fits"]:
        key = SurfaceKey.parse(fit["surface"])
        for other, surface in profile.surfaces.items():
            is_fitted = own and other == key and not fit["is_serving"]
            moved = _moved(key, other, surface, fit, is_exact=is_fitted)
            if moved is not None:
                surfaces[other] = with_params(surface, moved, fit["sigma"] if is_fitted else None)
        if own and not fit["is_serving"]:
            sigma[key.op_class] = fit["sigma"]
            published[fit["surface"]] = fit["rows"]
    ceilings = dict(profile.ceilings)
    sustained = ceilings.get("matrix_sustained/bf16")
    square = surfaces.get(SQUARE_SURFACE)
    if own and sustained is not None and square is not None and published.get(str(SQUARE_SURFACE)):
        rate = _square_rate(square)
        spread = np.exp(Z_90 * sigma["gemm"])
        ceilings["matrix_sustained/bf16"] = Number(rate, rate / spread, rate * spread, "published", record["source"])
    before = profile.provenance.get("published") or {}
    sources = [before["source"]] if before.get("source", record["source"]) != record["source"] else []
    provenance = {
        **profile.provenance,
        "sigma": sigma,
        "published": {
            "gpu": record["gpu"],
            "source": "; ".join([*sources, record["source"]]),
            "rows": {**(before.get("rows") or {}), **published},
            "like": sorted({*before.get("like", ()), *(f["surface"] for f in record["fits"] if f["is_serving"])}),
            "held_out": record["held_out"],
        },
    }
    basis = "published" if own else profile.basis
    return replace(profile, basis=basis, surfaces=surfaces, ceilings=ceilings, provenance=provenance)


def _moved(
    key: SurfaceKey, other: SurfaceKey, surface: Surface, fit: FitRecord, *, is_exact: bool
) -> dict[str, float] | None:
    """The parameters of `other`, moved by what was fitted of `key`; None where they stay."""
    if is_exact:
        return {**surface.params, **fit["after"]}
    if (other.op_class, other.backend) != (key.op_class, key.backend):
        return None
    names: tuple[str, ...]
    variant = other.variant
    if isinstance(variant, AttentionVariant) and isinstance(key.variant, AttentionVariant):
        if (variant.direction, key.variant.direction) != ("fwd", "fwd"):
            return None
        names = CARRIED
    elif variant.dtypes not in WIDE:
        names = ("throttle",) if variant.dtypes == "tf32" else ()
    else:
        is_unaligned = isinstance(variant, GemmVariant) and not variant.is_aligned
        names = SHARED if is_unaligned else tuple(fit["after"])
    before, after = fit["before"], fit["after"]
    moved = dict(surface.params)
    for name in names:
        if name in moved and name in after:
            ratio = after[name] / before[name] if name not in ADDITIVE else 1.0
            moved[name] = moved[name] * ratio if name not in ADDITIVE else moved[name] + after[name] - before[name]
            moved[name] = min(moved[name], 1.0) if name in AT_MOST_ONE else moved[name]
    return moved if names else None


def serving_estimate(
    profile: Profile, spec: GpuSpec, rows: Sequence[Timed], record: Record | None = None
) -> tuple[Array, Array]:
    """(seconds, deviations of log seconds) of a server's calls, by a projected profile, or as `record` was fitted."""
    seconds, sigma = np.empty(len(rows)), np.empty(len(rows))
    groups: dict[SurfaceKey, list[int]] = {}
    for i, row in enumerate(rows):
        groups.setdefault(_key(row), []).append(i)
    fits = {SurfaceKey.parse(fit["surface"]): fit for fit in (record["fits"] if record else ()) if fit["is_serving"]}
    for key, members in groups.items():
        surface, some = profile.surfaces[key], [rows[i] for i in members]
        fit = fits.get(key)
        params = {**serving_params(surface, spec), **(fit["after"] if fit else {})}
        seconds[members] = np.exp(serving_logs(profile, key, params, some))
        sigma[members] = fit["sigma"] if fit else profile.provenance["sigma"]["attention"]
    return seconds, sigma


def with_params(surface: Surface, params: Mapping[str, float], sigma: float | None) -> Surface:
    """The surface with other parameters and its points scaled along; `sigma`: their deviation, None to keep it."""
    features, sizes = np.array(surface.features, float), (np.array(surface.bytes), np.array(surface.flops))
    moved = replace(surface, params=dict(params))
    change = np.exp(moved.law(features, *sizes) - surface.law(features, *sizes))
    noise = surface.noise if sigma is None else (sigma,) * len(surface.noise)
    seconds = tuple((np.array(surface.seconds) * change).tolist())
    if surface.kind == "tiles":
        return replace(moved, seconds=seconds, noise=noise)
    levels = surface.residual.levels
    residual = (
        surface.residual if sigma is None else Residual(surface.residual.lengths, FAINT, FAINT, (FAINT,) * len(levels))
    )
    return replace(moved, seconds=seconds, noise=noise, residual=residual)


def _square_rate(surface: Surface, size: int = 8192) -> float:
    """FLOP/s of a large square product by the law."""
    features = np.full((1, 3), np.log2(size))
    flops = np.array([2.0 * size**3])
    return float(flops[0] / np.exp(surface.law(features, np.array([6.0 * size**2]), flops))[0])


def estimates(
    profile: Profile, spec: GpuSpec, rows: Sequence[Timed], record: Record | None = None
) -> tuple[Array, Array]:
    """(seconds, deviations of log seconds) of rows, each by what runs it: a server's calls by `serving_estimate`."""
    seconds, sigma = np.empty(len(rows)), np.empty(len(rows))
    serving = [i for i, row in enumerate(rows) if row.is_serving]
    plain = [i for i, row in enumerate(rows) if not row.is_serving]
    if serving:
        seconds[serving], sigma[serving] = serving_estimate(profile, spec, [rows[i] for i in serving], record)
    found = profile.estimate([(rows[i].work, rows[i].work.backend, "cold") for i in plain])
    seconds[plain], sigma[plain] = [f.seconds for f in found], [f.sigma for f in found]
    return seconds, sigma


def errors(
    before: Profile, after: Profile, spec: GpuSpec, record: Record, rows: Sequence[Timed], *, hold_out: bool
) -> list[dict[str, Any]]:
    """Mean |error| by fitted surface, before and after: of the shapes held out, or of all."""
    out = []
    for fit in record["fits"]:
        some = [
            row
            for row in rows
            if str(_key(row)) == fit["surface"]
            and row.is_serving == fit["is_serving"]
            and (row.is_held_out or not hold_out)
        ]
        if some:
            actual = np.array([row.seconds for row in some])
            found = [estimates(before, spec, some)[0], estimates(after, spec, some, record)[0]]
            mean = [float(np.abs(each / actual - 1.0).mean()) for each in found]
            out.append({"surface": fit["surface"], "rows": len(some), "before": mean[0], "after": mean[1]})
    return out
