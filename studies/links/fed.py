"""Measures on a GPU real steps that a DataLoader feeds, in the four ways that `flopcast predict --input` forecasts.

    python -m studies.links.fed OUT [--budget 240]

Of each step: its own time with the batch in place, then fed with batches that lie ready in host memory; of two steps
also with samples that take a while to load, by the training process, by too few workers and by enough of them. Appends
rows to OUT as they are measured, and goes on where it was stopped. `python -m studies.links.fed_table` compares them
with forecasts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from flopcast.microbench.recipe.inference import InferenceStep
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.training_step import TrainingStep
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import EMPTY_FIELDS, FedStepRow, Fields, Row, merged, rounded
from flopcast.microbench.steps.measure import time_step
from flopcast.microbench.steps.run import measure_plan, timing_fields
from flopcast.microbench.sweep.work import Stopwatch, first_line, oom_or_error
from flopcast.microbench.timing.allocator import settle_allocator
from flopcast.microbench.timing.device import describe, pick_device
from flopcast.microbench.timing.telemetry import Reading, telemetry
from flopcast.roofline.step.questions.input_pipeline import WAYS
from flopcast.roofline.stream.model.models import load_config
from studies.command import parser_of
from studies.links.feeding import Batch, Feed, timed

SUITE = "input"
UNFED = "unfed"
BUDGET = 240.0  # seconds
ROUNDS, LOADED_ROUNDS = 5, 3
ROUND_SECONDS = 0.3
WARM_UP = 2  # steps before a round
PREFETCHED = 2  # batches of each worker that lie ready before the first step: torch's default


@dataclass(frozen=True)
class Loading:
    """How a step's batches are loaded: milliseconds for which a sample keeps a core busy, 0 where batches lie ready,
    and the workers."""

    load_ms: float = 0.0
    workers: int = 0


@dataclass(frozen=True)
class Case:
    """A step and how its batches are loaded, one after the other."""

    plan: StepPlan
    loadings: tuple[Loading, ...] = (Loading(),)

    def key(self, loading: Loading, way: str) -> str:
        how = f"load{loading.load_ms:g}ms/workers{loading.workers}/{way.replace(', ', '-').replace(' ', '-')}"
        return f"fed_{self.plan.key}/{how}"


def _image(name: str, batch: int, *loadings: Loading) -> Case:
    plan = StepPlan(name=name, config={}, module=name, batch=batch, seq=1, optimizer="adamw-fused", group=SUITE)
    return Case(plan, (Loading(), *loadings))


def cases() -> list[Case]:
    """Chosen before any was measured: copies of 64 KiB to 154 MB. Where samples are loaded, one process takes longer
    than the step, two do, and eight are enough or nearly so. ResNet-18 stands for MobileNetV2, which was chosen first:
    its step is forecast at 115 ms, so that loading that bounds it would take minutes."""
    config = load_config("qwen3-0.6b")
    tokens = StepPlan(name="qwen3-0.6b", config=config, batch=8, seq=1024, optimizer="adamw-fused", group=SUITE)
    return [
        _image("vit_b16", 32, Loading(4.0, 2), Loading(4.0, 8), Loading(4.0, 0)),
        _image("resnet18", 256, Loading(0.75, 2), Loading(0.75, 8), Loading(0.75, 0)),
        _image("resnet50@nhwc", 64),
        _image("resnet50@nhwc", 256),
        Case(tokens),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which nothing is begun")
    options = parser.parse_args(arguments)
    device = pick_device(None)
    if device.type != "cuda":
        parser.error("copies to a GPU are measured: none is here")
    with Recorder(options.out, describe(device)) as recorder:
        run(cases(), device, recorder, budget_seconds=options.budget)


def run(
    todo: Sequence[Case], device: torch.device, recorder: Recorder, *, ways: Collection[str] = WAYS,
    round_seconds: float = ROUND_SECONDS, budget_seconds: float | None = None,
) -> None:  # fmt: skip
    """Measures what the recorder's folder lacks. A case that fails gets rows that say why, and the others go on."""
    settle_allocator(device)
    watch = Stopwatch(budget_seconds)
    for case in todo:
        left = [one for one in case.loadings if not all(recorder.is_done(case.key(one, way)) for way in ways)]
        if not left or watch.is_spent():
            continue

        def fed(step: TrainingStep | InferenceStep, case: Case = case, left: Sequence[Loading] = tuple(left)) -> Fields:
            timing = time_step(step, rounds=LOADED_ROUNDS, read=telemetry(device))
            print(f"{watch.seconds:4.0f} s  {case.plan.key}: {1e3 * median(timing.step_seconds):.2f} ms", flush=True)
            for loading in left:
                if not watch.is_spent():
                    for row in fed_rows(case, loading, step, device, ways, round_seconds):
                        recorder.append(row)
                        told = row["reason"] or f"{1e3 * (row['value'] or 0):.2f} ms, {1e3 * row['unfed_seconds']:.2f}"
                        print(f"{watch.seconds:4.0f} s  {row['key']}: {told}", flush=True)
            return timing_fields(timing)

        what = {"key": case.plan.key, "backend": "torch", "cache": "cold", "shape": None, "suite": SUITE}
        recorder.append(merged(Row, what, measure_plan(case.plan, device, fed)))


def fed_rows(
    case: Case, loading: Loading, step: TrainingStep | InferenceStep, device: torch.device, ways: Collection[str],
    round_seconds: float,
) -> Iterator[FedStepRow]:  # fmt: skip
    """A row per way. Batches that lie ready take turns with the step whose batch is in place; where they are loaded one
    way follows the other, each after what its workers had loaded ahead."""
    feed = Feed.of(step)
    common = {"plan": asdict(case.plan), "workers": loading.workers, "bytes": feed.bytes, "suite": SUITE,
              "backend": "torch", "cache": "cold", "shape": None, "role": "validation", "unit": "seconds",
              "asked_load_seconds": loading.load_ms * 1e-3}  # fmt: skip
    in_place = feed.step.batch
    done: set[str] = set()
    try:
        if not loading.load_ms:
            found = timed(
                feed, {UNFED: None, **{way: feed.fed(way) for way in ways}}, rounds=ROUNDS,
                round_seconds=round_seconds, warm_up=WARM_UP,
            )  # fmt: skip
            reading = _reading(feed, device)
            for way in ways:
                yield _row(case, loading, way, common, found[way], found[UNFED], found["steps"][way], 0.0, reading)
                done.add(way)
            return
        asked = loading.load_ms * 1e-3
        of_sample = feed.load_seconds(asked)
        unfed = timed(feed, {UNFED: None}, rounds=LOADED_ROUNDS, round_seconds=round_seconds, warm_up=WARM_UP)[UNFED]
        for way in ways:
            batches: Iterator[Batch] = feed.fed(way, asked, loading.workers)
            for _ in range((PREFETCHED + 1) * loading.workers + WARM_UP):
                feed.run(batches)
            found = timed(
                feed, {way: batches}, rounds=LOADED_ROUNDS, round_seconds=round_seconds, warm_up=0,
                whole=max(loading.workers, 1),
            )  # fmt: skip
            del batches  # and with it the workers
            reading = _reading(feed, device)
            yield _row(case, loading, way, common, found[way], unfed, found["steps"][way], of_sample, reading)
            done.add(way)
    except Exception as error:
        fault = {**EMPTY_FIELDS, **common, "status": oom_or_error(error), "reason": first_line(error), "value": None}
        for way in [way for way in ways if way not in done]:
            yield merged(FedStepRow, fault, {"key": case.key(loading, way), "way": way})
    finally:
        feed.step.batch = in_place


def _row(
    case: Case, loading: Loading, way: str, common: Fields, samples: Sequence[float], unfed: Sequence[float],
    steps: int, load_seconds: float, reading: Reading,
) -> FedStepRow:  # fmt: skip
    seconds = median(samples)
    found = {
        "key": case.key(loading, way), "way": way, "value": seconds, "seconds": seconds, "samples": rounded(samples),
        "n": len(samples), "timer": "wall", "steps_per_round": steps, "load_seconds": load_seconds,
        "unfed_seconds": median(unfed), "unfed_samples": rounded(unfed),
    }  # fmt: skip
    return merged(FedStepRow, EMPTY_FIELDS, common, reading.as_row(), found)


def _reading(feed: Feed, device: torch.device) -> Reading:
    """The device's state in one more step, which no time counts."""
    read = telemetry(device)
    feed.step.run()
    found = read()
    feed.drain()
    return found


if __name__ == "__main__":
    main()
