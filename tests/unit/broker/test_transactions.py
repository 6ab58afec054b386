"""Transactions of a stepped broker on a manual clock: halves, ends, checks, restarts."""

import dataclasses
import errno
import logging

import pytest

from simulation.stepped import (
    SMALL,
    SteppedBroker,
    SteppedClient,
    pull_fields,
    send_fields,
)
from sluicemq.broker.transactions.transactions import AbandonedTransaction
from sluicemq.config import BrokerConfig
from sluicemq.model.message import StoredMessage
from sluicemq.model.system_names import CHECK_MAX_TOPIC, HALF_TOPIC, OP_TOPIC, TRANSACTION_GROUP
from sluicemq.record.codec import decode_record, decode_records
from sluicemq.wire import bodies
from sluicemq.wire.bodies import Heartbeat, encode_heartbeat
from sluicemq.wire.frames import FLAG_ONEWAY, Command

COMMIT, ROLLBACK, UNKNOWN = 8, 12, 0
CHECK = 39
CONFIG = BrokerConfig(broker_name="broker-a", metrics_enable=False)


def half_fields(
    number: int = 1, *, topic: str = "T", more: str = "", **changes: object
) -> dict[str, object]:
    """The fields of a half message as clients send it."""
    properties = f"UNIQ_KEY\x01ID{number}\x02TRAN_MSG\x01true\x02PGROUP\x01P\x02TAGS\x01A\x02{more}"
    return send_fields(topic, properties, f=4, **changes)


@dataclasses.dataclass
class Sent:
    """What the answer to a half message tells its producer."""

    unique_id: str
    half_offset: int
    physical_offset: int

    def end(self, outcome: int, **changes: object) -> dict[str, object]:
        return {
            "producerGroup": "P", "tranStateTableOffset": self.half_offset,
            "commitLogOffset": self.physical_offset, "commitOrRollback": outcome,
            "fromTransactionCheck": "false", "msgId": self.unique_id,
            "transactionId": self.unique_id,
        } | changes  # fmt: skip


def begin(client: SteppedClient, number: int = 1, **options: object) -> Sent:
    answer = client.call(310, half_fields(number, **options), b"body-%d" % number)
    assert answer.code == 0, answer.remark
    fields = answer.fields or {}
    assert fields["transactionId"] == f"ID{number}"
    return Sent(f"ID{number}", int(fields["queueOffset"]), int(fields["msgId"][16:], 16))


def visible(broker: SteppedBroker, topic: str = "T") -> list[StoredMessage]:
    """Every message of queue 0 as a consumer gets it."""
    answer = broker.connect().call(11, pull_fields(topic))
    return decode_records(answer.body) if answer.code == 0 else []


def bodies_of(broker: SteppedBroker, topic: str = "T") -> list[bytes]:
    return [message.body for message in visible(broker, topic)]


def producer(broker: SteppedBroker, name: str = "c1", group: str = "P") -> SteppedClient:
    client = broker.connect()
    beat = Command(34, {}, encode_heartbeat(Heartbeat(name, (group,), ())))
    client.feed(beat)
    broker.step()
    return client


def run(broker: SteppedBroker, seconds: float, step_s: float = 0.5) -> None:
    broker.run(seconds, step_s)


def questions(client: SteppedClient) -> list[Command]:
    return [request for request in client.requests if request.code == CHECK]


def answer_check(client: SteppedClient, outcome: int, **changes: object) -> None:
    """What a Java client sends when it is asked for the last time."""
    fields = questions(client)[-1].fields or {}
    sent = Sent(
        fields["msgId"], int(fields["tranStateTableOffset"]), int(fields["commitLogOffset"])
    )
    client.feed(
        Command(
            37, {k: str(v) for k, v in sent.end(outcome, fromTransactionCheck="true").items()},
            flag=FLAG_ONEWAY, opaque=9000,
        )
    )  # fmt: skip


def restarted(broker: SteppedBroker, *, kill: bool = False) -> SteppedBroker:
    """The broker started again, after a stop in order or the death of its process."""
    if not kill:
        broker.close()
    return SteppedBroker(
        config=broker.settings.broker, store_config=broker.settings.store,
        files=broker.files.kill() if kill else broker.files, clock=broker.clock,
    )  # fmt: skip


@pytest.fixture
def broker() -> SteppedBroker:
    return SteppedBroker(config=CONFIG)


# --- the two phases


def test_a_half_message_is_seen_when_its_transaction_is_committed(broker: SteppedBroker) -> None:
    client = producer(broker)
    sent = begin(client)
    assert bodies_of(broker) == []
    assert client.call(37, sent.end(COMMIT)).code == 0
    [message] = visible(broker)
    assert message.body == b"body-1"
    assert message.sys_flag & 0xC == COMMIT
    assert message.prepared_offset == sent.physical_offset
    assert message.tag == "A"
    assert message.properties["__transactionId__"] == "ID1"
    assert message.properties["REAL_TOPIC"] == "T"


def test_a_half_message_is_never_seen_when_its_transaction_is_rolled_back(
    broker: SteppedBroker,
) -> None:
    client = producer(broker)
    answer = client.call(37, begin(client).end(ROLLBACK))
    assert (answer.code, answer.remark) == (0, "not set any response code")
    run(broker, 120)
    assert bodies_of(broker) == []
    assert questions(client) == []
    assert client.call(37, begin(client, 2).end(COMMIT)).code == 0
    assert bodies_of(broker) == [b"body-2"]


def test_an_undecided_end_is_not_answered(broker: SteppedBroker) -> None:
    client = producer(broker)
    client.feed(Command(37, {k: str(v) for k, v in begin(client).end(UNKNOWN).items()}, opaque=77))
    broker.step()
    assert 77 not in client.answers


def test_ends_are_durable_before_they_are_answered() -> None:
    store = dataclasses.replace(SMALL, flush_sync=True)
    broker = SteppedBroker(config=CONFIG, store_config=store)
    client = broker.connect()
    client.feed(Command(310, {k: str(v) for k, v in half_fields().items()}, b"x", opaque=1))
    broker.settle()
    fields = client.answers[1].fields or {}
    sent = Sent("ID1", int(fields["queueOffset"]), int(fields["msgId"][16:], 16))
    client.feed(Command(37, {k: str(v) for k, v in sent.end(COMMIT).items()}, opaque=2))
    broker.step()
    assert 2 not in client.answers
    assert bodies_of(broker) == []
    broker.finish_sync()
    assert client.answers[2].code == 0
    assert bodies_of(broker) == [b"x"]


# --- what an end has to prove


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        ({"producerGroup": "Q"}, "The producer group wrong"),
        ({"tranStateTableOffset": 7}, "The transaction state table offset wrong"),
        ({"commitLogOffset": 3}, "there is no half message at commitLogOffset 3"),
        ({"commitLogOffset": 1 << 40}, "there is no half message"),
        ({"commitOrRollback": 5}, "commitOrRollback must be 8 (commit)"),
    ],
)
def test_an_end_that_names_the_wrong_half_is_refused(
    broker: SteppedBroker, change: dict[str, object], remark: str
) -> None:
    client = producer(broker)
    answer = client.call(37, begin(client).end(COMMIT, **change))
    assert answer.code == 1
    assert remark in (answer.remark or "")
    assert bodies_of(broker) == []


def test_a_place_of_an_ordinary_message_is_no_half(broker: SteppedBroker) -> None:
    client = producer(broker)
    fields = client.call(310, send_fields(), b"plain").fields or {}
    sent = Sent("AB12", 0, int(fields["msgId"][16:], 16))
    assert client.call(37, sent.end(COMMIT)).code == 1
    assert bodies_of(broker) == [b"plain"]


def test_an_end_after_the_time_that_the_producer_asked_for_is_too_late(
    broker: SteppedBroker,
) -> None:
    client = broker.connect()  # no heartbeat: nobody is asked meanwhile
    immunity = "CHECK_IMMUNITY_TIME_IN_SECONDS\x0110\x02"
    early, late = begin(client, 1, more=immunity), begin(client, 2, more=immunity)
    run(broker, 9)
    assert client.call(37, early.end(COMMIT)).code == 0
    run(broker, 2)
    answer = client.call(37, late.end(COMMIT))
    assert (answer.code, "A check decides" in (answer.remark or "")) == (604, True)
    assert client.call(37, late.end(COMMIT, fromTransactionCheck="true")).code == 0
    assert bodies_of(broker) == [b"body-1", b"body-2"]


def test_without_such_a_time_an_end_is_never_too_late(broker: SteppedBroker) -> None:
    client = broker.connect()
    sent = begin(client)
    run(broker, 100)
    assert client.call(37, sent.end(COMMIT)).code == 0


# --- what cannot be a half message


@pytest.mark.parametrize(
    "more",
    ["DELAY\x013\x02", "TIMER_DELAY_MS\x01500\x02", "TIMER_DELAY_SEC\x015\x02",
     "TIMER_DELIVER_MS\x019999999999999\x02"],
)  # fmt: skip
def test_delays_and_transactions_exclude_each_other(broker: SteppedBroker, more: str) -> None:
    answer = broker.connect().call(310, half_fields(more=more), b"x")
    assert answer.code == 13
    assert "a message of a transaction cannot be delayed" in (answer.remark or "")
    assert broker.store.queue_offsets(HALF_TOPIC, 0) == (0, 0)


def test_batches_and_transactions_exclude_each_other(broker: SteppedBroker) -> None:
    fields = send_fields(properties="TRAN_MSG\x01true\x02PGROUP\x01P\x02", m="true")
    answer = broker.connect().call(320, fields, b"x")
    assert answer.code == 13
    assert "a batch cannot be part of a transaction" in (answer.remark or "")


def test_a_half_message_needs_a_group_to_ask(broker: SteppedBroker) -> None:
    fields = send_fields(properties="UNIQ_KEY\x01X\x02TRAN_MSG\x01true\x02", f=4)
    answer = broker.connect().call(310, fields, b"x")
    assert (answer.code, "PGROUP" in (answer.remark or "")) == (13, True)


@pytest.mark.parametrize("sys_flag", [4, 8, 12])
def test_a_flag_without_the_property_is_refused(broker: SteppedBroker, sys_flag: int) -> None:
    answer = broker.connect().call(310, send_fields(f=sys_flag), b"x")
    assert (answer.code, "sysFlag" in (answer.remark or "")) == (13, True)


def test_transactions_can_be_switched_off(broker: SteppedBroker) -> None:
    broker.change(reject_transactions=True)
    answer = broker.connect().call(310, half_fields(), b"x")
    assert (answer.code, "rejectTransactionMessage" in (answer.remark or "")) == (16, True)


def test_the_number_of_undecided_transactions_is_bounded(broker: SteppedBroker) -> None:
    broker.change(transactions_open_max=2)
    client = broker.connect()
    first, _ = begin(client, 1), begin(client, 2)
    answer = client.call(310, half_fields(3), b"x")
    assert (answer.code, "sluiceTransactionsOpenMax" in (answer.remark or "")) == (2, True)
    client.call(37, first.end(ROLLBACK))
    begin(client, 3)


def test_what_a_consumer_gives_back_is_no_half_message(broker: SteppedBroker) -> None:
    """The 5.x fall-back sends a copy with all its properties to the retry topic."""
    consumer = broker.connect()
    group = bodies.ConsumerData("G")
    consumer.feed(Command(34, {}, encode_heartbeat(Heartbeat("c", (), (group,)))))
    broker.step()
    fields = half_fields(topic="%RETRY%G", more="DELAY\x013\x02RETRY_TOPIC\x01T\x02", j=1)
    assert broker.connect().call(310, fields | {"f": 0}, b"again").code == 0
    assert broker.store.queue_offsets(HALF_TOPIC, 0) == (0, 0)
    run(broker, 15)
    assert bodies_of(broker, "%RETRY%G") == [b"again"]


# --- twice


def test_a_second_commit_changes_nothing(broker: SteppedBroker) -> None:
    client = producer(broker)
    sent = begin(client)
    for _ in range(3):
        assert client.call(37, sent.end(COMMIT)).code == 0
    client.feed(
        *[Command(37, {k: str(v) for k, v in sent.end(COMMIT).items()}, flag=FLAG_ONEWAY)] * 2
    )
    broker.step()
    assert bodies_of(broker) == [b"body-1"]


def test_two_commits_in_one_turn_are_one_message(broker: SteppedBroker) -> None:
    client = producer(broker)
    sent = begin(client)
    fields = {k: str(v) for k, v in sent.end(COMMIT).items()}
    client.feed(Command(37, dict(fields), opaque=50), Command(37, dict(fields), opaque=51))
    broker.step()
    assert (client.answers[50].code, client.answers[51].code) == (0, 0)
    assert bodies_of(broker) == [b"body-1"]


@pytest.mark.parametrize(("first", "second"), [(COMMIT, ROLLBACK), (ROLLBACK, COMMIT)])
def test_a_decision_stands(broker: SteppedBroker, first: int, second: int) -> None:
    client = producer(broker)
    sent = begin(client)
    client.call(37, sent.end(first))
    answer = client.call(37, sent.end(second))
    assert (answer.code, "before and cannot change" in (answer.remark or "")) == (1, True)
    assert bodies_of(broker) == ([b"body-1"] if first == COMMIT else [])


def test_a_send_that_was_repeated_is_one_transaction(broker: SteppedBroker) -> None:
    """Its answer was lost, so the client sent it again, perhaps to another queue."""
    client = producer(broker)
    begin(client, 1)
    second = begin(client, 1, e=2)
    client.call(37, second.end(COMMIT))
    run(broker, 120)
    assert questions(client) == []
    assert bodies_of(broker) == []
    assert len(decode_records(client.call(11, pull_fields() | {"queueId": 2}).body)) == 1


def test_other_messages_under_the_same_id_are_other_transactions(broker: SteppedBroker) -> None:
    client = producer(broker)
    first = begin(client, 1)
    answer = client.call(310, half_fields(1), b"another body").fields or {}
    second = Sent("ID1", int(answer["queueOffset"]), int(answer["msgId"][16:], 16))
    client.call(37, second.end(COMMIT))
    assert bodies_of(broker) == [b"another body"]
    client.call(37, first.end(COMMIT))
    assert bodies_of(broker) == [b"another body", b"body-1"]


def test_a_message_object_that_is_used_again_is_another_transaction(
    broker: SteppedBroker,
) -> None:
    """Java keeps the id of a Message that is sent twice, and does not wait for the end."""
    client = producer(broker)
    first = begin(client, 1)
    client.feed(
        Command(37, {k: str(v) for k, v in first.end(COMMIT).items()}, flag=FLAG_ONEWAY),
        Command(310, {k: str(v) for k, v in half_fields(1).items()}, b"body-1", opaque=60),
    )
    broker.step()
    fields = client.answers[60].fields or {}
    second = Sent("ID1", int(fields["queueOffset"]), int(fields["msgId"][16:], 16))
    assert client.call(37, first.end(COMMIT)).code == 0  # the late twin of the first one's end
    assert bodies_of(broker) == [b"body-1"]
    client.call(37, second.end(COMMIT))
    assert bodies_of(broker) == [b"body-1", b"body-1"]


# --- asking


def test_an_undecided_transaction_is_asked_about_when_its_time_is_over(
    broker: SteppedBroker,
) -> None:
    client = producer(broker)
    sent = begin(client)
    run(broker, 5.5)
    assert questions(client) == []
    run(broker, 1)
    [asked] = questions(client)
    fields = asked.fields or {}
    assert asked.is_oneway
    assert (fields["topic"], fields["bname"]) == (HALF_TOPIC, "broker-a")
    assert (fields["msgId"], fields["transactionId"]) == ("ID1", "ID1")
    assert int(fields["tranStateTableOffset"]) == sent.half_offset + 1
    message = decode_record(asked.body)
    assert (message.topic, message.queue_id, message.body) == ("T", 0, b"body-1")
    assert message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert message.properties["PGROUP"] == "P"
    assert message.offset_message_id == fields["offsetMsgId"]
    answer_check(client, COMMIT)
    run(broker, 120)
    assert bodies_of(broker) == [b"body-1"]
    assert len(questions(client)) == 1


def test_another_client_decides_when_the_sender_is_dead(broker: SteppedBroker) -> None:
    sender, other = producer(broker, "sender"), producer(broker, "other")
    begin(sender)
    broker.core.on_disconnect(sender.peer)
    sender.peer.closed = True
    run(broker, 7)
    assert questions(sender) == []
    assert len(questions(other)) == 1
    answer_check(other, ROLLBACK)
    run(broker, 60)
    assert len(questions(other)) == 1
    assert bodies_of(broker) == []


def test_a_client_whose_connection_is_closing_is_not_asked(broker: SteppedBroker) -> None:
    """Between the broker's own close of a connection and the end of it the client is still a member
    of its group. A question that is written there is lost, and with it one of the checks."""
    closing, live = producer(broker, "closing"), producer(broker, "live")
    closing.peer.closed = True
    begin(live, 1)
    begin(live, 2)
    run(broker, 7)
    assert questions(closing) == []
    assert [decode_record(q.body).body for q in questions(live)] == [b"body-1", b"body-2"]


def test_a_message_says_itself_when_it_may_be_asked_about(broker: SteppedBroker) -> None:
    client = producer(broker)
    begin(client, 1, more="CHECK_IMMUNITY_TIME_IN_SECONDS\x0160\x02")
    begin(client, 2, more="CHECK_IMMUNITY_TIME_IN_SECONDS\x011\x02")
    run(broker, 3)
    assert [decode_record(q.body).body for q in questions(client)] == [b"body-2"]
    answer_check(client, ROLLBACK)
    run(broker, 56)
    assert len(questions(client)) == 1
    run(broker, 2)
    assert [decode_record(q.body).body for q in questions(client)] == [b"body-2", b"body-1"]


def test_an_unknown_answer_brings_the_question_again_after_the_interval(
    broker: SteppedBroker,
) -> None:
    client = producer(broker)
    begin(client)
    run(broker, 7)
    answer_check(client, UNKNOWN)
    run(broker, 28)
    assert len(questions(client)) == 1
    run(broker, 3)
    assert len(questions(client)) == 2
    assert decode_record(questions(client)[1].body).properties["TRANSACTION_CHECK_TIMES"] == "2"


def test_an_end_that_names_an_older_half_ends_the_transaction(broker: SteppedBroker) -> None:
    """The local transaction was slow: meanwhile the half was written again for a check."""
    client = producer(broker)
    sent = begin(client)
    run(broker, 7)
    answer_check(client, UNKNOWN)
    assert client.call(37, sent.end(COMMIT)).code == 0
    answer_check(client, COMMIT)
    run(broker, 120)
    assert bodies_of(broker) == [b"body-1"]
    assert len(questions(client)) == 1


def test_an_end_while_the_question_is_being_written_ends_the_transaction(
    broker: SteppedBroker,
) -> None:
    client = producer(broker)
    sent = begin(client)
    broker.clock.advance(6.5)
    broker.core.sweep()  # the half is written again; its turn has not ended
    client.feed(Command(37, {k: str(v) for k, v in sent.end(COMMIT).items()}, opaque=80))
    broker.settle()
    assert client.answers[80].code == 0
    run(broker, 120)
    assert questions(client) == []
    assert bodies_of(broker) == [b"body-1"]
    assert len(broker.core.transactions.table) == 0


def test_members_without_a_listener_are_named_once_and_others_asked(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    mute, willing = producer(broker, "mute"), producer(broker, "willing")
    for number in range(1, 9):
        begin(willing, number)
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            run(broker, 31)
            while len(willing.requests) and questions(willing):
                answer_check(willing, COMMIT)
                willing.requests.remove(questions(willing)[-1])
            broker.settle()
    assert sorted(bodies_of(broker)) == [b"body-%d" % n for n in range(1, 9)]
    named = [r.getMessage() for r in caplog.records if "TransactionListener" in r.getMessage()]
    assert len(named) == 1
    assert "client mute of producer group P" in named[0]
    assert len(questions(mute)) <= 4
    assert broker.core.transactions.checker.unanswered_count == len(questions(mute))


def test_checks_without_anybody_to_ask_do_not_count(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    sender = broker.connect()
    begin(sender)
    with caplog.at_level(logging.WARNING):
        run(broker, 3600, 5.0)
    assert sum("no client of the group" in r.getMessage() for r in caplog.records) == 1
    assert broker.store.queue_offsets(HALF_TOPIC, 0)[1] == 1
    client = producer(broker)
    run(broker, 1)
    assert decode_record(questions(client)[0].body).properties["TRANSACTION_CHECK_TIMES"] == "1"


def test_a_client_that_connects_is_asked_at_once_about_what_was_due(broker: SteppedBroker) -> None:
    """The log says that the transactions are checked when a client connects."""
    sender = broker.connect()
    begin(sender, 1)
    begin(sender, 2, more="CHECK_IMMUNITY_TIME_IN_SECONDS\x01600\x02")  # not due
    ended = begin(sender, 3)
    run(broker, 12)
    assert sender.call(37, ended.end(ROLLBACK)).code == 0
    stranger = producer(broker, "stranger", "Q")
    run(broker, 1)
    assert questions(stranger) == []
    client, second = producer(broker, "c1"), producer(broker, "c2")
    run(broker, 1)
    (asked,) = [*questions(client), *questions(second)]
    assert (asked.fields or {})["msgId"] == "ID1"
    run(broker, 25)  # the next check is an interval later
    assert len([*questions(client), *questions(second)]) == 1


def test_a_client_that_leaves_before_it_is_asked_changes_nothing(broker: SteppedBroker) -> None:
    begin(broker.connect())
    run(broker, 12)
    producer(broker).disconnect()
    run(broker, 12)
    assert broker.store.queue_offsets(HALF_TOPIC, 0)[1] == 1
    client = producer(broker)
    run(broker, 1)
    answer_check(client, COMMIT)
    run(broker, 1)
    assert bodies_of(broker) == [b"body-1"]


# --- giving up


def test_after_so_many_checks_a_transaction_is_given_up(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[AbandonedTransaction] = []
    broker.core.transactions.on_given_up.append(told.append)
    client = producer(broker)
    sent = begin(client)
    with caplog.at_level(logging.ERROR):
        for _ in range(20):
            run(broker, 31)
            answer_check(client, UNKNOWN)
    assert len(questions(client)) == 15
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(lines) == 1
    assert "ID1 of producer group P for topic T is abandoned after 15 checks" in lines[0]
    assert [(one.unique_id, one.check_count, one.topic) for one in told] == [("ID1", 15, "T")]
    assert broker.core.transactions.abandoned_count == 1
    [kept] = visible(broker, CHECK_MAX_TOPIC)
    assert (kept.body, kept.properties["REAL_TOPIC"]) == (b"body-1", "T")
    assert bodies_of(broker) == []
    answer = client.call(37, sent.end(COMMIT))
    assert (answer.code, "abandoned before" in (answer.remark or "")) == (1, True)


def test_a_transaction_that_is_older_than_the_log_is_kept_is_given_up(
    broker: SteppedBroker,
) -> None:
    begin(broker.connect())
    run(broker, 72 * 3600, 600.0)
    assert visible(broker, CHECK_MAX_TOPIC) == []
    run(broker, 700, 50.0)
    assert len(visible(broker, CHECK_MAX_TOPIC)) == 1


def test_a_hook_that_fails_harms_nobody(
    broker: SteppedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    broker.change(transaction_check_max=0)

    def broken(given_up: AbandonedTransaction) -> None:
        raise KeyError(given_up.unique_id)

    broker.core.transactions.on_given_up.append(broken)
    begin(broker.connect())
    run(broker, 10)
    assert broker.core.transactions.abandoned_count == 1
    assert "a hook for abandoned transactions failed" in caplog.text


# --- commits that cannot be stored


def test_a_commit_to_a_deleted_topic_leaves_the_transaction_undecided(
    broker: SteppedBroker,
) -> None:
    client = producer(broker)
    sent = begin(client)
    config = broker.core.topics.table["T"].config
    broker.core.topics.remove("T")
    answer = client.call(37, sent.end(COMMIT))
    assert (answer.code, "topic[T] not exist" in (answer.remark or "")) == (17, True)
    broker.core.topics.put(config)
    run(broker, 7)
    answer_check(client, COMMIT)
    broker.settle()
    assert bodies_of(broker) == [b"body-1"]


def test_a_turn_that_fails_leaves_the_transaction_undecided(broker: SteppedBroker) -> None:
    client = producer(broker)
    sent = begin(client)
    broker.files.fail_next("write", errno.ENOSPC, path_part="commitlog")
    assert client.call(37, sent.end(COMMIT)).code != 0
    assert bodies_of(broker) == []
    assert client.call(37, sent.end(COMMIT)).code == 0
    assert bodies_of(broker) == [b"body-1"]
    assert len(broker.core.transactions.table) == 0


def test_a_question_whose_turn_fails_is_asked_later(broker: SteppedBroker) -> None:
    client = producer(broker)
    begin(client)
    run(broker, 5.5)
    broker.files.fail_next("write", errno.ENOSPC, path_part="commitlog")
    run(broker, 2)
    assert questions(client) == []
    run(broker, 31)
    assert len(questions(client)) == 1


# --- restarts


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_undecided_transactions_and_their_checks_survive_a_restart(
    broker: SteppedBroker, kill: bool
) -> None:
    client = producer(broker)
    ended = [begin(client, number) for number in range(1, 4)]
    client.call(37, ended[0].end(COMMIT))
    client.call(37, ended[1].end(ROLLBACK))
    run(broker, 7)
    answer_check(client, UNKNOWN)
    run(broker, 31)  # ID3: two checks
    again = restarted(broker, kill=kill)
    assert [t.unique_id for t in again.core.transactions.table] == ["ID3"]
    client = producer(again)
    run(again, 31)
    [asked] = questions(client)
    assert decode_record(asked.body).properties["TRANSACTION_CHECK_TIMES"] == "3"
    answer_check(client, COMMIT)
    run(again, 120)
    assert bodies_of(again) == [b"body-1", b"body-3"]
    assert len(questions(client)) == 1


def test_a_finished_transaction_is_not_asked_about_after_a_kill(broker: SteppedBroker) -> None:
    client = producer(broker)
    for number in range(1, 50):
        client.call(37, begin(client, number).end(COMMIT if number % 2 else ROLLBACK))
    again = restarted(broker, kill=True)
    client = producer(again)
    run(again, 120)
    assert questions(client) == []
    assert len(bodies_of(again)) == 25


def test_a_start_reads_only_what_is_not_done(broker: SteppedBroker) -> None:
    client = producer(broker)
    for number in range(1, 100):
        client.call(37, begin(client, number).end(COMMIT))
    open_one = begin(client, 100)
    broker.store.sync()
    run(broker, 1)
    offsets = broker.core.offsets
    assert offsets.committed(TRANSACTION_GROUP, HALF_TOPIC, 0) == open_one.half_offset == 99
    assert offsets.committed(TRANSACTION_GROUP, OP_TOPIC, 0) == 99
    again = restarted(broker)
    table = again.core.transactions.table
    assert [t.unique_id for t in table] == ["ID100"]
    assert (table.lowest_half_offset, table.find_lowest_op_offset(table.lowest_half_offset)) == (
        99,
        99,
    )


def test_offsets_are_kept_only_as_far_as_the_disk_has_the_log(broker: SteppedBroker) -> None:
    client = producer(broker)
    client.call(37, begin(client).end(COMMIT))
    run(broker, 1)
    assert broker.core.offsets.committed(TRANSACTION_GROUP, HALF_TOPIC, 0) <= 0
    broker.store.sync()
    run(broker, 1)
    assert broker.core.offsets.committed(TRANSACTION_GROUP, HALF_TOPIC, 0) == 1


def test_an_old_transaction_is_carried_forward(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sluicemq.broker.transactions.transactions.WINDOW_MESSAGES", 20)
    broker.change(transaction_timeout_ms=10_000_000)
    client = producer(broker)
    old = begin(client, 1)
    for number in range(2, 60):
        client.call(37, begin(client, number).end(ROLLBACK))
    run(broker, 2)
    [transaction] = broker.core.transactions.table
    assert (transaction.unique_id, transaction.check_count) == ("ID1", 0)
    assert transaction.offset > 50
    assert questions(client) == []
    again = restarted(broker)
    assert again.core.transactions.table.lowest_half_offset > 50
    client = producer(again)
    assert client.call(37, old.end(COMMIT)).code == 0
    [message] = visible(again)
    assert message.body == b"body-1"
    assert "SLUICE_FIRST_HALF" not in message.properties


def test_a_producer_with_a_wrong_clock_is_asked_in_time(broker: SteppedBroker) -> None:
    client = producer(broker)
    begin(client, 1, g=0)
    begin(client, 2, g=4_000_000_000_000)
    run(broker, 5.5)
    assert questions(client) == []
    run(broker, 1)
    assert len(questions(client)) == 2


# --- by hand


def listed(client: SteppedClient, **fields: object) -> list[bodies.OpenTransaction]:
    answer = client.call(900111, fields)
    assert answer.code == 0, answer.remark
    return bodies.decode_open_transactions(answer.body)


def test_undecided_transactions_are_listed_in_pages(broker: SteppedBroker) -> None:
    client = producer(broker)
    for number in range(1, 6):
        begin(client, number, topic="T" if number % 2 else "U", more="KEYS\x01k1 k2\x02")
    run(broker, 7)
    first = client.call(900111, {"maxMsgNums": 3})
    assert (first.fields or {})["count"] == "5"
    rest = client.call(900111, {"maxMsgNums": 3, "after": (first.fields or {})["after"]})
    assert "after" not in (rest.fields or {})
    items = [
        *bodies.decode_open_transactions(first.body), *bodies.decode_open_transactions(rest.body),
    ]  # fmt: skip
    assert [item.transaction_id for item in items] == [f"ID{n}" for n in range(1, 6)]
    assert {(item.group, item.keys, item.tag, item.checks) for item in items} == {
        ("P", "k1 k2", "A", 1)
    }
    assert items[0].asked_client_address == str(client.peer.remote)
    assert [item.transaction_id for item in listed(client, topic="U")] == ["ID2", "ID4"]
    assert listed(client, producerGroup="Q") == []


@pytest.mark.parametrize("outcome", [COMMIT, ROLLBACK])
def test_a_transaction_is_decided_by_hand(
    broker: SteppedBroker, outcome: int, caplog: pytest.LogCaptureFixture
) -> None:
    client = producer(broker)
    sent = begin(client)
    request = {"transactionId": "ID1", "commitOrRollback": outcome}
    assert client.call(900112, request).code == 0
    assert client.call(900112, request).code == 22
    assert "by an operator" in caplog.text
    assert bodies_of(broker) == ([b"body-1"] if outcome == COMMIT else [])
    assert client.call(37, sent.end(outcome)).code == 0
    assert len(bodies_of(broker)) == (outcome == COMMIT)


def test_a_decision_by_hand_has_to_be_one(broker: SteppedBroker) -> None:
    client = producer(broker)
    begin(client)
    answer = client.call(900112, {"transactionId": "ID1", "commitOrRollback": 0})
    assert answer.code == 29


def test_counters_tell_how_transactions_ended(broker: SteppedBroker) -> None:
    client = producer(broker)
    for number, outcome in enumerate((COMMIT, COMMIT, ROLLBACK), 1):
        client.call(37, begin(client, number).end(outcome))
    begin(client, 9)
    transactions = broker.core.transactions
    assert (transactions.committed, transactions.rolled_back) == ({"T": 2}, {"T": 1})
    assert broker.core.topics.table["T"].messages_in == 2
    assert len(transactions.table) == 1
