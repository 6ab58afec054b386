"""The base class of all producers and consumers with RocketMQ's names.

Each object has an asyncio client on an event loop thread of its own (`ThreadedClient`) between
`start` and `shutdown`. Every method blocks. Settings are attributes, which must be set before
`start`, except those in `_changeable_while_running`.
"""

from collections.abc import Awaitable, Callable, Coroutine
from typing import (
    Any,
    ClassVar,
    Concatenate,
    Generic,
    ParamSpec,
    Self,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from sluicemq.client.aio.cluster import Admin
from sluicemq.client.aio.sluice import Sluice
from sluicemq.client.threaded.portal import ThreadedClient
from sluicemq.errors import ClosedError, ConfigurationError
from sluicemq.model.topic import DEFAULT_TOPIC
from sluicemq.net.tls import Tls
from sluicemq.rocketmq.choices import AclClientRPCHook, AllocateMessageQueueStrategy
from sluicemq.rocketmq.messages import AnyMessageQueue, MessageExt, QueryResult, to_model_queue
from sluicemq.rocketmq.names import CheckedAttributes, Getter, PositionalArguments, Setter

C = TypeVar("C")
P = ParamSpec("P")
R = TypeVar("R")


class ClientOptions(TypedDict, total=False):
    """The keyword options of every constructor.

    - `namesrv_addr`: the name servers, as `host:port;host:port`. Without it, the environment
      variable NAMESRV_ADDR is read; if that is not set either, it is 127.0.0.1:9876.
    - `credentials`: a pair (access key, secret key) with which every request is signed.
    - `tls`: True, or a `Tls` with its files. None means what the environment variable SLUICE_TLS
      says.
    """

    namesrv_addr: str | None
    credentials: tuple[str, str] | None
    tls: Tls | bool | None


class Client(CheckedAttributes, Generic[C]):
    """A producer or consumer with RocketMQ's names: settings, `start`, `shutdown`, and MQAdmin.

    It can be used in a `with` statement, which calls `start` and `shutdown`. The methods of Java's
    interface MQAdmin query topics, offsets and stored messages.

    Methods that talk to servers raise ClosedError before `start` and after `shutdown`, and the
    errors of `sluicemq.errors`.
    """

    @overload
    def __init__(
        self,
        group: str = ...,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        group: str,
        rpc_hook: AclClientRPCHook | None,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(
        self,
        group: str,
        rpc_hook: AclClientRPCHook | None,
        strategy: AllocateMessageQueueStrategy,
        /,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        **options: Unpack[ClientOptions],
    ) -> None: ...

    @overload
    def __init__(self, rpc_hook: AclClientRPCHook, /, **options: Unpack[ClientOptions]) -> None: ...

    def __init__(
        self,
        group: Any = None,
        *java_arguments: Any,
        rpc_hook: AclClientRPCHook | None = None,
        enable_msg_trace: bool = False,
        customized_trace_topic: str | None = None,
        namesrv_addr: str | None = None,
        credentials: tuple[str, str] | None = None,
        tls: Tls | bool | None = None,
    ) -> None:
        """Make a client from the arguments of Java's constructors; it is not running yet.

        The positional arguments are, in this order: the group; a hook that signs requests; for push
        and lite pull consumers, the allocation strategy; whether traces are written; and the topic
        of the traces, None for RMQ_SYS_TRACE_TOPIC. Each may be None, and all but the last two may
        be left out. The keywords are described at `ClientOptions`. Raises ConfigurationError for
        any other argument.
        """
        positional = PositionalArguments(group, *java_arguments)
        self.group = positional.take(str) or self.group
        hook = positional.take(AclClientRPCHook) or rpc_hook
        if strategy := positional.take(AllocateMessageQueueStrategy):  # type: ignore[type-abstract]
            # A producer has no such attribute: setting it raises AttributeError.
            setattr(self, "allocate_message_queue_strategy", strategy)  # noqa: B010 - see above
        self.enable_msg_trace = enable_msg_trace
        self.customized_trace_topic = customized_trace_topic
        writes_traces = positional.take(bool)
        if writes_traces is not None:
            self.enable_msg_trace = writes_traces
            self.customized_trace_topic = positional.take(str) or customized_trace_topic
        positional.expect_end(
            type(self).__name__,
            "Pass in this order: group, AclClientRPCHook (no other hook is supported), whether to "
            "trace, topic of traces. Write a namespace before the group: 'prod%group'.",
        )
        self.namesrv_addr = namesrv_addr
        self.use_tls = tls
        self._credentials = credentials if hook is None else hook.session_credentials
        self._threaded: ThreadedClient[C] | None = None

    group = ""
    namesrv_addr: str | None = None
    use_tls: Tls | bool | None = None
    enable_msg_trace = False
    customized_trace_topic: str | None = None
    instance_name = "DEFAULT"
    """The name of this instance, by which a broadcasting consumer finds its offset file.

    Two broadcasting consumers of one group on one machine need different names.
    """
    unit_name: str | None = None
    """A suffix of the instance name, as in Java."""
    offsets_directory: str | None = None
    """The directory of the offset files of broadcasting groups. None means ~/.rocketmq_offsets."""
    set_namesrv_addr = Setter[str | None]()
    set_use_tls = Setter[Tls | bool | None]()
    set_enable_trace = Setter[bool]("enable_msg_trace")
    set_enable_msg_trace = Setter[bool]()
    set_trace_topic = Setter[str | None]("customized_trace_topic")
    set_customized_trace_topic = Setter[str | None]()
    set_instance_name = Setter[str]()
    set_unit_name = Setter[str | None]()
    get_namesrv_addr = Getter[str | None]()
    get_instance_name = Getter[str]()

    _changeable_while_running: ClassVar[frozenset[str]] = frozenset()
    """The settings that may also be changed after `start`."""

    def _check_setting(self, name: str, default: Any, new_value: Any) -> None:
        """Raise ConfigurationError if a setting has a wrong type, or cannot be changed any more.

        Most settings have no effect after `start`, so changing them then is an error.
        """
        super()._check_setting(name, default, new_value)
        # The constructor sets attributes before there is a `_threaded`.
        has_started = getattr(self, "_threaded", None) is not None
        if has_started and name not in self._changeable_while_running:
            raise ConfigurationError(
                f"{type(self).__name__} was started before: setting {name} has no effect.",
                fix="Set it before start().",
            )

    def set_credentials(self, access_key: str, secret_key: str) -> None:
        """Sign every request with these keys. Call this before `start`."""
        self._credentials = (access_key, secret_key)

    def set_vip_channel_enabled(self, vip_channel_enabled: bool) -> None:
        """Accept False, and raise ConfigurationError for True.

        Java's clients can use a second port of a broker, the VIP port, which is lower by two. This
        client always uses the port in the route.
        """
        if vip_channel_enabled:
            raise ConfigurationError(
                "the VIP channel is not supported.",
                fix="Remove this call: brokers serve the same requests at both ports.",
            )

    @property
    def _is_running(self) -> bool:
        """Whether the client was started and is not shut down."""
        return self._threaded is not None and not self._threaded.is_closed

    def start(self) -> None:
        """Start a thread with an event loop and, on it, the client; consumers join their group.

        If this raises, everything is closed again. Raises ConfigurationError if the client is
        running, and for invalid settings.
        """
        if self._is_running:
            raise ConfigurationError("this client is running already.", fix="Call start() once.")
        unit = f"@{self.unit_name}" if self.unit_name else ""
        trace: bool | str = False
        if self.enable_msg_trace:
            trace = self.customized_trace_topic or True

        def make_sluice() -> Sluice:
            return Sluice(
                self.namesrv_addr,
                credentials=self._credentials,
                trace=trace,
                tls=self.use_tls,
                instance=f"{self.instance_name}{unit}",
                offsets_directory=self.offsets_directory,
            )

        self._threaded = ThreadedClient(make_sluice, self._make_client, f"sluicemq {self.group}")

    async def _make_client(self, sluice: Sluice) -> C:
        """Return the asyncio client of this object, ready for use. Subclasses implement this.

        `start` calls it on the event loop. `sluice` is the new `Sluice` to make the client with.
        """
        raise NotImplementedError

    def _expect_running(self) -> ThreadedClient[C]:
        """Return the running client. Raise ClosedError before `start` and after `shutdown`."""
        if self._threaded is None or self._threaded.is_closed:
            raise ClosedError("this client does not run.", fix="Call start() first.")
        return self._threaded

    @overload
    def _call(
        self,
        method: Callable[Concatenate[C, P], Awaitable[R]],
        *arguments: P.args,
        **options: P.kwargs,
    ) -> R: ...

    @overload
    def _call(
        self, method: Callable[Concatenate[C, P], R], *arguments: P.args, **options: P.kwargs
    ) -> R: ...

    def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a method of the asyncio client with these arguments, and return its result.

        Raises what the method raises, and what `_expect_running` raises.
        """
        return self._expect_running().call(method, *arguments, **options)

    def _call_admin(self, operation: Callable[[Admin], Coroutine[Any, Any, R]]) -> R:
        """Run an operation of the asyncio client's `Admin`, and return its result."""
        threaded = self._expect_running()
        return threaded.portal.run(operation(threaded.sluice.admin))

    def shutdown(self) -> None:
        """Stop the client: wait for work in progress, commit offsets, leave the group, disconnect.

        Safe to call twice, and before `start`.
        """
        if self._threaded is not None and not self._threaded.is_closed:
            self._threaded.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        state = "running" if self._is_running else "not running"
        return f"<{type(self).__name__} {self.group} {state}>"

    # --------------------------------------------------------------------------- Java's MQAdmin

    @overload
    def create_topic(self, topic: str, queue_num: int = 8, /) -> None: ...

    @overload
    def create_topic(self, key: str, new_topic: str, queue_num: int, /) -> None: ...

    def create_topic(self, key: str, *java_arguments: Any) -> None:
        """Create a topic with `queue_num` queues (8 by default) on every master.

        The arguments are `(topic, queue_num)`, or as in Java `(key, topic, queue_num)`. Java's key
        must be TBW102, which selects every master too. Raises ConfigurationError for another key.
        """
        arguments = PositionalArguments(*java_arguments)
        topic = arguments.take(str) or key
        queue_num = arguments.take(int) or 8
        if arguments.next_argument is not None or (topic is not key and key != DEFAULT_TOPIC):
            raise ConfigurationError(
                f"create_topic cannot create a topic from the arguments {(key, *java_arguments)}.",
                fix="Pass the topic and its number of queues. It is created on every master.",
            )
        self._call_admin(lambda admin: admin.create_topic(topic, queues=queue_num))

    def search_offset(self, mq: AnyMessageQueue, timestamp: int) -> int:
        """Return the offset of a queue's first message that was stored at `timestamp` or later.

        `timestamp` is in milliseconds since 1970.
        """
        return self._call_admin(lambda admin: admin.offset_by_time(to_model_queue(mq), timestamp))

    def min_offset(self, mq: AnyMessageQueue) -> int:
        """Return the first offset that is stored in a queue."""
        return self._call_admin(lambda admin: admin.offset_min(to_model_queue(mq)))

    def max_offset(self, mq: AnyMessageQueue) -> int:
        """Return the offset that the next message of a queue will get."""
        return self._call_admin(lambda admin: admin.offset_max(to_model_queue(mq)))

    def earliest_msg_store_time(self, mq: AnyMessageQueue) -> int:
        """Return the time at which the oldest message of a queue was stored.

        The time is in milliseconds since 1970; it is -1 if the queue is empty.
        """
        return self._call_admin(lambda admin: admin.earliest_time(to_model_queue(mq)))

    @overload
    def view_message(self, offset_msg_id: str, /) -> MessageExt: ...

    @overload
    def view_message(self, topic: str, msg_id: str, /) -> MessageExt: ...

    def view_message(self, first: str, msg_id: str | None = None) -> MessageExt:
        """Return one message, by `view_message(offset_msg_id)` or `view_message(topic, msg_id)`.

        Raises MessageNotFoundError if there is no such message.
        """
        topic = None
        message_id = first
        if msg_id is not None:
            topic = first
            message_id = msg_id
        record = self._call_admin(lambda admin: admin.message_by_id(message_id, topic=topic))
        return MessageExt(record)

    def query_message(
        self, topic: str, key: str, max_num: int, begin: int, end: int
    ) -> QueryResult:
        """Return up to `max_num` messages of a topic that have the key `key`, the newest first.

        Only messages that were stored from `begin` to `end`, in milliseconds since 1970, are
        returned. The result is empty if there are none.
        """
        records = self._call_admin(
            lambda admin: admin.messages_by_key(
                topic, key, begin_ms=begin, end_ms=end, count_max=max_num
            )
        )
        return QueryResult([MessageExt(record) for record in records])
