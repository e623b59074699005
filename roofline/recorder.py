"""Records the op stream of a training step, real or on fake tensors.

What is recorded is what the dispatcher sees below autograd and autocast: forward, backward and optimizer, each call
with its operands, storages and module. Phases are told by autograd's engine, by the calls of modules and by
torch.optim's global hooks, so that a step function of one's own is recorded like the product's own recipe.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.kernels.shapes import Operand
from flopcast.roofline.garbage import no_garbage_collection, older_kept
from flopcast.roofline.stream import Op, Storage, Stream, TensorRef

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64",
}  # fmt: skip

# Calls that read a value back to the host: it waits for the device.
_SYNCS = {
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default", "nonzero.default", "is_nonzero.default", "equal.default", "_unique2.default",
        "unique_dim.default", "unique_consecutive.default", "masked_select.default", "repeat_interleave.Tensor",
    )
}  # fmt: skip
# Bookkeeping that launches nothing and costs next to nothing.
_IGNORED = ("profiler.", "prim.", "aten.is_same_size", "aten.sym_", "aten.lift_fresh")


class Recorder(TorchDispatchMode):
    """Appends every ATen call to `ops`; works on real and on fake tensors.

    `is_host` tells tensors in host memory from those on the device.
    """

    def __init__(
        self, modules: ModuleStack, is_host: Callable[[torch.Tensor], bool] = lambda tensor: False
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules, self.is_host = modules, is_host
        self.phase = "forward"
        self.ops: list[Op] = []
        self.tensors: list[TensorRef] = []
        self.storages: list[Storage] = []
        self._tensor_ids: dict[TensorRef, int] = {}
        self._storage_ids: dict[int, int] = {}  # by StorageImpl address, while it lives
        self._live: list[tuple[StorageWeakRef, int, int, int]] = []  # with its handle, address and number
        self._where: tuple[str, int | None] = ("", None)

    def register(self, tensor: torch.Tensor, kind: str, layer: int | None) -> None:
        """A tensor of a known role: what exists before the step, and the gradients."""
        index = self._storage(tensor, kind, layer)
        self.storages[index] = dataclasses.replace(self.storages[index], kind=kind, layer=layer)

    def set_kind_of(self, storage: int, kind: str) -> None:
        self.storages[storage] = dataclasses.replace(self.storages[storage], kind=kind)

    def _storage(self, tensor: torch.Tensor, kind: str = "activation", layer: int | None = None) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._storage_ids.get(address)
        if known is None:
            known = self._storage_ids[address] = len(self.storages)
            self.storages.append(Storage(storage.nbytes(), kind, layer))
            reference = StorageWeakRef(storage)
            self._live.append((reference, reference.cdata, address, known))
        return known

    def _sweep(self) -> tuple[int, ...]:
        """Storages that were released since the last call."""
        # some two hundred a call: `StorageWeakRef.expired` asks the same through three calls, an eighth of a trace
        expired = torch.UntypedStorage._expired
        freed = [entry for entry in self._live if expired(entry[1])]
        if not freed:
            return ()
        gone = {number for *_, number in freed}
        self._live = [entry for entry in self._live if entry[3] not in gone]
        for _, _, address, _ in freed:
            self._storage_ids.pop(address, None)
        return tuple(number for *_, number in freed)

    def _tensor(self, tensor: torch.Tensor, layer: int | None, kind: str = "activation") -> int:
        operand = Operand(tuple(tensor.shape), tuple(tensor.stride()), _DTYPES[tensor.dtype])
        kind = "host" if self.is_host(tensor) else kind
        ref = TensorRef(operand, self._storage(tensor, kind, None if kind == "input" else layer))
        known = self._tensor_ids.get(ref)
        if known is None:
            known = self._tensor_ids[ref] = len(self.tensors)
            self.tensors.append(ref)
        return known

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(_IGNORED):
            return func(*args, **kwargs)
        freed = self._sweep()
        module, layer = self._place()
        inputs: list[int] = []
        written: list[int] = []
        seen: dict[Any, int] = {}  # the same tensor, or list of tensors, twice in a call is one operand
        schema_arguments = func._schema.arguments
        is_multi_tensor = name.startswith(("aten._foreach", "aten._fused_adam"))

        def encode(value: Any, is_written: bool) -> Any:
            if isinstance(value, torch.Tensor):
                position = seen.setdefault(id(value), len(inputs))
                if is_written:
                    written.append(position)
                if position == len(inputs):
                    inputs.append(self._tensor(value, layer, "input"))
                return {"t": position}
            if isinstance(value, (list, tuple)):
                if value and all(isinstance(item, torch.Tensor) for item in value):
                    first = seen.setdefault(tuple(id(item) for item in value), len(inputs))
                    if is_written:
                        written.extend(range(first, first + len(value)))
                    if first == len(inputs):
                        inputs.extend(self._tensor(item, layer, "input") for item in value)
                    return {"ts": [first, len(value)]}
                if is_multi_tensor and value and all(item == value[0] for item in value):
                    return {"rs": [_encode_scalar(value[0]), len(value)]}
                return [encode(item, is_written) for item in value]
            return _encode_scalar(value)

        def is_mutated(argument: Any) -> bool:
            return argument.alias_info is not None and argument.alias_info.is_write

        encoded_args = [encode(value, is_mutated(schema_arguments[i])) for i, value in enumerate(args)]
        mutated = {argument.name: is_mutated(argument) for argument in schema_arguments}
        encoded_kwargs = {
            key: encode(value, mutated.get(key, False))
            for key, value in kwargs.items()
            if key not in ("device", "pin_memory")
        }
        result = func(*args, **kwargs)
        results = [t for t in flatten(result) if isinstance(t, torch.Tensor)]
        written_storages = {self.tensors[inputs[i]].storage for i in written}
        input_storages = {self.tensors[i].storage for i in inputs}
        outputs = [self._tensor(t, layer) for t in results]
        new = [o for o in outputs if self.tensors[o].storage not in written_storages]
        kind = "launch"
        is_host = [self.storages[s].kind == "host" for s in (written_storages or input_storages)]
        if is_host and all(is_host):  # what writes to host memory, or only reads from there
            kind = "host"
            for storage in (*input_storages, *(self.tensors[o].storage for o in new)):
                if self.storages[storage].kind in ("activation", "input"):
                    self.set_kind_of(storage, "host")
        elif name in _SYNCS or (is_host and self._reads_back(new, input_storages)):
            kind = "sync"
        elif bool(new) and not written and all(self.tensors[o].storage in input_storages for o in new):
            kind = "view"
        self.ops.append(
            Op(
                name=name,
                phase=self.phase,
                inputs=tuple(inputs),
                outputs=tuple(new),
                written=tuple(written),
                args=json.dumps(encoded_args, separators=(",", ":")),
                kwargs=json.dumps(encoded_kwargs, separators=(",", ":")),
                layer=layer,
                module=module,
                kind=kind,
                freed=freed,
            )
        )
        return result

    def _reads_back(self, new: Sequence[int], inputs: set[int]) -> bool:
        """Whether results lie on the host and operands on the device: a copy that the host waits for."""
        made = [self.storages[self.tensors[o].storage].kind == "host" for o in new]
        return bool(made) and all(made) and any(self.storages[s].kind != "host" for s in inputs)

    def _place(self) -> tuple[str, int | None]:
        """The module that the call belongs to: by the module stack, in the backward by the autograd node - but for
        what runs inside a module there, which is a forward run again (activation checkpointing)."""
        if self.phase == "forward" or (self.phase == "backward" and self.modules.is_inside):
            self._where = self.modules.current()
        elif self.phase == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                self._where = self.modules.of_node(node._sequence_nr(), self._where)
        else:
            self._where = ("", None)
        return self._where


def _encode_scalar(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return {"d": _DTYPES[value]}
    if isinstance(value, (torch.memory_format, torch.layout, torch.device)):
        return {"m": str(value).removeprefix("torch.")}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"f": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"o": type(value).__name__}


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    else:
        yield value


class ModuleStack:
    """Which module is running, and for each autograd node which module made it.

    Nodes are numbered in the order of their making, so the numbers at module entries and exits are enough.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """Of several models each one's modules are named after its class."""
        self.names: dict[torch.nn.Module, str] = {}
        stacks: list[tuple[str, torch.nn.ModuleList]] = []
        for model in models:
            prefix = "" if len(models) == 1 else f"{type(model).__name__}."
            found = {module: (prefix + name).removesuffix(".") for name, module in model.named_modules()}
            self.names |= found
            if (layers := find_layers(model)) is not None:
                stacks.append((f"{found[layers]}." if found[layers] else "", layers))
        self.prefix: str | None = None
        self.layers: torch.nn.ModuleList | None = None
        if stacks:
            self.prefix, self.layers = max(stacks, key=lambda stack: len(stack[1]))
        self._stack: list[str] = [""]
        self._starts: list[int] = [0]
        self._modules: list[str] = [""]

    def layer_of(self, name: str) -> int | None:
        if self.prefix is None or not name.startswith(self.prefix):
            return None
        number = name[len(self.prefix) :].split(".")[0]
        return int(number) if number.isdecimal() else None

    @property
    def is_inside(self) -> bool:
        """Whether a module is running."""
        return len(self._stack) > 1

    def current(self) -> tuple[str, int | None]:
        return self._stack[-1], self.layer_of(self._stack[-1])

    def of_node(self, number: int, previous: tuple[str, int | None]) -> tuple[str, int | None]:
        if number >= 2**63:  # AccumulateGrad: follows the node that made the gradient
            return previous
        name = self._modules[bisect.bisect_right(self._starts, number) - 1]
        return name, self.layer_of(name)

    def _mark(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(self._stack[-1])

    @contextlib.contextmanager
    def watching(self, entered: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Follows the modules of the models for as long as the context lasts; `entered` is called when one that no
        other contains begins."""

        def enter(module: torch.nn.Module, _args: Any) -> None:
            if module in self.names:
                if not self.is_inside:
                    entered()
                self._stack.append(self.names[module])
                self._mark()

        def leave(module: torch.nn.Module, _args: Any, _result: Any) -> None:
            if module in self.names and self.is_inside:
                self._stack.pop()
                self._mark()

        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            # called also when the module is left by an exception, as checkpointing leaves what it runs again
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def find_layers(model: torch.nn.Module) -> torch.nn.ModuleList | None:
    """The stack of identical layers: the longest ModuleList of one class with equal parameter shapes."""

    def signature(layer: torch.nn.Module) -> tuple[Any, ...]:
        return (type(layer), *((name, tuple(p.shape)) for name, p in layer.named_parameters()))

    stacks = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.ModuleList) and len({signature(layer) for layer in module}) == 1
    ]
    return max(stacks, key=len, default=None)


@dataclass
class Parts:
    """What a step works on: its models, optimizers and what they are fed."""

    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    batch: Any = None

    def named_parameters(self) -> dict[torch.Tensor, str]:
        """Each parameter once, a tied one under its first name."""
        prefixes = {id(m): "" if len(self.models) == 1 else f"{type(m).__name__}." for m in self.models}
        found: dict[torch.Tensor, str] = {}
        for model in self.models:
            for name, parameter in model.named_parameters():
                found.setdefault(parameter, prefixes[id(model)] + name)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found.setdefault(parameter, "")
        return found

    @contextlib.contextmanager
    def discovering(self) -> Iterator[None]:
        """Notes the models called and the optimizers stepped while the context lasts."""
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

        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave, always_call=True),
            register_optimizer_step_pre_hook(stepped),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextlib.contextmanager
def _phases(recorder: Recorder, ended: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Keeps `recorder.phase` right; gives what to call when a model begins. `ended` is called after each backward.

    A backward is what autograd's engine runs; after it comes the optimizer, until a model is called again.
    """
    original = torch.autograd.backward, torch.autograd.grad
    depth = 0

    def within(function: Callable[..., Any], after: str | None) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            before = recorder.phase
            recorder.phase = "backward"
            depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                if depth == 0:
                    ended()
                    recorder.phase = after or before

        return run

    def begin(phase: str) -> None:
        if depth == 0:
            recorder.phase = phase

    handle = register_optimizer_step_pre_hook(lambda *_: begin("optimizer"))
    torch.autograd.backward = within(original[0], "optimizer")
    torch.autograd.grad = within(original[1], None)
    try:
        yield lambda: begin("forward")
    finally:
        torch.autograd.backward, torch.autograd.grad = original
        handle.remove()


def counts_on_host(optimizer: torch.optim.Optimizer, device_type: str) -> bool:
    """Whether step counters lie in host memory: so with torch's optimizers on CUDA unless fused or capturable."""
    group = optimizer.param_groups[0]
    return device_type == "cuda" and not (group.get("fused") or group.get("capturable"))


def record_step(
    step: Any,
    meta: Mapping[str, Any] | None = None,
    *,
    is_host: Callable[[torch.Tensor], bool] | None = None,
    first: Callable[[], Any] | None = None,
) -> Stream:
    """The op stream of one steady step; a first step is run to create optimizer state, or `first` in its place.

    `step` has `run()` and `device_type`: a `TrainingStep`, or a `FunctionStep` around a function, whose models and
    optimizers are those that its first run used. `is_host` is for `Recorder`: by default a tensor on the CPU is in
    host memory where the device is another.
    """
    parts = Parts(batch=getattr(step, "batch", None))
    with older_kept():
        with parts.discovering():
            (first or step.run)()
        if isinstance(getattr(step, "model", None), torch.nn.Module):
            parts.models, parts.optimizers = [step.model], [step.optimizer]
        if hasattr(step, "zero_grad"):
            step.zero_grad()
        gc.collect()
    if is_host is None:
        device_type = step.device_type

        def is_host(tensor: torch.Tensor) -> bool:
            return bool(device_type != "cpu" and tensor.device.type == "cpu")

    modules = ModuleStack(parts.models)
    recorder = Recorder(modules, is_host)
    parameters = parts.named_parameters()
    homes = {parameter: modules.layer_of(name) for parameter, name in parameters.items()}
    _register(recorder, parts, homes, step.device_type)

    def register_gradients() -> None:
        for parameter, layer in homes.items():
            if parameter.grad is not None:
                recorder.register(parameter.grad, "gradient", layer)

    register_gradients()
    run = getattr(step, "run_phases", step.run)
    with (
        no_garbage_collection(),  # a collection in mid-step would free storages at a random op
        recorder,
        _phases(recorder, register_gradients) as begin,
        modules.watching(begin),
    ):
        run()
    layer_params = sum(p.numel() for p in modules.layers[0].parameters()) if modules.layers is not None else 0
    return Stream(
        ops=_place_optimizer(recorder.ops, recorder),
        tensors=tuple(recorder.tensors),
        storages=tuple(recorder.storages),
        n_params=sum(parameter.numel() for parameter in parameters),
        depth=len(modules.layers) if modules.layers is not None else None,
        meta={
            **(meta or {}),
            "layer_params": layer_params,
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
        },
    )


def _register(
    recorder: Recorder, parts: Parts, homes: Mapping[torch.Tensor, int | None], device_type: str
) -> None:
    """Tells the recorder what exists before the step."""
    for parameter, layer in homes.items():
        recorder.register(parameter, "parameter", layer)
    for model in parts.models:
        for buffer in model.buffers():
            recorder.register(buffer, "buffer", None)
    for tensor in flatten(parts.batch):
        if isinstance(tensor, torch.Tensor):
            recorder.register(tensor, "input", None)
    for optimizer in parts.optimizers:
        for owner, state in optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    kind = "host" if name == "step" and counts_on_host(optimizer, device_type) else "state"
                    recorder.register(value, kind, homes.get(owner))


def _place_optimizer(ops: list[Op], recorder: Recorder) -> tuple[Op, ...]:
    """An optimizer that loops over parameters works layer by layer; one over lists belongs to no layer.

    What a layer's operation makes (a temporary) is the layer's too, and so is what works on temporaries only.
    """
    placed: list[Op] = []
    current: int | None = None
    for op in ops:
        if op.phase != "optimizer":
            placed.append(op)
            continue
        refs = [recorder.tensors[i].storage for i in op.inputs]
        is_list = '"ts"' in op.args
        if not is_list and any(
            recorder.storages[s].kind in ("parameter", "gradient", "state", "host") for s in refs
        ):
            current = next(
                recorder.storages[s].layer for s in refs if recorder.storages[s].kind != "activation"
            )
        for position, index in enumerate(
            op.outputs
        ):  # the n-th result of a list op belongs with its n-th input
            made = recorder.tensors[index].storage
            layer = recorder.storages[refs[position]].layer if is_list else current
            recorder.storages[made] = dataclasses.replace(recorder.storages[made], layer=layer)
        placed.append(op if is_list else dataclasses.replace(op, layer=current))
    return tuple(placed)
