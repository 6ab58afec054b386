"""What a program may decide for itself, in RocketMQ's words: which queue a message goes to, who
reads which queue, what happens when a send is done, and who signs.

    class ByCustomer(MessageQueueSelector):
        def select(self, mqs, msg, arg):
            return mqs[arg % len(mqs)]

    producer.send(message, ByCustomer(), customer)
    producer.send(message, SelectMessageQueueByHash(), "customer-7")
    consumer.set_allocate_message_queue_strategy(AllocateMessageQueueAveragelyByCircle())

The same argument leads to the same queue as with Java's selector by hash, as long as the topic has
as many queues: text and whole numbers are hashed as Java hashes them. The ready strategies compute
what Java's do, so a group may have members in both languages.
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
from sluicemq.model import topic as places
from sluicemq.model.ids import java_hash
from sluicemq.model.topic import Strategy, allocate_average, allocate_circle
from sluicemq.rocketmq.messages import (
    Message,
    MessageQueue,
    Place,
    SendResult,
    frozen_queue,
    queues_of,
)


@dataclass(frozen=True, slots=True)
class AclClientRPCHook:
    """Signs every request with these keys; other hooks there are not."""

    session_credentials: Credentials


class SendCallback(ABC):
    """One of the two is called when a send is done, on the client's thread: be quick there."""

    @abstractmethod
    def on_success(self, send_result: SendResult) -> None:
        """The message is stored."""

    @abstractmethod
    def on_exception(self, e: SluiceError) -> None:
        """It is not, or nobody knows (SendUnknownError)."""


class MessageQueueSelector(ABC):
    """Chooses the queue of a message."""

    @abstractmethod
    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """One of `mqs`; `arg` is what `send` was given."""


Selector = MessageQueueSelector | Callable[[list[MessageQueue], Message, Any], MessageQueue]
"""A selector, or a function that is one."""


class SelectMessageQueueByHash(MessageQueueSelector):
    """The queue by the hash of `arg`: a text, or a whole number of 64 bits."""

    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """Raises ConfigurationError for any other argument."""
        if isinstance(arg, str):
            hashed = java_hash(arg)
        elif not isinstance(arg, int) or not -(2**63) <= arg < 2**63:
            raise ConfigurationError(
                f"the selector's argument is {arg!r}.", fix="Use a text or a whole number."
            )
        elif -(2**31) <= arg < 2**31:
            hashed = int(arg)
        else:
            hashed = (arg ^ (arg >> 32)) & 0xFFFFFFFF
            hashed -= (1 << 32) if hashed & 0x80000000 else 0
        return mqs[abs(hashed) % len(mqs)]


class SelectMessageQueueByRandom(MessageQueueSelector):
    """Any queue."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def select(self, mqs: list[MessageQueue], msg: Message, arg: Any) -> MessageQueue:
        """The argument does not matter."""
        return self._rng.choice(mqs)


class AllocateMessageQueueStrategy(ABC):
    """Which queues a member of a group reads; every member computes it and has to come to the
    same."""

    @abstractmethod
    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        """The queues of the member `current_cid`; both lists are sorted."""

    def core(self, group: str) -> Strategy:
        """The same as the asyncio client asks it."""

        def allocate(
            client_id: str, queues: Sequence[places.MessageQueue], members: Sequence[str]
        ) -> list[places.MessageQueue]:
            own = self.allocate(group, client_id, queues_of(queues), list(members))
            return list(map(frozen_queue, own))

        return allocate


class _Ready(AllocateMessageQueueStrategy):
    """One that the core computes."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        return queues_of(self._strategy(current_cid, list(map(frozen_queue, mq_all)), cid_all))


class AllocateMessageQueueAveragely(_Ready):
    """Runs of consecutive queues."""

    def __init__(self) -> None:
        super().__init__(allocate_average)


class AllocateMessageQueueAveragelyByCircle(_Ready):
    """Dealt out in turn."""

    def __init__(self) -> None:
        super().__init__(allocate_circle)


class AllocateMessageQueueConsistentHash(_Ready):
    """Few queues move when members come and go; with Java's own hash function."""

    def __init__(self, virtual_node_cnt: int = VIRTUAL_NODES) -> None:
        super().__init__(ConsistentHash(virtual_node_cnt))


class AllocateMessageQueueByConfig(_Ready):
    """Exactly these queues."""

    def __init__(self, message_queue_list: Iterable[Place] = ()) -> None:
        self.set_message_queue_list(message_queue_list)

    def set_message_queue_list(self, message_queue_list: Iterable[Place]) -> None:
        """Before start."""
        super().__init__(ConfiguredQueues(frozenset(map(frozen_queue, message_queue_list))))


class AllocateMessageQueueByMachineRoom(_Ready):
    """Only queues of brokers that are named `room@…`, of these rooms."""

    def __init__(self, consumeridcs: Iterable[str] = ()) -> None:
        self.set_consumeridcs(consumeridcs)

    def set_consumeridcs(self, consumeridcs: Iterable[str]) -> None:
        """The rooms, before start."""
        super().__init__(MachineRooms(frozenset(consumeridcs)))


class MachineRoomResolver(ABC):
    """Tells the rooms apart."""

    @abstractmethod
    def broker_deploy_in(self, message_queue: MessageQueue) -> str:
        """The room of its broker, which is all that this queue names."""

    @abstractmethod
    def consumer_deploy_in(self, client_id: str) -> str:
        """The room of a member."""


class AllocateMachineRoomNearby(AllocateMessageQueueStrategy):
    """Queues go to the members of their room, by another strategy; those of a room without members
    to all."""

    def __init__(
        self,
        allocate_message_queue_strategy: AllocateMessageQueueStrategy,
        machine_room_resolver: MachineRoomResolver,
    ) -> None:
        self._inner = allocate_message_queue_strategy
        self._resolver = machine_room_resolver

    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        """Raises ConfigurationError when the resolver names no room."""

        def broker_room(name: str) -> str:
            return self._resolver.broker_deploy_in(MessageQueue("", name, 0))

        inner = self._inner.core(consumer_group)
        nearby = MachineRoomNearby(inner, broker_room, self._resolver.consumer_deploy_in)
        return queues_of(nearby(current_cid, list(map(frozen_queue, mq_all)), cid_all))
