"""Steps as users write them, with a GPU in mind, are traced as on a machine that has it."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flopcast.errors import UsageError
from flopcast.roofline.stream.ops.op_stream import Op, Stream
from flopcast.roofline.stream.tracer.trace import trace_module

pytestmark = pytest.mark.filterwarnings("ignore:`torch.cuda.amp")
Step = Callable[[], Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def loop(
    after: Callable[..., Any] = lambda *_: None, device: Any = "cuda", optimizer: Any = torch.optim.AdamW
) -> Callable[[], Step]:
    """A factory of a training loop's step; `after` gets the loss, the model and the optimizer after the backward."""

    def factory() -> Step:
        model = net().to(device)
        update = optimizer(model.parameters())
        x = torch.randn(16, 8, device=device)

        def step() -> None:
            loss = model(x).square().mean()
            loss.backward()
            after(loss, model, update)
            update.step()
            update.zero_grad()

        return step

    return factory


def calls(stream: Stream, *fields: str) -> Counter[Any]:
    return Counter(
        tuple(getattr(op, field) for field in (fields or ("phase", "kind", "name", "args"))) for op in stream.ops
    )


def added(factory: Callable[[], Step]) -> Counter[str]:
    """The launches, reads and waits that a step has more than the plain loop."""
    more = calls(trace_module(factory), "kind", "name") - calls(trace_module(loop()), "kind", "name")
    return Counter({name.split(".")[1]: n for (kind, name), n in more.items() if kind not in ("view", "host")})


def index_everywhere() -> Step:
    model, x = net().cuda(0), torch.randn(16, 8, device=0)
    model.to(0)
    model.to(device=0)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x.to(0, non_blocking=True).cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def under_a_device() -> Step:
    with torch.device("cuda"):
        model, x = net(), torch.randn(16, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        with torch.device("cuda:0"):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def default_device() -> Step:
    torch.set_default_device("cuda")
    return loop()()


PLACED: dict[str, Callable[[], Step]] = {
    "torch.device('cuda', 0)": loop(device=torch.device("cuda", 0)),
    "torch.device(0)": lambda: loop(device=torch.device(0))(),
    "indices": index_everywhere,
    "with torch.device": under_a_device,
    "cuda where available": lambda: loop(device="cuda" if torch.cuda.is_available() else "cpu")(),
    "accelerator": lambda: loop(device=torch.accelerator.current_accelerator())(),
}


@pytest.mark.parametrize("name", PLACED)
def test_however_the_device_is_named(name: str) -> None:
    assert calls(trace_module(PLACED[name])) == calls(trace_module(loop()))
    assert torch.get_default_device().type == "cpu"


def test_a_batch_that_exists_already_is_on_the_device() -> None:
    class Places(nn.Module):
        """Adds to each token what its place has learned."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(10, 8), nn.Embedding(16, 8)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return (self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))).mean()

    ids = torch.zeros(2, 16, dtype=torch.int64)
    assert calls(trace_module(Places(), ids)) == calls(trace_module(lambda: (Places(), torch.zeros_like(ids))))
    assert ids.device.type == "cpu"


def test_a_default_device() -> None:
    """AdamW's counters are in host memory; up to torch 2.11 on the default device, where a step waits to read each."""
    counters = {"_foreach_add_": 1, "_local_scalar_dense": 2 * 4}
    assert added(default_device) == (counters if torch.__version__ < (2, 12) else {})
    assert torch.get_default_device().type == "cpu"


def test_torch_cuda_answers_as_the_gpu_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    start, end = [], []

    def after(*_: Any) -> None:
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.is_bf16_supported()
        assert torch._C._cuda_getCurrentRawStream(0) == 0  # as libraries with kernels take it when they are imported
        assert torch.cuda.get_device_capability() == (8, 9)
        assert torch.cuda.get_device_name(0) == "NVIDIA L4"
        assert torch.cuda.get_device_properties("cuda:0").total_memory == torch.cuda.mem_get_info()[1] == 24e9
        torch.cuda.set_device(0)
        torch.cuda.manual_seed_all(0)
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.empty_cache()
        torch.cuda.nvtx.range_push("step")
        torch.cuda.nvtx.range_pop()
        with torch.cuda.device(torch.cuda.current_device()):
            assert torch.cuda.max_memory_allocated() / 1e9 >= 0
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        for events in (start, end):
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()

    stream = trace_module(loop(after), gpu={"name": "NVIDIA L4", "capability": (8, 9), "memory_bytes": 24_000_000_000})
    assert start[0].elapsed_time(end[0]) > 0
    assert calls(stream) == calls(trace_module(loop()))
    assert "notes" not in stream.meta
    if not torch.cuda.is_available():  # nothing of it is left
        assert not torch.cuda.is_initialized()
        with pytest.raises((RuntimeError, AssertionError)):
            torch.cuda.synchronize()


def test_a_step_for_several_gpus_that_asks_for_one_is_noted() -> None:
    stream = trace_module(loop(lambda *_: torch.cuda.get_device_name()))
    (note,) = stream.meta["notes"]
    assert note.startswith("asked which GPU this is, the step was told NVIDIA H200: ")
    assert "test_user_steps.py" in note


WAITS: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {
    "synchronize": (lambda *_: torch.cuda.synchronize(), {"synchronize": 1}),
    "accelerator": (lambda *_: torch.accelerator.synchronize(), {"synchronize": 1}),
    "event": (lambda *_: torch.cuda.Event().synchronize(), {"synchronize": 1}),
    "stream": (lambda *_: torch.cuda.current_stream().synchronize(), {"synchronize": 1}),
    "item": (lambda loss, *_: loss.item(), {"_local_scalar_dense": 1}),
    "float": (lambda loss, *_: float(loss), {"_local_scalar_dense": 1}),
    "format": (lambda loss, *_: f"{loss:.3f}", {"_local_scalar_dense": 1}),
    "cpu": (lambda loss, *_: loss.detach().cpu(), {"_to_copy": 1}),
    "to('cpu')": (lambda loss, *_: loss.detach().to("cpu"), {"_to_copy": 1}),
    "numpy": (lambda loss, model, _: model[0].bias.detach().cpu().numpy().mean(), {"_to_copy": 1}),
    "tolist": (lambda loss, model, _: model[0].bias.tolist(), {"_to_copy": 1}),
    "copy_": (lambda loss, *_: torch.zeros((), device="cpu").copy_(loss.detach()), {"copy_": 1}),
    "tensor": (lambda loss, *_: torch.tensor(0.0, device=loss.device), {"synchronize": 1}),
    "tensor([])": (lambda loss, *_: torch.tensor([], device=loss.device), {}),
    "to('cuda')": (lambda *_: torch.zeros(4, device="cpu").to("cuda"), {"synchronize": 1}),
    "cuda()": (lambda *_: torch.zeros(4, device="cpu").pin_memory().cuda(), {"synchronize": 1}),
    "non_blocking": (lambda *_: torch.zeros(4, device="cpu").pin_memory().cuda(non_blocking=True), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", WAITS)
def test_the_step_waits_where_it_reads_or_synchronizes(name: str) -> None:
    after, expected = WAITS[name]
    assert added(loop(after)) == expected
    stream = trace_module(loop(after))
    assert Counter(op.name.split(".")[1] for op in stream.ops if op.kind == "sync") == expected


def test_a_list_as_an_index_is_copied_to_the_device_each_time() -> None:
    assert added(loop(lambda _, model, __: model[0].weight[:, [0, 2]])) == {"index": 1, "synchronize": 1}
    assert added(loop(lambda _, model, __: model[0].weight[:, 0:2])) == {}
    assert added(loop(lambda *_: torch.zeros(4, device="cpu")[[0, 2]])) == {}


@pytest.mark.parametrize(("enable_gqa", "is_fused"), [(True, True), (False, False)])
def test_fewer_heads_of_keys_take_a_fused_kernel_only_where_sdpa_is_told(enable_gqa: bool, is_fused: bool) -> None:
    """Multi-query attention that leaves it to broadcasting, as Falcon's, multiplies in fp32 on CUDA."""

    def factory() -> Step:
        query, key = (torch.randn(2, heads, 16, 8, device="cuda", requires_grad=True) for heads in (4, 1))

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                out = F.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=enable_gqa)
            out.sum().backward()

        return step

    stream = trace_module(factory)
    names = Counter(op.name.split(".")[1] for op in stream.ops)
    assert bool(names["attention"] and names["attention_backward"]) == is_fused
    assert names["bmm"] == (0 if is_fused else 6)
    assert names["_safe_softmax"] == (0 if is_fused else 1)
    products = [op for op in stream.ops if op.name == "aten.bmm.default"]
    assert {stream.tensors[op.outputs[0]].operand.dtype for op in products} <= {"fp32"}


def test_numpy_refuses_a_tensor_on_the_gpu_as_torch_does() -> None:
    with pytest.raises(UsageError, match=r"can't convert cuda:0 device type tensor.*test_user_steps.py:\d+, in "):
        trace_module(loop(lambda loss, *_: loss.detach().numpy()))


def stops_on_nan(loss: torch.Tensor, model: nn.Module, _: Any) -> None:
    if torch.isnan(loss).any():
        raise RuntimeError("the loss is NaN")
    if not torch.isfinite(loss) or torch.isinf(loss) or bool(loss != loss):
        raise RuntimeError("the loss is not finite")
    if math.isnan(loss.item()):
        raise RuntimeError("the number is NaN")
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    if torch.logical_or(norm.isnan(), norm.isinf()).sum() > 0:
        raise RuntimeError("the gradient is not finite")


def test_a_healthy_step_has_no_nan() -> None:
    stream = trace_module(loop(stops_on_nan))
    assert sum(op.kind == "sync" for op in stream.ops) == 7
    assert "notes" not in stream.meta


@pytest.mark.parametrize(("most", "dropouts"), [(0.0, 0), (0.1, 4)])
def test_numbers_from_zero_to_zero_are_read_as_zeros(most: float, dropouts: int) -> None:
    """As ConvNeXt asks how often to leave each of its layers out: never, unless it is told to."""

    def factory() -> Step:
        rates = torch.linspace(0, most, 4, device="cpu")
        listed = [rate for part in rates.split([2, 2]) for rate in part.tolist()]
        assert [rate.item() > 0 for rate in rates] == [rate > 0 for rate in listed]
        layers = [nn.Dropout(rate / 2) if rate > 0 else nn.Identity() for rate in listed]
        model = nn.Sequential(nn.Linear(8, 8), *layers).cuda()
        x = torch.randn(16, 8, device="cuda")
        return lambda: model(x).square().mean().backward()

    stream = trace_module(factory)
    assert sum(op.name == "aten.native_dropout.default" for op in stream.ops) == dropouts


@pytest.mark.parametrize(("dropped", "products"), [(0.0, 3), (0.1, 3), (0.9, 0)])
def test_layers_that_are_dropped_at_random_run_as_most_often(dropped: float, products: int) -> None:
    """As transformers' OPT and BART ask before each layer, and do by default with a share of 0."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                if torch.rand([]) < dropped:
                    continue
                x = layer(x)
            return x

    def factory() -> Step:
        model, x = Net().cuda(), torch.randn(16, 8, device="cuda", requires_grad=True)
        return lambda: model(x).square().mean().backward()

    ops = trace_module(factory).ops
    assert sum(op.name == "aten.addmm.default" for op in ops) == products


def test_a_branch_that_depends_on_values_is_noted() -> None:
    def after(loss: torch.Tensor, *_: Any) -> None:
        if loss > 3:
            loss.detach().exp()

    stream = trace_module(loop(after))
    assert any(op.name == "aten.exp.default" for op in stream.ops)
    (note,) = stream.meta["notes"]
    assert note.startswith("a condition that depends on values is taken to be true: ")
    assert note.endswith("in after: if loss > 3:")


def test_a_loop_that_waits_for_a_value_names_its_line() -> None:
    def after(loss: torch.Tensor, *_: Any) -> None:
        while loss > 0:
            loss = loss - 1

    with pytest.raises(UsageError, match=r"a loop waits for a value.*in after: while loss > 0:"):
        trace_module(loop(after))


@pytest.mark.parametrize("fused", [None, True])
def test_a_gradient_scaler_scales_and_the_optimizer_steps(fused: bool | None) -> None:
    def factory() -> Step:
        model, x = net().cuda(), torch.randn(16, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("cuda")

        def step() -> None:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return step

    names = Counter(op.name.split(".")[1] for op in trace_module(factory).ops)
    assert names["_amp_foreach_non_finite_check_and_unscale_"] == names["_amp_update_scale_"] == 1
    assert names["_fused_adamw_" if fused else "_foreach_addcdiv_"] == 1


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "workers": lambda: DataLoader(
        TensorDataset(torch.randn(64, 8), torch.zeros(64, dtype=torch.int64)), batch_size=16, shuffle=True,
        num_workers=2, pin_memory=True, persistent_workers=True,
    ),
    "in this process": lambda: DataLoader([(torch.randn(8), 1) for _ in range(32)], batch_size=16, shuffle=True),
}  # fmt: skip


@pytest.mark.parametrize("name", LOADERS)
def test_a_data_loader_is_no_part_of_the_step(name: str) -> None:
    def factory(load: bool) -> Step:
        loader = LOADERS[name]() if load else None
        model = net().cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        batches = iter(loader) if loader is not None else None

        def step() -> None:
            x, y = next(batches) if batches is not None else (torch.randn(16, 8).pin_memory(), torch.tensor([1] * 16))
            F.cross_entropy(model(x.cuda(non_blocking=True)), y.to("cuda")).backward()
            optimizer.step()

        return step

    stream = trace_module(lambda: factory(load=True))
    uploads = [op for op in stream.ops if op.kind == "host" and op.name == "aten._to_copy.default"]
    assert len(uploads) == 2
    on_device = [stream.storages[stream.tensors[op.outputs[0]].storage] for op in uploads]
    assert [(s.kind, s.bytes) for s in on_device] == [("activation", 16 * 8 * 4), ("activation", 16 * 8)]
    assert calls(stream, "phase", "name")[("forward", "aten.addmm.default")] == 2
    assert not any(op.name.startswith(("aten.stack", "aten.randperm", "aten.index")) for op in stream.ops)
    assert len(trace_module(lambda: factory(load=False)).ops) > len(stream.ops)  # which draws and pins its batch itself


def numpy_batches(loss: torch.Tensor, model: nn.Module, _: Any) -> None:
    x = torch.from_numpy(numpy.ones((16, 8), "float32")).cuda()
    assert x.is_cuda
    assert not torch.as_tensor(numpy.ones(3)).is_cuda


def generators(*_: Any) -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert generator.device.type == "cuda"
    assert isinstance(torch.default_generator, torch.Generator)
    torch.randn(4, generator=generator, device="cuda")


def second_stream(loss: torch.Tensor, *_: Any) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        copy = torch.zeros(4, pin_memory=True).cuda(non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    copy.record_stream(torch.cuda.current_stream())


def devices_of_tensors(loss: torch.Tensor, *_: Any) -> None:
    assert (loss.get_device(), loss.device.index, str(loss.device), loss.is_cuda) == (0, 0, "cuda:0", True)
    host = loss.detach().cpu()
    assert (host.get_device(), host.device.type, (host + 1).is_cuda, host.cuda().is_cuda) == (-1, "cpu", False, True)
    assert torch.tensor(5).item() == 5


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]


def averaged(_: torch.Tensor, model: nn.Module, optimizer: Any) -> None:
    for mean, parameter in zip(copy.deepcopy(model).parameters(), model.parameters(), strict=True):
        mean.data.lerp_(parameter.data, 0.01)


def weights_tied() -> Any:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 10, bias=False))
    model[1].weight = model[0].weight
    return model.cuda(), torch.zeros(2, 4, dtype=torch.int64, device="cuda")


def functional() -> Step:
    model, x = net().cuda(), torch.randn(4, 8).cuda()
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return lambda: torch.func.functional_call(model, weights, (x,)).sum().backward()


def per_sample() -> Step:
    model, x = net().cuda(), torch.randn(4, 8).cuda()
    weights = dict(model.named_parameters())

    def loss(weights: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (x[None],)).square().mean()  # type: ignore[no-any-return]

    def step() -> None:
        torch.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        model(x).sum().backward()

    return step


RUNS: dict[str, Callable[[], Any]] = {
    "numpy": loop(numpy_batches),
    "generators": loop(generators),
    "second stream": loop(second_stream),
    "devices": loop(devices_of_tensors),
    "accumulation": loop(lambda loss, model, _: [model(torch.randn(4, 8)).mean().backward() for _ in range(3)]),
    "moving average": loop(averaged),
    "adafactor": loop(optimizer=torch.optim.Adafactor),
    "sgd": loop(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "rmsprop": loop(optimizer=torch.optim.RMSprop),
    "capturable": loop(optimizer=lambda p: torch.optim.AdamW(p, capturable=True)),
    "schedule": loop(lambda _l, _m, optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3).step()),
    "clipping by value": loop(lambda _l, model, _o: nn.utils.clip_grad_value_(model.parameters(), 1.0)),
    "autograd function": loop(lambda loss, *_: Square.apply(loss.detach().requires_grad_()).backward()),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)).cuda(), torch.randn(4, 8)),
    "tied weights": weights_tied,
    "functional_call": functional,
    "gradients of each sample": per_sample,
    "complex rotations": loop(lambda loss, *_: torch.polar(torch.ones(4), loss.expand(4)).abs().sum()),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).cuda().to(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8).to("cuda", memory_format=torch.channels_last),
    ),
    "lstm": lambda: (nn.LSTM(8, 8).cuda(), torch.randn(4, 2, 8).cuda()),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_what_people_write_is_traced(name: str) -> None:
    stream = trace_module(RUNS[name])

    def launched(phase: str) -> list[Op]:
        return [op for op in stream.ops if op.phase == phase and op.kind == "launch"]

    assert launched("forward")
    assert launched("backward")


def test_a_copy_of_a_model_with_gradients_is_of_the_same_mode() -> None:
    """A copied mode holds copies of torch's weak references, whose release ends the process later."""
    modes: set[int] = set()

    def copied(_loss: torch.Tensor, model: nn.Module, _optimizer: Any) -> None:
        for made in (model, copy.deepcopy(model)):
            for parameter in made.parameters():
                assert parameter.grad is not None
                modes.update(id(tensor.fake_mode) for tensor in (parameter, parameter.grad))  # type: ignore[attr-defined]

    trace_module(loop(copied))
    assert len(modes) == 1


def test_products_in_tf32_by_the_steps_own_choice() -> None:
    def factory() -> Step:
        torch.backends.cuda.matmul.allow_tf32 = True
        return loop()()

    before = torch.backends.cuda.matmul.allow_tf32
    assert trace_module(factory).meta["precision"] == "tf32"
    assert torch.backends.cuda.matmul.allow_tf32 is before
    assert trace_module(loop()).meta["precision"] != "tf32"
