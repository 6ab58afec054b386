"""`@idempotent`: a handler whose effects in a database happen once, however often it is called.

    @idempotent("orders.db", key="order_id")
    def book(message, connection):
        connection.execute(insert(bookings).values(order=message.properties["order_id"]))

    async with mq.consumer("orders", group="billing", handler=book): ...

The handler gets a connection in a transaction that has already noted the message's key (see
`ledger`). Its return commits both; what it raises rolls both back, and the message comes again. A
message whose key is noted is acknowledged without a call. What the handler does elsewhere (mails,
calls of other services) is not undone and may happen twice.

Keys belong to a consumer, by default its group, and to a topic: two groups both get a message, and
order 7 of one topic is not order 7 of another. A handler of batches (`batch_max`) gets the messages
of its list that are new, and all of them are one transaction.
"""

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Unpack

from sluicemq.errors import ConfigurationError, MessageKeyMissingError, install_extra
from sluicemq.hints import unexpected_keyword_text
from sluicemq.model.message import KEYS, ORIGIN_MESSAGE_ID, TAGS, UNIQ_KEY

if TYPE_CHECKING:
    import sqlalchemy
    from sqlalchemy.ext.asyncio import AsyncEngine

    from sluicemq.client.ledger import AsyncLedger, Ledger, LedgerOptions

    Database = str | Path | sqlalchemy.URL | sqlalchemy.Engine | AsyncEngine | Ledger | AsyncLedger

_log = logging.getLogger("sluicemq.client")
_OPTIONS: Final = frozenset({"table", "keep", "create", "clock"})


class Consumed(Protocol):
    """What is used of a received message."""

    @property
    def group(self) -> str: ...

    @property
    def topic(self) -> str: ...

    @property
    def message_id(self) -> str: ...

    @property
    def body(self) -> bytes: ...

    @property
    def properties(self) -> Mapping[str, str]: ...


Key = str | Callable[[Any], object] | None
Handler = Callable[..., Any]


def idempotent(
    database: "Database",
    *,
    key: Key = None,
    consumer: str | None = None,
    **options: "Unpack[LedgerOptions]",
) -> Callable[[Handler], Handler]:
    """Makes `handler(message, connection)` a handler of messages with effects exactly once.

    `database`: a path (SQLite), a URL, or an engine of SQLAlchemy; for a coroutine function that of
    `create_async_engine`, and the handler gets an `AsyncConnection`. Or a `Ledger` (`AsyncLedger`),
    to be shared. `key`: what makes two messages the same: None the id that the producer gave it, a
    name the property of that name, a function what it returns for the message. `consumer`: whose
    keys these are; None the consumer group. `options`: `table`, `keep`, `create` of `Ledger`.

    Raises ConfigurationError without SQLAlchemy (the extra `sql`) and for what is no
    database of this handler. A call raises MessageKeyMissingError when a message has no key.
    """
    if key is not None and not callable(key) and not (isinstance(key, str) and key):
        raise ConfigurationError(
            f"key is {key!r}.", fix="Use the name of a property, or a function of the message."
        )
    unknown = sorted(options.keys() - _OPTIONS)
    if unknown:
        raise TypeError(unexpected_keyword_text(idempotent, unknown[0], sorted(_OPTIONS)))
    if inspect.isroutine(database):
        raise ConfigurationError(
            f"idempotent is given {database!r:.60} for a database.",
            fix="Write @idempotent('orders.db'), with the database in brackets.",
        )

    def decorate(handler: Handler) -> Handler:
        ledger = _ledger(database, options, inspect.iscoroutinefunction(handler))

        @functools.wraps(handler)
        def once(*arguments: Any) -> Any:
            *bound, given = arguments  # a method has its object before the message
            known = _identities(given, key, consumer)
            with ledger.transaction() as connection:
                new = {one for one in sorted(known) if ledger.claim(connection, *one)}
                if new:
                    return handler(*bound, _left(given, known, new), connection)
            return _skipped(given)

        @functools.wraps(handler)
        async def once_awaited(*arguments: Any) -> Any:
            *bound, given = arguments
            known = _identities(given, key, consumer)
            async with ledger.transaction() as connection:
                new = {one for one in sorted(known) if await ledger.claim(connection, *one)}
                if new:
                    return await handler(*bound, _left(given, known, new), connection)
            return _skipped(given)

        return once_awaited if inspect.iscoroutinefunction(handler) else once

    return decorate


def _ledger(database: Any, options: Mapping[str, Any], is_async: bool) -> Any:
    """The ledger of the right kind. Raises ConfigurationError."""
    try:
        from sluicemq.client import ledger  # noqa: PLC0415 - SQLAlchemy is an extra
    except ImportError as error:
        raise ConfigurationError(
            f"idempotent consuming needs SQLAlchemy 2 ({error}).",
            fix=install_extra("sql"),
        ) from error
    own, other = ledger.KINDS if is_async else ledger.KINDS[::-1]
    if isinstance(database, other):
        raise ConfigurationError(
            "a coroutine function needs an engine of create_async_engine, not a blocking one."
            if is_async
            else "a plain function needs an engine of create_engine, not an asynchronous one.",
            fix="Give the URL: the right engine is made from it.",
        )
    if not isinstance(database, own[0]):
        return own[0](database, **options)
    if options:
        raise ConfigurationError(
            f"{', '.join(sorted(options))}: the ledger that is given has its own.",
            fix="Say it where the ledger is made.",
        )
    return database


Identity = tuple[str, str, str]


def _identities(given: Any, key: Key, consumer: str | None) -> dict[Identity, Any]:
    """What a handler was given, a message or a list of them, by consumer, topic and key; of equal
    ones the first. Raises MessageKeyMissingError, ConfigurationError.

    They are claimed in sorted order: two transactions with the same ones in another order would
    wait for each other for ever.
    """
    known: dict[Identity, Any] = {}
    for message in given if isinstance(given, list) else [given]:
        name = consumer or message.group
        if not name:
            raise ConfigurationError(
                f"{message} belongs to no consumer group.",
                fix="Give consumer='…' to idempotent.",
            )
        known.setdefault((name, message.topic, message_key(message, key)), message)
    return known


def _left(given: Any, known: dict[Identity, Any], new: set[Identity]) -> Any:
    """The message, or those of the list that are new, in their order."""
    if not isinstance(given, list):
        return given
    return [message for identity, message in known.items() if identity in new]


def _skipped(given: Any) -> None:
    _log.debug("%s is skipped: it has been consumed before", given)


def message_key(message: Consumed, key: Key = None) -> str:
    """What makes a message the same as another one. Raises MessageKeyMissingError.

    The id is that of its producer, and stays the same when it is sent again by the producer's own
    retries or comes again from the retry topic; never the broker's, which is another one each time
    the message is stored. A digest of body, tag and keys stands behind it: with a broker and a Java
    client of RocketMQ 5.3 all messages of a batch have one id.
    """
    properties = message.properties
    if key is None:
        own_id = properties.get(UNIQ_KEY) or properties.get(ORIGIN_MESSAGE_ID) or message.message_id
        words = "\0".join((properties.get(TAGS, ""), properties.get(KEYS, ""), ""))
        digest = hashlib.blake2b(words.encode("utf-8", "surrogatepass"), digest_size=8)
        digest.update(message.body)
        return f"{own_id}:{digest.hexdigest()}"
    found = properties.get(key) if isinstance(key, str) else key(message)
    if found is None or found == "":
        what = f"the property {key!r}" if isinstance(key, str) else "a key: the function gave none"
        raise MessageKeyMissingError(
            f"{message} lacks {what}, so nobody can say whether it was consumed before.",
            fix="Send it with the property, or use a key that all messages have.",
        )
    return str(found)
