"""`config/sluiceClock.json`: by how much the broker's clock is ahead of the wall clock.

The due times of waiting messages are times of the broker's clock (`clock.SteadyClock`). After the
wall clock was set back, that clock is ahead of it. The next start has to keep the lead, or messages
would wait for that much longer. The file is written while the two clocks differ, and at each clean
shutdown. It holds both readings, in milliseconds since 1970:

    {"steady": 1700000305000, "wall": 1699996705000}
"""

from typing import Final

from sluicemq.broker.documents import Document
from sluicemq.clock import SteadyClock
from sluicemq.files import Files
from sluicemq.wire import fastjson
from sluicemq.wire.declare import load_object, take_integer

_NAME: Final = "sluiceClock.json"


class KeptClock:
    """The file, and the steady clock whose readings it holds."""

    def __init__(self, files: Files, root: str, clock: SteadyClock) -> None:
        """Use the file in `root`/config, where `root` is the store's directory, for the readings of
        `clock`."""
        self._clock = clock
        self._lead_ms = 0
        self.document = Document(files, f"{root}/config/{_NAME}", self._render)

    def load(self) -> None:
        """Set the steady clock to the time that it would show without the restart. Without a file,
        leave it as it is.

        The time between stop and start is measured by the wall clock. If the wall clock was set
        back meanwhile, that time is unknown and counts as 0. Raises StoreDamagedError.
        """

        def parse(text: str) -> tuple[int, int]:
            values = load_object(text, _NAME)
            return take_integer(values, "steady"), take_integer(values, "wall")

        kept = self.document.load(parse)
        if kept is not None:
            steady_ms, wall_ms = kept
            self._clock.raise_to(steady_ms + max(self._wall_ms - wall_ms, 0))
        self._lead_ms = self._clock.lead_ms

    def mark_if_ahead(self) -> None:
        """Mark the file as changed, so that it is written, if the clocks differ now or differed at
        the last call. Call this regularly."""
        lead_ms = self._clock.lead_ms
        self.document.changed |= lead_ms > 0 or self._lead_ms > 0
        self._lead_ms = lead_ms

    def _render(self) -> str:
        return fastjson.dumps_file({"steady": self._clock.now_ms(), "wall": self._wall_ms})

    @property
    def _wall_ms(self) -> int:
        return self._clock.now_ms() - self._clock.lead_ms
