"""flopcast: what a training step costs on a GPU, before you rent it.

    import flopcast
    flopcast.forecast(module, batch, gpu="nvidia-h200")          # a torch module and what it is called with
    flopcast.forecast("package.module:factory")                  # a function that returns both, by name
    flopcast.forecast(step)                                      # a function that trains one step

`forecast` is imported when it is first asked for: importing flopcast loads nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flopcast.roofline.api import forecast

__all__ = ["__version__", "forecast"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "forecast":
        from flopcast.roofline.api import forecast

        return forecast
    raise AttributeError(f"module 'flopcast' has no attribute {name!r}")
