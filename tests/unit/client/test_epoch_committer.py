"""How a driver commits an epoch at one broker and at several."""

import itertools
import zlib

import pytest

from sluicemq.client.core.epochs import (
    EpochCommitter,
    StagedRangeList,
    is_unknown_request,
    make_commit_request,
    parse_epoch_state,
)
from sluicemq.errors import RequestError, RequestTimeoutError
from sluicemq.wire import staging
from sluicemq.wire.frames import Command
from sluicemq.wire.staging import StagedRange


class Broker:
    """Answers as a broker does: each state for a few requests."""

    def __init__(self, recorded: tuple[StagedRange, ...] = (), slow: int = 1) -> None:
        self.recorded = recorded
        self.left = slow
        self.log: list[tuple[str, tuple[StagedRange, ...]]] = []

    def answer(self, command: Command) -> Command:
        assert command.fields is not None
        step = command.fields["step"]
        ranges = staging.decode_staged_ranges(command.body)
        self.log.append((step, ranges))
        if self.left:
            self.left -= 1
            return state("checking")
        if step == "commit":
            if not self.recorded:
                self.recorded = ranges
                return state("publishing", self.recorded)
            return state("published", self.recorded)
        return state("published", self.recorded) if self.recorded else state("checked")


def state(name: str, ranges: tuple[StagedRange, ...] = ()) -> Command:
    fields = {"state": name, "published": "0", "stagingTopic": "S", "stagingQueues": "8"}
    return Command(0, fields, staging.encode_staged_ranges(ranges) if ranges else b"")


def staged(broker: str, offset: int) -> StagedRange:
    return StagedRange(broker, 0, offset, 1, 0, 0, 0)


def committer(brokers: dict[str, Broker], timeout_s: float = 5.0) -> EpochCommitter:
    clock = itertools.count()
    return EpochCommitter(
        lambda name, command: brokers[name].answer(command), list(brokers), "q", ["T"],
        pause=lambda seconds: None, monotonic_s=lambda: next(clock) * 0.01, timeout_s=timeout_s,
    )  # fmt: skip


def test_one_broker_is_asked_until_it_says_published() -> None:
    broker = Broker()
    ranges = (staged("a", 0),)
    assert committer({"a": broker}).commit(3, ranges) == ranges
    assert [step for step, _ in broker.log] == ["commit"] * 3


def test_all_others_have_prepared_before_the_first_decides() -> None:
    order: list[str] = []
    brokers = {name: Broker() for name in "abc"}
    ranges = (staged("a", 0), staged("c", 5))
    known = committer(brokers)
    call = known._call

    def noted(name: str, command: Command) -> Command:
        step = (command.fields or {})["step"]
        order.append(f"{name} {step}")
        if step == "commit":
            assert [brokers[it].left for it in "bc"] == [0, 0], "one of them still checks"
        return call(name, command)

    known._call = noted  # type: ignore[method-assign]
    assert known.commit(0, ranges) == ranges
    first_decision = order.index("a commit")
    assert all(step.endswith("prepare") for step in order[:first_decision])
    assert {"b prepare", "c prepare"} <= set(order[:first_decision])
    assert "b commit" not in order, "nothing of the epoch lies there"
    assert brokers["c"].recorded == ranges


@pytest.mark.parametrize("knowing", ["a", "b"])
def test_what_is_recorded_anywhere_goes_before_what_is_staged_now(knowing: str) -> None:
    old, new = (staged("a", 0), staged("b", 0)), (staged("a", 10), staged("b", 10))
    brokers = {name: Broker(old if name == knowing else ()) for name in "ab"}
    assert committer(brokers).commit(0, new) == old
    assert {broker.recorded for broker in brokers.values()} == {old}


def test_a_broker_that_never_answers_published_ends_the_wait() -> None:
    with pytest.raises(RequestTimeoutError, match="has not committed epoch 7 of q within 5 s"):
        committer({"a": Broker(slow=10_000)}).commit(7, (staged("a", 0),))


def test_a_broker_without_epochs_is_known_by_its_refusal() -> None:
    refused = Command(3, {}, remark="request type 900201 not supported")
    with pytest.raises(RequestError) as error:
        parse_epoch_state(refused)
    assert is_unknown_request(error.value)
    assert not is_unknown_request(RequestError(1, "else"))


def test_a_request_names_query_epoch_step_and_topics() -> None:
    command = make_commit_request("q", 4, (staged("a", 0),), {"U", "T"}, step="commit")
    assert command.code == 900201
    assert command.fields == {"query": "q", "epoch": "4", "step": "commit", "topics": "T,U"}
    assert staging.decode_staged_ranges(command.body) == (staged("a", 0),)


def test_batches_that_follow_each_other_are_one_range() -> None:
    collected = StagedRangeList(partition=2, attempt=1)
    collected.add("a", 3, 10, 2, b"onetwo")
    collected.add("a", 3, 12, 1, b"three")
    collected.add("a", 3, 20, 1, b"four")
    collected.add("b", 3, 21, 1, b"five")
    assert collected.message_count == 5
    assert collected.ranges == (
        StagedRange("a", 3, 10, 3, zlib.crc32(b"onetwothree"), 2, 1),
        StagedRange("a", 3, 20, 1, zlib.crc32(b"four"), 2, 1),
        StagedRange("b", 3, 21, 1, zlib.crc32(b"five"), 2, 1),
    )


@pytest.mark.parametrize(
    "stage",
    [
        staging.Stage(staging.Owner("q-1", 5, 2, 0), "T"),
        staging.Stage(staging.Owner("q", 0, 0, 9), "a-b_%", 7, "L3"),
        staging.Stage(staging.Owner("q", 0, 0, 0), "T", None, "T1700000000000"),
    ],
)
def test_a_stage_property_says_all_and_is_read_back(stage: staging.Stage) -> None:
    assert staging.parse_stage(stage.encode().encode()) == stage


@pytest.mark.parametrize("text", [b"", b"q/1/2/3/-/-", b"q/x/2/3/-/-/T", b"q/1/2/3/-/Z9/T"])
def test_another_text_is_no_stage(text: bytes) -> None:
    with pytest.raises(Exception, match=r"not a valid stage property|has the invalid delay"):
        staging.parse_stage(text)
