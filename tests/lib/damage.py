"""A small store over files in memory, and ways to damage each of its files."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Final

from simulation.stepped import SMALL as USUAL
from simulation.stepped import START_MS, ManualClock, SteppedBroker, SteppedClient, send_fields
from sluicemq.testing.files import CrashableFiles

LOG_BYTES, QUEUE_BYTES = 4096, 200
CONFIG: Final = dataclasses.replace(
    USUAL, commit_log_file_bytes=LOG_BYTES, consume_queue_file_bytes=QUEUE_BYTES, index_slots=11,
    index_entries=44,
)  # fmt: skip
MESSAGES: Final = 80
FLIPS: Final = 6


def topic_of(number: int) -> str:
    return "T" if number % 3 else "S"


def send(client: SteppedClient, numbers: range) -> None:
    for number in numbers:
        tag = "ab"[number % 2]
        properties = f"UNIQ_KEY\x01U{number:05d}\x02KEYS\x01k{number}\x02TAGS\x01{tag}\x02"
        fields = send_fields(topic_of(number), properties, e=number // 3 % 2)
        assert client.call(310, fields, b"body %05d " % number * 12).code == 0


def built(*, killed: bool) -> CrashableFiles:
    """Return a store of two topics that has several files of each kind and 80 messages.

    Its checkpoint covers the first 60 of them. `killed` leaves the store as a kill does; otherwise
    it is shut down cleanly.
    """
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


def built_twice(*, killed: bool) -> tuple[CrashableFiles, CrashableFiles]:
    """Return (store, older store): a store of two runs, and the same store after the first run.

    The first run ended cleanly with 60 messages. `killed` is the end of the second one.
    """
    older = CrashableFiles()
    broker = SteppedBroker(store_config=CONFIG, files=older)
    client = broker.connect()
    send(client, range(60))
    broker.core.offsets.commit("G", "T", 0, 3)
    broker.close()
    older = broker.files.kill()
    clock = ManualClock(START_MS + 100_000)
    broker = SteppedBroker(store_config=CONFIG, files=older.kill(), clock=clock)
    client = broker.connect()
    send(client, range(60, MESSAGES))
    broker.core.offsets.commit("G", "T", 0, 5)
    for document in broker.core.documents:
        document.save()
    broker.clock.advance(1.5)
    broker.store.tick()
    if not killed:
        broker.close()
    return broker.files.kill(), older


Damage = Callable[[CrashableFiles], None]
"""Changes the files of a store."""


def edit(path: str, change: Callable[[bytearray], None]) -> Damage:
    """Return a damage that applies `change` to the content of a file."""

    def do(files: CrashableFiles) -> None:
        data = bytearray(files.content(path))
        change(data)
        files.put(path, bytes(data))

    return do


def flips(files: CrashableFiles, path: str) -> Iterator[tuple[str, Damage]]:
    """Yield (name, damage) for one bit in each sixth of the used part of a file.

    The bits are chosen at random, with the path as the seed.
    """
    used = len(files.content(path).rstrip(b"\0"))
    rng = random.Random(path)
    for part in range(FLIPS if used >= FLIPS else 0):
        at = rng.randrange(used * part // FLIPS, used * (part + 1) // FLIPS)
        bit = 1 << rng.randrange(8)

        def flip(data: bytearray, at: int = at, bit: int = bit) -> None:
            data[at] ^= bit

        yield f"bit {bit} of byte {at} flipped", edit(path, flip)


def neighbour(files: CrashableFiles, path: str) -> str | None:
    """Return the next file in the same directory (the last one if there is none), or None."""
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


def swaps(files: CrashableFiles, path: str) -> Iterator[tuple[str, Damage]]:
    """Yield (name, damage) for swapping the contents of a file and its neighbour."""
    other = neighbour(files, path)
    if other is not None:

        def swap(files: CrashableFiles) -> None:
            content, other_content = files.content(path), files.content(other)
            files.put(path, other_content)
            files.put(other, content)

        yield f"swapped with {other}", swap


def damages(
    files: CrashableFiles, path: str, kind: str, older: CrashableFiles | None = None
) -> Iterator[tuple[str, Damage]]:
    """Yield (name, damage) for each damage of one kind to the file at `path`.

    `older` is an older copy of the store, for the kind "older".
    """
    if kind == "older":
        assert older is not None
        if older.exists(path) and older.content(path) != files.content(path):
            content = older.content(path)
            yield "as after the previous run", lambda files: files.put(path, content)
    elif kind == "flipped":
        yield from flips(files, path)
    elif kind == "swapped":
        yield from swaps(files, path)
    elif kind == "zeroed":
        used = len(files.content(path).rstrip(b"\0"))

        def zero(data: bytearray) -> None:
            data[used // 3 : used * 2 // 3] = bytes(used * 2 // 3 - used // 3)

        if used >= 3:
            yield "its middle third zeroed", edit(path, zero)
    elif kind == "deleted":
        yield kind, lambda files: files.remove(path)
    else:
        size = 0 if kind == "emptied" else len(files.content(path)) // 2
        yield kind, lambda files: files.open(path).truncate(size)
