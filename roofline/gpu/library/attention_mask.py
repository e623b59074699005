"""How long an attention call with a mask or dropout takes on a GPU: the shipped law over that GPU's plain call.

Fitted to the attention calls of compiled steps on an H200: `python -m studies.compiled.masks`. Held out are Llama and
Qwen3-MoE, within 4.1%, and Qwen3 of 1.7B and 4B, 6 to 14% low: their steps, two thirds products, run at a lower clock
(the same call takes 214 us in Qwen3-0.6B's step and 230 in 1.7B's). An eager GPT-2's attention, with dropout and no
mask, comes out at -6%, where without dropout it was -32%.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import hypot

from flopcast.bounds import Deviation
from flopcast.decode import load
from flopcast.kernels.attention_blocks import is_banded
from flopcast.kernels.shapes import Attention
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.gpu.laws.attention_mask import MaskLaw, seconds
from flopcast.roofline.gpu.library.generated import projected_sigma, rates_of_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.attention_calls import attention_of
from flopcast.roofline.stream.lowering.describe import Work, describe

FILE = DATA / "attention_masks.json"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A law, the GPU that it was fitted on, and the deviation of a call's log seconds about it."""

    gpu: str
    law: MaskLaw
    sigma: Deviation
    source: str


@cache
def fitted() -> Fitted:
    return load(Fitted, FILE, "a law of attention masks", hint="`python -m studies.compiled.masks` makes it")


def plain(work: Work) -> Work:
    """The work without mask, dropout, window and documents, which profiles time."""
    shape = work.shape
    if isinstance(shape, Attention) and (shape.mask or shape.dropout or is_banded(shape)):
        return describe(replace(shape, mask=False, dropout=False, window=0, documents=0), work.backend)
    return work


def with_mask(work: Work, found: Estimate, profile: Profile) -> Estimate:
    """`found`: the estimate of `plain(work)`. On a GPU that the law was not fitted on it is extrapolated, and as little
    known as a projection of attention."""
    shape = attention_of(work.shape)
    if shape is None or not (shape.mask or shape.dropout) or profile.device["type"] == "cpu":
        return found
    known = fitted()
    taken = seconds(shape, found.seconds, rates_of_profile(profile), known.law)
    beyond = 1.0 - found.seconds / taken  # the share that is the law's
    sigma, basis = hypot(found.sigma, known.sigma), found.basis if found.basis != "measured" else "interpolated"
    if profile.gpu != known.gpu:
        sigma, basis = hypot(sigma, beyond * projected_sigma(known.gpu, profile, "attention")), "extrapolated"
    return Estimate(taken, sigma, basis, found.source)
