"""Chooses between the compiled modules of the fast path and their reference in Python.

Each compiled module handles the common form of its input:

    sends.pyx    plain sends and batches, from the bytes of a socket to record, unit and answer
    pulls.pyx    pulls that a consumer repeats, from the bytes of a socket to the answer
    client.pyx   the client's side of plain sends, and decoding of pulled records
    keys.pyx     the keys of records, for the key index
    reads.pyx    the properties that a filter reads, for messages without property columns

`state.py` defines the fields that the fast path uses for each message, in one small class for each
owner.

A compiled module leaves every other form untouched, and the general path in Python handles it. The
general path also handles the common form, and does so if there is no compiled module. So the two
engines differ in nothing but speed. Tests compare their results byte by byte:
tests/property/test_engines.py, test_engine_client.py, test_index_columns.py and
test_reads_compiled.py.

`make native` builds the modules in place. The environment variable `SLUICE_PURE=1` disables them. A
module that was built from another version of its source is not used either, because it might
behave like the older source. design/0027 explains why there are two engines.
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
    """Return the checksum of a `.pyx` file and of all `.pxd` files, as 8 hexadecimal digits.

    `tools/native.py` writes the same checksum beside the module that it builds.

    """
    parts = [source, *sorted(source.parent.glob("*.pxd"))]
    return f"{zlib.crc32(b''.join(part.read_bytes() for part in parts)):08x}"


def _is_stale(name: str) -> bool:
    """Return whether a compiled module was built from another version of its source.

    False if its source or its checksum is not installed.
    """
    source = _FOLDER / f"{name}.pyx"
    built = _FOLDER / f"{name}.built"
    return source.exists() and built.exists() and built.read_text() != checksum_of(source)


def _load_compiled(name: str) -> ModuleType | None:
    """Return a compiled module, or None if it is disabled, stale or not built.

    A stale module is reported by a RuntimeWarning.
    """
    if PURE:
        return None
    if _is_stale(name):
        warnings.warn(
            f"The compiled module sluicemq.engine.{name} does not match its source, and is not "
            "used. Run `make native` to build it again.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    try:
        return importlib.import_module(f"sluicemq.engine.{name}")
    except ImportError:
        return None


sends: Final = _load_compiled("sends")
client: Final = _load_compiled("client")
keys: Final = _load_compiled("keys")
reads: Final = _load_compiled("reads")
pulls: Final = _load_compiled("pulls")
decoding: Final = _load_compiled("decoding")
NAME: Final = "reference" if sends is None else "compiled"
"""The name of the engine in `sluice --version` and in the runtime information of a broker."""
