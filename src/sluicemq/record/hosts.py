"""Hosts of records as texts: `10.0.0.7:10911`, `[::1]:10911`.

A block has few different hosts, and each is decoded once: the bytes of all rows are sorted out as
numbers of 32 bits, five of them for an IPv6 host.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from sluicemq.model.ids import decode_host
from sluicemq.record.block import Block


def host_column(block: Block, name: str) -> Any:
    """The column `born_host` or `store_host` of a block."""
    places = np.empty(len(block), np.int64)
    texts: list[str] = []
    for rows, hosts in block.hosts(name):
        if not len(rows):
            continue
        words = np.ascontiguousarray(hosts).view(np.uint32).reshape(len(rows), -1)
        different, turns = np.unique(words, axis=0, return_inverse=True)
        places[rows] = len(texts) + turns.reshape(-1)
        texts += [str(decode_host(row.tobytes())) for row in different]
    return pa.array(texts, pa.string()).take(pa.array(places))
