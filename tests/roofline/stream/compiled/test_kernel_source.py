"""Bytes of small kernels, written as inductor writes them, counted by hand."""

from __future__ import annotations

import pytest

from flopcast.roofline.stream.compiled.kernel_source import UnreadableCodeError, moved_bytes, read_kernel
from flopcast.roofline.stream.compiled.launches import Kind

HEAD = """
import triton
import triton.language as tl

@triton_heuristics.{heuristics}(
    size_hints={{'x': 8192, 'r0_': 1024}},
    {hint}filename=__file__,
    triton_meta={{'signature': {{{signature}, 'xnumel': 'i32', 'XBLOCK': 'constexpr'}}, 'constants': {{}}}},
    inductor_meta={{'kernel_name': 'triton_poi_fused_x_0'{meta}}},
)
@triton.jit
def triton_poi_fused_x_0({arguments}, XBLOCK : tl.constexpr):
    xoffset = tl.program_id(0) * XBLOCK
    xindex = xoffset + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    r0_index = tl.arange(0, R0_BLOCK)[None, :]
"""


def bytes_of(
    body: str, pointers: dict[str, str], sizes: dict[str, int], numels: dict[str, int], **head: str
) -> tuple[int, int]:
    text = HEAD.format(
        heuristics=head.get("heuristics", "pointwise"),
        hint=head.get("hint", ""),
        meta=head.get("meta", ""),
        signature=", ".join(f"'{name}': '*{dtype}'" for name, dtype in pointers.items()),
        arguments=", ".join([*pointers, *numels]),
    )
    source = text + "\n".join(f"    {line}" for line in body.strip().splitlines())
    moved = moved_bytes(read_kernel(source), numels, sizes).values()
    return sum(read for read, _ in moved), sum(written for _, written in moved)


IN_OUT = {"in_ptr0": "fp32", "out_ptr0": "bf16"}


def test_a_cast_reads_four_and_writes_two_bytes() -> None:
    body = "x0 = xindex\ntmp0 = tl.load(in_ptr0 + (x0), None)\ntl.store(out_ptr0 + (x0), tmp0, None)"
    assert bytes_of(body, IN_OUT, {"in_ptr0": 100, "out_ptr0": 100}, {"xnumel": 100}) == (400, 200)


def test_a_broadcast_row_is_read_once() -> None:
    body = """
x0 = (xindex % 32)
x1 = xindex // 32
tmp0 = tl.load(in_ptr0 + (x0), None, eviction_policy='evict_last')
tmp1 = tl.load(in_ptr0 + (x0), None)
tl.store(out_ptr0 + (x0 + 32*x1), tmp0, None)
"""
    assert bytes_of(body, IN_OUT, {"in_ptr0": 32, "out_ptr0": 320}, {"xnumel": 320}) == (32 * 4, 320 * 2)


def test_a_slice_of_a_wider_row_is_read_alone() -> None:
    """The keys of a joint projection: 16 of 48 columns, at column 16."""
    body = """
x0 = (xindex % 16)
x1 = xindex // 16
tmp0 = tl.load(in_ptr0 + (16 + x0 + 48*x1), None)
tl.store(out_ptr0 + (xindex), tmp0, None)
"""
    sizes = {"in_ptr0": 48 * 10, "out_ptr0": 160}
    assert bytes_of(body, IN_OUT, sizes, {"xnumel": 160}) == (160 * 4, 160 * 2)


def test_overlapping_loads_of_a_row_are_joined() -> None:
    """Rotary embedding reads a row, and each of its halves under a mask: the row, once."""
    body = """
r0_1 = r0_index
x0 = xindex
tmp0 = tl.load(in_ptr0 + (r0_1 + 500*x0), None)
tmp1 = r0_1
tmp2 = tl.full([1, 1], 64, tl.int64)
tmp3 = tmp1 < tmp2
tmp4 = tl.load(in_ptr0 + (64 + r0_1 + 500*x0), tmp3 & xmask, other=0.0)
tmp5 = tmp1 >= tmp2
tmp6 = tl.load(in_ptr0 + ((-64) + r0_1 + 500*x0), tmp5, other=0.0)
tl.store(out_ptr0 + (r0_1 + 128*x0), tmp6, None)
"""
    sizes = {"in_ptr0": 500 * 10, "out_ptr0": 1280}
    numels = {"xnumel": 10, "r0_numel": 128}
    assert bytes_of(body, IN_OUT, sizes, numels, heuristics="reduction") == (1280 * 4, 1280 * 2)


def test_a_mask_leaves_half_of_a_row() -> None:
    body = """
r0_1 = r0_index
x0 = xindex
tmp1 = r0_1
tmp2 = tl.full([1, 1], 64, tl.int64)
tmp3 = tmp1 < tmp2
tmp4 = tl.load(in_ptr0 + (r0_1 + 500*x0), tmp3, other=0.0)
tl.store(out_ptr0 + (r0_1 + 128*x0), tmp4, None)
"""
    sizes = {"in_ptr0": 500 * 10, "out_ptr0": 1280}
    numels = {"xnumel": 10, "r0_numel": 128}
    assert bytes_of(body, IN_OUT, sizes, numels, heuristics="reduction")[0] == 10 * 64 * 4


GATHER = """
x0 = xindex
r0_1 = r0_index
tmp0 = tl.load(in_ptr1 + (x0), None, eviction_policy='evict_last')
tmp1 = tl.full([1, 1], 50000, tl.int32)
tmp2 = tmp0 + tmp1
tmp3 = tmp0 < 0
tmp4 = tl.where(tmp3, tmp2, tmp0)
"""


def test_an_embedding_reads_a_row_per_token() -> None:
    body = GATHER + "tmp6 = tl.load(in_ptr0 + (r0_1 + 32*tmp4), None)\ntl.store(out_ptr0 + (r0_1 + 32*x0), tmp6, None)"
    pointers = {"in_ptr0": "fp32", "in_ptr1": "i64", "out_ptr0": "bf16"}
    numels = {"xnumel": 8, "r0_numel": 32}
    sizes = {"in_ptr0": 50000 * 32, "in_ptr1": 8, "out_ptr0": 256}
    assert bytes_of(body, pointers, sizes, numels, heuristics="persistent_reduction") == (256 * 4 + 8 * 8, 256 * 2)
    few = sizes | {"in_ptr0": 4 * 32}  # a table of four rows: no more than that
    assert bytes_of(body, pointers, few, numels, heuristics="persistent_reduction") == (128 * 4 + 8 * 8, 256 * 2)


def test_atomic_additions_read_what_they_write() -> None:
    body = GATHER + "tl.atomic_add(out_ptr0 + (tl.broadcast_to(r0_1 + 32*tmp4, [XBLOCK, R0_BLOCK])), tmp4, None)"
    pointers = {"in_ptr1": "i64", "out_ptr0": "fp32"}
    numels = {"xnumel": 8, "r0_numel": 32}
    sizes = {"in_ptr1": 8, "out_ptr0": 50000 * 32}
    read, written = bytes_of(body, pointers, sizes, numels, heuristics="reduction")
    assert (read, written) == (8 * 8 + 256 * 4, 256 * 4)


def test_a_workspace_has_a_row_per_program() -> None:
    body = """
x0 = xindex
r0_1 = r0_index
tmp0 = tl.load(in_ptr0 + (r0_1 + 32*x0), None)
tl.store(ws_ptr + (tl.program_id(0) + 0 * tl.num_programs(0)) * r0_numel + r0_index, accum0, r0_mask)
tl.store(ws_ptr + (tl.program_id(0) + 1 * tl.num_programs(0)) * r0_numel + r0_index, accum1, r0_mask)
"""
    pointers = {"in_ptr0": "bf16", "ws_ptr": "fp32"}
    numels = {"xnumel": 100, "r0_numel": 32}
    sizes = {"in_ptr0": 3200, "ws_ptr": 2 * 7 * 32}
    moved = bytes_of(body, pointers, sizes, numels, heuristics="persistent_reduction", meta=", 'RSPLIT_SIZE': 16")
    assert moved == (3200 * 2, 2 * 7 * 32 * 4)  # ceil(100 / 16) programs, two sums


def test_kinds_and_hints() -> None:
    body = "x0 = xindex\ntl.store(out_ptr0 + (x0), 0.0, None)"
    text = HEAD.format(
        heuristics="reduction", hint="reduction_hint=ReductionHint.OUTER,", meta="",
        signature="'out_ptr0': '*fp32'", arguments="out_ptr0, xnumel",
    )  # fmt: skip
    kernel = read_kernel(text + "\n".join(f"    {line}" for line in body.splitlines()))
    assert (kernel.kind, kernel.hint, kernel.parameters) == (Kind.LOOPED, "OUTER", ("out_ptr0", "xnumel"))


def test_an_index_of_another_form_counts_every_place() -> None:
    body = """
x0 = (xindex % 8)
x1 = xindex // 8
tmp0 = tl.load(in_ptr0 + (x1*x1 + (-1 + (8*(8 <= x0) + x0*(x0 < 8)))), None)
tl.store(out_ptr0 + (x0 + 8*x1), tmp0, None)
"""
    assert bytes_of(body, IN_OUT, {"in_ptr0": 1000, "out_ptr0": 80}, {"xnumel": 80}) == (80 * 4, 80 * 2)
    assert bytes_of(body, IN_OUT, {"in_ptr0": 40, "out_ptr0": 80}, {"xnumel": 80}) == (40 * 4, 80 * 2)


def test_an_access_of_another_form_is_told() -> None:
    told = r"triton_poi_fused_x_0: an access that this reader does not know: tl\.load"
    with pytest.raises(UnreadableCodeError, match=told):
        bytes_of(
            "x0 = xindex\ntmp0 = tl.load(tl.make_block_ptr(in_ptr0, shape=[8]))",
            IN_OUT, {"in_ptr0": 1, "out_ptr0": 1}, {"xnumel": 8},
        )  # fmt: skip
