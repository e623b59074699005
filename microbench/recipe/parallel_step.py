"""Builds one rank's training step of a model laid out over several GPUs (`parallel_model`), on the process group that
exists, real or fake."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flopcast.errors import UsageError
from flopcast.microbench.recipe.finetune import fine_tuned
from flopcast.microbench.recipe.layout import DATA_KINDS, Layout
from flopcast.microbench.recipe.parallel_model import distributed, mesh_of, optimizers_of, steps_to_settle
from flopcast.microbench.recipe.pipeline_step import PipelineStep, build_pipeline
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build_model, build_module, causal_lm_batch

__all__ = ["ParallelStep", "build_parallel", "build_parallel_module", "mesh_of"]


@dataclass
class ParallelStep(TrainingStep):
    """One rank's step. `sequence_mesh`: of the ranks that divide a sequence, None where each has whole ones."""

    is_fully_sharded: bool = False
    sequence_mesh: DeviceMesh | None = None

    def warm_up(self) -> None:
        """Runs two steps: DistributedDataParallel lays out its buckets when the second begins."""
        self.run()
        self.run()

    def settle(self) -> None:
        """Runs the fewest micro-batches after which steps are steady: as `warm_up`, for what takes no time of its own.
        A single step makes the optimizer's states."""
        few = replace(self, accumulate=1)
        for _ in range(steps_to_settle(self.model)):
            few.run()

    def autocast(self) -> AbstractContextManager[Any]:
        """None where the parameters are gathered in bf16."""
        return nullcontext() if self.is_fully_sharded else super().autocast()

    def _without_reducing(self) -> AbstractContextManager[Any]:
        model: Any = self.model
        found: AbstractContextManager[Any] = model.no_sync() if hasattr(model, "no_sync") else nullcontext()
        return found

    def _dividing_sequences(self) -> AbstractContextManager[Any]:
        """Within the context the batch holds this rank's part of the sequences, which attention puts together."""
        if self.sequence_mesh is None:
            return nullcontext()
        from torch.distributed.tensor.experimental import context_parallel

        parts = [value for value in self.batch.values() if isinstance(value, torch.Tensor)]
        return context_parallel(self.sequence_mesh, buffers=parts, buffer_seq_dims=[1] * len(parts))

    def run_phases(self) -> torch.Tensor:
        self.zero_grad()
        for number in range(self.accumulate):
            is_last = number == self.accumulate - 1
            with nullcontext() if is_last else self._without_reducing(), self._dividing_sequences():
                loss = self.forward()
                self.backward(loss)
        self.optimizer_step()
        return loss


def build_parallel(
    config: Mapping[str, Any],
    layout: Layout,
    mesh: DeviceMesh,
    device: str,
    recipe: Recipe,
    *,
    foreach: bool | None = None,
    bucket_mib: float | None = None,
) -> ParallelStep | PipelineStep:
    """Builds the step of this rank on `device`, on which new tensors are made ("cuda" or "cpu"). The recipe's
    `batch` is this rank's; `bucket_mib`: the size of DistributedDataParallel's buckets in place of torch's.
    """
    if layout.pp > 1:
        return build_pipeline(config, layout, mesh, device, recipe, foreach=foreach, bucket_mib=bucket_mib)
    with torch.device(device):
        model: Any = build_model(config, "sdpa", recipe.precision, recipe.checkpoint, recipe.weights_dtype)
        tokens = torch.randint(0, int(model.config.vocab_size), (recipe.batch, recipe.seq))
        model = fine_tuned(model, recipe)
    sequence_mesh = _sequence_mesh(layout, device)
    if sequence_mesh is not None:
        _attend_without_masks(model)
    model = distributed(model, layout, mesh, recipe.precision, bucket_mib, recipe.mode)
    return ParallelStep(
        model, optimizers_of(model, layout, recipe, foreach),
        causal_lm_batch(tokens) if sequence_mesh is None else _divisible_batch(tokens), recipe.precision, device,
        accumulate=recipe.accumulate, clip=recipe.clip_before, is_fully_sharded=layout.is_fully_sharded,
        sequence_mesh=sequence_mesh,
    )  # fmt: skip


def build_parallel_module(
    module: torch.nn.Module,
    batch: Any,
    layout: Layout,
    mesh: DeviceMesh,
    device: str,
    recipe: Recipe,
    *,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
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
    whole = build_module(module, batch, device, recipe, loss_fn=loss_fn, foreach=foreach)
    model = distributed(whole.model, layout, mesh, recipe.precision, bucket_mib, recipe.mode)
    return ParallelStep(
        model, optimizers_of(model, layout, recipe, foreach), whole.batch, recipe.precision,
        whole.device_type, accumulate=recipe.accumulate, clip=recipe.clip_before, loss_fn=loss_fn,
        is_fully_sharded=layout.is_fully_sharded,
    )  # fmt: skip


def _sequence_mesh(layout: Layout, device: str) -> DeviceMesh | None:
    """The mesh of the ranks that divide this rank's sequences."""
    if layout.cp == 1:
        return None
    within = layout.ep * layout.tp
    ranks = [
        [[(other * layout.cp + part) * within + inner for inner in range(within)] for part in range(layout.cp)]
        for other in range(layout.world // layout.cp // within)
    ]
    return DeviceMesh(device, ranks, mesh_dim_names=("others", "cp", "within"))["cp"]


def _attend_without_masks(model: torch.nn.Module) -> None:
    """Lets attention be causal without a mask, as ring attention needs it; what accelerate does too."""

    def without_mask(_module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": None, "is_causal": True}

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(without_mask, with_kwargs=True)


def _divisible_batch(tokens: torch.Tensor) -> dict[str, Any]:
    """A batch whose parts can be moved: each token with its place and with the next one as its label. A mask of ones
    says that no sequence begins in between."""
    places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0).repeat(len(tokens), 1)
    following = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
    return {
        "input_ids": tokens, "labels": tokens.clone(), "shift_labels": following, "position_ids": places,
        "attention_mask": torch.ones_like(tokens), "use_cache": False,
    }  # fmt: skip
