"""What it is worth that another torch compiled a step than the profile's kernels were measured with."""

from __future__ import annotations

from flopcast.roofline.stream.ops.op_stream import Stream

# (the torch that compiled, the recorded steps' torch): launches and bytes, at the median and at most, of 12 recorded
# steps (reports/nvidia-h200/compiled-steps/without-a-gpu.md).
_WORTH = {("2.13", "2.11"): "launches by 1.5% at the median and 3.0% at most, bytes by 0.8 and 3.6%"}


def version_note(stream: Stream, measured_with: str) -> str | None:
    """Says, of a compiled step, by how much its code may differ from that of the profile's torch; None where both are
    one release, or the step is eager."""
    made, measured = (
        ".".join(version.split(".")[:2]) for version in (str(stream.meta.get("torch", "")), measured_with)
    )
    if stream.meta.get("mode", "eager") == "eager" or not measured or made == measured:
        return None
    worth = _WORTH.get((made, measured))
    said = f"; of recorded steps the two differ in {worth}" if worth else ", whose code was not compared with it"
    return f"compiled by torch {made}, the profile's kernels are of torch {measured}{said}"
