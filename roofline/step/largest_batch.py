"""Finds the largest micro-batch that fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.priced_step import PricedStep, traced_of
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES, to_batch

MOST = 2**20  # sequences: the search goes no further


def largest_batch(config: Mapping[str, Any], run: Run, profile: Profile) -> int:
    """Returns the sequences of the largest micro-batch for which `Forecast.fits` holds, all else as in `run`; 0 if not
    even one sequence fits.

    Raises UsageError as `forecast` does, and where more than `MOST` sequences would fit."""
    run.check()

    def stream_at(batch: int) -> Stream:
        return get_stream(config, traced_of(replace(run, batch=batch), profile), vary="batch")

    return _largest(stream_at, run, profile, run.seq)


def largest_module_batch(module: str, run: Run, profile: Profile, sizes: Mapping[str, int]) -> int:
    """As `largest_batch`, for the module that the factory "package.module:factory" makes. `sizes`: the other sizes
    passed to the factory.

    Raises UsageError as `api.forecast` does, and where the factory takes no batch."""
    from flopcast.roofline.stream.library import modules

    @cache
    def traced(batch: int) -> Stream:
        stream = modules.module_stream(module, run, profile.device["type"], sizes={**sizes, "batch": batch})
        if stream.meta["batch"] != batch:
            raise UsageError(
                f"--largest-batch with --module {module}: asked for a batch of {batch} the factory makes one of "
                f"{stream.meta['batch']}; give it a parameter `batch` that is the number of samples"
            )
        return stream

    def stream_at(batch: int) -> Stream:
        if batch in (1, *BATCHES):
            return traced(batch)
        try:
            return to_batch(traced(BATCHES[0]), traced(BATCHES[1]), batch)
        except NotDerivable:
            return traced(batch)

    return _largest(stream_at, run, profile, traced(BATCHES[0]).meta["seq"])


def _largest(stream_at: Callable[[int], Stream], run: Run, profile: Profile, seq: int) -> int:
    """Searches for the largest batch whose needed bytes fit into the device's memory.

    Memory grows with the batch, and faster the larger it is (what is live at the peak changes). The search interpolates
    linearly between the largest batch known to fit and the smallest known not to."""
    room = int(profile.device.get("memory_bytes") or 0)

    def needed(batch: int) -> int:
        return PricedStep(stream_at(batch), run, profile).needed_bytes

    fits, too_many = 0, 2
    used = {fits: 0}
    while too_many < MOST and (need := needed(too_many)) <= room:
        fits, used[too_many] = too_many, need
        too_many *= 4
    if too_many >= MOST:
        what = f"sequences of {seq} tokens" if seq > 1 else "samples"
        raise UsageError(f"more than {fits} {what} fit: that is no limit to plan with")
    used[too_many] = need
    if fits == 0:
        return 1 if needed(1) <= room else 0
    while too_many - fits > 1:
        # The curve is convex and lies below its chord: where the chord reaches the memory's size, some is still left.
        # The next batch is tried too, and then the middle of the interval.
        share = (room - used[fits]) / (used[too_many] - used[fits])
        chord = fits + int(share * (too_many - fits))
        for guess in (chord, chord + 1, (fits + too_many) // 2):
            if fits < guess < too_many:
                used[guess] = needed(guess)
                fits, too_many = (guess, too_many) if used[guess] <= room else (fits, guess)
    return fits
