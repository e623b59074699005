"""The streams of compiled steps as they are asked for, of code that inductor generated on an H200."""

from __future__ import annotations

import gzip
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library import code, compiled
from flopcast.roofline.stream.library.stored import shipped_path, stream_key
from flopcast.roofline.stream.library.streams import get_stream, is_at_hand
from flopcast.roofline.stream.model.models import depth_of, load_config, shipped_names, with_depth
from flopcast.roofline.stream.model.run import Run, Traced, chip_of
from flopcast.roofline.stream.ops.op_stream import Stream, load
from flopcast.roofline.stream.ops.to_micro_batches import times_run
from flopcast.roofline.stream.tracer.compiler.asked import Asked, Break, OutputCode

CONFIG = load_config("qwen3-0.6b")
RUN = Run(batch=8, seq=1024, optimizer="adamw-fused", mode="compile")
RECORDED = {2: "qwen3-0.6b-l2", 3: "qwen3-0.6b-l3", 28: "qwen3-0.6b-8x1024"}
LAUNCHES = 1641 + 2  # recorded, and gradients of the loss, 1, and of the logits, which nothing else uses, 0
H200 = "cuda 9.0 132"


@pytest.fixture
def compilers(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Asked]:
    """Answers with recorded code; the list of what was asked."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[Asked] = []

    @contextmanager
    def compiling(one: Asked) -> Iterator[Callable[[], OutputCode]]:
        asked.append(one)
        case = RECORDED[depth_of(one.config or {})]
        text = gzip.decompress((root / f"reports/nvidia-h200/compiled-steps/{case}.code.gz").read_bytes()).decode()
        found = Break(reason="print", where="net.py:3, in forward: print(x)")
        yield lambda: OutputCode(
            graphs=tuple(part for part in text.split("# ---- graph ") if part), calls=(0, 1), captured=1,
            breaks=(found,), waits=(found.where,), torch="2.11.0+cu130", triton="3.6.0",
        )  # fmt: skip

    monkeypatch.setattr(code, "compiling", compiling)
    return asked


@pytest.fixture(autouse=True)
def text_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recorded text is marked already."""
    monkeypatch.setattr(
        OutputCode, "text", property(lambda code: "\n".join(f"# ---- graph {part}" for part in code.graphs))
    )


def answer(monkeypatch: pytest.MonkeyPatch, **told: Any) -> None:
    """Lets the compiler say so of its code."""
    patched = code.compiling

    @contextmanager
    def compiling(one: Asked) -> Iterator[Callable[[], OutputCode]]:
        with patched(one) as result:
            yield lambda: replace(result(), **told)

    monkeypatch.setattr(code, "compiling", compiling)


def launches(stream: Stream) -> int:
    of_graphs = [times for op, times in zip(stream.ops, times_run(stream), strict=True) if op.phase != "optimizer"]
    return sum(of_graphs)


def test_two_depths_are_compiled_for_the_gpu_and_any_other_follows(compilers: list[Asked]) -> None:
    traced = RUN.traced_on(H200)
    assert not is_at_hand(CONFIG, traced)
    stream = get_stream(CONFIG, traced)
    assert [depth_of(one.config or {}) for one in compilers] == [2, 3]
    assert {(one.batch, one.seq, one.mode) for one in compilers} == {(8, 1024, "compile-graphs")}
    assert compilers[0].gpu == {"capability": [9, 0], "sm_count": 132}
    assert (stream.depth, stream.n_params) == (28, get_stream(CONFIG, compiled.as_eager(traced)).n_params)
    assert launches(stream) == LAUNCHES
    assert launches(get_stream(with_depth(CONFIG, 64), traced)) == LAUNCHES + 36 * 58
    assert is_at_hand(with_depth(CONFIG, 7), traced)
    assert is_at_hand(CONFIG, replace(traced, mode="compile-graphs"))  # whose code is the same
    assert len(compilers) == 2
    told = stream.meta
    assert (told["mode"], told["torch"], told["triton"]) == ("compile", "2.11.0", "3.6.0")
    assert told["breaks"][0]["where"] == told["waits"][0] == "net.py:3, in forward: print(x)"
    ((_, first, last), (label, start, stop)) = told["graphs"]
    assert (first, last, label, stream.ops[stop + 1].phase) == (0, start - 3, "0_backward", "optimizer")


@pytest.mark.parametrize("count", [2, 4, 6])
def test_micro_batches_run_the_graphs_again_and_add_their_gradients(compilers: list[Asked], count: int) -> None:
    one = get_stream(CONFIG, RUN.traced_on(H200))
    stream = get_stream(CONFIG, replace(RUN, accumulate=count).traced_on(H200))
    names = Counter[str]()
    for op, times in zip(stream.ops, times_run(stream), strict=True):
        names[op.name] += times * (op.phase != "optimizer")
    tensors = 2 + 11 * 28  # parameters: embeddings, the last norm, and of each layer
    assert names["aten.add_.Tensor"] == (count - 1) * tensors
    assert names["aten.div.Tensor"] == 2 * count
    assert launches(stream) == count * (launches(one) + 2) + (count - 1) * tensors
    profile = find_profile("nvidia-h200")
    peaks = [PricedStep(each, RUN, profile).peak_bytes for each in (one, stream)]
    assert peaks[0] < peaks[1] <= peaks[0] + 4 * one.n_params  # gradients stay, another's are made


@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_scaler_works_around_the_graphs(compilers: list[Asked], count: int) -> None:
    run = replace(RUN, precision="autocast-fp16", optimizer="adamw", accumulate=count)
    stream, eager = (get_stream(CONFIG, replace(run, mode=mode).traced_on(H200)) for mode in ("compile", "eager"))
    in_graphs = {number for _, first, last in stream.meta["graphs"] for number in range(first, last + 1)}
    around = Counter(op.name for number, op in enumerate(stream.ops) if number not in in_graphs)
    assert around["aten.mul.Tensor"] == 2 * count, "the loss by the scale, and its gradient"
    assert around["aten._amp_foreach_non_finite_check_and_unscale_.default"] == 1
    assert around["aten._amp_update_scale_.default"] == 1
    ends = [[op.name for op in one.ops if op.phase == "optimizer"] for one in (stream, eager)]
    assert ends[0] == ends[1]


def test_what_does_not_change_the_code_shares_a_compile(compilers: list[Asked]) -> None:
    streams = {
        run: get_stream(CONFIG, run.traced_on(H200))
        for run in (RUN, replace(RUN, optimizer="adamw"), replace(RUN, clip=1.0), replace(RUN, accumulate=2))
    }
    assert len(compilers) == 2
    assert len({len(stream.ops) for stream in streams.values()}) == 4
    get_stream(CONFIG, replace(RUN, seq=512).traced_on(H200))
    assert len(compilers) == 4
    for path in (tmp_code := Path(os.environ["XDG_CACHE_HOME"])).rglob("compiled/*/*.gz"):
        path.write_bytes(path.read_bytes()[:1000])  # torn
    assert any(tmp_code.rglob("compiled/*/*.gz"))
    get_stream(CONFIG, replace(RUN, optimizer="sgd").traced_on(H200))
    assert len(compilers) == 6


def test_layers_that_are_not_alike_are_compiled_whole(compilers: list[Asked], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDED, 2, "gpt2-l2")
    stream = get_stream(CONFIG, RUN.traced_on(H200))
    assert [depth_of(one.config or {}) for one in compilers] == [2, 3, 28]
    assert (stream.depth, launches(stream), stream.meta["repeated"]) == (28, LAUNCHES, [])
    get_stream(CONFIG, RUN.traced_on(H200))
    assert len(compilers) == 3


@pytest.mark.parametrize("mode", ["compile", "compile-graphs"])
def test_streams_of_shipped_configs_ship(mode: str) -> None:
    """For the H200 and H100 at 4 x 256; they say no path of the machine that made them."""
    for name in shipped_names():
        config, traced = with_depth(load_config(name), 3), Traced(device=H200, mode=mode)
        stream = load(shipped_path(stream_key(config, traced)))
        assert (stream.depth, stream.meta["mode"]) == (3, mode)
        assert not any(found["where"].startswith("/") for found in stream.meta["breaks"])
        assert not any(line.startswith("/") for line in stream.meta["waits"])


def test_eager_streams_keep_their_names_and_compiled_ones_have_a_chip() -> None:
    assert shipped_path(stream_key(with_depth(CONFIG, 3), Traced())).is_file()
    chips = {
        name: chip_of({"type": "cuda", "capability": spec.capability, "sm_count": spec.sm_count})
        for name, spec in load_specs().items()
    }
    assert chips["nvidia-h100-sxm"] == chips["nvidia-h200"] == H200
    assert chips["nvidia-a100-40gb-sxm"] == chips["nvidia-a100-80gb-pcie"] == "cuda 8.0 108"
    keys = {stream_key(CONFIG, replace(RUN, mode=mode).traced_on(chip)) for mode in ("compile", "compile-graphs")
            for chip in chips.values()}  # fmt: skip
    assert len(keys) == 2 * len(set(chips.values()))
    assert replace(RUN, mode="eager").traced_on(H200) == replace(RUN, mode="eager").traced_on("cuda")
    with pytest.raises(UsageError, match="on 'cpu': compiled steps are modelled on GPUs"):
        RUN.traced_on("cpu")


def test_work_outside_of_the_graphs_is_told_and_products_are_recorded_with_it(
    compilers: list[Asked], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:

    def outside(**operators: int) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "-".join(operators)))  # what was compiled is kept
        answer(monkeypatch, outside={f"aten.{name}": count for name, count in operators.items()})

    outside(mm=2, ones_like=1)
    one = get_stream(CONFIG, compiled.as_eager(RUN.traced_on(H200)))
    whole: list[Asked] = []
    monkeypatch.setattr(compiled, "_whole", lambda asked, mode: whole.append(asked) or one)
    get_stream(CONFIG, RUN.traced_on(H200))
    assert [(asked.is_whole, asked.optimizer, depth_of(asked.config or {})) for asked in whole] == [
        (True, "adamw-fused", 3), (True, "adamw-fused", 28),  # the first, which says of no op which layer it is of
    ]  # fmt: skip
    decode = Run(batch=1, precision="bf16", phase="decode", context=256, cache="static", mode="compile")
    with pytest.raises(UsageError, match=r"aten.mm runs outside of the compiled graphs.*net.py:3"):
        get_stream(CONFIG, decode.traced_on(H200))
    outside(mean=2, ones_like=1)
    assert get_stream(CONFIG, RUN.traced_on(H200)).meta["notes"] == [
        "outside of the compiled graphs, and not in the forecast: 2 aten.mean"
    ]


def test_paddings_that_a_slow_host_would_not_choose_are_told(
    compilers: list[Asked], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, unsure_pads=((4096, 1023, 1024), (1023, 4096, 1024), (4096, 3069, 1023)))
    meta = get_stream(CONFIG, RUN.traced_on(H200)).meta
    assert meta["unsure_pads"] == [[4096, 1023, 1024], [1023, 4096, 1024], [4096, 3069, 1023]]
    (note,) = meta["notes"]
    assert note.startswith("whether inductor pads a product of 4,096 x 1,023 x 1,024 (and of 2 other sizes) depends on")
    assert len(compilers) == 2
