"""How many bytes a range of offsets holds, about: the option `maxBytesPerTrigger`.

No request of RocketMQ tells the bytes of a range, so the mean stored size is taken from samples of
up to 32 messages: where the micro-batch would begin, then in the middle and at the end of what that
first guess allows, and again while the guess still shrinks. Sizes that change slowly are met within
some per cent; a queue whose messages alternate between small and large by thousands is not. Each
queue moves by one message at least.
"""

from collections.abc import Mapping
from typing import Final

from sluicemq.client.core import requests
from sluicemq.client.core.answers import PullStatus, pull_answer
from sluicemq.client.sync.admin import Admin
from sluicemq.model.subscription import ALL, Subscription
from sluicemq.model.topic import MessageQueue
from sluicemq.spark.offsets import Offsets

SAMPLE_MESSAGES: Final = 32
SAMPLE_BYTES: Final = 256 * 1024
ROUNDS_MAX: Final = 4


def admit_bytes(
    admin: Admin, group: str, start: Mapping[MessageQueue, int], latest: Offsets, bytes_max: int
) -> Offsets:
    """The end of the next micro-batch, like `offsets.admit`, with at most `bytes_max` stored
    bytes by sample, in equal shares of the queues that lag."""
    ends = dict(latest)
    lags = {queue: end - start.get(queue, 0) for queue, end in latest.items()}
    lagging = [queue for queue, lag in lags.items() if lag > 0]
    for queue in lagging:
        begin = start.get(queue, 0)
        allowed = max(1, bytes_max // len(lagging))
        first = mean_bytes(admin, group, queue, begin)
        count = min(lags[queue], _count(allowed, first))
        for _ in range(ROUNDS_MAX):
            places = {begin + count // 2, begin + count - 1} - {begin}
            sizes = [first, *(mean_bytes(admin, group, queue, place) for place in places)]
            known = [size for size in sizes if size]
            guess, count = count, min(count, _count(allowed, sum(known) / max(1, len(known))))
            if count * 5 >= guess * 4:
                break
        ends[queue] = begin + count
    return ends


def _count(bytes_max: int, mean: float) -> int:
    return max(1, int(bytes_max / mean)) if mean else 1


def mean_bytes(admin: Admin, group: str, queue: MessageQueue, offset: int) -> float:
    """The mean stored size of the messages from `offset` on; 0.0 when there is none."""
    command = requests.pull(
        group, queue, offset, count_max=SAMPLE_MESSAGES, bytes_max=SAMPLE_BYTES,
        subscription=Subscription(queue.topic, ALL),
    )  # fmt: skip
    address = admin.address(queue)
    answer = pull_answer(admin.call(address, command), address)
    if answer.status is not PullStatus.FOUND:
        return 0.0
    return len(answer.data) / max(1, answer.next_offset - offset)
