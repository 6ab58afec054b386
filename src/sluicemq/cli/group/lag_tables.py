"""Print the lag of consumer groups as tables."""

from dataclasses import asdict
from typing import Final

import click

from sluicemq.cli.output import format_time, print_records, record_builder
from sluicemq.client.admin.groups import QueueLag
from sluicemq.model.system_names import is_retry_topic

make_lag_record: Final = record_builder(
    "group topic=queue.topic broker=queue.broker queue_id=queue.queue_id committed offset_min "
    "offset_max lag in_flight lost at_risk=messages_at_risk loss_time_ms matching eta_ms beyond_end"
)
"""A function that returns the record of a `QueueLag` for tables and JSON."""


def print_lag(lags: list[QueueLag]) -> None:
    """Print a table of queues and one of lanes, then lines about committed offsets and filters.

    Queues of retry topics are left out if nothing in them matters. A committed offset beyond the
    end of its queue gets a line that says why that can happen.
    """
    _print_queue_lags(lags)
    _print_lane_lags(lags)
    for queue_lag in lags:
        if queue_lag.beyond_end:
            queue = queue_lag.queue
            click.echo(
                f"The committed offset {queue_lag.committed} of {queue_lag.group} is beyond the "
                f"end {queue_lag.offset_max} of {queue.topic} queue {queue.queue_id} on "
                f"{queue.broker}: the topic was deleted and created again, or the broker "
                f"lost messages. See sluice explain group {queue_lag.group}."
            )
    _print_matching_total(lags)


def _print_queue_lags(lags: list[QueueLag]) -> None:
    """Print a table of the queues, without queues of retry topics in which nothing matters."""
    records = []
    for queue_lag in lags:
        needs_attention = queue_lag.lag or queue_lag.lost or queue_lag.beyond_end
        if needs_attention or not is_retry_topic(queue_lag.queue.topic):
            records.append(make_lag_record(queue_lag))
    columns = (
        "group topic broker queue=queue_id committed first=offset_min end=offset_max lag "
        "?in_flight=in_flight matching "
        "?done_in=eta_ms:span ?lost ?at_risk=at_risk ?deleted_from=loss_time_ms:time"
    )
    print_records(records, columns=columns)


def _print_lane_lags(lags: list[QueueLag]) -> None:
    """Print a table of the lanes, without lanes of retry topics that match no unread message."""
    records = []
    for queue_lag in lags:
        lanes = queue_lag.lanes
        if is_retry_topic(queue_lag.queue.topic):
            lanes = tuple(lane for lane in lanes if lane.matching)
        # A lane has its own committed offset, which replaces that of the queue.
        records += [make_lag_record(queue_lag) | asdict(lane) for lane in lanes]
    columns = "group topic broker queue=queue_id lane filter=expression committed matching"
    title = "Lanes: a message counts in the lane that will receive it"
    print_records(records, columns=columns, title=title)


def print_lag_totals(lags: list[QueueLag]) -> None:
    """Print the sums of the lag, and what will be deleted next."""
    lag_text = f"The lag is {sum(queue_lag.lag for queue_lag in lags):,} messages"
    in_flight_count = sum(queue_lag.in_flight for queue_lag in lags)
    if in_flight_count:
        lag_text += f", of which {in_flight_count:,} are in flight"

    lags_at_risk = [queue_lag for queue_lag in lags if queue_lag.messages_at_risk]
    if lags_at_risk:
        at_risk_count = sum(queue_lag.messages_at_risk for queue_lag in lags_at_risk)
        first_loss_ms = min(queue_lag.loss_time_ms for queue_lag in lags_at_risk)
        first_loss = format_time(first_loss_ms)
        risk_text = f"{at_risk_count:,} of them will be deleted from {first_loss} on."
    else:
        risk_text = "None of them is about to be deleted."
    click.echo(f"{lag_text}. {risk_text}")


def _print_matching_total(lags: list[QueueLag]) -> None:
    """Print how many unread messages match the filters of the groups, if that is known.

    If it is unknown for a queue with a lag, a sentence says why it may be.
    """
    known_counts = [queue_lag.matching for queue_lag in lags if queue_lag.matching is not None]
    is_incomplete = any(queue_lag.lag and queue_lag.matching is None for queue_lag in lags)
    if is_incomplete:
        click.echo(
            "If matching is empty, the number of messages that match the filter is unknown: a "
            "RocketMQ broker does not count them, and the tags of a group without members are not "
            "known. The lag includes messages that a filter will drop."
        )
    elif known_counts:
        click.echo(f"{sum(known_counts):,} messages match the groups' filters.")
