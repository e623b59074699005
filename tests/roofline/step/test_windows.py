"""Steps of models with sliding windows, on torch's attention and on the Triton one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.device_work import backend_of, describe_ops
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.alternatives import advise
from flopcast.roofline.step.questions.explain import explain_step
from flopcast.roofline.step.questions.kernel_times import kernels
from flopcast.roofline.stream.library.stored import stream_key
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

# A Qwen3 whose second layer of two has a window, as transformers reads these fields.
CONFIG = {
    "model_type": "qwen3", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 128, "intermediate_size": 256, "vocab_size": 512,
    "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1,
}  # fmt: skip
RUN = Run(batch=2, seq=512)
OURS = replace(RUN, attention="triton")


@pytest.fixture(scope="module")
def streams() -> dict[str, Stream]:
    from flopcast.roofline.stream.library.streams import trace_now

    return {run.attention: trace_now(CONFIG, run.traced_on("cuda")) for run in (RUN, OURS)}


def attentions(stream: Stream) -> list[Attention]:
    works = [work for work in describe_ops(stream) if work is not None]
    return [work.shape for work in works if isinstance(work.shape, Attention)]


def test_the_triton_attention_takes_the_window_and_torchs_a_mask(streams: dict[str, Stream]) -> None:
    assert [(one.direction, one.mask, one.window) for one in attentions(streams["sdpa"])] == [
        ("fwd", False, 0), ("fwd", True, 0), ("bwd", True, 0), ("bwd", False, 0)
    ]  # fmt: skip
    found = attentions(streams["triton"])
    assert [(one.direction, one.mask, one.window) for one in found] == [
        ("fwd", False, 0), ("fwd", False, 64), ("bwd", False, 64), ("bwd", False, 0)
    ]  # fmt: skip
    assert all(one.causal and one.kv_heads == 1 for one in found)  # with a mask transformers repeats keys and values
    waits, before = ([op.module for op in streams[name].ops if op.kind == "sync"] for name in ("triton", "sdpa"))
    assert waits == [*before, "model.layers.1.self_attn"]  # the mask is looked at once per forward
    # nothing reads the log-sum-exp's gradient, and none is made
    assert not any(op.name == "aten.zeros.default" for op in streams["triton"].ops)


def test_a_step_on_windows_is_explained(streams: dict[str, Stream]) -> None:
    profile = find_profile("nvidia-h200")
    steps = {run.attention: PricedStep(streams[run.attention], run, profile) for run in (RUN, OURS)}
    found = explain_step(steps["triton"])
    windows = found.windows
    assert windows is not None
    assert windows.calls == 2
    assert windows.flops < windows.flops_visited < windows.flops_causal
    assert found.to_json()["windows"]["calls"] == 2
    assert explain_step(steps["sdpa"]).windows is None
    # what runs on a mask stays torch's, whichever attention was asked for
    masked = next(describe(one) for one in attentions(streams["sdpa"]) if one.mask)
    assert [backend_of(masked, run, "sdpa-cudnn") for run in (RUN, OURS)] == ["sdpa-cudnn"] * 2


def test_attention_by_triton_is_another_stream() -> None:
    keys = {stream_key(CONFIG, run.traced_on("cuda")) for run in (RUN, OURS)}
    assert len(keys) == 2
    short = [replace(run, seq=63) for run in (RUN, OURS)]  # no window hides anything
    assert len({stream_key(CONFIG, run.traced_on("cuda")) for run in short}) == 1


def test_what_is_not_forecast_is_said(streams: dict[str, Stream]) -> None:
    wide = describe(Attention(batch=1, heads=4, kv_heads=4, seq=512, head_dim=256))
    with pytest.raises(UsageError, match="head_dim 256: its kernels have 16, 32, 64, 128; use --attention sdpa"):
        backend_of(wide, OURS, "sdpa-cudnn")
    stream = streams["triton"]
    packed = next(op for op in stream.ops if op.name.startswith("flopcast.triton_attention"))
    with pytest.raises(UsageError, match="packed documents cannot be forecast"):
        lower(stream, packed._replace(args=packed.args.replace("null", '{"t":3}')))


def test_alternatives_of_a_window_need_their_own_stream(streams: dict[str, Stream]) -> None:
    step = PricedStep(streams["sdpa"], RUN, find_profile("nvidia-h200"))
    by = {one.option: one for one in advise(step, config={**CONFIG, "vocab_size": 513})}
    assert "has to be traced first" in by["--attention triton"].reason


def test_single_calls_with_a_window() -> None:
    row: dict[str, Any] = {"op": "attention", "batch": "1", "heads": "16", "kv_heads": "8", "seq": "8192",
                           "head_dim": "128", "backend": "triton"}  # fmt: skip
    rows = [row, row | {"window": "1024"}, row | {"window": "8192"}, row | {"window": "9", "backend": "sdpa"},
            row | {"head_dim": "96"}]  # fmt: skip
    causal, banded, same, *refused = kernels(rows, find_profile("nvidia-h200"))
    assert banded["basis"] == "extrapolated"
    assert banded["seconds"] < 0.7 * causal["seconds"]
    assert same["seconds"] == causal["seconds"]
    assert [one["reason"].partition(":")[0] for one in refused] == ["window 9", "head_dim 96 with backend triton"]
