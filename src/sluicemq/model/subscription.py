"""What a consumer wants to see, and the two-stage filter that decides it.

`MessageFilter` is the protocol of the broker's two stages: first the tag code that stands in the
consume queue, then the properties in the commit log. The broker makes its filters from the
subscriptions of its clients; an application cannot add another kind. Parsing of expressions is
`sluicemq.filter`'s matter.
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
    """A topic with an expression. For tags `tags` and `codes` hold the parsed set; both are empty
    for `*` (everything) and for SQL92. `version` is the client's time when it subscribed (ms)."""

    topic: str
    expression: str = ALL
    kind: str = TAG
    tags: frozenset[str] = frozenset()
    codes: frozenset[int] = frozenset()
    version: int = 0

    @property
    def is_everything(self) -> bool:
        return self.kind == TAG and self.expression == ALL

    def __repr__(self) -> str:
        name = "where" if self.kind == SQL92 else "tags"
        what = "everything" if self.is_everything else f"{name}={self.expression!r:.200}"
        return f"<Subscription to {self.topic}: {what}>"


class MessageFilter(Protocol):
    """Decides in two stages; a message is delivered when both say yes.

    `tag_codes` is the exact set of codes the first stage accepts, or None when it is not a set:
    with it the store scans a whole block at once. `reads_properties` is False when the second
    stage always says yes: then the commit log is not read to decide. A filter that can also decide
    on columns is a `ColumnFilter`.
    """

    @property
    def tag_codes(self) -> frozenset[int] | None: ...

    @property
    def reads_properties(self) -> bool: ...

    def by_consume_queue(self, tag_code: int) -> bool:
        """Stage one, with the tag code alone: False rules the message out."""
        ...

    def by_commit_log(self, properties: Mapping[str, str]) -> bool:
        """Stage two, asked when `reads_properties`: does the message match?"""
        ...


class BlockFilter(Protocol):
    """The second stage on a whole block of columns (`record.columns.ColumnBlock`) at once.

    `names` are the properties it reads.
    """

    @property
    def names(self) -> frozenset[str]: ...

    def verdicts(self, block: Any) -> "NDArray[np.uint8]":
        """One a row: FALSE 0, TRUE 1, null 2, error 3, and 4: ask the record (`by_commit_log`)."""
        ...

    def can_match(self, stats: Any) -> bool:
        """False when no row of a block with these `record.columns.BlockStats` is TRUE."""
        ...


@runtime_checkable
class ColumnFilter(Protocol):
    """What a `MessageFilter` may have besides: with it the store scans by columns. Ask by
    `isinstance`; `vectorised` gives exactly the messages that `by_commit_log` gives. `weight` is
    the length of its expressions: what an evaluation takes grows with it."""

    @property
    def weight(self) -> int: ...

    @property
    def vectorised(self) -> BlockFilter: ...
