"""The interface of every law of kernel times: one `Law` per module, all of them in `laws.LAWS`. numpy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flopcast.roofline.gpu.laws.smooth import Array

Params = Mapping[str, float]


def level(params: Params, features: Array, bytes_: Array) -> Array:
    """The sensitivities of a law that is uncertain as a whole: one term, its level."""
    return np.ones((len(bytes_), 1))


def never(params: Params) -> bool:
    return False


@dataclass(frozen=True)
class Law:
    """Physics first: the time that a kernel takes before any residual is learnt, each monotone in the work.

    `parameters`: names of those that a surface must have. In what follows `variant` is of the type that the law's
    operation class has, `features` [rows, sizes] are log2 sizes as in `describe.Work`, `bytes_` and `flops` [rows].

    log_seconds(variant, params, features, bytes_, flops)   log of seconds [rows]
    inputs(variant, params, features)                       what the residual depends on [rows, inputs]: the features
                                                            and what quantisation and alignment do to them, scaled so
                                                            that length scales of a few suit each
    sensitivities(params, features, bytes_)                 derivatives of log seconds by the law's uncertain terms
                                                            [rows, terms]
    is_rising(params)                                       whether more bytes never take less time, residual included
    """

    parameters: frozenset[str]
    log_seconds: Callable[[Any, Params, Array, Array, Array], Array]
    inputs: Callable[[Any, Params, Array], Array]
    sensitivities: Callable[[Params, Array, Array], Array] = level
    is_rising: Callable[[Params], bool] = never
