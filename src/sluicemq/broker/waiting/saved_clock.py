"""`config/sluiceClock.json`: by how much the broker's clock is ahead of the wall clock.

The due times of waiting messages are times of the broker's clock (`clock.SteadyClock`). After the
wall clock was set back, that clock is ahead of it. The next start has to restore the lead, because
messages would otherwise wait for that much longer. The file is written while the two clocks differ,
and at each orderly shutdown. It holds both readings, in milliseconds since 1970:

    {"steady": 1700000305000, "wall": 1699996705000}
"""

from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.wire import fastjson
from sluicemq.wire.fastjson import load_object, take_integer

_NAME: Final = "sluiceClock.json"


class SavedClock:
    """The file with the readings of a steady clock and the wall clock."""

    def __init__(self, files: Files, root: str, clock: SteadyClock) -> None:
        """Create the document of the file in `root`/config, without reading it.

        `clock` is the steady clock that `load` sets and the document saves. `root` is the store's
        directory.
        """
        self._clock = clock
        self._last_lead_ms = 0
        self.document = Document(files, f"{root}/config/{_NAME}", self._render)

    def load(self) -> None:
        """Set the steady clock to the time that it would show if the broker had not stopped.

        The time between stop and start is measured by the wall clock. If the wall clock was set
        back meanwhile, that time is unknown and counts as 0. If there is no file, the clock is not
        changed. Raises StoreDamagedError if the file cannot be parsed.
        """

        def parse(text: str) -> tuple[int, int]:
            values = load_object(text, _NAME)
            return take_integer(values, "steady"), take_integer(values, "wall")

        saved = self.document.load(parse)
        if saved is not None:
            steady_ms, wall_ms = saved
            self._clock.raise_to(steady_ms + max(self._wall_ms - wall_ms, 0))
        self._last_lead_ms = self._clock.lead_ms

    def mark_changed_if_ahead(self) -> None:
        """Mark the file as changed if the clocks differ now, or differed at the last call.

        The broker calls this regularly, so that the file is written while the clocks differ.
        """
        lead_ms = self._clock.lead_ms
        self.document.changed |= lead_ms > 0 or self._last_lead_ms > 0
        self._last_lead_ms = lead_ms

    def _render(self) -> str:
        """Return the text of the file with the present readings of both clocks."""
        return fastjson.dumps_file({"steady": self._clock.now_ms(), "wall": self._wall_ms})

    @property
    def _wall_ms(self) -> int:
        """The reading of the wall clock in ms since 1970."""
        return self._clock.now_ms() - self._clock.lead_ms
