"""Makes the command-line parser of a study."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from importlib.machinery import ModuleSpec


def parser_of(spec: ModuleSpec | None, about: str | None) -> ArgumentParser:
    """The parser of `python -m MODULE`, given the module's `__spec__`; its help is the module's docstring, `about`."""
    name = (spec.name if spec else "studies").removesuffix(".__main__")
    return ArgumentParser(prog=f"python -m {name}", description=about, formatter_class=RawDescriptionHelpFormatter)
