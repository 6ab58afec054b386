"""Who has to hear that a lane was sent back, and who may read a group with lanes at all."""

from sluicemq.broker.resets import TELLS_MAX, Resets
from sluicemq.testing.virtual import RESOLUTION_S, VirtualClock


def test_a_pull_that_waited_does_not_prove_that_its_reader_has_heard() -> None:
    resets = Resets()
    resets.put("lane", "T", 0, 3)
    assert resets.tell("lane", "T", 0, 8, "c1", is_parked=True) == 3
    # Another pull of the same client, from before its connection broke, stands at that offset.
    assert resets.tell("lane", "T", 0, 3, "c1", is_parked=True) == 3
    for _ in range(2 * TELLS_MAX):
        assert resets.tell("lane", "T", 0, 8, "c1", is_parked=True) == 3
    assert resets.blocks("lane", "T", 0)


def test_the_client_that_reads_the_queue_now_has_to_hear() -> None:
    resets = Resets()
    resets.put("lane", "T", 0, 7)
    assert resets.tell("lane", "T", 0, 12, "gone") == 7
    assert resets.tell("lane", "T", 0, 12, "reader") == 7  # it was never told
    assert resets.blocks("lane", "T", 0)
    assert resets.tell("lane", "T", 0, 7, "reader") is None
    assert not resets


def test_a_reset_of_a_group_is_heard_with_the_next_pull_as_ever() -> None:
    resets = Resets()
    resets.put("G", "T", 0, 5)
    assert resets.tell("G", "T", 0, 9) == 5
    assert resets.tell("G", "T", 0, 5) is None
    assert not resets.blocks("G", "T", 0)


def test_virtual_time_passes_however_near_the_timer_is() -> None:
    clock = VirtualClock()
    clock._pass(184.537369)
    before = clock.monotonic_s()
    clock._pass(1e-10)
    assert before < clock.monotonic_s() <= before + 2 * RESOLUTION_S
