"""Fits the law of matmul tiles (`kernels/matmul_law.py`) to timings, and says how well it picks at shapes left out.

    python -m studies.kernels.tile_law RECORD... [--write] [--folds 0]

RECORD: files of `flopcast tune-kernels` and `studies.kernels.tiles` (matmul_tuning.jsonl, also gzipped); of a
configuration that was timed at a shape several times the last counts. The constants and the rates are those of least
squares of log seconds, large errors damped; a configuration counts the less the further it is from the fastest at its
shape. What they leave over is fitted by trees (`studies.boosting`). `--folds N`: also fitted without each Nth of the
shapes, at which they then pick among what was timed there. `--write` replaces kernels/data/tiles_nvidia_h200.json and
trees_nvidia_h200.json.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopcast.kernels.matmul_configs import MatmulConfig, from_key
from flopcast.kernels.matmul_law import (
    FOLDER,
    Array,
    Columns,
    Constants,
    Law,
    columns,
    fitted,
    inputs,
    seconds,
    sizes_of,
    tile_key,
)
from flopcast.kernels.matmul_trees import Grown
from studies.boosting import boosted
from studies.command import parser_of
from studies.fitting import rounded

FILE = FOLDER / "tiles_nvidia_h200.json"
TREES = FOLDER / "trees_nvidia_h200.json"
SM_COUNT = 132
ROBUST = 0.04  # log seconds from which on an error counts linearly
SHARED = 0.3
TIMED_AT = 80  # shapes, in turn with all others: tiles timed at fewer are no candidates
NEAR = 4  # power of (fastest / seconds) by which a row counts
RATE, RATE_SD, CONSTANT_SD = 0.9, 0.25, 0.5  # what is believed before: of a rate, and of a constant its present value
Place = tuple[str, int, int, int]


@dataclass(frozen=True)
class Timed:
    """Configurations timed at a shape, and cuBLAS where it was read with them."""

    place: Place
    configs: tuple[MatmulConfig, ...]
    seconds: Array
    library: float | None

    @property
    def weights(self) -> Array:
        return np.asarray((self.seconds.min() / self.seconds).clip(0.3) ** NEAR)


def read(paths: Iterable[Path]) -> list[Timed]:
    """The timings of a few readings (round 1) of all records."""
    found: dict[Place, dict[str, float]] = {}
    library: dict[Place, float] = {}
    for path in paths:
        opened: Any = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            for row in map(json.loads, file):
                if row["kind"] == "time" and row.get("round") == 1 and row["status"] == "ok":
                    place = (row["layout"], row["m"], row["n"], row["k"])
                    if "library_seconds" in row:
                        if place in found and place not in library:
                            del found[place]  # read one by one, not in turn
                        library[place] = row["library_seconds"]
                    elif place in library:
                        continue
                    found.setdefault(place, {})[row["config"]] = row["seconds"]
    return [
        Timed(place, tuple(map(from_key, times)), np.array(list(times.values())), library.get(place))
        for place, times in found.items()
    ]


class Rows:
    """All timings as arrays, shapes of one layout after another's."""

    def __init__(self, timed: Sequence[Timed], tiles: Sequence[str]) -> None:
        number = {tile: i for i, tile in enumerate(tiles)}
        self.parts: list[tuple[str, Columns, NDArray[np.intp], Array]] = []
        measured, weights, places = [], [], []
        for layout in ("nt", "nn", "tn"):
            ours = [one for one in timed if one.place[0] == layout]
            configs = [config for one in ours for config in one.configs]
            sizes = np.array([one.place[1:] for one in ours for _ in one.configs], float).T
            which = np.array([number[tile_key(config)] for config in configs])
            self.parts.append((layout, columns(configs, np.ones(len(configs))), which, sizes))
            measured += [one.seconds for one in ours]
            weights += [one.weights for one in ours]
            places += [len(one.configs) for one in ours]
        self.log_seconds = np.log(np.concatenate(measured))
        self.weights = np.concatenate(weights)
        self.shape = np.repeat(np.arange(len(places)), places)

    def off(self, constants: Constants, rates: Array) -> Array:
        """Errors of log seconds, of what all configurations of a shape have in common SHARED alone: it ranks none."""
        error = self.predicted(constants, rates) - self.log_seconds
        total = np.bincount(self.shape, self.weights)
        common = np.bincount(self.shape, self.weights * error) / total
        return np.asarray((error - (1 - SHARED) * common[self.shape]) * self.weights)

    def predicted(self, constants: Constants, rates: Array) -> Array:
        """Log seconds."""
        return np.concatenate([
            np.log(seconds(constants, arrays._replace(rate=rates[which]), sizes_of(layout, *sizes), SM_COUNT))
            for layout, arrays, which, sizes in self.parts
        ])  # fmt: skip


NAMES = tuple(field.name for field in fields(Constants))


def fit(timed: Sequence[Timed], start: Law, steps: int = 25) -> Law:
    from scipy.optimize import least_squares

    tiles = sorted({tile_key(config) for one in timed for config in one.configs})
    rows = Rows(timed, tiles)
    center = np.log([*(getattr(start.constants, name) for name in NAMES), *[RATE] * len(tiles)])
    first = np.log([*np.exp(center[: len(NAMES)]), *(start.rates.get(tile, RATE) for tile in tiles)])
    width = np.array([CONSTANT_SD] * len(NAMES) + [RATE_SD] * len(tiles))

    def misfit(theta: Array) -> Array:
        off = rows.off(_constants(theta), np.exp(theta[len(NAMES) :]))
        return np.concatenate([off / ROBUST, (theta - center) / width])

    theta = least_squares(misfit, first, loss="soft_l1", max_nfev=steps).x
    rates = dict(zip(tiles, np.exp(theta[len(NAMES) :]).tolist(), strict=True))
    found = candidates(timed)
    return Law(device=start.device, triton=start.triton, constants=_constants(theta), rates=rates, candidates=found)


def grown(timed: Sequence[Timed], law: Law) -> Grown:
    """The trees of what the law leaves over; of what all configurations of a shape have in common SHARED alone."""
    rows, target, weights = [], [], []
    for one in timed:
        cost, asked = by_law(one, law)
        left = np.log(one.seconds / cost)
        rows.append(asked)
        target.append(left - (1 - SHARED) * np.average(left, weights=one.weights))
        weights.append(one.weights)
    return boosted(np.concatenate(rows), np.concatenate(target), np.concatenate(weights))


def by_law(one: Timed, law: Law) -> tuple[Array, Array]:
    """(seconds by the law, what the trees ask) of each configuration."""
    configs = columns(one.configs, [law.rates[tile_key(config)] for config in one.configs])
    sizes = sizes_of(*one.place)
    return seconds(law.constants, configs, sizes, SM_COUNT), inputs(configs, sizes, SM_COUNT)


def candidates(timed: Sequence[Timed]) -> tuple[str, ...]:
    in_turn = Counter(tile for one in timed if one.library for tile in {tile_key(config) for config in one.configs})
    return tuple(
        sorted(tile for tile, count in in_turn.items() if count >= TIMED_AT and not tile.startswith("pointer"))
    )


def _constants(theta: Array) -> Constants:
    return Constants(**dict(zip(NAMES, np.exp(theta[: len(NAMES)]).tolist(), strict=True)))


@dataclass(frozen=True)
class Pick:
    """What a law picks of the configurations timed at a shape: its seconds, the fastest's, cuBLAS's, its estimate."""

    place: Place
    picked: MatmulConfig
    seconds: float
    fastest: float
    library: float | None
    estimate: float


def picks(timed: Iterable[Timed], law: Law, trees: Grown) -> Iterator[Pick]:
    for one in timed:
        cost, asked = by_law(one, law)
        cost = cost * np.exp(trees(asked))
        i = int(np.argmin(cost))
        yield Pick(
            one.place, one.configs[i], float(one.seconds[i]), float(one.seconds.min()), one.library, float(cost[i])
        )


def left_out(timed: Sequence[Timed], start: Law, folds: int) -> Iterator[Pick]:
    """The picks at each shape of a law and trees that have not seen it."""
    fold = np.random.default_rng(0).permutation(len(timed)) % folds
    for i in range(folds):
        others = [one for one, its in zip(timed, fold, strict=True) if its != i]
        law = fit(others, start, 12)
        known = [one for one, its in zip(timed, fold, strict=True) if its == i]
        known = [one for one in known if all(tile_key(config) in law.rates for config in one.configs)]
        yield from picks(known, law, grown(others, law))


def multiple_of(place: Place) -> str:
    return "64" if all(size % 64 == 0 for size in place[1:]) else "8"


def summary(found: Sequence[Pick], of: str) -> Iterator[str]:
    def mean(values: Sequence[float]) -> float:
        return float(np.exp(np.mean(np.log(values))))

    for label in ("64", "8"):
        some = [pick for pick in found if multiple_of(pick.place) == label]
        if not some:
            continue
        lost = [pick.seconds / pick.fastest for pick in some]
        off = np.abs([np.log(pick.estimate / pick.seconds) for pick in some])
        text = (
            f"{of}, multiples of {label}: {len(some)} shapes, the pick takes {mean(lost):.3f} of the fastest timed "
            f"(90th percentile {np.quantile(lost, 0.9):.2f}, most {max(lost):.2f}); its time is off by "
            f"{np.median(off):.1%} at the median, {np.quantile(off, 0.9):.1%} at the 90th percentile"
        )
        ratios = [pick.library / pick.seconds for pick in some if pick.library]
        best = [pick.library / pick.fastest for pick in some if pick.library]
        if ratios:
            text += (
                f"; cuBLAS's time over the pick's {mean(ratios):.3f} (least {min(ratios):.2f}), over the fastest's "
                f"{mean(best):.3f} (least {min(best):.2f})"
            )
        yield text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"replace {FILE.name}")
    options = parser.parse_args(arguments)
    timed = read(options.records)
    law = fit(timed, fitted())
    trees = grown(timed, law)
    print(*summary(list(picks(timed, law, trees)), "fitted"), sep="\n")
    if options.folds:
        print(*summary(list(left_out(timed, law, options.folds)), "left out"), sep="\n")
    if options.write:
        record = {
            "device": law.device, "triton": law.triton,
            "constants": {name: getattr(law.constants, name) for name in NAMES}, "rates": law.rates,
            "candidates": law.candidates,
        }  # fmt: skip
        FILE.write_text(json.dumps(rounded(record), indent=1) + "\n", encoding="utf-8")
        left = {"device": law.device, **{name: each.tolist() for name, each in trees._asdict().items()}}
        TREES.write_text(json.dumps(rounded(left)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
