"""A process group of ranks that are not there, and CUDA streams whose order is followed though nothing runs."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.lanes import Lanes
from flopcast.roofline.stream.tracer.recorder import COMPOSED, Recorder


@contextlib.contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """Within the context this process is one rank of a process group of torch's backend "fake"."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None:  # a new group clears the compiler's table, which is to be of torch as it is
        rules.get_torch_obj_rule_map()
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_meshes()


@contextlib.contextmanager
def as_launched(answer: Callable[..., None] = lambda *_, **__: None) -> Iterator[None]:
    """Within the context code that joins its process group, and leaves it, gets the answer: by default it is a member
    of the one that is there. The environment says what a launcher says to a process of one host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 29500}
    own = {name: getattr(dist, name) for name in ("init_process_group", "destroy_process_group")}
    before = dict(os.environ)
    os.environ |= {name: str(value) for name, value in told.items()} | {"MASTER_ADDR": "localhost"}
    with contextlib.ExitStack() as stack:
        for module in list(sys.modules.values()):  # whoever has imported these functions by their names too
            for name, function in own.items():
                if vars(module).get(name) is function:
                    stack.enter_context(replaced(module, name, answer))
        try:
            yield
        finally:
            os.environ.clear()
            os.environ |= before


def _forget_meshes() -> None:
    """Clears what DTensor remembers of calls. Meshes of two worlds are alike to it, and it would go on with the groups
    of the first, by names that in the next are other groups' or nobody's."""
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    if debug is None and "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
    if debug is not None:
        debug._clear_sharding_prop_cache()
    redistribute: Any = sys.modules.get("torch.distributed.tensor._redistribute")
    for function in vars(redistribute).values() if redistribute is not None else ():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


# Methods of a mesh that compute with tensors of ranks, by torch's version; fake tensors have no values.
_OF_MESHES = ("__init__", "_concatenate", "_unflatten", "_flatten", "_compute_coordinates_from_mesh")


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Within the context meshes compute on real tensors where others are fake. A fake tensor of ranks, as code makes
    that is traced, stands for all of them in order."""

    def in_order(value: Any) -> Any:
        return torch.arange(value.numel()).view(value.shape) if isinstance(value, FakeTensor) else value

    def real(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return function(*map(in_order, args), **{name: in_order(value) for name, value in kwargs.items()})

        return run

    with contextlib.ExitStack() as stack:
        for name in _OF_MESHES:
            method = DeviceMesh.__dict__.get(name)
            if isinstance(method, (staticmethod, classmethod)):
                stack.enter_context(replaced(DeviceMesh, name, type(method)(real(method.__func__))))
            elif method is not None:
                stack.enter_context(replaced(DeviceMesh, name, real(method)))
        yield


# Methods by which DTensor learns a result's shape, by torch's version: it makes the call on tensors of the whole size.
_OF_SHAPES = ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta")


@contextlib.contextmanager
def unseen_shapes() -> Iterator[None]:
    """Within the context recorders do not record the calls by which DTensor learns shapes: they are no work of the
    step."""

    def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
            before = [recorder.is_paused for recorder in recorders]
            try:
                for recorder in recorders:
                    recorder.is_paused = True
                return function(*args, **kwargs)
            finally:
                for recorder, was_paused in zip(recorders, before, strict=True):
                    recorder.is_paused = was_paused

        return run

    with contextlib.ExitStack() as stack:
        for name in _OF_SHAPES:
            if name in vars(ShardingPropagator):
                method = unseen(vars(ShardingPropagator)[name])
                stack.enter_context(replaced(ShardingPropagator, name, method))
        yield


class _Event:
    """A CUDA event, which knows the calls that it stands behind."""

    lanes: Lanes

    def __init__(self, *_: Any, **__: Any) -> None:
        self._state: dict[int, int] = {}

    def record(self, stream: Any = None) -> _Event:
        lane = self.lanes.number(stream) if stream is not None else self.lanes.current
        self._state = self.lanes.state(lane)
        return self

    def wait(self, stream: Any = None) -> None:
        self.lanes.wait(self.lanes.number(stream) if stream is not None else self.lanes.current, self._state)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, _end: _Event) -> float:
        return 1.0


class _Stream:
    """A CUDA stream: a lane."""

    lanes: Lanes
    event: type[_Event]
    device, device_index = torch.device("cuda", 0), 0
    cuda_stream = stream_id = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: _Stream) -> None:
        self.lanes.wait(self.lanes.number(self), self.lanes.state(self.lanes.number(other)))

    def wait_event(self, event: _Event) -> None:
        event.wait(self)

    def record_event(self, event: _Event | None = None) -> _Event:
        return (event or self.event()).record(self)

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return False

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def followed_streams() -> Iterator[Lanes]:
    """Within the context CUDA streams and events are followed; yields their lanes. Inside `gpu_machine.machine_with`,
    whose one stream it replaces."""
    current: list[Any] = []
    lanes = Lanes(lambda: current[-1])
    event: Any = type("Event", (_Event,), {"lanes": lanes})
    stream: Any = type("Stream", (_Stream,), {"lanes": lanes, "event": event})
    main = stream()
    current.append(main)
    lanes.number(main)

    @contextlib.contextmanager
    def within(chosen: Any = None) -> Iterator[None]:
        current.append(chosen or current[-1])
        try:
            yield
        finally:
            current.pop()

    answers: dict[str, Any] = {
        "Stream": stream, "Event": event, "stream": within, "current_stream": lambda *_: current[-1],
        "default_stream": lambda *_: main,
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for owner in (torch.cuda, torch.accelerator):
            for name, answer in answers.items():
                if hasattr(owner, name):
                    stack.enter_context(replaced(owner, name, answer))
        stack.enter_context(followed_sends(lanes))
        stack.enter_context(_awaited_parts(lanes))
        yield lanes


# torch's modules that know the function by which DTensors are divided otherwise.
_WHO_DIVIDE = ("_redistribute", "_api", "_dispatch")


@contextlib.contextmanager
def _awaited_parts(lanes: Lanes) -> Iterator[None]:
    """Within the context who divides tensors otherwise waits for the collectives of it at once, as DTensor does unless
    it is asked not to: the sums of what layers of tensor parallel give back in the backward hide behind nothing."""
    modules: list[Any] = [importlib.import_module(f"torch.distributed.tensor.{name}") for name in _WHO_DIVIDE]
    own = modules[0].redistribute_local_tensor

    def run(*args: Any, async_op: bool = False, **options: Any) -> Any:
        with contextlib.nullcontext() if async_op else lanes.awaiting():
            return own(*args, async_op=async_op, **options)

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(replaced(module, own.__name__, run))
        yield


def _all_reduce(tensor: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """What torch makes of an all-reduce into another tensor: a copy, in which it sums."""
    copied = tensor.clone(memory_format=torch.contiguous_format)
    summed: torch.Tensor = torch.ops._c10d_functional.all_reduce_.default(copied, reduce_op, group_name)
    return summed


COMPOSED[torch.ops._c10d_functional.all_reduce.default] = _all_reduce


class _Sent:
    """What a pipeline's schedule waits for."""

    def __init__(self, work: Any, lanes: Lanes, state: dict[int, int]) -> None:
        self._work, self._lanes, self._state = work, lanes, state

    def wait(self) -> Any:
        self._lanes.wait(self._lanes.current, self._state)
        return self._work.wait()


@contextlib.contextmanager
def followed_sends(lanes: Lanes) -> Iterator[None]:
    """Within the context lanes know what a pipeline's schedule sends and receives together, and when it waits for
    it."""
    batch, post = dist.batch_isend_irecv, schedules._batch_p2p

    def batched(ops: Any) -> Any:
        with lanes.batch():
            return batch(ops)

    def posted(*args: Any, **kwargs: Any) -> list[Any]:
        with lanes.sending() as state:
            works = post(*args, **kwargs)
        return [_Sent(work, lanes, dict(state)) for work in works]

    with replaced(dist, "batch_isend_irecv", batched), replaced(schedules, "_batch_p2p", posted):
        yield


@contextlib.contextmanager
def known_shapes() -> Iterator[None]:
    """Within the context a pipeline's stages take the shapes that they are given, as they do once they have asked each
    other; a process group of ranks that are not there answers nothing."""
    owner: Any = schedules._PipelineSchedule
    name = "_warmup_p2p"  # by torch's version

    def known(_schedule: Any, stages: Any, *_: Any) -> None:
        from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]

        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with replaced(owner, name, known) if hasattr(owner, name) else contextlib.nullcontext():
        yield


class _Chunks:
    """What FSDP's `_chunk_with_empty` returns, each part made when it is asked for."""

    def __init__(self, tensor: torch.Tensor, count: int, dim: int) -> None:
        self._tensor, self._dim, self._size = tensor, dim, -(-tensor.size(dim) // count)

    def __getitem__(self, number: int) -> torch.Tensor:
        start, whole = number * self._size, self._tensor.size(self._dim)
        if start >= whole:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, whole - start))


@contextlib.contextmanager
def parts_of_one_rank() -> Iterator[None]:
    """Within the context `fully_shard` does not make all ranks' parts of each parameter to take one of them: on fake
    tensors those of 1,024 ranks take three times as long as the rest of a trace."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with replaced(_fsdp_param, "_chunk_with_empty", _Chunks):
        yield


@contextlib.contextmanager
def dividing_modules() -> Iterator[set[str]]:
    """Yields what will hold the last parts of the names of the modules that run within the context on parameters that
    DTensor divides: each of their calls goes through its Python."""
    found: set[str] = set()

    def left(module: torch.nn.Module, _args: Any, _result: Any) -> None:
        # as they are within the forward: what `fully_shard` divides is whole there
        if any(isinstance(parameter, DTensor) for parameter in module._parameters.values()):
            recorders = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)]
            found.update(recorder.modules.names[module].rpartition(".")[2] for recorder in recorders)

    with torch.nn.modules.module.register_module_forward_hook(left):
        yield found


@contextlib.contextmanager
def reduced_by_layer() -> Iterator[None]:
    """Within the context what a pipeline's schedule reduces after its last micro-batch belongs to the module whose
    gradients these are: `fully_shard` is then called by no module and no node of a backward."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    owner: Any = FSDPParamGroup
    reduce = owner.post_backward

    def reduced(group: Any, *args: Any) -> Any:
        if torch._C._current_autograd_node() is not None:
            return reduce(group, *args)
        with contextlib.ExitStack() as stack:
            for mode in _get_current_dispatch_mode_stack():
                if isinstance(mode, Recorder):
                    stack.callback(mode.leave)
                    stack.enter_context(mode.modules.inside(group.modules[0]))
            return reduce(group, *args)

    with replaced(owner, "post_backward", reduced):
        yield


@contextlib.contextmanager
def real_streams() -> Iterator[Lanes]:
    """As `followed_streams`, of the CUDA streams and events of a real GPU, which go on working."""
    record, wait = torch.cuda.Event.record, torch.cuda.Event.wait
    lanes = Lanes(lambda: torch.cuda.current_stream().cuda_stream)
    lanes.number(torch.cuda.default_stream().cuda_stream)

    def lane_of(stream: Any) -> int:
        return lanes.current if stream is None else lanes.number(stream.cuda_stream)

    def recorded(event: Any, stream: Any = None) -> Any:
        event.flopcast_state = lanes.state(lane_of(stream))
        return record(event, stream)

    def waited(event: Any, stream: Any = None) -> Any:
        lanes.wait(lane_of(stream), getattr(event, "flopcast_state", {}))
        return wait(event, stream)

    with (
        replaced(torch.cuda.Event, "record", recorded),
        replaced(torch.cuda.Event, "wait", waited),
        followed_sends(lanes),
    ):
        yield lanes
