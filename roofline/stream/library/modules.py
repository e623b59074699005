"""The op streams of a user's module or step function, traced when they are asked for."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Call
from flopcast.microbench.recipe.layout import OWN
from flopcast.roofline.stream.library.streams import has_bucket_each
from flopcast.roofline.stream.lowering.classes import PRODUCTS, op_class
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import lower
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import NotDerivable, Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES, to_batch
from flopcast.roofline.stream.ops.to_buckets import BUCKET_EACH, to_buckets

if TYPE_CHECKING:
    import torch

    from flopcast.roofline.stream.library.code import Codes


def module_stream(
    source: Any,
    run: Run,
    device: str,
    *,
    batch: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    sizes: Mapping[str, int] | None = None,
    gpu: Mapping[str, Any] | None = None,
    codes: Codes | None = None,
) -> Stream:
    """Returns the op stream of one step of `source` on `device`, as `Traced` names it. `source` and `gpu` are as
    `trace_module` takes them.

    A factory chooses its own batch and sequence length, except for the `sizes` given. A step that calls torch.compile
    by itself is forecast as it asks for, of the GPU that is given. `codes`: what the caller
    keeps of the same source's compiled steps. Raises UsageError, for a step
    that is compiled also where `source` is not the name of a factory.
    """
    sizes = sizes or {}
    if run.mode != "eager":
        return _compiled(source, run, device, loss_fn=loss_fn, sizes=sizes, gpu=gpu, codes=codes)
    try:
        return _eager(source, run, device, batch=batch, loss_fn=loss_fn, sizes=sizes, gpu=gpu)
    except UsageError as fault:
        is_known = isinstance(source, str) and loss_fn is None and gpu is not None and not run.is_parallel
        if not (is_known and _compiles_itself(fault)):
            raise
        return _own(source, run, sizes, gpu or {}, codes)


def _eager(
    source: Any, run: Run, device: str, *, batch: Any, loss_fn: Callable[[Any], torch.Tensor] | None,
    sizes: Mapping[str, int], gpu: Mapping[str, Any] | None,
) -> Stream:  # fmt: skip
    from flopcast.roofline.stream.tracer.trace import trace_module

    if run.phase != "train":
        raise UsageError(
            f"phase {run.phase} of a module: give a function that calls it without a backward, and leave phase out; or "
            "name a config"
        )
    for name in ("finetune", "base_dtype"):
        if (value := getattr(run, name)) != getattr(Run, name):
            raise UsageError(
                f"{name} {value} of a module: its factory makes the model, in its dtype and with what it freezes or "
                f"adapts; leave {name} out, or name a config"
            )
    options: dict[str, Any] = {"batch": batch, "loss_fn": loss_fn, "sizes": sizes, "gpu": gpu}
    traced = replace(run.traced_on(device), attention=Traced.attention)  # a module calls its own
    stream = _of_rank(source, traced, options) if run.is_parallel else trace_module(source, traced=traced, **options)
    if stream.meta["batch"] < 1 or stream.meta["seq"] < 1:
        raise UsageError(f"{stream.meta['module']}: the batch is empty: valid is one sample at least")
    return stream


def _compiles_itself(fault: UsageError) -> bool:
    """Whether a trace was refused because the step calls torch.compile."""
    from flopcast.roofline.stream.tracer.unmodelled import NotModelled, Topic

    return isinstance(fault.__cause__, NotModelled) and fault.__cause__.finding.topic is Topic.COMPILED


def _own(source: str, run: Run, sizes: Mapping[str, int], gpu: Mapping[str, Any], codes: Codes | None) -> Stream:
    """The stream of a step that compiles itself, in the mode that it asks torch for."""
    from flopcast.roofline.stream.library.compiled import compiled_own_now

    compiled = replace(run, mode="compile")
    compiled.check()
    return compiled_own_now(source, compiled.traced_on(compiled.device_of(gpu)), sizes, known=codes)


def _of_rank(source: Any, traced: Traced, options: Mapping[str, Any]) -> Stream:
    """The stream of a module's step on several GPUs, of the first rank."""
    from flopcast.roofline.stream.tracer.parallel.trace import trace_module_rank

    each = BUCKET_EACH if has_bucket_each(traced) else None
    found = trace_module_rank(source, traced, bucket_mib=each, **options)
    return found if each is None else to_buckets(found)


def _compiled(
    source: Any, run: Run, device: str, *, loss_fn: Callable[[Any], torch.Tensor] | None, sizes: Mapping[str, int],
    gpu: Mapping[str, Any] | None, codes: Codes | None,
) -> Stream:  # fmt: skip
    from flopcast.roofline.stream.library.compiled import as_eager, compiled_module_now, compiled_module_rank_now

    if not isinstance(source, str) or loss_fn is not None:
        raise UsageError(
            f"mode {run.mode!r} of an object: a step is compiled in a process of its own, which makes the module anew; "
            "give the name of a factory, 'package.module:factory' or 'path/file.py:factory'"
        )
    traced = run.traced_on(device)
    if run.is_parallel:
        return compiled_module_rank_now(source, traced, sizes)

    def eager() -> Stream:
        try:
            return _eager(
                source, replace(run, mode="eager"), as_eager(traced).device, batch=None, loss_fn=None, sizes=sizes,
                gpu=gpu,
            )  # fmt: skip
        except UsageError as fault:
            if not _compiles_itself(fault):
                raise
            raise UsageError(
                f"mode {run.mode} of {source}, which calls torch.compile by itself: it is forecast in the mode that it "
                "asks for; leave mode out"
            ) from fault

    return compiled_module_now(source, traced, sizes, eager, known=codes)


FEW = 3  # batches that are traced each: deriving more takes two traces, and one to check


@dataclass(frozen=True, eq=False)
class Module:
    """A user's module, factory or step function (`source`, `batch` and `loss_fn`: as `trace_module` takes them), each
    step of which is traced once. `sizes`: what its factory is given, by the names of its parameters."""

    source: Any
    batch: Any = None
    loss_fn: Callable[[Any], torch.Tensor] | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    _traced: dict[tuple[Any, ...], Stream] = field(default_factory=dict, repr=False)
    _codes: Codes = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.source if isinstance(self.source, str) else getattr(self.source, "__qualname__", "the module")

    def resized(self, **sizes: int) -> Module:
        """Returns the same with other sizes of its factory. Raises UsageError for one that it has no parameter for."""
        if isinstance(self.source, str):
            check_sizes(self.source, sizes)
        return replace(self, sizes={**self.sizes, **sizes})

    def takes(self, name: str) -> bool:
        """Whether the factory has a parameter of this name. Raises UsageError for a factory that cannot be imported."""
        return name in _parameters(self.source)

    def size(self, name: str) -> int | None:
        """Returns what the factory is given by this name, or its own default; None where that is no whole number."""
        found = self.sizes.get(name, _parameters(self.source)[name].default)
        return found if isinstance(found, int) else None

    def stream(self, run: Run, device: str, gpu: Mapping[str, Any] | None = None) -> Stream:
        """Returns the op stream of a step on a device, as `Traced` names it, at the factory's own batch. Raises
        UsageError.

        `gpu`: the device of the profile where the step is for one GPU alone."""
        if gpu is None:
            return self._trace(run, device, self.sizes)
        return module_stream(
            self.source, run, device, batch=self.batch, loss_fn=self.loss_fn, sizes=self.sizes, gpu=gpu,
            codes=self._codes,
        )  # fmt: skip

    def at_batch(self, run: Run, device: str, batch: int) -> Stream:
        """Returns the op stream at a batch, derived from two traced ones where possible; for many batches of a module.

        Raises UsageError, also where the factory takes no batch or makes another one."""
        if batch in (1, *BATCHES) or run.mode != "eager":
            return self._trace_batch(run, device, batch)
        low, high = (self._trace_batch(run, device, size) for size in BATCHES)
        with suppress(NotDerivable):
            return to_batch(low, high, batch)
        return self._trace_batch(run, device, batch)

    def at_batches(self, run: Run, device: str, batches: Collection[int]) -> Callable[[int], Stream]:
        """Returns a function as `at_batch` for many batches at once. They are derived only where the stream derived of
        the largest is what is traced of it: a module may do something else from some batch on."""
        largest = max(batches)
        traced = partial(self._trace_batch, run, device)
        if len(set(batches)) <= FEW or run.mode != "eager" or self.at_batch(run, device, largest) != traced(largest):
            return traced
        return partial(self.at_batch, run, device)

    def _trace_batch(self, run: Run, device: str, batch: int) -> Stream:
        # the run says this batch too: all batches of a sweep are derived from the same traces
        stream = self._trace(replace(run, batch=batch), device, {**self.sizes, "batch": batch})
        if stream.meta["unit"] == "steps":
            raise UsageError(
                f"{self.name}: the batch of a step function is not known, and cannot be varied; give a factory that "
                "returns (module, batch)"
            )
        if stream.meta["batch"] != batch:
            raise UsageError(
                f"{self.name}: asked for a batch of {batch} the factory makes one of {stream.meta['batch']}; give it a "
                "parameter `batch` that is the number of samples"
            )
        return stream

    def _trace(self, run: Run, device: str, sizes: Mapping[str, int]) -> Stream:
        key = (run.traced_on(device), *sorted(sizes.items()))
        if key not in self._traced:
            self._traced[key] = module_stream(
                self.source, run, device, batch=self.batch, loss_fn=self.loss_fn, sizes=sizes,
                codes=self._codes,
            )  # fmt: skip
        return self._traced[key]


def check_sizes(module: str, sizes: Mapping[str, int]) -> None:
    """Raises UsageError for a size that was given and that the factory has no parameter for."""
    for name, value in sizes.items():
        if name not in _parameters(module):
            raise UsageError(
                f"--{name} {value} with --module {module}: the factory has no parameter {name!r}; leave the option "
                "out, or give it one"
            )


def _parameters(source: Any) -> Mapping[str, inspect.Parameter]:
    """Returns a factory's parameters by name. Raises UsageError for a name that cannot be imported."""
    from flopcast.roofline.stream.tracer.trace import load_factory

    factory = load_factory(source) if isinstance(source, str) else source
    with suppress(TypeError, ValueError):
        return inspect.signature(factory).parameters
    # a built-in has no signature; tracing it gives the better message
    return {name: inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("batch", "seq")}


def run_of_stream(stream: Stream, run: Run) -> Run:
    """Returns `run` with what was traced: the batch and the sequence length, and the mode of a step that compiles
    itself; of a step function also the optimizer's class and, as the precision, the dtype of the products that most
    FLOPs are in ("" without products)."""
    mode = stream.meta.get("mode", run.mode)
    traced = replace(run, batch=stream.meta["batch"], seq=stream.meta["seq"], mode=mode)
    if stream.meta.get("unit") != "steps":
        return traced
    if run.is_parallel:  # a step is one whatever the ranks
        traced = replace(traced, parallel=f"{OWN}=1x{run.layout.world}")
    flops: Counter[str] = Counter()
    for op in stream.ops:
        work = lower(stream, op)
        if work is not None and op_class(op.name) in PRODUCTS:
            shape = work[0]
            flops[shape.inputs[0].dtype if isinstance(shape, Call) else shape.dtype] += describe(*work).flops
    ((dtype, _),) = flops.most_common(1) or [("", 0)]
    return replace(traced, precision=dtype, optimizer=stream.meta["optimizer"])
