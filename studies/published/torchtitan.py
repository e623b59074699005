"""Llama steps of torchtitan (pytorch/torchtitan, BSD-3), which are FSDP2's: transformers' Llama of the same sizes under
the recipe that `fsdp=N` stands for, with its selective checkpointing, clipped, by fused AdamW.

- benchmarks/llama3_h100_202412_torchtitan.md: Llama 3.1 8B on 8 and 128 H100s of 96 GB HBM2e and 500 W, hosts of eight
  joined by 400 Gbit/s per GPU, torch of December 2024; eager, and each layer compiled. Memory is what torch reserved.
- docs/performance.md before 4d88a8a44 (May to November 2024): Llama 2 and 3 on 64 A100s of 80 GB; what joins their
  hosts is not said, and eager is taken for granted, as the recipes have it. One row more checkpoints every second
  layer, which is not forecast.

Theirs is another Llama: rotary embeddings are products of complex numbers, and repeated heads are expanded; on A100s
norms are one kernel of Triton's. Attention was flash's: cuDNN's was not to be had without asking from October 2024 on
(pytorch/pytorch#138522), and torchtitan asks for it since March 2025 (pytorch/torchtitan#1000).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.projection.project import project
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.stream.model.run import Run
from studies.published.judged import Judged, attention_seconds

_SIZES = {  # width, layers, heads, heads of keys, inner width, vocabulary
    "Llama 3 8B": (4096, 32, 32, 8, 14336, 128256), "Llama 3 70B": (8192, 80, 64, 8, 28672, 128256),
    "Llama 2 13B": (5120, 40, 40, 40, 13824, 32000), "Llama 2 70B": (8192, 80, 64, 8, 28672, 32000),
}  # fmt: skip
GIB = 2**30
NVL_MHZ, NVL_MAX_MHZ = 1545.0, 1785.0  # the clock of an H100 NVL's 835 TFLOP/s in bf16, and its highest (datasheet)


@dataclass(frozen=True)
class Row:
    """`per_second`: tokens of one GPU. `memory`: GiB of the fullest GPU, 0 where not said."""

    gpu: str
    model: str
    gpus: int
    batch: int
    seq: int
    checkpoint: str
    mode: str
    per_second: float
    memory: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} {self.gpu}, {self.batch} x {self.seq}, {self.checkpoint}, {self.mode}"


ROWS = (
    Row("H100", "Llama 3 8B", 8, 2, 8192, "selective", "eager", 5762, 82.4),
    Row("H100", "Llama 3 8B", 8, 2, 8192, "selective", "compile", 6667, 77.0),
    Row("H100", "Llama 3 8B", 128, 2, 8192, "selective", "eager", 5605, 67.0),
    Row("H100", "Llama 3 8B", 128, 2, 8192, "selective", "compile", 6514, 62.0),
    Row("A100", "Llama 3 8B", 64, 1, 8192, "selective", "eager", 2973),
    Row("A100", "Llama 3 70B", 64, 1, 8192, "full", "eager", 331),
    Row("A100", "Llama 2 13B", 64, 2, 4096, "none", "eager", 2162),
    Row("A100", "Llama 2 13B", 64, 2, 4096, "selective", "eager", 1904),
    Row("A100", "Llama 2 70B", 64, 1, 4096, "selective", "eager", 355),
    Row("A100", "Llama 2 70B", 64, 2, 4096, "full", "eager", 353),
)


def config_of(model: str) -> dict[str, Any]:
    width, layers, heads, kv_heads, inner, vocabulary = _SIZES[model]
    return {
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": inner, "vocab_size": vocabulary,
        "max_position_embeddings": 8192, "tie_word_embeddings": False, "rms_norm_eps": 1e-5,
    }  # fmt: skip


def profiles_of(gpu: str) -> dict[str, Profile]:
    """An A100's as it ships; of their H100 what one of 80 GB that was measured says of it, by the datasheets' ratios.
    Its peak is not told but to lie between those of the SXM and the NVL part: by the clocks of either."""
    if gpu == "A100":
        return {"": find_profile("nvidia-a100-80gb-sxm")}
    sxm = find_spec("nvidia-h100-sxm")
    theirs = replace(
        sxm, name="h100-96gb-500w", name_match=("H100 of 96 GB",), memory_bytes=95 * GIB,
        bandwidth_bytes_per_second=2.4e12, tdp_w=500.0,
    )  # fmt: skip
    slower = {
        name: getattr(sxm, name) * NVL_MHZ / sxm.boost_mhz
        for name in (f"{dtype}_flops_per_second" for dtype in ("bf16", "fp16", "tf32", "fp8"))
    }
    nvl = replace(theirs, boost_mhz=NVL_MHZ, max_clock_mhz=NVL_MAX_MHZ, **slower)
    measured = find_profile(sxm.name)
    return {"": project(measured, theirs), ", by an NVL's clocks": project(measured, nvl)}


def judged() -> Iterator[Judged]:
    for row in ROWS:
        run = Run(
            batch=row.batch, seq=row.seq, checkpoint=row.checkpoint, mode=row.mode, optimizer="adamw-fused", clip=1.0,
            parallel=f"fsdp={row.gpus}", link="nvidia-h100-sxm" if row.gpu == "H100" else "auto",
        )  # fmt: skip
        config, eager = config_of(row.model), replace(run, mode="eager")
        hosts = "one host of 8" if row.gpus <= 8 else "several hosts of 8"
        for clocks, profile in profiles_of(row.gpu).items():
            flash = attention_seconds(forecast(config, replace(eager, attention="sdpa-flash"), profile))
            yield Judged(
                f"FSDP2 on {hosts} {row.gpu}s{clocks}", row.name + clocks, row.batch * row.seq / row.per_second,
                forecast(config, run, profile), flash - attention_seconds(forecast(config, eager, profile)),
                row.memory * GIB, is_told=True,
            )  # fmt: skip
