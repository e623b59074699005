"""Shipped suites hold what their plans say, keep holdout apart, and every case can be run."""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flopcast.errors import DataError, UsageError
from flopcast.kernels import aten
from flopcast.kernels.shapes import Attention, Call, Gemm, shape_from_json
from flopcast.microbench.records import records
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.suites import HOT_BYTES, SuiteCase
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.validation.step_plans import validation_plans
from studies.suites import build
from studies.suites.calls import CallPlan
from studies.suites.duration import FIXED_SECONDS, durations
from studies.suites.gemms import GemmPlan
from studies.suites.plans import PLANS, Plan, RolePlan, Source

SUITES = tuple(PLANS)
shipped = cache(suites.load)  # each read once for all tests
REPORT = Path(__file__).resolve().parents[3] / "reports" / "nvidia-h200" / "measurements" / "gpu0"


@pytest.mark.parametrize("name", SUITES)
def test_shipped_suites_follow_their_plans(name: str) -> None:
    plan, cases = PLANS[name], shipped(name)
    measurements = {(c.shape.key, c.backend, c.cache) for c in cases}
    assert len(measurements) == len(cases), "nothing is measured twice"
    assert {case.cache for case in cases} == set(plan.caches)
    attention = Counter((c.backend, c.role) for c in cases if isinstance(c.shape, Attention) and c.cache == "cold")
    expected: Counter[tuple[str, str]] = Counter()
    for backend in plan.attention_backends:
        for role, own in (("fit", plan.fit), ("holdout", plan.holdout)):
            expected[backend, role] = 2 * (len(own.grid) + sum(count for count, *_ in own.attention.kinds()))
    expected["triton", "fit"] = plan.triton_attention
    assert attention == +expected
    gemms = [c for c in cases if isinstance(c.shape, Gemm)]
    assert sum(c.backend == "triton" for c in gemms) == plan.triton_gemms
    cold = Counter(c.role for c in gemms if c.backend == "torch" and c.cache == "cold")
    for role, wanted in (("fit", plan.fit.gemms), ("holdout", plan.holdout.gemms)):
        like_no_stream = 3 * (wanted.like_stream + wanted.unaligned + wanted.half_aligned + wanted.random)
        assert like_no_stream <= cold[role] <= like_no_stream + wanted.stream
    assert {"nt", "nn", "tn"} <= {c.shape.layout for c in gemms if isinstance(c.shape, Gemm)}
    assert bool(plan.holdout.sources) == any(c.role == "holdout" for c in cases)


@pytest.mark.parametrize(("name", "most"), [("quick", 60), ("standard", 360), ("full", 1200)])
def test_suites_take_the_time_they_may(name: str, most: float) -> None:
    """Seconds on an H200, host calibration and ceilings included."""
    found = durations(shipped(name), find_profile("nvidia-h200"))
    assert sum(size.seconds for size in found) + FIXED_SECONDS <= most
    assert sum(size.cases for size in found) == len(shipped(name))


def test_the_estimate_is_what_a_measured_suite_took() -> None:
    """The committed rows of an H200: 7102 cases in 321 s by their time stamps."""
    rows = [row for row in records.read(REPORT).rows if row.get("shape")]
    cases = [SuiteCase(shape_from_json(row["shape"]), row["backend"], row["cache"], row["role"]) for row in rows]
    first, *_, last = (datetime.fromisoformat(row["time"]) for row in rows)
    estimate = sum(size.seconds for size in durations(cases, find_profile("nvidia-h200")))
    assert estimate == pytest.approx((last - first).total_seconds(), rel=0.25)


def test_widths_beside_multiples_and_all_token_counts_are_measured() -> None:
    for name in ("standard", "full"):
        fit = [c.shape for c in shipped(name) if c.role == "fit" and isinstance(c.shape, Gemm)]
        sides = {side % 64 for shape in fit for side in (shape.n, shape.k)}
        assert {1, 8, 56, 63} <= sides
        tokens = [shape.k if shape.layout == "tn" else shape.m for shape in fit]
        assert min(tokens) <= 256
        assert max(tokens) >= 60_000


def test_steps_that_judge_are_no_source() -> None:
    """No step that `validate` runs is traced for a fit; steps of the ladder at its default batch are the exception,
    which are there as the ladder, of other depths."""
    judged = {
        (plan.module.rpartition(":")[2] or plan.name, plan.batch, 1 if plan.module else plan.seq)
        for plan in validation_plans("cuda", "standard")
    }
    assert len(judged) > 10
    for name in ("standard", "full"):
        for source in PLANS[name].fit.sources:
            model = source.module or source.config
            assert (model, source.batch, 1 if source.module else source.seq) not in judged


@pytest.mark.parametrize("name", SUITES)
def test_no_holdout_shape_is_fitted(name: str) -> None:
    cases = shipped(name)
    fit = {case.shape.key for case in cases if case.role == "fit"}
    held = {case.shape.key for case in cases if case.role == "holdout"}
    assert fit
    assert not fit & held
    assert {case.role for case in cases} <= {"fit", "holdout"}


# A histogram of whole numbers, products of groups in fp32, statistics of a bf16 batch in fp32: other on a processor.
CUDA_ONLY = ("aten.histc.default", "aten._grouped_mm.default", "aten.native_batch_norm.default")
checked: set[tuple[str, str]] = set()  # suites share most of their kinds of call


@pytest.mark.parametrize("name", SUITES)
def test_a_call_of_each_kind_can_be_made_again_and_gives_what_was_recorded(name: str) -> None:
    """On fake tensors: the recorded arguments fit the operator, results have the recorded sizes, strides and dtypes."""
    kinds = {(c.shape.op, describe(c.shape).variant): c.shape for c in shipped(name) if isinstance(c.shape, Call)}
    assert len(kinds) > 50
    calls = [call for kind, call in kinds.items() if kind not in checked and call.op not in CUDA_ONLY]
    checked.update(kinds)
    with FakeTensorMode():
        for call in calls:
            tensors = aten.operands(call, "cpu")
            assert [(tuple(t.shape), tuple(t.stride())) for t in tensors[: len(call.inputs)]] == [
                (o.shape, o.stride) for o in call.inputs
            ]
            returned = aten.prepare(call, "torch", tensors)()
            found = returned if isinstance(returned, (list, tuple)) else [returned]
            results = [t for t in found if isinstance(t, torch.Tensor)]
            if not call.written:
                assert [tuple(t.shape) for t in results] == [o.shape for o in call.outputs], call.key
                assert [str(t.dtype) for t in results] == [str(aten._DTYPES[o.dtype]) for o in call.outputs], call.key


@pytest.mark.parametrize("name", SUITES)
def test_whole_numbers_are_valid_indices_wherever_they_are_looked_up(name: str) -> None:
    """Run here: an index out of bounds is an error on a processor, and the end of the process's context on CUDA."""
    lookups = ("embedding", "index", "gather", "scatter", "nll_loss", "take")
    calls = {
        c.shape.op: c.shape
        for c in sorted(shipped(name), key=lambda c: -c.shape.bytes)
        if isinstance(c.shape, Call) and c.shape.op.split(".")[1].startswith(lookups)
    }
    assert len(calls) >= 4
    for call in calls.values():  # the smallest of each
        if call.bytes < 3e8:
            aten.prepare(call, "torch", aten.operands(call, "cpu"))()


@pytest.mark.parametrize("name", SUITES)
def test_hot_cases_fit_the_cache_and_none_is_too_large(name: str) -> None:
    plan = PLANS[name]
    for case in shipped(name):
        work = describe(case.shape)
        assert work.bytes <= 1.2 * plan.fit.calls.largest or not isinstance(case.shape, Call)
        assert case.cache == "cold" or work.bytes <= 1.2 * HOT_BYTES


def test_unknown_suites() -> None:
    with pytest.raises(UsageError, match=r"unknown suite .huge.: valid are attention, .*, products, quick"):
        suites.load("huge")


def test_a_suite_built_now(tmp_path: Path) -> None:
    """A plan of two narrow models: a few calls of each kind of kernel, and all products."""
    plan = Plan(
        device="cuda",
        fit=RolePlan(
            sources=(Source(width=64, batch=1, seq=32, vocab=512), Source(width=64, batch=4, seq=64, vocab=512)),
            calls=CallPlan(others=2),
            gemms=GemmPlan(stream=20, random=2, unaligned=1),
            grid=((1, 2, 1, 64, 128),),
        ),
        holdout=RolePlan(
            sources=(Source(width=64, batch=2, seq=32, vocab=512),),
            calls=CallPlan(others=1),
            gemms=GemmPlan(stream=4, random=1),
            grid=((1, 2, 1, 96, 128),),
        ),
        attention_backends=("sdpa-flash",),
        triton_gemms=3,
        triton_attention=1,
    )
    cases = build.build(plan)
    attention = [c for c in cases if isinstance(c.shape, Attention)]
    assert Counter((c.backend, c.cache) for c in attention) == {
        ("sdpa-flash", "cold"): 4,
        ("sdpa-flash", "hot"): 4,
        ("triton", "cold"): 1,
    }
    assert sum(c.backend == "triton" for c in cases if isinstance(c.shape, Gemm)) == 3
    for role, count in (("fit", 2), ("holdout", 1)):
        kinds = Counter(describe(c.shape).variant for c in cases if isinstance(c.shape, Call) and c.role == role
                        and c.cache == "cold")  # fmt: skip
        assert set(kinds.values()) <= set(range(1, count + 1))
    shapes = {role: {c.shape for c in cases if c.role == role} for role in ("fit", "holdout")}
    assert not shapes["fit"] & shapes["holdout"]
    suites.save(cases, tmp_path / "a.json.gz")
    suites.save(list(cases), tmp_path / "b.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_saved_suites_are_loaded_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = shipped("quick")
    folder = tmp_path / "data" / "suites"
    folder.mkdir(parents=True)
    suites.save(cases, folder / "mine.json.gz", sources={"fit": ["a step"]})
    monkeypatch.setattr(suites, "DATA", tmp_path / "data")
    assert suites.load("mine") == cases


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"shapes": []}, "is wrong|valid is a suite that holds the shapes of its cases"),
        ({"cases": [[0, "torch", "warm", "fit"]]}, r"cases\[0\]\[2\] is 'warm': valid is one of cold, hot"),
        ({"cases": [[-1, "torch", "hot", "fit"]]}, r"cases\[0\]\[0\] is -1"),
        ({"shapes": [{"kind": "gemm", "m": 1, "n": 2}]}, r"shapes\[0\].k is missing"),
    ],
)
def test_a_file_that_is_no_suite_is_refused_in_words(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    path = tmp_path / "suite.json"
    cases = [SuiteCase(Gemm(m=1, n=2, k=3), "torch", "cold", "fit")]
    suites.save(cases, path)
    assert suites.read(path) == cases
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=told):
        suites.read(path)
