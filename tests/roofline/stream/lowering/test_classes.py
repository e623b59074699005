"""One table of classes for forecasts, measured rows and what shipped profiles hold."""

from __future__ import annotations

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.lowering.classes import GROUPS, OP_CLASSES, op_class
from flopcast.roofline.stream.lowering.variants import CallVariant


@pytest.mark.parametrize("gpu", ["nvidia-h200", "nvidia-h100-sxm"])
def test_a_shipped_surface_is_of_the_class_that_its_operation_has(gpu: str) -> None:
    """A call that moves to another class leaves its surfaces behind under the old one: fit the profile anew."""
    classes = {
        (variant.operation, key.op_class)
        for key in find_profile(gpu).surfaces
        if isinstance(variant := key.variant, CallVariant)
    }
    assert len(classes) > 20
    assert [pair for pair in classes if op_class(f"aten.{pair[0]}.default", default=pair[1]) != pair[1]] == []


def test_every_class_is_in_one_group() -> None:
    members = [member for group in GROUPS.values() for member in group]
    assert sorted(members) == sorted(OP_CLASSES)
    assert op_class("aten::mm") == op_class("aten.mm.default") == "gemm"


def test_every_fused_optimizer_of_torch_is_one() -> None:
    names = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
    assert {op_class(f"aten.{name}.default") for name in names} == {"optimizer"}
    assert op_class("aten._fused_rms_norm.default") != "optimizer"
