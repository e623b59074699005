"""The stand-in kernel module, loaded by path: test folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

STANDIN = Path(__file__).with_name("standin.py")


@pytest.fixture(scope="session")
def standin() -> ModuleType:
    spec = importlib.util.spec_from_file_location("microbench_standin", STANDIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
