"""The forecast of any module or step function, as Python and `--module` ask for it. torch is imported to trace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopcast.errors import UsageError
from flopcast.roofline.forecast import Forecast, Run, forecast_stream
from flopcast.roofline.lookup import find_host, find_profile
from flopcast.roofline.prices import Price
from flopcast.roofline.profile import HostCosts, Profile
from flopcast.roofline.stream import Stream

if TYPE_CHECKING:
    import torch


def forecast(
    step_fn_or_module: Any,
    batch: Any = None,
    gpu: str | Path | Profile = "nvidia-h200",
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    accumulate: int = 1,
    checkpoint: str = "none",
    matmul: str = "torch",
    attention: str = "sdpa",
    host: str | HostCosts | None = None,
    price: Price | None = None,
) -> Forecast:
    """What one training step costs on `gpu`, without running it there or here.

    `step_fn_or_module` is a torch module, called with `batch` (a tensor, a tuple or a dict of tensors); the name
    "package.module:factory" of a function that returns (module, batch[, loss_fn]) or a step function, or that
    function; or a step function, which runs forward, backward and optimizer by itself. Of a module the loss is
    `loss_fn(output)`, `output.loss`, a scalar output, or the mean of the output. `gpu` is a known GPU, a profile file
    or a Profile; `host` a known profile whose host feeds the GPU, or "none".
    Tokens are those of the ids in the batch, else samples; of a step function steps are counted.
    Seconds, bytes and FLOPs as in `Forecast`. Raises UsageError for what cannot be traced, with the reason.
    """
    run = Run(precision=precision, optimizer=optimizer, accumulate=accumulate, checkpoint=checkpoint,
              matmul=matmul, attention=attention)  # fmt: skip
    run.check()
    profile = gpu if isinstance(gpu, Profile) else find_profile(str(gpu))
    fed_by = find_host(host) if isinstance(host, str) else host
    stream = module_stream(step_fn_or_module, batch, run, profile, loss_fn=loss_fn)
    return forecast_stream(stream, run_of_stream(stream, run), profile, host=fed_by, price=price)


def module_stream(
    source: Any,
    batch: Any,
    run: Run,
    profile: Profile,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Stream:
    """The op stream of `source` on the device of `profile`. Raises UsageError."""
    from flopcast.roofline.trace import trace_module

    stream = trace_module(
        source, batch, loss_fn=loss_fn, sizes=sizes, precision=run.precision, optimizer=run.optimizer,
        device=profile.device["type"], accumulate=run.accumulate, checkpoint=run.checkpoint,
    )  # fmt: skip
    if stream.meta["batch"] < 1 or stream.meta["seq"] < 1:
        raise UsageError(f"{stream.meta['module']}: the batch is empty: valid is one sample at least")
    return stream


def check_sizes(module: str, sizes: Mapping[str, int]) -> None:
    """Raises UsageError for a size that was given and that the factory has no parameter for."""
    import inspect

    from flopcast.roofline.trace import load_factory

    factory = load_factory(module)
    with suppress(TypeError, ValueError):  # built in: tracing it says more
        parameters = inspect.signature(factory).parameters
        for name, value in sizes.items():
            if name not in parameters:
                raise UsageError(
                    f"--{name} {value} with --module {module}: the factory has no parameter {name!r}; leave the option "
                    "out, or give it one"
                )


def run_of_stream(stream: Stream, run: Run) -> Run:
    """`run` with the batch and the sequence length that were traced."""
    return replace(run, batch=stream.meta["batch"], seq=stream.meta["seq"])
