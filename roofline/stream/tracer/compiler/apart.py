"""Asks a process of its own for a compiled step's code, and waits for it within a time limit.

What the process does to torch (`fake_gpu`, `fake_cuda`) and what inductor remembers there ends with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from flopcast.child import PARENT
from flopcast.errors import UsageError
from flopcast.progress import progress
from flopcast.roofline.stream.tracer.compiler.asked import MODES, Asked, Break, OutputCode

# Two layers of Qwen3-0.6B take 15 s on two cores, all 28 of them 90 s.
MAX_SECONDS = 900.0
_PROCESS = "flopcast.roofline.stream.tracer.compiler.process"


def output_code(asked: Asked, *, max_seconds: float = MAX_SECONDS) -> OutputCode:
    """Returns what inductor generates for a step, compiled for a GPU that need not be there.

    Raises UsageError: an unknown mode, no Triton, a step that torch cannot compile (why), or the time limit.
    """
    if asked.mode not in MODES:
        raise UsageError(f"mode {asked.mode!r}: valid are {', '.join(MODES)}")
    # it imports from where this process does, and its caches are its own
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), PARENT: str(os.getpid())}
    with (
        tempfile.TemporaryDirectory(prefix="flopcast-compiled-") as folder,
        progress("compiling for the GPU"),
        open(Path(folder) / "stderr", "w+", encoding="utf-8", errors="replace") as errors,
    ):
        # it uses no GPU that is there, and compiles even where eager steps are wanted
        environment |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "",
                        "TORCHDYNAMO_DISABLE": "0", "TORCH_COMPILE_DISABLE": "0"}  # fmt: skip
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", _PROCESS], env=environment, text=True, timeout=max_seconds,
                input=json.dumps(asdict(asked)), stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        except subprocess.TimeoutExpired as fault:
            raise UsageError(
                f"the step is not compiled after {max_seconds:g} s: fewer layers take less time"
            ) from fault
        errors.seek(0)
        told = errors.read().strip().splitlines()
    if done.returncode != 0:
        raise UsageError(f"the step cannot be compiled here: {told[-1] if told else f'exit {done.returncode}'}")
    answer = json.loads(done.stdout)
    if "refused" in answer:
        raise UsageError(answer["refused"])
    return OutputCode(
        graphs=tuple(answer["graphs"]), calls=tuple(answer["calls"]), captured=answer["captured"],
        breaks=tuple(Break(**found) for found in answer["breaks"]), waits=tuple(answer["waits"]),
        torch=answer["torch"], triton=answer["triton"],
    )  # fmt: skip
