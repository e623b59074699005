"""flopcast: what a training step costs on a GPU, before you rent it.

    import flopcast
    flopcast.forecast(module, batch, gpu="nvidia-h200")          # a torch module and what it is called with
    flopcast.forecast("package.module:factory")                  # a function that returns both, by name
    flopcast.forecast(step)                                      # a function that trains one step
    flopcast.forecast(module, batch, gpus=["H200", "L4"])        # several GPUs, as a table
    flopcast.largest_batch(module, batch, gpu="L4")              # the samples that fit
    flopcast.collective("all_reduce", 2**30, 8, "H200")          # seconds of a collective, with an interval

They are imported when they are first asked for: importing flopcast loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopcast.roofline.api import collective, forecast, largest_batch

__all__ = ["__version__", "collective", "forecast", "largest_batch"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("collective", "forecast", "largest_batch"):
        from flopcast.roofline import api

        return getattr(api, name)
    raise AttributeError(f"module 'flopcast' has no attribute {name!r}")
