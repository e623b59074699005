"""The law of kernels that move bytes: floor + bytes / bandwidth, and what else their parameters say. numpy only.

The part of operands meant for the L2 that does not fit comes from memory ("beyond"). Kernels that widen what they read
take a time for each round of thread blocks besides ("wave"). Where there is a third size (results of a reduction,
indices of an embedding's gradient), there is a time for each of it ("each"); a reduction waits for its loads and
partial sums besides, however few bytes it reads (`reduction.py`), and a list of tensors takes a time for each tensor.
"""

from __future__ import annotations

import numpy as np

from flopcast.kernels.row_tiles import blocks_of
from flopcast.roofline.gpu.laws import reduction
from flopcast.roofline.gpu.laws.law import Law, Params
from flopcast.roofline.gpu.laws.smooth import Array, soft_max, trailing_zeros
from flopcast.roofline.stream.lowering.variants import CallVariant

# Of the L2 that operands may fill before they are fetched from memory again, and how suddenly that begins: on an H200
# (60 MiB) nothing is lost at 36 MiB, 0.3 of the gain at 40, 0.6 at 48 and all of it at 64.
SPILL_SHARE, SPILL_POWER = 0.75, 10.0

TURN_POWER = 3.0  # exponent of the smooth maximum of the time of a loss's loads and that of its bytes

# Bytes of a list's tensor from which on it fills a thread block's chunk (65,536 elements).
LARGE_BYTES = 262144.0


def log_seconds(variant: CallVariant, params: Params, features: Array, bytes_: Array, flops: Array) -> Array:
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


def inputs(variant: object, params: Params, features: Array) -> Array:
    """The features, and which rows cannot be read 16 bytes at a time, or do not start with a line of memory."""
    if features.shape[1] == 1:
        return features
    most = params.get("row_alignments", 3.0)
    return np.column_stack([features, most - trailing_zeros(features[:, 1]).clip(0.0, most)])


def sensitivities(params: Params, features: Array, bytes_: Array) -> Array:
    """The derivatives of log seconds by log floor and by -log bandwidth; and, where a kernel may hold a row in
    two tiles ("parted_rows"), 1 for the rows that it does, which run through code of their own."""
    moving = bytes_ / params["bandwidth"]
    share = moving / (params["floor"] + moving)
    terms = [1.0 - share, share]
    if "parted_rows" in params:
        terms.append(np.array([blocks_of(round(row))[1] > 0 for row in np.exp2(features[:, 1])], float))
    return np.column_stack(terms)


def is_rising(params: Params) -> bool:
    """True for all but losses: a loss of more rows has more threads and waits less."""
    return "turn" not in params


LAW = Law(frozenset({"floor", "bandwidth"}), log_seconds, inputs, sensitivities, is_rising)
