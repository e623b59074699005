"""A surface: how long one kind of kernel takes, as a function of its sizes, with an error bar. numpy only.

log seconds = law(sizes) + residual(sizes): the law is physics (`laws/`), the residual a Gaussian process
over the measured points, which says what it does not know. A residual is three things: the law's own
uncertainty (its level; for a memory-bound call its floor and its bandwidth), a smooth part (Matern 3/2,
one length scale per input), and a part of each shape alone ("white": cuBLAS picks another kernel for a
neighbour), which is known where that very shape was measured and unknown elsewhere. So a measured shape
comes back as measured, a new one as the law plus what its neighbours say, one far away as the law.

A kernel whose operands lie in the L2 is the same kernel as with cold ones, off its law for the same reasons: its
residual is that of the cold surface (`base`) and one of its own, Kennedy and O'Hagan's autoregressive model (2000).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, repeat
from math import isfinite, log2
from typing import Annotated, Any, NamedTuple, Required, TypedDict

import numpy as np
from numpy.typing import NDArray

from flopcast.bounds import Count, Deviation, NonNegative, Seconds, Size, Within
from flopcast.errors import DataError
from flopcast.roofline.gpu.laws.laws import LAWS
from flopcast.roofline.gpu.laws.smooth import Array, median
from flopcast.roofline.gpu.profile.gaussian_process import (
    MANY,
    Coordinates,
    Numbers,
    Residual,
    covariance,
    local_reduction,
    lower_inverse,
    numbered,
    solve_positive,
)
from flopcast.roofline.stream.lowering.variants import GemmVariant, Variant, parse_variant

PART = 512  # points whose inputs are worked out at once
LOCAL_FROM = 256  # above this number of points, the variance of a prediction comes from the NEAREST ones
CHUNK, CELLS = 4096, 1 << 21  # rows, and rows x points, predicted at once: 16 MiB per array
GRID_PER_OCTAVE = 8
GRID_MARGIN = 12  # octaves beyond the fitted range over which the residual fades


_MAY_LACK = ("own", "launches")  # of a record
Octaves = Annotated[float, Within(-64.0, 128.0)]  # log2 of a size


class Prediction(NamedTuple):
    """seconds[rows]; sigma[rows], standard deviation of log seconds; likeness[rows], the residual's correlation with
    that of the measured point most alike: 1 for that very shape, 0 for one that the points say nothing of;
    launches[rows], how many kernels that point launched, 0 where that is not known."""

    seconds: Array
    sigma: Array
    likeness: Array
    launches: Array


class SurfaceRecord(TypedDict, total=False):
    """A surface as a file holds it (`Surface.to_json`): of products the sizes, of other kinds what they follow from."""

    kind: Required[Annotated[str, tuple(LAWS)]]
    variant: Required[str]
    params: Required[dict[str, float]]
    residual: Required[Residual]
    seconds: Required[tuple[Seconds, ...]]
    noise: Required[tuple[Deviation, ...]]
    own: tuple[Deviation, ...]
    launches: tuple[Count, ...]
    weights: tuple[float, ...]
    has_base: bool
    sizes: Sequence[Sequence[Size]]
    features: tuple[tuple[Octaves, ...], ...]
    bytes: tuple[NonNegative, ...]
    flops: tuple[NonNegative, ...]


@dataclass(frozen=True)
class Surface:
    """Measured points of one kind of kernel, and the parameters of its law and of its residual.

    `kind`: of the law, one of `LAWS`. Per point: `features[points][sizes]` in log2, `bytes`, `flops`, `seconds`
    (medians) and `noise` (standard deviation of log seconds from run to run). `own`: standard deviation of log seconds
    by which a point differs from its neighbours beyond the residual's white part; empty where none does. `launches`:
    how many kernels a call of each point launches, 0 for one that was not seen; empty where none was. `base`: the
    surface whose residual is a part of this one's; a file only says that there is one (`has_base`), and the key says
    which: that of the same kernel with cold operands.
    """

    kind: str
    variant: Variant
    params: dict[str, float]
    features: tuple[tuple[float, ...], ...]
    bytes: tuple[float, ...]
    flops: tuple[float, ...]
    seconds: tuple[float, ...]
    noise: tuple[float, ...]
    residual: Residual
    own: tuple[float, ...] = ()
    launches: tuple[int, ...] = ()
    has_base: bool = False
    base: Surface | None = field(default=None, repr=False, compare=False)
    # What the residual's mean is made of, as a file holds it; any other surface made from this one solves for its own.
    _solved: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)

    @cached_property
    def measured(self) -> frozenset[tuple[float, ...]]:
        """The features of the measured points."""
        return frozenset(self.features)

    @property
    def weights(self) -> tuple[float, ...]:
        """The residual's weights that the surface was read with; empty where they have to be solved for."""
        return self._solved

    @property
    def cached_parts(self) -> int:
        """How many of the values that follow from the fields have been computed; grows as the surface is used."""
        return ("_state" in self.__dict__) + len(self.__dict__.get("_curves", ()))

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: the fields, and what follows from them, except what is large and rarely used."""
        large = {"leave_one_out"} | ({"_inverse"} if len(self.features) > LOCAL_FROM else set())
        return {name: value for name, value in self.__dict__.items() if name not in large}

    def law(self, features: Array, bytes_: Array, flops: Array) -> Array:
        """log seconds by the law alone."""
        return LAWS[self.kind].log_seconds(self.variant, self.params, features, bytes_, flops)

    def predict(self, features: Array, bytes_: Array, flops: Array) -> Prediction:
        """The times at features[rows, sizes] in log2, bytes[rows], flops[rows]. Raises ValueError for another number
        of sizes."""
        width = len(self.features[0])
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(f"a surface over {width} sizes was asked with an array of shape {features.shape}")
        step = min(CHUNK, max(CELLS // len(self.features), 1))
        parts = [
            self._predict(features[i : i + step], bytes_[i : i + step], flops[i : i + step])
            for i in range(0, len(features), step)
        ]
        if not parts:
            return Prediction(*(np.empty(0) for _ in range(4)))
        return Prediction(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def _predict(self, features: Array, bytes_: Array, flops: Array) -> Prediction:
        mean, variance, alike = self.residual_at(features, bytes_)
        log_seconds = self.law(features, bytes_, flops) + mean
        if LAWS[self.kind].is_rising(self.params):
            log_seconds = self._monotone(features, log_seconds)
        sigma = self.residual.sigma_scale * np.sqrt(variance + self._state.noise**2)
        return Prediction(np.exp(log_seconds), sigma, alike.max(axis=1), self._launches_of_most(alike, features))

    def _launches_of_most(self, alike: Array, features: Array) -> Array:
        """The kernels that the points most alike launch. Libraries choose kernels by size, as cuBLAS adds a second one
        where it divides a product's sum, so that a mean of all sizes is right for none. Of an H200's 2,187 held-out
        products, with 3,196 kernels, the numbers are 205 off; by the nearest logarithms of sizes 301, by a mean 928."""
        counts = self._counts
        if not len(counts):
            return np.zeros(len(alike))
        if not counts.min():
            alike = alike - 2.0 * (counts == 0)
        if self.kind == "attention":  # where heads share keys, cuDNN's backward adds up their gradients: two kernels
            shared, asked = np.array(self.features, float)[:, 1] > 0, features[:, 1] > 0
            alike = alike - (shared != asked[:, None])
        return np.asarray(counts[alike.argmax(axis=1)])

    @cached_property
    def _counts(self) -> Array:
        return np.array(self.launches, float)

    def residual_at(self, features: Array, bytes_: Array) -> tuple[Array, Array, Array]:
        """(mean, variance) of the residual, that of the base included, without `sigma_scale`; and the correlation of
        its smooth part with that of each point."""
        state, own = self._state, self.residual
        cross, smooth, extra = self._covariance(features, bytes_)
        terms = LAWS[self.kind].sensitivities(self.params, features, bytes_) * np.array(own.levels)
        prior = (terms**2).sum(axis=1) + own.amplitude**2 + own.white**2 + extra
        mean = cross @ state.weights
        if len(state.weights) > LOCAL_FROM:
            explained = local_reduction(state.coordinates, own, self._apart, cross, self._kinds)
        else:
            explained = ((cross @ self._inverse.T) ** 2).sum(axis=1)
        left = np.maximum(prior - explained, 0.0)
        if self.base is not None:
            lent, doubt, _ = self.base.residual_at(features, bytes_)
            mean, left = mean + lent, left + doubt
        return mean, left, smooth

    # --- the Gaussian process

    def _coordinates(self, features: Array, bytes_: Array) -> Coordinates:
        return Coordinates(
            LAWS[self.kind].inputs(self.variant, self.params, features),
            LAWS[self.kind].sensitivities(self.params, features, bytes_),
        )

    def _covariance(self, features: Array, bytes_: Array) -> tuple[Array, Array, Array]:
        """(covariance with the points, correlation of the smooth parts, variance of one's own beyond white)."""
        at, points = self._coordinates(features, bytes_), self._state.coordinates
        same = None
        if len(points.inputs) >= MANY:  # 7,000 points are numbered once, not for each few rows
            mine = numbered(at.inputs, dict(self._numbers))
            same = mine[:, None] == self._kinds
        total, smooth, same = covariance(at, points, self.residual, same)
        if not self.own:
            return total, smooth, np.zeros(len(features))
        extra = same * np.array(self.own) ** 2
        return total + extra, smooth, extra.max(axis=1)

    @cached_property
    def _state(self) -> State:
        features, bytes_ = np.array(self.features, float), np.array(self.bytes, float)
        # by parts, whose tables of tiles stay in the processor's cache: a third less time for two thousand products; a
        # fit asks for all of them again and again, which is cached (`laws.gemm`)
        step = PART if self._solved else len(features)
        parts = [
            LAWS[self.kind].inputs(self.variant, self.params, features[i : i + step])
            for i in range(0, len(features), step)
        ]
        own = Coordinates(np.concatenate(parts), LAWS[self.kind].sensitivities(self.params, features, bytes_))
        noise = float(median(np.array(self.noise)))
        if self._solved:
            return State(own, np.array(self._solved, float), noise)
        off_law = self._off_law(features, bytes_)
        if len(features) > LOCAL_FROM:  # only a fit asks for the inverse, too, which takes four times as long
            weights = self._positive(solve_positive, self._matrix_of(own), off_law)
        else:
            inverse = self._inverse_of(own)
            weights = inverse.T @ (inverse @ off_law)
        # to what a file keeps, so that what was fitted and what is read are the same
        return State(own, np.array([float(f"{weight:.7g}") for weight in weights.tolist()]), noise)

    def _off_law(self, features: Array, bytes_: Array) -> Array:
        """The points' log seconds minus the law and minus what they share with the base."""
        law = self.law(features, bytes_, np.array(self.flops, float))
        residual = np.log(np.array(self.seconds, float)) - law
        if self.base is not None:
            residual = residual - self.base.residual_at(features, bytes_)[0]
        return np.asarray(residual)

    @cached_property
    def _apart(self) -> Array:
        """Variance that each point has of its own: noise, and its deviation from its neighbours (`own`)."""
        noise = np.array(self.noise, float)
        return np.asarray(noise**2 + np.array(self.own or np.zeros(len(noise))) ** 2)

    @cached_property
    def _kinds(self) -> NDArray[np.intp]:
        """A number for each point, the same for the same inputs."""
        return numbered(self._state.coordinates.inputs, self._numbers)

    @cached_property
    def _numbers(self) -> Numbers:
        """The numbers of `_kinds` by the points' inputs."""
        known: Numbers = {}
        numbered(self._state.coordinates.inputs, known)
        return known

    @cached_property
    def _inverse(self) -> Array:
        """The inverse of the Cholesky factor of the points' covariance."""
        return self._inverse_of(self._state.coordinates)

    def _matrix_of(self, own: Coordinates) -> Array:
        """The covariance of the points, with what each has of its own."""
        return np.asarray(covariance(own, own, self.residual)[0] + np.diag(self._apart))

    def _inverse_of(self, own: Coordinates) -> Array:
        factor = self._positive(np.linalg.cholesky, self._matrix_of(own))
        inverse: Array = lower_inverse(np.asarray(factor, np.float64))
        self.__dict__.setdefault("_inverse", inverse)  # of two that ask for it the first pays
        return inverse

    def _positive(self, function: Callable[..., Array], *arguments: Array) -> Array:
        """Calls a function of a matrix that is to be positive definite. Raises DataError where it is not."""
        try:
            return function(*arguments)
        except np.linalg.LinAlgError:
            raise DataError(
                f"the surface of {self.variant} cannot be solved: points of the same sizes without noise; fit it anew"
            ) from None

    @cached_property
    def leave_one_out(self) -> tuple[Array, Array]:
        """(error, sigma)[points]: predicted minus measured log seconds of each point from the others, law and
        hyper-parameters held; in closed form from the inverse covariance. Where there is a base, the same sizes are
        left out of it, too."""
        state = self._state
        precision = (self._inverse**2).sum(axis=0)
        error, variance = -state.weights / precision, 1.0 / precision
        if self.base is not None:
            lent, doubt = self.base.leave_one_out
            place = {row: i for i, row in enumerate(self.base.features)}
            own = [i for i, row in enumerate(self.features) if row in place]
            twin = [place[self.features[i]] for i in own]
            error[own] += lent[twin]
            variance[own] += (doubt[twin] / self.base.residual.sigma_scale) ** 2
        return error, self.residual.sigma_scale * np.sqrt(variance)

    def without(self, features: Array) -> Surface:
        """This surface without the points of these sizes, parameters unchanged; itself where that leaves none."""
        gone = {tuple(row) for row in features.tolist()}
        kept = [i for i, row in enumerate(self.features) if row not in gone]
        if not kept or len(kept) == len(self.features):
            return self

        names = ("features", "bytes", "flops", "seconds", "noise", "own", "launches")
        columns = {name: getattr(self, name) for name in names}
        rest: dict[str, Any] = {name: tuple(each[i] for i in kept) for name, each in columns.items() if each}
        return replace(self, **rest)

    # --- more bytes never take less time

    def _monotone(self, features: Array, log_seconds: Array) -> Array:
        """Time along bytes (the first feature), made monotone: the mean of the running maximum and the
        running minimum from above, which leaves a rising curve as it is. On a fixed grid, so that an
        answer does not depend on what else is asked; beyond the grid the residual has faded and the law is
        monotone."""
        grid = self._grid
        is_within = (features[:, 0] >= grid[0]) & (features[:, 0] <= grid[-1])
        rows_of: dict[tuple[float, ...], list[int]] = {}
        for row in np.flatnonzero(is_within).tolist():
            rows_of.setdefault(tuple(features[row, 1:].tolist()), []).append(row)
        out = log_seconds.copy()
        for sizes, rows in rows_of.items():
            if sizes not in self._curves:
                self._curves[sizes] = self._curve(sizes)
            out[rows] = np.interp(features[rows, 0], grid, self._curves[sizes])
        return out

    def _curve(self, sizes: tuple[float, ...]) -> Array:
        """Log seconds along `_grid`, never falling, with all other sizes as given."""
        grid = self._grid
        points = np.column_stack([grid, np.tile(np.array(sizes), (len(grid), 1))])
        curve = self.law(points, np.exp2(grid), np.zeros(len(grid)))
        curve = curve + self._covariance(points, np.exp2(grid))[0] @ self._state.weights
        rising = np.maximum.accumulate(curve)
        falling = np.minimum.accumulate(curve[::-1])[::-1]
        return np.asarray((rising + falling) / 2.0)

    @cached_property
    def _grid(self) -> Array:
        sizes = np.array(self.features, float)[:, 0]
        low, high = sizes.min() - GRID_MARGIN, sizes.max() + GRID_MARGIN
        return np.unique(np.concatenate([np.linspace(low, high, int((high - low) * GRID_PER_OCTAVE) + 1), sizes]))

    @cached_property
    def _curves(self) -> dict[tuple[float, ...], Array]:
        """Results of `_curve` by the other sizes: most kinds have one size, and so one curve for all requests."""
        return {}

    # --- JSON

    def to_json(self) -> dict[str, Any]:
        """Of products the sizes themselves where features, bytes and FLOPs follow from them: thousands are kept."""
        # columns as they are: a copy of every number in them takes longer than all else
        record = {each.name: getattr(self, each.name) for each in fields(self)}
        record |= {"residual": asdict(self.residual), "variant": str(self.variant)}
        del record["base"], record["_solved"]
        record["weights"] = self._state.weights.tolist()
        if not self.has_base:
            del record["has_base"]
        if len(set(self.launches)) < 2:  # one number for all
            record["launches"] = self.launches[:1]
        if not self.launches:
            del record["launches"]
        if self.kind == "gemm" and isinstance(self.variant, GemmVariant):
            sizes = [[round(2.0**size) for size in row] for row in self.features]
            same = _from_sizes(self.variant, sizes)
            if all(same[name] == record[name] for name in same):
                record = {name: value for name, value in record.items() if name not in same} | {"sizes": sizes}
        return record

    @classmethod
    def from_record(cls, record: SurfaceRecord) -> Surface:
        """Raises ValueError on what is not a surface."""
        variant, kind, params = parse_variant(record["variant"]), record["kind"], record["params"]
        lacking = sorted(LAWS[kind].parameters - params.keys())
        if lacking:
            raise ValueError(f"a {kind} surface lacks {', '.join(lacking)}: an older version fitted it, fit it anew")
        if "sizes" in record and isinstance(variant, GemmVariant):
            columns = _from_sizes(variant, record["sizes"])
        else:
            columns = {name: record.get(name, ()) for name in ("features", "bytes", "flops")}
        columns |= {name: record.get(name, ()) for name in ("seconds", "noise", "own", "launches")}
        points, weights = len(columns["features"]), record.get("weights", ())
        if len(columns["launches"]) == 1:
            columns["launches"] *= points
        if not points or any(len(found) != points for name, found in columns.items() if name not in _MAY_LACK or found):
            raise ValueError("a surface needs as many bytes, flops, seconds and noise as features, and one at least")
        if weights and len(weights) != points:
            raise ValueError("a surface needs as many weights as features")
        if len(set(map(len, columns["features"]))) != 1:
            raise ValueError("the features of all points of a surface are as many")
        surface = cls(
            kind, variant, params, residual=record["residual"], has_base=record.get("has_base", False), **columns
        )
        surface._try_law()
        return surface.solved(weights)

    def _try_law(self) -> None:
        """Raises ValueError where the law cannot be worked out at the first point: for a variant that is not its own,
        for parameters that give no time, and for a residual over another number of inputs."""
        features, bytes_ = np.array(self.features[:1], float), np.array(self.bytes[:1], float)
        law = LAWS[self.kind]
        try:
            with np.errstate(all="ignore"):
                time = self.law(features, bytes_, np.array(self.flops[:1], float))
                inputs = law.inputs(self.variant, self.params, features)
                terms = law.sensitivities(self.params, features, bytes_)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"the law {self.kind!r} of {self.variant} fails at its first point: {error}") from None
        if not all(map(isfinite, chain(time.tolist(), *inputs.tolist(), *terms.tolist()))):
            raise ValueError(f"the law {self.kind!r} gives no time at its first point: its parameters are wrong")
        needed = inputs.shape[1], terms.shape[1]
        given = len(self.residual.lengths), len(self.residual.levels)
        if given != needed:
            raise ValueError(f"its residual has {given} lengths and levels, the law {self.kind!r} has {needed}")

    def solved(self, weights: tuple[float, ...]) -> Surface:
        """Sets weights found earlier, so that the surface need not be solved for, and returns it."""
        object.__setattr__(self, "_solved", weights)
        return self


def _from_sizes(variant: GemmVariant, sizes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Features, bytes and FLOPs of products as `describe.Work` has them. Raises ValueError for sizes of no product."""
    width = len(sizes[0]) if sizes else 0
    if width not in (3, 4) or {*map(len, sizes)} != {width}:
        raise ValueError("sizes of products are m, n, k and, of batched ones, the batch")
    m, n, k, *batches = zip(*sizes, strict=True)
    products = list(zip(m, n, k, batches[0] if batches else repeat(1), strict=False))
    logs = map(log2, chain.from_iterable(sizes))
    # as `Gemm` has them, which a third of a profile's reading would go to making thousands of
    item_bytes = variant.item_bytes
    return {
        "features": tuple(zip(*[logs] * width, strict=True)),
        "bytes": tuple([float(batch * (m * k + k * n + m * n) * item_bytes) for m, n, k, batch in products]),
        "flops": tuple([float(2 * batch * m * n * k) for m, n, k, batch in products]),
    }


@dataclass(frozen=True)
class State:
    coordinates: Coordinates
    weights: Array  # covariance^-1 (log seconds - law)
    noise: float  # median over the points
