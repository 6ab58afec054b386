"""Properties of the client's pure core."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sluicemq.client.core.consuming import InFlight
from sluicemq.client.core.messages import OutgoingMessage, make_outgoing, split_batch
from sluicemq.client.core.sending import QueueChooser, avoidance_s
from sluicemq.model.message import Message
from sluicemq.model.properties import REFUSED_PROPERTIES
from sluicemq.model.topic import MessageQueue, allocate_average
from sluicemq.record.codec import decode_properties

names = st.text(st.characters(exclude_characters="\x01\x02", exclude_categories=["Cs"]), min_size=1)
properties = st.dictionaries(
    names.filter(lambda name: name not in REFUSED_PROPERTIES and not name.startswith("__RMQ.")),
    names,
    max_size=6,
)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 60), st.sets(st.text("abcdefg@#1", min_size=1), min_size=1, max_size=12))
def test_every_queue_has_exactly_one_reader_and_shares_differ_by_at_most_one(count, members):
    queues = [MessageQueue("t", "ab"[n % 2], n) for n in range(count)]
    shares = [allocate_average(member, queues, sorted(members)) for member in members]
    assert sorted(queue for share in shares for queue in share) == sorted(queues)
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 5), max_size=40),
    st.data(),
)
def test_the_committable_offset_never_passes_an_unacknowledged_message(gaps, data):
    flight, offset, waiting, seen = InFlight(0), 0, set(), 0
    for gap in gaps:
        offset += gap
        waiting.add(offset)
        seen = offset + 1
        flight.add([(offset, 1)], seen)
        if waiting and data.draw(st.booleans()):
            done = data.draw(st.sampled_from(sorted(waiting)))
            before = flight.committable
            assert flight.ack(done)
            waiting.discard(done)
            assert flight.committable >= before, "it never goes back"
        assert flight.committable == min(waiting, default=seen)
        assert flight.count == flight.size_bytes == len(waiting)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=40), st.integers(100, 5000))
def test_a_batch_is_split_without_loss_in_order_and_within_the_limit(sizes, limit):
    parts = [
        OutgoingMessage("t", bytes(size), "", str(n), 0, 0, True) for n, size in enumerate(sizes)
    ]
    runs = list(split_batch(parts, limit))
    assert [part for run in runs for part in run] == parts
    for run in runs:
        assert len(run) == 1 or sum(22 + len(part.body) for part in run) <= limit


@settings(max_examples=100, deadline=None)
@given(properties)
def test_properties_read_back_as_they_were_given(given_properties):
    outgoing = make_outgoing(Message("t", b"x", properties=given_properties), "ID")
    read = decode_properties(outgoing.properties.encode())
    assert {"UNIQ_KEY": "ID", "WAIT": "true", **given_properties} == read


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from("abc"), min_size=1, max_size=8),
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 20)), max_size=20),
)
def test_the_chooser_always_chooses_and_avoids_a_failed_broker_when_another_is_well(
    brokers, events
):
    queues = [MessageQueue("t", broker, n) for n, broker in enumerate(brokers)]
    chooser, now_s = QueueChooser(), 0.0
    avoided_until_s: dict[str, float] = {}
    for broker, latency_s in events:
        chooser.record_latency(broker, latency_s, now_s)
        avoided_until_s[broker] = now_s + avoidance_s(latency_s)
        now_s += 0.1
        chosen = chooser.choose(queues, now_s)
        assert chosen in queues
        well = {name for name in brokers if avoided_until_s.get(name, 0.0) <= now_s}
        assert not well or chosen.broker in well
