"""Divides a model among the ranks of a layout, on the process group that exists, real or fake.

- ddp: DistributedDataParallel with gradients as views of its buckets (25 MiB, the first 1 MiB: torch's defaults),
  autocast as on one GPU. Of several micro-batches only the last one reduces gradients (`no_sync`).
- zero1: the same, with ZeroRedundancyOptimizer around the optimizer.
- fsdp: `fully_shard` on every layer and on the root, parameters in bf16 and gradients reduced in fp32
  (MixedPrecisionPolicy), no autocast. Every micro-batch reduces its gradients, as torch does by itself.
  A module of one's own has as layers its longest stack of alike ones; where there is none, the root alone.
- zero2: the same with `reshard_after_forward` off. hsdp: the same on a mesh of replicas and shards.
- tp: transformers' own plan of the model's layers, by `parallelize_module`; norms of single heads work on this rank's
  heads. What is in no layer (embedding, head, last norm) stays whole on every rank.
- ep: transformers' own plan of the experts: each rank has a part of them, routes every token, and the partial sums of
  all are reduced. All else is whole on every rank, which all work on the same tokens.
- cp: torch's `context_parallel`, ring attention with the head and the tail of the sequence on one rank. The ranks that
  divide a sequence hold the same parameters: they count with those of the data-parallel part, without which their
  gradients are reduced as ddp does.
- pp: `pipeline_step`.

Compiled as users do: under DistributedDataParallel the whole module, `torch.compile(DistributedDataParallel(model))`,
whose graphs torch then cuts where a bucket ends (DDPOptimizer); under `fully_shard` each layer by itself,
`fully_shard(torch.compile(layer))`, with embedding, head and last norm left eager, or a module without layers whole.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.optimizers import make_optimizers
from flopcast.microbench.recipe.settings import TORCH_MODES, Recipe
from flopcast.microbench.recipe.training_step import find_layers


def mesh_of(layout: Layout, device: str) -> DeviceMesh:
    """The mesh of all ranks, with a dimension for each part of the layout, outermost first. "shards" holds those that
    divide a sequence too. Needs the process group of all ranks. Raises UsageError for a layout that is not built
    yet."""
    layout.check_built()
    dims = {"pp": layout.pp} if layout.pp > 1 else {}
    dims |= {"replicas": layout.replicas} if layout.kind == "hsdp" else {}
    dims |= {"shards": layout.shards * layout.cp} if layout.kind or layout.cp > 1 else {}
    dims |= {name: size for name in ("ep", "tp") if (size := getattr(layout, name)) > 1}
    return DeviceMesh(device, torch.arange(layout.world).view(*dims.values()), mesh_dim_names=tuple(dims))


def distributed(
    model: torch.nn.Module, layout: Layout, mesh: DeviceMesh, precision: str, bucket_mib: float | None = None,
    mode: str = "eager",
) -> torch.nn.Module:  # fmt: skip
    """The model, or a pipeline's stage of it, with what its layout divides or reduces among the ranks of its stage,
    compiled in this mode."""
    if layout.tp > 1:
        _divide_layers(model, mesh["tp"])
    if layout.ep > 1:
        _divide_experts(model, mesh["ep"])
    if layout.is_fully_sharded:
        model = _shard(model, layout, mesh, precision, mode)
    elif layout.reduces_gradients:
        group = mesh.get_group("shards") if layout.pp > 1 else None
        model = torch.nn.parallel.DistributedDataParallel(
            model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mib
        )
        model = _compiled(model, mode)
    return model


def steps_to_settle(model: torch.nn.Module) -> int:
    """The steps after which a rank's next one is a steady one."""
    return 2 if isinstance(model, torch.nn.parallel.DistributedDataParallel) else 1


def _compiled(module: torch.nn.Module, mode: str) -> torch.nn.Module:
    if mode == "eager":
        return module
    compiled: Any = torch.compile(module, mode=TORCH_MODES[mode])
    made: torch.nn.Module = compiled
    return made


def _shard(model: torch.nn.Module, layout: Layout, mesh: DeviceMesh, precision: str, mode: str) -> torch.nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if precision == "autocast-bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = find_layers(model)
    if layers is not None:
        for number, layer in enumerate(layers):
            layers[number] = _compiled(layer, mode)
    else:
        model = _compiled(model, mode)
    # torch's default, None, frees the layers' parameters and keeps the root's, which its backward needs at once
    frees = False if layout.kind == "zero2" else None
    within = mesh["replicas", "shards"] if layout.kind == "hsdp" else mesh["shards"]
    for part in (*(layers or ()), model):
        fully_shard(part, mesh=within, mp_policy=policy, reshard_after_forward=frees)
    return model


def optimizers_of(
    model: torch.nn.Module, layout: Layout, recipe: Recipe, foreach: bool | None
) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers of what this rank holds."""
    made = make_optimizers(model, recipe.optimizer, foreach, recipe.clip)
    if layout.tp > 1 or layout.ep > 1:
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


def divided_names(model: Any) -> list[str]:
    """What the modules that tensor parallel divides are called within theirs: q_proj, down_proj, ..."""
    return sorted({name.rpartition(".")[2] for name in _plan_of_layers(model)})


def _plan_of_layers(model: Any) -> dict[str, str]:
    whole = model.config.base_model_tp_plan or {}
    return {name: style for name, style in whole.items() if name.startswith("layers.")}


def _divide_layers(model: Any, mesh: DeviceMesh) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    styles = {
        "colwise": ColwiseParallel(), "rowwise": RowwiseParallel(),
        "replicated_with_grad_allreduce": SequenceParallel(sequence_dim=2, use_local_output=True),
    }  # fmt: skip
    plan = _plan_of_layers(model)
    unknown = sorted({style for style in plan.values() if style not in styles})
    if not plan or unknown:
        found = f"has parts that are divided as {', '.join(unknown)}" if unknown else "has no plan in transformers"
        raise UsageError(
            f"tp of a {model.config.model_type}: it {found}; valid are models whose layers are divided by columns and "
            "rows, such as qwen3 and llama"
        )
    parallelize_module(model.base_model, mesh, {name: styles[style] for name, style in plan.items()})


def _divide_experts(model: Any, mesh: DeviceMesh) -> None:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    if not model.config.base_model_ep_plan:
        raise UsageError(
            f"ep of a {model.config.model_type}: it has no plan in transformers by which its experts are divided; "
            "valid are models that have one, such as qwen3_moe"
        )
    model.config.distributed_config = DistributedConfig(enable_expert_parallel=True)
    apply_tensor_parallelism(model, mesh)


def _divided(optimizer: torch.optim.Optimizer, divide: Callable[..., Any]) -> torch.optim.Optimizer:
    """The same optimizer with its parameters divided among the ranks."""
    (group,) = optimizer.param_groups
    options = {name: group[name] for name in signature(type(optimizer)).parameters if name in optimizer.defaults}
    found: torch.optim.Optimizer = divide(group["params"], type(optimizer), **options)
    return found
