"""A stepped broker with a topic `T` of four queues, and a client.

A test that kills a broker does it twice: what is left is its own disk, or that of a slave.
"""

import inspect

import pytest

from simulation.failover import failovers
from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.model.topic import TopicConfig


@pytest.fixture
def broker() -> SteppedBroker:
    stepped = SteppedBroker()
    stepped.core.topics.put(TopicConfig("T", 4, 4))
    return stepped


@pytest.fixture
def client(broker: SteppedBroker) -> SteppedClient:
    return broker.connect()


OF_ITS_OWN_FILES = {"test_units_of_an_earlier_life_are_wiped"}
OF_OWN_FILES = {"test_timer_damage", "test_timer_roles"}
"""Tests, and modules of tests, of files that a slave does not have."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    is_killed = ".kill()" in inspect.getsource(metafunc.function)
    is_of_own = metafunc.module.__name__.rpartition(".")[2] in OF_OWN_FILES
    if is_killed and not is_of_own and metafunc.function.__name__ not in OF_ITS_OWN_FILES:
        metafunc.parametrize("goes_on_with", ["own", "slave"], indirect=True)


@pytest.fixture(autouse=True)
def goes_on_with(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose disk `files.kill()` is."""
    if getattr(request, "param", "") == "slave":
        failovers(monkeypatch)
