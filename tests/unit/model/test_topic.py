"""How topics, groups and queues are written for people."""

from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig


def test_what_brokers_keep_is_logged_for_people() -> None:
    topic = TopicConfig("t", 8, 4, order=True, attributes={"message.type": "FIFO"})
    assert str(topic) == (
        "t (8 queues to read, 4 to write, read+write, strict order, message.type=FIFO)"
    )
    assert str(GroupConfig("g", consume_enable=False)) == "g (16 retries, may not consume)"
    assert f"{MessageQueue('t', 'b', 3)}" == "t/b/3"
