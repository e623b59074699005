"""Which GPUs a command is asked about: one by --gpu, or several by --gpus, and their prices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.price_book import gpu_names, price_book, tell_missing

if TYPE_CHECKING:
    from flopcast.roofline.cli.shared.options import PriceOptions
    from flopcast.roofline.gpu.catalogue.prices import Price
    from flopcast.roofline.step.questions.many_gpus import Gpu


def asked_gpus(gpu: str | None, gpus: str | None) -> list[Gpu]:
    """Returns the GPUs that --gpu or --gpus name, in their order. Raises UsageError, also for both or neither."""
    from flopcast.roofline.step.questions.many_gpus import gpu_of

    if gpu is not None and gpus is not None:
        raise UsageError(f"--gpu {gpu} with --gpus {gpus}: give all in --gpus")
    if gpus is not None:
        return [gpu_of(name) for name in gpu_names(gpus)]
    check_one(gpu)
    return [gpu_of(gpu or "")]


def check_one(gpu: str | None) -> str:
    """Returns the GPU of --gpu. Raises UsageError where there is none, or several."""
    if gpu is None:
        raise UsageError(
            "which GPU? give --gpu with one, such as H200, or --gpus with several; `flopcast gpus` lists them"
        )
    if "," in gpu and not gpu.endswith((".json", ".gz")):
        raise UsageError(f"--gpu {gpu!r} names several GPUs: give them as --gpus {gpu}")
    return gpu


def prices_of(gpus: list[Gpu], options: PriceOptions) -> Callable[[str], Price | None]:
    """Returns a function that returns the price of a GPU, as `price_book` finds it; None where there is none."""
    names = [one.gpu for one in gpus]
    book = price_book(options, names)
    tell_missing(names, book, options)
    return book.get
