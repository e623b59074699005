"""Puts plausible wrong constants into copies of the source, one at a time, and shows what of the accuracy tests fails.

    python -m studies.mutations [--out PAGE.md] [NAME ...]

Each mutant is a copy of the repository in which one text, found exactly once, is replaced by another. In it the bounds
of `tests/studies/evidence/test_accuracy.py` are checked, and a further test file where one is named. A mutant that
nothing notices ends the command with exit code 1. A minute each.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flopcast.errors import UsageError
from studies.command import parser_of
from studies.markdown import table

PAGE = """# Wrong constants

What the tests of accuracy see of plausible errors in the source, put one at a time into a copy of it by
`python -m studies.mutations`. "Fails": sets of steps, or kinds of kernels, with a figure out of its bounds
(`tests/studies/evidence/bounds.toml`). Where a set has other steps than before, what bounds a step has changed.

{table}
"""
COPIED = ("src", "kernels", "microbench", "roofline", "studies", "tests")
STEP, GPU = "roofline/step", "roofline/gpu"


@dataclass(frozen=True)
class Mutation:
    """A wrong constant: in `file`, `old`, which is there exactly once, becomes `new`. `test`: a test file that is to
    notice it besides, where steps cannot."""

    name: str
    file: str
    old: str
    new: str
    test: str = ""


MUTATIONS = (
    Mutation("half of L2 stays hot", f"{STEP}/device_work.py", "L2_SHARE = 0.8", "L2_SHARE = 0.4"),
    Mutation("products gain all that L2 can give", f"{STEP}/device_work.py", '"gemm": 0.4', '"gemm": 1.0'),
    Mutation("reductions gain nothing from L2", f"{STEP}/device_work.py", '"reduction": 0.6', '"reduction": 0.0'),
    Mutation(
        "the gap between kernels doubled", f"{STEP}/timeline.py",
        'return self.profile.ceiling("kernel_gap", GAP_SECONDS)',
        'return 2 * self.profile.ceiling("kernel_gap", GAP_SECONDS)',
    ),
    Mutation(
        "a synchronisation costs nothing", f"{STEP}/simulation.py",
        "host = (device if device > host else host) + sync_seconds", "host = device if device > host else host",
        "tests/roofline/step/test_simulation.py",
    ),
    Mutation(
        "attention's tile halved", f"{GPU}/laws/attention.py",
        'block, advance = params["block"], params["advance"]',
        'block, advance = params["block"] / 2, params["advance"]',
    ),
    Mutation(
        "a call of the optimizer launches one kernel", f"{STEP}/device_work.py",
        'n_launches = count if op.phase == "optimizer" else 1', "n_launches = 1",
    ),
    Mutation(
        "a layer's host time a fifth more", f"{GPU}/profile/host.py",
        'return costs.get("launch", 0.0) * max(launches, 1)',
        'return 1.2 * costs.get("launch", 0.0) * max(launches, 1)',
    ),
    Mutation(
        "the allocator rounds to 2 MiB", f"{STEP}/memory/allocator.py", "ROUNDED_TO = 512", "ROUNDED_TO = 2097152"
    ),
    Mutation(
        "gradients of tied embeddings summed elsewhere", f"{STEP}/memory/lifetimes.py",
        'is_sum = op.phase == "backward" and', 'is_sum = op.phase == "never" and',
    ),
    Mutation(
        "the device's deviation halved", f"{STEP}/uncertainty.py",
        "return sqrt((own + shared + projected**2)", "return 0.5 * sqrt((own + shared + projected**2)",
    ),
    Mutation("intervals of 95%", "roofline/base/numbers.py", "Z_90 = 1.6449", "Z_90 = 1.96"),
    Mutation(
        "a byte takes twice the energy", f"{GPU}/catalogue/power.py", "BYTE_JOULES = 1.2e-10", "BYTE_JOULES = 2.4e-10"
    ),
    Mutation("L2 spills from half of it on", f"{GPU}/laws/memory.py", "SPILL_SHARE, SPILL_POWER = 0.75",
             "SPILL_SHARE, SPILL_POWER = 0.5"),
    Mutation(
        "log-softmax passes once more over its rows", f"{GPU}/laws/memory.py",
        '    moving = bytes_ / params["bandwidth"]\n    if "beyond"',
        '    moving = bytes_ / params["bandwidth"]\n    if "softmax" in str(variant):\n'
        '        moving = 1.5 * moving\n    if "beyond"',
    ),
)  # fmt: skip


def mutated(root: Path, mutation: Mutation, folder: Path) -> Path:
    """A copy of the repository with one mutation. Raises UsageError where its text is not there exactly once."""
    text = (root / mutation.file).read_text(encoding="utf-8")
    if text.count(mutation.old) != 1:
        raise UsageError(
            f"{mutation.name}: {mutation.file} has {mutation.old!r} {text.count(mutation.old)} times, not 1"
        )
    for name in COPIED:
        shutil.copytree(root / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "reports").symlink_to(root / "reports")
    (folder / mutation.file).write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    return folder


def caught_by(folder: Path, mutation: Mutation) -> tuple[list[str], str]:
    """The tests that fail in a mutant, and what the first of them says."""
    command = [sys.executable, "-m", "studies.evidence.bounds", "--check"]
    found = _run(command, folder)
    lines = [line for line in found.stdout.splitlines() if line]
    if found.returncode and not lines:
        raise UsageError(f"{mutation.name}: the mutant does not run: {found.stderr.strip().splitlines()[-1]}")
    failed = list(dict.fromkeys(line.partition(": ")[0] for line in lines))
    if mutation.test:
        also = _run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", mutation.test], folder)
        failures = re.findall(r"^FAILED \S*/(\S+)", also.stdout, re.MULTILINE)
        failed += failures
        lines += failures
    return failed, lines[0] if lines else ""


def _run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a Markdown table of all mutants, or of those named."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("name", nargs="*", help="those whose names contain this text")
    parser.add_argument("--out", type=Path, help="file to write the table to")
    given = parser.parse_args(arguments)
    root = Path.cwd()
    rows = []
    for mutation in MUTATIONS:
        if given.name and not any(name in mutation.name for name in given.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            failed, first = caught_by(mutated(root, mutation, Path(folder)), mutation)
        rows.append((mutation.name, f"`{mutation.file}`", str(len(failed)), first or "NOTHING"))
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    page = PAGE.format(table=table(("wrong constant", "file", "fails", "the first says"), rows))
    if given.out is None:
        print(page)
    else:
        given.out.write_text(page, encoding="utf-8")
    return 1 if any(first == "NOTHING" for *_, first in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
