"""Every file of a store, damaged in every way, after a stop in order and after a kill.

A start over it, and readers after it, may do three things: show every message that was there, with
the same bytes at the same offsets (mended from the log); refuse, naming the path and the cure; or
pass over a message whose record is spoilt in the log, and say so with the cure. Never show less and
say nothing, never end in a traceback.

What nobody can see, since RocketMQ's format keeps no checksum of it, stands in `UNSEEN`.
"""

import logging
from typing import Any, Final, NamedTuple

import pytest

from damage import CONFIG, MESSAGES, built, damages, paths_below, topic_of
from simulation.stepped import START_MS, ManualClock, SteppedBroker
from sluicemq.errors import SluiceError
from sluicemq.filter.subscriptions import TagFilter, subscribe
from sluicemq.record.codec import decode_records
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
