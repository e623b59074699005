"""The fused memory-bound kernels (RMSNorm, rope with q/k-norm, SwiGLU, cross-entropy, AdamW): torch twins against
references, exact byte counts, refusals; Triton in its interpreter, compiled for other parts, and on a GPU."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flopcast.kernels import adamw, cross_entropy, matmul, patch_layers, rmsnorm, rope, swiglu
from flopcast.kernels.matmul_configs import shared_memory_limit
from flopcast.kernels.references import BackendUnavailable
from flopcast.kernels.shapes import AdamW, CrossEntropy, Fused, RmsNorm, RopeQkNorm, SwiGlu
from tests.kernels.resources import rows_of

CUDA = torch.cuda.is_available()
MODULES: dict[type[Fused], Any] = {
    RmsNorm: rmsnorm, RopeQkNorm: rope, SwiGlu: swiglu, CrossEntropy: cross_entropy, AdamW: adamw,
}  # fmt: skip
DIRECTIONS = {RmsNorm: ("fwd", "bwd"), RopeQkNorm: ("fwd", "bwd"), SwiGlu: ("fwd", "bwd"),
              CrossEntropy: ("fwd", "bwd", "both"), AdamW: ("step",)}  # fmt: skip
SMALL: tuple[Fused, ...] = (
    RmsNorm(rows=33, n=70),
    RmsNorm(rows=33, n=70, residual=True),
    RopeQkNorm(batch=2, seq=9, heads=4, kv_heads=2, head_dim=16),
    SwiGlu(numel=1001),
    CrossEntropy(rows=33, vocab=301),
    AdamW(numel=1001, tensors=3),
)


def directions(shape: Fused) -> list[Fused]:
    return [replace(shape, direction=direction) for direction in DIRECTIONS[type(shape)]]


def measured(shape: Fused, backend: str, device: str = "cpu") -> tuple[Any, Any, Any]:
    """(operands as they were, the reference, what the backend gives)."""
    module = MODULES[type(shape)]
    operands = module.operands(shape, device)
    ref = module.reference(operands, shape)
    copies = [x.clone() for x in operands]
    return operands, ref, module.prepare(shape, backend, copies)()


@pytest.mark.parametrize("shape", [d for s in SMALL for d in directions(s)], ids=lambda shape: shape.key)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_twin_agrees_with_the_reference_and_errors_do_not(shape: Fused, dtype: str) -> None:
    if isinstance(shape, AdamW):
        dtype = "fp32"
    shape, module = replace(shape, dtype=dtype), MODULES[type(shape)]
    operands, ref, out = measured(shape, "torch")
    error, tolerance = module.check(out, ref, operands, shape)
    assert error <= tolerance < 0.1
    for i, x in enumerate(out):
        wrong, nan, off = (y.clone().reshape(-1) for y in (x, x, x))
        wrong[-1] += 0.5 * x.abs().max()
        nan[0] = float("nan")
        off += 0.05 * x.float().abs().max()
        for bad in (wrong, nan, off):
            changed = (*out[:i], bad.reshape(x.shape), *out[i + 1 :])
            error, tolerance = module.check(changed, ref, operands, shape)
            assert not error <= tolerance
    error, tolerance = module.check(out[:-1], ref, operands, shape)
    assert not error <= tolerance


@pytest.mark.parametrize("shape", [directions(s)[-1] for s in SMALL], ids=lambda shape: shape.key)
def test_operands_depend_on_the_seed_alone(shape: Fused) -> None:
    first, again, other = (MODULES[type(shape)].operands(shape, "cpu", seed) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert not torch.equal(first[-1], other[-1])


def test_the_references_are_torchs_own() -> None:
    """Against torch.nn.functional and transformers' rotary functions in fp64."""
    shape = RmsNorm(rows=9, n=20, dtype="fp32")
    x, weight = (y.double() for y in rmsnorm.operands(shape, "cpu"))
    assert torch.allclose(
        rmsnorm.rms_norm_torch(x, weight)[0], torch.nn.functional.rms_norm(x, (20,), weight, rmsnorm.EPS)
    )
    loss = CrossEntropy(rows=40, vocab=30, dtype="fp32")
    logits, target = cross_entropy.operands(loss, "cpu")
    leaf = logits.double().requires_grad_()
    want = torch.nn.functional.cross_entropy(leaf, target)
    ref = cross_entropy.reference((logits, target), loss)
    assert torch.allclose(ref[0], want)
    assert torch.allclose(ref[1], torch.autograd.grad(want, leaf)[0])
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    q, k, q_weight, k_weight, cos, sin = rope.operands(
        RopeQkNorm(batch=2, seq=5, heads=2, kv_heads=1, head_dim=8, dtype="fp32"), "cpu"
    )
    norms = []
    for weight in (q_weight, k_weight):
        norms.append(qwen3.Qwen3RMSNorm(8))
        norms[-1].weight.data = weight
    wanted = qwen3.apply_rotary_pos_emb(norms[0](q).transpose(1, 2), norms[1](k).transpose(1, 2), cos, sin)
    for got, transposed in zip(rope.rope_qk_norm_torch(q, k, q_weight, k_weight, cos, sin), wanted, strict=True):
        assert torch.allclose(got, transposed.transpose(1, 2), atol=1e-6)
    config = qwen3.Qwen3Config(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": rope.THETA})
    tables = qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(5)[None])
    for ours, theirs in zip((cos, sin), tables, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert torch.equal(theirs[..., :4], theirs[..., 4:])  # what lets the kernel read one half


@pytest.mark.parametrize("shape", [d for s in SMALL for d in directions(s)], ids=lambda shape: shape.key)
def test_bytes_are_those_of_the_tensors(shape: Fused) -> None:
    shape = replace(shape, dtype="fp32")
    operands, _, out = measured(shape, "torch")
    total = sum(x.numel() * x.element_size() for x in (*operands, *out))
    if isinstance(shape, RmsNorm):
        total += 4 * shape.rows  # the reciprocal deviation, written or read
        if shape.residual and shape.direction == "bwd":  # reads the sum, not its terms; one gradient for both
            total -= 2 * 4 * shape.rows * shape.n
    elif isinstance(shape, RopeQkNorm):
        total -= sum(x.numel() * 4 for x in operands[4:6]) // 2  # half of each table
    elif isinstance(shape, CrossEntropy):
        total += 4 * shape.rows - (4 if shape.direction != "bwd" else 0)  # log-sum-exp; the loss itself is not counted
    assert shape.bytes == total
    assert shape.flops == 0


def test_keys_differ_and_bad_requests_say_what_is_valid() -> None:
    every = [d for s in SMALL for d in directions(s)]
    assert len({shape.key for shape in every}) == len(every)
    for shape in SMALL:
        module = MODULES[type(shape)]
        operands = module.operands(shape, "cpu")
        with pytest.raises(ValueError, match="known are torch, compile, triton"):
            module.prepare(shape, "cuda", operands)
        if importlib.util.find_spec("triton") is not None:
            with pytest.raises(BackendUnavailable, match="CUDA tensors"):
                module.prepare(shape, "triton", operands)()
        first = next(iter(vars(shape)))
        with pytest.raises(ValueError, match="at least 1"):
            module.operands(replace(shape, **{first: 0}), "cpu")
    with pytest.raises(ValueError, match="RMSNorm takes"):
        rmsnorm.forward(torch.ones(2, 4), torch.ones(5))
    with pytest.raises(BackendUnavailable, match="longer than"):
        rmsnorm.forward(torch.ones(1, 40000), torch.ones(40000))
    with pytest.raises(ValueError, match="alike"):
        swiglu.forward(torch.ones(2), torch.ones(3))
    with pytest.raises(ValueError, match="int64"):
        cross_entropy.forward(torch.ones(2, 3), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="rope_qk_norm takes"):
        rope.forward(*[torch.ones(1, 2, 1, 4)] * 2, *[torch.ones(4)] * 2, *[torch.ones(1, 3, 4)] * 2)
    with pytest.raises(ValueError, match="betas"):
        adamw.AdamW([torch.ones(1)], betas=(1.0, 0.9))


def test_fake_tensors_see_the_operators_without_triton() -> None:
    """A patched Qwen3 traces on fake tensors: shapes and dtypes are the unpatched model's."""
    transformers = pytest.importorskip("transformers")
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = transformers.Qwen3Config(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        patch_layers.patch(model)
        tokens = torch.zeros(2, 5, dtype=torch.int64)
        states = model.model(input_ids=tokens, use_cache=False, attention_mask={"full_attention": None})
        logits = model.lm_head(states.last_hidden_state)
        loss = model.loss_function(logits=logits, labels=tokens, vocab_size=96)
        loss.backward()
    assert logits.shape == (2, 5, 96)
    assert (loss.shape, loss.dtype) == ((), torch.float32)
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_configurations_fit_the_part(run_script: Callable[..., str]) -> None:
    rows = rows_of("compile_memory.py", run_script)
    assert {row["sm"] for row in rows} == {80, 90}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        limit = (
            row["limit_bytes"] if row["sm"] == 90 else shared_memory_limit((8, 9))
        )  # sm_89 runs the instructions of sm_80
        assert row["shared_bytes"] <= limit, row
        assert row["registers"] * row["threads"] <= 65536, row
        # 16 bytes an access where rows are: what is left are row numbers, weights and partial sums, and of lists of
        # tensors the masked end of each, element by element
        of_lists = {"adamw_kernel": 14, "squares_kernel": 2, "root_of_sum_kernel": 0}
        assert row["wide"] >= of_lists.get(row["kernel"], row["accesses"] / 2), row


# --- On a GPU ---

GPU_SHAPES: tuple[Fused, ...] = (
    *(
        RmsNorm(rows=rows, n=n, residual=residual)
        for rows, n in (
            (1, 8), (1023, 100), (4096, 128), (1024, 1024), (777, 1536), (2049, 5120), (64, 8192), (3, 16384),
        )
        for residual in (False, True)
    ),
    RopeQkNorm(batch=2, seq=1000, heads=16, kv_heads=8, head_dim=128),
    RopeQkNorm(batch=1, seq=77, heads=3, kv_heads=1, head_dim=64),
    RopeQkNorm(batch=3, seq=5, heads=2, kv_heads=2, head_dim=20),
    SwiGlu(numel=1),
    SwiGlu(numel=3 * 1024 * 1024 + 5),
    CrossEntropy(rows=1024, vocab=151936),
    CrossEntropy(rows=33, vocab=50257),
    CrossEntropy(rows=40, vocab=50258),  # pairs of numbers, not at multiples of 16 bytes
    CrossEntropy(rows=7, vocab=5),
    AdamW(numel=1 << 24, tensors=7),
    AdamW(numel=1001, tensors=1001),
)  # fmt: skip


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
class TestOnDevice:
    @pytest.mark.parametrize("shape", [d for s in GPU_SHAPES for d in directions(s)], ids=lambda shape: shape.key)
    @pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
    def test_agrees_with_the_reference_and_repeats(self, shape: Fused, dtype: str) -> None:
        if isinstance(shape, AdamW) and dtype != "fp32":
            pytest.skip("AdamW is fp32")
        shape = replace(shape, dtype=dtype)
        operands, ref, out = measured(shape, "triton", "cuda")
        error, tolerance = MODULES[type(shape)].check(out, ref, operands, shape)
        assert error <= tolerance
        _, _, again = measured(shape, "triton", "cuda")
        assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))

    @pytest.mark.parametrize(
        "shape",
        [
            RmsNorm(rows=501, n=1000, residual=True),
            RmsNorm(rows=301, n=4096, direction="bwd", residual=True),
            RopeQkNorm(batch=1, seq=301, heads=5, kv_heads=2, head_dim=128, direction="bwd"),
            *directions(CrossEntropy(rows=200, vocab=20000)),
        ],
        ids=lambda shape: shape.key,
    )
    def test_every_candidate_configuration(self, shape: Fused) -> None:
        module = MODULES[type(shape)]
        operands = module.operands(shape, "cuda")
        ref = module.reference(operands, shape)
        sizes = {RmsNorm: "n", RopeQkNorm: "head_dim"}.get(type(shape))
        extra = (getattr(shape, sizes),) if sizes else ()
        for config in module.candidates(shape.direction, *extra):
            try:
                out = module.triton_call(shape, operands, config)()
            except Exception as problem:  # a part with less shared memory than sm_90
                if "out of resource" not in str(problem):
                    raise
                continue
            error, tolerance = module.check(out, ref, operands, shape)
            assert error <= tolerance, config

    def test_offsets_beyond_two_to_the_31(self) -> None:
        if torch.cuda.mem_get_info()[0] < 40 << 30:
            pytest.skip("needs 40 GB of free device memory")
        rows, vocab = 16384, 151936  # 2.49e9 logits
        logits = torch.randn(rows, vocab, dtype=torch.bfloat16, device="cuda")
        target = torch.randint(0, vocab, (rows,), device="cuda")
        loss, gradient = cross_entropy.loss_and_gradient(logits, target)
        saved = cross_entropy.forward(logits, target)
        from_lse = cross_entropy.backward(torch.ones_like(loss), logits, target, *saved[1:])
        tail = slice(rows - 64, rows)
        want = torch.softmax(logits[tail].float(), -1)
        want[torch.arange(64, device="cuda"), target[tail]] -= 1
        for got in (gradient, from_lse):
            assert torch.allclose(got[tail].float() * rows, want, rtol=2.0**-7, atol=1e-9)
        del gradient, from_lse, saved
        up = torch.randn_like(logits)
        out = swiglu.forward(logits, up)
        assert torch.equal(out[tail], swiglu.forward(logits[tail], up[tail]))
        del up, out
        q = logits.view(-1)[: 1_100_000 * 2048].view(1, -1, 16, 128)  # 2.25e9 elements
        norms = torch.randn(2, 128, dtype=torch.bfloat16, device="cuda")
        tables = rope.tables(q.shape[1], 128, "cuda")
        rotated = rope.forward(q, q[:, :, :1], *norms, *tables)
        late = [x[:, -64:] for x in (q, q[:, :, :1])]
        want_late = rope.forward(*late, *norms, *(x[:, -64:] for x in tables))
        assert all(torch.equal(x[:, -64:], y) for x, y in zip(rotated, want_late, strict=True))
        gradients = rope.backward(*rotated, q, q[:, :, :1], *norms, *tables)
        want_late = rope.backward(*want_late, *late, *norms, *(x[:, -64:] for x in tables))
        assert all(torch.equal(x[:, -64:], y) for x, y in zip(gradients[:2], want_late[:2], strict=True))
        del rotated, gradients, tables
        wide = logits.view(-1)[: 1_100_000 * 2048].view(-1, 2048)
        weight = torch.randn(2048, dtype=torch.bfloat16, device="cuda")
        y, _, rstd = rmsnorm.forward(wide, weight)
        assert torch.equal(y[-64:], rmsnorm.forward(wide[-64:], weight)[0])
        dx, _, _ = rmsnorm.backward(y, wide, weight, rstd)
        assert torch.equal(dx[-64:], rmsnorm.backward(y[-64:], wide[-64:], weight, rstd[-64:])[0])

    def test_nan_and_infinity_as_in_torch(self) -> None:
        odd = torch.randn(64, 9000, device="cuda", dtype=torch.bfloat16)
        odd[0, 3], odd[1, 3], odd[2, 3], odd[3] = float("nan"), float("inf"), -float("inf"), -float("inf")
        weight = torch.ones(9000, device="cuda", dtype=torch.bfloat16)
        pairs = [
            (rmsnorm.forward(odd, weight)[0], rmsnorm.rms_norm_torch(odd, weight)[0]),
            (swiglu.forward(odd, odd), swiglu.swiglu_torch(odd, odd)[0]),
        ]
        target = torch.zeros(64, dtype=torch.int64, device="cuda")
        for row in range(5):
            one = odd[row : row + 1].clone().requires_grad_()
            ours = cross_entropy.cross_entropy(one, target[:1])
            torchs = cross_entropy.cross_entropy_torch(one, target[:1])
            pairs += [(ours, torchs), (torch.autograd.grad(ours, one)[0], torch.autograd.grad(torchs, one)[0])]
        for got, want in pairs:
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(got.isinf(), want.isinf())

    @pytest.mark.parametrize("vocab", [20000, 20001])
    def test_linear_cross_entropy_in_chunks(self, vocab: int) -> None:
        """The gradient written over the logits, which a row's programs share or (odd) do not."""
        torch.manual_seed(0)
        hidden, weight = (torch.randn(n, 256, device="cuda").mul(0.2).bfloat16().requires_grad_() for n in (300, vocab))
        target = torch.randint(0, vocab, (300,), device="cuda")
        target[::7] = -100
        ours = cross_entropy.linear_cross_entropy(hidden, weight, target, chunk_rows=128)
        torchs = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target)
        assert torch.allclose(ours, torchs, rtol=1e-4)
        for got, want in zip(
            torch.autograd.grad(ours, (hidden, weight)), torch.autograd.grad(torchs, (hidden, weight)), strict=True
        ):
            assert (got - want).abs().max() <= 0.02 * want.abs().max()

    @pytest.mark.parametrize("shape", [d for s in SMALL for d in directions(s)], ids=lambda shape: shape.key)
    def test_replays_from_a_graph(self, shape: Fused) -> None:
        module = MODULES[type(shape)]
        operands = module.operands(shape, "cuda")
        ref = module.reference(operands, shape)
        copies = [x.clone() for x in operands]
        call = module.prepare(shape, "triton", copies)
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        for copy, original in zip(copies, operands, strict=True):
            copy.copy_(original)
        graph.replay()
        torch.cuda.synchronize()
        error, tolerance = module.check(captured, ref, operands, shape)
        assert error <= tolerance

    @pytest.mark.parametrize("rows", [8, 20000])
    def test_kernels_launched_ahead_keep_the_order(self, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
        """A chain in which each reads what the one before writes, and writes where others, freed, were just read: as
        without, to the bit, in a stream and from a graph."""
        from flopcast.kernels.triton_ahead import launched_ahead

        torch.manual_seed(0)
        start, weight = (torch.randn(*n, 1024, device="cuda").bfloat16() for n in ((rows,), ()))
        square = torch.randn(1024, 1024, device="cuda").bfloat16()
        tables = rope.tables(rows, 128, "cuda")

        def chain(x: Tensor) -> Tensor:
            for _ in range(30):
                y, total, _ = rmsnorm.forward(x, weight, residual=x)
                y = matmul.matmul_triton(rmsnorm.forward(y, weight)[0], square, "nt")
                heads = y.view(1, rows, 8, 128)
                turned, few, norms = rope.backward(
                    heads, heads[:, :, :2], heads, heads[:, :, 2:4], weight[:128], weight[128:256], *tables
                )
                x = rmsnorm.forward(turned.view(rows, 1024), weight, residual=total)[0].clone()
                x[:, :256] += few.view(rows, 256)
                x[:, :128] += norms[0]
            return x

        results = []
        for switch in ("0", "1"):
            monkeypatch.setenv("FLOPCAST_PDL", switch)
            launched_ahead.cache_clear()
            results.append(chain(start))
            torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(start)
        launched_ahead.cache_clear()
        assert results[0].isfinite().all()
        assert torch.equal(*results)
        for _ in range(3):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(captured, results[0])

    @pytest.mark.parametrize("compiled", [False, True])
    @pytest.mark.parametrize("autocast", [True, False])
    def test_qwen3_trains_the_same_patched(self, autocast: bool, compiled: bool) -> None:
        """20 steps, bf16 autocast or all bf16: as near to the unpatched model as that is to one step's bf16 noise."""
        transformers = pytest.importorskip("transformers")
        config = transformers.Qwen3Config(
            vocab_size=4096, hidden_size=512, intermediate_size=1536, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        )  # fmt: skip
        torch.manual_seed(0)
        tokens = torch.randint(0, 4096, (4, 257), device="cuda")

        def losses(fused: bool) -> list[float]:
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").cuda()
            if not autocast:
                model = model.bfloat16()
            make: Any = torch.optim.AdamW
            if fused:
                patch_layers.patch(model)
                make = adamw.AdamW if autocast else make
            optimizer, seen = make(model.parameters(), lr=3e-4), []
            run = torch.compile(model) if compiled and fused else model
            for _ in range(20):
                with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                    loss: Tensor = run(input_ids=tokens, labels=tokens, use_cache=False).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append(loss.item())
            return seen

        plain, fused = losses(False), losses(True)
        assert plain[-1] < plain[0] - 0.5
        assert fused == pytest.approx(plain, rel=5e-3 if autocast else 2e-2)

    def test_adamw_is_torchs_fused(self) -> None:
        torch.manual_seed(0)
        start = [torch.randn(size, device="cuda") for size in ((300, 7), (5,), (1 << 20,), (1,), (4097,))]
        ours, torchs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
        mine, fused = adamw.AdamW(ours, lr=1e-2), torch.optim.AdamW(torchs, lr=1e-2, fused=True)
        for _ in range(10):
            for a, b in zip(ours, torchs, strict=True):
                a.grad = torch.randn_like(a)
                b.grad = a.grad.clone()
            mine.step()
            fused.step()
        for a, b in zip(ours, torchs, strict=True):
            assert (a - b).abs().max() <= 2e-6 * b.abs().max()
