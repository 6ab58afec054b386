"""Verdicts of expensive filters, which are found in another thread.

Seven hundred conditions on two thousand messages take a quarter of a second: no reader may hold the
loop so long. A read that has to know verdicts which take long ends with a `Judgement` instead: who
asked runs it where he likes, keeps what it found, and reads again, which finds it here. A read that
has come to something before it needs one ends there, as one whose time is up.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sluicemq.model.subscription import MessageFilter
from sluicemq.store.consumequeue import BLANK_SIZE, UNIT

WEIGHT_INLINE: Final = 512
"""Of filters that are asked here, record by record: some 20 µs each."""
RECORDS_S: Final = 0.002
"""After so long a read that looks at records ends."""
FILTERS_KEPT: Final = 64
RECORDS_KEPT: Final = 1024
"""Of each of them; it is asked about 256 at once."""


class Judgement(NamedTuple):
    """What a read has to know: `keep(run())`, of which `run` may happen in any thread."""

    run: Callable[[], Any]
    keep: Callable[[Any], object]


class PostponedError(Exception):
    """A read cannot go on without a judgement."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__("verdicts have to be found first")
        self.judgement = judgement


class JudgedRecords:
    """Verdicts of filters on records, by their places in the log."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, tuple[MessageFilter, dict[int, bool]]] = OrderedDict()

    def select(
        self,
        message_filter: MessageFilter,
        units: memoryview | bytearray | bytes,
        properties_at: Callable[[int, int], Mapping[str, str]],
    ) -> Sequence[int]:
        """Which of some units a filter wants: their indices. `properties_at` reads those of a
        record by its position and size.

        Raises PostponedError.
        """
        _, known = self._known.get(id(message_filter), (None, {}))
        places = [
            (index, position, size)
            for index, (position, size, code) in enumerate(UNIT.iter_unpack(units))
            if size != BLANK_SIZE and message_filter.by_consume_queue(code)
        ]
        missing = [(position, size) for _, position, size in places if position not in known]
        if missing:
            raise PostponedError(self._judgement(message_filter, missing, properties_at))
        return [index for index, position, _ in places if known[position]]

    def _judgement(
        self,
        message_filter: MessageFilter,
        places: list[tuple[int, int]],
        properties_at: Callable[[int, int], Mapping[str, str]],
    ) -> Judgement:
        read = [(position, properties_at(position, size)) for position, size in places]

        def run() -> dict[int, bool]:
            matches = message_filter.by_commit_log
            return {position: matches(properties) for position, properties in read}

        def keep(found: dict[int, bool]) -> None:
            _, known = self._known.pop(id(message_filter), (None, {}))
            if len(known) > RECORDS_KEPT - len(found):
                known = {}
            known.update(found)
            # What is kept cannot have given its id to another.
            self._known[id(message_filter)] = (message_filter, known)
            if len(self._known) > FILTERS_KEPT:
                self._known.popitem(last=False)

        return Judgement(run, keep)
