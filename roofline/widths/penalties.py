"""Which widths to choose: steps of neighbouring sizes forecast, and what each loses against its aligned neighbours.

Throughput rises with width anyway, so that a ranking of widths says little. What counts is the penalty: how much longer
a step takes than the line between its two neighbours that are multiples of 64 says,

    penalty(w) = t(w) / (t(a) + (t(b) - t(a)) (w - a) / (b - a)) - 1,    a < w < b

(of a multiple of 64 that is none of 128: against those of 128, and so on to 256). All three layouts of products are in
a step: the forward sums over a layer's inputs (nt), the gradient of its input over its outputs (nn), that of its
weights over the tokens (tn), so that a width is summed over in one product and lies across the tiles of two others.

`survey` forecasts, `penalties_of`, `rule_of` say what follows; no torch but for one trace a kind of model
(`stream/ops/to_width.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from statistics import median
from typing import Any

from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.base.numbers import Z_90
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, check_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.forward_only import forward_only

AXES = {"hidden": "hidden_size", "ffn": "intermediate_size", "vocab": "vocab_size"}
HEADS = "heads"  # heads x head_dim, which together are one width
HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 256)
LAYOUTS = {"nt": "forward", "nn": "gradient of the input", "tn": "gradient of the weights"}
ALIGNED = 64  # rows of 128 bytes in bf16: lines are drawn between its multiples
TOP_MULTIPLE = 256
MULTIPLES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOLERATED = 0.01  # a penalty that nobody needs to care about: less than a forecast of one is known to


@dataclass(frozen=True, kw_only=True)
class Point:
    """One forecast width. `layout_seconds`, `layout_flops`: of products by layout; `extrapolated`: share of the device
    time in kernels of no measured kind; `errors`: seconds by which each shape may be off (one standard deviation), for
    what differs between two points."""

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

    @property
    def multiple(self) -> int:
        return power_of_two(self.value)

    @property
    def flops_per_second(self) -> float:
        """Useful ones: counted FLOPs over the step."""
        return self.flops / self.step_seconds

    @property
    def seconds_per_parameter(self) -> float:
        return self.step_seconds / self.n_params

    def layout_rate(self, layout: str) -> float | None:
        """FLOP/s of the products of a layout."""
        seconds = self.layout_seconds.get(layout, 0.0)
        return self.layout_flops[layout] / seconds if seconds else None


@dataclass(frozen=True, kw_only=True)
class Penalty:
    """What a width loses against the line between `below` and `above`; low and high bound a 90% interval.

    `step` of the whole step, `device` of the kernels, `layouts` of the products by layout. Errors that the width has
    in common with its neighbours cancel, so the interval is of what differs: the shapes themselves.
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

    @property
    def hidden(self) -> float:
        """How much of the device's loss the step does not show: the device waits for the host anyway."""
        return self.device - self.step


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The multiple to keep on one axis. `median`, `worst`, `best`: penalties of widths that do not keep it (0.1: 10%
    longer), as the device and as the step sees them; None where no candidate ignores it."""

    axis: str
    multiple: int
    count: int
    median: float | None
    worst: float | None
    worst_value: int | None
    best: float | None
    step_median: float | None
    step_worst: float | None
    by_multiple: Mapping[int, float]


def power_of_two(value: int, most: int = TOP_MULTIPLE) -> int:
    """The largest power of two up to `most` that divides `value`."""
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
    """Forecasts one config. `forward`: the forward alone, as inference runs it, and not the step.

    Raises UsageError as `forecast` does.
    """
    stream = get_stream(config, traced_of(run, profile), vary="width")
    if forward:
        stream = forward_only(stream)
    step = PricedStep(stream, run, profile, host)
    found = step.forecast()
    seconds: dict[str, float] = defaultdict(float)
    flops: dict[str, int] = defaultdict(int)
    errors: dict[Any, float] = defaultdict(float)
    for op in step.ops:
        if op.work is None:
            continue
        shape = op.work.shape
        errors[shape] += op.seconds * op.sigma
        if isinstance(shape, Gemm) and shape.batch == 1:
            seconds[shape.layout] += op.seconds
            flops[shape.layout] += op.work.flops
    return Point(
        axis=axis, value=value, config=dict(config), n_params=found.n_params,
        step_seconds=found.step_seconds, step_seconds_low=found.step_seconds_low,
        step_seconds_high=found.step_seconds_high, device_seconds=found.device_seconds,
        device_seconds_low=found.device_seconds_low, device_seconds_high=found.device_seconds_high,
        host_seconds=found.host_seconds, bound=found.bound, flops=found.flops_counted,
        tokens=run.tokens, peak_bytes=found.peak_bytes, fits=found.fits,
        extrapolated=found.basis_shares["extrapolated"],
        layout_seconds=dict(seconds), layout_flops=dict(flops), errors=dict(errors),
    )  # fmt: skip


# --- candidates


def candidates(config: Mapping[str, Any], axis: str, span: int = 128) -> list[int]:
    """Sizes of one axis around the config's: multiples of 64 and what lies beside them.

    The multiples of 64 up to `span` from the one nearest to the config's own size, those of 256 around them (lines end
    there), the own size, and around the nearest multiple what is one of 32, 16, 8, 4, 2 and 1 at the most.
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


def head_shapes(config: Mapping[str, Any]) -> list[Config]:
    """Other heads x head_dim: head_dims in use with as many heads as come nearest to the same width, and one and two
    groups of heads more or less at the config's own head_dim. Query heads a key-value head stay."""
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
    """The multiples below and above, for one that is none."""
    below = value // multiple * multiple
    return below, below + multiple


def resized(config: Mapping[str, Any], axis: str, values: Iterable[int]) -> Iterator[tuple[int, Config]]:
    """(value, config) with each of `values` on one of AXES. Raises UsageError for a size of no model."""
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
    """Forecasts of (value, config), in order; `progress` is called after each. Raises UsageError as `forecast` does."""
    found = []
    with no_garbage_collection():
        for value, config in asked:
            found.append(point(axis, value, config, run, profile, host=host, forward=forward))
            progress()
    return found


# --- what follows


def penalties_of(points: Sequence[Point]) -> list[Penalty]:
    """Of every point whose two aligned neighbours are there too."""
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
    """The multiple whose line a width is held against; None for one of the highest."""
    multiple = power_of_two(value)
    if multiple < ALIGNED:
        return ALIGNED
    return None if multiple >= TOP_MULTIPLE else multiple * 2


def penalty(one: Point, below: Point, above: Point) -> Penalty:
    share = (one.value - below.value) / (above.value - below.value)
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
    )  # fmt: skip


def rule_of(axis: str, found: Sequence[Penalty], tolerated: float = TOLERATED) -> Rule:
    """The smallest multiple whose keeping costs no more than `tolerated` at the median, and what ignoring it costs."""
    by_multiple = {
        multiple: median(p.device for p in found if p.multiple == multiple)
        for multiple in MULTIPLES
        if any(p.multiple == multiple for p in found)
    }
    costly = [multiple for multiple, cost in by_multiple.items() if cost > tolerated]
    keep = 2 * max(costly) if costly else 1
    ignoring = [p for p in found if p.multiple < keep]
    worst = max(ignoring, key=lambda p: p.device, default=None)
    return Rule(
        axis=axis,
        multiple=keep,
        count=len(ignoring),
        median=median(p.device for p in ignoring) if ignoring else None,
        worst=worst.device if worst else None,
        worst_value=worst.value if worst else None,
        best=min(p.device for p in ignoring) if ignoring else None,
        step_median=median(p.step for p in ignoring) if ignoring else None,
        step_worst=max(p.step for p in ignoring) if ignoring else None,
        by_multiple=by_multiple,
    )
