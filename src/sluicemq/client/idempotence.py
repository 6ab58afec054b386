"""`@idempotent`: a handler whose effects in a database happen once, however often it is called.

    @idempotent("orders.db", key="order_id")
    def book(message, connection):
        connection.execute(insert(bookings).values(order=message.properties["order_id"]))

    await mq.consumer("billing", book).subscribe("orders").run()

The handler gets a connection in a transaction in which the message's key has already been inserted
(see `ledger`). If the handler returns, both are committed. If it raises, both are rolled back, and
the message is delivered again. A message whose key exists is acknowledged without calling the
handler. Effects outside of the database (mails, calls of other services) are not rolled back and
may happen twice.

Keys belong to a consumer, by default its group, and to a topic: two groups both process a message,
and order 7 of one topic differs from order 7 of another. A handler of batches (`batch_max`) gets
those messages of its list that are new, in one transaction.
"""

import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
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


class ConsumedMessage(Protocol):
    """The attributes of a received message that this module uses."""

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
"""What identifies a message: a property name, a function of the message, or None for its id."""
Handler = Callable[..., Any]


def idempotent(
    database: "Database",
    *,
    key: Key = None,
    consumer: str | None = None,
    **options: "Unpack[LedgerOptions]",
) -> Callable[[Handler], Handler]:
    """Make the effects of `handler(message, connection)` in a database happen exactly once.

    This is a decorator. `database` is a path (SQLite), a URL or a SQLAlchemy engine. For a
    coroutine function it is an engine of `create_async_engine`, and the handler gets an
    `AsyncConnection`. It may also be a `Ledger` (`AsyncLedger`), which several handlers can share.

    Messages with the same `key` are the same message. None means the message id that the producer
    assigned; a string means the property of that name; a function returns the key of a message.
    `consumer` is the owner of the keys; None means the consumer group. `options` are `table`,
    `keep` and `create` of `Ledger`.

    Raises ConfigurationError if SQLAlchemy is not installed (the extra `sql`), and if `database`
    does not fit the handler. The decorated handler raises MessageKeyMissingError for a message
    without a key.
    """
    _check_arguments(database, key, options)

    def decorate(handler: Handler) -> Handler:
        ledger = _make_ledger(database, options, inspect.iscoroutinefunction(handler))

        @functools.wraps(handler)
        def call_once(*arguments: Any) -> Any:
            *method_arguments, received = arguments  # a method has its object before the message
            message_by_identity = _collect_identities(received, key, consumer)
            with ledger.transaction() as connection:
                new_identities = _claim(ledger, connection, message_by_identity)
                if new_identities:
                    new_messages = _select_new(received, message_by_identity, new_identities)
                    return handler(*method_arguments, new_messages, connection)
            return _log_skipped(received)

        @functools.wraps(handler)
        async def await_once(*arguments: Any) -> Any:
            *method_arguments, received = arguments
            message_by_identity = _collect_identities(received, key, consumer)
            async with ledger.transaction() as connection:
                new_identities = await _claim_async(ledger, connection, message_by_identity)
                if new_identities:
                    new_messages = _select_new(received, message_by_identity, new_identities)
                    return await handler(*method_arguments, new_messages, connection)
            return _log_skipped(received)

        return await_once if inspect.iscoroutinefunction(handler) else call_once

    return decorate


def _check_arguments(database: object, key: Key, options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError or TypeError for wrong arguments of `idempotent`.

    It also recognises the decorator without parentheses: then `database` is the handler.
    """
    is_property_name = isinstance(key, str) and key != ""
    if key is not None and not callable(key) and not is_property_name:
        raise ConfigurationError(
            f"key must be a string or a function, got {key!r}.",
            fix="Use the name of a property, or a function of the message.",
        )
    unknown_options = sorted(options.keys() - _OPTIONS)
    if unknown_options:
        raise TypeError(unexpected_keyword_text(idempotent, unknown_options[0], sorted(_OPTIONS)))
    if inspect.isroutine(database):  # the decorator was used without parentheses
        raise ConfigurationError(
            f"idempotent needs a database, got {database!r:.60}.",
            fix="Write @idempotent('orders.db'), with the database in parentheses.",
        )


def _make_ledger(database: Any, options: Mapping[str, Any], is_async: bool) -> Any:
    """Return `database` as a ledger, the table that records which messages were consumed.

    An existing ledger is returned as it is. `is_async` says that the handler is a coroutine
    function, which needs an asynchronous engine. Raises ConfigurationError if the database does not
    fit the handler, or if SQLAlchemy is missing.
    """
    try:
        from sluicemq.client import ledger  # noqa: PLC0415 - SQLAlchemy is an extra
    except ImportError as error:
        raise ConfigurationError(
            f"idempotent consuming needs SQLAlchemy 2 ({error}).",
            fix=install_extra("sql"),
        ) from error
    async_classes, blocking_classes = ledger.LEDGER_KINDS
    right_classes = async_classes if is_async else blocking_classes
    wrong_classes = blocking_classes if is_async else async_classes
    if isinstance(database, wrong_classes):
        problem = "a plain function needs an engine of create_engine, not an asynchronous one."
        if is_async:
            problem = (
                "a coroutine function needs an engine of create_async_engine, not a blocking one."
            )
        raise ConfigurationError(problem, fix="Pass the URL: the right engine is created from it.")
    ledger_class = right_classes[0]
    if not isinstance(database, ledger_class):
        return ledger_class(database, **options)
    if options:
        raise ConfigurationError(
            f"the options {', '.join(sorted(options))} cannot be combined with a ledger.",
            fix="Pass them where the ledger is created.",
        )
    return database


MessageIdentity = tuple[str, str, str]
"""A message as the ledger knows it: (consumer, topic, key)."""


def _collect_identities(
    received: Any, key: Key, consumer: str | None
) -> dict[MessageIdentity, Any]:
    """Return identity -> message, for a message or a list of messages that a handler received.

    An identity is (consumer, topic, key). Of several messages with one identity, the first one
    counts. `consumer` None means the message's consumer group. Raises MessageKeyMissingError, and
    ConfigurationError for a message without a group.
    """
    message_by_identity: dict[MessageIdentity, Any] = {}
    for message in received if isinstance(received, list) else [received]:
        owner = consumer or message.group
        if not owner:
            raise ConfigurationError(
                f"{message} does not belong to a consumer group.",
                fix="Pass consumer='…' to idempotent.",
            )
        message_by_identity.setdefault((owner, message.topic, message_key(message, key)), message)
    return message_by_identity


def _claim(
    ledger: Any, connection: Any, identities: Iterable[MessageIdentity]
) -> set[MessageIdentity]:
    """Record messages in the ledger, and return those that it did not contain before.

    They are claimed in sorted order: two transactions that claim the same ones in different orders
    would deadlock.
    """
    return {identity for identity in sorted(identities) if ledger.claim(connection, *identity)}


async def _claim_async(
    ledger: Any, connection: Any, identities: Iterable[MessageIdentity]
) -> set[MessageIdentity]:
    """Record identities in an AsyncLedger, and return those that were not recorded before.

    `connection` is in a transaction, which also undoes the records if it is rolled back.
    """
    new_identities = set()
    for identity in sorted(identities):
        if await ledger.claim(connection, *identity):
            new_identities.add(identity)
    return new_identities


def _select_new(
    received: Any,
    message_by_identity: dict[MessageIdentity, Any],
    new_identities: set[MessageIdentity],
) -> Any:
    """Return the argument of the handler: only what was not consumed before.

    This is `received` if it is one message, else a list of its new messages.
    """
    if not isinstance(received, list):
        return received
    return [
        message for identity, message in message_by_identity.items() if identity in new_identities
    ]


def _log_skipped(received: Any) -> None:
    """Log that messages were consumed before."""
    _log.debug("%s is skipped: it has been consumed before", received)


def message_key(message: ConsumedMessage, key: Key = None) -> str:
    """Return the key by which a message is recognised when it is delivered again.

    `key` is the name of a property, or a function of the message. None means the id that the
    producer made, which remains the same when the producer or a broker sends the message again. A
    digest of body, tag and keys is appended to it, because a RocketMQ 5.3 broker gives all messages
    of a Java client's batch the same id.

    Raises MessageKeyMissingError if the message lacks the property, or if the function returns None
    or "".
    """
    if key is None:
        return _make_content_key(message)
    key_value: object
    if isinstance(key, str):
        key_value = message.properties.get(key)
        missing = f"the property {key!r}"
    else:
        key_value = key(message)
        missing = "a key: the key function returned nothing"
    if key_value is None or key_value == "":
        raise MessageKeyMissingError(
            f"{message} lacks {missing}, so it is unknown whether it was consumed before.",
            fix="Send it with the property, or use a key that all messages have.",
        )
    return str(key_value)


def _make_content_key(message: ConsumedMessage) -> str:
    """Return the id that the producer made, a colon, and a digest of body, tag and keys."""
    properties = message.properties
    producer_id = (
        properties.get(UNIQ_KEY) or properties.get(ORIGIN_MESSAGE_ID) or message.message_id
    )
    labels = "\0".join((properties.get(TAGS, ""), properties.get(KEYS, ""), ""))
    digest = hashlib.blake2b(labels.encode("utf-8", "surrogatepass"), digest_size=8)
    digest.update(message.body)
    return f"{producer_id}:{digest.hexdigest()}"
