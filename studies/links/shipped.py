"""Makes the shipped links: of H200s what one host measured of two and another of four, of H100s what one did of both.

    python -m studies.links.shipped

All rows are `flopcast bench --suite collectives` with NCCL 2.28.9 and NVLS off (reports/nvidia-h200/links, its folder
`four`, and reports/nvidia-h100-sxm/links). Contention of H200s is fitted to what two ran beside collectives; four's
such rows judge it.
"""

from __future__ import annotations

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import BesideRow, kind_of
from flopcast.roofline.gpu.links.fit import fit_links, profile_of
from flopcast.roofline.gpu.links.library import SHIPPED
from flopcast.roofline.gpu.links.profile import LinkProfile
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "links"
FOUR = FOLDER / "four"
H100 = ROOT / "reports" / "nvidia-h100-sxm" / "links"


def of_h200() -> LinkProfile:
    of_two, of_four = (records.read(folder).latest() for folder in (FOLDER, FOUR))
    known = {row["key"] for row in of_two}
    added = [row for row in of_four if row["key"] not in known and kind_of(row) is not BesideRow]
    return profile_of([*of_two, *added], records.read_machine(FOLDER), FOLDER)


def by_two() -> LinkProfile:
    """The link of H200s as the first host's two GPUs alone tell it, without what four ran."""
    return fit_links(FOLDER)


def shipped() -> dict[str, LinkProfile]:
    """The links by their files' names."""
    return {f"{profile.name}.json": profile for profile in (of_h200(), fit_links(H100))}


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    for name, profile in shipped().items():
        profile.save(SHIPPED / name)


if __name__ == "__main__":
    main()
