"""A directory of files of one fixed size that together are one long byte sequence.

Each file is named by the position of its first byte, with 20 digits, as in RocketMQ (spec/store.md
§1): `00000000000000000000`, `00000000001073741824`, … The files are contiguous. They are created
sparse at full size, written with pwrite and read through a read-only map. This is the only module
that maps files. There are no mapped writes: a mapped write into a hole kills the process if the
disk is full (SIGBUS).

Maps are made for files that are read much or often, and never closed explicitly, because slices of
them may still be on their way to a socket. When the descriptor pool needs a descriptor
(`Files.pool`), a segment that has not been read recently drops its map; the map is closed when the
last slice is gone. A test double of `File` has a `read_view` in place of a file that can be mapped.

Descriptors for `pwrite` and `pread` are open only while a file is being worked on; `release` closes
them. Only the log keeps the descriptor of its last file, through which it syncs. Closing a file of
units before it is synced loses nothing: its pages stay dirty, and the sync for the next checkpoint
reaches them through a new descriptor, which also reports errors that the kernel has met since.
(Units are derived data. The log's own descriptor is never closed between a write and its sync.)
"""

import contextlib
import errno
import logging
import mmap
from collections.abc import Iterator
from contextlib import closing
from typing import Final

from sluicemq.errors import StoreDamagedError
from sluicemq.files import File, Files, SystemFile, is_on_tmpfs

logger = logging.getLogger(__name__)

NAME_DIGITS: Final = 20
_IO_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_UNMAPPED_READ_MAX: Final = 4096
"""Reads of up to this many bytes may be made without a map."""


def map_file(file: File, size: int, *, is_sparse: bool = False) -> memoryview:
    """Return a read-only view of the first `size` bytes of the file, by mapping it.

    The view shows what later calls of `pwrite` write. The file may be closed afterwards. If
    `is_sparse`, the file is mostly holes, so the kernel is told not to read ahead.
    """
    if (read_view := getattr(file, "read_view", None)) is not None:  # a test double
        view: memoryview = read_view()
        return view
    mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    if is_sparse:
        mapped.madvise(mmap.MADV_RANDOM)
    return memoryview(mapped)


class Segment:
    """One file: the bytes [base, base + size) of the sequence, opened when first used."""

    __slots__ = (
        "_data_end",
        "_file",
        "_files",
        "_is_sparse",
        "_last_read_at",
        "_view",
        "base",
        "is_used",
        "path",
        "size",
    )

    def __init__(
        self, files: Files, path: str, base: int, size: int, *, is_sparse: bool = False
    ) -> None:
        """Describe the file at `path`, without opening it.

        It has `size` bytes, and its first byte has the offset `base` in the sequence of files.
        `is_sparse` means that the file is mostly holes.
        """
        self._files = files
        self._is_sparse = is_sparse
        self._file: File | None = None
        self._view: memoryview | None = None
        self._data_end = 0
        """The offset in the file behind its last data, in whole pages; 0 if it is not known yet."""
        self.is_used = False
        """Whether the map was used since the pool last looked (for `DescriptorPool`)."""
        self._last_read_at = 0
        """The pool's count at the last small read without a map; 0 if there was none."""
        self.path = path
        self.base = base
        self.size = size

    @property
    def end(self) -> int:
        """The position behind the file."""
        return self.base + self.size

    def file(self) -> File:
        """Return the open file, for `pread`, `pwrite` and syncs. Opens it if necessary.

        It stays open until `release` or `close`. Raises OSError.
        """
        file = self._file
        if file is None:
            file = self._file = self._files.open(self.path)
        return file

    def view(self) -> memoryview:
        """Return the whole file as a read-only view. Index 0 is the offset `base`.

        Only bytes that are known to have been written may be read through it. On tmpfs, reading a
        hole through a map allocates a page, and kills the process (SIGBUS) if the file system is
        full. For other bytes, use `data_view` or `safe_view`.
        """
        # The map needs a descriptor of its own: another thread may close the shared one.
        self.is_used = True
        view = self._view
        if view is None:
            with closing(self._files.open(self.path)) as file:
                view = self._view = map_file(file, self.size, is_sparse=self._is_sparse)
            self._files.pool.add(self)
        return view

    def data_view(self, end: int) -> memoryview:
        """Return a read-only view of the file that ends before the hole behind its data.

        The view begins at the file's first byte. It reaches at least to offset `end` of the
        sequence if the file has data up to there, and never beyond the data, rounded up to pages.
        So a reader that compares positions with the length of the view never reads the hole,
        whatever a damaged queue entry says.
        """
        if end - self.base > self._data_end:
            self._find_data_end()
        view = self.view()
        if self._data_end >= self.size:
            return view
        return view[: self._data_end]

    def safe_view(self, offset: int, size: int) -> tuple[memoryview, int]:
        """Return (view, index): the bytes [offset, offset + size) begin at this index of the view.

        `offset` is an offset of the sequence. The bytes may never have been written. If the file
        has data up to their end, the view is the map of the file. Otherwise it is a copy made with
        pread, which reads holes as zeros safely. At the end of the file, the view has fewer bytes.
        """
        view = self.data_view(min(offset + size, self.end))
        index = offset - self.base
        if index + size <= len(view) or len(view) == self.size:
            return view, index
        return memoryview(self.read_detached(offset, size)), 0

    def read_detached(self, offset: int, size: int) -> bytes:
        """Read bytes at `offset` of the sequence without the map, through a separate descriptor.

        Returns fewer bytes at the file's end. Raises OSError.
        """
        with closing(self._files.open(self.path)) as file:
            return file.pread(size, offset - self.base)

    def note_written(self, end: int) -> None:
        """Note that the bytes before offset `end` of the sequence were written.

        Then `data_view` need not ask the file system for the end of the data.
        """
        file_end = end - self.base
        if file_end > self._data_end:
            self._data_end = -(-file_end // _BLOCK_BYTES) * _BLOCK_BYTES  # rounded up to pages

    def _find_data_end(self) -> None:
        """Ask the file system where the last data of the file ends, and remember it."""
        with closing(self._files.open(self.path)) as file:
            end = min(self._data_end, self.size)
            # Go from one range of data to the next, until only a hole follows.
            while (data_start := file.data_start(end)) is not None:
                data_end = file.data_end(data_start)
                if data_end <= end:
                    break
                end = data_end
        self.note_written(self.base + end)

    def view_or_read(self, offset: int, size: int) -> memoryview | bytes:
        """Return `size` bytes at `offset` of the sequence, or fewer at the file's end.

        Mapping a file costs more than several reads. So the first small read of a file without a
        map returns a copy. The next small read makes a map if it is recent: fewer reads of other
        files than the pool's capacity lie between. Raises OSError.
        """
        begin = offset - self.base
        if self._view is None and size <= _UNMAPPED_READ_MAX:
            pool = self._files.pool
            last_read_at = self._last_read_at
            self._last_read_at = pool.next_request()
            is_recent = last_read_at and self._last_read_at - last_read_at <= pool.capacity
            if not is_recent:
                with closing(self._files.open(self.path)) as file:
                    return file.pread(size, begin)
        return self.view()[begin : begin + size]

    def release_descriptor(self) -> None:
        """Drop the map. The next reader makes a new one.

        The `DescriptorPool` calls this when it needs a descriptor: each map occupies one.
        """
        self._view = None

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset` of the sequence. Raises OSError."""
        self.file().pwrite(data, offset - self.base)
        self.note_written(offset + len(data))

    def read(self, offset: int, size: int) -> bytes:
        """Read a copy of `size` bytes at `offset` of the sequence with pread. Raises OSError."""
        return self.file().pread(size, offset - self.base)

    def data_start(self, offset: int) -> int | None:
        """Return the first offset at or behind `offset` that may hold a byte other than zero.

        Returns None if there is none in the file.
        """
        file_offset = self.file().data_start(offset - self.base)
        if file_offset is None:
            return None
        return self.base + file_offset

    def zero_range(self, offset: int, end: int | None = None) -> bool:
        """Set the bytes [offset, end) to zero. Return whether bytes were changed.

        Both are offsets of the sequence; `end` None means the file's end. Holes stay holes, so this
        works on a full disk too. The caller must sync the file if bytes were changed. Raises
        OSError.
        """
        if end is None:
            end = self.end
        file = self.file()
        end_index = end - self.base
        index = offset - self.base
        is_changed = False
        while index < end_index:
            # Find the next piece of data, behind any hole.
            data_start = file.data_start(index)
            if data_start is None or data_start >= end_index:
                break
            index = min(data_start + _IO_BYTES, end_index, file.data_end(data_start))
            piece = file.pread(index - data_start, data_start)
            # Blocks that are zero already may be holes, and stay as they are.
            for block_start, block_size in used_blocks(piece, data_start):
                file.pwrite(bytes(block_size), block_start)
                is_changed = True
        return is_changed

    def release(self) -> None:
        """Close the descriptor. The map, if there is one, stays valid."""
        file = self._file
        self._file = None
        if file is not None:
            file.close()

    def close(self) -> None:
        """Drop the map and close the descriptor."""
        self._files.pool.remove(self)
        self.release_descriptor()
        self.release()


def fill_holes(segment: Segment) -> None:
    """Write zeros into the holes between the data of a file, if it is on tmpfs.

    Reading such a hole through a map could kill the process. Does nothing on other file systems,
    where reading a hole needs no room. A copy made with `cp --sparse=always` has such holes where
    message bodies contain zeros. The hole behind the last data stays. Raises OSError, for example
    ENOSPC.
    """
    file = segment.file()
    if not isinstance(file, SystemFile) or not is_on_tmpfs(segment.path):
        return
    hole_start = file.data_end(0)
    while (hole_end := file.data_start(hole_start)) is not None and hole_end < segment.size:
        for zero_start in range(hole_start, hole_end, _IO_BYTES):
            file.pwrite(bytes(min(_IO_BYTES, hole_end - zero_start)), zero_start)
        hole_start = file.data_end(hole_end)


def used_blocks(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the disk blocks in `data` that contain bytes other than zeros.

    `data` are the bytes at offset `start` of a file, and offsets count from the begin of the file.
    A block has 4096 bytes, or fewer where `data` begins or ends within it. These blocks can be
    overwritten on a full disk, because they are not holes.
    """
    if data == bytes(len(data)):
        return
    index = 0
    while index < len(data):
        bytes_left_in_block = _BLOCK_BYTES - (start + index) % _BLOCK_BYTES
        block_size = min(bytes_left_in_block, len(data) - index)
        if data[index : index + block_size] != bytes(block_size):
            yield start + index, block_size
        index += block_size


class SegmentFiles:
    """The files of one directory, in order. Offsets are those of the whole sequence."""

    __slots__ = (
        "_are_sparse",
        "_cuts_in_order",
        "_segments",
        "directory",
        "file_bytes",
        "files",
        "size_key",
    )

    def __init__(
        self,
        files: Files,
        directory: str,
        file_bytes: int,
        size_key: str,
        *,
        cuts_in_order: bool = False,
        are_sparse: bool = False,
    ) -> None:
        """Create a sequence without files. `load` finds the files in `directory`.

        Each file has `file_bytes` bytes. `size_key` is the name of the setting for this size, which
        errors mention. If `cuts_in_order`, each removal at the end is durable before the next, so
        that a power loss never leaves a gap. If `are_sparse`, the files contain little data, so the
        kernel is told not to read ahead.
        """
        self.files = files
        self._are_sparse = are_sparse
        self._cuts_in_order = cuts_in_order
        self._segments: list[Segment] = []
        self.directory = directory
        self.file_bytes = file_bytes
        self.size_key = size_key

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    @property
    def start(self) -> int:
        """The first offset of the first file; 0 without files."""
        return self._segments[0].base if self._segments else 0

    @property
    def end(self) -> int:
        """The end of the last file, not of the bytes written in it; 0 without files."""
        return self._segments[-1].end if self._segments else 0

    @property
    def last(self) -> Segment | None:
        """The last file; None without files."""
        return self._segments[-1] if self._segments else None

    def load(
        self, *, is_derived: bool = False, removes: bool = True, keeps_open: bool = False
    ) -> None:
        """Find the files in the directory. They replace those that were known before.

        An empty last file, which a crash leaves, is removed. If `is_derived`, an empty or missing
        file in the middle ends the sequence, and the files behind it are removed, because they can
        be rebuilt. If `removes` is False, the files to remove are ignored, but stay on disk. If
        `keeps_open`, the last file stays open for the next read.

        Raises StoreDamagedError if a file has another size than configured, if its name is not a
        multiple of that size, or if a file is missing in between. Raises OSError.
        """
        segments = self._list_segments()
        sizes = []
        for segment in segments:
            sizes.append(segment.file().size())
            is_last = segment is segments[-1]
            if not (keeps_open and is_last):
                segment.release()

        count = len(segments)  # the number of files that form the sequence
        if is_derived:
            count = self._count_before_gap(segments, sizes)
        elif sizes and sizes[-1] == 0:
            count -= 1
            logger.warning(
                "ignoring %s: it is empty, because a crash interrupted its creation",
                segments[-1].path,
            )
        for segment in reversed(segments[count:]):
            segment.release()
            if removes:
                self.files.remove(segment.path)

        try:
            self._set_segments(segments[:count], sizes[:count])
        except StoreDamagedError:
            segments[count - 1].release()  # it may have been kept open
            raise

    def _set_segments(self, segments: list[Segment], sizes: list[int]) -> None:
        """Let the sequence consist of these files, whose sizes on disk are `sizes`.

        Raises StoreDamagedError at the first file that does not fit behind the one before it. The
        files before it then form the sequence.
        """
        self._segments = []
        for segment, size in zip(segments, sizes, strict=True):
            self._require_next(segment, size)
            self._segments.append(segment)

    def _list_segments(self) -> list[Segment]:
        """Return a segment for each file in the directory that is named like one, in order."""
        names = filter(is_segment_name, self.files.names(self.directory))
        return [self._make_segment(f"{self.directory}/{name}", int(name)) for name in names]

    def _count_before_gap(self, segments: list[Segment], sizes: list[int]) -> int:
        """Return the number of files before the first empty or missing file; all if there is none.

        `sizes` are the sizes of the files on disk.
        """
        for index, (segment, size) in enumerate(zip(segments, sizes, strict=True)):
            is_next = segment.base == segments[0].base + index * self.file_bytes
            if size == 0 or not is_next:
                return index
        return len(segments)

    def _require_next(self, segment: Segment, size: int) -> None:
        """Raise StoreDamagedError if a file of `size` bytes cannot be the next of the sequence.

        Its size must be the configured one, its name a multiple of it, and no file may be missing
        before.
        """
        path = segment.path
        base = segment.base
        if size != self.file_bytes:
            fix = "Restore the file from a copy."
            if size:
                fix = (
                    f"Set {self.size_key}={size} if all files there have that size,"
                    " or restore the file from a copy."
                )
            raise StoreDamagedError(
                f"{path} has {size} bytes, but {self.size_key} is {self.file_bytes}.", fix=fix
            )
        if base % self.file_bytes:
            raise StoreDamagedError(
                f"The name of {path} is not a multiple of {self.file_bytes}, the size of the"
                " files.",
                fix=f"Move the file away if it does not belong to this store, or set"
                f" {self.size_key}.",
            )
        if self._segments and base != self.end:
            raise StoreDamagedError(
                f"{self.directory} lacks the file {self.end:0{NAME_DIGITS}d}:"
                f" {base:0{NAME_DIGITS}d} follows {self._segments[-1].base:0{NAME_DIGITS}d}"
                f" (files of {self.file_bytes} bytes).",
                fix="Restore the missing file from a copy.",
            )

    def sizes_on_disk(self) -> list[int]:
        """Return the sizes of the files on disk, loaded or not, in bytes. Raises OSError."""
        names = self.files.names(self.directory)
        return [self._read_size(name) for name in names if is_segment_name(name)]

    def _read_size(self, name: str) -> int:
        """Return the size of the file with this name."""
        with closing(self.files.open(f"{self.directory}/{name}")) as file:
            return file.size()

    def at(self, offset: int) -> Segment | None:
        """Return the file that contains `offset`; None if there is none."""
        segments = self._segments  # read once: `detach_first` replaces the list in another thread
        if not segments:
            return None
        index = (offset - segments[0].base) // self.file_bytes
        return segments[index] if 0 <= index < len(segments) else None

    def read_last_block(self, unit_bytes: int) -> tuple[int, bytes]:
        """Read the end of the data in the last file: at most 4 KiB, in units of `unit_bytes` bytes.

        Returns (offset, bytes): whole units, and their offset in the sequence. The bytes may end
        with zeros, because the file system counts data in blocks. They are b"" if the file has no
        data. Returns (0, b"") if there is no file. The file stays open. Raises OSError.
        """
        last_segment = self.last
        if last_segment is None:
            return 0, b""
        block_bytes = _BLOCK_BYTES // unit_bytes * unit_bytes  # in whole units
        end = last_segment.file().data_end(0) // unit_bytes * unit_bytes
        begin = max(0, end - block_bytes)
        offset = last_segment.base + begin
        return offset, last_segment.read(offset, end - begin)

    def add(self, base: int) -> Segment:
        """Create the next file, full of zeros, and return it.

        `base` must be `end`. The first file may begin at any multiple of the size. The caller must
        sync the directory to make the name durable. Raises OSError; then the file is not in the
        sequence, but may exist on disk.
        """
        if self._segments and base != self.end:
            raise OSError(errno.EINVAL, f"the next file begins at {self.end}, not at {base}")
        path = f"{self.directory}/{base:0{NAME_DIGITS}d}"
        with closing(self.files.open(path, create=True)) as file:
            file.truncate(self.file_bytes)
        segment = self._make_segment(path, base)
        self._segments.append(segment)
        return segment

    def _make_segment(self, path: str, base: int) -> Segment:
        """Return a segment for a file of this directory."""
        return Segment(self.files, path, base, self.file_bytes, is_sparse=self._are_sparse)

    def make_directory(self, touched: list[str]) -> None:
        """Create the directory of a queue. Add the paths that must be synced to `touched`.

        These are the three directories above it: of the topic, of all queues, and of the store. Any
        of them may be new or have a new entry.
        """
        parent = self.directory
        for _ in range(3):
            parent = parent.rpartition("/")[0]
            touched.append(parent)
        self.files.make_directory(self.directory, durable=False)

    def detach_first(self) -> str:
        """Forget the first file, and return its path. The caller removes it from the disk.

        Readers that hold a view of it can go on reading. Another thread may call `at` at the same
        time.
        """
        first_segment, *other_segments = self._segments
        self._segments = other_segments
        first_segment.close()
        return first_segment.path

    def drop_last(self) -> None:
        """Forget the last file, and remove it from the disk if possible.

        It was just added, and could not be synced. An error is ignored.
        """
        segment = self._segments.pop()
        segment.close()
        with contextlib.suppress(OSError):
            self.files.remove(segment.path)

    def truncate(self, offset: int, *, keeps_file: bool = False) -> bool:
        """Remove everything from `offset` of the sequence on. Return whether something changed.

        Later files are removed, and the rest of the file that contains `offset` is zeroed. If
        something changed, the caller must sync the last file and the directory. If `keeps_file`, a
        file that begins at `offset` is zeroed instead of removed: it will be written again soon.
        Raises OSError.
        """
        is_changed = False
        # `keeps_file` counts as 1: then a file whose base equals `offset` stays.
        while self._segments and self._segments[-1].base >= offset + keeps_file:
            segment = self._segments.pop()
            segment.close()
            self.files.remove(segment.path)
            if self._cuts_in_order:
                self.files.sync_directory(self.directory)
            is_changed = True
        if self._segments and offset < self.end:
            is_changed |= self._segments[-1].zero_range(offset)
        return is_changed

    def remove_all(self) -> None:
        """Remove the directory and all files in it, also files of other names. Raises OSError."""
        self.truncate(0)
        for name in self.files.names(self.directory):
            with contextlib.suppress(FileNotFoundError):  # retention may have removed it
                self.files.remove(f"{self.directory}/{name}")
        if self.files.exists(self.directory):
            self.files.remove(self.directory)

    def release(self) -> None:
        """Close the descriptors that single reads have opened."""
        for segment in self._segments:
            segment.release()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []


def is_segment_name(name: str) -> bool:
    """Return whether a file name has the form of a segment's name: 20 digits."""
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
