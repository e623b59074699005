"""flopcast: what a training step costs on a GPU, before you rent it.

    import flopcast
    flopcast.forecast(module, batch, gpu="nvidia-h200")          # a torch module and what it is called with
    flopcast.forecast("package.module:factory")                  # a function that returns both, by name
    flopcast.forecast(step)                                      # a function that trains one step
    flopcast.forecast(module, batch, gpus=["H200", "L4"])        # several GPUs, as a table
    flopcast.largest_batch(module, batch, gpu="L4")              # the samples that fit
    flopcast.patch(model, gpu="nvidia-h200")                     # a Qwen3 onto the kernels that are fastest there
    flopcast.collective("all_reduce", 2**30, 8, "H200")          # seconds of a collective, with an interval

They are imported when they are first asked for: importing flopcast loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from flopcast.roofline.api import AnyGpu, collective, forecast, largest_batch

__all__ = ["__version__", "collective", "forecast", "largest_batch", "patch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("collective", "forecast", "largest_batch"):
        from flopcast.roofline import api

        return getattr(api, name)
    raise AttributeError(f"module 'flopcast' has no attribute {name!r}")


def patch(
    model: nn.Module,
    gpu: AnyGpu = "nvidia-h200",
    *,
    matmul: str = "best",
    attention: str = "triton",
    batch: int = 0,
    seq: int = 0,
) -> None:
    """Makes a transformers Qwen3 run on flopcast's Triton kernels, until `flopcast.kernels.patch.unpatch(model)`.

    As `flopcast.kernels.patch.patch`, with the profile of `gpu` to choose by. `matmul`: with "best" every product runs
    on the backend that is faster there, as `flopcast predict --matmul best` takes it to; with "measured" both are timed
    on this very GPU when a shape first comes up (25 ms, and the compiler's time), and the profile chooses only
    where that cannot be, while a CUDA graph is captured or memory is short; "torch" and "triton" are all of one.
    `attention`: "triton", "sdpa", or "best", the faster one for steps of `batch` sequences of `seq` tokens. Raises
    UsageError for an unknown GPU and for the best attention of no sizes, else what `patch` raises.
    """
    from flopcast.errors import UsageError
    from flopcast.kernels import patch as kernels
    from flopcast.kernels.shapes import Attention
    from flopcast.microbench.timing.faster_product import measured_choice
    from flopcast.roofline.gpu.library import fastest
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.gpu.profile.profile import Profile

    profile = gpu if isinstance(gpu, Profile) else find_profile(str(gpu))
    if attention == fastest.BEST:
        if batch < 1 or seq < 1:
            raise UsageError(f"attention 'best' is chosen for batch x seq, which are {batch} x {seq}: give both")
        config: Any = model.config
        shape = Attention(
            batch=batch, heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, seq=seq,
            head_dim=config.head_dim,
        )  # fmt: skip
        attention = "triton" if fastest.attention_choice(shape, profile) == "triton" else "sdpa"
    by_profile = fastest.product_choice(profile)
    choices = {fastest.BEST: by_profile, "measured": measured_choice(by_profile)}
    kernels.patch(model, attention=attention, matmul=choices.get(matmul, matmul))
