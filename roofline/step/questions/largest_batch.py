"""Finds the largest micro-batch that fits into a GPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flopcast.errors import UsageError
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.needed import needed_bytes
from flopcast.roofline.step.priced_step import target_of, traced_of
from flopcast.roofline.stream.library.ahead import compile_ahead
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
    run.check()
    target = target_of(profile, run.mode)

    def needed(stream: Stream) -> int:
        return needed_bytes(stream, run.layout, target)

    if isinstance(model, Module):
        module, device = model, run.device_of(profile.device)
        seq = module.at_batch(run, device, BATCHES[0]).meta["seq"]
        search = _largest if run.mode == "eager" else _largest_of_few
        return search(lambda batch: needed(module.at_batch(run, device, batch)), profile, seq)
    config = model

    def needed_at(batch: int) -> int:
        return needed(get_stream(config, traced_of(replace(run, batch=batch), profile), vary="batch"))

    def compile_at(batches: Sequence[int]) -> None:
        compile_ahead([(config, traced_of(replace(run, batch=batch), profile)) for batch in batches])

    if run.mode == "eager":
        return _largest(needed_at, profile, run.seq)
    return _largest_of_few(needed_at, profile, run.seq, compile_at)


def _largest(needed: Callable[[int], int], profile: Profile, seq: int) -> int:
    """Searches for the largest batch whose needed bytes fit into the device's memory.

    Memory grows with the batch, and faster the larger it is (what is live at the peak changes). The search interpolates
    linearly between the largest batch known to fit and the smallest known not to."""
    room = int(profile.device.get("memory_bytes") or 0)
    fits, too_many = 0, 2
    used = {fits: 0}
    while too_many < MOST and (need := needed(too_many)) <= room:
        fits, used[too_many] = too_many, need
        too_many *= 4
    if too_many >= MOST:
        raise _endless(fits, seq)
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


FIRST = (2, 8)  # batches that a search of few begins with: in one sequence, nothing is batched


def _largest_of_few(
    needed: Callable[[int], int],
    profile: Profile,
    seq: int,
    prepare: Callable[[Sequence[int]], None] = lambda batches: None,
) -> int:
    """As `_largest`, where each batch takes long, as one that has to be compiled: four batches in most cases. Memory is
    nearly linear in the batch, so that two batches tell where it ends, and the two there whether it does. `prepare` is
    told which batches are tried next."""
    room = int(profile.device.get("memory_bytes") or 0)
    used: dict[int, int] = {}
    fits = 0
    guesses: Sequence[int] = FIRST
    while guesses:
        prepare(guesses)
        used |= {guess: needed(guess) for guess in guesses}
        too_many = min((batch for batch, need in used.items() if need > room), default=MOST)
        fits = max((batch for batch in used if batch < too_many), default=0)
        line = _on_line(used, room)
        if too_many == MOST <= max(line):
            raise _endless(fits, seq)
        guesses = [guess for guess in line if fits < guess < too_many]
        if not guesses and too_many - fits > 1:
            guesses = [(fits + too_many) // 2]
    return fits


def _on_line(used: Mapping[int, int], room: int) -> tuple[int, int]:
    """The batch at which memory ends, by the line through the two tried batches nearest to it, and the next one."""
    low, high = sorted(sorted(used, key=lambda batch: abs(used[batch] - room))[:2])
    slope = (used[high] - used[low]) / (high - low)
    last = low + int((room - used[low]) / slope) if slope > 0 else MOST
    return last, last + 1


def _endless(fits: int, seq: int) -> UsageError:
    what = f"sequences of {seq} tokens" if seq > 1 else "samples"
    return UsageError(f"more than {fits} {what} fit: that is no limit to plan with; name one with --batch")
