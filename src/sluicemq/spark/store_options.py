"""The options of the source `rocketmq_store`: where the store is, and what `rocketmq` has as well.

What both have is declared once, in `options`, and means the same; only `path` is the directory here
and no second name of `topic`.
"""

from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote, urlsplit

from sluicemq.spark.options import OPTIONS, READ, Option, by_name
from sluicemq.spark.values import boolean, text

_SHARED: Final = (
    "topic", "topics", "topicsPattern", "filter.tags", "filter.sql", "columns", "inferMessages",
    "bodyFormat", "bodySchema", "badBody", "properties", "badProperties", "startingOffsets",
    "endingOffsets", "startingTimestamp", "endingTimestamp", "minPartitions",
    "maxRecordsPerPartition", "failOnDataLoss", "predicates", "pushFilters", "reportPushdown",
)  # fmt: skip


def directory(value: str) -> str:
    """A path of this machine, also as `file:/…`. Raises ValueError."""
    given = text(value)
    parts = urlsplit(given)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError("it names a machine; write file:///path")
        given = unquote(parts.path)
    elif "://" in given:
        raise ValueError(
            "files are mapped, so the store has to lie in a directory that driver and executors"
            " see (local, NFS …); mount it, or copy the store"
        )
    return str(PurePosixPath(given))


def log_directory(value: str) -> str:
    """As `directory`; RocketMQ can spread its log over several. Raises ValueError."""
    if "," in value:
        raise ValueError("logs in several directories are not read; bring the files into one")
    return directory(value)


_READ_ONLY: Final = frozenset({READ})
STORE_ONLY: Final[tuple[Option, ...]] = (
    Option(
        "path", directory, None, _READ_ONLY,
        "The directory of the store (storePathRootDir): a broker's own or a copy, seen by driver "
        "and executors under this name.",
    ),
    Option(
        "commitLogPath", log_directory, None, _READ_ONLY,
        "Where the log lies when it is not in `path` (storePathCommitLog).",
    ),
    Option(
        "consumeQueuePath", directory, None, _READ_ONLY,
        "Where the queues lie when they are not in `path` (storePathConsumeQueue).",
    ),
    Option(
        "brokerName", text, None, _READ_ONLY,
        "What the column `broker` says, and the offsets of `startingOffsets` and `endingOffsets` "
        "go by. Without it the name of the directory.",
    ),
    Option(
        "checkBodies", boolean, False, _READ_ONLY,
        "Compare every body with its checksum, about 2 µs a message. What leads to a message is "
        "compared in any case.",
    ),
)  # fmt: skip
"""The options that only this source has."""
STORE_OPTIONS: Final[tuple[Option, ...]] = (
    *STORE_ONLY,
    *(
        replace(option, aliases=tuple(name for name in option.aliases if name != "path"))
        for option in OPTIONS
        if option.name in _SHARED
    ),
)
DECLARED: Final = by_name(STORE_OPTIONS)
