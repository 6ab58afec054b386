# ruff: noqa: E501 - a row of the page is a line
"""docs/limits.md, written from the declarations: settings, constants, defaults of topics and groups.

    python tools/limits_page.py docs/limits.md

Each row names where its value is declared, so the page cannot say another one, and words of the
sentence that a user meets, which have to stand in the source that says it (tests/house/test_limits.py).
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from sluicemq.config.settings import KEYS

SOURCE: Final = Path(__file__).parents[1] / "src" / "sluicemq"
UNITS: Final = {"bytes": "B", "ms": "ms", "s": "s", "hours": "h"}
SIZES: Final = ((30, "GiB"), (20, "MiB"), (10, "KiB"))


class Row(NamedTuple):
    """`of`: the key of a setting, or module:NAME below sluicemq. `seen`: what happens beyond it.
    `said`: words of the sentence, and the file that says it. `how`: what else changes it."""

    what: str
    of: str
    seen: str = ""
    said: tuple[str, str] = ("", "")
    how: str = ""


HEAD: Final = "| limit | value | changed by | beyond it |\n|---|---|---|---|\n"
_ILLEGAL: Final = "the message is illegal", "broker/produce/intake.py"
_NAME: Final = "characters; the limit is", "broker/topics.py"
_CLOSED: Final = "the connection is closed; the log says why"
_PROXY: Final = "proxy/limits.py"


PAGE: Final[dict[str, tuple[Row, ...]]] = {
    "Messages": (
        Row("Body, compressed or not, of a message or of a batch", "maxMessageSize", "13 MESSAGE_ILLEGAL", _ILLEGAL),
        Row("... in the Python client, before it is compressed", "client.core.messages:BODY_BYTES_MAX", "ConfigurationError", ("the body has", "client/core/messages.py"), "`body_bytes_max` of a producer"),
        Row("Properties with keys, tag and what clients add", "sluicePropertiesLengthMax", "13 MESSAGE_ILLEGAL", ("Put large values into the body.", "broker/produce/intake.py")),
        Row("... in the Python client", "client.core.messages:PROPERTIES_BYTES_MAX", "ConfigurationError", ("the properties have", "client/core/messages.py")),
        Row("Tag, in characters, in the Python client", "client.core.names:TAG_LENGTH_MAX", "ConfigurationError", ("the tag", "client/core/names.py")),
        Row("One request of `send_batch`; more messages are several requests", "client.core.messages:BATCH_BYTES_MAX"),
        Row("Bodies from here on are compressed by the Python client", "client.core.messages:COMPRESS_FROM_BYTES", how="`compress_from_bytes` of a producer"),
        Row("A compressed body that a client reads, decompressed", "model.bodies:BODY_BYTES_MAX", "UndecodableBodyError", ("it decompresses to more than", "model/bodies.py"), "`body_bytes_max` of a consumer, `bodyBytesMax` in Spark"),
        Row("... that the proxy decompresses for a gRPC client", "proxy.convert:DECODED_BYTES_MAX", "handed on compressed"),
        Row("LZ4 or Zstandard frames in one body", "model.bodies:FRAMES_MAX", "UndecodableBodyError", ("frames", "model/bodies.py")),
    ),
    "Topics and groups": (
        Row("Name of a topic, in characters", "model.topic:TOPIC_LENGTH_MAX", "29 INVALID_PARAMETER; in the Python client ConfigurationError", _NAME, "`maxTopicLength` lowers it for sends"),
        Row("Name of a retry or dead-letter topic", "model.topic:RETRY_TOPIC_LENGTH_MAX", "as above", _NAME),
        Row("Name of a group, in characters", "model.topic:GROUP_LENGTH_MAX", "as above", _NAME),
        Row("Queues of a topic", "broker.admin.metadata:QUEUES_MAX", "29 INVALID_PARAMETER", ("A topic cannot have", "broker/admin/metadata.py")),
        Row("Queues of a topic that a send creates, at most", "defaultTopicQueueNums"),
        Row("Topics, so that a send creates no more", "sluiceAutoTopicsMax", "17 TOPIC_NOT_EXIST"),
        Row("Groups, so that a consumer creates no more", "sluiceAutoGroupsMax", "26 SUBSCRIPTION_GROUP_NOT_EXIST"),
        Row("Retries of a message until it is a dead letter", "model.topic:GroupConfig.retry_times_max", "it is in `%DLQ%GROUP`", how="the group's `retryMaxTimes`: `sluice group create`"),
        Row("Retry queues of a group", "model.topic:GroupConfig.retry_queues", how="the group's `retryQueueNums`"),
        Row("Notices of changes that a group is sent at once", "broker.consume.notices:NOTICES_BURST", "they wait, and one stands for several changes"),
        Row("... and after that, per second", "broker.consume.notices:NOTICES_PER_SECOND", "they wait, at most 1.2 s"),
        Row("Producer groups that a broker notes", "broker.produce.producers:PRODUCER_GROUPS_MAX", "further ones are not noted"),
    ),
    "Delays and timers": (
        Row("Delay levels", "messageDelayLevel", "a higher level is taken as the highest"),
        Row("Delay of a timed message", "timerMaxDelaySec", "13 MESSAGE_ILLEGAL", ("the delay must not be more than", "broker/waiting/rewrite.py")),
        Row("Messages due in one slot", "timerCongestNumEachSlot", "1 SYSTEM_ERROR", ("messages are due in the same second already", "broker/waiting/rewrite.py")),
    ),
    "Transactions": (
        Row("A transaction is asked about after", "transactionTimeOut"),
        Row("... and again every", "transactionCheckInterval"),
        Row("... so often, then it is given up", "transactionCheckMax", "it is in TRANS_CHECK_MAX_TIME_TOPIC"),
        Row("Undecided transactions", "sluiceTransactionsOpenMax", "2 SYSTEM_BUSY", ("transactions are undecided, the limit is", "broker/transactions/prepared.py")),
    ),
    "Pulls, pops and queries": (
        Row("Messages of a pull's answer from memory", "maxTransferCountOnMessageInMemory"),
        Row("... to a SluiceMQ client", "sluicePullCountMax"),
        Row("... their bytes", "maxTransferBytesOnMessageInMemory"),
        Row("Messages of a pull's answer from disk", "maxTransferCountOnMessageInDisk"),
        Row("... their bytes", "maxTransferBytesOnMessageInDisk"),
        Row("Bytes of an answer to a bulk reader (Spark)", "sluiceBulkPullBytesMax"),
        Row("A pull may wait for", "broker.consume.pull:SUSPEND_MS_MAX", "it is answered then"),
        Row("Pulls that wait, of all clients", "sluiceParkedPullsMax", "further ones are answered at once"),
        Row("... of one connection", "broker.consume.longpoll:PARKED_PER_CONNECTION_MAX", "as above"),
        Row("Entries of a queue that a filtered pull looks at", "sluiceFilterScanUnitsMax", "the next pull goes on there"),
        Row("Messages of a pop", "broker.pop.checks:COUNT_MAX", "29 INVALID_PARAMETER", ("pop message's num is greater than", "broker/pop/checks.py")),
        Row("A pop may wait for", "broker.pop.pop:WAIT_MS_MAX", "it is answered then"),
        Row("Pops of a group that wait for a queue", "popPollingSize", "209 POLLING_FULL; gRPC: TOO_MANY_REQUESTS"),
        Row("... of all groups", "maxPopPollingSize", "as above"),
        Row("Messages of a queue that a group has popped and not acknowledged", "popInflightMessageThreshold", "pops of that queue find nothing", how="counts with `enablePopMessageThreshold`"),
        Row("Messages of an answer to a query by key", "maxMsgsNumBatch"),
        Row("... by unique key", "defaultQueryMaxNum"),
        Row("Lock of a queue for ordered consuming lasts", "broker.consume.locks:LEASE_S", "another consumer may take it"),
        Row("Locks of queues", "broker.consume.locks:LEASES_MAX", "further ones are not given"),
    ),
    "Filters": (
        Row("An SQL92 expression, in characters", "filter.syntax:LENGTH_MAX", "23 SUBSCRIPTION_PARSE_FAILED; FilterSyntaxError", ("The expression has", "filter/syntax.py")),
        Row("... nested so deep", "filter.syntax:NESTING_MAX", "as above", ("Conditions are nested deeper than", "filter/syntax.py")),
        Row("Bytes of columns in memory", "sluicePropertyColumnsMemoryBytes", "columns are read again"),
        Row("Properties that become columns, of 65,536 messages", "sluicePropertyColumnsMax", "others are read from the messages"),
    ),
    "Connections and frames": (
        Row("Connections", "sluiceConnectionsMax", _CLOSED, ("connections, which is the limit", "net/accept.py")),
        Row("... of one address; loopback has no limit", "sluiceConnectionsPerAddressMax", _CLOSED, ("that one address may have", "net/accept.py")),
        Row("A connection without traffic is closed after", "serverChannelMaxIdleTimeSeconds", "", ("silent for too long", "net/accept.py")),
        Row("A frame has to be complete after", "sluiceFrameTimeoutSeconds", _CLOSED),
        Row("A frame: request or answer with its header", "wire.frames:FRAME_BYTES_MAX", _CLOSED, ("above the limit of", "wire/frames.py")),
        Row("Header of a request", "net.limits:HEADER_BYTES_MAX", _CLOSED, ("A header has", "net/dispatch.py")),
        Row("Fields of a header", "net.limits:FIELDS_MAX", "1 SYSTEM_ERROR", ("header fields, the limit is", "net/limits.py")),
        Row("Body of a request that carries no messages", "net.limits:SMALL_BODY_BYTES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("... of a heartbeat, of lists of topics, groups, queues to lock, acknowledgements", "net.limits:BODY_BYTES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Values in the JSON of a body", "net.limits:JSON_VALUES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("... of which are objects and lists", "net.limits:JSON_CONTAINERS_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Values of a header above 32 KiB", "net.limits:HEADER_VALUES_MAX", _CLOSED),
        Row("What the groups and subscriptions of a connection take in memory", "sluiceClientBytesMax", "1 SYSTEM_ERROR", ("The groups and subscriptions of this connection would take", "broker/consume/client_memory.py")),
        Row("... of all connections", "sluiceClientsBytesMax", "2 SYSTEM_BUSY", ("The groups and subscriptions of all clients would take", "broker/consume/client_memory.py")),
        Row("Incomplete frames of all connections", "sluicePendingBytesMax", "the connection that exceeds it is closed"),
        Row("Answers that a connection does not take", "sluiceWriteBufferBytesMax", "it is not read until it takes them"),
        Row("Requests without rights, before the first with", "net.limits:REFUSALS_MAX", _CLOSED),
        Row("A TLS handshake lasts at most", "net.openssl:HANDSHAKE_TIMEOUT_S", _CLOSED),
        Row("... and has so many bytes", "net.openssl:HELLO_BYTES_MAX", _CLOSED, ("its TLS handshake is longer than", "net/openssl.py")),
        Row("TLS handshakes under way", "net.openssl:HANDSHAKES_MAX", _CLOSED),
        Row("... of one address", "net.openssl:HANDSHAKES_PER_ADDRESS_MAX", _CLOSED),
    ),
    "Store and replicas": (
        Row("File of the commit log", "mappedFileSizeCommitLog"),
        Row("File of a consume queue", "mappedFileSizeConsumeQueue"),
        Row("File of the timer log", "mappedFileSizeTimerLog"),
        Row("Messages are kept for", "fileReservedTime", "they are deleted; `sluice group lag --at-risk` says before what would be unread"),
        Row("Disk, in percent, from which old files are deleted at any hour", "diskMaxUsedSpaceRatio"),
        Row("... from which the oldest are deleted whatever their age", "diskSpaceCleanForciblyRatio"),
        Row("... from which sends are refused", "diskSpaceWarningLevelRatio", "14 SERVICE_NOT_AVAILABLE; `/ready` fails"),
        Row("SYNC_FLUSH: a send waits for the disk", "syncFlushTimeout", "10 FLUSH_DISK_TIMEOUT", ("The fsync took longer than syncFlushTimeout", "broker/group_commit.py")),
        Row("A send waits for slaves", "slaveTimeout", "12 FLUSH_SLAVE_TIMEOUT", ("The slaves took longer than slaveTimeout", "broker/group_commit.py")),
        Row("A slave that is further behind does not count", "haMaxGapNotInSync"),
        Row("A client without a heartbeat is forgotten after", "channelExpiredTimeout"),
    ),
    "The Python client": (
        Row("A send with all its attempts", "client.core.send_attempts:SEND_TIMEOUT_MS", "SendError, SendUnknownError", ("it may be stored or not", "client/core/send_attempts.py"), "`timeout_ms` of a send, `send_timeout_ms` of `Sluice`"),
        Row("... is tried again so often", "client.core.send_attempts:RETRIES", "SendError, SendUnknownError: each attempt is in the text", how="`retries` of a producer"),
        Row("A connection is made within", "net.channel:DIAL_TIMEOUT_S"),
        Row("Other requests are answered within", "client.core.conversations:CALL_TIMEOUT_S", "RequestTimeoutError"),
        Row("Reply to a request (`request`)", "client.core.replies:REPLY_TIMEOUT_S", "RequestTimeoutError"),
        Row("Messages of a queue in flight, before pulling pauses", "client.core.consuming:IN_FLIGHT_COUNT_MAX", how="`prefetch_count`"),
        Row("... their bytes", "client.core.consuming:IN_FLIGHT_BYTES_MAX", how="`prefetch_bytes`"),
        Row("Messages that a handler gets at a time", "client.aio.consumer:BATCH_MAX", "ConfigurationError", ("batch_max", "client/aio/consumer.py"), "`batch_max`"),
        Row("Routes are asked for again after", "client.core.directory:ROUTE_PERIOD_S"),
        Row("A heartbeat every", "client.heartbeat_thread:HEARTBEAT_PERIOD_S"),
        Row("Trace records that wait to be written", "client.core.tracing:COUNT_MAX", "further ones are dropped and counted"),
    ),
    "Name server": (
        Row("Brokers that stopped registering are looked for every", "scanNotActiveBrokerInterval"),
        Row("A registration, after decompression", "sluiceRegistrationBytesMax", "refused", ("The compressed registration inflates to more than", "wire/registration.py")),
        Row("Topics of a registration", "wire.registration:REGISTRATION_TOPICS_MAX", "refused", ("A registration has more than", "wire/registration.py")),
        Row("Topics of all brokers together", "sluiceRegisteredTopicsMax", "the registration is refused", ("limit for all together is", "nameserver/routes.py")),
        Row("Brokers that are registered", "nameserver.routes:BROKERS_MAX", "the registration is refused", ("Too many brokers are registered (limit", "nameserver/routes.py")),
        Row("Key-values", "nameserver.requests:KEY_VALUES_BYTES_MAX", "refused", ("The key-values would take", "nameserver/requests.py")),
    ),
    "Proxy for gRPC": (
        Row("A request", "net.grpc:MESSAGE_BYTES_MAX", "RESOURCE_EXHAUSTED", ("is above the limit of", "net/grpc.py")),
        Row("... that carries no bodies of messages", "proxy.limits:REQUEST_BYTES_MAX", "PAYLOAD_TOO_LARGE", ("the request has", _PROXY)),
        Row("... that sends: messages and their fields", "proxy.limits:SEND_FIELDS_MAX", "PAYLOAD_TOO_LARGE", ("messages and fields of messages.", _PROXY)),
        Row("... its messages without their bodies", "proxy.limits:SEND_METADATA_BYTES_MAX", "PAYLOAD_TOO_LARGE", ("bytes in addition to their bodies.", _PROXY)),
        Row("Headers of a request", "wire.hpack:HEADER_LIST_BYTES_MAX", "ENHANCE_YOUR_CALM", ("The headers of a request are above the limit of", "wire/hpack.py")),
        Row("Body of a message", "config.proxying:ProxyLimits.body_bytes_max", "MESSAGE_BODY_TOO_LARGE", ("message body cannot exceed the max", _PROXY), "`maxMessageSize` of rmq-proxy.json"),
        Row("Properties of a message", "userPropertyMaxNum", "MESSAGE_PROPERTIES_TOO_LARGE", ("too many user properties", _PROXY)),
        Row("... their names, values, tag and keys", "maxUserPropertySize", "as above", ("the total size of user property is too large", _PROXY)),
        Row("Message group, which has fewer", "maxMessageGroupSize", "ILLEGAL_MESSAGE_GROUP", ("message group exceed the max size", _PROXY)),
        Row("Name of a lite topic, in characters", "proxy.limits:LITE_TOPIC_LENGTH_MAX", "ILLEGAL_LITE_TOPIC", ("lite topic exceed the max size", _PROXY)),
        Row("Delay", "maxDelayTimeMills", "ILLEGAL_DELIVERY_TIME", ("the max delay time of message is too large", _PROXY)),
        Row("Time until a transaction is asked about", "maxTransactionRecoverySecond", "BAD_REQUEST", ("the max transaction recovery time of message is too large", _PROXY)),
        Row("Messages of a receive", "proxy.receiving:BATCH_MAX"),
        Row("A receive waits at least", "grpcClientConsumerMinLongPollingTimeoutMillis", "ILLEGAL_POLLING_TIME", ("The deadline time remaining is not enough", _PROXY)),
        Row("... and at most", "grpcClientConsumerMaxLongPollingTimeoutMillis"),
        Row("Invisible time, at least", "minInvisibleTimeMillsForRecv", "ILLEGAL_INVISIBLE_TIME", ("the invisibleTime is too small", _PROXY)),
        Row("... and at most", "maxInvisibleTimeMills", "as above", ("the invisibleTime is too large", _PROXY)),
        Row("Invisible times are renewed for", "renewMaxTimeMillis"),
        Row("A renewal is tried again so often", "maxRenewRetryTimes"),
        Row("How far the date that a call signs may be away, with access control", "sluiceGrpcDateSeconds", "UNAUTHORIZED", ("The date of the signature for accessKey=", "acl/verdict.py")),
        Row("A proxy that ends waits for answers at most", "grpcShutdownTimeSeconds"),
        Row("Acknowledgements of one request", "proxy.receiving:ENTRIES_MAX", "refused", ("send some at a time.", "proxy/receiving.py")),
        Row("Clients of a connection", "proxy.clients:CLIENTS_PER_CONNECTION_MAX", "TOO_MANY_REQUESTS", ("clients on this connection and", "proxy/clients.py")),
        Row("Clients", "proxy.clients:CLIENTS_MAX", "as above", ("clients on this connection and", "proxy/clients.py")),
        Row("Messages whose invisible time the proxy renews", "proxy.renewal:IN_FLIGHT_MAX", "TOO_MANY_REQUESTS", ("clients of this proxy work on", "proxy/receiving.py")),
        Row("Streams (calls) of a connection at a time", "net.http2_limits:STREAMS_MAX", "REFUSED_STREAM: clients wait"),
    ),
    "Console and assistants": (
        Row("Sessions", "console.sessions:SESSIONS_MAX", "the oldest ends"),
        Row("A session without requests ends after", "console.sessions:IDLE_S", "sign in again"),
        Row("... and at the latest after", "console.sessions:LIFE_S", "sign in again"),
        Row("Wrong secrets before one has to wait", "console.sessions:FAILURES_FREE", "each further one doubles the wait"),
        Row("... at most", "console.sessions:WAIT_MAX_S"),
        Row("Characters of a secret, at least", "console.accounts:SECRET_LENGTH_MIN"),
        Row("A form: a message to send", "console.app:FORM_BYTES_MAX"),
        Row("Bytes of a body that are shown", "console.bodies:SHOWN_BYTES_MAX"),
        Row("`sluice mcp`: bytes of a body", "operate.mcp:BODY_BYTES_MAX"),
        Row("... rows of a page", "operate.mcp:PAGE_MAX"),
        Row("... messages of an answer", "operate.mcp:MESSAGES_MAX"),
    ),
}  # fmt: skip


def written(text: str) -> str:
    """The page with its tables as the declarations are now."""
    head = text.partition("\n## ")[0].rstrip()
    parts = [head + "\n"]
    for title, rows in PAGE.items():
        parts.append(f"\n## {title}\n\n{HEAD}")
        parts += map(line, rows)
    return "".join(parts)


def line(row: Row) -> str:
    """A row of its table."""
    value, setting = declared(row.of)
    how = "; ".join(filter(None, (setting, row.how))) or "–"
    said = f"*{row.said[0]} …*" if row.said[0] else ""
    return (
        f"| {row.what} | {value} | {how} | {': '.join(filter(None, (row.seen, said))) or '–'} |\n"
    )


def declared(of: str) -> tuple[str, str]:
    """The value with its unit, and the setting."""
    module, colon, path = of.partition(":")
    if not colon:
        key = next(key for key in KEYS if key.name == of)
        return shown(key.field, key.default), f"`{of}`"
    value: Any = import_module(f"sluicemq.{module}")
    for name in path.split("."):
        if isinstance(value, type) and "__slots__" in vars(value):
            value = value("")  # the defaults of a topic or group
        value = getattr(value, name)
    return shown(path, value), ""


def shown(name: str, value: Any) -> str:
    """The value in the unit that the name ends with."""
    if not isinstance(value, int | float):
        return f"`{value}`"
    unit = next((word for word in reversed(name.lower().split("_")) if word in UNITS), "")
    if unit == "bytes" and value >= 1024:
        power, size = next(pair for pair in SIZES if value >= 1 << pair[0])
        exact = "" if value % (1 << power) == 0 else f" ({value:,})"
        return f"{value / (1 << power):.4g} {size}{exact}"
    if unit in ("ms", "s"):
        seconds = value / 1000 if unit == "ms" else value
        for length, word in ((86_400, "d"), (3600, "h"), (60, "min")):
            if seconds >= 2 * length and seconds % length == 0:
                return f"{seconds / length:g} {word}"
        return f"{seconds:g} s" if seconds >= 1 else f"{value:g} ms"
    return f"{value:,} {UNITS[unit]}" if unit in UNITS else f"{value:,}"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(written(page.read_text()))
