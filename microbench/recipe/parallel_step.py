"""Builds one rank's training step of a model laid out over several GPUs, on the process group that exists, real or
fake.

- ddp: DistributedDataParallel with gradients as views of its buckets (25 MiB, the first 1 MiB: torch's defaults),
  autocast as on one GPU. Of several micro-batches only the last one reduces gradients (`no_sync`).
- zero1: the same, with ZeroRedundancyOptimizer around the optimizer.
- fsdp: `fully_shard` on every layer and on the root, parameters in bf16 and gradients reduced in fp32
  (MixedPrecisionPolicy), no autocast. Every micro-batch reduces its gradients, as torch does by itself.
  A module of one's own has as layers its longest stack of alike ones; where there is none, the root alone.
- zero2: the same with `reshard_after_forward` off. hsdp: the same on a mesh of replicas and shards.
- tp: transformers' own plan of the model's layers, by `parallelize_module`; norms of single heads work on this rank's
  heads. What is in no layer (embedding, head, last norm) stays whole on every rank. Not
  yet together with others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import DATA_KINDS, Layout
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.training_step import (
    TrainingStep,
    build_model,
    build_module,
    causal_lm_batch,
    find_layers,
)


@dataclass
class ParallelStep(TrainingStep):
    """One rank's step."""

    is_fully_sharded: bool = False

    def warm_up(self) -> None:
        """Runs two steps: DistributedDataParallel lays out its buckets when the second begins."""
        self.run()
        self.run()

    def autocast(self) -> AbstractContextManager[Any]:
        """None where the parameters are gathered in bf16."""
        return nullcontext() if self.is_fully_sharded else super().autocast()

    def _without_reducing(self) -> AbstractContextManager[Any]:
        model: Any = self.model
        found: AbstractContextManager[Any] = model.no_sync() if hasattr(model, "no_sync") else nullcontext()
        return found

    def run_phases(self) -> torch.Tensor:
        self.zero_grad()
        for number in range(self.accumulate):
            is_last = number == self.accumulate - 1
            with nullcontext() if is_last else self._without_reducing():
                loss = self.forward()
                self.backward(loss)
        self.optimizer_step()
        return loss


def mesh_of(layout: Layout, device: str) -> DeviceMesh:
    """The mesh of all ranks, with a dimension for each part of the layout, outermost first. Needs the process group of
    all of them. Raises UsageError for a layout that is not built yet."""
    layout.check_built()
    dims = {"replicas": layout.replicas} if layout.kind == "hsdp" else {}
    dims |= {"shards": layout.shards} if layout.kind else {}
    dims |= {"tp": layout.tp} if layout.tp > 1 else {}
    return DeviceMesh(device, torch.arange(layout.world).view(*dims.values()), mesh_dim_names=tuple(dims))


def build_parallel(
    config: Mapping[str, Any],
    layout: Layout,
    mesh: DeviceMesh,
    device: str,
    *,
    batch: int = 4,
    seq: int = 256,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    accumulate: int = 1,
    checkpoint: str = "none",
    foreach: bool | None = None,
    bucket_mib: float | None = None,
) -> ParallelStep:
    """Builds the step of this rank on `device`, on which new tensors are made ("cuda" or "cpu"). `batch` is this
    rank's, `bucket_mib` the size of DistributedDataParallel's buckets in place of torch's."""
    with torch.device(device):
        model = build_model(config, precision=precision, checkpoint=checkpoint)
        input_ids = torch.randint(0, int(config["vocab_size"]), (batch, seq))
    if layout.tp > 1:
        _divide_layers(model, mesh["tp"])
    model = _wrapped(model, layout, mesh, precision, bucket_mib)
    return ParallelStep(
        model, _optimizers(model, layout, optimizer, foreach), causal_lm_batch(input_ids), precision, device,
        accumulate=accumulate, is_fully_sharded=layout.is_fully_sharded,
    )  # fmt: skip


def build_parallel_module(
    module: torch.nn.Module,
    batch: Any,
    layout: Layout,
    mesh: DeviceMesh,
    device: str,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    precision: str = "autocast-bf16",
    optimizer: str = "adamw",
    accumulate: int = 1,
    checkpoint: str = "none",
    foreach: bool | None = None,
    bucket_mib: float | None = None,
) -> ParallelStep:
    """Builds this rank's step of any module and this rank's batch, as `training_step.build_module` builds that of one
    GPU. Raises UsageError for a layout that divides layers, of which a module of one's own says nothing."""
    if layout.world > layout.data:
        raise UsageError(
            f"parallel {layout} of a module: only configs say how their layers are divided; valid are "
            f"{', '.join(f'{kind}=N' for kind in DATA_KINDS[:-1])} and hsdp=RxS"
        )
    whole = build_module(
        module, batch, device, loss_fn=loss_fn, precision=precision, optimizer=optimizer, checkpoint=checkpoint,
        foreach=foreach,
    )  # fmt: skip
    model = _wrapped(whole.model, layout, mesh, precision, bucket_mib)
    return ParallelStep(
        model, _optimizers(model, layout, optimizer, foreach), whole.batch, precision, whole.device_type,
        accumulate=accumulate, loss_fn=loss_fn, is_fully_sharded=layout.is_fully_sharded,
    )  # fmt: skip


def _wrapped(
    model: torch.nn.Module, layout: Layout, mesh: DeviceMesh, precision: str, bucket_mib: float | None
) -> torch.nn.Module:
    """The model with the data-parallel part of its layout around it."""
    if layout.is_fully_sharded:
        _shard(model, layout, mesh, precision)
        return model
    if layout.kind:
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib)
    return model


def _shard(model: torch.nn.Module, layout: Layout, mesh: DeviceMesh, precision: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision == "autocast-bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = find_layers(model)
    # torch's default, None, frees the layers' parameters and keeps the root's, which its backward needs at once
    frees = False if layout.kind == "zero2" else None
    for part in (*(layers or ()), model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=frees)


def _optimizers(
    model: torch.nn.Module, layout: Layout, optimizer: str, foreach: bool | None
) -> tuple[torch.optim.Optimizer, ...]:
    made = make_optimizers(model, optimizer, foreach)
    if layout.tp > 1:
        for one in made:
            _group_by_mesh(one)
    if layout.kind != "zero1":
        return made
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return tuple(_divided(one, ZeroRedundancyOptimizer) for one in made)


def _group_by_mesh(optimizer: torch.optim.Optimizer) -> None:
    """Gives parameters that are divided in different ways groups of their own: one call takes those of one mesh."""
    groups = []
    for group in optimizer.param_groups:
        meshes = dict.fromkeys(getattr(parameter, "device_mesh", None) for parameter in group["params"])
        for mesh in meshes:
            alike = [p for p in group["params"] if getattr(p, "device_mesh", None) == mesh]
            groups.append({**group, "params": alike})
    optimizer.param_groups[:] = groups


def _divide_layers(model: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel(), "rowwise": RowwiseParallel(),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }  # fmt: skip
    whole = model.config.base_model_tp_plan or {}
    plan = {name: style for name, style in whole.items() if name.startswith("layers.")}
    unknown = sorted({style for style in plan.values() if style not in styles})
    if not plan or unknown:
        found = f"has parts that are divided as {', '.join(unknown)}" if unknown else "has no plan in transformers"
        raise UsageError(
            f"tp of a {model.config.model_type}: it {found}; valid are models whose layers are divided by columns and "
            "rows, such as qwen3 and llama"
        )
    parallelize_module(model.base_model, mesh, {name: styles[style] for name, style in plan.items()})


def _divided(optimizer: torch.optim.Optimizer, divide: Callable[..., Any]) -> torch.optim.Optimizer:
    """The same optimizer with its parameters divided among the ranks."""
    (group,) = optimizer.param_groups
    options = {name: group[name] for name in signature(type(optimizer)).parameters if name in optimizer.defaults}
    found: torch.optim.Optimizer = divide(group["params"], type(optimizer), **options)
    return found
