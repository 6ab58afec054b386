"""Counts and lists over the whole broker, for the tools: 315 317 328 343 345 353.

    315   a count by minute, hour and day (`Spans`)
    317   how far each group is in each of its topics
    328   the producers of all groups
    343   the topics of a group, 345 what it wants of one
    353   keeps a group from a topic, or lets it again

RocketMQ counts by minute, hour and day where it counts at all. Here nothing happens where messages
pass: the counters that metrics are made of are sampled, each ten seconds for the minute, each ten
minutes for the hour, each hour for the day, and only those that have changed take room (`Rates`).
What a count comes to is the newest sample less the oldest of its span (spec/admin.md §4).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sluicemq.broker.admin.status import Admin, Rates
from sluicemq.broker.background import Steps
from sluicemq.broker.consume.clients import Consumers, Producers
from sluicemq.broker.consume.pull import Pull
from sluicemq.broker.offsets import Offsets
from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Groups, Topics
from sluicemq.broker.turns import Postponed
from sluicemq.errors import RequestError
from sluicemq.net.dispatch import Peer
from sluicemq.wire import bodies, fastjson
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.headers import (
    GetConsumeStatsOfBrokerRequest,
    GroupForbiddenRequest,
    StatisticsRequest,
    TopicGroupRequest,
    TopicsOfGroupRequest,
)

log = logging.getLogger(__name__)

SPANS: Final = (("statsMinute", 10, 7), ("statsHour", 600, 7), ("statsDay", 3600, 25))
"""Name in the answer, seconds between two samples, how many are kept."""
Counters = Callable[[], Mapping[str, int]]


class Spans:
    """Counters as they were during the last minute, hour and day."""

    def __init__(self) -> None:
        self._samples = {name: Rates(count) for name, _, count in SPANS}
        self._next_s = dict.fromkeys(self._samples, float("-inf"))

    def sample(self, now_s: float, counters: Counters) -> None:
        """Call this once a second; `counters` is asked when a sample is due."""
        due = [span for span in SPANS if now_s >= self._next_s[span[0]]]
        if due:
            found = counters()
            for name, period_s, _ in due:
                self._next_s[name] = now_s + period_s
                self._samples[name].sample(now_s, found)

    def counted(self, name: str) -> dict[str, tuple[int, float]] | None:
        """(What it has counted, a second) of each span; None for a counter that is not known."""
        newest_s, newest = self._samples[SPANS[0][0]].newest(name)
        if newest is None:
            return None
        found = {}
        for span, samples in self._samples.items():
            oldest_s, oldest = samples.oldest(name)
            seconds = newest_s - oldest_s
            count = newest - oldest
            found[span] = (count, count / seconds if seconds > 0 else 0.0)
        return found


@dataclass(slots=True, eq=False)
class Statistics:
    """The request family."""

    settings: Settings
    topics: Topics
    groups: Groups
    offsets: Offsets
    consumers: Consumers
    producers: Producers
    pull: Pull
    spans: Spans
    status: Admin

    def counters(self) -> dict[str, int]:
        """All counters by RocketMQ's name and key of them."""
        found: dict[str, int] = {}
        put = got = 0
        for topic in self.topics:
            put += topic.messages_in
            if topic.messages_in:
                found[f"TOPIC_PUT_NUMS {topic.name}"] = topic.messages_in
                found[f"TOPIC_PUT_SIZE {topic.name}"] = topic.bytes_in
        for (name, group), delivered in self.pull.delivered.items():
            got += delivered.messages_out
            if delivered.messages_out:
                found[f"GROUP_GET_NUMS {name}@{group}"] = delivered.messages_out
                found[f"GROUP_GET_SIZE {name}@{group}"] = delivered.bytes_out
        cluster = self.settings.broker.cluster_name
        return found | {f"BROKER_PUT_NUMS {cluster}": put, f"BROKER_GET_NUMS {cluster}": got}

    def view(self, header: StatisticsRequest, command: Command, peer: Peer) -> Command:
        """315. `avgpt` is bytes a message of what counts bytes, else 1."""
        counted = self.spans.counted(f"{header.name} {header.key}")
        if counted is None:
            remark = f"The stats <{header.name}> <{header.key}> not exist"
            raise RequestError(ResponseCode.SYSTEM_ERROR, remark)
        numbers = self.spans.counted(f"{header.name.replace('_SIZE', '_NUMS')} {header.key}") or {}
        body = {
            span: {
                "avgpt": total / numbers[span][0] if numbers.get(span, (0,))[0] else 0.0,
                "sum": total,
                "tps": rate,
            }
            for span, (total, rate) in counted.items()
        }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def topics_by_group(self, *, ordered: bool) -> dict[str, list[str]]:
        """The topics that exist and that groups have offsets of, without those that a group which
        is online does not subscribe. `ordered`: ordered topics alone."""
        found: dict[str, list[str]] = {}
        for name, groups in sorted(self.offsets.groups_by_topic().items()):
            topic = self.topics.get(name)
            if topic is None or (ordered and not topic.config.order):
                continue
            for group in groups:
                online = self.consumers.groups.get(group)
                if group in self.groups and (online is None or name in online.watches):
                    found.setdefault(group, []).append(name)
        return found

    def of_broker(
        self, header: GetConsumeStatsOfBrokerRequest, command: Command, peer: Peer
    ) -> Postponed:
        """317: a step a group."""

        def steps() -> Steps[Command]:
            listed, behind, in_flight = [], 0, 0
            for group, names in sorted(self.topics_by_group(ordered=header.ordered).items()):
                found = [self.status.progress(group, [name]) for name in names]
                for queue in (it for stats in found for it in stats.queues.values()):
                    behind += queue.broker_offset - queue.consumer_offset
                    in_flight += queue.pull_offset - queue.consumer_offset
                listed.append({group: found})
                yield None
            answer = bodies.ConsumeStatsOfBroker(self._address, listed, behind, in_flight)
            body = bodies.encode_consume_stats_of_broker(answer)
            return Command(ResponseCode.SUCCESS, body=body)

        return Postponed(steps())

    def all_producers(self, command: Command, peer: Peer) -> Command:
        """328."""
        found = {
            group: [
                {
                    "clientId": member.client_id,
                    "language": member.language,
                    "lastUpdateTimestamp": member.seen_ms,
                    "remoteIP": f"/{member.peer.remote}",
                    "version": member.version,
                }
                for member in members.values()
            ]
            for group, members in self.producers.groups.items()
        }
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps({"data": found}))

    def topics_of_group(
        self, header: TopicsOfGroupRequest, command: Command, peer: Peer
    ) -> Command:
        """343: those that it has offsets of."""
        names = sorted(self.offsets.topics_of(header.group))
        return Command(ResponseCode.SUCCESS, body=bodies.encode_topic_list(names, self._address))

    def subscription(self, header: TopicGroupRequest, command: Command, peer: Peer) -> Command:
        """345: nothing of a group that is offline."""
        watch = self.consumers.watch(header.group, header.topic)
        body: dict[str, Any] = {"group": header.group, "topic": header.topic}
        if watch is not None:
            body["subscriptionData"] = bodies.subscription_object(watch.subscription)
        return Command(ResponseCode.SUCCESS, body=fastjson.dumps(body))

    def forbidden(self, header: GroupForbiddenRequest, command: Command, peer: Peer) -> Command:
        """353: changes it when `readable` is there, and says how it is."""
        group, topic = header.group, header.topic
        if header.is_readable is not None:
            self.groups.forbid(group, topic, is_forbidden=not header.is_readable)
            log.info("%s: group %s reads %s: %s", peer.remote, group, topic, header.is_readable)
        readable = self.groups.may_read(group, topic)
        body = {"group": group, "readable": readable, "topic": topic}
        return Command(ResponseCode.SUCCESS, remark="", body=fastjson.dumps(body))

    @property
    def _address(self) -> str:
        host = self.settings.host
        return f"{self.settings.broker.broker_ip1 or host.address}:{host.port}"
