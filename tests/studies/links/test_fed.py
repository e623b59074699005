"""Steps that a DataLoader feeds: run for real on the processor, and set beside what `flopcast predict --input` says."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from typer.testing import CliRunner

from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.records import records
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.records.rows import FedStepRow, StepRow, select
from flopcast.microbench.steps.build import build_plan
from flopcast.microbench.timing.device import describe
from flopcast.roofline.cli.app import app
from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.step.questions.input_pipeline import HANDING, LEAST_HANDED, WAYS, Feeding, fed
from flopcast.roofline.stream.model.models import make_config
from studies.links import fed as feeding_study
from studies.links import fed_table, handing
from studies.links.fed import Case, Loading, cases, run
from studies.links.feeding import AHEAD, PAGEABLE, Feed, timed

CPU = torch.device("cpu")
TINY = make_config(width=64, depth=2, heads=4, kv_heads=2, head_dim=16, vocab=512)
PLAN = StepPlan(name="tiny", config=TINY, batch=4, seq=32, optimizer="adamw-fused")
IMAGES = StepPlan(name="resnet18@32", config={}, module="resnet18@32", batch=2, seq=1, optimizer="adamw-fused")
LOADED = Loading(2.0, 2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Samples keep a core busy beside the step: threads that wait for each other would take ten times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of real steps on the processor, where memory is of one kind and nothing is copied ahead; of two rounds."""
    out = tmp_path_factory.mktemp("fed")
    todo = [Case(PLAN, (Loading(), LOADED, replace(LOADED, workers=0))), Case(IMAGES)]
    with pytest.MonkeyPatch.context() as patch:
        for rounds in ("ROUNDS", "LOADED_ROUNDS"):
            patch.setattr(feeding_study, rounds, 2)
        for _ in range(2):  # the second finds nothing to do
            with Recorder(out, describe(CPU)) as recorder:
                run(todo, CPU, recorder, ways=(PAGEABLE,), round_seconds=0.02)
    return out


def test_each_case_has_a_row_and_each_step_its_own(folder: Path) -> None:
    found = records.read(folder)
    assert not found.warnings
    assert [(row["status"], row["reason"]) for row in found.rows] == [("ok", None)] * 6
    ready, by_workers, by_one, images = select(found.rows, FedStepRow)
    assert [row["key"] for row in select(found.rows, StepRow)] == [PLAN.key, IMAGES.key]
    assert ready["bytes"] == 4 * 32 * 8  # ids, which are the labels too
    assert images["bytes"] == 2 * (3 * 32 * 32 * 4 + 8)
    assert (ready["load_seconds"], ready["asked_load_seconds"], ready["workers"]) == (0.0, 0.0, 0)
    for row in (by_workers, by_one):
        assert row["asked_load_seconds"] == 0.002
        assert row["load_seconds"] >= 0.002
    assert (by_workers["steps_per_round"] or 0) % 2 == 0
    assert (by_one["value"] or 0) >= 4 * 0.002  # a lower bound that no machine undercuts
    assert len({row["key"] for row in found.rows}) == 6


def test_the_model_gets_what_the_loader_brings() -> None:
    step = build_plan(PLAN, CPU)
    feed = Feed.of(step)
    before, batches = step.batch, feed.fed(PAGEABLE)
    feed.run(batches)
    assert step.batch["labels"] is step.batch["input_ids"]
    assert step.batch["input_ids"] is not before["input_ids"]
    assert torch.equal(step.batch["input_ids"], before["input_ids"])
    assert step.batch["use_cache"] is False
    loaded = next(feed.fed(PAGEABLE, 1e-4))
    assert loaded["input_ids"].shape == (4, 32)


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("load_seconds", [0.0, 1e-4])
def test_what_arrives_on_a_gpu_is_what_was_sent(way: str, load_seconds: float) -> None:
    feed = Feed.of(build_plan(PLAN, torch.device("cuda")))
    samples = feed.batch["input_ids"][:1].expand(4, -1).contiguous() if load_seconds else feed.batch["input_ids"]
    batches = feed.fed(way, load_seconds)
    for _ in range(6):
        feed.run(batches)
        assert feed.step.batch["input_ids"].is_cuda
        assert torch.equal(feed.step.batch["input_ids"].cpu(), samples)


def test_images_keep_their_layout_and_are_loaded_in_torchs_own_alone() -> None:
    feed = Feed.of(build_plan(replace(IMAGES, module="resnet18@32@nhwc"), CPU))
    assert next(feed.fed(PAGEABLE))["pixel_values"].is_contiguous(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="not contiguous"):
        feed.fed(PAGEABLE, 1e-3)


def test_sources_take_turns_and_only_rounds_count() -> None:
    class Counted(Feed):
        def run(self, batches: object) -> None:
            now[0] += 2.0 if batches is None else 3.0
            ran.append("unfed" if batches is None else "fed")

    now, ran = [0.0], list[str]()
    feed = Counted(build_plan(PLAN, CPU), {}, {})  # type: ignore[arg-type]
    found = timed(
        feed, {"a": None, "b": iter(())}, rounds=2, round_seconds=10.0, warm_up=1, whole=2, clock=lambda: now[0]
    )
    assert (found["a"], found["b"]) == ([2.0, 2.0], [3.0, 3.0])
    assert found["steps"] == {"a": 6, "b": 4}
    turn = ["unfed"] * 7 + ["fed"] * 5
    assert ran == ["unfed"] * 2 + turn[:7] + ["fed"] * 2 + turn[7:] + turn


def test_a_case_that_fails_says_why(tmp_path: Path) -> None:
    channels_last = replace(IMAGES, module="resnet18@32@nhwc")
    with Recorder(tmp_path, describe(CPU)) as recorder:
        run([Case(channels_last, (LOADED,))], CPU, recorder, ways=(PAGEABLE,), round_seconds=0.01)
        row, step = recorder.rows
    assert (row["status"], step["status"]) == ("error", "ok")
    assert "not contiguous" in str(row["reason"])


def test_the_cases_are_of_every_way_once() -> None:
    keys = [case.key(loading, way) for case in cases() for loading in case.loadings for way in WAYS]
    assert len(keys) == len(set(keys)) == 4 * 11


# --- beside forecasts


def test_forecasts_are_those_of_the_command_line(folder: Path) -> None:
    """What the table holds against a real step is what a user is told of it."""
    rows = [row for row in select(records.read(folder).rows, FedStepRow) if row["plan"]["module"]]
    (found,) = fed_table.compared(rows, find_profile(SOURCE))
    words = ["--module", "resnet18@32", "--batch", "2", "--optimizer", "adamw-fused", "--input", "images", "--json"]
    told = CliRunner().invoke(app, ["predict", "--gpu", SOURCE, *words])
    assert told.exit_code == 0, told.output
    said = json.loads(told.stdout)["input"]
    assert found.unfed_forecast == pytest.approx(said["unfed_seconds"])
    assert found.forecast == pytest.approx(said["ways"][0]["step_seconds"])
    assert found.bytes == said["bytes"]


def test_what_runs_beside_a_step_hides_in_a_longer_one() -> None:
    """With the step's own time as it is forecast the two forecasts are one, whatever bounds; with a longer one the copy
    ahead and what workers do hide in it."""
    step = fed_table.priced(PLAN, find_profile(SOURCE))
    alone = step.timeline.step_seconds()
    for size in (2**12, 2**28):
        for load, workers in ((0.0, 0), (5 * alone, 0), (5 * alone, 2), (5 * alone, 9)):
            for way in fed(step, Feeding(bytes=size, load_seconds=load, workers=workers)).ways:
                assert fed_table.on_measured(way, 0.0) == way.step_seconds
                longer = fed_table.on_measured(way, 9 * alone)
                if way.way == AHEAD and workers and size == 2**12:
                    assert longer == pytest.approx(10 * alone)
                assert longer >= way.step_seconds


def test_the_page_and_the_rows_tell_every_case(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fed_table.main([str(folder), "--out", str(tmp_path)])
    capsys.readouterr()
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    with (tmp_path / "input.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["step"], row["workers"], row["way"]) for row in rows] == [
        ("tiny", "0", PAGEABLE), ("tiny", "2", PAGEABLE), ("tiny", "0", PAGEABLE), ("resnet18@32", "0", PAGEABLE),
    ]  # fmt: skip
    assert text.count("| tiny x 4 |") == 3
    shown = sorted(
        float(line.split(" | ")[-5])
        for line in text.splitlines()
        if line.startswith(("| tiny x 4 |", "| resnet18@32 x 2"))
    )
    assert shown == pytest.approx(sorted(1e3 * float(row["measured"]) for row in rows), abs=0.006)
    for row in rows:
        assert float(row["error"]) == pytest.approx(float(row["forecast"]) / float(row["measured"]) - 1, abs=1e-4)


@pytest.fixture(scope="module")
def committed() -> list[fed_table.Compared]:
    return list(fed_table.compared(records.read(fed_table.FOLDER).latest(), find_profile(SOURCE)))


def test_the_committed_page_is_of_its_rows(committed: list[fed_table.Compared]) -> None:
    text = fed_table.page(committed, records.read(fed_table.FOLDER).latest(), fed_table.FOLDER)
    assert (fed_table.FOLDER / "README.md").read_text(encoding="utf-8") == text
    assert {one.way for one in committed} == set(WAYS)


def test_what_feeding_adds_is_within_an_eighth_where_samples_are_loaded(committed: list[fed_table.Compared]) -> None:
    """By what handing over took on another host (`studies.links.handing`)."""
    loaded, ready = (
        [abs(one.own_error) for one in committed if bool(one.load_seconds) is kind] for kind in (True, False)
    )
    assert (len(loaded), len(ready)) == (24, 20)
    assert median(loaded) < 0.066
    assert max(loaded) < 0.13
    assert median(ready) < 0.018
    assert max(ready) < 0.151


def test_what_handing_over_takes_is_what_was_measured() -> None:
    rows = handing.read()
    assert {row.bytes for row in rows} == {samples * handing.SAMPLE_BYTES for samples in handing.SAMPLES}
    assert min(row.bytes for row in rows) == LEAST_HANDED
    for name, (fixed, per_byte) in handing.lines(rows).items():
        shipped = getattr(HANDING, name)
        assert shipped.fixed == pytest.approx(fixed, abs=1e-5)
        assert 1 / shipped.per_byte == pytest.approx(1 / per_byte, rel=0.01)
