"""Descriptors: what is used stays mapped, and everyone's part follows from the limit."""

import resource

import pytest

from sluicemq.files import descriptors
from sluicemq.files.descriptors import DescriptorPool


class Map:
    def __init__(self) -> None:
        self.is_used = True
        self.is_there = True

    def release_descriptor(self) -> None:
        self.is_there = False


def test_map_that_is_used_stays_and_the_others_go_in_order() -> None:
    pool, often, maps = DescriptorPool(4), Map(), [Map() for _ in range(20)]
    pool.add(often)
    for one in maps:
        often.is_used = True
        pool.add(one)
        assert len(pool) <= 4
    assert often.is_there
    assert [one.is_there for one in maps] == [False] * 17 + [True] * 3


def test_new_map_stays_when_all_others_are_used() -> None:
    pool, maps = DescriptorPool(3), [Map() for _ in range(3)]
    for one in maps:
        pool.add(one)
    for one in maps:
        one.is_used = True
    new = Map()
    pool.add(new)
    assert new.is_there
    assert [one.is_there for one in maps] == [False, True, True]


def test_map_that_left_gives_its_place_back() -> None:
    pool, maps = DescriptorPool(2), [Map() for _ in range(3)]
    for one in maps[:2]:
        pool.add(one)
    pool.remove(maps[0])
    pool.remove(maps[0])
    pool.add(maps[2])
    assert len(pool) == 2
    assert maps[1].is_there


@pytest.mark.parametrize(
    ("limit", "maps", "socket_descriptor_end"),
    [(1024, 256, 704), (256, 64, 128), (20_000, 1024, 18_912), (1 << 30, 1024, (1 << 20) - 1088)],
)
def test_maps_and_sockets_share_the_limit(
    monkeypatch: pytest.MonkeyPatch, limit: int, maps: int, socket_descriptor_end: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert descriptors.maps_max() == maps
    assert descriptors.socket_descriptor_end() == socket_descriptor_end


def test_limit_is_raised_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert descriptors.raise_limit() == 4096
    assert descriptors.raise_limit() == 4096
    assert limits == [(1024, 4096), (4096, 4096)]
