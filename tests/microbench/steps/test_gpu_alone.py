"""What runs on a GPU that processes share while they compile: one of them at a time, products that are timed too."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from flopcast.microbench.recipe.inference import build_inference
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.steps import gpu_alone
from flopcast.roofline.stream.model.models import make_config


def test_products_are_timed_alone_while_a_model_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.fx_passes import pad_mm  # a second, which no other process is to spend on collecting this

    alone: list[bool] = []

    def timed(*given: Any) -> bool:
        alone.append(gpu_alone._held.is_set())
        return True

    monkeypatch.setattr(pad_mm, "_should_pad", timed)
    with gpu_alone.graphs_alone("cpu"):
        assert pad_mm._should_pad(None, torch.ones(2, 2), torch.ones(2, 2), torch.ops.aten.mm)
    assert alone == [True]
    assert pad_mm._should_pad is timed  # as it was before


LEAVES_A_CORE = """
import os, threading
from flopcast.microbench.steps.gpu_alone import gpu_alone, leave_a_core

asked, told, other = threading.Event(), threading.Event(), []

def beside():  # as autograd's threads are there before the first graph runs
    for _ in range(2):
        asked.wait()
        asked.clear()
        other.append(os.sched_getaffinity(0))
        told.set()

def both():
    told.clear()
    asked.set()
    told.wait()
    return os.sched_getaffinity(0), other[-1]

thread = threading.Thread(target=beside, daemon=True)  # a failure ends the process
thread.start()
cores = os.sched_getaffinity(0)
leave_a_core(least=2)
with gpu_alone("cpu"):
    assert both() == ({max(cores)}, {max(cores)})
assert both() == (cores - {max(cores)}, cores - {max(cores)})
thread.join()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.skipif(len(getattr(os, "sched_getaffinity", lambda _: [0])(0)) < 2, reason="needs two cores")
def test_a_core_is_left_to_the_process_that_has_the_gpu() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES_A_CORE], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_first_calls_of_inference_leave_it_ready(phase: str) -> None:
    step = build_inference(
        make_config(width=64, depth=2, vocab=512), "cpu",
        Recipe(batch=1, phase=phase, context=4, cache="static", precision="fp32"),
    )  # fmt: skip
    gpu_alone.first_steps(step, 2)
    (length, _), *_ = step.lengths
    assert length.item() == (6 if phase == "decode" else 4)
