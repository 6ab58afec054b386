"""Half a minute of `make soak`, and whether its verdict can fail."""

import asyncio
from pathlib import Path

import pytest
from benchmarks.soak import Cluster, Figures, line_through, soak, verdicts

from peer import clusters  # isort: skip

MINUTES = 0.5


def test_what_grows_is_not_flat_and_noise_is() -> None:
    figures = Figures()
    for step in range(1800):
        at_s = step * 2.0
        figures.add("memory_mib", at_s, 80 + at_s / 3600 * 20 + step % 3)
        figures.add("descriptors", at_s, 40 + step % 7)
    found = verdicts(figures, 0)
    assert found["memory_mib"]["grows_an_hour"] == pytest.approx(20, abs=0.1)
    assert not found["memory_mib"]["flat"]
    assert found["descriptors"]["flat"]


def test_a_line_is_the_one_of_least_squares() -> None:
    assert line_through([(0, 1), (3600, 3), (7200, 5)]) == pytest.approx((3, 2, 0))


@pytest.mark.thorough
def test_half_a_minute_loses_nothing(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        for name, process in (("first", cluster.first), ("second", cluster.second)):
            clusters.await_line(process, tmp_path / f"{name}.log", "ready ")
        report = asyncio.run(soak(cluster, MINUTES, rate=100))
    finally:
        cluster.close()
    assert report["missing"] == 0
    assert report["sent"] > 1000
    assert report["delayed"] > 50
    assert report["decided"] > 20
    assert report["popped"] > 100
    assert {"memory_mib", "descriptors", "delivery_p50_ms"} <= report["figures"].keys()
