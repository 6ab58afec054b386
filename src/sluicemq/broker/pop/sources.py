"""The queues that a pop reads, and their order."""

from collections.abc import Iterator
from random import Random

from sluicemq.broker.settings import Settings
from sluicemq.broker.topics import Topics
from sluicemq.model.topic import POP_RETRY, POP_RETRY_V2, pop_kind, pop_topic
from sluicemq.wire.popping import PopMessageRequest

Source = tuple[str, int, int]
"""A queue to read: its topic, its id, and the kind of the topic (`model.topic.pop_kind`)."""


class PopSources:
    """Selects the queues that pops read."""

    def __init__(self, settings: Settings, topics: Topics, random: Random) -> None:
        """Create the selector. It reads the numbers of queues in `topics` for each pop.

        `random` decides whether the retry topics are first, and from which queue of a topic a pop
        starts.
        """
        self._settings = settings
        self._topics = topics
        self._random = random

    def iter_queues(self, header: PopMessageRequest) -> Iterator[Source]:
        """Yield the queues that a pop reads, in the order in which it reads them.

        Each is a tuple (topic, queue id, kind of the topic). They are the requested queue, or all
        queues of the topic if no queue is requested, and the queues of the retry topics. The retry
        topics come first with a probability of popFromRetryProbability percent, otherwise last.
        Called for each pop: keep it cheap.
        """
        retry_sources = self._iter_retry_queues(header)
        is_retry_first = self._random.randrange(100) < self._settings.broker.pop_retry_percent
        if is_retry_first:
            yield from retry_sources
        if header.queue_id >= 0:
            yield header.topic, header.queue_id, pop_kind(header.topic)
        else:
            yield from self._iter_topic_queues(header.topic)
        if not is_retry_first:
            yield from retry_sources

    def _iter_retry_queues(self, header: PopMessageRequest) -> Iterator[Source]:
        """Yield the queues of the retry topics for the group and topic of a pop.

        If there are two kinds of retry topics, a random one comes first. An ordered pop reads none.
        """
        retry_kinds = () if header.order else self.retry_kinds
        if len(retry_kinds) > 1 and self._random.randrange(2):
            retry_kinds = retry_kinds[::-1]
        for retry_kind in retry_kinds:
            yield from self._iter_topic_queues(pop_topic(header.topic, header.group, retry_kind))

    @property
    def retry_kinds(self) -> tuple[int, ...]:
        """The kinds of retry topics that pops read, according to the settings."""
        config = self._settings.broker
        if not config.pop_retry_v2:
            return (POP_RETRY,)
        return (POP_RETRY, POP_RETRY_V2) if config.pop_retry_v1_read else (POP_RETRY_V2,)

    def _iter_topic_queues(self, name: str) -> Iterator[Source]:
        """Yield all queues of the topic `name`, beginning with a random one.

        The queue with the highest id is followed by queue 0. Yield nothing if the topic does not
        exist.
        """
        topic = self._topics.get(name)
        if topic is None:
            return
        queue_count = topic.config.read_queues
        first_id = self._random.randrange(queue_count) if queue_count > 1 else 0
        topic_kind = pop_kind(name)
        for distance in range(queue_count):
            yield name, (first_id + distance) % queue_count, topic_kind
