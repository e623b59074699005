"""Fits the law that says which of our products is faster than cuBLAS's (`gpu/library/product_ratio.py`).

    python -m studies.kernels.ratio RECORD... [--gpu nvidia-h200] [--judge PAIRS.csv] [--write]

RECORD: files of `studies.kernels.tiles`, in which each shape's configurations were timed in turn with cuBLAS; what
counts is the one that a call takes. Or of `studies.kernels.pairs` (.csv), those of what a call takes today. Shapes of
the tuned table are left out.
Judged tenfold, each tenth by the others, and by `--judge`, pairs of other shapes. `--write` replaces
roofline/data/product_ratio.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from flopcast.kernels.matmul_law import Array
from flopcast.kernels.matmul_table import choose, find
from flopcast.kernels.shapes import Gemm
from flopcast.roofline.gpu.library.product_ratio import FILE, Pair, Ratio, likeness, place, terms
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from studies.command import parser_of
from studies.fitting import rounded
from studies.kernels.gap import timed
from studies.kernels.pairs import read_rows
from studies.kernels.tile_law import SM_COUNT, Timed, read

RIDGE = 1.0  # against terms that few shapes tell apart
MOST = 0.35  # of a pair's error that counts, log
FOLDS = 10
WHITE = 0.05  # noise of a pair, log
ROUNDS = 3


def pairs(records: Sequence[Timed], device: str) -> list[tuple[Gemm, float]]:
    """Shapes with log(ours / cuBLAS's), of the configuration that a call takes."""
    found = []
    table = find(device, "")
    for one in records:
        layout, m, n, k = one.place
        shape = Gemm(m=m, n=n, k=k, layout=layout)
        taken = choose(shape, SM_COUNT, (9, 0), tma=True, table=table).key
        times = {config.key: seconds for config, seconds in zip(one.configs, one.seconds.tolist(), strict=True)}
        is_tuned = table is not None and (m, n, k) in table.choices.get(layout, {})
        if one.library and taken in times and not is_tuned:
            found.append((shape, float(np.log(times[taken] / one.library))))
    return found


def timed_pairs(records: Sequence[Path], device: str) -> list[tuple[Gemm, float]]:
    tables = [path for path in records if path.suffix == ".csv"]
    found = pairs(read([path for path in records if path not in tables]), device)
    for row in (row for path in tables for row in timed(read_rows(path))):
        shape = Gemm(m=int(row["m"]), n=int(row["n"]), k=int(row["k"]), layout=row["layout"])
        if row["config"] == choose(shape, SM_COUNT, (9, 0), tma=True, table=find(device, "")).key:
            found.append((shape, float(np.log(float(row["seconds"]) / float(row["peer_seconds"])))))
    return found


def estimates(shapes: Sequence[Gemm], profile: Profile) -> Array:
    """log(ours / cuBLAS's) by the profile's estimates."""
    works = [describe(shape) for shape in shapes]
    ours, library = (
        np.log([each.seconds for each in profile.estimate([(work, backend, "cold") for work in works])])
        for backend in ("triton", "torch")
    )
    return np.asarray(ours - library)


def fit(values: Array, error: Array) -> Array:
    """The coefficients, by ridge regression."""
    clipped = np.clip(error, -MOST, MOST)
    return np.asarray(np.linalg.solve(values.T @ values + RIDGE * np.eye(values.shape[1]), values.T @ clipped))


def weights(places: Array, left: Array) -> Array:
    """The weights of a Gaussian process at `places`, of what the line leaves over. Pairs far off it count less, as if
    their noise were larger: cuBLAS runs some products twice as slowly as their neighbours."""
    near = likeness(places, places)
    noise: Array = np.full(len(left), WHITE**2)
    found: Array = np.zeros(len(left))
    for _ in range(ROUNDS):
        found = np.asarray(np.linalg.solve(near + np.diag(noise), left), np.float64)
        beyond = np.abs(left - near @ found) / (2 * WHITE)
        noise = np.asarray(WHITE**2 * beyond.clip(1.0) ** 2)
    return found


def fitted_ratio(gpu: str, shapes: Sequence[Gemm], known: Array, ratio: Array) -> Ratio:
    values = np.array([terms(shape, own) for shape, own in zip(shapes, known.tolist(), strict=True)])
    error = np.clip(ratio - known, -MOST, MOST)
    line = fit(values, error)
    places = np.array([place(shape, own) for shape, own in zip(shapes, known.tolist(), strict=True)])
    of_process = weights(places, error - values @ line)
    pairs = tuple(
        Pair(shape.layout, shape.m, shape.n, shape.k, own, weight)
        for shape, own, weight in zip(shapes, known.tolist(), of_process.tolist(), strict=True)
    )
    return Ratio(gpu=gpu, coefficients=tuple(line.tolist()), pairs=pairs)


def by_law(law: Ratio, shapes: Sequence[Gemm], known: Array) -> Array:
    return np.array([law.corrected(shape, own) for shape, own in zip(shapes, known.tolist(), strict=True)])


def kept(ratio: Array, picked: Array) -> str:
    """The speed of what is picked (ours where `picked` is below 0) over the better one's."""
    lost = np.where(picked < 0, ratio, 0.0) - np.minimum(ratio, 0.0)
    return f"{np.exp(-lost.mean()):.4f}, least {np.exp(-lost.max()):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--judge", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help=f"replace {FILE.name}")
    options = parser.parse_args(arguments)
    profile = find_profile(options.gpu)
    device = str(profile.device.get("name"))
    found = timed_pairs(options.records, device)
    shapes, ratio = [shape for shape, _ in found], np.array([value for _, value in found])
    known = estimates(shapes, profile)
    left_out = np.zeros(len(shapes))
    fold = np.random.default_rng(0).permutation(len(shapes)) % FOLDS
    for i in range(FOLDS):
        others, mine = np.flatnonzero(fold != i), np.flatnonzero(fold == i)
        law = fitted_ratio(profile.gpu, [shapes[j] for j in others], known[others], ratio[others])
        left_out[mine] = by_law(law, [shapes[j] for j in mine], known[mine])
    tell("cross-validated", ratio, known, left_out)
    law = fitted_ratio(profile.gpu, shapes, known, ratio)
    if options.judge:
        others_found = timed_pairs(options.judge, device)
        judged, of_judged = [shape for shape, _ in others_found], np.array([value for _, value in others_found])
        guesses = estimates(judged, profile)
        tell("judged", of_judged, guesses, by_law(law, judged, guesses))
    if options.write:
        FILE.write_text(json.dumps(rounded(asdict(law)), separators=(",", ":")) + "\n", encoding="utf-8")
    return 0


def tell(how: str, ratio: Array, known: Array, by_law: Array) -> None:
    picks = {"always ours": -np.ones(len(ratio)), "always cuBLAS": np.ones(len(ratio)), "estimates": known,
             "this law": by_law}  # fmt: skip
    for label, picked in picks.items():
        print(f"{how}, {label}: {len(ratio)} shapes, the pick's speed over the better one's {kept(ratio, picked)}")


if __name__ == "__main__":
    sys.exit(main())
