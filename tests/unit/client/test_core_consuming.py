"""Routes, balance, reports, answers, subscriptions, start positions."""

from datetime import UTC, datetime

import pytest

from sluicemq.client.admin.group_report import group_report
from sluicemq.client.admin.groups import QueueProgress
from sluicemq.client.admin.topics import masters_of
from sluicemq.client.core.consuming import (
    ConsumeOptions,
    InFlight,
    SubscriptionRegistry,
    local_retry_delay_s,
    make_subscription,
    pull_pause_s,
)
from sluicemq.client.core.directory import (
    RouteCache,
    find_read_addresses,
    list_write_queues,
    predict_created_route,
)
from sluicemq.client.core.names import Credentials, sign_request
from sluicemq.client.core.requests import (
    PullStatus,
    SendStatus,
    expect_success,
    int_field,
    parse_pull_response,
    parse_send_response,
)
from sluicemq.errors import (
    ConfigurationError,
    FilterSyntaxError,
    GroupNotFoundError,
    PermissionDeniedError,
    ProtocolError,
    SubscriptionConflictError,
    TopicNotFoundError,
)
from sluicemq.model.topic import (
    BrokerData,
    MessageQueue,
    QueueData,
    TopicRoute,
    allocate_average,
    readable_queues,
)
from sluicemq.wire.bodies import ClusterInfo
from sluicemq.wire.frames import Command

ROUTE = TopicRoute(
    (
        BrokerData("b", "c1", {0: "b:1", 1: "b:2"}),
        BrokerData("a", "c1", {1: "a:2", 2: "a:3"}),
    ),
    (QueueData("b", 3, 2, 6), QueueData("a", 1, 1, 6), QueueData("x", 1, 1, 4)),
)


def test_producers_see_writable_queues_whose_master_is_there():
    assert list_write_queues("t", ROUTE) == [MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)]


def test_consumers_see_readable_queues_in_the_order_all_clients_sort_them():
    assert readable_queues("t", ROUTE) == [
        MessageQueue("t", "a", 0),
        *(MessageQueue("t", "b", n) for n in range(3)),
        MessageQueue("t", "x", 0),
    ]


def test_strict_order_keeps_its_queues_when_a_broker_is_away():
    route = TopicRoute(ROUTE.brokers, ROUTE.queues, "b:1;gone:2")
    assert list_write_queues("t", route) == [
        MessageQueue("t", "b", 0),
        MessageQueue("t", "gone", 0),
        MessageQueue("t", "gone", 1),
    ]


def test_reading_goes_to_the_master_or_to_the_first_slave():
    without = BrokerData("c", "c1", {})
    route = TopicRoute((*ROUTE.brokers, without), ROUTE.queues)
    assert find_read_addresses(route) == {"b": "b:1", "a": "a:2"}


def test_a_topic_made_on_the_first_send_has_at_most_four_queues():
    default = TopicRoute(ROUTE.brokers, (QueueData("b", 8, 8, 7),))
    assert predict_created_route(default).queues == (QueueData("b", 4, 4, 7),)


def test_routes_are_fresh_for_30_seconds_and_an_unknown_answer_keeps_the_old_one():
    routes = RouteCache()
    assert not routes.is_fresh("t", 0.0)
    assert routes.store("t", ROUTE, 100.0)
    assert not routes.store("t", ROUTE, 101.0), "not changed"
    assert routes.is_fresh("t", 130.9)
    assert not routes.is_fresh("t", 131.0)
    routes.store("t", None, 131.0)
    assert routes.routes["t"] is ROUTE
    assert len(routes.write_queues["t"]) == 2
    assert routes.master_addresses["t"] == {"b": "b:1"}
    assert routes.broker_addresses(["t"]) == {"b:1", "b:2", "a:2", "a:3"}
    routes.expire("t")
    assert not routes.is_fresh("t", 131.0)
    assert routes.routes["t"] is ROUTE
    routes.remove("t")
    assert not routes.routes
    assert not routes.write_queues
    assert not routes.master_addresses
    assert not routes.read_addresses


def queues(count):
    return [MessageQueue("t", "a", n) for n in range(count)]


@pytest.mark.parametrize(
    ("count", "members", "sizes"),
    [(8, 3, [3, 3, 2]), (3, 3, [1, 1, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (4, 1, [4])],
)
def test_shares_are_runs_of_queues_the_first_members_get_one_more(count, members, sizes):
    ids = [f"m{n}" for n in range(members)]
    shares = [allocate_average(one, queues(count), ids) for one in ids]
    assert [len(share) for share in shares] == sizes
    assert [queue for share in shares for queue in share] == queues(count)


def test_who_is_not_a_member_gets_nothing():
    assert allocate_average("z", queues(4), ["a", "b"]) == []


def test_the_lowest_unacknowledged_offset_may_be_committed():
    flight = InFlight(10)
    flight.add([(offset, 100) for offset in (10, 11, 15)], 20)
    assert (flight.committable, flight.count, flight.size_bytes) == (10, 3, 300)
    assert flight.ack(11)
    assert flight.committable == 10
    assert flight.ack(10)
    assert flight.committable == 15
    assert not flight.ack(10)
    assert not flight.ack(99)
    assert flight.ack(15)
    assert (flight.committable, flight.count, flight.size_bytes) == (20, 0, 0)


def test_what_nobody_was_given_is_taken_back_from_the_end_on():
    """A wanted subscription changes: messages that wait are read again, by the new one."""
    flight = InFlight(10)
    flight.add([(offset, 100) for offset in (10, 12, 15, 17)], 20)
    assert flight.rewind({10, 15, 17}) == {15, 17}, "12 was given, so 10 stays before it"
    assert (flight.position, flight.count, flight.size_bytes) == (15, 2, 200)
    assert flight.committable == 10
    assert not flight.ack(17), "it is as if it had never been seen"
    flight.add([(15, 100)], 16)
    for offset in (10, 12, 15):
        assert flight.ack(offset)
    assert flight.committable == 16, "the position: nothing was passed since"
    assert flight.rewind(()) == set()


def test_room_ends_at_either_limit():
    flight = InFlight(0)
    flight.add([(0, 50)], 1)
    assert flight.has_room(2, 51)
    assert not flight.has_room(1, 1000)
    assert not flight.has_room(100, 50)


def test_idle_members_are_named_with_the_reason():
    report = group_report(
        "g", ["m1", "m2", "m3"], [QueueProgress(queues(1)[0], 5, 12)], {"t": queues(2)}
    )
    assert [len(member.queues) for member in report.members] == [1, 1, 0]
    assert "3 members share 2 queues" in report.members[2].idle_because
    assert "stop 1 members" in report.members[2].idle_because
    assert report.lag == 7
    assert "No member of g is online" in group_report("g", [], [], {}).notes[0]
    assert "used by two members" in group_report("g", ["m", "m"], [], {"t": queues(2)}).notes[0]
    assert "no offsets yet" in group_report("g", ["m"], [], {}).members[0].idle_because


def test_masters_of_an_unknown_cluster_name_the_known_ones():
    info = ClusterInfo({data.broker: data for data in ROUTE.brokers}, {"c1": ("a", "b")})
    assert masters_of(info) == masters_of(info, "c1") == {"b": "b:1"}
    with pytest.raises(ConfigurationError, match="Use one of: c1"):
        masters_of(info, "c2")


@pytest.mark.parametrize(
    ("code", "kind"),
    [(17, TopicNotFoundError), (26, GroupNotFoundError), (16, PermissionDeniedError)],
)
def test_codes_become_their_exceptions_with_a_cure(code, kind):
    with pytest.raises(kind) as error:
        expect_success(Command(code, remark="why"), "host:1")
    assert error.value.code == code
    assert "why" in str(error.value)
    assert "host:1" in str(error.value)
    assert error.value.fix


def test_a_stored_message_may_have_missed_its_flush_or_slave():
    queue = MessageQueue("t", "a", 0)
    for code, status in [(10, SendStatus.FLUSH_DISK_TIMEOUT), (11, SendStatus.SLAVE_NOT_AVAILABLE)]:
        fields = {"msgId": "X", "queueId": "2", "queueOffset": "7"}
        (result,) = parse_send_response(Command(code, fields), queue, ("ID",), "")
        assert (result.status, result.queue.queue_id, result.queue_offset) == (status, 2, 7)
        assert (result.message_id, result.offset_message_id) == ("ID", "X")


def test_an_answer_without_its_number_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="must be an integer, got None"):
        int_field(Command(0), "offset")
    with pytest.raises(ProtocolError, match="'x'"):
        int_field(Command(0, {"offset": "x"}), "offset")


def test_pull_answers_keep_their_position_and_drop_a_body_that_is_none():
    fields = {"nextBeginOffset": "5", "minOffset": "1", "maxOffset": "9"}
    answer = parse_pull_response(Command(21, fields, b"junk", remark="OFFSET_RESET"), "")
    assert answer.status is PullStatus.OFFSET_ILLEGAL
    assert (answer.next_offset, answer.offset_min, answer.offset_max) == (5, 1, 9)
    assert answer.data == b""
    assert answer.remark == "OFFSET_RESET"


def test_one_expression_for_a_group_and_topic_until_the_last_user_leaves():
    registry = SubscriptionRegistry()
    tags = make_subscription("t", tags="A")
    registry.add_user("c", "g", tags)
    registry.add_user("c", "g", make_subscription("t", tags="A", version=5))
    sql = make_subscription("t", where="n > 1")
    with pytest.raises(SubscriptionConflictError, match=r"tags='A'.*where='n > 1'"):
        registry.add_user("c", "g", sql)
    registry.add_user("other cluster", "g", sql)
    registry.add_user("c", "other group", sql)
    registry.remove_user("c", "g", "t")
    with pytest.raises(SubscriptionConflictError):
        registry.add_user("c", "g", sql)
    registry.remove_user("c", "g", "t")
    registry.add_user("c", "g", sql)


def test_a_filter_that_does_something_else_than_it_seems_is_logged(caplog):
    make_subscription("t", where="NOT a = 5")
    assert "NOT a = 5" in caplog.text


def test_text_that_would_be_ignored_is_refused():
    with pytest.raises(FilterSyntaxError, match="not valid at character 7"):
        make_subscription("t", where="a = 5 garbage")


def test_where_a_group_starts_is_checked():
    moment = datetime(2013, 1, 1, tzinfo=UTC)
    assert ConsumeOptions(start=moment).start_ms == 1_356_998_400_000
    assert ConsumeOptions(start="last").consume_from == "CONSUME_FROM_LAST_OFFSET"
    assert ConsumeOptions(start=5).consume_from == "CONSUME_FROM_TIMESTAMP"
    for wrong in ({"start": "begin"}, {"count_max": 0}, {"pull_count": 0}):
        with pytest.raises(ConfigurationError):
            ConsumeOptions(**wrong)


def test_pauses_grow_and_end():
    assert [local_retry_delay_s(n) for n in (1, 2, 3, 7, 50)] == [1, 2, 4, 60, 60]
    assert [pull_pause_s(n) for n in (1, 2, 50)] == [0.2, 0.4, 5.0]


def test_credentials_are_a_pair_and_keep_their_secret():
    credentials = Credentials.from_value(("user", "hidden"))
    assert "hidden" not in repr(credentials)
    command = sign_request(Command(10, {"a": "1"}, b"x"), credentials)
    assert command.fields["AccessKey"] == "user"
    again = dict(command.fields)
    assert sign_request(command, credentials).fields == again, "a retry signs the same content"
    assert Credentials.from_value(None) is None
    with pytest.raises(ConfigurationError, match="access_key, secret_key"):
        Credentials.from_value(("user", ""))


@pytest.mark.parametrize("where", ["", " ", "\t\n"])
def test_an_empty_expression_is_called_empty(where: str) -> None:
    with pytest.raises(FilterSyntaxError, match=r"The SQL92 expression is empty\. Write TRUE"):
        make_subscription("t", where=where)
    assert make_subscription("t", tags="").expression == "*"
