"""Remakes the tables of docs/accuracy.md and README.md from the committed measurements: no figure in them is typed.

    python -m studies.evidence.accuracy            # rewrites what stands between the markers of both files
    python -m studies.evidence.accuracy --print    # prints the tables instead

With them it remakes the tests' bounds (`bounds.py`) and both GPUs' validation.csv, as `flopcast validate` writes it.
A table stands between `<!-- made: NAME -->` and `<!-- end -->`; the functions of TABLES make them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from flopcast.kernels.shapes import canonical_json
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import OperationRow, StepEstimateRow, select
from flopcast.roofline.base.units import short_name
from flopcast.roofline.gpu.fit.cards import Found, read_folder
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.validation.baselines import calibrated
from flopcast.roofline.validation.step_comparison import Part, StepComparison, write_csv
from flopcast.roofline.validation.summary import (
    METHOD_LABELS,
    Errors,
    Summary,
    by_bound,
    compare_methods,
    errors_of,
    summary,
)
from studies.command import parser_of
from studies.evidence import bounds
from studies.evidence.kernels import Held, by_kind
from studies.evidence.processes import judge
from studies.evidence.steps import (
    EARLIER_TILES,
    H100,
    H200,
    MACHINES,
    PROJECTED,
    REPLAYED,
    REPLAYED_AGAIN,
    REPLAYING,
    Rows,
    compared,
    is_plain,
    judged,
    sets_of,
)
from studies.markdown import table

FILES = (Path("docs/accuracy.md"), Path("README.md"))
BENCHMARK = f"{H200}/steps/estimates-benchmark"
HOST_PROCESSES = f"{H200}/host-processes"
CHECKED = f"{H200}/checked-sample"
PART_LABELS = {
    "device": "device time (sum of kernels)", "gemm": "- matrix products", "attention": "- attention",
    "optimizer": "- optimizer", "softmax": "- loss (log-softmax)", "reduction": "- reductions",
    "elementwise": "- element-wise, casts, rest", "peak": "peak memory",
}  # fmt: skip
KIND_LABELS = {
    "torch gemm": "matrix products, rows aligned", "torch gemm unaligned": "matrix products, rows unaligned",
    "torch gemm wide": "matrix products in fp32 and tf32", "sdpa-cudnn attention": "attention through cuDNN",
    "sdpa-flash attention": "attention through flash", "triton attention": "Triton's attention",
    "torch pointwise": "element-wise", "torch reduction": "reductions", "torch copy": "copies", "torch cat": "cat",
    "torch softmax": "softmax and log-softmax", "torch loss": "losses", "torch optimizer": "optimizer",
    "torch embedding": "embedding", "torch conv": "convolutions", "triton fused": "fused Triton kernels",
}  # fmt: skip
FEW = 5  # kinds of kernels with fewer held-out rows are left out


@dataclass(frozen=True)
class Evidence:
    """What the tables are made of, read or forecast when first asked for."""

    reports: Path

    @cached_property
    def every(self) -> dict[str, list[StepComparison]]:
        return compared(self.reports)

    @cached_property
    def machines(self) -> dict[str, Rows]:
        return judged(self.every)

    @cached_property
    def sets(self) -> dict[str, list[StepComparison]]:
        return sets_of(self.machines)

    @property
    def plain(self) -> list[StepComparison]:
        return self.sets["H200"]

    @cached_property
    def measurements(self) -> Found:
        return read_folder(self.reports / H200 / "measurements")


# --- cells


def _errors(found: Errors) -> str:
    return "-" if found.median is None else f"{100 * found.median:.1f} / {100 * (found.worst or 0):.1f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def _inside(rows: Sequence[StepComparison], part: Callable[[StepComparison], Part]) -> str:
    return f"{sum(bool(part(row).is_within) for row in rows)} of {len(rows)}"


def _own(row: StepComparison) -> Part:
    return row.step


def _shipped(row: StepComparison) -> Part:
    return row.profile_host_step


def _summaries(sets: Mapping[str, Sequence[StepComparison]]) -> dict[str, Summary]:
    return {name: summary(name, rows) for name, rows in sets.items()}


# --- tables


def steps(evidence: Evidence) -> str:
    """The plain steps of the first H200, by component and by what bounds them."""
    return components(evidence.plain)


def components(rows: Sequence[StepComparison]) -> str:
    """The errors of steps by component and by what bounds them, and a line of their signs."""
    sets = {name: members for name, members in by_bound(rows).items() if members}
    found = _summaries(sets)
    lines = [[label, *(_errors(one.parts[name]) for one in found.values())] for name, label in PART_LABELS.items()]
    for label, name, part in (
        ("shipped host", "profile_host_step", _shipped), ("host of the same run", "step", _own)
    ):  # fmt: skip
        widths = [one.profile_host_width if part is _shipped else one.interval_width for one in found.values()]
        lines += [
            [f"step, {label}", *(_errors(one.parts[name]) for one in found.values())],
            ["- inside the 90% interval", *(_inside(members, part) for members in sets.values())],
            ["- mean width of the interval", *map(_percent, widths)],
        ]
    head = (r"\|error\|, %: median / worst", *(f"{name} {len(members)}" for name, members in sets.items()))
    signs = found.get("device-bound", found["all"]).parts
    said = ", ".join(
        f"{words} {100 * (signs[name].signed or 0):+.1f}%"
        for name, words in (("gemm", "matrix products"), ("reduction", "reductions"), ("device", "all kernels"))
    )
    return (
        f"{table(head, lines)}\n\nMedian signed errors where the device bounds: {said}. Errors of opposite sign cancel."
    )


def machines(evidence: Evidence) -> str:
    """What a user gets on every machine that ran steps: the shipped host beside the host of the same run."""
    lines = []
    for machine in (*MACHINES, PROJECTED):
        rows = evidence.machines[machine]
        for bound, members in by_bound(rows).items():
            if bound != "all" and members:
                one = summary(bound, members)
                lines.append([
                    machine, f"{bound} {len(members)}", _errors(one.parts["device"]),
                    _errors(one.parts["profile_host_step"]), _inside(members, _shipped),
                    _percent(one.profile_host_width), _errors(one.parts["step"]), _inside(members, _own),
                    _percent(one.interval_width),
                ])  # fmt: skip
    host = find_profile(H200).host
    spread = (
        "" if host is None else f"\n\nThe shipped host is `{host.name}`, known to {host.sigma:.0%} (one deviation)."
    )
    head = ("machine", "steps", "device time", "step, shipped host", "inside", "width", "step, host of the same run",
            "inside", "width")  # fmt: skip
    return table(head, lines) + spread


def methods(evidence: Evidence) -> str:
    """Other ways to estimate the plain steps, as they are and with one factor."""
    found = compare_methods(evidence.plain)
    shipped = {name: errors_of(map(_shipped, rows)) for name, rows in by_bound(evidence.plain).items()}
    sets = tuple(shipped)
    lines = [
        ["this forecast, host of the same run", *(_errors(found[0].sets[name]) for name in sets)],
        ["this forecast, shipped host", *map(_errors, shipped.values())],
        *([one.label, *(_errors(one.sets[name]) for name in sets)] for one in found[1:]),
    ]
    benchmarked = with_benchmark(evidence)
    by_set = by_bound(benchmarked)
    label = f"{METHOD_LABELS['torch']}, benchmark mode"
    raw = {name: errors_of(row.baselines["torch"] for row in rows) for name, rows in by_set.items()}
    scaled = {name: errors_of(calibrated(rows, "torch")) for name, rows in by_set.items()}
    for words, cells in (("", raw), (", one factor", scaled)):
        lines.append([label + words, *(f"{_errors(cells[name])} ({cells[name].n})" for name in sets)])
    head = (
        r"\|error\| of the step, %: median / worst",
        *(f"{name} {len(by_bound(evidence.plain)[name])}" for name in sets),
    )
    return table(head, lines)


def with_benchmark(evidence: Evidence) -> list[StepComparison]:
    """The plain steps that torch's benchmark mode estimated, with its estimate in place of torch's cost model's."""
    rows = select(records.read(evidence.reports / BENCHMARK).rows, StepEstimateRow)
    found = []
    for row in evidence.plain:
        value = next((one.get("value") for one in rows if one["status"] == "ok" and is_of(one["plan"], row.plan)), None)
        if value is not None:
            baselines = {**row.baselines, "torch": Part(row.step.measured, value)}
            found.append(replace(row, baselines=baselines))
    return found


def is_of(recorded: Mapping[str, Any], plan: StepPlan) -> bool:
    """Whether a record is of a plan; plans may have got options since, which the record does not name."""
    fields = vars(plan)
    return canonical_json(dict(recorded)) == canonical_json({name: fields.get(name) for name in recorded})


def others(evidence: Evidence) -> str:
    """Device time and step beyond plain Qwen3, set by set, and other families one by one."""
    names = ("H200, other kernels", *dict.fromkeys(REPLAYING.values()), EARLIER_TILES, "H200, other options",
             "H200, other families", "H100 SXM, other kernels")  # fmt: skip
    lines = [_line(name, evidence.sets[name]) for name in names]
    lines += [_line(f"- {short_name(row.label)}", [row]) for row in evidence.sets["H200, other families"]]
    return table(
        ("steps", "n", "device time", "step, host of the same run", "inside", "step, shipped host", "inside"), lines
    )


def _line(name: str, rows: Sequence[StepComparison]) -> list[str]:
    parts = summary(name, rows).parts

    def cell(of: Errors) -> str:
        return f"{100 * (of.signed or 0):+.1f}" if len(rows) == 1 else _errors(of)

    return [
        name, str(len(rows)), cell(parts["device"]), cell(parts["step"]), _inside(rows, _own),
        cell(parts["profile_host_step"]), _inside(rows, _shipped),
    ]  # fmt: skip


def kernels(evidence: Evidence) -> str:
    """Held-out kernels of all cards by kind: |error|, and how many of their intervals hold."""
    found = by_kind(
        [row for row in evidence.measurements.rows if row.get("role") == "holdout" and row.get("shape")],
        find_profile(H200), told_apart=True,
    )  # fmt: skip
    lines = []
    for kind, label in KIND_LABELS.items():
        both = [found.get(f"{kind} {cache}") for cache in ("cold", "hot")]
        if any(one is not None and one.n >= FEW for one in both):
            lines.append([label, *(cell for one in both for cell in _held(one))])
    head = ("kernels", "cold, % (n)", "inside", "width", "hot, % (n)", "inside", "width")
    return table(head, lines)


def _held(one: Held | None) -> list[str]:
    if one is None or one.n < FEW:
        return ["-", "-", "-"]
    return [f"{100 * one.median:.1f} / {100 * one.p90:.1f} ({one.n})", _percent(one.coverage), _percent(one.width)]


def cards(evidence: Evidence) -> str:
    """How many cards each row of the profile rests on, and what was checked."""
    holders: dict[tuple[str, str, str], list[str]] = {}
    unchecked = set()
    for card, rows in evidence.measurements.cards.items():
        for row in rows:
            if row.get("shape") and row["status"] == "ok":
                key = (row["key"], row.get("backend", "torch"), row.get("cache", "cold"))
                holders.setdefault(key, []).append(card)
                if row.get("relative_error") is None:
                    unchecked.add(key)
    alone = Counter(names[0] for names in holders.values() if len(names) == 1)
    most, count = alone.most_common(1)[0]
    only = sum(alone.values())
    sample = select(records.read(evidence.reports / CHECKED).rows, OperationRow)
    right = [row for row in sample if row["status"] == "ok"]
    error = max((row["relative_error"] or 0.0) / (row["tolerance"] or 1.0) for row in right)
    recorded = {row["key"]: row["kernel_seconds"] for row in evidence.measurements.cards[most]}
    apart = median(
        abs(seen / known - 1)
        for row in right
        if (seen := row["kernel_seconds"]) and (known := recorded.get(row["key"]))
    )
    n = len(holders)
    return (
        f"The profile of the H200 rests on {len(evidence.measurements.cards)} cards and {n:,} rows, of which "
        f"{only:,} ({only / n:.0%}) were measured on one card alone, {count:,} of these on one and the same.\n\n"
        f"{len(unchecked):,} rows ({len(unchecked) / n:.0%}), nearly all of them products of unaligned widths, were "
        "compared with no reference when they were timed, and timed without flushing the cache. Of a random sample "
        f"of {len(sample)} of them, measured again on another card as all other rows are, {len(right)} were right "
        f"(largest error {error:.2f} of the tolerance), and their kernels took within {apart:.1%} (median) of the "
        "recorded time."
    )


def processes(evidence: Evidence) -> str:
    """How many host-bound steps the calibration of so many processes holds."""
    found = judge(evidence.reports / HOST_PROCESSES)
    lines = [
        [one.machine, str(one.count), str(one.hosts), f"{one.inside} of {one.steps}", _percent(one.inside / one.steps),
         _percent(one.width)]
        for one in found
    ]  # fmt: skip
    head = ("machine", "processes", "choices", "inside the 90% interval", "share", "mean width")
    return table(head, lines)


def readme(evidence: Evidence) -> str:
    """The table of the first page: what a user gets."""
    sets = by_bound(evidence.plain)
    found = _summaries(sets)
    every = [row for name in MACHINES for row in evidence.machines[name] if is_plain(row)]
    roofline = next(one for one in compare_methods(evidence.plain) if one.method == "roofline")
    lines = [
        ["device time (sum of kernels)", *_pair(found["all"].parts["device"])],
        ["peak memory", *_pair(found["all"].parts["peak"])],
    ]
    for name, words in (("device-bound", "where the device bounds it"), ("host-bound", "where the host bounds it")):
        count = len(sets[name])
        shipped, own = found[name].parts["profile_host_step"], found[name].parts["step"]
        lines.append([f"step, {words} ({count} steps), with the shipped host", *_pair(shipped)])
        lines.append([f"the same {count}, host calibrated in the same run", *_pair(own)])
    lines.append(["for comparison: all steps from a roofline at datasheet peaks", *_pair(roofline.sets["all"])])
    made = table((r"\|error\|", "median", "worst"), lines)
    return (
        f"{made}\n\nWith the shipped host the 90% interval held {_inside(evidence.plain, _shipped)}, with the host of "
        f"the same run {_inside(evidence.plain, _own)}; of the plain steps of all {len(MACHINES)} machines it held "
        f"{_inside(every, _shipped)} and {_inside(every, _own)}."
    )


def _pair(found: Errors) -> tuple[str, str]:
    return f"{100 * (found.median or 0):.1f}%", f"{100 * (found.worst or 0):.1f}%"


def h100(evidence: Evidence) -> str:
    """The plain steps of the H100 by component."""
    return components(evidence.sets["H100 SXM"])


def launches(evidence: Evidence) -> str:
    """Steps of the fused kernels on the H200s, bound by their host and by the device: those whose launches were made
    anew, and those that replay them."""
    machines = {name: rows for name, rows in evidence.machines.items() if name.startswith("H200")}
    fused = {name: [row for row in rows if row.plan.fused != "none"] for name, rows in machines.items()}
    before = [row for name, rows in fused.items() if name not in REPLAYING for row in rows]
    today = {name: [row for row in fused.get(name, ()) if row.is_host_bound] for name in (REPLAYED, REPLAYED_AGAIN)}
    made_anew = _range([_own(row).error for row in before if row.is_host_bound])
    by_device = _range([_own(row).error for row in before if not row.is_host_bound])
    of_first, of_second = (_range([_own(row).error for row in today[name]]) for name in (REPLAYED, REPLAYED_AGAIN))
    shipped = _range([_shipped(row).error for rows in today.values() for row in rows])
    return (
        f"Before launches were replayed steps of the fused kernels that their host bounds came out {made_anew}, by the "
        f"operators' costs as of then and the host of the run; those that the device bounds {by_device}. Since then "
        f"those that the host bounds come out {of_second} by the host of the run, and {shipped} by the shipped one. On "
        f"the machine before, whose host was measured calling rope with one tensor for two weights, they come out "
        f"{of_first} by the host of the run."
    )


def _range(errors: Sequence[float | None]) -> str:
    found = sorted(error for error in errors if error is not None)
    low, middle, high = (100 * value for value in (found[0], median(found), found[-1]))
    return f"between {low:+.0f} and {high:+.0f}%, {middle:+.1f}% at the median of {len(found)}"


TABLES = {
    "steps": steps, "machines": machines, "methods": methods, "others": others, "kernels": kernels, "cards": cards,
    "launches": launches, "processes": processes, "h100": h100, "readme": readme,
}  # fmt: skip
BLOCK = re.compile(r"(<!-- made: (\w+) -->\n).*?(\n<!-- end -->)", re.DOTALL)


def remade(text: str, evidence: Evidence) -> str:
    """The text with what stands between markers made anew."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{TABLES[found[2]](evidence)}\n{found[3]}", text)


def main() -> None:
    """Rewrites the tables of both files, or prints them."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--print", action="store_true", dest="is_printed")
    given = parser.parse_args()
    evidence = Evidence(Path("reports"))
    if given.is_printed:
        for name, make in TABLES.items():
            print(f"## {name}\n\n{make(evidence)}\n")
        return
    for path in FILES:
        path.write_text(remade(path.read_text(encoding="utf-8"), evidence), encoding="utf-8")
        print(f"wrote {path}")
    bounds.write(bounds.step_figures(evidence.every), bounds.held_out_figures(evidence.reports))
    print(f"wrote {bounds.BOUNDS}")
    for gpu in (H200, H100):
        of_gpu = [rows for name, rows in evidence.every.items() if MACHINES.get(name, "").startswith(f"{gpu}/steps/")]
        path = evidence.reports / gpu / "validation.csv"
        write_csv([row for rows in of_gpu for row in rows], path)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
