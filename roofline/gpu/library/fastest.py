"""Which backend a profile says is faster for a product or an attention: `--matmul best` and `--attention best`.

A forecast and a patched model (`flopcast.patch`, `microbench.recipe.patches`) ask the same function, so that what is
priced is what runs. Compared is the time of the kernels, cold; what launching them costs the host is not. Of products
the estimates' ratio is corrected by what pairs timed side by side say (`product_ratio`). Attention
runs forward and backward on one backend, which keeps the log-sum-exp as it wants it: there the sum of both decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.library import product_ratio
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Request
from flopcast.roofline.stream.lowering.describe import Work, describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey

BEST = "best"
MATMULS = ("torch", "triton")
ATTENTIONS = ("sdpa-flash", "sdpa-cudnn", "triton")


def fastest(works: Mapping[int, Work], profile: Profile) -> dict[int, str]:
    """The backend for each product and each attention, keyed as `works`, of those that the profile knows to run its
    kind of kernel; where it knows of none, torch's own."""
    calls: dict[Attention | Gemm, list[Work]] = {}  # what runs on one backend
    for work in works.values():
        if isinstance(work.shape, Gemm | Attention):
            calls.setdefault(_call(work.shape), []).append(work)
    options = {call: _options(together, profile) for call, together in calls.items()}
    requests: list[Request] = [
        (work, backend, "cold") for call, together in calls.items() for backend in options[call] for work in together
    ]
    estimates = iter(profile.estimate(requests))
    chosen: dict[Attention | Gemm, str] = {}
    for call, together in calls.items():
        seconds = {backend: sum(next(estimates).seconds for _ in together) for backend in options[call]}
        if isinstance(call, Gemm) and "triton" in seconds and product_ratio.is_for(profile.gpu, call):
            estimate = math.log(seconds["triton"] / seconds["torch"])
            seconds["triton"] = seconds["torch"] * math.exp(product_ratio.fitted().corrected(call, estimate))
        chosen[call] = min(seconds, key=seconds.__getitem__)
    return {key: chosen[_call(work.shape)] for key, work in works.items() if isinstance(work.shape, Gemm | Attention)}


def _call(shape: Gemm | Attention) -> Gemm | Attention:
    return replace(shape, direction="fwd") if isinstance(shape, Attention) else shape


def _options(together: Sequence[Work], profile: Profile) -> list[str]:
    """Torch's own backend first, which a tie goes to, then the others that have a surface for each of these works."""
    shape = together[0].shape
    if isinstance(shape, Gemm):
        usual, names = "torch", list(MATMULS)
    else:
        usual, names = profile.default_attention, list(ATTENTIONS)
    others = [
        name
        for name in names
        if name != usual
        and all(
            SurfaceKey(profile.aliases.get(name, name), work.op_class, work.variant, "cold") in profile.surfaces
            for work in together
        )
    ]
    return [usual, *others]


def product_choice(profile: Profile) -> Callable[[Gemm], str]:
    """A function that names the faster backend of a product, as `kernels.matmul_chosen` asks for it."""

    @cache
    def choose(shape: Gemm) -> str:
        is_for_triton = shape.batch == 1 and shape.dtype in ("bf16", "fp16")
        return fastest({0: describe(shape)}, profile)[0] if is_for_triton else "torch"

    return choose


def attention_choice(shape: Attention, profile: Profile) -> str:
    """The faster backend of a training step's attention of this shape, forward and backward."""
    works = {i: describe(replace(shape, direction=direction)) for i, direction in enumerate(("fwd", "bwd"))}
    return fastest(works, profile)[0]
