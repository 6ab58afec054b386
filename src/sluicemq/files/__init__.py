"""The port through which everything durable goes: store, tables, KV configuration, access rules.

Two small protocols, `File` and `Files`, and the real implementation of both. `testing.files` has
the twin that forgets unsynced writes at will, so that one code can be crashed a thousand times.

What the callers may rely on:

- `pwrite` writes all bytes or raises OSError; how much of them is then on disk is unknown.
- `sync` makes the bytes and the size of a file durable; an error of it is final for that file,
  because the kernel may have dropped the pages (never retry, never trust a later success).
- A name is durable only after `sync_directory` of the directory that holds it.

A table (`topics.json` …) is replaced in one step: the old edition is copied to `.bak`, the new one
is written beside, synced, renamed over the old one, and the directory synced. So a reader finds the
old or the new edition in `path` at every moment, and the one before in `path.bak` (RocketMQ renames
the old one to `.bak` first, which leaves a gap, spec/store.md §11). Every new edition has the owner
and the mode of the one before, from its first byte on: it may hold secrets.
"""

import ctypes
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Final, NamedTuple, Protocol, TypeVar

from sluicemq.errors import ConfigurationError, ProtocolError, StoreDamagedError, StoreLockedError
from sluicemq.files import descriptors
from sluicemq.files.descriptors import DescriptorPool

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOCK_CONTENT: Final = b"lock"
PASSING_ERRORS: Final = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
)
"""The system is short of something for the moment: nothing is wrong with the disk."""
FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
"""There is no room: nothing is wrong with what is there."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # for a byte that is no UTF-8
_FLOCK: Final = struct.Struct(
    "hhqqi"
)  # struct flock of Linux on 64 bits: type whence start len pid


NEW_FILE_MODE: Final = 0o640
NEW_DIRECTORY_MODE: Final = 0o750
"""Messages are for the owner of the store, and for its group to read. What exists keeps its mode;
the umask of the process can take more away."""


class Access(NamedTuple):
    """Who may do what with a file: permission bits, user and group id (None: who makes it)."""

    mode: int = NEW_FILE_MODE
    owner: int | None = None
    group: int | None = None


FOR_OWNER: Final = Access(0o600)
OPEN: Final = Access()


class File(Protocol):
    """One open file. Offsets and sizes are bytes."""

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, or raise OSError."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Make data and size durable. An OSError is fatal for this file."""
        ...

    def truncate(self, size: int) -> None:
        """Cut, or grow sparsely (the new part reads as zeros and takes no room)."""
        ...

    def size(self) -> int: ...

    def data_start(self, offset: int) -> int | None:
        """The first position from `offset` on that may hold other bytes than zeros, or None."""
        ...

    def data_end(self, offset: int) -> int:
        """Where the bytes that were ever written around `offset` end; `offset` itself in a hole."""
        ...

    def fileno(self) -> int:
        """For read-only maps of the store."""
        ...

    def close(self) -> None: ...


class Files(Protocol):
    """The file system as the product uses it. Paths are plain text."""

    pool: DescriptorPool  # bounds how many files stay open or mapped at a time

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open for reading and writing (for reading alone where writing is not allowed). A file
        that is created with `access` is never more open than that."""
        ...

    def access(self, path: str) -> Access:
        """Raises FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool: ...

    def names(self, directory: str) -> list[str]:
        """Sorted names in a directory; empty when it is missing."""
        ...

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """With parents. `durable=False` leaves the directory syncs to the caller."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory. Raises FileNotFoundError when it is missing."""
        ...

    def rename(self, old: str, new: str) -> None: ...

    def sync_directory(self, path: str) -> None: ...

    def sync_all(self, path: str) -> bool:
        """Make the whole file system of `path` durable at once. False, having done nothing, where
        the system cannot: then each file has to be synced."""
        ...

    def lock(self, path: str) -> Callable[[], None]:
        """Own the lock file until the returned function is called. Raises StoreLockedError."""
        ...

    def usage(self, path: str) -> tuple[int, int]:
        """Total and free bytes of the file system that holds `path`, as far as we may use it."""
        ...

    def modified_ms(self, path: str) -> int:
        """When the file was last written, in ms since 1970. Raises FileNotFoundError."""
        ...


class SystemFile:
    """A file of this machine.

    A file that was opened while writing was not allowed (a file system that the kernel has
    remounted read-only, missing rights) asks for the right again at each `pwrite`, so a descriptor
    that stays open recovers when the file system does.
    """

    __slots__ = ("_descriptor", "_is_writable", "path")

    def __init__(self, path: str, descriptor: int, *, is_writable: bool = True) -> None:
        self.path = path
        self._descriptor = descriptor
        self._is_writable = is_writable

    def _reopen_for_writing(self) -> None:
        """Replace a read-only descriptor by a writable one of the same file. Raises OSError: the
        reason why writing is not allowed, or ESTALE when the path names another file by now."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor)):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the file was replaced while it was open", self.path)
        os.close(self._descriptor)
        self._descriptor, self._is_writable = descriptor, True

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        if not self._is_writable:
            self._reopen_for_writing()
        written = os.pwrite(self._descriptor, data, offset)
        size = len(data)
        while written < size:  # a short write is rare: a signal, or the disk is nearly full
            more = os.pwrite(self._descriptor, memoryview(data)[written:], offset + written)
            if more == 0:
                raise OSError(errno.EIO, "the file takes no more bytes", self.path)
            written += more

    def pread(self, size: int, offset: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data

    def sync(self) -> None:
        os.fdatasync(self._descriptor)

    def truncate(self, size: int) -> None:
        if not self._is_writable:
            self._reopen_for_writing()
        os.ftruncate(self._descriptor, size)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def data_start(self, offset: int) -> int | None:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            return offset if offset < self.size() else None  # the file system knows no holes

    def data_end(self, offset: int) -> int:
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_HOLE)
        except OSError as error:
            return offset if error.errno == errno.ENXIO else self.size()

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_locked: set[str] = set()
"""POSIX locks do not exclude a second opening in the same process: this does."""


class SystemFiles:
    """The file system of this machine."""

    __slots__ = ("pool",)

    def __init__(self) -> None:
        self.pool = DescriptorPool()

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            descriptor = os.open(path, flags, NEW_FILE_MODE if access is None else 0o600)
        except OSError as error:
            if create or error.errno not in (errno.EACCES, errno.EROFS):
                raise
            read_only = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return SystemFile(path, read_only, is_writable=False)
        if not create or access is None:
            return SystemFile(path, descriptor)
        # What this process may not give is left out: nobody else gets it instead.
        mode, found = access.mode, os.fstat(descriptor)
        owner = found.st_uid if access.owner is None else access.owner
        group = found.st_gid if access.group is None else access.group
        if (owner, group) != (found.st_uid, found.st_gid):
            try:
                os.fchown(descriptor, owner, group)
            except PermissionError:
                try:
                    os.fchown(descriptor, -1, group)
                except PermissionError:
                    mode &= ~0o070
        os.fchmod(descriptor, mode)
        return SystemFile(path, descriptor)

    def access(self, path: str) -> Access:
        found = os.stat(path)  # noqa: PTH116 - paths are text on this port
        return Access(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # noqa: PTH110 - paths are text on this port

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        missing = []
        while path and not self.exists(path):
            missing.append(path)
            path = os.path.dirname(path)  # noqa: PTH120
        for directory in reversed(missing):
            os.mkdir(directory, NEW_DIRECTORY_MODE)  # noqa: PTH102
            if durable:
                self.sync_directory(os.path.dirname(directory))  # noqa: PTH120

    def remove(self, path: str) -> None:
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114
            os.rmdir(path)  # noqa: PTH106
        else:
            os.unlink(path)  # noqa: PTH108

    def rename(self, old: str, new: str) -> None:
        os.replace(old, new)  # noqa: PTH105

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self, path: str) -> bool:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)  # Linux alone has it
        if syncfs is None:
            return False
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if syncfs(descriptor):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        finally:
            os.close(descriptor)
        return True

    def lock(self, path: str) -> Callable[[], None]:
        """Locks byte 0 as Java's FileChannel does, so that a Java broker is kept out as well."""
        real = os.path.realpath(path)
        if real in _locked:
            raise _locked_error(path, os.getpid())
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = SystemFile(path, os.open(path, flags, NEW_FILE_MODE))
        try:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            owner = _lock_owner(file.fileno())
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _locked_error(path, owner) from None
            raise
        _locked.add(real)
        file.pwrite(LOCK_CONTENT, 0)

        def release() -> None:
            _locked.discard(real)
            file.close()

        return release

    def usage(self, path: str) -> tuple[int, int]:
        state = os.statvfs(path)
        used = state.f_blocks - state.f_bfree  # what is kept for root counts as neither: as `df`
        return (used + state.f_bavail) * state.f_frsize, state.f_bavail * state.f_frsize

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000  # noqa: PTH116 - paths are text on this port


SYSTEM_FILES: Final = SystemFiles()
_FICLONE: Final = 0x40049409
_TMPFS: Final = 0x01021994  # f_type of statfs(2)
_STATFS_BYTES: Final = 256  # more than struct statfs has on any platform


def is_on_tmpfs(path: str) -> bool:
    """Return whether a file lies on tmpfs, where reading a hole through a map takes a page of room
    (and is a SIGBUS when there is none). False where the system does not tell."""
    statfs = getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)  # Linux alone has this one
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs is None or statfs(os.fsencode(path), answer):
        return False
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) == _TMPFS


def clone(old: str, new: str) -> bool:
    """Make a file that shares the blocks of another until either is written. False, having done
    nothing, where the file system has no such copies, or the two are on different ones."""
    source = SYSTEM_FILES.open(old)
    with closing(source), closing(SYSTEM_FILES.open(new, create=True)) as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError:
            SYSTEM_FILES.remove(new)
            return False
        target.sync()
    return True


def link(old: str, new: str) -> bool:
    """Another name for a file that nobody writes any more. False, having done nothing, where the
    file system cannot."""
    try:
        os.link(old, new)
    except OSError:
        return False
    return True


def make_private_directory(path: str, *, below: str) -> None:
    """Make a directory, and those on the way to it, in one where everybody writes (/tmp), for us
    alone. Raises ConfigurationError when one of them is a link or of somebody else: whoever
    prepared it would choose where files come to lie."""
    directory = below
    for name in path.removeprefix(f"{below}/").split("/"):
        directory = f"{directory}/{name}"
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)  # noqa: PTH102
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            raise ConfigurationError(
                f"{directory} is a link, or belongs to somebody else.",
                fix="Remove it, or let its owner remove it: it is made again, for you alone.",
            )
        os.chmod(directory, 0o700)  # noqa: PTH101 - before what is in it is looked at


def replace_private(path: str, data: bytes) -> None:
    """A new file in the place of what has that name, a link as well; its owner alone reads it."""
    with suppress(FileNotFoundError):
        SYSTEM_FILES.remove(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(SystemFile(path, os.open(path, flags, 0o600))) as file:
        file.pwrite(data, 0)


def _locked_error(path: str, owner: int | None) -> StoreLockedError:
    who = f"process {owner}" if owner else "another process"
    return StoreLockedError(
        f"{path} is locked by {who}, which is running.",
        fix="Stop it, or give this broker a storePathRootDir of its own.",
    )


def lock_holder(path: str) -> int | None:
    """The process that holds a lock file, asked without taking the lock; None: nobody we know."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _lock_owner(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: str) -> bool:
    """Return whether this process, or another one that the system tells of, holds a lock file. The
    lock is not taken."""
    return os.path.realpath(path) in _locked or lock_holder(path) is not None


def _lock_owner(descriptor: int) -> int | None:
    """The process that holds the lock, where the system tells (Linux on 64 bits)."""
    try:
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        owner: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, question))[4]
    except (OSError, struct.error):
        return None
    return owner if owner > 0 else None


def memory_bytes() -> int:
    """The machine's physical memory; 4 GiB where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 4 << 30


_FIXES: Final = {
    errno.EISDIR: "Move the directory away: a file belongs there.",
    errno.ENOTDIR: "Move the file away: a directory belongs there.",
    errno.ELOOP: "A symbolic link leads in a circle: remove it, or let it lead to the right place.",
    errno.ENOENT: "Bring it back from a copy, or remove the link that leads nowhere.",
    errno.ENOSPC: "Make room on that disk.",
    errno.EDQUOT: "Make room, or raise the quota.",
    errno.EEXIST: "Move away what has that name: a link that leads nowhere, or a file.",
    errno.EIO: "Check the disk.",
    errno.EMFILE: descriptors.FIX,
    errno.ENFILE: "Let the machine have more open files: fs.file-max.",
    errno.ENOMEM: "Give the machine more memory, or raise vm.max_map_count.",
}


def fix_of(error: OSError) -> str:
    """What a user can do about an error of the file system in a store."""
    return _FIXES.get(
        error.errno or 0,
        "The broker must be able to write there: change the rights, or set storePathRootDir.",
    )


def process_id() -> int:
    """Of this process: it stands in the store's `abort` file."""
    return os.getpid()


def text_names(files: Files, directory: str) -> list[str]:
    """Return the sorted names in a directory that are valid UTF-8. Names of topics always are, so
    a directory with another name was not made by a broker."""
    return [name for name in files.names(directory) if not _SURROGATE.search(name)]


def read_text(files: Files, path: str) -> str | None:
    """The whole file as UTF-8, or None when it does not exist. Raises UnicodeDecodeError."""
    if not files.exists(path):
        return None
    file = files.open(path)
    try:
        return file.pread(file.size(), 0).decode()
    finally:
        file.close()


def replace_text(files: Files, path: str, text: str) -> None:
    """Write a new edition of a table in one step, and keep the last one as `<path>.bak`, with the
    same access. Durable on return."""
    data = text.encode()
    _keep_last(files, path)
    _write_beside(files, path, data, None)
    files.rename(path + ".tmp", path)
    files.sync_directory(_directory(path))


def overwrite_text(files: Files, path: str, text: str) -> None:
    """Write a new edition in one step: a reader finds the old one or the new one. A new file is its
    owner's alone. Durable on return."""
    _write_beside(files, path, text.encode(), FOR_OWNER)
    files.rename(path + ".tmp", path)
    files.sync_directory(_directory(path))


def edit_text(files: Files, path: str, text: str) -> None:
    """As `overwrite_text`, and keep the last edition as `<path>.bak`, with the same access."""
    _keep_last(files, path)
    overwrite_text(files, path, text)


def _keep_last(files: Files, path: str) -> None:
    """Copy the file at `path`, if there is one, to `<path>.bak`, in one step."""
    if not files.exists(path):
        return
    last, access, file = path + ".bak", files.access(path), files.open(path)
    try:
        data = file.pread(file.size(), 0)
    finally:
        file.close()
    _write_beside(files, last, data, access)
    files.rename(last + ".tmp", last)


def _write_beside(files: Files, path: str, data: bytes, new_access: Access | None) -> None:
    """Write `<path>.tmp`, with the access of the file at `path`, or `new_access` if there is none.
    Durable on return, but for its name."""
    files.make_directory(_directory(path))
    temporary = path + ".tmp"
    if files.exists(temporary):
        files.remove(temporary)
    access = files.access(path) if files.exists(path) else new_access
    file = files.open(temporary, create=True, access=access)
    try:
        file.truncate(len(data))
        file.pwrite(data, 0)
        file.sync()
    finally:
        file.close()


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def exposure(files: Files, path: str) -> str | None:
    """A sentence when a file with secrets is there and can be read by more than its owner.

    The group of a file of root may read it: how else could a server that is not root?
    """
    if not path or not files.exists(path):
        return None
    access = files.access(path)
    group = 0o040 if access.owner != 0 else 0
    if not access.mode & (0o004 | group):
        return None
    who = "everybody on this machine" if access.mode & 0o004 else "its group"
    return f"{path} holds secrets and can be read by {who}: chmod 600 {path}"


def load_text(files: Files, path: str, parse: Callable[[str], T]) -> T | None:
    """Parse the newest edition of a table that can be read; None when there is none at all.

    `parse` raises ValueError (or KeyError, TypeError, ProtocolError) on text that is not such a
    table. That the edition before is used is logged. Raises StoreDamagedError when an edition is
    there but none can be read.
    """
    broken: list[str] = []
    for edition in (path, path + ".bak"):
        try:
            text = read_text(files, edition)
            if text is None:
                continue
            if not text.strip():
                broken.append(f"{edition} is empty")
                continue
            value = parse(text)
        except (ValueError, KeyError, TypeError, ProtocolError) as error:
            broken.append(f"{edition}: {error}")
            continue
        if edition != path:
            why = "; ".join(broken) or f"{path} is missing"
            logger.warning("%s: the edition before it is used, %s", why, edition)
        return value
    if broken:
        raise StoreDamagedError(
            f"{path} cannot be read ({'; '.join(broken)}).",
            fix="Put back a good copy, or remove the file and its .bak to start without it.",
        )
    return None
