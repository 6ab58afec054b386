"""A timer wheel of two hours instead of two weeks, so that files in memory stay small."""

from typing import Final

import pytest

from sluicemq.broker.waiting import listing, timers
from sluicemq.store.timers import checking, files
from sluicemq.store.tools import timers as verifying

SLOTS: Final = 8192


def make_wheel_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every wheel that is made from now on have `SLOTS` slots."""
    for module in (timers, listing, checking, files, verifying):
        monkeypatch.setattr(module, "SLOTS", SLOTS)
    monkeypatch.setattr(files, "WHEEL_BYTES", SLOTS * files.SLOT_BYTES)
