"""Finds the fastest shapes at a given number of parameters by trading hidden size, ffn and depth against each other.

Only cost is forecast. Shapes also differ in what they can learn, most where depth changes: the candidates stay within
bounds that published models keep (`RATIOS`, `DEPTHS`), and the table gives each shape's depth, so that the user can
choose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import Config, check_config, depth_of, n_params, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths.penalties import Point, survey

RATIOS = (2.0, 5.0)  # ffn over hidden size
DEPTHS = (0.5, 2.0)  # over the depth of the model asked about
HIDDEN_STEP = 128  # between the hidden sizes that are tried
PER_WIDTH = 3  # depths kept per hidden size
MOST = 36  # shapes at most
TOLERANCE = 0.02

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
_VALID = "params=600M±2% (or +-2%, or a tolerance in parameters: params=1.7B+-50M); without one, 2% is meant"
_CONSTRAINT = re.compile(
    r"params\s*=\s*(?P<count>[\d_.]+)\s*(?P<unit>[kmbg]?)"
    r"\s*(?:(?:±|\+/?-)\s*(?P<tolerance>[\d_.]+)\s*(?P<of>%|[kmbg]?))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Constraint:
    """A number of parameters and the tolerance, as a share of it."""

    params: float
    tolerance: float = TOLERANCE

    def holds(self, count: int) -> bool:
        return abs(count / self.params - 1.0) <= self.tolerance

    def __str__(self) -> str:
        return f"{self.params / 1e6:.4g}M parameters ± {self.tolerance:.2%}"


def parse_constraint(text: str) -> Constraint:
    """Parses params=600M±2%, params=600M+-2%, params=600M+-12M or params=600M. Raises UsageError for anything else."""
    found = _CONSTRAINT.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--constraint is {text!r}: valid is {_VALID}")
    try:
        count = float(found["count"]) * _SUFFIX[found["unit"].lower()]
        tolerance = TOLERANCE
        if found["tolerance"]:
            given, of = float(found["tolerance"]), found["of"].lower()
            # a bare number is a share in percent: 600M±2
            tolerance = given / 100.0 if of in ("%", "") else given * _SUFFIX[of] / count
    except (ValueError, ZeroDivisionError) as fault:
        raise UsageError(f"--constraint is {text!r}: valid is {_VALID}") from fault
    if count < 1 or not 0.0 < tolerance < 0.5:
        raise UsageError(
            f"--constraint is {text!r}: valid are at least one parameter and a tolerance above 0 and below "
            f"50%; as in {_VALID}"
        )
    return Constraint(count, tolerance)


def shapes_within(
    config: Mapping[str, Any],
    constraint: Constraint,
    multiples: Mapping[str, int] | None = None,
    per_width: int = PER_WIDTH,
) -> list[Config]:
    """Returns at most MOST configs within the constraint: hidden size and depth are chosen first, and ffn takes the
    remaining parameters.

    `multiples`: the multiples that hidden and ffn keep to (default 64). Heads follow the hidden size at the config's
    own ratio; head_dim and query heads per key-value head stay the same. Raises UsageError where no shape is found.
    """
    keep = {"hidden": 64, "ffn": 64, **(multiples or {})}
    own, depth = int(config["hidden_size"]), max(2, depth_of(config))
    step = max(HIDDEN_STEP, keep["hidden"])
    grid: dict[int, list[tuple[float, Config]]] = {}
    own_ratio = int(config["intermediate_size"]) / own
    most_depth = max(2, round(depth * DEPTHS[1]))
    for hidden in range(step, 2 * own + step, step):
        if hidden < own / 2:
            continue
        found = []
        for layers in range(max(2, round(depth * DEPTHS[0])), most_depth + 1):
            shape = _fitted(config, hidden, layers, constraint, keep["ffn"])
            if shape is not None:
                found.append((abs(shape["intermediate_size"] / hidden / own_ratio - 1.0), shape))
        if found:
            found.sort(key=lambda pair: pair[0])
            grid[hidden] = found
    shapes = [shape for found in grid.values() for _, shape in found[:per_width]]
    if not shapes:
        raise UsageError(
            f"no shape of {constraint} near hidden size {own} and {depth} layers (vocabulary {config['vocab_size']}): "
            "valid is a constraint that --around and --depth come near to"
        )
    if len(shapes) > MOST:  # evenly over hidden sizes
        shapes = [shapes[i * len(shapes) // MOST] for i in range(MOST)]
    return shapes


def _fitted(config: Mapping[str, Any], hidden: int, depth: int, constraint: Constraint, multiple: int) -> Config | None:
    """Returns the config of this hidden size and depth with the ffn that comes nearest to the constraint; None where it
    does not meet the constraint or `RATIOS`."""
    group = int(config["num_attention_heads"]) // int(config["num_key_value_heads"])
    ratio = int(config["num_attention_heads"]) / int(config["hidden_size"])
    groups = max(1, round(ratio * hidden / group))
    shape = {**config, "hidden_size": hidden, "num_attention_heads": groups * group, "num_key_value_heads": groups}
    shape = with_depth({**shape, "intermediate_size": multiple}, depth)
    left = constraint.params - n_params(shape)
    ffn = multiple + round(left / (3 * hidden * depth) / multiple) * multiple
    if not RATIOS[0] <= ffn / hidden <= RATIOS[1]:
        return None
    shape["intermediate_size"] = ffn
    check_config(shape)
    return shape if constraint.holds(n_params(shape)) else None


def survey_shapes(
    shapes: Iterable[Config],
    run: Run,
    profile: Profile,
    *,
    host: HostCosts | None = None,
    forward: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Forecasts the shapes and returns them in order of rising seconds per parameter."""
    asked = ((int(shape["hidden_size"]), dict(shape)) for shape in shapes)
    return ranked(survey("shape", asked, run, profile, host=host, forward=forward, progress=progress))


def ranked(points: Sequence[Point]) -> list[Point]:
    """Sorts points by the step's seconds per parameter, since shapes within one constraint differ in parameters by up
    to its tolerance."""
    return sorted(points, key=lambda p: p.seconds_per_parameter)
