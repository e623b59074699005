"""AdamW over a list of fp32 parameters: torch's fused kernel, torch.compile, one Triton launch; and an optimizer.

Decoupled weight decay, bias correction, no amsgrad: the formula of torch.optim.AdamW(fused=True), to fp32 rounding.
A step reads parameter, gradient and two moments and writes all but the gradient: 28 bytes per element.

    optimizer = AdamW(model.parameters(), lr=1e-3)       # in place of torch.optim.AdamW

    operands_ = operands(shape, device)                  # parameters, gradients, first and second moments
    ref = reference(operands_, shape)                    # before the call, which works in place
    error, tolerance = check(prepare(shape, "triton", copies)(), ref, operands_, shape)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_dynamo_compiling

from flopcast.kernels.gradient_norm import are_aligned, chunks_of, gradient_norm, made_once, require_whole, to_device
from flopcast.kernels.launching import Replayed
from flopcast.kernels.operators import unobserved
from flopcast.kernels.references import require_known, standard_normal, worst
from flopcast.kernels.rowwise import BACKENDS, Outputs, load_triton
from flopcast.kernels.shapes import AdamW as AdamWShape

LR, BETAS, EPS, WEIGHT_DECAY = 1e-2, (0.9, 0.999), 1e-8, 1e-2  # of the benchmark interface
STEP = 3


@dataclass(frozen=True)
class AdamWConfig:
    """Launch options: a program of `num_warps` warps takes `chunk` elements of one tensor, `block` at a time."""

    chunk: int = 2048
    block: int = 2048
    num_warps: int = 8  # 8 elements per thread: two 16-byte loads of each of four operands in flight


DEFAULT = AdamWConfig()


def candidates() -> list[AdamWConfig]:
    """The configurations worth timing on a new part."""
    blocks = ((512, 4), (1024, 4), (1024, 8), (2048, 8))
    return [AdamWConfig(chunk, *block) for chunk in (2048, 8192, 32768) for block in blocks]


@dataclass(frozen=True)
class Table:
    """What the kernel reads to find its work. It does not keep the tensors alive.

    pointers: int64 [tensors, 5], the addresses of parameter, gradient and both moments, and the number of elements.
    chunk_tensor, chunk_index: int32 [programs], the tensor of each program and the chunk within it.
    aligned: whether all addresses are multiples of 16 bytes.
    """

    pointers: Tensor
    chunk_tensor: Tensor
    chunk_index: Tensor
    aligned: bool
    config: AdamWConfig


@dataclass(frozen=True)
class _Kept:
    """What stays from step to step: `rows` as `Table.pointers`, on the host, of parameters and moments that were looked
    at; gradients lie elsewhere in every step."""

    rows: Tensor
    shapes: list[torch.Size]
    numels: tuple[int, ...]
    aligned: bool

    @classmethod
    def of(cls, params: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]) -> _Kept:
        """Raises ValueError as `make_table`."""
        shapes = [x.shape for x in params]
        for tensors in (params, exp_avgs, exp_avg_sqs):
            _require_whole(tensors, params[0].device, shapes)
        columns = [[x.data_ptr() for x in tensors] for tensors in (params, params, exp_avgs, exp_avg_sqs)]
        numels = tuple(x.numel() for x in params)
        rows = torch.tensor((*columns, numels), dtype=torch.int64).T.contiguous()
        return cls(rows, shapes, numels, all(map(are_aligned, columns)))

    def table(
        self, grads: Sequence[Tensor], addresses: Sequence[int], device: torch.device, config: AdamWConfig
    ) -> Table:
        """The table of these gradients, which lie at `addresses`. Raises ValueError as `make_table`."""
        _require_whole(grads, device, self.shapes)
        rows = self.rows.clone()
        rows[:, 1] = torch.tensor(addresses, dtype=torch.int64)
        chunks = chunks_of(self.numels, config.chunk, device)
        return Table(to_device(rows, device), *chunks, self.aligned and are_aligned(addresses), config)


def _require_whole(tensors: Sequence[Tensor], device: torch.device, shapes: list[torch.Size]) -> None:
    require_whole(tensors, device, "torch.optim.AdamW")
    if [x.shape for x in tensors] == shapes:
        return
    for x, shape in zip(tensors, shapes, strict=True):
        if x.shape != shape:
            raise ValueError(
                f"AdamW takes tensors of their parameter's shape, {tuple(shape)}, got {tuple(x.shape)}: use "
                "torch.optim.AdamW for others"
            )


def make_table(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    config: AdamWConfig = DEFAULT,
) -> Table:  # fmt: skip
    """The table of tensors that stay where they are. Raises ValueError unless all are fp32, contiguous, on one device
    and of their parameter's shape."""
    addresses = [x.data_ptr() for x in grads]
    return _Kept.of(params, exp_avgs, exp_avg_sqs).table(grads, addresses, params[0].device, config)


def scalars(step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> tuple[float, ...]:
    """(1 - lr weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, step size, sqrt of the second bias correction, eps)."""
    return (
        1 - lr * weight_decay, beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1**step), (1 - beta2**step) ** 0.5,
        eps,
    )  # fmt: skip


# The tables made last, by address, and what they share: gradients lie elsewhere in most steps, the rest stays.
_TABLES: dict[tuple[tuple[int, ...], ...], Table] = {}
_KEPT: dict[tuple[int, ...], _Kept] = {}


def _table(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor]
) -> Table:
    stays = (*map(Tensor.data_ptr, (*params, *exp_avgs, *exp_avg_sqs)), *map(Tensor.numel, params))
    addresses = tuple(map(Tensor.data_ptr, grads))

    def make() -> Table:
        base = made_once(_KEPT, stays, lambda: _Kept.of(params, exp_avgs, exp_avg_sqs))
        return base.table(grads, addresses, params[0].device, DEFAULT)

    return made_once(_TABLES, (stays, addresses), make)


def step_triton(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    norm: Tensor | None = None, max_norm: float = 0.0,
) -> None:  # fmt: skip
    """Makes step number `step` (from 1) in place, in one launch. Raises ValueError as `make_table` does, and
    BackendUnavailable where the kernel cannot run. `norm`: of all gradients, which are clipped to `max_norm` by it.

    The scalars come from the host: a CUDA graph that holds this call repeats the step number it was captured with.
    """
    if not params:
        return
    load_triton("adamw", params[0])
    table = _table(params, grads, exp_avgs, exp_avg_sqs)
    if table.chunk_tensor.numel():
        numbers = scalars(step, lr, beta1, beta2, eps, weight_decay)
        tensors = table.pointers, table.chunk_tensor, table.chunk_index
        if norm is None:
            _launch(*tensors, table.aligned, table.config, *numbers)
        else:
            _launch_clipped(*tensors, norm, max_norm, table.aligned, table.config, *numbers)


def call_of(
    params: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
    norm: Tensor | None = None, max_norm: float = 0.0,
) -> Callable[[], Outputs]:  # fmt: skip
    """A call that makes this step again and again by a table of its own, made here, and returns all tensors: it can be
    captured in a CUDA graph and keeps what the graph refers to, whatever other tables are made. Errors as
    `step_triton`."""
    module = load_triton("adamw", params[0])
    table = make_table(params, grads, exp_avgs, exp_avg_sqs)
    numbers = scalars(step, lr, beta1, beta2, eps, weight_decay)
    kept = (*params, *grads, *exp_avgs, *exp_avg_sqs)  # of which the table has addresses alone

    def run() -> Outputs:
        if table.chunk_tensor.numel():
            module.launch(table, numbers, norm, max_norm)
        return kept

    return run


_SCALARS = ("decay", "beta1", "rest1", "beta2", "rest2", "step_size", "root2", "eps")  # as `scalars` gives them


def _launch_by(
    pointers: Tensor, chunk_tensor: Tensor, chunk_index: Tensor, aligned: bool, config: AdamWConfig,
    decay: float, beta1: float, rest1: float, beta2: float, rest2: float, step_size: float, root2: float, eps: float,
) -> None:  # fmt: skip
    numbers = (decay, beta1, rest1, beta2, rest2, step_size, root2, eps)
    load_triton("adamw").launch(Table(pointers, chunk_tensor, chunk_index, aligned, config), numbers)


def _launch_clipped_by(
    pointers: Tensor, chunk_tensor: Tensor, chunk_index: Tensor, norm: Tensor, max_norm: float, aligned: bool,
    config: AdamWConfig, decay: float, beta1: float, rest1: float, beta2: float, rest2: float, step_size: float,
    root2: float, eps: float,
) -> None:  # fmt: skip
    numbers = (decay, beta1, rest1, beta2, rest2, step_size, root2, eps)
    table = Table(pointers, chunk_tensor, chunk_index, aligned, config)
    load_triton("adamw").launch(table, numbers, norm, max_norm)


_launch = Replayed(_launch_by, passed=_SCALARS)
_launch_clipped = Replayed(_launch_clipped_by, passed=_SCALARS)


@torch.library.custom_op("flopcast::adamw_", mutates_args=("params", "exp_avgs", "exp_avg_sqs"))
def adamw_op(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    step_triton(params, grads, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay)


@adamw_op.register_fake
def _(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    return None


@torch.library.custom_op("flopcast::adamw_clipped_", mutates_args=("params", "exp_avgs", "exp_avg_sqs"))
def adamw_clipped_op(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, norm: Tensor, max_norm: float,
) -> None:  # fmt: skip
    step_triton(
        params, grads, exp_avgs, exp_avg_sqs, step, lr, beta1, beta2, eps, weight_decay, norm, max_norm
    )  # fmt: skip


@adamw_clipped_op.register_fake
def _(
    params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    step: int, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, norm: Tensor, max_norm: float,
) -> None:  # fmt: skip
    return None


@dataclass(frozen=True)
class _Counters:
    """How many steps each state of a group has made. together: fp32 [states] on the host; numbers: the same memory as
    numpy's array; places: a view of each, which is the state's own."""

    together: Tensor
    numbers: Any
    places: tuple[Tensor, ...]


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW for contiguous fp32 parameters, by the Triton kernel: one launch per parameter group.

    With `max_norm` above 0 every step clips as `torch.nn.utils.clip_grad_norm_(parameters, max_norm)` before it would:
    the norm of all gradients of all groups is made in one pass (`gradient_norm`; afterwards in `grad_norm`, on the
    device) and its scale applied inside the step, so that the gradients themselves stay as they are.

    Its state dict is that of torch.optim.AdamW (step, exp_avg, exp_avg_sq), and each loads the other's. Raises
    ValueError on hyperparameters out of range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8, weight_decay: float = 1e-2, max_norm: float = 0.0,
    ) -> None:  # fmt: skip
        if not max_norm >= 0:
            raise ValueError(f"max_norm must be above 0, or 0 for no clipping, got {max_norm}")
        if not (lr >= 0 and eps >= 0 and weight_decay >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(
                "lr, eps and weight_decay must be at least 0 and betas in [0, 1), got "
                f"lr {lr}, betas {betas}, eps {eps}, weight_decay {weight_decay}"
            )
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        self._counters: dict[int, _Counters] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"max_norm": self.max_norm, "grad_norm": None, "_counters": {}}

    def _states_of(self, params: Sequence[Tensor]) -> list[dict[str, Any]]:
        states = [self.state[param] for param in params]
        if not all(states):
            for param, state in zip(params, states, strict=True):
                if not state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
                    state["exp_avg"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
                    state["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.contiguous_format)
        return states

    def _norm(self) -> Tensor | None:
        """The norm of all gradients; None where there are none."""
        found = [param.grad.contiguous() for group in self.param_groups for param in group["params"]
                 if param.grad is not None]  # fmt: skip
        return gradient_norm(found) if found else None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes one step of every parameter that has a gradient; returns the closure's value, where there is one.

        Raises NotImplementedError for amsgrad and maximize, ValueError as `make_table` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.max_norm:
            self.grad_norm = self._norm()
        for index, group in enumerate(self.param_groups):
            if group.get("amsgrad") or group.get("maximize"):  # from another optimizer's state dict
                raise NotImplementedError("amsgrad and maximize are not built: use torch.optim.AdamW")
            for count, *lists in self._counted(index, group["params"]):
                params, _, exp_avgs, exp_avg_sqs = lists
                arguments = (*lists, count, float(group["lr"]), *group["betas"], group["eps"], group["weight_decay"])
                clipping = () if self.grad_norm is None else (self.grad_norm, self.max_norm)
                if not is_dynamo_compiling() and unobserved():
                    step_triton(*arguments, *clipping)
                    increment_version([*params, *exp_avgs, *exp_avg_sqs])
                elif clipping:
                    adamw_clipped_op(*arguments, *clipping)
                else:
                    adamw_op(*arguments)
        return loss

    def _counted(self, index: int, params: Sequence[Tensor]) -> Iterator[Any]:
        """(number of the step, parameters, gradients, both moments) of those that have a gradient, by this number."""
        found = [param.grad for param in params]
        grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in found if grad is not None]
        if not grads:
            return
        if len(grads) < len(params):
            params = [param for param, grad in zip(params, found, strict=True) if grad is not None]
        states = self._states_of(params)
        lists = params, grads, [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]
        counts = self._advanced(index, states)
        if len(distinct := set(counts)) == 1:
            yield int(counts[0]), *lists
            return
        for count in sorted(distinct):
            those = [place for place, each in enumerate(counts) if each == count]
            yield int(count), *([values[place] for place in those] for values in lists)

    def _advanced(self, index: int, states: Sequence[dict[str, Any]]) -> list[float]:
        """The counters of a group's states, one step on.

        They lie in one tensor, of which each state has its place: one by one, each would be a call of torch's to
        advance and one to read.
        """
        counters = [state["step"] for state in states]
        kept = self._counters.get(index)
        if kept is None or len(kept.places) != len(counters) or not all(map(is_, kept.places, counters)):
            # torch's fused optimizer, whose state may have been loaded, keeps them on the device
            together = torch.stack([counter.to("cpu", torch.float32) for counter in counters])
            kept = self._counters[index] = _Counters(together, together.numpy(), together.unbind())
            for state, place in zip(states, kept.places, strict=True):
                state["step"] = place
        if is_dynamo_compiling():
            kept.together.add_(1)
        else:
            kept.numbers[...] += 1  # not a call of torch's: a trace would have as many counters as its layers
        counts: list[float] = kept.together.tolist()
        return counts


# --- torch twins and the benchmark interface ---


def _lists(operands: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    count = len(operands) // 4
    params, grads, exp_avgs, exp_avg_sqs = (list(operands[i * count : (i + 1) * count]) for i in range(4))
    return params, grads, exp_avgs, exp_avg_sqs


def _foreach_step(params: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor]) -> None:
    """The step that torch.compile is given: element-wise on every list, in place."""
    decay, beta1, rest1, beta2, rest2, step_size, root2, eps = scalars(STEP, LR, *BETAS, EPS, WEIGHT_DECAY)
    torch._foreach_mul_(params, decay)
    torch._foreach_mul_(exp_avgs, beta1)
    torch._foreach_add_(exp_avgs, grads, alpha=rest1)
    torch._foreach_mul_(exp_avg_sqs, beta2)
    torch._foreach_addcmul_(exp_avg_sqs, grads, grads, rest2)
    denominator = torch._foreach_sqrt(exp_avg_sqs)
    torch._foreach_div_(denominator, root2)
    torch._foreach_add_(denominator, eps)
    torch._foreach_addcdiv_(params, exp_avgs, denominator, -step_size)


def operands(shape: AdamWShape, device: torch.device | str, seed: int = 0) -> tuple[Tensor, ...]:
    """Four lists one after another: standard-normal parameters, gradients and first moments, and squares of such for
    the second moments. The elements are split evenly over the tensors (the first are one longer). Raises ValueError on
    sizes below 1 and dtypes other than fp32."""
    if min(shape.numel, shape.tensors) < 1 or shape.tensors > shape.numel:
        raise ValueError(f"{shape.key}: there must be at least 1 tensor, of at least 1 element")
    if shape.dtype != "fp32":
        raise ValueError(f"{shape.key}: AdamW is for fp32 parameters")
    each, more = divmod(shape.numel, shape.tensors)
    made = standard_normal([(each + (i < more),) for i in range(shape.tensors)] * 4, shape.dtype, device, seed)
    for second in made[3 * shape.tensors :]:
        second.square_()
    return made


def prepare(shape: AdamWShape, backend: str, operands: Sequence[Tensor]) -> Callable[[], Outputs]:
    """A call that makes one step IN PLACE, always step number STEP, and returns parameters, first and second moments.

    Errors as `rmsnorm.prepare`. `reference` and `check` take operands that no call has changed.
    """
    require_known("AdamW backend", backend, BACKENDS)
    if backend == "triton":
        return triton_call(shape, operands, None)
    params, grads, exp_avgs, exp_avg_sqs = _lists(operands)
    results = (*params, *exp_avgs, *exp_avg_sqs)
    if backend == "compile":
        compiled = torch.compile(_foreach_step, dynamic=False)

        def run_compiled() -> Outputs:
            compiled(params, grads, exp_avgs, exp_avg_sqs)
            return results

        return run_compiled
    steps = [torch.full((), float(STEP), device=params[0].device) for _ in params]

    def run_fused() -> Outputs:
        torch._fused_adamw_(
            params, grads, exp_avgs, exp_avg_sqs, [], steps, lr=LR, beta1=BETAS[0], beta2=BETAS[1],
            weight_decay=WEIGHT_DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        return results

    return run_fused


def triton_call(shape: AdamWShape, operands: Sequence[Tensor], config: AdamWConfig | None) -> Callable[[], Outputs]:
    """As `prepare` for backend triton, with the given configuration (None: the default); makes the table once, here."""
    params, grads, exp_avgs, exp_avg_sqs = _lists(operands)
    module = load_triton("adamw", params[0])
    table = make_table(params, grads, exp_avgs, exp_avg_sqs, config or DEFAULT)
    values = scalars(STEP, LR, *BETAS, EPS, WEIGHT_DECAY)

    kept = tuple(operands)  # the table holds addresses alone: gradients too must live as long as the call

    def run() -> Outputs:
        module.launch(table, values)
        count = len(kept) // 4
        return kept[:count] + kept[2 * count :]

    return run


def _by_definition(operands: Sequence[Tensor], dtype: torch.dtype) -> Outputs:
    copies = [x.to(dtype, copy=True) for x in operands]
    params, grads, exp_avgs, exp_avg_sqs = _lists(copies)
    _foreach_step(params, grads, exp_avgs, exp_avg_sqs)
    return (*params, *exp_avgs, *exp_avg_sqs)


def reference(operands: Sequence[Tensor], shape: AdamWShape) -> Outputs:
    """One step in fp64; the operands stay as they are."""
    return _by_definition(operands, torch.float64)


def check(out: Outputs, ref: Outputs, operands: Sequence[Tensor], shape: AdamWShape) -> tuple[float, float]:
    """(relative error, tolerance) of the worst tensor, by `references.worst`; `operands` are those before the step.

    Errors are divided by at least 1, the size of the operands: in a tensor of few elements all may cancel.
    """
    return worst(out, ref, _by_definition(operands, torch.float32), floor=1.0)
