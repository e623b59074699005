"""Compares what ranks of real steps launched (`studies.parallel.record`) with what is traced for them.

    python -m studies.parallel.gate OUT [--only ddp,fsdp] [--keep FOLDER]

Every recorded rank is traced on the device that it ran on, and compared operation by operation: name, phase, layer,
operands, CUDA stream, what it waits for; and collective by collective. On GPUs attention goes by one name, whichever
backend ran it. Says for each rank how many operations differ and the first that do; exits with 1 where any does.
FOLDER gets what is compared of each rank, by which tests hold the tracer.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from flopcast.kernels.shapes import Operand
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import Stream
from studies.command import parser_of

SHOWN = 5
_OF_GLOO = ["c10d._reduce_scatter_base_.default", "aten.split.Tensor", "aten.copy_.default"]
_RUN = (
    "batch", "seq", "precision", "optimizer", "accumulate", "checkpoint", "device", "clip", "finetune", "base_dtype"
)  # fmt: skip


def retraced(meta: Mapping[str, Any]) -> Stream:
    """The trace of the rank that was recorded with this meta."""
    from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

    layout, rank = meta["parallel"]["layout"], meta["parallel"]["rank"]
    run = {name: meta[name] for name in _RUN if name in meta}
    return trace_rank(meta["config"], Traced(**run, parallel=layout, rank=rank))


def lines(stream: Stream) -> list[str]:
    """An op a line: what it is, where it runs, and what it waits for, by line; then a collective a line. Without what
    gloo adds to a reduce-scatter (it sums all, splits, and copies a part), and without views that change nothing, which
    DTensor makes or not by its version."""
    found: list[str] = []
    is_gloo = stream.meta["device"] == "cpu"
    before = ["", ""]
    line_of: dict[int, int] = {}
    for number, op in enumerate(stream.ops):
        before = [*before[-2:], op.name]
        inputs, outputs = ([_key(stream.tensors[i].operand) for i in places] for places in (op.inputs, op.outputs))
        if (is_gloo and (before[1:] == _OF_GLOO[:2] or before == _OF_GLOO)) or (
            op.kind == "view" and inputs == outputs
        ):
            continue
        line_of[number] = len(found)
        name, waits = op.name, ",".join(str(line_of[wait]) for wait in op.waits)
        if "attention" in name:  # q, k and v, with the gradient before them in the backward
            is_backward = "backward" in name
            name, inputs, outputs = f"attention{'_backward' * is_backward}", inputs[: 4 if is_backward else 3], []
        operands = f"{','.join(inputs)}>{','.join(outputs)}"
        found.append(f"{op.phase} {op.layer} {op.kind} {name} {operands} lane {op.lane} waits {waits}")
    return found + [
        f"{sent.kind} of {sent.bytes} bytes {sent.dtype} among {sent.ranks} ranks {sent.stride} apart lane {sent.lane}"
        for sent in collectives(stream)
    ]


def _key(operand: Operand) -> str:
    """Without the strides of dimensions of size 1, which mean nothing and differ by attention's backend."""
    stride = tuple(0 if size == 1 else step for size, step in zip(operand.shape, operand.stride, strict=True))
    return replace(operand, stride=stride).key


def differences(recorded: Sequence[str], traced: Sequence[str]) -> list[str]:
    """Where the lines of two streams of a rank differ, a line each."""
    pairs = zip_longest(recorded, traced, fillvalue="nothing")
    return [f"line {i}: recorded {a} | traced {b}" for i, (a, b) in enumerate(pairs) if a != b]


def keep(recorded: Stream, path: Path) -> None:
    record = {"meta": recorded.meta, "lines": lines(recorded)}
    path.write_bytes(gzip.compress(json.dumps(record, separators=(",", ":")).encode(), 9, mtime=0))


def kept(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The meta and the lines of a rank."""
    record = json.loads(gzip.decompress(path.read_bytes()))
    return record["meta"], record["lines"]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    failed = 0
    for path in sorted(options.out.glob("*.rank*.json.gz")):
        if options.only and path.name.partition(".")[0] not in options.only.split(","):
            continue
        recorded = streams.load(path)
        if options.keep:
            keep(recorded, options.keep / f"h200x2_{path.name}")
        traced = retraced(recorded.meta)
        found = differences(lines(recorded), lines(traced))
        failed += bool(found)
        sent = collectives(recorded)
        print(f"{path.name}: {len(recorded.ops)} ops, {len(sent)} collectives of {sum(c.bytes for c in sent):,} bytes; "
              f"{len(found)} differences", flush=True)  # fmt: skip
        if "peak_bytes" in recorded.meta:
            print(f"  peak {recorded.meta['peak_bytes']:,} bytes, of the stream {peak_bytes(traced):,} without "
                  "workspaces")  # fmt: skip
        for line in found[:SHOWN]:
            print(f"  {line}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
