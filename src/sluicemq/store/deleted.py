"""Topics that were deleted, and up to where in the log their records do not count any more.

The records of a deleted topic stay in the log until its files go. A recovery that builds queues
from the log would bring the topic back, so it asks here first. The entry is durable before the
first queue file is removed: a deletion that a crash interrupts is finished at the next start. A
topic that is made again begins behind its entry; so the log is on disk up to there before the entry
is, and where a damaged log ends before it, the entry is cut back.

The file is ours alone (RocketMQ does not look at it, and after a crash brings such topics back):
`config/deletedTopics.json`, an object of topic -> position in the log.
"""

import json
import logging

from sluicemq.errors import StoreDamagedError
from sluicemq.files import Files, load_text, replace_text

logger = logging.getLogger(__name__)


class DeletedTopics:
    """topic -> records before this position of the log do not count."""

    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self.ends: dict[str, int] = {}

    def load(self) -> None:
        """A file that cannot be read is no reason not to start: a topic may come back."""
        try:
            self.ends = load_text(self._files, self._path, _parse) or {}
        except StoreDamagedError as error:
            logger.warning("%s Deleted topics may come back.", error.fact)

    def add(self, topic: str, end: int, log_start: int) -> None:
        """Durable on return. Entries that the log has left behind go. Raises OSError."""
        kept = {name: position for name, position in self.ends.items() if position > log_start}
        self.ends = kept | {topic: end}
        replace_text(self._files, self._path, json.dumps(self.ends, indent=1))

    def cut(self, end: int) -> None:
        """The log ends here: what is written from now on counts. Raises OSError."""
        if any(position > end for position in self.ends.values()):
            self.ends = {name: min(position, end) for name, position in self.ends.items()}
            replace_text(self._files, self._path, json.dumps(self.ends, indent=1))

    def counts(self, topic: str, position: int) -> bool:
        """Whether a record of the topic at this position of the log still counts."""
        return position >= self.ends.get(topic, 0)


def _parse(text: str) -> dict[str, int]:
    values = json.loads(text)
    if not isinstance(values, dict):
        raise TypeError("no object of topics")
    return {str(topic): int(end) for topic, end in values.items()}
