"""The sizes of a store's files are found where nobody tells them."""

import pytest

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.store.directory import QUEUE_FILES_MAX, detect_file_sizes
from sluicemq.testing.files import CrashableFiles

CONFIG = StoreConfig(root="/s")
LOG = "/s/commitlog/%020d"
QUEUE = "/s/consumequeue/T/0/%020d"


def files_of(*logs: int, queues: tuple[int, ...] = ()) -> CrashableFiles:
    """Log files of these sizes, and files of one queue."""
    files = CrashableFiles()
    for number, size in enumerate(logs):
        files.put(LOG % (number * 8192), bytes(size))
    for number, size in enumerate(queues):
        files.put(QUEUE % (number * 400), bytes(size))
    return files


def sizes(files: CrashableFiles, config: StoreConfig = CONFIG) -> tuple[int, int]:
    fitting = detect_file_sizes(config, files)
    return fitting.commit_log_file_bytes, fitting.consume_queue_file_bytes


def test_sizes_are_those_of_the_files() -> None:
    assert sizes(files_of(8192, 8192, queues=(400,))) == (8192, 400)


def test_without_queue_files_the_configured_size_stays() -> None:
    assert sizes(files_of(8192)) == (8192, 6_000_000)


def test_an_empty_last_file_does_not_count() -> None:
    assert sizes(files_of(8192, 0, queues=(400, 0))) == (8192, 400)


def test_the_odd_file_does_not_decide_unless_it_is_as_configured() -> None:
    files = files_of(8192, 8192, 5000)
    assert sizes(files)[0] == 8192
    assert sizes(files, StoreConfig(root="/s", commit_log_file_bytes=5000))[0] == 5000


def test_other_names_beside_the_files_do_not_count() -> None:
    files = files_of(8192)
    files.put("/s/commitlog/backup.tar", bytes(77))
    assert sizes(files)[0] == 8192


def test_a_store_of_many_queues_is_not_read_whole() -> None:
    files = files_of(8192)
    for number in range(QUEUE_FILES_MAX * 2):
        files.put(f"/s/consumequeue/T{number}/0/{0:020d}", bytes(400))
    opened = []
    plain = files.open
    files.open = lambda path, **rest: opened.append(path) or plain(path, **rest)  # type: ignore
    assert sizes(files)[1] == 400
    assert len(opened) <= QUEUE_FILES_MAX + 1


def test_a_directory_without_log_files_is_no_store() -> None:
    files = CrashableFiles()
    files.put("/s/consumequeue/T/0/x", b"")
    with pytest.raises(StoreError, match="/s is not a message store"):
        detect_file_sizes(CONFIG, files)
