"""Forecasts the points of the sawtooth figure: steps over a range of hidden sizes, aligned and not, on one GPU.

    points = sawtooth_points(profile)                        # ten seconds: ninety forecasts, one trace
    figure = views.figures.widths.sawtooth_figure(points, profile)   # a canvas.Figure, as the report's others

The report page can take both as they are; `flopcast widths --figure` draws the same around one width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.model.models import Config, depth_for, make_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.widths.penalties import ALIGNED, Point, survey

RANGE = 512, 4096
OFFSETS = (1, 2, 4, 8, 16, 32)  # beside every multiple of 512
RUN = Run(batch=8, seq=1024, optimizer="adamw-fused")  # large enough that the device bounds the step
TILE = 128, 256  # the tile of cuBLAS's large products on Hopper: rows (tokens), columns (the width)


def sawtooth_widths(low: int = RANGE[0], high: int = RANGE[1]) -> list[int]:
    """Returns the multiples of 128, one multiple of 64 after each multiple of 256 from `low`, and sizes 1 to 32 above
    each multiple of 512 from `low`."""
    found = {*range(low, high + 1, 128), *range(low + ALIGNED, high, 256)}
    found |= {anchor + offset for anchor in range(low, high, 512) for offset in OFFSETS}
    return sorted(value for value in found if low <= value <= high)


def ladder_shape(width: int, law: str = "printed", vocab: int | None = None) -> Config:
    """Returns the ladder's model at a hidden size that need not be aligned: heads, ffn and depth are those of the
    nearest multiple of 128, so that only the hidden size is unaligned."""
    near = max(128, round(width / 128) * 128)
    shape = make_config(width=near, depth=max(2, depth_for(near, law)))
    if vocab is not None:
        shape["vocab_size"] = vocab
    return {**shape, "hidden_size": width}


def sawtooth_points(
    profile: Profile,
    widths: Sequence[int] | None = None,
    run: Run = RUN,
    *,
    law: str = "printed",
    vocab: int | None = None,
    host: HostCosts | None = None,
    progress: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Forecasts steps of the ladder over hidden sizes. Raises UsageError as `forecast` does."""
    chosen = sawtooth_widths() if widths is None else widths
    asked = ((width, ladder_shape(width, law, vocab)) for width in chosen)
    return survey("hidden", asked, run, profile, host=host, progress=progress)


def wave_ends(tokens: int, sm_count: int, low: int, high: int, tile: tuple[int, int] = TILE) -> list[tuple[int, int]]:
    """Returns (wave, width) of the widths in [low, high] at which a product [tokens, width] just fills its waves.

    One more column of tiles begins the next wave: the product has ceil(tokens / rows) x width / columns blocks on
    `sm_count` multiprocessors.
    """
    rows, columns = tile
    down = -(-tokens // rows)
    found: dict[int, int] = {}
    wave = 1
    while (width := wave * sm_count // down * columns) <= high:
        if width >= low:
            found[width] = wave
        wave += 1
        if down > sm_count * 64:
            break
    return [(wave, width) for width, wave in found.items()]
