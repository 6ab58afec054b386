"""Is this a directory that we can work in? Diagnoses before anything is read or changed.

A store is what spec/store.md §1 shows: files and directories by fixed names. What has another kind
than it must have, and stores whose log or queues lie in formats that are not read here (DLedger,
RocksDB), are refused with what to do about it. Everything else in the directory is left alone.
"""

from typing import Final

from sluicemq.config import StoreConfig
from sluicemq.errors import StoreDamagedError, StoreError
from sluicemq.files import Files, cure_of
from sluicemq.store.segments import is_segment_name

LOG: Final = "commitlog"
DLEDGER_PREFIX: Final = "dledger-"
ROCKSDB_QUEUES: Final = "consumequeue_r"
ROCKSDB_FILE: Final = "CURRENT"  # every RocksDB has it


def check_directory(files: Files, config: StoreConfig) -> None:
    """Raises StoreError or StoreDamagedError; OSError for what cannot be looked at."""
    root = config.root
    for name in (config.commit_log_path, config.consume_queue_path, f"{root}/index"):
        _require_directory(files, name)
    _require_directory(files, f"{root}/config")
    for name in files.names(root):
        if name.startswith(DLEDGER_PREFIX) and files.names(f"{root}/{name}"):
            raise StoreError(
                f"{root}/{name} is a log of DLedger (enableDLegerCommitLog), which is not read"
                " here.",
                cure="Copy the topics into a plain broker with RocketMQ's tools, or give this"
                " broker a storePathRootDir of its own.",
            )
    if files.names(f"{root}/{ROCKSDB_QUEUES}"):
        raise StoreError(
            f"{root}/{ROCKSDB_QUEUES} says that RocketMQ keeps the queues of this store in RocksDB"
            " (storeType=defaultRocksDB), which is not read here.",
            cure="Move that directory away: the queues are then built from the commit log.",
        )
    for name in files.names(f"{root}/config"):
        if ROCKSDB_FILE in files.names(f"{root}/config/{name}"):
            raise StoreError(
                f"{root}/config/{name} is a table in RocksDB, which is not read here.",
                cure="Export it with `mqadmin rocksDBConfigToJson`, then move the directory away.",
            )


def _require_directory(files: Files, path: str) -> None:
    if not files.exists(path) or files.names(path):
        return
    try:
        files.open(path).close()
    except IsADirectoryError:
        return
    raise StoreDamagedError(
        f"{path} is a file, and must be a directory.",
        cure="Move it away, and bring the directory back from a copy if there was one.",
    )


def no_store(files: Files, root: str, log_paths: str, option: str) -> StoreError:
    """The error for a directory without a commit log; `option` says where the log lies."""
    if not files.exists(root):
        return StoreError(f"{root} does not exist.", cure="Name the directory of a store.")
    if any(is_segment_name(name) for name in files.names(root)):
        return StoreError(
            f"{root} holds the files of one part of a store.",
            cure="Name the directory above it (the one that storePathRootDir says).",
        )
    if files.exists(f"{root}/store/{LOG}"):
        return StoreError(f"{root} is no store.", cure=f"Name {root}/store: that one is.")
    if files.exists(f"{root}/{ROCKSDB_QUEUES}"):
        return StoreError(
            f"{root} keeps its queues in RocksDB (storeType=defaultRocksDB) and has no commit log"
            " here.",
            cure=f"Name the log with {option}; queues in RocksDB cannot be read.",
        )
    return StoreError(
        f"{log_paths} holds no commit log.",
        cure="Name the directory that storePathRootDir says (it holds commitlog), and with"
        f" {option} the one that storePathCommitLog says when the log lies elsewhere.",
    )


def cannot_open(root: str, error: OSError) -> StoreError:
    """The error of the system as one of the store: path, reason, cure."""
    return StoreError(
        f"The store in {root} cannot be opened: {error.strerror or error}"
        f"{f' ({error.filename})' if error.filename else ''}.",
        cure=cure_of(error),
    )
