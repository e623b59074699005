"""What runs in earnest while a step is traced: batches of a DataLoader, and imports.

A forecast is of a step whose next batch is ready. What loads it - worker processes, samplers, collation - runs as it
would without a tracer, in this process, and is not recorded. A library that a factory imports keeps what it makes then,
which has to be real: fake tensors are of one trace.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import sys
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
def working_apart(
    inside: Callable[[], AbstractContextManager[None]], on_host: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """Within the context loaders, in one process, and imports work without torch's modes: within what `inside` returns,
    in which tensors say where they really are. `on_host` takes the tensors of batches."""
    begin, advance, load_module = DataLoader.__iter__, _BaseDataLoaderIter.__next__, builtins.__import__

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

    importing = False

    def imported(name: str, scope: Any = None, local: Any = None, names: Any = (), level: int = 0) -> Any:
        nonlocal importing
        if importing or level or name in sys.modules:
            return load_module(name, scope, local, names, level)
        importing = True
        try:
            with _apart(), inside():
                return load_module(name, scope, local, names, level)
        finally:
            importing = False

    with (
        replaced(DataLoader, "__iter__", iterate),
        replaced(_BaseDataLoaderIter, "__next__", load),
        replaced(builtins, "__import__", imported),
    ):
        yield


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
