"""Where the messages of a group's retry topic go: to the feeds of the topics they came from."""

from collections.abc import Callable, Mapping

from sluicemq.client.aio.received import Feed, ReceivedMessage


class RetrySink:
    """Sends the messages of a retry topic to the feeds of the topics they came from."""

    __slots__ = ("_feeds",)

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self._feeds = feeds

    def put(self, messages: list[ReceivedMessage]) -> None:
        """A message of a topic that is not subscribed to any more goes to any feed."""
        for message in messages:
            feed = self._feed_of(message)
            if feed is not None:
                feed.put([message])

    def _feed_of(self, message: ReceivedMessage) -> Feed | None:
        return self._feeds.get(message.topic) or next(iter(self._feeds.values()), None)

    def discard(self, unwanted: Callable[[ReceivedMessage], bool]) -> None:
        for feed in self._feeds.values():
            feed.discard(unwanted)

    def fail(self, error: BaseException) -> None:
        for feed in self._feeds.values():
            feed.fail(error)
