"""Clusters and drivers of the compatibility tests, started once for all tests that use them.

What a missing tool means is decided here: a skip with the reason, or a failure when CI=true.

A test that fails runs up to twice more: these clients have timeouts of their own, 3 s and less,
and a machine that starts three JVMs at once stalls that long. pytest reports it as flaky, with the
first traceback (tests/conftest.py). What a test makes is named by `names.own`.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from peer import clusters, drivers, names, official, sessions, toolchain

FIRST_FETCH_S = 700  # the first test that needs them waits for the jars
# Brokers that ask soon how a transaction ended. The real one keeps back for a moment which have
# ended, and asks about them too when its timeout is no longer than that.
QUICK_CHECKS = {"transactionTimeOut": "2000", "transactionCheckInterval": "1000"}
CLUSTERS = {
    "sluicemq": partial(clusters.sluice_cluster, **QUICK_CHECKS),
    "rocketmq": partial(
        clusters.rocketmq_cluster, **QUICK_CHECKS, transactionOpBatchInterval="100"
    ),
    **sessions.CLUSTERS,
    **official.CLUSTERS,
}
DRIVERS: dict[str, Callable[[Path], drivers.Driver]] = {
    "java-4.9.8": lambda directory: drivers.java_driver("client-4.9.8", directory),
    "java-5.3.3": lambda directory: drivers.java_driver("client-5.3.3", directory),
    "java-5.5.0": lambda directory: drivers.java_driver("client-5.5.0", directory),
    "go-2.1.2": drivers.golang_driver,
    "python-aio": lambda directory: drivers.python_driver("aio", directory),
    "python-sync": lambda directory: drivers.python_driver("sync", directory),
    "python-rocketmq": lambda directory: drivers.python_driver("rocketmq", directory),
    **sessions.DRIVERS,
    **official.DRIVERS,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    impossible = [item for item in ours if cannot(item)]
    for item in ours:
        item.add_marker(pytest.mark.compatibility)
        item.add_marker(pytest.mark.timeout(FIRST_FETCH_S))
        item.add_marker(pytest.mark.flaky(reruns=2, reruns_delay=5))
    if impossible:
        items[:] = [item for item in items if item not in impossible]
        config.hook.pytest_deselected(items=impossible)


def cannot(item: pytest.Item) -> bool:
    """Whether the module's table CANNOT says that the client of this test has no such thing."""
    assert isinstance(item, pytest.Function)
    return any(
        words in item.name and f"[{client}" in item.name
        for words, client in getattr(item.module, "CANNOT", {})
    )


class Running:
    """The clusters that run, one of a kind. They end with the last test here that is in sight: a
    real broker at rest takes a fifth of a core from the tests that follow."""

    def __init__(self) -> None:
        self.found: dict[str, clusters.Cluster] = {}
        self.stack = contextlib.ExitStack()

    def close(self) -> None:
        self.found.clear()
        self.stack.close()


RUNNING = Running()


def pytest_runtest_setup(item: pytest.Item) -> None:
    names.begin_try(item)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    here = Path(__file__).parent
    if here in item.path.parents and (nextitem is None or here not in nextitem.path.parents):
        RUNNING.close()


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], clusters.Cluster]]:
    """cluster("sluicemq") or cluster("rocketmq"): the running cluster of that kind."""

    def start(kind: str) -> clusters.Cluster:
        if kind not in RUNNING.found:
            directory = tmp_path_factory.mktemp(kind)
            with missing_tool_is_a_reason():
                RUNNING.found[kind] = RUNNING.stack.enter_context(CLUSTERS[kind](directory))
        return RUNNING.found[kind]

    yield start
    RUNNING.close()


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], drivers.Driver]]:
    """driver("java-5.3.3"): the running driver of that client."""
    running: dict[str, drivers.Driver] = {}
    with contextlib.ExitStack() as stack:

        def start(client: str) -> drivers.Driver:
            if client not in running or running[client].is_over:
                with missing_tool_is_a_reason():
                    running[client] = DRIVERS[client](tmp_path_factory.mktemp(client))
                stack.callback(running[client].close)
            return running[client]

        yield start


@pytest.fixture(params=official.PAIRS, ids="-".join)
def stage(
    request: pytest.FixtureRequest,
    cluster: Callable[[str], clusters.Cluster],
    driver: Callable[[str], drivers.Driver],
) -> Iterator[official.Stage]:
    """An official gRPC client before an arrangement of proxy and broker."""
    client, arrangement = request.param
    place, running = cluster(f"official-{arrangement}"), driver(f"official-{client}")
    made = official.Stage(client, place, running)
    yield made
    made.close()


@contextlib.contextmanager
def missing_tool_is_a_reason() -> Iterator[None]:
    try:
        yield
    except toolchain.MissingTool as missing:
        skip_or_fail(str(missing))


def skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
