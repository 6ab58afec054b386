"""What groups got: sums that pulls add to, and that metrics and `filter_watch` read."""

from typing import Final

from sluicemq.broker.pacing import Pace
from sluicemq.model.subscription import MessageFilter

RUNS_MAX: Final = 128
FILTERS_MAX: Final = 256
"""On queues: a pull may bring another expression each time."""


class Delivered:
    """What one group got of one topic. `pulled` is the table of how far it has fetched, by queue;
    it belongs to `Offsets`. `runs` are the ranges that a filter of properties was asked about, by
    filter and queue, start and end in turn, for who asks what came of them (`filter_watch`).
    `pace` is how far apart what it has in hand may lie."""

    __slots__ = ("bytes_out", "filtered", "messages_out", "pace", "pulled", "runs")

    def __init__(self, pulled: dict[int, int]) -> None:
        self.pulled = pulled
        self.messages_out = 0
        self.bytes_out = 0
        self.filtered = 0
        self.pace = Pace()
        self.runs: dict[tuple[MessageFilter, int], list[int]] = {}

    def looked(self, message_filter: MessageFilter, queue_id: int, start: int, end: int) -> None:
        """The filter was asked about these messages: a sum for each pull, not for each message.

        Of a reader that jumps, or changes its filter, more than anybody asks for, the oldest ranges
        are forgotten.
        """
        runs = self.runs.get((message_filter, queue_id))
        if runs is None:
            if len(self.runs) >= FILTERS_MAX:
                del self.runs[next(iter(self.runs))]
            self.runs[message_filter, queue_id] = [start, end]
        elif runs[-1] == start:
            runs[-1] = end
        else:
            runs += (start, end)
            if len(runs) > RUNS_MAX:
                del runs[:2]
