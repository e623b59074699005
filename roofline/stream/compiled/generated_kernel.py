"""What the time of a generated kernel depends on, and how an op of a stream holds it: "inductor.pointwise"."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from flopcast.bounds import Count
from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.kernels.shapes import Call
from flopcast.roofline.stream.compiled.launches import Kind, Launch, Work

NAMESPACE = "inductor"  # of ops that are generated kernels
NO_WORK = Work()
_Numels = tuple[tuple[str, Count], ...]
_Ages = tuple[tuple[Count, Count], ...]


@dataclass(frozen=True, kw_only=True)
class GeneratedKernel:
    """A launch of a kernel that inductor generated; what it is of each field, `Launch` says."""

    kind: Kind
    bytes_read: int
    bytes_written: int
    numels: _Numels = ()
    hint: str = ""
    work: Work = NO_WORK
    ages: _Ages = ()

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written

    @property
    def op(self) -> str:
        """The name of its op."""
        return f"{NAMESPACE}.{self.kind.name.lower()}"

    @property
    def args(self) -> str:
        """The arguments of its op: all but the bytes, which are those of the op's tensors."""
        work = {name: amount for name, amount in asdict(self.work).items() if amount}
        told = {"numels": self.numels, "hint": self.hint, "work": work, "ages": self.ages}
        return json.dumps(told, separators=(",", ":"))


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    numels: _Numels
    hint: str
    work: Work
    ages: _Ages


def kernel_of_launch(launch: Launch) -> GeneratedKernel:
    """Raises DataError for what is no kernel of these kinds."""
    if launch.work is None or launch.kind is Kind.TEMPLATE:
        raise DataError(
            f"{launch.name} is no generated pointwise kernel, reduction or scatter but a {launch.kind.value}: "
            "its time does not follow from its source; compile without max-autotune"
        )
    return GeneratedKernel(
        kind=launch.kind, bytes_read=launch.bytes_read, bytes_written=launch.bytes_written, numels=launch.numels,
        hint=launch.hint, work=launch.work, ages=launch.ages,
    )  # fmt: skip


def kernel_of_call(call: Call) -> GeneratedKernel:
    """The kernel of a stream's op. Raises DataError for an op that tells none."""
    name = call.op.removeprefix(f"{NAMESPACE}.").upper()
    if name not in Kind.__members__:
        raise DataError(f"op {call.op!r} is of no kind of generated kernel: the stream was written by another flopcast")
    try:
        arguments = json.loads(call.args)
    except ValueError:
        arguments = None
    told = decode(_Arguments, arguments, f"the arguments of {call.op}", hint="make the stream again")
    return GeneratedKernel(
        kind=Kind[name], bytes_read=call.read_bytes, bytes_written=call.write_bytes, numels=told.numels, hint=told.hint,
        work=told.work, ages=told.ages,
    )  # fmt: skip
