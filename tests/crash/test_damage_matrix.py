"""Every file of a store, damaged in every way, after a stop in order and after a kill.

A start over it, and readers after it, may do three things: show every message that was there, with
the same bytes at the same offsets (mended from the log); refuse, naming the path and the cure; or
pass over a message whose record is spoilt in the log, and say so with the cure. Never show less and
say nothing, never end in a traceback.

What nobody can see, since RocketMQ's format keeps no checksum of it, stands in `UNSEEN`.
"""

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from simulation.stepped import SMALL as USUAL
from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import TagFilter, subscribe
from sluicemq.record.codec import decode_records
from sluicemq.testing.files import CrashableFiles

LOG_BYTES, QUEUE_BYTES = 4096, 200
CONFIG: Final = dataclasses.replace(
    USUAL, commit_log_file_bytes=LOG_BYTES, consume_queue_file_bytes=QUEUE_BYTES, index_slots=11,
    index_entries=44,
)  # fmt: skip
MESSAGES: Final = 80
FLIPS: Final = 6
Place = tuple[str, int, int]


class View(NamedTuple):
    """What clients see: messages by pulls of each kind, keys that are found, topics, progress."""

    pulled: dict[Place, bytes]
    in_bulk: dict[Place, bytes]
    by_tag: dict[Place, bytes]
    keys: set[int]
    topics: set[str]
    progress: int


def topic_of(number: int) -> str:
    return "T" if number % 3 else "S"


def send(client: SteppedClient, numbers: range) -> None:
    for number in numbers:
        tag = "ab"[number % 2]
        properties = f"UNIQ_KEY\x01U{number:05d}\x02KEYS\x01k{number}\x02TAGS\x01{tag}\x02"
        fields = send_fields(topic_of(number), properties, e=number // 3 % 2)
        assert client.call(310, fields, b"body %05d " % number * 12).code == 0


def built(*, killed: bool) -> CrashableFiles:
    """A store of two topics over several files of each kind; the mark lies 20 messages back."""
    broker = SteppedBroker(store_config=CONFIG)
    client = broker.connect()
    send(client, range(60))
    broker.core.offsets.commit("G", "T", 0, 3)
    for _ in range(3):
        broker.clock.advance(20)
        broker.store.tick()
        broker.store.sync()
    for document in broker.core.documents:
        document.save()
    send(client, range(60, 72))
    broker.clock.advance(1.5)
    broker.store.tick()
    send(client, range(72, MESSAGES))
    broker.core.offsets.commit("G", "T", 0, 5)
    for document in broker.core.documents:
        document.save()
    if not killed:
        broker.close()
    return broker.files.kill()


def view(files: CrashableFiles) -> View:
    clock = ManualClock(START_MS + 1_000_000)
    broker = SteppedBroker(store_config=CONFIG, files=files, clock=clock)
    store = broker.store
    tags = [TagFilter(subscribe("T", tag)) for tag in "ab"]
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


# --- damage

Damage = Callable[[CrashableFiles], None]


def edit(path: str, change: Callable[[bytearray], None]) -> Damage:
    def do(files: CrashableFiles) -> None:
        data = bytearray(files.content(path))
        change(data)
        files.put(path, bytes(data))

    return do


def flips(files: CrashableFiles, path: str) -> Iterator[tuple[str, Damage]]:
    """One bit in each part of what is written, chosen by the file's name."""
    used = len(files.content(path).rstrip(b"\0"))
    rng = random.Random(path)
    for part in range(FLIPS if used >= FLIPS else 0):
        at = rng.randrange(used * part // FLIPS, used * (part + 1) // FLIPS)
        bit = 1 << rng.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> None:
            data[at] ^= bit

        yield f"bit {bit} of byte {at} flipped", edit(path, flip)


def neighbour(files: CrashableFiles, path: str) -> str | None:
    directory, _, name = path.rpartition("/")
    others = [n for n in files.names(directory) if n != name and is_file(files, f"{directory}/{n}")]
    return (
        f"{directory}/{min((n for n in others if n > name), default=others[-1])}"
        if others
        else None
    )


def is_file(files: CrashableFiles, path: str) -> bool:
    return not files.names(path) and path in paths_below(files, path.rpartition("/")[0])


def paths_below(files: CrashableFiles, directory: str) -> list[str]:
    found: list[str] = []
    for name in files.names(directory):
        path = f"{directory}/{name}"
        try:
            files.open(path)
        except IsADirectoryError:
            found += paths_below(files, path)
        else:
            found.append(path)
    return found


def damages(files: CrashableFiles, path: str, kind: str) -> Iterator[tuple[str, Damage]]:
    if kind == "flipped":
        yield from flips(files, path)
    elif kind == "swapped":
        other = neighbour(files, path)
        if other is not None:

            def swap(files: CrashableFiles) -> None:
                mine, its = files.content(path), files.content(other)
                files.put(path, its)
                files.put(other, mine)

            yield f"swapped with {other}", swap
    elif kind == "deleted":
        yield kind, lambda files: files.remove(path)
    else:
        size = 0 if kind == "emptied" else len(files.content(path)) // 2
        yield kind, lambda files: files.open(path).truncate(size)


# --- what is seen


def judge(
    whole: View, files: CrashableFiles, path: str, caplog: pytest.LogCaptureFixture
) -> str | None:
    """What is wrong about how this damage is met; None when nothing is."""
    try:
        found = view(files)
    except SluiceError as error:
        is_named = path.rpartition("/")[0] in str(error) and error.cure
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
        path in text or "store repair" in text or "cut off" in text for text in caplog.messages
    ):
        return ", ".join(lost)
    return None


UNSEEN: Final = {
    ("commitlog", "flipped"): ("keys",),  # a property; only enabledAppendPropCRC protects those
    ("consumequeue", "flipped"): ("by_tag",),  # the tag code of a unit
    ("index", "flipped"): ("keys",),  # hashes and chains
    ("index", "swapped"): ("keys",),
    ("config", "flipped"): ("topics", "progress"),  # JSON that reads well, and says another thing
    ("config", "swapped"): ("progress",),  # with the edition before
}
"""(directory, damage): what may be less in silence; `store verify` finds it in units and index."""
NOTHING_KNOWS: Final = f"/store/commitlog/{24_576:020d}"
"""The log's last file, wholly behind the mark: killed before any of it was synced."""


@pytest.mark.parametrize("kind", ["deleted", "truncated", "emptied", "swapped", "flipped"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_no_damage_of_any_file_hides_messages_in_silence(
    killed: bool, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    template = built(killed=killed)
    whole = view(template.kill())
    assert len(whole.pulled) == len(whole.in_bulk) == len(whole.by_tag) == len(whole.keys) == 80
    assert whole.progress == 5
    caplog.set_level(logging.WARNING)
    red, cells = [], 0
    for path in paths_below(template, "/store"):
        for name, damage in damages(template, path, kind):
            files = template.kill()
            damage(files)
            caplog.clear()
            cells += 1
            wrong = judge(whole, files, path, caplog)
            unseen = UNSEEN.get((path.split("/")[2], kind), ())
            if wrong is None or (wrong.startswith(unseen) and "," not in wrong):
                continue
            if killed and kind == "deleted" and path == NOTHING_KNOWS:
                continue
            red.append(f"{path} {name}: {wrong}")
    assert cells > 20
    assert not red, "\n".join(red)
