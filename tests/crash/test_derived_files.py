"""Derived files that look right and are not: what no client may notice in silence.

Each file of a store that has every kind of derived state in use is removed, emptied, zeroed, or
replaced by an older copy (of the store's last orderly stop) or by the same file of another store;
after an orderly stop, and after a kill. The start may mend it, repeating messages where the file
was the only source of progress; or refuse it, naming path and fix. See docs/design/0029.

The same state is carried through roles that are gained, lost and gained again.
"""

import copy
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pytest

from damage import paths_below
from derived import CONFIG, Workload, make_small
from simulation.roles import CHANGES, Pair
from simulation.stepped import ManualClock, SteppedBroker
from sluicemq.errors import SluiceError
from sluicemq.files.identity import IDENTITY_SUFFIX
from sluicemq.model.system_names import HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from sluicemq.testing.files import CrashableFiles

AWAY_MS: Final = 7000
IS_FULL: Final = "SLUICEMQ_SEEDS" in os.environ
KINDS: Final = ("missing", "emptied", "zeroed", "older", "foreign")
CANCELLED: Final = ("cancelled, but there",)
ONLY_SOURCE: Final = {
    # Nothing else says how far a group is; a reset, or RocketMQ, may have moved it anywhere.
    ("config/consumerOffset.json", "foreign"): (
        "offset of G", "popped", "popped in order", "of lanes",
    ),
    # Nothing else says that a message was cancelled: without it the message is delivered.
    ("config/sluiceDelayCancelled.json", "missing"): CANCELLED,
    ("config/sluiceDelayCancelled.json", "older"): CANCELLED,
    ("config/sluiceDelayCancelled.json", "foreign"): CANCELLED,
}  # fmt: skip
"""What cannot be known from elsewhere, and what may be wrong then: the broker logs a warning that
names the file and the fix. Progress that is older, or unknown, only repeats messages and needs no
entry here."""
QUEUES: Final = (HALF_TOPIC, OP_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC, "REVIVE", "EPOCH", "/T/0/")
"""Of all consume queues these are damaged; with SLUICEMQ_SEEDS all are."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


class Made(NamedTuple):
    """A store, its last orderly stop, what its clients were promised, and when it ended (ms)."""

    work: Workload
    older: CrashableFiles
    files: CrashableFiles
    end_ms: int

    def start(self, files: CrashableFiles) -> list[str]:
        """Start a broker over the files; return what is wrong."""
        clock = ManualClock(self.end_ms + AWAY_MS)
        broker = SteppedBroker(store_config=CONFIG, files=files, clock=clock)
        return copy.deepcopy(self.work).missing(broker)


def make(name: str, *, killed: bool, rounds: int = 1, is_foreign: bool = False) -> Made:
    work = Workload(name, leaves_open=not is_foreign)
    broker = SteppedBroker(store_config=CONFIG)
    for _ in range(rounds):
        work.round(broker, count=2 if is_foreign else 1)
    broker.close()
    older, clock = broker.files.kill(), ManualClock(broker.clock.now_ms() + 1000)
    broker = SteppedBroker(store_config=CONFIG, files=older.kill(), clock=clock)
    work.round(broker)
    if not killed:
        broker.close()
    return Made(work, older, broker.files.kill(), clock.now_ms())


@functools.cache
def stores() -> dict[str, Made]:
    """Return the stores by how they ended, and another one, with more of everything."""
    return {
        "stopped": make("", killed=False),
        "killed": make("", killed=True),
        "foreign": make("F", killed=False, rounds=3, is_foreign=True),
    }


def chosen(files: CrashableFiles, kind: str) -> Iterator[str]:
    """Yield the files to damage: not the commit log, and `.bak` together with its table."""
    for path in paths_below(files, "/store"):
        is_derived = not path.endswith((".bak", "/lock", "/abort")) and "/commitlog/" not in path
        is_queue = "/consumequeue/" in path
        if path.endswith(IDENTITY_SUFFIX) and kind in ("emptied", "zeroed"):
            continue  # that is as if it were missing
        if is_derived and (not is_queue or IS_FULL or any(part in path for part in QUEUES)):
            yield path


def damaged(kind: str, made: Made, path: str) -> CrashableFiles | None:
    """Return the store with a damaged file; None when that changes nothing."""
    files = made.files.kill()
    editions = [each for each in (path, path + ".bak") if files.exists(each)]
    if kind == "missing":
        for each in editions:
            files.remove(each)
    elif kind in ("emptied", "zeroed"):
        for each in editions:
            files.put(each, bytes(len(files.content(each)) if kind == "zeroed" else 0))
    else:
        source = made.older if kind == "older" else stores()["foreign"].files
        if not source.exists(path) or source.content(path) == files.content(path):
            return None
        files.put(path, source.content(path))
    return files


def judge(
    made: Made, files: CrashableFiles, path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> str:
    """Return what is wrong about how a damaged store is met, "" when nothing is."""
    try:
        wrong = made.start(files)
    except SluiceError as error:
        is_named = path.rpartition("/")[0] in str(error) and error.fix
        return "" if is_named else f"refused without path or fix: {error}"
    path = path.removesuffix(IDENTITY_SUFFIX)
    unknown = ONLY_SOURCE.get((path.removeprefix("/store/"), kind), ())
    if unknown and any(path in text for text in caplog.messages):
        wrong = [line for line in wrong if not any(f"{what}:" in line for what in unknown)]
    return "; ".join(wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ended", ["stopped", "killed"])
def test_a_derived_file_that_is_not_right_hides_nothing(
    ended: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = stores()[ended]
    assert not made.start(made.files.kill())
    caplog.set_level(logging.WARNING)
    red, cells = [], 0
    for path in chosen(made.files, kind):
        files = damaged(kind, made, path)
        if files is not None:
            cells += 1
            caplog.clear()
            wrong = judge(made, files, path, kind, caplog)
            if wrong:
                red.append(f"{path} {kind}: {wrong}")
    assert cells > 12
    assert not red, "\n".join(red)


def test_the_store_has_every_kind_of_derived_file() -> None:
    files = stores()["stopped"].files
    names = " ".join(paths_below(files, "/store"))
    for name in (
        "columns/T/", "index/", "delayOffset.json", "sluiceDelayCancelled.json", "sluicePop.json",
        "sluiceLanes.json", "sluiceEpochs.json", "consumerOrderInfo.json", "consumerFilter.json",
        "consumerOffset.json", "sluiceOffsetResets.json", HALF_TOPIC, OP_TOPIC,
    ):  # fmt: skip
        assert name in names, name


WAYS: Final = [
    *((2, way) for way in itertools.product(CHANGES, repeat=2)),
    (3, ("switched", "killed", "switched")),
    (3, ("killed", "switched", "killed")),
]


@pytest.mark.parametrize(("count", "way"), WAYS, ids=str)
def test_a_role_that_returns_brings_back_nothing_of_its_first_term(
    count: int, way: tuple[str, ...]
) -> None:
    pair, work = Pair(count=count, config=CONFIG), Workload()
    changes: list[Callable[[Pair], None] | None] = [*(CHANGES[name] for name in way), None]
    for change in changes:
        work.round(pair.master)
        pair.follow()
        work.round(pair.master, has_state=False)  # a failover has the log of this, and no state
        if change is not None:
            change(pair)
    assert work.missing(pair.master) == []


def test_tables_of_the_first_term_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that keeps its own tables while it is a slave delivers what the other cancelled."""
    pair, work = Pair(config=CONFIG), Workload()
    work.round(pair.master)
    pair.switch()
    monkeypatch.setattr(Pair, "follow_state", lambda self: None)
    work.round(pair.master)
    pair.switch()
    assert any("cancelled, but there" in line for line in work.missing(pair.master))
