"""Batches of a DataLoader: loaded in earnest, apart from the step, in host memory.

A forecast is of a step whose next batch is ready. What loads it - worker processes, samplers, collation - runs as it
would without a tracer, in this process, and is not recorded.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flopcast.roofline.stream.tracer.import_stubs import replaced
from flopcast.roofline.stream.tracer.recorder import flatten


@contextlib.contextmanager
def loading_apart(
    inside: Callable[[], AbstractContextManager[None]], on_host: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """Within the context loaders work without torch's modes, and in one process: within what `inside` returns, in which
    tensors say where they really are. `on_host` takes the tensors of their batches."""
    begin, advance = DataLoader.__iter__, _BaseDataLoaderIter.__next__

    def iterate(loader: Any) -> Any:
        alone = copy.copy(loader)
        single = {"num_workers": 0, "timeout": 0, "pin_memory": False, "persistent_workers": False}
        vars(alone).update({name: value for name, value in single.items() if name in vars(alone)})
        vars(alone)["_DataLoader__multiprocessing_context"] = None
        with _apart(), inside():
            return begin(alone)

    def load(iterator: Any) -> Any:
        with _apart(), inside():
            batch = advance(iterator)
        for item in flatten(batch):
            if isinstance(item, torch.Tensor):
                on_host(item)
        return batch

    with replaced(DataLoader, "__iter__", iterate), replaced(_BaseDataLoaderIter, "__next__", load):
        yield


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
