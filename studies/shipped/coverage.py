"""How much of the device time of Qwen3 steps a profile has measured.

python -m studies.shipped.coverage [GPU]
"""

from __future__ import annotations

from flopcast.roofline.step.coverage import coverage, rows_of
from flopcast.roofline.step.measured_model import MeasuredModel
from flopcast.roofline.stream.library.streams import get_stream
from flopcast.roofline.stream.model.models import LADDER_WIDTHS, depth_for, load_config, make_config, shipped_names
from flopcast.roofline.stream.model.run import Traced
from studies.command import parser_of


def qwen3_models(device_type: str = "cuda") -> list[MeasuredModel]:
    """Steps whose streams ship: the configs at 4 x 256 and 8 x 1024, and every fourth width of the ladder."""
    large = Traced(batch=8, seq=1024, optimizer="adamw-fused", device=device_type)
    small = Traced(device=device_type)
    names = [name for name in shipped_names() if name.startswith("qwen3-") and "moe" not in name]
    models = [(name, load_config(name), traced) for name in names for traced in (small, large)]
    models += [(f"w{w}", make_config(width=w, depth=depth_for(w)), small) for w in LADDER_WIDTHS[::4]]
    return [MeasuredModel(name=name, stream=get_stream(config, traced)) for name, config, traced in models]


def main() -> None:
    """Prints the coverage of Qwen3 steps by a profile."""
    from flopcast.roofline.gpu.library.profiles import find_profile
    from flopcast.roofline.views.terminal.console import console, table

    parser = parser_of(__spec__, __doc__)
    parser.add_argument("gpu", nargs="?", default="nvidia-h200", help="or a profile's file")
    profile = find_profile(parser.parse_args().gpu)
    found = [coverage(profile, model) for model in qwen3_models(profile.device["type"])]
    columns = (
        "step", "device ms", "measured", "interpolated", "extrapolated", "in measured kinds", "fits",
        "extrapolated most",
    )  # fmt: skip
    console().print(table(f"Device time by basis, {profile.gpu}", columns, rows_of(found)))


if __name__ == "__main__":
    main()
