"""The recorded compiled steps of an H200 by the shipped laws: no law may get worse.

Of Llama, ViT, Qwen3-1.7B and 4B nothing was fitted (`steps.md` says of which steps something was). Attention with
masks is that of calls alone, at the highest clock, which these four steps did not run at: they take longer by up to
16%. A law that was fitted to calls in steps hid it (8% in all, now 10%), and was twice as far off elsewhere."""

from __future__ import annotations

from functools import cache

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from studies.compiled.record import CASES
from studies.compiled.recorded import FOLDER, compiled_stream, record_of, run_of
from studies.compiled.steps import GPU, GROUPS, Compared, compared, parts_fitted, report

DEVICE = {  # the most that device time may be off
    "llama-3.2-1b-l2": 0.0147, "vit-b16": 0.015, "qwen3-1.7b-l2": 0.01, "qwen3-4b-l2": 0.03, "gpt2-l2": 0.01,
    "resnet50": 0.025, "mlp": 0.035, "qwen3-0.6b-l2-4x256": 0.015, "qwen3-0.6b-l2": 0.015,
    "qwen3-moe-l2": 0.045,
}  # fmt: skip
HELD_OUT = ("llama-3.2-1b-l2", "vit-b16", "qwen3-1.7b-l2", "qwen3-4b-l2")
SUMS = {"gemm": 0.01, "attention": 0.10, "generated": 0.0285, "optimizer": 0.03, "reduction": 0.20, "elementwise": 0.03}


@cache
def step(name: str) -> Compared:
    return compared(next(case for case in CASES if case.name == name), find_profile(GPU))


@pytest.mark.parametrize(("name", "most"), DEVICE.items())
def test_device_time(name: str, most: float) -> None:
    assert abs(step(name).device_error) <= most
    assert step(name).is_within


@pytest.mark.parametrize("group", GROUPS)
def test_groups_of_kernels_of_steps_that_were_held_out(group: str) -> None:
    assert not any(parts_fitted(name) for name in HELD_OUT)
    forecast, measured = (
        sum(side.get(group, 0.0) for side in sides)
        for sides in ([step(name).forecast for name in HELD_OUT], [step(name).measured for name in HELD_OUT])
    )
    assert forecast == pytest.approx(measured, rel=SUMS[group])


def test_gradients_that_autograd_copies() -> None:
    """Those of channels last, which are copied one by one: 17 kernels of 63 us. Their sum was once compared with all
    that is elementwise, of which another kernel of 17 us hid that they were forecast a fifth too long."""
    case = next(case for case in CASES if case.name == "resnet50")
    stream = compiled_stream(FOLDER, case)
    ops = PricedStep(stream, run_of(case), find_profile(GPU)).ops
    copied = [
        priced.seconds
        for op, after, priced in zip(stream.ops, stream.ops[1:], ops, strict=False)
        if op.name == "aten.clone.default" and "convolution" not in after.name  # which copies its own
    ]
    kernels = record_of(FOLDER, case.name)["kernels"]["compile"]
    measured = [seconds for name, seconds in kernels if name.startswith("void at::native::elementwise_kernel<128, 2,")]
    assert len(copied) == len(measured) == 17
    assert sum(copied) == pytest.approx(sum(measured), rel=0.12)


def test_the_table_says_what_was_fitted() -> None:
    shown = report([step("llama-3.2-1b-l2"), step("gpt2-l2")])
    assert "| llama-3.2-1b-l2 | none | 38.17 |" in shown
    assert "| gpt2-l2 | generated, dropout |" in shown
    assert "- All: 2 steps" in shown
    assert "- Of which no kernel was fitted: 1 steps" in shown
