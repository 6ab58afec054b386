"""What somebody writes in a hurry with RocketMQ's names; a type checker flags each marked line."""

from sluicemq.rocketmq import (
    AclClientRPCHook,
    AllocateMessageQueueStrategy,
    DefaultLitePullConsumer,
    DefaultMQProducer,
    DefaultMQPushConsumer,
    Message,
    MessageQueue,
    SendCallback,
    SendResult,
    TransactionMQProducer,
)


class Callback(SendCallback):
    def on_success(self, send_result: SendResult) -> None: ...

    def on_exception(self, e: Exception) -> None: ...


class Half(SendCallback):
    def on_success(self, send_result: SendResult) -> None: ...


message = Message("orders", "A", b"body")
Message("orders", b"body", "A")  # wrong
Message("orders", "A", "text")  # wrong
Message("orders", "A", b"body", "k")  # wrong
Message("orders", "A", "k", b"body", 1, True)  # wrong
message.set_delay_time_level("3")  # wrong
message.put_user_property("a", 1)  # wrong
message.tgas = "A"  # wrong

producer = DefaultMQProducer("desk")
DefaultMQProducer("desk", ("key", "secret"))  # wrong
DefaultMQProducer("desk", AclClientRPCHook("key", "secret"))  # wrong
DefaultMQProducer("desk", name_server="127.0.0.1:9876")  # wrong
producer.setNamesrvAddr("127.0.0.1:9876")  # wrong
producer.set_send_msg_time_out(3000)  # wrong
producer.set_send_msg_timeout = 3000  # wrong
producer.send_msg_timeout = "3 s"  # wrong
producer.send("orders", b"body")  # wrong
producer.send(message, Callback(), "1 s")  # wrong
producer.send(message, Half())  # wrong
producer.send(message, Callback()).get_msg_id()  # wrong
print(producer.send(message).message_id)  # wrong
MessageQueue("orders", "broker-a", 0).set_queue_id(1)  # wrong

consumer = DefaultMQPushConsumer("billing")
consumer.consume_thread_mx = 3  # wrong
consumer.set_message_model("BROADCASTING")  # wrong
consumer.set_allocate_message_queue_strategy(AllocateMessageQueueStrategy)  # wrong
consumer.subscribe("orders", tags="A")  # wrong
TransactionMQProducer("desk").set_transaction_listener(Callback())  # wrong
DefaultLitePullConsumer("billing").poll("1 s")  # wrong
