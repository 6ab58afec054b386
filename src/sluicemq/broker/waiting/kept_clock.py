"""`config/sluiceClock.json`: by how much the broker's clock is ahead of the wall clock.

Whatever waits is due at a time of the broker's clock (`clock.SteadyClock`), which is ahead of the
wall clock once that was set back. The next start has to go on from there, or messages would wait
for that long again. The file is written while the two clocks differ, and at each orderly stop. It
holds both readings:

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
    """The file, and the clock whose readings it keeps."""

    def __init__(self, files: Files, root: str, clock: SteadyClock) -> None:
        """`root` is the store's directory."""
        self._clock = clock
        self._lead_ms = 0
        self.document = Document(files, f"{root}/config/{_NAME}", self._render)

    def load(self) -> None:
        """Set the steady clock to where it would be without the restart.

        The time between stop and start is that of the wall clock, unless the wall clock was set
        back meanwhile: then it is not known, and counts as none. Raises StoreDamagedError.
        """

        def parse(text: str) -> tuple[int, int]:
            values = load_object(text, _NAME)
            return take_integer(values, "steady"), take_integer(values, "wall")

        kept = self.document.load(parse)
        if kept is not None:
            steady_ms, wall_ms = kept
            self._clock.raise_to(steady_ms + max(self._wall_ms - wall_ms, 0))
        self._lead_ms = self._clock.lead_ms

    def look(self) -> None:
        """Note whether the file has to be written: while the clocks differ, and when they meet."""
        lead_ms = self._clock.lead_ms
        self.document.changed |= lead_ms > 0 or self._lead_ms > 0
        self._lead_ms = lead_ms

    def _render(self) -> str:
        return fastjson.dumps_file({"steady": self._clock.now_ms(), "wall": self._wall_ms})

    @property
    def _wall_ms(self) -> int:
        return self._clock.now_ms() - self._clock.lead_ms
