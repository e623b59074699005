"""Keeps what torch's compiler generates for steps: steps that differ in what the code does not depend on share it.

Code depends on the model, its sizes, the precision and the GPU; not on the optimizer, on clipping or on the number of
micro-batches, and not on how it is read. That of configs is kept in the user's cache. That of a module, whose source
may change, is kept for as long as the caller does.

The layers of a model are found by compiling it at two depths (`stream/compiled/layers`). Where another width of it
launches the same kernels in the same order, its layers are in the same places: `layers_of` keeps these, so that of many
widths most are compiled at one depth.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flopcast import files
from flopcast.decode import load
from flopcast.errors import DataError
from flopcast.files import cache_folder
from flopcast.kernels.shapes import canonical_json
from flopcast.microbench.recipe.settings import ONE_GPU
from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.library.stored import relevant, versions
from flopcast.roofline.stream.tracer.compiler.apart import compiling
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode

# Increased when `stream/tracer/compiler` makes other code of the same step: code kept before is then made again.
COMPILER = 6

Codes = MutableMapping[str, OutputCode]  # of modules
# What code depends on, but for the model; that of steps that are recorded and of inference on more. Of other settings
# the key says what is not at its default.
_ALWAYS = ("module", "sizes", "batch", "seq", "precision", "checkpoint", "mode", "base_dtype", "gpu", "cudnn")
_OF_RECORDED = ("parallel", "rank", "optimizer", "accumulate", "clip", "is_own", "is_whole")
_OF_INFERENCE = ("phase", "context")


def code_key(asked: Asked) -> str:
    """A hash of what the code depends on, except versions."""
    groups = {_ALWAYS: True, _OF_RECORDED: asked.is_recorded, _OF_INFERENCE: asked.phase != "train"}
    told = {name: getattr(asked, name) for names, is_said in groups.items() if is_said for name in names}
    known = {name for names in groups for name in names}
    unusual = {name: value for name, value in asked.unusual.items() if name not in known}
    if "parallel" in told:
        told["parallel"] = told["parallel"].replace(ONE_GPU, "")  # as keys had it first
    config = None if asked.config is None else relevant(asked.config)
    return hashlib.sha256(canonical_json({**unusual, **told, "config": config}).encode()).hexdigest()[:20]


def is_kept(asked: Asked) -> bool:
    """Whether the user's cache has a config's code."""
    return _path(asked).is_file()


@contextmanager
def compiled_once(asked: Asked, codes: Codes | None = None) -> Iterator[Callable[[], OutputCode]]:
    """As `compiling`, which it asks only where the code is not kept. `codes`: the caller's, of modules."""
    found = kept_code(asked, codes)
    if found is not None:
        yield lambda: found
        return
    with compiling(asked) as result:

        def code() -> OutputCode:
            made = result()
            keep_code(made, asked, codes)
            return made

        yield code


Layers = Mapping[str, tuple[tuple[int, int], ...]]  # by graph, the launches that a layer more launches once more


def layers_of(deep: Sequence[Graph]) -> Layers | None:
    """Where a layer lies in the graphs of a model of FOLDED_DEPTH layers, where that of a model was kept whose graphs
    launch the same."""
    with suppress(DataError):
        return load(_Kept, _layers_path(deep), "the places of a compiled model's layers", hint="delete it").layers
    return None


def keep_layers(deep: Sequence[Graph], layers: Layers) -> None:
    with suppress(OSError):
        files.write(_layers_path(deep), json.dumps({"layers": layers}, separators=(",", ":")))


@dataclass(frozen=True)
class _Kept:
    layers: Layers


def pattern_of(graphs: Sequence[Graph]) -> str:
    """A hash of which kernels graphs launch, in order."""
    launched = [[graph.label, *(launch.name for launch in graph.launches)] for graph in graphs]
    return hashlib.sha256(canonical_json(launched).encode()).hexdigest()[:20]


def _layers_path(deep: Sequence[Graph]) -> Path:
    return _folder() / f"layers-{pattern_of(deep)}.json.gz"


def _folder() -> Path:
    return cache_folder("compiled") / f"compiler{COMPILER}-{versions('torch', 'triton', 'transformers')}"


def _path(asked: Asked) -> Path:
    return _folder() / f"{code_key(asked)}.json.gz"


def kept_code(asked: Asked, codes: Codes | None = None) -> OutputCode | None:
    if asked.module:
        return None if codes is None else codes.get(code_key(asked))
    with suppress(DataError):  # missing, torn, or written by another flopcast: compiled again
        return load(OutputCode, _path(asked), "a compiled step's code", hint="delete it to compile again")
    return None


def keep_code(code: OutputCode, asked: Asked, codes: Codes | None = None) -> None:
    """A failure costs only time: the step is then compiled again."""
    if asked.module:
        if codes is not None:
            codes[code_key(asked)] = code
        return
    with suppress(OSError):
        files.write(_path(asked), json.dumps(asdict(code), separators=(",", ":")))
