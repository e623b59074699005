"""Derives the op stream of any width from one trace: every size of a step is a product of the model's dimensions.

This takes milliseconds, a trace one second after five for imports, for which a search over sixty widths would wait
every time. The model is traced once with dimensions that are distinct primes: hidden size h, ffn f, vocabulary v,
key-value heads k, query heads per key-value head g, and half the size of a head p. These show in the factors of every
number of the stream (shapes, strides, bytes, numbers among the arguments), where other dimensions take their places:
2226242 = 2 x 101 x 103 x 107 is heads x head_dim. This is exact for models whose sizes are such products
(`MODEL_TYPES`), as tests against real traces show. A k or g of 1 stays 1 in the trace, because torch takes
other paths there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flopcast.kernels.shapes import DTYPE_BYTES, Operand
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, NotDerivable, Op, Storage, Stream, TensorRef

# Dense decoders of transformers whose config states all six dimensions.
MODEL_TYPES = ("qwen3", "llama", "mistral")

# Large enough that no other size has them as factors; `_primes` leaves out those that divide the number of tokens.
_CANDIDATES = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149, 151, 157)
_LARGE = {"h": (1009, 1013, 1019, 1021), "f": (3019, 3023, 3037, 3041), "v": (50021, 50023, 50033, 50047)}
_FREE_HEADS = ("qwen3",)  # other models require hidden sizes that are multiples of the number of heads
# Optimizers that treat a tensor by how large it is: what they launch, or its sizes, are no products of dimensions.
_OF_SIZES = {
    "muon": "an optimizer that transposes what is higher than wide",
    "adamw8bit": "an optimizer that rounds up to blocks, and leaves small tensors in 32 bits",
}
_NO_END = 2**63 - 1  # the end of a slice that has none


def dimensions(config: Config) -> dict[str, int]:
    """Returns the dimensions h, f, v, k, g, p of a config (see the module's docstring). Raises NotDerivable."""
    if config.get("model_type") not in MODEL_TYPES:
        raise NotDerivable("not a dense decoder whose config says all six dimensions")
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        ffn, vocab = int(config["intermediate_size"]), int(config["vocab_size"])
    except (KeyError, TypeError, ValueError) as fault:
        raise NotDerivable(f"no {fault}") from fault
    if heads % kv_heads or head_dim % 2 or head_dim < 4 or min(hidden, ffn, vocab) < 2:
        raise NotDerivable("dimensions of one, or odd heads")
    return {"h": hidden, "f": ffn, "v": vocab, "k": kv_heads, "g": heads // kv_heads, "p": head_dim // 2}


def with_dimensions(config: Config, sizes: Mapping[str, int]) -> Config:
    """Returns the same config with other dimensions, as `dimensions` gives them."""
    return {
        **config, "hidden_size": sizes["h"], "intermediate_size": sizes["f"], "vocab_size": sizes["v"],
        "num_key_value_heads": sizes["k"], "num_attention_heads": sizes["k"] * sizes["g"],
        "head_dim": 2 * sizes["p"],
    }  # fmt: skip


def reference_of(config: Config, traced: Traced) -> Config:
    """Returns the config that is traced for `config` at any width: its depth is folded, its dimensions are primes.

    Raises NotDerivable.
    """
    sizes = dimensions(config)
    if reason := _OF_SIZES.get(traced.optimizer):
        raise NotDerivable(reason)
    if (traced.finetune, traced.base_dtype) != ("full", "auto"):
        raise NotDerivable("weights of several dtypes, or some that are not trained")
    if traced.phase != "train":
        raise NotDerivable("a context that is a size like others")
    if depth_of(config) < 1 or len(set(config.get("layer_types") or ())) > 1:
        raise NotDerivable("layers that do not fold")
    depth = FOLDED_DEPTH if depth_of(config) > 1 else 1  # a single layer is first and last at once
    return with_depth(with_dimensions(config, _primes(sizes, traced, str(config["model_type"]))), depth)


def _primes(sizes: Mapping[str, int], traced: Traced, model_type: str) -> dict[str, int]:
    """Chooses a prime for each dimension, or 1 for one that is 1; none divides a number of tokens.

    A hidden size that has to be a multiple of the number of heads is a prime times that number, a small one: it would
    be larger than a config may say. `to_width` replaces it as a whole, before the heads.
    """
    batch, seq = traced.batch, traced.seq
    numbers = (batch, seq, seq - 1, seq + 1, traced.accumulate, traced.clip)
    free = [prime for prime in _CANDIDATES if all(number % prime for number in numbers if number)]
    found = {name: next(p for p in _LARGE[name] if all(n % p for n in numbers if n)) for name in _LARGE}
    for name in ("k", "g", "p"):
        found[name] = 1 if name != "p" and sizes[name] == 1 else free.pop(0)
    if model_type not in _FREE_HEADS:
        found["h"] = free.pop(0) * found["k"] * found["g"]
    return found


def to_width(reference: Stream, config: Config) -> Stream:
    """Derives the stream of `config` from that of its `reference_of`, at the reference's depth.

    Raises NotDerivable where the two do not belong together.
    """
    traced_as = dimensions(reference.meta["config"])
    wanted = dimensions(config)
    swaps = [(traced_as[name], wanted[name]) for name in wanted if traced_as[name] != wanted[name]]
    if any(prime == 1 for prime, _ in swaps):
        raise NotDerivable("a head that stands alone in the reference")
    scale = (2 * traced_as["p"]) ** -0.5  # the factor of attention's scores
    known: dict[int, int] = {_NO_END: _NO_END}

    def size(value: int) -> int:
        found = known.get(value)
        if found is None:
            found, rest = 1, value
            if value:
                for prime, other in swaps:
                    while rest % prime == 0:
                        rest //= prime
                        found *= other
            known[value] = found = found * rest
        return found

    def argument(value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, int):
            return size(value)
        if isinstance(value, float) and value == scale:
            return (2 * wanted["p"]) ** -0.5
        if isinstance(value, float) and value.is_integer() and abs(value) < _NO_END:
            return float(size(int(value)))
        if isinstance(value, list):
            return [argument(item) for item in value]
        if isinstance(value, dict) and not value.keys() & {"t", "ts", "rs"}:  # these keys refer to operands by number
            return {key: argument(item) for key, item in value.items()}
        return value

    texts: dict[str, str] = {}

    def text(encoded: str) -> str:
        found = texts.get(encoded)
        if found is None:
            changed = argument(json.loads(encoded))
            found = texts[encoded] = json.dumps(changed, separators=(",", ":"))
        return found

    def renamed(op: Op) -> Op:
        args, kwargs = text(op.args), text(op.kwargs)
        # most contain no size: replacing these too took a third of the time
        return op if (args, kwargs) == (op.args, op.kwargs) else op._replace(args=args, kwargs=kwargs)

    tensors = tuple(
        TensorRef(
            Operand(
                tuple([size(n) for n in ref.operand.shape]),
                tuple([size(n) for n in ref.operand.stride]),
                ref.operand.dtype,
            ),
            ref.storage,
        )
        for ref in reference.tensors
    )
    storages = tuple(Storage(size(s.bytes), s.kind, s.layer) for s in reference.storages)
    item_bytes = DTYPE_BYTES["bf16" if reference.meta.get("precision") == "bf16" else "fp32"]
    parameters = [s for s in storages if s.kind == "parameter"]
    return replace(
        reference,
        ops=tuple(renamed(op) for op in reference.ops),
        tensors=tensors,
        storages=storages,
        n_params=sum(s.bytes for s in parameters) // item_bytes,
        meta={
            **reference.meta,
            "config": with_depth(config, depth_of(reference.meta["config"])),
            "layer_params": sum(s.bytes for s in parameters if s.layer == 0) // item_bytes,
        },
    )
