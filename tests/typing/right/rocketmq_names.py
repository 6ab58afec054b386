"""Programs with RocketMQ's names that type checkers pass."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sluicemq.rocketmq import (
    AclClientRPCHook,
    AllocateMessageQueueAveragely,
    AllocateMessageQueueConsistentHash,
    AllocateMessageQueueStrategy,
    ConsumeConcurrentlyContext,
    ConsumeConcurrentlyStatus,
    ConsumeFromWhere,
    ConsumeOrderlyContext,
    ConsumeOrderlyStatus,
    DefaultLitePullConsumer,
    DefaultMQProducer,
    DefaultMQPullConsumer,
    DefaultMQPushConsumer,
    LocalTransactionState,
    Message,
    MessageExt,
    MessageListenerConcurrently,
    MessageListenerOrderly,
    MessageModel,
    MessageQueue,
    MessageQueueSelector,
    MessageSelector,
    PullStatus,
    SelectMessageQueueByHash,
    SendCallback,
    SendResult,
    SendStatus,
    SessionCredentials,
    TransactionListener,
    TransactionMQProducer,
)

hook = AclClientRPCHook(SessionCredentials("key", "secret"))


class Callback(SendCallback):
    def on_success(self, send_result: SendResult) -> None:
        print(send_result.get_msg_id().upper())

    def on_exception(self, e: Exception) -> None:
        print(e)


class Selector(MessageQueueSelector):
    def select(self, mqs: list[MessageQueue], msg: Message, arg: int) -> MessageQueue:
        return mqs[arg % len(mqs)]


class Mine(AllocateMessageQueueStrategy):
    def allocate(
        self,
        consumer_group: str,
        current_cid: str,
        mq_all: list[MessageQueue],
        cid_all: list[str],
    ) -> list[MessageQueue]:
        return mq_all if current_cid == cid_all[0] else []


class Ledger(TransactionListener):
    def execute_local_transaction(self, msg: Message, arg: Any) -> LocalTransactionState:
        return LocalTransactionState.COMMIT_MESSAGE

    def check_local_transaction(self, msg: MessageExt) -> LocalTransactionState | None:
        return None


class Concurrently(MessageListenerConcurrently):
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeConcurrentlyContext
    ) -> ConsumeConcurrentlyStatus:
        context.set_ack_index(len(msgs) - 1)
        return ConsumeConcurrentlyStatus.CONSUME_SUCCESS


class Orderly(MessageListenerOrderly):
    def consume_message(
        self, msgs: list[MessageExt], context: ConsumeOrderlyContext
    ) -> ConsumeOrderlyStatus:
        context.set_suspend_current_queue_time_millis(100)
        return ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT


def messages() -> list[Message]:
    made = Message()
    made.set_topic("orders")
    made.set_body("text")
    return [
        made,
        Message("orders", b"body"),
        Message("orders", "text", tags="A", keys=["k", "l"]),
        Message("orders", "A", b"body"),
        Message("orders", "A", "k", b"body"),
        Message("orders", "A", "k", 1, b"body", False),
    ]


def produce() -> int:
    producer = DefaultMQProducer("desk", hook, True, "traces", namesrv_addr="127.0.0.1:9876")
    producer.set_send_msg_timeout(3000)
    producer.retry_times_when_send_failed = 1
    producer.start()
    message, queue = messages()[1], MessageQueue("orders", "broker-a", 0)
    result = producer.send(message)
    producer.send(message, 3000)
    producer.send(message, queue, 3000)
    producer.send(message, Selector(), 7)
    producer.send(message, SelectMessageQueueByHash(), "key", 3000)
    producer.send(message, lambda mqs, msg, arg: mqs[0], None)
    producer.send(message, Callback())
    producer.send(message, queue, Callback(), 3000)
    producer.send(message, Selector(), 7, Callback())
    producer.send(messages())
    producer.send(messages(), Callback())
    producer.send_oneway(message, queue)
    producer.shutdown()
    return result.queue_offset + (result.get_send_status() is SendStatus.SEND_OK)


def transact() -> str:
    producer = TransactionMQProducer("desk")
    producer.set_executor_service(ThreadPoolExecutor(2))
    producer.set_transaction_listener(Ledger())
    with producer:
        return producer.send_message_in_transaction(messages()[1], None).get_transaction_id()


def consume() -> None:
    consumer = DefaultMQPushConsumer("billing", hook, AllocateMessageQueueAveragely(), True)
    consumer.set_allocate_message_queue_strategy(Mine())
    consumer.set_allocate_message_queue_strategy(AllocateMessageQueueConsistentHash(20))
    consumer.set_allocate_message_queue_strategy("average_circle")
    consumer.set_consume_from_where(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET)
    consumer.set_message_model(MessageModel.CLUSTERING)
    consumer.consume_thread_max = 4
    consumer.subscribe("orders", MessageSelector.by_sql("a > 3"))
    consumer.register_message_listener(Concurrently())
    consumer.register_message_listener(Orderly())
    consumer.start()


def poll() -> list[bytes]:
    consumer = DefaultLitePullConsumer("billing")
    consumer.set_pull_batch_size(20)
    with consumer:
        queues = consumer.fetch_message_queues("orders")
        consumer.assign(queues)
        consumer.seek(queues[0], 10)
        found = [message.get_body() for message in consumer.poll(1000)]
        consumer.commit_sync()
    return found


def pull() -> int:
    with DefaultMQPullConsumer("billing") as consumer:
        queue = consumer.fetch_subscribe_message_queues("orders")[0]
        result = consumer.pull(queue, "*", 0, 32)
        if result.get_pull_status() is PullStatus.FOUND:
            consumer.update_consume_offset(queue, result.get_next_begin_offset())
        return consumer.fetch_consume_offset(queue)
