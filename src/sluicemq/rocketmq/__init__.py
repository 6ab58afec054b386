"""RocketMQ's own names, for those who come from its Java or Python client.

    producer = DefaultMQProducer("my_group")
    producer.set_namesrv_addr("127.0.0.1:9876")
    producer.start()
    producer.send(Message("TopicTest", "TagA", "k1", b"Hello"))
    producer.shutdown()

Classes, life cycle (`start`, `shutdown`) and vocabulary are the original ones, methods are in snake
case, calls block. Underneath is the asyncio client on a thread of its own (`client.threaded`), so
checks, retries and errors (`sluicemq.errors`) are SluiceMQ's. A name that is not there is an error
at once. New programs: `sluicemq.Sluice`.
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
from sluicemq.rocketmq.clients import (
    DefaultMQProducer,
    TransactionListener,
    TransactionMQProducer,
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
