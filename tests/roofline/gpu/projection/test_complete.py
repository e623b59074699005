"""A measured profile lent kinds of kernel: what was measured stays, what was lent says so and is known less well."""

import math
from dataclasses import replace

import pytest

from flopcast.kernels.shapes import Attention, Gemm
from flopcast.roofline.gpu.catalogue.datasheets import find_spec
from flopcast.roofline.gpu.library.profiles import SOURCE, completed, find_profile, known, known_profiles, projection
from flopcast.roofline.gpu.profile.host import default_host
from flopcast.roofline.gpu.profile.profile import Profile
from flopcast.roofline.gpu.profile.roofs import points_of
from flopcast.roofline.gpu.projection.complete import complete
from flopcast.roofline.gpu.projection.project import project
from flopcast.roofline.gpu.projection.rates import SAME_CHIP_SIGMA
from flopcast.roofline.step.priced_step import forecast
from flopcast.roofline.step.uncertainty import card_sigma
from flopcast.roofline.stream.lowering.describe import describe
from flopcast.roofline.stream.lowering.variants import SurfaceKey
from flopcast.roofline.stream.model.models import make_config
from flopcast.roofline.stream.model.run import Run

NAME = "nvidia-h100-sxm"
WIDE_HEADS = Attention(batch=2, heads=28, kv_heads=7, seq=640, head_dim=256)  # of `bench --suite heads`
BF16, TF32 = (describe(Gemm(m=1024, n=1024, k=1024, dtype=dtype, layout="nt")) for dtype in ("bf16", "tf32"))


@pytest.fixture(scope="module")
def bare() -> Profile:
    """As it was measured."""
    return Profile.load(known_profiles()[NAME])


@pytest.fixture(scope="module")
def source() -> Profile:
    return Profile.load(known_profiles()[SOURCE])


@pytest.fixture(scope="module")
def whole(bare: Profile) -> Profile:
    return completed(bare)


def test_what_was_measured_stays_and_what_was_lent_says_so(bare: Profile, whole: Profile, source: Profile) -> None:
    assert whole.basis == "measured"
    assert whole.own_surfaces == bare.surfaces
    assert whole.projected_kinds == whole.surfaces.keys() - bare.surfaces.keys()
    there = project(source, find_spec(NAME))
    own, lent = whole.estimate([(BF16, "torch", "cold"), (TF32, "torch", "cold")])
    assert own.basis in ("measured", "interpolated")
    assert own.seconds == bare.estimate([(BF16, "torch", "cold")])[0].seconds
    assert lent.basis == "extrapolated"  # though the source measured this very shape
    assert lent.seconds == there.estimate([(TF32, "torch", "cold")])[0].seconds
    assert lent.sigma >= SAME_CHIP_SIGMA["gemm"]
    assert {point.op_class for point in points_of(whole)} == {point.op_class for point in points_of(bare)}


def test_a_kind_measured_cold_answers_for_itself_hot(bare: Profile, source: Profile) -> None:
    """Half measured, it is not half lent."""
    name = SurfaceKey.parse("torch/gemm/nt/bf16/hot")
    assert name in bare.surfaces
    less = replace(bare, surfaces={key: s for key, s in bare.surfaces.items() if key != name})
    found = complete(less, source, find_spec(NAME), find_spec(SOURCE))
    assert name not in found.surfaces
    assert found.estimate([(BF16, "torch", "hot")])[0].source != str(name)


def test_one_card_is_lent_the_spread_of_the_sources_cards(whole: Profile, source: Profile) -> None:
    seconds = {"gemm": 1.0, "pointwise": 2.0}
    assert card_sigma(seconds, source) > 0
    assert card_sigma(seconds, whole) == pytest.approx(math.sqrt(2) * card_sigma(seconds, source))
    assert "gpus" not in whole.provenance  # one card was measured, and no page says otherwise


def test_the_machines_host_is_kept_and_the_shipped_one_feeds_what_ships(bare: Profile, whole: Profile) -> None:
    """What two machines differ by does not tell two GPUs apart."""
    assert bare.host is not None
    assert whole.host == bare.host
    assert bare.host != default_host()
    assert find_profile(NAME).host == find_profile(SOURCE).host == default_host()


def test_the_source_borrows_what_only_another_measured(source: Profile, bare: Profile) -> None:
    """A source without attention of heads of 256 columns, which the H100 measured too, borrows the H100's."""
    own = {key: found for key, found in source.surfaces.items() if "/d256" not in str(key)}
    assert len(own) < len(source.surfaces)
    whole_source = completed(replace(source, surfaces=own))
    assert whole_source.own_surfaces == own
    assert whole_source.projected_kinds
    assert whole_source.projected_kinds <= bare.surfaces.keys()
    assert all("attention" in str(key) for key in whole_source.projected_kinds)
    asked = [(describe(WIDE_HEADS, "sdpa-cudnn"), "sdpa-cudnn", "cold")]
    (lent,), (there,) = whole_source.estimate(asked), bare.estimate(asked)
    assert (lent.basis, there.basis) == ("extrapolated", "measured")
    assert 0.9 * there.seconds < lent.seconds < there.seconds  # the same chip, with faster memory
    assert whole_source.projected_kinds <= projection("nvidia-a100-80gb-sxm").surfaces.keys()


def test_a_profile_that_lacks_nothing_is_as_it_was(source: Profile) -> None:
    assert complete(source, source, find_spec(SOURCE), find_spec(SOURCE)).surfaces == source.surfaces


def test_the_shipped_name_finds_the_whole_profile_and_says_what_is_projected() -> None:
    found = find_profile(NAME)
    assert found.projected_kinds
    entry = next(entry for entry in known() if entry.name == NAME)
    assert (entry.basis, SOURCE in entry.source) == ("measured", True)
    config = make_config(width=256, depth=4)
    assert not any("projected" in text for text in forecast(config, Run(), found).warnings)
    (warning,) = (text for text in forecast(config, Run(precision="tf32"), found).warnings if "device" in text)
    assert f"not measured on this GPU, projected from {SOURCE}'s: gemm" in warning
