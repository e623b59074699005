"""Fits the law that says which of our products is faster than cuBLAS's (`gpu/library/product_ratio.py`).

    python -m studies.kernels.ratio RECORD... [--gpu nvidia-h200] [--write]

RECORD: files of `studies.kernels.tiles`, in which each shape's configurations were timed in turn with cuBLAS; what
counts is the one that a call takes. Shapes of the tuned table are left out. Judged tenfold, each tenth by the others.
`--write` replaces roofline/data/product_ratio.json.
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
from flopcast.roofline.gpu.library.product_ratio import FILE, Ratio, terms
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.lowering.describe import describe
from studies.command import parser_of
from studies.fitting import rounded
from studies.kernels.tile_law import SM_COUNT, Timed, read

RIDGE = 1.0  # against terms that few shapes tell apart
MOST = 0.35  # of a pair's error that counts, log
FOLDS = 10


def pairs(timed: Sequence[Timed], device: str) -> list[tuple[Gemm, float]]:
    """Shapes with log(ours / cuBLAS's), of the configuration that a call takes."""
    found = []
    table = find(device, "")
    for one in timed:
        layout, m, n, k = one.place
        shape = Gemm(m=m, n=n, k=k, layout=layout)
        taken = choose(shape, SM_COUNT, (9, 0), tma=True, table=table).key
        times = {config.key: seconds for config, seconds in zip(one.configs, one.seconds.tolist(), strict=True)}
        is_tuned = table is not None and (m, n, k) in table.choices.get(layout, {})
        if one.library and taken in times and not is_tuned:
            found.append((shape, float(np.log(times[taken] / one.library))))
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


def kept(ratio: Array, picked: Array) -> str:
    """The speed of what is picked (ours where `picked` is below 0) over the better one's."""
    lost = np.where(picked < 0, ratio, 0.0) - np.minimum(ratio, 0.0)
    return f"{np.exp(-lost.mean()):.4f}, least {np.exp(-lost.max()):.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--gpu", default="nvidia-h200")
    parser.add_argument("--write", action="store_true", help=f"replace {FILE.name}")
    options = parser.parse_args(arguments)
    profile = find_profile(options.gpu)
    timed = pairs(read(options.records), str(profile.device.get("name")))
    shapes, ratio = [shape for shape, _ in timed], np.array([value for _, value in timed])
    known = estimates(shapes, profile)
    values = np.array([terms(shape, own) for shape, own in zip(shapes, known.tolist(), strict=True)])
    left_out = np.zeros(len(shapes))
    fold = np.random.default_rng(0).permutation(len(shapes)) % FOLDS
    for i in range(FOLDS):
        left_out[fold == i] = values[fold == i] @ fit(values[fold != i], (ratio - known)[fold != i])
    picks = {"always ours": -np.ones(len(ratio)), "always cuBLAS": np.ones(len(ratio)), "estimates": known,
             "this law, left out": known + left_out}  # fmt: skip
    for label, picked in picks.items():
        print(f"{label}: {len(ratio)} shapes, the pick's speed over the better one's {kept(ratio, picked)}")
    if options.write:
        found = Ratio(gpu=profile.gpu, coefficients=tuple(fit(values, ratio - known).tolist()))
        FILE.write_text(json.dumps(rounded(asdict(found)), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
