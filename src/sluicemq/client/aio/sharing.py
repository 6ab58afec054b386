"""Which consumers of one client may be in one group together."""

from sluicemq.client.aio.member import Member
from sluicemq.client.aio.received import Feed
from sluicemq.client.core.consuming import ConsumeOptions
from sluicemq.errors import ConfigurationError


def check_sharing(
    member: Member, topic: str, feed: Feed, options: ConsumeOptions, *, retry: bool
) -> None:
    """Only streams share a topic: a handler or a poll beside them would starve, or starve them.
    A group consumes in order or not, and has one rule for retries.
    Raises ConfigurationError."""
    known = member.feed_of(topic)
    is_same = known is None or known is feed or (known.is_shareable and feed.is_shareable)
    if not is_same or member.retry != retry:
        raise ConfigurationError(
            f"the group {member.group!r} is already read by another kind of consumer, or by "
            "another handler, of this client.",
            cure="Use another group, or a Sluice of its own.",
        )
    if member.options.broadcast != options.broadcast:
        raise ConfigurationError(
            f"the group {member.group!r} of this client broadcasts for one of its consumers only.",
            cure="Give all consumers of a group the same.",
        )
    own = (member.options.ordered, member.options.retry)
    if own != (options.ordered, options.retry):
        raise ConfigurationError(
            f"the group {member.group!r} is read by this client already with ordered={own[0]} and "
            f"{own[1]}; now it is ordered={options.ordered} and {options.retry}.",
            cure="Give all consumers of a group the same.",
        )
