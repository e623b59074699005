"""The Hopper attention: tiles by table, resources and schedule without a GPU, what tensor-memory copies must bear."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from flopcast.decode import decode
from flopcast.errors import DataError
from flopcast.kernels import attention as A
from flopcast.kernels import attention_config
from flopcast.kernels.shapes import Attention
from flopcast.roofline.stream.compiled.profiled import class_of_kernel
from tests.kernels.resources import rows_of

CUDA = torch.cuda.is_available()
SHAPE = Attention(batch=2, heads=4, kv_heads=2, seq=50, head_dim=64)


def test_hopper_tiles_fit_and_overlap(run_script: Callable[..., str]) -> None:
    """Each tile that can be chosen, compiled for sm_90: resources, and what its speed rests on.

    ptxas may serialise matrix instructions (a wait for each) or move the wait for a product above the softmax that
    it should run under.
    """
    pytest.importorskip("triton.experimental.gluon")
    rows = rows_of("compile_attention.py", run_script)
    assert {(row["kernel"], row["head_dim"]) for row in rows} >= {
        (kernel, dim) for kernel in ("forward", "dkdv", "dq") for dim in (64, 128)
    }
    for row in rows:
        assert row["spill_bytes"] <= 96, row
        assert row["shared_bytes"] <= row["limit_bytes"], row
        assert row["registers"] <= 168, row  # 12 warps of them fill the register file
        assert 0 < 3 * row["waits"] <= row["products"], row
        assert row["hidden"] >= 32, row


def test_its_kernels_are_told_from_others_by_name() -> None:
    pytest.importorskip("triton.experimental.gluon")
    from flopcast.kernels import triton_attention as plain
    from flopcast.kernels import triton_attention_launch as by_gluon

    kernels = (
        plain.forward_kernel, plain.delta_kernel, plain.dkdv_kernel, plain.dq_kernel, by_gluon.hopper.forward_kernel,
        by_gluon.hopper_dkdv.prepare_kernel, by_gluon.hopper_dkdv.dkdv_kernel, by_gluon.hopper_dq.dq_kernel,
        by_gluon.hopper_onepass.onepass_kernel, by_gluon.hopper_onepass.dq_scale_kernel,
    )  # fmt: skip
    assert {class_of_kernel(kernel.__name__) for kernel in kernels} == {"attention"}


def table_of(choices: dict[str, dict[str, str]]) -> attention_config.Table:
    document = {"format": attention_config.FORMAT, "device": "D", "triton": "3.6.0", "choices": choices}
    return decode(attention_config.Table, document, "table.json")


def test_a_call_takes_the_tile_measured_nearest() -> None:
    short, long = "hopper/128x64/w4s4/pack", "hopper/128x128/w4s2/pingpong/single"
    table = table_of({"forward/128/causal": {"1024": short, "8192": long}})
    shape = replace(SHAPE, head_dim=128)
    for seq, key in ((1, short), (1024, short), (2896, short), (2897, long), (10**6, long)):
        tile = table.tile("forward", replace(shape, seq=seq))
        assert tile is not None
        assert tile.key == key
    assert table.tile("dq", shape) is None
    assert table.tile("forward", replace(shape, causal=False)) is None
    for bad in ("hopper/128x128", "tma/128x128/w4s2", "hopper/128x128/w4s2/pong"):
        with pytest.raises(ValueError, match="no attention tile"):
            attention_config.from_key(bad)
    for wrong, told in (
        ({"1024": "tma/1x1"}, "choices is wrong|no attention tile"),
        ({"0": short}, "one element or more"),
        ({"1k": short}, "invalid literal"),
    ):
        with pytest.raises(DataError, match=told):
            table_of({"forward/128/causal": wrong})
    with pytest.raises(DataError, match="format is missing"):
        decode(attention_config.Table, {}, "table.json")


@pytest.mark.parametrize("table", attention_config.tables(), ids=lambda table: table.device)
def test_shipped_tables_serve_every_shape(table: attention_config.Table) -> None:
    """Two heads a group or one, any length and masking: tiles for Hopper; one head a group cannot be packed."""
    for head_dim in (64, 128):
        for causal in (True, False):
            for seq in (1, 300, 4096, 32768):
                shape = Attention(batch=1, heads=4, kv_heads=2, seq=seq, head_dim=head_dim, causal=causal)
                chosen = attention_config.config_for(shape, tma=True, device=table.device, triton=table.triton)
                assert {chosen.forward.kind, chosen.dkdv.kind, chosen.dq.kind} == {"hopper"}
                alone = attention_config.config_for(
                    replace(shape, kv_heads=4), tma=True, device=table.device, triton=table.triton
                )
                assert not alone.forward.pack
                assert alone.forward.block_n == 128
                plain = attention_config.config_for(shape, device=table.device, triton=table.triton)
                assert plain.forward.kind == "pointer"


# --- On a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnDevice:
    def test_heads_in_sections_give_the_same_bits(self) -> None:
        """The order in which tiles are taken; sizes that leave a part of a section."""
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("Hopper kernels")
        shape = Attention(batch=5, heads=6, kv_heads=3, seq=1500, head_dim=128, direction="bwd")
        config = attention_config.rule(shape, tma=True)
        sections = replace(
            config, **{name: replace(getattr(config, name), l2_mib=2) for name in ("forward", "dkdv", "dq")}
        )
        q, k, v, do = A.operands(shape, "cuda")
        results = []
        for each in (config, sections):
            o, lse = A.forward(q, k, v, config=each)
            results.append((o, lse, *A.backward(do, q, k, v, o, lse, config=each)))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(("seq", "causal"), [(64, True), (300, True), (1024, True), (300, False)])
    def test_a_backward_that_skips_blocks_and_makes_its_own_delta(self, head_dim: int, seq: int, causal: bool) -> None:
        shape = Attention(batch=2, heads=4, kv_heads=2, seq=seq, head_dim=head_dim, causal=causal, direction="bwd")
        config = attention_config.rule(shape, tma=True)
        dkdv = attention_config.Tile(64, 128, 4, 3, "hopper", skip=causal)
        operands = A.operands(shape, "cuda")
        q, k, v, do = operands
        o, lse = A.forward(q, k, v, causal)
        for changed in (replace(config, dkdv=dkdv), replace(config, dq=replace(config.dq, delta=True))):
            out = A.backward(do, q, k, v, o, lse, causal, config=changed)
            error, tolerance = A.check(out, A.reference(operands, shape), operands, shape)
            assert error <= tolerance, changed

    @pytest.mark.parametrize(("heads", "kv_heads", "seq"), [(2, 2, 129), (8, 2, 1000), (4, 1, 333), (14, 2, 2049)])
    @pytest.mark.parametrize("causal", [True, False])
    def test_a_backward_in_one_pass(self, heads: int, kv_heads: int, seq: int, causal: bool) -> None:
        shape = Attention(
            batch=2, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=128, causal=causal, direction="bwd"
        )
        operands = A.operands(shape, "cuda")
        q, k, v, do = operands
        o, lse = A.forward(q, k, v, causal)
        config = replace(attention_config.rule(shape, tma=True), dkdv=attention_config.ONE_PASS)
        out = A.backward(do, q, k, v, o, lse, causal, config=config)
        error, tolerance = A.check(out, A.reference(operands, shape), operands, shape)
        assert error <= tolerance

    def test_a_long_backward_gives_the_same_bits_where_torch_is_to_be_deterministic(self) -> None:
        shape = Attention(batch=2, heads=4, kv_heads=4, seq=4096, head_dim=128, direction="bwd")
        *inputs, do = A.operands(shape, "cuda")
        inputs = [x.detach().requires_grad_() for x in inputs]

        def gradients() -> tuple[torch.Tensor, ...]:
            return torch.autograd.grad(A.attention(*inputs), inputs, do)

        quick = gradients()
        torch.use_deterministic_algorithms(True)
        try:
            first, second, third = gradients(), gradients(), gradients()  # as written, watched, replayed
        finally:
            torch.use_deterministic_algorithms(False)
        for one, other, last, near in zip(first, second, third, quick, strict=True):
            assert torch.equal(one, other)
            assert torch.equal(one, last)
            torch.testing.assert_close(one, near, rtol=0.02, atol=0.02)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_offsets_beyond_32_bits(self, head_dim: int) -> None:
        """The second batch lies 2^31 elements behind the first."""
        far, seq = 2**31 + 64, 300
        storage = torch.zeros(far + seq * 4 * head_dim, dtype=torch.bfloat16, device="cuda")
        view = storage.as_strided((2, 4, seq, head_dim), (far, head_dim, 4 * head_dim, 1))
        view.copy_(torch.randn(view.shape, device="cuda"))
        q, k, v = view[:, :2], view[:, 2:3], view[:, 3:]
        near = [x.contiguous() for x in (q, k, v)]
        o, lse = A.forward(q, k, v)
        assert torch.equal(o, A.forward(*near)[0])
        do = torch.randn_like(o)
        for got, want in zip(A.backward(do, q, k, v, o, lse), A.backward(do, *near, o, lse), strict=True):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_rows_that_copies_cannot_read_in_place(self, head_dim: int) -> None:
        """Rows not at multiples of 16 bytes, and the gradient of a sum: all strides 0."""
        packed = torch.randn(1, 77, 4, head_dim + 1, device="cuda", dtype=torch.bfloat16)[..., 1:]
        q, k, v = (x.transpose(1, 2) for x in packed.split([2, 1, 1], dim=2))
        o, lse = A.forward(q, k, v)
        assert torch.equal(o, A.forward(q.contiguous(), k.contiguous(), v.contiguous())[0])
        ones = torch.ones((), device="cuda", dtype=torch.bfloat16).expand(o.shape)
        for got, want in zip(
            A.backward(ones, q, k, v, o, lse), A.backward(ones.contiguous(), q, k, v, o, lse), strict=True
        ):
            assert torch.equal(got, want)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_nan_and_infinity_reach_the_rows_that_see_them(self, head_dim: int) -> None:
        shape = Attention(batch=1, heads=2, kv_heads=1, seq=200, head_dim=head_dim)
        q, k, v = A.operands(shape, "cuda")
        clean = A.forward(q, k, v)[0]
        nan_q, inf_k, inf_v = q.clone(), k.clone(), v.clone()
        nan_q[0, 0, 70, 3] = float("nan")
        got = A.forward(nan_q, k, v)[0]
        assert got[0, 0, 70].isnan().all()
        got[0, 0, 70] = clean[0, 0, 70]
        assert torch.equal(got, clean)
        inf_k[0, 0, 150] = float("inf")  # scores of either sign, added: not a number
        got = A.forward(q, inf_k, v)[0]
        assert got[:, :, 150:].isnan().all()
        assert torch.equal(got[:, :, :150], clean[:, :, :150])
        inf_v[0, 0, 150, 5] = float("inf")
        got = A.forward(q, k, inf_v)[0]
        assert got[:, :, 150:, 5].isposinf().all()
        assert torch.equal(got[:, :, :128], clean[:, :, :128])  # a masked 0 times infinity is no number
