"""Describes where the report page's numbers come from, and the commands that reproduce each figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flopcast.microbench.records.machine import Device
from flopcast.roofline.step.forecast import tokens_of, width_of
from flopcast.roofline.views.figures.canvas import Figure
from flopcast.roofline.views.page.data import ReportData

if TYPE_CHECKING:
    from flopcast.roofline.step.forecast import Forecast


def provenance(data: ReportData) -> Iterator[tuple[str, str]]:
    """Yields (what, value) on where the numbers come from."""
    profile = data.profile
    device, stack, made = profile.device, profile.stack, profile.provenance
    yield "profile", f"{profile.gpu}, {profile.basis}"
    yield "device", _device(device)
    if profile.host is not None:
        yield "host", f"{profile.host.name}, {profile.host.basis}"
    yield "software", _facts(stack, tuple(stack))
    if made.get("from"):
        yield "measured", f"{made['from']} to {made.get('to')}"
    if made.get("suites"):
        yield "suites", ", ".join(made["suites"])
    if made.get("rows"):
        throttled, held = made.get("rows_throttled", 0), made.get("rows_held_out", 0)
        yield "rows", f"{made['rows']:,} fitted, of which {throttled:,} power-throttled; {held:,} held out"
    if data.fit is not None and data.fit.unused:
        yield "rows not used", ", ".join(f"{number} {status}" for status, number in data.fit.unused.items())
    said = ("from", "to", "suites", "rows", "rows_throttled", "rows_held_out")
    cards = (made.get("gpus") or {}).get("cards") or {}
    if cards:
        names = ", ".join(f"{name} ({_card(card)})" for name, card in cards.items())
        yield "cards", f"{len(cards)}: {names}; how far they lie apart by class is in a table above"
    lent = made.get("cards_lent")
    if lent:
        yield "cards", f"one; what cards differ by is taken from {lent['from']}'s"
    kinds = made.get("projected_kinds")
    if kinds:
        yield ("not measured here", f"{len(kinds['surfaces'])} kinds of kernel, projected from {kinds['from']}'s")
    rest = {name: value for name, value in made.items() if name not in said and isinstance(value, str | int | float)}
    if rest:
        yield "method", _facts(rest, tuple(rest))
    if data.validation:
        versions = {(row.torch, row.transformers) for row in data.validation if row.torch}
        streams = "; ".join(f"torch {torch}, transformers {hf}" for torch, hf in sorted(versions))
        traced = f"; op streams traced with {streams}" if streams else ""
        yield "validation", f"{len(data.validation)} real steps{traced}"
    if profile.aliases:
        yield "backends", ", ".join(f"{name} is {meaning}" for name, meaning in profile.aliases.items())


def _card(card: Mapping[str, Any]) -> str:
    """Describes a card; one with few rows has no factor of its own."""
    factor = card.get("factor")
    return "few rows" if factor is None else f"{factor:.3f} of the median card's time"


def _device(device: Device) -> str:
    """Describes a device: NVIDIA H200, driver 580, clock up to 1,980 MHz, ..."""
    named = (
        ("uuid", "", ""), ("driver", "driver ", ""), ("clock_mhz", "clock up to ", " MHz"),
        ("memory_clock_mhz", "memory clock ", " MHz"), ("power_limit_w", "power limit ", " W"), ("isa", "", ""),
    )  # fmt: skip
    parts = [str(device["name"])] if device.get("name") else []
    for name, before, unit in named:
        value = device.get(name)
        if value is not None:
            parts.append(f"{before}{f'{value:,.0f}' if isinstance(value, int | float) else value}{unit}")
    return ", ".join(parts)


def _facts(record: Mapping[str, Any], names: Sequence[str]) -> str:
    """Lists known facts as "name value, name value"; unknown ones are left out."""
    known = ((name, record.get(name)) for name in names)
    return ", ".join(f"{name} {value}" if name != "name" else f"{value}" for name, value in known if value is not None)


def reproduce(data: ReportData, figures: Sequence[Figure]) -> Iterator[tuple[str, str]]:
    """Yields (figure, command) with the command that reproduces the figure's numbers."""
    gpu = data.profile.gpu
    is_cpu = data.profile.device.get("type") == "cpu"
    device = " --device cpu" if is_cpu else ""
    measure = f"flopcast bench{device or ' --suite standard'} --out DIR && "
    validate = f"flopcast validate{device or f' --gpu {gpu}'} --out STEPS"
    roofs = f"{measure}flopcast fit DIR --out PROFILE && flopcast roofline --gpu PROFILE --out roofline.svg"
    predict = f"flopcast predict --gpu {gpu}"
    page = f"flopcast report --gpu {gpu} --measurements DIR --steps STEPS --out REPORT"
    commands = {
        "roofline": roofs,
        "bandwidth": roofs,
        "map": f"flopcast kernels --gpu {gpu} --from shapes.csv --out times.csv  # m, n by 64; drawn by report",
        "anatomy": f"{predict}{_model_options(data.anatomy[-1]) if data.anatomy else ''}  # a width a call",
        "batches": f"{predict} --config {data.batched_model} --seq {data.batched_seq} --batch 8  # a batch a call",
        "memory": f"{predict} --config {data.batched_model} --seq {data.batched_seq} --largest-batch",
        "host": "flopcast bench --suite host --out DIR && flopcast fit DIR",
        "agreement": validate,
        "residuals": validate,
        "modes": f"flopcast cost --all-modes --gpus {','.join(curve.gpu for curve in data.curves)} --out COST",
        "cost": f"flopcast cost --gpus {','.join(curve.gpu for curve in data.curves)} --out COST",
    }
    for part in data.extra:
        commands |= part.commands
    for figure in figures:
        yield figure.title, commands.get(figure.name, page)
    yield "This page and all its figures (figures/*.png)", page


def _model_options(found: Forecast) -> str:
    """The last model of the ladder, as options of `predict`."""
    from flopcast.roofline.stream.model.models import CPU_BATCH, CPU_SEQ, CPU_VOCABULARY

    if not found.depth or (width := width_of(found)) is None:
        return " --config CONFIG"
    text = f" --width {width} --depth {found.depth}"
    if tokens_of(found) == CPU_BATCH * CPU_SEQ:
        text += f" --vocab {CPU_VOCABULARY} --batch {CPU_BATCH} --seq {CPU_SEQ}"
    return text
