"""The committed compiled steps beside their forecasts: the table, by mode and by what bounds a step.

    python -m studies.compiled.validation                     writes README.md and MODE.csv
    python -m studies.compiled.validation --print             prints the tables instead
    python -m studies.compiled.validation --streams           makes the streams that are missing, as `predict` does

A GPU's folder, of FOLDERS, holds what `python -m studies.compiled.validate` measured: `compile` and `compile-graphs`,
or both in `steps`, the steps of each machine that ran some; `host`, the host of the first by itself. Compiling them
anew takes half an hour and torch 2.11, the version that measured; so their op streams, made without a GPU, lie in
`streams` of the H200's folder. An H100 of 132 multiprocessors has the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from flopcast.errors import UsageError
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.rows import KERNEL, StepKernelsRow, select
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import depth_of, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.validation.architectures import ARCHITECTURES
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders, plan_of, step_folders, stream_of
from flopcast.roofline.validation.step_comparison import Part, StepComparison, write_csv
from flopcast.roofline.validation.summary import Errors, errors_of
from studies.beside_evidence import first_errors, first_told
from studies.command import parser_of
from studies.compiled.record import CASES
from studies.compiled.validate import MODES
from studies.markdown import table

FOLDERS = {gpu: Path("reports", gpu, "compiled-validation") for gpu in ("nvidia-h200", "nvidia-h100-sxm")}
STREAMS = FOLDERS["nvidia-h200"] / "streams"
REFUSED = "refused.json"
GENERATED, TRITON = "inductor.", f"{KERNEL}triton_"
PARTS = ("device", "gemm", "attention", "generated", "optimizer", "step", "peak")
# Whose kernels laws were fitted to, on another card: judged apart.
SEEN = {(case.config, case.batch, case.seq) for case in CASES if case.config and case.layers is None}
# Three steps gave the least ratio of steps in a row to their phases (`gpu.fit.host.LEAST_STEADY_COMPILED`).
FITTED_HOST = {("w1024-d5", 4, 128), ("w1024-d5", 4, 256), ("w640-d6-h64", 4, 128)}

TOLD = {
    "nvidia-h200": """# Compiled steps on an H200 beside their forecasts

`python -m studies.compiled.validation`, from steps that `python -m studies.compiled.validate` ran (torch 2.11): on a
host of two H200s, one GPU and one process for each mode, side by side, and on other machines after it. Forecasts are
those of the shipped profile; of step times, "host in the run" takes the host's costs from tiny models that ran between
the steps, and "in a row" as few steps as were timed at once, of which the last is waited for: five of Llama-3.2-1B's at
4 x 128, whose optimizer runs 5 ms after the host has gone on, take 6% longer each than they would among many. Errors
are forecast over measured, less one. Steps with a star were recorded on another card before, and laws were fitted to
some of their kernels; those with a plus set the width of intervals (`python -m studies.compiled.intervals`). Neither
counts in a summary but its own.
""",
    "nvidia-h100-sxm": """# Compiled steps on four H100s (SXM) beside their forecasts

`python -m studies.compiled.validation`, from steps that `python -m studies.compiled.validate` ran on three H100s of
three machines (torch 2.11), in each as many of its list as 400 to 540 seconds gave, and from 16 architectures that
`flopcast validate --suite architectures --mode compile` ran on a fourth. The first machine's host was slow:
4.3 to 5.9 ms per layer of an eager Qwen3, where the shipped host takes 3.6; of the third no compiled tiny models were
measured. Generated kernels go by a law that was fitted on an H200 and is scaled by the datasheet; products and
attention by the H100's own profile. No law was fitted to these steps. GPT-2's are 11% off: of its products of 50,257
columns inductor padded others than on the H200, as its kernels' names tell; what it pads is a lottery of the host.
Of the architectures two mendings have seen Pythia's and Gemma-3's: that cuDNN takes heads of 256 columns, and how long
such attention takes, which another card then measured. That a byte takes more energy than on an H200 was fitted to
eager steps of another H100, after these had shown a lower clock than forecast; `first.csv` has their forecasts before.
Columns and signs are those of [the H200's page](../../nvidia-h200/compiled-validation/README.md).
""",
}
BY_MODE = "## By mode and by what bounds the step\n"


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--print", action="store_true", dest="printed")
    parser.add_argument("--streams", action="store_true")
    options = parser.parse_args()
    for gpu, folder in FOLDERS.items():
        found = compared(gpu, made_streams if options.streams else kept_stream)
        text = report(gpu, found)
        if options.printed:
            print(text)
            continue
        (folder / "README.md").write_text(text)
        for mode, rows in found.items():
            write_csv(rows, folder / f"{mode}.csv")


def compared(gpu: str, find: Callable[[StepPlan, Run, Profile], streams.Stream]) -> dict[str, list[StepComparison]]:
    """The steps of each mode with their forecasts."""
    profile = find_profile(gpu)
    folders = [StepsFolder(place, profile) for place in places(FOLDERS[gpu])]
    rows = [row for found in compare_folders(folders, find_stream=find) for row in found]
    return {mode: [row for row in rows if row.plan.mode == mode] for mode in MODES}


def places(folder: Path) -> list[Path]:
    """The folders of steps that there are: by mode, as they were measured first, and of both modes at once."""
    return [place for name in (*MODES, "steps") if (place := folder / name).is_dir()]


def kept_stream(plan: StepPlan, run: Run, profile: Profile) -> streams.Stream:
    """The stream that lies beside the measurements. Raises UsageError for a step that could not be forecast when they
    were made, with the reason."""
    path = path_of(plan)
    if not path.is_file():
        raise UsageError(
            _refused().get(path.name, f"{path} is missing: python -m studies.compiled.validation --streams")
        )
    return _to_own_depth(streams.load(path), plan)


def made_streams(plan: StepPlan, run: Run, profile: Profile) -> streams.Stream:
    deep = plan
    if plan.config and plan.group != ARCHITECTURES and depth_of(plan.config) < FOLDED_DEPTH:
        deep = replace(plan, config=with_depth(plan.config, FOLDED_DEPTH))  # of which any depth is made
    path = path_of(plan)
    if path.is_file() or path.name in _refused():
        return kept_stream(plan, run, profile)
    try:
        made = stream_of(deep, run, profile)
    except UsageError as fault:
        (path.parent / REFUSED).write_text(json.dumps({**_refused(), path.name: str(fault)}, indent=1) + "\n")
        raise
    streams.save(made, path)
    return _to_own_depth(made, plan)


def _refused() -> dict[str, str]:
    """Why steps could not be forecast, by the name of the stream's file."""
    path = STREAMS / REFUSED
    found: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _to_own_depth(stream: streams.Stream, plan: StepPlan) -> streams.Stream:
    return to_depth(stream, depth_of(plan.config)) if plan.config and stream.depth is not None else stream


def path_of(plan: StepPlan) -> Path:
    return STREAMS / f"{plan.name}-{plan.batch}x{plan.seq}-{plan.mode}.json.gz"


def launched(gpu: str, mode: str) -> dict[str, tuple[int, int]]:
    """How many kernels that inductor generated each profiled step launches: by its stream, and as the profiler saw."""
    profile, found = find_profile(gpu), {}
    runs = [run for place in places(FOLDERS[gpu]) for run in step_folders(place)]
    rows = [(run.name, row) for run in runs for row in select(records.read(run).rows, StepKernelsRow)]
    for run, row in rows:
        plan = plan_of(row)
        if plan.mode != mode or not path_of(plan).is_file():
            continue
        stream = kept_stream(plan, Run(**plan.settings), profile)
        times = zip(stream.ops, times_run(stream), strict=True)
        told = sum(count for op, count in times if op.name.startswith(GENERATED))
        seen = sum(int(count) for name, (_, count) in (row["ops"] or {}).items() if name.startswith(TRITON))
        name = f"{plan.name} {plan.batch}x{plan.seq} {mode}"
        found[f"{name} ({run})" if name in found else name] = told, seen
    return found


def is_seen(row: StepComparison) -> bool:
    return (row.plan.name, row.plan.batch, row.plan.seq) in SEEN


def is_judged(row: StepComparison) -> bool:
    """Whether nothing of the forecast was made from the step, neither its laws nor its interval."""
    return not is_seen(row) and not row.used_in_intervals


def breaks(row: StepComparison) -> bool:
    """Whether the step's layers break, as those of mixtures of experts do: what entering their many graphs costs the
    host is known from one process (`studies.calls.breaks`), so that they are told apart."""
    return bool(row.plan.config.get("num_experts"))


def report(gpu: str, found: dict[str, list[StepComparison]]) -> str:
    rows = [row for one in found.values() for row in one]
    done = [row for row in rows if row.step.error is not None]
    head = ["steps", "quantity", "number", "median", "worst", "median, signed"]
    lines = [TOLD[gpu], BY_MODE, table(head, list(_summary(found))), "", _coverage(done), "", _launches(gpu), ""]
    lines += [line for told in first_told(first_errors(FOLDERS[gpu] / "first.csv")) for line in (told, "")]
    lines += [*_left_out(rows), "## Step by step", ""]
    for mode, some in found.items():
        head = ["step", "bound", "device, ms", *PARTS[:5], "step, ms", "shipped host", "host in the run",
                "in a row", "in", "peak, GB", "error", "kernels"]  # fmt: skip
        lines += [f"### {mode}", "", table(head, [_row(row) for row in some if row.step.error is not None]), ""]
    return "\n".join(lines)


def _summary(found: dict[str, list[StepComparison]]) -> Sequence[list[str]]:
    lines = []
    for mode, rows in found.items():
        own = [row for row in rows if is_judged(row) and not breaks(row)]
        by_bound = {
            "device-bound": [row for row in own if not row.is_host_bound],
            "host-bound": [row for row in own if row.is_host_bound],
        }
        lines += [_errors(mode, name, [row.parts[name] for row in own]) for name in PARTS if name != "step"]
        for bound, some in by_bound.items():
            lines.append(_errors(f"{mode}, {bound}", "step, shipped host", [row.profile_host_step for row in some]))
            lines.append(_errors(f"{mode}, {bound}", "step, host in the run", [row.step for row in some]))
            lines.append(_errors(f"{mode}, {bound}", "the same, as timed in a row", [row.in_a_row for row in some]))
        held = [
            row for row in by_bound["host-bound"] if (row.plan.name, row.plan.batch, row.plan.seq) not in FITTED_HOST
        ]
        if len(held) < len(by_bound["host-bound"]) and mode == "compile":
            lines.append(_errors(f"{mode}, host-bound, without {len(FITTED_HOST)} that gave a constant of the host",
                                 "the same, as timed in a row", [row.in_a_row for row in held]))  # fmt: skip
    seen = [row for rows in found.values() for row in rows if is_seen(row)]
    lines += [
        _errors("recorded on another card before", name, [row.parts[name] for row in seen])
        for name in ("device", "peak")
    ]
    broken = [row for rows in found.values() for row in rows if breaks(row)]
    for bound in ("device", "host"):
        if some := [row for row in broken if row.is_host_bound == (bound == "host")]:
            name = f"experts, whose layers break, {bound}-bound"
            lines += [
                _errors(name, "device", [row.device for row in some]),
                _errors(name, "step, shipped host", [row.profile_host_step for row in some]),
                _errors(name, "step, host in the run", [row.step for row in some]),
                _errors(name, "peak", [row.peak for row in some]),
            ]
    return lines


def _errors(steps: str, name: str, parts: Sequence[Part]) -> list[str]:
    found: Errors = errors_of(parts)
    told = ["-"] * 3 if found.n == 0 else [f"{value:.1%}" for value in (found.median, found.worst)]
    return [steps, name, str(found.n), *(told if found.n == 0 else [*told, f"{found.signed:+.1%}"])]


def _coverage(done: Sequence[StepComparison]) -> str:
    own = [row for row in done if is_judged(row)]
    words = []
    for name, parts in (
        ("device times", [row.device for row in own]),
        ("step times with the shipped host", [row.profile_host_step for row in own]),
        ("step times with the host in the run", [row.step for row in own]),
    ):
        inside = [part for part in parts if part.is_within is not None]
        width = median(part.interval_width or 0.0 for part in inside)
        words.append(
            f"{sum(bool(part.is_within) for part in inside)} of {len(inside)} {name} (median width {width:.0%})"
        )
    return "Inside their intervals of 90%: " + ", ".join(words) + "."


def _launches(gpu: str) -> str:
    found = {name: pair for mode in MODES for name, pair in launched(gpu, mode).items()}
    others = [f"{name} {told} for {seen}" for name, (told, seen) in found.items() if told != seen]
    words = f"Generated kernels: as many are launched as forecast in {len(found) - len(others)} of {len(found)} steps"
    return f"{words}{': not in ' * bool(others)}{', '.join(others)}."


def _left_out(rows: Sequence[StepComparison]) -> list[str]:
    reasons = {row.label: row.reason for row in rows if row.step.error is None}
    return [*(f"- {label}: not forecast. {reason}" for label, reason in reasons.items()), *([""] if reasons else [])]


def _row(row: StepComparison) -> list[str]:
    def error(part: Part) -> str:
        return "-" if part.error is None else f"{part.error:+.1%}"

    device = "-" if row.device.measured is None else f"{row.device.measured * 1e3:.2f}"
    peak = "-" if row.peak.measured is None else f"{row.peak.measured / 1e9:.2f}"
    step = f"{(row.step.measured or 0.0) * 1e3:.2f}"
    within = "-" if row.step.is_within is None else "yes" if row.profile_host_step.is_within else "no"
    kernels = "-" if row.kernels.measured is None else f"{row.kernels.forecast:.0f} of {row.kernels.measured:.0f}"
    name = replace(row, plan=replace(row.plan, mode="eager")).label
    name += " *" if is_seen(row) else " +" if row.used_in_intervals else ""
    return [name, row.bound or "-", device, *(error(row.parts[part]) for part in PARTS[:5]), step,
            error(row.profile_host_step), error(row.step), error(row.in_a_row), within, peak, error(row.peak),
            kernels]  # fmt: skip


if __name__ == "__main__":
    main()
