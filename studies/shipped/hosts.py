"""Remakes a shipped host: the mean of several machines with one model of CPU.

python -m studies.shipped.hosts OUT FOLDER ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from flopcast.roofline.gpu.profile.host import combine


def main(arguments: Sequence[str]) -> None:
    """OUT FOLDER ...: one host of the machines whose measurements lie in the folders."""
    from flopcast.roofline.gpu.fit.folder import fit_host_folder

    out, *folders = arguments
    host = combine([fit_host_folder(Path(folder)) for folder in folders])
    host.save(Path(out))
    print(f"wrote {out}: {host.name}, {len(folders)} machines, deviation {host.sigma:.0%}")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: python -m studies.shipped.hosts OUT FOLDER ...")
    main(sys.argv[1:])
