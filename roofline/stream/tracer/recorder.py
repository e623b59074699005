"""Records every ATen call that torch's dispatcher makes below autograd and autocast: operands, storages, phase, module.

`record_step` tells it which tensors a step works on and when its phases begin.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.ops.op_stream import Op, Storage, TensorRef
from flopcast.roofline.stream.tracer.lanes import (
    COLLECTIVES,
    Lanes,
    group_of,
    is_bookkeeping,
    is_launch,
    is_wait,
    own_part,
    wraps,
)
from flopcast.roofline.stream.tracer.module_stack import ModuleStack
from flopcast.roofline.stream.tracer.unmodelled import check_call, check_layout, check_tensor

_DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "uint8", torch.bool: "bool", torch.complex64: "complex64", torch.float8_e4m3fn: "fp8",
    # of which no kernel is measured, as of integers with a sign; seeds of random numbers are such
    torch.uint64: "int64", torch.uint32: "int32", torch.uint16: "int16",
}  # fmt: skip

# Calls that read a value back to the host, which waits for the device.
_SYNCS = {
    f"aten.{name}"
    for name in (
        "_local_scalar_dense.default", "nonzero.default", "is_nonzero.default", "equal.default", "_unique2.default",
        "unique_dim.default", "unique_consecutive.default", "masked_select.default", "repeat_interleave.Tensor",
    )
} | {"flopcast.synchronize.default"}  # fmt: skip
# Bookkeeping calls, which launch nothing and cost almost nothing. So does making a tensor without elements: torch 2.11
# makes two for each layer that it checkpoints, outside the layer.
_IGNORED = ("profiler.", "prim.", "aten.is_same_size", "aten.sym_", "aten.lift_fresh")
_to_json = json.JSONEncoder(separators=(",", ":")).encode  # `json.dumps` makes an encoder at each call
# What torch asks of a fake tensor twice and more a call.
DEVICE_OF = torch.ops.prim.device.default
# Operators that are recorded as the calls that a function makes of them.
COMPOSED: dict[Any, Callable[..., Any]] = {}


class Recorder(TorchDispatchMode):
    """Appends every ATen call to `ops`; works on real and on fake tensors.

    `is_host`: whether a tensor is in host memory rather than on the device. `lanes`: says on which CUDA stream a call
    runs; without it all run on one.
    """

    supports_higher_order_operators = True  # they are called like any other, and refused

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled graphs run within it as without it: what they are is told by `note`."""
        return True

    def __init__(
        self,
        modules: ModuleStack,
        is_host: Callable[[torch.Tensor], bool] = lambda tensor: False,
        lanes: Lanes | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.modules, self.is_host, self.lanes = modules, is_host, lanes
        self.phase = "forward"
        self.recomputations = 0  # forwards that the backward is repeating now, one within another
        self.ops: list[Op] = []
        self.tensors: list[TensorRef] = []
        self.storages: list[Storage] = []
        self._tensor_ids: dict[TensorRef, int] = {}
        self._storage_ids: dict[int, int] = {}  # number by StorageImpl address, while the storage exists
        self._live: list[tuple[StorageWeakRef, int, int, int]] = []  # weak reference, its handle, address and number
        self._where: tuple[str, int | None] = ("", None)
        self._given_back: list[int] = []  # storages whose memory was given back although they exist
        self.is_paused = False  # calls are made, and not recorded
        self._refilled: set[int] = set()  # addresses of storages that got memory during the step
        # By op: in a forward the number of autograd's next node, in a backward that of the node that runs, -1 for none.
        self.nodes: list[int] = []

    def register(self, tensor: torch.Tensor, kind: str, layer: int | None) -> None:
        """Registers a tensor of a known role: one that exists before the step, or a gradient."""
        tensor = own_part(tensor)
        check_layout(tensor, f"a {kind}")
        index = self._storage(tensor, kind, layer)
        self.storages[index] = self.storages[index]._replace(kind=kind, layer=layer)

    def kind_of(self, tensor: torch.Tensor) -> str:
        return self.storages[self._storage(tensor)].kind

    def set_kind_of(self, storage: int, kind: str) -> None:
        self.storages[storage] = self.storages[storage]._replace(kind=kind)

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

    @contextlib.contextmanager
    def watching_sizes(self) -> Iterator[None]:
        """Within the context storages that are resized, as FSDP's of gathered parameters are, become others: their
        memory is given back, and what they hold later is made when it is first used."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            known = self._storage_ids.pop(storage._cdata, None)
            if known is not None:
                self._given_back.append(known)
                self._live = [entry for entry in self._live if entry[3] != known]
            if size:
                self._refilled.add(storage._cdata)
            return resize(storage, size)

        torch.UntypedStorage.resize_ = resized  # type: ignore[assignment]
        try:
            yield
        finally:
            del torch.UntypedStorage.resize_  # it inherits its own

    def _sweep(self) -> tuple[int, ...]:
        """Returns the storages that were released since the last call."""
        given_back, self._given_back = tuple(self._given_back), []
        return given_back + self._expired()

    def _expired(self) -> tuple[int, ...]:
        # about two hundred per call; `StorageWeakRef.expired` makes three calls for each, an eighth of a trace's time
        expired = torch.UntypedStorage._expired
        freed = [entry for entry in self._live if expired(entry[1])]
        if not freed:
            return ()
        gone = {number for *_, number in freed}
        self._live = [entry for entry in self._live if entry[3] not in gone]
        for _, _, address, _ in freed:
            self._storage_ids.pop(address, None)
        return tuple(number for *_, number in freed)

    def _tensor(self, tensor: torch.Tensor, layer: int | None, function: Any, kind: str = "activation") -> int:
        check_tensor(tensor, function, _DTYPES)
        operand = Operand(tuple(tensor.shape), tuple(tensor.stride()), _DTYPES[tensor.dtype])
        if kind == "input" and tensor.untyped_storage()._cdata in self._refilled:
            kind = "activation"
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
        if func is DEVICE_OF and is_on_processor(args[0]):
            return fake_device(args[0])
        if wraps(types):
            return NotImplemented
        kwargs = kwargs or {}
        name = str(func)
        if name.startswith(_IGNORED) or (name == "aten.empty.memory_format" and 0 in args[0]):
            return func(*args, **kwargs)
        if self.is_paused:
            return func(*args, **kwargs)
        if func in COMPOSED:
            with self:
                return COMPOSED[func](*args, **kwargs)
        if is_bookkeeping(func):
            if self.lanes is not None and is_wait(func, args[0]):
                self.lanes.wait_for([self._storage(args[0])])
            result = func(*args, **kwargs)
            return result if wraps((type(result),)) else args[0]  # a fake one is a copy
        check_call(func)
        freed = self._sweep()
        module, layer = self._place()
        inputs: list[int] = []
        written: list[int] = []
        seen: dict[Any, int] = {}  # a tensor, or list of tensors, that occurs twice in a call is one operand
        schema_arguments = func._schema.arguments
        is_multi_tensor = name.startswith(("aten._foreach", "aten._fused_adam"))

        def encode(value: Any, is_written: bool, argument: str = "") -> Any:
            if isinstance(value, torch.Tensor):
                position = seen.setdefault(id(value), len(inputs))
                if is_written:
                    written.append(position)
                if position == len(inputs):
                    inputs.append(self._tensor(value, layer, func, "input"))
                return {"t": position}
            if isinstance(value, (list, tuple)):
                if value and all(isinstance(item, torch.Tensor) for item in value):
                    first = seen.setdefault(tuple(id(item) for item in value), len(inputs))
                    if is_written:
                        written.extend(range(first, first + len(value)))
                    if first == len(inputs):
                        inputs.extend(self._tensor(item, layer, func, "input") for item in value)
                    return {"ts": [first, len(value)]}
                if is_multi_tensor and value and all(item == value[0] for item in value):
                    return {"rs": [_encode_scalar(value[0]), len(value)]}
                return [encode(item, is_written) for item in value]
            if (group := group_of(value, argument)) is not None:
                return {"g": list(group)}
            return _encode_scalar(value)

        def is_mutated(argument: Any) -> bool:
            return argument.alias_info is not None and argument.alias_info.is_write

        encoded_args = [
            encode(value, is_mutated(schema_arguments[i]), schema_arguments[i].name) for i, value in enumerate(args)
        ]
        mutated = {argument.name: is_mutated(argument) for argument in schema_arguments}
        encoded_kwargs = {
            key: encode(value, mutated.get(key, False))
            for key, value in kwargs.items()
            if key not in ("device", "pin_memory")
        }
        if self.lanes is not None and self.lanes.together and func.namespace == COLLECTIVES:
            encoded_kwargs["together"] = self.lanes.together
        result = func(*args, **kwargs)
        results = [own_part(t) for t in flatten(result) if isinstance(t, torch.Tensor)]
        written_storages = {self.tensors[inputs[i]].storage for i in written}
        input_storages = {self.tensors[i].storage for i in inputs}
        outputs = [self._tensor(t, layer, func) for t in results]
        new = [o for o in outputs if self.tensors[o].storage not in written_storages]
        kind = "launch"
        is_host = [self.storages[s].kind == "host" for s in (written_storages or input_storages)]
        if is_host and all(is_host):  # it writes to host memory, or only reads from there
            is_read_back = bool(written) and any(self.storages[s].kind != "host" for s in input_storages)
            kind = "sync" if is_read_back else "host"
            is_upload = name == "aten._to_copy.default" and self.is_host(args[0]) and not self.is_host(results[0])
            made = () if is_upload else (self.tensors[o].storage for o in new)
            for storage in (*input_storages, *made):
                if self.storages[storage].kind in ("activation", "input") and not is_read_back:
                    self.set_kind_of(storage, "host")
        elif not inputs and results and all(self.is_host(t) for t in results):
            kind = "host"
        elif name in _SYNCS or (is_host and self._reads_back(new, input_storages)):
            kind = "sync"
        elif (
            bool(new)
            and not is_launch(func)
            and not written
            and all(self.tensors[o].storage in input_storages for o in new)
        ):
            kind = "view"
        lane = 0
        waits: tuple[int, ...] = ()
        if self.lanes is not None:
            storages = input_storages | {self.tensors[o].storage for o in outputs}
            lane, waits = self.lanes.placed(len(self.ops), func, args, kind, storages)
        self.nodes.append(self._node())
        self.ops.append(
            Op(
                name=name,
                phase=self.phase,
                inputs=tuple(inputs),
                outputs=tuple(new),
                written=tuple(written),
                args=_to_json(encoded_args),
                kwargs=_to_json(encoded_kwargs),
                layer=layer,
                module=module,
                kind=kind,
                freed=freed,
                is_recomputed=self.recomputations > 0,
                lane=lane,
                waits=waits,
            )
        )
        return result

    def note(self, name: str, inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor], args: str) -> None:
        """Appends what is no call of ATen's, of which Python knows operands and results alone."""
        freed = self._sweep()
        module, layer = self._place()
        taken = tuple(self._tensor(tensor, layer, name, "input") for tensor in inputs)
        made = tuple(self._tensor(tensor, layer, name) for tensor in results)
        lane: int = 0
        waits: tuple[int, ...] = ()
        if self.lanes is not None:
            storages = {self.tensors[i].storage for i in (*taken, *made)}
            lane, waits = self.lanes.placed(len(self.ops), None, (), "launch", storages)
        again = self.recomputations > 0
        self.nodes.append(self._node())
        self.ops.append(
            Op(name, self.phase, taken, made, (), args, "{}", layer, module, "launch", freed, again, lane, waits)
        )

    def _reads_back(self, new: Sequence[int], inputs: set[int]) -> bool:
        """Whether results are on the host and operands on the device: a copy that the host waits for."""
        made = [self.storages[self.tensors[o].storage].kind == "host" for o in new]
        return bool(made) and all(made) and any(self.storages[s].kind != "host" for s in inputs)

    def _node(self) -> int:
        if self.phase == "backward":
            node = torch._C._current_autograd_node()
            return -1 if node is None else node._sequence_nr()
        return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]

    def leave(self) -> None:
        """A backward has ended: what follows is of none of its modules."""
        self._where = ("", None)

    def _place(self) -> tuple[str, int | None]:
        """Returns the module and layer of the call, by the module stack; in the backward by the autograd node, except
        for calls inside a module, which recompute a forward (activation checkpointing)."""
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
        return {"d": _DTYPES.get(value, str(value).removeprefix("torch."))}  # a result of another kind is refused
    if isinstance(value, (torch.memory_format, torch.layout, torch.device)):
        return {"m": str(value).removeprefix("torch.")}
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return {"f": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return {"o": type(value).__name__}


def is_on_processor(tensor: Any) -> bool:
    """Whether a tensor is a fake one of the CPU's. Others, as where compiled steps are traced, have modes of their own
    that answer for them."""
    return isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cpu"


def fake_device(tensor: FakeTensor) -> torch.device:
    """What a fake tensor's mode answers to `DEVICE_OF`; to go through all modes takes a sixth of a trace's time."""
    found: torch.device = torch.device("meta") if tensor.fake_mode.in_kernel_invocation else tensor.fake_device
    return found


def flatten(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flatten(item)
    else:
        yield value
