"""What heartbeats make a broker keep: bounded, given back, and taken apart in slices."""

from typing import Any

import orjson
import pytest

from simulation.stepped import SteppedBroker, SteppedClient
from sluicemq.broker.consume import client_memory, clients, filters
from sluicemq.config import BrokerConfig
from sluicemq.filter import subscriptions
from sluicemq.wire.codes import RequestCode, ResponseCode
from sluicemq.wire.frames import Command

MIB = 1 << 20


def heartbeat(
    client: SteppedClient,
    client_id: str = "c",
    groups: dict[str, list[dict[str, Any]]] | None = None,
    producers: list[str] | None = None,
) -> Command:
    """Say the subscriptions of consumer groups, and producer groups."""
    body = {
        "clientID": client_id,
        "producerDataSet": [{"groupName": name} for name in producers or ()],
        "consumerDataSet": [
            {"groupName": name, "subscriptionDataSet": wanted}
            for name, wanted in (groups or {}).items()
        ],
    }
    return client.call(RequestCode.HEART_BEAT, {}, orjson.dumps(body))


def wanted(topic: str, text: str = "*", kind: str = "TAG", **more: Any) -> dict[str, Any]:
    return {"topic": topic, "subString": text, "expressionType": kind, "subVersion": 1, **more}


def with_limits(connection: int = 16 * MIB, everybody: int = 256 * MIB) -> SteppedBroker:
    config = BrokerConfig(
        broker_name="broker-a", metrics_enable=False, enable_property_filter=True,
        client_bytes_max=connection, clients_bytes_max=everybody,
    )  # fmt: skip
    return SteppedBroker(config=config)


def test_one_connection_keeps_so_much_however_many_groups_and_clients_it_names() -> None:
    """hb_memory: each heartbeat of 0.6 MB under another client id and group became 9 MB."""
    broker = with_limits(connection=4 * MIB)
    client = broker.connect()
    answers = []
    for number in range(6):
        topics = [wanted(f"{number}t{k}", codeSet=list(range(20))) for k in range(500)]
        answers.append(heartbeat(client, f"c{number}", {f"g{number}": topics}))
    assert [answer.code for answer in answers] == [0, 0, 1, 1, 1, 1]
    remark = answers[-1].remark or ""
    assert "limit is sluiceClientBytesMax = 4194304. Subscribe to fewer topics" in remark
    assert sorted(broker.core.consumers.groups) == ["g0", "g1"]
    other = broker.connect()
    assert heartbeat(other, "other", {"g": [wanted("T")]}).code == 0


def test_a_heartbeat_that_says_the_same_again_takes_no_more() -> None:
    broker = with_limits(connection=2 * MIB)
    client = broker.connect()
    for version in range(5):
        topics = [wanted(f"t{k}", subVersion=version) for k in range(1000)]
        assert heartbeat(client, "c", {"g": topics}).code == 0
    assert broker.core.held_bytes.total < 2 * MIB


def test_all_connections_together_keep_so_much() -> None:
    broker = with_limits(connection=2 * MIB, everybody=3 * MIB)
    topics = [wanted(f"t{k}") for k in range(1000)]
    answers = [heartbeat(broker.connect(), f"c{n}", {f"g{n}": topics}) for n in range(4)]
    busy = ResponseCode.SYSTEM_BUSY
    assert [answer.code for answer in answers] == [0, 0, 0, busy]
    assert "sluiceClientsBytesMax = 3145728" in (answers[-1].remark or "")


@pytest.mark.parametrize("how", ["disconnect", "unregister", "expire"])
def test_what_a_member_took_is_given_back_when_it_leaves(how: str) -> None:
    broker = with_limits()
    client = broker.connect()
    heartbeat(client, "c", {f"g{n}": [wanted("T")] for n in range(300)}, ["p0", "p1"])
    assert broker.core.held_bytes.total > 300 * client_memory.MEMBER_BYTES
    if how == "disconnect":
        client.disconnect()
    elif how == "expire":
        broker.clock.advance(1000)
        broker.core.expire_clients()
    else:
        for number in range(300):
            fields = {"clientID": "c", "consumerGroup": f"g{number}"}
            client.call(RequestCode.UNREGISTER_CLIENT, fields)
        for number in range(2):
            fields = {"clientID": "c", "producerGroup": f"p{number}"}
            client.call(RequestCode.UNREGISTER_CLIENT, fields)
    broker.step()
    assert broker.core.held_bytes.total == len(broker.core.held_bytes) == 0
    assert not broker.core.consumers.groups
    assert not broker.core.producers.groups
    assert broker.core.producers.find_connection("c") is None


def test_one_connection_cannot_take_all_places_of_producers() -> None:
    broker = with_limits(connection=1 * MIB)
    greedy, other = broker.connect(), broker.connect()
    answer = heartbeat(greedy, "greedy", producers=[f"p{n}" for n in range(5000)])
    assert answer.code == 1
    assert len(broker.core.producers.groups) < 1100
    assert heartbeat(other, "other", producers=["mine"]).code == 0
    assert broker.core.producers.find_connection("other") is not None


def test_filters_of_groups_that_are_away_make_room_for_those_that_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filters, "TABLE_BYTES_MAX", 20_000)
    broker = with_limits()
    table = broker.core.filters
    for number in range(100):
        client = broker.connect()
        expression = f"a = '{number:0100}'"
        answer = heartbeat(client, f"c{number}", {f"g{number}": [wanted("T", expression, "SQL92")]})
        assert answer.code == 0
        client.disconnect()
        broker.clock.advance(1)
    kept = [item for topics in table.table.values() for item in topics.values()]
    assert table.size_bytes == sum(500 + len(item.expression) for item in kept) <= 20_000
    assert "g99" in table.table
    assert "g0" not in table.table


def test_an_expression_that_finds_no_room_is_served_but_not_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(filters, "TABLE_BYTES_MAX", 1200)
    broker = with_limits()
    for name in ("g1", "g2", "g3", "g4"):
        heartbeat(broker.connect(), name, {name: [wanted("T", "a = 1", "SQL92")]})
    assert sorted(broker.core.filters.table) == ["g1", "g2"]
    assert broker.core.consumers.find_subscription("g4", "T") is not None
    assert caplog.text.count("further ones are used, but not saved") == 1


def test_a_tag_expression_without_end_is_refused() -> None:
    text = "x" * (subscriptions.TAGS_LENGTH_MAX + 1)
    with pytest.raises(subscriptions.FilterSyntaxError, match="65537 characters"):
        subscriptions.parse_subscription("T", text)


def test_the_members_of_a_connection_are_found_without_a_look_at_all_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each group that leaves is a step of its own, between which others are served."""
    broker = with_limits()
    client, bystander = broker.connect(), broker.connect()
    heartbeat(bystander, "b", {"mine": [wanted("T")]})
    heartbeat(client, "c", {f"g{n}": [wanted("T")] for n in range(50)})
    left: list[str] = []
    unregister = clients.Consumers.unregister
    monkeypatch.setattr(
        clients.Consumers,
        "unregister",
        lambda self, name, *rest: (left.append(name), unregister(self, name, *rest)),
    )
    steps = broker.core.consumers.remove_connection(client.peer)
    for number, _ in enumerate(steps, 1):
        assert len(left) == number
    assert sorted(left) == sorted(f"g{n}" for n in range(50))
