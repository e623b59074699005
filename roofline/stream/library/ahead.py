"""Compiles the code of many steps ahead of time, several side by side, into the user's cache.

Of each model of alike layers the deeper of two depths is compiled, and the other one only where no model was compiled
before whose graphs launch the same kernels in the same order: most widths of a model do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress
from dataclasses import replace

from flopcast.errors import FlopcastError
from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.library.code import code_key, is_kept, keep_code, kept_code, layers_of, pattern_of
from flopcast.roofline.stream.library.compiled import SHALLOW, asked_of, depths_of, find_layers, whole_of
from flopcast.roofline.stream.library.streams import folded, folding, is_at_hand
from flopcast.roofline.stream.model.models import Config, depth_of, with_depth
from flopcast.roofline.stream.model.run import Traced
from flopcast.roofline.stream.ops.op_stream import FOLDED_DEPTH
from flopcast.roofline.stream.tracer.compiler.asked import Asked, OutputCode
from flopcast.roofline.stream.tracer.compiler.side_by_side import compilers

FEW = 2  # models: fewer are compiled when they are asked for, both depths side by side

Progress = Callable[[int, int], None]


def compile_ahead(wanted: Iterable[tuple[Config, Traced]], progress: Progress = lambda done, total: None) -> None:
    """Compiles what `get_stream` would have to for the steps that are `wanted`, but for those on several GPUs, whose
    code is not kept. What cannot be compiled is left out: whoever asks for its stream is told why. `progress`:
    compilations done, of how many."""
    by_chip: dict[str, dict[str, Asked]] = defaultdict(dict)
    for config, traced in wanted:
        if traced.mode != "eager" and not traced.is_parallel and not is_at_hand(config, traced):
            depth = FOLDED_DEPTH if folding(config, traced) else None
            asked = _asked(config, traced)
            deep = asked if depth is None else replace(asked, config=with_depth(config, depth))
            by_chip[traced.device][code_key(deep)] = deep
    queues = [list(found.values()) for found in by_chip.values() if len(found) >= FEW]
    done, total = 0, sum(map(len, queues))
    for models in queues:
        for more in _compile(models):
            done, total = done + 1, total + more
            progress(done, total)


def has_code(config: Config, traced: Traced) -> bool:
    """Whether `get_stream` answers without compiling."""
    if traced.mode == "eager" or is_at_hand(config, traced):
        return True
    asked = _asked(folded(config, traced), traced)
    depths = depths_of(asked) if folding(config, traced) and not asked.is_whole else [asked]
    return all(is_kept(one) for one in depths)


def _asked(config: Config, traced: Traced) -> Asked:
    return whole_of(config, traced) or replace(asked_of(traced), config=config, mode="compile-graphs")


def _compile(models: Sequence[Asked]) -> Iterator[int]:
    """Compiles models for one GPU into the cache. Yields, after each, how many compilations it has added."""
    seen: set[str] = set()  # what models launch of which a layer's places are known, or will be
    with compilers(models[0].gpu, models[0].cudnn, len(models)) as submit:

        def begin(asked: Asked) -> Future[OutputCode]:
            found = kept_code(asked)
            if found is None:
                return submit(asked)
            future = Future[OutputCode]()
            future.set_result(found)
            return future

        waiting: dict[Future[OutputCode], tuple[Asked, Sequence[Graph]]] = {begin(one): (one, ()) for one in models}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                asked, deep = waiting.pop(future)
                more = 0
                with suppress(FlopcastError, BrokenExecutor):
                    code = future.result()
                    keep_code(code, asked)
                    if deep:
                        find_layers(code, deep)
                    elif depth_of(asked.config or {}) == FOLDED_DEPTH and not asked.is_whole:
                        graphs = read_output_code(code.text)
                        pattern = pattern_of(graphs)
                        if pattern not in seen and layers_of(graphs) is None:
                            shallow = replace(asked, config=with_depth(asked.config or {}, SHALLOW))
                            waiting[begin(shallow)] = shallow, graphs
                            more = 1
                        seen.add(pattern)
                yield more
