"""A small profile, small models, and their op streams, each traced once a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flopcast.roofline.base.numbers import Number
from flopcast.roofline.gpu.profile.host import HostCosts
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.library import code
from flopcast.roofline.stream.library.stored import stream_key
from flopcast.roofline.stream.library.streams import get_stream, trace_now
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, Stream
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode
from flopcast.roofline.stream.tracer.compiler.side_by_side import compilers

TINY = make_config(width=64, depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512)

HOST = HostCosts(
    name="a host",
    forward={"launch": 1.1e-5, "view": 4e-6, "fixed": 8e-4},
    backward={"launch": 1.0e-5, "view": 4e-6, "fixed": 7e-4},
    optimizer={"launch": 6e-6, "per_tensor": 6e-7, "host_op": 6e-7, "fixed": 3e-4},
    step_fixed=1e-4,
    sigma=0.1,
    basis="measured",
)


def exact(value: float) -> Number:
    return Number(value, value, value, "measured", "a test")


@pytest.fixture(scope="session")
def profile() -> Profile:
    """A part like an H200 with nothing measured but its ceilings: every kernel costs a floor, bytes or FLOPs."""
    return Profile(
        gpu="test-gpu",
        basis="measured",
        device={
            "type": "cuda", "name": "Test", "sm_count": 132, "memory_bytes": 80 * 10**9, "l2_bytes": 50 * 1024**2,
            "capability": [9, 0],
        },
        peaks={"bf16": exact(9e14), "fp16": exact(9e14), "tf32": exact(4.5e14), "fp32": exact(6e13)},
        ceilings={
            "hbm_copy": exact(4e12), "kernel_floor": exact(1.5e-6), "kernel_gap": exact(1e-6),
            "queue_depth": exact(1024), "sync": exact(8e-6),
        },
        surfaces={},
        host=HOST,
        stack={"torch": "2.11.0"},
        provenance={"machine": "0"},
        aliases={"sdpa": "sdpa-cudnn"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny() -> dict[str, Any]:
    """A Qwen3 of width 64 and 3 layers, 0.1 M parameters."""
    return dict(TINY)


Tracing = Callable[..., Stream]


@pytest.fixture(scope="session")
def traced() -> Tracing:
    """traced(config, batch=..., folded=True): the stream as users get it, or (False) traced at its own depth."""
    known: dict[tuple[str, bool], Stream] = {}

    def get(config: Mapping[str, Any], folded: bool = True, **run: Any) -> Stream:
        options = Traced(**{"batch": 2, "seq": 32, **run})
        is_folded = folded or config["num_hidden_layers"] == FOLDED_DEPTH
        key = stream_key(config, options), is_folded
        if key not in known:
            known[key] = (get_stream if is_folded else trace_now)(config, options)
        return known[key]

    return get


@pytest.fixture(scope="session")
def golden(load_module: Callable[[Path], ModuleType]) -> ModuleType:
    """tests/roofline/golden.py."""
    return load_module(Path(__file__).with_name("golden.py"))


@pytest.fixture(scope="module")
def _folder_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache_of_the_module(_folder_of_the_module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test of the module traces, the others find."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(_folder_of_the_module))


@pytest.fixture(scope="session")
def compiled() -> Iterator[Callable[[Asked], Future[OutputCode]]]:
    """Has steps compiled for an H200 one after the other, in one process for all files: starting one takes ten
    seconds."""
    with compilers({"capability": [9, 0], "sm_count": 132}, Asked.cudnn, 1) as compiled:
        yield compiled


@pytest.fixture
def compiled_in_one_process(compiled: Callable[[Asked], Future[OutputCode]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of compiled steps, which are of an H200, are made of what that process compiles."""

    @contextmanager
    def compiling(asked: Asked) -> Iterator[Callable[[], OutputCode]]:
        yield compiled(asked).result

    monkeypatch.setattr(code, "compiling", compiling)
