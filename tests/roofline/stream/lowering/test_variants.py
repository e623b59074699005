"""What surfaces are called: taken apart into what tells kernels from one another, and put together the same."""

import pytest

from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.lowering.variants import (
    AttentionVariant,
    CallVariant,
    ConvVariant,
    GemmVariant,
    KernelKind,
    SurfaceKey,
    Variant,
    parse_variant,
)

VARIANTS = {
    "nt/bf16": GemmVariant("nt", "bf16"),
    "nn/fp32/unaligned": GemmVariant("nn", "fp32", is_aligned=False),
    "batched/tn/tf32/unaligned": GemmVariant("tn", "tf32", "batched", is_aligned=False),
    "grouped/tt/fp32": GemmVariant("tt", "fp32", "grouped"),
    "fwd/causal/bf16/d128": AttentionVariant("fwd", True, "bf16", 128),
    "bwd/full/fp16/d64": AttentionVariant("bwd", False, "fp16", 64),
    "bwd/causal/bf16/d192v128": AttentionVariant("bwd", True, "bf16", 192, 128),
    "wgrad/bf16/nchw/k7x7s2x2g4": ConvVariant("wgrad", "bf16", "nchw", "k7x7s2x2g4"),
    "_to_copy|fp32>bf16|ab>ba": CallVariant("_to_copy", "fp32>bf16", "ab>ba"),
    "_foreach_mul_|fp32": CallVariant("_foreach_mul_", "fp32"),
    "fill": CallVariant("fill"),
}


@pytest.mark.parametrize(("text", "variant"), VARIANTS.items())
def test_names_come_apart_and_together(text: str, variant: Variant) -> None:
    assert parse_variant(text) == variant
    assert str(variant) == text
    key = SurfaceKey.parse(f"torch/x/{text}/cold")
    assert key == SurfaceKey("torch", "x", variant, "cold")
    assert str(key.with_cache("hot")) == f"torch/x/{text}/hot"
    assert KernelKind.parse(str(key.kind)) == key.kind


def test_every_surface_that_ships_has_a_name_of_its_own() -> None:
    profile = find_profile("nvidia-h200")
    assert len({str(key) for key in profile.surfaces}) == len(profile.surfaces)
    assert all(surface.variant == key.variant for key, surface in profile.surfaces.items())
    products = {key.variant.dtypes for key in profile.surfaces if key.op_class == "gemm"}
    assert products == {"bf16", "tf32", "fp32", "fp16", "fp8", "bf16+int32+bf16>bf16"}


@pytest.mark.parametrize("text", ["a/b/c/d/e", "nt/bf16/odd", "fwd/causal/bf16/dx", "add|fp32>fp32|a>a|b", ""])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no variant of a kernel|invalid literal"):
        parse_variant(text)


def test_what_is_no_surface_is_refused() -> None:
    with pytest.raises(ValueError, match="not enough values"):
        SurfaceKey.parse("gemm")
