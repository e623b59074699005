"""What compiled kernels take of a part: registers, shared memory, spills, by configuration.

    python -m tests.kernels.resources      compiles everything, two minutes of a core, and writes KEPT

Compiling every configuration was a tenth of the tests' time. While neither kernels nor tables nor Triton change, what
was kept holds, and every EVERY-th configuration is compiled again to show it. Another version of Triton compiles all.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flopcast.microbench.records import kernel_code

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent.parent / "kernels"
KEPT = HERE.parent / "data" / "kernel_resources.json"
PARTS = {
    "compile_offline.py": ("80", "89", "90"),
    "compile_attention.py": ("128", "64"),
    "compile_memory.py": ("80", "90"),
}
EVERY = 8

Row = dict[str, Any]
RunScript = Callable[..., str]


def fingerprint(script: str) -> str:
    """Of the kernels, the tables of configurations and the script that compiles them, without comments."""
    parts = (*kernel_code.parts(KERNELS, lambda name: True), (HERE / script).read_text(encoding="utf-8"))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def compiled(script: str, run: RunScript, *options: str) -> list[Row]:
    """Rows of what the script compiles, its parts two at once."""
    with ThreadPoolExecutor(2) as pool:
        printed = list(pool.map(lambda part: run(script, part, *options), PARTS[script]))
    return [json.loads(line) for text in printed for line in text.splitlines()]


def rows_of(script: str, run: RunScript) -> list[Row]:
    """The rows of all configurations: those that were kept, where they are of today's kernels, else compiled now."""
    kept = json.loads(KEPT.read_text(encoding="utf-8"))
    if kept["triton"] != version("triton"):
        return compiled(script, run)
    known = kept["scripts"][script]
    assert known["fingerprint"] == fingerprint(script), "kernels have changed: run `python -m tests.kernels.resources`"
    # few are compiled: one process for all parts, since each imports torch and Triton first
    again = [json.loads(line) for line in run(script, *PARTS[script], "--every", str(EVERY)).splitlines()]
    assert {row.get("sm", row.get("head_dim")) for row in again} == set(map(int, PARTS[script]))
    assert all(row in known["rows"] for row in again)
    rows: list[Row] = known["rows"]
    return rows


def main() -> None:
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"TRITON_CACHE_DIR": cache, "TRITON_INTERPRET": "0"}

        def run(script: str, *arguments: str) -> str:
            command = [sys.executable, str(HERE / script), *arguments]
            return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

        scripts = {script: {"fingerprint": fingerprint(script), "rows": compiled(script, run)} for script in PARTS}
    lines = ["{", f' "triton": {json.dumps(version("triton"))},', ' "scripts": {']
    for number, (script, found) in enumerate(scripts.items()):
        rows = ",\n".join("    " + json.dumps(row) for row in found["rows"])
        comma = "," if number + 1 < len(scripts) else ""
        lines.append(
            f'  "{script}": {{\n   "fingerprint": "{found["fingerprint"]}",\n   "rows": [\n{rows}\n   ]\n  }}{comma}'
        )
    KEPT.write_text("\n".join([*lines, " }", "}"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
