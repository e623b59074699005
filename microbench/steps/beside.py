"""What happens beside a step that is timed: nothing, or other processes that stand still meanwhile (`ahead.Ahead`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from flopcast.microbench.recipe.inference import InferenceStep
    from flopcast.microbench.recipe.training_step import TrainingStep


class Beside(Protocol):
    """`first` runs a step that is not timed; while `still()` is held nothing else computes."""

    def first(self, step: TrainingStep | InferenceStep) -> None: ...
    def still(self) -> AbstractContextManager[None]: ...


class Nothing:
    """Nothing else runs on this machine that we know of."""

    def first(self, step: TrainingStep | InferenceStep) -> None:
        step.run()

    def still(self) -> AbstractContextManager[None]:
        return nullcontext()


NOTHING = Nothing()
