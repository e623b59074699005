"""Measurements of several GPUs of one kind: rows of the median card, and how far the cards lie apart. numpy, no torch.

`flopcast bench --all-gpus --out OUT` leaves a folder a card, OUT/gpu0, OUT/gpu1, ... The profile is fitted from the
median over the cards, row by row; what the cards differ by is a deviation that every forecast for "one of these"
carries (`Profile.provenance["gpus"]`), and the slowest card is named with its factor, class by class.

Several runs of one card, of suites that complete one another or of one suite twice, are read together likewise, as
run0, run1, ... in the card's folder: what was measured in more than one is the median.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

import numpy as np

from flopcast.errors import DataError
from flopcast.microbench.records import kernel_sources, records
from flopcast.microbench.records.machine import Machine
from flopcast.microbench.records.rows import HOST_SCALARS, Fields, merged
from flopcast.roofline.gpu.fit.row_seconds import FitRow, with_taken, work_of
from flopcast.roofline.gpu.profile.profile import Profile

SPREAD_QUANTILE = 0.95  # a row whose cards differ more counts as if it differed by this quantile of its class
WORST_ROWS = 3
LEAST_SHARE = 0.5
# What has to be the same for two cards to be two of a kind.
SAME = ("name", "sm_count", "memory_bytes", "l2_bytes", "power_limit_w", "driver")


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a folder holds: of one card its own rows, of several the median's. `cards`: rows by card, if several.

    `home`: the folder with what lies beside the measurements, of several cards the first's.
    """

    home: Path
    machine: Machine
    rows: list[FitRow]
    warnings: list[str]
    cards: dict[str, list[FitRow]] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)


def card_folders(folder: Path) -> dict[str, Path]:
    """The folders of the cards, by name and in their order; none where `folder` holds measurements itself."""
    return {} if records.file_in(folder).is_file() else _numbered(folder, "gpu")


def run_folders(folder: Path) -> dict[str, Path]:
    """As `card_folders`, of one card's runs."""
    return {} if records.file_in(folder).is_file() else _numbered(folder, "run")


def _numbered(folder: Path, start: str) -> dict[str, Path]:
    """The folders below that hold measurements, or runs of them, in their order."""
    if not folder.is_dir():
        return {}
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(rf"{start}(\d+)", path.name))]
    return {
        path.name: path
        for _, path in sorted(found)
        if records.file_in(path).is_file() or (start != "run" and run_folders(path))
    }


def read_folder(folder: Path | str) -> Found:
    """The measurements of a folder, of one card or of several.

    Raises DataError as `records.read` does, where a file mixes machines, and where the cards are not of one kind or
    were not measured with one stack.
    """
    folder = Path(folder)
    folders = card_folders(folder)
    if not folders and (runs := run_folders(folder)):
        return _read_runs(runs)
    if not folders:
        machine, measured = records.read_machine(folder), records.read(folder)
        present, others = kernel_sources.present(measured.latest())
        rows = cast(list[FitRow], present)
        _check_one_machine(folder, machine, rows)
        rows = with_taken(rows)
        said = [f"{folder}: {text}" for text in kernel_sources.warning(others)]
        return Found(home=folder, machine=machine, rows=rows, warnings=[*measured.warnings, *said])
    each = {name: read_folder(path) for name, path in folders.items()}
    first = next(iter(each.values()))
    _check_same_kind(folders, {name: found.machine for name, found in each.items()})
    cards = {name: found.rows for name, found in each.items()}
    return Found(
        home=first.home,
        machine=first.machine,
        rows=median_rows(cards),
        warnings=[warning for found in each.values() for warning in found.warnings],
        cards=cards,
        machines={name: found.machine for name, found in each.items()},
    )


def _read_runs(runs: Mapping[str, Path]) -> Found:
    """Several runs of one machine as one. Raises DataError where they are of more than one."""
    each = {name: read_folder(path) for name, path in runs.items()}
    (_, first), *others = each.items()
    for name, found in others:
        _check_one_machine(runs[name], first.machine, found.rows)
    rows = {name: with_taken(found.rows) for name, found in each.items()}
    return Found(
        home=first.home,
        machine=first.machine,
        rows=[_of_runs(row) for row in median_rows(rows)],
        warnings=[warning for found in each.values() for warning in found.warnings],
    )


def _of_runs(row: FitRow) -> FitRow:
    return merged(FitRow, {name: value for name, value in row.items() if name != "by_card"})


def _check_one_machine(folder: Path, machine: Machine, rows: Iterable[FitRow]) -> None:
    for row in rows:
        if row["machine"] != machine["machine"]:
            raise DataError(
                f"{folder}: row {row['key']} was measured on machine {row['machine']}, {records.MACHINE} is of "
                f"machine {machine['machine']}: rows of two machines are never mixed; keep each in its own folder"
            )


def _check_same_kind(folders: Mapping[str, Path], machines: Mapping[str, Machine]) -> None:
    (first_name, first), *others = machines.items()
    for name, machine in others:
        pairs = [(part, first["device"].get(part), machine["device"].get(part)) for part in SAME]
        stacks = first.get("stack", {}), machine.get("stack", {})
        pairs += [(part, stacks[0].get(part), stacks[1].get(part)) for part in stacks[0] if part != "flopcast"]
        for part, own, other in pairs:
            if own != other:
                raise DataError(
                    f"{folders[first_name]} and {folders[name]} differ in {part} ({own} and {other}): a profile is "
                    "of cards of one kind and one stack; fit their folders one by one"
                )


# --- the median card


def median_rows(cards: Mapping[str, Sequence[FitRow]]) -> list[FitRow]:
    """One row a measurement, of the median over the cards that could make it.

    Times, values and each quantile of the samples are medians; the rest is that of the card nearest to the median.
    `by_card` holds what was taken of each. Host cost and the scalars of the host come from the cards that had the host
    to themselves: those that calibrated it.
    """
    alone = {name for name, rows in cards.items() if any(row["key"].startswith("host/") for row in rows)}
    groups: dict[tuple[Any, ...], dict[str, FitRow]] = defaultdict(dict)
    for name, rows in cards.items():
        for row in rows:
            of_host = row["key"] in HOST_SCALARS
            if not (of_host and alone and name not in alone):
                key = row["key"], row.get("backend", "torch"), row.get("cache", "cold"), row["method"]
                groups[key][name] = row
    return [_median_row(group) for group in groups.values()]


def _median_row(group: Mapping[str, FitRow]) -> FitRow:
    done = {name: row for name, row in group.items() if row["status"] == "ok" and _reading(row)}
    if not done:
        return next(iter(group.values()))
    middle = float(median(_reading(row) for row in done.values()))
    nearest = min(done.values(), key=lambda row: abs(_reading(row) - middle))
    middles: dict[str, object] = {
        name: float(median(known))
        for name in ("seconds", "kernel_seconds", "taken_seconds", "value")
        if (known := _numbers(done.values(), name)) and _numbers([nearest], name)
    }
    if not nearest["key"].startswith("host/"):  # their order tells the rounds
        middles["samples"] = _median_samples([row.get("samples") or [] for row in done.values()])
    by_card = {name: _reading(row) for name, row in done.items()}
    is_throttled = any(row.get("throttled") for row in done.values())
    return merged(FitRow, nearest, {"by_card": by_card}, middles, {"throttled": is_throttled})


def _numbers(rows: Iterable[Fields], name: str) -> list[float]:
    """What rows say in a field, those that do."""
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def _reading(row: FitRow) -> float:
    """What a row says of its card: the seconds that a profile takes of it, of a scalar its value; 0 where neither is
    there."""
    found = row.get("taken_seconds") or row.get("seconds") or row.get("kernel_seconds") or row.get("value")
    return float(found or 0.0)


def _median_samples(samples: Sequence[Sequence[float]]) -> list[float]:
    """Each quantile the median of the cards'; as many as the card of fewest has."""
    count = min(map(len, samples))
    if count == 0:
        return []
    at = np.linspace(0.0, 1.0, count)  # plain lists: numpy's median of three numbers takes twenty times as long
    quantiles = [
        sorted(s) if len(s) == count else np.interp(at * (len(s) - 1), range(len(s)), sorted(s)).tolist()
        for s in samples
    ]
    return [float(median(column)) for column in zip(*quantiles, strict=True)]


# --- how far they lie apart


def counted(cards: Mapping[str, Sequence[FitRow]]) -> dict[str, Sequence[FitRow]]:
    """The cards that tell how far cards lie apart: of the rows that another card has, too, those with `LEAST_SHARE` of
    the median card's and more. One of a few kernels measured again, or of thousands that no other has, would leave the
    spread to the few rows that all cards have."""
    done = {
        name: {(row["key"], row.get("backend"), row.get("cache")) for row in rows if row["status"] == "ok"}
        for name, rows in cards.items()
    }
    having = Counter(key for keys in done.values() for key in keys)
    measured = {name: sum(having[key] > 1 for key in keys) for name, keys in done.items()}
    least = LEAST_SHARE * float(np.median(list(measured.values()))) if measured else 0.0
    return {name: rows for name, rows in cards.items() if measured[name] >= least}


def with_cards(profile: Profile, found: Found) -> Profile:
    """The profile with the spread between its cards, which widens its estimates; as it is where one card counts."""
    if len(counted(found.cards)) < 2:
        return profile
    return replace(profile, provenance={**profile.provenance, "gpus": spread(found)})


def spread(found: Found) -> dict[str, Any]:
    """{"cards": by name, "classes": by "class/cache", "slowest", "slowest_factor"}.

    Of a class: `rows` that all cards measured, `sigma` (standard deviation of log seconds from card to card),
    `median` and `p90` of the largest over the smallest time less 1, `factors` (each card's median time over the
    median card's), `slowest` and its `slowest_factor`, and the `worst` rows. The slowest of all is that of the
    greatest factor over all rows of shapes. Cards that do not count (`counted`) are named with a factor of None.
    """
    several = counted(found.cards)
    readings = _readings_by_class(several)
    names = list(several)
    classes = {name: _class_spread(keys, values, names) for name, (keys, values) in sorted(readings.items())}
    devices = {name: machine["device"] for name, machine in found.machines.items()}
    everything = [values for _, values in readings.values() if len(values)]
    factors = _factors(np.concatenate(everything), names) if everything else {}
    slowest = max(factors, key=lambda name: factors[name], default=None)
    cards = {
        name: {
            "uuid": devices.get(name, {}).get("uuid"),
            "machine": found.machines.get(name, {}).get("machine"),
            "rows": sum(row["status"] == "ok" for row in rows),
            "rows_throttled": sum(bool(row.get("throttled")) for row in rows),
            "factor": factors.get(name),
        }
        for name, rows in found.cards.items()
    }
    return {
        "cards": cards,
        "classes": classes,
        "slowest": slowest,
        "slowest_factor": None if slowest is None else factors[slowest],
    }


def _readings_by_class(cards: Mapping[str, Sequence[FitRow]]) -> dict[str, tuple[list[str], np.ndarray]]:
    """ "class/cache" -> (row keys, seconds[rows, cards]), of the rows that all cards measured."""
    times: dict[tuple[str, str, str], dict[str, float]] = defaultdict(dict)
    shapes: dict[tuple[str, str, str], FitRow] = {}
    for name, rows in cards.items():
        for row in rows:
            if row["status"] == "ok" and row.get("shape") and _reading(row):
                key = row["key"], row.get("backend", "torch"), row.get("cache", "cold")
                times[key][name], shapes[key] = _reading(row), row
    grouped: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for key, by_card in times.items():
        if len(by_card) == len(cards):
            try:
                op_class = work_of(shapes[key]).op_class
            except (KeyError, TypeError, ValueError, IndexError):
                continue  # the fit warns of it
            entry = "/".join(key), [by_card[name] for name in cards]
            grouped[f"{op_class}/{key[2]}"].append(entry)
    return {name: ([key for key, _ in rows], np.array([v for _, v in rows])) for name, rows in grouped.items()}


def _class_spread(keys: Sequence[str], seconds: np.ndarray, names: Sequence[str]) -> dict[str, Any]:
    logs = np.log(seconds)
    variances = logs.var(axis=1, ddof=1) if len(names) > 1 else np.zeros(len(keys))
    ranges = np.expm1(logs.max(axis=1) - logs.min(axis=1))
    factors = _factors(seconds, names)
    slowest = max(factors, key=lambda name: factors[name])
    worst = np.argsort(-ranges)[:WORST_ROWS]
    return {
        "rows": len(keys),
        "sigma": float(np.sqrt(np.minimum(variances, np.quantile(variances, SPREAD_QUANTILE)).mean())),
        "median": float(np.median(ranges)),
        "p90": float(np.quantile(ranges, 0.9)),
        "factors": factors,
        "slowest": slowest,
        "slowest_factor": factors[slowest],
        "worst": [[keys[i], float(ranges[i])] for i in worst],
    }


def _factors(seconds: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    relative = seconds / np.median(seconds, axis=1, keepdims=True)
    return {name: float(value) for name, value in zip(names, np.median(relative, axis=0), strict=True)}


def table_rows(gpus: Mapping[str, Any]) -> list[list[str]]:
    """Cells for the terminal: class, rows, median and 90th percentile of the difference, slowest card, its factor."""
    rows = [
        [name, f"{c['rows']:,}", f"{c['median']:.1%}", f"{c['p90']:.1%}", f"{c['sigma']:.1%}", c["slowest"],
         f"{c['slowest_factor'] - 1:+.1%}"]
        for name, c in gpus["classes"].items()
    ]  # fmt: skip
    if gpus["slowest"] is not None:
        everything = f"{sum(c['rows'] for c in gpus['classes'].values()):,}"
        rows.append(["all", everything, "", "", "", gpus["slowest"], f"{gpus['slowest_factor'] - 1:+.1%}"])
    return rows


TABLE_COLUMNS = ("class/cache", "rows", "cards apart, median", "p90", "deviation", "slowest", "above the median")
