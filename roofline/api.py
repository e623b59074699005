"""Forecasts a training step of any torch module or step function, for Python callers and `--module`.

torch is imported in order to trace.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopcast.roofline.gpu.catalogue.prices import Price
from flopcast.roofline.gpu.library.profiles import find_host, find_profile
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    import torch
from flopcast.roofline.stream.library.modules import module_stream, run_of_stream


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
    """Forecasts what one training step costs on `gpu`, without running it there or here.

    `step_fn_or_module` is a torch module, called with `batch` (a tensor, a tuple or a dict of tensors); the name
    "package.module:factory" of a function that returns (module, batch[, loss_fn]) or a step function, or that
    function; or a step function, which runs forward, backward and optimizer by itself. The loss of a module is
    `loss_fn(output)`, `output.loss`, a scalar output, or the mean of the output. `gpu` is a known GPU, a profile file
    or a Profile; `host` is a known profile whose host feeds the GPU, or "none".
    Throughput counts the token ids in the batch, or samples where it has none, or steps for a step function.
    Seconds, bytes and FLOPs are as in `Forecast`. Raises UsageError, with the reason, for what cannot be traced.
    """
    run = Run(precision=precision, optimizer=optimizer, accumulate=accumulate, checkpoint=checkpoint,
              matmul=matmul, attention=attention)  # fmt: skip
    run.check()
    profile = gpu if isinstance(gpu, Profile) else find_profile(str(gpu))
    fed_by = find_host(host) if isinstance(host, str) else host
    stream = module_stream(step_fn_or_module, run, profile.device["type"], batch=batch, loss_fn=loss_fn)
    return PricedStep(stream, run_of_stream(stream, run), profile, fed_by, price).forecast()
