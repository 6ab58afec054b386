"""An outage is logged once when it begins and once when it ends, however often it is met."""

import errno
import logging
import threading

import pytest

from sluicemq.errors import ConnectionLostError, RequestError, SendError
from sluicemq.outages import FLAP_S, KINDS_MAX, Outages, is_outage, kind_of

log = logging.getLogger("sluicemq.tests.outages")


class Clock:
    now_s = 0.0

    def monotonic_s(self):
        return self.now_s


def texts(caplog):
    return [one.getMessage() for one in caplog.records]


def starts(caplog):
    return [text.partition(" [")[0] for text in texts(caplog)]


def test_the_end_tells_how_long_it_was_and_how_much_was_not_logged(caplog):
    clock = Clock()
    outages = Outages(clock, log)
    for _ in range(4):
        outages.report_failure("a:1", "pull of %s failed", "q")
    outages.report_failure("b:1", "other")
    clock.now_s = 60.0
    outages.report_success("a:1")
    outages.report_success("a:1")
    assert texts(caplog) == [
        "pull of q failed [until it works again, failures of a:1 are logged at DEBUG]",
        "other [until it works again, failures of b:1 are logged at DEBUG]",
        "the outage of a:1 is over after 60 s; 3 more failures were logged at DEBUG",
    ]
    assert set(outages.current) == {"b:1"}


def test_every_failure_is_in_the_log_at_debug(caplog):
    caplog.set_level(logging.DEBUG)
    outages = Outages(Clock(), log)
    for number in range(3):
        outages.report_failure("a:1", "failure %d", number)
    levels = [one.levelno for one in caplog.records]
    assert levels == [logging.WARNING, logging.DEBUG, logging.DEBUG]
    assert texts(caplog)[1:] == ["failure 1", "failure 2"]


def test_what_fails_again_at_once_is_logged_when_it_lasts(caplog):
    clock = Clock()
    outages = Outages(clock, log)
    outages.report_failure("a:1", "first")
    outages.report_success("a:1")
    caplog.clear()
    outages.report_failure("a:1", "flap")
    outages.report_success("a:1")
    assert not caplog.records
    outages.report_failure("a:1", "flap")
    clock.now_s += FLAP_S + 1
    outages.report_failure("a:1", "lasts")
    outages.report_failure("a:1", "lasts")
    assert starts(caplog) == ["lasts"]
    outages.report_success("a:1")
    assert "2 more failures" in texts(caplog)[-1]


def test_what_fails_and_works_in_turns_is_logged_again_after_a_while(caplog):
    clock = Clock()
    outages = Outages(clock, log)
    for _ in range(int(5 * FLAP_S)):
        outages.report_failure("a:1", "fails")
        clock.now_s += 0.5
        outages.report_success("a:1")
        clock.now_s += 0.5
    assert 4 <= starts(caplog).count("fails") <= 5


def test_each_kind_of_failure_is_logged_once_in_an_outage(caplog):
    outages = Outages(Clock(), log)
    for _ in range(3):
        for number in (errno.ENOSPC, errno.EROFS):
            error = OSError(number, "no")
            outages.report_failure("writes", "%s", error, kind=kind_of(error))
    assert starts(caplog) == ["[Errno 28] no", "[Errno 30] no"]
    outages.report_success("writes")
    assert "4 more failures" in texts(caplog)[-1]


def test_a_flap_of_another_kind_is_logged_at_once(caplog):
    outages = Outages(Clock(), log)
    outages.report_failure("writes", "full", kind=errno.ENOSPC)
    outages.report_success("writes")
    caplog.clear()
    outages.report_failure("writes", "full", kind=errno.ENOSPC)
    outages.report_failure("writes", "read-only", kind=errno.EROFS)
    assert starts(caplog) == ["read-only"]
    outages.report_success("writes")
    assert "1 more failures" in texts(caplog)[-1]


def test_the_number_of_kinds_is_limited(caplog):
    outages = Outages(Clock(), log)
    for number in range(2 * KINDS_MAX):
        outages.report_failure("writes", "failure %d", number, kind=str(number))
    assert len(starts(caplog)) == KINDS_MAX


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(errno.EIO, "x"), errno.EIO), (OSError("short write"), "short write")],
)
def test_the_kind_of_a_disk_error_is_its_number_or_its_text(error, kind):
    assert kind_of(error) == kind


def test_one_of_many_threads_logs_the_beginning_and_one_the_end(caplog):
    outages = Outages(Clock(), log)
    count = 8
    for method in (
        lambda: outages.report_failure("a:1", "gone"),
        lambda: outages.report_success("a:1"),
    ):
        ready = threading.Barrier(count)

        def meet(method=method, ready=ready):
            ready.wait()
            method()

        threads = [threading.Thread(target=meet) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert starts(caplog)[0] == "gone"
    assert texts(caplog)[1:] == [
        f"the outage of a:1 is over after 0 s; {count - 1} more failures were logged at DEBUG"
    ]


def test_an_outage_is_found_behind_the_error_that_a_send_raises():
    failed = SendError("not stored")
    failed.__cause__ = ConnectionLostError("gone")
    assert is_outage(failed)
    refused = RequestError(1, "no")
    refused.__cause__ = refused  # as `raise error from error` leaves it
    assert not is_outage(refused)
