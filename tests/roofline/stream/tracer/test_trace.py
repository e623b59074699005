"""A traced step is the real one: against recordings of an H200, and against a real step on this processor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from flopcast.errors import UsageError
from flopcast.kernels.shapes import Attention, Gemm
from flopcast.microbench.recipe import training_step
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.steps.measure import profile_kernels
from flopcast.roofline.gpu.profile.profile import PROFILES, Profile
from flopcast.roofline.stream.library.stored import shipped_path, stream_key
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.lower import launches, lower
from flopcast.roofline.stream.model.models import depth_of, load_config, n_params, shipped_names
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import Stream
from flopcast.roofline.stream.tracer.cuda_semantics import FakeValues, as_on_cuda
from flopcast.roofline.stream.tracer.record_step import record_step
from flopcast.roofline.stream.tracer.trace import trace, trace_module
from studies.shipped.streams import compiled_streams, shipped_streams

Tracing = Callable[..., Stream]
FAMILIES = (
    "llama", "gpt2", "gpt2_bf16", "mistral_window", "qwen3_moe", "qwen3_fp32", "qwen3_bf16", "qwen3_accumulate",
    "qwen3_checkpoint", "vit_b16", "vit_b16_fp32", "resnet50", "resnet50_fp32", "resnet50_channels_last", "mlp",
    "train_mlp", "transformer_encoder",
)  # fmt: skip
STEPS = ("w256d4", "w1024d3", "w1024d3_8x1024f", "w1024d3u_2x2048", "q06b")


def stream_of(record: dict[str, Any], traced: Tracing) -> Stream:
    """The forecast's own stream of a recorded step: traced at three layers, unfolded."""
    meta = record["meta"]
    return traced(meta["config"], batch=meta["batch"], seq=meta["seq"], optimizer=meta["optimizer"])


@pytest.mark.parametrize("name", STEPS)
def test_the_trace_is_what_an_h200_ran(name: str, golden: ModuleType, traced: Tracing) -> None:
    record = golden.read(name)
    stream = stream_of(record, traced)
    found, expected = golden.ops_of(stream), Counter(record["ops"])
    assert found - expected == Counter()
    assert expected - found == Counter()
    assert stream.n_params == record["n_params"]
    assert sum(n for line, n in expected.items() if line.split()[1] == "sync") == 1


# torch 2.11, that the H200 ran, and later ones differ in how they make a tensor of zeros or of nothing.
SAME = ("aten.new_zeros", "aten.zeros", "aten.empty")


def without_fills(ops: Counter[str]) -> tuple[Counter[str], int]:
    """All ops but those, and how many zeros there are among them."""
    rest = Counter({line: n for line, n in ops.items() if not line.split()[2].startswith(SAME)})
    return rest, sum(n for line, n in ops.items() if "zeros" in line.split()[2] and "zeros_like" not in line)


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families_and_runs_trace_to_what_an_h200_ran(name: str, golden: ModuleType) -> None:
    record, entry = golden.read(name), golden.FAMILIES[name]
    run = Traced(**golden.run_of(entry))
    is_config = "config" in entry
    stream = trace(entry["config"], run) if is_config else trace_module(golden.factory_of(entry), traced=run)
    found, expected = golden.ops_of(stream), Counter(record["ops"])
    assert sum(expected.values()) > 80
    assert without_fills(found)[0] - without_fills(expected)[0] == Counter()
    assert without_fills(expected)[0] - without_fills(found)[0] == Counter()
    assert without_fills(found)[1] == without_fills(expected)[1]
    assert stream.n_params == record["n_params"]


@pytest.mark.parametrize("name", STEPS)
def test_kernels_are_those_of_an_h200(name: str, golden: ModuleType, traced: Tracing) -> None:
    """Matrix products and attentions one by one; the other kernels within 5% with measured counts a call, within 12%
    by torch's rules alone (which know no library's fills: 113 of 5756 in Qwen3-0.6B's sums alone)."""
    record = golden.read(name)
    measured: Counter[str] = Counter()
    for op, kernel, count in record["kernels"]:
        is_matrix = op in ("aten::mm", "aten::bmm")
        if kernel in ("nvjet", "gemm", "cublas") and is_matrix:
            measured["gemm"] += count
        elif "attention" in op:
            measured["attention"] += op == "aten::_cudnn_attention_forward" and kernel == "cudnn" and count
        elif not is_matrix:
            measured["other"] += count
    stream = stream_of(record, traced)
    shipped = PROFILES / "nvidia-h200.json.gz"
    profile = Profile.load(shipped) if shipped.is_file() else None
    counts: Counter[str] = Counter()
    by_rules = 0
    for op in stream.ops:
        lowered = lower(stream, op)
        if lowered is None:
            continue
        work = describe(*lowered)
        if isinstance(work.shape, Gemm):
            counts["gemm"] += 1
        elif isinstance(work.shape, Attention):
            counts["attention"] += work.shape.direction == "fwd"
        else:
            rules = launches(work.shape)
            by_rules += rules
            is_counted = profile is not None and work.op_class != "optimizer"
            seen = profile.estimate([(work, lowered[1], "cold")])[0].launches if profile and is_counted else 0
            counts["other"] += seen or rules
    assert counts["gemm"] == measured["gemm"]
    assert counts["attention"] == measured["attention"]
    assert by_rules == pytest.approx(measured["other"], rel=0.12)
    if profile is not None:
        assert counts["other"] == pytest.approx(measured["other"], rel=0.05)


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip"),
    [
        ("adamw", "autocast-bf16", 0.0),
        ("adamw-fused", "autocast-bf16", 0.0),
        ("adamw-fused", "bf16", 0.0),
        ("adamw-fused", "autocast-bf16", 1.0),
        ("sgd-momentum", "autocast-bf16", 1.0),
        ("adafactor", "autocast-bf16", 0.0),
        ("adafactor-foreach", "autocast-bf16", 0.0),
        ("muon", "autocast-bf16", 0.0),
    ],
)
def test_the_trace_is_what_this_processor_runs(
    optimizer: str, precision: str, clip: float, tiny: dict[str, Any], golden: ModuleType
) -> None:
    run: dict[str, Any] = {"optimizer": optimizer, "precision": precision, "clip": clip}
    step = training_step.build(tiny, "cpu", Recipe(batch=2, seq=32, **run))
    real = record_step(step)
    fake = trace(tiny, Traced(batch=2, seq=32, device="cpu", **run))
    found, expected = golden.ops_of(fake), golden.ops_of(real)
    if optimizer != "adamw-fused":  # a loop over parameters takes numbers that depend on the step: compare the calls
        found, expected = (calls(stream) for stream in (fake, real))
    assert found - expected == expected - found == Counter()
    assert fake.n_params == real.n_params == sum(p.numel() for p in step.model.parameters())
    products = Counter(kernel.name for kernel in profile_kernels(step))
    for call in ("mm", "bmm"):
        assert products[f"aten::{call}"] == sum(op.name == f"aten.{call}.default" for op in fake.ops)


def calls(stream: Stream) -> Counter[Any]:
    return Counter(
        (op.phase, op.kind, op.layer, op.name, tuple(stream.tensors[i].operand.key for i in op.inputs))
        for op in stream.ops
    )


def test_parameters_of_the_shipped_configs(traced: Tracing) -> None:
    for name in shipped_names():
        config = load_config(name)
        stream = traced(config, batch=4, seq=256)
        assert stream.n_params == n_params(config), name
        assert stream.depth == depth_of(config)
        assert stream.parameter_bytes == 4 * stream.n_params


def test_shipped_streams_are_what_the_tracer_gives() -> None:
    """With the versions that made them: after a change of the tracer run `python -m studies.shipped.streams`."""
    wanted = shipped_streams()
    paths = {shipped_path(stream_key(config, traced)) for config, traced in (*wanted, *compiled_streams())}
    assert all(path.is_file() for path in paths)
    assert len(list(next(iter(paths)).parent.glob("*.json.gz"))) == len(paths)
    config, options = wanted[1]
    shipped = streams.load(shipped_path(stream_key(config, options)))
    now = trace(config, options)
    if all(shipped.meta[x] == now.meta[x] for x in ("torch", "transformers")):
        assert shipped.ops == now.ops
        assert shipped.storages == now.storages


SMALL = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 512,
}  # fmt: skip
OTHERS = {
    "llama": {"model_type": "llama", **SMALL},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512, "n_positions": 64,
        "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    },
}  # fmt: skip


LEARNED = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 512}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "intermediate_size": 96, "is_decoder": True, **LEARNED},
        {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 64, **LEARNED},
    ],
    ids=["bert", "opt"],
)
def test_no_more_tokens_than_a_model_has_learned_positions_of(config: dict[str, Any]) -> None:
    config = {**config, "max_position_embeddings": 32}
    with pytest.raises(UsageError, match="seq is 33: this model has 32 positions"):
        trace(config, Traced(batch=1, seq=33))
    assert trace(config, Traced(batch=1, seq=32)).ops


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_trace_too(name: str, traced: Tracing) -> None:
    config = OTHERS[name]
    stream = traced(config)
    with torch.device("meta"):
        model = training_step.build_model(config)
    assert stream.n_params == sum(p.numel() for p in model.parameters())
    attentions = [w[0] for op in stream.ops if (w := lower(stream, op)) and isinstance(w[0], Attention)]
    assert Counter(a.direction for a in attentions) == {"fwd": 4, "bwd": 4}
    assert all(a.causal and a.heads == 4 and a.seq == 32 for a in attentions)


@pytest.mark.parametrize(
    ("config", "device", "message"),
    [
        ({"model_type": "nonsense", **SMALL}, "cuda", "nonsense"),
        ({"model_type": "t5", "d_model": 64}, "cuda", "'t5' cannot be traced"),
        ({"model_type": "qwen3", **SMALL, "rms_norm_eps": "small"}, "cuda", "cannot be traced"),
    ],
)
def test_what_cannot_be_traced_says_why(config: dict[str, Any], device: str, message: str, traced: Tracing) -> None:
    with pytest.raises(UsageError, match=message):
        traced(config, device=device)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("autocast-bf16", "bf16"), ("bf16", "bf16"), ("fp32", "fp32"), ("tf32", "tf32")]
)
def test_precisions(precision: str, dtype: str, tiny: dict[str, Any], traced: Tracing) -> None:
    stream = traced(tiny, precision="fp32" if precision == "tf32" else precision)
    stream = replace(stream, meta={**stream.meta, "precision": precision})  # tf32 launches the calls of fp32
    gemms = [
        w[0]
        for op in stream.ops
        if (w := lower(stream, op)) and isinstance(w[0], Gemm) and op.name == "aten.mm.default"
    ]
    assert {gemm.dtype for gemm in gemms} == {dtype}
    size = 2 if precision == "bf16" else 4
    assert stream.parameter_bytes == size * stream.n_params
    casts = sum(op.name == "aten._to_copy.default" for op in stream.ops)
    if precision == "autocast-bf16":  # every weight once, and what goes in and out of the norms
        assert casts > 30


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-fused"])
def test_gradients_in_fp16_are_unscaled_and_only_an_unfused_optimizer_waits(
    optimizer: str, tiny: dict[str, Any], traced: Tracing
) -> None:
    stream = traced(tiny, precision="autocast-fp16", optimizer=optimizer, clip=1.0)
    products = [stream.tensors[op.inputs[0]].operand for op in stream.ops if op.name == "aten.mm.default"]
    assert {operand.dtype for operand in products} == {"fp16"}
    names = Counter(op.name.split(".")[1] for op in stream.ops if op.phase == "optimizer")
    assert names["_amp_foreach_non_finite_check_and_unscale_"] == names["_amp_update_scale_"] == 1
    waits = [op.phase for op in stream.ops if op.kind == "sync"]
    assert waits == ["forward", *(["optimizer"] if optimizer == "adamw" else [])]
    [unscale] = [op for op in stream.ops if "unscale" in op.name]
    found = lower(stream, unscale)
    assert found is not None
    assert describe(*found).op_class == "optimizer"


class TwoLayers(torch.nn.Module):
    """Any module that takes ids and labels and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, use_cache: bool) -> Any:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden).relu_()
        if hidden.sum().item() == float("inf"):  # reads a value back
            raise ValueError("overflow")
        return SimpleNamespace(loss=hidden.square().mean())


def test_any_module_is_recorded_with_its_modules_storages_and_syncs() -> None:
    model = TwoLayers()
    step = training_step.TrainingStep(
        model,
        [torch.optim.AdamW(model.parameters(), foreach=True)],
        training_step.causal_lm_batch(torch.randint(0, 32, (2, 4))),
        "fp32",
        "cpu",
    )
    stream = record_step(step)
    assert stream.depth == 2
    assert stream.n_params == 32 * 16 + 2 * (16 * 16 + 16)
    forward = [op for op in stream.ops if op.phase == "forward"]
    assert [(op.module, op.layer) for op in forward if op.name == "aten.addmm.default"] == [
        ("blocks.0", 0),
        ("blocks.1", 1),
    ]
    assert [op.name for op in forward if op.kind == "sync"] == ["aten._local_scalar_dense.default"]
    relu = [op for op in stream.ops if op.name == "aten.relu_.default"]
    assert [op.written for op in relu] == [(0,), (0,)]
    assert all(op.kind == "launch" and not op.outputs for op in relu)
    assert {op.kind for op in forward if op.name == "aten.t.default"} == {"view"}
    kinds = Counter(storage.kind for storage in stream.storages)
    assert kinds["parameter"] == kinds["gradient"] == 5
    assert kinds["state"] == 15  # two moments and a counter each
    # what the backward makes is of the layer whose forward it undoes
    backward = [op for op in stream.ops if op.phase == "backward" and op.name == "aten.mm.default"]
    assert [op.layer for op in backward] == [1, 1, 0, 0]


def test_step_counters_of_foreach_adamw_lie_on_the_host(tiny: dict[str, Any], traced: Tracing) -> None:
    stream = traced(tiny)
    host = [op for op in stream.ops if op.kind == "host"]
    parameters = sum(s.kind == "parameter" for s in stream.storages)
    assert Counter(op.name for op in host) == {
        "aten._foreach_add_.Tensor": 1,
        "aten._local_scalar_dense.default": 2 * parameters,
    }
    assert all(lower(stream, op) is None for op in host)
    fused = traced(tiny, optimizer="adamw-fused")
    assert not [op for op in fused.ops if op.kind == "host"]


def test_tracing_leaves_transformers_as_it_was(tiny: dict[str, Any]) -> None:
    import transformers.utils.import_utils as utils

    before = utils.is_fake_tensor
    trace(tiny, Traced(batch=1, seq=16))
    assert utils.is_fake_tensor is before
    assert not torch.is_autocast_enabled("cpu")
    with pytest.raises(ValueError, match="optimizer 'lion'"):
        trace(tiny, Traced(optimizer="lion"))
    assert utils.is_fake_tensor is before


UNDER_AUTOCAST: dict[str, Callable[[torch.Tensor], Any]] = {
    "mm": lambda x: torch.mm(x, x),
    "matmul": lambda x: x @ x,
    "linear": lambda x: F.linear(x, x),
    "addmm": lambda x: torch.addmm(x, x, x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "multi_dot": lambda x: torch.linalg.multi_dot([x, x, x]),
    "pow": lambda x: x.pow(2),
    "power of a number": lambda x: 2.0**x,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, (8,)),
    "rms_norm": lambda x: F.rms_norm(x, (8,)),
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: x.norm(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x),
    "cdist": lambda x: torch.cdist(x, x),
    "exp": lambda x: x.exp(),
    "log": lambda x: x.log(),
    "rsqrt": lambda x: x.rsqrt(),
    "sqrt": lambda x: x.sqrt(),
    "one over": lambda x: 1 / x,
    "cos": lambda x: x.cos(),
    "silu": lambda x: F.silu(x),
    "gelu": lambda x: F.gelu(x),
    "softplus": lambda x: F.softplus(x),
    "sigmoid": lambda x: x.sigmoid(),
    "mul": lambda x: x * x,
    "mul with fp32": lambda x: x * x.float(),
    "cat with fp32": lambda x: torch.cat([x, x.float()]),
    "stack with fp32": lambda x: torch.stack([x, x.float()]),
    "addcmul with fp32": lambda x: torch.addcmul(x, x, x.float()),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.zeros(8, dtype=torch.int64, device=x.device)),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "huber_loss": lambda x: F.huber_loss(x, x),
    "embedding": lambda x: F.embedding(torch.zeros(3, dtype=torch.int64, device=x.device), x),
    "max": lambda x: x.max(),
    "var": lambda x: x.var(),
}


@contextmanager
def on_fake_cuda() -> Iterator[None]:
    values = FakeValues()
    with FakeTensorMode(allow_non_fake_inputs=True), values, as_on_cuda(values):
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", UNDER_AUTOCAST)
def test_casts_are_cudas_own(name: str, dtype: torch.dtype) -> None:
    """Against torch's autocast for CUDA itself, which casts fake CUDA tensors on a machine without one."""
    call = UNDER_AUTOCAST[name]
    with FakeTensorMode():
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            expected = call(torch.empty(8, 8, dtype=dtype, device="cuda")).dtype
        finally:
            torch.set_autocast_enabled("cuda", False)
    with on_fake_cuda(), torch.autocast("cuda", dtype=torch.bfloat16):
        found = call(torch.empty(8, 8, dtype=dtype)).dtype
    assert found == expected


def test_a_weight_used_twice_is_cast_once_a_step() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    casts = []
    with on_fake_cuda():
        for _ in range(2):  # two steps
            with Casts() as seen, torch.autocast("cuda", dtype=torch.bfloat16):
                F.linear(F.linear(torch.randn(4, 8), weight), weight)
            casts.append(seen.sizes)
    assert casts == [[32, 64], [32, 64]]  # the input and the weight


class Casts(TorchDispatchMode):
    """Notes the sizes of what is cast to bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))
