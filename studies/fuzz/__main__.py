"""Runs every command against damaged files and options, and counts how each ended.

    python -m studies.fuzz [--examples 2000] [--seed 0] [--only "prices csv,config"]

An example is refused in words (exit code 2), failed in words (1), done, or a defect: a traceback, a number that cannot
be in what was done, a message of 8,000 characters, more than 30 s or 1 GB. Each kind of defect is printed once, with
the seed that makes it again (`--seed N --examples 1 --only NAME`).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

from studies.command import parser_of


def main() -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--examples", type=int, default=2000, help="how many, spread evenly over the formats")
    parser.add_argument("--seed", type=int, default=0, help="number of the first example")
    parser.add_argument("--only", default="", help="names of formats, separated by commas")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = str(Path(name) / "cache")
        from studies.fuzz.examples import NAMES, Examples

        wanted = [part.strip() for part in options.only.split(",") if part.strip()] or list(NAMES)
        unknown = [part for part in wanted if part not in NAMES]
        if unknown:
            parser.error(f"--only {unknown[0]!r}: valid are {', '.join(NAMES)}")
        folder = Path(name) / "files"
        folder.mkdir()
        examples = Examples(folder)
        counts: dict[str, Counter[str]] = {part: Counter() for part in wanted}
        seen: Counter[str] = Counter()
        begun = time.monotonic()
        for number in range(options.examples):
            seed, part = options.seed + number, wanted[number % len(wanted)]
            found = examples.one(Random(seed), part)
            counts[part][found.outcome.kind] += 1
            if found.outcome.is_defect:
                seen[f"{part}: {found.outcome.why}"] += 1
                if seen[f"{part}: {found.outcome.why}"] == 1:
                    shown = found.command.replace(name, "")
                    print(f"seed {seed}, {part}: {found.outcome.why}\n    {shown}", flush=True)
    kinds = ("refused", "failed", "done", "defect")
    print(f"{'':16}" + "".join(f"{kind:>9}" for kind in kinds))
    for part, found_kinds in counts.items():
        print(f"{part:16}" + "".join(f"{found_kinds[kind]:9}" for kind in kinds))
    total = {kind: sum(found[kind] for found in counts.values()) for kind in kinds}
    print(f"{'all':16}" + "".join(f"{total[kind]:9}" for kind in kinds))
    print(f"{options.examples} examples in {time.monotonic() - begun:.0f} s, {len(seen)} kinds of defects")
    return int(total["defect"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
