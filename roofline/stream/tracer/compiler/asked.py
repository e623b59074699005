"""Which compiled step is asked for, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flopcast.microbench.recipe.settings import Recipe


@dataclass(frozen=True, kw_only=True)
class Asked(Recipe):
    """A training step: `torch.compile(model)`, loss inside the model, backward and optimizer outside. With a `phase`
    other than "train" a call of inference of `seq` tokens, with a static cache for `context` of them and more.

    The model is that of `config`, or what the factory `module` ("package.module:factory") returns for those of `sizes`
    that it has parameters for. `gpu` says of a GPU name, capability, sm_count, l2_bytes, memory_bytes, max_clock_mhz,
    bandwidth_bytes_per_second and bf16_flops_per_second; what it lacks is an H200's. `cudnn`: the version on that
    machine, 91900 as torch counts them; it decides whether attention is cuDNN's.

    `parallel`: the layout over several GPUs of which the step is one `rank`'s; with it also what the whole step needs.
    `is_own`: what `module` returns calls torch.compile by itself, and may be a step function; `mode` is then its own.
    `is_whole`: what runs outside of the graphs is a part of the step, as products that run there have to be.
    """

    config: Mapping[str, Any] | None = None
    module: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    mode: str = "compile"
    cache: str = "static"
    gpu: Mapping[str, Any] = field(default_factory=dict)
    cudnn: int = 91900
    rank: int = 0
    is_own: bool = False
    is_whole: bool = False

    @property
    def is_recorded(self) -> bool:
        """Whether what surrounds the graphs is recorded: it is not known from the eager step."""
        return self.is_parallel or self.is_own or self.is_whole


@dataclass(frozen=True, kw_only=True)
class Break:
    """A place where dynamo ended a graph: why, and the user's line."""

    reason: str
    where: str


# A product that takes this long or longer as it is, inductor pads whatever the host: one of 209 us was left by a slow
# one, those of 7,982 us and more were padded by it too (reports/nvidia-h100-sxm/pads.json).
PADDED_BY_ANY_HOST_SECONDS = 220e-6


@dataclass(frozen=True, kw_only=True)
class OutputCode:
    """What inductor generated. `graphs`: the text of each, in the order in which they were compiled, which is that of a
    first step: forwards as they are called, backwards as autograd reaches them. `calls`: the numbers of the graphs that
    a step calls, in order; layers that are compiled apart may share one. `captured`: how many graphs dynamo captured,
    one more than the graph breaks that lie on the way. `breaks`: all that were found. `waits`: lines outside of the
    graphs that read a value back from the GPU, for which the host waits; such values are taken to be 1 and true.
    `waited_after`: of each such wait, how many of `calls` came before it.
    `outside`: operators that run on the GPU outside of the graphs, by name, with their number. `recorded`: one rank's
    step of several GPUs, one that compiles itself, or a whole one, as `op_stream.to_json` has it, with what is outside
    of its graphs. `unsure_pads`: (m, k, n) of products that inductor pads only where the host launches quickly, once
    each."""

    graphs: tuple[str, ...]
    calls: tuple[int, ...]
    captured: int
    breaks: tuple[Break, ...]
    waits: tuple[str, ...]
    outside: Mapping[str, int] = field(default_factory=dict)
    torch: str
    triton: str
    waited_after: tuple[int, ...] = ()
    recorded: Mapping[str, Any] | None = None
    unsure_pads: tuple[tuple[int, int, int], ...] = ()

    @property
    def text(self) -> str:
        """All graphs, each under a line "# ---- graph N", as recorded steps are kept."""
        return "\n".join(f"# ---- graph {number}\n{code}" for number, code in enumerate(self.graphs))
