"""Forecast against measured: errors of every component, and no row is lost."""

from __future__ import annotations

import csv
import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.microbench.recipe.plans import PHASES, StepPlan
from flopcast.roofline.gpu.fit.host_calibration import host_plan
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.lowering.classes import GROUPS, OP_CLASSES, op_class
from flopcast.roofline.stream.model.models import check_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.validation.comparable import check_device, check_stack, check_stream
from flopcast.roofline.validation.compare_steps import compare, step_folders, stream_of
from flopcast.roofline.validation.host_of_run import hosts_of_runs
from flopcast.roofline.validation.step_comparison import COLUMNS, Part, StepComparison, signed_error, write_csv
from flopcast.roofline.validation.step_plans import factories, validation_plans
from flopcast.roofline.validation.summary import busy_words, compare_methods, inside, summaries
from flopcast.roofline.views.figures.agreement import agreement_figure
from flopcast.roofline.views.page.words import how_wrong
from studies.suites.plans import PLANS

Rows = list[dict[str, Any]]

# A call of each class, as profilers name the launching ATen call.
CALL_OF = {
    "gemm": "aten::mm", "attention": "aten::_cudnn_attention_forward", "pointwise": "aten::mul", "copy": "aten::copy_",
    "reduction": "aten::sum", "softmax": "aten::_log_softmax", "loss": "aten::nll_loss_forward",
    "embedding": "aten::embedding_dense_backward", "optimizer": "aten::_foreach_mul_", "cat": "aten::cat",
    "rnn": "aten::_cudnn_rnn", "linalg": "aten::_linalg_eigh", "custom": "torchvision::nms",
    "fill": "aten::fill_", "other": "aten::something_else",
}  # fmt: skip
PLAN = {"name": "tiny", "group": "test", "batch": 2, "seq": 32, "precision": "autocast-bf16", "optimizer": "adamw",
        "attention": "sdpa"}  # fmt: skip


def rows_of(found: Forecast, config: dict[str, Any], *, slower: float = 1.0, kernels: bool = True) -> Rows:
    """The rows that `run_steps` would write of a step `slower` times as slow as forecast, in every part."""
    plan = {**PLAN, "config": config}
    row = {
        "key": "step/tiny", "status": "ok", "reason": None, "plan": plan, "value": slower * found.step_seconds,
        "host_seconds": slower * found.host_seconds, "peak_bytes": round(slower * found.peak_bytes),
    }  # fmt: skip
    ops = {CALL_OF[s.op_class]: [slower * s.seconds, s.calls] for s in found.breakdown}
    part = {
        "key": "step_kernels/tiny", "status": "ok", "plan": plan, "device_seconds": slower * found.device_seconds,
        "n_kernels": found.kernels, "ops": ops,
    }  # fmt: skip
    return [row, part] if kernels else [row]


@pytest.fixture
def found(tiny: dict[str, Any], profile: Profile) -> Forecast:
    return forecast(tiny, Run(batch=2, seq=32), profile)


def _errors(row: StepComparison) -> list[float | None]:
    """Of all parts but generated kernels, which an eager step has none of."""
    return [part.error for name, part in row.parts.items() if name != "generated"]


def test_a_step_as_forecast_has_no_error(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    (row,) = compare(rows_of(found, tiny), profile)
    assert _errors(row) == pytest.approx([0.0] * (3 + len(GROUPS)), abs=1e-9)
    assert row.step.is_within is row.device.is_within is True
    assert row.to_json()["used_in_fit"] is False
    assert row.kernels == Part(found.kernels, found.kernels)
    assert row.n_params == found.n_params
    assert (row.width, row.depth, row.plan.batch, row.plan.seq) == (64, 3, 2, 32)
    assert sum(part.measured or 0.0 for part in row.classes.values()) == pytest.approx(row.device.measured)
    assert sum(part.forecast or 0.0 for part in row.classes.values()) == pytest.approx(row.device.forecast)


def test_a_module_that_a_row_names_is_not_imported(
    found: Forecast, profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_by_a_row.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\ndef factory(): ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    rows = rows_of(found, {})
    for factory in ("named_by_a_row:factory", "flopcast.microbench.zoo:absent"):
        for row in rows:
            row["plan"]["module"] = factory
        (compared,) = compare(rows, profile)
        assert "only flopcast.microbench.zoo:mlp" in str(compared.reason)
        assert factory in str(compared.reason)
    assert not (tmp_path / "ran").exists()


def test_errors_are_signed(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    (row,) = compare(rows_of(found, tiny, slower=2.0), profile)
    assert _errors(row) == pytest.approx([-0.5] * (3 + len(GROUPS)), rel=1e-6)
    assert row.step.is_within is False
    assert signed_error(3.0, 2.0) == 0.5
    assert signed_error(None, 2.0) is signed_error(2.0, None) is signed_error(2.0, 0.0) is None


def test_a_step_without_kernels_keeps_its_times(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    (row,) = compare(rows_of(found, tiny, kernels=False), profile)
    assert row.step.error == pytest.approx(0.0, abs=1e-9)
    assert row.device.error is row.classes["gemm"].error is row.kernels.measured is None
    failed = [rows_of(found, tiny)[0], {**rows_of(found, tiny)[1], "status": "oom"}]
    assert compare(failed, profile) == [row]


def test_what_did_not_run_keeps_its_row(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    (step,) = rows_of(found, tiny, kernels=False)
    small = replace(profile, device={**profile.device, "memory_bytes": 10**6})
    oom = {
        **step,
        "status": "oom",
        "reason": "CUDA out of memory",
        "value": None,
        "host_seconds": None,
        "peak_bytes": None,
    }
    foreseen, unforeseen = compare([oom], small)[0], compare([oom], profile)[0]
    assert "out of memory, as forecast" in (foreseen.reason or "")
    assert "CUDA out of memory" in (foreseen.reason or "")
    assert unforeseen.reason == "CUDA out of memory"
    assert foreseen.status == "oom"
    assert (foreseen.step.forecast or 0.0) > 0
    assert foreseen.step.error is foreseen.step.measured is None
    unknown = {**step, "plan": {**step["plan"], "config": {**tiny, "model_type": "no-such-model"}}}
    failed = {**step, "status": "error", "reason": "what a bug"}
    several = [{**row, "key": f"step/{i}"} for i, row in enumerate((oom, unknown, step, failed))]
    rows = compare([*several, {"key": "host/x/depth2/forward", "status": "error"}], profile)
    assert len(rows) == 4  # only steps, all of them, in order
    assert "no-such-model" in (rows[1].reason or "")
    assert rows[2].status == "ok"
    assert rows[3].reason == "what a bug"
    assert summaries(rows[3:]) == []


def test_progress_is_told(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    told: list[tuple[int, int]] = []
    compare(rows_of(found, tiny), profile, progress=lambda done, total: told.append((done, total)))
    assert told == [(1, 1)]


def test_a_full_queue_says_nothing_of_the_host(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    step, kernels = rows_of(found, tiny)
    kernels = {**kernels, "n_kernels": 2000, "device_seconds": 2 * step["host_seconds"]}
    assert compare([step, kernels], profile)[0].host.error is None
    kernels = {**kernels, "n_kernels": 900}
    assert compare([step, kernels], profile)[0].host.error is not None


def test_a_processors_host_share_is_what_its_operators_leave(tiny: dict[str, Any], profile: Profile) -> None:
    cpu = replace(profile, device={**profile.device, "type": "cpu"})
    found = forecast(tiny, Run(batch=2, seq=32), cpu)
    (row,) = compare(rows_of(found, tiny), cpu)
    assert row.host.measured == pytest.approx((row.step.measured or 0.0) - (row.device.measured or 0.0))
    assert row.step.error == pytest.approx(0.0, abs=1e-9)
    assert row.kernels == Part()


def test_summary(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    rows = [compare(rows_of(found, tiny, slower=factor), profile)[0] for factor in (1.0, 1.25, 2.0)]
    everything, host_bound = summaries(rows)
    assert (everything.label, everything.n) == ("all", 3)
    assert host_bound.label == f"{'host' if found.bound == 'host' else 'device'}-bound"
    assert everything.parts["step"].median == pytest.approx(0.2)
    assert everything.parts["step"].worst == pytest.approx(0.5)
    assert everything.coverage == pytest.approx(sum(bool(row.step.is_within) for row in rows) / 3)
    assert summaries([]) == []


def test_a_busy_machine_is_said(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    rows = [{**row, "others_share": 0.5} for row in rows_of(found, tiny)]
    cpu = replace(profile, device={**profile.device, "type": "cpu"})
    (busy,) = compare(rows, cpu)
    assert "other processes kept 50% of its cores (up to 50%) while 1 of 1 steps ran" in busy_words([busy])
    assert "other processes kept 50%" in how_wrong([busy])
    assert busy.to_json()["others_share"] == 0.5
    (calm,) = compare(rows, profile)  # a GPU's host has cores to spare
    assert (calm.is_busy, busy_words([calm])) == (False, "")


def test_csv(found: Forecast, tiny: dict[str, Any], profile: Profile, tmp_path: Path) -> None:
    oom = {**rows_of(found, tiny)[0], "status": "oom", "reason": "out of memory, says CUDA"}
    rows = [*compare(rows_of(found, tiny), profile), *compare([oom], profile)]
    write_csv(rows, tmp_path / "new" / "validation.csv")
    with (tmp_path / "new" / "validation.csv").open(newline="") as file:
        reader = csv.DictReader(file)
        assert tuple(reader.fieldnames or ()) == COLUMNS
        first, second = reader
    assert float(first["step_seconds"]) == pytest.approx(found.step_seconds, rel=1e-5)
    assert first["within_interval"] == "true"
    assert first["used_in_fit"] == "false"
    assert second["step_seconds"] == ""
    assert "out of memory, says CUDA" in second["reason"]
    assert all(f"{name}_{what}" in COLUMNS for name in GROUPS for what in ("seconds", "forecast", "error"))


def test_an_unwritable_csv(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"validation\.csv cannot be written.*--out"):
        write_csv([], tmp_path / "file" / "validation.csv")


@pytest.mark.parametrize(("wanted", "call"), [(k, v) for k, v in CALL_OF.items() if k != "other"])
def test_calls_have_the_class_of_the_forecast(wanted: str, call: str) -> None:
    assert op_class(call) == wanted


def test_every_class_is_compared_once() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(OP_CLASSES)
    assert op_class("aten::_fused_adamw_") == "optimizer"
    assert op_class("") == "pointwise"  # a kernel that no call owns: element-wise


@pytest.mark.parametrize(("device", "name"), [("cpu", "quick"), ("cuda", "quick"), ("cuda", "standard")])
def test_steps_to_validate_on(device: str, name: str) -> None:
    plans = validation_plans(device, name)
    assert len({plan.key for plan in plans}) == len(plans)
    for plan in plans:
        check_config(plan.config)
    if device == "cuda":
        assert {plan.batch * plan.seq for plan in plans} >= {1024, 8192}
    if name == "standard":
        groups = Counter(plan.group for plan in plans)
        plain = ("ladder", "ln ladder", "off the ladder", "published configs", "large batch", "cpu")
        assert sum(groups[group] for group in plain) >= 44
        assert groups["patched"] >= 6
        triton = [p for p in plans if "triton" in (p.matmul, p.attention)]
        assert len(triton) >= 6
        judged = {(str(p.config), p.batch, p.seq) for p in plans if p.group != "intervals"}
        assert not judged & {(str(p.config), p.batch, p.seq) for p in plans if p.group == "intervals"}
        fitted = {(source.width, source.batch, source.seq) for source in PLANS["standard"].fit.sources}
        off = [p for p in plans if p.group == "off the ladder"]
        assert off
        assert not {(p.config["hidden_size"], p.batch, p.seq) for p in off} & fitted


def test_rows_of_kernels_may_lie_before_their_steps(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    rows = rows_of(found, tiny)
    assert compare(rows, profile) == compare(rows[::-1], profile)


STACK = {"torch": "2.11.0+cu130", "triton": "3.6.0", "transformers": "5.17.0"}


def test_steps_of_other_versions_are_refused(
    found: Forecast, tiny: dict[str, Any], profile: Profile, traced: Callable[..., Stream]
) -> None:
    """Kernels are the profile's torch's, operations transformers'; a trace by another torch is proven the same."""
    stream = traced(tiny)
    check_stack(STACK, profile)
    check_stream(replace(stream, meta={**stream.meta, "torch": "2.13.0", "transformers": "5.17.3"}), STACK)
    check_stream(replace(stream, meta={}), STACK)
    with pytest.raises(UsageError, match=r"torch 2\.12\.1.*measured with torch 2\.11\.0.*bench.*--any-stack"):
        check_stack({**STACK, "torch": "2.12.1"}, profile)
    for name, version in (("transformers", "5.23.0"), ("torch", "2.9.1")):
        other = replace(stream, meta={**stream.meta, **STACK, name: version})
        with pytest.raises(UsageError, match=f"traced with {name} {version}.*pip install {name}=={version}"):
            check_stream(other, STACK)
    rows = rows_of(found, tiny)
    assert compare(rows, profile, stack=STACK) == compare(rows, profile)
    with pytest.raises(UsageError, match="--any-stack"):
        compare(rows, profile, stack={**STACK, "transformers": "4.0.0"})


def test_steps_of_another_device_are_refused_unless_told(profile: Profile) -> None:
    own, other = {"type": "cuda", "name": "NVIDIA H200"}, {"type": "cuda", "name": "NVIDIA L4"}
    profile = replace(profile, gpu="nvidia-h200")
    check_device(own, profile)
    check_device(other, profile, any_gpu=True)
    with pytest.raises(UsageError, match=r"NVIDIA L4.*profile nvidia-h200.*--any-gpu"):
        check_device(other, profile, any_gpu=False)
    with pytest.raises(UsageError, match=r"cuda device, the steps are of cpu"):
        check_device({"type": "cpu", "name": "Xeon"}, profile, any_gpu=True)
    processor = replace(profile, gpu="cpu", device={"type": "cpu", "name": "EPYC"})
    check_device({"type": "cpu", "name": "EPYC"}, processor)
    with pytest.raises(UsageError, match=r"ran on Xeon, profile cpu is of another device, EPYC"):
        check_device({"type": "cpu", "name": "Xeon"}, processor)


def test_other_kinds_of_steps_are_summed_up_apart(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    def of_group(group: str, slower: float) -> StepComparison:
        rows = rows_of(found, tiny, slower=slower)
        return compare([{**row, "plan": {**row["plan"], "group": group}} for row in rows], profile)[0]

    groups = ("ladder", "patched", "other families", "options", "intervals")
    rows = [of_group(group, 1.25 + i / 4) for i, group in enumerate(groups)]
    by_name = {entry.label: entry for entry in summaries(rows)}
    assert by_name["all"].n == 1
    assert by_name["all"].parts["step"].worst == pytest.approx(0.2)
    assert by_name["patched with other kernels"].parts["step"].worst == pytest.approx(1 / 3)
    assert by_name["other families"].n == by_name["options"].n == 1
    assert sum(entry.n for name, entry in by_name.items() if not name.endswith("-bound")) == 4
    assert [row.used_in_intervals for row in rows] == [False] * 4 + [True]
    assert (by_name["all"].interval_width or 0.0) > 0


def test_the_same_steps_by_other_methods(found: Forecast, tiny: dict[str, Any], profile: Profile) -> None:
    h200 = replace(profile, gpu="nvidia-h200")
    rows = rows_of(found, tiny)
    estimate = {"key": "step_estimate/tiny", "status": "ok", "value": 2 * found.step_seconds}
    (row,) = compare([*rows, estimate], h200)
    assert row.baselines["torch"].error == pytest.approx(1.0)
    assert (
        0.0 < (row.baselines["roofline"].forecast or 0.0) < (row.device.forecast or 0.0)
    )  # nothing beats the datasheet
    assert row.baselines["six_n"].forecast == pytest.approx(6 * found.n_params * 64 / (0.4 * 9e14))
    methods = {entry.method: entry for entry in compare_methods([row])}
    assert list(methods) == ["step", "roofline", "six_n", "torch"]
    assert methods["step"].sets["all"].worst == pytest.approx(0.0, abs=1e-9)
    assert methods["torch"].sets["all"].signed == pytest.approx(1.0)
    (unknown,) = compare(rows, profile)  # a GPU without a datasheet, and torch's estimator not run
    assert unknown.baselines["roofline"].forecast is unknown.baselines["torch"].forecast is None
    assert [entry.method for entry in compare_methods([unknown])] == ["step", "six_n"]


def test_the_host_is_the_one_beside_the_step(tiny: dict[str, Any], profile: Profile) -> None:
    """Tiny models half as fast around one step: that step's host is, the other's is not."""
    plan = host_plan("cuda")
    samples = [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    calibration = [
        {"key": plan.row_key(depth, phase), "status": "ok", "session": "a", "value": 1e-3 * (1 + depth),
         "samples": [1e-3 * (1 + depth) * factor for factor in samples], "n": len(samples)}
        for depth in plan.configs for phase in ("zero_grad", *PHASES)
    ]  # fmt: skip
    host = hosts_of_runs(calibration, profile)["a"]
    calm, busy = host.at(2), host.at(6)
    assert busy.forward["launch"] == pytest.approx(2 * calm.forward["launch"])
    assert busy.optimizer["fixed"] == pytest.approx(2 * calm.optimizer["fixed"])
    assert host.at(None) == host.costs
    assert hosts_of_runs([], profile) == {}
    steps = [
        {**row, "key": f"{row['key']}{i}", "session": "a", "host_samples_before": n}
        for i, n in enumerate((2, 6))
        for row in rows_of(forecast(tiny, Run(batch=2, seq=32), profile), tiny)[:1]
    ]
    first, second = compare([*steps, *calibration], profile)
    assert second.host.forecast == pytest.approx(2 * (first.host.forecast or 0.0))
    assert first.host_calibrated == "in the same run"


def test_steps_of_several_machines_are_read_together(tmp_path: Path) -> None:
    for name in ("run0", "run1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "measurements.jsonl").write_text("")
    assert step_folders(tmp_path) == [tmp_path / "run0", tmp_path / "run1"]
    assert step_folders(tmp_path / "run0") == [tmp_path / "run0"]


def test_one_count_of_the_steps_inside_their_intervals() -> None:
    """What the page's text and its figure say, and what the guide quotes: steps that set the width judge nothing."""

    def row(measured: float, *, sets_width: bool = False) -> StepComparison:
        step = Part(measured=measured, forecast=1.0, low=0.9, high=1.1)
        return StepComparison(StepPlan(name="a", config={}), "ok", step=step, used_in_intervals=sets_width)

    rows = [row(1.0), row(1.05), row(2.0), row(1.0, sets_width=True), row(3.0, sets_width=True)]
    found = inside([*rows, StepComparison(StepPlan(name="b", config={}), "oom")])
    assert (found.count, found.judged, found.setters) == (2, 3, 2)
    assert found.words == "2 of 3 inside the 90% interval (2 more steps set its width)"
    assert inside(rows[:3]).words == "2 of 3 inside the 90% interval"
    assert found.words in how_wrong(rows)
    drawn = agreement_figure(rows)
    assert drawn is not None
    assert found.words in drawn.caption


def test_the_readme_quotes_the_count_of_the_committed_comparison(root: Path) -> None:
    with (root / "reports" / "nvidia-h200" / "validation.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["within_interval"]]
    judged = [row for row in rows if row["used_in_intervals"] == "false"]
    within = sum(row["within_interval"] == "true" for row in judged)
    count = f"{within} of {len(judged)}"
    assert f": {count} hold" in (root / "README.md").read_text()


def test_a_row_may_name_any_factory_of_the_zoo_and_no_other(profile: Profile) -> None:
    from flopcast.microbench import zoo

    own = {name for name, value in vars(zoo).items() if inspect.isfunction(value) and value.__module__ == zoo.__name__}
    assert factories() == {f"flopcast.microbench.zoo:{name}" for name in own if not name.startswith("_")}
    assert "flopcast.microbench.zoo:transformer_encoder" in factories()
    with pytest.raises(UsageError, match=r"only .*transformer_encoder.* are run"):
        stream_of(StepPlan(name="other", config={}, module="os:getcwd"), Run(), profile)
