"""Megatron-LM's training step of a GPT, divided among the GPUs of a host by tensor parallel, as a step function in
plain torch: `--module studies/published/megatron_step.py:make_step --parallel own=1x2`, for `tp` GPUs own=1x`tp`.

What it launches is what Megatron-LM launches: half-precision weights and activations, sequence first; linear layers
divided by columns and by rows, with their all-reduces; attention by two batched products with a softmax between them;
embedding, logits and loss divided by vocabulary; an optimizer of fp32 copies of the weights, scaled, clipped. Where
Megatron runs kernels of its own, as of scale, mask and softmax, a call of torch's stands for each that is one kernel
too and reads and writes as many bytes, though it computes something else: this step is to be forecast, not to train.
Left out are the sums of norms' gradients over the ranks under sequence parallel, megabytes of a step, and what the host
reads of the gradients' norm at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, layer_norm
from torch.utils.checkpoint import checkpoint

HALF, DROPOUT, CLIP = torch.float16, 0.1, 1.0
VOCABULARY, PADDED_TO = 50257, 128
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Sizes:
    """`recompute`: nothing, attention between its linear layers, or every layer. `sequence_parallel`: what is not
    divided otherwise, norms and residuals, is divided along the sequence. `overlapped`: the collective of an input's
    gradient runs beside the product of the weight's."""

    hidden: int
    layers: int
    heads: int
    tp: int
    micro_batch: int
    global_batch: int
    seq: int
    vocabulary: int = VOCABULARY
    recompute: Recompute = "full"
    sequence_parallel: bool = False
    overlapped: bool = True

    @property
    def padded_vocabulary(self) -> int:
        part = PADDED_TO * self.tp
        return -(-self.vocabulary // part) * part


class Column(torch.autograd.Function):
    """The product of an input and a weight divided by columns, whose input's gradient is summed over the ranks; under
    sequence parallel the input is gathered, once more in the backward, and the sum is scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sizes: Sizes) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sizes = sizes
        whole = _gathered(x, sizes)[0] if sizes.sequence_parallel else x
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (x, weight), sizes = gradients, ctx.saved_tensors, ctx.sizes
        whole, work = _gathered(x, sizes, True) if sizes.sequence_parallel else (x, None)
        of_input = gradient @ weight
        if work is not None:
            work.wait()
        if sizes.sequence_parallel:
            summed = torch.empty_like(x)
            work = dist.reduce_scatter_tensor(summed, of_input, async_op=sizes.overlapped)
        else:
            summed = of_input
            work = dist.all_reduce(summed, async_op=sizes.overlapped)
        of_weight = gradient.flatten(0, 1).t() @ whole.flatten(0, 1)
        if work is not None:
            work.wait()
        return summed, of_weight, None


class Row(torch.autograd.Function):
    """The sum over the ranks of what each has computed of its rows of a weight; under sequence parallel each rank gets
    the sum of its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sizes) -> Tensor:
        ctx.sizes = sizes
        if not sizes.sequence_parallel:
            ctx.mark_dirty(x)
            dist.all_reduce(x)
            return x
        summed = x.new_empty(x.shape[0] // sizes.tp, *x.shape[1:])
        dist.reduce_scatter_tensor(summed, x)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return (_gathered(gradient.contiguous(), ctx.sizes)[0] if ctx.sizes.sequence_parallel else gradient), None


class BiasGelu(torch.autograd.Function):
    """One kernel each way, as Megatron's; torch's gelu stands for it, which reads no bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, bias)
        return torch.nn.functional.gelu(x, approximate="tanh")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, bias) = gradients, ctx.saved_tensors
        of_input = torch.ops.aten.gelu_backward(gradient, x, approximate="tanh")
        return of_input, of_input.flatten(0, 1).sum(0).view_as(bias)


class BiasDropoutAdd(torch.autograd.Function):
    """A bias, dropout and a residual in one kernel each way; a choice by a mask stands for it, which reads the mask
    where Megatron's kernel writes it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)
        ctx.save_for_backward(mask, bias)
        return torch.where(mask, x, residual)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (gradient,), (mask, bias) = gradients, ctx.saved_tensors
        of_input = torch.ops.aten.native_dropout_backward(gradient, mask, 1 / (1 - DROPOUT))
        return of_input, of_input.flatten(0, 1).sum(0).view_as(bias), gradient


class VocabularyLoss(torch.autograd.Function):
    """The cross entropy of logits of which this rank has a part of the vocabulary: the largest, the target's and the
    sum of their exponentials are reduced over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest.unsqueeze(-1)
        elsewhere, place = _own(target, logits.shape[-1])
        rows, place = torch.arange(place.numel(), device=place.device), place.flatten()
        predicted = logits.flatten(0, 1)[rows, place].view_as(target).masked_fill_(elsewhere, 0.0)
        dist.all_reduce(predicted)
        exponentials = logits.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), elsewhere, rows, place)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), (probabilities, elsewhere, rows, place) = gradients, ctx.saved_tensors
        probabilities.flatten(0, 1)[rows, place] -= 1.0 - elsewhere.flatten().float()
        return probabilities.mul_(gradient.unsqueeze(-1)), None


def _gathered(x: Tensor, sizes: Sizes, is_async: bool = False) -> tuple[Tensor, Any]:
    whole = x.new_empty(x.shape[0] * sizes.tp, *x.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, x, async_op=is_async)


def _own(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Which ids are of other ranks' parts of the vocabulary, and the place of each in this rank's."""
    first = dist.get_rank() * size
    elsewhere = (ids < first) | (ids >= first + size)
    return elsewhere, (ids.clone() - first).masked_fill_(elsewhere, 0)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = _parameter(width), _parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight.shape, self.weight, self.bias)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, inner = sizes.hidden, 4 * sizes.hidden
        self.sizes = sizes
        self.input_norm, self.inner_norm = Norm(width), Norm(width)
        self.query_key_value, self.query_key_value_bias = (
            _parameter(3 * width // sizes.tp, width),
            _parameter(3 * width // sizes.tp),
        )
        self.dense, self.dense_bias = _parameter(width, width // sizes.tp), _parameter(width)
        self.up, self.up_bias = _parameter(inner // sizes.tp, width), _parameter(inner // sizes.tp)
        self.down, self.down_bias = _parameter(width, inner // sizes.tp), _parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        """`x`: sequence, batch, width."""
        sizes = self.sizes
        mixed = _of(Column, self.input_norm(x), self.query_key_value, sizes) + self.query_key_value_bias
        if sizes.recompute == "selective":
            attended = checkpoint(self.attention, mixed, use_reentrant=True, preserve_rng_state=False)
        else:
            attended = self.attention(mixed)
        x = _of(BiasDropoutAdd, _of(Row, attended @ self.dense.t(), sizes), self.dense_bias, x)
        inner = _of(BiasGelu, _of(Column, self.inner_norm(x), self.up, sizes), self.up_bias)
        return _of(BiasDropoutAdd, _of(Row, inner @ self.down.t(), sizes), self.down_bias, x)

    def attention(self, mixed: Tensor) -> Tensor:
        """Of all pairs of tokens; the softmax stands for that of what is scaled and masked."""
        seq, batch = mixed.shape[:2]
        heads, size = self.sizes.heads // self.sizes.tp, self.sizes.hidden // self.sizes.heads
        parts = mixed.view(seq, batch, heads, 3 * size).chunk(3, dim=-1)
        query, key, value = (part.view(seq, batch * heads, size).transpose(0, 1) for part in parts)
        scores = mixed.new_empty(batch * heads, seq, seq)
        scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0, alpha=size**-0.5)
        weights = dropout(torch.softmax(scores, -1), DROPOUT)
        attended = torch.bmm(weights, value).view(batch, heads, seq, size)
        return attended.permute(2, 0, 1, 3).contiguous().view(seq, batch, heads * size)


class Stack(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.again = sizes.recompute == "full"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True, preserve_rng_state=False) if self.again else layer(x)
        return x


class Gpt(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.words = _parameter(sizes.padded_vocabulary // sizes.tp, sizes.hidden)
        self.positions = _parameter(sizes.seq, sizes.hidden)
        self.transformer = Stack(sizes)
        self.norm = Norm(sizes.hidden)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        """`ids`, `target`: batch, sequence. The logits' weights are the embedding's."""
        x = self.transformer(dropout(self.embedded(ids), DROPOUT))
        logits = _of(Column, self.norm(x), self.words, self.sizes)
        return _of(VocabularyLoss, logits.float(), target.t().contiguous()).mean()

    def embedded(self, ids: Tensor) -> Tensor:
        elsewhere, place = _own(ids, len(self.words))
        found = embedding(place, self.words).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        places = torch.arange(self.sizes.seq, device=ids.device).expand_as(ids)
        if self.sizes.sequence_parallel:
            summed = _of(Row, found.transpose(0, 1).contiguous(), self.sizes)
            return summed + self.positions.unsqueeze(1)[: len(summed)]
        return (_of(Row, found, self.sizes) + embedding(places, self.positions)).transpose(0, 1).contiguous()


def _of(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=HALF))


class Optimizer:
    """Adam on fp32 copies of half-precision parameters: their gradients are widened, unscaled and clipped."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.parameters: list[Tensor] = [*parameters]
        self.copies = [parameter.detach().clone().float() for parameter in self.parameters]
        self.adam = torch.optim.AdamW(self.copies, fused=True)
        device = self.copies[0].device
        self.inverse_scale, self.found_inf = torch.ones(1, device=device), torch.zeros(1, device=device)

    @torch.no_grad()
    def step(self) -> None:
        found: list[Any] = [parameter.grad for parameter in self.parameters]
        gradients = [gradient.float() for gradient in found]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found_inf, self.inverse_scale)
        dist.all_reduce(self.found_inf, op=dist.ReduceOp.MAX)
        norm = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(norm)
        torch._foreach_mul_(gradients, (CLIP / (norm.sqrt() + 1e-6)).clamp(max=1.0))
        for copy, gradient in zip(self.copies, gradients, strict=True):
            copy.grad = gradient
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        torch._foreach_copy_(self.parameters, self.copies)


def make_step(
    hidden: int = 1024, layers: int = 12, heads: int = 16, tp: int = 2, micro_batch: int = 1, global_batch: int = 2,
    seq: int = 1024, vocabulary: int = VOCABULARY, recompute: Recompute = "full", sequence_parallel: bool = False,
    overlapped: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """A step of `global_batch` sequences of `seq` tokens, `micro_batch` at a time, on the `tp` ranks of the process
    group; see `Sizes`."""
    dist.init_process_group("nccl")
    sizes = Sizes(
        hidden, layers, heads, tp, micro_batch, global_batch, seq, vocabulary, recompute, sequence_parallel, overlapped
    )
    device = torch.device("cuda")
    model = Gpt(sizes).to(device)
    optimizer = Optimizer(model.parameters())
    ids, target = (torch.zeros(micro_batch, seq, dtype=torch.long, device=device) for _ in range(2))
    loss_scale = torch.ones((), device=device)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        for _ in range(global_batch // micro_batch):
            (model(ids, target) * loss_scale).backward()
        optimizer.step()

    return step


def make_layers(
    hidden: int = 1024, layers: int = 12, heads: int = 16, tp: int = 2, micro_batch: int = 1, seq: int = 1024,
    recompute: Recompute = "full", sequence_parallel: bool = False, overlapped: bool = True,
) -> Callable[[], None]:  # fmt: skip
    """The forward and backward of the layers alone, of one micro-batch."""
    dist.init_process_group("nccl")
    sizes = Sizes(
        hidden, layers, heads, tp, micro_batch, micro_batch, seq, VOCABULARY, recompute, sequence_parallel, overlapped
    )
    device = torch.device("cuda")
    stack = Stack(sizes).to(device)
    tokens = seq // tp if sequence_parallel else seq
    x = torch.zeros(tokens, micro_batch, hidden, dtype=HALF, device=device, requires_grad=True)
    gradient = torch.zeros_like(x)

    def step() -> None:
        stack.zero_grad(set_to_none=True)
        stack(x).backward(gradient)

    return step
