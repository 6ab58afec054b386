"""Every file of a store, damaged in every way, after a stop in order and after a kill, and met in
every way: by a start, by a read-only one, by Spark's store source, by verify and by repair.

Each of them may do three things: show every message that was there, with
the same bytes at the same offsets (mended from the log); refuse, naming the path and the cure; or
pass over a message whose record is spoilt in the log, and say so with the cure. Never show less and
say nothing, never end in a traceback.

What nobody can see, since RocketMQ's format keeps no checksum of it, stands in `UNSEEN`.
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
    """What clients see: messages by pulls of each kind, keys that are found, topics, progress."""

    pulled: dict[Place, bytes]
    in_bulk: dict[Place, bytes]
    by_tag: dict[Place, bytes]
    keys: set[int]
    topics: set[str]
    progress: int


def view(files: CrashableFiles, *, read_only: bool = False) -> View:
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


# --- what is seen


def judge(
    whole: View,
    files: CrashableFiles,
    path: str,
    caplog: pytest.LogCaptureFixture,
    look: Callable[[CrashableFiles], View] = view,
) -> str | None:
    """What is wrong about how this damage is met; None when nothing is."""
    try:
        found = look(files)
    except SluiceError as error:
        is_named = path.rpartition("/")[0] in str(error) and error.fix
        return None if is_named else f"refused without path or cure: {error}"
    except Exception as error:  # whatever it is, the cell is red
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


UNSEEN: Final = {
    ("commitlog", "flipped"): ("keys",),  # a property; only enabledAppendPropCRC protects those
    ("consumequeue", "flipped"): ("by_tag",),  # the tag code of a unit
    ("index", "flipped"): ("keys",),  # hashes and chains
    ("index", "swapped"): ("keys",),
    ("index", "zeroed"): ("keys",),  # a file of the index that is full may have hundreds of MB
    ("config", "flipped"): ("topics", "progress"),  # JSON that reads well, and says another thing
    ("config", "swapped"): ("progress",),  # with the edition before
    ("config", "older"): ("progress",),  # that is less, and only repeats messages
}
"""(directory, damage): what may be less in silence; `store verify` finds it in units and index."""
NOTHING_KNOWS: Final = f"/store/commitlog/{24_576:020d}"
"""The log's last file, wholly behind the mark: killed before any of it was synced."""


# --- the other ways in


def read_only_view(files: CrashableFiles) -> View:
    """As `view`, of a read-only broker, which changes nothing."""
    return view(files, read_only=True)


def source_view(files: CrashableFiles) -> dict[Place, bytes]:
    """What Spark's store source reads."""
    reader = StoreReader.open("/store", files=files, wanted=lambda topic, queue_id: True)
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
    """A damaged store, the file that is damaged, and how."""

    whole: View
    files: CrashableFiles
    path: str
    kind: str
    killed: bool

    @property
    def is_unknowable(self) -> bool:
        """Whether nothing in the store tells of the damage."""
        return self.killed and self.kind == "deleted" and self.path == NOTHING_KNOWS

    @property
    def unseen(self) -> tuple[str, ...]:
        """Return what may be less in silence: the beginnings of what `judge` says of it."""
        return UNSEEN.get((self.path.split("/")[2], self.kind), ())


def through_start(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    return judge(cell.whole, cell.files, cell.path, caplog)


def through_read_only(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    before = {path: cell.files.content(path) for path in paths_below(cell.files, "/store")}
    wrong = judge(cell.whole, cell.files, cell.path, caplog, read_only_view)
    after = {path: cell.files.content(path) for path in paths_below(cell.files, "/store")}
    return wrong if after == before else f"a read-only broker has changed {cell.path}"


def through_source(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    try:
        found = source_view(cell.files)
    except SluiceError as error:
        return None if error.fix else f"refused without a cure: {error}"
    except Exception as error:  # whatever it is, the cell is red
        return f"{type(error).__name__}: {error}"
    changed = [place for place, body in found.items() if cell.whole.pulled.get(place) != body]
    if changed:
        return f"other bytes at {changed}"
    less = len(cell.whole.pulled) - len(found)
    return None if caplog.messages or not less else f"{less} fewer, and nothing says so"


def through_verify(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """Whatever a start shows less of is a finding; what it refuses: test_verify_starts.py."""
    try:
        is_clean = verify(StoreLayout.find("/store", files=cell.files.kill())).findings.is_clean
    except SluiceError as error:
        return None if error.fix else f"refused without a cure: {error}"
    except Exception as error:  # whatever it is, the cell is red
        return f"{type(error).__name__}: {error}"
    try:
        found = view(cell.files)
    except SluiceError:
        return None
    less = len(cell.whole.pulled) - len(found.pulled)
    if cell.killed and cell.kind == "emptied" and cell.path == NOTHING_KNOWS:
        return None  # a crash just after the file was made leaves it like that
    return f"verify finds nothing, and a start shows {less} fewer" if is_clean and less else None


def through_repair(cell: Cell, caplog: pytest.LogCaptureFixture) -> str | None:
    """A repaired store starts, with all that a start shows without it, and what is lost is told."""
    try:
        without: set[Place] = set(view(cell.files.kill()).pulled)
    except SluiceError:
        without = set()
    caplog.clear()
    try:
        report = repair("/store", files=cell.files, stamp="now", write=True)
        found = view(cell.files)
    except SluiceError as error:
        return None if error.fix else f"refused without a cure: {error}"
    except Exception as error:  # whatever it is, the cell is red
        return f"{type(error).__name__}: {error}"
    changed = [place for place, body in found.pulled.items()
               if cell.whole.pulled.get(place) not in (body, None)]  # fmt: skip
    if changed:
        return f"other bytes at {changed}"
    if missing := without - set(found.pulled):
        return f"{len(missing)} fewer than without the repair"
    less = len(set(cell.whole.pulled) - set(found.pulled))
    is_told = not report.is_sound or report.tail_bytes or caplog.messages
    return None if is_told or not less else f"{less} fewer, and nothing says so"


WAYS: Final = {
    "start": through_start,
    "read-only": through_read_only,
    "source": through_source,
    "verify": through_verify,
    "repair": through_repair,
}
"""How a damaged store is met: by a broker, by a read-only one, by Spark's store source, by `sluice
store verify`, and by `sluice store repair --write` and a broker after it."""
IS_FULL: Final = "SLUICEMQ_SEEDS" in os.environ
"""Every flipped bit is met in every way; else in CI a sixth of them, but for the start."""
KINDS: Final = ("deleted", "truncated", "emptied", "swapped", "flipped", "zeroed", "older")


def cells(kind: str, *, killed: bool) -> Iterator[tuple[str, Cell]]:
    """Yield each damaged file's name and cell."""
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
def test_no_damage_of_any_file_hides_messages_in_silence(
    killed: bool, kind: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    red, count = [], 0
    for number, (name, cell) in enumerate(cells(kind, killed=killed)):
        if kind == "flipped" and way != "start" and number % 6 and not IS_FULL:
            continue
        caplog.clear()
        count += 1
        wrong = WAYS[way](cell, caplog)
        is_unseen = wrong is not None and wrong.startswith(cell.unseen) and "," not in wrong
        if wrong is not None and not is_unseen and not cell.is_unknowable:
            red.append(f"{name}: {wrong}")
    assert count > (2 if kind == "older" else 20)
    assert not red, "\n".join(red)
