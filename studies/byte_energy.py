"""What a moved byte takes of energy, by the power that real eager steps drew: `gpu/catalogue/power.py`, BYTE_JOULES_OF.

    python -m studies.byte_energy nvidia-h100-sxm reports/nvidia-h100-sxm/steps

Prints each step's joules per byte and their median. Of a step that runs at the full clock, its power times its seconds
is the static energy, that of its products, as the part's sustained rate gives it, and that of its bytes. Left out are
steps that say too little: those of less than LEAST_SECONDS, in which the power that is read lags behind; those that
keep the device waiting or whose clock the limit lowers; and those with convolutions or grouped products, whose FLOPs
draw an energy that is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from flopcast.microbench.records.rows import StepRow, select
from flopcast.roofline.gpu.library.profiles import find_profile
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.step.device_work import TimedOp
from flopcast.roofline.step.power_limit import byte_joules, draw_of
from flopcast.roofline.validation.compare_steps import plan_of, read_steps, step_folders
from studies.command import parser_of
from studies.links.fed_table import priced

LEAST_SECONDS = 0.03
FULL_CLOCK_MHZ = 1950  # of 1980: the limit lowers none of these by more
BUSY = 0.9  # share of a step in which its kernels run, by their forecast


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpu")
    parser.add_argument("folder", type=Path, help="of steps that `flopcast validate` ran on it")
    options = parser.parse_args(arguments)
    found = dict(joules_of(options.folder, find_profile(options.gpu)))
    for name, joules in found.items():
        print(f"{name:100} {joules * 1e10:.2f}e-10")
    print(f"{len(found)} steps, {median(found.values()) * 1e10:.2f}e-10 J at the median")


def joules_of(folder: Path, profile: Profile) -> Iterator[tuple[str, float]]:
    """Of each step, its key and the joules per byte that its power leaves to its bytes."""
    for run in step_folders(folder):
        for row in select(read_steps(run), StepRow):
            watts, seconds, clock = row["power_w"], row["seconds"], row["clock_mhz"]
            plan = plan_of(row)
            if row["status"] != "ok" or plan.mode != "eager" or not (watts and seconds and clock):
                continue
            if seconds < LEAST_SECONDS or clock < FULL_CLOCK_MHZ:
                continue
            step = priced(plan, profile)
            if sum(op.seconds for op in step.ops) < BUSY * seconds or any(map(_draws_uncounted, step.ops)):
                continue
            draw = draw_of(step.ops, profile)
            spent = (watts - draw.static_watts) * seconds - draw.matrix_joules
            yield f"{run.name}/{row['key']}", spent / (draw.byte_joules / byte_joules(profile))


def _draws_uncounted(op: TimedOp) -> bool:
    return op.work is not None and (op.work.op_class == "conv" or "grouped" in str(op.work.variant))


if __name__ == "__main__":
    main()
