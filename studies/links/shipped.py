"""Makes the shipped link of H200s: of two GPUs what one host measured, of four what another did.

    python -m studies.links.shipped

Rows of both are `flopcast bench --suite collectives`, with the same NCCL and NVLS off (reports/nvidia-h200/links and
its folder `four`). Contention is fitted to what the first ran beside collectives; the other's such rows judge it.
"""

from __future__ import annotations

from flopcast.microbench.records import records
from flopcast.microbench.records.rows import BesideRow, kind_of
from flopcast.roofline.gpu.links.fit import profile_of
from flopcast.roofline.gpu.links.profile import LinkProfile
from studies.command import parser_of
from studies.imports import ROOT

FOLDER = ROOT / "reports" / "nvidia-h200" / "links"
FOUR = FOLDER / "four"
FILE = ROOT / "roofline" / "data" / "links" / "nvidia-h200.json"


def shipped() -> LinkProfile:
    of_two, of_four = (records.read(folder).latest() for folder in (FOLDER, FOUR))
    known = {row["key"] for row in of_two}
    added = [row for row in of_four if row["key"] not in known and kind_of(row) is not BesideRow]
    return profile_of([*of_two, *added], records.read_machine(FOLDER), FOLDER)


def main() -> None:
    parser_of(__spec__, __doc__).parse_args()
    shipped().save(FILE)


if __name__ == "__main__":
    main()
