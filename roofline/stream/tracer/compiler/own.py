"""Compiles and records a whole step: one that calls torch.compile by itself, a step function or a module compiled by
its factory, or one of a model that is compiled here.

As of a rank's step (`rank`), a first step compiles everything, and of a later one each call is recorded, that of a
graph as one op; what runs outside of graphs stands between them as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

from flopcast.errors import UsageError
from flopcast.microbench.recipe.finetune import fine_tuned
from flopcast.microbench.recipe.settings import TORCH_MODES, why_not
from flopcast.microbench.recipe.training_step import (
    FunctionStep,
    TrainingStep,
    build_model,
    build_module,
    causal_lm_batch,
    find_layers,
    has_equal_layers,
)
from flopcast.roofline.stream.model.models import depth_of
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.compiler.asked import Asked
from flopcast.roofline.stream.tracer.compiler.experts import one_by_one
from flopcast.roofline.stream.tracer.compiler.inductor import Kept
from flopcast.roofline.stream.tracer.compiler.rank import record_compiled
from flopcast.roofline.stream.tracer.cuda_semantics import untraced
from flopcast.roofline.stream.tracer.gpu_machine import Gpu, machine_with
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.trace import load_factory, make, meta_of, refuse_unused, sizes_of

_MODE_OF = {mode or "default": ours for ours, mode in TORCH_MODES.items()}  # by torch's name
_CAPTURES, _TUNES = "triton.cudagraphs", "max_autotune"  # among inductor's options


def record_own(asked: Asked, gpu: Gpu, kept: Kept) -> Stream:
    """Builds on the GPU what is asked for, compiles it, unless it does so by itself, and returns its step as it was
    recorded, with the mode in its meta. Raises UsageError for what is not modelled."""
    notes: dict[str, None] = {}
    TorchInGraphFunctionVariable._get_handlers()  # by function, one each: before others stand in their places
    properties = torch.cuda.get_device_properties  # with what only compilers ask
    with (
        untraced(), machine_with(gpu, lambda note: notes.update({note: None}), lambda _: None),
        replaced(torch.cuda, "get_device_properties", properties),
        replaced(OptimizerVariable, "call_method", _refuse_optimizer), one_by_one(), _noting() as modes,
    ):  # fmt: skip
        with torch.device("cuda", 0):
            step, meta = _built(asked)
        kept.shares = True
        if not asked.is_own and isinstance(step, TrainingStep):
            layers = find_layers(step.model)
            step.model = torch.compile(step.model, mode=TORCH_MODES[asked.mode])  # type: ignore[assignment]
            if layers is not None and len(layers) == depth_of(asked.config or {}) and has_equal_layers(layers):
                with _first_alone(layers):
                    step.run()
        step.run()
        if not kept.graphs:
            raise UsageError(f"{asked.module}: nothing of its step is compiled")
        if len(modes) != 1:
            found = " and ".join(sorted(modes)) or "none, without torch.compile"
            raise UsageError(
                f"{asked.module} compiles parts of its step in the modes {found}: one for all is modelled; give all "
                "calls of torch.compile one mode"
            )
        if notes:
            meta["notes"] = list(notes)
        return record_compiled(step, kept, {**meta, "mode": modes.pop()})


def _built(asked: Asked) -> tuple[TrainingStep | FunctionStep, dict[str, Any]]:
    """The step, and what its stream's meta is to say of it."""
    if asked.config is not None:
        meta = {"config": dict(asked.config), **meta_of(asked, "cuda")}
        model = fine_tuned(build_model(asked.config, "sdpa", asked.precision, "none", asked.base_dtype), asked)
        batch = causal_lm_batch(torch.zeros((asked.batch, asked.seq), dtype=torch.int64))
        return build_module(model, batch, "cuda", asked, foreach=True), meta
    made = make(load_factory(asked.module), asked.sizes, asked.module)
    meta = {"module": asked.module, **meta_of(asked, "cuda")}
    if not isinstance(made, tuple):
        refuse_unused(asked.module, asked)
        return FunctionStep(made, "cuda"), {**meta, "batch": 1, "seq": 1, "unit": "steps"}
    module, batch, *loss_fn = made
    step = build_module(module, batch, "cuda", asked, loss_fn=loss_fn[0] if loss_fn else None, foreach=True)
    samples, tokens = sizes_of(step.batch)
    return step, {**meta, "batch": samples, "seq": tokens, "unit": "tokens" if tokens > 1 else "samples"}


@contextmanager
def _first_alone(layers: torch.nn.ModuleList) -> Iterator[None]:
    """Within the context only the first of a model's layers runs. What dynamo compiles of it serves the others, and it
    traces one layer, not all, each time that it finds a frame around the layers which cannot be one graph: of
    Qwen3-MoE five frames, one in the other, twice each."""
    others = list(layers[1:])
    del layers[1:]
    try:
        yield
    finally:
        layers.extend(others)


def _refuse_optimizer(*_: Any) -> Any:
    raise UsageError(
        "a compiled step of an optimizer is not modelled: compile the model, and call the optimizer's step outside of "
        "what torch.compile is given"
    )


@contextmanager
def _noting() -> Iterator[set[str]]:
    """Yields the modes, by our names, in which torch.compile is asked to compile within the context. It raises
    UsageError for what is not modelled."""
    modes: set[str] = set()
    own = torch.compile

    @wraps(own)
    def compile_(*args: Any, **given: Any) -> Any:
        if not given.get("disable"):
            modes.add(_mode_of(**given))
        return own(*args, **given)

    with replaced(torch, "compile", compile_):
        yield modes


def _mode_of(
    *, mode: str | None = None, backend: Any = "inductor", options: Mapping[str, Any] | None = None, **_: Any
) -> str:
    given = options or {}
    if backend != "inductor" or (mode or "default") not in _MODE_OF:
        name, value = ("mode", mode) if backend == "inductor" else ("backend", backend)
        value = value if isinstance(value, str) else getattr(value, "__qualname__", type(value).__name__)
        raise UsageError(
            f"torch.compile with {name} {value!r} is not modelled: valid are the modes {', '.join(_MODE_OF)} of "
            f"inductor{why_not(value)}"
        )
    if any(name.startswith(_TUNES) and on for name, on in given.items()):
        raise UsageError(f"torch.compile with option {_TUNES} is not modelled{why_not('max-autotune')}; leave it out")
    return _MODE_OF["reduce-overhead" if given.get(_CAPTURES) else mode or "default"]
