"""Asks processes of their own for compiled steps' code, and waits for them within a time limit.

What a process does to torch (`fake_gpu`, `fake_cuda`) and what inductor remembers there ends with it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from flopcast import child
from flopcast.errors import UsageError
from flopcast.microbench.recipe.settings import TORCH_MODES
from flopcast.progress import progress
from flopcast.roofline.stream.tracer.compiler.asked import Asked, Break, OutputCode

# Two layers of Qwen3-0.6B take 15 s on two cores, all 28 of them 90 s.
MAX_SECONDS = 900.0
_PROCESS = "flopcast.roofline.stream.tracer.compiler.process"


def output_code(asked: Asked, *, max_seconds: float = MAX_SECONDS) -> OutputCode:
    """Returns what inductor generates for a step, compiled for a GPU that need not be there.

    Raises UsageError: an unknown mode, no Triton, a step that torch cannot compile (why), or the time limit.
    """
    with compiling(asked, max_seconds=max_seconds) as result:
        return result()


@contextmanager
def compiling(asked: Asked, *, max_seconds: float = MAX_SECONDS) -> Iterator[Callable[[], OutputCode]]:
    """As `output_code`, in the background: yields a function that waits for the code. The process ends here."""
    if asked.mode not in TORCH_MODES:
        raise UsageError(f"mode {asked.mode!r}: valid are {', '.join(TORCH_MODES)}")
    with (
        tempfile.TemporaryDirectory(prefix="flopcast-compiled-") as folder,
        open(Path(folder) / "stderr", "w+", encoding="utf-8", errors="replace") as errors,
    ):
        try:
            process = child.start(_PROCESS, environment(folder), errors)
        except OSError as fault:
            raise UsageError(f"no process can be started to compile in: {fault}") from fault
        assert process.stdin is not None
        json.dump(asdict(asked), process.stdin)  # less than a pipe holds: the process works from here on
        process.stdin.close()
        process.stdin = None

        def result() -> OutputCode:
            with progress("compiling for the GPU"):
                try:
                    answer, _ = process.communicate(timeout=max_seconds)
                except subprocess.TimeoutExpired as fault:
                    raise UsageError(
                        f"the step is not compiled after {max_seconds:g} s: fewer layers take less time"
                    ) from fault
            errors.seek(0)
            return _read(answer, process.returncode, errors.read())

        try:
            yield result
        finally:
            process.kill()
            process.communicate()


def environment(folder: str) -> dict[str, str]:
    """That of a process which compiles: its caches are its own, it uses no GPU that is there, and compiles even where
    eager steps are wanted."""
    return {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": folder, "CUDA_VISIBLE_DEVICES": "",
            "TORCHDYNAMO_DISABLE": "0", "TORCH_COMPILE_DISABLE": "0"}  # fmt: skip


def _read(answer: str, code: int, told: str) -> OutputCode:
    if code != 0:
        lines = told.strip().splitlines()
        raise UsageError(f"the step cannot be compiled here: {lines[-1] if lines else f'exit {code}'}")
    found = json.loads(answer)
    if "refused" in found:
        raise UsageError(found["refused"])
    return OutputCode(
        graphs=tuple(found["graphs"]), calls=tuple(found["calls"]), captured=found["captured"],
        breaks=tuple(Break(**one) for one in found["breaks"]), waits=tuple(found["waits"]),
        outside=found["outside"], torch=found["torch"], triton=found["triton"],
        waited_after=tuple(found["waited_after"]), recorded=found["recorded"],
        unsure_pads=tuple((m, k, n) for m, k, n in found["unsure_pads"]),
    )  # fmt: skip
