"""The steps that are recorded on several GPUs: layouts of one small Qwen3, whose shards and buckets are uneven."""

from __future__ import annotations

from dataclasses import dataclass

from flopcast.microbench.recipe.layout import Layout
from flopcast.roofline.stream.model.models import Config, make_config
from flopcast.roofline.stream.model.run import Traced

# Five layers, the least that unfolds from four; 68 MiB of gradients, whose buckets cross layers.
CONFIG: Config = make_config(width=512, depth=5, heads=4, kv_heads=2, vocab=4096)


@dataclass(frozen=True)
class Case:
    """A step; `layout` with {n} in place of the ranks."""

    name: str
    layout: str
    optimizer: str = "adamw-fused"
    accumulate: int = 1

    def layout_of(self, ranks: int) -> Layout:
        return Layout.parse(self.layout.format(n=ranks))

    def traced(self, device: str) -> Traced:
        return Traced(batch=2, seq=128, optimizer=self.optimizer, accumulate=self.accumulate, device=device)


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
)
