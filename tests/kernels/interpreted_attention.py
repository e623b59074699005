"""The Triton attention in Triton's interpreter, on the CPU; run by test_attention.py in a process of its own.

fp16 and fp32 only: the interpreter's tl.dot multiplies bf16 as raw bits.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flopcast.kernels import attention as A
from flopcast.kernels import documents as packed
from flopcast.kernels.attention_blocks import Band, visits
from flopcast.kernels.attention_transformers import register_with_transformers
from flopcast.kernels.shapes import Attention

# More key blocks than query blocks and the reverse: the masked and unmasked passes meet at other places.
WIDE = A.AttentionConfig(*[A.Tile(32, 16, 4, 2)] * 3)
TALL = A.AttentionConfig(*[A.Tile(16, 32, 4, 2)] * 3)


def run(shape: Attention, config: A.AttentionConfig | None = None, documents: Tensor | None = None) -> None:
    """Forward and backward against the reference."""
    operands = A.operands(replace(shape, direction="bwd"), "cpu", seed=shape.seq)
    q, k, v, do = operands
    how = (shape.causal, None, shape.window, documents)
    o, lse = A.forward(q, k, v, *how, config=config)
    gradients = A.backward(do, q, k, v, o, lse, *how, config=config)
    for direction, out in (("fwd", o), ("bwd", gradients)):
        one = replace(shape, direction=direction)
        error, tolerance = A.check(out, A.reference(operands, one, documents), operands, one, documents)
        assert error <= tolerance, (one, error, tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("config", "seq", "dtype"), [(WIDE, 1, "fp16"), (TALL, 32, "fp16"), (WIDE, 37, "fp32"), (TALL, 37, "fp16")]
)
def test_agrees_with_the_reference(causal: bool, config: A.AttentionConfig, seq: int, dtype: str) -> None:
    run(Attention(batch=1, heads=4, kv_heads=2, seq=seq, head_dim=16, causal=causal, dtype=dtype), config)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, False), (128, True)])
def test_the_chosen_configuration_runs(head_dim: int, causal: bool) -> None:
    run(Attention(batch=1, heads=2, kv_heads=1, seq=150, head_dim=head_dim, causal=causal, dtype="fp16"))


@settings(max_examples=5, deadline=None, database=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seq=st.integers(1, 36),
    causal=st.booleans(),
    config=st.sampled_from([WIDE, TALL]),
)
def test_any_small_shape(
    batch: int, kv_heads: int, group: int, seq: int, causal: bool, config: A.AttentionConfig
) -> None:
    heads = kv_heads * group
    shape = Attention(batch=batch, heads=heads, kv_heads=kv_heads, seq=seq, head_dim=16, causal=causal, dtype="fp32")
    run(shape, config)


def spans_of(*rows: list[int]) -> Tensor:
    """Documents of these lengths, row by row."""
    ids = [torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)) for lengths in rows]
    return packed.from_ids(torch.stack(ids))


# Documents that begin and end within tiles and at their edges, of one token, and longer than tiles.
PACKED = spans_of([1, 15, 16, 1, 20])


@pytest.mark.parametrize(
    ("config", "causal", "window", "documents"),
    [
        (WIDE, True, 1, None), (TALL, True, 16, None), (WIDE, True, 37, None), (WIDE, True, 53, None),
        (TALL, True, 5, PACKED), (WIDE, True, 0, PACKED), (TALL, True, 0, spans_of([30, 23])), (TALL, False, 0, PACKED),
    ],
)  # fmt: skip
def test_windows_and_documents(config: A.AttentionConfig, causal: bool, window: int, documents: Tensor | None) -> None:
    """Of 53 tokens, tiles of 32 by 16 and 16 by 32."""
    run(
        Attention(batch=1, heads=2, kv_heads=1, seq=53, head_dim=16, dtype="fp16", causal=causal, window=window),
        config,
        documents,
    )


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_the_benchmarks_call_with_a_window_and_documents(direction: str) -> None:
    shape = Attention(
        batch=2, heads=1, kv_heads=1, seq=33, head_dim=16, dtype="fp16", window=9, documents=3, direction=direction
    )
    operands = A.operands(shape, "cpu")
    out = A.prepare(shape, "triton", operands)()
    error, tolerance = A.check(out, A.reference(operands, shape), operands, shape)
    assert error <= tolerance
    whole = replace(shape, window=0, documents=0)
    assert A.check(out, A.reference(operands, whole), operands, whole)[0] > tolerance


def test_each_row_of_a_batch_has_its_own_documents() -> None:
    shape = Attention(batch=2, heads=1, kv_heads=1, seq=33, head_dim=16, dtype="fp32")
    run(shape, WIDE, spans_of([1, 15, 17], [20, 13]))


@pytest.mark.parametrize(("config", "causal", "window", "lengths"), [(WIDE, True, 17, ()), (TALL, True, 15, (1, 30))])
def test_visited_blocks_are_those_counted(
    config: A.AttentionConfig, causal: bool, window: int, lengths: tuple[int, ...]
) -> None:
    """A block that holds no numbers leaves none in the results of a tile that visits it, for 0 x NaN is NaN: of 50
    tokens, in each row of the batch another block has none."""
    seq, most = 50, 4
    band = Band(seq, causal, window, lengths)
    spans = spans_of(*[[*lengths, seq - sum(lengths)]] * most) if lengths else None
    shape = Attention(batch=most, heads=1, kv_heads=1, seq=seq, head_dim=16, causal=causal, dtype="fp32")
    q, k, v, do = A.operands(replace(shape, direction="bwd"), "cpu")
    how = (causal, None, window, spans)

    def spoilt(x: Tensor, block: int) -> Tensor:
        x = x.clone()
        for row in range(most):
            x[row, :, row * block : (row + 1) * block] = float("nan")
        return x

    def seen(out: Tensor, rows: int) -> tuple[int, ...]:
        """Of each tile, how many blocks were visited."""
        return tuple(int(tile.isnan().any(-1).any(-1).sum()) for tile in out[:, 0].split(rows, dim=1))

    def counted(kernel: str) -> tuple[int, ...]:
        return tuple(one.blocks for one in visits(kernel, band, getattr(config, kernel)))

    o, lse = A.forward(q, k, v, *how, config=config)
    keys, queries = config.forward.block_n, config.dkdv.block_m
    assert seen(A.forward(q, k, spoilt(v, keys), *how, config=config)[0], config.forward.block_m) == counted("forward")
    dq, _, _ = A.backward(do, q, k, spoilt(v, keys), o, lse, *how, config=config)
    assert seen(dq, config.dq.block_m) == counted("dq")
    _, _, dv = A.backward(spoilt(do, queries), q, k, v, o, lse, *how, config=config)
    assert seen(dv, config.dkdv.block_n) == counted("dkdv")


def test_a_window_and_documents_through_autograd() -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors(20))
    lengths = torch.tensor([0, 3, 12, 20], dtype=torch.int32)
    o = A.attention(q[:1], k[:1], v[:1], window=4, cu_seqlens=lengths)
    ids = torch.tensor([0] * 3 + [1] * 9 + [2] * 8)
    rows = torch.arange(20)
    mask = (ids[:, None] == ids) & (rows[:, None] >= rows) & (rows[:, None] < rows + 4)
    want = torch.nn.functional.scaled_dot_product_attention(q[:1], k[:1], v[:1], mask, enable_gqa=True)
    assert torch.allclose(o, want, atol=1e-5)
    do = torch.randn_like(o)
    for got, wanted in zip(
        torch.autograd.grad(o, (q, k, v), do), torch.autograd.grad(want, (q, k, v), do), strict=True
    ):
        assert torch.allclose(got, wanted, atol=1e-5)
    positions = torch.tensor([[*range(3), *range(9), *range(8)]])
    assert torch.equal(packed.from_positions(positions), packed.from_ids(ids[None]))
    assert torch.equal(packed.from_cu_seqlens(lengths, 20), packed.from_ids(ids[None]))
    apart = (packed.from_positions(torch.arange(20)[None] + 7), packed.from_ids(torch.zeros(1, 20, dtype=torch.long)))
    assert torch.equal(*apart)


def test_windows_and_documents_that_do_not_fit_are_refused() -> None:
    q, k, v = tensors(20)
    with pytest.raises(ValueError, match="a window of 4 with causal=False"):
        A.attention(q, k, v, False, window=4)
    with pytest.raises(ValueError, match="a window of 0"):
        A.attention(q, k, v, window=0)
    with pytest.raises(ValueError, match=r"\[batch, 2, seq\]"):
        A.attention(q, k, v, documents=torch.zeros(1, 20, dtype=torch.int32))
    with pytest.raises(ValueError, match="of a batch of one row"):
        A.attention(torch.cat((q, q)), k, v, cu_seqlens=torch.tensor([0, 20]))


def tensors(seq: int = 20, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, seq, n, 16, dtype=dtype).transpose(1, 2) for n in (4, 2, 2))  # type: ignore[return-value]


def test_small_integers_are_exact() -> None:
    """With equal scores the output is the mean of the values seen so far: of a constant, the constant."""
    q, k, v = tensors(48, torch.float16)
    constant = torch.full_like(v, 3.0)
    assert torch.equal(A.forward(torch.zeros_like(q), k, constant, config=WIDE)[0], torch.full_like(q, 3.0))
    steps = torch.arange(16.0).half().expand(1, 2, 48, 16).contiguous()
    assert torch.equal(A.forward(torch.zeros_like(q), k, steps, False, config=TALL)[0], steps.repeat(1, 2, 1, 1))


def test_lse_is_the_natural_log_sum_exp() -> None:
    q, k, v = tensors()
    scores = torch.einsum("bhmd,bhnd->bhmn", q, k.repeat_interleave(2, 1)) / 4
    assert torch.allclose(A.forward(q, k, v, causal=False)[1], torch.logsumexp(scores, -1), atol=1e-5)


def test_strided_operands_are_read_in_place() -> None:
    """Slices of one packed projection give what copies of them give."""
    packed = torch.randn(1, 20, 8, 16)
    q, k, v = (x.transpose(1, 2) for x in packed.split([4, 2, 2], dim=2))
    o, lse = A.forward(q, k, v)
    copied, copied_lse = A.forward(q.contiguous(), k.contiguous(), v.contiguous())
    assert torch.equal(o, copied)
    assert torch.equal(lse, copied_lse)
    do = torch.ones(()).expand(o.shape)  # what o.sum().backward() hands over: all strides 0
    for got, want in zip(A.backward(do, q, k, v, o, lse), A.backward(do.contiguous(), q, k, v, o, lse), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_those_of_autograd(causal: bool) -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors())
    do = torch.randn(q.shape)
    want = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=0.3),
        (q, k, v),
        do,
    )
    got = torch.autograd.grad(A.attention(q, k, v, causal, scale=0.3), (q, k, v), do)
    for g, w in zip(got, want, strict=True):
        assert torch.allclose(g, w, atol=1e-5)


def test_autocast_casts_as_for_sdpa() -> None:
    with torch.autocast("cpu", torch.float16):
        assert A.attention(*tensors()).dtype == torch.float16


def test_the_operators_obey_torchs_rules() -> None:
    q, k, v = (x.detach().requires_grad_() for x in tensors(8))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(A.attention_forward_op.overload, (q, k, v, True, 0.25, 3, None), test_utils=checks)


def test_flop_counter_counts_what_it_counts_for_sdpa() -> None:
    shape = Attention(batch=1, heads=4, kv_heads=2, seq=20, head_dim=16, causal=False)
    q, k, v = (x.detach().requires_grad_() for x in tensors())
    with FlopCounterMode(display=False) as counter:
        A.attention(q, k, v, causal=False).sum().backward()
    assert counter.get_total_flops() == shape.flops + replace(shape, direction="bwd").flops


def test_qwen3_trains_on_it() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    tokens = torch.randint(0, 64, (1, 19))
    results = []
    for implementation in ("sdpa", register_with_transformers()):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), model.model.layers[0].self_attn.k_proj.weight.grad))
    for sdpa, triton in zip(*results, strict=True):
        assert torch.allclose(sdpa, triton, atol=1e-5)


def test_what_it_cannot_do_is_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(NotImplementedError, match="bf16 is wrong"):
        A.forward(q.bfloat16(), k.bfloat16(), v.bfloat16())
