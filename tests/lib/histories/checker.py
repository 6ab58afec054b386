"""What must hold in every history.

    lost        a value that was acknowledged is not where it was said to be, on the last master
    twice       one offset of a queue was given to two values, in answers or to consumers
    order       sends of a queue are not linearizable: one that was called after another had
                returned stands before it (also when nobody was told that it is stored)
    taken back  what a consumer was given is not there at the end, or is another value
    missed      a filter that changes all the time has left out what it wants, or let through what
                it does not
    phantom     a value is there that nobody sent, that was refused, or more often than it was tried
    backwards   a master of the same or a later epoch has shown a shorter queue than one before it
    split       two masters have one epoch, one is elected from outside the set, or acknowledgements
                of an older epoch stand behind those of a newer one
    epoch       the rows of a committed epoch are not there exactly once, or a row is there of an
                aborted one, of an attempt that has failed, of a commit that came too late
    forgotten   a change that was answered is not there at the end
    apart       two replicas differ in what both have of the log
    undelivered a timed message that was acknowledged, and not taken back, is not delivered
    unlisted    a pending timed message is missing in the master's list after the last fault
    early       a timed message was delivered before it was due
    repeated    a timed message was delivered more than once, and more often than masters were
                elected after it was due
    recalled    a timed message was delivered although taking it back had succeeded

Each check is linear (or a sort) in the history, so histories of real processes can be as long as
they like. Linearizability is that simple because an append says its place: an order of the
operations exists exactly when no two have one offset and real time agrees with the offsets; an
unsure one counts if it is found, else it has not happened.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import inf

from histories.history import History, Outcome, Queue, Send

LEASE_MS = 4000
"""After this time a master knows that another one is elected."""
LIST_MS = 1500
"""A message that is due sooner may be delivered while the list is made."""


def check(history: History) -> list[str]:
    """Everything that is wrong, the plainest first. Without a replica left that may take over (the
    only disks that had everything are gone) only what does not need one is looked at."""
    during = [*_twice(history), *_backwards(history), *_split(history)]
    if not history.left:
        return during
    return [
        *_lost(history), *during, *_order(history), *_taken_back(history), *_missed(history),
        *_phantoms(history), *_epochs(history), *_forgotten(history), *_apart(history),
        *check_timed(history),
    ]  # fmt: skip


def _final(history: History) -> dict[Queue, dict[int, str]]:
    return history.left[0].queues if history.left else {}


def _acknowledged(history: History) -> Iterator[tuple[Queue, Send]]:
    for send in history.sends:
        if send.outcome is Outcome.OK and send.must_stay:
            assert send.queue is not None
            yield send.queue, send


def _lost(history: History) -> Iterator[str]:
    final = _final(history)
    for queue, send in _acknowledged(history):
        found = final.get(queue, {}).get(send.offset)
        if found != send.value:
            yield f"lost: {send.value} was acknowledged at {queue}:{send.offset}, there is {found}"


def _twice(history: History) -> Iterator[str]:
    given: dict[tuple[Queue, int], str] = {}
    places = [(queue, send.offset, send.value) for queue, send in _acknowledged(history)]
    places += [(seen.queue, seen.offset, seen.value) for seen in history.seen]
    for queue, offset, value in places:
        if given.setdefault((queue, offset), value) != value:
            yield f"twice: {queue}:{offset} was {given[queue, offset]} and is {value}"


def _order(history: History) -> Iterator[str]:
    """Backwards: nothing had returned before what stands in front of it was called."""
    by_value = {send.value: send for send in history.sends}
    places: dict[Queue, dict[int, Send]] = defaultdict(dict)
    for queue, values in _final(history).items():
        for offset, value in values.items():
            if value in by_value and by_value[value].attempts_max == 1:
                places[queue][offset] = by_value[value]
    for queue, send in _acknowledged(history):
        places[queue][send.offset] = send
    for queue, sends in places.items():
        first: Send | None = None
        for offset in sorted(sends, reverse=True):
            send = sends[offset]
            if first is not None and first.returned_s < send.called_s:
                yield (
                    f"order: {send.value} at {queue}:{offset} was called at {send.called_s:.3f} s,"
                    f" {first.value} behind it had returned at {first.returned_s:.3f} s"
                )
            told_s = send.returned_s if send.outcome is Outcome.OK else inf
            if first is None or told_s < first.returned_s:
                first = send if told_s < inf else first


def _taken_back(history: History) -> Iterator[str]:
    final = _final(history)
    for seen in history.seen:
        found = final.get(seen.queue, {}).get(seen.offset)
        if found != seen.value:
            place = f"{seen.queue}:{seen.offset}"
            yield f"taken back: {seen.value} was seen at {place}, there is {found}"


def _missed(history: History) -> Iterator[str]:
    final = _final(history)
    for read in history.filtered:
        there = final.get(read.queue, {})
        values = {there[at] for at in range(read.start, read.stop) if at in there}
        wanted = {value for value in values if read.wants(value)}
        if wanted != read.values:
            yield (
                f"missed: {read.filter} of {read.queue} from {read.start} to {read.stop} gave"
                f" {sorted(read.values)[:5]}, not {sorted(wanted)[:5]}"
            )


def _phantoms(history: History) -> Iterator[str]:
    by_value = {send.value: send for send in history.sends}
    counts: dict[str, int] = defaultdict(int)
    others = {value for epoch in history.epochs for value in epoch.staged}
    others |= {timed.value for timed in history.timed}
    for queue, values in _final(history).items():
        for offset, value in values.items():
            send = by_value.get(value)
            counts[value] += 1
            if value in others:
                continue
            if send is None:
                yield f"phantom: nobody sent {value}, which is at {queue}:{offset}"
            elif send.outcome is Outcome.REFUSED:
                yield f"phantom: {value} was refused, and is at {queue}:{offset}"
            elif counts[value] > send.attempts_max:
                yield f"phantom: {value} was sent once, and is again at {queue}:{offset}"


def _epochs(history: History) -> Iterator[str]:
    """All rows of one offer or, before a commit was answered, none."""
    final = _final(history).values()
    counts = Counter(value for values in final for value in values.values())
    for epoch in history.epochs:
        found = {value for value in epoch.staged if counts[value]}
        allowed = epoch.offers[: epoch.committed_at]
        if epoch.committed_at is None:
            allowed = [*allowed, frozenset()]
        if found not in allowed:
            nearest = min(allowed, key=lambda offer: len(offer ^ found))
            yield (
                f"epoch: {epoch.name}, committed at {epoch.committed_at} of {len(epoch.offers)}:"
                f" {len(nearest - found)} rows of {len(nearest)} are missing"
                f" {sorted(nearest - found)[:3]}, {len(found - nearest)} should not be there"
                f" {sorted(found - nearest)[:3]}"
            )
        for value in sorted(found):
            if counts[value] > 1:
                yield f"epoch: {value} of {epoch.name} is there {counts[value]} times"


def _backwards(history: History) -> Iterator[str]:
    """Of those that had returned when it was called, none of its epoch or older saw more."""
    by_queue = defaultdict(list)
    for said in history.ends:
        by_queue[said.queue].append(said)
    for queue, ends in by_queue.items():
        longest: dict[int, int] = {}  # by epoch, of what has returned
        returning = iter(sorted(ends, key=lambda said: said.returned_s))
        following = next(returning)
        for said in sorted(ends, key=lambda said: said.called_s):
            while following.returned_s < said.called_s:
                longest[following.epoch] = max(longest.get(following.epoch, 0), following.end)
                following = next(returning)
            for epoch, end in longest.items():
                if epoch <= said.epoch and end > said.end:
                    yield (
                        f"backwards: {queue} ended at {end} in epoch {epoch},"
                        f" and later at {said.end} in epoch {said.epoch}"
                    )


def _split(history: History) -> Iterator[str]:
    masters: dict[int, tuple[int, str]] = {}
    for before, term in zip([None, *history.terms], history.terms, strict=False):
        who = (term.master, term.life)
        if masters.setdefault(term.epoch, who) != who:
            yield f"split: epoch {term.epoch} is of {masters[term.epoch]} and of {who}"
        if before is None or term.epoch == before.epoch or term.is_unclean:
            continue
        if term.epoch < before.epoch:
            yield f"split: epoch {term.epoch} comes after {before.epoch}"
        if term.in_sync.get(term.master) not in (before.in_sync.get(term.master, "-"), None):
            yield f"split: {term.master} is elected in epoch {term.epoch}, not of {before.in_sync}"
    highest: dict[Queue, tuple[int, int]] = {}
    for queue, send in sorted(_acknowledged(history), key=lambda pair: pair[1].offset):
        epoch = send.epoch or 0
        newest, at = highest.get(queue, (0, 0))
        if epoch and epoch < newest:
            yield f"split: {queue}:{send.offset} is of epoch {epoch}, {at} before it of {newest}"
        highest[queue] = max((newest, at), (epoch, send.offset))


def _forgotten(history: History) -> Iterator[str]:
    for change in history.changes:
        if change.outcome is Outcome.OK and change.value not in history.left[0].changes:
            yield f"forgotten: {change.value} was answered, and is not there"


def _apart(history: History) -> Iterator[str]:
    for left in history.left[1:]:
        first = history.left[0]
        start = max(left.log_start, first.log_start)
        ours, theirs = first.log[start - first.log_start :], left.log[start - left.log_start :]
        size = min(len(ours), len(theirs))
        if ours[:size] != theirs[:size]:
            at = next(i for i in range(size) if ours[i] != theirs[i])
            yield f"apart: {first.name} and {left.name} differ at {start + at}"


def check_timed(history: History) -> Iterator[str]:
    """Yield what is wrong with the timed messages of a history that has come to rest.

    A master delivers a message once, and a new master may repeat what its predecessor delivered
    shortly before the failover, or as long as its predecessor did not know of the election. So a
    message is delivered once, and at most once more for each master that was elected later than
    LEASE_MS before the message was due. With `timers_come_once` that holds for delay levels alone.
    """
    counts = Counter(value for values in _final(history).values() for value in values.values())
    elected_ms: dict[int, float] = {}
    for term in history.terms:
        elected_ms[term.epoch] = min(term.at_ms, elected_ms.get(term.epoch, inf))
    for timed in history.timed:
        name, count = f"{timed.value} ({timed.kind})", counts[timed.value]
        is_sure = timed.outcome is Outcome.OK
        if is_sure and timed.recall is None and not count:
            yield f"undelivered: {name} was acknowledged, due at {timed.due_ms:.0f}"
        if timed.recall is Outcome.OK and count and history.has_true_clocks:
            yield f"recalled: {name} was taken back, and is delivered {count} times"
        due_ms = timed.due_ms if history.has_true_clocks else 0
        bound = 1 + sum(at_ms >= due_ms - LEASE_MS for at_ms in elected_ms.values())
        if history.timers_come_once and history.has_true_clocks and timed.kind != "DELAY":
            bound = 1
        if count > bound:
            yield f"repeated: {name} is delivered {count} times, {bound} allowed"
    yield from _early(history)
    yield from _unlisted(history)


def _early(history: History) -> Iterator[str]:
    """A broker stamps all records of one group commit with the time at which it began, and relative
    delays count from that time: `early_ms` is how long a group commit may take."""
    timed = {one.value: one for one in history.timed}
    for seen in history.seen if history.has_true_clocks else ():
        if (one := timed.get(seen.value)) is not None and seen.stored_ms is not None:
            early_ms = one.due_ms - min(seen.stored_ms, seen.at_s * 1000 + history.epoch_ms)
            if early_ms > history.early_ms:
                name = f"{one.value} ({one.kind})"
                yield f"early: {name} was delivered {early_ms:.0f} ms before it was due"


def _unlisted(history: History) -> Iterator[str]:
    for listed in history.listed:
        for timed in history.timed:
            is_stored = timed.outcome is Outcome.OK and timed.answered_ms <= listed.at_ms
            is_pending = is_stored and timed.due_ms > listed.at_ms + LIST_MS
            if is_pending and timed.recall is None and timed.value not in listed.values:
                yield (
                    f"unlisted: {timed.value} ({timed.kind}) is not listed"
                    f" {timed.due_ms - listed.at_ms:.0f} ms before it is due"
                )
