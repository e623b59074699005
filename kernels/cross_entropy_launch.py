"""Calls of the Triton cross-entropy kernels on plain tensors: checks, output tensors and the choice of the kernel.

`cross_entropy` registers these functions as operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopcast.kernels.cross_entropy_config import WHOLE_ROWS, VocabConfig, config_for
from flopcast.kernels.rowwise import load_triton, multiprocessors

IGNORE_INDEX = -100


def _module(logits: Tensor, target: Tensor) -> Any:
    if logits.dim() != 2 or target.shape != logits.shape[:1] or target.dtype != torch.int64:
        raise ValueError(
            "cross-entropy takes logits [rows, vocab] and int64 targets [rows], got "
            f"{tuple(logits.shape)} and {target.dtype}{tuple(target.shape)}"
        )
    return load_triton("cross_entropy", logits)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _plan(x: Tensor, vocab: int, pairs: bool, config: VocabConfig | None) -> tuple[VocabConfig, int]:
    """(the configuration that makes loss and gradient of logits like x; the int64 words per row that it needs).

    It is `config`, or the default, but `WHOLE_ROWS` where that one shares rows among programs and x's cannot be shared.
    They can be if they are pairs of 16-bit numbers and all programs of a row run at once: one program per
    multiprocessor always does; in Triton's interpreter, where programs run one after another, only one alone.
    """
    config = config or config_for("both")
    if not config.split:
        return config, 0
    shared = load_triton("cross_entropy_split", x)
    if not pairs or shared.parts(vocab, config) > (multiprocessors(x.device) if x.is_cuda else 1):
        return WHOLE_ROWS, 0
    return config, int(shared.slots(vocab, config))


def _in_pairs(logits: Tensor) -> bool:
    """Whether every row can be read as int32, two logits at a time."""
    return logits.element_size() == 2 and not (
        logits.shape[1] % 2 or logits.stride(0) % 2 or logits.storage_offset() % 2
    )


def _is_mean(reduction: str) -> bool:
    if reduction not in ("mean", "sum"):
        raise ValueError(f"unknown reduction {reduction!r}: known are mean, sum")
    return reduction == "mean"


def _launch(
    module: Any, logits: Tensor, target: Tensor, losses: Tensor, count: Tensor, words: Tensor, out: Tensor,
    ignore_index: int, config: VocabConfig,
) -> None:  # fmt: skip
    """Makes loss and gradient with a configuration from `_plan`."""
    if config.split:
        shared = load_triton("cross_entropy_split", logits)
        shared.launch_split(logits, target, losses, count, words, out, ignore_index, config)
    else:
        module.launch_both(logits, target, losses, count, out, ignore_index, multiprocessors(logits.device), config)


def forward(
    logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
    *, config: VocabConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Triton forward: (loss, log-sum-exp [rows], divisor [1]), all fp32. Ignored rows are not read; their lse is 0.

    Raises ValueError on operands that do not fit together, BackendUnavailable where the kernel cannot run,
    NotImplementedError for bf16 in the interpreter.
    """
    module, mean = _module(logits, target), _is_mean(reduction)
    target = target.contiguous()
    losses, lse = (torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device) for _ in range(2))
    if logits.shape[0]:
        module.launch_forward(_rows(logits), target, losses, lse, ignore_index, config or config_for("fwd"))
    loss, count = module.count_and_mean(losses, target, ignore_index, mean)
    return loss, lse, count


def backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, count: Tensor, ignore_index: int = IGNORE_INDEX,
    *, config: VocabConfig | None = None,
) -> Tensor:  # fmt: skip
    """Triton backward: the gradient of the logits, contiguous and in their dtype, from what `forward` returned.
    Errors as there."""
    module = _module(logits, target)
    out = logits.new_empty(logits.shape)
    if logits.numel():
        module.launch_backward(
            dloss.contiguous(), _rows(logits), target.contiguous(), lse, count, out, ignore_index,
            config or config_for("bwd"),
        )  # fmt: skip
    return out


def loss_and_gradient(
    logits: Tensor, target: Tensor, ignore_index: int = IGNORE_INDEX, reduction: str = "mean",
    *, config: VocabConfig | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Triton: (loss in fp32; its gradient, contiguous, in the logits' dtype) from one kernel. Errors as `forward`."""
    module, mean = _module(logits, target), _is_mean(reduction)
    target, rows = target.contiguous(), _rows(logits)
    config, slots = _plan(rows, rows.shape[1], _in_pairs(rows), config)
    count, words = module.count_targets(target, ignore_index, mean, slots)
    losses = torch.empty(logits.shape[:1], dtype=torch.float32, device=logits.device)
    out = logits.new_empty(logits.shape)
    if logits.numel():
        _launch(module, rows, target, losses, count, words, out, ignore_index, config)
    return module.mean(losses, count), out


def linear_loss_and_gradients(
    hidden: Tensor, weight: Tensor, target: Tensor, ignore_index: int, reduction: str, chunk_rows: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(the loss in fp32, dhidden, dweight) of hidden [rows, k] and weight [vocab, k], `chunk_rows` rows at a time.

    Each chunk takes three products by torch (cuBLAS); its gradient is written over its logits. dweight is summed over
    the chunks in fp32.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            "linear cross-entropy takes hidden [rows, k] and weight [vocab, k] of one dtype, got "
            f"{hidden.dtype}{tuple(hidden.shape)} and {weight.dtype}{tuple(weight.shape)}"
        )
    if chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    rows = hidden.shape[0]
    module = load_triton("cross_entropy", hidden, weight)
    if target.shape != (rows,) or target.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{rows}], got {target.dtype}{tuple(target.shape)}")
    target = target.contiguous()
    vocab = weight.shape[0]
    config, slots = _plan(hidden, vocab, hidden.element_size() == 2 and vocab % 2 == 0, None)
    count, words = module.count_targets(target, ignore_index, _is_mean(reduction), slots)
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    dhidden = hidden.new_empty(hidden.shape)
    dweight: Tensor | None = None
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        logits = hidden[chunk] @ weight.T
        _launch(module, logits, target[chunk], losses[chunk], count, words[chunk], logits, ignore_index, config)
        torch.mm(logits, weight, out=dhidden[chunk])
        of_chunk = logits.T @ hidden[chunk]
        if dweight is None:
            dweight = of_chunk if rows <= chunk_rows else of_chunk.float()
        else:
            dweight += of_chunk
    if dweight is None:
        dweight = torch.zeros_like(weight)
    return module.mean(losses, count), dhidden, dweight.to(weight.dtype)
