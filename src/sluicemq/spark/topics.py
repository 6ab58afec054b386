"""Which topics are read: one by name, a list, or all whose name matches a pattern.

A pattern is matched against the whole name. It finds what users made: retry and dead-letter topics
only when it says so by its first character (`%DLQ%.*`), system topics never. A stream asks again at
each trigger, so a topic that is made while it runs is read, from its first message; topics of a
list that the checkpoint does not know yet likewise.
"""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Final

from sluicemq.client.sync.admin import Admin
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX
from sluicemq.spark.options import Options

_WAYS: Final = ("topic", "topics", "topicsPattern")
_SYSTEM: Final = frozenset({
    "TBW102", "SCHEDULE_TOPIC_XXXX", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT", "BenchmarkTest",
    "CHECKPOINT_TOPIC", "TRANS_CHECK_MAX_TIME_TOPIC",
})  # fmt: skip
_SYSTEM_PREFIXES: Final = ("rmq_sys_", "RMQ_SYS_")


@dataclass(frozen=True, slots=True)
class Topics:
    """Names, or (with `pattern`) the names that match. `label` is how messages call them."""

    names: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def label(self) -> str:
        return ",".join(self.names) if self.pattern is None else f"pattern {self.pattern}"

    def has(self, topic: str) -> bool:
        """Whether a topic of this name is read."""
        if self.pattern is None:
            return topic in self.names
        return re.fullmatch(self.pattern, topic) is not None

    def found(self, admin: Admin) -> Sequence[str]:
        """The topics there are now; names are taken as they stand. Raises ConfigurationError when
        nothing matches the pattern."""
        if self.pattern is None:
            return self.names
        info = admin.cluster_info()
        return self.matching(admin.topics(), {*info.brokers, *info.clusters})

    def matching(self, topics: Iterable[str], own: Set[str] = frozenset()) -> Sequence[str]:
        """Those of `topics` that the pattern finds; `own` are names that a cluster made. Raises
        ConfigurationError when there is none."""
        names = [one for one in topics if one not in _SYSTEM | own and self._may_match(one)]
        matching = [name for name in names if self.has(name)]
        if not matching:
            raise ConfigurationError(
                f"no topic matches the pattern {self.pattern!r}.",
                cure=f"There are: {', '.join(names[:20]) or 'none'}.",
            )
        return matching

    def _may_match(self, name: str) -> bool:
        if name.startswith((RETRY_PREFIX, DLQ_PREFIX)):
            return (self.pattern or "").startswith("%")
        return not name.startswith(_SYSTEM_PREFIXES) and not name.endswith("_REPLY_TOPIC")


def topics_of(options: Options) -> Topics:
    """What the options name. Raises ConfigurationError unless exactly one of the three is given."""
    given = [name for name in _WAYS if options[name] is not None]
    if not given:
        options.required("topic")
    if len(given) > 1:
        raise ConfigurationError(
            f"the options {' and '.join(given)} are given together.", cure="Give one of them."
        )
    if options["topicsPattern"] is not None:
        return Topics(pattern=options["topicsPattern"])
    names = options["topics"] if options["topics"] is not None else (options["topic"],)
    return Topics(names=tuple(names))
