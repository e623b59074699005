"""Finds the module that an op belongs to: the one that is running, or the one that made an autograd node."""

from __future__ import annotations

import bisect
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from flopcast.microbench.recipe.training_step import find_layers


class ModuleStack:
    """Tracks which module is running, and which module made each autograd node.

    Nodes are numbered in order of creation, so the numbers at module entries and exits suffice.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        """Takes the models to follow. With several, the names of modules begin with the class of their model."""
        self.names: dict[torch.nn.Module, str] = {}
        stacks: list[tuple[str, torch.nn.ModuleList]] = []
        for model in models:
            prefix = "" if len(models) == 1 else f"{type(model).__name__}."
            found = {module: (prefix + name).removesuffix(".") for name, module in model.named_modules()}
            self.names |= found
            if (layers := find_layers(model)) is not None:
                stacks.append((f"{found[layers]}." if found[layers] else "", layers))
        self.prefix: str | None = None
        self.layers: torch.nn.ModuleList | None = None
        if stacks:
            self.prefix, self.layers = max(stacks, key=lambda stack: len(stack[1]))
        self._stack: list[str] = [""]
        self._starts: list[int] = [0]
        self._modules: list[str] = [""]

    def layer_of(self, name: str) -> int | None:
        if self.prefix is None or not name.startswith(self.prefix):
            return None
        number = name[len(self.prefix) :].split(".")[0]
        return int(number) if number.isdecimal() else None

    @property
    def is_inside(self) -> bool:
        """Whether a module is running."""
        return len(self._stack) > 1

    def current(self) -> tuple[str, int | None]:
        return self._stack[-1], self.layer_of(self._stack[-1])

    def of_node(self, number: int, previous: tuple[str, int | None]) -> tuple[str, int | None]:
        if number >= 2**63:  # AccumulateGrad, which follows the node that made the gradient
            return previous
        name = self._modules[bisect.bisect_right(self._starts, number) - 1]
        return name, self.layer_of(name)

    def _mark(self) -> None:
        self._starts.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
        self._modules.append(self._stack[-1])

    @property
    def _outside_of_graphs(self) -> list[torch.nn.Module] | None:
        """The modules that are in no compiled one, and those themselves; None where none is compiled. What hooks the
        others have is a part of their compiled code."""
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")  # takes seconds to import
        kinds = (dynamo.OptimizedModule,) if dynamo is not None else ()
        compiled = [module for module in self.names if isinstance(module, kinds)]
        inside = {inner for module in compiled for inner in module.modules() if inner is not module}
        return [module for module in self.names if module not in inside] if compiled else None

    @contextlib.contextmanager
    def inside(self, module: torch.nn.Module) -> Iterator[None]:
        """Within the context a module is taken to be running."""
        self._stack.append(self.names.get(module, ""))
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def watching(self, entered: Callable[[], None] = lambda: None) -> Iterator[None]:
        """Follows the modules of the models within the context; `entered` is called when a module begins that is not
        inside another."""

        def enter(module: torch.nn.Module, _args: Any) -> None:
            if module in self.names:
                if not self.is_inside:
                    entered()
                self._stack.append(self.names[module])
                self._mark()

        def leave(module: torch.nn.Module, _args: Any, _result: Any) -> None:
            if module in self.names and self.is_inside:
                self._stack.pop()
                self._mark()

        with forward_hooks(enter, leave, self._outside_of_graphs):
            yield


@contextlib.contextmanager
def forward_hooks(
    enter: Callable[..., None], leave: Callable[..., None], modules: Sequence[torch.nn.Module] | None = None
) -> Iterator[None]:
    """Calls `enter` before and `leave` after the forward of every module, or of `modules`, within the context; `leave`
    also when an exception ends the forward, as checkpointing ends its recomputation."""
    hooks = torch.nn.modules.module
    # a handle removes its hook at the end of the context
    if modules is not None:
        with contextlib.ExitStack() as stack:
            for module in modules:
                # before the module's own, as those of all modules are
                stack.enter_context(module.register_forward_pre_hook(enter, prepend=True))
                stack.enter_context(module.register_forward_hook(leave, prepend=True, always_call=True))
            yield
        return
    with hooks.register_module_forward_pre_hook(enter), hooks.register_module_forward_hook(leave, always_call=True):
        yield
