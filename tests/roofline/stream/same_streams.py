"""Compares streams that are made in two ways."""

from __future__ import annotations

from typing import Any

from flopcast.roofline.stream.ops.op_stream import Op, Stream


def facts(stream: Stream, op: Op) -> tuple[Any, ...]:
    return op.name, op.phase, op.layer, op.module, op.kind, op.written, stream.call(op).key


def assert_same(unfolded: Stream, real: Stream) -> None:
    """Fails where two streams differ in more than the numbers of their tensors and storages."""
    assert unfolded.n_params == real.n_params
    assert unfolded.parameter_bytes == real.parameter_bytes
    assert [facts(unfolded, op) for op in unfolded.ops] == [facts(real, op) for op in real.ops]
    assert [len(op.freed) for op in unfolded.ops] == [len(op.freed) for op in real.ops]
    # the same storages up to their numbers: every op touches and frees the same ones
    there: dict[int, int] = {}
    back: dict[int, int] = {}
    for a, b in zip(unfolded.ops, real.ops, strict=True):
        pairs = [
            (unfolded.tensors[i].storage, real.tensors[j].storage)
            for i, j in zip(a.inputs + a.outputs, b.inputs + b.outputs, strict=True)
        ]
        for mine, other in pairs:
            assert there.setdefault(mine, other) == other, (a.name, a.layer)
            assert back.setdefault(other, mine) == mine, (a.name, a.layer)
        assert {there[s] for s in a.freed if s in there} == set(b.freed) & set(back)
    assert all(unfolded.storages[a] == real.storages[b] for a, b in there.items())
