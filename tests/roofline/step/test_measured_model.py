"""What --config measures: all that the step launches, hot where the timeline says so, by the kernels that run it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError, UsageError
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step import measured_model
from flopcast.roofline.step.coverage import coverage
from flopcast.roofline.step.measured_model import MeasuredModel, ModelOptions, kept, model_options, step_cases
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run, Traced


@pytest.fixture(scope="module")
def h200() -> Profile:
    return find_profile("nvidia-h200")


@pytest.fixture(scope="module")
def model() -> MeasuredModel:
    return MeasuredModel(name="w256", stream=get_stream(make_config(width=256, depth=4), Traced()))


def test_every_operation_of_the_step_is_measured_once(model: MeasuredModel, h200: Profile) -> None:
    cases = step_cases(model, h200.device, h200.stack)
    launched = {
        lowered[0].key
        for op in model.stream.ops
        if op.kind != "sync" and (lowered := lower(model.stream, op)) is not None
    }
    assert {case.shape.key for case in cases if case.cache == "cold"} == launched
    assert {case.shape.key for case in cases} == launched
    assert len(cases) == len({(case.shape.key, case.cache) for case in cases})
    assert {case.role for case in cases} == {"fit"}


def test_hot_is_measured_where_the_timeline_finds_operands_in_l2(model: MeasuredModel, h200: Profile) -> None:
    def hot(l2_bytes: float) -> int:
        return sum(case.cache == "hot" for case in step_cases(model, {**h200.device, "l2_bytes": l2_bytes}, h200.stack))

    assert hot(0) == 0
    assert 0 < hot(2**20) < hot(h200.l2_bytes) <= len(step_cases(model, h200.device, h200.stack)) / 2


@pytest.mark.parametrize(
    ("gpu", "options", "expected"),
    [
        ("nvidia-h200", {}, ("torch", "sdpa-cudnn")),
        ("nvidia-l4", {}, ("torch", "sdpa-flash")),
        ("nvidia-h200", {"matmul": "triton", "attention": "triton"}, ("triton", "triton")),
        ("nvidia-h200", {"attention": "sdpa-flash"}, ("torch", "sdpa-flash")),
    ],
)
def test_backends_are_those_that_the_step_runs(
    model: MeasuredModel, gpu: str, options: dict[str, str], expected: tuple[str, str]
) -> None:
    device, stack = ({"type": "cuda", "l2_bytes": 5e7, "capability": [8, 9]}, {"torch": "2.11.0+cu130", "cudnn": 91900})
    if gpu == "nvidia-h200":
        device["capability"] = [9, 0]
    cases = step_cases(replace(model, run=Run(**options)), device, stack)
    products = [c for c in cases if isinstance(c.shape, Gemm)]
    assert {c.backend for c in products if c.shape.dtype == "bf16"} == {expected[0]}
    assert {c.backend for c in products if c.shape.dtype == "fp32"} == {"torch"}  # rotary angles: none of Triton's
    assert {c.backend for c in cases if isinstance(c.shape, Attention)} == {expected[1]}


def test_what_is_measured_so_is_all_that_the_forecast_asks_for(model: MeasuredModel, h200: Profile) -> None:
    """A surface through exactly these cases would say `measured` of the whole step, the read-back apart."""
    cases = step_cases(model, h200.device, h200.stack)
    have = {(case.shape.key, case.backend, case.cache) for case in cases}

    class Asking(Profile):
        def estimate(self, requests: Any) -> Any:
            asked_for.extend(requests)
            return super().estimate(requests)

    asked_for: list[Any] = []
    asking = Asking(**{name: getattr(h200, name) for name in h200.__dataclass_fields__})
    coverage(asking, model)
    cold = {(w.shape.key, asking.aliases.get(b, b), c) for w, b, c in asked_for if c == "cold"}
    assert {key for key, *_ in cold - have if "_local_scalar_dense" not in key} == set()


# --- beside the measurements


def test_sources_are_kept_as_they_were(model: MeasuredModel, tmp_path: Path) -> None:
    other = replace(model, run=Run(matmul="triton"))
    deeper = MeasuredModel(name="w256", stream=get_stream(make_config(width=256, depth=6), Traced()))
    for one in (model, other, deeper, model):
        measured_model.keep(tmp_path, one)
    assert sorted(kept(tmp_path), key=repr) == sorted([model, other, deeper], key=repr)
    assert kept(tmp_path / "nothing") == []
    assert other.label == "w256 4x256 triton"
    (tmp_path / measured_model.SOURCES / "a.json.gz").write_bytes(b"torn")
    with pytest.raises(DataError, match=r"a\.json\.gz"):
        kept(tmp_path)


def test_held_out_rows_of_the_step_are_fitted(model: MeasuredModel, h200: Profile) -> None:
    first, *_ = (case for case in step_cases(model, h200.device, h200.stack) if case.cache == "cold")
    wanted: dict[str, Any] = {"key": first.shape.key, "backend": first.backend, "cache": "cold", "role": "holdout"}
    rows = [wanted, {**wanted, "key": "gemm/nt/bf16/7x7x7"}, {"key": "scalar/launch", "value": 1.0}]
    machine = {"device": h200.device, "stack": h200.stack}
    turned, count = measured_model.promote(rows, [model], machine)
    assert (count, [row.get("role") for row in turned]) == (1, ["fit", "holdout", None])
    assert measured_model.promote(rows, [], machine) == (rows, 0)


# --- as the command line names it


def test_options_ask_for_a_model() -> None:
    assert model_options({"config": None, "batch": None}) is None
    found = model_options({"config": "qwen3-0.6b", "depth": 4, "batch": 8, "seq": 1024, "optimizer": "adamw-fused"})
    assert found is not None
    assert found.run == Run(batch=8, seq=1024, optimizer="adamw-fused")
    assert " ".join(found.arguments) == ("--config qwen3-0.6b --depth 4 --batch 8 --seq 1024 --optimizer adamw-fused")
    assert found.model("cuda").label == "qwen3-0.6b-d4 8x1024 adamw-fused"
    assert found.model("cuda").stream.depth == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 8}, "--batch without a model"),
        ({"config": "qwen3-0.6b", "module": "a:b"}, "--module and --config"),
        ({"module": "a:b", "depth": 2}, "--module and --depth"),
        ({"config": "qwen3-0.6b", "batch": 0}, "batch is 0"),
        ({"config": "qwen3-0.6b", "optimizer": "lion"}, "optimizer 'lion': valid are"),
        ({"config": "qwen3-0.6b", "attention": "best"}, "picks by a profile"),
    ],
)
def test_what_cannot_be_asked_for(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model_options(options)


def test_a_config_file_gives_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    config = make_config(width=64, depth=1, vocab=512)
    for path in (folder / "config.json", tmp_path / "small.json"):
        path.write_text(json.dumps(config))
    run = {"batch": 1, "seq": 32}
    names = [ModelOptions({"config": str(p), **run}).model("cuda").name for p in sorted(tmp_path.rglob("*.json"))]
    assert names == ["my-model", "small"]
