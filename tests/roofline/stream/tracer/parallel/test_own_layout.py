"""What code that lays itself out over several GPUs launches, as one of its ranks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_process_group

from flopcast.errors import UsageError
from flopcast.roofline.api import forecast
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.communication import DIVIDED_CALLS, calls_around
from flopcast.roofline.step.memory.peak import peak_bytes
from flopcast.roofline.step.priced_step import PricedStep
from flopcast.roofline.stream.library.modules import module_stream, run_of_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.collectives import collectives
from flopcast.roofline.stream.ops.op_stream import Stream

RANKS, WIDTH, ROWS, BLOCKS = 4, 512, 64, 3
BF16, FP32 = 2, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, bias=False) for sizes in ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().square().mean()  # type: ignore[no-any-return]


def whole() -> tuple[nn.Module, torch.Tensor]:
    return Net(), torch.randn(ROWS, WIDTH)


def sharded() -> tuple[nn.Module, torch.Tensor]:
    """As torch's tutorial of `fully_shard` has it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net, batch = whole()
    for part in (*net.blocks, net):  # type: ignore[misc]
        fully_shard(part, mesh=mesh, mp_policy=policy)  # type: ignore[call-overload]
    return net, batch


def replicated() -> Callable[[], None]:
    """A training script's step under DistributedDataParallel."""
    dist.init_process_group("nccl")
    net, batch = whole()
    rank = dist.get_rank()
    model = nn.parallel.DistributedDataParallel(net.to(rank), device_ids=[rank], gradient_as_bucket_view=True)
    batch = batch.to(rank)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(batch)
        loss.backward()
        optimizer.step()

    return step


def divided() -> Callable[[], None]:
    """Layers divided in pairs of ranks by DTensor, gradients summed among the pairs by hand."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (RANKS // 2, 2), mesh_dim_names=("data", "tensor"))
    net, batch = whole()
    net.cuda()
    for block in net.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    batch = batch.cuda()
    optimizer = torch.optim.SGD(net.parameters(), foreach=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = net(batch)
        loss.backward()
        for parameter in net.parameters():
            gradient: Any = parameter.grad
            dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=mesh["data"].get_group())
        optimizer.step()

    return step


def sending() -> Callable[[], None]:
    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    return lambda: dist.send(x, 1)


def gathering_a_list() -> Callable[[], None]:
    dist.init_process_group("nccl")
    x = torch.ones(4, device="cuda")
    return lambda: dist.all_gather([torch.empty_like(x) for _ in range(RANKS)], x)


def traced(source: Any, profile: Profile, layout: str = f"own={RANKS}", **settings: Any) -> Stream:
    return module_stream(source, Run(parallel=layout, **settings), "cuda", gpu=profile.device)


def calls(stream: Stream) -> list[Any]:
    return [(op.name, op.phase, op.kind, op.layer, op.lane, op.waits, op.inputs, op.outputs) for op in stream.ops]


def test_a_module_that_shards_itself_is_the_one_that_is_sharded_for_it(profile: Profile) -> None:
    own = traced(sharded, profile, optimizer="adamw-fused", precision="fp32")
    made = traced(whole, profile, f"fsdp={RANKS}", optimizer="adamw-fused")
    assert calls(own) == calls(made)
    assert own.storages == made.storages
    assert sum(calls_around(own).values()) == sum(calls_around(made).values()) > 0


def test_a_step_function_under_ddp_is_the_step_that_is_made(profile: Profile) -> None:
    own, made = traced(replicated, profile), traced(whole, profile, f"ddp={RANKS}", optimizer="adamw-fused")
    assert [call[:-2] for call in calls(own)] == [call[:-2] for call in calls(made)]
    buckets = [[one.bytes for one in stream.storages if one.kind == "bucket"] for stream in (own, made)]
    assert Counter(buckets[0]) == Counter(buckets[1])
    assert sum(buckets[0]) == own.n_params * FP32
    assert peak_bytes(own) == peak_bytes(made)


def test_layers_divided_by_hand(profile: Profile) -> None:
    stream = traced(divided, profile)
    within = [c.bytes for c in collectives(stream) if (c.kind, c.ranks, c.stride) == ("all_reduce", 2, 1)]
    # what goes up is summed in bf16; what goes down in fp32, as the residuals are, and not to the batch
    assert within == [ROWS * WIDTH * BF16] * BLOCKS + [ROWS * WIDTH * FP32] * (BLOCKS - 1)
    among = [c.bytes for c in collectives(stream) if (c.ranks, c.stride) == (2, 2)]
    assert sum(among) == (BLOCKS * 4 * WIDTH**2 + WIDTH**2 + WIDTH) * FP32  # what this rank holds
    products = {op.module for op in stream.ops if op.name.startswith("aten.mm") and op.phase == "forward"}
    around = calls_around(stream)
    slowed = {op.module for i, op in enumerate(stream.ops) if around.get(i) == DIVIDED_CALLS["forward"]}
    assert slowed == products == {f"blocks.{number}.{part}" for number in range(BLOCKS) for part in ("up", "down")}


def test_throughput_counts_what_ranks_work_on_at_once(profile: Profile) -> None:
    def per_second(source: Any, layout: str) -> float:
        stream = traced(source, profile, layout)
        run = run_of_stream(stream, Run(parallel=layout, link="nvlink4"))
        found = PricedStep(stream, run, profile).forecast()
        return found.tokens_per_second * found.step_seconds

    assert per_second(sharded, f"own={RANKS}") == pytest.approx(RANKS * ROWS)
    assert per_second(sharded, "own=2x2") == pytest.approx(2 * ROWS)  # pairs of ranks on one batch
    assert per_second(divided, f"own={RANKS}") == pytest.approx(1)  # a step function counts steps


@pytest.mark.parametrize(
    ("source", "settings", "words"),
    [
        (sending, {}, "sends from one rank to another.*pp=N"),
        (gathering_a_list, {}, r"calls c10d\.allgather_, of which no time is known; use all_reduce"),
        (replicated, {"layout": f"ddp={RANKS}"}, f"give own={RANKS} where it lays itself out"),
        (divided, {"layout": "none"}, "give --parallel own=N"),
        (lambda: lambda: None, {"layout": f"ddp={RANKS}"}, f"where it lays itself out, own={RANKS}"),
    ],
)
def test_what_is_not_modelled_is_refused(source: Any, settings: dict[str, Any], words: str, profile: Profile) -> None:
    with pytest.raises(UsageError, match=words):
        traced(source, profile, **settings)


def test_where_own_layouts_are_not_modelled() -> None:
    with pytest.raises(UsageError, match=r"parallel own=8 of a config: .* give --module"):
        get_stream(load_config("qwen3-0.6b"), Run(parallel="own=8").traced_on("cuda"))
    with pytest.raises(UsageError, match="what torch compiles of a module that lays itself out is not modelled"):
        Run(parallel="own=8", mode="compile").check()


def test_the_process_is_as_it_was() -> None:
    before = dict(os.environ)
    found = forecast(sharded, gpu="nvidia-h200", parallel="own=2")
    assert found.num_gpus == 2
    assert os.environ == before
    assert not dist.is_initialized()
