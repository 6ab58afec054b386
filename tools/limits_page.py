# ruff: noqa: E501 - a row of the page is a line
"""Write docs/limits.md from the declarations: settings, constants, defaults of topics and groups.

    python tools/limits_page.py docs/limits.md

Each row names where its value is declared, so the page cannot say another one, and words of the
sentence that a user meets, which have to stand in the source that says it (tests/house/test_limits.py).
"""

from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple

from written_tables import rewrite_page

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


HEAD: Final = "| limit | value | changed by | beyond the limit |\n|---|---|---|---|\n"
_ILLEGAL: Final = "the message is illegal", "broker/produce/intake.py"
_NAME: Final = "characters; the limit is", "broker/topics.py"
_CLOSED: Final = "the connection is closed, and the log says why"
_PROXY: Final = "proxy/limits.py"


PAGE: Final[dict[str, tuple[Row, ...]]] = {
    "Messages": (
        Row("Size of the body of a message or a batch, as it is sent", "maxMessageSize", "13 MESSAGE_ILLEGAL", _ILLEGAL),
        Row("Size of a body in the Python client, before compression", "client.core.messages:BODY_BYTES_MAX", "ConfigurationError", ("the body has", "client/core/messages.py")),
        Row("Size of the properties, with keys, tag and those that clients add, in bytes", "sluicePropertiesLengthMax", "13 MESSAGE_ILLEGAL", ("Put large values into the body.", "broker/produce/intake.py")),
        Row("Size of the properties in the Python client", "client.core.messages:PROPERTIES_BYTES_MAX", "ConfigurationError", ("the properties have", "client/core/messages.py")),
        Row("Length of a tag in the Python client, in characters", "client.core.names:TAG_LENGTH_MAX", "ConfigurationError", ("the tag", "client/core/names.py")),
        Row("Size of one request of `send_batch`", "client.core.messages:BATCH_BYTES_MAX"),
        Row("Size from which the Python client compresses a body", "client.core.messages:COMPRESS_FROM_BYTES", how="`compress_from_bytes` of a producer"),
        Row("Decompressed size of a body that a client reads", "model.bodies:BODY_BYTES_MAX", "UndecodableBodyError", ("it decompresses to more than", "model/bodies.py"), "`body_bytes_max` of a consumer, `bodyBytesMax` in Spark"),
        Row("Decompressed size of a body that the proxy decompresses for a gRPC client", "proxy.convert:DECODED_BYTES_MAX", "the body is delivered compressed"),
        Row("LZ4 or Zstandard frames in one body", "model.bodies:FRAMES_MAX", "UndecodableBodyError", ("frames", "model/bodies.py")),
    ),
    "Topics and groups": (
        Row("Length of the name of a topic, in characters", "model.topic:TOPIC_LENGTH_MAX", "29 INVALID_PARAMETER; in the Python client ConfigurationError", _NAME, "`maxTopicLength` lowers it for sends"),
        Row("Length of the name of a retry or dead-letter topic, in characters", "model.topic:RETRY_TOPIC_LENGTH_MAX", "as above", _NAME),
        Row("Length of the name of a group, in characters", "model.topic:GROUP_LENGTH_MAX", "as above", _NAME),
        Row("Queues of a topic", "broker.admin.metadata:QUEUES_MAX", "29 INVALID_PARAMETER", ("A topic cannot have", "broker/admin/metadata.py")),
        Row("Queues of a topic that its first send creates, at most", "defaultTopicQueueNums"),
        Row("Topics of a broker up to which a send creates a topic", "sluiceAutoTopicsMax", "17 TOPIC_NOT_EXIST"),
        Row("Groups of a broker up to which a consumer creates a group", "sluiceAutoGroupsMax", "26 SUBSCRIPTION_GROUP_NOT_EXIST"),
        Row("Retries of a message before it becomes a dead letter", "model.topic:GroupConfig.retry_times_max", "the message goes to `%DLQ%GROUP`", how="the group's `retryMaxTimes`: `sluice group create`"),
        Row("Retry queues of a group", "model.topic:GroupConfig.retry_queues", how="the group's `retryQueueNums`"),
        Row("Notices of a change of members that a group gets at once", "broker.consume.notices:NOTICES_BURST", "they wait, and several changes become one notice"),
        Row("Further notices per second", "broker.consume.notices:NOTICES_PER_SECOND", "they wait for up to 1.2 s"),
        Row("Producer groups that a broker remembers", "broker.produce.producers:PRODUCER_GROUPS_MAX", "further ones are not remembered"),
    ),
    "Delays and timers": (
        Row("Delay levels", "messageDelayLevel", "a higher level counts as the highest"),
        Row("Delay of a timed message", "timerMaxDelaySec", "13 MESSAGE_ILLEGAL", ("the delay must not be more than", "broker/waiting/rewrite.py")),
        Row("Timed messages that are due in the same slot", "timerCongestNumEachSlot", "1 SYSTEM_ERROR", ("messages are due in the same second already", "broker/waiting/rewrite.py")),
    ),
    "Transactions": (
        Row("Time before the first transaction check", "transactionTimeOut"),
        Row("Time between transaction checks", "transactionCheckInterval"),
        Row("Transaction checks before a transaction is abandoned", "transactionCheckMax", "the message goes to TRANS_CHECK_MAX_TIME_TOPIC"),
        Row("Open transactions of a broker", "sluiceTransactionsOpenMax", "2 SYSTEM_BUSY", ("transactions are undecided, the limit is", "broker/transactions/prepared.py")),
    ),
    "Pulls, pops and queries": (
        Row("Messages in the response to a pull, from memory", "maxTransferCountOnMessageInMemory"),
        Row("Messages in the response to a pull of a SluiceMQ client", "sluicePullCountMax"),
        Row("Size of the response to a pull, from memory", "maxTransferBytesOnMessageInMemory"),
        Row("Messages in the response to a pull, from disk", "maxTransferCountOnMessageInDisk"),
        Row("Size of the response to a pull, from disk", "maxTransferBytesOnMessageInDisk"),
        Row("Size of the response to a bulk reader (Spark)", "sluiceBulkPullBytesMax"),
        Row("Time for which a pull can wait for messages", "broker.consume.pull:SUSPEND_MS_MAX", "it is answered without messages"),
        Row("Parked pulls of all clients", "sluiceParkedPullsMax", "further ones are answered immediately"),
        Row("Parked pulls of one connection", "broker.consume.longpoll:PARKED_PER_CONNECTION_MAX", "as above"),
        Row("Entries of a queue that one filtered pull examines", "sluiceFilterScanUnitsMax", "the next pull continues there"),
        Row("Messages of one pop", "broker.pop.checks:COUNT_MAX", "29 INVALID_PARAMETER", ("pop message's num is greater than", "broker/pop/checks.py")),
        Row("Time for which a pop can wait for messages", "broker.pop.pop:WAIT_MS_MAX", "it is answered without messages"),
        Row("Parked pops of a group at one queue", "popPollingSize", "209 POLLING_FULL; gRPC: TOO_MANY_REQUESTS"),
        Row("Parked pops of all groups", "maxPopPollingSize", "as above"),
        Row("Messages of a queue that a group has in flight by pops", "popInflightMessageThreshold", "pops of that queue return nothing", how="only with `enablePopMessageThreshold`"),
        Row("Messages in the response to a query by key", "maxMsgsNumBatch"),
        Row("Messages in the response to a query by unique key", "defaultQueryMaxNum"),
        Row("Duration of a queue lock for ordered consuming", "broker.consume.locks:LEASE_S", "another consumer can lock the queue, unless the lock was renewed"),
        Row("Queue locks of a broker", "broker.consume.locks:LEASES_MAX", "further locks are refused"),
    ),
    "Filters": (
        Row("Length of an SQL92 expression, in characters", "filter.syntax:LENGTH_MAX", "23 SUBSCRIPTION_PARSE_FAILED; FilterSyntaxError", ("The expression has", "filter/syntax.py")),
        Row("Nesting of conditions in an SQL92 expression", "filter.syntax:NESTING_MAX", "as above", ("Conditions are nested deeper than", "filter/syntax.py")),
        Row("Size of the property columns in memory", "sluicePropertyColumnsMemoryBytes", "columns are read again"),
        Row("Properties of a block of 65,536 messages that become columns", "sluicePropertyColumnsMax", "other properties are read from the messages"),
    ),
    "Connections and frames": (
        Row("Connections of a server", "sluiceConnectionsMax", _CLOSED, ("connections, which is the limit", "net/accept.py")),
        Row("Connections from one address. The loopback address has no limit", "sluiceConnectionsPerAddressMax", _CLOSED, ("that one address may have", "net/accept.py")),
        Row("Time without traffic before a connection is closed", "serverChannelMaxIdleTimeSeconds", "", ("silent for too long", "net/accept.py")),
        Row("Time in which a frame must arrive completely", "sluiceFrameTimeoutSeconds", _CLOSED),
        Row("Size of a frame: a request or response with its header", "wire.frames:FRAME_BYTES_MAX", _CLOSED, ("above the limit of", "wire/frames.py")),
        Row("Size of the header of a request", "net.limits:HEADER_BYTES_MAX", _CLOSED, ("A header has", "net/dispatch.py")),
        Row("Fields of a header", "net.limits:FIELDS_MAX", "1 SYSTEM_ERROR", ("header fields, the limit is", "net/limits.py")),
        Row("Size of the body of a request without messages", "net.limits:SMALL_BODY_BYTES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Size of the body of a heartbeat, or of a list of topics, groups, queues to lock or acknowledgements", "net.limits:BODY_BYTES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Values in the JSON of a body", "net.limits:JSON_VALUES_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Objects and lists in the JSON of a body", "net.limits:JSON_CONTAINERS_MAX", "1 SYSTEM_ERROR", ("Split it up.", "net/limits.py")),
        Row("Values of a header that is larger than 32 KiB", "net.limits:HEADER_VALUES_MAX", _CLOSED),
        Row("Memory for the groups and subscriptions of one connection", "sluiceClientBytesMax", "1 SYSTEM_ERROR", ("The groups and subscriptions of this connection would take", "broker/consume/client_memory.py")),
        Row("Memory for the groups and subscriptions of all connections", "sluiceClientsBytesMax", "2 SYSTEM_BUSY", ("The groups and subscriptions of all clients would take", "broker/consume/client_memory.py")),
        Row("Size of the incomplete frames of all connections", "sluicePendingBytesMax", "the connection that exceeds it is closed"),
        Row("Size of the responses that a connection has not read", "sluiceWriteBufferBytesMax", "the server reads no further requests from it"),
        Row("Refused requests of a connection before its first permitted one", "net.limits:REFUSALS_MAX", _CLOSED),
        Row("Duration of a TLS handshake", "net.openssl:HANDSHAKE_TIMEOUT_S", _CLOSED),
        Row("Size of a TLS handshake", "net.openssl:HELLO_BYTES_MAX", _CLOSED, ("its TLS handshake is longer than", "net/openssl.py")),
        Row("TLS handshakes in progress", "net.openssl:HANDSHAKES_MAX", _CLOSED),
        Row("TLS handshakes in progress from one address", "net.openssl:HANDSHAKES_PER_ADDRESS_MAX", _CLOSED),
    ),
    "Store and replicas": (
        Row("Size of a file of the commit log", "mappedFileSizeCommitLog"),
        Row("Size of a file of a consume queue", "mappedFileSizeConsumeQueue"),
        Row("Size of a file of the timer log", "mappedFileSizeTimerLog"),
        Row("Time for which messages are kept", "fileReservedTime", "they are deleted; `sluice group lag --at-risk` shows before which of them are unread"),
        Row("Disk usage in percent above which expired files are deleted at any hour", "diskMaxUsedSpaceRatio"),
        Row("Disk usage in percent above which the oldest files are deleted at any age", "diskSpaceCleanForciblyRatio"),
        Row("Disk usage in percent above which sends are refused", "diskSpaceWarningLevelRatio", "14 SERVICE_NOT_AVAILABLE; `/ready` fails"),
        Row("Time for which a send waits for the disk, with SYNC_FLUSH", "syncFlushTimeout", "10 FLUSH_DISK_TIMEOUT", ("The fsync took longer than syncFlushTimeout", "broker/group_commit.py")),
        Row("Time for which a send waits for slaves", "slaveTimeout", "12 FLUSH_SLAVE_TIMEOUT", ("The slaves took longer than slaveTimeout", "broker/group_commit.py")),
        Row("Lag of a slave above which a send does not count it", "haMaxGapNotInSync"),
        Row("Time without a heartbeat before a client is removed", "channelExpiredTimeout"),
    ),
    "The Python client": (
        Row("Time for a send with all its attempts", "client.core.send_attempts:SEND_TIMEOUT_MS", "SendError, SendUnknownError", ("it may be stored or not", "client/core/send_attempts.py"), "`timeout_ms` of a send, `send_timeout_ms` of `Sluice`"),
        Row("Further attempts of a send", "client.core.send_attempts:RETRIES", "SendError, SendUnknownError: the text names each attempt", how="`retries` of a producer"),
        Row("Time to open a connection", "net.channel:DIAL_TIMEOUT_S"),
        Row("Time for the response to other requests", "client.core.conversations:CALL_TIMEOUT_S", "RequestTimeoutError"),
        Row("Time for the reply to a `request`", "client.core.replies:REPLY_TIMEOUT_S", "RequestTimeoutError"),
        Row("Messages of a queue in flight before the client stops pulling from it", "client.core.consuming:IN_FLIGHT_COUNT_MAX", how="`prefetch_count`"),
        Row("Size of these messages", "client.core.consuming:IN_FLIGHT_BYTES_MAX", how="`prefetch_bytes`"),
        Row("Messages in one call of a handler", "client.aio.consumer:BATCH_MAX", "ConfigurationError", ("batch_max", "client/aio/consumer.py"), "`batch_max`"),
        Row("Time between updates of routes", "client.core.directory:ROUTE_PERIOD_S"),
        Row("Time between heartbeats", "client.heartbeat_thread:HEARTBEAT_PERIOD_S"),
        Row("Trace records that wait to be sent", "client.core.tracing:COUNT_MAX", "further ones are dropped and counted"),
    ),
    "Name server": (
        Row("Time between checks for brokers that stopped registering", "scanNotActiveBrokerInterval"),
        Row("Size of a registration after decompression", "sluiceRegistrationBytesMax", "refused", ("The compressed registration inflates to more than", "wire/registration.py")),
        Row("Topics in a registration", "wire.registration:REGISTRATION_TOPICS_MAX", "refused", ("A registration has more than", "wire/registration.py")),
        Row("Topics of all registered brokers together", "sluiceRegisteredTopicsMax", "the registration is refused", ("limit for all together is", "nameserver/routes.py")),
        Row("Registered brokers", "nameserver.routes:BROKERS_MAX", "the registration is refused", ("Too many brokers are registered (limit", "nameserver/routes.py")),
        Row("Size of the key-value configuration", "nameserver.requests:KEY_VALUES_BYTES_MAX", "refused", ("The key-values would take", "nameserver/requests.py")),
    ),
    "Proxy for gRPC": (
        Row("Size of a request", "net.grpc:MESSAGE_BYTES_MAX", "RESOURCE_EXHAUSTED", ("is above the limit of", "net/grpc.py")),
        Row("Size of a request without message bodies", "proxy.limits:REQUEST_BYTES_MAX", "PAYLOAD_TOO_LARGE", ("the request has", _PROXY)),
        Row("Messages and their fields in a request that sends", "proxy.limits:SEND_FIELDS_MAX", "PAYLOAD_TOO_LARGE", ("messages and fields of messages.", _PROXY)),
        Row("Size of the messages in a request that sends, without their bodies", "proxy.limits:SEND_METADATA_BYTES_MAX", "PAYLOAD_TOO_LARGE", ("bytes in addition to their bodies.", _PROXY)),
        Row("Size of the headers of a request", "wire.hpack:HEADER_LIST_BYTES_MAX", "ENHANCE_YOUR_CALM", ("The headers of a request are above the limit of", "wire/hpack.py")),
        Row("Size of the body of a message", "config.proxying:ProxyLimits.body_bytes_max", "MESSAGE_BODY_TOO_LARGE", ("message body cannot exceed the max", _PROXY), "`maxMessageSize` of rmq-proxy.json"),
        Row("Number of properties of a message", "userPropertyMaxNum", "MESSAGE_PROPERTIES_TOO_LARGE", ("too many user properties", _PROXY)),
        Row("Size of the names and values of properties, tag and keys", "maxUserPropertySize", "as above", ("the total size of user property is too large", _PROXY)),
        Row("Size of a message group, which must be smaller", "maxMessageGroupSize", "ILLEGAL_MESSAGE_GROUP", ("message group exceed the max size", _PROXY)),
        Row("Length of the name of a lite topic, in characters", "proxy.limits:LITE_TOPIC_LENGTH_MAX", "ILLEGAL_LITE_TOPIC", ("lite topic exceed the max size", _PROXY)),
        Row("Delay of a message", "maxDelayTimeMills", "ILLEGAL_DELIVERY_TIME", ("the max delay time of message is too large", _PROXY)),
        Row("Time before a transaction check that a client may ask for", "maxTransactionRecoverySecond", "BAD_REQUEST", ("the max transaction recovery time of message is too large", _PROXY)),
        Row("Messages in the response to a receive call", "proxy.receiving:BATCH_MAX"),
        Row("Shortest wait of a receive call", "grpcClientConsumerMinLongPollingTimeoutMillis", "ILLEGAL_POLLING_TIME", ("The deadline time remaining is not enough", _PROXY)),
        Row("Longest wait of a receive call", "grpcClientConsumerMaxLongPollingTimeoutMillis"),
        Row("Shortest invisible time", "minInvisibleTimeMillsForRecv", "ILLEGAL_INVISIBLE_TIME", ("the invisibleTime is too small", _PROXY)),
        Row("Longest invisible time", "maxInvisibleTimeMills", "as above", ("the invisibleTime is too large", _PROXY)),
        Row("Time for which the proxy renews invisible times", "renewMaxTimeMillis"),
        Row("Further attempts of a renewal", "maxRenewRetryTimes"),
        Row("Difference between the signed date of a call and the clock, with access control", "sluiceGrpcDateSeconds", "UNAUTHORIZED", ("The date of the signature for accessKey=", "acl/verdict.py")),
        Row("Time for which a stopping proxy waits for responses", "grpcShutdownTimeSeconds"),
        Row("Acknowledgements in one request", "proxy.receiving:ENTRIES_MAX", "refused", ("send some at a time.", "proxy/receiving.py")),
        Row("Clients of one connection", "proxy.clients:CLIENTS_PER_CONNECTION_MAX", "TOO_MANY_REQUESTS", ("clients on this connection and", "proxy/clients.py")),
        Row("Clients of a proxy", "proxy.clients:CLIENTS_MAX", "as above", ("clients on this connection and", "proxy/clients.py")),
        Row("Messages whose invisible time the proxy renews", "proxy.renewal:IN_FLIGHT_MAX", "TOO_MANY_REQUESTS", ("clients of this proxy work on", "proxy/receiving.py")),
        Row("Streams (calls) of a connection at the same time", "net.http2_limits:STREAMS_MAX", "REFUSED_STREAM: clients wait"),
    ),
    "Console and assistants": (
        Row("Sessions of the console", "console.sessions:SESSIONS_MAX", "the oldest ends"),
        Row("Time without requests before a session ends", "console.sessions:IDLE_S", "sign in again"),
        Row("Longest duration of a session", "console.sessions:LIFE_S", "sign in again"),
        Row("Wrong secrets before a client has to wait", "console.sessions:FAILURES_FREE", "each further one doubles the wait"),
        Row("Longest such wait", "console.sessions:WAIT_MAX_S"),
        Row("Shortest secret, in characters", "console.accounts:SECRET_LENGTH_MIN"),
        Row("Size of a form, for example a message to send", "console.app:FORM_BYTES_MAX"),
        Row("Size of the part of a body that is shown", "console.bodies:SHOWN_BYTES_MAX"),
        Row("`sluice mcp`: size of the part of a body that is returned", "operate.mcp:BODY_BYTES_MAX"),
        Row("`sluice mcp`: rows of a page", "operate.mcp:PAGE_MAX"),
        Row("`sluice mcp`: messages in a response", "operate.mcp:MESSAGES_MAX"),
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
    rewrite_page(written)
