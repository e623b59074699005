"""Records the op stream of a training step, real or on fake tensors.

Which phase runs (forward, backward, optimizer) is known from autograd's engine, from calls of modules and from the
global hooks of torch.optim, so that a user's own step function is recorded like flopcast's own training step. The
calls themselves are recorded by `recorder`.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flopcast.gc_pause import no_garbage_collection, older_kept
from flopcast.microbench.recipe.training_step import has_equal_layers
from flopcast.roofline.stream.ops.op_stream import Op, Stream
from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.lanes import Lanes
from flopcast.roofline.stream.tracer.module_stack import ModuleStack, forward_hooks
from flopcast.roofline.stream.tracer.recorder import Recorder, flatten


@dataclass
class Parts:
    """What a step works on: its models, their optimizers and the batch."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    batch: Any = None

    def prefix_of(self, model: torch.nn.Module) -> str:
        """What the names of a model's parameters and buffers begin with."""
        return "" if len(self.models) == 1 else f"{type(model).__name__}."

    def named_parameters(self) -> dict[torch.Tensor, str]:
        """Returns each parameter once with its name, a tied one under its first name."""
        found: dict[torch.Tensor, str] = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                found.setdefault(parameter, self.prefix_of(model) + name)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.setdefault(parameter, "")
        return found

    @contextlib.contextmanager
    def discovering(self) -> Iterator[None]:
        """Adds the models that are called and the optimizers that step within the context."""
        depth = 0

        def enter(module: torch.nn.Module, _args: Any) -> None:
            nonlocal depth
            if depth == 0 and not any(module is m for known in self.models for m in known.modules()):
                self.models.append(module)
            depth += 1

        def leave(_module: torch.nn.Module, _args: Any, _result: Any) -> None:
            nonlocal depth
            depth -= 1

        def stepped(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            if all(optimizer is not known for known in self.optimizers):
                self.optimizers.append(optimizer)

        with forward_hooks(enter, leave), register_optimizer_step_pre_hook(stepped):
            yield


@contextlib.contextmanager
def _phases(
    recorder: Recorder, ended: Callable[[], None], following: str = "optimizer"
) -> Iterator[Callable[[], None]]:
    """Keeps `recorder.phase` up to date; yields a function to call when a model begins. Calls `ended` after a backward.

    The backward is what autograd's engine runs; the phase that is named follows, until a model is called again. It runs
    without recording a graph: where something switches that on within it, a forward is repeated, as checkpointing of
    every kind does to have the graph that it did not keep.
    """
    depth = 0

    def within(function: Callable[..., Any], after: str | None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            before, outer = recorder.phase, recorder.recomputations
            recorder.phase, recorder.recomputations = "backward", 0
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                recorder.recomputations = outer
                if depth == 0:
                    ended()
                    if recorder.lanes is not None:  # DistributedDataParallel's reducer waits for what it asked for
                        recorder.lanes.wait_for_collectives()
                    recorder.phase = after or before
                    recorder.leave()

        return run

    enable, restore = torch.enable_grad.__enter__, torch.enable_grad.__exit__
    repeating: list[torch.enable_grad] = []

    def enabled(context: torch.enable_grad) -> None:
        enable(context)
        if depth:
            repeating.append(context)
            recorder.recomputations += 1

    def restored(context: torch.enable_grad, *fault: Any) -> None:
        if context in repeating:
            repeating.remove(context)
            recorder.recomputations -= 1
        restore(context, *fault)

    def begin(phase: str) -> None:
        if depth == 0:
            recorder.phase = phase

    with (
        replaced(torch.autograd, "backward", within(torch.autograd.backward, following)),
        replaced(torch.autograd, "grad", within(torch.autograd.grad, None)),
        replaced(torch.enable_grad, "__enter__", enabled),
        replaced(torch.enable_grad, "__exit__", restored),
        register_optimizer_step_pre_hook(lambda *_: begin("optimizer")),
    ):
        yield lambda: begin("forward")


def record_step(
    step: Any,
    meta: Mapping[str, Any] | None = None,
    *,
    is_host: Callable[[torch.Tensor], bool] | None = None,
    first: Callable[[], Any] | None = None,
    lanes: Lanes | None = None,
    place: Callable[[Recorder], None] = lambda recorder: None,
) -> Stream:
    """Returns the op stream of one steady step; a first step is run to create optimizer state, or `first` in its place.

    `step` has `run()` and `device_type`: a `TrainingStep`, or a `FunctionStep` around a function, whose models and
    optimizers are those that its first run used; it may say which phase follows a backward (`after_backward`).
    `is_host` is for `Recorder`: by default a tensor on the CPU is in host memory where the device is another. `lanes`:
    follows the CUDA streams of a step on several of them. `place` may say of which layers the recorded ops are.
    """
    parts = Parts(batch=getattr(step, "batch", None))
    with older_kept():
        with parts.discovering():
            (first or step.run)()
        if isinstance(getattr(step, "model", None), torch.nn.Module):
            parts.models, parts.optimizers = [step.model], list(step.optimizers)
        else:  # a function, which chose its optimizers
            names = dict.fromkeys(type(optimizer).__name__ for optimizer in parts.optimizers)
            meta = {**(meta or {}), "optimizer": " and ".join(names)}
        if lanes is not None:
            lanes.begin()
        if hasattr(step, "zero_grad"):
            step.zero_grad()
        if hasattr(step, "refill"):
            step.refill()
        gc.collect()
    if is_host is None:
        device_type = step.device_type

        def is_host(tensor: torch.Tensor) -> bool:
            return bool(device_type != "cpu" and tensor.device.type == "cpu")

    modules = ModuleStack(parts.models)
    recorder = Recorder(modules, is_host, lanes)
    parameters = parts.named_parameters()
    homes = {parameter: modules.layer_of(name) for parameter, name in parameters.items()}
    _register(recorder, parts, homes)

    _register_cache(recorder, step)

    def register_gradients() -> None:
        for parameter, layer in homes.items():
            if parameter.grad is not None:
                recorder.register(parameter.grad, "gradient", layer)

    register_gradients()
    run = getattr(step, "run_phases", step.run)
    with (
        no_garbage_collection(),  # a collection during the step would free storages at a random op
        recorder,
        recorder.watching_sizes(),
        _phases(recorder, register_gradients, getattr(step, "after_backward", "optimizer")) as begin,
        modules.watching(begin),
    ):
        run()
    _register_cache(recorder, step, "new cache")
    place(recorder)
    layers = modules.layers
    of_layers = [sum(map(_stands_for, layer.parameters())) for layer in layers or ()]
    depth = None if layers is None or not has_equal_layers(layers) else len(layers)
    return Stream(
        ops=_place_optimizer(recorder.ops, recorder),
        tensors=tuple(recorder.tensors),
        storages=tuple(recorder.storages),
        n_params=sum(map(_stands_for, parameters)),
        depth=depth,
        meta={
            **(meta or {}),
            "layer_params": 0 if depth is None else of_layers[0],
            **({"params_of_layers": of_layers} if depth is None and of_layers else {}),
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
        },
    )


def _stands_for(parameter: torch.Tensor) -> int:
    """How many parameters of the model a tensor holds: several weights may be packed into one number."""
    return int(getattr(parameter, "stands_for", parameter.numel()))


def _register(recorder: Recorder, parts: Parts, homes: Mapping[torch.Tensor, int | None]) -> None:
    """Registers with the recorder the tensors that exist before the step."""
    for parameter, layer in homes.items():
        recorder.register(parameter, "parameter", layer)
    for model in parts.models:
        for name, buffer in model.named_buffers():
            recorder.register(buffer, "buffer", recorder.modules.layer_of(parts.prefix_of(model) + name))
    for tensor in flatten(parts.batch):
        if isinstance(tensor, torch.Tensor):
            recorder.register(tensor, "input", None)
    for optimizer in parts.optimizers:
        own = getattr(optimizer, "optim", optimizer)  # ZeroRedundancyOptimizer's, of this rank's parameters
        for owner, state in own.state.items():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    kind = "host" if recorder.is_host(value) else "state"
                    recorder.register(value, kind, homes.get(owner))


def _register_cache(recorder: Recorder, step: Any, kind: str = "cache") -> None:
    """Registers what the cache of a call of inference holds now and no storage is known for, or a temporary is."""
    for tensor, layer in getattr(step, "cached", ()):
        if recorder.kind_of(tensor) == "activation":
            recorder.register(tensor, kind, layer)
    for tensor, layer in getattr(step, "lengths", ()):
        recorder.register(tensor, "buffer", layer)


def _place_optimizer(ops: list[Op], recorder: Recorder) -> tuple[Op, ...]:
    """Assigns the optimizer's ops to layers: a loop over parameters works layer by layer, an op on lists has no layer.

    Temporaries that a layer's op makes belong to the layer too, and so do ops that work on temporaries only.
    """
    placed: list[Op] = []
    current: int | None = None
    temporaries: set[int] = set()
    for op in ops:
        if op.phase != "optimizer":
            placed.append(op)
            continue
        refs = [recorder.tensors[i].storage for i in op.inputs]
        is_list = '"ts"' in op.args
        if not is_list and any(recorder.storages[s].kind in ("parameter", "gradient", "state", "host") for s in refs):
            current = next(recorder.storages[s].layer for s in refs if recorder.storages[s].kind != "activation")
        elif not is_list and (made_here := [s for s in refs if s in temporaries]):
            current = recorder.storages[made_here[0]].layer
        for position, index in enumerate(op.outputs):  # the n-th result of a list op has the layer of its n-th input
            made = recorder.tensors[index].storage
            layer = recorder.storages[refs[position]].layer if is_list else current
            recorder.storages[made] = recorder.storages[made]._replace(layer=layer)
            temporaries.add(made)
        placed.append(op if is_list else op._replace(layer=current))
    return tuple(placed)
