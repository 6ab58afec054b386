"""Where the records begin in a run of concatenated stored records, found in columns.

A record says its own size first (spec/store.md §2.1), so finding the starts is a walk: each step
needs the one before. Three ways, from fast to slow, all giving exactly what the plain walk gives:

1. *Equal sizes.* When the first record's size repeats, the starts are an arithmetic row; a look at
   the size and magic of each place proves it.
2. *Lanes.* The run is cut at evenly spaced places where a magic number was found, and all pieces
   are walked side by side, one NumPy step for all of them. A magic number inside a body may be a
   false start; but the lane before it then does not end exactly on it, and since the first lane
   starts at a true record, "every lane ends where the next begins" proves all of them.
3. *One by one*, for short runs and for runs that are damaged; it raises the exact error.
"""

import numpy as np
from numpy.typing import NDArray

from sluicemq.errors import ProtocolError
from sluicemq.record.layout import BLANK, MAGIC_V1, MAGIC_V2, MAGICS, RECORD_BYTES_MIN
from sluicemq.record.places import Bytes, Positions, gather, view_of

LANES = 1024
LANE_RECORDS_MIN = 24
"""Fewer and longer lanes take more steps, more and shorter ones longer to be found."""
_WINDOW_BYTES_MIN = 512
_WINDOW_RECORDS = 1.5
"""So much of each lane is searched for its begin; without one it belongs to the lane before."""
_MAGIC_FIRST = MAGIC_V1 >> 24 & 0xFF
_EQUAL_RUN_MIN = 64


def sizes_at(raw: Bytes, starts: Positions) -> Positions:
    """The total size that stands at each start."""
    return view_of(raw, ">i4")[starts].astype(np.int64)


def record_starts(raw: Bytes) -> Positions:
    """The start of every record in `raw`, which must hold whole records and nothing else.

    Raises ProtocolError where the bytes are not a record.
    """
    if len(raw) == 0:
        return np.empty(0, np.int64)
    if len(raw) < RECORD_BYTES_MIN:
        return _walk(raw, 0)
    starts = _equal_run(raw)
    end = int(starts[-1] + sizes_at(raw, starts[-1:])[0]) if len(starts) else 0
    if end == len(raw):
        return starts
    rest = _lanes(raw[end:], LANES)
    rest = _walk(raw, end) if rest is None else rest + end
    return np.concatenate((starts, rest)) if len(starts) else rest


def _equal_run(raw: Bytes) -> Positions:
    """The starts of the leading records that all have the size of the first one."""
    size = int(sizes_at(raw, np.zeros(1, np.int64))[0])
    if size < RECORD_BYTES_MIN or size > len(raw):
        return np.empty(0, np.int64)
    probe = np.arange(0, min(len(raw) - size + 1, size * _EQUAL_RUN_MIN), size, dtype=np.int64)
    if not _are_records(raw, probe, size).all():
        return np.empty(0, np.int64)
    places = np.arange(0, len(raw) - size + 1, size, dtype=np.int64)
    bad = np.flatnonzero(~_are_records(raw, places, size))
    return places[: bad[0]] if len(bad) else places


def _are_records(raw: Bytes, places: Positions, size: int) -> NDArray[np.bool_]:
    fields = gather(raw, places, BLANK.dtype)
    magics: NDArray[np.bool_] = (fields["magic"] == MAGIC_V1) | (fields["magic"] == MAGIC_V2)
    return np.asarray(magics & (fields["size"] == size))


def _lanes(raw: Bytes, lanes: int) -> Positions | None:
    """The starts by lanes, or None when the run is short or the lanes do not prove each other."""
    if len(raw) < RECORD_BYTES_MIN:  # what a damaged run ends with: the walk says what is wrong
        return None
    first = max(int(sizes_at(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    lanes = min(lanes, len(raw) // (first * LANE_RECORDS_MIN))
    if lanes < 2:
        return None
    begins = _lane_begins(raw, lanes)
    ends = np.append(begins[1:], len(raw))
    places = _step_lanes(raw, begins, ends)
    if places is None:
        return None
    arrived = places >= ends
    steps = arrived.argmax(axis=0)
    if (places[steps, np.arange(len(ends))] != ends).any():
        return None
    inside = np.arange(len(places))[:, np.newaxis] < steps
    starts = places.T[inside.T]
    sizes = np.diff(starts, append=len(raw))
    return starts if (sizes >= RECORD_BYTES_MIN).all() else None


def _lane_begins(raw: Bytes, lanes: int) -> Positions:
    """Places near even distances where a magic number says a record may begin."""
    stride = len(raw) // lanes
    window = min(stride, max(_WINDOW_BYTES_MIN, int(_WINDOW_RECORDS * stride) // LANE_RECORDS_MIN))
    windows = raw[: lanes * stride].reshape(lanes, stride)[1:, 4:window]
    turns, places = np.divmod(np.flatnonzero(windows == _MAGIC_FIRST), windows.shape[1])
    places += (turns + 1) * stride
    inside = np.searchsorted(places, len(raw) - 8, side="right")
    turns, places = turns[:inside], places[:inside]
    magics = view_of(raw, ">i4")[places + 4]
    hits = np.flatnonzero((magics == MAGIC_V1) | (magics == MAGIC_V2))
    firsts = hits[np.diff(turns[hits], prepend=-1) > 0]
    return np.append(0, places[firsts])


def _step_lanes(raw: Bytes, begins: Positions, ends: Positions) -> Positions | None:
    """All lanes walked until each is at or past its end: places by step and lane.

    A lane that arrived walks on, in the next one's records or in nonsense past the end of the run;
    the caller takes what lies before the first arrival. None when some lane takes too long.
    """
    at = view_of(raw, ">u4")
    last = len(raw) - 4
    place = begins
    places = [place]
    for _ in range(2 + int((ends - begins).max()) // RECORD_BYTES_MIN):
        place = place + at[np.minimum(place, last)]
        places.append(place)
        if len(places) % 4 == 0 and (place >= ends).all():
            return np.stack(places)
    return None


def _walk(raw: Bytes, start: int) -> Positions:
    """The plain walk from `start`, which names the place of what is wrong."""
    data = raw.data
    starts: list[int] = []
    end = len(raw)
    while start < end:
        if end - start < 8:
            raise ProtocolError(f"{end - start} bytes after the last record at {start}.")
        size, magic = BLANK.struct.unpack_from(data, start)
        if magic not in MAGICS:
            raise ProtocolError(
                f"no stored record at byte {start}: magic {magic & 0xFFFFFFFF:#010x}."
            )
        if size < RECORD_BYTES_MIN or size > end - start:
            raise ProtocolError(f"a stored record at byte {start} of {end} claims {size} bytes.")
        starts.append(start)
        start += size
    return np.array(starts, np.int64)


def leading_starts(raw: Bytes) -> Positions:
    """Starts of records that follow one another from the first byte on: as many as one look proves.

    `raw` begins with a record and may end anywhere, also inside one, in zeros or in nonsense. All
    returned records lie wholly in `raw`, as far as sizes and magic numbers say. Where nothing can
    be proved the answer is empty: the caller looks at single records and asks again behind them.
    """
    if len(raw) < RECORD_BYTES_MIN:
        return np.empty(0, np.int64)
    starts = _equal_run(raw)
    return starts if len(starts) else _leading_lanes(raw)


def _leading_lanes(raw: Bytes) -> Positions:
    """As `_lanes`, up to the last place where a lane began: what follows proves nothing."""
    first = max(int(sizes_at(raw, np.zeros(1, np.int64))[0]), RECORD_BYTES_MIN)
    lanes = min(LANES, len(raw) // (first * LANE_RECORDS_MIN))
    if lanes < 2:
        return np.empty(0, np.int64)
    begins = _lane_begins(raw, lanes)
    far = np.flatnonzero(np.diff(begins) > 4 * (len(raw) // lanes))
    if len(far):  # a lane this long takes too many steps
        begins = begins[: far[0] + 1]
    while len(begins) > 1:
        ends = begins[1:]
        places = _step_lanes(raw, begins[:-1], ends)
        if places is not None:
            return _proved(raw, places, ends)
        begins = begins[: (len(begins) + 1) // 2]  # something stops a lane: nearer ones may do
    return np.empty(0, np.int64)


def _proved(raw: Bytes, places: Positions, ends: Positions) -> Positions:
    """The starts in the leading lanes that end exactly where the next one begins."""
    steps = (places >= ends).argmax(axis=0)
    missed = np.flatnonzero(places[steps, np.arange(len(ends))] != ends)
    lanes = int(missed[0]) if len(missed) else len(ends)
    inside = np.arange(len(places))[:, np.newaxis] < steps[:lanes]
    starts: Positions = places[:, :lanes].T[inside.T]
    small = np.flatnonzero(np.diff(starts, append=ends[lanes - 1]) < RECORD_BYTES_MIN)
    return starts[: small[0]] if len(small) else starts
