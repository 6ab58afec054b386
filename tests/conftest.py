"""Which tests the processes of `make test` get, and in which order (`--dist loadgroup`).

A file is one piece of work, but for the tests that share the Spark session: they are all one, since
each process that has a session holds a JVM and its Python workers. The long pieces come first;
begun last, one of them would run on alone.
"""

from pathlib import Path
from typing import Final

import pytest

HERE: Final = Path(__file__).parent
LONG: Final = (
    "integration/spark",
    "compatibility",
    "unit/broker/test_lane_simulation.py",
    "crash",
    "integration",
)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else those with the most tests are first


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """After pytest-randomly: the order within a rank stays as it shuffled it."""
    items.sort(key=rank)
    for item in items:
        is_shared = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if is_shared else where(item)))


def where(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix()


def rank(item: pytest.Item) -> int:
    return next((i for i, start in enumerate(LONG) if where(item).startswith(start)), len(LONG))
