"""Forecasts steps of neighbouring widths and computes what each loses against its aligned neighbours.

Throughput rises with width anyway, so a ranking of widths says little. What counts is the penalty: how much longer a
step takes than the linear interpolation between its two neighbours that are multiples of 64,

    penalty(w) = t(w) / (t(a) + (t(b) - t(a)) (w - a) / (b - a)) - 1,    a < w < b

with w, a and b in parameters: those of a config are linear in each of its sizes, those of a module need not be. (For a
multiple of 64 that is not one of 128: between multiples of 128, and so on up to 256.) All three layouts of
products occur in a step: the forward sums over a layer's inputs (nt), the gradient of its input over its outputs (nn),
that of its weights over the tokens (tn), so that a width is the reduction dimension of one product and is divided into
tiles in two others.

`survey` forecasts; `penalties_of` and `rule_of` derive penalties and rules. torch is needed only for one trace per kind
of model (`stream/ops/to_width.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from operator import attrgetter
from statistics import median
from typing import Any

from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.compiled import as_eager
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, check_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.forward_only import forward_only
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.widths.padding import padded_products

AXES = {"hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size"}
HEADS = "heads"  # heads x head_dim, which together are one width
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
PARTS = {"gemm": "products", "generated": "passes"}  # of a compiled step, by operation class
REST = "rest"
LAYOUTS = {"nt": "forward", "nn": "gradient of the input", "tn": "gradient of the weights"}
ALIGNED = 64  # rows of 128 bytes in bf16: times are interpolated between its multiples
TOP_MULTIPLE = 256
MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Beside the nearest multiple of 64: both sides of it for the classes between which the multiple to keep is decided (a
# size just above it begins a tile that it hardly uses), one for the others.
BESIDE = (-1, 1, -2, 4, -8, 8, 16, -32)
# The same of compiled steps, each of which takes ten seconds: inductor pads products to multiples of 8, so that those
# of 1, 2 and 4 are alike.
COMPILED = (-1, -4, 8, 16, -32)
TOLERATED = 0.01  # a negligible penalty: smaller than the error of a forecast penalty


@dataclass(frozen=True, kw_only=True)
class Point:
    """One forecast width. `layout_seconds`, `layout_flops`: those of products, by layout; `extrapolated`: share of the
    device time in kernels of no measured kind; `errors`: by shape, the standard deviation of its seconds, from which
    the error of a difference between two points is computed.

    Of a compiled step only, `parts`: device seconds of its matrix products, of the kernels that inductor generates and
    of the rest; `padded`: of how many products inductor pads operands, and `products`, how many there are."""

    axis: str
    value: int
    config: Config
    n_params: int
    step_seconds: float
    step_seconds_low: float
    step_seconds_high: float
    device_seconds: float
    device_seconds_low: float
    device_seconds_high: float
    host_seconds: float
    bound: str
    flops: int
    tokens: int
    peak_bytes: int
    fits: bool
    extrapolated: float
    layout_seconds: Mapping[str, float]
    layout_flops: Mapping[str, int]
    errors: Mapping[Any, float] = field(repr=False)
    parts: Mapping[str, float] = field(default_factory=dict)
    padded: int = 0
    products: int = 0

    @property
    def multiple(self) -> int:
        return power_of_two(self.value)

    @property
    def flops_per_second(self) -> float:
        """The useful FLOP/s: counted FLOPs divided by the step's seconds."""
        return self.flops / self.step_seconds

    @property
    def seconds_per_parameter(self) -> float:
        return self.step_seconds / self.n_params

    def layout_rate(self, layout: str) -> float | None:
        """Returns the FLOP/s of the products of a layout; None where it takes no time."""
        seconds = self.layout_seconds.get(layout, 0.0)
        return self.layout_flops[layout] / seconds if seconds else None


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """What a width loses against the linear interpolation between `below` and `above`; low and high bound a 90%
    interval.

    `step`: loss of the whole step; `device`: of the kernels; `layouts`: of the products, by layout. Errors that the
    width shares with its neighbours cancel, so the interval covers only what differs: the errors of the shapes.
    `parts`: what each of a compiled step's parts adds to `device`, of which they are the sum.
    """

    axis: str
    value: int
    multiple: int
    below: int
    above: int
    step: float
    device: float
    device_low: float
    device_high: float
    layouts: Mapping[str, float]
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def hidden(self) -> float:
        """How much of the device's loss the step does not show, because the device waits for the host anyway."""
        return self.device - self.step


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The multiple to keep on one axis. `median`, with the ends of its 90% interval, `worst`, `best`: penalties, in
    device time, of widths that do not keep it (0.1: 10% longer); `step_median`, `step_worst`: the same in step time;
    None where every candidate keeps it."""

    axis: str
    multiple: int
    count: int
    median: float | None
    median_low: float | None
    median_high: float | None
    worst: float | None
    worst_value: int | None
    best: float | None
    step_median: float | None
    step_worst: float | None
    by_multiple: Mapping[int, float]


def power_of_two(value: int, most: int = TOP_MULTIPLE) -> int:
    """Returns the largest power of two up to `most` that divides `value`."""
    return min(value & -value, most) if value else most


def point(
    axis: str,
    value: int,
    config: Config,
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    forward: bool = False,
) -> Point:
    """Forecasts one config. Raises UsageError as `forecast` does."""
    traced = traced_of(run, profile)
    stream = get_stream(config, traced, vary="width")
    eager = None if run.mode == "eager" else get_stream(config, as_eager(traced), vary="width")
    return point_of(axis, value, config, stream, run, profile, host=host, forward=forward, eager=eager)


def point_of(
    axis: str,
    value: int,
    config: Config,
    stream: Stream,
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    forward: bool = False,
    eager: Stream | None = None,
) -> Point:
    """Forecasts a traced step. `forward`: only the forward, as inference runs it, instead of the whole step. `eager`:
    the eager step where this one is compiled."""
    if forward:
        stream = forward_only(stream)
    step = PricedStep(stream, run, profile, host)
    found = step.forecast()
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, int] = defaultdict(int)
    errors: dict[Any, float] = defaultdict(float)
    parts = dict.fromkeys((*PARTS.values(), REST), 0.0)
    for op in step.ops:
        if op.work is None:
            continue
        shape = op.work.shape
        errors[op.work.alike] += op.seconds * op.sigma
        parts[PARTS.get(op.work.op_class, REST)] += op.seconds
        if isinstance(shape, Gemm) and shape.batch == 1:
            seconds[shape.layout] += op.seconds
            flops[shape.layout] += op.work.flops
    padded, products = (0, 0) if eager is None else padded_products(stream, eager)
    return Point(
        axis=axis, value=value, config=dict(config), n_params=found.n_params,
        step_seconds=found.step_seconds, step_seconds_low=found.step_seconds_low,
        step_seconds_high=found.step_seconds_high, device_seconds=found.device_seconds,
        device_seconds_low=found.device_seconds_low, device_seconds_high=found.device_seconds_high,
        host_seconds=found.host_seconds, bound=found.bound, flops=found.flops_counted,
        tokens=run.tokens, peak_bytes=found.peak_bytes, fits=found.fits,
        extrapolated=found.basis_shares["extrapolated"],
        layout_seconds={} if eager else dict(seconds), layout_flops=dict(flops), errors=dict(errors),
        parts=parts if eager else {}, padded=padded, products=products,
    )  # fmt: skip


# --- candidates


def candidates(config: Mapping[str, Any], axis: str, span: int = 128) -> list[int]:
    """Returns sizes of one axis around the config's: multiples of 64 and sizes beside them.

    These are the multiples of 64 up to `span` from the one nearest to the config's own size, the multiples of 256
    around them (the ends of interpolation), the own size, and, beside the nearest multiple, sizes whose largest power
    of two as a divisor is 32, 16, 8, 4, 2 and 1.
    """
    own = int(config[AXES[axis]])
    center = max(ALIGNED, round(own / ALIGNED) * ALIGNED)
    steps = max(1, span // ALIGNED)
    start = center // TOP_MULTIPLE * TOP_MULTIPLE
    aligned = {start, start + TOP_MULTIPLE, *(center + i * ALIGNED for i in range(-steps, steps + 1))}
    beside = {center + sign * step for step in (1, 2, 4, 8, 16, 32) for sign in (-1, 1)}
    beside |= {center + ALIGNED - step for step in (1, 8)} | {center - ALIGNED + step for step in (1, 8)}
    lines = {end for value in (own, *beside) for end in neighbours(value, ALIGNED)}
    lines |= {end for value in aligned if (anchor := anchor_of(value)) for end in neighbours(value, anchor)}
    return sorted(value for value in {own, *aligned, *beside, *lines} if value >= 2)


def widths_near(own: int, beside: Sequence[int] = BESIDE) -> list[int]:
    """Returns twelve sizes at most: the own one, the nearest three multiples of 64, and sizes `beside` the nearest."""
    center = max(2 * ALIGNED, round(own / ALIGNED) * ALIGNED)
    return sorted({own, *(center + step for step in (-ALIGNED, 0, ALIGNED, *beside))})


def head_shapes(config: Mapping[str, Any]) -> list[Config]:
    """Returns configs with other heads x head_dim: common head_dims with the number of heads that comes nearest to the
    same width, and the config's own head_dim with one and two groups of heads more or less. The query heads per
    key-value head stay the same."""
    heads, head_dim = int(config["num_attention_heads"]), int(config["head_dim"])
    group = heads // int(config["num_key_value_heads"])
    groups = {(max(1, round(heads * head_dim / (size * group))), size) for size in (*HEAD_DIMS, head_dim)}
    groups |= {(max(1, heads // group + i), head_dim) for i in (-2, -1, 1, 2)}
    found: list[Config] = []
    for number, size in sorted(groups, key=lambda pair: (pair[1], pair[0])):
        shape = {**config, "num_attention_heads": number * group, "num_key_value_heads": number, "head_dim": size}
        check_config(shape)
        found.append(shape)
    return found


def neighbours(value: int, multiple: int) -> tuple[int, int]:
    """Returns the multiples below and above a value; a value that is itself a multiple counts as the one below."""
    below = value // multiple * multiple
    return below, below + multiple


def resized(config: Mapping[str, Any], axis: str, values: Iterable[int]) -> Iterator[tuple[int, Config]]:
    """Yields (value, config) for each of `values` on one of AXES. Raises UsageError for a size that no model has."""
    for value in values:
        found = {**config, AXES[axis]: value}
        check_config(found)
        yield value, found


def survey(
    axis: str,
    asked: Iterable[tuple[int, Config]],
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    forward: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Forecasts each (value, config), in order; `progress` is called after each. Raises UsageError as `forecast`
    does."""
    found = []
    with no_garbage_collection():
        for value, config in asked:
            found.append(point(axis, value, config, run, profile, host=host, forward=forward))
            progress()
    return found


# --- what follows


def penalties_of(points: Sequence[Point]) -> list[Penalty]:
    """Returns the penalty of every point whose two aligned neighbours are among the points."""
    known = {p.value: p for p in points}
    found = []
    for one in points:
        anchor = anchor_of(one.value)
        if anchor is None:
            continue
        below, above = neighbours(one.value, anchor)
        if below in known and above in known:
            found.append(penalty(one, known[below], known[above]))
    return found


def anchor_of(value: int) -> int | None:
    """Returns the multiple between whose neighbours a width's expected time is interpolated; None for a multiple of
    256."""
    multiple = power_of_two(value)
    if multiple < ALIGNED:
        return ALIGNED
    return None if multiple >= TOP_MULTIPLE else multiple * 2


def penalty(one: Point, below: Point, above: Point) -> Penalty:
    size = attrgetter("value" if above.n_params == below.n_params else "n_params")
    share: float = (size(one) - size(below)) / (size(above) - size(below))
    ends = ((below, 1.0 - share), (above, share))

    def line(of: Callable[[Point], float]) -> float:
        return sum(weight * of(end) for end, weight in ends)

    expected = line(lambda p: p.device_seconds)
    ratio = one.device_seconds / expected
    off: dict[Any, float] = defaultdict(float)  # of log ratio, by shape
    for shape, error in one.errors.items():
        off[shape] += error / one.device_seconds
    for end, weight in ends:
        for shape, error in end.errors.items():
            off[shape] -= weight * error / expected
    sigma = sqrt(sum(value**2 for value in off.values()))
    layouts = {
        layout: one.layout_seconds[layout] / line(lambda p, name=layout: p.layout_seconds.get(name, 0.0)) - 1  # type: ignore[misc]
        for layout in one.layout_seconds
        if all(end.layout_seconds.get(layout) for end, _ in ends)
    }
    return Penalty(
        axis=one.axis, value=one.value, multiple=one.multiple, below=below.value, above=above.value,
        step=one.step_seconds / line(lambda p: p.step_seconds) - 1, device=ratio - 1,
        device_low=ratio * (1 - Z_90 * sigma) - 1, device_high=ratio * (1 + Z_90 * sigma) - 1, layouts=layouts,
        parts={
            part: (seconds - line(lambda p, name=part: p.parts.get(name, 0.0))) / expected  # type: ignore[misc]
            for part, seconds in one.parts.items()
        },
    )  # fmt: skip


def rule_of(axis: str, found: Sequence[Penalty], tolerated: float = TOLERATED) -> Rule:
    """Returns the smallest multiple from which on no penalty exceeds `tolerated` at the median, and what ignoring it
    costs."""
    by_multiple = {
        multiple: median(p.device for p in found if p.multiple == multiple)
        for multiple in MULTIPLES
        if any(p.multiple == multiple for p in found)
    }
    costly = [multiple for multiple, cost in by_multiple.items() if cost > tolerated]
    keep = 2 * max(costly) if costly else min(by_multiple, default=1)
    ignoring = [p for p in found if p.multiple < keep]
    worst = max(ignoring, key=lambda p: p.device, default=None)
    return Rule(
        axis=axis,
        multiple=keep,
        count=len(ignoring),
        median=median(p.device for p in ignoring) if ignoring else None,
        # their errors are of the same fits, so they are all low or all high together
        median_low=median(p.device_low for p in ignoring) if ignoring else None,
        median_high=median(p.device_high for p in ignoring) if ignoring else None,
        worst=worst.device if worst else None,
        worst_value=worst.value if worst else None,
        best=min(p.device for p in ignoring) if ignoring else None,
        step_median=median(p.step for p in ignoring) if ignoring else None,
        step_worst=max(p.step for p in ignoring) if ignoring else None,
        by_multiple=by_multiple,
    )
