"""A trace in a process of its own, with stand-ins for parts of torch, is the trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flopcast import child
from flopcast.child import PARENT
from flopcast.errors import UsageError
from flopcast.microbench.recipe import training_step
from flopcast.roofline.stream.library import trace_process
from flopcast.roofline.stream.library.streams import trace_now
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.tracer import cuda_semantics
from flopcast.roofline.stream.tracer import trace as tracer
from flopcast.roofline.stream.tracer.trace import trace

ASKED: dict[str, Any] = {"batch": 2, "seq": 32, "checkpoint": "full", "accumulate": 2}
_PREDICT = """
import sys
from flopcast.roofline.cli.app import app
app(["predict", "--gpu", "nvidia-h200", "--config", sys.argv[1], "--batch", "3", "--seq", "16", "--json"],
    standalone_mode=False)
print(sorted({"torch", "transformers"} & sys.modules.keys()), file=sys.stderr)
"""


def _process(arguments: list[str], **more: Any) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, *arguments], text=True, **pipes, **more)


def test_the_streams_of_a_process_of_its_own(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Three at once: a trace, a config that is refused, and a forecast that has to be traced."""
    module = ["-P", "-m", "flopcast.roofline.stream.library.trace_process"]
    config = tmp_path / "config.json"
    config.write_text(json.dumps(tiny))
    traces, refuses = _process(module), _process(module)
    own_cache = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    predicts = _process(["-c", _PREDICT, str(config)], env=own_cache)
    answer = json.loads(traces.communicate(json.dumps({"config": tiny, "traced": ASKED}))[0])
    expected = streams.to_json(trace_now(tiny, Traced(**ASKED)))
    assert answer["stream"] == json.loads(json.dumps(expected))
    unknown = {"config": {**tiny, "model_type": "no such"}, "traced": {}}
    assert "no such" in json.loads(refuses.communicate(json.dumps(unknown))[0])["refused"]
    out, told = predicts.communicate()
    assert json.loads(out)["depth"] == 3, told
    assert told.splitlines()[-1] == "[]"  # what forecasts has no torch
    assert list((tmp_path / "flopcast" / "streams").rglob("*.json.gz"))


@pytest.mark.parametrize("family", ["qwen3", "qwen3-bf16", "qwen3_moe", "llama", "mistral", "gpt2"])
def test_optimizer_state_without_a_first_step(
    family: str, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second step's stream is the same whether a first one ran or only made its state. Of two layers."""
    name, _, precision = family.partition("-")
    shipped = {"qwen3_moe": "qwen3-moe", "gpt2": "gpt2"}.get(name)
    config = {**with_depth(load_config(shipped) if shipped else tiny, 2), "vocab_size": 512}
    if name in ("llama", "mistral"):
        config = {
            "model_type": name, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        }  # fmt: skip
    run = Traced(batch=2, seq=32, precision=precision or "autocast-bf16")
    assert tracer._is_steady_at_once(config)
    short = trace(config, run)
    monkeypatch.setattr(tracer, "_is_steady_at_once", lambda _: False)
    assert streams.to_json(short) == streams.to_json(trace(config, run))


def test_parameters_without_gradients_have_no_state(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that leaves parameters out is traced with a whole first step."""
    build = training_step.build_model

    def with_unused(*args: Any, **kwargs: Any) -> Any:
        import torch

        model = build(*args, **kwargs)
        model.unused = torch.nn.Linear(8, 8)
        return model

    monkeypatch.setattr(training_step, "build_model", with_unused)
    found = trace(tiny, Traced(batch=2, seq=32))
    monkeypatch.setattr(tracer, "_is_steady_at_once", lambda _: False)
    assert streams.to_json(found) == streams.to_json(trace(tiny, Traced(batch=2, seq=32)))


def test_a_trace_ends_with_the_command_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told to before it reads the request: a killed command left a process that traced on for minutes."""

    def told() -> None:
        raise EOFError(os.environ.pop(PARENT))

    started = trace_process._started
    monkeypatch.setattr(trace_process, "sys", SimpleNamespace(modules={}, executable=sys.executable))
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda command, env, **_: env[PARENT])
        monkeypatch.setenv(PARENT, str(started()))
    monkeypatch.setattr(child, "end_with_parent", told)
    with pytest.raises(EOFError, match=f"^{os.getpid()}$"):
        trace_process.main()


def test_a_trace_ends_in_time(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_semantics, "MAX_SECONDS", 0.01)
    with pytest.raises(UsageError, match=r"cannot be traced: one step is not traced after 0\.01 s .*; fewer layers"):
        trace_now(tiny, Traced(**ASKED))
