"""Every file of a store, damaged in every way, is opened in every way.

The store was shut down cleanly or killed. It is then opened by a broker, by a read-only broker, by
Spark's store source, by `sluice store verify` and by `sluice store repair`. Each of them may

- return every message, with the same bytes at the same offsets (repaired from the log),
- refuse the store, with the path and a fix in the error, or
- skip a message whose record is damaged in the log, and say so with a fix.

None may silently return fewer messages, or end with a traceback.

`UNDETECTABLE` lists the damage that cannot be detected, because RocketMQ's format has no checksum
for it.
"""

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from damage import CONFIG, MESSAGES, built, built_twice, damages, paths_below, topic_of
from simulation.stepped import START_MS, ManualClock, SteppedBroker
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import TagFilter, parse_subscription
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.store.readonly import StoreReader, check_recovery
from sluicemq.store.tools.layout import StoreLayout
from sluicemq.store.tools.repair import repair
from sluicemq.store.tools.verify import verify
from sluicemq.testing.files import CrashableFiles

Place = tuple[str, int, int]


class View(NamedTuple):
    """What clients see of a store.

    `pulled`, `in_bulk` and `by_tag` are the bodies of messages as three types of pulls return them.
    `keys` are the numbers of messages that a query by key finds, `topics` the known topics, and
    `progress` is the committed offset of a group.
    """

    pulled: dict[Place, bytes]
    in_bulk: dict[Place, bytes]
    by_tag: dict[Place, bytes]
    keys: set[int]
    topics: set[str]
    progress: int


def view(files: CrashableFiles, *, read_only: bool = False) -> View:
    """Start a broker on the store, and return what clients see of it."""
    clock = ManualClock(START_MS + 1_000_000)
    broker = SteppedBroker(store_config=CONFIG, files=files, clock=clock, read_only=read_only)
    store = broker.store
    tags = [TagFilter(parse_subscription("T", tag)) for tag in "ab"]
    kinds: list[tuple[int | None, list[Any]]] = [(None, [None]), (1 << 20, [None]), (None, tags)]
    pulls: list[dict[Place, bytes]] = []
    for bytes_max, filters in kinds:
        found: dict[Place, bytes] = {}
        for key in store.queues():
            for message_filter in filters:
                offset, end = store.queue_offsets(*key)
                while offset < end:
                    result = store.reader.read(*key, offset, 32, bytes_max, message_filter)
                    for message in decode_records(b"".join(result.data)):
                        assert (message.topic, message.queue_id) == key
                        found[*key, message.queue_offset] = message.body
                    assert result.next_offset > offset
                    offset = result.next_offset
        pulls.append(found)
    keys = {
        number
        for number in range(MESSAGES)
        if (hit := store.keys.find(topic_of(number), f"k{number}", 9, 0, 1 << 60)) and hit.records
    }
    committed = broker.core.offsets.committed("G", "T", 0)
    return View(pulls[0], pulls[1], pulls[2], keys, set(broker.core.topics.table), committed)


# --- what clients see


def find_fault(
    whole: View,
    files: CrashableFiles,
    path: str,
    caplog: pytest.LogCaptureFixture,
    open_view: Callable[[CrashableFiles], View] = view,
) -> str | None:
    """Open a damaged store with `open_view`. Return what is wrong with the result, or None.

    `whole` is what clients saw before the damage, and `path` is the damaged file.
    """
    try:
        found = open_view(files)
    except SluiceError as error:
        is_named = path.rpartition("/")[0] in str(error) and error.fix
        return None if is_named else f"refused without path or fix: {error}"
    except Exception as error:  # any exception is a failure
        return f"{type(error).__name__}: {error}"
    lost = [
        f"{name}: {len(old) - len(new)} fewer"
        for name, old, new in zip(View._fields, whole[:5], found[:5], strict=False)
        if not set(old) <= set(new)
    ]
    changed = [place for place, body in found.pulled.items() if whole.pulled.get(place) != body]
    if changed:
        return f"other bytes at {changed}"
    if found.progress != whole.progress:
        lost.append(f"progress {found.progress}")
    if lost and not any(
        path in text or "store repair" in text or "the log ends at" in text
        for text in caplog.messages
    ):
        return ", ".join(lost)
    return None


UNDETECTABLE: Final = {
    ("commitlog", "flipped"): ("keys",),  # a property; only enabledAppendPropCRC protects those
    ("consumequeue", "flipped"): ("by_tag",),  # the tag code of a unit
    ("index", "flipped"): ("keys",),  # hashes and chains
    ("index", "swapped"): ("keys",),
    ("index", "zeroed"): ("keys",),  # a full index file may have hundreds of MB
    ("config", "flipped"): ("topics", "progress"),  # valid JSON with another content
    ("config", "swapped"): ("progress",),  # with the previous edition
    ("config", "older"): ("progress",),  # a smaller offset, which only repeats messages
}
"""(directory, damage) -> the fields of View that may silently have less.

`sluice store verify` detects such damage in units and index.
"""
UNKNOWN_FILE: Final = f"/store/commitlog/{24_576:020d}"
"""The last file of the log, completely behind the checkpoint: no part of it was synced."""


# --- the ways to open a store


def read_only_view(files: CrashableFiles) -> View:
    """Start a read-only broker on the store, and return what clients see of it."""
    return view(files, read_only=True)


def source_view(files: CrashableFiles) -> dict[Place, bytes]:
    """Return the bodies of all messages that Spark's store source reads."""
    reader = StoreReader.open("/store", files=files, is_wanted=lambda topic, queue_id: True)
    found: dict[Place, bytes] = {}
    try:
        check_recovery(reader, "/store", files=files)
        for topic, queue_id in reader.queues():
            start, end = (
                reader.queue_offsets(topic, queue_id)[0],
                reader.verified_end(topic, queue_id),
            )
            for places in reader.scan_queue(topic, queue_id, check_bodies=True).iter_places(
                start, end
            ):
                for at in places.starts.tolist():
                    message = decode_record(places.view, at)
                    found[topic, queue_id, message.queue_offset] = message.body
    finally:
        reader.close()
    return found


class Cell(NamedTuple):
    """A damaged store: what clients saw before, its files, the damaged file, and the damage."""

    whole: View
    files: CrashableFiles
    path: str
    kind: str
    killed: bool

    @property
    def is_unknowable(self) -> bool:
        """Whether no file of the store shows the damage."""
        return self.killed and self.kind == "deleted" and self.path == UNKNOWN_FILE

    @property
    def undetectable(self) -> tuple[str, ...]:
        """The fields that may silently have less: beginnings of texts that `find_fault` returns."""
        return UNDETECTABLE.get((self.path.split("/")[2], self.kind), ())


def check_start(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Start a broker on the store. Return what is wrong with the result, or None."""
    return find_fault(cell.whole, cell.files, cell.path, caplog)


def check_read_only(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Start a read-only broker on the store, which must not change a byte."""
    before = {path: cell.files.content(path) for path in paths_below(cell.files, "/store")}
    wrong = find_fault(cell.whole, cell.files, cell.path, caplog, read_only_view)
    after = {path: cell.files.content(path) for path in paths_below(cell.files, "/store")}
    return wrong if after == before else f"a read-only broker has changed {cell.path}"


def check_source(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Read the store with Spark's store source."""
    try:
        found = source_view(cell.files)
    except SluiceError as error:
        return None if error.fix else f"refused without a fix: {error}"
    except Exception as error:  # any exception is a failure
        return f"{type(error).__name__}: {error}"
    changed = [place for place, body in found.items() if cell.whole.pulled.get(place) != body]
    if changed:
        return f"other bytes at {changed}"
    less = len(cell.whole.pulled) - len(found)
    return None if caplog.messages or not less else f"{less} fewer, and nothing says so"


def check_verify(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Check that verify has a finding if a start shows fewer messages.

    test_verify_starts.py covers what a start refuses.
    """
    try:
        is_clean = verify(StoreLayout.find("/store", files=cell.files.kill())).findings.is_clean
    except SluiceError as error:
        return None if error.fix else f"refused without a fix: {error}"
    except Exception as error:  # any exception is a failure
        return f"{type(error).__name__}: {error}"
    try:
        found = view(cell.files)
    except SluiceError:
        return None
    less = len(cell.whole.pulled) - len(found.pulled)
    if cell.killed and cell.kind == "emptied" and cell.path == UNKNOWN_FILE:
        return None  # a crash just after the file was made leaves it like that
    return f"verify finds nothing, and a start shows {less} fewer" if is_clean and less else None


def check_repair(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Check that a repaired store starts with all messages that it shows without the repair.

    Lost messages must be reported.
    """
    try:
        without: set[Place] = set(view(cell.files.kill()).pulled)
    except SluiceError:
        without = set()
    caplog.clear()
    try:
        report = repair("/store", files=cell.files, stamp="now", write=True)
        found = view(cell.files)
    except SluiceError as error:
        return None if error.fix else f"refused without a fix: {error}"
    except Exception as error:  # any exception is a failure
        return f"{type(error).__name__}: {error}"
    changed = [place for place, body in found.pulled.items()
               if cell.whole.pulled.get(place) not in (body, None)]  # fmt: skip
    if changed:
        return f"other bytes at {changed}"
    if missing := without - set(found.pulled):
        return f"{len(missing)} fewer than without the repair"
    less = len(set(cell.whole.pulled) - set(found.pulled))
    is_reported = not report.is_sound or report.tail_bytes or caplog.messages
    return None if is_reported or not less else f"{less} fewer, and nothing says so"


WAYS: Final = {
    "start": check_start,
    "read-only": check_read_only,
    "source": check_source,
    "verify": check_verify,
    "repair": check_repair,
}
"""How a damaged store is opened: by a broker, by a read-only broker, by Spark's store source, by
`sluice store verify`, and by `sluice store repair --write` and then a broker."""
IS_FULL: Final = "SLUICEMQ_SEEDS" in os.environ
"""Whether every flipped bit is tested in every way. Otherwise only a start tests all of them, and
the other ways a sixth."""
KINDS: Final = ("deleted", "truncated", "emptied", "swapped", "flipped", "zeroed", "older")


def cells(kind: str, *, killed: bool) -> Iterator[tuple[str, Cell]]:
    """Yield (name, cell) for each damage of this kind to each file."""
    template, older = (
        built_twice(killed=killed) if kind == "older" else (built(killed=killed), None)
    )
    whole = view(template.kill())
    assert len(whole.pulled) == len(whole.in_bulk) == len(whole.by_tag) == len(whole.keys) == 80
    assert whole.progress == 5
    for path in paths_below(template, "/store"):
        for name, damage in damages(template, path, kind, older):
            files = template.kill()
            damage(files)
            yield f"{path} {name}", Cell(whole, files, path, kind, killed)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_no_damage_of_any_file_silently_hides_messages(
    killed: bool, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    failures, count = [], 0
    for number, (name, cell) in enumerate(cells(kind, killed=killed)):
        if kind == "flipped" and way != "start" and number % 6 and not IS_FULL:
            continue
        caplog.clear()
        count += 1
        wrong = WAYS[way](cell, caplog)
        is_undetectable = (
            wrong is not None and wrong.startswith(cell.undetectable) and "," not in wrong
        )
        if wrong is not None and not is_undetectable and not cell.is_unknowable:
            failures.append(f"{name}: {wrong}")
    assert count > (2 if kind == "older" else 20)
    assert not failures, "\n".join(failures)
