"""Trains a small Qwen3 for 200 steps on all Triton kernels and on torch's, in every mode: do they learn the same?

    python -m studies.kernels.train OUT [--steps 200] [--modes eager compile compile-graphs captured]

Contenders: torch in fp32 throughout, which says what is exact; torch in bf16 autocast, once as it is and three times
with its first weights moved by a millionth, whose distances from it are the noise that bf16 makes; ours in bf16
autocast, eager, under `torch.compile(fullgraph=True)`, with `mode="reduce-overhead"`, and eager inside one
`torch.cuda.graph` of forward, backward and optimizer. All start from the same weights and see the same batches, whose
tokens follow one another by a rule with noise, so that there is something to learn. AdamW, fused, at 5e-4.

Writes OUT/train.csv, a row per contender as it ends, and OUT/losses.csv. A row's `deviation` is the mean distance of
its losses from fp32's, its `gradient_error` the median over the parameters of |g - g32| / |g32| before the first step.
Ours agrees (exit 0) if the gradients' error is at most 1.25 times torch's in bf16, the losses' deviation 1.25 times the
greatest of torch's four (or 0.02% of the loss), and the mean of the last 20 losses within 0.5% of torch's. How far
roundings carry two runs apart depends on the run: at 1e-3, with a plateau of 20 steps at first, losses in the steep
part are 0.03 to 0.09 apart.
"""

from __future__ import annotations

import csv
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from studies.command import parser_of

CONFIG: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True,
}  # fmt: skip
BATCH, SEQ = 4, 512
LAST = 20  # losses that are averaged at the end
MORE = {"deviation": 1.25, "gradient_error": 1.25}  # times torch's in bf16
LEAST = 2e-4  # of the loss: what repeating a run with other roundings moves it by
NUDGED = 3
MODES = ("eager", "compile", "compile-graphs", "captured")


@dataclass(frozen=True)
class Row:
    contender: str
    steps: int
    first_loss: float
    last_loss: float
    deviation: float
    gradient_error: float
    agrees: str


def tokens(step: int, device: str) -> Any:
    """The batch of a step: each token follows from the one before, but for one in ten."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    vocabulary = int(CONFIG["vocab_size"])
    noise = torch.randint(0, vocabulary, (BATCH, SEQ), generator=generator)
    surprising = torch.rand((BATCH, SEQ), generator=generator) < 0.1
    found = noise.clone()
    for position in range(1, SEQ):
        following = (found[:, position - 1] * 5 + 17) % vocabulary
        found[:, position] = torch.where(surprising[:, position], noise[:, position], following)
    return found.to(device)


def model_of(device: str) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3Config(**CONFIG))


def gradients_of(model: Any, call: Callable[..., Any], batch: Any, precision: AbstractContextManager[Any]) -> list[Any]:
    with precision:
        loss = call(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    found = [parameter.grad.float().clone() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def train(contender: str, batches: Sequence[Any], device: str) -> tuple[list[float], list[Any]]:
    """(the losses, the gradients before the first step) of "torch fp32", "torch bf16", "torch bf16, nudged N" or "ours,
    MODE"."""
    import torch

    from flopcast.kernels.patch import patch

    who, _, mode = contender.partition(", ")
    model = model_of(device)
    if mode.startswith("nudged"):
        torch.manual_seed(int(mode.split()[1]))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + 1e-6 * torch.randn_like(parameter))
    call: Callable[..., Any] = model
    if who == "ours":
        patch(model)
    if mode in ("compile", "compile-graphs"):
        torch._dynamo.reset()
        call = torch.compile(model, fullgraph=True, mode="reduce-overhead" if mode == "compile-graphs" else "default")

    def precision() -> AbstractContextManager[Any]:
        return nullcontext() if who == "torch fp32" else torch.autocast(device, torch.bfloat16)

    gradients = gradients_of(model, call, batches[0], precision())
    captured = mode == "captured"
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=device == "cuda", capturable=captured)
    static = batches[0].clone()

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with precision():
            loss = call(input_ids=static, labels=static, use_cache=False).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    replay: Callable[[], Any] = step
    side = torch.cuda.Stream() if captured else None
    for index, batch in enumerate(batches):
        static.copy_(batch)
        if side is not None and index < 3:  # the first steps warm up, as torch's notes on whole-network capture do
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                losses.append(float(step()))
            torch.cuda.current_stream().wait_stream(side)
            continue
        if captured and index == 3:
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                result = step()
            replay = partial(_again, graph, result)
        losses.append(float(replay()))
    return losses, gradients


def _again(graph: Any, result: Any) -> Any:
    graph.replay()
    return result


def _error(found: Sequence[Any], exact: Sequence[Any]) -> float:
    return statistics.median(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


def agrees(row: Row, torchs: Row) -> str:
    """An empty string, or in what a row of ours differs from torch's in bf16."""
    wrong = []
    if row.deviation > max(MORE["deviation"] * torchs.deviation, LEAST * torchs.last_loss):
        wrong.append(f"losses deviate by {row.deviation:.2e}, torch's by {torchs.deviation:.2e}")
    if not row.gradient_error <= MORE["gradient_error"] * torchs.gradient_error:
        wrong.append(f"gradients are {row.gradient_error:.2e} off, torch's {torchs.gradient_error:.2e}")
    if not abs(row.last_loss - torchs.last_loss) <= 0.005 * torchs.last_loss:
        wrong.append(f"it ends at {row.last_loss:.4f}, torch's at {torchs.last_loss:.4f}")
    return "; ".join(wrong)


def run(steps: int, modes: Sequence[str], device: str) -> Iterator[tuple[Row, list[float]]]:
    batches = [tokens(step, device) for step in range(steps)]
    exact, exact_gradients = train("torch fp32", batches, device)
    torchs: Row | None = None
    nudged = [f"torch bf16, nudged {number + 1}" for number in range(NUDGED)]
    for contender in ("torch bf16", *nudged, *(f"ours, {mode}" for mode in modes)):
        try:
            losses, gradients = train(contender, batches, device)
        except Exception as error:  # a contender that fails is a row with a reason
            yield Row(contender, 0, 0.0, 0.0, 0.0, 0.0, f"no: {type(error).__name__}: {str(error)[:600]}"), []
            continue
        deviation = statistics.mean(abs(one - other) for one, other in zip(losses, exact, strict=True))
        last = statistics.mean(losses[-LAST:])
        row = Row(contender, steps, losses[0], last, deviation, _error(gradients, exact_gradients), "")
        torchs = torchs or row
        if not contender.startswith("ours"):
            torchs = replace(torchs, deviation=max(torchs.deviation, deviation))
        why = agrees(row, torchs)
        yield Row(**{**asdict(row), "agrees": f"no: {why}" if why else "yes"}), losses
        del gradients
    yield Row("torch fp32", steps, exact[0], statistics.mean(exact[-LAST:]), 0.0, 0.0, "yes"), exact


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    options = parser.parse_args(arguments)
    import torch

    if not torch.cuda.is_available():
        print("train runs Triton kernels on a GPU: none is here", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    options.out.mkdir(parents=True, exist_ok=True)
    good = True
    with (options.out / "train.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)])
        writer.writeheader()
        for row, losses in run(options.steps, options.modes, "cuda"):
            good &= row.agrees == "yes"
            writer.writerow(asdict(row))
            file.flush()
            with (options.out / "losses.csv").open("a", newline="", encoding="utf-8") as all_losses:
                csv.writer(all_losses).writerow([row.contender, *losses])
            print(
                f"{row.contender:22} {row.first_loss:8.4f} -> {row.last_loss:8.4f}  deviation {row.deviation:.2e}  "
                f"gradients {row.gradient_error:.2e}  {row.agrees}",
                flush=True,
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
