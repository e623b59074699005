"""Builds steps on fake CUDA tensors, compiles and runs each once, and keeps what inductor generates.

For a process of its own (`apart`, `side_by_side`), since it changes torch for good.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch._guards import CompileContext, TracingContext

from flopcast.errors import UsageError
from flopcast.microbench.recipe.finetune import fine_tuned
from flopcast.microbench.recipe.inference import InferenceStep, build_for_inference
from flopcast.microbench.recipe.settings import TORCH_MODES, Recipe
from flopcast.microbench.recipe.training_step import TrainingStep, build_model, build_module, causal_lm_batch
from flopcast.roofline.stream.ops import op_stream
from flopcast.roofline.stream.tracer.compiler.asked import Asked, Break, OutputCode
from flopcast.roofline.stream.tracer.compiler.attention import rule_for
from flopcast.roofline.stream.tracer.compiler.fake_cuda import be_cuda, read_ones
from flopcast.roofline.stream.tracer.compiler.fake_gpu import Card, tell_of

if TYPE_CHECKING:
    from flopcast.roofline.stream.tracer.compiler.inductor import Kept

_FIRST_LINE = 300  # characters of an error that are told


class Compiler:
    """torch's compiler, made to generate for a GPU that need not be there: steps one after the other, all for that GPU.

    Raises UsageError where Triton is missing."""

    def __init__(self, gpu: Mapping[str, Any], cudnn: int) -> None:
        try:
            import triton
        except ImportError as fault:
            raise UsageError("compiled steps need Triton, which generates their kernels: pip install triton") from fault
        card = Card.of(gpu)
        tell_of(card)
        be_cuda(rule_for(card.gpu.capability, cudnn))
        warnings.filterwarnings("ignore")  # torch's about its own code and about hardware that is not there
        logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # an L4's "Not enough SMs", once per graph
        # this imports inductor, which has to find the GPU
        from flopcast.roofline.stream.tracer.compiler.inductor import keep_code

        self.kept, self.watched, self.triton = keep_code(card), read_ones(), str(triton.__version__)
        self.gpu = card.gpu

    def code(self, asked: Asked) -> OutputCode:
        """Returns what inductor generates for a step. Raises UsageError for one that torch cannot build or compile."""
        # these import dynamo, as above
        from torch._dynamo import utils as dynamo
        from torch._functorch import aot_autograd
        from torch._subclasses.fake_tensor import FakeTensorMode

        kept, watched = self.kept, self.watched
        waits, outside = list[tuple[str, int]](), Counter[str]()
        kept.forget()
        torch._dynamo.reset()
        dynamo.counters.clear()
        dynamo.graph_break_reasons.clear()
        aot_autograd.AOT_COUNTER = count()  # numbers the graphs

        def ran(func: Any, given: Any) -> None:
            if is_built and not kept.is_running and _runs_on_gpu(func, given):
                outside[func.name().split(".")[0].replace("::", ".")] += 1

        is_built = False
        # autograd's engine runs in this thread, where fake tensors have their mode
        recorded: Any = None
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.autograd.set_multithreading_enabled(False):
            watched.mode, watched.ran = mode, ran
            watched.waited = lambda line: waits.append((line, len(kept.calls)))
            try:
                torch.backends.cuda.matmul.allow_tf32 = asked.precision == "tf32"
                if asked.is_parallel:
                    recorded = _of_rank(asked, kept)
                elif asked.is_recorded:
                    from flopcast.roofline.stream.tracer.compiler.own import record_own

                    recorded = op_stream.to_json(record_own(asked, self.gpu, kept))
                else:
                    step = _built(asked)
                    step.model = torch.compile(step.model, mode=TORCH_MODES[asked.mode])  # type: ignore[assignment]
                    is_built = True
                    if isinstance(step, InferenceStep):
                        step.run()
                    else:
                        step.backward(step.forward())
            except Exception as fault:
                if (refusal := _refusal_in(fault)) is not None:
                    raise refusal from fault
                raise UsageError(f"torch cannot compile the step: {_told(fault)}; {_ADVICE}") from fault
        if not kept.graphs:
            raise UsageError(f"torch compiles nothing of the step; {_ADVICE}")
        return OutputCode(
            graphs=tuple(kept.graphs), calls=tuple(kept.calls), captured=int(dynamo.counters["stats"]["unique_graphs"]),
            breaks=tuple(one for one in _breaks(dynamo.graph_break_reasons) if recorded is None or not _is_of_ddp(one)),
            waits=tuple(dict.fromkeys(_short(line) for line, _ in waits if line)),
            waited_after=tuple(calls for _, calls in waits) if recorded is None else (), outside=dict(outside),
            torch=torch.__version__, triton=self.triton, recorded=recorded,
            unsure_pads=tuple(dict.fromkeys(kept.unsure)),
        )  # fmt: skip


def compiled(asked: Asked) -> OutputCode:
    """As `Compiler.code`, of one step."""
    return Compiler(asked.gpu, asked.cudnn).code(asked)


# Operators that run no kernel, besides views.
_NOTHING = ("empty", "new_empty", "detach", "lift_fresh", "device", "_unsafe_view", "_reshape_alias", "resize_")


def _runs_on_gpu(func: Any, given: Any) -> bool:
    """Whether an operator runs a kernel on the GPU, and not for a compiler at work."""
    if CompileContext.try_get() is not None or TracingContext.try_get() is not None:
        return False
    arguments = func._schema.arguments
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in arguments)
    if is_view or func._schema.name.split("::")[1].startswith(_NOTHING):
        return False
    args, kwargs = given
    values = pytree.tree_leaves((args, kwargs or {}))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return any(tensor.is_cuda for tensor in tensors) or any(
        isinstance(value, torch.device) and value.type == "cuda" for value in values if not tensors
    )


# Where graphs end in a step of DistributedDataParallel: in its own code, in the contexts that it enters, and, cut by
# torch, where a bucket ends.
_DDP = ("torch/nn/parallel/distributed.py", "torch/_dynamo/backends/distributed.py", contextlib.__file__)
_ADVICE = "make sure that torch.compile(model) runs where there is a GPU"


def _built(asked: Asked) -> TrainingStep | InferenceStep:
    """Builds the step that is asked for, its tensors on the GPU; its optimizer, which is not compiled, is any."""
    from flopcast.roofline.stream.tracer.cuda_semantics import untraced

    with untraced(), torch.device("cuda", 0):
        if asked.config is not None:
            ids = torch.zeros((asked.batch, asked.seq), dtype=torch.int64)
            if asked.phase != "train":
                call = InferenceStep(
                    build_for_inference(asked.config, "sdpa", asked.precision, asked.base_dtype),
                    ids,
                    asked.precision,
                    "cuda",
                    asked.phase,
                    asked.context,
                    cache_kind="static",
                )
                call.refill()  # the cache is there before the model is compiled
                return call
            model = build_model(asked.config, "sdpa", asked.precision, asked.checkpoint, asked.base_dtype)
            model = fine_tuned(model, asked)
            batch: Any = causal_lm_batch(ids)
            return TrainingStep(model, (), batch, asked.precision, "cuda")
        model, batch, loss_fn = _made(asked)
        return build_module(
            model, batch, "cuda", Recipe(precision=asked.precision, checkpoint=asked.checkpoint), loss_fn=loss_fn
        )


def _made(asked: Asked) -> tuple[torch.nn.Module, Any, Any]:
    """The module, the batch and the loss function that a factory makes."""
    from flopcast.roofline.stream.tracer.trace import load_factory

    factory = load_factory(asked.module)
    parameters = inspect.signature(factory).parameters
    made = factory(**{name: size for name, size in asked.sizes.items() if name in parameters})
    if not isinstance(made, (tuple, list)) or not made or not isinstance(made[0], torch.nn.Module):
        raise UsageError(
            f"mode {asked.mode} of {asked.module}: valid is a factory that returns (module, batch[, loss_fn]); a step "
            "function compiles by itself what it is to compile, and is forecast so: leave mode out"
        )
    model, batch, *loss_fn = made
    return model, batch, loss_fn[0] if loss_fn else None


def _of_rank(asked: Asked, kept: Kept) -> dict[str, Any]:
    """Compiles and records one rank's step, as JSON of its stream."""
    from flopcast.microbench.recipe.parallel_step import build_parallel, build_parallel_module
    from flopcast.roofline.stream.tracer.compiler.rank import as_rank, record_rank
    from flopcast.roofline.stream.tracer.cuda_semantics import untraced
    from flopcast.roofline.stream.tracer.trace import meta_of, sizes_of

    layout = asked.layout
    meta = {**meta_of(asked, "cuda"), "parallel": {"layout": asked.parallel, "rank": asked.rank}}
    with untraced(), as_rank(layout, asked.rank) as (mesh, lanes):
        step: Any
        if asked.config is not None:
            step = build_parallel(asked.config, layout, mesh, "cuda", asked, foreach=True)
            meta["config"] = dict(asked.config)
        else:
            with torch.device("cuda", 0):
                model, batch, loss_fn = _made(asked)
            step = build_parallel_module(model, batch, layout, mesh, "cuda", asked, loss_fn=loss_fn, foreach=True)
            samples, tokens = sizes_of(step.batch)
            meta |= {"module": asked.module, "batch": samples, "seq": tokens}
            meta["unit"] = "tokens" if tokens > 1 else "samples"
        return op_stream.to_json(record_rank(step, lanes, kept, meta))


def _breaks(found: Iterable[Any]) -> Iterable[Break]:
    """Lists graph breaks once each, with the innermost line of the compiled code."""
    known: dict[Break, None] = {}
    for one in found:
        place = one.user_stack[-1] if one.user_stack else None
        where = _short(f"{place.filename}:{place.lineno}, in {place.name}: {place.line}") if place else ""
        known[Break(reason=one.reason.strip().split("\n")[0], where=where)] = None
    return known


def _short(line: str) -> str:
    """A line without the folder that packages are installed in."""
    return line.rpartition("site-packages/")[2]


def _is_of_ddp(found: Break) -> bool:
    return found.where.startswith(_DDP)


def _refusal_in(fault: BaseException | None) -> UsageError | None:
    """What was refused while dynamo compiled, which raises it as an error of its own, or adds where it was."""
    while fault is not None and not isinstance(fault, UsageError):
        fault = fault.__cause__ or fault.__context__
    return None if fault is None else UsageError(str(fault).partition("\n")[0])


def _told(fault: BaseException) -> str:
    """An error and what caused it, in a line."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    cause = next((line for line in lines if "Error" in line.partition(":")[0]), lines[0] if lines else "")
    return f"{type(fault).__name__}: {cause}"[:_FIRST_LINE]
