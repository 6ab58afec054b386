"""A slave's files are those of its master at some moment, whatever fails meanwhile."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.broker.replication import state_log
from sluicemq.broker.replication.state_applier import StateApplier
from sluicemq.broker.replication.state_log import (
    Operation,
    OperationKind,
    RecordingFiles,
    ReplicatedPaths,
    StateLog,
    decode_operations,
    encode_operations,
)
from sluicemq.errors import ProtocolError
from sluicemq.files import overwrite_text, replace_text
from sluicemq.testing.files import CrashableFiles, PowerLost

MASTER = ReplicatedPaths({"config": "/m/config", "acl/main": "/etc/m/plain_acl.yml"})
SLAVE = ReplicatedPaths({"config": "/s/config", "acl/main": "/etc/s/rules.yml"})


class Pair:
    """The files of a master, and those of a slave that copies them."""

    def __init__(self) -> None:
        self.master = CrashableFiles()
        self.master.make_directory("/m/config")
        self.slave = CrashableFiles()
        self.state_log = StateLog(MASTER, run_id="one")
        self.files = RecordingFiles(self.master, self.state_log)
        self.units: list[tuple[str, int, int, bytes]] = []
        self.start()

    def start(self) -> None:
        """Start the slave's process."""
        self.applier = StateApplier(self.slave, SLAVE, lambda *unit: self.units.append(unit))
        self.applier.finish_snapshot()

    def ask(self, log_end: int = 1 << 62) -> bool:
        """Send one request. Return False if there were no new operations."""
        applier, state_log = self.applier, self.state_log
        state_log.record_progress(1, applier.run_id, applier.applied_number, 0.0)
        found = state_log.operations_after(applier.run_id, applier.applied_number)
        if found is None:
            found = state_log.make_snapshot(self.master)
        applier.enqueue(state_log.run_id, decode_operations(encode_operations(found)))
        applier.apply(log_end)
        return bool(found)

    def follow(self) -> None:
        while self.ask():
            pass

    def contents(self, files: CrashableFiles, places: ReplicatedPaths) -> dict[str, bytes]:
        return {name: files.content(path) for name, path in places.find_files(files)}

    @property
    def is_same(self) -> bool:
        return self.contents(self.master, MASTER) == self.contents(self.slave, SLAVE)


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_snapshot_and_what_comes_after_it(pair: Pair) -> None:
    replace_text(pair.files, "/m/config/topics.json", "one")
    overwrite_text(pair.files, "/etc/m/plain_acl.yml", "accounts: []")
    pair.slave.put("/s/config/old.json", b"of another master")
    pair.follow()
    assert pair.is_same
    assert pair.slave.content("/etc/s/rules.yml") == b"accounts: []"
    assert pair.slave.access("/etc/s/rules.yml").mode == 0o600
    replace_text(pair.files, "/m/config/topics.json", "two")
    journal = pair.files.open("/m/config/topics.json.journal-1", create=True)
    journal.pwrite(b"three\n", 0)
    assert not pair.is_same
    pair.follow()
    assert pair.is_same
    assert pair.slave.content("/s/config/topics.json.bak") == b"one"
    pair.files.remove("/m/config/topics.json.journal-1")
    pair.follow()
    assert pair.is_same


def test_files_of_the_replica_itself_stay(pair: Pair) -> None:
    pair.slave.put("/s/config/sluiceReplicas.json", b"mine")
    replace_text(pair.files, "/m/config/sluiceReplicas.json", "master's")
    replace_text(pair.files, "/m/config/topics.json", "one")
    pair.follow()
    assert pair.slave.content("/s/config/sluiceReplicas.json") == b"mine"


def test_an_operation_waits_for_the_log(pair: Pair) -> None:
    pair.follow()
    pair.state_log.log_end = lambda: 100
    replace_text(pair.files, "/m/config/consumerOffset.json", "{}")
    pair.ask(log_end=99)
    assert pair.applier.next_log_end == 100
    assert not pair.slave.exists("/s/config/consumerOffset.json")
    assert pair.state_log.acked_number(1) < pair.state_log.last_number
    pair.applier.apply(100)
    assert pair.is_same
    pair.ask(100)
    assert pair.state_log.acked_number(1) == pair.state_log.last_number


def test_a_snapshot_waits_for_the_log_as_a_whole(pair: Pair) -> None:
    replace_text(pair.files, "/m/config/topics.json", "one")
    pair.state_log.log_end = lambda: 100
    pair.ask(log_end=99)
    assert not pair.applier.has_snapshot
    assert not pair.slave.exists("/s/config/topics.json")
    pair.applier.apply(100)
    assert pair.applier.has_snapshot
    assert pair.is_same


def test_a_slave_that_is_too_far_behind_gets_a_snapshot(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_log, "RETAINED_BYTES_MAX", 1000)
    pair.follow()
    for number in range(10):
        replace_text(pair.files, "/m/config/topics.json", f"{number}" * 300)
    assert pair.state_log.operations_after("one", pair.applier.applied_number) is None
    pair.follow()
    assert pair.is_same


def test_a_snapshot_of_many_answers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_log, "ANSWER_BYTES", 100)
    monkeypatch.setattr(state_log, "CHUNK_BYTES", 30)
    for number in range(5):
        replace_text(pair.files, f"/m/config/{number}.json", f"{number}" * 100)
    asked = 0
    while pair.ask():
        asked += 1
        replace_text(pair.files, "/m/config/topics.json", f"{asked}")  # goes on meanwhile
        if asked == 40:
            break
    assert asked > 3
    pair.follow()
    assert pair.is_same


def test_numbers_of_another_run_do_not_count(pair: Pair) -> None:
    replace_text(pair.files, "/m/config/topics.json", "one")
    pair.follow()
    pair.state_log = StateLog(MASTER, run_id="two")
    pair.files = RecordingFiles(pair.master, pair.state_log)
    replace_text(pair.files, "/m/config/topics.json", "two")
    assert pair.state_log.acked_number(1) == -1
    pair.state_log.record_progress(1, pair.applier.run_id, pair.applier.applied_number, 0.0)
    assert pair.state_log.acked_number(1) == -1
    pair.follow()
    assert pair.is_same
    assert pair.state_log.acked_number(1) == pair.state_log.last_number


def test_waiting_functions_are_called_when_all_slaves_have_the_operation(pair: Pair) -> None:
    pair.follow()
    said: list[str] = []
    pair.state_log.call_when_replicated(lambda: [1], lambda: said.append("nothing has happened"))
    replace_text(pair.files, "/m/config/topics.json", "two")
    pair.state_log.call_when_replicated(lambda: [1], lambda: said.append("kept"))
    pair.state_log.call_when_replicated(tuple, lambda: said.append("nobody to wait for"))
    assert said == ["nothing has happened", "nobody to wait for"]
    pair.follow()
    assert said[2:] == ["kept"]


def test_a_long_poll_is_woken(pair: Pair) -> None:
    pair.follow()
    woken: list[int] = []
    pair.state_log.call_when_recorded(pair.state_log.last_number + 1, lambda: woken.append(1))
    assert not woken
    replace_text(pair.files, "/m/config/topics.json", "two")
    assert woken


def test_units_of_a_snapshot_are_passed_on(pair: Pair) -> None:
    pair.state_log.expired_queues = lambda: [("T/x", 3, 7, b"u" * 20)]
    pair.follow()
    assert pair.units == [("T/x", 3, 7, b"u" * 20)]


def test_edited_access_rules_are_recorded(pair: Pair) -> None:
    pair.master.put("/etc/m/plain_acl.yml", b"one")
    pair.follow()
    pair.state_log.record_edits(pair.master)
    pair.master.put("/etc/m/plain_acl.yml", b"two")
    pair.state_log.record_edits(pair.master)
    pair.follow()
    assert pair.is_same
    number = pair.state_log.last_number
    pair.state_log.record_edits(pair.master)
    assert pair.state_log.last_number == number
    pair.master.remove("/etc/m/plain_acl.yml")
    pair.state_log.record_edits(pair.master)
    pair.follow()
    assert pair.is_same


def test_a_snapshot_is_requested_after_a_disk_error(pair: Pair) -> None:
    pair.follow()
    replace_text(pair.files, "/m/config/topics.json", "one")
    pair.slave.fail_next("rename")
    with pytest.raises(OSError, match="error"):
        pair.follow()
    assert not pair.applier.has_snapshot
    pair.follow()
    assert pair.is_same


@pytest.mark.parametrize("name", ["config/../../etc/passwd", "etc/passwd", "configs/x"])
def test_a_name_of_another_file_is_refused(name: str) -> None:
    with pytest.raises(ProtocolError, match="not the name of a replicated file"):
        SLAVE.path_of(name)


OPERATIONS = st.builds(
    Operation, st.integers(0, 2**62), st.integers(0, 2**62), st.sampled_from(OperationKind),
    st.text(max_size=20), st.integers(0, 2**62), st.binary(max_size=50),
)  # fmt: skip


@given(st.lists(OPERATIONS, max_size=5), st.integers(1, 30))
def test_operations_round_trip(operations: list[Operation], cut: int) -> None:
    data = encode_operations(operations)
    assert decode_operations(data) == operations
    if operations:
        with pytest.raises(ProtocolError):
            decode_operations(data[:-cut] if cut < len(data) else b"\0")


def _changes(rng: random.Random) -> Iterator[tuple[str, str]]:
    for number in range(rng.randint(1, 12)):
        kind = rng.choice(["table", "journal", "rules", "remove"])
        yield kind, f"{kind} {number} " + "x" * rng.randint(0, 40)


@given(st.integers(0, 2**32), st.integers(0, 60))
def test_a_slave_killed_at_any_moment_has_the_files_of_one_moment(
    seed: int, fails_after: int
) -> None:
    """Every moment of the master is kept; what the slave has after its death is one of them, and
    not older than what it has said to have."""
    rng, pair = random.Random(seed), Pair()
    moments = [pair.contents(pair.master, MASTER)]
    said = -1

    class ObservedLog(StateLog):
        def record(
            self, kind: OperationKind, name: str, offset: int = 0, data: bytes = b""
        ) -> None:
            super().record(kind, name, offset, data)
            moments.append(pair.contents(pair.master, MASTER))

    pair.state_log = ObservedLog(MASTER, run_id="one")
    pair.files = RecordingFiles(pair.master, pair.state_log)
    if rng.random() < 0.5:
        pair.ask()
    pair.slave.power_fails_after = fails_after
    journal = pair.files.open("/m/config/topics.json.journal-1", create=True)
    try:
        for kind, text in _changes(rng):
            if kind == "table":
                replace_text(pair.files, "/m/config/topics.json", text)
            elif kind == "rules":
                overwrite_text(pair.files, "/etc/m/plain_acl.yml", text)
            elif kind == "journal":
                journal.pwrite(text.encode(), journal.size())
            elif pair.master.exists("/m/config/topics.json.bak"):
                pair.files.remove("/m/config/topics.json.bak")
            if rng.random() < 0.6:
                pair.ask()
                said = pair.state_log.acked_number(1)
    except PowerLost:
        pass
    pair.slave.power_fails_after = None
    pair.slave = pair.slave.kill()
    pair.start()
    found = pair.contents(pair.slave, SLAVE)
    found = {name: data for name, data in found.items() if not name.endswith(".new")}
    assert found in moments[max(said, 0) :] or (said < 0 and not found)
    pair.follow()
    assert pair.is_same
