"""Clients with the class and method names of RocketMQ's Java and Python clients.

    producer = DefaultMQProducer("my_group")
    producer.set_namesrv_addr("127.0.0.1:9876")
    producer.start()
    producer.send(Message("TopicTest", "TagA", "k1", b"Hello"))
    producer.shutdown()

Classes, settings and life cycle (`start`, `shutdown`) are RocketMQ's, method names are in snake
case, and calls block. Each client runs SluiceMQ's asyncio client on a thread, so checks, retries
and errors (`sluicemq.errors`) are SluiceMQ's. Using a name that does not exist raises
AttributeError at once, with the right name in the text.

New programs should use `sluicemq.Sluice` instead.
"""

from sluicemq.client.core.names import Credentials as SessionCredentials
from sluicemq.client.core.requests import PullStatus
from sluicemq.rocketmq.choices import (
    AclClientRPCHook,
    AllocateMachineRoomNearby,
    AllocateMessageQueueAveragely,
    AllocateMessageQueueAveragelyByCircle,
    AllocateMessageQueueByConfig,
    AllocateMessageQueueByMachineRoom,
    AllocateMessageQueueConsistentHash,
    AllocateMessageQueueStrategy,
    MachineRoomResolver,
    MessageQueueSelector,
    SelectMessageQueueByHash,
    SelectMessageQueueByRandom,
    SendCallback,
)
from sluicemq.rocketmq.consumers import (
    ConsumeConcurrentlyContext,
    ConsumeOrderlyContext,
    DefaultLitePullConsumer,
    DefaultMQPullConsumer,
    DefaultMQPushConsumer,
    MessageListenerConcurrently,
    MessageListenerOrderly,
)
from sluicemq.rocketmq.messages import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyStatus,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageModel,
    MessageQueue,
    MessageSelector,
    PullResult,
    QueryResult,
    SendResult,
    SendStatus,
    TransactionSendResult,
)
from sluicemq.rocketmq.producers import (
    DefaultMQProducer,
    TransactionListener,
    TransactionMQProducer,
)

__all__ = [
    "AclClientRPCHook",
    "AllocateMachineRoomNearby",
    "AllocateMessageQueueAveragely",
    "AllocateMessageQueueAveragelyByCircle",
    "AllocateMessageQueueByConfig",
    "AllocateMessageQueueByMachineRoom",
    "AllocateMessageQueueConsistentHash",
    "AllocateMessageQueueStrategy",
    "ConsumeConcurrentlyContext",
    "ConsumeConcurrentlyStatus",
    "ConsumeFromWhere",
    "ConsumeOrderlyContext",
    "ConsumeOrderlyStatus",
    "DefaultLitePullConsumer",
    "DefaultMQProducer",
    "DefaultMQPullConsumer",
    "DefaultMQPushConsumer",
    "LocalTransactionState",
    "MachineRoomResolver",
    "Message",
    "MessageExt",
    "MessageListenerConcurrently",
    "MessageListenerOrderly",
    "MessageModel",
    "MessageQueue",
    "MessageQueueSelector",
    "MessageSelector",
    "PullResult",
    "PullStatus",
    "QueryResult",
    "SelectMessageQueueByHash",
    "SelectMessageQueueByRandom",
    "SendCallback",
    "SendResult",
    "SendStatus",
    "SessionCredentials",
    "TransactionListener",
    "TransactionMQProducer",
    "TransactionSendResult",
]
