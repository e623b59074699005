"""Makes the page's section on several GPUs, where their link was measured: how a step scales, where its time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.roofline.base.units import gb_in_column, ms_in_column, share, three_in_column
from flopcast.roofline.views.figures.several_gpus import lanes_figure, scaling_figure
from flopcast.roofline.views.page.data import Section, section
from flopcast.roofline.views.page.table import Column, Table, text

if TYPE_CHECKING:
    from flopcast.roofline.dollars.scaling import Scaled, Scaling
    from flopcast.roofline.gpu.profile.profile import Profile
    from flopcast.roofline.step.questions.lanes import Lanes

MODEL, MOST, EACH, SEQ = "qwen3-0.6b", 8, 4, 1024  # GPUs at most, sequences per GPU of the most, and their tokens
LAYOUTS = ("ddp", "zero2", "fsdp", "tp")  # on as many GPUs as the link was measured among


def several_section(profile: Profile, *, may_trace: bool) -> Section | None:
    """The section; None where no link of this GPU was measured, or no step may be traced."""
    from flopcast.roofline.dollars.layouts import Workload
    from flopcast.roofline.dollars.scaling import STRONG, WEAK, scaling
    from flopcast.roofline.gpu.links.library import find_interconnect
    from flopcast.roofline.stream.model.models import load_config
    from flopcast.roofline.stream.model.run import Run

    try:
        link = find_interconnect(profile.gpu).profile
    except UsageError:
        return None
    if link is None or not may_trace:
        return None
    run = Run(batch=EACH, seq=SEQ, optimizer="adamw-fused")
    work = Workload(model=load_config(MODEL), run=run, sequences=EACH * MOST, profile=profile)
    found = [scaling(work, kind, MOST) for kind in (STRONG, WEAK)]
    measured = max(link.measured_gpus())
    lanes = _lanes(profile, run, measured)
    step = f"{MODEL}, {EACH} x {SEQ:,} tokens per data-parallel GPU, bf16 autocast, fused AdamW"
    command = f"flopcast scale --gpu {profile.gpu} --config {MODEL} --seq {SEQ} --optimizer adamw-fused"
    return section(
        "several", "Several GPUs",
        [scaling_figure([("", found)]), lanes_figure(lanes, profile.gpu, profile.basis, step)],
        [_scaling_table(found, measured), _lanes_table(lanes, step)],
        advice=("How many GPUs are worth it", _advice(found[0])),
        commands={
            "scale": f"{command} --num-gpus {MOST} --batch {EACH * MOST} --out OUT",
            "lanes": f"flopcast explain --gpu {profile.gpu} --config {MODEL} --batch {EACH} --seq {SEQ} "
            f"--optimizer adamw-fused --parallel fsdp={measured}",
        },
    )  # fmt: skip


def _lanes(profile: Profile, run: Any, gpus: int) -> list[Lanes]:
    from dataclasses import replace

    from flopcast.roofline.step.priced_step import PricedStep, traced_of
    from flopcast.roofline.step.questions.lanes import lanes_of
    from flopcast.roofline.stream.library.streams import get_stream
    from flopcast.roofline.stream.model.models import load_config

    found = []
    for kind in LAYOUTS:
        laid_out = replace(run, parallel=f"{kind}={gpus}")
        stream = get_stream(load_config(MODEL), traced_of(laid_out, profile))
        found.append(lanes_of(PricedStep(stream, laid_out, profile)))
    return found


def _advice(strong: Scaling) -> str:
    """One sentence on how many GPUs a step of the section's sequences is worth."""
    last = strong.points[-1]
    if last.forecast is None:
        return ""
    many = f"{MODEL} with {last.sequences} x {SEQ:,} tokens per step in all"
    turns = strong.turns
    if turns is None:
        return (
            f"{many}: every doubling up to {last.num_gpus} pays; there each GPU does {last.efficiency or 0:.0%} of "
            "what one does alone."
        )
    return f"{many}: more than {strong.last} stop paying, since as many again do {turns.gain:.0%} of what these do."


def _scaling_table(found: Sequence[Scaling], measured: int) -> Table:
    rows = [(one.kind, point) for one in found for point in one.points]

    def of(name: str) -> Any:
        return lambda row: getattr(row[1].forecast, name) if row[1].forecast is not None else None

    columns = [
        Column("kind", "scaling", of=lambda row: row[0], is_number=False),
        Column("num_gpus", "GPUs", of=lambda row: row[1].num_gpus),
        Column("parallel", "layout", of=lambda row: _layout(row[1]), is_number=False),
        Column("batch", "sequences per GPU and micro-batch", of=lambda row: row[1].best and row[1].best.run.batch),
        Column("accumulate", "micro-batches", of=lambda row: row[1].best and row[1].best.run.accumulate),
        Column("step_seconds", "step, ms", ms_in_column, of("step_seconds"), below=_ends),
        Column("tokens_per_second", "tokens/s", three_in_column, of("tokens_per_second")),
        Column("efficiency", "throughput per GPU", share, lambda row: row[1].efficiency),
        Column("tokens_per_usd", "tokens per dollar", three_in_column, lambda row: row[1].per_usd),
        Column("exposed_seconds", "exposed communication, ms", ms_in_column, of("exposed_communication_seconds")),
        Column("needed_bytes", "memory needed, GB", gb_in_column, of("needed_bytes")),
        Column("bound", "bound by", of=of("bound"), is_number=False),
    ]  # fmt: skip
    note = (
        f"Each number of GPUs in the faster of DDP and FSDP that fits, in as few micro-batches as memory takes. Below "
        f"the step: its 90% interval. Collectives were measured among {measured} GPUs; more are forecast by law."
    )
    return Table("scaling", "A step on more GPUs", note, columns, rows)


def _layout(point: Scaled) -> str | None:
    return None if point.best is None else "one GPU" if point.num_gpus == 1 else point.best.run.parallel


def _ends(row: tuple[str, Scaled]) -> str:
    found = row[1].forecast
    if found is None:
        return row[1].reason
    return f"{ms_in_column(found.step_seconds_low)}–{ms_in_column(found.step_seconds_high)}"


def _lanes_table(lanes: Sequence[Lanes], step: str) -> Table:
    columns = [
        text("parallel", "layout"), Column("step_seconds", "step, ms", ms_in_column),
        Column("device_seconds", "kernels by themselves, ms", ms_in_column),
        Column("contention_seconds", "slower beside collectives, ms", ms_in_column, lambda one: one.shares.contention),
        Column("communication_seconds", "collectives, ms", ms_in_column, lambda one: one.shares.communication),
        Column("exposed_seconds", "of them exposed, ms", ms_in_column, lambda one: one.shares.exposed),
        Column("idle_seconds", "neither, ms", ms_in_column),
    ]  # fmt: skip
    note = f"{step}, as forecast. Neither: gaps between kernels, and waiting for the host."
    return Table("lanes", "Where the milliseconds go", note, columns, lanes)
