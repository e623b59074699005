"""The memory-bound Triton kernels in Triton's interpreter, on the CPU; run by test_memory_kernels.py in a process of
its own. fp16 and fp32 only: the interpreter truncates where a device rounds to bf16."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flopcast.kernels import adamw, aten, cross_entropy, gradient_norm, patch_layers, rmsnorm, rope, swiglu
from flopcast.kernels.rowwise import RowConfig, load_triton
from flopcast.kernels.shapes import AdamW, Call, CrossEntropy, Fused, Operand, RmsNorm, RopeQkNorm, SwiGlu
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.settings import Recipe

BOTH = ("fwd", "bwd")
SHAPES: list[tuple[Any, Fused]] = [
    *(
        (rmsnorm, RmsNorm(rows=rows, n=n, residual=residual, direction=direction, dtype=dtype))
        for direction in BOTH
        for rows, n, residual, dtype in (
            (7, 48, False, "fp16"), (65, 100, True, "fp32"), (1, 1, True, "fp32"), (13, 2304, False, "fp32"),
            (40, 128, True, "fp16"),
        )
    ),
    *(
        (rope, RopeQkNorm(batch=b, seq=s, heads=h, kv_heads=k, head_dim=d, direction=direction, dtype=dtype))
        for direction in BOTH
        for b, s, h, k, d, dtype in ((2, 37, 3, 1, 20, "fp32"), (1, 70, 4, 2, 64, "fp16"), (1, 1, 1, 1, 2, "fp32"))
    ),
    *(
        (swiglu, SwiGlu(numel=numel, direction=direction, dtype=dtype))
        for direction in BOTH
        for numel, dtype in ((1, "fp32"), (5001, "fp16"), (4096, "fp32"))
    ),
    *(
        (cross_entropy, CrossEntropy(rows=rows, vocab=vocab, direction=direction, dtype=dtype))
        for direction in ("fwd", "bwd", "both")
        for rows, vocab, dtype in ((19, 37, "fp32"), (5, 1000, "fp16"), (2, 20011, "fp32"))
    ),
    *((adamw, AdamW(numel=numel, tensors=tensors)) for numel, tensors in ((1, 1), (30000, 3), (9001, 4))),
]  # fmt: skip


@pytest.mark.parametrize(("module", "shape"), SHAPES, ids=lambda x: getattr(x, "key", ""))
def test_agrees_with_the_reference(module: Any, shape: Fused) -> None:
    operands = module.operands(shape, "cpu")
    ref = module.reference(operands, shape)
    out = module.prepare(shape, "triton", [x.clone() for x in operands])()
    error, tolerance = module.check(out, ref, operands, shape)
    assert error <= tolerance


@pytest.mark.parametrize("config", [RowConfig(1, 1, 1, 1), RowConfig(4, 4, 2, 3)])
def test_any_configuration_gives_the_same(config: RowConfig) -> None:
    for module, shape in (
        (rmsnorm, RmsNorm(rows=21, n=40, residual=True, direction="bwd", dtype="fp32")),
        (rope, RopeQkNorm(batch=1, seq=9, heads=2, kv_heads=1, head_dim=8, direction="bwd", dtype="fp32")),
    ):
        operands: tuple[Tensor, ...] = module.operands(shape, "cpu")
        out = module.triton_call(shape, operands, config)()
        error, tolerance = module.check(out, module.reference(operands, shape), operands, shape)
        assert error <= tolerance


def test_rope_reads_gradients_where_they_lie() -> None:
    """In pairs: from tensors as they are made, and from attention's [B, H, S, D], whose batches do not follow one
    another as tokens do. One by one: at odd strides, and of another dtype. All alike, to the bit."""
    shape = RopeQkNorm(batch=2, seq=23, heads=3, kv_heads=1, head_dim=20, direction="bwd", dtype="fp16")
    *rows, dq, dk = rope.operands(shape, "cpu")
    want = rope.backward(dq, dk, *rows)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (dq, dk)]
    odd = [torch.cat((x, x[..., :1]), -1)[..., :-1] for x in (dq, dk)]
    late = [torch.cat((x.new_zeros(1), x.reshape(-1)))[1:].view(x.shape) for x in (dq, dk)]
    for other in (turned, odd, late, [dq.float(), dk.float()], [dq, odd[1]]):
        assert all(map(torch.equal, rope.backward(*other, *rows), want))


def test_a_norm_of_whole_blocks_is_that_of_masked_ones() -> None:
    for residual in (False, True):
        x, *others = rmsnorm.operands(RmsNorm(rows=32, n=128, residual=residual, dtype="fp16"), "cpu")
        total, weight = others if residual else (None, others[0])
        apart = torch.cat((x, x), -1)[:, :128]
        want = rmsnorm.forward(x, weight, residual=total)
        few = rmsnorm.forward(x[:31], weight, residual=None if total is None else total[:31])
        for got, full in zip((*rmsnorm.forward(apart, weight, residual=total), *few), (*want, *want), strict=True):
            assert got is full is None or torch.equal(got, full[: len(got)])


def test_rows_read_once_give_the_same() -> None:
    """Pairs of 16-bit numbers in pieces; every row its target, ignored ones and one beyond the vocabulary."""
    for vocab, config in (
        (1000, cross_entropy.VocabConfig(1024, 1, split=True)),
        (30, cross_entropy.VocabConfig(8192, 4, split=True)),
    ):
        shape = CrossEntropy(rows=18, vocab=vocab, dtype="fp16")
        operands = cross_entropy.operands(shape, "cpu")
        out = cross_entropy.triton_call(shape, operands, config)()
        error, tolerance = cross_entropy.check(out, cross_entropy.reference(operands, shape), operands, shape)
        assert error <= tolerance
        operands[1][0] = vocab
        assert cross_entropy.triton_call(shape, operands, config)()[0].isnan()


def test_programs_that_share_a_row_agree() -> None:
    """Three a row. Here they run one after the other, so that what they tell one another, maximum and sum of each
    block, is there before: they must say the same themselves and make the gradient of the whole row."""
    shape, config = (CrossEntropy(rows=9, vocab=2500, dtype="fp16"), cross_entropy.VocabConfig(1024, 1, split=True))
    logits, target = cross_entropy.operands(shape, "cpu")
    target[3], target[4] = 2499, 1024
    logits[5, 1024:2048] = -math.inf
    target[5] = 7
    largest, sums = torch.full((9, 3), -math.inf), torch.zeros(9, 3)
    for i in range(3):
        block = logits[:, 1024 * i : 1024 * (i + 1)].float()
        largest[:, i] = block.amax(1)
        sums[:, i] = (block - largest[:, i : i + 1].clamp(min=-1e30)).exp().sum(1)
    words = torch.zeros(9, 4, dtype=torch.int64)
    words[:, :3] = (largest.view(torch.int32).long() << 32) | ((sums.view(torch.int32).long() + 1) & 0xFFFFFFFF)
    told, out, losses = words.clone(), torch.empty_like(logits), torch.empty(9)
    shared = load_triton("cross_entropy_split", logits)
    count = (target != -100).sum().float().reshape(1)
    shared.launch_split(logits, target, losses, count, words, out, -100, config)
    got = losses.sum() / count[0], out
    error, tolerance = cross_entropy.check(
        got, cross_entropy.reference((logits, target), shape), (logits, target), shape
    )
    assert error <= tolerance
    kept = target != -100
    assert torch.equal(words[kept] >> 32, told[kept] >> 32)
    said = ((words - 1) & 0xFFFFFFFF).to(torch.int32).view(torch.float32)[kept, :3]
    assert torch.allclose(said, sums[kept], rtol=1e-5)
    assert torch.equal(words[:, 3], told[:, 3])


def leaves(*sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size, dtype=dtype).requires_grad_() for size in sizes]


def same_gradients(ours: Tensor, torchs: Tensor, of: list[Tensor]) -> None:
    seed = torch.randn(ours.shape)
    for got, want in zip(
        torch.autograd.grad((ours * seed).sum(), of), torch.autograd.grad((torchs * seed).sum(), of), strict=True
    ):
        assert got.dtype == want.dtype
        assert torch.allclose(got.float(), want.float(), atol=2e-3 if got.dtype == torch.float16 else 2e-5)


def test_norm_of_a_sum_with_two_dtypes() -> None:
    """As under autocast: a projection's 16 bits onto an fp32 residual, handed on in 16 bits."""
    (x,) = leaves((2, 5, 16), dtype=torch.float16)
    residual, weight = leaves((2, 5, 16), (16,))
    y, total = rmsnorm.add_rms_norm(x, residual, weight, out_dtype=torch.float16)
    want, total_want = rmsnorm.add_rms_norm_torch(x, residual, weight)
    assert (y.dtype, total.dtype) == (torch.float16, torch.float32)
    assert torch.equal(total, total_want)
    assert torch.allclose(y.float(), want, atol=4e-3)
    same_gradients(y.float() + total, want.half().float() + total_want, [x, residual, weight])
    with torch.autocast("cpu", torch.float16):
        assert rmsnorm.rms_norm(residual, weight).dtype == torch.float16


def test_strided_operands_are_read_in_place() -> None:
    """Queries and keys as views of one packed projection; rows of a wider matrix."""
    (packed,) = leaves((2, 7, 5 * 8))
    q, k = packed[..., :24].unflatten(-1, (3, 8)), packed[..., 24:32].unflatten(-1, (1, 8))
    weights = leaves((8,), (8,))
    tables = rope.tables(7, 8, "cpu")
    ours, torchs = (rope.rope_qk_norm(q, k, *weights, *tables), rope.rope_qk_norm_torch(q, k, *weights, *tables))
    for got, want in zip(ours, torchs, strict=True):
        assert torch.allclose(got, want, atol=1e-5)
    same_gradients(torch.cat(ours, 2), torch.cat(torchs, 2), [packed, *weights])
    rows, weight = packed[0, :, 3:19], torch.randn(16)
    assert torch.equal(rmsnorm.forward(rows, weight)[0], rmsnorm.forward(rows.contiguous(), weight)[0])
    columns = packed[0].T  # stride 1 is elsewhere: copied
    assert torch.equal(rmsnorm.forward(columns, torch.ones(7))[0], rmsnorm.forward(columns.clone(), torch.ones(7))[0])
    expanded = torch.ones(()).expand(3, 16)  # what y.sum().backward() hands over
    _, _, rstd = rmsnorm.forward(rows[:3], weight)
    for got, want in zip(
        rmsnorm.backward(expanded, rows[:3], weight, rstd),
        rmsnorm.backward(expanded.clone(), rows[:3], weight, rstd),
        strict=True,
    ):
        assert got is want is None or torch.equal(got, want)


def test_a_table_for_every_sequence() -> None:
    """Position ids that differ over the batch: cos and sin [B, S, D]."""
    q, k = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 1, 8)
    cos, sin = (torch.cat((x, x.roll(2, 1))) for x in rope.tables(6, 8, "cpu"))
    for got, want in zip(
        rope.forward(q, k, torch.ones(8), torch.ones(8), cos, sin),
        rope.rope_qk_norm_torch(q, k, torch.ones(8), torch.ones(8), cos, sin),
        strict=True,
    ):
        assert torch.allclose(got, want, atol=1e-5)


def same_or_both_nan(got: Tensor, want: Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.allclose(got.nan_to_num(), want.nan_to_num(), atol=1e-5)


def test_nan_and_infinity_as_in_torch() -> None:
    """Compared with torch's own sums in the order of the definition, row by row."""
    inf = math.inf
    odd = torch.tensor(
        [[1.0, -2, 3, 4], [math.nan, 1, 2, 3], [inf, 1, 2, 3], [-inf, 1, -inf, 3], [-inf] * 4, [0.0] * 4]
    )
    weight = torch.tensor([1.0, 2, 3, 4])
    same_or_both_nan(rmsnorm.forward(odd, weight)[0], rmsnorm.rms_norm_torch(odd, weight)[0])
    up = torch.full_like(odd, 2.0)
    same_or_both_nan(swiglu.forward(odd, up), swiglu.swiglu_torch(odd, up)[0])
    target = torch.tensor([1, 1, 1, 1, 1, 1])
    for keep in range(len(odd)):
        logits, one = odd[keep : keep + 1].clone().requires_grad_(), target[:1]
        for at_forward in (True, False):
            ours = cross_entropy.cross_entropy(logits, one, gradient_at_forward=at_forward)
            torchs = cross_entropy.cross_entropy_torch(logits, one)
            same_or_both_nan(ours, torchs)
            same_or_both_nan(*(torch.autograd.grad(x, logits)[0] for x in (ours, torchs)))


@pytest.mark.parametrize("at_forward", [True, False])
def test_cross_entropy_in_training(at_forward: bool) -> None:
    (logits,) = leaves((9, 50))
    target = torch.randint(0, 50, (9,))
    target[4] = -1
    ours = cross_entropy.cross_entropy(logits, target, -1, "sum", gradient_at_forward=at_forward) * 3
    torchs = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum") * 3
    assert torch.allclose(ours, torchs)
    same_gradients(ours, torchs, [logits])
    all_ignored = cross_entropy.cross_entropy(logits, torch.full((9,), -100), gradient_at_forward=at_forward)
    assert all_ignored.isnan()  # 0 of 0, as in torch


def test_a_gradient_is_scaled_once() -> None:
    """Made in the forward and scaled where it lies: a second backward must not scale it again in silence."""
    (logits,) = leaves((3, 10))
    loss = cross_entropy.cross_entropy(logits, torch.tensor([1, 2, 3])) * 2
    torch.autograd.grad(loss, logits, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


@pytest.mark.parametrize("chunk_rows", [4, 100])
def test_linear_cross_entropy(chunk_rows: int) -> None:
    hidden, weight = leaves((11, 8), (30, 8))
    target = torch.randint(0, 30, (11,))
    target[::4] = -100
    with FlopCounterMode(display=False) as counter:
        ours = cross_entropy.linear_cross_entropy(hidden, weight, target, chunk_rows=chunk_rows) * 2
    assert counter.get_total_flops() == 3 * 2 * 11 * 8 * 30
    torchs = torch.nn.functional.cross_entropy(hidden @ weight.T, target) * 2
    assert torch.allclose(ours, torchs)
    same_gradients(ours, torchs, [hidden, weight])


def test_adamw_is_torchs_through_state_dicts_and_missing_gradients() -> None:
    torch.manual_seed(0)
    start = [torch.randn(3, 5), torch.randn(10000), torch.randn(7)[1:]]  # the last not at a multiple of 16 bytes
    ours, torchs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    hyper: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    mine, fused = adamw.AdamW(ours, **hyper), torch.optim.AdamW(torchs, fused=True, **hyper)
    for step in range(6):
        for a, b in zip(ours, torchs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        if step == 2:
            ours[0].grad = torchs[0].grad = None
        if step == 4:  # each continues from the other's state
            states = copy.deepcopy((mine.state_dict(), fused.state_dict()))
            mine, fused = adamw.AdamW(ours), torch.optim.AdamW(torchs, fused=True)
            mine.load_state_dict(states[1])
            states[0]["param_groups"] = states[1]["param_groups"]
            fused.load_state_dict(states[0])
        mine.step()
        fused.step()
        assert mine.state[ours[0]].keys() == fused.state[torchs[0]].keys()
        for a, b in zip(ours, torchs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="contiguous fp32"):
        adamw.make_table(*[[torch.ones(4, 4).T]] * 4)


def test_every_parameter_has_its_own_number_of_steps() -> None:
    """Whichever of them have gradients in a step, as of idle experts, and whoever else has the optimizer's state."""
    torch.manual_seed(0)
    ours, torchs = ([torch.full((5,), 1.0 + i).requires_grad_() for i in range(3)] for _ in range(2))
    mine, fused = adamw.AdamW(ours, lr=1e-2), torch.optim.AdamW(torchs, lr=1e-2, fused=True)
    for step, busy in enumerate(((0, 1), (1, 2), (0, 1, 2), (0,), (0, 1, 2), (0, 1, 2))):
        if step == 4:  # a copy steps on by itself, and what it was made from does not notice
            copied = copy.deepcopy(mine)
            for x in copied.param_groups[0]["params"]:
                x.grad = torch.ones_like(x)
            copied.step()
        for i, (a, b) in enumerate(zip(ours, torchs, strict=True)):
            a.grad = torch.randn_like(a) if i in busy else None
            b.grad = a.grad
        mine.step()
        fused.step()
        assert [mine.state[x]["step"].item() for x in ours if x in mine.state] == [
            fused.state[x]["step"].item() for x in torchs if x in fused.state
        ]
        for a, b in zip(ours, torchs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-6)


def test_a_copied_optimizer_clips_as_the_first() -> None:
    parameter = torch.ones(4, requires_grad=True)
    parameter.grad = torch.ones(4)
    copied = copy.deepcopy(adamw.AdamW([parameter], max_norm=0.5))
    copied.step()
    assert copied.grad_norm is not None
    assert copied.grad_norm.item() == pytest.approx(2.0)


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_adamw_clips_as_torch_does_before_it(max_norm: float) -> None:
    """Over two groups, with a parameter that has no gradient and one past a chunk's end; gradients stay as they are."""
    torch.manual_seed(0)
    start = [torch.randn(3, 5), torch.randn(40000), torch.randn(7)[1:], torch.randn(2)]
    ours, torchs = ([x.clone().requires_grad_() for x in start] for _ in range(2))
    groups: list[Any] = [[{"params": x[:2]}, {"params": x[2:], "lr": 1e-3}] for x in (ours, torchs)]
    mine = adamw.AdamW(groups[0], lr=1e-2, max_norm=max_norm)
    theirs = torch.optim.AdamW(groups[1], lr=1e-2, fused=True)
    for _ in range(3):
        for a, b in zip(ours[:3], torchs[:3], strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        kept = [x.grad.clone() for x in ours[:3] if x.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(torchs, max_norm)
        mine.step()
        theirs.step()
        assert mine.grad_norm is not None
        assert torch.allclose(mine.grad_norm[0], norm, rtol=1e-6)
        for a, b in zip(ours, torchs, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=2e-6)
        assert all(torch.equal(a.grad, b) for a, b in zip(ours[:3], kept, strict=True) if a.grad is not None)
    ours[0].grad = torch.full((3, 5), torch.nan)
    mine.step()
    assert ours[1].isnan().all()  # as torch's: a norm that is no number leaves no parameter


@pytest.mark.parametrize("precision", ["fp32", "autocast-fp16"])
def test_a_training_step_clips_once_whoever_clips(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole step, scaled gradients included: with our optimizer as with torch's behind clip_grad_norm_."""
    config = qwen3().config.to_dict()
    calls = []
    clip = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *args: (calls.append(args), clip(*args))[1])
    found = []
    for optimizer in ("adamw-fused", "adamw-triton"):
        recipe = Recipe(batch=2, seq=9, precision=precision, optimizer=optimizer, clip=1e-3)
        step = training_step.build(config, "cpu", recipe)
        for _ in range(3):
            step.run()
        found.append([x.detach() for x in step.model.parameters()])
        assert len(calls) == 3  # all of torch's step
    for ours, torchs in zip(*found, strict=True):
        assert torch.allclose(ours, torchs, rtol=0, atol=2e-5)  # of 3 steps of 1e-3


def recorded(name: str, numels: list[int], numbers: str = "", norm: bool = False) -> Call:
    """A call of an optimizer's operator on lists of tensors, as a trace holds it."""
    lists = 1 if name == "gradient_norm" else 4
    inputs = [Operand((n,), (1,), "fp32") for _ in range(lists) for n in numels]
    count = len(numels)
    places = ",".join(f'{{"ts":[{i * count},{count}]}}' for i in range(lists))
    written = tuple(i for i in range(len(inputs)) if not count <= i < 2 * count) if lists == 4 else ()
    last = f',{{"t":{len(inputs)}}},0.5' if norm else ""
    one = Operand((1,), (1,), "fp32")
    return Call(
        f"flopcast.{name}.default", (*inputs, *([one] if norm else [])), (one,) if lists == 1 else (),
        f"[{places}{numbers}{last}]", written=written,
    )  # fmt: skip


STEP = ",3,0.01,0.9,0.95,1e-08,0.1"


@pytest.mark.parametrize(
    "call",
    [
        recorded("adamw_", [5, 70000, 1], STEP),
        recorded("adamw_clipped_", [5, 70000, 1], STEP, norm=True),
        recorded("gradient_norm", [5, 70000, 1]),
    ],
    ids=lambda call: call.op,
)
def test_recorded_calls_of_the_optimizer_are_replayed_and_checked(call: Call) -> None:
    """Also when more sets of operands take turns than tables are kept, and against a kernel that would be wrong."""
    sets = [aten.operands(call, "cpu", seed) for seed in range(10)]
    expected = [aten.reference(x, call) for x in sets]
    made = [aten.prepare(call, "triton", x) for x in sets]
    outs = [one() for one in made]
    for out, want, x in zip(outs, expected, sets, strict=True):
        error, tolerance = aten.check(out, want, x, call)
        assert error <= tolerance / 10
    if call.written:  # without a step
        fresh = aten.operands(call, "cpu")
        error, tolerance = aten.check(None, expected[0], fresh, call)
        assert error > tolerance


def test_a_norm_takes_what_it_can_read() -> None:
    assert gradient_norm.gradient_norm([torch.full((2, 2), 2.0), torch.zeros(0)]).tolist() == [4.0]
    for wrong in ([torch.ones(4, 4).T], [torch.ones(3).half()]):
        with pytest.raises(ValueError, match="contiguous fp32"):
            gradient_norm.make_table(wrong)
    with pytest.raises(ValueError, match="at least one"):
        gradient_norm.gradient_norm([])
    with pytest.raises(ValueError, match="max_norm must be above 0"):
        adamw.AdamW([torch.ones(1)], max_norm=-1.0)


def test_the_operators_obey_torchs_rules() -> None:
    x, residual, weight, half = leaves((5, 16), (5, 16), (16,), (5, 16))
    target = torch.tensor([1, 2, 3, -100, 4])
    tables = rope.tables(4, 8, "cpu")
    q, k, q_weight, k_weight = leaves((1, 4, 2, 8), (1, 4, 1, 8), (8,), (8,))
    lists = [[torch.rand(3), torch.rand(5)] for _ in range(4)]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    cases: tuple[tuple[Any, tuple[Any, ...]], ...] = (
        (rmsnorm.rms_norm_op, (x, weight, 1e-6, None)),
        (rmsnorm.add_rms_norm_op, (half.half().detach().requires_grad_(), residual, weight, 1e-6, torch.float16)),
        (rope.rope_qk_norm_op, (q, k, q_weight, k_weight, *tables, 1e-6, None)),
        (swiglu.swiglu_op, (x, residual)),
        (cross_entropy.cross_entropy_op, (x, target, -100, "mean")),
        (cross_entropy.cross_entropy_with_gradient_op, (x, target, -100, "mean")),
        (cross_entropy.linear_cross_entropy_op, (x, residual, target, -100, "mean", 2)),
        (cross_entropy.scale_op, (torch.rand(9), torch.tensor(2.0))),
        (adamw.adamw_op, (*lists, 1, 1e-2, 0.9, 0.99, 1e-8, 0.1)),
        (adamw.adamw_clipped_op, (*lists, 1, 1e-2, 0.9, 0.99, 1e-8, 0.1, torch.ones(1), 0.5)),
        (gradient_norm.gradient_norm_op, (lists[0],)),
    )
    for operator, arguments in cases:
        torch.library.opcheck(getattr(operator, "overload", operator), arguments, test_utils=checks)


def qwen3(**changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        **{"num_hidden_layers": 1, **changes}, vocab_size=96, hidden_size=32, intermediate_size=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config)


def test_qwen3_trains_the_same_patched() -> None:
    torch.manual_seed(1)
    tokens = torch.randint(0, 96, (2, 11))
    labels = tokens.clone()
    labels[1, 4:] = -100
    runs = []
    for fused in (False, True):
        model = qwen3()
        make: Any = torch.optim.AdamW
        if fused:
            patch_layers.patch(model)
            make = adamw.AdamW
        optimizer, losses = make(model.parameters(), lr=1e-2), []
        for _ in range(3):
            loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runs.append(losses)
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert runs[0][-1] < runs[0][0] - 0.2


def test_a_patched_qwen3_runs_our_operators_and_unpatched_none() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Ours(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "flopcast":
                self.seen.append(func.__name__.split(".")[0])
            return func(*args, **(kwargs or {}))

    model, tokens = qwen3(num_hidden_layers=2), torch.randint(0, 96, (1, 5))
    with Ours() as during, patch_layers.patched(model), torch.no_grad():
        patch_layers.patch(model)  # twice is once
        fused = model(input_ids=tokens, labels=tokens, num_items_in_batch=7)
    with Ours() as after, torch.no_grad():
        plain = model(input_ids=tokens, labels=tokens, num_items_in_batch=7)
    layer = ["rms_norm", "rope_qk_norm", "add_rms_norm", "swiglu"]
    assert during.seen == [*layer, *layer, "rms_norm", "cross_entropy"]
    assert after.seen == []
    assert torch.allclose(fused.logits, plain.logits, atol=1e-5)
    assert torch.allclose(fused.loss, plain.loss, atol=1e-5)
    assert patch_layers._UNDO not in model.__dict__


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="bf16 is wrong"):
        swiglu.forward(torch.ones(4, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="no layers of Qwen3, Qwen2, Llama or Mistral"):
        patch_layers.patch(torch.nn.Linear(2, 2))
    with pytest.raises(NotImplementedError, match="gelu"):
        patch_layers.patch(qwen3(hidden_act="gelu"))
