"""Attention: every backend against a higher-precision reference, exact counts, refusals, one direction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopcast.kernels import attention as A
from flopcast.kernels import attention_sdpa
from flopcast.kernels import documents as packed
from flopcast.kernels.attention_transformers import register_with_transformers
from flopcast.kernels.references import BackendUnavailable, attention_math
from flopcast.kernels.shapes import Attention

CUDA = torch.cuda.is_available()
SHAPE = Attention(batch=2, heads=4, kv_heads=2, seq=50, head_dim=64)


@pytest.mark.parametrize("backend", ["sdpa-cpu", "sdpa-math"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_cpu_backends_agree_with_the_reference(backend: str, dtype: str, causal: bool, direction: str) -> None:
    shape = replace(SHAPE, dtype=dtype, causal=causal, direction=direction)
    operands = A.operands(shape, "cpu")
    out = A.prepare(shape, backend, operands)()
    error, tolerance = A.check(out, A.reference(operands, shape), operands, shape)
    assert error <= tolerance


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("value_dim", [0, 48])
def test_the_reference_is_attention_and_its_gradient(causal: bool, value_dim: int) -> None:
    shape = replace(SHAPE, dtype="fp32", causal=causal, direction="bwd", value_dim=value_dim)
    operands = A.operands(shape, "cpu")
    q, k, v, do = (x.double().requires_grad_() for x in operands)
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    wanted = (o, *torch.autograd.grad(o, (q, k, v), do))
    got = (A.reference(operands[:3], replace(shape, direction="fwd")), *A.reference(operands, shape))
    for ours, torchs in zip(got, wanted, strict=True):
        assert isinstance(ours, torch.Tensor)
        assert torch.allclose(ours, torchs, atol=1e-12)


def test_the_reference_has_windows_and_documents() -> None:
    shape = replace(SHAPE, dtype="fp32", batch=1, window=9, direction="bwd")
    operands = A.operands(shape, "cpu")
    q, k, v, do = (x.double().requires_grad_() for x in operands)
    ids, rows = torch.tensor([0] * 20 + [1] * 30), torch.arange(50)
    mask = (rows >= rows[:, None] - 8) & (rows <= rows[:, None]) & (ids == ids[:, None])
    o = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    wanted = (o, *torch.autograd.grad(o, (q, k, v), do))
    spans = packed.from_ids(ids[None])
    forward = A.reference(operands[:3], replace(shape, direction="fwd"), spans)
    for ours, torchs in zip((forward, *A.reference(operands, shape, spans)), wanted, strict=True):
        assert isinstance(ours, torch.Tensor)
        assert torch.allclose(ours, torchs, atol=1e-12)
    with pytest.raises(BackendUnavailable, match="no windows but by a mask"):
        A.prepare(shape, "sdpa-cpu", operands)
    with pytest.raises(ValueError, match="causal attention"):
        A.operands(replace(shape, causal=False), "cpu")


def test_the_reference_is_the_same_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long sequences are computed in blocks of query rows; here forced at seq 50."""
    from flopcast.kernels import references

    shape = replace(SHAPE, dtype="fp32", direction="bwd")
    operands = A.operands(shape, "cpu")
    q, k, v = operands[:3]
    whole = (attention_math(q, k, v, True, 0.125, torch.float64), *A.reference(operands, shape))
    blocks = references._row_blocks
    monkeypatch.setattr(references, "_row_blocks", lambda heads, seq: blocks(heads, seq, heads * seq * 7))
    parts = (attention_math(q, k, v, True, 0.125, torch.float64), *A.reference(operands, shape))
    for one, many in zip(whole, parts, strict=True):
        assert isinstance(one, torch.Tensor)
        assert torch.allclose(one, many, atol=1e-12)


def test_the_check_sees_what_it_must() -> None:
    operands = A.operands(SHAPE, "cpu")
    ref = A.reference(operands, SHAPE)
    assert isinstance(ref, torch.Tensor)
    q, k, v = operands
    good = ref.bfloat16()
    off_by_one = torch.roll(good, 1, dims=2)
    wrong_head = torch.roll(good, 1, dims=1)
    not_causal = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    nan = good.clone()
    nan[0, 0, 0, 0] = float("nan")
    error, tolerance = A.check(good, ref, operands, SHAPE)
    assert error <= tolerance < 0.03
    for bad in (off_by_one, wrong_head, not_causal, nan, good[:1]):
        error, tolerance = A.check(bad, ref, operands, SHAPE)
        assert error > tolerance


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_a_prepared_call_runs_one_direction_only(direction: str) -> None:
    """What is timed is one operator: the backward holds no forward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    shape = replace(SHAPE, direction=direction)
    call = A.prepare(shape, "sdpa-cpu", A.operands(shape, "cpu"))
    with Names() as names:
        call()
    suffix = "_backward" if direction == "bwd" else ""
    assert names.seen == [f"aten._scaled_dot_product_flash_attention_for_cpu{suffix}.default"]
    call = A.prepare(shape, "sdpa-math", A.operands(shape, "cpu"))
    with Names() as names:
        call()
    assert any("_softmax_backward_data" in name for name in names.seen) == (direction == "bwd")
    assert any("_safe_softmax" in name or "_softmax.default" in name for name in names.seen) == (direction == "fwd")


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_flops_and_bytes_match_independent_counts(direction: str) -> None:
    full = replace(SHAPE, causal=False, direction=direction)
    seen = torch.ones(full.seq, full.seq, dtype=torch.bool)
    pairs = int(seen.sum()) * full.batch * full.heads
    matmuls = 2 if direction == "fwd" else 5  # S = QK, O = PV; S again, dV, dP, dQ, dK
    assert full.flops == matmuls * 2 * full.head_dim * pairs
    causal = replace(full, causal=True)
    visible = int(seen.tril().sum()) * full.batch * full.heads
    exact = matmuls * 2 * full.head_dim * visible
    assert exact * full.seq / (full.seq + 1) == causal.flops  # the half counts a half of the diagonal
    for window in (1, 7, full.seq, 90):
        exact = matmuls * 2 * full.head_dim * int(seen.tril().triu(1 - window).sum()) * full.batch * full.heads
        diagonal = matmuls * full.head_dim * min(window, full.seq) * full.batch * full.heads  # a half of it, as above
        assert replace(causal, window=window).flops == exact - diagonal
    operands = A.operands(full, "cpu")
    outputs = A.prepare(full, "sdpa-cpu", operands)()
    tensors = [*operands, *(outputs if isinstance(outputs, tuple) else (outputs,))]
    if direction == "bwd":
        tensors.append(operands[0])  # o, of q's size, is read too
    lse = 4 * full.batch * full.heads * full.seq
    assert sum(x.numel() * x.element_size() for x in tensors) + lse == full.bytes


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_values_narrower_than_queries_count_as_torch_counts_them(direction: str) -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape = replace(SHAPE, kv_heads=4, causal=False, head_dim=24, value_dim=16, direction=direction)
    operands = A.operands(shape, "cpu")
    q, k, v = (tuple(x.shape) for x in operands[:3])
    own = sdpa_flop_count(q, k, v) if direction == "fwd" else sdpa_backward_flop_count((*q[:3], 16), q, k, v)
    assert shape.flops == own
    outputs = A.prepare(shape, "sdpa-math", operands)()
    tensors = [*operands, *(outputs if isinstance(outputs, tuple) else (outputs,))]
    if direction == "bwd":
        tensors.append(operands[3])  # o, of the size of its gradient, is read too
    lse = 4 * shape.batch * shape.heads * shape.seq
    assert sum(x.numel() * x.element_size() for x in tensors) + lse == shape.bytes
    assert shape.key != replace(shape, value_dim=0).key
    for backend in ("triton", "sdpa-flash"):
        with pytest.raises(BackendUnavailable, match="values as wide as queries"):
            A.prepare(shape, backend, operands)


def test_operands_lie_as_projections_leave_them() -> None:
    q, k, v, do = A.operands(replace(SHAPE, direction="bwd"), "cpu", seed=1)
    for x, heads in ((q, 4), (k, 2), (v, 2), (do, 4)):
        assert x.shape == (2, heads, 50, 64)
        assert x.transpose(1, 2).is_contiguous()
    assert torch.equal(q, A.operands(SHAPE, "cpu", seed=1)[0])


def test_unavailable_backends_say_why() -> None:
    operands = A.operands(SHAPE, "cpu")
    for backend in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "triton"):
        with pytest.raises(BackendUnavailable, match="CUDA"):
            A.prepare(SHAPE, backend, operands)
    with pytest.raises(BackendUnavailable, match="tf32"):
        A.prepare(replace(SHAPE, dtype="tf32"), "sdpa-cpu", operands)
    with pytest.raises(ValueError, match="known are sdpa-flash"):
        A.prepare(SHAPE, "flash", operands)
    assert A.sdpa_choice(operands, SHAPE) == "sdpa-cpu"


@pytest.mark.parametrize(
    ("change", "message"),
    [({"heads": 3}, "divisible"), ({"seq": 0}, "at least 1"), ({"direction": "sideways"}, "fwd, bwd")],
)
def test_bad_shapes_say_what_is_valid(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        A.operands(replace(SHAPE, **change), "cpu")  # type: ignore[arg-type]


def test_operands_that_do_not_fit_are_refused() -> None:
    q, k = torch.ones(1, 4, 8, 64), torch.ones(1, 2, 8, 64)
    for bad in ((q, k, k[:, :1]), (q, k[:, :, :4], k[:, :, :4]), (q[:, :3], k, k), (q, k.half(), k)):
        with pytest.raises(ValueError, match=r"attention takes|divisible|one dtype"):
            A.forward(*bad)
    with pytest.raises(BackendUnavailable, match="head_dim 80"):
        A.forward(torch.ones(1, 4, 8, 80), torch.ones(1, 2, 8, 80), torch.ones(1, 2, 8, 80))


def test_fake_tensors_see_the_operators_without_triton() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k, v = (torch.empty(2, 50, n, 64).transpose(1, 2) for n in (4, 2, 2))
        o, lse = A.attention_forward_op(q, k, v, True, 0.125, 0, None)
        gradients = A.attention_backward_op(o, q, k, v, o, lse, True, 0.125, 0, None, False)
    assert o.shape == q.shape
    assert o.stride() == q.stride()
    assert lse.shape == q.shape[:3]
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient"])
def test_cuda_operators_take_what_the_calls_pass(backend: str) -> None:
    """Fake CUDA tensors go through torch's shape functions: arguments in order, gradients in k's heads."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kv_heads = 4 if backend == "sdpa-efficient" else 2  # the efficient kernel has no grouped heads
    with FakeTensorMode():
        q, k, v, do = (
            torch.empty(2, 50, n, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for n in (4, kv_heads, kv_heads, 4)
        )
        forward, backward = attention_sdpa._fused_calls(backend, q, k, v, True, None)
        saved = forward()
        gradients = backward(do, saved)
    assert saved[0].shape == q.shape
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


# --- On a GPU ---

GPU_SHAPES = [
    Attention(batch=2, heads=4, kv_heads=2, seq=256, head_dim=128),
    Attention(batch=1, heads=6, kv_heads=2, seq=1, head_dim=64),
    Attention(batch=3, heads=2, kv_heads=2, seq=129, head_dim=64),
    Attention(batch=1, heads=8, kv_heads=1, seq=1000, head_dim=128),
    Attention(batch=1, heads=16, kv_heads=8, seq=4096, head_dim=128),
    Attention(batch=2, heads=4, kv_heads=2, seq=513, head_dim=128, causal=False),
    Attention(batch=2, heads=4, kv_heads=4, seq=1024, head_dim=64, causal=False),
    Attention(batch=1, heads=2, kv_heads=1, seq=32768, head_dim=128),
    Attention(batch=1, heads=6, kv_heads=2, seq=2047, head_dim=64),
]
GPU_BACKENDS = [backend for backend in A.BACKENDS if backend != "sdpa-cpu"]


def prepared(shape: Attention, backend: str, operands: tuple[torch.Tensor, ...]) -> Callable[[], A.Outputs]:
    try:
        return A.prepare(shape, backend, operands)
    except BackendUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("shape", GPU_SHAPES, ids=lambda shape: shape.key)
    @pytest.mark.parametrize("backend", GPU_BACKENDS)
    @pytest.mark.parametrize("direction", ["fwd", "bwd"])
    @pytest.mark.parametrize("dtype", ["bf16", "fp16"])
    def test_agrees_with_the_reference(self, shape: Attention, backend: str, direction: str, dtype: str) -> None:
        shape = replace(shape, direction=direction, dtype=dtype)
        operands = A.operands(shape, "cuda")
        out = prepared(shape, backend, operands)()
        error, tolerance = A.check(out, A.reference(operands, shape), operands, shape)
        assert error <= tolerance

    @pytest.mark.parametrize("direction", ["fwd", "bwd"])
    def test_triton_in_fp32(self, direction: str) -> None:
        shape = replace(SHAPE, dtype="fp32", direction=direction)
        operands = A.operands(shape, "cuda")
        error, tolerance = A.check(
            A.prepare(shape, "triton", operands)(), A.reference(operands, shape), operands, shape
        )
        assert error <= tolerance

    @pytest.mark.parametrize("backend", ["sdpa-flash", "sdpa-cudnn", "sdpa-math"])
    @pytest.mark.parametrize("shape", [GPU_SHAPES[0], GPU_SHAPES[5]], ids=lambda shape: shape.key)
    def test_the_prepared_backward_is_that_of_training(self, backend: str, shape: Attention) -> None:
        shape = replace(shape, direction="bwd")
        operands = A.operands(shape, "cuda")
        got = prepared(shape, backend, operands)()
        kind = {
            "sdpa-flash": SDPBackend.FLASH_ATTENTION,
            "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
            "sdpa-math": SDPBackend.MATH,
        }[backend]
        q, k, v = (x.detach().requires_grad_() for x in operands[:3])
        with sdpa_kernel(kind):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=True)
        want = torch.autograd.grad(o, (q, k, v), operands[3])
        for g, w in zip(got, want, strict=True):
            assert isinstance(g, torch.Tensor)
            # atomics may reorder sums: two ulp of the largest gradient
            assert (g.float() - w.float()).abs().max() <= 2 * 2.0**-7 * w.float().abs().max()

    @pytest.mark.parametrize("backend", GPU_BACKENDS)
    @pytest.mark.parametrize("direction", ["fwd", "bwd"])
    def test_replays_from_a_graph(self, backend: str, direction: str) -> None:
        shape = Attention(batch=2, heads=4, kv_heads=4, seq=512, head_dim=64, direction=direction)
        operands = A.operands(shape, "cuda")
        call = prepared(shape, backend, operands)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        torch.cuda.synchronize()
        error, tolerance = A.check(captured, A.reference(operands, shape), operands, shape)
        assert error <= tolerance

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize(
        ("seq", "window", "lengths"),
        [(1024, 128, ()), (777, 100, (300, 1, 476)), (700, 0, (64, 128, 508)), (300, 1, ())],
    )
    def test_windows_and_documents(self, head_dim: int, seq: int, window: int, lengths: tuple[int, ...]) -> None:
        shape = Attention(batch=1, heads=4, kv_heads=2, seq=seq, head_dim=head_dim, window=window, direction="bwd")
        operands = A.operands(shape, "cuda")
        q, k, v, do = operands
        ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)).cuda() if lengths else None
        spans = None if ids is None else packed.from_ids(ids[None])
        o, lse = A.forward(q, k, v, True, None, window, spans)
        gradients = A.backward(do, q, k, v, o, lse, True, None, window, spans)
        for direction, out in (("fwd", o), ("bwd", gradients)):
            one = replace(shape, direction=direction)
            error, tolerance = A.check(out, A.reference(operands, one, spans), operands, one, spans)
            assert error <= tolerance, direction

    def test_triton_repeats_bit_for_bit(self) -> None:
        shape = Attention(batch=2, heads=8, kv_heads=2, seq=777, head_dim=128, direction="bwd")
        call = A.prepare(shape, "triton", A.operands(shape, "cuda"))
        first = call()
        for _ in range(3):
            assert all(torch.equal(x, y) for x, y in zip(first, call(), strict=True))

    def test_qwen3_trains_on_it_under_autocast(self) -> None:
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3Config(
            vocab_size=512, hidden_size=256, intermediate_size=768, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        )  # fmt: skip
        tokens = torch.randint(0, 512, (2, 200), device="cuda")
        losses = []
        for implementation in ("sdpa", register_with_transformers()):
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
            model = model.cuda()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            for _ in range(5):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=0.01)
