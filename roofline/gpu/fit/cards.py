"""Reads measurements of several GPUs of one model: rows of the median card, and the spread between the cards.

Uses numpy, no torch. `flopcast bench --all-gpus --out OUT` writes one folder per card, OUT/gpu0, OUT/gpu1, ... The
profile is fitted to the median over the cards, row by row. The spread between the cards is a standard deviation that
every forecast for "one of these" carries (`Profile.provenance["gpus"]`); the slowest card is named with its factor,
per class.

Several runs of one card, of suites that complete one another or of one suite twice, are read together in the same way,
from run0, run1, ... in the card's folder: a row measured in more than one run is the median of the runs.
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

SPREAD_QUANTILE = 0.95  # caps a row's variance between cards at this quantile of its class's rows
WORST_ROWS = 3
LEAST_SHARE = 0.5
# Fields of the device that must agree for two cards to count as the same model.
SAME = ("name", "sm_count", "memory_bytes", "l2_bytes", "power_limit_w", "driver")


@dataclass(frozen=True, kw_only=True)
class Found:
    """The measurements of a folder: the rows of its one card, or the median rows of several cards.

    `cards`: rows by card, empty for one card. `home`: the folder whose other files (besides the measurements) belong
    to the profile; with several cards, the first card's.
    """

    home: Path
    machine: Machine
    rows: list[FitRow]
    warnings: list[str]
    cards: dict[str, list[FitRow]] = field(default_factory=dict)
    machines: dict[str, Machine] = field(default_factory=dict)


def card_folders(folder: Path) -> dict[str, Path]:
    """The folders of the cards by name, in numerical order; empty where `folder` holds measurements itself."""
    return {} if records.file_in(folder).is_file() else _numbered(folder, "gpu")


def run_folders(folder: Path) -> dict[str, Path]:
    """The folders of one card's runs by name, in numerical order; empty where `folder` holds measurements itself."""
    return {} if records.file_in(folder).is_file() else _numbered(folder, "run")


def _numbered(folder: Path, start: str) -> dict[str, Path]:
    """The subfolders named `start` and a number that hold measurements or runs, in numerical order."""
    if not folder.is_dir():
        return {}
    found = [(int(m[1]), path) for path in folder.iterdir() if (m := re.fullmatch(rf"{start}(\d+)", path.name))]
    return {
        path.name: path
        for _, path in sorted(found)
        if records.file_in(path).is_file() or (start != "run" and run_folders(path))
    }


def read_folder(folder: Path | str) -> Found:
    """Reads the measurements of a folder, of one card or of several.

    Raises DataError as `records.read` does, where a file mixes rows of several machines, and where the cards are not of
    one model or were not measured with one software stack.
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
    """Reads several runs of one machine as one. Raises DataError where the runs are of more than one machine."""
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
    """Returns one row per measurement: the median over the cards on which it succeeded.

    Times, values and each quantile of the samples are medians; the other fields are those of the card nearest to the
    median. `by_card` holds the time or value taken from each card. Host costs and the host's scalars come only from
    the cards that had the host to themselves: those that calibrated it.
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
    if not nearest["key"].startswith("host/"):  # the order of host samples marks the rounds
        middles["samples"] = _median_samples([row.get("samples") or [] for row in done.values()])
    by_card = {name: _reading(row) for name, row in done.items()}
    is_throttled = any(row.get("throttled") for row in done.values())
    return merged(FitRow, nearest, {"by_card": by_card}, middles, {"throttled": is_throttled})


def _numbers(rows: Iterable[Fields], name: str) -> list[float]:
    """The values of a field, of the rows that have a number there."""
    return [float(value) for row in rows if isinstance(value := row.get(name), int | float)]


def _reading(row: FitRow) -> float:
    """A row's reading: the seconds that a profile takes from it, or a scalar's value; 0 where neither is present."""
    found = row.get("taken_seconds") or row.get("seconds") or row.get("kernel_seconds") or row.get("value")
    return float(found or 0.0)


def _median_samples(samples: Sequence[Sequence[float]]) -> list[float]:
    """Samples whose every quantile is the median over the cards; as many as the card with the fewest has."""
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
    """The cards from which the spread between cards is computed.

    A card counts if, of the rows that at least one other card also measured, it has at least `LEAST_SHARE` of the
    median card's number. A card on which a few kernels were measured again, or thousands that no other card has, would
    restrict the spread to the few rows that all cards have."""
    done = {
        name: {(row["key"], row.get("backend"), row.get("cache")) for row in rows if row["status"] == "ok"}
        for name, rows in cards.items()
    }
    having = Counter(key for keys in done.values() for key in keys)
    measured = {name: sum(having[key] > 1 for key in keys) for name, keys in done.items()}
    least = LEAST_SHARE * float(np.median(list(measured.values()))) if measured else 0.0
    return {name: rows for name, rows in cards.items() if measured[name] >= least}


def with_cards(profile: Profile, found: Found) -> Profile:
    """Adds the spread between the cards, which widens estimates, to the profile; unchanged if fewer than two count."""
    if len(counted(found.cards)) < 2:
        return profile
    return replace(profile, provenance={**profile.provenance, "gpus": spread(found)})


def spread(found: Found) -> dict[str, Any]:
    """{"cards": by name, "classes": by "class/cache", "slowest", "slowest_factor"}.

    Per class: the number of `rows` that all cards measured, `sigma` (standard deviation of log seconds from card to
    card), `median` and `p90` of the ratio of the largest to the smallest time, minus 1, `factors` (each card's median
    ratio to the median card's time), `slowest` and its `slowest_factor`, and the `worst` rows. The slowest card overall
    has the greatest factor over all rows of shapes. Cards that do not count (`counted`) are listed with factor None.
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
            "uuid": devices[name].get("uuid") if name in devices else None,
            "machine": found.machines[name]["machine"] if name in found.machines else None,
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
    """Maps "class/cache" to (row keys, seconds[rows, cards]) of the rows that all cards measured."""
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
