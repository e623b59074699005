"""Gets the op stream of a model and a run: the one place that is asked for streams.

A stream is the first of these that is available:

- one that ships in the wheel, or that this user's cache has from an earlier trace (`stored`). A model of identical
  layers is stored at FOLDED_DEPTH, and a step of many micro-batches at TRACED of them, from which any other depth and
  number follow (`ops/to_depth`, `ops/to_micro_batches`);
- where the caller varies the batch or the width, one that follows from traces made for all of them (`ops/to_batch`,
  `ops/to_width`);
- one traced now (`trace_now`), in a process of its own (`trace_process`), or side by side ahead of time (`prefetch`);
- that of a compiled step, made of what torch's compiler generates for it (`compiled`).

Of a step on several GPUs it is one rank's, and of a pipeline one of each stage; that of DistributedDataParallel is
stored with a bucket for each gradient (`ops/to_buckets`).

Only tracing imports torch. Streams of a user's modules are traced whenever they are asked for (`modules`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

from flopcast.errors import FlopcastError, UsageError
from flopcast.gc_pause import no_garbage_collection
from flopcast.kernels.shapes import canonical_json
from flopcast.microbench.recipe.settings import NEW_TOKENS, ONE_GPU
from flopcast.roofline.stream.library.layers import pattern_of
from flopcast.roofline.stream.library.stored import find_stored, is_stored, store
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced, check_step
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH, FOLDED_PARALLEL, NotDerivable, Stream
from flopcast.roofline.stream.ops.to_batch import BATCHES, to_batch
from flopcast.roofline.stream.ops.to_buckets import BUCKET_EACH, to_buckets
from flopcast.roofline.stream.ops.to_groups import Pattern, unfolded
from flopcast.roofline.stream.ops.to_micro_batches import TRACED, to_micro_batches
from flopcast.roofline.stream.ops.to_width import reference_of, to_width

Trace = Callable[[Config, Traced], Stream]
Vary = Literal["batch", "width"]


def get_stream(config: Config, traced: Traced, *, vary: Vary | None = None, trace: Trace | None = None) -> Stream:
    """Returns the op stream of one step of `config`, at its own depth.

    `vary`: what the caller varies from one stream to the next. Streams that are neither shipped nor cached are then
    derived from two batches, or from one width, traced once for all, where the model allows it. `trace` traces
    (default: `trace_now`); its result is cached. Raises UsageError for impossible sizes, and when transformers refuses
    the config.
    """
    check_step(config, traced)
    if traced.layout.pp > 1:
        return _pipeline(config, traced, trace)
    return _rank_stream(config, traced, vary=vary, trace=trace)


def _pipeline(config: Config, traced: Traced, trace: Trace | None) -> Stream:
    """Returns the stream of a pipeline's last stage, which knows those of the others, with the parameters of all.

    Raises UsageError for layers of several kinds, which differ from stage to stage.
    """
    pattern = pattern_of(config, traced.seq)
    if pattern is None or not pattern.is_of_one:
        raise UsageError(
            f"pp={traced.layout.pp} of a {config['model_type']}: its layers are of several kinds, which stages are not "
            "modelled to differ in; divide its parameters by fsdp, tp or ep instead"
        )
    ranks = traced.layout.distinct_ranks
    *before, last = (_rank_stream(config, replace(traced, rank=rank), vary=None, trace=trace) for rank in ranks)
    twice = config["vocab_size"] * config["hidden_size"] if config.get("tie_word_embeddings") else 0
    n_params = sum(stage.n_params for stage in (*before, last)) - twice
    return replace(last, n_params=n_params, depth=depth_of(config), stages_before=tuple(before))


def _rank_stream(config: Config, traced: Traced, *, vary: Vary | None, trace: Trace | None) -> Stream:
    depth, pattern = depth_of(config) // traced.layout.pp, folding(config, traced)
    if vary is not None and sources_of(config, traced, vary) and not is_at_hand(config, traced):
        with suppress(NotDerivable, UsageError):  # raised by the trace of a source, not of the step that was asked for
            return _finished(unfolded(_follow(config, traced, vary), pattern or Pattern(), depth), traced)
    if as_traced(traced) != traced:
        few = get_stream(config, as_traced(traced), vary=vary, trace=trace)
        with suppress(NotDerivable):
            return to_micro_batches(few, traced.accumulate)
    base = folded(config, traced)
    found = _find_or_trace(base, traced, trace, is_folded=pattern is not None, vary=vary)
    if pattern is not None and found.depth in (None, pattern.depth_of(_few(traced))):
        with suppress(NotDerivable):
            return _finished(unfolded(found, pattern, depth), traced)
    # the layers differ from one another although the config does not say so: they cannot be folded
    if base != config:
        found = _find_or_trace(config, traced, trace, is_folded=False, vary=vary)
    return _finished(found, traced)


def _finished(stream: Stream, traced: Traced) -> Stream:
    """Returns an unfolded stream, of DistributedDataParallel with its gradients in torch's buckets."""
    return to_buckets(stream) if has_bucket_each(traced) else stream


def is_at_hand(config: Config, traced: Traced, *, vary: Vary | None = None) -> bool:
    """Whether `get_stream` answers without a trace."""
    if is_stored(folded(config, traced), as_traced(traced)) or is_stored(config, as_traced(traced)):
        return True
    sources = sources_of(config, traced, vary) if vary is not None else []
    return bool(sources) and all(is_stored(*source) for source in sources)


def sources_of(config: Config, traced: Traced, vary: Vary) -> list[tuple[Config, Traced]]:
    """Lists the stored streams from which this one and others that differ in `vary` are derived; none where it has to
    be traced itself."""
    as_stored = as_traced(traced)
    if traced.mode != "eager":  # what inductor generates changes with the sizes
        return []
    if vary == "width" and traced.parallel != ONE_GPU:
        return []
    if vary == "batch":
        batches = BATCHES if traced.batch not in (1, *BATCHES) else ()
        return [(folded(config, traced), replace(as_stored, batch=batch)) for batch in batches]
    with suppress(NotDerivable):
        return [(reference_of(config, traced), as_stored)]
    return []


def _follow(config: Config, traced: Traced, vary: Vary) -> Stream:
    """Derives the stream from its sources, at their depth. Raises NotDerivable, and UsageError as `get_stream` does."""
    if vary == "batch":
        return _at_batch(canonical_json(folded(config, traced)), traced)
    return to_width(_source(canonical_json(reference_of(config, traced)), traced), config)


@lru_cache(maxsize=64)
def _at_batch(config: str, traced: Traced) -> Stream:
    low, high = (_source(config, replace(traced, batch=batch)) for batch in BATCHES)
    return to_batch(low, high, traced.batch)


@lru_cache(maxsize=64)
def _source(config: str, traced: Traced) -> Stream:
    return get_stream(json.loads(config), traced)


def folded(config: Config, traced: Traced) -> Config:
    """Returns the config at the depth at which its stream is stored."""
    pattern = folding(config, traced)
    return dict(config) if pattern is None else with_depth(config, pattern.depth_of(_few(traced)) * traced.layout.pp)


def _few(traced: Traced) -> int:
    """How many layers, or groups of layers, are traced for all of them."""
    return FOLDED_DEPTH if traced.parallel == ONE_GPU else FOLDED_PARALLEL


def has_bucket_each(traced: Traced) -> bool:
    """Whether the stream is stored with a bucket for each gradient: torch's own cross layers. That of a compiled step
    is not, whose graphs torch cuts where its buckets end."""
    return traced.layout.reduces_gradients and traced.mode == "eager"


def folding(config: Config, traced: Traced) -> Pattern | None:
    """Returns by which pattern the model's stream is unfolded from one of few layers; None where it is stored with all
    of them. So is that of a single layer, which is first and last at once, and of a model that freezes some layers. So
    is eager inference: what a layer takes lives until the next but one, of which three layers show no example. So is
    ZeRO-1, which divides the parameters of all layers among the ranks, and compiled steps of
    DistributedDataParallel. Groups of layers are unfolded in eager steps, as no pipeline divides them."""
    layout = traced.layout
    is_whole = traced.finetune.startswith("last=") or layout.kind == "zero1"
    is_whole |= traced.phase != "train" and traced.mode == "eager"
    # the graphs of a compiled step end where buckets do, which lie otherwise in each layer
    is_whole |= traced.mode != "eager" and layout.reduces_gradients
    depth = depth_of(config) // layout.pp
    if is_whole or depth < _few(traced) - 1:
        return None
    # a cache holds the last tokens of a window, and all of a sequence where there is none
    longest = traced.seq if traced.phase == "train" else traced.context + NEW_TOKENS
    pattern = pattern_of(config, longest)
    if pattern is None or pattern.is_of_one:
        return pattern
    groups = pattern.groups_of(depth) or 0
    return pattern if groups > _few(traced) and traced.mode == "eager" and layout.pp == 1 else None


def as_traced(traced: Traced) -> Traced:
    """Returns `traced` with the number of micro-batches that is traced for it."""
    if traced.layout.pp > 1:  # whose micro-batches are all under way at once
        return traced
    return replace(traced, accumulate=min(traced.accumulate, TRACED))


def _find_or_trace(
    config: Config, traced: Traced, trace: Trace | None, *, is_folded: bool, vary: Vary | None
) -> Stream:
    found = find_stored(config, traced)
    if found is None:
        if traced.mode == "eager":
            found = (trace or trace_now)(config, traced)
            store(found, config, traced)
        elif traced.parallel != ONE_GPU:
            from flopcast.roofline.stream.library.compiled import compiled_rank_now

            found = compiled_rank_now(config, traced)
            store(found, config, traced)
        else:
            from flopcast.roofline.stream.library.compiled import as_eager, compiled_now

            eager = partial(get_stream, config, as_eager(traced), vary=vary, trace=trace)
            made = compiled_now(config, traced, eager, is_folded=is_folded)
            for mode, stream in made.items():
                store(stream, config, replace(traced, mode=mode))
            found = made[traced.mode]
    return found


def trace_now(config: Config, traced: Traced) -> Stream:
    """Traces an eager step, importing torch and transformers. Raises UsageError for what transformers refuses."""
    with no_garbage_collection():
        from flopcast.roofline.stream.tracer.trace import trace

        try:
            if traced.parallel != ONE_GPU:
                from flopcast.roofline.stream.tracer.parallel.trace import trace_rank

                return trace_rank(config, traced, BUCKET_EACH if has_bucket_each(traced) else None)
            return trace(config, traced)
        except FlopcastError:
            raise
        except Exception as fault:  # transformers, its config classes and torch each raise their own errors
            kind = config.get("model_type")
            reason = " ".join(str(fault).split())[:300] or type(fault).__name__
            raise UsageError(
                f"config with model_type {kind!r} cannot be traced: {reason}; "
                "valid is the config.json of a causal language model that transformers can build"
            ) from fault
