"""Requests of a popping consumer to a stepped broker, and helpers that read the answers.

Messages are identified by their property `n`.
"""

from simulation.stepped import SteppedBroker, SteppedClient, send_fields
from sluicemq.record.codec import decode_records
from sluicemq.wire.frames import Command
from sluicemq.wire.popping import ReceiptHandle

POP, ACK = 200050, 200051


def pop_fields(broker: SteppedBroker, **changes: object) -> dict[str, object]:
    """Return the fields of a pop (200050) of any queue that does not wait."""
    fields: dict[str, object] = {
        "consumerGroup": "G", "topic": "T", "queueId": -1, "maxMsgNums": 32,
        "invisibleTime": 60_000, "pollTime": 0, "bornTime": broker.clock.now_ms(), "initMode": 0,
        "order": "false",
    }  # fmt: skip
    return fields | changes


def fill(client: SteppedClient, count: int, queue_id: int = 0, tags: str = "A") -> None:
    """Send messages 0, 1, …, with the tags in turn."""
    for number in range(count):
        properties = f"UNIQ_KEY\x01AB{number}\x02TAGS\x01{tags[number % len(tags)]}\x02"
        send = send_fields(properties=f"{properties}n\x01{number}\x02", e=queue_id)
        client.call(310, send, b"body")


def numbers(answer: Command) -> list[int]:
    """Return the numbers of the messages in an answer."""
    return sorted(int(m.properties["n"]) for m in decode_records(answer.body))


def fields_of(answer: Command) -> dict[str, str]:
    """Return the header fields of an answer."""
    assert answer.fields is not None
    return answer.fields


def handles(answer: Command) -> dict[int, ReceiptHandle]:
    """Return the receipt handles by message number, as a client builds them."""
    fields = fields_of(answer)
    starts = {}
    for text in filter(None, fields["startOffsetInfo"].split(";")):
        kind, queue_id, start = text.split(" ")
        starts[int(kind), int(queue_id)] = int(start)
    found = {}
    for m in decode_records(answer.body):
        number = int(m.properties["n"])
        if "POP_CK" in m.properties:
            found[number] = ReceiptHandle.parse(m.properties["POP_CK"])
        else:
            found[number] = ReceiptHandle(
                starts[0, m.queue_id], int(fields["popTime"]), int(fields["invisibleTime"]),
                int(fields["reviveQid"]), 0, "broker-a", m.queue_id, m.queue_offset,
            )  # fmt: skip
    return found


def ack(client: SteppedClient, handle: ReceiptHandle, **changes: object) -> Command:
    """Acknowledge a message (200051), and return the answer."""
    fields: dict[str, object] = {
        "consumerGroup": "G", "topic": "T", "queueId": handle.queue_id, "offset": handle.offset,
        "extraInfo": handle.encode(),
    }  # fmt: skip
    return client.call(ACK, fields | changes)
