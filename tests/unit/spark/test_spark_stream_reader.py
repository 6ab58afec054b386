"""The streaming reader against a cluster of numbers: retention, limits, vanished brokers."""

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxRows

from simulation.stepped import ManualClock
from sluicemq.errors import (
    ConfigurationError,
    ConnectionLostError,
    OffsetOutOfRangeError,
    RouteNotFoundError,
    SluiceError,
)
from sluicemq.model.topic import BrokerData, MessageQueue, QueueData, TopicRoute
from sluicemq.spark import errors
from sluicemq.spark.schema import BASE_COLUMNS, to_spark_schema
from sluicemq.spark.sources import identity as topic_identity
from sluicemq.spark.sources import stream
from sluicemq.spark.sources import stream as sizes
from sluicemq.spark.sources.offsets import RangePartition
from sluicemq.wire.bodies import ClusterInfo
from sluicemq.wire.codes import RequestCode
from sluicemq.wire.frames import Command

A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)
SCHEMA = to_spark_schema(BASE_COLUMNS)
OPTIONS = {"topic": "t", "nameServers": "127.0.0.1:9876"}


class FakeAdmin:
    """Queues with bounds; `lost` makes the next call fail once. `made_ms`: when the topic was made;
    a message is stored every millisecond since (None: nobody tells when)."""

    def __init__(self, bounds: dict[MessageQueue, tuple[int, int]]) -> None:
        self.bounds = bounds
        self.made_ms: int | None = None
        self.looked: list[tuple[MessageQueue, int]] = []
        self.committed: dict[MessageQueue, int] = {}
        self.known = {"%RETRY%denied", "%RETRY%old"}
        self.asked: list[tuple[str, int]] = []
        self.registered = {"a"}
        self.unreadable: dict[MessageQueue, tuple[int, int]] = {}
        self.lost = 0
        self.opened = 0

    def queues(self, topic: str) -> list[MessageQueue]:
        if self.lost:
            self.lost -= 1
            raise ConnectionLostError("gone")
        if not self._queues(topic):
            raise RouteNotFoundError(f"no broker serves {topic!r}.")
        return self._queues(topic)

    def _queues(self, topic: str) -> list[MessageQueue]:
        return sorted(queue for queue in self.bounds if queue.topic == topic)

    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.bounds})

    def offsets(self, queue: MessageQueue) -> tuple[int, int]:
        if queue not in self.bounds and queue not in self.unreadable:
            raise RouteNotFoundError(f"no broker serves {queue.topic!r}.")
        return (self.bounds | self.unreadable)[queue]

    def route(self, topic: str) -> TopicRoute:
        names = sorted({queue.broker for queue in self.queues(topic)})
        return TopicRoute(
            tuple(BrokerData(name, "c", {0: f"{name}:10911"}) for name in names),
            tuple(QueueData(name, 2, 2, 6) for name in names),
        )

    def commit_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        if group == "denied":
            raise SluiceError("no")
        self.committed[queue] = offset

    def find_route(self, topic: str) -> str | None:
        return topic if topic in self.known or self._queues(topic) else None

    def cluster_info(self) -> ClusterInfo:
        return ClusterInfo({name: BrokerData(name, "c", {}) for name in self.registered})

    def call(self, address: str, command: Command) -> None:
        self.asked.append((address, command.code))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def no_hidden_tracebacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.os, "environ", {})


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    admin = FakeAdmin({A0: (0, 100), A1: (0, 50)})

    def opened(_: object) -> FakeAdmin:
        admin.opened += 1
        return admin

    def fetch_store_time(
        _admin: object, _group: str, queue: MessageQueue, offset: int
    ) -> int | None:
        admin.looked.append((queue, offset))
        return None if admin.made_ms is None else admin.made_ms + offset

    monkeypatch.setattr(stream, "open_admin", opened)
    monkeypatch.setattr(topic_identity, "fetch_store_time", fetch_store_time)
    return admin


@pytest.fixture
def make(cluster: FakeAdmin) -> Callable[..., Any]:
    return lambda **options: stream.create_stream_reader(OPTIONS | options, SCHEMA)


def point(**offsets: int) -> dict[str, Any]:
    """A checkpoint: a0=5 is offset 5 of queue 0 of broker a."""
    queues: dict[str, dict[str, int]] = {}
    for name, offset in offsets.items():
        queues.setdefault(name[0], {})[name[1]] = offset
    return {"version": 1, "topic": "t", "filter": "TAG *", "queues": queues}


def ranges(partitions: list[RangePartition]) -> list[tuple[str, int, int]]:
    return [
        (f"{one.queue.broker}{one.queue.queue_id}", one.start, one.end)
        for one in partitions if one.queue is not None
    ]  # fmt: skip


def test_a_new_stream_starts_at_the_end_unless_told_otherwise(make: Any) -> None:
    assert make().initialOffset() == point(a0=100, a1=50) | {"initial": True}
    first = make(startingOffsets="earliest").initialOffset()
    assert first == point(a0=0, a1=0) | {"initial": True}


def test_the_first_micro_batch_says_where_it_began(make: Any, cluster: FakeAdmin) -> None:
    """Spark does not keep where a stream started, and asks again after a crash."""
    reader = make()
    first = reader.initialOffset()
    assert reader.latestOffset(first, ReadAllAvailable()) is first
    cluster.bounds[A0] = (0, 110)
    end = reader.latestOffset(first, ReadAllAvailable())
    cluster.bounds[A0] = (0, 500)
    again = make()
    assert ranges(again.partitions(again.initialOffset(), end)) == [("a0", 100, 110)]


def test_an_end_that_is_the_start_is_given_back_as_it_came(make: Any) -> None:
    start = point(a0=100, a1=50) | {"from": {"a": {"0": 7}}}
    assert make().latestOffset(start, ReadAllAvailable()) is start


def test_a_limit_is_shared_by_lag(make: Any) -> None:
    reader = make(maxOffsetsPerTrigger="30")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxRows(30)
    assert reader.latestOffset(point(a0=0, a1=0), limit) == point(a0=20, a1=10)
    assert reader.latestOffset(point(a0=0, a1=0), ReadAllAvailable()) == point(a0=100, a1=50)


def test_available_now_reads_nothing_that_came_later(make: Any, cluster: FakeAdmin) -> None:
    reader = make()
    reader.prepareForTriggerAvailableNow()
    cluster.bounds = {A0: (0, 500), A1: (0, 50), B0: (0, 9)}
    assert reader.latestOffset(point(a0=0, a1=0), ReadAllAvailable()) == point(a0=100, a1=50)
    assert reader.reportLatestOffset() == point(a0=500, a1=50, b0=9)


def test_partitions_are_the_ranges_between_two_checkpoints(make: Any) -> None:
    found = make().partitions(point(a0=10, a1=50), point(a0=100, a1=50))
    assert ranges(found) == [("a0", 10, 100)]
    assert found[0].address == "a:10911"
    assert make().partitions(point(a0=5, a1=5), point(a0=5, a1=5)) == []


def test_a_new_queue_is_read_from_its_first_message(make: Any, cluster: FakeAdmin) -> None:
    cluster.bounds[B0] = (3, 9)
    reader = make()
    end = reader.latestOffset(point(a0=100, a1=50), ReadAllAvailable())
    assert end == point(a0=100, a1=50, b0=9) | {"from": {"b": {"0": 3}}}
    cluster.bounds[B0] = (5, 20)  # retention went on before the micro-batch is planned again
    with pytest.raises(OffsetOutOfRangeError, match="2 messages are gone"):
        reader.partitions(point(a0=100, a1=50), end)
    cluster.bounds[B0] = (3, 20)
    assert ranges(reader.partitions(point(a0=100, a1=50), end)) == [("b0", 3, 9)]


def test_a_broker_that_is_away_keeps_its_offsets(make: Any) -> None:
    start = point(a0=0, a1=0, b0=7)
    reader = make(timeoutMs="150")
    assert reader.latestOffset(start, ReadAllAvailable()) == point(a0=100, a1=50, b0=7)
    with pytest.raises(RouteNotFoundError, match="the broker of b:0 is not in the route"):
        reader.partitions(start, point(a0=100, a1=50, b0=9))


def test_retention_that_passed_the_stream_is_an_error(make: Any, cluster: FakeAdmin) -> None:
    cluster.bounds[A0] = (40, 100)
    with pytest.raises(
        OffsetOutOfRangeError, match=r"retention deleted unread messages: a:0.*30 messages are gone"
    ):
        make().partitions(point(a0=10, a1=50), point(a0=100, a1=50))


def test_retention_may_be_accepted(make: Any, cluster: FakeAdmin) -> None:
    cluster.bounds[A0] = (40, 100)
    reader = make(failOnDataLoss="false")
    assert ranges(reader.partitions(point(a0=10), point(a0=100))) == [("a0", 40, 100)]
    assert ranges(reader.partitions(point(a0=10), point(a0=30))) == []


def test_a_topic_that_ends_before_the_stream_is_an_error(make: Any, cluster: FakeAdmin) -> None:
    cluster.bounds[A0] = (0, 5)
    for step in (
        lambda: make().latestOffset(point(a0=10, a1=50), ReadAllAvailable()),
        lambda: make().partitions(point(a0=1), point(a0=10)),
    ):
        with pytest.raises(OffsetOutOfRangeError, match="created again"):
            step()


def advanced(reader: Any, start: dict[str, Any]) -> dict[str, Any]:
    """Where the next micro-batch ends, as it is read back from the checkpoint."""
    found: dict[str, Any] = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
    return found


def test_a_checkpoint_holds_when_a_message_before_each_offset_was_stored(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.made_ms = 5_000
    first = make(startingOffsets="earliest").initialOffset()
    assert "seen" not in first, "nothing was read"
    end = advanced(make(), first)
    assert end == point(a0=100, a1=50) | {
        "from": {"a": {"0": 0, "1": 0}}, "seen": {"a": {"0": [99, 5099], "1": [49, 5049]}},
    }  # fmt: skip
    assert make().initialOffset()["seen"] == end["seen"]


def test_a_topic_made_anew_is_noticed_though_it_is_longer_than_the_stream(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.made_ms = 5_000
    reader = make()
    end = advanced(reader, point(a0=0, a1=0))
    cluster.made_ms, cluster.bounds = 900_000, {A0: (0, 130), A1: (0, 50)}
    for one in (reader, make()):
        with pytest.raises(
            OffsetOutOfRangeError, match=r"'t' was deleted and created again: a:0.*99"
        ):
            one.latestOffset(end, ReadAllAvailable())


def test_a_topic_made_anew_is_noticed_though_it_is_as_long_as_the_stream(
    make: Any, cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a new reader at once, in a running stream within a second."""
    clock = ManualClock()
    monkeypatch.setattr(topic_identity, "SYSTEM_CLOCK", clock)
    cluster.made_ms = 5_000
    reader = make()
    end = advanced(reader, point(a0=0, a1=0))
    assert advanced(reader, end) == end
    cluster.made_ms = 900_000
    with pytest.raises(OffsetOutOfRangeError, match="'t' was deleted and created again"):
        make().latestOffset(end, ReadAllAvailable())
    looks = len(cluster.looked)
    assert advanced(reader, end) == end, "an idle stream asks no more than once a second"
    assert len(cluster.looked) == looks
    clock.advance(1.0)
    with pytest.raises(OffsetOutOfRangeError, match="'t' was deleted and created again"):
        advanced(reader, end)
    allowed = make(failOnDataLoss="false")
    following = advanced(allowed, end)
    assert following["queues"] == end["queues"]
    assert following["from"] == {"a": {"0": 0, "1": 0}}
    assert ranges(allowed.partitions(end, following)) == [("a0", 0, 100), ("a1", 0, 50)]
    assert advanced(allowed, following) == following


GONE = r"queues disappeared: a:0 of 't' \(read up to offset 100\)"


def test_a_queue_that_disappears_fails_the_stream(make: Any, cluster: FakeAdmin) -> None:
    del cluster.bounds[A0]
    for step in (
        lambda: make().latestOffset(point(a0=100, a1=50), ReadAllAvailable()),
        lambda: make().partitions(point(a0=10, a1=50), point(a0=100, a1=50)),
    ):
        with pytest.raises(OffsetOutOfRangeError, match=GONE):
            step()


def test_a_queue_that_disappears_may_be_given_up(
    make: Any, cluster: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.made_ms = 5_000
    end = advanced(make(), point(a0=0, a1=0))
    del cluster.bounds[A0]
    cluster.bounds[A1] = (0, 60)
    reader = make(failOnDataLoss="false")
    following = advanced(reader, end)
    assert following["queues"] == {"a": {"1": 60}}
    assert following["seen"] == {"a": {"1": [49, 5049]}}
    assert ranges(reader.partitions(end, following)) == [("a1", 50, 60)]
    assert advanced(reader, following) == following
    assert caplog.text.count("disappeared") == 1
    assert advanced(make(), following) == following, "from now on nothing is missing"
    cluster.bounds[A0] = (0, 3)
    assert ranges(make().partitions(following, advanced(make(), following))) == [("a0", 0, 3)]


def test_a_queue_that_is_not_read_any_more_and_holds_nothing_unread_is_no_loss(
    make: Any, cluster: FakeAdmin
) -> None:
    """The topic has fewer queues to read now; the broker still has what lies in the others."""
    del cluster.bounds[A0]
    cluster.unreadable[A0] = (0, 101)
    with pytest.raises(OffsetOutOfRangeError, match=GONE):
        make().latestOffset(point(a0=100, a1=50), ReadAllAvailable())
    cluster.unreadable[A0] = (0, 100)
    assert advanced(make(), point(a0=100, a1=50))["queues"] == point(a0=100, a1=50)["queues"]


SEVERAL = {"version": 2, "filter": "TAG *", "queues": {
    "t": {"a": {"0": 100, "1": 50}}, "u": {"a": {"0": 7}},
}}  # fmt: skip
U0 = MessageQueue("u", "a", 0)


@pytest.mark.parametrize("way", ["list", "pattern"])
def test_a_topic_that_disappears_fails_the_stream_or_lets_the_others_go_on(
    cluster: FakeAdmin, way: str
) -> None:
    options = {"topics": "t,u"} if way == "list" else {"topicsPattern": "[a-z]"}
    label = "t,u" if way == "list" else "pattern [a-z]"
    start = SEVERAL | {"topic": label}

    def made(**more: str) -> Any:
        given = {"nameServers": "127.0.0.1:9876"} | options | more
        return stream.create_stream_reader(given, SCHEMA)

    cluster.bounds[U0] = (0, 7)
    assert advanced(made(), start)["queues"] == start["queues"]
    del cluster.bounds[U0]
    cluster.bounds[A0] = (0, 110)
    with pytest.raises(OffsetOutOfRangeError, match=r"a:0 of 'u' \(read up to offset 7"):
        made().latestOffset(start, ReadAllAvailable())
    reader = made(failOnDataLoss="false")
    reader.prepareForTriggerAvailableNow()
    following = advanced(reader, start)
    assert following["queues"] == {"t": {"a": {"0": 110, "1": 50}}}
    assert ranges(reader.partitions(start, following)) == [("a0", 100, 110)]
    again = made(failOnDataLoss="false")
    assert advanced(again, following)["queues"] == following["queues"], "after a restart"
    cluster.bounds.clear()
    assert advanced(again, following)["queues"] == {}
    assert advanced(again, advanced(again, following))["queues"] == {}
    with pytest.raises(OffsetOutOfRangeError, match="disappeared"):
        made().latestOffset(following, ReadAllAvailable())
    cluster.bounds[U0] = (0, 4)
    assert advanced(again, following)["queues"] == {"u": {"a": {"0": 4}}}, "from its beginning"


def test_a_topic_whose_broker_is_away_is_waited_for(
    make: Any, cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.bounds, cluster.registered = {}, set()
    with pytest.raises(RouteNotFoundError):
        make(timeoutMs="1000").latestOffset(point(a0=100), ReadAllAvailable())


def test_a_topic_made_anew_is_read_from_its_beginning_when_loss_is_allowed(
    make: Any, cluster: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.made_ms = 5_000
    end = advanced(make(), point(a0=0, a1=0))
    cluster.made_ms, cluster.bounds = 900_000, {A0: (0, 130), A1: (0, 20), B0: (0, 3)}
    reader = make(failOnDataLoss="false")
    following = advanced(reader, end)
    assert following["queues"] == point(a0=130, a1=20, b0=3)["queues"]
    assert ranges(reader.partitions(end, following)) == [
        ("a0", 0, 130), ("a1", 0, 20), ("b0", 0, 3),
    ]  # fmt: skip
    assert ranges(make().partitions(end, following))[0] == ("a0", 0, 130), "after a crash too"
    assert caplog.text.count("created again") == 1, "for both queues"
    assert advanced(reader, following) == following
    strict = make()
    cluster.bounds[A0] = (0, 140)
    assert advanced(strict, following)["queues"]["a"]["0"] == 140


def test_a_topic_made_anew_is_noticed_when_a_micro_batch_is_planned_again(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.made_ms = 5_000
    start = advanced(make(), point(a0=0, a1=0))
    cluster.bounds[A0] = (0, 120)
    end = advanced(make(), start)
    cluster.made_ms, cluster.bounds[A0] = 900_000, (0, 500)
    with pytest.raises(OffsetOutOfRangeError, match="created again"):
        make().partitions(start, end)
    assert ranges(make(failOnDataLoss="false").partitions(start, end)) == []


def test_messages_that_come_again_before_the_stream_are_those_of_a_new_topic(
    make: Any, cluster: FakeAdmin
) -> None:
    """Retention had removed all that the stream has read: there was no message to remember."""
    cluster.made_ms, cluster.bounds = 5_000, {A0: (100, 100)}
    first = make(startingOffsets="earliest").initialOffset()
    assert first["seen"] == {"a": {"0": [99, None]}}
    cluster.made_ms, cluster.bounds = 900_000, {A0: (0, 130)}
    with pytest.raises(OffsetOutOfRangeError, match="created again"):
        make().latestOffset(first, ReadAllAvailable())


def test_a_checkpoint_of_an_older_version_is_taken_as_it_is_and_anchored(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.made_ms = 5_000
    end = advanced(make(), point(a0=10, a1=50))
    assert end["queues"] == point(a0=100, a1=50)["queues"]
    assert end["seen"]["a"]["0"] == [99, 5099]


def test_a_running_stream_looks_once_a_trigger_and_not_at_all_behind_retention(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.made_ms, cluster.bounds = 5_000, {A0: (0, 100)}
    reader, place = make(), point(a0=0)
    for lowest, highest, looks in (
        (0, 100, 1),  # the first anchor
        (0, 100, 0),  # nothing new
        (0, 110, 1),
        (20, 120, 1),  # what begins at 20 has to be compared once,
        (20, 130, 0),  # then a queue that begins anew would begin lower
        (20, 400, 1),  # the anchor is renewed before retention reaches it
        (20, 410, 0),
    ):
        cluster.bounds[A0] = (lowest, highest)
        cluster.looked.clear()
        following = advanced(reader, place)
        if following != place:
            reader.partitions(place, following)
        assert len(cluster.looked) == looks, (lowest, highest)
        place = following
    cluster.bounds[A0] = (0, 500)
    cluster.made_ms = 900_000
    with pytest.raises(OffsetOutOfRangeError, match="created again"):
        advanced(reader, place)


def test_a_broker_that_lost_its_newest_messages_is_gone_on_with_at_its_end(
    make: Any, cluster: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    """The anchor tells that it is the same topic, so nothing is read twice."""
    cluster.made_ms = 5_000
    start = point(a0=100, a1=50) | {"seen": {"a": {"0": [80, 5080]}}}
    cluster.bounds[A0] = (0, 90)
    with pytest.raises(OffsetOutOfRangeError, match="the broker lost messages"):
        make().latestOffset(start, ReadAllAvailable())
    following = advanced(make(failOnDataLoss="false"), start)
    assert following["queues"]["a"]["0"] == 90
    assert following["from"] == {"a": {"0": 90}}
    assert "continues at 90" in caplog.text


def test_spark_4_1_notices_a_topic_made_anew(
    monkeypatch: pytest.MonkeyPatch, make: Any, cluster: FakeAdmin
) -> None:
    monkeypatch.setattr(stream, "SupportsTriggerAvailableNow", None)
    cluster.made_ms = 5_000
    start = make().latestOffset()
    cluster.made_ms, cluster.bounds[A0] = 900_000, (0, 130)
    reader = make()
    end = reader.latestOffset()
    with pytest.raises(OffsetOutOfRangeError, match="created again"):
        reader.partitions(start, end)
    allowed = make(failOnDataLoss="false")
    assert ranges(allowed.partitions(start, allowed.latestOffset())) == [("a0", 0, 130)]


def test_a_checkpoint_of_another_topic_is_an_error(make: Any) -> None:
    other = point(a0=1) | {"topic": "x"}
    with pytest.raises(ConfigurationError, match="checkpoint is of the topic 'x'"):
        make().latestOffset(other, ReadAllAvailable())


def test_a_changed_filter_is_an_error_unless_allowed(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    filters = {"filter.tags": "B"}
    for step in (
        lambda reader: reader.latestOffset(point(a0=1), ReadAllAvailable()),
        lambda reader: reader.partitions(point(a0=1), point(a0=9)),
    ):
        with pytest.raises(ConfigurationError, match=r"with the filter 'TAG \*'.*has 'TAG B'"):
            step(make(**filters))
    reader = make(onFilterChange="continue", **filters)
    assert reader.latestOffset(point(a0=1, a1=50), ReadAllAvailable())["filter"] == "TAG B"
    reader.partitions(point(a0=1), point(a0=9))
    assert caplog.text.count("the filter changed") == 1


def test_the_order_of_tags_is_no_change_of_the_filter(make: Any) -> None:
    first = make(**{"filter.tags": "B||A"}).initialOffset()
    make(**{"filter.tags": "A || B"}).latestOffset(first, ReadAllAvailable())


def test_a_filter_that_an_older_version_wrote_in_other_words_is_the_same(make: Any) -> None:
    filters = {"filter.tags": "B", "filter.sql": "n > 1.0 OR m = 2"}
    written = "SQL92 (n > 1.0 OR m = 2\n) AND (TAGS IN ('B')\n)"
    start = point(a0=100, a1=50) | {"filter": written}
    assert make(**filters)._parse_offsets(start) == {A0: 100, A1: 50}
    with pytest.raises(ConfigurationError, match="was written with the filter"):
        make(**filters | {"filter.tags": "A"})._parse_offsets(start)


def test_bytes_are_shared_and_sampled(
    make: Any, cluster: FakeAdmin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "sample_mean_bytes", lambda _admin, _group, queue, offset: 100.0)
    reader = make(maxBytesPerTrigger="3000")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMaxBytes(3000)
    assert reader.latestOffset(point(a0=0, a1=0), limit)["queues"] == {"a": {"0": 15, "1": 15}}
    assert reader.latestOffset(point(a0=98, a1=50), limit)["queues"] == {"a": {"0": 100, "1": 50}}
    both = make(maxBytesPerTrigger="3000", maxOffsetsPerTrigger="10")
    assert both.getDefaultReadLimit() == ReadMaxRows(10)
    end = both.latestOffset(point(a0=0, a1=0), ReadMaxRows(10))
    assert end["queues"] == {"a": {"0": 5, "1": 5}}
    huge = make(maxBytesPerTrigger="10")
    assert huge.latestOffset(point(a0=0, a1=0), limit)["queues"] == {"a": {"0": 1, "1": 1}}


def test_sizes_that_grow_are_looked_at_further_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of 10 bytes, from offset 10 on of 1,000."""
    monkeypatch.setattr(
        sizes,
        "sample_mean_bytes",
        lambda _admin, _group, _queue, offset: 10.0 if offset < 10 else 1000.0,
    )
    reader = make(maxBytesPerTrigger="20000")
    end = reader.latestOffset(point(a0=0, a1=50), reader.getDefaultReadLimit())
    assert end["queues"]["a"]["0"] in range(10, 35)


def test_a_topic_more_in_the_list_goes_on_a_topic_less_is_refused(cluster: FakeAdmin) -> None:
    given = {"nameServers": OPTIONS["nameServers"], "topics": "t,u"}
    reader = stream.create_stream_reader(given, SCHEMA)
    found = reader._parse_offsets(point(a0=5))
    assert found == {A0: 5}
    with pytest.raises(ConfigurationError, match="is of the topic 't', but the stream reads 'u,v'"):
        stream.create_stream_reader(given | {"topics": "u,v"}, SCHEMA)._parse_offsets(point(a0=5))


def test_an_outage_is_ridden_out_with_new_connections(make: Any, cluster: FakeAdmin) -> None:
    reader = make()
    cluster.lost = 2
    end = reader.latestOffset(point(a0=1), ReadAllAvailable())
    assert end["queues"] == point(a0=100, a1=50)["queues"]
    assert cluster.opened == 3


def test_an_outage_that_lasts_longer_than_timeout_ms_ends_the_stream(
    make: Any, cluster: FakeAdmin
) -> None:
    cluster.lost = 1_000
    with pytest.raises(ConnectionLostError):
        make(timeoutMs="150").latestOffset(point(a0=1), ReadAllAvailable())


def test_a_stream_that_has_reached_nothing_yet_fails_at_once(make: Any, cluster: FakeAdmin) -> None:
    cluster.lost = 1
    with pytest.raises(ConnectionLostError):
        make().initialOffset()
    assert cluster.opened == 1


def test_the_group_learns_the_offsets_and_its_trouble_stops_nothing(
    make: Any, cluster: FakeAdmin, caplog: pytest.LogCaptureFixture
) -> None:
    make().commit(point(a0=1))
    assert cluster.committed == {}
    make(group="g").commit(point(a0=7, a1=8))
    assert cluster.committed == {A0: 7, A1: 8}
    heartbeat, leave = RequestCode.HEART_BEAT, RequestCode.UNREGISTER_CLIENT
    assert cluster.asked == [("a:10911", heartbeat), ("a:10911", leave)], "mqadmin finds it so"
    make(group="old").commit(point(a0=7, a1=8))
    assert len(cluster.asked) == 2
    make(group="denied").commit(point(a0=9))
    assert "cannot commit offsets to the group 'denied'" in caplog.text


def test_tags_that_cannot_match_read_nothing(make: Any) -> None:
    reader = make(**{"filter.tags": " || "})
    assert reader.partitions(point(a0=0), point(a0=100)) == []


def test_a_reader_that_cannot_be_made_says_why_when_asked() -> None:
    reader = stream.create_stream_reader({"topic": "t"}, SCHEMA)
    for ask in (
        reader.initialOffset,
        lambda: reader.latestOffset({}, None),
        lambda: reader.read(None),
    ):
        with pytest.raises(ConfigurationError, match="'nameServers' is missing"):
            ask()
    assert errors.os.environ[errors.HIDE_TRACEBACK] == "1"


def test_readers_are_pickled_without_their_connections(make: Any) -> None:
    reader = make()
    reader.initialOffset()
    copy = pickle.loads(pickle.dumps(reader))
    assert copy._admin is None
    assert copy.plan == reader.plan


def test_spark_4_1_has_no_limit_and_says_so(
    monkeypatch: pytest.MonkeyPatch, make: Any, cluster: FakeAdmin
) -> None:
    monkeypatch.setattr(stream, "SupportsTriggerAvailableNow", None)
    for name in ("maxOffsetsPerTrigger", "maxBytesPerTrigger"):
        with pytest.raises(ConfigurationError, match=rf"{name}' needs Spark 4\.2"):
            make(**{name: "5"}).initialOffset()
    reader = make()
    cluster.bounds = {A0: (0, 100), B0: (0, 50)}
    assert reader.latestOffset() == point(a0=100, b0=50)
    cluster.bounds = {A0: (0, 110)}  # the other broker is away
    assert reader.latestOffset() == point(a0=110, b0=50)
