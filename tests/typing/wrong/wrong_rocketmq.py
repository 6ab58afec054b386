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
Message("orders", b"body", "A")  # wrong: tags before the body
Message("orders", "A", "text")  # wrong: a text as body of three
Message("orders", "A", b"body", "k")  # wrong: keys before the body
Message("orders", "A", "k", b"body", 1, True)  # wrong: flag before the body
message.set_delay_time_level("3")  # wrong: a level in quotes
message.put_user_property("a", 1)  # wrong: a number as property
message.tgas = "A"  # wrong: tgas

producer = DefaultMQProducer("desk")
DefaultMQProducer("desk", ("key", "secret"))  # wrong: a pair of keys
AclClientRPCHook("key", "secret")  # wrong: keys without SessionCredentials
DefaultMQProducer("desk", name_server="127.0.0.1:9876")  # wrong: name_server
producer.setNamesrvAddr("127.0.0.1:9876")  # wrong: setNamesrvAddr
producer.set_send_msg_time_out(3000)  # wrong: time_out
producer.set_send_msg_timeout = 3000  # wrong: a setter is a method
producer.send_msg_timeout = "3 s"  # wrong: a text as time-out
MessageQueue("orders")  # wrong: one of three values
producer.send("orders", b"body")  # wrong: topic and body
producer.send(message, Callback(), "1 s")  # wrong: a text as time-out
producer.send(message, Half())  # wrong: on_exception is missing
producer.send(message, Callback()).get_msg_id()  # wrong: nothing comes back
print(producer.send(message).message_id)  # wrong: message_id
MessageQueue("orders", "broker-a", 0).set_queue_id("1")  # wrong: a text as queue id

consumer = DefaultMQPushConsumer("billing")
consumer.consume_thread_mx = 3  # wrong: consume_thread_mx
consumer.set_message_model("BROADCASTING")  # wrong: a text as model
consumer.set_allocate_message_queue_strategy(AllocateMessageQueueStrategy)  # wrong: a class
consumer.subscribe("orders", tags="A")  # wrong: tags
TransactionMQProducer("desk").set_transaction_listener(Callback())  # wrong: another listener
DefaultLitePullConsumer("billing").poll("1 s")  # wrong: a text as time-out
