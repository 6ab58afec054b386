"""File access for everything durable: stores, tables, key-value configuration, access rules.

The protocols `File` and `Files` define the operations that the product uses, and `SystemFiles`
implements them for the disk of this machine. Tests implement them in memory (`testing.files`), so
that the same code runs on files that lose unsynced writes.

Guarantees for callers:

- `pwrite` writes all bytes or raises OSError. After an error, any part of them may be on disk.
- `sync` makes the bytes and the size of a file durable. An error is final for that file, because
  the kernel may have dropped the written pages: do not retry, and do not trust a later success.
- A name is durable only after `sync_directory` of its directory.

A table, such as `topics.json`, is replaced atomically. The old version is copied to `.bak`; the new
one is written to a temporary file, synced, and renamed over the old one; then the directory is
synced. So a reader finds the old or the new version at `path` at every moment, and the version
before that in `path.bak`. (RocketMQ renames the old version to `.bak` first, so that there is a
moment without the file, spec/store.md §11.) A new version has the owner and the mode of the old
one from its first byte on, because it may contain secrets.
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
TRANSIENT_ERRORS: Final = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EINTR)
)
"""Errors that mean that a resource of the system is exhausted for now. The disk is intact."""
FULL_ERRORS: Final = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Errors that mean that the disk or a quota is full. Existing files are intact."""
_SURROGATE: Final = re.compile("[\ud800-\udfff]")  # stands for a byte that is not UTF-8
_FLOCK: Final = struct.Struct(
    "hhqqi"
)  # struct flock of Linux on 64 bits: type whence start len pid


NEW_FILE_MODE: Final = 0o640
NEW_DIRECTORY_MODE: Final = 0o750
"""The owner of a store can read and write messages, and its group can read them.

Existing files keep their mode. The umask of the process can remove more permissions.
"""


class Access(NamedTuple):
    """The permission bits of a file and the ids of its owner and group.

    None as an id means the user or group of the process that creates the file.
    """

    mode: int = NEW_FILE_MODE
    owner: int | None = None
    group: int | None = None


OWNER_ONLY: Final = Access(0o600)
DEFAULT_ACCESS: Final = Access()


class File(Protocol):
    """One open file. Offsets and sizes are bytes."""

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, or raise OSError."""
        ...

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes at `offset`. There are fewer only at the end of the file."""
        ...

    def sync(self) -> None:
        """Make the data and the size of the file durable. An OSError is final for this file."""
        ...

    def truncate(self, size: int) -> None:
        """Set the size of the file: cut it, or extend it sparsely.

        An extended part reads as zeros and takes no disk space.
        """
        ...

    def size(self) -> int:
        """Return the size of the file."""
        ...

    def data_start(self, offset: int) -> int | None:
        """Return the first position at or after `offset` that may not be zero, or None."""
        ...

    def data_end(self, offset: int) -> int:
        """Return the end of the data that contains `offset`, or `offset` if it is in a hole.

        A hole is a part of the file that was never written.
        """
        ...

    def fileno(self) -> int:
        """Return the descriptor, from which the store makes read-only maps."""
        ...

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        ...


class Files(Protocol):
    """The operations of a file system that the product uses. Paths are strings."""

    pool: DescriptorPool
    """Limits how many files stay open or mapped at a time."""

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file for reading and writing, or only for reading if writing is not allowed.

        With `create`, a missing file is created. If `access` is given, the file never has more
        permissions than that, from its creation on. Raises OSError.
        """
        ...

    def access(self, path: str) -> Access:
        """Return the permissions and owner of a file. Raises FileNotFoundError."""
        ...

    def exists(self, path: str) -> bool:
        """Return whether there is a file or directory with this path."""
        ...

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory, or an empty list if it does not exist."""
        ...

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create a directory and its missing parents. Do nothing if it exists.

        With `durable=False` the caller must sync the directories.
        """
        ...

    def remove(self, path: str) -> None:
        """Remove a file or an empty directory. Raises FileNotFoundError if it does not exist."""
        ...

    def rename(self, old_path: str, new_path: str) -> None:
        """Rename a file atomically. A file with the new name is replaced."""
        ...

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable."""
        ...

    def sync_all(self, path: str) -> bool:
        """Make the whole file system of `path` durable at once, and return True.

        Return False, without doing anything, if the system has no such call. Then the caller must
        sync each file.
        """
        ...

    def lock(self, path: str) -> Callable[[], None]:
        """Lock a file until the returned function is called.

        Raises StoreLockedError if another process, or this one, has locked it.
        """
        ...

    def usage(self, path: str) -> tuple[int, int]:
        """Return the total and the free bytes that this process can use in the file system."""
        ...

    def modified_ms(self, path: str) -> int:
        """Return the time of the last write to a file, in milliseconds since 1970.

        Raises FileNotFoundError.
        """
        ...


class SystemFile:
    """A file on the disk of this machine (an implementation of `File`).

    If writing was not allowed when the file was opened, because the kernel has remounted the file
    system read-only or permissions are missing, `pwrite` and `truncate` try to open it for writing
    again. So an open file recovers when the file system does.
    """

    __slots__ = ("_descriptor", "_is_writable", "path")

    def __init__(self, path: str, descriptor: int, *, is_writable: bool = True) -> None:
        """Take over an open `descriptor` of the file at `path`; `close` closes it."""
        self.path = path
        self._descriptor = descriptor
        self._is_writable = is_writable

    def _reopen_for_writing(self) -> None:
        """Replace the read-only descriptor by a writable one of the same file.

        Raises OSError if writing is not allowed, or with ESTALE if the path names another file now.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        if not os.path.samestat(os.fstat(descriptor), os.fstat(self._descriptor)):
            os.close(descriptor)
            raise OSError(errno.ESTALE, "the file was replaced while it was open", self.path)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._is_writable = True

    def pwrite(self, data: bytes | bytearray | memoryview, offset: int) -> None:
        """Write all of `data` at `offset`, or raise OSError. Reopen a read-only file first."""
        if not self._is_writable:
            self._reopen_for_writing()
        bytes_written = os.pwrite(self._descriptor, data, offset)
        bytes_total = len(data)
        # Short writes are rare: after a signal, or if the disk is nearly full.
        while bytes_written < bytes_total:
            rest = memoryview(data)[bytes_written:]
            count = os.pwrite(self._descriptor, rest, offset + bytes_written)
            if count == 0:
                raise OSError(errno.EIO, "the file accepts no more bytes", self.path)
            bytes_written += count

    def pread(self, size: int, offset: int) -> bytes:
        """Return up to `size` bytes at `offset`; fewer only at the end of the file."""
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            piece = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not piece:
                break
            data += piece
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
        """Return the first position at or after `offset` outside holes; None if none follows."""
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return None
            return offset if offset < self.size() else None  # no support for holes

    def data_end(self, offset: int) -> int:
        """Return the end of the data that contains `offset`, or `offset` if it is in a hole."""
        try:
            return os.lseek(self._descriptor, offset, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # `offset` is behind the data
                return offset
            return self.size()  # no support for holes

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _set_access(descriptor: int, access: Access) -> None:
    """Set owner, group and permissions of an open file, as far as this process may.

    If the process may not give the file to the group, the group gets no permissions. Otherwise the
    members of another group would get them.
    """
    mode = access.mode
    status = os.fstat(descriptor)
    owner = status.st_uid if access.owner is None else access.owner
    group = status.st_gid if access.group is None else access.group
    if (owner, group) != (status.st_uid, status.st_gid):
        try:
            os.fchown(descriptor, owner, group)
        except PermissionError:
            try:
                os.fchown(descriptor, -1, group)  # -1 keeps the owner
            except PermissionError:
                mode &= ~0o070
    os.fchmod(descriptor, mode)


_locked: set[str] = set()
"""Paths that this process has locked. POSIX locks do not exclude a second lock in one process."""


class SystemFiles:
    """The file system of this machine (an implementation of `Files`)."""

    __slots__ = ("pool",)

    def __init__(self) -> None:
        self.pool = DescriptorPool()

    def open(self, path: str, *, create: bool = False, access: Access | None = None) -> File:
        """Open a file for reading and writing, or only for reading if writing is not allowed.

        If `create`, a missing file is created, with the permissions `access` from the beginning on.
        Raises OSError.
        """
        flags = os.O_RDWR | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        # With `access`, the file begins private, and gets more permissions below.
        initial_mode = NEW_FILE_MODE if access is None else OWNER_ONLY.mode
        try:
            descriptor = os.open(path, flags, initial_mode)
        except OSError as error:
            if create or error.errno not in (errno.EACCES, errno.EROFS):
                raise
            read_only = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return SystemFile(path, read_only, is_writable=False)
        if create and access is not None:
            _set_access(descriptor, access)
        return SystemFile(path, descriptor)

    def access(self, path: str) -> Access:
        status = os.stat(path)  # noqa: PTH116 - paths are strings here
        return Access(stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid)

    def exists(self, path: str) -> bool:
        return os.path.exists(path)  # noqa: PTH110 - paths are strings here

    def names(self, directory: str) -> list[str]:
        """Return the sorted names in a directory; [] if it does not exist or is a file."""
        try:
            return sorted(os.listdir(directory))  # noqa: PTH208 - paths are strings here
        except (FileNotFoundError, NotADirectoryError):
            return []

    def make_directory(self, path: str, *, durable: bool = True) -> None:
        """Create a directory and its missing parents. If `durable`, sync each parent."""
        missing = []
        while path and not self.exists(path):
            missing.append(path)
            path = os.path.dirname(path)  # noqa: PTH120 - paths are strings here
        for directory in reversed(missing):
            os.mkdir(directory, NEW_DIRECTORY_MODE)  # noqa: PTH102 - paths are strings here
            if durable:
                parent = os.path.dirname(directory)  # noqa: PTH120 - paths are strings here
                self.sync_directory(parent)

    def remove(self, path: str) -> None:
        # Paths are strings here.
        """Remove a file, a symbolic link, or an empty directory. Raises OSError."""
        if os.path.isdir(path) and not os.path.islink(path):  # noqa: PTH112, PTH114 - as above
            os.rmdir(path)  # noqa: PTH106 - as above
        else:
            os.unlink(path)  # noqa: PTH108 - as above

    def rename(self, old_path: str, new_path: str) -> None:
        os.replace(old_path, new_path)  # noqa: PTH105 - paths are strings here

    def sync_directory(self, path: str) -> None:
        """Make the names in a directory durable. Raises OSError."""
        descriptor = os.open(path or ".", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self, path: str) -> bool:
        """Sync the whole file system of `path`. Return False if the system has no such call."""
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)  # only on Linux
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
        """Lock a file. Return the function that unlocks it.

        Byte 0 is locked, as by Java's FileChannel, so that RocketMQ's brokers are excluded too.
        Raises StoreLockedError if another process, or this one, has locked the file.
        """
        real_path = os.path.realpath(path)
        if real_path in _locked:
            raise _make_locked_error(path, os.getpid())
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        file = SystemFile(path, os.open(path, flags, NEW_FILE_MODE))
        try:
            fcntl.lockf(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
        except OSError as error:
            owner_id = _find_lock_owner(file.fileno())
            file.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _make_locked_error(path, owner_id) from None
            raise
        _locked.add(real_path)
        file.pwrite(LOCK_CONTENT, 0)

        def release() -> None:
            _locked.discard(real_path)
            file.close()

        return release

    def usage(self, path: str) -> tuple[int, int]:
        """Return (total bytes, free bytes) of the file system of `path`, for this user."""
        state = os.statvfs(path)
        # Like `df`: blocks that are reserved for root count neither as used nor as free.
        used_blocks = state.f_blocks - state.f_bfree
        free_blocks = state.f_bavail
        total_bytes = (used_blocks + free_blocks) * state.f_frsize
        return total_bytes, free_blocks * state.f_frsize

    def modified_ms(self, path: str) -> int:
        return os.stat(path).st_mtime_ns // 1_000_000  # noqa: PTH116 - paths are strings here


SYSTEM_FILES: Final = SystemFiles()
_FICLONE: Final = 0x40049409
_TMPFS: Final = 0x01021994  # f_type of statfs(2)
_STATFS_BYTES: Final = 256  # more than struct statfs has on any platform


def is_on_tmpfs(path: str) -> bool:
    """Return whether a file is on tmpfs. Return False if that cannot be found out.

    On tmpfs, reading a hole through a map takes a page, and raises SIGBUS if there is none.
    """
    statfs = getattr(ctypes.CDLL(None, use_errno=True), "statfs", None)  # only on Linux
    answer = ctypes.create_string_buffer(_STATFS_BYTES)
    if statfs is None or statfs(os.fsencode(path), answer):
        return False
    return int.from_bytes(answer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) == _TMPFS


def clone(source_path: str, target_path: str) -> bool:
    """Copy a file by sharing its blocks (reflink). Return whether that succeeded.

    The copy at `target_path` is synced, its name is not. False means that the file system cannot
    share blocks, or that the paths are in different file systems; then there is no file at
    `target_path`. Raises OSError.
    """
    source = SYSTEM_FILES.open(source_path)
    with closing(source), closing(SYSTEM_FILES.open(target_path, create=True)) as target:
        try:
            fcntl.ioctl(target.fileno(), _FICLONE, source.fileno())
        except OSError:
            SYSTEM_FILES.remove(target_path)
            return False
        target.sync()
    return True


def link(existing_path: str, link_path: str) -> bool:
    """Create the hard link `link_path` to the file `existing_path`. Return whether that succeeded.

    It fails for example if the file system has no links, or if `link_path` exists. The file must
    never be written again.
    """
    try:
        os.link(existing_path, link_path)
    except OSError:
        return False
    return True


def make_private_directory(path: str, *, below: str) -> None:
    """Create a directory and its parents for this user only, in a directory such as /tmp.

    `path` must be below the directory `below`, in which all users can write. Raises
    ConfigurationError if a directory on the way is a link or belongs to another user, because that
    user could redirect the files.
    """
    directory = below
    for component in path.removeprefix(f"{below}/").split("/"):
        directory = f"{directory}/{component}"
        with suppress(FileExistsError):
            os.mkdir(directory, 0o700)  # noqa: PTH102 - paths are strings here
        status = os.lstat(directory)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise ConfigurationError(
                f"{directory} is a symbolic link or belongs to another user.",
                fix="Remove it, or ask its owner to. It is then created again for you.",
            )
        os.chmod(directory, 0o700)  # noqa: PTH101 - paths are strings here


def create_private_file(path: str, content: bytes) -> None:
    """Create a file with this content that only its owner can read.

    A file or link with that name is replaced, not followed. The file is not synced. Raises OSError.
    """
    with suppress(FileNotFoundError):
        SYSTEM_FILES.remove(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(SystemFile(path, os.open(path, flags, 0o600))) as file:
        file.pwrite(content, 0)


def _make_locked_error(path: str, owner_id: int | None) -> StoreLockedError:
    """Make the error for a locked file. `owner_id` is the process that has locked it, if known."""
    owner = f"process {owner_id}" if owner_id else "another process"
    return StoreLockedError(
        f"{path} is locked by {owner}, which is running.",
        fix="Stop it, or give this broker a storePathRootDir of its own.",
    )


def lock_owner(path: str) -> int | None:
    """Return the id of the process that has locked a file; None if that is not known.

    The call does not lock the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return _find_lock_owner(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: str) -> bool:
    """Return whether this process, or another known process, has locked a file.

    The file is not locked by this call.
    """
    return os.path.realpath(path) in _locked or lock_owner(path) is not None


def _find_lock_owner(descriptor: int) -> int | None:
    """Return the id of the process that has locked an open file; None if that is not known.

    Works only on Linux with 64 bits.
    """
    try:
        lock_query = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        owner_id: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, lock_query))[4]
    except (OSError, struct.error):
        return None
    return owner_id if owner_id > 0 else None


def memory_bytes() -> int:
    """Return the size of the physical memory, or 4 GiB if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 4 << 30


_FIXES: Final = {
    errno.EISDIR: "Move the directory away; there must be a file.",
    errno.ENOTDIR: "Move the file away; there must be a directory.",
    errno.ELOOP: "Remove the symbolic link, which points to itself, or correct its target.",
    errno.ENOENT: "Restore it from a copy, or remove the link that points nowhere.",
    errno.ENOSPC: "Free disk space.",
    errno.EDQUOT: "Free disk space, or raise the quota.",
    errno.EEXIST: "Move the file or dangling link with that name away.",
    errno.EIO: "Check the disk.",
    errno.EMFILE: descriptors.FIX,
    errno.ENFILE: "Raise fs.file-max, the limit of open files of the machine.",
    errno.ENOMEM: "Give the machine more memory, or raise vm.max_map_count.",
}


def fix_of(error: OSError) -> str:
    """Return a sentence that says what a user can do about a file system error in a store."""
    return _FIXES.get(
        error.errno or 0,
        "Give the broker permission to write there, or set storePathRootDir.",
    )


def process_id() -> int:
    """Return the id of this process, which the store writes to its `abort` file."""
    return os.getpid()


def text_names(files: Files, directory: str) -> list[str]:
    """Return the sorted names in a directory that are valid UTF-8.

    Names of topics always are, so no broker has created a directory with another name.
    """
    return [name for name in files.names(directory) if not _SURROGATE.search(name)]


def read_text(files: Files, path: str) -> str | None:
    """Return the text of a file, or None if it does not exist.

    Raises UnicodeDecodeError if it is not UTF-8.
    """
    if not files.exists(path):
        return None
    file = files.open(path)
    try:
        return file.pread(file.size(), 0).decode()
    finally:
        file.close()


def replace_text(files: Files, path: str, text: str) -> None:
    """Replace the text of a file atomically, and keep the old version as `<path>.bak`.

    Both have the permissions of the old file. The directory is created if it does not exist. The
    change is durable on return. Raises OSError; then the old version is at `path`, unless only the
    last sync failed.
    """
    content = text.encode()  # before anything is changed: it may raise
    _copy_to_backup(files, path)
    _write_temporary(files, path, content, None)
    files.rename(path + ".tmp", path)
    files.sync_directory(_directory(path))


def overwrite_text(files: Files, path: str, text: str) -> None:
    """Replace the text of a file atomically. Only the owner can read a file that did not exist.

    The change is durable on return.
    """
    _write_temporary(files, path, text.encode(), OWNER_ONLY)
    files.rename(path + ".tmp", path)
    files.sync_directory(_directory(path))


def edit_text(files: Files, path: str, text: str) -> None:
    """Do what `overwrite_text` does, and keep the old version as `<path>.bak`."""
    _copy_to_backup(files, path)
    overwrite_text(files, path, text)


def _copy_to_backup(files: Files, path: str) -> None:
    """Copy the file at `path` atomically to `<path>.bak`, if it exists."""
    if not files.exists(path):
        return
    backup_path = path + ".bak"
    access = files.access(path)
    file = files.open(path)
    try:
        content = file.pread(file.size(), 0)
    finally:
        file.close()
    _write_temporary(files, backup_path, content, access)
    files.rename(backup_path + ".tmp", backup_path)


def _write_temporary(files: Files, path: str, content: bytes, new_access: Access | None) -> None:
    """Write `content` to `<path>.tmp`, durably. The caller then renames it to `path`.

    The file gets the permissions of the file at `path`. If there is none, it gets `new_access`
    (None means the usual permissions). An older temporary file is replaced. The new name is not
    synced. Raises OSError.
    """
    files.make_directory(_directory(path))
    temporary_path = path + ".tmp"
    if files.exists(temporary_path):
        files.remove(temporary_path)
    access = new_access
    if files.exists(path):
        access = files.access(path)
    file = files.open(temporary_path, create=True, access=access)
    try:
        file.truncate(len(content))
        file.pwrite(content, 0)
        file.sync()
    finally:
        file.close()


def _directory(path: str) -> str:
    """Return the directory of a path; "" without one."""
    return path.rpartition("/")[0]


def exposure_warning(files: Files, path: str) -> str | None:
    """Return a warning if a file with secrets can be read by others; None if it is safe.

    The group may read a file of root, because a server that does not run as root could not read it
    otherwise. Return None also if there is no file.
    """
    if not path or not files.exists(path):
        return None
    access = files.access(path)
    everyone_may_read = bool(access.mode & 0o004)
    group_may_read = bool(access.mode & 0o040)
    is_owned_by_root = access.owner == 0
    if everyone_may_read:
        readers = "every user of this machine"
    elif group_may_read and not is_owned_by_root:
        readers = "its group"
    else:
        return None
    return f"{path} contains secrets and can be read by {readers}. Run chmod 600 {path}"


def load_text(files: Files, path: str, parse: Callable[[str], T]) -> T | None:
    """Parse the newest version of a file that can be parsed: `path`, else `<path>.bak`.

    `parse` must raise ValueError, KeyError, TypeError or ProtocolError for a text that is not
    valid. If the backup is used, a warning is logged. Return None if neither file exists. Raises
    StoreDamagedError if a file exists but none can be parsed.
    """
    faults: list[str] = []  # why the versions so far cannot be used
    for version_path in (path, path + ".bak"):
        try:
            text = read_text(files, version_path)
            if text is None:
                continue
            if not text.strip():
                faults.append(f"{version_path} is empty")
                continue
            table = parse(text)
        except (ValueError, KeyError, TypeError, ProtocolError) as error:
            faults.append(f"{version_path}: {error}")
            continue
        if version_path != path:
            reason = "; ".join(faults) or f"{path} is missing"
            logger.warning("%s. The backup %s is used instead.", reason, version_path)
        return table
    if faults:
        raise StoreDamagedError(
            f"{path} cannot be read ({'; '.join(faults)}).",
            fix="Restore a good copy, or remove the file and its .bak to start without it.",
        )
    return None
