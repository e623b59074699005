"""What small kernels compute, written as inductor writes them, counted by hand."""

from __future__ import annotations

from flopcast.roofline.stream.compiled.instructions import INTEGER_DIVISION, SHUFFLES, WARP, work_of
from flopcast.roofline.stream.compiled.kernel_source import read_kernel
from flopcast.roofline.stream.compiled.launches import Work

HEAD = """
import triton
import triton.language as tl

@triton_heuristics.{heuristics}(
    size_hints={{'x': 8192, 'r0_': 1024}},
    reduction_hint=ReductionHint.{hint},
    filename=__file__,
    triton_meta={{'signature': {{'in_ptr0': '*{dtype}', 'out_ptr0': '*{dtype}', 'xnumel': 'i32'}}, 'constants': {{}}}},
    inductor_meta={{'kernel_name': 'triton_x'}},
)
@triton.jit
def triton_x(in_ptr0, out_ptr0, xnumel, r0_numel, XBLOCK : tl.constexpr):
"""


def work(body: str, heuristics: str = "pointwise", hint: str = "INNER", dtype: str = "fp32", **numels: int) -> Work:
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    source = HEAD.format(heuristics=heuristics, hint=hint, dtype=dtype) + lines
    return work_of(read_kernel(source), {f"{name}numel": size for name, size in numels.items()})


def pointwise(value: str, load: str = "in_ptr0 + (x0)", dtype: str = "fp32") -> Work:
    body = f"x0 = xindex\ntmp0 = tl.load({load}, None)\ntmp1 = {value}\ntl.store(out_ptr0 + (x0), tmp1, None)"
    return work(body, x=1024, dtype=dtype)


def test_a_copy_loads_and_stores_four_floats_at_a_time() -> None:
    found = pointwise("tmp0")
    assert found == Work(accesses=1024 * 2 / 4, requested=1024 * 8, steps=1)


def test_functions_cost_what_they_compute() -> None:
    copy = pointwise("tmp0")
    assert pointwise("tmp0 * tmp0").arithmetic == copy.arithmetic + 1024
    assert pointwise("tl_math.sin(tmp0)").trigonometric == 1024
    assert pointwise("libdevice.exp(tmp0)").special == 1024
    assert pointwise("libdevice.erf(tmp0)").arithmetic > pointwise("libdevice.exp(tmp0)").arithmetic


def test_a_remainder_by_no_power_of_two_costs_more() -> None:
    by_64, by_60 = (pointwise("tmp0", f"in_ptr0 + (x0 % {size})") for size in (64, 60))
    assert by_60.arithmetic > by_64.arithmetic


def divided(value: str) -> Work:
    """A copy along an index that is divided before, as inductor repeats a cache of keys for several heads."""
    body = "x1 = xindex // 1536\nx2 = xindex\ntmp0 = tl.load(in_ptr0 + (x2 + 64*x1), None)\n"
    return work(body + f"tl.store(out_ptr0 + (x2), {value}, None)", x=12288)


def test_what_only_an_address_needs_is_computed_once_for_four_floats() -> None:
    copy = work("x2 = xindex\ntmp0 = tl.load(in_ptr0 + (x2), None)\ntl.store(out_ptr0 + (x2), tmp0, None)", x=12288)
    alone, used = divided("tmp0"), divided("tmp0 + x1")
    assert alone.arithmetic - copy.arithmetic == 12288 * INTEGER_DIVISION / 4
    assert used.arithmetic - copy.arithmetic == 12288 * (INTEGER_DIVISION + 1), "its value is needed too"


def test_a_large_stride_gathers_elements_one_by_one() -> None:
    assert pointwise("tmp0", "in_ptr0 + (1024*x0)").gathered == 1024
    assert pointwise("tmp0", "in_ptr0 + (1024*(x0 % 64) + x0 // 64)").gathered == 1024
    assert pointwise("tmp0", "in_ptr0 + (x0 % 64)").gathered == 0
    assert pointwise("tmp0", "in_ptr0 + (x0 // 64)").gathered == 0


def test_rows_of_an_odd_length_are_loaded_one_by_one() -> None:
    """Rows of 50,257 in bf16 do not begin at 16 bytes, and threads cannot load eight at once."""
    body = "x0 = xindex\nr0_1 = r0_index\ntmp0 = tl.load(in_ptr0 + (r0_1 + {columns}*x0), None)"
    even, odd = (
        work(body.format(columns=columns), "reduction", dtype="bf16", x=8, r0_=4096) for columns in (50256, 50257)
    )
    assert odd.requested == 2 * even.requested
    assert odd.accesses == 8 * even.accesses


def test_a_head_repeated_for_several_others_is_loaded_as_wide_as_it_is_stored() -> None:
    """A cache of keys that is repeated for each query's head: neighbours share the head's number."""
    each, shared = (
        pointwise("tmp0", f"in_ptr0 + (x0 % 65536 + 65536*(x0 // 65536 % 16 // {heads}))") for heads in (1, 2)
    )
    assert shared.accesses == each.accesses
    assert pointwise("tmp0", "in_ptr0 + (x0 // 2)").accesses > each.accesses, "neighbours differ"


def test_where_rows_end_at_an_odd_place_each_element_has_its_own_condition() -> None:
    """Inductor pads rows of 50,257 so that they begin at 16 bytes; they still end within a vector."""
    body = "x0 = xindex\nr0_1 = r0_index\ntmp0 = tl.load(in_ptr0 + (r0_1 + 50264*x0), {mask})"
    whole, ends, even = (
        work(body.format(mask=mask), "reduction", dtype="bf16", x=8, r0_=columns)
        for mask, columns in (("None", 50257), ("r0_mask", 50257), ("r0_mask", 50264))
    )
    assert ends.accesses == 8 * whole.accesses
    assert even.accesses == whole.accesses


def test_what_stands_in_several_places_is_computed_once() -> None:
    index = "((x0 // 3) * 5 + x0 % 7)"
    body = f"x0 = xindex\ntmp0 = tl.load(in_ptr0 + ({index}), None)\ntmp1 = tl.load(in_ptr0 + (1 + {index}), None)"
    once, twice = work("\n".join(body.splitlines()[:2]), x=1024), work(body, x=1024)
    assert twice.arithmetic == once.arithmetic > 0
    assert twice.accesses == 2 * once.accesses
    # in another turn of a loop it is computed anew
    loops = "for r0_offset in tl.range(0, r0_numel, R0_BLOCK):\n    tmp0 = r0_index * 3 + r0_index // 7\n"
    one, two = (work(loops * count, "reduction", x=1, r0_=4096).arithmetic for count in (1, 2))
    assert two == 2 * one


def test_a_row_s_scale_is_computed_by_the_threads_of_the_row() -> None:
    body = "x0 = xindex\ntmp0 = tl.load(in_ptr0 + (x0), None)\ntmp1 = libdevice.rsqrt(tmp0)\ntmp2 = tmp1 * r0_index"
    found = work(body, "persistent_reduction", x=512, r0_=128)
    assert found.special == 512 * WARP
    assert found.requested == 512 * 4


def test_a_sum_shuffles_once_per_row() -> None:
    body = "x0 = xindex\nr0_1 = r0_index\ntmp0 = tl.load(in_ptr0 + (r0_1 + 128*x0), None)\ntmp1 = {value}"
    summed, kept = (
        work(body.format(value=value), "persistent_reduction", x=512, r0_=128) for value in ("tl.sum(tmp0, 1)", "tmp0")
    )
    assert summed.arithmetic - kept.arithmetic == 512 * 128 + 512 * WARP * SHUFFLES
    assert summed.reductions == 1
    assert kept.reductions == 0


def test_a_row_is_padded_to_a_power_of_two_where_a_program_holds_it() -> None:
    body = "x0 = xindex\nr0_1 = r0_index\ntmp0 = x0 * r0_1"
    assert work(body, "persistent_reduction", x=10, r0_=197).arithmetic == 10 * 256
    looped = "x0 = xindex\nfor r0_offset in tl.range(0, r0_numel, R0_BLOCK):\n    tmp0 = x0 * r0_index"
    assert work(looped, "reduction", x=10, r0_=197).arithmetic == 10 * 197


def test_loads_wait_for_one_another_in_a_loop_and_by_what_was_loaded() -> None:
    body = """
x0 = xindex
for r0_offset in tl.range(0, r0_numel, R0_BLOCK):
    r0_1 = r0_index
    tmp0 = tl.load(in_ptr0 + (r0_1), r0_mask)
    tmp1 = tl.load(in_ptr0 + (r0_1 + 4096*tmp0), r0_mask)
"""
    found = work(body, "reduction", x=1, r0_=8192)
    assert found.steps == 8192 / 2048
    assert found.chained == 8192 / 2048
