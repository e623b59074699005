"""Forecasts a training step of any torch module or step function, or a collective, for Python callers.

torch is imported in order to trace.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.gpu.catalogue.prices import Price, find_price
from flopcast.roofline.gpu.library.profiles import find_host, find_profile
from flopcast.roofline.gpu.links.choice import Kind
from flopcast.roofline.gpu.links.fitted import CollectiveTime
from flopcast.roofline.gpu.links.library import find_interconnect
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.forecast import Forecast, Forecasts
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.step.questions import largest_batch as search
from flopcast.roofline.stream.library.modules import Module, run_of_stream
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    import torch

AnyGpu = str | Path | Profile


class Options(TypedDict, total=False):
    """The further arguments of `forecast`."""

    loss_fn: Callable[[Any], torch.Tensor] | None
    precision: str
    optimizer: str
    clip: float
    accumulate: int
    checkpoint: str
    parallel: str
    nodes: int
    link: str
    matmul: str
    attention: str
    host: str | HostCosts | None
    price: Price | float | None
    provider: str | None
    on: date | str | None


@overload
def forecast(
    step_fn_or_module: Any, batch: Any = ..., gpu: AnyGpu = ..., *, gpus: None = ..., **options: Unpack[Options]
) -> Forecast: ...
@overload
def forecast(
    step_fn_or_module: Any, batch: Any = ..., *, gpus: Sequence[AnyGpu], **options: Unpack[Options]
) -> Forecasts: ...
def forecast(
    step_fn_or_module: Any,
    batch: Any = None,
    gpu: AnyGpu = "nvidia-h200",
    *,
    gpus: Sequence[AnyGpu] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    clip: float = 0.0,
    accumulate: int = 1,
    checkpoint: str = "none",
    matmul: str = "torch",
    attention: str = "sdpa",
    mode: str = "eager",
    parallel: str = ONE_GPU,
    nodes: int = 0,
    link: str = "auto",
    host: str | HostCosts | None = None,
    price: Price | float | None = None,
    provider: str | None = None,
    on: date | str | None = None,
) -> Forecast | Forecasts:
    """Forecasts what one training step costs on `gpu`, or on each of `gpus`, without running it there or here.

    `step_fn_or_module` is a torch module, called with `batch` (a tensor, a tuple or a dict of tensors); the name
    "package.module:factory" or "path/file.py:factory" of a function that returns (module, batch[, loss_fn]) or a step
    function, or that function; or a step function, which runs forward, backward and optimizer by itself. The loss of a
    module is `loss_fn(output)`, `output.loss`, a scalar output, or the mean of the output. `gpu` is a known GPU
    ("H200" will do), a profile file or a Profile; for `gpus` the step is traced once, and the result is a tuple of
    forecasts that prints as a table. `host` is a known profile whose host feeds the GPU, or "none". `price` is a Price,
    or USD per hour; by default each GPU has its newest in the shipped price book, of `provider` (default: RunPod Secure
    Cloud) up to the day `on`.
    `parallel` lays the step of a module or factory out over several GPUs of that kind, such as "ddp=8", "zero1=8",
    "zero2=8", "fsdp=8" or "hsdp=2x4"; the batch is that of one GPU. They lie evenly on `nodes` hosts (0: as few as hold
    8 each), and `link` joins those of a host, by default the GPU's usual one. Seconds and bytes are then one GPU's,
    tokens, FLOPs and dollars all GPUs'.
    `mode`: "eager", or for a factory by its name "compile" (torch.compile) and "compile-graphs" (its reduce-overhead).
    Throughput counts the token ids in the batch, or samples where it has none, or steps for a step function.
    Seconds, bytes and FLOPs are as in `Forecast`. Raises UsageError, with the reason, for what cannot be traced.
    """
    run = Run(precision=precision, optimizer=optimizer, accumulate=accumulate, checkpoint=checkpoint, clip=clip,
              matmul=matmul, attention=attention, mode=mode, parallel=parallel, nodes=nodes, link=link)  # fmt: skip
    run.check()
    fed_by = find_host(host) if isinstance(host, str) else host
    module = Module(step_fn_or_module, batch, loss_fn)

    def forecast_on(one: AnyGpu) -> Forecast:
        profile = _profile(one)
        priced = price if isinstance(price, Price) else find_price(profile.gpu, price, provider, on)
        stream = module.stream(run, run.device_of(profile.device), profile.device if gpus is None else None)
        return PricedStep(stream, run_of_stream(stream, run), profile, fed_by, priced).forecast()

    if gpus is None:
        return forecast_on(gpu)
    if price is not None:
        raise UsageError(f"price {price} of several GPUs: each has its own; leave price out, or give one gpu")
    return Forecasts(map(forecast_on, _several(gpus)))


def largest_batch(
    module_or_factory: Any,
    batch: Any = None,
    gpu: AnyGpu = "nvidia-h200",
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    clip: float = 0.0,
    accumulate: int = 1,
    checkpoint: str = "none",
    parallel: str = ONE_GPU,
) -> int:
    """Returns the samples (of token ids: sequences) of the largest micro-batch that fits into the memory of `gpu`; 0 if
    not even one does; with `parallel` into that of each of several.

    `module_or_factory` is a torch module with an example of its `batch`, of which the first dimension of every tensor
    is varied; or a factory with a parameter `batch`, or its name, as `forecast` takes them; so are the other arguments.
    Raises UsageError for what cannot be traced, for a factory that takes no batch, and where 2^20 samples would fit.
    """
    run = Run(precision=precision, optimizer=optimizer, accumulate=accumulate, checkpoint=checkpoint, clip=clip,
              parallel=parallel)  # fmt: skip
    source = module_or_factory
    if batch is not None:

        def source(batch: int) -> Any:
            made = module_or_factory, _resized(example, batch)
            return made if loss_fn is None else (*made, loss_fn)

        example = batch
    return search.largest_batch(Module(source, loss_fn=loss_fn), run, _profile(gpu))


def collective(
    kind: Kind,
    bytes: float,
    gpus: int,
    link: str | Path = "nvidia-h200",
    *,
    nodes: int = 1,
    network: str | None = None,
    dtype: str = "bf16",
    nvls: bool = True,
) -> CollectiveTime:
    """Forecasts how long a collective takes among `gpus` GPUs, evenly on `nodes` hosts: `seconds` on the GPUs, launch
    excluded, with a 90% interval from `low` to `high`.

    `kind` is all_reduce, all_gather, reduce_scatter, all_to_all, broadcast or send_recv; `bytes` the whole, as
    nccl-tests counts it: of all_gather what each GPU has afterwards. `link` is a link that was measured (its name or
    file), one of `flopcast gpus --links`, or a GPU, whose usual link is meant; `network` joins the hosts, an adapter
    per GPU. `nvls`: whether NVSwitch may add up. Raises UsageError for what is not known or cannot be.
    """
    return find_interconnect(str(link), network, nvls=nvls).time(kind, bytes, gpus, nodes, dtype)


def _profile(gpu: AnyGpu) -> Profile:
    return gpu if isinstance(gpu, Profile) else find_profile(str(gpu))


def _several(gpus: Sequence[AnyGpu]) -> Sequence[AnyGpu]:
    """Raises UsageError for a text in place of a list, and for an empty one."""
    if isinstance(gpus, str) or not gpus:
        raise UsageError(f'gpus is {gpus!r}: valid is a list of GPUs, as in ["H200", "L4"]')
    return gpus


def _resized(batch: Any, samples: int) -> Any:
    """Returns an example of a batch with another number of samples in every tensor's first dimension."""
    if isinstance(batch, Mapping):
        return {name: _resized(part, samples) for name, part in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_resized(part, samples) for part in batch)
    return batch.new_empty((samples, *batch.shape[1:])) if getattr(batch, "ndim", 0) else batch
