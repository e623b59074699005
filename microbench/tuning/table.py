"""Derives from the record of a tuning the fastest configuration of each shape, the table of these configurations, and
the configurations to try again."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flopcast.kernels import matmul, matmul_table
from flopcast.kernels.matmul_configs import GLUON, MatmulConfig, from_key
from flopcast.microbench.tuning.record import Row
from flopcast.microbench.tuning.shapes import LAYOUTS

AGAIN = 14  # new configurations tried for a shape that already has a record

Place = tuple[str, int, int, int]


def sessions(records: Iterable[Row]) -> dict[Place, tuple[dict[str, float], float]]:
    """(layout, m, n, k) -> (the finalists' seconds by configuration, cuBLAS's seconds), of each shape's last complete
    tuning.

    A shape's tuning is complete with cuBLAS's row. Configurations that were wrong at that shape are left out.
    """
    begun: dict[Place, dict[str, float]] = defaultdict(dict)
    wrong: dict[Place, set[str]] = defaultdict(set)
    ended = {}
    for row in records:
        if row["kind"] != "time":
            continue
        place = (row["layout"], row["m"], row["n"], row["k"])
        if row["status"] == "wrong":
            wrong[place].add(row["config"])
        elif row["status"] == "ok" and row["round"] == 2:
            if row["config"] == "cublas":
                times, bad = begun.pop(place, {}), wrong.pop(place, set())
                ended[place] = ({k: v for k, v in times.items() if k not in bad}, row["seconds"])
            else:
                begun[place][row["config"]] = row["seconds"]
    return ended


def configurations(records: Sequence[Row]) -> dict[Place, tuple[list[str], set[str]]]:
    """(layout, m, n, k) -> (the finalists of the shape's last complete tuning, fastest first; all configurations that
    were ever timed or found wrong at that shape)."""
    timed: dict[Place, set[str]] = defaultdict(set)
    for row in records:
        if row["kind"] == "time":
            timed[row["layout"], row["m"], row["n"], row["k"]].add(row["config"])
    return {
        place: (sorted(times, key=times.__getitem__), timed[place])
        for place, (times, _) in sessions(records).items()
        if times
    }


def again(options: Sequence[MatmulConfig], tried: tuple[list[str], set[str]]) -> list[MatmulConfig]:
    """The configurations to try at a shape that has a record: its finalists; AGAIN of the options that it lacks, those
    of the Gluon kernel first and no more than half of them of one kind; and the first of these with fewer and with
    more rows per group."""
    finalists, timed = tried
    found = [from_key(key) for key in finalists]
    lacking: list[MatmulConfig] = []
    kinds = Counter[str]()
    options = [config for config in options if config.key not in timed]
    for config in sorted(options, key=lambda config: config.kind not in GLUON):
        if len(lacking) < AGAIN and kinds[config.kind] < AGAIN // 2:
            kinds[config.kind] += 1
            lacking.append(config)
    grouped = [
        replace(config, group_m=group)
        for config in lacking[:1]
        if config.split == 1
        for group in (config.group_m // 4, config.group_m // 2, config.group_m * 2)
        if group >= 1
    ]
    return [*found, *lacking, *(config for config in grouped if config.key not in timed)]


def best(records: Iterable[Row]) -> dict[Place, tuple[str, float]]:
    """(layout, m, n, k) -> (configuration, seconds): the fastest configuration of each shape's last complete tuning."""
    return {
        place: min(times.items(), key=lambda item: item[1]) for place, (times, _) in sessions(records).items() if times
    }


def table(records: Sequence[Row], device: str, sm_count: int, capability: tuple[int, int]) -> Row:
    """Makes the document that `matmul_table.read` reads."""
    chosen = best(records)
    configs = sorted({config for config, _ in chosen.values()})
    shapes: dict[str, list[list[int]]] = {layout: [] for layout in LAYOUTS}
    for (layout, m, n, k), (config, _) in sorted(chosen.items()):
        shapes.setdefault(layout, []).append([m, n, k, configs.index(config)])
    return {
        "format": matmul_table.FORMAT, "device": device, "sm_count": sm_count, "capability": list(capability),
        "dtype": "bf16", "triton": matmul._triton_version(), "torch": torch.__version__,
        "made": time.strftime("%Y-%m-%d", time.gmtime()), "configs": configs, "shapes": shapes,
    }  # fmt: skip


def write_table(document: Row, path: Path) -> None:
    """Writes the table as JSON with one shape per line."""
    head = {key: value for key, value in document.items() if key not in ("configs", "shapes")}
    lines = json.dumps(head, indent=1)[:-2] + ',\n "configs": [\n'
    lines += ",\n".join(f"  {json.dumps(key)}" for key in document["configs"]) + '\n ],\n "shapes": {\n'
    layouts = []
    for layout, entries in document["shapes"].items():
        layouts.append(f'  "{layout}": [\n' + ",\n".join(f"   {json.dumps(entry)}" for entry in entries) + "\n  ]")
    path.write_text(lines + ",\n".join(layouts) + "\n }\n}\n", encoding="utf-8")


def ratios(records: Iterable[Row]) -> dict[Place, float]:
    """cuBLAS's time divided by the best configuration's, for each shape."""
    return {place: library / min(times.values()) for place, (times, library) in sessions(records).items() if times}


def summary(records: Sequence[Row]) -> str:
    found = ratios(records)
    if not found:
        return "no shape is timed yet"
    large = [value for place, value in found.items() if min(place[1:]) >= 1024]
    lines = [f"cuBLAS's time over ours: {_spread(list(found.values()))}"]
    if large:
        lines.append(f"  m, n, k >= 1024: {_spread(large)}")
    lines += [
        f"  {layout}: {_spread(values)}"
        for layout in LAYOUTS
        if (values := [value for place, value in found.items() if place[0] == layout])
    ]
    lines.append("  least: " + ", ".join(f"{place} {found[place]:.2f}" for place in _least(found, 8)))
    return "\n".join(lines)


def _least(found: dict[Place, float], count: int) -> Iterator[Place]:
    yield from sorted(found, key=lambda place: found[place])[:count]


def _spread(values: Sequence[float]) -> str:
    mean = math.exp(statistics.fmean(math.log(value) for value in values))
    return f"geometric mean {mean:.3f}, least {min(values):.3f}, {len(values)} shapes"
