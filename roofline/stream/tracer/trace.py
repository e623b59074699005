"""Traces the op stream of a training step on fake tensors, without a GPU: of a config, of a module, of a step function.

The step runs on fake CPU tensors, which have no values; `cuda_semantics` makes them behave as on CUDA,
`record_step` records the step, as it records a real one.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)

from flopcast.errors import FlopcastError, UsageError
from flopcast.microbench import images
from flopcast.microbench.recipe.bitsandbytes_calls import standing_in
from flopcast.microbench.recipe.factories import import_holder, is_file
from flopcast.microbench.recipe.finetune import fine_tuned
from flopcast.microbench.recipe.inference import InferenceStep, build_for_inference
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.patches import attention_implementation
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import (
    FunctionStep,
    TrainingStep,
    build_model,
    build_module,
    causal_lm_batch,
    map_tensors,
    scaler_for,
    use_fused,
)
from flopcast.roofline.stream.model.models import Config, has_windows
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_micro_batches import TRACED, to_micro_batches
from flopcast.roofline.stream.tracer.cuda_semantics import FakeValues, HostTensors, as_on_cuda, untraced
from flopcast.roofline.stream.tracer.gpu_machine import Gpu, machine_with
from flopcast.roofline.stream.tracer.lanes import Lanes
from flopcast.roofline.stream.tracer.loaders import loading_apart
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.recorder import flatten
from flopcast.roofline.stream.tracer.unmodelled import NotModelled, Topic, finding_in, modelled, refusing
from flopcast.roofline.stream.tracer.user_code import line_of

__all__ = ["load_factory", "record_step", "sizes_of", "trace", "trace_made", "trace_module"]


@dataclass(frozen=True)
class Recording:
    """Builds and records a step on fake tensors; `hosts`: the tensors in host memory (None: not distinguished).

    `watch_compiler` is called once a factory has run, which may have loaded the compiler."""

    values: FakeValues
    watch_compiler: Callable[[], None]
    hosts: HostTensors | None = None

    def build(self, module: torch.nn.Module, batch: Any, traced: Traced, **given: Any) -> TrainingStep:
        return build_module(module, batch, traced.device, traced, **given)

    def build_function(self, function: Callable[[], Any], device: str) -> FunctionStep:
        return FunctionStep(function, device)

    def __call__(
        self, step: Any, meta: Mapping[str, Any], first: Callable[[], Any] | None = None, lanes: Lanes | None = None
    ) -> Stream:
        is_host = self.hosts.__contains__ if self.hosts is not None else lambda tensor: False
        return record_step(step, meta, is_host=is_host, first=first, lanes=lanes)


class _FakeMode(FakeTensorMode):
    """Fake tensors whose copies are of the same mode.

    `copy.deepcopy` of a tensor that is no parameter, such as a gradient, copies its mode too, and with that torch's
    weak references to storages (2.11 and 2.13), which count no copies: each is released twice, and a later collection
    of garbage ends the process.
    """

    def __deepcopy__(self, _memo: Any) -> _FakeMode:
        return self


@contextlib.contextmanager
def faking(device: str, gpu: Gpu | None = None, *, casts_in_order: bool = False) -> Iterator[Recording]:
    """Makes tensors fake, behaving as those of `device` ("cuda" or "cpu"); yields the function that records a step.

    `gpu`: what Python code sees of the GPU. `casts_in_order`: autocast casts the operands of a call in CUDA's order;
    streams of one GPU, stored since before that was known, have the first operand's cast first."""
    values = FakeValues()
    with (
        _settings_kept(),
        standing_in(),
        untraced(),
        refusing() as watch_compiler,
        loading_apart(values.inside, values.hosts.add),
        _FakeMode(allow_non_fake_inputs=True),
        values,
        warnings.catch_warnings(),
    ):
        # torch warns about its own code: a copy of a module, as nn.TransformerEncoder makes of its layer
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        # and about the hooks by which the tracer follows modules
        warnings.filterwarnings("ignore", message=r"Using `torch.compile\(module\)` when there are global hooks")
        if device == "cpu":
            yield Recording(values, watch_compiler)
        else:
            with (
                machine_with(gpu, values.note, values.hosts.add),
                as_on_cuda(values, casts_in_order=casts_in_order) as hosts,
            ):
                yield Recording(values, watch_compiler, hosts)


@contextlib.contextmanager
def _settings_kept() -> Iterator[None]:
    """Puts torch's global settings back at the end, which a factory may change."""
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    dtype, precision = torch.get_default_dtype(), torch.backends.cuda.matmul.allow_tf32
    try:
        yield
    finally:
        torch.set_default_device(context.device if context is not None else None)
        torch.set_default_dtype(dtype)
        torch.backends.cuda.matmul.allow_tf32 = precision


def trace(config: Config, traced: Traced) -> Stream:
    """Traces one step of a transformers causal language model on fake tensors and returns its op stream: of training,
    or of inference one call with `context` tokens a sequence (`microbench.recipe.inference`).

    Its `device` is the one whose semantics are traced ("cuda" or "cpu"); neither is needed. `attention` "triton": a
    model with sliding windows calls the Triton attention; others launch the same on either. Raises ValueError when
    transformers refuses the config, or the patch the model, and NotImplementedError for what the Triton attention
    lacks.
    """
    if not has_windows(config, traced.seq):
        traced = replace(traced, attention=Traced.attention)
    device, precision = traced.device, traced.precision
    meta = {"config": dict(config), **meta_of(traced, device)}
    attention = attention_implementation(traced.attention)
    ids = (traced.batch, traced.seq)
    if traced.phase != "train":
        fp8 = modelled(Topic.FP8) if traced.base_dtype == "fp8" else contextlib.nullcontext()
        with fp8, faking(device) as record:
            model = build_for_inference(config, attention, precision, traced.base_dtype)
            _check_positions(model, traced.context + (traced.phase == "decode"))
            call = InferenceStep(
                model, torch.zeros(ids, dtype=torch.int64), precision, device, traced.phase, traced.context,
                cache_kind=traced.cache,
            )  # fmt: skip
            return record(call, {**meta, "optimizer": ""})
    for is_short in (True, False) if _is_steady_at_once(config) else (False,):
        with faking(device) as record:
            model = build_model(config, attention, precision, traced.checkpoint, traced.base_dtype)
            _check_positions(model, traced.seq)
            model = fine_tuned(model, traced)
            use_fused(model, traced.fused)
            optimizers = make_optimizers(model, traced.optimizer, True if device == "cuda" else None, traced.clip)
            step = TrainingStep(
                model, optimizers, causal_lm_batch(torch.zeros(ids, dtype=torch.int64)), precision, device,
                accumulate=traced.accumulate, clip=traced.clip_before, scaler=scaler_for(precision, device),
            )  # fmt: skip
            stream = record(step, meta, first=functools.partial(_make_state, step) if is_short else None)
            if all((p.grad is not None) == p.requires_grad for p in model.parameters()):
                break  # otherwise state was made for parameters that get no gradients
    return stream


def _check_positions(model: torch.nn.Module, tokens: int) -> None:
    """Raises UsageError for more tokens than a model has learned positions of: BERT's, OPT's and GPT-Neo's lie in a
    table, in which fake tensors find any number."""
    most = getattr(model.config, "max_position_embeddings", None)
    names = (name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, torch.nn.Embedding))
    if isinstance(most, int) and tokens > most and any("pos" in name or name == "wpe" for name in names):
        raise UsageError(
            f"seq is {tokens}: this model has {most} positions (max_position_embeddings), use at most that"
        )


# Settings that a stream's meta always says, and those that it says otherwise; others where they are not at the default.
_ALWAYS = ("batch", "seq", "precision", "optimizer", "accumulate", "checkpoint")
_OTHERWISE = ("mode", "parallel")


def meta_of(recipe: Recipe, device: str) -> dict[str, Any]:
    """What the meta of a stream says of how its step was run."""
    unusual = {name: value for name, value in recipe.unusual.items() if name not in _OTHERWISE}
    return {**{name: getattr(recipe, name) for name in _ALWAYS}, **unusual, "device": device}


# Models whose first forward is like every other, as tests show; other models run a whole first step.
_STEADY = ("qwen3", "qwen3_moe", "llama", "mistral", "gpt2")


def _is_steady_at_once(config: Config) -> bool:
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"  # others may keep state across steps
    return config.get("model_type") in _STEADY and is_plain


def _make_state(step: TrainingStep) -> None:
    """Creates the optimizer's state, all that a second step sees of the first; running the first step takes a third of
    a trace's time."""
    for parameter in step.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    if step.scaler is not None:
        step.scaler.scale(torch.zeros((), device=step.device_type))  # which makes its state
    step.optimizer_step()


_USUAL = Traced()


def trace_module(
    source: Any,
    batch: Any = None,
    traced: Traced = _USUAL,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    sizes: Mapping[str, int] | None = None,
    gpu: Mapping[str, Any] | None = None,
) -> Stream:
    """Traces one step of any module on fake tensors: no value is computed and no weight is initialized.

    `source` is one of
    - a module, with its `batch`: a tensor, a tuple of positional or a dict of keyword arguments. The loss is
      `loss_fn(output)`, else `microbench.recipe.training_step.loss_of(output)`; the optimizer is the one named;
    - a factory, or its name "package.module:factory": a function without arguments that returns (module, batch),
      (module, batch, loss_fn) or a step function. Of `sizes` ("batch", "seq") it gets those it has parameters for;
    - a step function: it runs forward, backward and optimizer by itself, once per call. How it is run is then
      its own business: `precision` is not used, and `refuse_unused` says what has to be at its default.

    `gpu` is the device of a profile, of which `torch.cuda` tells the code that asks its name, memory or compute
    capability; by default an H200, which `meta` then says under "notes", as it does what else was taken for granted.
    Modules and optimizers that exist already are lent fake parameters and given their own back. `meta` says "batch" and
    "seq": samples per micro-batch, and tokens per sample where the first tensor of the batch holds ids, else 1; "unit"
    what they count: tokens, samples, or steps of a step function.
    Raises UsageError: not importable, wrong return, not traceable (which op, and what to do).
    """

    def of(micro_batches: int) -> Stream:
        faked = faking(traced.device, Gpu.of(gpu) if gpu else None)
        return trace_made(source, batch, loss_fn, sizes or {}, traced, micro_batches, faked)

    if traced.accumulate > TRACED:
        with contextlib.suppress(NotDerivable):
            return to_micro_batches(of(TRACED), traced.accumulate)
    return of(traced.accumulate)


def trace_made(
    source: Any,
    batch: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    sizes: Mapping[str, int],
    traced: Traced,
    micro_batches: int,
    faked: contextlib.AbstractContextManager[Recording],
) -> Stream:
    """Does what `trace_module` does, within `faked` and with `micro_batches` in place of the number in `traced`."""
    name = source if isinstance(source, str) else getattr(source, "__qualname__", type(source).__name__)
    device = traced.device
    function = load_factory(source) if isinstance(source, str) else source
    with faked as record, _lent_fakes(function), _explained(name, record.values):
        made: Any = (function, batch) if isinstance(function, torch.nn.Module) else make(function, sizes, name)
        record.watch_compiler()
        if not isinstance(made, tuple):
            refuse_unused(name, traced)
            step: Any = record.build_function(made, device)
            batch_sizes = (1, 1)
        else:
            traced = replace(traced, accumulate=micro_batches)
            if isinstance(source, torch.nn.Module) and batch is None:
                raise UsageError(f"{name}: a module needs a batch: a tensor, a tuple or a dict of tensors")
            module, batch, *given = made
            batch = _as_fakes(batch, record.values)
            step = record.build(
                module, batch, traced, loss_fn=given[0] if given else loss_fn,
                foreach=True if device == "cuda" else None,
            )  # fmt: skip
            batch_sizes = sizes_of(step.batch)
        meta = {"module": name, **meta_of(traced, device), "batch": batch_sizes[0], "seq": batch_sizes[1]}
        meta["unit"] = "tokens" if batch_sizes[1] > 1 else "samples" if isinstance(made, tuple) else "steps"
        stream = record(step, meta)
        if isinstance(step, FunctionStep) and torch.backends.cuda.matmul.allow_tf32:
            stream.meta["precision"] = "tf32"  # of its products in fp32, by its own choice
        if record.values.notes:
            stream.meta["notes"] = list(record.values.notes)
    if device != "cpu" and (strangers := sorted({op.name for op in stream.ops if _OF_THE_CPU in op.name})):
        raise UsageError(
            f"{name} cannot be forecast: {', '.join(strangers)} runs on processors alone, and what CUDA runs in its "
            "place is not known; use layers of torch's that do without it"
        )
    if not any(op.kind == "launch" for op in stream.ops):
        raise UsageError(
            f"{name}: nothing ran on the device: valid is a factory that returns (module, batch) or a step function, "
            "or a function that runs a step or calls a module itself"
        )
    return stream


_OF_THE_CPU = "mkldnn"  # in the names of operators of the processors' library


def refuse_unused(name: str, recipe: Recipe) -> None:
    """Raises UsageError for a setting that a step function decides by itself."""
    for setting, value in recipe.unusual.items():
        # tf32 is how the GPU is to run products in fp32, which no trace shows
        if setting in ("precision", "optimizer", "accumulate", "checkpoint", "clip") and value != "tf32":
            raise UsageError(
                f"{setting} {value} of {name}, a step function: it does that by itself; leave {setting} out, or give a "
                "factory that returns (module, batch)"
            )


def load_factory(name: str) -> Callable[..., Any]:
    """Imports the function that "package.module:factory" names, also from the current folder, or
    "path/file.py:factory"; or returns the factory of an image model by its name (`microbench.images`).

    Raises UsageError that says what is missing.
    """
    if ":" not in name and (image_model := images.named(name)) is not None:
        return image_model
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute or attribute.endswith(".py"):
        raise UsageError(
            f"module {name!r}: valid are package.module:factory and path/file.py:factory, as in "
            f"flopcast.microbench.zoo:vit_b16, and MODEL[@SIZE][@nhwc] of {', '.join(images.MODELS)}, torchvision/NAME "
            "and timm/NAME"
        )
    if is_file(module_name) and not Path(module_name).is_file():
        what = "is a folder" if Path(module_name).is_dir() else "does not exist"
        raise UsageError(
            f"module {name!r}: {module_name} {what}; give the path of a Python file, as in train.py:factory"
        )
    try:
        module = import_holder(module_name)
    except ModuleNotFoundError as fault:
        raise UsageError(
            f"module {name!r}: {fault}; run from the folder that holds it, set PYTHONPATH, or install it"
        ) from fault
    except (Exception, SystemExit) as fault:  # a script's own exit would end the command as if it had succeeded
        line = line_of(fault.__traceback__)
        where = f" ({line})" if line else ""
        raise UsageError(f"module {name!r}: importing {module_name} failed: {_one_line(fault)}{where}") from fault
    found = getattr(module, attribute, None)
    if not callable(found):
        functions = sorted(
            n
            for n, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not n.startswith("_")
        )
        what = "is not a function" if found is not None else "does not exist"
        known = f"; functions there: {', '.join(functions)}" if functions else ""
        raise UsageError(f"module {name!r}: {attribute} {what} in {module_name}{known}")
    return found  # type: ignore[no-any-return]


def make(function: Callable[..., Any], sizes: Mapping[str, int], name: str) -> Any:
    """Calls a factory and returns its (module, batch[, loss_fn]) or step function; returns a step function as it is.

    Which of the two a function is shows when it is called: a factory returns one of these.
    """
    if not callable(function):
        raise UsageError(f"{name}: valid is a module with its batch, a factory or a step function")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in has no signature
        parameters = {}  # type: ignore[assignment]
    made = function(**{key: value for key, value in sizes.items() if key in parameters})
    if isinstance(made, (tuple, list)) and made and isinstance(made[0], torch.nn.Module):
        if len(made) in (2, 3) and (len(made) == 2 or callable(made[2])):
            return tuple(made)
        raise UsageError(f"{name} returns {len(made)} values: valid are (module, batch) and (module, batch, loss_fn)")
    if isinstance(made, torch.nn.Module):
        raise UsageError(
            f"{name} returns a module alone: valid is (module, batch), the batch being what it is called with"
        )
    if callable(made):
        return made
    if made is None or isinstance(made, (torch.Tensor, float, int)):  # the function has run a step
        return function
    raise UsageError(
        f"{name} returns {type(made).__name__}: valid are (module, batch), (module, batch, loss_fn) and a step function"
    )


def sizes_of(batch: Any) -> tuple[int, int]:
    """Returns (samples, tokens per sample) of a batch by its first tensor: a 2-D tensor of integers holds token ids."""
    first = next((t for t in flatten(batch) if isinstance(t, torch.Tensor) and t.ndim), None)
    if first is None:
        return 1, 1
    has_tokens = first.ndim == 2 and not first.is_floating_point()
    return int(first.shape[0]), int(first.shape[1]) if has_tokens else 1


@contextlib.contextmanager
def _explained(name: str, values: FakeValues) -> Iterator[None]:
    """Turns errors of a step on fake tensors into UsageErrors that say which op failed and what to do."""
    # torch logs the traceback of mismatched shapes before it raises the error that is reported here
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except NotModelled as fault:
        raise UsageError(f"{name} cannot be forecast: {fault}") from fault
    except FlopcastError:
        raise
    except (Exception, SystemExit) as fault:
        found = finding_in(fault)
        if found is not None:
            raise UsageError(f"{name} cannot be forecast: {found}") from fault
        line = line_of(fault.__traceback__)
        where = f" ({line})" if line else ""
        advice = "make sure that one real step of it runs"
        if isinstance(fault, DynamicOutputShapeException):
            reason = f"the size of what {fault.func} returns depends on values, which a forecast does not have"
            advice = "give it a fixed size: a mask, or torch.where with three arguments, in place of picked elements"
            raise UsageError(f"{name} cannot be traced: {reason}{where}; {advice}") from fault
        if isinstance(fault, (UnsupportedOperatorException, DataDependentOutputException)):
            where = f" in {fault.func}{where}"
            advice = "give the operator a fake implementation (torch.library.register_fake)"
        elif values.fault is fault:
            where = f" in {values.failed}{where}"
        raise UsageError(f"{name} cannot be traced: {_one_line(fault)}{where}; {advice}") from fault
    finally:
        log.setLevel(level)


def _one_line(fault: BaseException) -> str:
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"


# --- what exists already ------------------------------------------------------------------------------


@contextlib.contextmanager
def _lent_fakes(source: Any) -> Iterator[None]:
    """Gives the modules and optimizers that `source` is or refers to fake parameters and buffers within the context;
    tensors that it refers to get their own gradients back at its end."""
    fakes: dict[int, torch.Tensor] = {}
    keep: list[torch.Tensor] = []

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            keep.append(tensor)  # kept alive, so that its id is not reused
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            fakes[id(tensor)] = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made
        return fakes[id(tensor)]

    with contextlib.ExitStack() as stack:
        for thing in _reachable(source):
            if isinstance(thing, torch.nn.Module):
                for owner in thing.modules():
                    tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
                    for held in tables:
                        stack.callback(dict.update, held, dict(held))
                        held.update({key: fake(value) for key, value in held.items() if value is not None})
            elif isinstance(thing, torch.Tensor):
                stack.callback(setattr, thing, "grad", thing.grad)
            else:
                for group in thing.param_groups:
                    stack.callback(group.__setitem__, "params", group["params"])
                    group["params"] = [fake(parameter) for parameter in group["params"]]
                stack.callback(setattr, thing, "state", thing.state)
                thing.state = defaultdict(dict)
        yield


def _as_fakes(batch: Any, values: FakeValues) -> Any:
    """Returns a batch with a fake tensor for each real one on the device, the same for the same."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, FakeTensor) or tensor in values.hosts:
            return tensor
        if id(tensor) not in fakes:
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
            fakes[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return fakes[id(tensor)]

    return map_tensors(batch, fake)


def _reachable(source: Any) -> list[torch.nn.Module | torch.optim.Optimizer | torch.Tensor]:
    """Lists the modules, optimizers and tensors to be given gradients that a function refers to: by closure, name,
    bound object or arguments."""
    found: list[torch.nn.Module | torch.optim.Optimizer | torch.Tensor] = []
    seen: set[int] = set()

    def visit(thing: Any, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        if isinstance(thing, (torch.nn.Module, torch.optim.Optimizer)):
            found.append(thing)
        elif isinstance(thing, torch.Tensor):
            if thing.requires_grad and thing.is_leaf:
                found.append(thing)
        elif isinstance(thing, functools.partial):
            visit([thing.func, *thing.args, *thing.keywords.values()], depth)
        elif inspect.ismethod(thing):
            visit([thing.__func__, *getattr(thing.__self__, "__dict__", {}).values()], depth)
            visit(thing.__self__, depth)
        elif inspect.isfunction(thing):
            try:
                names = inspect.getclosurevars(thing)
            except ValueError:  # an empty closure cell
                return
            visit([*names.nonlocals.values(), *names.globals.values()], depth + 1)
        elif isinstance(thing, (list, tuple, set)):
            for item in thing:
                visit(item, depth + 1)
        elif isinstance(thing, Mapping):
            visit(list(thing.values()), depth)
        elif callable(thing) and not isinstance(thing, type) and hasattr(thing, "__dict__"):
            visit(list(vars(thing).values()), depth)

    visit(source, 0)
    return found
