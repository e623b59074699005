"""The stand-in kernel module, loaded by path: test folders are no packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

STANDIN = Path(__file__).with_name("standin.py")


@pytest.fixture(scope="session")
def standin(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    return load_module(STANDIN)
