"""The suites of fine-tuning and inference hold what `standard` lacks of them, and keep their holdouts apart."""

from __future__ import annotations

from functools import cache

import pytest

from flopcast.kernels.shapes import Call, Gemm
from flopcast.microbench.recipe.settings import QUANTISED
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.suites import FINE_TUNE, IMAGES, INFERENCE, PRECISIONS, SuiteCase
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run
from studies.suites.beside import convolution, drawn_beside, layer_norm, product_of_4_bits

shipped = cache(suites.load)  # each read once for all tests
STANDARD = shipped("standard")


def kinds(cases: list[SuiteCase]) -> set[tuple[str, str]]:
    return {(work.op_class, str(work.variant)) for case in cases for work in [describe(case.shape, case.backend)]}


@pytest.mark.parametrize("name", [INFERENCE, FINE_TUNE, IMAGES])
def test_what_is_held_out_is_not_fitted(name: str) -> None:
    cases = shipped(name)
    assert len({(case.shape.key, case.cache) for case in cases}) == len(cases)
    fit, holdout = ({case.shape for case in cases if case.role == role} for role in ("fit", "holdout"))
    assert fit.isdisjoint(holdout)
    assert fit.isdisjoint(case.shape for case in STANDARD)
    assert {case.backend for case in cases} == {"torch"}


@pytest.mark.parametrize(
    ("name", "run"),
    [
        (INFERENCE, {"phase": "decode", "context": 640, "precision": "bf16"}),
        (FINE_TUNE, {"optimizer": "muon"}),
        (FINE_TUNE, {"optimizer": "adafactor-foreach"}),
    ],
)
def test_every_kernel_of_such_a_step_is_of_a_measured_kind(name: str, run: dict[str, object]) -> None:
    known = kinds(shipped(name)) | kinds(STANDARD)
    asked = Run(batch=3, **run)  # type: ignore[arg-type]
    stream = get_stream(make_config(width=1024, depth=2), asked.traced_on("cuda"))
    works = [work for work in describe_ops(stream) if work is not None]
    missing = {(work.op_class, str(work.variant)) for work in works} - known
    assert {kind for kind in missing if "_local_scalar_dense" not in kind[1]} == set()


def test_decodes_are_measured_from_one_row_to_many_and_over_long_caches() -> None:
    fitted = [case.shape for case in shipped(INFERENCE) if case.role == "fit"]
    rows = {shape.m for shape in fitted if isinstance(shape, Gemm)}
    assert min(rows) == 1
    assert max(rows) > 64
    keys = {s.inputs[1].shape[2] for s in fitted if isinstance(s, Call) and s.op.startswith("flopcast.attention")}
    assert min(keys) < 300
    assert max(keys) > 30_000


@pytest.mark.parametrize("weights", QUANTISED)
def test_products_of_weights_of_few_bits_are_measured_with_the_casts_around_them(weights: str) -> None:
    known = kinds(shipped(INFERENCE)) | kinds(STANDARD)
    for phase in ("prefill", "decode"):
        run = Run(batch=3, phase=phase, context=640, precision="bf16", base_dtype=weights)
        stream = get_stream(make_config(width=1024, depth=2), run.traced_on("cuda"))
        missing = {(w.op_class, str(w.variant)) for w in describe_ops(stream) if w is not None} - known
        assert missing == set(), phase


def test_a_product_of_4_bits_is_drawn_as_it_is_traced() -> None:
    run = Run(batch=3, phase="decode", context=640, precision="bf16", base_dtype="int4")
    stream = get_stream(make_config(width=1024, depth=2), run.traced_on("cuda"))
    traced = {stream.call(op) for op in stream.ops if "int4pack" in op.name}
    assert product_of_4_bits(3, 3072, 1024) in traced


def test_layer_norms_are_drawn_as_they_are_traced_and_of_rows_that_torch_sums_either_way() -> None:
    cases = shipped(IMAGES)
    drawn = drawn_beside(IMAGES)
    begin = cases.index(drawn[0])
    traced = {case.shape for case in cases[:begin]}
    assert cases[begin : begin + len(drawn)] == drawn
    forward = {layer_norm(4, 40, 96, is_backward=False, is_permuted=True), layer_norm(36, 7, 768, False, False)}
    assert forward <= traced
    assert layer_norm(64, 5, 768, is_backward=True, is_permuted=False) in traced
    assert layer_norm(18, 56, 96, is_backward=True, is_permuted=True) in traced
    norms = [case.shape for case in drawn if isinstance(case.shape, Call) and "layer_norm" in case.shape.op]
    patterns = {describe(shape).variant.tokens[-1] for shape in norms}
    assert patterns == {"row", "row~", "row parted", "row parted~"}


@pytest.mark.parametrize("is_backward", [False, True])
def test_convolutions_are_drawn_as_they_are_traced(is_backward: bool) -> None:
    drawn = [case.shape for case in drawn_beside(IMAGES)]
    cases = shipped(IMAGES)
    traced = {case.shape for case in cases[: [case.shape for case in cases].index(drawn[0])]}
    assert convolution(32, 5, 576, 160, 1, 1, True, is_backward) in traced
    assert convolution(32, 5, 512, 512, 3, 1, False, is_backward) in traced
    kind = "aten.convolution_backward.default" if is_backward else "aten.convolution.default"
    kinds_drawn = {str(describe(shape).variant) for shape in drawn if isinstance(shape, Call) and shape.op == kind}
    way = "bwd" if is_backward else "fwd"
    forms = {"nchw": ("point", "unaligned", "dense"), "nhwc": ("point", "dense")}
    assert kinds_drawn == {f"{way}/bf16/{layout}/{form}" for layout, some in forms.items() for form in some}


def test_a_size_is_fitted_or_held_out() -> None:
    """Of all convolutions, however they came into the suite."""
    roles: dict[tuple[str, str], set[str]] = {}
    for case in shipped(IMAGES):
        roles.setdefault((case.shape.key, case.cache), set()).add(case.role)
    assert all(len(found) == 1 for found in roles.values())


def test_products_of_experts_have_every_layout_and_few_rows() -> None:
    every = [case.shape for case in drawn_beside(PRECISIONS) if isinstance(case.shape, Gemm)]
    assert {shape.dtype for shape in every} == {"fp32", "tf32", "fp16"}
    drawn = every[: next(i for i, shape in enumerate(every) if shape.dtype != "fp32")]
    assert {shape.layout for shape in drawn} == {"nt", "nn", "tn"}
    rows = [shape.k if shape.layout == "tn" else shape.m for shape in drawn]
    assert min(rows) < 16
    assert max(rows) > 2048
    assert set(drawn) <= {case.shape for case in shipped(PRECISIONS)}
