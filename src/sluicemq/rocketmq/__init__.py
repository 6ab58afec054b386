"""RocketMQ's own names, for those who come from its Java or Python client.

    producer = DefaultMQProducer("my_group")
    producer.set_namesrv_addr("127.0.0.1:9876")
    producer.start()
    producer.send(Message("TopicTest", b"Hello", tags="TagA", keys="k1"))
    producer.shutdown()

Classes, life cycle (`start`, `shutdown`) and vocabulary are the original ones, methods are in snake
case, calls block. Underneath is the asyncio client on a thread of its own (`client.threaded`), so
checks, retries and errors (`sluicemq.errors`) are SluiceMQ's. New programs: `sluicemq.Sluice`.
"""

from sluicemq.client.core.requests import PullStatus
from sluicemq.model.topic import MessageQueue
from sluicemq.rocketmq.clients import (
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    DefaultMQProducer,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageModel,
    MessageSelector,
    PullResult,
    SelectMessageQueueByHash,
    SendResult,
    SendStatus,
    TransactionListener,
    TransactionMQProducer,
    TransactionSendResult,
)
from sluicemq.rocketmq.consumers import (
    ConsumeConcurrentlyContext,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    DefaultLitePullConsumer,
    DefaultMQPullConsumer,
    DefaultMQPushConsumer,
    MessageListenerConcurrently,
    MessageListenerOrderly,
)

__all__ = [
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
    "Message",
    "MessageExt",
    "MessageListenerConcurrently",
    "MessageListenerOrderly",
    "MessageModel",
    "MessageQueue",
    "MessageSelector",
    "PullResult",
    "PullStatus",
    "SelectMessageQueueByHash",
    "SendResult",
    "SendStatus",
    "TransactionListener",
    "TransactionMQProducer",
    "TransactionSendResult",
]
