"""Which engine the hot path runs on: compiled, or the pure Python that is its reference.

    state        what the hot path touches for each message, one small struct for each owner
    sends.pyx    plain sends, frame after frame, and batches: from the socket's bytes to log, unit
                 and answer
    client.pyx   our client: the frames of plain sends, their answers, records as they are pulled
    keys.pyx     the keys of records, for the index
    pulls.pyx    pulls that a consumer repeats
    reads.pyx    the properties that a filter reads, where there are no columns yet

A compiled module takes what is plain and leaves everything else where it stands: then the Python
beside it decides, which does all of it when there is no compiled module. So nothing but speed
differs. The tests hold both equal, byte by byte (tests/property/test_engines.py,
test_engine_client.py, test_index_columns.py, test_reads_compiled.py).

`make native` builds the modules in place. `SLUICE_PURE=1` does without them. A module that is not
of the source beside it is left alone too: what was built from older source would do what that said.
Why there are two: design/0027.
"""

import importlib
import os
import warnings
import zlib
from pathlib import Path
from types import ModuleType
from typing import Final

PURE: Final = os.environ.get("SLUICE_PURE") == "1"
_FOLDER: Final = Path(__file__).parent


def checksum_of(source: Path) -> str:
    """Of the source of a compiled module and what it includes: `tools/native.py` leaves it beside
    the module.
    """
    parts = [source, *sorted(source.parent.glob("*.pxd"))]
    return f"{zlib.crc32(b''.join(part.read_bytes() for part in parts)):08x}"


def _is_stale(name: str) -> bool:
    source, built = _FOLDER / f"{name}.pyx", _FOLDER / f"{name}.built"
    return source.exists() and built.exists() and built.read_text() != checksum_of(source)


def _compiled(name: str) -> ModuleType | None:
    """A compiled module, None without it."""
    if PURE:
        return None
    if _is_stale(name):
        warnings.warn(
            f"the compiled {name} is older than its source and is not used: run `make native`",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    try:
        return importlib.import_module(f"sluicemq.engine.{name}")
    except ImportError:
        return None


sends: Final = _compiled("sends")
client: Final = _compiled("client")
keys: Final = _compiled("keys")
reads: Final = _compiled("reads")
pulls: Final = _compiled("pulls")
NAME: Final = "reference" if sends is None else "compiled"
"""As `sluice --version` and the start-up line tell it."""
