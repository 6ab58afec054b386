"""Where the failures of a consumer group go: its retry topic, or in the end its dead letters.

    %RETRY%group     retryQueueNums queues; a message waits (a delay level) before it lies there
    %DLQ%group       one queue, readable and writable like any topic: a group may subscribe to it

A group that reads a %DLQ% topic is a group like any other: what it fails on goes to *its* retry
topic and *its* dead letters, and is counted from the beginning (`begins_anew`). RocketMQ counts on:
there such a failure is a dead letter again at once (spec/delivery.md §4, §17 of remoting.md).
"""

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Final

from sluicemq.broker.consume.clients import QueueLocks
from sluicemq.broker.topics import Groups, Topic, Topics
from sluicemq.clock import Clock
from sluicemq.errors import RequestError
from sluicemq.model.message import DELAY, TIMER_PROPERTIES
from sluicemq.model.topic import DLQ_PREFIX, RETRY_PREFIX, GroupConfig
from sluicemq.wire.codes import ResponseCode

log = logging.getLogger(__name__)

UNIT_SYS_FLAG: Final = 0x1
SAY_PERIOD_S: Final = 60.0
_CLIENT_SAYS_MAX_SINCE: Final = 121  # V3_4_9: maxReconsumeTimes of a request counts
_DELAYS: Final = (DELAY, *TIMER_PROPERTIES)


@dataclass(slots=True, eq=False)
class Retries:
    """The rules, the two topics, and how much went there."""

    topics: Topics
    groups: Groups
    locks: QueueLocks
    clock: Clock
    said_s: dict[str, float] = field(default_factory=dict, init=False)
    retried: dict[str, int] = field(default_factory=dict, init=False)
    """Messages that will come again, by group."""
    dead: dict[str, int] = field(default_factory=dict, init=False)
    """Dead letters, by group."""

    def config(self, group: str) -> GroupConfig:
        """The group's settings; made where that is allowed. Raises RequestError when there is no
        such group."""
        config = self.groups.find(group)
        if config is None:
            raise RequestError(
                ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST,
                f"subscription group not exist, {group}. Create it, or set "
                "autoCreateSubscriptionGroup=true in broker.conf.",
            )
        return config

    @staticmethod
    def times_max(config: GroupConfig, said: int | None, version: int) -> int:
        """How often a message of a group comes again at most; `said` by the request's header."""
        return said if said is not None and version >= _CLIENT_SAYS_MAX_SINCE else (
            config.retry_times_max
        )  # fmt: skip

    def is_ordered(self, group: str) -> bool:
        """Does the group consume in order now? It has tried at its own place: what it gives up
        is a dead letter."""
        return self.locks.holds_any(group)

    def retry_topic(self, config: GroupConfig, *, is_unit: bool) -> Topic:
        """Made when it is missing."""
        sys_flag = UNIT_SYS_FLAG if is_unit else 0
        return self.topics.ensure(RETRY_PREFIX + config.name, config.retry_queues, sys_flag)

    def dead_letters(self, group: str) -> Topic:
        """Made when it is missing."""
        return self.topics.ensure(DLQ_PREFIX + group, 1)

    def bury(self, group: str, properties: MutableMapping[str, str]) -> Topic:
        """A message becomes a dead letter, at once: its delays are taken off. Returns its topic."""
        for name in _DELAYS:
            properties.pop(name, None)
        return self.dead_letters(group)

    def stored(self, group: str, topic: Topic, message_id: str, times: int) -> None:
        """Counts a message that is stored: it will come again, or it is a dead letter."""
        if not topic.name.startswith(DLQ_PREFIX):
            self.retried[group] = self.retried.get(group, 0) + 1
            return
        count = self.dead[group] = self.dead.get(group, 0) + 1
        now_s = self.clock.monotonic_s()
        if now_s - self.said_s.get(group, -SAY_PERIOD_S) >= SAY_PERIOD_S:
            self.said_s[group] = now_s
            log.warning(
                "group %s gives up on message %s after %d retries: it goes to %s (%d dead letters "
                "since the start; this is said once a minute)",
                group, message_id, times, topic.name, count,
            )  # fmt: skip


def begins_anew(topic: str) -> bool:
    """Is a message of this topic a dead letter, whose failures are counted from the beginning?"""
    return topic.startswith(DLQ_PREFIX)
