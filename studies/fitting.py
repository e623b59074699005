"""What the studies that fit a shipped law share: their options, and how they hand over their tables and parameters."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from studies.command import parser_of


def fit_parser(spec: ModuleSpec | None, about: str | None, folder: str, file: Path) -> ArgumentParser:
    """The parser of a study that fits what ships as `file` to what lies in a folder; `folder` says what that is."""
    parser = parser_of(spec, about)
    parser.add_argument("folder", type=Path, help=folder)
    parser.add_argument("--out", type=Path, help="file for the tables")
    parser.add_argument("--write", action="store_true", help=f"replace {file.name}")
    return parser


def hand_over(shown: str, known: Any, file: Path, options: Namespace) -> None:
    """Prints the tables, and writes them and the fitted dataclass where `fit_parser`'s options say so."""
    print(shown)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(shown + "\n")
    if options.write:
        file.write_text(json.dumps(rounded(asdict(known)), indent=1) + "\n")


def rounded(value: object) -> object:
    """To five digits: more are noise, and differ from machine to machine."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(one) for one in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
