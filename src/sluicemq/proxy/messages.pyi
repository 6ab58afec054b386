# Written by tools/proto.py; do not edit.
from collections.abc import MutableMapping, MutableSequence
from enum import IntEnum
from typing import Any, Self, TypeVar

T = TypeVar("T", bound="Record")

class Record:
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...
    def SerializeToString(self) -> bytes: ...
    def CopyFrom(self, other: Self) -> None: ...
    def HasField(self, name: str) -> bool: ...
    def WhichOneof(self, name: str) -> str | None: ...
    def ClearField(self, name: str) -> None: ...

class Messages(list[T]):
    def add(self, **fields: Any) -> T: ...

class Timestamp(Record):
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...
    seconds: int
    nanos: int

class Duration(Record):
    def __init__(self, *, seconds: int = ..., nanos: int = ...) -> None: ...
    seconds: int
    nanos: int

class TransactionResolution(IntEnum):
    TRANSACTION_RESOLUTION_UNSPECIFIED = 0
    COMMIT = 1
    ROLLBACK = 2

class TransactionSource(IntEnum):
    SOURCE_UNSPECIFIED = 0
    SOURCE_CLIENT = 1
    SOURCE_SERVER_CHECK = 2

class Permission(IntEnum):
    PERMISSION_UNSPECIFIED = 0
    NONE = 1
    READ = 2
    WRITE = 3
    READ_WRITE = 4

class FilterType(IntEnum):
    FILTER_TYPE_UNSPECIFIED = 0
    TAG = 1
    SQL = 2

class AddressScheme(IntEnum):
    ADDRESS_SCHEME_UNSPECIFIED = 0
    IPv4 = 1
    IPv6 = 2
    DOMAIN_NAME = 3

class MessageType(IntEnum):
    MESSAGE_TYPE_UNSPECIFIED = 0
    NORMAL = 1
    FIFO = 2
    DELAY = 3
    TRANSACTION = 4
    LITE = 5
    PRIORITY = 6

class DigestType(IntEnum):
    DIGEST_TYPE_UNSPECIFIED = 0
    CRC32 = 1
    MD5 = 2
    SHA1 = 3

class ClientType(IntEnum):
    CLIENT_TYPE_UNSPECIFIED = 0
    PRODUCER = 1
    PUSH_CONSUMER = 2
    SIMPLE_CONSUMER = 3
    PULL_CONSUMER = 4
    LITE_PUSH_CONSUMER = 5
    LITE_SIMPLE_CONSUMER = 6

class Encoding(IntEnum):
    ENCODING_UNSPECIFIED = 0
    IDENTITY = 1
    GZIP = 2

class Code(IntEnum):
    CODE_UNSPECIFIED = 0
    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_MESSAGE_ID = 40009
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    UNAUTHORIZED = 40100
    PAYMENT_REQUIRED = 40200
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    TOPIC_NOT_FOUND = 40402
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    REQUEST_TIMEOUT = 40800
    PAYLOAD_TOO_LARGE = 41300
    MESSAGE_BODY_TOO_LARGE = 41301
    MESSAGE_BODY_EMPTY = 41302
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    LITE_TOPIC_QUOTA_EXCEEDED = 42901
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    REQUEST_HEADER_FIELDS_TOO_LARGE = 43100
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_ERROR = 50000
    INTERNAL_SERVER_ERROR = 50001
    HA_NOT_AVAILABLE = 50002
    NOT_IMPLEMENTED = 50100
    PROXY_TIMEOUT = 50400
    MASTER_PERSISTENCE_TIMEOUT = 50401
    SLAVE_PERSISTENCE_TIMEOUT = 50402
    UNSUPPORTED = 50500
    VERSION_UNSUPPORTED = 50501
    VERIFY_FIFO_MESSAGE_UNSUPPORTED = 50502
    FAILED_TO_CONSUME_MESSAGE = 60000

class Language(IntEnum):
    LANGUAGE_UNSPECIFIED = 0
    JAVA = 1
    CPP = 2
    DOT_NET = 3
    GOLANG = 4
    RUST = 5
    PYTHON = 6
    PHP = 7
    NODE_JS = 8
    RUBY = 9
    OBJECTIVE_C = 10
    DART = 11
    KOTLIN = 12

class LiteSubscriptionAction(IntEnum):
    PARTIAL_ADD = 0
    PARTIAL_REMOVE = 1
    COMPLETE_ADD = 2
    COMPLETE_REMOVE = 3

class QueryOffsetPolicy(IntEnum):
    BEGINNING = 0
    END = 1
    TIMESTAMP = 2

class FilterExpression(Record):
    def __init__(self, *, type: int | None = ..., expression: str | None = ...) -> None: ...
    type: int
    expression: str

class RetryPolicy(Record):
    def __init__(self, *, max_attempts: int | None = ..., exponential_backoff: ExponentialBackoff | None = ..., customized_backoff: CustomizedBackoff | None = ...) -> None: ...
    max_attempts: int
    exponential_backoff: ExponentialBackoff
    customized_backoff: CustomizedBackoff

class ExponentialBackoff(Record):
    def __init__(self, *, initial: Duration | None = ..., max: Duration | None = ..., multiplier: float | None = ...) -> None: ...
    initial: Duration
    max: Duration
    multiplier: float

class CustomizedBackoff(Record):
    def __init__(self, *, next: MutableSequence[Duration] | None = ...) -> None: ...
    next: Messages[Duration]

class Resource(Record):
    def __init__(self, *, resource_namespace: str | None = ..., name: str | None = ...) -> None: ...
    resource_namespace: str
    name: str

class SubscriptionEntry(Record):
    def __init__(self, *, topic: Resource | None = ..., expression: FilterExpression | None = ...) -> None: ...
    topic: Resource
    expression: FilterExpression

class Address(Record):
    def __init__(self, *, host: str | None = ..., port: int | None = ...) -> None: ...
    host: str
    port: int

class Endpoints(Record):
    def __init__(self, *, scheme: int | None = ..., addresses: MutableSequence[Address] | None = ...) -> None: ...
    scheme: int
    addresses: Messages[Address]

class Broker(Record):
    def __init__(self, *, name: str | None = ..., id: int | None = ..., endpoints: Endpoints | None = ...) -> None: ...
    name: str
    id: int
    endpoints: Endpoints

class MessageQueue(Record):
    def __init__(self, *, topic: Resource | None = ..., id: int | None = ..., permission: int | None = ..., broker: Broker | None = ..., accept_message_types: MutableSequence[int] | None = ...) -> None: ...
    topic: Resource
    id: int
    permission: int
    broker: Broker
    accept_message_types: MutableSequence[int]

class Digest(Record):
    def __init__(self, *, type: int | None = ..., checksum: str | None = ...) -> None: ...
    type: int
    checksum: str

class SystemProperties(Record):
    def __init__(self, *, tag: str | None = ..., keys: MutableSequence[str] | None = ..., message_id: str | None = ..., body_digest: Digest | None = ..., body_encoding: int | None = ..., message_type: int | None = ..., born_timestamp: Timestamp | None = ..., born_host: str | None = ..., store_timestamp: Timestamp | None = ..., store_host: str | None = ..., delivery_timestamp: Timestamp | None = ..., receipt_handle: str | None = ..., queue_id: int | None = ..., queue_offset: int | None = ..., invisible_duration: Duration | None = ..., delivery_attempt: int | None = ..., message_group: str | None = ..., trace_context: str | None = ..., orphaned_transaction_recovery_duration: Duration | None = ..., dead_letter_queue: DeadLetterQueue | None = ..., lite_topic: str | None = ..., priority: int | None = ...) -> None: ...
    tag: str
    keys: MutableSequence[str]
    message_id: str
    body_digest: Digest
    body_encoding: int
    message_type: int
    born_timestamp: Timestamp
    born_host: str
    store_timestamp: Timestamp
    store_host: str
    delivery_timestamp: Timestamp
    receipt_handle: str
    queue_id: int
    queue_offset: int
    invisible_duration: Duration
    delivery_attempt: int
    message_group: str
    trace_context: str
    orphaned_transaction_recovery_duration: Duration
    dead_letter_queue: DeadLetterQueue
    lite_topic: str
    priority: int

class DeadLetterQueue(Record):
    def __init__(self, *, topic: str | None = ..., message_id: str | None = ...) -> None: ...
    topic: str
    message_id: str

class Message(Record):
    def __init__(self, *, topic: Resource | None = ..., user_properties: MutableMapping[str, str] | None = ..., system_properties: SystemProperties | None = ..., body: bytes | None = ...) -> None: ...
    topic: Resource
    user_properties: MutableMapping[str, str]
    system_properties: SystemProperties
    body: bytes

class Assignment(Record):
    def __init__(self, *, message_queue: MessageQueue | None = ...) -> None: ...
    message_queue: MessageQueue

class Status(Record):
    def __init__(self, *, code: int | None = ..., message: str | None = ...) -> None: ...
    code: int
    message: str

class UA(Record):
    def __init__(self, *, language: int | None = ..., version: str | None = ..., platform: str | None = ..., hostname: str | None = ...) -> None: ...
    language: int
    version: str
    platform: str
    hostname: str

class Settings(Record):
    def __init__(self, *, client_type: int | None = ..., access_point: Endpoints | None = ..., backoff_policy: RetryPolicy | None = ..., request_timeout: Duration | None = ..., publishing: Publishing | None = ..., subscription: Subscription | None = ..., user_agent: UA | None = ..., metric: Metric | None = ...) -> None: ...
    client_type: int
    access_point: Endpoints
    backoff_policy: RetryPolicy
    request_timeout: Duration
    publishing: Publishing
    subscription: Subscription
    user_agent: UA
    metric: Metric

class Publishing(Record):
    def __init__(self, *, topics: MutableSequence[Resource] | None = ..., max_body_size: int | None = ..., validate_message_type: bool | None = ...) -> None: ...
    topics: Messages[Resource]
    max_body_size: int
    validate_message_type: bool

class Subscription(Record):
    def __init__(self, *, group: Resource | None = ..., subscriptions: MutableSequence[SubscriptionEntry] | None = ..., fifo: bool | None = ..., receive_batch_size: int | None = ..., long_polling_timeout: Duration | None = ..., lite_subscription_quota: int | None = ..., max_lite_topic_size: int | None = ...) -> None: ...
    group: Resource
    subscriptions: Messages[SubscriptionEntry]
    fifo: bool
    receive_batch_size: int
    long_polling_timeout: Duration
    lite_subscription_quota: int
    max_lite_topic_size: int

class Metric(Record):
    def __init__(self, *, on: bool | None = ..., endpoints: Endpoints | None = ...) -> None: ...
    on: bool
    endpoints: Endpoints

class OffsetOption(Record):
    def __init__(self, *, policy: int | None = ..., offset: int | None = ..., tail_n: int | None = ..., timestamp: int | None = ...) -> None: ...
    policy: int
    offset: int
    tail_n: int
    timestamp: int

class QueryRouteRequest(Record):
    def __init__(self, *, topic: Resource | None = ..., endpoints: Endpoints | None = ...) -> None: ...
    topic: Resource
    endpoints: Endpoints

class QueryRouteResponse(Record):
    def __init__(self, *, status: Status | None = ..., message_queues: MutableSequence[MessageQueue] | None = ...) -> None: ...
    status: Status
    message_queues: Messages[MessageQueue]

class SendMessageRequest(Record):
    def __init__(self, *, messages: MutableSequence[Message] | None = ...) -> None: ...
    messages: Messages[Message]

class SendResultEntry(Record):
    def __init__(self, *, status: Status | None = ..., message_id: str | None = ..., transaction_id: str | None = ..., offset: int | None = ..., recall_handle: str | None = ...) -> None: ...
    status: Status
    message_id: str
    transaction_id: str
    offset: int
    recall_handle: str

class SendMessageResponse(Record):
    def __init__(self, *, status: Status | None = ..., entries: MutableSequence[SendResultEntry] | None = ...) -> None: ...
    status: Status
    entries: Messages[SendResultEntry]

class QueryAssignmentRequest(Record):
    def __init__(self, *, topic: Resource | None = ..., group: Resource | None = ..., endpoints: Endpoints | None = ...) -> None: ...
    topic: Resource
    group: Resource
    endpoints: Endpoints

class QueryAssignmentResponse(Record):
    def __init__(self, *, status: Status | None = ..., assignments: MutableSequence[Assignment] | None = ...) -> None: ...
    status: Status
    assignments: Messages[Assignment]

class ReceiveMessageRequest(Record):
    def __init__(self, *, group: Resource | None = ..., message_queue: MessageQueue | None = ..., filter_expression: FilterExpression | None = ..., batch_size: int | None = ..., invisible_duration: Duration | None = ..., auto_renew: bool | None = ..., long_polling_timeout: Duration | None = ..., attempt_id: str | None = ...) -> None: ...
    group: Resource
    message_queue: MessageQueue
    filter_expression: FilterExpression
    batch_size: int
    invisible_duration: Duration
    auto_renew: bool
    long_polling_timeout: Duration
    attempt_id: str

class ReceiveMessageResponse(Record):
    def __init__(self, *, status: Status | None = ..., message: Message | None = ..., delivery_timestamp: Timestamp | None = ...) -> None: ...
    status: Status
    message: Message
    delivery_timestamp: Timestamp

class AckMessageEntry(Record):
    def __init__(self, *, message_id: str | None = ..., receipt_handle: str | None = ..., lite_topic: str | None = ...) -> None: ...
    message_id: str
    receipt_handle: str
    lite_topic: str

class AckMessageRequest(Record):
    def __init__(self, *, group: Resource | None = ..., topic: Resource | None = ..., entries: MutableSequence[AckMessageEntry] | None = ...) -> None: ...
    group: Resource
    topic: Resource
    entries: Messages[AckMessageEntry]

class AckMessageResultEntry(Record):
    def __init__(self, *, message_id: str | None = ..., receipt_handle: str | None = ..., status: Status | None = ...) -> None: ...
    message_id: str
    receipt_handle: str
    status: Status

class AckMessageResponse(Record):
    def __init__(self, *, status: Status | None = ..., entries: MutableSequence[AckMessageResultEntry] | None = ...) -> None: ...
    status: Status
    entries: Messages[AckMessageResultEntry]

class ForwardMessageToDeadLetterQueueRequest(Record):
    def __init__(self, *, group: Resource | None = ..., topic: Resource | None = ..., receipt_handle: str | None = ..., message_id: str | None = ..., delivery_attempt: int | None = ..., max_delivery_attempts: int | None = ..., lite_topic: str | None = ...) -> None: ...
    group: Resource
    topic: Resource
    receipt_handle: str
    message_id: str
    delivery_attempt: int
    max_delivery_attempts: int
    lite_topic: str

class ForwardMessageToDeadLetterQueueResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

class HeartbeatRequest(Record):
    def __init__(self, *, group: Resource | None = ..., client_type: int | None = ...) -> None: ...
    group: Resource
    client_type: int

class HeartbeatResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

class EndTransactionRequest(Record):
    def __init__(self, *, topic: Resource | None = ..., message_id: str | None = ..., transaction_id: str | None = ..., resolution: int | None = ..., source: int | None = ..., trace_context: str | None = ...) -> None: ...
    topic: Resource
    message_id: str
    transaction_id: str
    resolution: int
    source: int
    trace_context: str

class EndTransactionResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

class PrintThreadStackTraceCommand(Record):
    def __init__(self, *, nonce: str | None = ...) -> None: ...
    nonce: str

class ReconnectEndpointsCommand(Record):
    def __init__(self, *, nonce: str | None = ...) -> None: ...
    nonce: str

class ThreadStackTrace(Record):
    def __init__(self, *, nonce: str | None = ..., thread_stack_trace: str | None = ...) -> None: ...
    nonce: str
    thread_stack_trace: str

class VerifyMessageCommand(Record):
    def __init__(self, *, nonce: str | None = ..., message: Message | None = ...) -> None: ...
    nonce: str
    message: Message

class VerifyMessageResult(Record):
    def __init__(self, *, nonce: str | None = ...) -> None: ...
    nonce: str

class RecoverOrphanedTransactionCommand(Record):
    def __init__(self, *, message: Message | None = ..., transaction_id: str | None = ...) -> None: ...
    message: Message
    transaction_id: str

class NotifyUnsubscribeLiteCommand(Record):
    def __init__(self, *, lite_topic: str | None = ...) -> None: ...
    lite_topic: str

class TelemetryCommand(Record):
    def __init__(self, *, status: Status | None = ..., settings: Settings | None = ..., thread_stack_trace: ThreadStackTrace | None = ..., verify_message_result: VerifyMessageResult | None = ..., recover_orphaned_transaction_command: RecoverOrphanedTransactionCommand | None = ..., print_thread_stack_trace_command: PrintThreadStackTraceCommand | None = ..., verify_message_command: VerifyMessageCommand | None = ..., reconnect_endpoints_command: ReconnectEndpointsCommand | None = ..., notify_unsubscribe_lite_command: NotifyUnsubscribeLiteCommand | None = ...) -> None: ...
    status: Status
    settings: Settings
    thread_stack_trace: ThreadStackTrace
    verify_message_result: VerifyMessageResult
    recover_orphaned_transaction_command: RecoverOrphanedTransactionCommand
    print_thread_stack_trace_command: PrintThreadStackTraceCommand
    verify_message_command: VerifyMessageCommand
    reconnect_endpoints_command: ReconnectEndpointsCommand
    notify_unsubscribe_lite_command: NotifyUnsubscribeLiteCommand

class NotifyClientTerminationRequest(Record):
    def __init__(self, *, group: Resource | None = ...) -> None: ...
    group: Resource

class NotifyClientTerminationResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

class ChangeInvisibleDurationRequest(Record):
    def __init__(self, *, group: Resource | None = ..., topic: Resource | None = ..., receipt_handle: str | None = ..., invisible_duration: Duration | None = ..., message_id: str | None = ..., lite_topic: str | None = ..., suspend: bool | None = ...) -> None: ...
    group: Resource
    topic: Resource
    receipt_handle: str
    invisible_duration: Duration
    message_id: str
    lite_topic: str
    suspend: bool

class ChangeInvisibleDurationResponse(Record):
    def __init__(self, *, status: Status | None = ..., receipt_handle: str | None = ...) -> None: ...
    status: Status
    receipt_handle: str

class PullMessageRequest(Record):
    def __init__(self, *, group: Resource | None = ..., message_queue: MessageQueue | None = ..., offset: int | None = ..., batch_size: int | None = ..., filter_expression: FilterExpression | None = ..., long_polling_timeout: Duration | None = ...) -> None: ...
    group: Resource
    message_queue: MessageQueue
    offset: int
    batch_size: int
    filter_expression: FilterExpression
    long_polling_timeout: Duration

class PullMessageResponse(Record):
    def __init__(self, *, status: Status | None = ..., message: Message | None = ..., next_offset: int | None = ...) -> None: ...
    status: Status
    message: Message
    next_offset: int

class UpdateOffsetRequest(Record):
    def __init__(self, *, group: Resource | None = ..., message_queue: MessageQueue | None = ..., offset: int | None = ...) -> None: ...
    group: Resource
    message_queue: MessageQueue
    offset: int

class UpdateOffsetResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

class GetOffsetRequest(Record):
    def __init__(self, *, group: Resource | None = ..., message_queue: MessageQueue | None = ...) -> None: ...
    group: Resource
    message_queue: MessageQueue

class GetOffsetResponse(Record):
    def __init__(self, *, status: Status | None = ..., offset: int | None = ...) -> None: ...
    status: Status
    offset: int

class QueryOffsetRequest(Record):
    def __init__(self, *, message_queue: MessageQueue | None = ..., query_offset_policy: int | None = ..., timestamp: Timestamp | None = ...) -> None: ...
    message_queue: MessageQueue
    query_offset_policy: int
    timestamp: Timestamp

class QueryOffsetResponse(Record):
    def __init__(self, *, status: Status | None = ..., offset: int | None = ...) -> None: ...
    status: Status
    offset: int

class RecallMessageRequest(Record):
    def __init__(self, *, topic: Resource | None = ..., recall_handle: str | None = ...) -> None: ...
    topic: Resource
    recall_handle: str

class RecallMessageResponse(Record):
    def __init__(self, *, status: Status | None = ..., message_id: str | None = ...) -> None: ...
    status: Status
    message_id: str

class SyncLiteSubscriptionRequest(Record):
    def __init__(self, *, action: int | None = ..., topic: Resource | None = ..., group: Resource | None = ..., lite_topic_set: MutableSequence[str] | None = ..., version: int | None = ..., offset_option: OffsetOption | None = ...) -> None: ...
    action: int
    topic: Resource
    group: Resource
    lite_topic_set: MutableSequence[str]
    version: int
    offset_option: OffsetOption

class SyncLiteSubscriptionResponse(Record):
    def __init__(self, *, status: Status | None = ...) -> None: ...
    status: Status

