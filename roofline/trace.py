"""Traces the op stream of a training step on fake tensors, without a GPU: of a config, of a module, of a step function.

The step runs as it would, on fake CPU tensors that have no values; `cuda_semantics` does what CUDA would do
differently, `recorder` writes down what the dispatcher sees. A real step is recorded by the same `record_step`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flopcast.microbench.steps import TrainingStep, build_model, causal_lm_batch, make_optimizer
from flopcast.roofline.cuda_semantics import NAMES, FakeValues, as_on_cuda, untraced
from flopcast.roofline.recorder import record_step
from flopcast.roofline.stream import Stream

__all__ = ["record_step", "trace"]

Recording = Callable[[Any, Mapping[str, Any]], Stream]


@contextlib.contextmanager
def _fake(device: str) -> Iterator[Recording]:
    """Fake tensors that behave as those of `device` ("cuda" or "cpu"); gives the function that records a step."""
    values = FakeValues()
    with untraced(), FakeTensorMode(allow_non_fake_inputs=True), values:
        if device == "cpu":
            yield lambda step, meta: record_step(step, meta, is_host=lambda tensor: False)
            return
        with as_on_cuda(values) as hosts:
            yield lambda step, meta: record_step(step, meta, is_host=hosts.__contains__, names=NAMES)


def trace(
    config: Mapping[str, Any],
    *,
    batch: int = 4,
    seq: int = 256,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    device: str = "cuda",
    accumulate: int = 1,
    checkpoint: str = "none",
) -> Stream:
    """The op stream of one step of a transformers causal language model, on fake tensors.

    `device` is the device whose semantics are traced ("cuda" or "cpu"); neither is needed. Raises ValueError
    when transformers refuses the config.
    """
    with _fake(device) as record:
        model = build_model(config, precision=precision, checkpoint=checkpoint)
        input_ids = torch.zeros((batch, seq), dtype=torch.int64)
        adamw = make_optimizer(model, optimizer, foreach=True if device == "cuda" else None)
        step = TrainingStep(
            model, adamw, causal_lm_batch(input_ids), precision, device, accumulate=accumulate
        )
        meta = {"config": dict(config), "batch": batch, "seq": seq, "precision": precision,
                "optimizer": optimizer, "device": device}  # fmt: skip
        return record(step, meta)
