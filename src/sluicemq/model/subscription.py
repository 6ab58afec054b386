"""Subscriptions, and the protocol of the filters that a broker makes of them.

A broker filters in two stages: first by the tag code in the consume queue, then by the properties
in the commit log (`MessageFilter`). It makes the filters from the subscriptions of its clients, so
an application cannot add another kind of filter. Expressions are parsed in `sluicemq.filter`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TAG = "TAG"
SQL92 = "SQL92"
ALL = "*"


@dataclass(frozen=True, slots=True, repr=False)
class Subscription:
    """A topic and the filter expression of a consumer for it.

    `kind` is TAG or SQL92. For tags, `tags` has the parsed tags and `codes` their tag codes. Both
    are empty for `*`, which means all messages, and for SQL92. `version` is the time at which the
    client subscribed, in milliseconds since 1970.
    """

    topic: str
    expression: str = ALL
    kind: str = TAG
    tags: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    version: int = 0

    @property
    def is_everything(self) -> bool:
        """Whether the subscription matches all messages."""
        return self.kind == TAG and self.expression == ALL

    def __repr__(self) -> str:
        if self.is_everything:
            return f"<Subscription to {self.topic}: everything>"
        expression_name = "where" if self.kind == SQL92 else "tags"
        return f"<Subscription to {self.topic}: {expression_name}={self.expression!r:.200}>"


class MessageFilter(Protocol):
    """A filter with two stages. A message matches if both stages accept it.

    A filter that can also evaluate columns is a `ColumnFilter` as well.
    """

    @property
    def tag_codes(self) -> frozenset[int] | None:
        """The tag codes that the first stage accepts, or None if they cannot be listed.

        If there is a set, the store compares a whole block of tag codes at once.
        """
        ...

    @property
    def reads_properties(self) -> bool:
        """Whether there is a second stage. If not, the commit log need not be read to decide."""
        ...

    def by_consume_queue(self, tag_code: int) -> bool:
        """Return whether the first stage accepts a message with this tag code."""
        ...

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Return whether the second stage accepts a message with these properties.

        It is called only if `reads_properties`.
        """
        ...


class BlockFilter(Protocol):
    """The second stage of a filter for a whole block of columns (`record.columns.ColumnBlock`)."""

    @property
    def names(self) -> frozenset[str]:
        """The names of the properties that the filter reads."""
        ...

    def verdicts(self, block: Any) -> "NDArray[np.uint8]":
        """Return a verdict for each row of the block.

        The values are 0 for FALSE, 1 for TRUE, 2 for null, 3 for an error, and 4 if the columns do
        not decide, so that the record must be read (`by_commit_log`).
        """
        ...

    def can_match(self, stats: Any) -> bool:
        """Return False if no row of a block with these `record.columns.BlockStats` can be TRUE."""
        ...


@runtime_checkable
class ColumnFilter(Protocol):
    """A `MessageFilter` that can also evaluate columns. Test for it with `isinstance`."""

    @property
    def weight(self) -> int:
        """The length of the filter's expressions. The time of an evaluation grows with it."""
        ...

    @property
    def vectorised(self) -> BlockFilter:
        """The second stage for columns. It accepts the same messages as `by_commit_log`."""
        ...
