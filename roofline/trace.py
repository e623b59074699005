"""Traces the op stream of a training step: on fake tensors without a GPU, or from a real step.

The only module of `roofline` that imports torch. What is recorded is what the dispatcher sees below autograd
and autocast: forward, backward and optimizer, each call with its operands, storages and module.

For a CUDA stream on a machine without CUDA the step runs on fake CPU tensors while `_CudaSemantics` does
what CUDA would do differently: CUDA's autocast lists (the CPU's differ) and attention kept as one operation.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import gc
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.kernels.shapes import Operand
from flopcast.microbench.steps import TrainingStep, build_model, make_optimizer
from flopcast.roofline.stream import Op, Storage, Stream, TensorRef

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64",
}  # fmt: skip

# Calls that read a value back to the host: it waits for the device.
_SYNCS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.is_nonzero.default",
    "aten.equal.default",
}
# Bookkeeping that launches nothing and costs next to nothing.
_IGNORED = ("profiler.", "prim.", "aten.is_same_size", "aten.sym_", "aten.lift_fresh")


# --- recording ----------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Appends every ATen call to `ops`; works on real and on fake tensors."""

    def __init__(self, modules: _ModuleStack) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules = modules
        self.phase = "forward"
        self.ops: list[Op] = []
        self.tensors: list[TensorRef] = []
        self.storages: list[Storage] = []
        self._tensor_ids: dict[TensorRef, int] = {}
        self._storage_ids: dict[int, int] = {}  # by StorageImpl address, while it lives
        self._live: list[tuple[StorageWeakRef, int, int]] = []
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
            self._live.append((StorageWeakRef(storage), address, known))
        return known

    def _sweep(self) -> tuple[int, ...]:
        """Storages that were released since the last call."""
        freed, live = [], []
        for entry in self._live:
            if entry[0].expired():
                freed.append(entry[2])
                self._storage_ids.pop(entry[1], None)
            else:
                live.append(entry)
        self._live = live
        return tuple(freed)

    def _tensor(self, tensor: torch.Tensor, layer: int | None) -> int:
        operand = Operand(tuple(tensor.shape), tuple(tensor.stride()), _DTYPES[tensor.dtype])
        ref = TensorRef(operand, self._storage(tensor, "activation", layer))
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
                    inputs.append(self._tensor(value, layer))
                return {"t": position}
            if isinstance(value, (list, tuple)):
                if value and all(isinstance(item, torch.Tensor) for item in value):
                    first = seen.setdefault(tuple(id(item) for item in value), len(inputs))
                    if is_written:
                        written.extend(range(first, first + len(value)))
                    if first == len(inputs):
                        inputs.extend(self._tensor(item, layer) for item in value)
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
        results = [t for t in _flatten(result) if isinstance(t, torch.Tensor)]
        written_storages = {self.tensors[inputs[i]].storage for i in written}
        input_storages = {self.tensors[i].storage for i in inputs}
        outputs = [self._tensor(t, layer) for t in results]
        new = [o for o in outputs if self.tensors[o].storage not in written_storages]
        kind = "launch"
        is_host = [self.storages[s].kind == "host" for s in (written_storages or input_storages)]
        if is_host and all(is_host):  # what writes to host memory, or only reads from there
            kind = "host"
            for storage in (*input_storages, *(self.tensors[o].storage for o in new)):
                if self.storages[storage].kind == "activation":
                    self.set_kind_of(storage, "host")
        elif name in _SYNCS:
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

    def _place(self) -> tuple[str, int | None]:
        """The module that the call belongs to: by the module stack, in the backward by the autograd node."""
        if self.phase == "forward":
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


def _flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


class _ModuleStack:
    """Which module is running, and for each autograd node which module made it.

    Nodes are numbered in the order of their making, so the numbers at module entries and exits are enough.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.layers = find_layers(model)
        self.prefix = (
            next((f"{n}." for n, m in model.named_modules() if m is self.layers), "") if self.layers else None
        )
        self._stack: list[str] = [""]
        self._starts: list[int] = [0]
        self._modules: list[str] = [""]

    def layer_of(self, name: str) -> int | None:
        if self.prefix is None or not name.startswith(self.prefix):
            return None
        return int(name[len(self.prefix) :].split(".")[0])

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
    def watching(self) -> Iterator[None]:
        """Follows the modules of this model for as long as the context lasts."""

        def enter(module: torch.nn.Module, _args: Any) -> None:
            if module in self.names:
                self._stack.append(self.names[module])
                self._mark()

        def leave(module: torch.nn.Module, _args: Any, _result: Any) -> None:
            if module in self.names:
                self._stack.pop()
                self._mark()

        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(enter),
            torch.nn.modules.module.register_module_forward_hook(leave),
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


def record_step(step: TrainingStep, meta: Mapping[str, Any] | None = None) -> Stream:
    """The op stream of one steady step of `step`; a first step is run to create optimizer state."""
    step.run()
    step.zero_grad()
    gc.collect()
    modules = _ModuleStack(step.model)
    recorder = Recorder(modules)
    gc.disable()  # a collection in mid-step would free storages at a random op
    try:
        homes: dict[torch.Tensor, int | None] = {
            parameter: modules.layer_of(name) for name, parameter in step.model.named_parameters()
        }
        for parameter, layer in homes.items():
            recorder.register(parameter, "parameter", layer)
        for buffer in step.model.buffers():
            recorder.register(buffer, "buffer", None)
        recorder.register(step.input_ids, "input", None)
        for owner, state in step.optimizer.state.items():
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    kind = "host" if name == "step" and step.counts_on_host else "state"
                    recorder.register(value, kind, homes.get(owner))
        with recorder, modules.watching():
            loss = step.forward()
            recorder.phase = "backward"
            step.backward(loss)
            for parameter, layer in homes.items():
                if parameter.grad is not None:
                    recorder.register(parameter.grad, "gradient", layer)
            recorder.phase = "optimizer"
            step.optimizer_step()
    finally:
        gc.enable()
    ops = _place_optimizer(recorder.ops, recorder)
    layer_params = sum(p.numel() for p in modules.layers[0].parameters()) if modules.layers is not None else 0
    return Stream(
        ops=ops,
        tensors=tuple(recorder.tensors),
        storages=tuple(recorder.storages),
        n_params=sum(parameter.numel() for parameter in step.model.parameters()),
        depth=len(modules.layers) if modules.layers is not None else None,
        meta={
            **(meta or {}),
            "layer_params": layer_params,
            "torch": torch.__version__.split("+")[0],
            "transformers": transformers.__version__,
        },
    )


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


# --- CUDA's semantics on fake CPU tensors ----------------------------------------------------------

# torch/csrc: aten/src/ATen/autocast_mode.h, the CUDA lists, as function names.
_TO_BF16 = {
    "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "linear", "addmm", "addmv", "addr", "addbmm",
    "baddbmm", "mv", "einsum", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d",
    "conv_transpose3d", "prelu", "scaled_dot_product_attention", "chain_matmul", "linalg_multi_dot",
    "_grouped_mm", "grouped_mm",
}  # fmt: skip
_TO_FP32 = {
    "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "acos", "asin", "cosh", "cosine_similarity",
    "cross_entropy", "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "kl_div", "l1_loss",
    "layer_norm", "rms_norm", "log", "log10", "log1p", "log2", "log_softmax", "mse_loss", "nll_loss", "norm",
    "normalize", "prod", "reciprocal", "rsqrt", "sinh", "smooth_l1_loss", "softmax", "softmin", "softplus",
    "sum", "tan", "binary_cross_entropy_with_logits",
    "cdist", "pdist", "logsumexp", "renorm", "huber_loss", "linalg_vector_norm", "linalg_matrix_norm", "interpolate",
}  # fmt: skip
_PROMOTE = {
    "addcdiv",
    "addcmul",
    "atan2",
    "bilinear",
    "cross",
    "dot",
    "index_put",
    "scatter_add",
    "tensordot",
    "cat",
    "stack",
}


class _CudaSemantics(TorchFunctionMode):
    """Casts as CUDA's autocast does, and keeps attention one operation."""

    def __init__(self) -> None:
        super().__init__()
        self._cache: dict[int, torch.Tensor] = {}

    def clear(self) -> None:
        """Autocast drops its cast weights when its outermost context ends."""
        self._cache.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if torch.is_autocast_enabled("cpu"):
            cast: Callable[[torch.Tensor], torch.Tensor] | None = None
            if name in _TO_BF16:
                cast = self._to_bf16
            elif name in _TO_FP32:
                cast = _to_fp32
            elif name in _PROMOTE:
                found = [t for a in args for t in _flatten(a) if isinstance(t, torch.Tensor)]
                if any(t.dtype == torch.float32 for t in found):
                    cast = _to_fp32
            if cast is not None:
                args = tuple(_map_tensors(a, cast) for a in args)
                kwargs = {key: _map_tensors(value, cast) for key, value in kwargs.items()}
        if name == "scaled_dot_product_attention":
            return _opaque_attention(*args, **kwargs)
        # The CPU's own autocast stays out: its lists differ.
        with torch._C._DisableAutocast():
            return func(*args, **kwargs)

    def _to_bf16(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype != torch.float32:
            return tensor
        if not (tensor.is_leaf and tensor.requires_grad):
            return tensor.to(torch.bfloat16)
        key = id(tensor)
        if key not in self._cache:
            self._cache[key] = tensor.to(torch.bfloat16)
        return self._cache[key]


def _to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32) if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


@torch.library.custom_op("flopcast::attention", mutates_args=())
def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError("flopcast::attention exists for tracing only")


@_attention.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, seq, _ = query.shape
    # As flash and cuDNN lay it out: [batch, seq, heads, dim] in memory.
    out = query.new_empty((batch, seq, heads, value.shape[-1])).transpose(1, 2)
    return out, query.new_empty((batch, heads, seq), dtype=torch.float32)


@torch.library.custom_op("flopcast::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    raise NotImplementedError("flopcast::attention_backward exists for tracing only")


@_attention_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
    lse: torch.Tensor, is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return tuple(t.new_empty(t.transpose(1, 2).shape).transpose(1, 2) for t in (query, key, value))  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.set_materialize_grads(False)  # else the unused log-sum-exp would get a gradient of zeros
    ctx.mark_non_differentiable(output[1])
    query, key, value, ctx.is_causal = inputs
    ctx.save_for_backward(query, key, value, *output)


def _attention_gradient(ctx: Any, grad: torch.Tensor, _lse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.is_causal), None


torch.library.register_autograd("flopcast::attention", _attention_gradient, setup_context=_save)


def _opaque_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0, is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    if attn_mask is not None or dropout_p:
        raise NotImplementedError("attention with a mask or dropout is not modelled yet")
    out: torch.Tensor = _attention(query, key, value, is_causal)[0]
    return out


@dataclass
class _FakeStep(TrainingStep):
    """A step whose autocast is `_CudaSemantics`'s."""

    semantics: _CudaSemantics = field(default_factory=_CudaSemantics)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        # The CPU's autocast is only the switch that `_CudaSemantics` reads: models turn it off for parts.
        if self.precision == "autocast-bf16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def forward(self) -> torch.Tensor:
        with self.semantics:
            loss = super().forward()
        self.semantics.clear()
        return loss


class _FakeValues(TorchDispatchMode):
    """A fake tensor has no value to read back: checks are taken to pass, numbers to be 1."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _transformers_untraced() -> Iterator[None]:
    """transformers takes fake tensors for a compiler's and leaves the causal SDPA: say they are not fake."""
    import transformers.utils.import_utils as utils

    original = utils.is_fake_tensor
    utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        utils.is_fake_tensor = original


def trace(
    config: Mapping[str, Any],
    *,
    batch: int = 4,
    seq: int = 256,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    device: str = "cuda",
) -> Stream:
    """The op stream of one step of a transformers causal language model, on fake tensors.

    `device` is the device whose semantics are traced ("cuda" or "cpu"); neither is needed. Raises ValueError
    when transformers refuses the config.
    """
    with _transformers_untraced(), FakeTensorMode(), _FakeValues():  # type: ignore[no-untyped-call]
        model = build_model(config, precision=precision)
        input_ids = torch.zeros((batch, seq), dtype=torch.int64)
        adamw = make_optimizer(model, optimizer, foreach=True if device == "cuda" else None)
        kind = _FakeStep if device == "cuda" else TrainingStep
        step = kind(model, adamw, input_ids, precision, device)
        meta = {"config": dict(config), "batch": batch, "seq": seq, "precision": precision,
                "optimizer": optimizer, "device": device}  # fmt: skip
        return record_step(step, meta)
