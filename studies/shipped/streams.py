"""Remakes the op streams that ship.

    python -m studies.shipped.streams

The streams of the ladder and of the shipped configs let `predict` and `cost` answer without torch; those of compiled
steps without a compiler.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from flopcast.microbench.recipe.settings import MODES
from flopcast.roofline.base.shipped import DATA
from flopcast.roofline.dollars.standard import MICRO_BATCHES, MODELS, SEQUENCES
from flopcast.roofline.stream.library.compiled import compiled_now
from flopcast.roofline.stream.library.stored import shipped_path, stream_key
from flopcast.roofline.stream.library.streams import as_traced, get_stream, trace_now
from flopcast.roofline.stream.model.models import (
    LADDER_WIDTHS,
    Config,
    load_config,
    make_config,
    shipped_names,
    with_depth,
)
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops import op_stream as streams
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH
from flopcast.roofline.stream.ops.to_batch import BATCHES
from studies.command import parser_of


def shipped_streams() -> list[tuple[Config, Traced]]:
    """The ladder and the shipped configs at 4 x 256, and the configs at 8 x 1024 with the fused optimizer; Qwen3-0.6B
    at the batches that every other follows from (`stream/ops/to_batch.py`): what the report shows over batches; the
    standard models in the micro-batches of GPUs with less memory."""
    ladder = [make_config(width=width, depth=FOLDED_DEPTH) for width in LADDER_WIDTHS]
    configs = [with_depth(load_config(name), FOLDED_DEPTH) for name in shipped_names()]
    large = Traced(batch=8, seq=1024, optimizer="adamw-fused")
    small = configs[shipped_names().index("qwen3-0.6b")]
    standard = [with_depth(load_config(name), FOLDED_DEPTH) for name in MODELS]
    fewer = [
        as_traced(replace(large, batch=SEQUENCES // count, accumulate=count)) for count in MICRO_BATCHES if count > 1
    ]
    return [
        *((c, Traced()) for c in (*ladder, *configs)),
        *((c, large) for c in configs),
        *((small, Traced(batch=batch)) for batch in BATCHES),
        *((c, micro_batch) for c in standard for micro_batch in fewer),
    ]


def compiled_configs() -> list[Config]:
    """Configs whose compiled streams ship."""
    return [with_depth(load_config(name), FOLDED_DEPTH) for name in shipped_names()]


COMPILED = Traced(device="cuda 9.0 132", mode="compile")  # for the H200 and the H100


def compiled_streams() -> list[tuple[Config, Traced]]:
    """Those of compiled steps, in each of their modes."""
    return [
        (config, replace(COMPILED, mode=mode)) for config in compiled_configs() for mode in MODES if mode != "eager"
    ]


def main() -> None:
    """Writes data/streams."""
    parser_of(__spec__, __doc__).parse_args()
    wanted = shipped_streams()
    for old in (DATA / "streams").glob("*.json.gz"):
        old.unlink()
    for config, traced in wanted:
        path = shipped_path(stream_key(config, traced))
        streams.save(trace_now(config, traced), path)
        width = config.get("hidden_size", config.get("n_embd"))
        size = path.stat().st_size / 1024
        print(f"stream {config['model_type']} {width} wide, {traced.batch} x {traced.seq}: {size:.0f} kB")
    for config in compiled_configs():
        eager = partial(get_stream, config, Traced())
        made = compiled_now(config, COMPILED, eager, is_folded=True)
        for mode in (mode for mode in MODES if mode != "eager" and mode not in made):
            made |= compiled_now(config, replace(COMPILED, mode=mode), eager, is_folded=True)
        for mode, stream in made.items():
            streams.save(stream, shipped_path(stream_key(config, replace(COMPILED, mode=mode))))
        print(f"compiled streams {config['model_type']} {config.get('hidden_size', config.get('n_embd'))} wide")


if __name__ == "__main__":
    main()
