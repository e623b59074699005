"""Many compiled steps at once: each model at one depth, and at the other where its launches are new."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.stream.library import ahead, code
from flopcast.roofline.stream.library.ahead import compile_ahead
from flopcast.roofline.stream.library.prefetch import prefetched
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import Config, depth_of, load_config
from flopcast.roofline.stream.model.run import Run, Traced
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

CONFIG = load_config("qwen3-0.6b")
H200 = "cuda 9.0 132"
TRACED = Run(batch=8, seq=1024, optimizer="adamw-fused", mode="compile").traced_on(H200)
RECORDED = {2: "qwen3-0.6b-l2", 3: "qwen3-0.6b-l3"}
REFUSED = 3333  # a vocabulary that the compiler refuses


@pytest.fixture
def compiled(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Asked]:
    """A pool that answers with recorded code, whatever the width; the list of what it compiled."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Asked] = []
    texts = {
        depth: gzip.decompress((root / f"reports/nvidia-h200/compiled-steps/{case}.code.gz").read_bytes()).decode()
        for depth, case in RECORDED.items()
    }

    def answer(one: Asked) -> OutputCode:
        asked.append(one)
        if (one.config or {})["vocab_size"] == REFUSED:
            raise UsageError("no")
        graphs = tuple(part for part in texts[depth_of(one.config or {})].split("# ---- graph ") if part)
        return OutputCode(graphs=graphs, calls=(0, 1), captured=1, breaks=(), waits=(), torch="2.11.0", triton="3.6.0")

    @contextmanager
    def compilers(gpu: Mapping[str, Any], cudnn: int, steps: int) -> Iterator[Callable[[Asked], Future[OutputCode]]]:
        def submit(one: Asked) -> Future[OutputCode]:
            future = Future[OutputCode]()
            try:
                future.set_result(answer(one))
            except UsageError as fault:
                future.set_exception(fault)
            return future

        yield submit

    @contextmanager
    def compiling(one: Asked) -> Iterator[Callable[[], OutputCode]]:
        yield lambda: answer(one)

    monkeypatch.setattr(ahead, "compilers", compilers)
    monkeypatch.setattr(code, "compiling", compiling)
    monkeypatch.setattr(
        OutputCode, "text", property(lambda own: "\n".join(f"# ---- graph {part}" for part in own.graphs))
    )
    return asked


def vocabularies(*sizes: int) -> list[tuple[Config, Traced]]:
    return [({**CONFIG, "vocab_size": size}, TRACED) for size in sizes]


def test_models_that_launch_alike_are_compiled_at_one_depth(compiled: list[Asked]) -> None:
    seen: list[tuple[int, int]] = []
    wanted = vocabularies(151_936, 4096, 8192)
    compile_ahead(wanted, lambda done, total: seen.append((done, total)))
    depths = [depth_of(one.config or {}) for one in compiled]
    assert depths.count(3) == 3
    assert 1 <= depths.count(2) == len(compiled) - 3  # one, unless others are done before it
    assert seen[-1] == (len(compiled), len(compiled))
    made = [get_stream(*one) for one in wanted]
    assert len(compiled) == len(depths)
    assert {(stream.depth, len(stream.meta["repeated"])) for stream in made} == {(28, 2)}
    compile_ahead([(config, replace(traced, optimizer="sgd")) for config, traced in wanted])
    assert len(compiled) == len(depths)


def test_steps_on_several_gpus_are_not_compiled_ahead(compiled: list[Asked]) -> None:
    """Nothing would take the code of one GPU for them."""
    wanted = [(config, replace(traced, parallel="fsdp=2")) for config, traced in vocabularies(4096, 8192, 16_384)]
    compile_ahead(wanted)
    assert compiled == []
    compile_ahead(vocabularies(4096, 8192, 16_384))
    assert not any(ahead.has_code(*one) for one in wanted)


def test_another_depth_than_that_of_like_launches_gives_the_same_stream(
    compiled: list[Asked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A model whose layers were found by another's, and by itself."""
    wanted = vocabularies(4096, 151_936)
    compile_ahead(wanted)
    found = get_stream(*wanted[1])
    own = [depth_of(one.config or {}) for one in compiled if (one.config or {})["vocab_size"] == 151_936]
    assert own in ([3], [3, 2])  # the second where the other model's layers were not found yet
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))
    assert get_stream(*wanted[1]) == found
    assert [depth_of(one.config or {}) for one in compiled[-2:]] == [2, 3]


def test_what_cannot_be_compiled_is_told_to_who_asks_for_it(compiled: list[Asked]) -> None:
    wanted = vocabularies(4096, REFUSED)

    def streams() -> Iterator[Stream]:
        with prefetched(wanted) as stream_of:
            for one in wanted:
                yield stream_of(*one)

    found = streams()
    assert next(found).depth == 28
    with pytest.raises(UsageError, match="no"):
        next(found)
