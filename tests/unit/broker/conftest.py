"""A stepped broker with a topic `T` of four queues, and a client."""

import pytest

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
