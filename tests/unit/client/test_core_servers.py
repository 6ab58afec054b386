"""What brokers and name servers answer to the tools (spec/admin.md §4), read as values."""

from collections.abc import Callable
from typing import Any

import pytest

from sluicemq.client.admin import clients, servers
from sluicemq.client.core.conversations import Call, Conversation
from sluicemq.client.core.directory import Directory
from sluicemq.clock import SYSTEM_CLOCK
from sluicemq.errors import RequestError
from sluicemq.model.topic import MessageQueue
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import UpdateAccountRequest

DIRECTORY = Directory("n1:1;n2:2", SYSTEM_CLOCK)


def told(talk: Conversation[Any], *answers: Command) -> tuple[Any, list[Call]]:
    """The talk's result when it is answered so, and what it asked."""
    asked: list[Call] = []
    left = list(answers)
    try:
        step = next(talk)
        while True:
            assert isinstance(step, Call)
            asked.append(step)
            step = talk.send(left.pop(0))
    except StopIteration as done:
        assert not left
        return done.value, asked


def test_settings_are_lines_of_names_and_values() -> None:
    body = b"#comment\nbrokerName=a\nnamesrvAddr=n1:1;n2:2\nempty=\nnothing\n"
    found, (call,) = told(servers.broker_settings(DIRECTORY, "b:1"), Command(0, body=body))
    assert found == {"brokerName": "a", "namesrvAddr": "n1:1;n2:2", "empty": ""}
    assert (call.address, call.command.code) == ("b:1", 26)
    _, (call,) = told(servers.change_broker_settings(DIRECTORY, "b:1", {"k": "v"}), Command(0))
    assert (call.command.code, call.command.body) == (25, b"k=v\n")
    change = servers.change_name_server_settings(DIRECTORY, "n1:1", {"k": "v"})
    assert told(change, Command(0))[1][0].command.code == 318


def test_values_go_to_every_name_server() -> None:
    _, asked = told(servers.put_kv_config(DIRECTORY, "N", "k", "v"), Command(0), Command(0))
    assert [call.address for call in asked] == ["n1:1", "n2:2"]
    assert asked[0].command.fields == {"namespace": "N", "key": "k", "value": "v"}
    _, asked = told(servers.delete_kv_config(DIRECTORY, "N", "k"), Command(0), Command(0))
    assert [call.command.code for call in asked] == [102, 102]
    found, _ = told(servers.kv_config(DIRECTORY, "N", "k"), Command(0, {"value": "v"}))
    assert found == "v"


@pytest.mark.parametrize(("allowed", "code", "field"), [(True, 327, "add"), (False, 205, "wipe")])
def test_a_broker_may_be_written_to_or_not(allowed: bool, code: int, field: str) -> None:
    talk = servers.set_write_permission(DIRECTORY, "n1:1", "b", allowed=allowed)
    found, (call,) = told(talk, Command(0, {f"{field}TopicCount": "7"}))
    assert (found, call.command.code) == (7, code)


STATISTICS = (
    b'{"statsDay":{"avgpt":0.0,"sum":0,"tps":0.0},"statsHour":{"avgpt":1.0,"sum":9,"tps":0.1},'
    b'"statsMinute":{"avgpt":1.0,"sum":3,"tps":0.5}}'
)


@pytest.mark.parametrize(
    ("answer", "found"), [(Command(0, body=STATISTICS), (0.5, 9)), (Command(1), (0.0, 0))]
)
def test_a_count_is_that_of_the_longest_span_that_has_one(
    answer: Command, found: tuple[float, int]
) -> None:
    assert told(servers.statistic_at(DIRECTORY, "b:1", "TOPIC_PUT_NUMS", "T"), answer)[0] == found


def test_the_progress_of_all_groups_of_a_broker() -> None:
    body = (
        b'{"brokerAddr":"b:1","consumeStatsList":[{"G":[{"consumeTps":0.0,"offsetTable":{'
        b'{"brokerName":"b","queueId":1,"topic":"T"}:{"brokerOffset":5,"consumerOffset":3,'
        b'"lastTimestamp":1,"pullOffset":4}}}]}],"totalDiff":2,"totalInflightDiff":1}'
    )
    talk = clients.consume_stats_at(DIRECTORY, "b:1", is_ordered=True)
    ((group, queue, progress),), (call,) = told(talk, Command(0, body=body))
    assert (group, queue, progress.consumer_offset) == ("G", MessageQueue("T", "b", 1), 3)
    assert (call.command.code, call.command.fields) == (317, {"isOrder": "true"})


def test_the_producers_of_a_broker() -> None:
    body = b'{"data":{"P":[{"clientId":"c","language":"JAVA","version":1}]}}'
    found, (call,) = told(clients.producers(DIRECTORY, "b:1"), Command(0, body=body))
    assert found == {"P": [{"clientId": "c", "language": "JAVA", "version": 1}]}
    assert call.command.code == 328


ACCOUNT = UpdateAccountRequest(access_key="account9", secret_key="secret99")


@pytest.mark.parametrize(
    ("talk", "code"),
    [
        (lambda: servers.clean_up(DIRECTORY, "b:1", "queues"), 306),
        (lambda: servers.clean_up(DIRECTORY, "b:1", "topics"), 316),
        (lambda: servers.clean_up(DIRECTORY, "b:1", "log"), 329),
        (lambda: servers.reset_flushed_position(DIRECTORY, "b:1", 5), 908),
        (lambda: servers.roll_back_pops(DIRECTORY, "b:1"), 200056),
        (lambda: servers.update_account(DIRECTORY, "b:1", ACCOUNT), 50),
        (lambda: servers.delete_account(DIRECTORY, "b:1", "account9"), 51),
        (lambda: servers.set_white_addresses(DIRECTORY, "b:1", "10.0.0.9"), 53),
    ],
)
def test_what_a_broker_is_told_to_do(talk: Callable[[], Conversation[None]], code: int) -> None:
    assert told(talk(), Command(0))[1][0].command.code == code
    with pytest.raises(RequestError, match="no"):
        told(talk(), Command(1, remark="no"))
