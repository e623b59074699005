"""Remakes reports/economics: tests the source article's claims (`claims.py`) and draws the cost curves behind them.

python -m studies.claims --out reports/economics
"""

from __future__ import annotations

from pathlib import Path

from flopcast.roofline.views.terminal.console import say
from studies.claims.report import gather, write
from studies.command import parser_of


def main() -> None:
    """Writes the folder."""
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("--out", type=Path, default=Path("reports/economics"))
    out = parser.parse_args().out
    for path in write(gather(say), out):
        say(f"wrote {path}")


if __name__ == "__main__":
    main()
