"""Measures on a GPU the copies that torch makes of tensors before it sums them over GPUs.

    python -m studies.links.copies OUT

An all-reduce into another tensor, as DTensor asks for of every layer, clones its operand first: whole rows of a layer's
activations, which other suites have in no size above 4 MB. Appends to OUT, which `studies.shipped.added` reads from
reports/nvidia-h200/links/kernels.
"""

from __future__ import annotations

from pathlib import Path

from flopcast.kernels.shapes import DTYPE_BYTES, Call, Operand
from flopcast.microbench.records.recorder import Recorder
from flopcast.microbench.sweep.cases import Case
from flopcast.microbench.timing.device import describe, pick_device
from flopcast.roofline.gpu.suites import HOT_BYTES
from studies.beside_training import measure
from studies.command import parser_of

SUITE = "links"
# Tokens and width of an activation. The fitted ones lie a factor of 4 apart or less, those held out between them.
FIT = (
    (64, 1024),
    (256, 1024),
    (512, 1536),
    (1024, 2048),
    (2048, 2560),
    (4096, 3072),
    (8192, 4096),
    (16384, 5120),
    (32768, 6144),
)
HELD_OUT = ((128, 1280), (1024, 1152), (3072, 2048), (8192, 2048), (16384, 4096))


def clone(tokens: int, width: int, dtype: str) -> Call:
    rows = Operand((1, tokens, width), (tokens * width, width, 1), dtype)
    return Call(
        op="aten.clone.default", inputs=(rows,), outputs=(rows,), args='[{"t":0}]',
        kwargs='{"memory_format":{"m":"contiguous_format"}}',
    )  # fmt: skip


def cases() -> list[Case]:
    return [
        Case(shape=clone(*sizes, dtype), backend="torch", cache=cache, role=role)
        for role, some in (("fit", FIT), ("holdout", HELD_OUT))
        for sizes in some
        for dtype in ("fp32", "bf16")
        for cache in ("cold", "hot")
        if cache == "cold" or 2 * sizes[0] * sizes[1] * DTYPE_BYTES[dtype] <= HOT_BYTES / 2
    ]


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    device = pick_device(None)
    with Recorder(out, describe(device)) as recorder:
        measure(cases(), recorder, device, SUITE)


if __name__ == "__main__":
    main()
