"""Remakes a shipped host: the mean of several machines with one model of CPU.

python -m studies.shipped.hosts OUT FOLDER ...
"""

from __future__ import annotations

from pathlib import Path

from flopcast.roofline.gpu.fit.folder import fit_host_folder
from flopcast.roofline.gpu.profile.host import combine
from studies.command import parser_of


def main() -> None:
    """Writes one host made of the machines whose measurements lie in the folders."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("folder", type=Path, nargs="+", help="that `flopcast bench` wrote")
    given = parser.parse_args()
    host = combine([fit_host_folder(folder) for folder in given.folder])
    host.save(given.out)
    print(f"wrote {given.out}: {host.name}, {len(given.folder)} machines, deviation {host.sigma:.0%}")


if __name__ == "__main__":
    main()
