"""Links by datasheet: found by name and by GPU, with rates and sources that add up."""

from __future__ import annotations

import pytest

from flopcast.errors import UsageError
from flopcast.roofline.gpu.catalogue.datasheets import load_specs
from flopcast.roofline.gpu.links.catalogue import find_link, link_of, links


def test_every_gpu_has_one_link_and_every_link_a_source() -> None:
    named = [gpu for link in links().values() for gpu in link.gpus]
    assert sorted(named) == sorted(load_specs())
    for link in links().values():
        assert link.source
        assert 0 < link.carried_bytes_per_second <= link.bytes_per_second
        assert bool(link.arch) is (link.kind != "network")


def test_a_gpu_is_joined_by_its_own_link() -> None:
    found = link_of("nvidia-h200")
    assert found is not None
    assert found.name == "nvlink4"
    assert found.bytes_per_second == 450e9  # of one direction: half of what is advertised
    assert link_of("nvidia-v100") is None


@pytest.mark.parametrize(("name", "network"), [("nvlink9", False), ("ib-400", False), ("nvlink4", True)])
def test_an_unknown_link_is_refused_with_the_valid_ones(name: str, network: bool) -> None:
    with pytest.raises(UsageError, match="ethernet-100" if network else "pcie4"):
        find_link(name, network=network)
