"""Which tests the processes of `make test` get, and in which order (`--dist loadgroup`).

A file is one piece of work, but for the tests that share the Spark session: they are all one, since
each process that has a session holds a JVM and its Python workers. The long pieces come first;
begun last, one of them would run on alone.
"""

import os
from pathlib import Path
from typing import Any, Final

import pytest

HERE: Final = Path(__file__).parent
LONG: Final = (
    "integration/spark",
    "compatibility",
    "unit/broker/test_lane_simulation.py",
    "crash",
    "integration",
)
SEEDS: Final = "SLUICEMQ_SEEDS"
SPARK_TIMEOUT_S: Final = 300  # the first test of a process waits for the session
SPARK: Final = {
    "spark.log.level": "ERROR",
    "spark.sql.shuffle.partitions": "2",
    # For a few rows Spark works hardest at working fast: compiling its plans, and compiling those.
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.adaptive.enabled": "false",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData",
}
"""What makes the shared session cheap where all data is small: half the processor time."""


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The session that all tests of a process share; push-down is on.

    Never stopped: Spark has one session a process. Its JVM ends with this process.
    """
    from sluicemq.spark.session import spark_session

    warehouse = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    return spark_session("tests", master="local[2]", settings=SPARK | warehouse)


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # else those with the most tests are first


@pytest.hookimpl(tryfirst=True)  # xdist has to find the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """After pytest-randomly: the order within a rank stays as it shuffled it."""
    items.sort(key=rank)
    for item in items:
        is_shared = "spark" in getattr(item, "fixturenames", ())
        item.add_marker(pytest.mark.xdist_group("spark" if is_shared else where(item)))
        if is_shared and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    if SEEDS not in os.environ:
        left = [item for item in items if item.get_closest_marker("simulation")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


def where(item: pytest.Item) -> str:
    return item.path.relative_to(HERE).as_posix()


def rank(item: pytest.Item) -> int:
    return next((i for i, start in enumerate(LONG) if where(item).startswith(start)), len(LONG))
