"""Who goes first on this machine."""

import os
import threading

from sluicemq.broker.server import Broker
from sluicemq.config import BrokerConfig, StoreConfig
from sluicemq.files.machine import LOWER_BY, Priority, priority


def test_a_thread_lowers_its_priority_when_it_may_raise_it_again() -> None:
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    def work() -> None:
        priority = Priority()
        for is_low in (True, False):
            priority.set_low(is_low)
            look()

    look()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    look()
    usual, low, *after = found
    assert low in (usual, min(usual + LOWER_BY, 19))
    assert after == [usual, usual]


def test_threads_that_a_broker_begins_are_as_usual_though_its_own_is_lowered() -> None:
    found: list[int] = []

    def work() -> None:
        broker = Broker(BrokerConfig(), StoreConfig())
        priority().set_low()
        for executor in (broker._executor, broker._filter_executor):
            found.append(executor.submit(os.getpriority, os.PRIO_PROCESS, 0).result())
            executor.shutdown()
        assert priority() is priority()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [os.getpriority(os.PRIO_PROCESS, 0)] * 2
