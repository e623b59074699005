"""Says which kinds of kernel torch's optimizers launch that the shipped profile of the H200 has not measured.

    python -m studies.optimizer_kinds
    flopcast bench --module studies.optimizer_kinds:every_optimizer --out OUT      measures them, on a GPU

Of each optimizer of torch.optim the forms that it has: a loop over parameters, foreach and fused. NAdam is left out: it
divides by a counter that it reads back, of which a trace knows no value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode, UnsupportedOperatorException

from flopcast.roofline.gpu.library.profiles import SOURCE, find_profile
from flopcast.roofline.step.device_work import describe_ops
from flopcast.roofline.stream.lowering.variants import KernelKind
from flopcast.roofline.stream.tracer.trace import trace_module
from studies.command import parser_of
from studies.markdown import table

NAMES = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "RAdam", "RMSprop", "Rprop", "SGD", "Adafactor", "Muon",
)  # fmt: skip
FORMS = ("loop", "foreach", "fused")
WIDTH, ROWS = 1024, 64


def main() -> None:
    """Prints a row per optimizer and form."""
    parser_of(__spec__, __doc__).parse_args()
    known = {key.kind for key in find_profile(SOURCE).surfaces}
    rows = []
    for name, form in forms():
        stream = trace_module(partial(step_of, name, form))
        works = [w for op, w in zip(stream.ops, describe_ops(stream), strict=True) if op.phase == "optimizer" and w]
        lacking = sorted(
            {str(kind).replace("|", " ") for w in works if (kind := KernelKind(w.op_class, w.variant)) not in known}
        )
        rows.append([name, form, str(len(works)), str(len(lacking)), ", ".join(lacking)])
    print(table(["optimizer", "form", "calls", "kinds not measured", "which"], rows))


def forms() -> Iterator[tuple[str, str]]:
    """The optimizers that this torch has, each with its forms."""
    for name in NAMES:
        if hasattr(torch.optim, name):
            options = inspect.signature(getattr(torch.optim, name)).parameters
            for form in FORMS:
                if form == "loop" or (form in options and (form != "fused" or _is_fused_on_cuda(name))):
                    yield name, form


def _is_fused_on_cuda(name: str) -> bool:
    """Whether this torch has the optimizer's fused form for CUDA: Adagrad's is for CPUs alone in 2.11, which says so
    when it is made or first steps."""
    with FakeTensorMode(allow_fallback_kernels=False):
        parameter = torch.nn.Parameter(torch.empty(1, 1, device="cuda"))
        parameter.grad = torch.empty_like(parameter)
        try:
            getattr(torch.optim, name)([parameter], fused=True).step()
        except UnsupportedOperatorException:
            return True  # which fake tensors cannot run
        except RuntimeError:
            return False
    return True


def step_of(name: str, form: str) -> Callable[[], None]:
    """A step of four square layers with one optimizer."""
    optimizer = getattr(torch.optim, name)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)])
    options: dict[str, Any] = {"lr": 1e-3}
    if "foreach" in inspect.signature(optimizer).parameters:
        options |= {"foreach": form == "foreach"}
    if form == "fused":
        options |= {"foreach": None, "fused": True}
    if name in ("SGD", "RMSprop"):
        options["momentum"] = 0.9
    made = optimizer(model.parameters(), **options)
    data = torch.randn(ROWS, WIDTH)

    def step() -> None:
        made.zero_grad()
        model(data).square().mean().backward()
        made.step()

    return step


def every_optimizer() -> Callable[[], None]:
    """A step of each optimizer in each form, one after the other."""
    steps = [step_of(name, form) for name, form in forms()]

    def run() -> None:
        for step in steps:
            step()

    return run


if __name__ == "__main__":
    main()
