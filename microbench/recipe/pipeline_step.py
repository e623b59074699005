"""Builds one rank's training step of a model whose layers are divided among the stages of a pipeline, by
`torch.distributed.pipelining`.

Layers are divided in equal parts; the embedding is on the first stage, the last norm and the head on the last one.
Micro-batches are those that are accumulated. Autocast is that of one GPU, around each forward and each loss; with
fully_shard there is none. What is sent between stages is what one layer gives the next: fp32 under autocast, bf16 with
fully_shard. The loss of a micro-batch is divided by their number, so that torch need not scale gradients.

Where the head's weights are the embedding's, each of the two stages holds them, and their gradients are summed after
the last micro-batch, as Megatron does: torch's pipelining leaves that to its user.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from flopcast.errors import UsageError
from flopcast.microbench.recipe.layout import Layout
from flopcast.microbench.recipe.parallel_model import distributed, optimizers_of, steps_to_settle
from flopcast.microbench.recipe.settings import Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build_model

_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Stage(torch.nn.Module):
    """The part of a causal language model that one stage runs: of tokens, or of what the stage before it gives."""

    def __init__(self, model: Any, *, is_first: bool, is_last: bool, device: str, autocasts: bool) -> None:
        super().__init__()
        self.is_first, self.device, self.autocasts = is_first, device, autocasts
        self.base = model.base_model
        self.head = model.get_output_embeddings() if is_last else None
        plan = tuple(model.config.base_model_pp_plan or ())
        if len(plan) != 3:
            raise UsageError(
                f"pp of a {model.config.model_type}: it has no plan in transformers of embedding, layers and norm; "
                "valid are models that have one, such as qwen3 and llama"
            )
        embedding, _, norm = plan
        if not is_first:
            delattr(self.base, embedding)
        if not is_last:
            setattr(self.base, norm, torch.nn.Identity())

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocasts):
            named = {"input_ids" if self.is_first else "inputs_embeds": given}
            hidden: torch.Tensor = self.base(**named, use_cache=False).last_hidden_state
            return hidden if self.head is None else self.head(hidden)


@dataclass
class PipelineStep(TrainingStep):
    """One rank's step. `batch` is that of all micro-batches, `schedule` torch's, `of_one` that of a single one, `ends`
    the group of the first and the last stage where they share a weight that this rank has, and `shared` that weight."""

    schedule: Any = None
    of_one: Any = None
    is_first: bool = False
    is_last: bool = False
    ends: dist.ProcessGroup | None = None
    shared: torch.nn.Parameter | None = None
    # Forwards and backwards take turns, and what is sent in between belongs to neither an optimizer.
    after_backward = "backward"

    def warm_up(self) -> None:
        """Runs two steps, as those of a layout without a pipeline do."""
        self.run()
        self.run()

    def settle(self) -> None:
        """As `ParallelStep.settle`. What the schedule does before its first step is done too."""
        tokens = self.batch["input_ids"]
        first = tokens[: len(tokens) // self.accumulate]
        few = replace(self, schedule=self.of_one, batch={"input_ids": first})
        for _ in range(steps_to_settle(self.model)):
            few.run()
        self.schedule._initialize_stage((first,) if self.is_first else (), {})

    def run_phases(self) -> torch.Tensor:
        self.zero_grad()
        tokens = self.batch["input_ids"]
        losses: list[torch.Tensor] = []
        given = (tokens,) if self.is_first else ()
        named = {"target": tokens, "losses": losses} if self.is_last else {}
        self.schedule.step(*given, **named, return_outputs=False)
        if self.ends is not None and self.shared is not None:
            gradient: Any = self.shared.grad
            dist.all_reduce(getattr(gradient, "_local_tensor", gradient), group=self.ends)
        self.optimizer_step()
        return losses[-1] if losses else tokens


def build_pipeline(
    config: Mapping[str, Any],
    layout: Layout,
    mesh: DeviceMesh,
    device: str,
    recipe: Recipe,
    *,
    foreach: bool | None = None,
    bucket_mib: float | None = None,
) -> PipelineStep:
    """Builds the step of this rank of a layout with a pipeline. Raises UsageError for a model that cannot be divided
    so."""
    number = mesh.get_local_rank("pp")
    is_first, is_last = number == 0, number == layout.pp - 1
    precision, accumulate = recipe.precision, recipe.accumulate
    autocasts = precision == "autocast-bf16" and not layout.is_fully_sharded
    with torch.device(device):
        model: Any = build_model(stage_config(config, layout.pp), precision=precision, checkpoint=recipe.checkpoint)
        stage = Stage(model, is_first=is_first, is_last=is_last, device=device, autocasts=autocasts)
        tokens = torch.randint(0, int(model.config.vocab_size), (recipe.batch * accumulate, recipe.seq))
    is_tied = bool(model.config.tie_word_embeddings)

    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocasts):
            loss: torch.Tensor = model.loss_function(output, target, vocab_size=model.config.vocab_size)
        return loss if accumulate == 1 else loss / accumulate

    module = distributed(stage, layout, mesh, precision, bucket_mib)
    made = PipelineStage(
        module, number, layout.pp, torch.device(device), group=mesh.get_group("pp"),
        **_shapes(model.config, recipe, layout, device, is_first=is_first, is_last=is_last),
    )  # fmt: skip
    given: Any = {"n_microbatches": accumulate, "loss_fn": loss_of, "scale_grads": False}
    embedding: Any = model.get_input_embeddings() if is_first else stage.head
    return PipelineStep(
        module, optimizers_of(module, layout, recipe, foreach), {"input_ids": tokens}, precision, device,
        accumulate=accumulate,
        schedule=_SCHEDULES[layout.schedule](made, **given), is_first=is_first, is_last=is_last,
        of_one=ScheduleGPipe(made, **{**given, "n_microbatches": 1}),
        ends=_ends(layout) if is_tied else None, shared=embedding.weight if is_first or is_last else None,
    )  # fmt: skip


def stage_config(config: Mapping[str, Any], stages: int) -> dict[str, Any]:
    """The config of a model of one stage's layers. Raises UsageError for layers of several types, which differ from
    stage to stage."""
    name = "num_hidden_layers" if "num_hidden_layers" in config else "n_layer"
    found = {**config, name: int(config[name]) // stages}
    if types := config.get("layer_types"):
        if len(set(types)) > 1:
            raise UsageError(f"pp={stages} of layers of several types ({', '.join(sorted(set(types)))}): not modelled")
        found["layer_types"] = list(types)[: found[name]]
    return found


def _shapes(
    config: Any, recipe: Recipe, layout: Layout, device: str, *, is_first: bool, is_last: bool
) -> dict[str, Any]:
    """What a stage gets and gives, by the names of PipelineStage's arguments: torch then need not run it to know."""
    batch, seq, precision = recipe.batch, recipe.seq, recipe.precision
    is_half = precision == "bf16" or (precision == "autocast-bf16" and layout.is_fully_sharded)
    sent = torch.bfloat16 if is_half else torch.float32
    given = torch.bfloat16 if precision in ("autocast-bf16", "bf16") else torch.float32

    def tensor(*size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    hidden = tensor(batch, seq, config.hidden_size, dtype=sent)
    return {
        "input_args": (tensor(batch, seq, dtype=torch.int64) if is_first else hidden,),
        "output_args": (tensor(batch, seq, config.vocab_size, dtype=given) if is_last else hidden,),
    }


def _ends(layout: Layout) -> dist.ProcessGroup | None:
    """The group of the first and the last stage of this rank's pipeline. All ranks call it."""
    width = layout.world // layout.pp
    found: dist.ProcessGroup | None
    found, _ = dist.new_subgroups_by_enumeration([[rank, layout.world - width + rank] for rank in range(width)])
    return found
