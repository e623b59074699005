"""The op stream of a user's module or step function, traced when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream

if TYPE_CHECKING:
    import torch


def module_stream(
    source: Any,
    run: Run,
    device: str,
    *,
    batch: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Stream:
    """Returns the op stream of one step of `source` on `device`, "cuda" or "cpu". `source`: as `trace_module` takes it.

    A factory chooses its own batch and sequence length, except for the `sizes` given. Raises UsageError.
    """
    from flopcast.roofline.stream.tracer.trace import trace_module

    stream = trace_module(
        source, batch, loss_fn=loss_fn, sizes=sizes, precision=run.precision, optimizer=run.optimizer,
        device=device, accumulate=run.accumulate, checkpoint=run.checkpoint,
    )  # fmt: skip
    if stream.meta["batch"] < 1 or stream.meta["seq"] < 1:
        raise UsageError(f"{stream.meta['module']}: the batch is empty: valid is one sample at least")
    return stream


def check_sizes(module: str, sizes: Mapping[str, int]) -> None:
    """Raises UsageError for a size that was given and that the factory has no parameter for."""
    import inspect

    from flopcast.roofline.stream.tracer.trace import load_factory

    factory = load_factory(module)
    with suppress(TypeError, ValueError):  # a built-in has no signature; tracing it gives the better message
        parameters = inspect.signature(factory).parameters
        for name, value in sizes.items():
            if name not in parameters:
                raise UsageError(
                    f"--{name} {value} with --module {module}: the factory has no parameter {name!r}; leave the option "
                    "out, or give it one"
                )


def run_of_stream(stream: Stream, run: Run) -> Run:
    """Returns `run` with the batch and the sequence length that were traced."""
    return replace(run, batch=stream.meta["batch"], seq=stream.meta["seq"])
