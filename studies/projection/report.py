"""reports/projection/README.md: the checks of projections as a page, made from the rows of the CSV files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from studies.markdown import table
from studies.projection.steps import __doc__ as STEPS
from studies.projection.steps import fp32_rows
from studies.projection.targets import FROM_OTHER, LOOKED_AT, SOURCE, TARGETS

STEP_TARGET = 0.15
WAYS = {"stack": "stack", "FLOPs, power of ten": "FLOPs", "k": "k", "sequence": "sequence", "op": "op",
        "layout": "layout"}  # fmt: skip


def page(
    rows: Sequence[Mapping[str, Any]],
    sizes: Sequence[Mapping[str, Any]],
    steps: Sequence[Mapping[str, Any]],
    fp32: Sequence[Mapping[str, Any]] = (),
    judged: Mapping[str, Sequence[Mapping[str, str]]] | None = None,
) -> str:
    """`judged`: by GPU the rows of classes.csv that `measured.py` made of a card measured since."""
    parts = [
        "# Projections against published times\n",
        "Made by `python -m studies.projection.check DATA_DIR --out reports/projection`; errors are "
        "forecast / published - 1. *zero-shot*: from the datasheet and the H200's measurements alone. "
        f"*{FROM_OTHER}*: the same with the measurements of that GPU, one card, in the H200's place; the H200 stays "
        "the source, having more cards and kinds of kernel. *refined*: the "
        "tile law's and the attention law's parameters fitted to one half of the shapes, shown on the other half (the "
        "SHA-256 of a shape's key tells the halves: `published.Timed.is_held_out`). The half that was fitted gives the "
        "parameters that ship (`roofline/data/published`).\n",
        f"Products and attention: {SOURCE}. Element-wise calls: sitar-lab/NeuSight (MIT). Training products on an A100 "
        "PCIe: MooreThreads/SimuMax (Apache-2.0). Steps: mosaicml/llm-foundry. The tables do not ship.\n",
        table(
            ["GPU", "class", "stage", "rows", "mean abs. error", "target", "median", "5% to 95%", "in 90% interval"],
            [_cells(row) for row in rows],
        ),
        "\n**Chosen with these errors in view** (no constant was fitted to them but the widths of intervals, "
        "`project.SIGMA`):\n",
        "\n".join(f"- {choice}" for choice in LOOKED_AT),
        "\n**What bounds them.** " + _bounds(rows, sizes),
        *_judged(judged or {}),
        "\n## Training steps\n",
        *_steps(steps),
        *_fp32(fp32),
        "\n## By size\n",
    ]
    for gpu, op_class, stage in sorted({(s["gpu"], s["class"], s["stage"]) for s in sizes}):
        some = [s for s in sizes if (s["gpu"], s["class"], s["stage"]) == (gpu, op_class, stage)]
        if stage != FROM_OTHER and ((gpu, op_class, stage) in TARGETS or op_class == "attention forward"):
            parts.append(f"\n{gpu}, {op_class}, {stage}\n")
            parts.append(
                table(
                    ["by", "", "rows", "mean abs. error", "median"],
                    [
                        [WAYS.get(s["by"], s["by"]), _size(s), str(s["rows"]), _percent(s["mean_abs_error"]),
                         _signed(s["median_error"])]
                        for s in some
                    ],
                )
            )  # fmt: skip
    return "\n".join(parts) + "\n"


def _size(size: Mapping[str, Any]) -> str:
    return f"1e{size['value']}" if size["by"].startswith("FLOPs") else str(size["value"])


def _cells(row: Mapping[str, Any]) -> list[str]:
    target = "" if row["target"] is None else f"{row['target']:.0%} {'met' if row['met'] else '**missed**'}"
    return [
        row["gpu"], row["class"], row["stage"], f"{row['rows']:,}", _percent(row["mean_abs_error"]), target,
        _signed(row["median_error"]), f"{_signed(row['p5_error'])} to {_signed(row['p95_error'])}",
        f"{row['coverage90']:.0%}",
    ]  # fmt: skip


def _bounds(rows: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, Any]]) -> str:
    stacks = {
        (s["gpu"], s["stage"], s["value"]): s["mean_abs_error"]
        for s in sizes
        if s["by"] == "stack" and s["class"] == "matmul"
    }
    said = [
        f"{gpu} {stage} {value}: {_percent(error)}"
        for (gpu, stage, value), error in sorted(stacks.items())
        if stage in ("zero-shot", "refined")
    ]
    return (
        "The tables hold two stacks' times of the same products, which differ by 5.8% (A100) and 16.1% (L40S) on "
        "average: one sustains what the power limit leaves, the other runs at full clock. One law cannot be right for "
        "both: " + "; ".join(said) + "."
    )


def _judged(found: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """What forecasts written down before a card was measured came to: a table, and where the rest is."""
    if not found:
        return []
    kinds = {"device": "device time of real steps", "kernel": "kernels"}
    cells = []
    for gpu, rows in found.items():
        for row in rows:
            is_whole = row["kind"] == "device" and row["group"] == "all"
            if row["stage"] == "ahead" and row["rows"] != "0" and (is_whole or row["kind"] == "kernel"):
                what = kinds[row["kind"]] + ("" if is_whole else f": {row['group']} ({row['backend']}), {row['cache']}")
                cells.append(
                    [f"[{gpu}]({gpu}/README.md)", what, row["rows"], _signed(float(row["median_error"])),
                     _percent(float(row["median_abs_error"])), _percent(float(row["p90_abs_error"])),
                     f"{float(row['inside_90']):.0%}"]
                )  # fmt: skip
    head = ["GPU", "what", "rows", "median", "median abs.", "90th pct. abs.", "in 90% interval"]
    return [
        "\n## Against cards measured afterwards\n",
        "Forecasts of the projection from the datasheet and the H200, written down before anything of the GPU had been "
        "measured; made by `python -m studies.projection.measured`, whose folder has every number.\n",
        table(head, sorted(cells, key=lambda row: row[1] != kinds["device"])),
    ]


def _steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    if not steps:
        return ["(not made)\n"]
    parts = ["\n".join((STEPS or "").splitlines()[2:]) + "\n"]
    head = [
        "GPU",
        "stage",
        "rows",
        "median error",
        "median abs. error",
        "target",
        "worst",
        "in 90% interval",
        "median with torch's flash",
    ]
    cells = []
    for key in dict.fromkeys((s["gpu"], s["stage"]) for s in steps):
        some = [s for s in steps if (s["gpu"], s["stage"]) == key]
        cells.append([*key, *_summary(some)])
    for stage in dict.fromkeys(s["stage"] for s in steps):
        cells.append(["all", stage, *_summary([s for s in steps if s["stage"] == stage])])
    parts.append(table(head, cells))
    head = ["GPU", "model", "sequence", "micro-batch x accumulation", "published s", "forecast s (shipped)", "error",
            "zero-shot error", "error with torch's flash"]  # fmt: skip
    plain = {_key(s): s for s in steps if s["stage"] == "zero-shot"}
    cells = [
        [s["gpu"], s["model"], s["seq"], f"{s['micro_batch']} x {s['accumulate']}", f"{s['seconds']:.3f}",
         f"{s['forecast']:.3f}", _signed(s["error"]), _signed(plain[_key(s)]["error"]),
         _signed(s["error_torch_flash"])]
        for s in steps if s["stage"] == "shipped"
    ]  # fmt: skip
    parts.append("\n" + table(head, cells))
    return parts


def _fp32(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    if not steps:
        return []
    said = " ".join((fp32_rows.__doc__ or "").split())
    head = ["GPU", "model", "sequence", "batch", "published s", "forecast s", "error", "NeuSight's error"]
    cells = [
        [s["gpu"], s["model"], s["seq"], s["batch"], f"{s['seconds']:.3f}", f"{s['forecast']:.3f}",
         _signed(s["error"]), _signed(s["neusight_error"])]
        for s in steps
    ]  # fmt: skip
    return ["\n## Model steps in fp32, with caution\n", said + "\n", table(head, cells)]


def _key(step: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(step[name] for name in ("gpu", "model", "seq", "micro_batch", "accumulate"))


def _summary(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    errors = sorted(step["error"] for step in steps)
    size = sorted(abs(error) for error in errors)
    inside = sum(step["low"] <= step["seconds"] <= step["high"] for step in steps)
    typical = _median(size)
    return [
        str(len(errors)), _signed(_median(errors)), _percent(typical),
        f"{STEP_TARGET:.0%} {'met' if typical <= STEP_TARGET else '**missed**'}", _signed(max(errors, key=abs)),
        f"{inside / len(errors):.0%}", _signed(_median(sorted(step["error_torch_flash"] for step in steps))),
    ]  # fmt: skip


def _median(values: Sequence[float]) -> float:
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2.0


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"
