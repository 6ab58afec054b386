"""Bodies as brokers store them: good and undecodable ones, of every compression.

`GOOD` and `BAD` are by name. `LIMIT` is the `body_bytes_max` that makes the oversized ones
undecodable; with a larger limit they are good.
"""

import gzip
import os
import zlib
from typing import Final, NamedTuple

from sluicemq import Sluice
from sluicemq.client.core.messages import OutgoingMessage
from sluicemq.client.core.sending import Sender
from sluicemq.model.bodies import COMPRESSED, compress

LIMIT: Final = 256 * 1024
KINDS: Final = {"zlib of old clients": 0, "lz4": 0x100, "zstd": 0x200, "zlib": 0x300}
TEXT: Final = b"hello sluice " * 40


class StoredBody(NamedTuple):
    """`raw` and `sys_flag` as a record holds them; `body` is what the producer sent, None when it
    cannot be known."""

    raw: bytes
    sys_flag: int
    body: bytes | None


def _made() -> tuple[dict[str, StoredBody], dict[str, StoredBody]]:
    good = {
        "plain": StoredBody(TEXT, 0, TEXT),
        "plain with a compression type": StoredBody(TEXT, 0x300, TEXT),
        "gzip": StoredBody(gzip.compress(TEXT), COMPRESSED, TEXT),
        "compressed and empty": StoredBody(b"", COMPRESSED, b""),
        "zlib with bytes behind it": StoredBody(
            zlib.compress(TEXT) + b"\1junk", COMPRESSED | 0x300, TEXT
        ),
    }
    bad = {
        f"compression type {kind}": StoredBody(zlib.compress(TEXT), COMPRESSED | kind << 8, None)
        for kind in range(4, 8)
    }
    random = os.urandom(997) * 99
    for name, kind in KINDS.items():
        flag = COMPRESSED | kind
        whole = compress(TEXT, kind)
        good[name] = StoredBody(whole, flag, TEXT)
        good[f"{name}, random"] = StoredBody(compress(random, kind), flag, random)
        good[f"{name}, at the limit"] = StoredBody(compress(bytes(LIMIT), kind), flag, bytes(LIMIT))
        bad[f"{name}, garbage"] = StoredBody(b"not compressed", flag, None)
        bad[f"{name}, cut"] = StoredBody(whole[:-3], flag, None)
        bad[f"{name}, half"] = StoredBody(whole[: len(whole) // 2], flag, None)
        bad[f"{name}, one byte"] = StoredBody(whole[:1], flag, None)
        bad[f"{name}, oversized"] = StoredBody(compress(bytes(LIMIT + 1), kind), flag, None)
    for name in ("lz4", "zstd"):
        whole, flag, _ = good[name]
        good[f"{name}, two frames"] = StoredBody(whole + whole, flag, TEXT + TEXT)
        bad[f"{name}, bytes behind it"] = StoredBody(whole + b"\1junkjunk", flag, None)
        bad[f"{name}, a cut second frame"] = StoredBody(whole + whole[:-3], flag, None)
        bad[f"{name}, too many frames"] = StoredBody(compress(b"", KINDS[name]) * 1025, flag, None)
    return good, bad


GOOD, BAD = _made()


async def send_stored(
    mq: Sluice, topic: str, message_id: str, stored: StoredBody, queue: int = 0, **properties: str
) -> None:
    """Send a body as it shall be stored to a queue of the topic, whatever it is."""
    own = {"UNIQ_KEY": message_id, **properties}
    text = "".join(f"{name}\x01{value}\x02" for name, value in own.items())
    outgoing = OutgoingMessage(topic, stored.raw, text, message_id, stored.sys_flag, 0, True)
    sender = Sender(mq.cluster.directory, "P", str)
    await mq.cluster.run(sender.send_outgoing(outgoing, (await mq.queues(topic))[queue]))
