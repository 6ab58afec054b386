"""What size the files of a store have: for who opens a store that he knows nothing of.

All files of a kind have one size (spec/store.md §1), which the broker that wrote them was told by
mappedFileSizeCommitLog, mappedFileSizeConsumeQueue and mappedFileSizeTimerLog. A copy of the store
alone does not say.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreError
from sluicemq.files import Files
from sluicemq.store.segments import is_segment_name

QUEUE_FILES_MAX = 64
"""So many files of queues are asked: a large store has tens of thousands."""


def fit_sizes(config: StoreConfig, files: Files) -> StoreConfig:
    """`config` with the sizes of the files that are there.

    Where files differ the most frequent size counts: opening the store then names the odd one.
    Raises StoreError when `config.root` holds no store.
    """
    log = config.commit_log_path
    if not any(is_segment_name(name) for name in files.names(log)):
        raise _no_store(config.root, log, files)
    queue_files = _queue_files(files, config.consume_queue_path)
    return replace(
        config,
        commit_log_file_bytes=_size(files, _segments(files, log), config.commit_log_file_bytes),
        consume_queue_file_bytes=_size(files, queue_files, config.consume_queue_file_bytes),
        timer_log_file_bytes=_size(
            files, _segments(files, f"{config.root}/timerlog"), config.timer_log_file_bytes
        ),
    )


def _segments(files: Files, directory: str) -> Iterator[str]:
    return (f"{directory}/{name}" for name in files.names(directory) if is_segment_name(name))


def _queue_files(files: Files, directory: str) -> Iterator[str]:
    left = QUEUE_FILES_MAX
    for topic in files.names(directory):
        for queue in files.names(f"{directory}/{topic}"):
            for path in _segments(files, f"{directory}/{topic}/{queue}"):
                yield path
                left -= 1
                if not left:
                    return


def _size(files: Files, paths: Iterable[str], configured: int) -> int:
    sizes: Counter[int] = Counter()
    for path in paths:
        with closing(files.open(path)) as file:
            sizes[file.size()] += 1
    del sizes[0]  # the trace of a crash at the file's creation
    if not sizes or configured in sizes:
        return configured
    return sizes.most_common(1)[0][0]


def _no_store(root: str, log: str, files: Files) -> StoreError:
    names = files.names(root)
    inner = [name for name in names if files.names(f"{root}/{name}/commitlog")]
    if inner:
        cure = f"The store is in {root}/{inner[0]}: name that directory."
    elif files.exists(root):
        cure = "Name the directory that holds commitlog, consumequeue and config."
    else:
        cure = "That directory does not exist: check the path."
    return StoreError(f"{root} is not a message store: there is no log file in {log}.", cure=cure)
