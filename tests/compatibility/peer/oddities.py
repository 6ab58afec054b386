"""Writes records of every kind into a store through the store's own face, then ends.

    python oddities.py STORE [long] SIGNAL [key=value …]

SIGNAL 9 ends by kill -9, any other by an orderly close. With `long` there are V2 records, which
RocketMQ 4.9 does not know.
"""

import os
import signal
import struct
import sys
import zlib

from sluicemq.config import load_broker_config
from sluicemq.model.bodies import COMPRESSED
from sluicemq.model.ids import tag_code
from sluicemq.model.message import PREPARED
from sluicemq.record.codec import encode_properties
from sluicemq.store.store import Store

TOPIC, QUEUES = "Todd", 4
LONG = "%RETRY%" + "g" * 190
COMMIT = 8
IPV4 = bytes([127, 0, 0, 1]) + struct.pack(">i", 10911)
IPV6 = bytes(15) + b"\x01" + struct.pack(">i", 10912)
BORN_MS = 1_700_000_000_000


def fill(store: Store, *, has_long: bool) -> None:
    packed = zlib.compress(b"a body that the producer compressed " * 300)
    for number in range(40):
        properties = encode_properties(
            {"n": str(number), "TAGS": f"t{number % 3}", "KEYS": f"odd {number}"}
        )
        tag = tag_code(f"t{number % 3}")
        queue = number % QUEUES
        common = (BORN_MS + number, IPV6 if number % 2 else IPV4, IPV6 if number % 5 == 4 else IPV4)
        store.writer.append(TOPIC, queue, b"plain %d" % number, properties, tag, number, 0, *common)
        store.writer.append(TOPIC, queue, packed, properties, tag, 0, COMPRESSED, *common)
        store.writer.append(TOPIC, queue, b"retried", properties, tag, -1, 0, *common, 3)
        store.writer.append(TOPIC, queue, b"half", properties, tag, 0, PREPARED, *common)
        store.writer.append(TOPIC, queue, b"whole", properties, tag, 0, COMMIT, *common, 0, 17)
        store.writer.append(TOPIC, queue, b"bare", b"", 0, 0, 0, *common)
        parts = [(part, b"part %d" % part * 50, properties, tag) for part in range(5)]
        store.writer.append_batch(TOPIC, queue, parts, 0, *common)
        if has_long:
            store.writer.append(LONG, 0, b"long %d" % number, properties, tag, 0, 0, *common)
        store.commit()


def main(root: str, *words: str) -> None:
    settings = [word for word in words if "=" in word]
    config = load_broker_config("\n".join(settings), overrides={"storePathRootDir": root})[1]
    store = Store.open(config)
    fill(store, has_long="long" in words)
    if str(int(signal.SIGKILL)) in words:
        os.kill(os.getpid(), signal.SIGKILL)
    store.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
