"""Physics first: the law that a kernel's time follows before any residual is learnt. numpy only.

Laws, each a few parameters fitted per surface (`regress.py`), each monotone in the work:

memory      floor + bytes / bandwidth; of operands meant to lie in L2, what does not fit comes from memory.
            Kernels that widen what they read take a time for each round of thread blocks besides.
            Where there is a third size (results of a reduction, indices of an embedding's gradient), a time for each
            of it; a reduction waits for its loads and partial sums besides, however few bytes it reads
            (`reduce_plan.py`), and a list of tensors takes a time a tensor
gemm        `gemm_law.py`; of unaligned rows `gemm_unaligned.py`; tiles: `tile_law.py`, of GPUs before Hopper, from
            their datasheets
tuned       `tuned_law.py`: products of Triton's kernels, by the configurations that they pick
attention   `attention_law.py`
conv        `conv_law.py`

A law maps features (log2 sizes as `lower.describe` gives them), bytes and flops to log seconds; `inputs`
gives what the residual is learnt over: the features and what quantisation and alignment do to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flopcast.roofline.gpu.laws import attention, convolution, gemm, gemm_before_hopper, gemm_triton, reduction
from flopcast.roofline.gpu.laws.smooth import Array, soft_max, trailing_zeros

Params = Mapping[str, float]

KINDS = ("memory", "gemm", "tiles", gemm_triton.KIND, "attention", "conv")

# Of the L2 that operands may fill before they are fetched from memory again, and how suddenly that begins: on an H200
# (60 MiB) nothing is lost at 36 MiB, 0.3 of the gain at 40, 0.6 at 48 and all of it at 64.
SPILL_SHARE, SPILL_POWER = 0.75, 10.0

TURN_POWER = 3.0  # of the smooth maximum of a loss's waiting and its bytes

# Bytes of a list's tensor from which on it fills a thread block's chunk (65,536 elements).
LARGE_BYTES = 262144.0

# What each law reads; of memory also those of `_memory`, where they apply.
PARAMETERS = {
    "memory": {"floor", "bandwidth"},
    "gemm": gemm.PARAMETERS,
    "tiles": gemm_before_hopper.PARAMETERS,
    gemm_triton.KIND: gemm_triton.PARAMETERS,
    "attention": attention.PARAMETERS,
    "conv": convolution.PARAMETERS,
}


def kind_of(op_class: str) -> str:
    """The law of an operation class."""
    return op_class if op_class in ("gemm", "attention", "conv") else "memory"


def log_seconds(kind: str, variant: Any, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
    """log of seconds. features[rows, sizes] in log2, bytes and flops[rows]."""
    if kind == "gemm":
        return gemm.log_seconds(variant, params, features, bytes_)
    if kind == "tiles":
        return gemm_before_hopper.log_seconds(variant, params, features, bytes_)
    if kind == gemm_triton.KIND:
        return gemm_triton.log_seconds(variant, params, features)
    if kind == "attention":
        return attention.log_seconds(variant, params, features, bytes_, flops)
    if kind == "conv":
        return convolution.log_seconds(params, features, bytes_, flops)
    return _memory(variant, params, features, bytes_)


def inputs(kind: str, variant: Any, params: Params, features: Array) -> Array:
    """What the residual depends on, [rows, inputs]: features scaled so that a length scale of a few suits
    each."""
    if kind == "gemm":
        return gemm.inputs(variant, params, features)
    if kind == gemm_triton.KIND:
        return gemm_triton.inputs(variant, params, features)
    if kind == "attention":
        return attention.inputs(variant, params, features)
    if kind == "conv":
        return convolution.inputs(params, features)
    if features.shape[1] > 1:  # rows that cannot be read 16 bytes at a time, or do not start with a line
        most = params.get("row_alignments", 3.0)
        return np.column_stack([features, most - trailing_zeros(features[:, 1]).clip(0.0, most)])
    return features


def sensitivities(kind: str, params: Params, bytes_: Array) -> Array:
    """How log seconds moves with what is uncertain in the law, [rows, terms]: with log floor and -log
    bandwidth for memory, with the level of the whole law for the others."""
    if kind != "memory":
        return np.ones((len(bytes_), 1))
    moving = bytes_ / params["bandwidth"]
    share = moving / (params["floor"] + moving)
    return np.column_stack([1.0 - share, share])


# --- kernels that move bytes --------------------------------------------------------------------------------


def _memory(variant: Any, params: Params, features: Array, bytes_: Array) -> Array:
    moving = bytes_ / params["bandwidth"]
    if "beyond" in params:
        filled = (bytes_ / (SPILL_SHARE * params["l2_bytes"])) ** SPILL_POWER
        moving = moving + (bytes_ / params["beyond"] - moving) * filled / (1.0 + filled)
    if "wave" in params:
        moving = moving + params["wave"] * np.ceil(bytes_ / params["wave_bytes"])
    if "turn" in params:  # a block that waits for its loads until there are so many that it is bound by them
        turns = reduction.loss_turns(np.round(bytes_ / params["row_bytes"]))
        moving = soft_max(params["turn"] * turns, moving, TURN_POWER)
    if "step" in params:
        moving = np.hypot(moving, params["step"] * np.exp2(features[:, 1]))
    if "plane_load" in params:
        count, channels, places = (np.exp2(features[:, i]).round() for i in (1, 2, 3))
        planes = reduction.planes(count, channels, places, params["sm_count"])
        moving = moving + params["plane"] * planes.rounds + params["plane_load"] * planes.loads
        moving = moving + params.get("spread", 0.0) * planes.spread
    if "load" in params:
        count, results = np.exp2(features[:, 1]).round(), np.exp2(features[:, 2]).round()
        plan = reduction.plan(variant, results, count, params["sm_count"])
        moving = moving + params["load"] * plan.loads
        moving = moving + params["merge"] * plan.merged + params["split"] * (plan.merged > 0)
    if "tensor" in params:
        tensors = np.exp2(features[:, 1])
        large = np.minimum(bytes_ / tensors / LARGE_BYTES, 1.0)
        moving = moving + tensors * (params["tensor"] + params["large_tensor"] * large)
    if "element" in params:
        moving = moving + params["element"] * np.exp2(features[:, 1] + features[:, 2])
    if "each" in params:
        moving = moving + params["each"] * np.exp2(features[:, 2])
    return np.asarray(np.log(params["floor"] + moving))
