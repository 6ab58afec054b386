"""What a call may say: names, and later the fields of messages (spec/grpc.md §3).

Each check raises StatusError with the code that the clients know it by.
"""

from typing import Final

from sluicemq.client.core import names
from sluicemq.errors import ConfigurationError
from sluicemq.proxy import messages as m
from sluicemq.proxy.clients import StatusError
from sluicemq.proxy.messages import Code

SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"


def topic_of(resource: m.Resource) -> str:
    """The name of a topic; system topics are not for clients of gRPC."""
    name = resource.name
    if name.startswith(SYSTEM_TOPIC_PREFIX):
        raise StatusError(Code.ILLEGAL_TOPIC, f"the topic {name!r} belongs to the broker itself.")
    try:
        return names.check_topic_to_send(name)
    except ConfigurationError as error:
        raise StatusError(Code.ILLEGAL_TOPIC, str(error)) from error


def group_of(resource: m.Resource) -> str:
    """The name of a consumer group."""
    name = resource.name
    if name.startswith(SYSTEM_GROUP_PREFIX):
        raise StatusError(
            Code.ILLEGAL_CONSUMER_GROUP, f"the group {name!r} belongs to the broker itself."
        )
    try:
        return names.check_group(name)
    except ConfigurationError as error:
        raise StatusError(Code.ILLEGAL_CONSUMER_GROUP, str(error)) from error
