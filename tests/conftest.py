"""What every test runs under: few threads, no network, a cache of its own, GPU tests only on a GPU."""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from flopcast.roofline.gpu.profile.profile import Profile

# Read when torch or OpenBLAS are first imported. The tensors are small: more threads only contend, and the processes
# that run tests side by side share the cores: on two cores one thread each. They inherit what the process that starts
# them chose for itself alone: two threads each, which wait for one another on a busy core, take a training step's test
# eight times as long.
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
_CHOSEN = "FLOPCAST_TESTS_CHOSE_THREADS"  # here, not by the user
if os.environ.get("OMP_NUM_THREADS") in (None, os.environ.get(_CHOSEN)):
    os.environ["OMP_NUM_THREADS"] = os.environ[_CHOSEN] = str(max(1, min(2, (os.cpu_count() or 1) // WORKERS)))
os.environ["HF_HUB_OFFLINE"] = "1"  # a model comes from its config, never from the hub
os.environ["MPLBACKEND"] = "Agg"
# The command line's output is compared as text: same width everywhere, no colours (CI services force them).
os.environ["COLUMNS"] = "120"
os.environ["NO_COLOR"] = "1"
os.environ.pop("FORCE_COLOR", None)

# Rarer collections, as the command line has them: streams are millions of objects, and an eighth of the tests' time
# went into looking through them.
gc.set_threshold(50_000, 20, 100)

# Machines differ too much for deadlines; derandomised, so that a red run can be run again.
settings.register_profile("flopcast", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("flopcast")


@pytest.fixture(autouse=True, scope="session")
def _quick_bf16() -> None:
    from tests.quick_bf16 import quicken  # imports torch, which reads what is set above

    quicken()


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Streams traced by the tests stay out of the user's cache, and the user's out of the tests. The processes that run
    tests side by side share one, as a user's do."""
    base = tmp_path_factory.getbasetemp()
    os.environ["XDG_CACHE_HOME"] = str((base.parent if WORKERS > 1 else base) / "cache")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def load_module() -> Callable[[Path], ModuleType]:
    """A file as a module, by its path: folders of tests and of benchmarks are no packages."""

    @functools.cache
    def load(path: Path) -> ModuleType:
        name = "_".join(("loaded", path.parent.name, path.stem))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    return load


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Result(NamedTuple):
    """What one command left behind."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """stdout as the one strict JSON document (no NaN, no Infinity)."""
        return json.loads(self.out, parse_constant=_no_constant)


# Profiles that tests ask for by these names; none of them is ever in a test's own folder of profiles.
SHIPPED = {"nvidia-h200": "nvidia-h200", "H200": "nvidia-h200", "nvidia-l4": "nvidia-l4", "nvidia-b200": "nvidia-b200"}
_once = functools.cache(lambda find, name: find(name))


@pytest.fixture(scope="session")
def h200() -> Profile:
    """The shipped profile, the same as for commands: the rules of its widths, which take 5 s, are derived once."""
    from flopcast.roofline.gpu.library import profiles

    found: Profile = _once(profiles.find_profile, "nvidia-h200")
    return found


@pytest.fixture
def flopcast(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """flopcast("predict", "--gpu", ...) runs the command in this process, as `main` would.

    What ships is loaded once a run, which halves the time of these tests.
    """
    from flopcast.roofline.cli import app
    from flopcast.roofline.gpu.library import profiles

    find = profiles.find_profile
    monkeypatch.setattr(
        profiles, "find_profile", lambda name: _once(find, SHIPPED[name]) if name in SHIPPED else find(name)
    )

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["flopcast", *map(str, arguments)])
        capsys.readouterr()
        code: Any = 0
        try:
            app.main()
        except SystemExit as left:
            code = left.code or 0
        return Result(code, *capsys.readouterr())

    return run


# Of the process when all garbage was last collected: its blocks of memory.
_BLOCKS = [0]
_UNFREEZE = gc.unfreeze


def pytest_collection_finish() -> None:
    _BLOCKS[0] = sys.getallocatedblocks()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Collections within a test and its set-up look through what these made: measurements begin with one, and end with
    one, and each looked through the three million objects of torch and of earlier tests for a second and a half. The
    rest stays left out after a trace, which ends the like for itself.
    Garbage of earlier tests is collected between files, whenever half as much memory again is in use."""
    gc.freeze()
    gc.unfreeze = lambda: None
    try:
        return (yield)
    finally:
        gc.unfreeze = _UNFREEZE
        gc.unfreeze()
        if nextitem is not None and nextitem.path != item.path and sys.getallocatedblocks() > 1.5 * _BLOCKS[0]:
            gc.collect()
            _BLOCKS[0] = sys.getallocatedblocks()


def pytest_sessionfinish() -> None:
    """pytest and Python go through all that is left five times and once, only to let it go: 4 s of each process."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Files go out in this order, and the longest of all, of answers that are kept, came last but few: the other process
    # waited for it, half a minute.
    items.sort(key=lambda item: item.path.name != "test_golden_answers.py")
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
