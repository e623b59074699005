"""Says in one sentence which sizes to take: what a reader of `flopcast widths` looks for first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flopcast.roofline.base.units import percent
from flopcast.roofline.widths.penalties import AXES, Penalty, Point, Rule

NAMES = {"hidden": "hidden size", "ffn": "ffn size", "vocab": "vocabulary", "width": "width"}
GROWS_ONLY = ("vocab",)  # a tokenizer's vocabulary can be padded, not cut


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The size to take on one axis: the one `asked` about where it is a multiple of `multiple`, or where the interval
    of what it loses has 0 in it; else the `nearest` that is a multiple. `device`, with the ends of its 90% interval,
    and `step`: what the asked size loses in kernel time and in the step against its aligned neighbours, 0 where it
    keeps to the multiple."""

    axis: str
    asked: int
    multiple: int
    nearest: int
    recommended: int
    device: float = 0.0
    device_low: float = 0.0
    device_high: float = 0.0
    step: float = 0.0

    @property
    def keeps(self) -> bool:
        return self.asked == self.recommended


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What to choose on each axis; `rules` by axis; `heads`: the models with other heads, fastest per parameter first,
    and `center` the model asked about. `what`: the step or the forward."""

    choices: Sequence[Choice]
    rules: Mapping[str, Rule]
    heads: Sequence[Point]
    center: Point
    what: str

    @property
    def sentence(self) -> str:
        """The verdict in one sentence; of heads only where no other axis was asked for."""
        if not self.choices:
            return self._of_heads()
        kept = [choice for choice in self.choices if choice.asked == choice.nearest]
        parts = [self._change(choice) for choice in self.choices if not choice.keeps]
        parts += [_indifferent(choice) for choice in self.choices if choice.keeps and choice not in kept]
        if kept:
            parts.append(self._keep(kept))
        text = "; ".join(parts) + "."
        return text[0].upper() + text[1:]

    def _change(self, choice: Choice) -> str:
        low, high = _plain(choice.device_low), _plain(choice.device_high)
        return (
            f"take {NAMES[choice.axis]} {choice.recommended:,}, a multiple of {choice.multiple}, in place of "
            f"{choice.asked:,}, which loses {_plain(choice.device)} of kernel time (90%: {low} to {high}) and "
            f"{_plain(choice.step)} of the {self.what}"
        )

    def _keep(self, kept: Sequence[Choice]) -> str:
        """Which sizes are right as they are, and what ignoring their multiples loses on the axis where it is most."""
        sizes = _listed([f"{NAMES[choice.axis]} {choice.asked:,}" for choice in kept])
        found = list(dict.fromkeys(choice.multiple for choice in kept))
        each = "" if len(kept) == 1 else "both " if len(kept) == 2 else "all "
        some = f"{each}multiples of {found[0]}" if len(found) == 1 else f"multiples of {_listed(list(map(str, found)))}"
        if found == [1]:
            return f"keep {sizes}: none near loses anything"
        text = f"keep {sizes}, " + (f"a multiple of {found[0]}" if len(kept) == 1 else some)
        rules = [self.rules[choice.axis] for choice in kept]
        worst = max((rule for rule in rules if rule.median), key=lambda rule: rule.median or 0.0, default=None)
        if worst is None or worst.median_low is None or worst.median_high is None:
            return text
        span = f"{_plain(worst.median_low)} to {_plain(worst.median_high)}"
        if worst.median_low <= 0:
            return (
                f"{text}: a {NAMES[worst.axis]} that is none loses {span} of kernel time at the median (90%), "
                "which may be nothing"
            )
        return (
            f"{text}: a {NAMES[worst.axis]} that is none loses {_plain(worst.median)} of kernel time at the median "
            f"(90%: {span}) and {_plain(worst.step_median)} of the {self.what}"
        )

    def _of_heads(self) -> str:
        gain = self.heads[0].seconds_per_parameter / self.center.seconds_per_parameter - 1 if self.heads else 0.0
        if gain >= 0:
            return f"Keep {_heads(self.center)}: no others tried take less time per parameter."
        return (
            f"Take {_heads(self.heads[0])} in place of {_heads(self.center)}: the {self.what} takes {_plain(-gain)} "
            "less time per parameter."
        )

    def to_json(self) -> dict[str, Any]:
        return {"says": self.sentence, "sizes": [{**asdict(choice), "keeps": choice.keeps} for choice in self.choices]}


def verdict(
    center: Point,
    penalties: Mapping[str, Sequence[Penalty]],
    rules: Mapping[str, Rule],
    heads: Sequence[Point],
    what: str,
) -> Verdict:
    """Weighs the sizes of the model asked about by what was forecast around it."""
    choices = [
        _choice(axis, int(center.config[AXES.get(axis, axis)]), rule.multiple, penalties[axis])
        for axis, rule in rules.items()
    ]
    return Verdict(choices=choices, rules=rules, heads=heads, center=center, what=what)


def _choice(axis: str, asked: int, multiple: int, found: Sequence[Penalty]) -> Choice:
    below, over = divmod(asked, multiple)
    if not over:
        return Choice(axis=axis, asked=asked, multiple=multiple, nearest=asked, recommended=asked)
    goes_up = axis in GROWS_ONLY or not below or 2 * over >= multiple
    nearest = (below + goes_up) * multiple
    own = next((penalty for penalty in found if penalty.value == asked), None)
    if own is None:
        return Choice(axis=axis, asked=asked, multiple=multiple, nearest=nearest, recommended=nearest)
    return Choice(
        axis=axis, asked=asked, multiple=multiple, nearest=nearest,
        recommended=nearest if own.device_low > 0 else asked, device=own.device, device_low=own.device_low,
        device_high=own.device_high, step=own.step,
    )  # fmt: skip


def _indifferent(choice: Choice) -> str:
    return (
        f"{NAMES[choice.axis]} {choice.asked:,} may stay: no multiple of {choice.multiple}, it loses "
        f"{_plain(choice.device_low)} to {_plain(choice.device_high)} of kernel time (90%), which may be nothing"
    )


def _plain(change: float | None) -> str:
    return percent(change).removeprefix("+")


def _heads(one: Point) -> str:
    c = one.config
    return f"{c['num_attention_heads']}/{c['num_key_value_heads']} heads of {c['head_dim']}"


def _listed(words: Sequence[str]) -> str:
    """Joins words: a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
