"""Which real steps `validate` runs: none of them is used in fitting."""

from __future__ import annotations

from flopcast.microbench.plans import StepPlan
from flopcast.roofline.calibration import CPU_BATCH, CPU_SEQ, CPU_VOCABULARY
from flopcast.roofline.models import depth_for, load_config, make_config

# The CPU suite measures shapes of widths 64, 128 and 256; these lie between and at them.
CPU_WIDTHS = ((64, 3), (96, 2), (160, 3), (192, 2), (256, 2))


def validation_plans(device_type: str, name: str = "standard") -> list[StepPlan]:
    """The steps to run on a device, small models first: "quick" for a minute or two, "standard" for all."""
    if device_type == "cpu":
        return [
            StepPlan(
                name=f"w{width}", config=make_config(width=width, depth=depth, vocab=CPU_VOCABULARY),
                batch=CPU_BATCH, seq=CPU_SEQ, group="cpu",
            )
            for width, depth in CPU_WIDTHS
        ]  # fmt: skip
    plans = [_ladder(width) for width in (256, 512, 768, 1024, 1536, 2048, 2560, 3072, 4096)]
    if name == "quick":
        return [*plans[:4:3], _ladder(1024, batch=8, seq=1024, optimizer="adamw-fused", group="large batch")]
    plans += [_ladder(width, law="ln", group="ln ladder") for width in (256, 512, 1024, 2048)]
    plans += [_ladder(width, group="off the ladder") for width in (640, 896, 1408, 1920)]
    plans += [_shipped("qwen3-0.6b"), _shipped("qwen3-0.6b", optimizer="adamw-fused"), _shipped("qwen3-1.7b")]
    plans += [
        _ladder(width, batch=8, seq=1024, optimizer="adamw-fused", group="large batch")
        for width in (256, 512, 1024, 2048, 640)
    ]
    plans += [
        _ladder(1024, batch=8, seq=1024, group="large batch"),
        _ladder(1024, batch=4, seq=4096, optimizer="adamw-fused", group="large batch"),
        _ladder(1024, batch=2, seq=8192, optimizer="adamw-fused", group="large batch"),
        _shipped("qwen3-0.6b", batch=8, seq=1024, optimizer="adamw-fused", group="large batch"),
        _shipped("qwen3-1.7b", batch=8, seq=1024, optimizer="adamw-fused", group="large batch"),
        _shipped("qwen3-4b"),
        _shipped("qwen3-8b"),
    ]
    return plans


def _ladder(
    width: int,
    *,
    law: str = "printed",
    batch: int = 4,
    seq: int = 256,
    optimizer: str = "adamw",
    group: str = "ladder",
) -> StepPlan:
    depth = depth_for(width, law)
    return StepPlan(
        name=f"w{width}-d{depth}", config=make_config(width=width, depth=depth), batch=batch, seq=seq,
        optimizer=optimizer, group=group,
    )  # fmt: skip


def _shipped(
    name: str, *, batch: int = 4, seq: int = 256, optimizer: str = "adamw", group: str = "published configs"
) -> StepPlan:
    return StepPlan(
        name=name, config=load_config(name), batch=batch, seq=seq, optimizer=optimizer, group=group
    )
