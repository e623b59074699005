"""Tests the source article's claims.

python -m studies.claims --out reports/economics
"""

from __future__ import annotations


def main() -> None:
    """Remakes the folder: see `report.main`."""
    from studies.claims import report

    report.main()


if __name__ == "__main__":
    main()
