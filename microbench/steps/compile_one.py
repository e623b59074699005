"""A process that compiles one step, or the models that calibrate the host, and answers with the step's kernels."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

from flopcast.child import answer


def compiled(ask: Callable[[], Any]) -> Mapping[str, Any] | None:
    """The fields of the row of kernels of the plan that is asked for; None for models that calibrate the host."""
    import torch

    from flopcast.microbench.recipe.compiling import host_builders
    from flopcast.microbench.recipe.plans import HostPlan, StepPlan
    from flopcast.microbench.steps.gpu_alone import first_steps, gpu_alone, graphs_alone, leave_a_core
    from flopcast.microbench.steps.measure import profile_step
    from flopcast.microbench.steps.run import kernel_fields, measure_plan

    gc.enable()  # compiling leaves circles behind
    asked = ask()
    device = torch.device(asked["device"])
    leave_a_core()
    if "host" in asked:
        depths = {int(depth): config for depth, config in asked["plan"]["configs"].items()}  # JSON has no other keys
        builders, _ = host_builders(HostPlan(**{**asked["plan"], "configs": depths}), device)
        with graphs_alone(device.type):
            for build in builders.values():
                build()
        return None

    def kernels(step: Any) -> Mapping[str, object]:
        first_steps(step)
        with gpu_alone(device.type):
            return kernel_fields(profile_step(step))

    return measure_plan(StepPlan(**asked["plan"]), device, kernels)


if __name__ == "__main__":
    answer(compiled)
