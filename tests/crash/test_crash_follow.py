"""A follower over crashable files: power losses and kills at any step of appending, dispatching and
truncating, masters that change and go on from a place between what is confirmed and the follower's
end. At all times the follower holds a prefix of a master's log, shows what is confirmed and nothing
more, and in the end it has what the last master has: log and queues byte for byte, and each key.

A failure names its seed. The planted bugs at the end show that these tests can fail.
"""

import os
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from simulation.stepped import ManualClock
from sluicemq.config import StoreConfig
from sluicemq.errors import SluiceError
from sluicemq.record.codec import decode_records, encode_properties
from sluicemq.store.follow import LogFollower
from sluicemq.store.index.index import KeyIndex
from sluicemq.store.log import CommitLog
from sluicemq.store.queues import ConsumeQueues
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles, PowerLost

SEEDS = int(os.environ.get("SLUICEMQ_EXAMPLES", "60"))
HOST = bytes(8)
STEPS = [*("send", "dispatch") * 2, *("feed",) * 3, "tick", "stop", "turn"]
KEYS = [(topic, queue_id) for topic in "TU" for queue_id in range(2)]


class Written(NamedTuple):
    """A message as the master has it."""

    place: int
    end: int
    key: tuple[str, int]
    body: bytes
    word: str


def config_of(rng: random.Random) -> StoreConfig:
    return StoreConfig(
        root="/store", commit_log_file_bytes=2048, consume_queue_file_bytes=400,
        index_slots=rng.choice([1, 7, 50]), index_entries=rng.choice([5, 40, 400]),
        flush_sync=rng.random() < 0.3,
    )  # fmt: skip


class Master:
    """A store that writes, after the log of the master before."""

    def __init__(self, config: StoreConfig, clock: ManualClock, log: bytes, sent: list[Written]):
        self.files = CrashableFiles()
        self.clock = clock
        self.store = Store.open(config, files=self.files, clock=clock)
        if log:
            following = self.store.start_following()
            following.append(0, log)
            self.store.close()
            self.store = Store.open(config, files=self.files, clock=clock)
            assert self.store.written_offset == len(log)
        self.sent = sent

    def send(self, rng: random.Random) -> None:
        turn = []
        for _ in range(rng.randint(1, 12)):
            topic, queue_id = rng.choice(KEYS)
            word = f"k{rng.randrange(10**6)}" if rng.random() < 0.6 else ""
            body = rng.randbytes(rng.choice([0, 3, 50, 900]))
            place, _ = self.store.writer.append(
                topic, queue_id, body, encode_properties({"KEYS": word} if word else {}), 0, 0, 0,
                1, HOST, HOST,
            )  # fmt: skip
            turn.append((place, (topic, queue_id), body, word))
        self.store.commit()
        for place, *rest in turn:
            record = self.store._log.find_record(place)
            assert record is not None
            self.sent.append(Written(place, record.end, *rest))
        self.clock.advance(0.01)

    def log(self, end: int) -> bytes:
        data = b""
        while len(data) < end:
            data += self.store.view_log(len(data), end - len(data))
        return data


class Machine:
    """A follower on a disk that crashes, and whoever is its master."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.config = config_of(self.rng)
        self.files = CrashableFiles()
        self.master = Master(self.config, self.clock, b"", [])
        self.confirmed = 0
        # A power loss keeps or drops each write on its own here, a disk does so with sectors:
        # writes that are smaller than a record are for kills.
        self.only_killed = self.rng.random() < 0.4
        self.pieces = [1, 70, 3000] if self.only_killed else [1200, 3000]
        self.open()

    def open(self) -> None:
        self.store = Store.open(
            self.config, files=self.files, clock=self.clock, confirmed=self.confirmed
        )
        self.following = self.store.start_following()
        self.check(is_dispatched=True)
        self.agree()

    def agree(self) -> None:
        """Truncate to where the logs part."""
        end = min(self.following.end, self.master.store.written_offset)
        mine = b""
        while len(mine) < end:
            mine += self.store.view_log(len(mine), end - len(mine))
        theirs = self.master.log(end)
        same = next((at for at in range(end) if mine[at] != theirs[at]), end)
        place = max(at for at in self.ends() if at <= same)
        goal = min(self.confirmed, self.following.end)
        assert not any(place < at <= goal for at in self.ends()), (place, self.confirmed)
        if same < self.following.end:
            self.following.truncate(place)
            assert self.following.end in (place, same)

    def ends(self) -> list[int]:
        """Where the master's log may be cut."""
        skip = self.master.store._log.skip_blank
        return [0, *(at for one in self.master.sent for at in {one.end, skip(one.end)})]

    def step(self) -> None:
        rng = self.rng
        match rng.choice(
            ["send", "send", "feed", "feed", "feed", "dispatch", "dispatch", "tick", "stop", "turn"]
        ):
            case "send":
                self.master.send(rng)
            case "feed":
                for _ in range(rng.randint(1, 5)):
                    data = self.master.store.view_log(self.following.end, rng.choice(self.pieces))
                    self.following.append(self.following.end, data)
            case "dispatch":
                self.confirmed = max(
                    self.confirmed, self.following.end - rng.choice([0, 0, 40, 500, 3000])
                )
                self.following.dispatch(self.confirmed)
                self.check(is_dispatched=True)
            case "tick":
                self.clock.advance(rng.choice([0.3, 11, 61]))
                if self.store.tick() or rng.random() < 0.7:
                    self.store.sync()
                self.store.keys.catch_up(rng.choice([0, 300, 5000, 1 << 20]))
            case "stop":
                self.store.close()
                self.open()
            case "turn":
                self.change_master()
        self.check()

    def change_master(self) -> None:
        """Another one, which has what is confirmed and maybe more, goes on."""
        places = [at for at in self.ends() if at >= self.confirmed]
        if places:
            place = self.rng.choice(places)
            sent = [one for one in self.master.sent if one.end <= place]
            self.master = Master(self.config, self.clock, self.master.log(place), sent)
            self.master.send(self.rng)
            self.agree()

    def check(self, *, is_dispatched: bool = False) -> None:
        """What is confirmed and here is visible (when it was dispatched), and nothing else."""
        goal = min(self.confirmed, self.following.end)
        expected = [one for one in self.master.sent if one.end <= goal]
        for key in KEYS:
            bodies = [one.body for one in expected if one.key == key]
            low, high = self.store.queue_offsets(*key)
            found: list[bytes] = []
            while low + len(found) < high:
                result = self.store.reader.read(*key, low + len(found), 1000, 1 << 20)
                assert result.count
                found += [m.raw_body for m in decode_records(b"".join(result.data))]
            assert found == (bodies if is_dispatched else bodies[: len(found)]), key

    def crash(self) -> None:
        is_killed = self.only_killed or self.rng.random() < 0.3
        self.files = self.files.kill() if is_killed else self.files.crash(self.rng)
        self.open()

    def run(self) -> None:
        for _ in range(self.rng.randint(1, 4)):
            self.files.power_fails_after = self.rng.choice([3, 10, 30, 100, 300])
            try:
                for _ in range(40):
                    self.step()
            except PowerLost:
                pass
            self.files.power_fails_after = None
            self.crash()
        self.finish()

    def finish(self) -> None:
        end = self.master.store.written_offset
        while self.following.end < end:
            self.following.append(
                self.following.end, self.master.store.view_log(self.following.end, 500)
            )
        self.confirmed = end
        self.following.dispatch(end)
        self.check(is_dispatched=True)
        assert self.store.reader.visible_end == end
        for one in self.master.sent:
            if one.word:
                found = self.store.keys.find(one.key[0], one.word, 32, 0, 1 << 60)
                assert found is not None
                assert len(found.records) == 1, one
        self.store.close()
        self.master.store.close()
        for part in ("commitlog", "consumequeue"):
            mine, theirs = below(self.files, part), below(self.master.files, part)
            for path, data in theirs.items():
                assert mine.pop(path, b"") == data, path
            assert not any(any(data) for data in mine.values())


def below(files: CrashableFiles, part: str) -> dict[str, bytes]:
    def paths(path: str) -> list[str]:
        names = files.names(path)
        return [path] if not names else [found for n in names for found in paths(f"{path}/{n}")]

    return {path: files.content(path) for path in paths(f"/store/{part}") if files.exists(path)}


def crash_everywhere(seeds: int) -> None:
    for seed in range(seeds):
        try:
            Machine(seed).run()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_after_any_crash_a_follower_is_a_prefix_of_its_master_and_becomes_it() -> None:
    crash_everywhere(SEEDS)


# --- these tests can fail


def queues_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ConsumeQueues, "truncate_to_log", lambda *_: None)


def index_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyIndex, "truncate", lambda *_: None)


def log_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(log: CommitLog, end: int) -> None:
        log.written_offset, log.synced_offset = end, min(log.synced_offset, end)

    monkeypatch.setattr(CommitLog, "truncate", cut)


def mark_is_not_set_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mark goes on speaking of what is cut."""
    original = Store.cut_log

    def cut_log(store: Store, end: int) -> None:
        file = store._checkpoints.file
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(file, "write", lambda _checkpoint: None)
            original(store, end)

    monkeypatch.setattr(Store, "cut_log", cut_log)


def unconfirmed_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[..., None] = LogFollower.dispatch
    monkeypatch.setattr(LogFollower, "dispatch", lambda f, _end: original(f, None))


def found_tail_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Store, "hide_unconfirmed", lambda *_: None)


def bytes_are_taken_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted master's bytes are written without looking where they belong."""
    original: Callable[..., None] = LogFollower.append
    monkeypatch.setattr(LogFollower, "append", lambda f, _at, data: original(f, f.end, data[1:]))


@pytest.mark.parametrize(
    "plant",
    [
        queues_are_not_cut, index_is_not_cut, log_is_not_cut, mark_is_not_set_back,
        unconfirmed_is_shown, found_tail_is_shown, bytes_are_taken_anywhere,
    ],
)  # fmt: skip
def test_planted_bug_is_found(
    plant: Callable[[pytest.MonkeyPatch], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, SluiceError, IndexError)):
        crash_everywhere(200)
