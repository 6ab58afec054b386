"""What an executor does with its share of a store: places in the log -> Arrow batches.

    StoreReader    opened for the one queue, read-only
    RangeScan      units of the queue -> matches -> places in mapped files of the log
    RecordDecoder  decodes them where they lie; from there on everything is as in `reader`

No byte of a record is copied before it is in a column. Heavy to import: only executors do.
"""

from collections.abc import Iterator
from typing import Any, Final

from sluicemq.errors import OffsetOutOfRangeError, ProtocolError, StoreDamagedError
from sluicemq.filter.subscriptions import make_filter
from sluicemq.model.subscription import TAG, MessageFilter
from sluicemq.spark.plan import ReadPlan
from sluicemq.spark.reader import Tally, decoder_of, finished, report_tally
from sluicemq.spark.store_plan import StorePartition, StorePlace

SKIP: Final = "Set failOnDataLoss=false to read what is left."
_SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"


def read_part(
    place: StorePlace, plan: ReadPlan, part: StorePartition, *, check_bodies: bool = False
) -> Iterator[Any]:
    """Arrow batches of a range, columns in the plan's order.

    Raises OffsetOutOfRangeError for messages that are gone and StoreDamagedError for damaged ones
    (with failOnDataLoss), ConfigurationError as `reader.read_range`.
    """
    queue = part.queue
    assert queue is not None
    tally = Tally()
    decoder = decoder_of(plan, place.broker)
    reader = place.open(frozenset({queue.topic}), queue.queue_id)
    try:
        reader.add_units(queue.topic, queue.queue_id, part.tail_start, part.tail)
        scan = reader.range(
            queue.topic,
            queue.queue_id,
            _filter_of(plan, queue.topic),
            skips=not plan.fail_on_data_loss,
            check_bodies=check_bodies,
        )
        for places in scan.places(part.start, part.end):
            for batch in decoder.decode_at(places.view, places.starts):
                yield finished(batch, plan, queue, tally)
    except OffsetOutOfRangeError as error:
        raise OffsetOutOfRangeError(error.fact + ".", cure=f"{error.cure} {SKIP}") from None
    except StoreDamagedError as error:
        raise StoreDamagedError(error.fact + ".", cure=f"{error.cure} {SKIP}") from None
    except ProtocolError as error:
        raise StoreDamagedError(
            f"a message of queue {queue.queue_id} of {queue.topic!r} in {place.root} is damaged:"
            f" {error}",
            cure="`sluice store verify` shows all damage; checkBodies=true with"
            " failOnDataLoss=false reads what is sound.",
        ) from None
    finally:
        reader.close()
    tally.lost, tally.damaged, tally.bytes_read = scan.gone, scan.damaged, scan.log_bytes
    report_tally(queue, tally)


def _filter_of(plan: ReadPlan, topic: str) -> MessageFilter | None:
    """What the store decides. Units of delayed messages hold times where others have the code of
    their tag (spec/store.md §3): of those the decoder alone compares tags."""
    if plan.subscription is None or (
        topic == _SCHEDULE_TOPIC and plan.subscription.kind == TAG and plan.tags is not None
    ):
        return None
    return make_filter(plan.subscription)
