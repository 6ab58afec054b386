"""Who goes first on this machine."""

import os
import threading

from sluicemq.files.machine import LOWER_BY, Priority


def test_a_thread_lowers_its_priority_when_it_may_raise_it_again() -> None:
    found: list[int] = []

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    def work() -> None:
        priority = Priority()
        for is_low in (True, False):
            priority.lower(is_low)
            look()

    look()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    look()
    usual, low, *after = found
    assert low in (usual, min(usual + LOWER_BY, 19))
    assert after == [usual, usual]
