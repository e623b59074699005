"""Says how the layers of a model repeat themselves, as transformers builds them at the model's own depth.

A config need not say so: DeepSeek-V3's first three layers have no experts, the fourth of Qwen3-Next attends otherwise,
and SmolLM3 rotates no fourth one, by rules of their own classes. The few layers that are traced show nothing of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache

from flopcast.files import cache_folder, read_own
from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import canonical_json
from flopcast.roofline.stream.library.stored import relevant, versions
from flopcast.roofline.stream.model.models import Config, has_windows, with_depth
from flopcast.roofline.stream.ops.to_groups import Pattern

# Families whose classes build one kind of layer whatever the config says, but for windows, which in Mistral all layers
# have or none: nothing is built to answer.
_UNIFORM = ("gpt2", "llama", "qwen3")
# Families whose layers differ by their window alone, where it is shorter than the sequence. In others layers without a
# window differ from those with one by more: those of Cohere2 rotate nothing.
_BY_WINDOW = ("gemma2", "gemma3_text", "gpt_oss", "olmo3", "qwen2", "qwen3", "qwen3_moe")


def pattern_of(config: Config, seq: int) -> Pattern | None:
    """Returns how the layers of `config` repeat themselves for sequences of `seq` tokens; None where they do not, or
    where transformers builds others at fewer layers.

    Of one kind as well where transformers cannot build the model or it has no stack of layers, of which the trace
    speaks. The answer is kept in the user's cache: building imports torch and transformers, which takes seconds.
    """
    kind, by_window = config["model_type"], has_windows(config, seq)
    dense = config.get("mlp_only_layers") or (config.get("decoder_sparse_step") or 1) != 1
    if kind == "mistral" or (not by_window and (kind in _UNIFORM or (kind == "qwen3_moe" and not dense))):
        return Pattern()
    return _answered(canonical_json(config), has_windows=by_window or kind not in _BY_WINDOW)


@cache
def _answered(config: str, *, has_windows: bool) -> Pattern | None:
    what = [relevant(json.loads(config)), has_windows]
    key = hashlib.sha256(canonical_json(what).encode()).hexdigest()[:20]
    path = cache_folder("layers") / versions("transformers") / f"{key}.json"
    with suppress(OSError, ValueError, TypeError):
        known = json.loads(read_own(path))
        return None if known is None else Pattern(*map(int, known))
    found = _built(json.loads(config), has_windows=has_windows)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _built(config: Config, *, has_windows: bool) -> Pattern | None:
    with no_garbage_collection():
        from flopcast.roofline.stream.tracer.layer_kinds import kinds_of_layers

        kinds = kinds_of_layers(config, has_windows=has_windows)
    if len(set(kinds)) <= 1:
        return Pattern()
    found = pattern_in(kinds)
    if found is None:
        return None
    few = found.depth_of(3)  # as `pattern_in` has at least
    alike = kinds_of_layers(with_depth(config, few), has_windows=has_windows) == kinds[:few]
    return found if alike else None


def pattern_in(kinds: Sequence[Hashable]) -> Pattern | None:
    """Returns the pattern of these kinds of layers with which the fewest have to be looked at: of three groups or more,
    the last one whole. None where there is none."""
    depth = len(kinds)
    found = [
        Pattern(first, period)
        for period in range(1, depth // 3 + 1)
        for first in range(depth % period, depth - 3 * period + 1, period)
        if all(kinds[i] == kinds[i + period] for i in range(first, depth - period))
    ]
    return min(found, key=lambda pattern: pattern.depth_of(3), default=None)
