"""Gathers all that `flopcast widths` answers: forecasts by axis, penalties, rules, shapes of equal parameter count.

The report page and Python callers use `answer(...)` too; `to_json` and `csv_rows` give plain data in SI units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from flopcast.errors import UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.roofline.base.units import percent
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import traced_of
from flopcast.roofline.stream.library.ahead import compile_ahead
from flopcast.roofline.stream.model.models import Config, n_params
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import NotDerivable
from flopcast.roofline.stream.ops.to_width import MODEL_TYPES, dimensions
from flopcast.roofline.widths.measured_rules import MeasuredRule, measured_rules
from flopcast.roofline.widths.penalties import (
    ALIGNED,
    AXES,
    COMPILED,
    HEADS,
    LAYOUTS,
    PARTS,
    REST,
    TOLERATED,
    Penalty,
    Point,
    Rule,
    candidates,
    head_shapes,
    penalties_of,
    point,
    resized,
    rule_of,
    survey,
    widths_near,
)  # fmt: skip
from flopcast.roofline.widths.shapes import MOST, Constraint, ranked, shapes_within, survey_shapes
from flopcast.roofline.widths.verdict import NAMES, Verdict, verdict


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of `flopcast widths` for one model on one GPU.

    `center`: the model asked about; `points`, `penalties`, `rules`: by axis; `shapes`: models of equal parameter count,
    and `heads`: other heads x head_dim, both in order of rising seconds per parameter; `measured`: rules from
    measurements of this GPU's own products; `refused`: why a module's factory refuses widths that were tried."""

    gpu: str
    basis: str
    run: Run
    forward: bool
    center: Point
    points: Mapping[str, Sequence[Point]]
    penalties: Mapping[str, Sequence[Penalty]]
    rules: Mapping[str, Rule]
    heads: Sequence[Point]
    shapes: Sequence[Point]
    constraint: Constraint | None
    measured: Sequence[MeasuredRule]
    tolerated: float
    refused: Mapping[int, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Which sizes to take, for what it gains."""
        what = "forward" if self.forward else "step"
        return verdict(self.center, self.penalties, self.rules, self.heads, what)

    @property
    def is_host_bound(self) -> bool:
        return self.center.bound == "host"

    def host_words(self) -> str | None:
        """Says how a host that bounds the step hides what widths cost; None where the host does not bound it."""
        center, what = self.center, "forward" if self.forward else "step"
        if not self.is_host_bound:
            return None
        words = (
            f"the host bounds this {what}: {center.host_seconds * 1e3:.1f} ms to hand over "
            f"{center.device_seconds * 1e3:.1f} ms of kernels; {self.idle_share:.0%} of the {what} the device waits. "
            "No width makes it faster"
        )
        unaligned = [p for found in self.penalties.values() for p in found if p.multiple < ALIGNED]
        if unaligned:
            worst = max(unaligned, key=lambda p: p.device)
            lost, shown = median(p.device for p in unaligned), median(p.step for p in unaligned)
            if max(p.step for p in unaligned) > self.tolerated:
                words += ", and unaligned ones make it slower where their kernels outlast the host"
            words += (
                f": of what unaligned sizes add to kernel time, {lost:.0%} at the median, the {what} shows "
                f"{max(0.0, shown):.0%}, of the worst's {worst.device:.0%} ({worst.axis} {worst.value}) "
                f"{max(0.0, worst.step):.0%}"
            )
        return words + "; larger batches (--batch), or --host none for the device alone, show what widths cost"

    def padding_words(self) -> str | None:
        """Says of a compiled step which products inductor pads and what that costs; None for an eager step."""
        if self.run.mode == "eager":
            return None
        found = [one for points in self.points.values() for one in points if one.padded]
        if not found:
            return "inductor pads none of these sizes' products"
        sizes = {axis: [one for one in points if one.padded] for axis, points in self.points.items()}
        told = "; ".join(
            f"{NAMES[axis]} {', '.join(f'{one.value:,}' for one in padded)}: {_most(padded)}"
            for axis, padded in sizes.items()
            if padded
        )
        words = "inductor pads products to whole rows of 16 bytes where it finds them faster so, timing both "
        words += f"while it compiles ({told})"
        values = {(one.axis, one.value) for one in found}
        losing = [p for each in self.penalties.values() for p in each if (p.axis, p.value) in values]
        if losing:
            total = median(p.device for p in losing)
            products, passes = (median(p.parts[part] for p in losing) for part in ("products", "passes"))
            words += (
                f". At the median these sizes lose {percent(total).lstrip('+')} of kernel time: {percent(products)} in "
                f"products, {percent(passes)} in the passes that write padded operands and read them"
            )
        return words

    @property
    def idle_share(self) -> float:
        return max(0.0, 1.0 - self.center.device_seconds / self.center.step_seconds)

    def to_json(self) -> dict[str, Any]:
        return {
            "gpu": self.gpu,
            "profile_basis": self.basis,
            "run": self.run.to_json(),
            "forward_only": self.forward,
            "model": dict(self.center.config),
            "bound": self.center.bound,
            "host": {"is_bound": self.is_host_bound, "idle_share": self.idle_share, "says": self.host_words()},
            "verdict": self.verdict.to_json(),
            **({} if self.run.mode == "eager" else {"padding": {"says": self.padding_words()}}),
            "tolerated": self.tolerated,
            "refused": {str(width): why for width, why in self.refused.items()},
            "rules": [
                {**asdict(rule), "by_multiple": {str(k): v for k, v in rule.by_multiple.items()}}
                for rule in self.rules.values()
            ],
            "points": [_point_row(one) for found in self.points.values() for one in found],
            "penalties": [_penalty_json(one) for found in self.penalties.values() for one in found],
            "heads": [_point_row(one) for one in self.heads],
            "constraint": None if self.constraint is None else asdict(self.constraint),
            "shapes": [_point_row(one) for one in self.shapes],
            "measured_rules": [{**rule.to_json(), "says": rule.sentence} for rule in self.measured],
        }

    @property
    def columns(self) -> tuple[str, ...]:
        """Those of `csv_rows`."""
        return CSV_COLUMNS if self.run.mode == "eager" else (*CSV_COLUMNS, *COMPILED_COLUMNS)

    def csv_rows(self) -> list[dict[str, Any]]:
        """Returns one row per forecast, with a point's penalty in the same row."""
        rows = []
        for axis, found in self.points.items():
            known = {p.value: p for p in self.penalties[axis]}
            for one in found:
                penalty = known.get(one.value)
                more = {} if penalty is None else _penalty_row(penalty)
                rows.append({**_point_row(one), **more})
        return [*rows, *(_point_row(one) for one in (*self.heads, *self.shapes))]


CSV_COLUMNS = (
    "axis",
    "value",
    "multiple",
    "width",
    "depth",
    "heads",
    "kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "n_params",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "device_seconds",
    "device_seconds_low",
    "device_seconds_high",
    "host_seconds",
    "bound",
    "flops_per_second",
    "seconds_per_parameter",
    "peak_bytes",
    "fits",
    "extrapolated",
    *(f"{layout}_flops_per_second" for layout in LAYOUTS),
    "below",
    "above",
    "penalty_step",
    "penalty_device",
    "penalty_device_low",
    "penalty_device_high",
    *(f"penalty_{layout}" for layout in LAYOUTS),
)
COMPILED_COLUMNS = ("padded_products", "products", *(f"penalty_{part}" for part in (*PARTS.values(), REST)))


def _point_row(one: Point) -> dict[str, Any]:
    config = one.config
    return {
        "axis": one.axis, "value": one.value, "multiple": one.multiple,
        "width": config.get("hidden_size", one.value), "depth": config.get("num_hidden_layers"),
        "heads": config.get("num_attention_heads"), "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"), "ffn": config.get("intermediate_size"), "vocab": config.get("vocab_size"),
        "n_params": one.n_params,
        "step_seconds": one.step_seconds, "step_seconds_low": one.step_seconds_low,
        "step_seconds_high": one.step_seconds_high, "device_seconds": one.device_seconds,
        "device_seconds_low": one.device_seconds_low, "device_seconds_high": one.device_seconds_high,
        "host_seconds": one.host_seconds, "bound": one.bound, "flops_per_second": one.flops_per_second,
        "seconds_per_parameter": one.seconds_per_parameter, "peak_bytes": one.peak_bytes, "fits": one.fits,
        "extrapolated": one.extrapolated,
        **{f"{layout}_flops_per_second": one.layout_rate(layout) for layout in LAYOUTS},
        **({"padded_products": one.padded, "products": one.products} if one.products else {}),
    }  # fmt: skip


def _most(padded: Sequence[Point]) -> str:
    """Of how many products operands are padded."""
    shares = sorted({(one.padded, one.products) for one in padded})
    return " or ".join(f"{count} of {products}" for count, products in shares)


def _penalty_json(one: Penalty) -> dict[str, Any]:
    record = asdict(one)
    if not one.parts:  # of an eager step
        del record["parts"]
    return record


def _penalty_row(one: Penalty) -> dict[str, Any]:
    return {
        "below": one.below, "above": one.above, "penalty_step": one.step, "penalty_device": one.device,
        "penalty_device_low": one.device_low, "penalty_device_high": one.device_high,
        **{f"penalty_{name}": value for name, value in (*one.layouts.items(), *one.parts.items())},
    }  # fmt: skip


def _compile(configs: Iterable[Config], run: Run, profile: Profile, progress: Callable[[int, int], None]) -> None:
    traced = traced_of(run, profile)
    compile_ahead([(config, traced) for config in configs], progress)


def check_forward(run: Run, forward: bool) -> None:
    """Raises UsageError for the forward alone of a compiled step."""
    if forward and run.mode != "eager":
        raise UsageError(
            f"--forward-only with mode {run.mode!r}: the compiled forward of a step saves what its backward needs, and "
            "one without a backward is other code, which is not modelled yet; leave one of the two out"
        )


def with_all_sizes(config: Mapping[str, Any]) -> Config:
    """Returns the config with head_dim and key-value heads made explicit. Raises UsageError for a model without these
    dimensions."""
    try:
        sizes = dimensions(config)
    except NotDerivable as fault:
        raise UsageError(
            f"widths of a model with model_type {config.get('model_type')!r} ({fault}): valid are "
            f"{', '.join(MODEL_TYPES)} with hidden, ffn and vocabulary sizes above 1; `flopcast sweep` forecasts any "
            "list of models"
        ) from fault
    return {**config, "num_key_value_heads": sizes["k"], "head_dim": 2 * sizes["p"]}


def answer(
    config: Mapping[str, Any],
    run: Run,
    profile: Profile,
    *,
    axes: Sequence[str] = (*AXES, HEADS),
    span: int = 128,
    forward: bool = False,
    constraint: Constraint | None = None,
    with_shapes: bool = True,
    tolerated: float = TOLERATED,
    host: HostCosts | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Answer:
    """Forecasts models around `config` on each axis of `axes`, and, unless `with_shapes` is false, shapes within
    `constraint` (default: the config's own parameters ± 2%). Of a compiled step nine sizes of an axis at most are
    tried, and compiled first. Raises UsageError as `forecast` does, and where no shape meets a given constraint."""
    run.check()
    check_forward(run, forward)
    model = with_all_sizes(config)
    asked = constraint or Constraint(n_params(model))
    is_eager = run.mode == "eager"
    values = {
        axis: candidates(model, axis, span) if is_eager else widths_near(int(model[AXES[axis]]), COMPILED)
        for axis in axes
        if axis in AXES
    }
    heads = head_shapes(model) if HEADS in axes else []
    if not is_eager:
        tried = (one for axis, found in values.items() for _, one in resized(model, axis, found))
        _compile([model, *tried, *heads], run, profile, progress)
    total = 1 + sum(map(len, values.values())) + len(heads) + (MOST if with_shapes else 0)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress(min(done, total), total)

    settings: dict[str, Any] = {"host": host, "forward": forward}
    with no_garbage_collection():
        center = point("hidden", int(model["hidden_size"]), model, run, profile, **settings)
        advance()
        points = {
            axis: survey(axis, resized(model, axis, found), run, profile, progress=advance, **settings)
            for axis, found in values.items()
        }
        sized = ((int(shape["num_attention_heads"]) * int(shape["head_dim"]), shape) for shape in heads)
        other_heads = survey(HEADS, sized, run, profile, progress=advance, **settings)
        penalties = {axis: penalties_of(found) for axis, found in points.items()}
        rules = {axis: rule_of(axis, found, tolerated) for axis, found in penalties.items()}
        shapes: list[Point] = []
        if with_shapes:
            keep = {axis: max(ALIGNED, rule.multiple) for axis, rule in rules.items()}
            try:
                found = shapes_within(model, asked, keep)
            except UsageError:
                if constraint is not None:  # without one asked for, it is no error that no shape is found
                    raise
                found = []
            if not is_eager:
                _compile(found, run, profile, progress)
            shapes = survey_shapes(found, run, profile, progress=advance, **settings)
    measured = [rule for rule in measured_rules(profile) if rule.layout == "all" and is_eager]  # not padded
    return Answer(
        gpu=profile.gpu, basis=profile.basis, run=run, forward=forward, center=center, points=points,
        penalties=penalties, rules=rules, heads=ranked(other_heads), shapes=shapes,
        constraint=asked if with_shapes else None, measured=measured, tolerated=tolerated,
    )  # fmt: skip
