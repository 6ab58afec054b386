"""Which tests the processes of `make test` get, and in which order (`--dist loadfile`).

A file is one piece of work, but for those that share the Spark session: they are all one, since
each process that has a session holds a JVM and its Python workers. The long pieces come first;
begun last, one of them would run on alone.
"""

import logging
import os
from pathlib import Path
from typing import Any, Final, cast

import pytest
from hypothesis import HealthCheck, settings

HERE: Final = Path(__file__).parent
LONG: Final = (
    "integration/spark",
    "compatibility/test_delivery.py",
    "compatibility/test_proxy_java_broker.py",
    "compatibility/test_store_exchange.py",
    "compatibility",
    "unit/broker/test_lane_simulation.py",
    "crash",
    "integration",
    "house/test_readme.py",
    "unit/broker/test_journal.py",
    "unit/replication/test_etcd.py",
)
OWN_PROCESSES: Final = {
    "test_spark_demo.py", "test_spark_standalone.py", "test_spark_no_java.py",
    "test_spark_notebook.py", "test_spark_restarts.py", "test_spark_outage.py",
}  # fmt: skip
"""Files that start Spark in a process of its own, or need none."""
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
    # How long an example takes says how busy the machine is, and nothing of the code.
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Pieces(LoadScopeScheduling):
        """xdist's own groups (`xdist_group`) are not seen under pytest 9."""

        def _split_scope(self, nodeid: str) -> str:
            return piece_of(nodeid.partition("::")[0].removeprefix("tests/"))

    return Pieces(config, log)


def piece_of(path: str) -> str:
    """The piece of work that a file belongs to; paths are below tests/."""
    name = Path(path).name
    is_named = path.startswith(("integration/", "compatibility/")) and (
        "spark" in path or name in {"test_pipelines_on_both.py", "test_archive_on_both.py"}
    )
    return "spark" if is_named and name not in OWN_PROCESSES else path


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test that passed at its second try is a flake: its first traceback is for whoever mends
    it."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("=", f"FLAKY {report.nodeid} ({report.when})", yellow=True)
        terminalreporter.write_line(report.longreprtext)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest hangs its own handlers on loggers that do not propagate, and those of PySpark, which
    appear with its first error, give every handler their JSON: for all later tests of the process.
    """
    for logger in logging.Logger.manager.loggerDict.values():
        if type(logger).__name__ == "PySparkLogger":
            cast(logging.Logger, logger).propagate = True
    plugin: Any = item.config.pluginmanager.get_plugin("logging-plugin")
    for handler in (plugin.caplog_handler, plugin.report_handler):
        handler.setFormatter(plugin.formatter)


@pytest.hookimpl(trylast=True)  # pytest-randomly has shuffled
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=rank)
    for item in items:
        is_shared = "spark" in getattr(item, "fixturenames", ())
        if is_shared and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SPARK_TIMEOUT_S))
    if SEEDS not in os.environ:
        left = [item for item in items if item.get_closest_marker("simulation")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


def rank(item: pytest.Item) -> int:
    """Its place in `LONG`; the order within a place stays as it was shuffled."""
    path = item.path.relative_to(HERE).as_posix()
    return next((i for i, start in enumerate(LONG) if path.startswith(start)), len(LONG))
