"""Prints the output of `flopcast predict`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.markup import escape

from flopcast.microbench.recipe.settings import ADAPTERS
from flopcast.roofline.base.units import (
    NONE,
    byte_size,
    gigabytes,
    ms,
    parameters,
    rate,
    share,
    short_name,
    three_digits,
    utilisation,
)
from flopcast.roofline.views.terminal.console import console, print_table, warn

if TYPE_CHECKING:
    from flopcast.roofline.step.forecast import Forecast, Forecasts
    from flopcast.roofline.step.questions.input_pipeline import InputReport
    from flopcast.roofline.stream.model.run import Run


ONLY_A_RANGE = 3.0  # where an interval's ends lie so far apart, no time between them is named


def batch_words(batch: int, seq: int, unit: str = "tokens") -> str:
    """Describes the batch: 4 x 256 tokens, 64 samples, or a step of one's own."""
    if unit == "tokens":
        return f"{batch} x {seq} tokens"
    return f"{batch} sample{'s' if batch > 1 else ''}" if unit == "samples" else "a step of its own"


# Settings that are said of every run, or with others.
_SAID = ("batch", "seq", "context", "accumulate", "precision", "optimizer", "mode", "phase", "lora_rank", "nodes")


def run_words(run: Run, unit: str = "tokens") -> str:
    """Describes the run: 4 x 256 tokens, autocast-bf16, adamw, eager, and other settings that are not the default."""
    more = [f"{run.accumulate} micro-batches per step"] if run.accumulate > 1 else []
    words = {
        "checkpoint": f"checkpoint {run.checkpoint}", "matmul": f"matmul by {run.matmul}",
        "attention": f"attention by {run.attention}", "fused": f"fused by {run.fused}",
        "clip": f"clipped to {run.clip}",
        "finetune": f"training {run.finetune}" + f", rank {run.lora_rank}" * (run.finetune in ADAPTERS),
        "lora_targets": f"adapters on {run.lora_targets}", "base_dtype": f"weights in {run.base_dtype}",
        "cache": f"cache {run.cache}", "imbalance": f"fullest expert {run.imbalance:g} x the mean",
        "parallel": f"over {run.parallel}" + f", on hosts: {run.hosts}" * (run.hosts > 1),
        "link": f"linked by {run.link}",
    }  # fmt: skip
    unusual = {name: f"{name} {value}" for name, value in run.unusual.items() if name not in _SAID}
    told = [words.get(name, unusual[name]) for name in {**words, **unusual} if name in unusual]
    if run.phase != "train":
        each = f"{run.context} tokens" if run.phase == "prefill" else f"a token after {run.context}"
        return ", ".join([f"{run.phase} of {run.batch} x {each}", run.precision, run.mode, *told])
    # a step function's precision is the dtype of its products
    precision = f"products in {run.precision}" if unit == "steps" and run.precision else run.precision
    how = [precision, run.optimizer, run.mode, *told]
    return ", ".join([batch_words(run.batch, run.seq, unit), *more, *filter(None, how)])


def parameters_words(found: Forecast) -> str:
    """Counts the parameters, and where they are fewer those that are trained and those that a token passes."""
    some = {"active": found.n_params_active, "trained": found.n_params_trained}
    fewer = [f"{parameters(count)} {name}" for name, count in some.items() if count < found.n_params]
    words = f" ({', '.join(fewer)})" if fewer else ""
    return f"{parameters(found.n_params)} parameters{words}"


def step_words(found: Forecast, run: Run) -> str:
    """Names the step and its GPU, as the title of its tables."""
    depth = f"{found.depth} layers, " if found.depth else ""
    return f"{found.gpu} ({found.profile_basis}): {parameters_words(found)}, {depth}{run_words(run, found.unit)}"


def host_words(found: Forecast) -> str:
    """Names the host, and of how many machines it is the mean."""
    return found.host + (f", the mean of {found.host_machines} machines" if found.host_machines > 1 else "")


def print_forecast(found: Forecast, run: Run, largest_batch: int | None = None) -> None:
    """Prints the step and its device time by class on stdout, the forecast's warnings on stderr. The first line is the
    forecast's advice, where it has one."""
    from flopcast.roofline.step.memory.needed import CONTEXT_BYTES, nccl_bytes

    outside = nccl_bytes(run.layout)
    if found.advice:
        console().print("\n".join(textwrap.wrap(escape(found.advice), 118)))
    step = f"{ms(found.step_seconds)} ms  ({ms(found.step_seconds_low)} to {ms(found.step_seconds_high)})"
    if found.step_seconds_high > ONLY_A_RANGE * found.step_seconds_low:
        step = f"between {ms(found.step_seconds_low)} and {ms(found.step_seconds_high)} ms: see the warnings"
    rows = [
        ["step, 90% interval", step],
        ["bound by", found.bound],
        ["device (sum of kernels)", f"{ms(found.device_seconds)} ms, {found.kernels:,} kernels"],
        ["device time by basis", ", ".join(f"{share(s)} {basis}" for basis, s in found.basis_shares.items() if s)],
        *_communication_rows(found),
        ["host (to enqueue one step)", f"{ms(found.host_seconds)} ms on {host_words(found)}"],
        [f"{found.unit} per second", three_digits(found.tokens_per_second)],
        *_inference_rows(found),
        *_flops_rows(found, run),
        ["peak memory, allocated", gigabytes(found.peak_bytes) + _memory_words(found)],
        ["peak memory, reserved", f"{gigabytes(found.reserved_bytes)} where the GPU has it"],
        [
            "memory needed",
            f"{gigabytes(found.needed_bytes)} at least, with {gigabytes(CONTEXT_BYTES + outside)} of context"
            f"{' and NCCL' * bool(outside)}: {'fits' if found.fits else 'DOES NOT FIT'}",
        ],
    ]
    if largest_batch is not None:
        words = batch_words(largest_batch, run.seq, found.unit) if largest_batch else f"{NONE} (not even one fits)"
        if largest_batch and run.phase != "train":
            words = f"{largest_batch:,} sequences"
        rows.append(["largest micro-batch that fits", words])
    rows += _cost_rows(found, run)
    print_table(step_words(found, run), ("", ""), rows)
    total = found.device_seconds or 1.0
    classes = [
        [s.op_class, ms(s.seconds), share(s.seconds / total), f"{s.calls:,}", byte_size(s.bytes), f"{s.flops:.3g}"]
        for s in sorted(found.breakdown, key=lambda s: -s.seconds)
    ]
    print_table("Device time by class", ("class", "ms", "share", "calls", "bytes moved", "FLOPs"), classes)
    warn(found.warnings)


def print_input(found: InputReport) -> None:
    """Prints a row per way to feed the step, and what the best of them saves."""
    feeding = found.feeding
    rows = [
        [
            way.way,
            ms(way.copy_seconds),
            ms(way.step_seconds),
            share(way.step_seconds / found.unfed_seconds - 1),
            way.bound,
        ]
        for way in found.ways
    ]
    loaded = (
        f", loaded in {ms(feeding.load_seconds)} ms by each of {feeding.workers} workers" if feeding.workers else ""
    )
    if feeding.load_seconds and not feeding.workers:
        loaded = f", loaded by the training process in {ms(feeding.load_seconds)} ms"
    title = f"Fed {byte_size(feeding.bytes)} a step{loaded}; {ms(found.unfed_seconds)} ms with the batch in place"
    print_table(title, ("memory and copy", "copy, ms", "step, ms", "longer by", "bound by"), rows)
    warn(found.notes)


def print_forecasts(found: Forecasts, run: Run, largest: Mapping[str, int] | None = None) -> None:
    """Prints one step on several GPUs, a row each, on stdout, their prices below and warnings on stderr. `largest`: the
    largest micro-batch that fits, by GPU."""
    columns, rows = list(found.columns), found.rows()
    if largest is not None:
        columns.append("largest batch")
        rows = [[*row, f"{largest[one.gpu]:,}"] for row, one in zip(rows, found, strict=True)]
    print_table(f"{step_words(found[0], run).partition(': ')[2]} (90% intervals)", columns, rows, ruled=False)
    for price in found.prices:
        console().print(price)
    warn(dict.fromkeys(f"{short_name(one.gpu)}: {warning}" for one in found for warning in one.warnings))


def _cost_rows(found: Forecast, run: Run) -> list[list[str]]:
    """Rows of price and cost; no dollars without a price, nor for a step that cannot run."""
    if found.price is None:
        return [] if found.gpu == "cpu" else [["price", f"{NONE} (give --price {found.gpu}=USD_PER_HOUR)"]]
    price = ["price", found.price.label + (f", of {found.num_gpus} GPUs each" if found.num_gpus > 1 else "")]
    usd, flops = found.usd_per_step, found.flops_per_usd
    if usd is None or flops is None:
        return [price, ["cost", f"{NONE} (does not fit)"]]
    per_million = three_digits(usd / run.tokens * 1e6)
    return [
        price,
        ["cost", f"${three_digits(usd)} per step, ${per_million} per million {found.unit}"],
        ["FLOPs per dollar", f"{flops:.3g}"],
    ]


def _memory_words(found: Forecast) -> str:
    parts = ", ".join(f"{gigabytes(size)} {name}" for name, size in found.memory.items() if size)
    return f": {parts}" if parts else ""


def _communication_rows(found: Forecast) -> list[list[str]]:
    if found.num_gpus == 1:
        return []
    exposed = ms(found.exposed_communication_seconds)
    words = f"{ms(found.communication_seconds)} ms over {found.link}, {exposed} ms of it exposed"
    rows = [["communication", f"{words}; kernels beside it take {ms(found.contention_seconds)} ms longer"]]
    if found.bubble_seconds:
        rows.append(["bubble", f"{ms(found.bubble_seconds)} ms in which the last stage waits for others"])
    return rows


def _inference_rows(found: Forecast) -> list[list[str]]:
    """What the time of a call of inference is called, and where a decode turns."""
    if found.phase == "prefill":
        return [["time to first token", f"{ms(found.step_seconds)} ms, without a queue and sampling"]]
    if found.phase == "train":
        return []
    turns = "none: each sequence's cache takes longer to read than its FLOPs"
    if found.turning_batch is not None:
        turns = f"from {found.turning_batch:,.0f} on"
    return [
        ["time per token", f"{ms(found.step_seconds)} ms, without sampling"],
        ["matrix-bound batch, by roofline", turns],
    ]


def _flops_rows(found: Forecast, run: Run) -> list[list[str]]:
    """Rows of FLOPs and MFU; 6N is given for tokens only, since an image costs more than 6 FLOPs per parameter."""
    peak = rate(found.peak_flops_per_second, "FLOP/s", 1)
    again, rule = [], "6N" if found.phase == "train" else "2N"
    if found.flops_hardware > found.flops_counted:
        what = "recomputation" if run.checkpoint != "none" or run.optimizer != "muon" else "the optimizer's"
        again = [[f"with {what} (HFU)", f"{found.flops_hardware:.4g}, {utilisation(found.hfu)} of {peak}"]]
    if found.unit != "tokens":
        rows = [["FLOPs counted", f"{found.flops_counted:.4g}"], ["MFU counted", f"{utilisation(found.mfu)} of {peak}"]]
    else:
        rows = [
            [f"FLOPs counted, {rule}", f"{found.flops_counted:.4g}, {found.flops_6n:.4g}"],
            [f"MFU counted, {rule}", f"{utilisation(found.mfu)}, {utilisation(found.mfu_6n)} of {peak}"],
        ]
    return rows + again
