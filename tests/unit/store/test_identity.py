"""Identity files: what a start may believe of a derived file."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from sluicemq.files.identity import (
    NO_RECORD,
    FileState,
    FileVerdict,
    Identity,
    IdentityFile,
    RecordSource,
    content_checksum,
    file_checksum,
    read_identity,
)
from sluicemq.files.incarnation import read_incarnation
from sluicemq.testing.files import CrashableFiles, PowerLost

PATH = "/store/wheel"
RECORDS = (b"\0\0\0\x08abcd", b"\0\0\0\x0aefghij")


def log_of(*records: bytes, start: int = 0) -> RecordSource:
    data = b"".join(records)
    return RecordSource(start, lambda position, size: data[position : position + size])


LOG = log_of(*RECORDS)


@pytest.fixture
def files() -> CrashableFiles:
    files = CrashableFiles()
    files.make_directory("/store")
    files.open(PATH, create=True).pwrite(b"content", 0)
    return files


def sealed(files: CrashableFiles, incarnation: str = "one", position: int = 8) -> None:
    identity = IdentityFile(files, PATH, incarnation)
    identity.mark_open()
    identity.mark_sealed(LOG, position, file_checksum(files, PATH), {"version": 7})


def verdict(
    files: CrashableFiles, log: RecordSource = LOG, incarnation: str = "one"
) -> FileVerdict:
    return IdentityFile(files, PATH, incarnation).check(log, lambda: file_checksum(files, PATH))


def damage(files: CrashableFiles, data: bytes, at: int = 0) -> None:
    files.open(PATH).pwrite(data, at)


Change = Callable[[CrashableFiles], object]
CASES: dict[str, tuple[Change, FileVerdict]] = {
    "nothing": (lambda files: None, FileVerdict.SEALED),
    "opened": (lambda files: IdentityFile(files, PATH, "one").mark_open(), FileVerdict.OPEN),
    "one bit": (lambda files: damage(files, b"contenu"), FileVerdict.CHANGED),
    "zeroed": (lambda files: damage(files, bytes(7)), FileVerdict.CHANGED),
    "truncated": (lambda files: files.open(PATH).truncate(3), FileVerdict.CHANGED),
    "grown by zeros": (lambda files: files.open(PATH).truncate(100), FileVerdict.CHANGED),
    "missing": (lambda files: files.remove(PATH), FileVerdict.CHANGED),
    "no identity": (lambda files: files.remove(f"{PATH}.identity"), FileVerdict.UNKNOWN),
    "torn identity": (
        lambda files: files.open(f"{PATH}.identity").truncate(40),
        FileVerdict.UNKNOWN,
    ),
    "not text": (lambda files: files.put(f"{PATH}.identity", b"\xff\xfe"), FileVerdict.UNKNOWN),
    "no object": (lambda files: files.put(f"{PATH}.identity", b"[1]"), FileVerdict.UNKNOWN),
    "discarded": (
        lambda files: IdentityFile(files, PATH, "one").mark_discarded(),
        FileVerdict.DISCARDED,
    ),
    "another store's": (lambda files: sealed(files, "two"), FileVerdict.FOREIGN),
}


@pytest.mark.parametrize("name", CASES)
def test_a_start_believes_a_sealed_file_that_did_not_change(
    files: CrashableFiles, name: str
) -> None:
    change, wanted = CASES[name]
    sealed(files)
    change(files)
    assert verdict(files) is wanted


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        (LOG, FileVerdict.SEALED),
        (log_of(*RECORDS, b"more"), FileVerdict.SEALED),
        (log_of(RECORDS[0]), FileVerdict.FOREIGN),
        (log_of(RECORDS[0], b"\0\0\0\x0aefghiJ"), FileVerdict.FOREIGN),
        (log_of(RECORDS[0], bytes(100)), FileVerdict.FOREIGN),
        (log_of(bytes(8), bytes(10), start=10), FileVerdict.SEALED),
    ],
    ids=["same", "longer", "cut", "other bytes", "zeros", "removed by retention"],
)
def test_a_file_belongs_to_the_log_from_which_it_was_built(
    files: CrashableFiles, log: RecordSource, wanted: FileVerdict
) -> None:
    sealed(files)
    assert verdict(files, log) is wanted
    identity = IdentityFile(files, PATH, "one")
    identity.check(log, lambda: 0)
    identity.mark_open()
    is_open = wanted is FileVerdict.SEALED
    assert verdict(files, log) is (FileVerdict.OPEN if is_open else wanted), "also after a crash"


def test_every_flipped_bit_of_an_identity_is_noticed(files: CrashableFiles) -> None:
    sealed(files)
    path = f"{PATH}.identity"
    good = files.content(path)
    for at in range(len(good)):
        for bit in (1, 4, 32):
            files.put(path, good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
            found = read_identity(files, PATH)
            assert found is None or found == Identity.from_text(good.decode()), at


def test_opening_again_writes_nothing(files: CrashableFiles) -> None:
    identity = IdentityFile(files, PATH, "one")
    identity.check(LOG, lambda: 0)
    identity.mark_open()
    before = len(files.operations)
    identity.mark_open()
    assert len(files.operations) == before


def test_details_come_back(files: CrashableFiles) -> None:
    sealed(files)
    identity = IdentityFile(files, PATH, "one")
    identity.check(LOG, lambda: file_checksum(files, PATH))
    assert identity.identity is not None
    assert identity.identity.details == {"version": 7}


def test_a_position_without_a_record_is_none(files: CrashableFiles) -> None:
    sealed(files, position=4)
    found = read_identity(files, PATH)
    assert found is not None
    assert (found.position, found.state) == (NO_RECORD, FileState.SEALED)


def test_a_power_loss_leaves_the_old_or_the_new_identity(files: CrashableFiles) -> None:
    sealed(files)
    for directory in ("/store", "/"):
        files.sync_directory(directory)
    for changes in range(7):
        for seed in range(8):
            torn = files.kill()
            torn.power_fails_after = changes
            identity = IdentityFile(torn, PATH, "one")
            identity.check(LOG, lambda: file_checksum(files, PATH))
            try:
                identity.mark_open()
            except PowerLost:
                pass
            else:
                assert read_identity(torn.crash(random.Random(seed)), PATH) == identity.identity
            assert read_identity(torn.crash(random.Random(seed)), PATH) is not None


def test_a_checksum_does_not_depend_on_holes(files: CrashableFiles) -> None:
    size = 5 << 16
    dense, sparse = files.open("/store/a", create=True), files.open("/store/b", create=True)
    for file in (dense, sparse):
        file.truncate(size)
        file.pwrite(b"here", 3 << 16)
    dense.pwrite(bytes(1 << 16), 1 << 16)
    assert content_checksum(dense) == content_checksum(sparse)
    sparse.pwrite(b"here", 2 << 16)
    sparse.pwrite(bytes(4), 3 << 16)
    assert content_checksum(dense) != content_checksum(sparse), "at another place"


def test_a_store_keeps_its_incarnation(bench: Any) -> None:
    found = [bench.open().incarnation.text]
    for kill in (False, True, False):
        bench.send(b"a", b"b")
        found.append(bench.reopen(kill=kill).incarnation.text)
    assert len(set(found)) == 1
    assert read_incarnation(bench.files, "/store") == found[0]


def test_the_record_that_an_identity_names_is_read_from_the_log(bench: Any) -> None:
    store = bench.open()
    places = [place for place, _ in bench.send(*[b"x" * 500] * 20)]
    log = store.record_source
    assert all(log.record_crc(place) is not None for place in places)
    for place in (places[-1] + 4, store.written_offset, 1 << 40):
        assert log.record_crc(place) is None, "no record begins there"
