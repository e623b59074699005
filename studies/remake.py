"""Makes the committed tables and pages again that follow from the shipped profile: none should tell of an earlier one.

    python -m studies.remake                    all of them, in order, and says which files that changed
    python -m studies.remake parallel widths    those whose command or files have one of these words
    python -m studies.remake --list             what is made, by which command

Run it after any change of the profile, of a law or of what a step launches, and commit what it changed by itself. It
needs no GPU; steps with adapters need peft. Tables that need a GPU or somebody else's measurements are not here: each
says which command makes it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from studies.beside_evidence import SUITES
from studies.command import parser_of
from studies.imports import ROOT

H200 = "reports/nvidia-h200"
H100 = "reports/nvidia-h100-sxm"
COMPILED = f"{H200}/compiled-steps"


@dataclass(frozen=True)
class Page:
    """What `python -m` with these words writes, below the repository's root."""

    command: tuple[str, ...]
    writes: tuple[str, ...]

    @classmethod
    def of(cls, command: str, *writes: str) -> Page:
        return cls(tuple(command.split()), writes)

    def has(self, words: Sequence[str]) -> bool:
        """Whether the command or a file has one of the words; without words all are meant."""
        return not words or any(word in text for word in words for text in (*self.command, *self.writes))


# In the order in which one reads what another wrote: pages show the tables beside them.
PAGES = (
    Page.of(f"studies.compiled.generated {COMPILED} --out {COMPILED}/generated.md", f"{COMPILED}/generated.md"),
    Page.of(f"studies.compiled.dropout {COMPILED} --out {COMPILED}/dropout.md", f"{COMPILED}/dropout.md"),
    Page.of(f"studies.compiled.kernels {COMPILED} --out {COMPILED}/kernels.md", f"{COMPILED}/kernels.md"),
    Page.of(f"studies.compiled.steps --out {COMPILED}/steps.md", f"{COMPILED}/steps.md"),
    Page.of("studies.compiled.another_torch table", f"{H200}/random/another-torch.md"),
    Page.of(f"studies.compiled.timeline --out {COMPILED}/timeline.md", f"{COMPILED}/timeline.md"),
    Page.of(
        "studies.compiled.validation",
        f"{H200}/compiled-validation/README.md",
        f"{H200}/compiled-validation/compile.csv",
        f"{H200}/compiled-validation/compile-graphs.csv",
        f"{H100}/compiled-validation/README.md",
        f"{H100}/compiled-validation/compile.csv",
        f"{H100}/compiled-validation/compile-graphs.csv",
    ),
    Page.of("studies.power.again", f"{H200}/compiled-validation/again/README.md"),
    Page.of(f"studies.links.again --out {H200}/links/again.md", f"{H200}/links/again.md"),
    Page.of("studies.links.fed_table", f"{H200}/input/README.md", f"{H200}/input/input.csv"),
    Page.of(f"studies.experts.table --out {H200}/experts/README.md", f"{H200}/experts/README.md"),
    Page.of(f"studies.power.table --out {H200}/power-limit/README.md", f"{H200}/power-limit/README.md"),
    Page.of(f"studies.memory.table --out {H200}/memory/README.md", f"{H200}/memory/README.md"),
    Page.of("studies.parallel.timeline --out reports/parallel/timeline.md", "reports/parallel/timeline.md"),
    Page.of("studies.parallel.memory --out reports/parallel/memory.md", "reports/parallel/memory.md"),
    Page.of(
        "studies.beside_evidence",
        *(f"{H200}/{suite}/{file}" for suite in SUITES for file in ("README.md", "validation.csv")),
        *(f"{H100}/architectures/{file}" for file in ("README.md", "validation.csv")),
    ),
    Page.of(f"studies.shipped.attention_bands {H200} --out {H200}/bands/bands.md", f"{H200}/bands/bands.md"),
    Page.of(f"studies.widths.hindsight --out {H200}/widths-hindsight.csv", f"{H200}/widths-hindsight.csv"),
    Page.of(
        "studies.evidence.accuracy",
        "docs/accuracy.md",
        "README.md",
        "tests/studies/evidence/bounds.toml",
        f"{H200}/validation.csv",
        "reports/nvidia-h100-sxm/validation.csv",
    ),
    Page.of("studies.projection.measured nvidia-h100-sxm", "reports/projection/nvidia-h100-sxm/README.md"),
    Page.of("studies.claims", "reports/economics/README.md", "reports/economics/claims.csv"),
    Page.of("studies.claims.modes", "reports/economics/modes.md", "reports/economics/modes.csv"),
    Page.of("studies.house", "docs/rooms.svg"),
    Page.of(
        "studies.shipped.pages",
        f"{H200}/report.html",
        "reports/nvidia-h100-sxm/report.html",
        "reports/index.html",
    ),
)  # fmt: skip


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("words", nargs="*", help="of commands or files (default: all)")
    parser.add_argument("--list", action="store_true", help="print commands and files, and make nothing")
    options = parser.parse_args()
    pages = [page for page in PAGES if page.has(options.words)]
    if not pages:
        parser.error(f"no page has {' or '.join(options.words)} in its command or files; --list shows all")
    failed = []
    for page in pages:
        line = " ".join(page.command)
        if options.list:
            print(f"python -m {line}", *page.writes, sep="\n    ")
            continue
        before = changed()
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *page.command], cwd=ROOT, stdout=subprocess.DEVNULL)
        if done.returncode:
            failed.append(line)
        after = changed()
        news = sorted(path for path in before | after if before.get(path) != after.get(path))
        told = "FAILED" if done.returncode else ", ".join(news) or "as it was"
        print(f"{line}: {time.monotonic() - start:.0f} s: {told}", flush=True)
    if failed:
        sys.exit(f"{len(failed)} of {len(pages)} failed: {'; '.join(failed)}")


def changed() -> dict[str, str]:
    """The files that differ from the last commit, with a hash of each; "" for one that is gone."""
    shown = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=all"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [line[3:] for line in shown.stdout.splitlines()]
    return {path: sha256((ROOT / path).read_bytes()).hexdigest() if (ROOT / path).is_file() else "" for path in paths}


if __name__ == "__main__":
    main()
