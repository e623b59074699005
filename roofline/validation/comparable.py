"""Checks that steps may be compared with a forecast: that both were made on the same device with matching versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flopcast.errors import UsageError
from flopcast.microbench.records.machine import Device
from flopcast.roofline.gpu.catalogue.device import gpu_name
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.stream.ops.op_stream import Stream

# Pairs (torch of the trace, torch of the run) whose streams are the same multiset of operations: the golden files of
# `tests/data`, recorded from real steps with torch 2.11, equal the traces made with torch 2.13.
SAME_STREAMS = {("2.13", "2.11")}


def check_device(device: Device, profile: Profile, *, any_gpu: bool | None = None) -> None:
    """Refuses steps that ran on another device than the profile's: the difference would read as the forecast's error.

    `any_gpu` accepts steps of another GPU, but never of a CPU in place of a GPU; None: the command has no such option.
    Raises UsageError.
    """
    ran, measured = device.get("type"), profile.device.get("type")
    if ran != measured:
        raise UsageError(
            f"profile {profile.gpu} is of a {measured} device, the steps are of {ran}: valid for --gpu is the profile "
            "of the device that runs them; `flopcast bench` and `flopcast fit` make it"
        )
    ran, measured = gpu_name(device), profile.gpu
    if ran == "cpu":
        ran, measured = str(device.get("name")), str(profile.device.get("name"))
    if ran != measured and not any_gpu:
        else_ = "" if any_gpu is None else ", or compare all the same with --any-gpu"
        raise UsageError(
            f"the steps ran on {device.get('name')}, profile {profile.gpu} is of another device"
            f"{f', {measured}' if profile.gpu == 'cpu' else ''}: give the profile of the device that ran them with "
            f"--gpu{else_}"
        )


def check_stack(stack: Mapping[str, Any], profile: Profile) -> None:
    """Refuses steps that ran with other versions of torch or triton than the profile was measured with.

    The forecast's kernels are the profile's: torch (with its cuBLAS and cuDNN) has to be of the same release,
    major.minor, and so has triton where both name one. Raises UsageError.
    """
    for name in ("torch", "triton"):
        measured, ran = profile.stack.get(name), stack.get(name)
        if measured and ran and release(measured) != release(ran):
            raise UsageError(
                f"the steps ran with {name} {ran}, profile {profile.gpu} was measured with {name} {measured}: their "
                f"kernels differ; measure a profile with this {name} (`flopcast bench`, `flopcast fit`), or run the "
                f"steps with {name} {release(measured)}, or compare all the same with --any-stack"
            )


def check_stream(stream: Stream, stack: Mapping[str, Any]) -> None:
    """Refuses a stream traced with versions that may launch other operations than the steps did.

    transformers' code decides which operations a model calls: the same release, major.minor, is needed. The release
    of torch may differ where streams are proven equal (`SAME_STREAMS`). Raises UsageError.
    """
    traced = {name: stream.meta.get(name) for name in ("torch", "transformers")}
    for name, version in traced.items():
        ran = stack.get(name)
        if not version or not ran or release(version) == release(ran):
            continue
        if name == "torch" and (release(version), release(ran)) in SAME_STREAMS:
            continue
        raise UsageError(
            f"the steps ran with {name} {ran}, the stream of their model was traced with {name} {version}, and the two "
            f"may call different operations: run the steps with {name} {release(version)} (`pip install "
            f"{name}=={version}`), or compare all the same with --any-stack"
        )


def release(version: str) -> str:
    """The major.minor release of a version: 2.11.0+cu130 -> 2.11."""
    return ".".join(version.split("+")[0].split(".")[:2])
