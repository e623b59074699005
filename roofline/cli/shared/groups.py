"""Groups of options: options that several commands share are declared once, as the fields of a frozen dataclass.

A command names the group as a parameter's type and receives an instance of it; `expanded` makes the function that
typer reads, with the fields in the parameter's place. `Annotated[Run, Only("batch", "seq")]` offers only these fields;
the others keep their defaults. The settings of a step say themselves what their options are (`recipe.settings`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, get_args, get_type_hints

from typer import Option

from flopcast.microbench.recipe.settings import Recipe, settings_of
from flopcast.roofline.cli.shared import completion
from flopcast.roofline.cli.shared.completion import one_of


class Only:
    """The fields of a group that a command offers."""

    def __init__(self, *names: str) -> None:
        self.names = names


def expanded(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command as typer takes it, with one parameter per option. A command without groups is unchanged."""
    parameters: list[Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        group, *marks = get_args(parameter.annotation) or (parameter.annotation,)
        options = [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
        if is_dataclass(group) and isinstance(group, type):
            options = _options(group, next((mark.names for mark in marks if isinstance(mark, Only)), None))
            groups[parameter.name] = group, [option.name for option in options]
        parameters += options
    if not groups:
        return command

    @wraps(command)
    def with_groups(**given: Any) -> None:
        made = {
            name: group(**{option: given.pop(option) for option in names}) for name, (group, names) in groups.items()
        }
        command(**given, **made)

    with_groups.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return with_groups


def _options(group: type, names: tuple[str, ...] | None) -> list[Parameter]:
    """Returns the fields of a group as parameters, in their order."""
    types = {**get_type_hints(group, include_extras=True), **_setting_types(group)}
    return [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
        for field in fields(group)
        if names is None or field.name in names
    ]


_NAMES = {"link": completion.links}  # that are looked up, of settings


def _setting_types(group: type) -> dict[str, Any]:
    """Returns the types of the settings of a step among the fields of a group, as typer takes them."""
    plain = get_type_hints(group)
    return {
        name: Annotated[plain[name], Option(help=one.help, autocompletion=one_of(_NAMES.get(name, one.completions)))]
        for name, one in (settings_of(group) if issubclass(group, Recipe) else {}).items()
    }
