"""How long an attention call with dropout takes on a GPU: the call without it, and what the shipped law adds.

Fitted to the attention calls of a compiled GPT-2 on an H200: `python -m studies.compiled.dropout`.
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
from flopcast.roofline.gpu.laws.attention_dropout import DropoutLaw, dropout_seconds
from flopcast.roofline.gpu.library.generated import projected_sigma, rates_of_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.request import Estimate
from flopcast.roofline.stream.lowering.attention_calls import attention_of
from flopcast.roofline.stream.lowering.describe import Work, describe

FILE = DATA / "attention_dropout.json"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A law, the GPU that it was fitted on, and the deviation of a call's log seconds about it."""

    gpu: str
    law: DropoutLaw
    sigma: Deviation
    source: str


@cache
def fitted() -> Fitted:
    return load(Fitted, FILE, "a law of attention's dropout", hint="`python -m studies.compiled.dropout` makes it")


def plain(work: Work) -> Work:
    """The work without dropout, window and documents, which profiles time."""
    shape = work.shape
    if isinstance(shape, Attention) and (shape.dropout or is_banded(shape)):
        return describe(replace(shape, dropout=False, window=0, documents=0), work.backend)
    return work


def with_dropout(work: Work, found: Estimate, profile: Profile) -> Estimate:
    """`found`: the estimate of `plain(work)`. On a GPU that the law was not fitted on it is extrapolated, and as little
    known as a projection of attention."""
    shape = attention_of(work.shape)
    if shape is None or not shape.dropout or profile.device["type"] == "cpu":
        return found
    known = fitted()
    added = dropout_seconds(shape, rates_of_profile(profile), known.law)
    taken = found.seconds + added
    sigma, basis = hypot(found.sigma, known.sigma), found.basis if found.basis != "measured" else "interpolated"
    if profile.gpu != known.gpu:
        sigma = hypot(sigma, added / taken * projected_sigma(known.gpu, profile, "attention"))
        basis = "extrapolated"
    return Estimate(taken, sigma, basis, found.source)
