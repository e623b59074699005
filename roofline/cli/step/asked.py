"""The step that `predict` and `explain` are asked for: a config or a module, and how it is run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from typer import Context

from flopcast.errors import UsageError
from flopcast.roofline.cli.shared.options import ModelOptions, given
from flopcast.roofline.stream.model.run import Run

if TYPE_CHECKING:
    from flopcast.roofline.stream.library.modules import Module
    from flopcast.roofline.stream.library.streams import Trace
    from flopcast.roofline.stream.model.models import Config
    from flopcast.roofline.stream.ops.op_stream import Stream


@dataclass(frozen=True, kw_only=True)
class AskedStep:
    """A step of `config` or of `module`, whose factory is given the batch and sequence length that were asked for."""

    config: Config | None = None
    module: Module | None = None
    run: Run

    def traced(
        self, device: str, trace: Trace | None = None, gpu: Mapping[str, Any] | None = None
    ) -> tuple[Stream, Run]:
        """Returns the op stream on a device, as `Traced` names it, and the run with the batch and sequence length that
        were traced.

        `trace`: as in `get_stream`; `gpu`: as in `Module.stream`. Raises UsageError for a step that cannot be traced.
        """
        if self.module is None:
            from flopcast.roofline.stream.library.streams import get_stream

            return get_stream(self.config or {}, self.run.traced_on(device), trace=trace), self.run
        from flopcast.roofline.stream.library.modules import run_of_stream

        stream = self.module.stream(self.run, device, gpu)
        return stream, run_of_stream(stream, self.run)

    def stream_of(self, run: Run, device: Mapping[str, Any], *, trace: bool) -> Stream | None:
        """Returns the op stream of the same model run otherwise, on what a profile says of its device. None where it is
        not at hand, unless `trace`: then it is traced or compiled. Raises UsageError as `traced` does."""
        if self.module is not None:
            return self.module.stream(run, run.device_of(device), device) if trace else None
        return stream_of_config(self.config or {}, run, device, trace=trace)

    @property
    def model(self) -> Config | Module:
        return self.module or self.config or {}


def stream_of_config(config: Config, run: Run, device: Mapping[str, Any], *, trace: bool) -> Stream | None:
    """Returns a config's op stream; the rest as `AskedStep.stream_of`."""
    from flopcast.roofline.stream.library.streams import get_stream, is_at_hand

    traced = run.traced_on(run.device_of(device))
    return get_stream(config, traced) if trace or is_at_hand(config, traced) else None


def asked_step(context: Context, model: ModelOptions, run: Run) -> AskedStep:
    """Returns the step that the options describe. Raises UsageError, also where an option conflicts with --module."""
    if model.module is None:
        if run.phase != "train" and "precision" not in given(context, run):
            run = replace(run, precision="bf16")  # as models are loaded for inference
        asked = AskedStep(config=model.to_config(), run=run.checked())
        if run.link != Run.link:
            from flopcast.roofline.gpu.links.library import find_interconnect

            find_interconnect(run.link)  # raises before anything is traced
        return asked
    check_module_options(context, model, run)
    from flopcast.roofline.stream.library.modules import Module

    sizes = {name: value for name, value in given(context, run).items() if name in ("batch", "seq")}
    return AskedStep(module=Module(model.module).resized(**sizes), run=run.checked())


def check_module_options(context: Context, model: ModelOptions, run: Run) -> None:
    """Raises UsageError for options that conflict with --module."""
    clash = min(given(context, model).keys() - {"module"}, default=None)
    if clash is not None:
        raise UsageError(f"--module with --{clash.replace('_', '-')}: the factory makes the model, give one of the two")
    if run.fused != "none":
        raise UsageError(
            f"--module with --fused {run.fused}: a factory patches its own model, leave one of the two out"
        )
