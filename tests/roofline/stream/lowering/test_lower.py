"""Calls become work: layouts from strides, attention shapes, memory patterns, bytes and FLOPs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from math import ceil, prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop, sdpa_flop

from flopcast.kernels.shapes import Attention, Call, Dtype, Gemm, Operand
from flopcast.microbench.recipe import training_step
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.stream.lowering.classes import OP_CLASSES
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.lowering.variants import AttentionVariant, CallVariant, parse_variant
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.ops.op_stream import Op, Storage, Stream, TensorRef
from flopcast.roofline.stream.tracer.record_step import record_step

Tracing = Callable[..., Stream]


def contiguous(*shape: int, dtype: str = "fp32") -> Operand:
    return Operand(shape, tuple(prod(shape[i + 1 :]) for i in range(len(shape))), dtype)


def works(stream: Stream) -> list[Work]:
    return [describe(*lowered) for op in stream.ops if (lowered := lower(stream, op)) is not None]


def lowered(name: str, inputs: list[Operand], outputs: list[Operand], args: Any, **op: Any) -> Any:
    tensors = tuple(TensorRef(operand, i) for i, operand in enumerate((*inputs, *outputs)))
    stream = Stream(
        ops=(), tensors=tensors, storages=tuple(Storage(t.operand.bytes, "activation") for t in tensors), n_params=0
    )
    count = len(inputs)
    return lower(
        stream, Op(name, "forward", tuple(range(count)), tuple(range(count, len(tensors))), args=json.dumps(args), **op)
    )


class Head(torch.nn.Module):
    """ids -> embedding -> Linear without bias -> loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.up = torch.nn.Linear(16, 48, bias=False)
        self.down = torch.nn.Linear(48, 8, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(loss=self.down(self.up(self.embed(input_ids))).square().mean())


def test_layouts_of_a_linear_layer_as_torch_really_runs_it() -> None:
    model = Head()
    batch = training_step.causal_lm_batch(torch.randint(0, 32, (3, 4)))
    step = training_step.TrainingStep(model, [torch.optim.AdamW(model.parameters(), fused=True)], batch, "fp32", "cpu")
    stream = record_step(step)
    by_phase = {
        phase: [w[0] for op in stream.ops if op.phase == phase and (w := lower(stream, op)) and isinstance(w[0], Gemm)]
        for phase in ("forward", "backward")
    }
    tokens = 12
    assert by_phase["forward"] == [
        Gemm(m=tokens, n=48, k=16, dtype="fp32", layout="nt"),
        Gemm(m=tokens, n=8, k=48, dtype="fp32", layout="nt"),
    ]
    assert set(by_phase["backward"]) == {
        Gemm(m=8, n=48, k=tokens, dtype="fp32", layout="tn"),
        Gemm(m=tokens, n=48, k=8, dtype="fp32", layout="nn"),
        Gemm(m=48, n=16, k=tokens, dtype="fp32", layout="tn"),
        Gemm(m=tokens, n=16, k=48, dtype="fp32", layout="nn"),
    }
    assert len(by_phase["backward"]) == 4


@pytest.mark.parametrize(
    ("a", "b", "layout"),
    [
        (Operand((8, 4), (4, 1), "bf16"), Operand((4, 6), (1, 4), "bf16"), "nt"),
        (Operand((8, 4), (4, 1), "bf16"), Operand((4, 6), (6, 1), "bf16"), "nn"),
        (Operand((8, 4), (1, 8), "bf16"), Operand((4, 6), (6, 1), "bf16"), "tn"),
        (Operand((8, 4), (1, 8), "bf16"), Operand((4, 6), (1, 4), "bf16"), "tt"),
        (Operand((8, 4), (16, 1), "bf16"), Operand((4, 6), (1, 32), "bf16"), "nt"),  # rows of a wider matrix
        (Operand((1, 4), (4, 1), "bf16"), Operand((4, 6), (1, 4), "bf16"), "nt"),
    ],
)
def test_layout_from_strides(a: Operand, b: Operand, layout: str) -> None:
    shape, backend = lowered("aten.mm.default", [a, b], [contiguous(a.shape[0], 6, dtype="bf16")], [{"t": 0}, {"t": 1}])
    assert shape == Gemm(m=a.shape[0], n=6, k=4, layout=layout)
    assert backend == "torch"
    bias = contiguous(6, dtype="bf16")
    with_bias, _ = lowered(
        "aten.addmm.default", [bias, a, b], [contiguous(a.shape[0], 6, dtype="bf16")], [{"t": 0}, {"t": 1}, {"t": 2}]
    )
    assert with_bias == shape


def test_batched_products() -> None:
    a, b = contiguous(5, 8, 4), contiguous(5, 4, 6)
    shape, _ = lowered("aten.bmm.default", [a, b], [contiguous(5, 8, 6)], [{"t": 0}, {"t": 1}])
    assert shape == Gemm(m=8, n=6, k=4, dtype="fp32", layout="nn", batch=5)
    assert str(describe(shape).variant).startswith("batched/nn/fp32")


@pytest.mark.parametrize("name", ["cudnn", "efficient", "flash"])
@pytest.mark.parametrize("suffix", ["", "_backward"])
def test_masks_and_dropout_of_torchs_own_attention(name: str, suffix: str) -> None:
    """By the places that torch's schema gives them."""
    call = f"_scaled_dot_product_{name}_attention{suffix}"
    places = [argument.name for argument in getattr(torch.ops.aten, call).default._schema.arguments]
    heads, row, square = contiguous(2, 4, 64, 128), contiguous(2, 4, 64, 1), contiguous(2, 1, 64, 64)
    tensors = {"grad_out": heads, "grad_out_": heads, "query": heads, "key": heads, "value": heads, "out": heads,
               "logsumexp": row}  # fmt: skip

    def shape(mask: bool, **given: Any) -> Attention:
        of = {**tensors, "attn_bias": square} if mask else tensors
        inputs = [of[place] for place in places if place in of]
        args = [{"t": [p for p in places if p in of].index(p)} if p in of else given.get(p) for p in places]
        found: Attention = lowered(f"aten.{call}.default", inputs, [heads], args)[0]
        return found

    takes_mask = "attn_bias" in places
    assert shape(takes_mask, dropout_p=0.0).mask is takes_mask
    assert not shape(False, dropout_p=0.0, is_causal=True).mask
    assert shape(False, dropout_p=0.0, is_causal=True).causal
    assert [shape(False, dropout_p=p).dropout for p in (0.0, 0.1)] == [False, True]


def test_attention_shapes(traced: Tracing) -> None:
    config = make_config(width=64, depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512)
    for device, backend in (("cuda", "sdpa"), ("cpu", "sdpa-cpu")):
        stream = traced(config, device=device)
        found = Counter(w for op in stream.ops if (w := lower(stream, op)) and isinstance(w[0], Attention))
        # the processor's own kernel has no grouped heads: torch repeats keys and values for it
        shape = {"batch": 2, "heads": 4, "kv_heads": 2, "seq": 32, "head_dim": 16, "dtype": "bf16"}
        kv_heads = {a.kv_heads for a, _ in found if isinstance(a, Attention)}
        assert kv_heads <= {2, 4}
        shape["kv_heads"] = kv_heads.pop()
        expected = {(Attention(direction=d, **shape), backend): 3 for d in ("fwd", "bwd")}  # type: ignore[arg-type]
        assert found == expected


@pytest.mark.parametrize("mode", ["train", "prefill"])
def test_values_may_be_narrower_than_queries(traced: Tracing, mode: str) -> None:
    """DeepSeek-V3's attention: 128 columns of keys and 64 of positions, and values of 128."""
    config = {
        "model_type": "deepseek_v3", "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "first_k_dense_replace": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    stream = traced(config) if mode == "train" else traced(config, phase="prefill", context=32, precision="bf16")
    found = [w for w in works(stream) if w.op_class == "attention"]
    assert len(found) == (2 if mode == "train" else 1)
    for work in found:
        assert isinstance(work.variant, AttentionVariant)
        assert (work.variant.head_dim, work.variant.value_dim) == (192, 128)


def test_flops_are_torchs_own_counts(traced: Tracing) -> None:
    """2 per multiply-add, against torch.utils.flop_counter on a model without data; causal attention counts half."""
    config = make_config(width=64, depth=3, heads=4, kv_heads=2, head_dim=16, vocab=512)
    stream = traced(config)
    found = works(stream)
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        model = training_step.build_model(config)
        model(input_ids=torch.zeros((2, 32), dtype=torch.int64), use_cache=False).logits.sum().backward()
    counts = counter.get_flop_counts()["Global"]
    rotary = sum(w.flops for w in found if w.op_class == "gemm") - counts[torch.ops.aten.mm]
    assert rotary == 2 * 32 * 8  # positions times 8 frequencies; the counter's other bmm are its attention's
    for work in found:
        if isinstance(work.shape, Attention):
            shape = work.shape
            q = (shape.batch, shape.heads, shape.seq, shape.head_dim)  # keys and values repeated to the query's heads
            full = sdpa_flop(q, q, q) if shape.direction == "fwd" else sdpa_backward_flop(q, q, q, q)
            assert work.flops == full // 2
    assert all(w.flops == 0 for w in found if w.op_class not in ("gemm", "attention"))


@pytest.mark.parametrize(("optimizer", "bytes_a_parameter"), [("adamw", 80), ("adamw-fused", 28)])
def test_bytes_of_the_optimizers(optimizer: str, bytes_a_parameter: int, tiny: dict[str, Any], traced: Tracing) -> None:
    """Parameter, gradient, two moments: 28 bytes fused (16 read, 12 written); foreach passes over them nine times."""
    stream = traced(tiny, optimizer=optimizer)
    moved = sum(w.bytes for w in works(stream) if w.op_class == "optimizer")
    assert moved == pytest.approx(bytes_a_parameter * stream.n_params, rel=0.001)


PATTERNS = [
    # operands -> same letters for flat, a missing letter for a broadcast, another order for a transposition
    ([contiguous(8, 16), contiguous(8, 16)], contiguous(8, 16), "a,a>a"),
    ([contiguous(2, 8, 16), contiguous(16)], contiguous(2, 8, 16), "ab,b>ab"),
    ([contiguous(2, 8, 16), contiguous(2, 8, 1)], contiguous(2, 8, 16), "ab,a>ab"),
    ([Operand((8, 16), (1, 8), "fp32")], contiguous(8, 16), "ba"),
    ([Operand((8, 16), (32, 1), "fp32")], contiguous(8, 16), "ab>ab"),  # rows of a wider matrix
    ([Operand((8, 16), (32, 2), "fp32")], contiguous(8, 16), "a~>a"),  # every second element
    ([Operand((8, 16), (0, 1), "fp32")], contiguous(8, 16), "b>ab"),  # expanded
    ([contiguous(8, 16), Operand((), (), "fp32")], contiguous(8, 16), "a,0>a"),  # one number on the device
    ([Operand((), (), "fp32"), Operand((), (), "fp32")], Operand((), (), "fp32"), ">0"),
]


@pytest.mark.parametrize(("inputs", "out", "pattern"), PATTERNS)
def test_patterns_of_element_wise_calls(inputs: list[Operand], out: Operand, pattern: str) -> None:
    work = describe(Call("aten.mul.Tensor", tuple(inputs), (out,), '[{"t":0},{"t":1}]'))
    assert work.op_class == "pointwise"
    assert work.variant.tokens[-1].startswith(pattern)


@given(
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=4),
    dtype=st.sampled_from(["fp32", "bf16", "int64"]),
    scale=st.integers(2, 5),
)
def test_flat_calls_of_one_kind_share_a_curve(sizes: list[int], dtype: str, scale: int) -> None:
    """Whatever their rank: one variant, bytes all operands once, features that grow with the bytes."""
    small, large = contiguous(*sizes, 2, dtype=dtype), contiguous(scale, *sizes, 2, dtype=dtype)
    a, b = (describe(Call("aten.neg.default", (o,), (o,), '[{"t":0}]')) for o in (small, large))
    assert a.variant == b.variant == CallVariant("neg", f"{dtype}>{dtype}", "a>a")
    assert a.bytes == 2 * small.bytes
    assert b.bytes == scale * a.bytes
    assert b.features[0] > a.features[0]


@given(
    m=st.integers(1, 5000), n=st.integers(1, 5000), k=st.integers(1, 5000), layout=st.sampled_from(["nt", "nn", "tn"])
)
def test_products(m: int, n: int, k: int, layout: str) -> None:
    work = describe(Gemm(m=m, n=n, k=k, layout=layout))  # type: ignore[arg-type]
    assert work.op_class == "gemm"
    is_few = layout == "nt" and m < 64 and n % 8 == k % 8 == 0
    assert str(work.variant).startswith(f"{'few/' * is_few}{layout}/bf16")
    assert parse_variant(str(work.variant)) == work.variant
    assert work.flops == 2 * m * n * k
    assert work.bytes == 2 * (m * k + k * n + m * n)
    assert [round(2**f) for f in work.features[:3]] == [m, n, k]


def tensor(*shape: int, stride: tuple[int, ...] = (), dtype: Dtype = "bf16") -> Operand:
    whole = contiguous(*shape)
    return replace(whole, dtype=dtype, stride=stride or whole.stride)


def put_together(along: int, *operands: Operand) -> Work:
    shape = list(operands[0].shape)
    shape[along] = sum(operand.shape[along] for operand in operands)
    result = replace(contiguous(*shape), dtype=operands[0].dtype)
    return describe(Call("aten.cat.default", operands, (result,), json.dumps([{"ts": [0, len(operands)]}, along])))


def test_a_cache_grows_by_a_kernel_of_its_own() -> None:
    """The kernel that reads 16 bytes at a time takes contiguous tensors; the halves of a rotary embedding, of which one
    is a part of another tensor, are another's, whose threads have little to do where one tensor is much the larger."""

    def pattern(along: int, *operands: Operand) -> str:
        return str(put_together(along, *operands).variant).rpartition("|")[2]

    cache, token = (tensor(2, 4, n, 64) for n in (8, 1))
    assert pattern(-2, cache, token) == pattern(-2, cache, replace(token, stride=(256, 64, 64, 1))) == "rows"
    assert pattern(-1, cache, cache) == "rows"  # 4 TB/s
    assert pattern(-1, cache, cache, cache) == "rows"
    assert pattern(-1, tensor(4, 3), tensor(4, 3)) == "a>a"  # rows of 6 bytes
    rotated = tensor(2, 4, 8, 64, stride=(4096, 1024, 128, 1))
    assert pattern(-1, cache, rotated) == "a>a"  # 1 TB/s
    strided = tensor(2, 4, 1, 64, stride=(2304, 64, 2304, 1))
    assert pattern(-2, cache, strided) == "a>a uneven"  # 0.65 TB/s
    assert pattern(-2, strided, cache).endswith(" uneven")
    wide = tensor(2, 4, 8, 64, dtype="fp32")
    assert pattern(-2, wide, tensor(2, 4, 1, 64, dtype="fp32")) == pattern(-1, wide, wide) == "rows"
    assert pattern(-2, wide, replace(strided, dtype="fp32")) == "a>a uneven"
    assert pattern(-2, wide, strided) == "a>a", "of two dtypes: another kernel"


def test_what_puts_tensors_together_takes_what_an_h200_measured() -> None:
    """Two rows that were held out, of a contiguous cache and of halves of 100 MB. GPT-2's growing cache, to which each
    token's row comes as a part of another tensor, lies between rows of 83 and 443 MB, 0.65 and 0.67 TB/s."""
    cache, token = tensor(25, 8, 2000, 64), tensor(25, 8, 1, 64)
    both = (15, 16, 768, 64)
    one, other = tensor(*both, stride=(786432, 64, 1024, 1)), tensor(*both, stride=(1572864, 128, 2048, 1))
    grown, row = tensor(64, 12, 1024, 64), tensor(64, 12, 1, 64, stride=(2304, 64, 2304, 1))
    works = [put_together(-2, cache, token), put_together(-1, one, other), put_together(-2, grown, row)]
    found = find_profile("nvidia-h200").estimate([(work, "torch", "cold") for work in works])
    speeds = [work.bytes / each.seconds / 1e12 for work, each in zip(works, found, strict=True)]
    assert speeds == pytest.approx([3.74, 0.96, 0.66], rel=0.08)


def test_what_runs_nothing(tiny: dict[str, Any], traced: Tracing) -> None:
    operand = contiguous(4, 4)
    assert lowered("aten.empty_like.default", [operand], [operand], [{"t": 0}]) is None
    assert lowered("aten.detach.default", [operand], [operand], [{"t": 0}]) is None
    # a channels-last ResNet restrides its weights so: as a kernel it had an interval of 1e9 seconds
    assert lowered("aten.as_strided_.default", [operand], [operand], [{"t": 0}]) is None
    assert lowered("aten.view.default", [operand], [operand], [{"t": 0}, [16]], kind="view") is None
    empty = contiguous(0, 4)
    assert lowered("aten.neg.default", [empty], [empty], [{"t": 0}]) is None
    stream = traced(tiny)
    assert all(lower(stream, op) is None for op in stream.ops if op.kind in ("view", "host"))


def test_every_call_of_a_step_has_a_class_and_bytes(tiny: dict[str, Any], traced: Tracing) -> None:
    found = works(traced(tiny))
    assert {work.op_class for work in found} <= set(OP_CLASSES)
    assert {"gemm", "attention", "pointwise", "copy", "reduction", "softmax", "loss", "optimizer"} <= {
        work.op_class for work in found
    }
    assert all(work.bytes > 0 for work in found)
    unknown = sum(work.bytes for work in found if work.op_class == "other")
    assert unknown < 0.05 * sum(work.bytes for work in found)


def test_looking_up_a_table_moves_its_rows_in_use() -> None:
    table, ids, out = contiguous(100_000, 64), contiguous(8, dtype="int64"), contiguous(8, 64)
    work = describe(Call("aten.embedding.default", (table, ids), (out,), '[{"t":0},{"t":1}]'))
    assert work.op_class == "embedding"
    assert 2 * out.bytes <= work.bytes <= 2 * out.bytes + ids.bytes
    loss = Call(
        "aten.nll_loss_forward.default",
        (contiguous(8, 100_000), ids),
        (contiguous(), contiguous()),
        '[{"t":0},{"t":1},null,1,-100]',
    )
    assert describe(loss).bytes < 1000


def multi_tensor(name: str, sizes: list[int], lists: int) -> Call:
    inputs = tuple(contiguous(size) for _ in range(lists) for size in sizes)
    args = [{"ts": [i * len(sizes), len(sizes)]} for i in range(lists)]
    return Call(name, inputs, (), json.dumps(args), written=tuple(range(len(sizes))))


def test_multi_tensor_calls_launch_by_tensors_and_chunks() -> None:
    """torch's rule: at most 320 chunks of 65,536 elements a launch; 110 tensors in one list, 64 in two, 48 in three."""
    assert launches(multi_tensor("aten._foreach_mul_.Scalar", [10], 1)) == 1
    assert launches(multi_tensor("aten._foreach_mul_.Scalar", [10] * 110, 1)) == 1
    assert launches(multi_tensor("aten._foreach_mul_.Scalar", [10] * 111, 1)) == 2
    assert launches(multi_tensor("aten._foreach_lerp_.Scalar", [10] * 65, 2)) == 2
    assert launches(multi_tensor("aten._foreach_addcmul_.Scalar", [10] * 49, 3)) == 2
    assert launches(multi_tensor("aten._foreach_mul_.Scalar", [65_536 * 321], 1)) == 2
    assert launches(Gemm(m=1, n=1, k=1)) == 1


@given(sizes=st.lists(st.integers(1, 10**7), min_size=1, max_size=200), lists=st.integers(1, 4))
def test_launches_grow_with_the_lists(sizes: list[int], lists: int) -> None:
    count = launches(multi_tensor("aten._foreach_add_.Scalar", sizes, lists))
    assert count >= ceil(sum(sizes) / (65_536 * 320))
    assert launches(multi_tensor("aten._foreach_add_.Scalar", [*sizes, 10**6], lists)) >= count
