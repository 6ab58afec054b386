"""Classes by which an application customizes the clients: selectors, strategies, callbacks, keys.

    class ByCustomer(MessageQueueSelector):
        def select(self, mqs, msg, arg):
            return mqs[arg % len(mqs)]

    producer.send(message, ByCustomer(), customer)
    producer.send(message, SelectMessageQueueByHash(), "customer-7")
    consumer.set_allocate_message_queue_strategy(AllocateMessageQueueAveragelyByCircle())

`SelectMessageQueueByHash` hashes strings and integers as Java does. So the same argument selects
the same queue as Java's client, while the topic has the same number of queues. The allocation
strategies compute the same queues as Java's. So a group may have members in both languages.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sluicemq.client.core.balance import (
    VIRTUAL_NODES,
    ConfiguredQueues,
    ConsistentHash,
    MachineRoomNearby,
    MachineRooms,
)
from sluicemq.client.core.names import Credentials
from sluicemq.errors import ConfigurationError, SluiceError
from sluicemq.model.ids import java_hash
from sluicemq.model.topic import MessageQueue as ModelQueue
from sluicemq.model.topic import Strategy, allocate_average, allocate_circle
from sluicemq.rocketmq.messages import (
    AnyMessageQueue,
    Message,
    MessageQueue,
    SendResult,
    to_model_queue,
    to_rocketmq_queues,
)


@dataclass(frozen=True, slots=True)
class AclClientRPCHook:
    """A hook that signs every request with the given keys. No other hooks are supported."""

    session_credentials: Credentials


class SendCallback(ABC):
    """An object that is notified of the end of an asynchronous send.

    One of the two methods is called, on the thread of the client's event loop. It must return
    quickly, because all other work of the client waits meanwhile.
    """

    @abstractmethod
    def on_success(self, send_result: SendResult) -> None:
        """Handle the result of a message that is stored."""

    @abstractmethod
    def on_exception(self, e: SluiceError) -> None:
        """Handle the error of a send that failed.

        The message is not stored. If `e` is a SendUnknownError, it may be stored.
        """


class MessageQueueSelector(ABC):
    """An object that selects the queue of a message."""

    @abstractmethod
    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """Return the queue for a message: one of `mqs`, the writable queues of its topic.

        `msg` is the message that is sent. `arg` is the argument that was passed to `send` after the
        selector.
        """


Selector = MessageQueueSelector | Callable[[list[MessageQueue], Message, Any], MessageQueue]
"""A `MessageQueueSelector`, or a function with the parameters of its `select`."""


class SelectMessageQueueByHash(MessageQueueSelector):
    """A selector by the hash code that Java has for the argument: a string or a 64-bit integer."""

    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """Return the queue at the index `abs(hash code of arg) % len(mqs)`, as Java's class does.

        The hash code is Java's: that of String for a string, of Integer or Long for an integer.
        Raises ConfigurationError unless `arg` is a string or an integer of 64 bits.
        """
        if isinstance(arg, str):
            hash_code = java_hash(arg)
        elif not isinstance(arg, int) or not -(2**63) <= arg < 2**63:
            raise ConfigurationError(
                f"the selector's argument must be a string or a 64-bit integer, got {arg!r}.",
                fix="Pass a string or an integer.",
            )
        elif -(2**31) <= arg < 2**31:
            hash_code = int(arg)
        else:
            # Long.hashCode of Java: both halves combined, as a signed 32-bit integer.
            hash_code = (arg ^ (arg >> 32)) & 0xFFFFFFFF
            hash_code -= (1 << 32) if hash_code & 0x80000000 else 0
        return mqs[abs(hash_code) % len(mqs)]


class SelectMessageQueueByRandom(MessageQueueSelector):
    """A selector that selects a random queue."""

    def __init__(self, rng: random.Random | None = None) -> None:
        """Select queues with `rng`; None means a new random number generator."""
        self._rng = rng or random.Random()

    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """Return a random queue. `arg` is ignored."""
        return self._rng.choice(mqs)


class AllocateMessageQueueStrategy(ABC):
    """A rule that distributes the queues of a topic over the members of a group.

    Every member computes its own queues, so all members must have the same strategy and settings.
    """

    @abstractmethod
    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        """Return the queues of the member with client id `current_cid`.

        `mq_all` are all queues of the topic and `cid_all` the client ids of all members. Both are
        sorted.
        """

    def to_core_strategy(self, group: str) -> Strategy:
        """Return this strategy as a plain function, as the asyncio client expects it.

        The function takes the client id of this member of `group`, all queues of the topic and the
        client ids of all members. It returns the queues that this member has to read.
        """

        def allocate(
            client_id: str, queues: Sequence[ModelQueue], members: Sequence[str]
        ) -> list[ModelQueue]:
            allocated = self.allocate(group, client_id, to_rocketmq_queues(queues), list(members))
            return list(map(to_model_queue, allocated))

        return allocate


class _BuiltinStrategy(AllocateMessageQueueStrategy):
    """A strategy that `client.core.balance` implements."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        queues = list(map(to_model_queue, mq_all))
        return to_rocketmq_queues(self._strategy(current_cid, queues, cid_all))


class AllocateMessageQueueAveragely(_BuiltinStrategy):
    """A strategy that gives each member a run of consecutive queues."""

    def __init__(self) -> None:
        super().__init__(allocate_average)


class AllocateMessageQueueAveragelyByCircle(_BuiltinStrategy):
    """A strategy that gives the queues to the members in turn, one at a time."""

    def __init__(self) -> None:
        super().__init__(allocate_circle)


class AllocateMessageQueueConsistentHash(_BuiltinStrategy):
    """A strategy by consistent hashing: few queues move when members join or leave.

    The hash function is that of Java's client.
    """

    def __init__(self, virtual_node_cnt: int = VIRTUAL_NODES) -> None:
        """Put each member on the ring `virtual_node_cnt` times.

        Raises ConfigurationError unless that is 1 to 100,000.
        """
        super().__init__(ConsistentHash(virtual_node_cnt))


class AllocateMessageQueueByConfig(_BuiltinStrategy):
    """A strategy that gives this member exactly the configured queues."""

    def __init__(self, message_queue_list: Iterable[AnyMessageQueue] = ()) -> None:
        """Configure the queues. Raises ConfigurationError as `set_message_queue_list` does."""
        self.set_message_queue_list(message_queue_list)

    def set_message_queue_list(self, message_queue_list: Iterable[AnyMessageQueue]) -> None:
        """Replace the queues. Call this before the consumer starts.

        Raises ConfigurationError if a queue lacks a value.
        """
        super().__init__(ConfiguredQueues(frozenset(map(to_model_queue, message_queue_list))))


class AllocateMessageQueueByMachineRoom(_BuiltinStrategy):
    """A strategy for brokers whose names are `room@…`: allocates queues of the given rooms only."""

    def __init__(self, consumeridcs: Iterable[str] = ()) -> None:
        """Allocate the queues of the brokers in the rooms `consumeridcs`."""
        self.set_consumeridcs(consumeridcs)

    def set_consumeridcs(self, consumeridcs: Iterable[str]) -> None:
        """Replace the rooms. Call this before the consumer starts."""
        super().__init__(MachineRooms(frozenset(consumeridcs)))


class MachineRoomResolver(ABC):
    """An object that knows in which machine room a broker and a consumer are."""

    @abstractmethod
    def broker_deploy_in(self, message_queue: MessageQueue) -> str:
        """Return the room of a broker.

        `message_queue` has only a broker name: its topic is "" and its queue id is 0.
        """

    @abstractmethod
    def consumer_deploy_in(self, client_id: str) -> str:
        """Return the room of the member with this client id."""


class AllocateMachineRoomNearby(AllocateMessageQueueStrategy):
    """A strategy that allocates the queues of each machine room to the members in that room.

    Another strategy distributes them among these members. Queues of a room without members are
    distributed over all members.
    """

    def __init__(
        self,
        allocate_message_queue_strategy: AllocateMessageQueueStrategy,
        machine_room_resolver: MachineRoomResolver,
    ) -> None:
        """Distribute the queues of each room with `allocate_message_queue_strategy`.

        `machine_room_resolver` says in which room each broker and each member is.
        """
        self._inner = allocate_message_queue_strategy
        self._resolver = machine_room_resolver

    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        """Return the queues that the member with the client id `current_cid` has to read.

        Queues of a machine room go to the members in the same room, by the inner strategy. Raises
        ConfigurationError if the resolver returns an empty room.
        """

        def broker_room(name: str) -> str:
            return self._resolver.broker_deploy_in(MessageQueue("", name, 0))

        nearby = MachineRoomNearby(
            self._inner.to_core_strategy(consumer_group),
            broker_room,
            self._resolver.consumer_deploy_in,
        )
        return to_rocketmq_queues(nearby(current_cid, list(map(to_model_queue, mq_all)), cid_all))
