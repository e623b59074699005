"""DistributedDataParallel's reducer on fake tensors.

The reducer is torch's own, in C++. Three things that it does need values, or results of communication:

- it compares the parameters of all ranks when it is made: left out, as `init_sync=False` does;
- an all-reduce must return its result, which the fake backend's does not: the process group it is given does;
- it lays out its buckets anew after the first step, with tables of numbers that it reads: those stay real.

What stands in for bitsandbytes keeps in buffers what the library does not, which are not sent around.

What it makes on "cpu" lies where the parameters do, on the device that they answer, and not in host memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.microbench.recipe.bitsandbytes_calls import kept_beside_weights
from flopcast.roofline.stream.tracer.import_stubs import replaced

_NUMBERS = (torch.int32, torch.int64)


class _RealNumbers(TorchDispatchMode):
    """Keeps tensors of integers that are made on the host real."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        is_made = func.overloadpacket is torch.ops.aten.empty and kwargs.get("dtype") in _NUMBERS
        are_real = all(not isinstance(t, FakeTensor) and t.dtype in _NUMBERS for t in tensors)
        if is_made or (tensors and are_real):
            if is_made:  # also of those that the reducer would have where the parameters are
                kwargs = {**kwargs, "device": torch.device("cpu")}
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _Answering(dist.ProcessGroup):
    """A process group whose collectives are another's, and done at once."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group

    def _done(self, tensors: list[torch.Tensor]) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(list(tensors))
        of_c10d: Any = torch._C._distributed_c10d
        return of_c10d._create_work_from_future(future)

    def allreduce(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        self._group.allreduce(tensors, options or dist.AllreduceOptions())
        return self._done(tensors)

    def broadcast(self, tensors: Any, options: Any = None) -> Any:  # type: ignore[override]
        return self._done(tensors)


class _Reducer:
    """Torch's reducer on a process group that answers."""

    def __init__(self, own: Any, group: _Answering) -> None:
        self._own, self._group = own, group  # the reducer does not keep the group's Python part

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def _rebuild_buckets(self) -> Any:
        with _RealNumbers(), torch._C.DisableTorchFunction():
            return self._own._rebuild_buckets()


@contextlib.contextmanager
def fake_reducers() -> Iterator[list[Any]]:
    """Within the context DistributedDataParallel works on fake tensors and the fake process group. Yields what will
    hold the reducers that are made."""
    known: list[Any] = []
    reducers: Any = dist  # which does not say that it exports them
    made, log = reducers.Reducer, reducers.Logger
    init = torch.nn.parallel.DistributedDataParallel.__init__

    def reducer(parameters: Any, buckets: Any, sizes: Any, group: Any, *rest: Any, **named: Any) -> Any:
        answering = _Answering(group)
        with torch._C.DisableTorchFunction():
            known.append(_Reducer(made(parameters, buckets, sizes, answering, *rest, **named), answering))
        return known[-1]

    def start(self: Any, module: Any, *args: Any, **named: Any) -> None:
        module._ddp_params_and_buffers_to_ignore = kept_beside_weights(module)
        init(self, module, *args, **{**named, "init_sync": False})

    with (
        replaced(dist, "Reducer", reducer),
        replaced(dist, "Logger", lambda reducer: log(reducer._own)),
        replaced(torch.nn.parallel.DistributedDataParallel, "__init__", start),
    ):
        yield known
