"""SluiceMQ: a RocketMQ-compatible messaging system with a Spark source and sink.

    from sluicemq import Sluice

    async with Sluice("127.0.0.1:9876") as mq:
        await mq.send("flights", body, tag="UA", properties={"dep_delay": "61"})
        async for message in mq.subscribe("flights", group="late", where="dep_delay > 60"):
            await message.ack()

The names in `__all__` are the public Python API for asyncio. `Sluice` is the client; it creates the
producers and consumers, and `Sluice.admin` administers the cluster. Every error is a subclass of
`SluiceError`; its text says what to do, and `sluice explain error NAME` explains it further.

Code without asyncio uses the blocking clients: `sluicemq.client.sync` (producer and administration)
and `sluicemq.client.threaded` (consumers). `sluicemq.rocketmq` has the class and method names of
RocketMQ's own clients. `sluicemq.spark` has the Spark source and sink.

Each name is imported from its module on first use, so that `import sluicemq` stays fast for servers
and the command line.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sluicemq.client.aio.cluster import Admin
    from sluicemq.client.aio.consumer import MessageStream, PushConsumer
    from sluicemq.client.aio.producer import CloseReport, Producer
    from sluicemq.client.aio.pull import LitePullConsumer, PullConsumer, PullResult
    from sluicemq.client.aio.received import ReceivedMessage
    from sluicemq.client.aio.sluice import Sluice
    from sluicemq.client.core.consuming import OffsetMoved
    from sluicemq.client.core.names import Credentials
    from sluicemq.client.core.requests import PullStatus, SendResult, SendStatus
    from sluicemq.client.core.transactions import (
        TransactionListener,
        TransactionResult,
        TransactionState,
    )
    from sluicemq.client.idempotence import idempotent
    from sluicemq.errors import (
        ClientError,
        ClosedError,
        ConfigurationError,
        ConnectionLostError,
        FilterError,
        FilterSyntaxError,
        GroupNotFoundError,
        MessageKeyMissingError,
        MessageNotFoundError,
        NameServerUnreachableError,
        OffsetOutOfRangeError,
        PermissionDeniedError,
        ProtocolError,
        RequestError,
        RequestTimeoutError,
        RetryLaterError,
        RouteNotFoundError,
        SendError,
        SendUnknownError,
        SluiceError,
        SubscriptionConflictError,
        TopicNotFoundError,
        UndecodableBodyError,
    )
    from sluicemq.model.message import Message, StoredMessage
    from sluicemq.model.subscription import MessageFilter, Subscription
    from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
    from sluicemq.net.tls import Tls

__version__ = "0.1.0"

_EXPORTS_BY_MODULE = {
    "sluicemq.client.aio.sluice": ("Sluice",),
    "sluicemq.client.aio.cluster": ("Admin",),
    "sluicemq.client.aio.consumer": ("MessageStream", "PushConsumer"),
    "sluicemq.client.aio.producer": ("CloseReport", "Producer"),
    "sluicemq.client.aio.pull": ("LitePullConsumer", "PullConsumer", "PullResult"),
    "sluicemq.client.aio.received": ("ReceivedMessage",),
    "sluicemq.client.core.requests": ("PullStatus", "SendResult", "SendStatus"),
    "sluicemq.client.core.consuming": ("OffsetMoved",),
    "sluicemq.client.core.names": ("Credentials",),
    "sluicemq.client.core.transactions": (
        "TransactionListener",
        "TransactionResult",
        "TransactionState",
    ),
    "sluicemq.client.idempotence": ("idempotent",),
    "sluicemq.model.message": ("Message", "StoredMessage"),
    "sluicemq.model.subscription": ("MessageFilter", "Subscription"),
    "sluicemq.model.topic": ("GroupConfig", "MessageQueue", "TopicConfig"),
    "sluicemq.net.tls": ("Tls",),
}
_MODULE_OF_EXPORT = {name: module for module, names in _EXPORTS_BY_MODULE.items() for name in names}
"""Maps each exported name to its module. Exceptions are not in it: all are in `sluicemq.errors`."""
_SYNONYMS = {
    "Sluice": "Client MQ AsyncClient AsyncSluice SluiceClient Connection connect",
    "PushConsumer": "Consumer SimpleConsumer DefaultMQPushConsumer",
    "Producer": "DefaultMQProducer AsyncProducer",
    "SluiceError": "Error MQException MQClientException",
}
"""Maps exported names to the words that other libraries use for them (`hints.intended_name`)."""

__all__ = [
    "Admin",
    "ClientError",
    "CloseReport",
    "ClosedError",
    "ConfigurationError",
    "ConnectionLostError",
    "Credentials",
    "FilterError",
    "FilterSyntaxError",
    "GroupConfig",
    "GroupNotFoundError",
    "LitePullConsumer",
    "Message",
    "MessageFilter",
    "MessageKeyMissingError",
    "MessageNotFoundError",
    "MessageQueue",
    "MessageStream",
    "NameServerUnreachableError",
    "OffsetMoved",
    "OffsetOutOfRangeError",
    "PermissionDeniedError",
    "Producer",
    "ProtocolError",
    "PullConsumer",
    "PullResult",
    "PullStatus",
    "PushConsumer",
    "ReceivedMessage",
    "RequestError",
    "RequestTimeoutError",
    "RetryLaterError",
    "RouteNotFoundError",
    "SendError",
    "SendResult",
    "SendStatus",
    "SendUnknownError",
    "Sluice",
    "SluiceError",
    "StoredMessage",
    "Subscription",
    "SubscriptionConflictError",
    "Tls",
    "TopicConfig",
    "TopicNotFoundError",
    "TransactionListener",
    "TransactionResult",
    "TransactionState",
    "UndecodableBodyError",
    "__version__",
    "idempotent",
]


def _load_export(name: str) -> Any:
    """Import an exported name from its module, and return its value.

    The value becomes an attribute of this package, so that this function is not called again for
    it. Raises AttributeError or ImportError, with a suggestion, if the name is not exported.
    """
    if name not in __all__:
        raise _error_for_unknown(name)
    module = importlib.import_module(_MODULE_OF_EXPORT.get(name, "sluicemq.errors"))
    exported = getattr(module, name)
    globals()[name] = exported
    return exported


def _error_for_unknown(name: str) -> Exception:
    """Return the error for a name that this package does not export, with a suggestion.

    It is an AttributeError for `sluicemq.NAME`. For `from sluicemq import NAME`, Python discards
    the text of an AttributeError, so it is an ImportError if there is a suggestion. If the name is
    a submodule that is not imported yet, it is an AttributeError, after which Python imports the
    submodule.
    """
    from importlib.util import find_spec  # noqa: PLC0415 - needed for wrong names only

    from sluicemq.hints import intended_name  # noqa: PLC0415 - needed for wrong names only

    fact = f"module 'sluicemq' has no attribute {name!r}."
    # Python's function for the names of `from … import`.
    is_import = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if is_import and find_spec(f"{__name__}.{name}") is not None:
        return AttributeError(fact)

    intended = intended_name(name, __all__, _SYNONYMS)
    if not intended:
        return AttributeError(fact)
    if is_import:
        return ImportError(
            f"cannot import name {name!r} from 'sluicemq'. Did you mean {intended!r}?", name=name
        )
    return AttributeError(f"{fact} Did you mean {intended!r}?")


if not TYPE_CHECKING:  # With `__getattr__`, type checkers would accept every name.
    __getattr__ = _load_export


def __dir__() -> list[str]:
    """Return the names of the package, including exported names that are not imported yet."""
    return sorted({*globals(), *__all__})
