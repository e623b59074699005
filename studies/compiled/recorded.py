"""Reads the compiled steps that `record.py` recorded: the code of their graphs, the kernels that they ran, and the
same steps' eager streams."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.profiled import Joined, join, run_order
from flopcast.roofline.stream.compiled.to_rank import to_rank
from flopcast.roofline.stream.compiled.to_stream import to_stream
from flopcast.roofline.stream.library.modules import module_stream
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.model.run import Run
from flopcast.roofline.stream.ops.op_stream import Stream, load
from studies.compiled.record import Case

FOLDER = Path("reports/nvidia-h200/compiled-steps")
CODE, RECORD = ".code.gz", ".json.gz"
OUTSIDE = "outside"  # the folder of what steps run between their graphs


def cases_of(folder: Path, suffix: str = RECORD) -> list[str]:
    """The names of the cases of which a folder has such a file."""
    return sorted(path.name.removesuffix(suffix) for path in folder.glob("*" + suffix))


def graphs_of(folder: Path, case: str) -> tuple[Graph, ...]:
    return read_output_code(gzip.decompress((folder / f"{case}{CODE}").read_bytes()).decode())


def record_of(folder: Path, case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((folder / f"{case}{RECORD}").read_bytes()))
    return found


def joined(folder: Path, case: str) -> Joined:
    """The launches of a case with their times, and the kernels of no launch."""
    kernels = [(str(name), float(seconds)) for name, seconds in record_of(folder, case)["kernels"]["compile"]]
    return join(graphs_of(folder, case), kernels)


def compiled_stream(folder: Path, case: Case) -> Stream:
    """The stream of a recorded step: its launches in the order in which the profiler saw them and, where products run
    between its graphs, what was recorded there without a GPU (`make.py`), as `predict` has it."""
    graphs = graphs_of(folder, case.name)
    outside = folder / OUTSIDE / f"{case.name}{RECORD}"
    if outside.is_file():
        return to_rank(load(outside), graphs)
    return to_stream(run_order(graphs, record_of(folder, case.name)["kernels"]["compile"]), eager_stream(case))


def run_of(case: Case) -> Run:
    return Run(batch=case.batch, seq=case.seq if case.config else 1, optimizer=case.optimizer)


def eager_stream(case: Case) -> Stream:
    """The stream of the same step without compilation, whose optimizer and parameters the compiled step shares."""
    run = run_of(case)
    if not case.config:
        return module_stream(case.module, run, "cuda", sizes={"batch": case.batch})
    config = load_config(case.config)
    return get_stream(config if case.layers is None else with_depth(config, case.layers), run.traced_on("cuda"))
