"""Holds real steps of fine-tuning, inference, image models and bitsandbytes against forecasts, and writes the tables.

    python -m studies.beside_evidence [SUITE ...]     validation.csv and README.md in reports/GPU/SUITE

Needs peft for steps with adapters. What a mending has seen is marked: those steps judge nothing. Where a folder has
first.csv, the forecasts of the version that had seen none of its steps, the page shows its errors too.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from statistics import median

from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.validation.compare_steps import StepsFolder, compare_folders
from flopcast.roofline.validation.step_comparison import StepComparison, write_csv
from studies.command import parser_of
from studies.compiled.another_torch import plans_of, stream_of_its_torch
from studies.imports import ROOT
from studies.markdown import table

GPUS = {SOURCE: "an NVIDIA H200", "nvidia-h100-sxm": "an NVIDIA H100 SXM"}
REPORTS = {gpu: ROOT / "reports" / gpu for gpu in GPUS}
SUITES = {
    "fine-tune": "Fine-tuning and optimizers",
    "inference": "Calls of inference, in bf16",
    "quantised": "Calls of inference on weights of 8 and 4 bits",
    "images": "Image models",
    "bitsandbytes": "QLoRA and AdamW in 8 bits, by bitsandbytes",
    "precisions": "Steps in fp32, tf32, fp16 and bf16",
    "adamw-triton": "AdamW with clipping inside",
    "architectures": "Architectures that no kernel was measured for",
    "random": "Steps that a seed drew",
    "checkpoints": "Steps that checkpoint selectively",
    "attention-steps": "Attention in fp32, and of values narrower than queries,",
}
RAN = {"attention-steps": "--config CONFIG"}  # of no suite

# What tells the steps of a first.csv apart, with what they took: two runs had some of the same.
NAMED = ("name", "batch", "seq", "context", "precision", "optimizer", "mode")
FIRST = {"device": "device", "step": "step", "peak": "memory"}  # what is kept of first forecasts, and its name
MOST_NAMED = 30  # steps

# Steps that a seed drew: of those that are compiled there are the streams of the torch that ran them. The runs by which
# the widths of compiled steps' intervals are set, of seeds 7 to 11, profiled after a rest.
DRAWN = "random", SOURCE
SETS_INTERVALS = tuple(f"run{number}" for number in range(10, 20))

TIMED_ONCE = (
    " Timed once: in one round, where others have five, whose median counts; a decode's first round takes longer."
)


OF_ITS_TORCH = (
    " Compiled steps are forecast from the code that the torch which ran them, 2.11, generates where no GPU is; "
    "[what that of a later one is worth](another-torch.md). \u2021: sets the width of intervals of compiled steps, "
    "and is not counted in the last column."
)
_SEEN_COMPILED = (
    ("llama-3.2-1b-d12", 3), ("qwen3-4b-d11", 9), ("qwen3-d13", 50), ("qwen3-d10", 2), ("llama-3.2-1b", 4),
    ("gpt2", 3), ("qwen3-1.7b", 1), ("qwen3-1.7b", 55), ("qwen3-1.7b-d22", 2), ("qwen3-4b", 5), ("vit_b16@192", 32),
    ("convnext_tiny@192", 24), ("qwen3-4b-d2", 4), ("qwen3-moe-d6", 3),
    # checkpointed ones of the first two seeds that were compiled
    ("llama-3.2-1b-d6", 5), ("qwen3-d7", 2), ("qwen3-8b-d3", 6), ("qwen3-d3", 4), ("llama-3.2-1b-d11", 38),
)  # fmt: skip


def is_seen(row: StepComparison) -> bool:
    """Whether a mending has seen the step. Of captured decodes: how copies of a repeated cache are counted was found in
    Qwen3-0.6B's, and products by 1,024 columns in Qwen3-4B's of one sequence. Of images: layer norms and a traced fault
    were found in ConvNeXt's steps, batch norms and depthwise convolutions in two others. The host of a call without
    gradients is of four decodes, and that another kernel puts a large cache together was found in a fifth; that Muon
    copies what it adds to, and that its and Adafactor's Python is a call a tensor, was found in their steps; in those
    of QLoRA that residuals behind a frozen embedding were never released; two prefills in int4 showed that products of
    so many rows had to be measured, and that hot ones of few rows must not speak for them. That layers
    differ beyond those that are traced was found in Qwen3-Next's step, that attention of fewer heads of keys takes no
    fused kernel in Falcon's, that a copy from host memory is waited for in BLOOM's, that dividing by one of the
    device's numbers is not dividing by one of Python's in Gemma-2's, that values may be narrower than queries in
    DeepSeek-V3's. Of steps that a seed drew: that experts in fp32 are launched in a loop that waits was found in
    Qwen3-MoE's, that compiled checkpointing runs attention inside another operator in two others, that attention in
    fp32 is another kernel in a step in tf32, and that a mask does not slow that one in a compiled one; what a layer
    keeps for the backward in two compiled steps with adapters and one of a Qwen3, that gradients are copied in every
    layer in one in bf16; that what a killed run's compiled tiny models had told was lost in all that the host bounds of
    that run, that a mask slows attention over a static cache in one prefill, what no compiled ConvNeXt had told in
    one, in one that tied embeddings which two graphs take are one storage, and in one that was refused that experts in
    layers that checkpoint run outside of the graphs. That selective checkpointing costs the host a call for each that
    it sees was found in eager steps of a first run."""
    plan = row.plan
    if plan.group == "random":
        in_fp32 = plan.precision == "tf32" and (plan.batch, plan.seq) in ((11, 896), (12, 640))
        drawn_twice = (plan.name, plan.seq) == ("qwen3-d12", 3648)
        compiled = plan.mode == "compile" and ((plan.name, plan.batch) in _SEEN_COMPILED or drawn_twice)
        experts = "moe" in plan.name and plan.batch == 6
        return experts or in_fp32 or compiled
    if plan.group == "inference":
        seen = ("llama-3.2-1b", 32, "eager"), ("qwen3-4b", 1, "eager"), ("qwen3-4b", 1, "compile-graphs")
        return plan.phase == "decode" and (plan.name == "qwen3-0.6b" or (plan.name, plan.batch, plan.mode) in seen)
    if plan.group == "quantised":
        first = ("llama-3.2-1b", 8), ("qwen3-4b", 1)
        return (plan.phase, plan.base_dtype) == ("prefill", "int4") and (plan.name, plan.batch) in first
    if plan.group == "checkpoints":  # the first run, which ended before kernels were profiled
        return plan.mode == "eager" and row.device.measured is None
    if plan.group == "architectures":
        return plan.name in ("qwen3-next-d4", "falcon-7b-d3", "bloom-560m-d8", "gemma-2-2b-d4", "deepseek-v3-d3")
    if plan.group == "images":
        return plan.name.startswith("convnext_tiny") or plan.name in ("efficientnet_b0@nhwc", "resnet18@288@nhwc")
    is_of_optimizer = plan.optimizer in ("muon", "adafactor-foreach") and plan.name == "qwen3-0.6b"
    return is_of_optimizer or (plan.finetune == "qlora" and plan.checkpoint == "none")


def was_timed_once(row: StepComparison) -> bool:
    """Whether the step has one round alone: of eleven decodes timed in five the first took 1.4 to 3.9 times the median,
    and no forecast says what a first call costs."""
    return row.rounds == 1


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("suite", nargs="*", help=f"default: all, {', '.join(SUITES)}")
    options = parser.parse_args()
    if find_spec("peft") is None:
        parser.error("peft is not installed, without which steps with adapters have no forecast: `pip install peft`")
    for suite, (gpu, report) in product(options.suite or SUITES, REPORTS.items()):
        folder = report / suite
        if not folder.is_dir():
            continue
        find_stream = stream_of_its_torch if (suite, gpu) == DRAWN else None
        (found,) = compare_folders([StepsFolder(folder, find_profile(gpu))], find_stream=find_stream)
        rows = [row for row in found if row.status == "ok"]
        if (suite, gpu) == DRAWN:
            widths = [plan for run in SETS_INTERVALS for plan in plans_of(folder / run)]
            rows = [replace(row, used_in_intervals=row.plan in widths) for row in rows]
        write_csv(rows, folder / "validation.csv")
        first = folder / "first.csv"
        (folder / "README.md").write_text(readme(suite, gpu, rows, first_errors(first)), encoding="utf-8")
        print(folder.relative_to(ROOT), f"{len(rows)} steps")


def first_errors(path: Path) -> Mapping[tuple[str, ...], Mapping[str, float]]:
    """Of the steps of a first.csv, by what tells them apart (`NAMED`): the errors of the device, the step and the
    memory; none without a file."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8") as file:
        return {
            (*(row[name] for name in NAMED), row["step_seconds"]): {
                part: float(row[f"{part}_error"]) for part in FIRST if row[f"{part}_error"]
            }
            for row in csv.DictReader(file)
        }


def readme(
    suite: str, gpu: str, rows: Sequence[StepComparison], first: Mapping[tuple[str, ...], Mapping[str, float]]
) -> str:
    """The page of a suite: what was run, errors by bound, and every step."""
    parts = [
        f"# {SUITES[suite]} on {GPUS[gpu]}",
        "Real steps beside their forecasts, forecast / measured - 1, with the host calibrated in the same run "
        f"(`flopcast validate {RAN.get(suite, f'--suite {suite}')}`). \u2020: a mending has seen this step; it judges "
        "nothing. Made by `python -m studies.beside_evidence`."
        + (TIMED_ONCE if any(map(was_timed_once, rows)) else "") + (OF_ITS_TORCH if (suite, gpu) == DRAWN else ""),
        table(["steps that no mending has seen", "count", "device", "step", "memory", "inside 90%"], summary(rows)),
        *first_told(first),
        table(["step", "rounds", "ms", "error", "shipped host", "device, ms", "device", "host", "memory", "bound by",
               *(f"first: {name}" for name in FIRST.values() if first)], [
            [
                row.label + ("\u2020" if is_seen(row) else "") + ("\u2021" if row.used_in_intervals else ""),
                f"{row.rounds}",
                _ms(row.step.measured), _error(row.step.error),
                _error(row.profile_host_step.error), _ms(row.device.measured), _error(row.device.error),
                _error(row.host.error), _error(row.peak.error), row.bound or "",
                *(_error(first.get(_named(row), {}).get(part)) for part in FIRST if first),
            ]
            for row in rows
        ]),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _named(row: StepComparison) -> tuple[str, ...]:
    took = row.step.measured
    return (*(str(getattr(row.plan, name)) for name in NAMED), "" if took is None else f"{took:.7g}")


def first_told(first: Mapping[tuple[str, ...], Mapping[str, float]]) -> list[str]:
    """What all steps were off by when none had been seen: a sentence, where that is known."""
    if not first:
        return []
    words = ", ".join(
        f"{name} {_spread([errors.get(part) for errors in first.values()])}" for part, name in FIRST.items()
    )
    steps = ", ".join(dict.fromkeys(name for name, *_ in first))
    named = f" They are {steps}." if steps.count(",") < MOST_NAMED else ""  # else the table's last columns tell them
    return [f"Before any of these was seen (median / worst, of how many): {words}.{named}"]


def summary(rows: Sequence[StepComparison]) -> list[list[str]]:
    """Errors, at the median and at worst, of the steps that no mending has seen, by what bounds them."""
    unseen = [row for row in rows if not is_seen(row)]
    kinds: dict[str, Callable[[StepComparison], bool]] = {
        "bound by the device": lambda row: not row.is_host_bound,
        "bound by the host": lambda row: row.is_host_bound and not was_timed_once(row),
        "bound by the host, timed once": lambda row: row.is_host_bound and was_timed_once(row),
    }
    found = []
    for name, belongs in kinds.items():
        own = [row for row in unseen if belongs(row)]
        if own:
            inside = [row.step.is_within for row in own if row.step.is_within is not None and not row.used_in_intervals]
            parts = (
                [row.device.error for row in own],
                [row.step.error for row in own],
                [row.peak.error for row in own],
            )
            found.append([name, f"{len(own)}", *map(_spread, parts), f"{sum(inside)} of {len(inside)}"])
    return found


def _spread(errors: Sequence[float | None]) -> str:
    known = [abs(error) for error in errors if error is not None]
    return f"{median(known):.1%} / {max(known):.1%} ({len(known)})" if known else ""


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:+.1%}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


if __name__ == "__main__":
    main()
