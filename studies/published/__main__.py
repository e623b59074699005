"""Judges forecasts of steps on several GPUs by those that others published: torchtitan's, MPT's and Megatron's.

    python -m studies.published DATA [--most 12] [--out reports/parallel/published.md]

DATA holds training_tables_a100.csv and training_steps_a100_single_node.csv, which are not ours to ship: the page has
errors alone. Nothing is fitted to any of these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from studies.command import parser_of
from studies.imports import ROOT
from studies.markdown import table
from studies.published import megatron, mpt, torchtitan
from studies.published.judged import Judged, summary

OUT = ROOT / "reports" / "parallel" / "published.md"

_WORDS = """`python -m studies.published DATA`. Error: forecast over measured less 1, of the step's time. Nothing was
fitted to these steps; forecasts are by projected profiles and links and the shipped host. What others ran differs in
parts from what is forecast, as the docstrings of `studies/published` say.

- **FSDP2**: torchtitan's Llamas. Its H100 is a part of 96 GB, 2.4 TB/s and 500 W, projected from one of 80 GB that was
  measured. Its source says that its peak lies between those of the SXM part, by whose clocks it is forecast first, and
  the NVL part. Compiled, its rotary embeddings of complex numbers are no generated code, as those forecast are.
- **FSDP**: MPT models by llm-foundry, on torch 1.13. The worst, of 760 M parameters, stands apart in their table too.
- **Attention** ran by kernels that were slower than those that torch picks now: flash's second version on H100s, its
  first one in Triton on MPT's A100s. The first error has its time as they ran it (`flopcast predict --attention
  sdpa-flash`; 1.8 times as long, `studies.projection.steps`), "as forecast" the one that torch picks now.
- **Tensor parallel**: Megatron-LM's 22B model on a DGX of A100s, as an own step function in plain torch
  (`studies/published/megatron_step.py`, `--parallel own=1x8`).
- **Sums**: vTrain's table of Megatron's steps. Its {sums} rows of tensor parallel alone depart from a straight line
  over micro-batches and over layers by {bend:.0e} ms at most, as no steps do that ran: they are sums of what a layer
  took under a profiler, with its host's gaps. They are shown, and judge nothing."""


def page(found: Sequence[Judged], sums: Sequence[megatron.Sum]) -> str:
    told = [one for one in found if one.is_told]
    columns = ["step", "error", "as forecast", "inside 90%", "bound by", "memory reserved"]
    rows = [
        [
            one.name, f"{one.error:+.1%}", f"{one.error_as_forecast:+.1%}", "yes" if one.is_within else "no",
            one.forecast.bound, "" if one.memory_error is None else f"{one.memory_error:+.1%}",
        ]
        for one in told
    ]  # fmt: skip
    return "\n\n".join([
        "# Published steps on several GPUs beside their forecasts",
        _WORDS.format(sums=len(sums), bend=megatron.departure(sums)), summary(found),
        "Row by row, of those whose source anybody can read:", table(columns, rows),
    ]) + "\n"  # fmt: skip


def _all(data: Path, most: int) -> Iterator[Judged]:
    return chain(torchtitan.judged(), megatron.judged(), mpt.judged(data, most), megatron.judged_rows(data, most))


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found = []
    for one in _all(options.data, options.most):
        print(one, flush=True)
        found.append(one)
    text = page(found, megatron.all_sums(options.data))
    options.out.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
