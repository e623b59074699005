"""Real training steps on this processor: they learn, they are measured by component, and none stops the others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.plans import StepPlan
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.steps.measure import paced_rounds, profile_kernels, profile_step, time_step
from flopcast.microbench.steps.run import by_op, measure_plan, run_steps
from flopcast.microbench.timing.device import describe
from flopcast.microbench.timing.telemetry import Reading
from flopcast.roofline.gpu.fit.host_calibration import host_plan
from flopcast.roofline.stream.model.models import make_config

CPU = torch.device("cpu")
TINY = make_config(width=64, depth=2, heads=4, kv_heads=2, head_dim=16, vocab=256)


def step_of(seed: int = 0, **options: Any) -> training_step.TrainingStep:
    return training_step.build(TINY, "cpu", Recipe(**{"batch": 2, "seq": 16, **options}), seed)


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [
        ("autocast-bf16", "adamw"),
        ("autocast-bf16", "adamw-fused"),
        ("bf16", "adamw-fused"),
        ("autocast-fp16", "adamw"),
        ("autocast-fp16", "adamw-fused"),
        ("fp32", "adamw"),
        ("tf32", "adamw"),
        ("autocast-bf16", "sgd-momentum"),
        ("autocast-bf16", "adafactor"),
        ("autocast-bf16", "adafactor-foreach"),
        ("autocast-bf16", "muon"),
    ],
)
def test_steps_learn(precision: str, optimizer: str) -> None:
    """The same batch again and again: the loss starts at chance and falls."""
    step = step_of(precision=precision, optimizer=optimizer)
    losses = [float(step.run()) for _ in range(5 if "adamw" in optimizer else 60)]
    assert losses[0] == pytest.approx(math.log(256), rel=0.1)
    assert losses[-1] < 0.95 * losses[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    assert {p.dtype for p in step.model.parameters()} == {dtype}


def test_the_recipe_is_the_one_forecast() -> None:
    step = step_of()
    with step.autocast():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    config: Any = step.model.config
    assert config._attn_implementation == "sdpa"
    assert step.model.training
    assert [type(optimizer) for optimizer in step.optimizers] == [torch.optim.AdamW]
    step.run()
    step.zero_grad()
    assert all(p.grad is None for p in step.model.parameters())  # set to none, not to zero
    embeddings = [p for n, p in step.model.named_parameters() if "embed" in n or "lm_head" in n]
    assert len(embeddings) == 1  # tied


def test_a_model_without_sdpa_attends_as_transformers_would_have_it() -> None:
    config = {"model_type": "bloom", "hidden_size": 32, "n_head": 2, "n_layer": 1, "vocab_size": 64}
    step = training_step.build(config, "cpu", Recipe(batch=2, seq=8))
    assert step.model.config._attn_implementation == "eager"
    assert step.run().isfinite()
    assert step_of().model.config._attn_implementation == "sdpa"


def test_clipping_bounds_the_norm_of_the_gradients() -> None:
    for clip, is_bounded in ((0.0, False), (1e-3, True)):
        step = step_of(clip=clip)
        step.run()
        norm = torch.nn.utils.get_total_norm([p.grad for p in step.model.parameters() if p.grad is not None])
        assert (norm <= 1.01e-3) == is_bounded


def test_muon_trains_the_matrices_within_and_adamw_the_rest() -> None:
    muon, adamw = step_of(optimizer="muon").optimizers
    matrices, rest = ([p for group in one.param_groups for p in group["params"]] for one in (muon, adamw))
    assert (len(matrices), {p.ndim for p in matrices}) == (2 * 7, {2})
    assert sum(p.ndim == 2 for p in rest) == 1  # the embedding, tied to the output layer


def test_the_same_seed_gives_the_same_step() -> None:
    first, again, other = (float(step_of(seed=seed).run()) for seed in (1, 1, 2))
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "precision 'fp8'"),
        ({"optimizer": "lion"}, "optimizer 'lion': valid are adamw, adamw-fused"),
    ],
)
def test_unknown_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step_of(**options)


def test_a_step_is_timed_by_component() -> None:
    timing = time_step(step_of(), rounds=3, steps_per_round=2, warm_up=1)
    for name in ("step", "host", "forward", "backward", "optimizer"):
        samples = getattr(timing, f"{name}_seconds")
        assert len(samples) == 3
        assert min(samples) > 0
    for whole, *parts in zip(
        timing.host_seconds, timing.forward_seconds, timing.backward_seconds, timing.optimizer_seconds, strict=True
    ):
        assert sum(parts) == pytest.approx(whole)
    assert timing.peak_bytes is None  # the processor's allocator does not count
    assert timing.pace_seconds == ()


def test_the_pace_of_the_host_is_taken_before_each_round_and_after_the_last() -> None:
    step = step_of()
    runs: list[int] = []

    def pace() -> float:
        runs.append(counted.runs)
        return 0.25

    counted = Counted(step)
    timing = time_step(cast(training_step.TrainingStep, counted), rounds=3, steps_per_round=2, warm_up=1, pace=pace)
    assert timing.pace_seconds == (0.25,) * 4
    assert runs == [1, 3, 5, 7]


def test_the_shorter_a_step_the_more_rounds_stand_between_paces() -> None:
    rounds = [paced_rounds(seconds) for seconds in (5.0, 1.0, 0.25, 0.1, 0.01)]
    assert rounds == [0, 4, 16, 20, 20]  # a long step has as many rounds as were asked for


class Counted:
    """A real step that counts how often it ran whole."""

    def __init__(self, step: training_step.TrainingStep) -> None:
        self._step, self.runs = step, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def run(self) -> Any:
        self.runs += 1
        return self._step.run()


class Clocked:
    """A step of 8 ms, by a clock of its own."""

    device_type, accumulate = "cpu", 1

    def __init__(self) -> None:
        self.now, self.runs = 0.0, 0

    def run(self) -> None:
        self.now += 0.008
        self.runs += 1

    def phases(self) -> Iterator[str]:
        yield from ("forward", "backward", "optimizer")


@pytest.mark.parametrize(("least", "in_a_round"), [(0.0, 5), (0.03, 5), (0.2, 25)])
def test_rounds_of_short_steps_are_as_long_as_asked_for(
    monkeypatch: pytest.MonkeyPatch, least: float, in_a_round: int
) -> None:
    step = Clocked()
    monkeypatch.setattr("flopcast.microbench.steps.measure.time.perf_counter", lambda: step.now)
    timing = time_step(cast(training_step.TrainingStep, step), rounds=2, warm_up=1, least_round_seconds=least)
    assert step.runs == 1 + 2 * in_a_round
    assert timing.step_seconds == pytest.approx([0.008] * 2)


@pytest.mark.parametrize(("is_held", "in_a_round"), [(False, 5), (True, 125)])
def test_a_step_that_meets_the_power_limit_is_timed_for_longer(
    monkeypatch: pytest.MonkeyPatch, is_held: bool, in_a_round: int
) -> None:
    step = Clocked()
    monkeypatch.setattr("flopcast.microbench.steps.measure.time.perf_counter", lambda: step.now)
    reading = Reading(clock_mhz=1740.0, throttle_reasons=("sw_power_cap",) if is_held else ("gpu_idle",))
    timing = time_step(cast(training_step.TrainingStep, step), rounds=2, warm_up=1, read=lambda: reading)
    assert timing.steps_per_round == in_a_round
    assert step.runs == 1 + 2 * 5 + (2 * 125 if is_held else 0)
    assert timing.step_seconds == pytest.approx([0.008] * 2)
    assert timing.reading == reading


def test_operators_of_a_step() -> None:
    step = step_of(optimizer="adamw-fused")
    found = profile_step(step)
    assert len(found.device_seconds) == 1
    assert found.device_seconds[0] == pytest.approx(sum(kernel.seconds for kernel in found.kernels))
    totals = by_op(found.kernels)
    products = 2 * 7 + 1  # seven weights a layer and the head; each again for two gradients
    assert totals["aten::mm"][1] == 3 * products
    assert totals["aten::_fused_adamw_"][1] == 1
    assert sum(seconds for seconds, _ in totals.values()) == pytest.approx(found.device_seconds[0])
    assert all(kernel.seconds > 0 for kernel in profile_kernels(step))


PLAN = StepPlan(name="tiny", config=TINY, batch=2, seq=16)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    with Recorder(tmp_path, describe(CPU)) as opened:
        yield opened


def run(plans: list[StepPlan], recorder: Recorder, **options: Any) -> Any:
    return run_steps(plans, device=CPU, recorder=recorder, rounds=2, steps_per_round=1, **options)


def test_one_that_fails_is_a_row_and_the_rest_goes_on(recorder: Recorder) -> None:
    broken = replace(PLAN, name="broken", config={**TINY, "model_type": "no-such-model"})
    vast = replace(PLAN, name="vast", config={**TINY, "vocab_size": 10**13})
    summary = run([broken, vast, PLAN], recorder)
    rows = {row["key"]: row for row in recorder.rows}
    assert rows[broken.key]["status"] == "error"
    assert "no-such-model" in rows[broken.key]["reason"]
    assert rows[broken.key]["value"] is None
    assert rows[vast.key]["status"] == "oom"
    assert rows[vast.key]["plan"]["name"] == "vast"
    done = rows[PLAN.key]
    assert done["status"] == "ok"
    assert done["value"] > 0
    assert done["n"] == len(done["samples"]) == 2
    assert done["n_params"] == sum(p.numel() for p in step_of().model.parameters())
    assert set(done["phase_seconds"]) == {"forward", "backward", "optimizer"}
    kernels = rows[PLAN.kernels_key]
    assert kernels["status"] == "ok"
    assert kernels["device_seconds"] > 0
    assert kernels["ops"]["aten::mm"][1] == 45
    assert {broken.kernels_key, vast.kernels_key}.isdisjoint(rows)  # what did not run has no kernels
    assert summary.statuses == {"error": 1, "oom": 1, "ok": 2}
    assert summary.remaining == 0


def test_what_is_done_is_not_run_again(recorder: Recorder) -> None:
    first = run([PLAN], recorder)
    again = run([PLAN], recorder)
    assert first.statuses == {"ok": 2}
    assert again.statuses == {}
    assert again.skipped == 2
    assert len(recorder.rows) == 2


def test_a_run_that_is_killed_keeps_what_tells_its_host(
    recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killed_in_mid_run.py").write_text("def factory(batch):\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    killed = replace(PLAN, name="killed", config={}, module="killed_in_mid_run:factory")
    with pytest.raises(KeyboardInterrupt):
        run([PLAN, killed], recorder, host=host_plan("cpu"))
    before = {row["key"]: row for row in recorder.rows}
    assert before[PLAN.key]["host_samples_before"] == 2
    for depth in (2, 4):
        assert len(before[host_plan("cpu").row_key(depth, "forward")]["samples"]) == 4  # two before each of the steps


def test_a_spent_budget_leaves_the_rest(recorder: Recorder) -> None:
    summary = run([PLAN, replace(PLAN, name="next")], recorder, budget_seconds=0.0)
    assert summary.remaining == 2
    assert recorder.rows == []


def test_rows_say_what_was_run() -> None:
    row = measure_plan(PLAN, CPU, lambda step: {"value": 1.0})
    assert row["role"] == "validation"
    assert row["plan"] == {
        "name": "tiny", "config": TINY, "batch": 2, "seq": 16, "precision": "autocast-bf16", "optimizer": "adamw",
        "attention": "sdpa", "matmul": "torch", "accumulate": 1, "checkpoint": "none", "fused": "none", "clip": 0.0,
        "finetune": "full", "lora_rank": 16, "lora_targets": "all-linear", "base_dtype": "auto",
        "phase": "train", "context": 0, "cache": "auto", "module": "", "group": "ladder", "mode": "eager",
        "parallel": "none",
    }  # fmt: skip
    keys = {
        plan.key
        for plan in (
            PLAN, replace(PLAN, batch=4), replace(PLAN, seq=32), replace(PLAN, optimizer="adamw-fused"),
            replace(PLAN, precision="bf16"), replace(PLAN, config={**TINY, "num_hidden_layers": 3}),
            replace(PLAN, matmul="triton"), replace(PLAN, attention="sdpa-flash"), replace(PLAN, accumulate=2),
            replace(PLAN, checkpoint="full"), replace(PLAN, config={}, module="a.module:factory"),
            replace(PLAN, fused="triton"), replace(PLAN, clip=1.0),
            replace(PLAN, finetune="last=1"), replace(PLAN, finetune="lora"), replace(PLAN, base_dtype="bf16"),
            replace(PLAN, finetune="lora", lora_rank=4),
        )
    }  # fmt: skip
    assert len(keys) == 17
