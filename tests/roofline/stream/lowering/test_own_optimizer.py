"""Steps of flopcast's AdamW: what is traced and launched, what it costs, what parameters it takes, what is measured."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flopcast.errors import UsageError
from flopcast.kernels import adamw
from flopcast.kernels.adamw import AdamW
from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.shapes import Call, Operand
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.settings import CLIPPING, OPTIMIZERS, Recipe
from flopcast.roofline.gpu import suites
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions.alternatives import advise
from flopcast.roofline.stream.compiled.profiled import class_of_kernel
from flopcast.roofline.stream.library.streams import trace_now
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.model.models import make_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Op, Stream
from flopcast.roofline.stream.ops.to_depth import to_depth
from flopcast.roofline.stream.tracer.trace import trace_module
from flopcast.roofline.validation.step_plans import validation_plans
from studies.suites.build import works
from studies.suites.plans import OPTIMIZER_SOURCES

Tracing = Callable[..., Stream]
OWN = {"optimizer": "adamw-triton"}
CLIPPED = {**OWN, "clip": 1.0}


def launched(stream: Stream) -> list[Op]:
    return [op for op in stream.ops if op.phase == "optimizer" and op.kind not in ("host", "view")]


def kinds_of(stream: Stream, op: Op, first: int, count: int) -> set[str]:
    return {stream.storages[stream.tensors[i].storage].kind for i in op.inputs[first : first + count]}


def test_a_step_is_a_norm_and_a_step_with_its_scale(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """Over all gradients, without one of torch's own norms; steps are counted without a call of torch's."""
    stream = traced(tiny, **CLIPPED)
    norm, step = launched(stream)
    count = sum(s.kind == "parameter" for s in stream.storages)
    assert (norm.name, step.name) == ("flopcast.gradient_norm.default", "flopcast.adamw_clipped_.default")
    assert kinds_of(stream, norm, 0, count) == {"gradient"}
    kinds = [kinds_of(stream, step, i * count, count) for i in range(4)]
    assert kinds == [{"parameter"}, {"gradient"}, {"state"}, {"state"}]
    assert set(range(4 * count)) - set(step.written) == set(range(count, 2 * count)), "gradients stay as they are"
    assert step.inputs[-1] == norm.outputs[0]
    assert not any(op.kind == "host" for op in stream.ops)
    assert not any("norm" in op.name for op in stream.ops if op.phase == "optimizer" and op is not norm)
    (alone,) = launched(traced(tiny, **OWN))
    assert alone.name == "flopcast.adamw_.default"


def test_scaled_gradients_are_unscaled_before_their_norm(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """As by torch's guide: unscaled and checked first, and nothing is clipped twice."""
    names = [op.name for op in launched(traced(tiny, **CLIPPED, precision="autocast-fp16"))]
    (unscaled,) = (i for i, name in enumerate(names) if "unscale" in name)
    assert unscaled < names.index("flopcast.gradient_norm.default") < names.index("flopcast.adamw_clipped_.default")
    assert not any("_foreach_norm" in name or "_foreach_mul" in name for name in names)


def test_kernels_and_bytes_by_hand(tiny: Mapping[str, Any], traced: Tracing) -> None:
    for run, expected in ((CLIPPED, ((2, 4, 4), (1, 28, 4))), (OWN, ((1, 28, 0),))):
        stream = traced(tiny, **run)
        for op, (kernels, each, more) in zip(launched(stream), expected, strict=True):
            found = lower(stream, op)
            assert found is not None
            work = describe(*found)
            assert (found[1], work.backend, work.op_class) == ("triton", "triton", "optimizer")
            assert launches(found[0]) == kernels
            assert work.bytes == each * stream.n_params + more
            assert str(work.variant) == f"{op.name.split('.')[1]}|fp32"


@given(st.lists(st.integers(1, 2**20), min_size=1, max_size=40), st.integers(2, 5))
def test_its_work_counts_elements_and_tensors_alone(numels: list[int], times: int) -> None:
    """Twice the elements are twice the bytes, however they are divided; the number of tensors is a size of its own."""

    def work_of(sizes: list[int]) -> Any:
        count = len(sizes)
        inputs = tuple(Operand((n,), (1,), "fp32") for _ in range(4) for n in sizes)
        lists = ",".join(f'{{"ts":[{i * count},{count}]}}' for i in range(4))
        written = tuple(i for i in range(4 * count) if not count <= i < 2 * count)
        return describe(Call("flopcast.adamw_.default", inputs, (), f"[{lists},1]", written=written), "triton")

    one, longer, split = work_of(numels), work_of([n * times for n in numels]), work_of([*numels, *numels])
    assert one.bytes == 28 * sum(numels)
    assert longer.bytes == times * one.bytes
    assert longer.features[1] == one.features[1]
    assert split.bytes == 2 * one.bytes
    assert split.features[1] == pytest.approx(one.features[1] + 1)
    assert one.variant == longer.variant == split.variant


def test_before_it_is_measured_its_bytes_price_it(tiny: Mapping[str, Any], traced: Tracing, profile: Profile) -> None:
    """At a copy's bandwidth, and said to be so; of every measured kind of optimizer it has surfaces of its own."""
    large = {**with_depth(tiny, 3), "vocab_size": 2**20}
    step = PricedStep(traced(large, **CLIPPED), Run(batch=2, seq=32, **CLIPPED), profile)  # type: ignore[arg-type]
    norm, update = step.by_class["optimizer"]
    for op, kernels in ((norm, 2), (update, 1)):
        assert op.seconds == pytest.approx(kernels * 1.5e-6 + op.bytes / 4e12)
        assert op.launches == kernels
        assert op.basis == "extrapolated"
    assert any("no measured kind" in text and "adamw_clipped_" in text for text in step.warnings)
    fused, ours = (
        PricedStep(traced(large, optimizer=name, clip=1.0), Run(batch=2, seq=32, optimizer=name, clip=1.0), profile)
        for name in ("adamw-fused", "adamw-triton")
    )
    moved = [sum(op.bytes for op in step.by_class["optimizer"]) for step in (fused, ours)]
    assert moved[0] - moved[1] == pytest.approx(8 * ours.stream.n_params, rel=0.01), "a read and a write less"
    assert ours.timeline.host_seconds < fused.timeline.host_seconds


def test_it_needs_the_memory_of_torchs(tiny: Mapping[str, Any], traced: Tracing) -> None:
    """Parameters, gradients, two moments; torch's fused one has its counters of steps on the device, 512 bytes each."""
    ours, fused = (traced(tiny, optimizer=name) for name in ("adamw-triton", "adamw-fused"))
    count = sum(s.kind == "parameter" for s in ours.storages)
    assert peak_bytes(fused) - peak_bytes(ours) == 512 * count
    states = [sum(s.bytes for s in stream.storages if s.kind == "state") for stream in (ours, fused)]
    assert states == [8 * ours.n_params, 8 * ours.n_params + 4 * count]
    depths = [peak_bytes(to_depth(traced(tiny, folded=False, **CLIPPED), depth)) for depth in (2, 3, 5, 9)]
    steps = [b - a for a, b in pairwise(depths)]
    assert steps[1] == pytest.approx(2 * steps[0], rel=0.02)
    assert steps[2] == pytest.approx(4 * steps[0], rel=0.02)


def test_it_takes_contiguous_parameters_in_fp32() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Conv2d(8, 8, 3))
    (made,) = make_optimizers(model, "adamw-triton", clip=0.5)
    assert isinstance(made, AdamW)
    assert made.max_norm == 0.5
    with pytest.raises(UsageError, match=r"0\.weight of bfloat16: .* use adamw-fused"):
        make_optimizers(torch.nn.Sequential(torch.nn.Linear(4, 4).bfloat16()), "adamw-triton")
    with pytest.raises(UsageError, match=r"1\.weight of float32, not contiguous"):
        make_optimizers(model.to(memory_format=torch.channels_last), "adamw-triton")
    model[1].weight.requires_grad_(False)  # what is not trained may lie as it will
    make_optimizers(model, "adamw-triton")


def test_only_what_clips_by_itself_leaves_the_step_nothing_to_clip() -> None:
    for optimizer in OPTIMIZERS:
        assert Recipe(optimizer=optimizer, clip=2.0).clip_before == (0.0 if optimizer in CLIPPING else 2.0)


@pytest.mark.parametrize(
    "run",
    [
        {"precision": "bf16"},
        {"base_dtype": "bf16"},
        {"base_dtype": "bf16", "finetune": "last=2"},
        {"parallel": "fsdp=2"},
    ],
    ids=str,
)
def test_what_it_cannot_step_is_refused(run: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"adamw-triton.*adamw-fused"):
        Run(**CLIPPED, **run).check()


def test_it_goes_with_adapters_and_compiled_models_and_no_processor() -> None:
    for run in (
        {"finetune": "lora"},
        {"finetune": "qlora"},
        {"mode": "compile"},
        {"fused": "patch", "attention": "triton"},
    ):
        Run(**CLIPPED, **run).check()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"adamw-triton on processors: .* use adamw"):
        Run(**OWN).traced_on("cpu")  # type: ignore[arg-type]


def test_a_users_own_step_with_it_is_traced() -> None:
    """Made in a function of theirs, without `--optimizer`."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer, data = AdamW(model.parameters(), max_norm=1.0), torch.randn(3, 8)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    stream = trace_module(step)
    assert [op.name.split(".")[1] for op in launched(stream)] == ["gradient_norm", "adamw_clipped_"]
    with pytest.raises(BackendUnavailable, match="CUDA tensors"):  # it has its own parameters again, on a processor
        step()


def test_explain_names_it_where_a_step_clips(tiny: Mapping[str, Any], traced: Tracing, profile: Profile) -> None:
    one_layer = {**tiny, "num_hidden_layers": 1}  # whose alternatives are all traced
    for clip, optimizer, is_named in ((1.0, "adamw", True), (1.0, "adamw-fused", True), (0.0, "adamw", False)):
        run = Run(batch=2, seq=32, optimizer=optimizer, clip=clip)
        step = PricedStep(traced(one_layer, optimizer=optimizer, clip=clip), run, profile)
        named = {one.name: one for one in advise(step, config=one_layer, trace=is_named)}
        assert ("clipping inside AdamW" in named) == is_named
        if is_named:
            assert named["clipping inside AdamW"].kind == "forecast"
            assert (named["clipping inside AdamW"].gain or 0.0) > 0


def test_the_suite_holds_calls_as_they_are_traced() -> None:
    """Of 0.1 M to 4 B parameters, up to where a check in fp64 fits; what is held out is of models of its own."""
    cases = suites.load(suites.OPTIMIZERS)
    assert {(case.backend, case.cache) for case in cases} == {("triton", "cold")}
    assert len({case.shape for case in cases}) == len(cases)
    found = {case.shape: describe(case.shape, "triton") for case in cases}
    assert {work.op_class for work in found.values()} == {"optimizer"}
    per_kind = Counter((str(found[case.shape].variant), case.role) for case in cases)
    assert min(per_kind.values()) >= 7
    assert set(per_kind) == {
        (f"{name}|fp32", role) for name in ("adamw_", "adamw_clipped_", "gradient_norm") for role in ("fit", "holdout")
    }
    numels = [work.bytes / 4 for work in found.values() if "norm" in str(work.variant)]
    assert min(numels) < 2e5
    assert max(numels) > 4e9
    assert max(work.bytes for work in found.values()) < 50e9
    known = {case.shape: case.role for case in cases}
    for role, sources in OPTIMIZER_SOURCES.items():
        small = [replace(source) for source in sources if source.width in (64, 128)][:2]
        own = [work for work in works(small, "cuda") if work.op_class == "optimizer"]
        assert len(own) == 3
        assert {known[work.shape] for work in own if isinstance(work.shape, Call)} == {role}


def test_its_steps_are_valid_and_most_of_them_clip() -> None:
    plans = validation_plans("cuda", "adamw-triton")
    assert 8 <= len(plans) <= 10
    assert {plan.optimizer for plan in plans} == {"adamw-triton"}
    assert sum(plan.clip > 0 for plan in plans) > len(plans) / 2
    assert len({plan.key for plan in plans}) == len(plans)
    assert all("adamw-triton" in plan.key for plan in plans)
    for plan in plans:
        Run(**plan.settings).check()


def test_its_kernels_are_known_by_name_in_a_profile_of_a_step() -> None:
    """They are launched past torch's dispatcher, so that no call is told that launched them."""
    folder = Path(adamw.__file__).parent
    texts = [(folder / f"triton_{name}.py").read_text() for name in ("adamw", "gradient_norm")]
    names = [name for text in texts for name in re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE)]
    assert len(names) == 3
    assert {class_of_kernel(name) for name in names} == {"optimizer"}


def test_a_model_that_has_a_parameter_without_a_gradient(tiny: Mapping[str, Any]) -> None:
    """The untied output layer's neighbour: only what is trained is in the lists."""
    config = make_config(width=64, depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512, tied=False)
    run = Run(batch=2, seq=32, finetune="last=1", **CLIPPED)  # type: ignore[arg-type]
    norm, step = launched(trace_now(config, run.traced_on("cuda")))
    assert len(norm.inputs) == 11
    assert len(step.inputs) == 4 * 11 + 1
