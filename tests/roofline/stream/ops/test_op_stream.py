"""Folded streams unfold to what a trace at that depth gives, and streams survive the disk."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopcast.errors import DataError
from flopcast.kernels.shapes import Operand
from flopcast.roofline.stream.model.models import with_depth
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef
from flopcast.roofline.stream.ops.to_depth import to_depth
from tests.roofline.stream.same_streams import assert_same, facts

Tracing = Callable[..., Stream]
RUNS = [(device, optimizer) for device in ("cuda", "cpu") for optimizer in ("adamw", "adamw-fused")]


@pytest.mark.parametrize(
    "run",
    [
        *({"device": device, "optimizer": optimizer} for device, optimizer in RUNS),
        {"accumulate": 3},
        {"checkpoint": "full"},
        {"accumulate": 2, "checkpoint": "full", "optimizer": "adamw-fused"},
        {"optimizer": "adamw-fused", "clip": 1.0},
        {"optimizer": "adamw-triton", "clip": 1.0},
        {"optimizer": "adamw-triton", "accumulate": 2},
        {"optimizer": "sgd-momentum", "clip": 0.5},
        {"optimizer": "adafactor"},
        {"optimizer": "adafactor-foreach"},
        {"optimizer": "muon"},
    ],
    ids=str,
)
def test_three_layers_unfold_to_what_five_give(tiny: dict[str, Any], traced: Tracing, run: dict[str, Any]) -> None:
    unfolded = to_depth(traced(tiny, folded=False, **run), 5)
    real = traced(with_depth(tiny, 5), folded=False, **run)
    assert unfolded.depth == real.depth == 5
    assert_same(unfolded, real)


def test_other_depths(tiny: dict[str, Any], traced: Tracing) -> None:
    folded = traced(tiny, folded=False)
    assert to_depth(folded, 3) is folded
    per_layer = [to_depth(folded, depth).n_params for depth in (2, 3, 4, 50)]
    layer = per_layer[1] - per_layer[0]
    assert layer == folded.meta["layer_params"] > 0
    assert per_layer == [per_layer[0] + n * layer for n in (0, 1, 2, 48)]
    two = to_depth(folded, 2)
    real = traced(with_depth(tiny, 2), folded=False)
    assert Counter(facts(two, op) for op in two.ops) == Counter(facts(real, op) for op in real.ops)
    with pytest.raises(ValueError, match="trace it at that depth"):
        to_depth(folded, 1)
    with pytest.raises(ValueError, match="trace it at that depth"):
        to_depth(two, 4)


def small_stream() -> Stream:
    operand = Operand((4, 8), (8, 1), "fp32")
    return Stream(
        ops=(
            Op("aten.mul.Tensor", "forward", (0, 1), (2,), (), '[{"t":0},{"t":1}]', layer=0, module="m.layers.0"),
            Op("aten.add_.Tensor", "backward", (2, 0), (), (0,), '[{"t":0},{"t":1}]', freed=(1,)),
        ),
        tensors=(TensorRef(operand, 0), TensorRef(operand, 1), TensorRef(operand, 2)),
        storages=(Storage(128, "parameter", 0), Storage(128, "activation"), Storage(128, "activation", 0)),
        n_params=32,
        depth=1,
        meta={"torch": "2.13.0"},
    )


def test_json_round_trip(tiny: dict[str, Any], traced: Tracing, tmp_path: Path) -> None:
    for stream in (small_stream(), traced(tiny, folded=False)):
        streams.save(stream, tmp_path / "deep" / "s.json.gz")
        again = streams.load(tmp_path / "deep" / "s.json.gz")
        assert again == stream
        first = (tmp_path / "deep" / "s.json.gz").read_bytes()
        streams.save(again, tmp_path / "deep" / "s.json.gz")
        assert (tmp_path / "deep" / "s.json.gz").read_bytes() == first
        assert [p.name for p in (tmp_path / "deep").iterdir()] == ["s.json.gz"]


def test_a_parameter_that_generated_code_reads_as_bytes_counts_its_elements_no_more(tmp_path: Path) -> None:
    """Frozen weights in fp32 of compiled steps with adapters: their streams were kept, but could not be read again."""
    stream = small_stream()
    as_bytes = tuple(ref._replace(operand=Operand((128,), (1,), "uint8")) for ref in stream.tensors)
    streams.save(replace(stream, tensors=as_bytes), tmp_path / "s.json")
    assert streams.load(tmp_path / "s.json").n_params == 32


def test_an_op_is_a_replayable_call() -> None:
    stream = small_stream()
    call = stream.call(stream.ops[1])
    assert call.op == "aten.add_.Tensor"
    assert call.written == (0,)
    assert call.outputs == ()
    assert call.bytes == 3 * 128  # reads both, writes one


GOOD = json.dumps(streams.to_json(small_stream())).encode()


def with_field(name: str, value: Any) -> bytes:
    return gzip.compress(json.dumps({**json.loads(GOOD), name: value}).encode(), mtime=0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(GOOD.replace(b'"schema": 1', b'"schema": 2'), mtime=0), "schema 2 is newer"),
        (gzip.compress(GOOD, mtime=0)[:-20], "not a flopcast op stream"),
        (gzip.compress(GOOD, mtime=0)[:30] + b"\x00" * 40, "not a flopcast op stream"),
        (GOOD[:-20], "not a flopcast op stream"),  # not gzipped
        (gzip.compress(GOOD[:200], mtime=0), "not a flopcast op stream"),
        (gzip.compress(b"[]", mtime=0), "a `schema` of 1 is expected"),
        (gzip.compress(b"{}", mtime=0), "a `schema` of 1 is expected"),
        (gzip.compress(json.dumps({"schema": 1}).encode(), mtime=0), "not a flopcast op stream"),
        (gzip.compress(GOOD.replace(b'"backward"', b'1, "x"'), mtime=0), "not a flopcast op stream"),
        (b"", "not a flopcast op stream|schema"),
        (with_field("n_params", -1), "n_params is -1: valid is an integer of 0 or more"),
        (with_field("n_params", 0), "n_params is 0: its tensors hold 32 parameters"),
        (with_field("tensors", []), "op 0 is of no tensor of it"),
        (with_field("storages", []), "tensor 0 is of no storage of it"),
        (with_field("meta", {"batch": "4"}), "meta.batch is '4'"),
    ],
)
def test_what_is_no_stream_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "s.json.gz").write_bytes(data)
    with pytest.raises(DataError, match=message):
        streams.load(tmp_path / "s.json.gz")


def test_a_stream_that_somebody_unpacked_is_read(tmp_path: Path) -> None:
    (tmp_path / "s.json.gz").write_bytes(GOOD)
    assert streams.load(tmp_path / "s.json.gz") == small_stream()


def test_a_missing_stream(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.json\.gz"):
        streams.load(tmp_path / "none.json.gz")


def test_layers_keep_their_names(tiny: dict[str, Any], traced: Tracing) -> None:
    deep = to_depth(traced(tiny, folded=False), 12)
    for op in deep.ops:
        if op.layer is not None and op.module:
            assert f".layers.{op.layer}." in f"{op.module}.", (op.module, op.layer)
    assert {op.layer for op in deep.ops} == {None, *range(12)}
    changed = replace(deep, depth=12)
    assert to_depth(changed, 12) is changed
