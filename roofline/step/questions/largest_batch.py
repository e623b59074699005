"""Finds the largest micro-batch that fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory import needed_bytes, peak_bytes, workspace_bytes
from flopcast.roofline.step.priced_step import traced_of
from flopcast.roofline.stream.library.modules import Module
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES

MOST = 2**20  # sequences: the search goes no further


def largest_batch(model: Mapping[str, Any] | Module, run: Run, profile: Profile) -> int:
    """Returns the sequences (of a module: samples) of the largest micro-batch for which `Forecast.fits` holds, all else
    as in `run`; 0 if not even one fits. `model`: a config or a user's module.

    Raises UsageError as `forecast` does, where more than `MOST` would fit, and for a factory that takes no batch."""
    check_search(run)
    if isinstance(model, Module):
        module, device = model, run.device_of(profile.device)
        seq = module.at_batch(run, device, BATCHES[0]).meta["seq"]
        return _largest(lambda batch: module.at_batch(run, device, batch), profile, seq)
    config = model

    def stream_at(batch: int) -> Stream:
        return get_stream(config, traced_of(replace(run, batch=batch), profile), vary="batch")

    return _largest(stream_at, profile, run.seq)


def check_search(run: Run) -> None:
    """Raises UsageError where the largest batch of a run is not searched for: ask before its step is compiled."""
    run.check()
    if run.mode != "eager":
        raise UsageError(
            f"the largest batch with mode {run.mode!r}: every batch that the search tries would have to be compiled, "
            "some minutes in all; give --batch"
        )


def _largest(stream_at: Callable[[int], Stream], profile: Profile, seq: int) -> int:
    """Searches for the largest batch whose needed bytes fit into the device's memory.

    Memory grows with the batch, and faster the larger it is (what is live at the peak changes). The search interpolates
    linearly between the largest batch known to fit and the smallest known not to."""
    room = int(profile.device.get("memory_bytes") or 0)

    def needed(batch: int) -> int:
        return needed_bytes(peak_bytes(stream_at(batch), workspace_bytes(profile.capability)))

    fits, too_many = 0, 2
    used = {fits: 0}
    while too_many < MOST and (need := needed(too_many)) <= room:
        fits, used[too_many] = too_many, need
        too_many *= 4
    if too_many >= MOST:
        what = f"sequences of {seq} tokens" if seq > 1 else "samples"
        raise UsageError(f"more than {fits} {what} fit: that is no limit to plan with; name one with --batch")
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
