"""Feeds a real step as a user's loop does: a DataLoader brings batches, which are copied to the GPU in a way of four.

    for batch in loader: batch = batch.to(device, non_blocking=...)

A batch lies ready in host memory, or each of its samples keeps a core busy for a while, in the training process or in
workers, as decoding does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from flopcast.gc_pause import no_garbage_collection
from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.training_step import TrainingStep
from flopcast.roofline.step.questions.input_pipeline import WAYS

Batch = dict[str, torch.Tensor]

PAGEABLE, _, UNWAITED, AHEAD = WAYS
READY = 4  # batches that take turns: one alone would stay in a processor's cache
ENDLESS = 2**30  # samples or batches of a data set
LOADED = 3  # batches by which the time of loading one is measured
FEW, MANY = 2, 4096  # steps of a round, at least and at most


class Ready(Dataset[Batch]):
    """Batches that lie in host memory, pinned or not. Nothing copies them on their way to the loop."""

    def __init__(self, batch: Batch, is_pinned: bool) -> None:
        copies = [{name: tensor.clone() for name, tensor in batch.items()} for _ in range(READY)]
        self.batches = [{n: t.pin_memory() for n, t in one.items()} for one in copies] if is_pinned else copies

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index % READY]


class Loaded(Dataset[Batch]):
    """Samples each of which keeps a core busy for `seconds`."""

    def __init__(self, sample: Batch, seconds: float) -> None:
        self.sample, self.seconds = sample, seconds

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Batch:
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass
        return self.sample


@dataclass(frozen=True)
class Feed:
    """How batches come to `step`: `batch` is one in host memory, each of its tensors once; `same` names for each that
    the model is called with the one that it is, as labels that are the ids."""

    step: TrainingStep
    batch: Batch
    same: Mapping[str, str]

    @classmethod
    def of(cls, step: TrainingStep | InferenceStep) -> Feed:
        """Raises TypeError for a step that is not called with tensors by name."""
        if not isinstance(step, TrainingStep) or not isinstance(step.batch, Mapping):
            raise TypeError(f"{type(step).__name__}: a training step whose model is called with names is fed")
        tensors = {name: value for name, value in step.batch.items() if isinstance(value, torch.Tensor)}
        first: dict[int, str] = {}
        same = {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}
        return cls(step, {name: tensors[name].cpu() for name in first.values()}, same)

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.batch.values())

    @property
    def samples(self) -> int:
        return len(next(iter(self.batch.values())))

    def loader(self, way: str, load_seconds: float = 0.0, workers: int = 0) -> Iterator[Batch]:
        """The batches in host memory as a DataLoader brings them, without end. `load_seconds`: of a sample; 0 where
        batches lie ready. Raises ValueError for samples to load of a batch that is channels-last, which torch's own
        `default_collate` does not make."""
        is_pinned = way != PAGEABLE
        if not load_seconds:
            return iter(DataLoader(Ready(self.batch, is_pinned), batch_size=None, pin_memory=is_pinned))
        if not all(tensor.is_contiguous() for tensor in self.batch.values()):
            raise ValueError(
                "samples to load of a batch that is not contiguous: feed this step with batches that lie ready"
            )
        sample = {name: tensor[0].clone() for name, tensor in self.batch.items()}
        return iter(DataLoader(
            Loaded(sample, load_seconds), batch_size=self.samples, num_workers=workers, pin_memory=is_pinned
        ))  # fmt: skip

    def load_seconds(self, asked: float) -> float:
        """What one process takes for a sample, putting the batch together included, in memory that is not pinned."""
        loader = self.loader(PAGEABLE, asked)
        next(loader)
        found = []
        for _ in range(LOADED):
            start = time.perf_counter()
            next(loader)
            found.append(time.perf_counter() - start)
        return median(found) / self.samples

    def fed(self, way: str, load_seconds: float = 0.0, workers: int = 0) -> Iterator[Batch]:
        """The batches on the device, each copied in a way of `WAYS`."""
        loader, device = self.loader(way, load_seconds, workers), next(self.step.model.parameters()).device
        return _ahead(loader, device) if way == AHEAD else _moved(loader, device, is_waited=way != UNWAITED)

    def run(self, batches: Iterator[Batch] | None) -> None:
        """One step, with the next batch where there are any."""
        if batches is not None:
            batch = next(batches)
            self.step.batch = {**self.step.batch, **{name: batch[one] for name, one in self.same.items()}}
        self.step.run()

    def drain(self) -> None:
        if self.step.device_type == "cuda":
            torch.cuda.synchronize()


def _moved(loader: Iterator[Batch], device: torch.device, *, is_waited: bool) -> Iterator[Batch]:
    for batch in loader:
        yield {name: tensor.to(device, non_blocking=not is_waited) for name, tensor in batch.items()}


def _ahead(loader: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The next batch is copied on a CUDA stream of its own before the step of this one is launched."""
    side = torch.cuda.Stream(device)

    def begun() -> Batch:
        batch = next(loader)
        with torch.cuda.stream(side):
            return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}

    coming = begun()
    while True:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        batch = coming
        for tensor in batch.values():
            tensor.record_stream(current)
        coming = begun()
        yield batch


# --- times


def timed(
    feed: Feed, sources: Mapping[str, Iterator[Batch] | None], *, rounds: int, round_seconds: float, warm_up: int,
    whole: int = 1, clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:  # fmt: skip
    """Seconds per step of each source of batches, None for a step whose batch stays in place: of every round one
    number, by the wall clock, the host waiting for the device at both ends alone. Sources take turns round by round,
    each after `warm_up` steps of its own. A round lasts `round_seconds` about, and is of a multiple of `whole` steps:
    workers that began together bring their batches together.

    Returns lists of seconds by source, and under "steps" the steps of a source's rounds."""
    steps: dict[str, int] = {}
    found: dict[str, list[float]] = {name: [] for name in sources}
    gc.collect()
    with no_garbage_collection():
        for number in range(rounds):
            for name, batches in sources.items():
                for _ in range(warm_up):
                    feed.run(batches)
                feed.drain()
                if number == 0:
                    one = _round(feed, batches, max(FEW, whole), clock)
                    steps[name] = ceil(min(max(round_seconds / max(one, 1e-9), FEW), MANY) / whole) * whole
                found[name].append(_round(feed, batches, steps[name], clock))
    return {**found, "steps": steps}


def _round(feed: Feed, batches: Iterator[Batch] | None, steps: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(steps):
        feed.run(batches)
    feed.drain()
    return (clock() - start) / steps
