"""Reads the compiled steps that `record.py` recorded: the code of their graphs, and the kernels that they ran."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from flopcast.roofline.stream.compiled.launches import Graph
from flopcast.roofline.stream.compiled.output_code import read_output_code
from flopcast.roofline.stream.compiled.profiled import Joined, join

FOLDER = Path("reports/nvidia-h200/compiled-steps")
CODE, RECORD = ".code.gz", ".json.gz"


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
