"""Compares real steps that a DataLoader fed with what `flopcast predict --input` forecasts of them.

    python -m studies.links.fed_table [ROWS] [--out reports/nvidia-h200/input]

ROWS is a folder of `studies.links.fed`, by default the one of --out, which gets README.md and input.csv. Needs no GPU.
Each step is forecast as shipped, and once more with its own time as measured: what is then off is the feeding's alone.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import FedStepRow, Row, select
from flopcast.roofline.cli.step.asked import AskedStep
from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.input_pipeline import IMAGES, TOKENS, WAYS, Fed, fed, feeding_of
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.model.run import Run
from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table

FOLDER = ROOT / "reports" / SOURCE / "input"
AHEAD = WAYS[3]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A step fed in one way: seconds as measured and as forecast. `load_seconds`: of one process for a sample.
    `on_measured`: as forecast where the step takes by itself what it did: that with what copies, waits and loading by
    the training process add, and not less than what runs beside it."""

    step: str
    batch: int
    bytes: int
    load_seconds: float
    workers: int
    way: str
    unfed_measured: float
    unfed_forecast: float
    measured: float
    forecast: float
    on_measured: float
    bound: str

    @property
    def error(self) -> float:
        return self.forecast / self.measured - 1

    @property
    def own_error(self) -> float:
        """Of the feeding by itself."""
        return self.on_measured / self.measured - 1

    @property
    def unfed_error(self) -> float:
        return self.unfed_forecast / self.unfed_measured - 1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("rows", type=Path, nargs="?", help="folder of rows (default: that of --out)")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    folder: Path = options.rows or options.out
    measured = records.read(folder).latest()
    found = list(compared(measured, find_profile(SOURCE)))
    options.out.mkdir(parents=True, exist_ok=True)
    write_csv(found, options.out / "input.csv")
    text = page(found, measured, folder)
    (options.out / "README.md").write_text(text, encoding="utf-8")
    print(text)


def priced(plan: StepPlan, profile: Profile) -> PricedStep:
    """The step as `flopcast predict` has it. Raises UsageError as that does."""
    run = Run(**plan.settings)
    module = Module(plan.module).resized(batch=plan.batch) if plan.module else None
    step = AskedStep(config=None if plan.module else plan.config, module=module, run=run)
    return PricedStep(*step.traced(run.device_of(profile.device), None, profile.device), profile)


def compared(rows: Iterable[Row], profile: Profile) -> Iterator[Compared]:
    """Each fed step that ran, beside its forecast."""
    steps: dict[str, PricedStep] = {}
    for row in select(rows, FedStepRow):
        measured = row["value"]
        if row["status"] != "ok" or measured is None:
            continue
        plan = StepPlan(**row["plan"])
        step = steps.setdefault(plan.key, steps.get(plan.key) or priced(plan, profile))
        feeding = feeding_of(IMAGES if plan.module else TOKENS, step, row["load_seconds"], row["workers"])
        report = fed(step, feeding)
        way = next(one for one in report.ways if one.way == row["way"])
        yield Compared(
            step=plan.name, batch=plan.batch, bytes=row["bytes"], load_seconds=row["load_seconds"],
            workers=row["workers"], way=way.way, unfed_measured=row["unfed_seconds"],
            unfed_forecast=report.unfed_seconds, measured=measured, forecast=way.step_seconds,
            on_measured=on_measured(way, row["unfed_seconds"] - report.unfed_seconds),
            bound=way.bound,
        )  # fmt: skip


def on_measured(way: Fed, longer: float) -> float:
    """The fed step's seconds if the step by itself took so much longer than forecast."""
    return max(way.serial_seconds + longer, way.beside_seconds)


# --- tables


def write_csv(found: Sequence[Compared], path: Path) -> None:
    """A row per case, seconds to six digits."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Compared.__dataclass_fields__, "error", "own_error"])
        for one in found:
            values = [*asdict(one).values(), one.error, one.own_error]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


def page(found: Sequence[Compared], measured: Sequence[Row], folder: Path) -> str:
    machine = records.read_machine(folder)
    device, host, torch_version = machine["device"], machine["host"], machine["stack"].get("torch")
    failed = [row for row in select(measured, FedStepRow) if row["status"] != "ok"]
    dates = sorted(row["time"][:10] for row in select(measured, FedStepRow))
    told = (
        f"{len(found)} steps on an {device.get('name')}, host {host.get('cpu')} of {host.get('cores')} cores, torch "
        f"{torch_version}, {dates[0] if dates else '-'}: training with a DataLoader and `.to(device)`, measured by "
        "`python -m studies.links.fed`, medians of rounds at whose ends alone the host waits. Forecasts are those of "
        "`flopcast predict --input` with what one process was measured to take for a sample and the number of workers. "
        "Errors are forecast / measured - 1; its own is that with the step's time without feeding as measured, so that "
        "only what feeding adds is forecast. Batches that lie ready are pinned beforehand; of loaded ones torch's "
        "DataLoader pins each."
    )
    lines = ["# Steps that are fed, beside their forecasts", "", "`python -m studies.links.fed_table`", "", told, ""]
    head = ["batches", "way", "steps", "error, median", "worst", "own, median", "worst"]
    lines += [table(head, summary(found)), ""]
    unfed = {(one.step, one.batch): one for one in reversed(found)}  # batches that lie ready come first
    if unfed:
        errors = sorted(abs(one.unfed_error) for one in unfed.values())
        at_worst = f"{median(errors):.1%} off at the median, {errors[-1]:.1%} at worst."
        lines += [f"Without feeding the {len(unfed)} steps are {at_worst}", ""]
    for title, some in groups(found):
        head = ["step", "MB", *(["ms a sample", "workers"] if title == LOADED else []), "way", "unfed, ms",
                "fed, ms", "forecast, ms", "error", "its own", "bound by"]  # fmt: skip
        lines += [f"## {title[0].upper()}{title[1:]}", "", table(head, [_cells(one, title) for one in some]), ""]
    if failed:
        lines += ["## Not measured", "", *(f"- {row['key']}: {row['status']}, {row['reason']}" for row in failed), ""]
    return "\n".join(lines)


READY, LOADED = "ready in host memory", "loaded"


def groups(found: Sequence[Compared]) -> list[tuple[str, list[Compared]]]:
    by_kind = [(READY, [one for one in found if not one.load_seconds]),
               (LOADED, [one for one in found if one.load_seconds])]  # fmt: skip
    return [(title, some) for title, some in by_kind if some]


def summary(found: Sequence[Compared]) -> list[list[str]]:
    """Absolute errors by way, of all of it and of the feeding by itself."""
    of: Sequence[Callable[[Compared], float]] = (lambda one: one.error, lambda one: one.own_error)
    rows = []
    for title, some in groups(found):
        for way in [*WAYS, "all"]:
            alike = [one for one in some if way in (one.way, "all")]
            sizes = [sorted(abs(error(one)) for one in alike) for error in of]
            shown = [f"{value:.1%}" for errors in sizes if errors for value in (median(errors), errors[-1])]
            rows += [[title, way, str(len(alike)), *shown]] if alike else []
    return rows


def _cells(one: Compared, title: str) -> list[str]:
    loading = [f"{1e3 * one.load_seconds:.2f}", str(one.workers)] if title == LOADED else []
    times = [f"{1e3 * seconds:.2f}" for seconds in (one.unfed_measured, one.measured, one.forecast)]
    errors = [f"{one.error:+.1%}", f"{one.own_error:+.1%}"]
    return [f"{one.step} x {one.batch}", f"{one.bytes / 1e6:.3g}", *loading, one.way, *times, *errors, one.bound]


if __name__ == "__main__":
    main()
