"""Draws the rates of matrix products over m and n at one k, with the edges of waves.

A product is cut into tiles, the tiles are distributed over the multiprocessors, and a last wave that is not full costs
as much as a full one, so rates fall off behind each edge. Cells are a profile's estimates; lines are where its law of
products counts one more wave of the likeliest tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flopcast.kernels.shapes import Gemm
from flopcast.roofline.base.units import duration, scale, three_digits
from flopcast.roofline.gpu.laws import gemm
from flopcast.roofline.gpu.profile.roofs import roofs_of
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import GemmVariant, SurfaceKey
from flopcast.roofline.views.figures.canvas import Figure, finish, new_sheet, styled
from flopcast.roofline.views.figures.colours import LIGHT, Theme

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile


SIZES = tuple(range(64, 4097, 64))
INNER = 4096
DTYPE, LAYOUT, CACHE = "bf16", "nt", "cold"
SHOWN_FROM = 0.5  # share of the best rate; lower rates, of products of a few tiles, share the darkest colour


@dataclass(frozen=True)
class ProductMap:
    """Estimates of the products m x n x k, with m and n from `sizes`, as arrays of [rows of m, columns of n].

    `waves` and `tiles` ("128x256", split k as "128x256 / 4") are the likeliest by the law of products; None where it
    does not give them. `bases`: share of the cells by basis.
    """

    k: int
    sizes: tuple[int, ...]
    flops_per_second: np.ndarray
    seconds: np.ndarray
    waves: np.ndarray | None
    tiles: list[list[str]] | None
    bases: dict[str, float]


def product_map(profile: Profile, sizes: Sequence[int] = SIZES, k: int = INNER) -> ProductMap | None:
    """Estimates the products of a map; None if the profile has no curve of such products, and for a CPU, which has no
    waves."""
    if profile.device.get("type") == "cpu" or not any(
        key.op_class == "gemm" and (key.variant.dtypes, key.cache) == (DTYPE, CACHE) for key in profile.surfaces
    ):
        return None
    works = [describe(Gemm(m=m, n=n, k=k, dtype=DTYPE, layout=LAYOUT)) for m in sizes for n in sizes]
    found = profile.estimate([(work, "torch", CACHE) for work in works])
    shape = len(sizes), len(sizes)
    seconds = np.array([estimate.seconds for estimate in found]).reshape(shape)
    flops = np.array([float(work.flops) for work in works]).reshape(shape)
    bases = {e.basis: 0 for e in found}
    for estimate in found:
        bases[estimate.basis] += 1
    surface = profile.surfaces.get(SurfaceKey("torch", "gemm", works[0].variant, CACHE))
    told = None
    if surface is not None and surface.kind == "gemm" and isinstance(surface.variant, GemmVariant):
        told = _likeliest(surface.variant, surface.params, np.array([work.features for work in works], float))
    waves = tiles = None
    if told is not None:
        waves, tiles = told[0].reshape(shape), [list(row) for row in np.array(told[1]).reshape(shape)]
    shares = {basis: number / len(found) for basis, number in bases.items()}
    return ProductMap(k, tuple(sizes), flops / seconds, seconds, waves, tiles, shares)


def _likeliest(
    variant: GemmVariant, params: Mapping[str, float], features: np.ndarray
) -> tuple[np.ndarray, list[str]] | None:
    """Returns (blocks over multiprocessors, tile) of each product's likeliest tile; None where no tile was learnt."""
    if not gemm.is_learnt(params, gemm.FAMILIES[0]):
        return None
    tiles, choice = gemm.likeliest_tiles(variant, params, features, 0)
    rows = np.arange(len(features))
    best = choice.share.argmax(axis=1)
    tile, parts = choice.tile[rows, best], choice.parts[rows, best]
    m, n = np.round(np.exp2(features[:, 0])), np.round(np.exp2(features[:, 1]))
    tile_m, tile_n = tiles.rows[tile], tiles.columns[tile]
    waves = np.ceil(m / tile_m) * np.ceil(n / tile_n) * parts / params["sm_count"]
    names = [
        f"{a:.0f}x{b:.0f}" + (f", k in {p:.0f}" if p > 1 else "") for a, b, p in zip(tile_m, tile_n, parts, strict=True)
    ]
    return waves, names


@styled
def map_figure(profile: Profile, found: ProductMap | None, *, theme: Theme = LIGHT) -> Figure | None:
    """Draws the heat map. None without estimates."""
    if found is None:
        return None
    best = float(found.flops_per_second.max())
    by, unit = scale(best, "FLOP/s")
    roof = roofs_of(profile).of(DTYPE)
    sheet = new_sheet(6.4)
    ax = sheet.axes[0]
    sizes = found.sizes
    step = sizes[1] - sizes[0]
    edges = (sizes[0] - step / 2, sizes[-1] + step / 2)
    drawn = sheet.image(
        ax, found.flops_per_second / by, _tips(found, by, unit), cmap="cividis", aspect="equal",
        extent=(*edges, *edges), vmin=SHOWN_FROM * best / by, vmax=best / by,
    )  # fmt: skip
    ticks = [size for size in (64, 512, 1024, 1536, 2048, 2560, 3072, 3584, 4096) if size <= sizes[-1]]
    ax.set(xticks=ticks, yticks=ticks, xlabel="n", ylabel="m")
    ax.set_xticklabels([str(tick) for tick in ticks])
    ax.set_yticklabels([str(tick) for tick in ticks])
    ax.grid(False)
    bar: Any = sheet.canvas.colorbar(drawn, ax=ax, extend="min", shrink=0.86, pad=0.02)
    bar.set_label(f"{unit}, {DTYPE}, k = {found.k}")
    bar.outline.set_visible(False)
    slow = float(np.quantile(found.flops_per_second[_large(found)], 0.1))
    caption = (
        f"Products m x n x {found.k} in {DTYPE}, in steps of {step}: the best reaches {three_digits(best / by)} {unit}"
        + (f", {best / roof.best.value:.0%} of the burst roof" if roof else "")
        + f"; one in ten of those with both sides of 2048 and more stays below {three_digits(slow / by)}. The ragged "
        "edges are waves: a last round of tiles that does not fill the multiprocessors takes as long as a full one."
    )
    if found.waves is not None:
        caption += " A cell's words name the likeliest tile and how many rounds it makes."
    caption += f" What is darkest lies below {SHOWN_FROM:.0%} of the best."
    bases = ", ".join(
        f"{f'{share:.0%}' if share >= 0.01 else 'under 1%'} {basis}"
        for basis, share in sorted(found.bases.items(), key=lambda b: -b[1])
    )
    alt = (
        f"Heat map of {unit} over m and n from {sizes[0]} to {sizes[-1]}: dark along both axes, where products are "
        f"small, and bright to {three_digits(best / by)} {unit} beyond, with steps where another wave of tiles begins."
    )
    return finish(sheet, "map", "Efficiency map: products over m and n", caption, alt,
                  f"estimates of a {profile.basis} profile, operands from memory (cold): {bases}")  # fmt: skip


def _large(found: ProductMap) -> tuple[slice, slice]:
    first = next((i for i, size in enumerate(found.sizes) if size >= 2048), 0)
    return slice(first, None), slice(first, None)


def _tips(found: ProductMap, by: float, unit: str) -> list[str]:
    tips = []
    for i, m in enumerate(found.sizes):
        for j, n in enumerate(found.sizes):
            tip = (
                f"{m} x {n}: {three_digits(found.flops_per_second[i, j] / by)} {unit}, {duration(found.seconds[i, j])}"
            )
            if found.waves is not None and found.tiles is not None:
                tip += f"; {found.tiles[i][j]}, {found.waves[i, j]:.2f} waves"
            tips.append(tip)
    return tips
