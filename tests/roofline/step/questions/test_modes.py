"""The modes of a step side by side: each is forecast as it would be alone, and breaks, waits and zeros have a price."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.alternatives import advise
from flopcast.roofline.step.questions.modes import interruptions, modes_of, remedy_for
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

RECORDED = Path(__file__).resolve().parents[4] / "reports" / "nvidia-h200" / "compiled-steps"
RUN = Run(batch=4, seq=256)
BREAK = {"where": "model.py:7, in forward: if x.max().item() > 0:", "reason": "Unsupported Tensor.item() call"}


@cache
def streams() -> dict[str, Stream]:
    """A real step in each mode: two layers of Qwen3-0.6B, compiled on an H200."""
    eager = get_stream(with_depth(load_config("qwen3-0.6b"), 2), RUN.traced_on("cuda"))
    text = gzip.decompress((RECORDED / "qwen3-0.6b-l2-4x256.code.gz").read_bytes()).decode()
    compiled = to_stream(read_output_code(text), eager)
    return {
        "eager": eager, "compile": compiled,
        "compile-graphs": replace(compiled, meta={**compiled.meta, "mode": "compile-graphs"}),
    }  # fmt: skip


def step_in(mode: str, **meta: Any) -> PricedStep:
    stream = streams()[mode]
    return PricedStep(
        replace(stream, meta={**stream.meta, **meta}), replace(RUN, mode=mode), find_profile("nvidia-h200")
    )


def known(run: Run) -> Stream | None:
    return streams()[run.mode]


@pytest.mark.parametrize("asked", ["eager", "compile", "compile-graphs"])
def test_each_mode_is_its_own_forecast(asked: str) -> None:
    found = modes_of(step_in(asked), known)
    assert found is not None
    assert [one.mode for one in found.steps] == ["eager", "compile", "compile-graphs"]
    for one in found.steps:
        alone = step_in(one.mode).forecast()
        assert (one.step_seconds, one.peak_bytes, one.kernels) == (alone.step_seconds, alone.peak_bytes, alone.kernels)
        assert one.waiting_seconds is not None
        assert 0 <= one.waiting_seconds < alone.step_seconds
    eager, compiled, captured = found.steps
    assert eager.launches == eager.kernels
    assert compiled.bytes is not None
    assert eager.bytes is not None
    assert compiled.bytes < eager.bytes
    assert captured.launches is not None
    assert compiled.launches is not None
    assert captured.launches < compiled.launches == compiled.kernels
    assert not found.interruptions


def test_a_mode_without_its_stream_or_that_cannot_be_compiled_says_so() -> None:
    def stream_of(run: Run) -> Stream | None:
        if run.mode == "compile":
            raise UsageError("torch cannot compile the step")
        return None

    found = modes_of(step_in("eager"), stream_of)
    assert found is not None
    reasons = {one.mode: one.reason for one in found.steps}
    assert reasons["eager"] == ""
    assert reasons["compile"] == "torch cannot compile the step"
    assert "--what-if" in reasons["compile-graphs"]


def test_zeros_for_logits_that_the_loss_does_not_need_are_told() -> None:
    """A causal model returns its logits, whose gradient is nothing: vocabulary x tokens in bf16."""
    found = modes_of(step_in("compile"), known)
    assert found is not None
    assert found.zeros_bytes == pytest.approx(151_936 * RUN.tokens * 2, rel=0.01)
    assert found.zeros_seconds > found.zeros_bytes / 4.8e12


def test_a_break_costs_what_entering_its_graphs_does() -> None:
    """The forward and the backward, cut in two where the host bounds."""
    (whole, first, last), (_, start, stop) = streams()["compile"].meta["graphs"]
    forward, backward = (first + last) // 2, (start + stop) // 2
    calls = [(whole, first, forward), ("1_forward", forward + 1, last), ("1_backward", start, backward),
             ("0_backward", backward + 1, stop)]  # fmt: skip
    step = replace(step_in("compile", graphs=calls, breaks=[BREAK]), host=default_host().scaled(5.0))
    found = modes_of(step, known)
    assert found is not None
    (only,) = found.interruptions
    costs = step.host_costs.graph_costs("compile")
    assert (only.kind, only.where) == ("graph break", BREAK["where"])
    assert only.step_seconds == pytest.approx(costs.forward + costs.backward, rel=0.25)
    assert "torch.where" in only.remedy


@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
def test_compiled_steps_have_no_bound_of_what_compiling_saves(mode: str) -> None:
    assert "no host" not in [one.name for one in advise(step_in(mode))]
    assert "no host" in [one.name for one in advise(step_in("eager"))]


def test_a_step_function_has_the_mode_that_it_is_written_in() -> None:
    step = step_in("eager", unit="steps")
    own = replace(step, run=replace(step.run, optimizer="AdamW", precision="bf16"))
    found = modes_of(own, known)
    assert found is not None
    assert [one.step_seconds is None for one in found.steps] == [False, True, True]
    assert all("torch.compile" in one.reason for one in found.steps[1:])
    (alone,) = [one for one in advise(own) if one.name == "no host"]
    assert (alone.kind, alone.step_seconds is None) == ("bound", False)


def test_a_factory_that_compiles_has_no_other_mode() -> None:
    compiled = streams()["compile"]
    found = modes_of(step_in("compile"), lambda run: compiled)
    assert found is not None
    assert [one.step_seconds is None for one in found.steps] == [True, False, True]
    assert found.steps[0].reason == "the factory compiles what it returns by itself, in mode compile"


def test_frames_around_experts_are_one_break() -> None:
    line = "transformers/integrations/moe.py:336, in _grouped_mm: return torch.ops.transformers.grouped_mm_fallback(x)"
    frames = [{"reason": "step_unsupported", "where": f"model.py:{number}, in f: return x"} for number in range(3)]
    other = {"reason": "call of print", "where": "model.py:9, in g: print(x)"}
    alone = interruptions(step_in("compile", breaks=frames))
    assert [one.where for one in alone] == [one["where"] for one in frames]
    found = interruptions(step_in("compile", breaks=[*frames, other], waits=[line]))
    by_kind = {(one.kind, one.where): one for one in found}
    assert len(found) == len(by_kind) == 3
    of_experts, wait = by_kind["graph break", line], by_kind["wait", line]
    assert "3 frames" in of_experts.reason
    assert "--precision bf16" in of_experts.remedy
    assert wait.remedy == of_experts.remedy
    assert by_kind["graph break", other["where"]].remedy == remedy_for("print")


def test_remedies_follow_the_reason() -> None:
    assert "outside of the model" in remedy_for("call to builtin print")
    assert "TORCH_LOGS" in remedy_for("something dynamo does not know")


def test_a_processor_has_no_modes() -> None:
    step = step_in("eager")
    processor = replace(step.profile, device={**step.profile.device, "type": "cpu"})
    assert modes_of(replace(step, profile=processor), known) is None
