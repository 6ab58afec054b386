"""Finding messages as conversations: what is asked of whom, and what is believed."""

import pytest

from sluicemq.client.admin import explain, traces
from sluicemq.client.admin import messages as finding
from sluicemq.client.core import requests
from sluicemq.client.core.conversations import BlockingShell, Call
from sluicemq.client.core.directory import Directory
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    MessageNotFoundError,
    NameServerUnreachableError,
    RequestError,
    RouteNotFoundError,
)
from sluicemq.model.ids import Host, encode_host, offset_message_id
from sluicemq.model.message import StoredMessage
from sluicemq.model.topic import BrokerData, TopicRoute
from sluicemq.record.codec import encode_properties, encode_record
from sluicemq.wire import bodies
from sluicemq.wire.frames import Command

A, B = Host("10.0.0.1", 10911), Host("10.0.0.2", 10911)


def record(
    host: Host, offset: int, time_ms: int, unique: str, keys: str, topic: str = "T"
) -> bytes:
    return encode_record(
        topic=topic, queue_id=0, queue_offset=0, physical_offset=offset, body=b"x",
        properties=encode_properties({"UNIQ_KEY": unique, "KEYS": keys}), flag=0, sys_flag=0,
        born_time_ms=1, born_host=encode_host(host), store_time_ms=time_ms,
        store_host=encode_host(host),
    )  # fmt: skip


class Answers(BlockingShell):
    """Two brokers and a name server: `stored` are (address, code) -> answers."""

    def __init__(self, stored: dict[tuple[str, int], Command]) -> None:
        self.directory = Directory("ns:9876", SYSTEM_CLOCK)
        self.stored = stored
        self.asked: list[tuple[str, int]] = []

    def send_request(self, call: Call) -> Command:
        code = call.command.code
        if code == 105:
            brokers = [BrokerData("a", "C", {0: str(A)}), BrokerData("b", "C", {0: str(B), 1: "s"})]
            route = TopicRoute(brokers=tuple(brokers), queues=())
            return Command(0, body=bodies.encode_topic_route(route))
        self.asked.append((call.address, code))
        if code == 106:
            info = bodies.ClusterInfo(
                {n: BrokerData(n, "C", {0: str(h)}) for n, h in (("a", A), ("b", B))},
                {"C": ["a", "b"]},
            )
            return Command(0, body=bodies.encode_cluster_info(info))
        if code == 206:
            return Command(0, body=bodies.encode_topic_list(["T", "U"]))
        missing = Command(22 if code == 12 else 1, {}, remark="nothing")
        return self.stored.get((call.address, code), missing)

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)

    def by_key(self, key: str, begin_ms: int, end_ms: int, count_max: int) -> list[StoredMessage]:
        return self.run(
            finding.messages_by_key(
                self.directory, "T", key, begin_ms=begin_ms, end_ms=end_ms, count_max=count_max
            )
        )

    def by_id(self, message_id: str, topic: str | None) -> StoredMessage:
        return self.run(finding.message_by_id(self.directory, message_id, topic=topic))


def test_all_brokers_of_the_topic_are_asked_and_collisions_are_dropped() -> None:
    on_a = record(A, 0, 5, "1", "k other") + record(A, 500, 9, "2", "BBBB")
    on_b = record(B, 0, 7, "3", "k") + record(B, 500, 8, "4", "k", topic="U")
    answers = Answers({(str(A), 12): Command(0, body=on_a), (str(B), 12): Command(0, body=on_b)})
    found = answers.by_key("k", 0, 10, 64)
    assert [(m.broker, m.message_id) for m in found] == [("b", "3"), ("a", "1")]
    assert answers.asked == [(str(A), 12), (str(B), 12)]
    assert len(answers.by_key("k", 0, 10, 1)) == 1


def test_a_broker_that_refuses_is_an_error() -> None:
    answers = Answers({(str(B), 12): Command(2, {}, remark="the key index is being built")})
    with pytest.raises(RequestError, match="the key index is being built"):
        answers.by_key("k", 0, 10, 64)


def test_an_id_of_a_broker_is_asked_there_first_and_believed_when_the_message_says_so() -> None:
    there, elsewhere = record(B, 500, 8, "4", "k"), record(A, 500, 8, "9", "k")
    answers = Answers(
        {(str(B), 33): Command(0, body=there), (str(A), 33): Command(0, body=elsewhere)}
    )
    identity = offset_message_id(encode_host(B), 500)
    assert answers.by_id(identity, None).message_id == "4"
    assert answers.asked[-1] == (str(B), 33)
    assert (str(A), 33) not in answers.asked
    answers = Answers({(str(A), 33): Command(0, body=elsewhere)})
    with pytest.raises(
        MessageNotFoundError, match=f"no message with the ID '{identity}' was found"
    ):
        answers.by_id(identity, None)


@pytest.mark.parametrize("topic", [None, "U"])
def test_an_id_of_a_producer_is_looked_for_in_every_topic_or_in_the_one(topic: str | None) -> None:
    there = record(B, 500, 8, "C0A8", "k", topic="U")
    answers = Answers({(str(B), 12): Command(0, body=there)})
    assert answers.by_id(" C0A8 ", topic).topic == "U"
    assert answers.asked.count((str(A), 12)) == (1 if topic else 2)


@pytest.mark.parametrize("message_id", ["C0A8", "C0A8" * 8])
def test_topics_are_not_all_walked_through_for_others(message_id: str) -> None:
    """Java makes unique keys of 32 digits: read as a place, they are none."""
    for talk in (finding.message_by_id, traces.trace, explain.explain_message):
        answers = Answers({})
        with pytest.raises(MessageNotFoundError):
            answers.run(talk(answers.directory, message_id, anywhere=False))
        assert {code for _, code in answers.asked} <= {106, 33, 12}
        assert 206 not in {code for _, code in answers.asked}


@pytest.mark.parametrize(
    ("key", "begin", "end", "count", "text"),
    [
        ("two words", 0, 1, 1, "is not a valid key"),
        ("", 0, 1, 1, "is not a valid key"),
        ("k", 2, 1, 1, "begins at 2 ms"),
        ("k", 0, 1, 0, "count_max must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_asked_is_said(
    key: str, begin: int, end: int, count: int, text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Answers({}).by_key(key, begin, end, count)


class BrokersOnly(BlockingShell):
    """Brokers at the addresses `brokers`; a name server that knows no topic at any other."""

    def __init__(self, name_servers: str, *brokers: str) -> None:
        self.directory = Directory(name_servers, SYSTEM_CLOCK)
        self.brokers = brokers
        self.asked: list[str] = []

    def send_request(self, call: Call) -> Command:
        self.asked.append(call.address)
        code = call.command.code
        if call.address in self.brokers:
            return Command(3, {}, remark=f"request type {code} not supported")
        if call.address.startswith("down"):
            raise ConnectionLostError(f"{call.address} refuses the connection.")
        return Command(17, {}, remark="no route") if code == 105 else Command(1, {})

    def sleep(self, seconds: float) -> None:
        raise AssertionError(seconds)


@pytest.mark.parametrize(
    "command",
    [requests.route("T"), requests.cluster_info(), Command(206, {})],
    ids=lambda command: str(command.code),
)
def test_the_address_of_a_broker_given_as_name_server_is_named(command: Command) -> None:
    shell = BrokersOnly("b:10911", "b:10911")
    with pytest.raises(
        ConfigurationError,
        match=r"b:10911 is configured as a name server, but a broker.*port is 9876",
    ):
        shell.run(shell.directory.call_name_server(command))


def test_a_broker_among_name_servers_is_passed_over_and_named_when_the_others_are_down() -> None:
    shell = BrokersOnly("b:10911;ns:9876", "b:10911")
    with pytest.raises(RouteNotFoundError):
        shell.run(shell.directory.get_route("T"))
    assert set(shell.asked) == {"b:10911", "ns:9876"}
    shell = BrokersOnly("b:10911;down:9876", "b:10911")
    with pytest.raises(
        NameServerUnreachableError, match="b:10911 is configured as a name server, but a broker"
    ):
        shell.run(shell.directory.get_route("T"))


def test_a_request_that_a_name_server_may_not_know_says_nothing_of_what_it_is() -> None:
    shell = BrokersOnly("ns:9876", "ns:9876")
    answer = shell.run(shell.directory.call_name_server(Command(317, {})))
    assert answer.code == 3
