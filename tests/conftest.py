"""Which tests the processes of `make test` get, in which order (`--dist loadfile`), and how long
they may take.

The long pieces of work (`scheduling`) come first: begun last, one of them would run on alone.

Every limit is what a machine at rest needs, and is multiplied by how slow this machine is
(`waiting.slowness`). Tests that took more than half of their limit are named at the end.
"""

import gc
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import pytest
from hypothesis import HealthCheck, settings

from thorough import ALL
from waiting import CORES, SLOWNESS, limits_missed_nearly, measure_slowness

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
    "unit/broker/failover/test_etcd.py",
)
SEEDS: Final = "SLUICEMQ_SEEDS"
SLOW: Final = "took more than half of a limit"
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
    gc.disable()  # until the tests are collected
    config.option.loadscopereorder = False  # else those with the most tests are first
    # How long an example takes says how busy the machine is, and nothing of the code.
    settings.register_profile(
        "patient", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")
    # A shell ignores these signals for what it starts in the background, and programs inherit that.
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGQUIT, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)
    if SLOWNESS not in os.environ:  # the processes of pytest-xdist have it from the first one
        workers = getattr(config.option, "numprocesses", None) or 1
        os.environ[SLOWNESS] = f"{measure_slowness() * max(1.0, workers / CORES):.2f}"


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage from now on, but not among the tests and their modules: they stay, and each
    full collection would visit them all."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from scheduling import Pieces  # without pytest-xdist there is nothing to schedule

    return Pieces(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """A test that passed at its second try is a flake: its first traceback is for whoever mends
    it."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.write_sep("=", f"FLAKY {report.nodeid} ({report.when})", yellow=True)
        terminalreporter.write_line(report.longreprtext)
    slow = sorted(
        (text, report.nodeid)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, text in getattr(report, "user_properties", ())
        if name == SLOW and report.when == "teardown"
    )
    for text, nodeid in slow:
        terminalreporter.write_line(f"SLOW {nodeid}: {text}")
    if slow:
        terminalreporter.write_line(
            f"{len(slow)} tests took more than half of a limit; limits were multiplied by "
            f"{os.environ[SLOWNESS]} or more."
        )


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Note in the report of the test's end which of its limits it nearly missed."""
    if call.when == "teardown":
        item.user_properties.extend((SLOW, text) for text in limits_missed_nearly())
    elif call.when == "call":
        marker = item.get_closest_marker("timeout")
        limit_s = marker.args[0] if marker is not None and marker.args else 0
        if limit_s and call.duration > limit_s / 2:
            item.user_properties.append((SLOW, f"it took {call.duration:.0f} of {limit_s:.0f} s"))
    yield


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
    if not ALL:
        left_out = [item for item in items if item.get_closest_marker("thorough")]
        items[:] = [item for item in items if not item.get_closest_marker("thorough")]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=rank)
    default_s = float(config.getini("timeout") or 0)
    if config.getoption("timeout", None) is None:  # else it is for all tests, as it was given
        for item in items:
            scale_timeout(item, default_s)
    if SEEDS not in os.environ:
        left = [item for item in items if item.get_closest_marker("simulation")]
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left)


def scale_timeout(item: pytest.Item, default_s: float) -> None:
    """Multiply a test's limit by the slowness of the machine. 0 is no limit."""
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        limit_s = float(marker.args[0] if marker.args else marker.kwargs["timeout"])
    elif "spark" in getattr(item, "fixturenames", ()):
        limit_s = SPARK_TIMEOUT_S
    else:
        limit_s = default_s
    item.add_marker(pytest.mark.timeout(limit_s * float(os.environ[SLOWNESS])), append=False)


def rank(item: pytest.Item) -> int:
    """Its place in `LONG`; the order within a place stays as it was shuffled."""
    path = item.path.relative_to(HERE).as_posix()
    return next((i for i, start in enumerate(LONG) if path.startswith(start)), len(LONG))
