"""Headers of our own requests about transactions: what is undecided, and deciding one by hand.

Only SluiceMQ brokers know them; docs/requests.md describes the bodies.
"""

from sluicemq.wire.declare import header, int32, int64, text


@header
class ListTransactionsRequest:
    """900111: a page of what is undecided; `after` from the answer before, absent at first."""

    group: str | None = text("producerGroup", default=None)
    topic: str | None = text("topic", default=None)
    after: int | None = int64("after", default=None)
    count_max: int | None = int32("maxMsgNums", default=None)


@header
class ListTransactionsResponse:
    """Answer to 900111: without `after` there is no further page. The body lists them."""

    count: int = int32("count")
    after: int | None = int64("after", default=None)


@header
class ResolveTransactionRequest:
    """900112: `outcome` is 8 commit, 12 rollback."""

    transaction_id: str = text("transactionId")
    outcome: int = int32("commitOrRollback")
