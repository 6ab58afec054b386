"""The offsets file of a broadcasting consumer, in the form of the Java client's.

Each client of a broadcasting group reads every queue and keeps its own offsets in a file:

    <directory>/<client>/<group>/offsets.json      and the edition before it in offsets.json.bak
    {"offsetTable":{{"brokerName":"b","queueId":0,"topic":"T"}:5}}

The directory is ~/.rocketmq_offsets, the client `<address>@DEFAULT`: no process number in it, so
that a program that starts again finds its offsets, and a Java program's file is taken over.
"""

from collections.abc import Mapping
from typing import Final

from sluicemq.errors import ProtocolError
from sluicemq.model.topic import MessageQueue
from sluicemq.protocol import fastjson

FILE_NAME: Final = "offsets.json"
LOCK_NAME: Final = "offsets.lock"
DIRECTORY_NAME: Final = ".rocketmq_offsets"
INSTANCE: Final = "DEFAULT"


def encode_local_offsets(offsets: Mapping[MessageQueue, int]) -> str:
    """The file's text, with tabs and breaks where Java's fastjson has them."""
    entries = ",".join(
        f'{{\n\t\t\t"brokerName":{_quoted(queue.broker)},'
        f'\n\t\t\t"queueId":{queue.queue_id},'
        f'\n\t\t\t"topic":{_quoted(queue.topic)}\n\t\t}}:{offset}'
        for queue, offset in sorted(offsets.items())
    )
    return f'{{\n\t"offsetTable":{{{entries}\n\t}}\n}}'


def _quoted(text: str) -> str:
    return fastjson.dumps(text).decode()


def decode_local_offsets(text: str) -> dict[MessageQueue, int]:
    """Raises ValueError when it is another thing, as `files.load_text` wants it."""
    try:
        value = fastjson.loads(text)
    except ProtocolError as error:
        raise ValueError(error.fact) from error
    table = value.get("offsetTable") if isinstance(value, dict) else None
    if not isinstance(table, dict):
        raise ValueError("it has no offsetTable")  # noqa: TRY004 - what load_text wants
    found: dict[MessageQueue, int] = {}
    for key, offset in table.items():
        try:
            parts = dict(key)
            queue = MessageQueue(parts["topic"], parts["brokerName"], int(parts["queueId"]))
            found[queue] = int(offset)
        except (TypeError, ValueError, KeyError):
            raise ValueError(f"it has the odd entry {key!r}: {offset!r}") from None
    return found
