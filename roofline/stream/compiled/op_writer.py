"""Writes ops one after the other, with their tensors and storages, behind those of a stream that is there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.compiled.generated_kernel import kernel_of_launch
from flopcast.roofline.stream.compiled.launches import Launch, storage_bytes
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef

_BYTES = "uint8"

Placed = tuple[Operand, int]  # a tensor and the storage that it lies in


class OpWriter:
    """The ops that were written, and the tensors and storages of `stream`, to which theirs are added. `freed`: storages
    whose memory the next op may take. `home`: the module and the layer of what is written next."""

    def __init__(self, stream: Stream) -> None:
        self.ops: list[Op] = []
        self.tensors = list(stream.tensors)
        self.storages = list(stream.storages)
        self.freed: list[int] = []
        self.home: tuple[str, int | None] = ("", None)
        self._known: dict[TensorRef, int] = {}

    def append(
        self, name: str, phase: str, operands: Sequence[Placed], results: Sequence[Placed], args: str = "[]",
        written: tuple[int, ...] = (), kind: str = "launch",
    ) -> None:  # fmt: skip
        inputs, outputs = (tuple(self._tensor(*placed) for placed in tensors) for tensors in (operands, results))
        freed = tuple(dict.fromkeys(self.freed))
        module, layer = self.home
        self.ops.append(
            Op(name, phase, inputs, outputs, written, args, layer=layer, module=module, kind=kind, freed=freed)
        )
        self.freed.clear()

    def launch(self, launch: Launch, phase: str, places: Mapping[str, int]) -> None:
        """Appends a launch of a graph's code. `places`: storages by buffer."""
        buffers = [places[touch.buffer] for touch in launch.touches]
        if launch.is_generated:
            touched = list(zip(launch.touches, buffers, strict=True))
            read = [(_bytes(touch.read), at) for touch, at in touched if touch.read]
            written = [(_bytes(touch.written), at) for touch, at in touched if touch.written]
            kernel = kernel_of_launch(launch)
            self.append(kernel.op, phase, read, written, kernel.args)
            return
        name = launch.name if "." in launch.name else f"aten.{launch.name}"
        operands = list(zip(launch.operands, buffers, strict=False))
        results = list(zip(launch.results, buffers[len(operands) :], strict=False))
        self.append(f"{name}.default", phase, operands, results, launch.args)

    def copy(self, phase: str, operand: Operand, source: int) -> int:
        """Copies a tensor to memory of its own, as a captured graph has its inputs; the storage there."""
        target = self.new(operand)
        tensors = [(operand, target), (operand, source)]
        self.append("aten.copy_.default", phase, tensors, [], '[{"t":0},{"t":1}]', (0,))
        return target

    def storage(self, size: int) -> int:
        """A storage of so many bytes that this step makes."""
        self.storages.append(Storage(size, "activation", self.home[1]))
        return len(self.storages) - 1

    def new(self, operand: Operand) -> int:
        return self.storage(storage_bytes(operand))

    def _tensor(self, operand: Operand, storage: int) -> int:
        ref = TensorRef(operand, storage)
        if ref not in self._known:
            self._known[ref] = len(self.tensors)
            self.tensors.append(ref)
        return self._known[ref]


def _bytes(count: int) -> Operand:
    return Operand((count,), (1,), _BYTES)
