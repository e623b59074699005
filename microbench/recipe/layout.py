"""How a step is laid out over several GPUs: the value that `ddp=8` or `tp=2,fsdp=4` stands for, checked. Without torch.

A layout is a product of parts, each with the number of ranks that it takes:

    ddp=N         DistributedDataParallel: every rank has the whole model, gradients are averaged in buckets
    zero1=N       the same with the optimizer's state divided (ZeroRedundancyOptimizer)
    zero2=N       fully_shard, parameters kept whole between forward and backward
    fsdp=N        fully_shard of every layer and the root (ZeRO-3)
    hsdp=RxS      fully_shard over S ranks, R replicas of them
    tp=N          tensor parallel: each layer's products divided
    pp=N[:KIND]   pipeline of N stages, KIND is 1f1b (default) or gpipe; the micro-batches are the accumulated ones
    ep=N, cp=N    experts, and the sequence, divided
    own=N, own=RxS
                  what a user's code lays out by itself over N ranks, each with a batch of its own, or over R times S,
                  of which S work on one batch together

The batch is that of one data-parallel rank. Ranks that lie next to each other talk the most: tensor parallel is the
innermost part, then experts and sequence, then data, and the pipeline is the outermost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from flopcast.errors import UsageError

DATA_KINDS = ("ddp", "zero1", "zero2", "fsdp", "hsdp")
OWN = "own"
SCHEDULES = ("1f1b", "gpipe")
PARTS = (*DATA_KINDS, "tp", "pp", "ep", "cp", OWN)
MOST_RANKS = 2**20
# Parts that torch and transformers put together, and that are traced so.
_SHARDED = ("zero2", "fsdp", "hsdp")
_TOGETHER = (
    *({part, kind} for kind in _SHARDED for part in ("tp", "ep", "cp", "pp")),
    *({part, "ddp"} for part in ("cp", "pp")),
)
_EXAMPLES = "ddp=8, zero1=8, zero2=8, fsdp=8, hsdp=2x4, tp=2, pp=2, pp=2:gpipe, ep=8, cp=2, or several: tp=2,fsdp=4"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The parts of a layout, outermost first, and their ranks. `kind`: of the data-parallel part, one of DATA_KINDS, or
    OWN; "" where there is none. `shards`: the ranks over which its states or parameters are divided, or all ranks of
    `ddp`; `replicas`: how many such groups hold the same, above 1 for `hsdp` alone. Of OWN each of `replicas` batches
    is that of `shards` ranks."""

    pp: int = 1
    schedule: str = "1f1b"
    kind: str = ""
    replicas: int = 1
    shards: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.pp * self.replicas * self.shards * self.cp * self.ep * self.tp

    @property
    def data(self) -> int:
        """The batches that ranks work on at once, each rank on one of its own where none is divided."""
        return self.replicas if self.is_own else self.replicas * self.shards

    @property
    def is_own(self) -> bool:
        """Whether the user's code divides its work by itself."""
        return self.kind == OWN

    @property
    def kinds(self) -> list[str]:
        """The kinds of its parts, without their ranks."""
        return [*(name for name in ("pp", "cp", "ep", "tp") if getattr(self, name) > 1), *filter(None, [self.kind])]

    @property
    def is_fully_sharded(self) -> bool:
        return self.kind in _SHARDED

    @property
    def reduces_gradients(self) -> bool:
        """Whether ranks hold the same parameters and DistributedDataParallel reduces their gradients."""
        return self.kind in ("ddp", "zero1") or (self.cp > 1 and not self.kind)

    def check_built(self) -> None:
        """Raises UsageError for one GPU, and for parts that are not built together."""
        if self.world == 1:
            raise UsageError(f"parallel {self} is one GPU: valid are two and more; leave it out for one")
        if self.kind == "hsdp" and self.replicas == 1:
            raise UsageError(f"parallel {self} has one replica: give fsdp={self.shards}")
        parts = self.kinds
        if len(parts) > 1 and not any(set(parts) <= valid for valid in _TOGETHER):
            raise UsageError(
                f"parallel {self}: {' and '.join(parts)} are not modelled together; valid together are zero2, fsdp or "
                "hsdp with tp, ep, cp or pp, and ddp with cp or pp"
            )

    def check_not_own(self) -> None:
        """Raises UsageError for what nobody but a user's own code lays out."""
        if self.is_own:
            raise UsageError(
                f"parallel {self} of a config: it is of what a module or a step function lays out by itself; give "
                "--module to predict, or one of the layouts that flopcast makes, as fsdp=8"
            )

    @property
    def distinct_ranks(self) -> tuple[int, ...]:
        """Ranks of which every other runs the same operations as one: the first of each stage of the pipeline."""
        return tuple(range(0, self.world, self.world // self.pp))

    def __str__(self) -> str:
        """As `parse` takes it."""
        parts = [f"{name}={size}" for name in ("tp", "ep", "cp") if (size := getattr(self, name)) > 1]
        if self.kind:
            are_two = self.kind == "hsdp" or (self.is_own and self.shards > 1)
            sizes = f"{self.replicas}x{self.shards}" if are_two else self.replicas * self.shards
            parts.append(f"{self.kind}={sizes}")
        if self.pp > 1:
            parts.append(f"pp={self.pp}" + (f":{self.schedule}" if self.schedule != SCHEDULES[0] else ""))
        return ",".join(parts) or "ddp=1"

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Reads a layout as the module's docstring lists them. Raises UsageError for anything else."""
        found: dict[str, Any] = {}
        for part in text.split(","):
            name, is_given, value = part.strip().partition("=")
            if name not in PARTS or not is_given:
                raise UsageError(f"parallel {text!r}: {part.strip()!r} is no part of a layout; valid are {_EXAMPLES}")
            key = "kind" if name in (*DATA_KINDS, OWN) else name
            if key in found:
                valid = f"one of {', '.join(DATA_KINDS)}" if key == "kind" else f"one {name}"
                raise UsageError(f"parallel {text!r}: {part.strip()!r} is a second part of its kind; valid is {valid}")
            found[key] = name if key == "kind" else 1
            found |= _sizes(text, name, value)
        made = cls(**found)
        if made.world > MOST_RANKS:
            raise UsageError(f"parallel {text!r} is {made.world} ranks: valid are at most {MOST_RANKS}")
        if made.kind in ("ddp", "zero1") and made.tp > 1:
            raise UsageError(
                f"parallel {text!r}: {made.kind} does not divide what tensor parallel has divided; valid beside tp are "
                "zero2, fsdp and hsdp"
            )
        return made

    def check(
        self,
        *,
        layers: int = 0,
        heads: int = 0,
        kv_heads: int = 0,
        ffn: int = 0,
        experts: int = 0,
        seq: int = 0,
        accumulate: int = 1,
    ) -> None:
        """Raises UsageError where a part does not divide what it divides of a model and its step, naming the sizes that
        do; sizes that are 0 are not known and not checked."""
        self._divides("tp", {"heads": heads, "kv_heads": kv_heads, "ffn": ffn})
        self._divides("pp", {"layers": layers})
        self._divides("cp", {"half of seq": seq // 2})
        if self.ep > 1 and not experts:
            raise UsageError(f"ep={self.ep}: the model has no experts to divide; leave ep out")
        self._divides("ep", {"experts": experts})
        if self.pp > 1 and self.schedule == "1f1b" and accumulate < self.pp:
            raise UsageError(
                f"pp={self.pp} with {accumulate} micro-batches: 1f1b needs at least as many as stages; valid are "
                f"accumulate {self.pp} and above, or pp={self.pp}:gpipe"
            )

    def _divides(self, part: str, sizes: Mapping[str, int]) -> None:
        ranks = getattr(self, part)
        if ranks == 1 or not any(size % ranks for size in sizes.values()):
            return
        known = {name: size for name, size in sizes.items() if size}
        valid = [n for n in range(1, min(known.values()) + 1) if not any(size % n for size in known.values())]
        raise UsageError(
            f"{part}={ranks} does not divide {' and '.join(f'{name} {size}' for name, size in known.items())}: valid "
            f"are {', '.join(map(str, valid))}"
        )


def _sizes(text: str, name: str, value: str) -> dict[str, Any]:
    """Reads what follows the name of a part."""
    found: dict[str, Any] = {}
    if name == "pp" and ":" in value:
        value, _, found["schedule"] = value.partition(":")
        if found["schedule"] not in SCHEDULES:
            raise UsageError(f"parallel {text!r}: schedule {found['schedule']!r}: valid are {', '.join(SCHEDULES)}")
    are_two = name == "hsdp" or (name == OWN and "x" in value)
    numbers = value.split("x") if are_two else [value]
    one = "shards" if name in DATA_KINDS else "replicas" if name == OWN else name
    names = ("replicas", "shards") if are_two else (one,)
    are_right = all(n.isascii() and n.isdecimal() and int(n[:9]) >= 1 and len(n) <= 7 for n in numbers)
    if len(numbers) != len(names) or not are_right or prod(map(int, numbers)) > MOST_RANKS:
        valid = "two numbers of ranks, such as hsdp=2x4" if name == "hsdp" else f"a number of ranks, such as {name}=8"
        raise UsageError(f"parallel {text!r}: {name} is {value!r}: valid is {valid}, at most {MOST_RANKS}")
    return found | dict(zip(names, map(int, numbers), strict=True))
