"""What the terminal shows: tables and progress. Units are ms, TFLOP/s, TB/s and $/Mtoken here and only here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from flopcast.roofline.fit_report import FitReport
    from flopcast.roofline.forecast import Forecast, Run
    from flopcast.roofline.lookup import Known
    from flopcast.roofline.profile import Number

NONE = "-"


class Whole(Console):
    """Lines wider than the terminal are left to it to break: cut short, a number reads as another."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})


def console() -> Console:
    """stdout, as wide as the terminal; 120 columns where there is none, so that nothing is cut in a log."""
    return Whole(width=None if sys.stdout.isatty() else 120, highlight=False)


def say(text: str) -> None:
    """A line for the person, on stderr: stdout is for results."""
    print(text, file=sys.stderr)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Yields advance(done, total): a bar on stderr where that is a terminal, nothing elsewhere."""
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caption: str | None = None
) -> Table:
    """First column left, the others right."""
    made = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", header_style="bold"
    )
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        made.add_row(*map(escape, row))  # a path may hold what rich takes for markup
    return made


def ms(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{seconds * 1e3:.2f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def percent(error: float | None) -> str:
    """+1.5%; 0.0% has no sign"""
    return NONE if error is None else f"{error * 100:+.1f}%" if abs(error) >= 0.0005 else "0.0%"


def share(value: float | None) -> str:
    return NONE if value is None else f"{value * 100:.1f}%"


def rate(flops_per_second: float) -> str:
    return (
        f"{flops_per_second / 1e12:,.1f} TFLOP/s"
        if flops_per_second >= 1e12
        else f"{flops_per_second / 1e9:,.1f} GFLOP/s"
    )


def gigabytes(count: float | None) -> str:
    return NONE if count is None else f"{count / 1e9:.2f} GB" if count < 1e10 else f"{count / 1e9:.1f} GB"


def parameters(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def numbers(found: Mapping[str, Number]) -> dict[str, Any]:
    return {name: asdict(number) for name, number in found.items()}


def print_known(found: Sequence[Known]) -> None:
    rows = [[entry.name, entry.basis, entry.source] for entry in found]
    console().print(table("Known GPUs", ("--gpu", "basis", "source"), rows))


def batch_words(batch: int, seq: int, unit: str = "tokens") -> str:
    """4 x 256 tokens, 64 samples, or a step of one's own."""
    if unit == "tokens":
        return f"{batch} x {seq} tokens"
    return f"{batch} sample{'s' if batch > 1 else ''}" if unit == "samples" else "a step of its own"


def run_words(run: Run, unit: str = "tokens") -> str:
    """4 x 256 tokens, autocast-bf16, adamw, eager; what is not the default of the rest is named too."""
    more = [f"{run.accumulate} micro-batches a step"] if run.accumulate > 1 else []
    rest = {
        "checkpoint": (run.checkpoint, "none"), "matmul by": (run.matmul, "torch"),
        "attention by": (run.attention, "sdpa"), "fused by": (run.fused, "none"),
    }  # fmt: skip
    words = [f"{name} {value}" for name, (value, default) in rest.items() if value != default]
    return ", ".join(
        [batch_words(run.batch, run.seq, unit), *more, run.precision, run.optimizer, run.mode, *words]
    )


def print_forecast(found: Forecast, run: Run) -> None:
    from flopcast.roofline.canvas import byte_size
    from flopcast.roofline.memory import CONTEXT_BYTES, FRAGMENTATION

    out = console()
    depth = f"{found.depth} layers, " if found.depth else ""
    step = f"{ms(found.step_seconds)} ms  ({ms(found.step_seconds_low)} to {ms(found.step_seconds_high)})"
    rows = [
        ["step, 90% interval", step],
        ["bound by", found.bound],
        ["device (sum of kernels)", f"{ms(found.device_seconds)} ms, {found.kernels:,} kernels"],
        [
            "device time by basis",
            ", ".join(f"{share(s)} {basis}" for basis, s in found.basis_shares.items() if s),
        ],
        ["host (to enqueue one step)", f"{ms(found.host_seconds)} ms on {found.host}"],
        [f"{found.unit} per second", f"{found.tokens_per_second:,.0f}"],
        *_flops_rows(found),
        ["peak memory, allocated", gigabytes(found.peak_bytes)],
        [
            "memory needed",
            f"{gigabytes(found.needed_bytes)} with {gigabytes(CONTEXT_BYTES)} of context and {FRAGMENTATION:.0%} for "
            f"fragmentation: {'fits' if found.fits else 'DOES NOT FIT'}",
        ],
    ]
    if found.price is not None:
        usd = found.usd_per_step or 0.0
        per_million = usd / (run.batch * run.seq * run.accumulate) * 1e6
        rows.append(["price", found.price.label])
        rows.append(["cost", f"${usd:.3g} a step, ${per_million:.3g} per million {found.unit}"])
        rows.append(["FLOPs per dollar", f"{found.flops_per_usd:.3g}"])
    title = (
        f"{found.gpu} ({found.profile_basis}): {parameters(found.n_params)} parameters, {depth}"
        f"{run_words(run, found.unit)}"
    )
    out.print(table(title, ("", ""), rows))
    total = found.device_seconds or 1.0
    classes = [
        [
            s.op_class,
            ms(s.seconds),
            share(s.seconds / total),
            f"{s.calls:,}",
            byte_size(s.bytes),
            f"{s.flops:.3g}",
        ]
        for s in sorted(found.breakdown, key=lambda s: -s.seconds)
    ]
    out.print(
        table("Device time by class", ("class", "ms", "share", "calls", "bytes moved", "FLOPs"), classes)
    )
    for warning in found.warnings:
        say(f"warning: {warning}")


def _flops_rows(found: Forecast) -> list[list[str]]:
    """FLOPs and MFU; 6N is of tokens alone: an image costs more than 6 FLOPs a parameter."""
    peak = rate(found.peak_flops_per_second)
    if found.unit != "tokens":
        return [
            ["FLOPs counted", f"{found.flops_counted:.4g}"],
            ["MFU counted", f"{share(found.mfu)} of {peak}"],
        ]
    return [
        ["FLOPs counted, 6N", f"{found.flops_counted:.4g}, {found.flops_6n:.4g}"],
        ["MFU counted, 6N", f"{share(found.mfu)}, {share(found.mfu_6n)} of {peak}"],
    ]


def print_fit(report: FitReport) -> None:
    rows = [
        [q.name, str(q.n), share(q.left_out_median), share(q.left_out_p90),
         str(q.n_holdout) if q.n_holdout else NONE, share(q.holdout_median), share(q.holdout_p90),
         share(q.holdout_coverage)]
        for q in report.classes
    ]  # fmt: skip
    columns = ("class", "fitted", "left-out median", "p90", "held out", "median", "p90", "in 90% interval")
    console().print(table("Errors of the fit, |forecast / measured - 1|", columns, rows))
    for status, count in report.unused.items():
        say(f"{count} rows of status {status} not used")
    for warning in report.warnings:
        say(f"warning: {warning}")


def short(gpu: str) -> str:
    """nvidia-a100-80gb-pcie -> a100-80gb-pcie: a column's worth."""
    return gpu.removeprefix("nvidia-")
