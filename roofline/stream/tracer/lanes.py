"""Follows the CUDA streams of a step on several GPUs: on which lane each call runs, and what it waits for.

A lane is a CUDA stream, numbered in the order of first use; 0 is the one that computes. Events order calls of different
lanes. They are not kept: a call `waits` for the last calls that an event it waits for stands behind.

NCCL runs a collective that is asked for asynchronously on a stream of its own, one per process group, after what the
current stream holds at that moment; a synchronous one runs on the current stream (torch 2.7 and later). What is sent
and received in one batch runs there too, as one kernel; what is sent by itself on a stream of the two ranks' own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

# torch's operators that are more than ATen: collectives as c10d knows them, as DTensor asks for them, FSDP's copies.
COLLECTIVES, FUNCTIONAL, COPIES = "c10d", "_c10d_functional", "fsdp"
SENT = ("c10d::send", "c10d::recv_")
_WAIT = "_c10d_functional.wait_tensor.default"
_NO_WORK = (_WAIT, "_c10d_functional._wrap_tensor_autograd.default")


def wraps(types: Iterable[type]) -> bool:
    """Whether tensors stand for parts of others, as DTensors do: they make calls of their own on this rank's part."""
    return any(kind.__module__.startswith("torch.distributed.") for kind in types)


def is_bookkeeping(func: Any) -> bool:
    """Whether a call only says that a collective is to be waited for, or that it is waited for now (`is_wait`)."""
    return str(func) in _NO_WORK


def is_wait(func: Any, tensor: Any) -> bool:
    """Whether a call lets the current stream wait for the collective that wrote a tensor. Eager code makes it when the
    tensor is used or its asker wants it at once; code on fake tensors, taken for a compiler's, always at once, so that
    there who uses it waits (`Lanes.placed`), and whoever asks for it at once is known (`Lanes.awaiting`)."""
    return str(func) == _WAIT and not isinstance(tensor, FakeTensor)


def own_part(tensor: Any) -> Any:
    """What this rank has of a tensor that stands for more, and what a collective is writing where it stands for that;
    others as they are."""
    return getattr(tensor, "_local_tensor", getattr(tensor, "elem", tensor))


def is_launch(func: Any) -> bool:
    """Whether a call that returns its operands runs on the device all the same."""
    return func.namespace in (COLLECTIVES, FUNCTIONAL, COPIES)


def group_of(value: Any, argument: str = "") -> tuple[int, int] | None:
    """(ranks, distance between two of them) of a process group, given as the dispatcher does or by its name; None for
    another value."""
    is_boxed = type(value) is torch.ScriptObject and str(value._type()).endswith(".ProcessGroup")
    if not is_boxed and not (argument == "group_name" and isinstance(value, str)):
        return None
    import torch.distributed as dist

    of_name: Any = vars(dist.distributed_c10d)["_resolve_process_group"]  # which it does not say that it exports
    group = dist.ProcessGroup.unbox(value) if is_boxed else of_name(value)
    ranks = dist.get_process_group_ranks(group)
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


class Lanes:
    """What is known of each lane while a step is recorded. A lane is known by any key: a stream, or a process group."""

    def __init__(self, current: Callable[[], Any]) -> None:
        """`current` returns the stream that is current; the first that is numbered computes."""
        self._current = current
        self._numbers: dict[Any, int] = {}
        self._last: dict[int, int] = {}  # the last call of each lane
        self._ahead: dict[int, dict[int, int]] = {}  # by lane: the calls that its next one waits for, by their lanes
        self._seen: dict[int, dict[int, int]] = {}  # by lane: the last call of each other lane that it has waited for
        self._owed: dict[int, tuple[int, int]] = {}  # by storage: the lane and the call of a collective on it
        self.together = 0  # the number of the batch that is being sent and received; 0 outside of one
        self._batches = 0
        self._sent: dict[int, int] = {}  # what was sent or received last, by lane, since `sending` began

    def begin(self) -> None:
        """Numbers batches from here on: a step's are the same, however many ran before it."""
        self._batches = 0

    def number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    @property
    def current(self) -> int:
        return self.number(self._current())

    def state(self, lane: int) -> dict[int, int]:
        """What an event stands behind that is recorded on a lane now: a call of each lane."""
        found = dict(self._ahead.get(lane, {}))
        if lane in self._last:
            found[lane] = self._last[lane]
        return found

    def wait(self, lane: int, state: dict[int, int]) -> None:
        """Lets a lane's next call wait for an event of that state."""
        ahead = self._ahead.setdefault(lane, {})
        for other, call in state.items():
            if other != lane and call > max(ahead.get(other, -1), self._seen.get(lane, {}).get(other, -1)):
                ahead[other] = call

    def wait_for_collectives(self) -> None:
        """Lets the current lane wait for all asynchronous collectives so far."""
        for lane, call in self._owed.values():
            self.wait(self.current, {lane: call})
        self._owed.clear()

    def wait_for(self, storages: Iterable[int]) -> None:
        """Lets the current lane wait for the collectives on these storages."""
        for storage in self._owed.keys() & set(storages):
            lane, call = self._owed.pop(storage)
            self.wait(self.current, {lane: call})

    @contextlib.contextmanager
    def awaiting(self) -> Iterator[None]:
        """At the end of the context the current lane waits for the collectives that were asked for within it."""
        before = dict(self._owed)
        yield
        self.wait_for([storage for storage, owed in self._owed.items() if owed != before.get(storage)])

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Within the context what is sent and received runs as one kernel."""
        self._batches += 1
        self.together = self._batches
        try:
            yield
        finally:
            self.together = 0

    @contextlib.contextmanager
    def sending(self) -> Iterator[dict[int, int]]:
        """Yields what will hold the last call on each lane that sends or receives within the context: who asks for
        these waits for them explicitly."""
        before, self._sent = self._sent, {}
        yield self._sent
        self._sent = before

    def placed(
        self, number: int, func: Any, args: tuple[Any, ...], kind: str, storages: Iterable[int]
    ) -> tuple[int, tuple[int, ...]]:
        """The lane of the call of this number, and the calls that it waits for. `storages`: those it touches; whoever
        asked for a collective on them has waited for it."""
        storages = set(storages)
        lane = self.current
        self.wait_for(storages)
        if kind in ("view", "host"):
            return lane, ()
        if is_asynchronous(func, args):
            named = zip(args, func._schema.arguments, strict=False)
            group = next(found for value, argument in named if (found := group_of(value, argument.name)) is not None)
            is_sent = func._schema.name in SENT
            peer = args[2] if is_sent and not self.together else None
            now, lane = self.state(lane), self.number(("nccl", group, peer))
            self.wait(lane, now)
            if is_sent:
                self._sent[lane] = number
            else:
                self._owed |= dict.fromkeys(storages, (lane, number))
        ahead = self._ahead.pop(lane, {})
        self._seen.setdefault(lane, {}).update(ahead)
        self._last[lane] = number
        return lane, tuple(sorted(ahead.values()))


def is_asynchronous(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is a collective on NCCL's own stream. `func` None: a compiled graph."""
    if func is None:
        return False
    if func.namespace == FUNCTIONAL:
        return True
    if func.namespace != COLLECTIVES:
        return False
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("async_op") if "async_op" in names else len(args)
    return place >= len(args) or bool(args[place])  # the schema's default is true
