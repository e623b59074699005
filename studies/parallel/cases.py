"""The steps that are recorded on several GPUs: layouts of a small Qwen3, whose shards and buckets are uneven, and of
one with experts."""

from __future__ import annotations

from dataclasses import dataclass

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.stream.model.models import Config, load_config, make_config
from flopcast.roofline.stream.model.run import Traced

# Five layers, the least that unfolds from four; 68 MiB of gradients, whose buckets cross layers.
CONFIG: Config = make_config(width=512, depth=5, heads=4, kv_heads=2, vocab=4096)
CONFIGS: dict[str, Config] = {
    "dense": CONFIG,
    "even": {**CONFIG, "num_hidden_layers": 6},
    "even-untied": {**CONFIG, "num_hidden_layers": 6, "tie_word_embeddings": False},
    "moe": {
        **load_config("qwen3-moe"), "hidden_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 1536, "moe_intermediate_size": 256, "num_experts": 8,
        "num_experts_per_tok": 2, "vocab_size": 4096,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A step; `layout` with {n} in place of the ranks."""

    name: str
    layout: str
    optimizer: str = "adamw-fused"
    accumulate: int = 1
    model: str = "dense"
    clip: float = 0.0
    finetune: str = "full"

    @property
    def config(self) -> Config:
        return CONFIGS[self.model]

    def layout_of(self, ranks: int) -> Layout:
        return Layout.parse(self.layout.format(n=ranks))

    def traced(self, device: str) -> Traced:
        return Traced(
            batch=2, seq=128, optimizer=self.optimizer, accumulate=self.accumulate, clip=self.clip,
            finetune=self.finetune, base_dtype="bf16" if self.finetune == "lora" else "auto", device=device,
        )  # fmt: skip


CASES = (
    Case("ddp", "ddp={n}"),
    Case("ddp-accumulate", "ddp={n}", accumulate=2),
    Case("fsdp", "fsdp={n}"),
    Case("fsdp-foreach", "fsdp={n}", optimizer="adamw"),
    Case("fsdp-accumulate", "fsdp={n}", accumulate=2),
    Case("zero2", "zero2={n}"),
    Case("zero1", "zero1={n}"),
    Case("hsdp", "hsdp={n}x1"),
    Case("tp", "tp={n}"),
    Case("pp", "pp={n}", accumulate=4, model="even"),
    Case("pp-gpipe", "pp={n}:gpipe", accumulate=2, model="even-untied"),
    Case("cp", "cp={n}"),
    Case("cp-fsdp", "cp={n},fsdp=1"),
    Case("ep", "ep={n}", model="moe"),
    Case("ddp-clip", "ddp={n}", clip=1.0),
    Case("zero1-clip", "zero1={n}", clip=1.0),
    Case("fsdp-clip", "fsdp={n}", clip=1.0),
    Case("ddp-muon", "ddp={n}", optimizer="muon"),
    Case("ddp-lora", "ddp={n}", clip=1.0, finetune="lora"),
    Case("fsdp-lora", "fsdp={n}", clip=1.0, finetune="lora"),
    Case("fsdp-last", "fsdp={n}", finetune="last=2"),
)
