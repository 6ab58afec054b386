"""Queue choice, fault avoidance, attempts and their verdicts."""

import pytest

from sluicemq.client.core.send_attempts import SendAttempts
from sluicemq.client.core.sending import (
    QueueChooser,
    avoidance_s,
    choose_by_sharding_key,
    choose_with_selector,
)
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    RequestError,
    RequestTimeoutError,
    SendError,
    SendUnknownError,
)
from sluicemq.model.message import Message
from sluicemq.model.topic import MessageQueue

QUEUES = [MessageQueue("t", broker, queue_id) for broker in "ab" for queue_id in range(2)]
LOST = ConnectionLostError("lost.")


def test_queues_are_taken_in_turn():
    chooser = QueueChooser()
    chosen = [chooser.choose(QUEUES, 0.0) for _ in range(8)]
    assert sorted(chosen[:4]) == sorted(QUEUES)
    assert chosen[:4] == chosen[4:]


def test_a_failed_brokers_next_attempt_goes_to_another_broker():
    chooser = QueueChooser()
    assert {chooser.choose(QUEUES, 0.0, "a").broker for _ in range(8)} == {"b"}
    only_a = QUEUES[:2]
    assert chooser.choose(only_a, 0.0, "a").broker == "a", "when there is no other"


@pytest.mark.parametrize(
    ("latency_s", "pause_s"),
    [(0.01, 0), (0.54, 0), (0.55, 2), (1.8, 5), (3, 6), (5, 10), (15, 30), (60, 30)],
)
def test_a_slow_broker_is_left_alone_as_rocketmq_does(latency_s, pause_s):
    assert avoidance_s(latency_s) == pause_s


def test_an_avoided_broker_comes_back_after_its_time():
    chooser = QueueChooser()
    chooser.record_failure("a", 100.0)
    assert {chooser.choose(QUEUES, 109.0).broker for _ in range(8)} == {"b"}
    assert {chooser.choose(QUEUES, 111.0).broker for _ in range(8)} == {"a", "b"}


def test_a_quick_answer_ends_the_avoidance():
    chooser = QueueChooser()
    chooser.record_failure("a", 100.0)
    chooser.record_latency("a", 0.01, 101.0)
    assert {chooser.choose(QUEUES, 101.0).broker for _ in range(8)} == {"a", "b"}


def test_when_every_broker_is_avoided_one_is_used_all_the_same():
    chooser = QueueChooser()
    chooser.record_failure("a", 0.0)
    chooser.record_failure("b", 0.0)
    assert chooser.choose(QUEUES, 1.0) in QUEUES


@pytest.mark.parametrize("code", [17, 14, 1, 2, 16, 204, 205, 1500])
def test_the_listed_answers_are_tried_at_the_next_broker(code):
    attempts = SendAttempts(0.0, 10_000, 2)
    error = RequestError(code, "x")
    assert attempts.record_failure("a", error, 1.0, was_written=True)
    assert attempts.record_failure("b", error, 2.0, was_written=True)
    assert not attempts.record_failure("a", error, 3.0, was_written=True), "two retries, no more"
    assert attempts.make_error("t", "id", error) is error


@pytest.mark.parametrize("code", [13, 29, 3, 26])
def test_other_answers_are_final(code):
    assert not SendAttempts(0.0).record_failure("a", RequestError(code, "x"), 1.0, was_written=True)


def test_a_time_out_is_never_retried_once_the_request_was_written():
    error = RequestTimeoutError("late.")
    written = SendAttempts(0.0)
    assert not written.record_failure("a", error, 1.0, was_written=True)
    assert isinstance(written.make_error("t", "id", error), SendUnknownError)
    assert SendAttempts(0.0).record_failure("a", error, 1.0, was_written=False), (
        "only the connection timed out"
    )


def test_nothing_is_retried_after_the_deadline_of_all_attempts():
    attempts = SendAttempts(5.0, 1000, 2)
    assert attempts.deadline_s == 6.0
    assert not attempts.record_failure("a", LOST, 6.0, was_written=False)


def test_a_connection_that_broke_before_anything_was_written_means_not_stored():
    attempts = SendAttempts(0.0, retries=0)
    attempts.record_failure("a", LOST, 1.0, was_written=False)
    verdict = attempts.make_error("t", "id", LOST)
    assert isinstance(verdict, SendError)
    assert not isinstance(verdict, SendUnknownError)
    assert "was not stored [a: lost]" in str(verdict)


def test_a_connection_that_broke_after_the_write_leaves_the_outcome_open_for_good():
    attempts = SendAttempts(0.0)
    attempts.record_failure("a", LOST, 1.0, was_written=True)
    refused = RequestError(13, "illegal")
    attempts.record_failure("b", refused, 2.0, was_written=True)
    verdict = attempts.make_error("t", "id", refused)
    assert isinstance(verdict, SendUnknownError)
    assert "a: lost" in str(verdict)
    assert "illegal" in str(verdict)


def test_a_selector_has_to_choose_one_of_the_queues():
    message = Message("t", b"")
    assert choose_with_selector(lambda queues, _: queues[2], QUEUES, message) == QUEUES[2]
    with pytest.raises(ConfigurationError, match="not one of the 4 queues"):
        choose_with_selector(lambda queues, _: queues[2]._replace(queue_id=9), QUEUES, message)


@pytest.mark.parametrize(
    ("key", "java_hash"),
    [("hello", 99162322), ("20034568923546", 567306561), ("polygenelubricants", -(2**31))],
)
def test_a_key_leads_to_the_queue_that_a_java_producer_chooses(key, java_hash):
    queues = [MessageQueue("t", "b", n) for n in range(7)]
    # Java: hash % size, truncated towards zero, then its absolute value.
    assert choose_by_sharding_key(queues, key).queue_id == abs(java_hash) % 7
