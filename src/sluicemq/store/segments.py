"""A directory of files of one fixed size that together are one long byte sequence.

Each file is named by the position of its first byte, 20 digits, as RocketMQ does (spec/store.md
§1): `00000000000000000000`, `00000000001073741824` … They are contiguous, created sparse at full
size, written with pwrite and read through a read-only map; this is the only module that maps.
A mapped *write* into a hole would kill the process when the disk is full (SIGBUS): there is none.

Maps are made for who reads much or often, and never closed by hand: slices of them may be on their
way to a socket. A segment that is not read for long lets go of its map when others need the
descriptor (`Files.pool`), and when the last slice is gone too, so is the map. A test double of
`File` has a `read_view` instead of something that can be mapped.

Descriptors for `pwrite` and `pread` are open only as long as a file is worked on: `release` closes
them. Only the log keeps that of its last file, which it syncs through it. Closing a file of units
before it is synced is no loss: its pages stay dirty, the sync of the next checkpoint reaches them
through a new descriptor, which also gets an error that the kernel has met in between; and units are
derived, the log's own descriptor is never closed between a write and its sync.
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
_READ_BYTES: Final = 1 << 20
_BLOCK_BYTES: Final = 4096
_COPIED_MAX: Final = 4096


def map_file(file: File, size: int, *, is_sparse: bool = False) -> memoryview:
    """A read-only view of the file, which shows what `pwrite` writes from now on.

    `is_sparse`: mostly holes, which the kernel would fill its cache with by reading around.
    """
    if (read_view := getattr(file, "read_view", None)) is not None:  # a test double
        view: memoryview = read_view()
        return view
    mapped = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
    if is_sparse:
        mapped.madvise(mmap.MADV_RANDOM)
    return memoryview(mapped)


class Segment:
    """One file: the bytes [base, base + size) of the sequence. Opened when first used."""

    __slots__ = (
        "_data_end",
        "_file",
        "_files",
        "_is_sparse",
        "_view",
        "_wanted_at",
        "base",
        "is_used",
        "path",
        "size",
    )

    def __init__(
        self, files: Files, path: str, base: int, size: int, *, is_sparse: bool = False
    ) -> None:
        self._files = files
        self._is_sparse = is_sparse
        self._file: File | None = None
        self._view: memoryview | None = None
        self._data_end = 0  # within the file, a whole number of pages; 0: not known yet
        self.is_used = False  # lately, for `DescriptorPool`
        self._wanted_at = 0
        self.path = path
        self.base = base
        self.size = size

    @property
    def end(self) -> int:
        return self.base + self.size

    def file(self) -> File:
        file = self._file
        if file is None:
            file = self._file = self._files.open(self.path)
        return file

    def view(self) -> memoryview:
        """Return the whole file as a read-only view; positions in it are relative to `base`.

        Read only bytes through it that are known to have been written: on tmpfs, reading a hole
        through a map allocates a page, and that kills the process (SIGBUS) when the file system is
        full. Use `data_view` or `look` where the bytes may never have been written.
        """
        # The map is made through a descriptor of its own: another thread may just release the
        # shared one.
        self.is_used = True
        view = self._view
        if view is None:
            with closing(self._files.open(self.path)) as file:
                view = self._view = map_file(file, self.size, is_sparse=self._is_sparse)
            self._files.pool.add(self)
        return view

    def data_view(self, end: int) -> memoryview:
        """Return the file as a read-only view that ends before the hole behind its data.

        The view reaches up to offset `end` of the sequence if the file holds data up to there, and
        is never longer than the data, rounded up to pages. So a reader that checks positions
        against the length of the view never touches the hole, whatever a damaged unit says.
        """
        if end - self.base > self._data_end:
            self._find_data_end()
        view = self.view()
        return view if self._data_end >= self.size else view[: self._data_end]

    def look(self, offset: int, size: int) -> tuple[memoryview, int]:
        """Return a view and the index in it of the bytes [offset, offset + size) of the sequence,
        which may never have been written.

        Where the file holds data up to their end the view is the map, else a copy made by pread,
        which reads holes as zeros without allocating them. It holds fewer bytes at the file's end.
        """
        view, at = self.data_view(min(offset + size, self.end)), offset - self.base
        if at + size <= len(view) or len(view) == self.size:
            return view, at
        return memoryview(self.copy(offset, size)), 0

    def copy(self, offset: int, size: int) -> bytes:
        """Read bytes at `offset` of the sequence without the map, through a descriptor of its own.
        Returns fewer at the file's end. Raises OSError."""
        with closing(self._files.open(self.path)) as file:
            return file.pread(size, offset - self.base)

    def grown(self, end: int) -> None:
        """Note that the bytes before offset `end` of the sequence were written."""
        if end - self.base > self._data_end:
            self._data_end = -(-(end - self.base) // _BLOCK_BYTES) * _BLOCK_BYTES

    def _find_data_end(self) -> None:
        """Ask the file system where the last data of the file ends."""
        with closing(self._files.open(self.path)) as file:
            end = min(self._data_end, self.size)
            while (start := file.data_start(end)) is not None:
                following = file.data_end(start)
                if following <= end:
                    break
                end = following
        self.grown(self.base + end)

    def part(self, offset: int, size: int) -> memoryview | bytes:
        """Some bytes at `offset` of the sequence, fewer at the end. Of a file without a map a few
        are copied: only who comes again soon gets a map, which costs more than several reads."""
        begin = offset - self.base
        if self._view is None and size <= _COPIED_MAX:
            pool = self._files.pool
            before, self._wanted_at = self._wanted_at, pool.next_request()
            if not before or self._wanted_at - before > pool.capacity:
                with closing(self._files.open(self.path)) as file:
                    return file.pread(size, begin)
        return self.view()[begin : begin + size]

    def release_descriptor(self) -> None:
        """Drop the map: the next reader makes a new one."""
        self._view = None

    def write(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write `data` at `offset` of the sequence. Raises OSError."""
        self.file().pwrite(data, offset - self.base)
        self.grown(offset + len(data))

    def read(self, offset: int, size: int) -> bytes:
        """A copy by pread: for single looks into files that need no map."""
        return self.file().pread(size, offset - self.base)

    def data_start(self, offset: int) -> int | None:
        """The first offset, from this one on, that may hold other bytes than zeros."""
        found = self.file().data_start(offset - self.base)
        return None if found is None else self.base + found

    def zero_from(self, offset: int, end: int | None = None) -> bool:
        """Make [offset, end) read as zeros, `end` being the file's; True when bytes were changed.

        Holes stay holes, so this works on a full disk too.
        """
        file = self.file()
        at, stop = offset - self.base, (self.end if end is None else end) - self.base
        changed = False
        while at < stop:
            start = file.data_start(at)
            if start is None or start >= stop:
                break
            at = min(start + _READ_BYTES, stop, file.data_end(start))
            for place, size in used_blocks(file.pread(at - start, start), start):
                file.pwrite(bytes(size), place)
                changed = True
        return changed

    def release(self) -> None:
        """Close the descriptor; the map, if any, stays valid."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._files.pool.remove(self)
        self.release_descriptor()
        self.release()


def fill_holes(segment: Segment) -> None:
    """Write zeros into each hole between the data of a file on tmpfs, so that no map reads a hole
    there. Do nothing on other file systems, where reading a hole takes no room.

    A copy made with `cp --sparse=always` has such holes where message bodies hold zeros. The hole
    behind the last data stays: see `Segment.data_view`. Raises OSError, ENOSPC among them.
    """
    file = segment.file()
    if not isinstance(file, SystemFile) or not is_on_tmpfs(segment.path):
        return
    end = file.data_end(0)
    while (start := file.data_start(end)) is not None and start < segment.size:
        for at in range(end, start, _READ_BYTES):
            file.pwrite(bytes(min(_READ_BYTES, start - at)), at)
        end = file.data_end(start)


def used_blocks(data: bytes, start: int) -> Iterator[tuple[int, int]]:
    """(offset, size) of the disk's blocks that hold something, of bytes at `start` of a file: those
    have room on the disk, a hole may not."""
    if data == bytes(len(data)):
        return
    at = 0
    while at < len(data):
        size = min(_BLOCK_BYTES - (start + at) % _BLOCK_BYTES, len(data) - at)
        if data[at : at + size] != bytes(size):
            yield start + at, size
        at += size


class SegmentFiles:
    """The files of one directory, in order. Offsets are those of the whole sequence.

    `size_key` is the name of the setting that says how large the files are: it stands in the
    error when they are not. With `cuts_in_order` a removal at the end is durable before the next:
    after a power loss no file is missing in the middle, whatever the order of its journal. Files
    that `are_sparse` hold little as a rule, and there are many: see `map_file`.
    """

    __slots__ = (
        "_are_sparse", "_cuts_in_order", "_segments", "directory", "file_bytes", "files",
        "size_key",
    )  # fmt: skip

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
        """The first position there is; 0 without files."""
        return self._segments[0].base if self._segments else 0

    @property
    def end(self) -> int:
        """The end of the last file (not of what is written in it); 0 without files."""
        return self._segments[-1].end if self._segments else 0

    @property
    def last(self) -> Segment | None:
        return self._segments[-1] if self._segments else None

    def load(
        self, *, is_derived: bool = False, removes: bool = True, keeps_open: bool = False
    ) -> None:
        """Find the files. An empty last file is the trace of a crash at its creation: removed.

        `is_derived`: after a crash an empty or missing file in the middle ends the sequence, what
        follows is removed (it can be built again). `removes=False` leaves such files where they
        are. The last file `keeps_open` for who reads it next. Raises StoreDamagedError when a file
        has another size than configured or one is missing in between.
        """
        names = [n for n in self.files.names(self.directory) if is_segment_name(n)]
        found = [self._new(f"{self.directory}/{name}", int(name)) for name in names]
        sizes = []
        for segment in found:
            sizes.append(segment.file().size())
            if not keeps_open or segment is not found[-1]:
                segment.release()
        keep = len(found)
        if is_derived:
            places = enumerate(zip(found, sizes, strict=True))
            is_end = (
                size == 0 or segment.base != found[0].base + index * self.file_bytes
                for index, (segment, size) in places
            )
            keep = next((index for index, ends in enumerate(is_end) if ends), keep)
        elif sizes and sizes[-1] == 0:
            keep -= 1
            logger.warning(
                "%s is empty, the trace of a crash at its creation: it is left out", found[-1].path
            )
        for segment in reversed(found[keep:]):
            segment.release()
            if removes:
                self.files.remove(segment.path)
        self._segments = []
        try:
            for segment, size in zip(found[:keep], sizes, strict=False):
                self._check(segment, size)
                self._segments.append(segment)
        except StoreDamagedError:
            found[keep - 1].release()
            raise

    def _check(self, segment: Segment, size: int) -> None:
        """Does it go on from those before?"""
        path, base = segment.path, segment.base
        if size != self.file_bytes:
            raise StoreDamagedError(
                f"{path} has {size} bytes, but {self.size_key} is {self.file_bytes}.",
                fix=f"Set {self.size_key}={size} if all files there have that size,"
                " or bring back the file from a copy."
                if size
                else "Bring back the file from a copy.",
            )
        if base % self.file_bytes:
            raise StoreDamagedError(
                f"{path} has a name that no file of {self.file_bytes} bytes has: they begin at"
                " multiples of that.",
                fix=f"Move the file away if it is not of this store, or set {self.size_key}.",
            )
        if self._segments and base != self.end:
            raise StoreDamagedError(
                f"{self.directory} lacks the file {self.end:0{NAME_DIGITS}d}:"
                f" {base:0{NAME_DIGITS}d} follows {self._segments[-1].base:0{NAME_DIGITS}d}"
                f" (files of {self.file_bytes} bytes).",
                fix="Bring back the missing file from a copy.",
            )

    def sizes(self) -> list[int]:
        """Of the files on disk, loaded or not."""
        return [self._size(n) for n in self.files.names(self.directory) if is_segment_name(n)]

    def _size(self, name: str) -> int:
        with closing(self.files.open(f"{self.directory}/{name}")) as file:
            return file.size()

    def at(self, offset: int) -> Segment | None:
        """The file that holds `offset`."""
        segments = self._segments  # read once: `remove_first` exchanges it
        if not segments:
            return None
        index = (offset - segments[0].base) // self.file_bytes
        return segments[index] if 0 <= index < len(segments) else None

    def last_block(self, unit_bytes: int) -> tuple[int, bytes]:
        """The end of what was ever written in the last file: about 4 KiB of whole units, and where
        they begin. Nothing where that file holds nothing, or there is none."""
        last = self.last
        if last is None:
            return 0, b""
        end = last.file().data_end(0) // unit_bytes * unit_bytes
        begin = max(0, end - _BLOCK_BYTES // unit_bytes * unit_bytes)
        return last.base + begin, last.read(last.base + begin, end - begin)

    def add(self, base: int) -> Segment:
        """Create the next file; without files yet it may begin at any multiple of the size.

        The name is not durable before the directory is synced. On failure there is no such file.
        """
        if self._segments and base != self.end:
            raise OSError(errno.EINVAL, f"the next file begins at {self.end}, not at {base}")
        path = f"{self.directory}/{base:0{NAME_DIGITS}d}"
        with closing(self.files.open(path, create=True)) as file:
            file.truncate(self.file_bytes)
        segment = self._new(path, base)
        self._segments.append(segment)
        return segment

    def _new(self, path: str, base: int) -> Segment:
        return Segment(self.files, path, base, self.file_bytes, is_sparse=self._are_sparse)

    def make_directory(self, touched: list[str]) -> None:
        """Make the directory of a queue and name those above it for syncing, up to the root."""
        above = self.directory
        for _ in range(3):
            above = above.rpartition("/")[0]
            touched.append(above)
        self.files.make_directory(self.directory, durable=False)

    def remove_first(self) -> str:
        """Let go of the first file and return its path: the caller removes it from the disk.

        Readers that hold a slice of it read on. Another thread may be in `at` meanwhile.
        """
        first, *rest = self._segments
        self._segments = rest
        first.close()
        return first.path

    def drop_last(self) -> None:
        """The file that was just added cannot be relied on: it never was."""
        segment = self._segments.pop()
        segment.close()
        with contextlib.suppress(OSError):
            self.files.remove(segment.path)

    def cut(self, offset: int, *, keeps_file: bool = False) -> bool:
        """Drop everything from `offset` on: later files go, the rest of its file reads as zeros.

        True when something was changed (and has to be synced). `keeps_file`: a file that begins at
        `offset` is to be written again, which costs less than making it anew.
        """
        changed = False
        while self._segments and self._segments[-1].base >= offset + keeps_file:
            segment = self._segments.pop()
            segment.close()
            self.files.remove(segment.path)
            if self._cuts_in_order:
                self.files.sync_directory(self.directory)
            changed = True
        if self._segments and offset < self.end:
            changed |= self._segments[-1].zero_from(offset)
        return changed

    def remove_all(self) -> None:
        """Remove the files and the directory."""
        self.cut(0)
        for name in self.files.names(self.directory):
            with contextlib.suppress(FileNotFoundError):  # retention may just remove it
                self.files.remove(f"{self.directory}/{name}")
        if self.files.exists(self.directory):
            self.files.remove(self.directory)

    def release(self) -> None:
        """Close the descriptors that single looks have opened."""
        for segment in self._segments:
            segment.release()

    def close(self) -> None:
        for segment in self._segments:
            segment.close()
        self._segments = []


def is_segment_name(name: str) -> bool:
    return len(name) == NAME_DIGITS and name.isascii() and name.isdigit()
