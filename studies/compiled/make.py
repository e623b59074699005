"""Makes the code of the recorded compiled steps on this machine, which needs no GPU.

    python -m studies.compiled.make OUT                  all cases of `studies.compiled.record`, as for an H200
    python -m studies.compiled.make OUT --only mlp       one of them
    python -m studies.compiled.gate reports/nvidia-h200/compiled-steps OUT

OUT gets CASE.code.gz, the text that the last command compares with what an H200 generated, and of a step whose experts
run between its graphs outside/CASE.json.gz, its op stream with the calls of graphs as they are. With the torch of the
records, 2.11, every launch is the same by name; another torch's code is what it generates for the same GPU, and the
comparison says what the version is worth. Prints for each case the graphs, how often a step calls them, and the breaks.
"""

from __future__ import annotations

import gzip
import time
from pathlib import Path

from flopcast.errors import FlopcastError
from flopcast.microbench.recipe.settings import EXPERTS, TORCH_MODES
from flopcast.roofline.stream.model.models import load_config, with_depth
from flopcast.roofline.stream.ops.op_stream import from_json, save
from flopcast.roofline.stream.tracer.compiler.apart import output_code
from flopcast.roofline.stream.tracer.compiler.asked import Asked
from studies.command import parser_of
from studies.compiled.record import CASES, Case
from studies.compiled.recorded import CODE, OUTSIDE, RECORD


def main() -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("out", type=Path, help="folder for the code")
    parser.add_argument("--only", help="the name of one case")
    parser.add_argument("--mode", choices=tuple(TORCH_MODES), default="compile", help="how the model is compiled")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = [case for case in CASES if options.only in (None, case.name)]
    if not wanted:
        parser.error(f"--only {options.only!r}: valid are {', '.join(case.name for case in CASES)}")
    for case in wanted:
        started = time.monotonic()
        try:
            code = output_code(asked(case, options.mode))
        except FlopcastError as error:
            print(f"{case.name}: {error}", flush=True)
            continue
        (options.out / f"{case.name}{CODE}").write_bytes(gzip.compress(code.text.encode(), 9, mtime=0))
        if code.recorded is not None:
            save(from_json(code.recorded, case.name), options.out / OUTSIDE / f"{case.name}{RECORD}")
        print(
            f"{case.name}: {time.monotonic() - started:.0f} s, torch {code.torch}, {len(code.graphs)} graphs called "
            f"{len(code.calls)} times, {len(code.breaks)} breaks, {len(code.waits)} lines wait",
            flush=True,
        )


def asked(case: Case, mode: str = "compile") -> Asked:
    """A recorded case as it is asked for."""
    if not case.config:
        return Asked(module=case.module, sizes={"batch": case.batch}, mode=mode)
    config = load_config(case.config)
    config = config if case.layers is None else with_depth(config, case.layers)
    is_whole = any(config.get(name) for name in EXPERTS)  # their weights are fp32
    return Asked(config=config, batch=case.batch, seq=case.seq, mode=mode, is_whole=is_whole, optimizer=case.optimizer)


if __name__ == "__main__":
    main()
