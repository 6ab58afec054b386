"""The overlay: everything of the file port works above it, and nothing happens below."""

import errno
import mmap
import os
import random
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from sluicemq.config import StoreConfig
from sluicemq.files import Files, load_text, read_text, replace_text
from sluicemq.files.overlay import READ_ONLY_FILES, OverlayFiles
from sluicemq.store.store import Store
from sluicemq.testing.files import CrashableFiles

MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "0").write_bytes(b"zero" * 1000)
    (tmp_path / "log" / "1").write_bytes(b"one")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "t.json").write_text('{"a":1}')
    return tmp_path


def state(root: Path) -> dict[str, object]:
    """Every name with its content and all of its metadata but the time of the last access."""
    found: dict[str, object] = {}
    for path in [root, *sorted(root.rglob("*"))]:
        stat = path.lstat()
        content = path.read_bytes() if path.is_file() else None
        found[str(path)] = (
            content, stat.st_mode, stat.st_uid, stat.st_gid, stat.st_size, stat.st_mtime_ns,
            stat.st_ctime_ns, stat.st_ino, stat.st_nlink, stat.st_blocks,
        )  # fmt: skip
    return found


def anonymous_kib() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0])


def test_what_is_written_is_read_above_and_not_below(tree: Path) -> None:
    before = state(tree)
    files = OverlayFiles()
    path = f"{tree}/log/0"
    with closing(files.open(path)) as file:
        file.pwrite(b"ZERO", 4)
        file.pwrite(b"end", 4000)
        file.sync()
    with closing(files.open(path)) as file:
        assert file.pread(12, 0) == b"zeroZEROzero"
        assert file.pread(10, 3998) == b"roend"
        assert file.size() == 4003
    assert state(tree) == before


def test_names_are_made_renamed_and_removed_above_alone(tree: Path) -> None:
    before = state(tree)
    files = OverlayFiles()
    files.make_directory(f"{tree}/new/deep")
    files.open(f"{tree}/new/deep/a", create=True).close()
    files.rename(f"{tree}/log/1", f"{tree}/log/2")
    files.remove(f"{tree}/log/0")
    assert files.names(str(tree)) == ["config", "log", "new"]
    assert files.names(f"{tree}/log") == ["2"]
    assert files.names(f"{tree}/new/deep") == ["a"]
    with closing(files.open(f"{tree}/log/2")) as file:
        assert file.pread(9, 0) == b"one"
    assert not files.exists(f"{tree}/log/0")
    with pytest.raises(FileNotFoundError):
        files.open(f"{tree}/log/0")
    files.open(f"{tree}/log/0", create=True).close()
    with closing(files.open(f"{tree}/log/0")) as file:
        assert file.size() == 0, "made anew, it is not the old one"
    assert state(tree) == before


def test_a_directory_goes_only_when_it_is_empty_and_comes_back_empty(tree: Path) -> None:
    files = OverlayFiles()
    with pytest.raises(OSError, match=os.strerror(errno.ENOTEMPTY)):
        files.remove(f"{tree}/log")
    for name in ("0", "1"):
        files.remove(f"{tree}/log/{name}")
    files.remove(f"{tree}/log")
    assert not files.exists(f"{tree}/log")
    files.make_directory(f"{tree}/log")
    assert files.names(f"{tree}/log") == []
    with pytest.raises(IsADirectoryError):
        files.open(f"{tree}/log")


def test_a_directory_below_is_no_file(tree: Path) -> None:
    files = OverlayFiles()
    for path in (f"{tree}/log", str(tree)):
        with pytest.raises(IsADirectoryError):
            files.open(path)
    assert files.names(f"{tree}/log") == ["0", "1"]


def test_a_store_whose_index_is_still_empty_is_opened_above(tmp_path: Path) -> None:
    """A slave may have to stand in before it has written one key."""
    config = StoreConfig(root=str(tmp_path), commit_log_file_bytes=1 << 20)
    Store.open(config).close()
    for name in ("index", "consumequeue", "config"):
        (tmp_path / name).mkdir(exist_ok=True)
    assert not list((tmp_path / "index").iterdir())
    Store.open(config, files=OverlayFiles()).close()


def test_tables_are_replaced_with_their_bak_in_memory(tree: Path) -> None:
    before = state(tree)
    files = OverlayFiles()
    path = f"{tree}/config/t.json"
    for number in range(5):
        replace_text(files, path, f'{{"a":{"x" * number}}}')
    assert read_text(files, path) == '{"a":xxxx}'
    assert load_text(files, path + ".bak", str) == '{"a":xxx}'
    assert files.names(f"{tree}/config") == ["t.json", "t.json.bak"]
    assert state(tree) == before


def test_a_view_shows_what_is_written_later_through_another_handle(tree: Path) -> None:
    files = OverlayFiles()
    with closing(files.open(f"{tree}/log/0")) as file:
        view = file.read_view()  # type: ignore[attr-defined]
    with closing(files.open(f"{tree}/log/0")) as file:
        file.pwrite(b"ZERO", 0)
    assert bytes(view[:8]) == b"ZEROzero"
    assert view.readonly
    assert (tree / "log" / "0").read_bytes()[:4] == b"zero"


def test_a_made_file_of_a_gib_takes_memory_only_where_it_is_touched(tmp_path: Path) -> None:
    files = OverlayFiles()
    before = anonymous_kib()
    for number in range(4):
        file = files.open(f"{tmp_path}/{number}", create=True)
        file.truncate(GIB)
        file.pwrite(b"first", 0)
        file.pwrite(b"last", GIB - 4)
        view = file.read_view()  # type: ignore[attr-defined]
        assert view[GIB // 2] == 0
        assert file.pread(4, GIB - 4) == b"last"
    assert anonymous_kib() - before < 1024
    assert list(tmp_path.iterdir()) == []


def test_a_written_byte_copies_one_page_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as raw:
        raw.truncate(GIB)
    files = OverlayFiles()
    before = anonymous_kib()
    with closing(files.open(str(path))) as file:
        file.pwrite(b"x", GIB // 2)
        assert file.data_start(0) == GIB // 2
        assert file.data_start(GIB // 2 + 4096) is None
    assert anonymous_kib() - before < 1024
    assert path.stat().st_blocks == 0


def test_growing_keeps_the_content_and_cutting_forgets_it(tree: Path) -> None:
    files = OverlayFiles()
    with closing(files.open(f"{tree}/log/1")) as file:
        file.truncate(3 * MIB)
        assert file.pread(5, 0) == b"one\0\0"
        file.pwrite(b"tail", 2 * MIB)
        file.truncate(2)
        file.truncate(4)
        assert file.pread(10, 0) == b"on\0\0"
    assert (tree / "log" / "1").read_bytes() == b"one"


def test_a_file_that_was_only_read_is_forgotten_and_one_that_was_written_is_not(
    tree: Path,
) -> None:
    files = OverlayFiles()
    with closing(files.open(f"{tree}/log/0")) as file:
        file.pread(10, 0)
    (tree / "log" / "0").write_bytes(b"other")  # nobody does that; it shows who reads from where
    with closing(files.open(f"{tree}/log/0")) as file:
        assert file.pread(10, 0) == b"other"
        file.pwrite(b"O", 0)
    (tree / "log" / "0").unlink()
    with closing(files.open(f"{tree}/log/0")) as file:
        assert file.pread(10, 0) == b"Other"


def test_nobody_is_locked_out_and_no_lock_file_appears(tree: Path) -> None:
    before = state(tree)
    files = OverlayFiles()
    first, second = files.lock(f"{tree}/lock"), files.lock(f"{tree}/lock")
    first()
    second()
    assert state(tree) == before


def test_times_of_change_are_those_below_until_a_file_is_written(tree: Path) -> None:
    os.utime(tree / "log" / "0", (1000, 1000))
    files = OverlayFiles()
    path = f"{tree}/log/0"
    assert files.modified_ms(path) == 1_000_000
    with closing(files.open(path)) as file:
        file.pwrite(b"x", 0)
    assert files.modified_ms(path) > 1_000_000
    with pytest.raises(FileNotFoundError):
        files.modified_ms(f"{tree}/log/none")


def test_the_disk_below_is_asked_for_its_room_also_for_a_directory_that_was_made(
    tree: Path,
) -> None:
    files = OverlayFiles()
    files.make_directory(f"{tree}/a/b")
    assert files.usage(f"{tree}/a/b")[0] == READ_ONLY_FILES.usage(str(tree))[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda files, root: files.open(f"{root}/new", create=True),
        lambda files, root: files.make_directory(f"{root}/new"),
        lambda files, root: files.remove(f"{root}/log/0"),
        lambda files, root: files.rename(f"{root}/log/0", f"{root}/log/9"),
        lambda files, root: files.sync_directory(str(root)),
        lambda files, root: files.lock(f"{root}/lock"),
        lambda files, root: files.open(f"{root}/log/0").pwrite(b"x", 0),
        lambda files, root: files.open(f"{root}/log/0").truncate(0),
    ],
    ids=["create", "directory", "remove", "rename", "sync", "lock", "write", "truncate"],
)
def test_the_way_under_an_overlay_changes_nothing_even_when_asked(
    tree: Path, change: Callable[[Files, Path], object]
) -> None:
    before = state(tree)
    with pytest.raises(OSError):  # noqa: PT011 - EROFS of ours, EBADF or EINVAL of the system
        change(READ_ONLY_FILES, tree)
    assert state(tree) == before


# --- against a model


def operations(rng: random.Random) -> Iterator[Callable[[Files], object]]:
    """Things to do with any file port, each drawn anew."""
    paths = [f"/r/{directory}/{name}" for directory in "ab" for name in "123"]
    while True:
        path, other = rng.choice(paths), rng.choice("123")
        offset, size = rng.randrange(9000), rng.randrange(1, 6000)
        data = rng.randbytes(size)
        create = rng.random() < 0.5
        kind = rng.choice(["write", "write", "read", "cut", "remove", "rename", "names", "data"])
        if kind == "write":
            yield lambda f, p=path, o=offset, d=data, c=create: work_on(
                f, p, c, lambda file: file.pwrite(d, o)
            )
        elif kind == "read":
            yield lambda f, p=path, o=offset, s=size: work_on(
                f, p, False, lambda file: (file.pread(s, o), file.size(), bytes(file.read_view()))
            )
        elif kind == "cut":
            yield lambda f, p=path, s=size, c=create: work_on(
                f, p, c, lambda file: file.truncate(s)
            )
        elif kind == "remove":
            yield lambda f, p=path: f.remove(p)
        elif kind == "rename":
            yield lambda f, p=path, n=other: f.rename(p, p[:-1] + n) if p[-1] != n else None
        elif kind == "names":
            yield lambda f, p=path: (f.names(p[:4]), f.exists(p), f.names("/r"))
        else:
            yield lambda f, p=path, o=offset: work_on(f, p, False, lambda file: data_holds(file, o))


def work_on(files: Files, path: str, create: bool, work: Callable[..., object]) -> object:
    with closing(files.open(path, create=create)) as file:
        return work(file)


def data_holds(file: object, offset: int) -> bool:
    """Whether `data_start` leaves out zeros only."""
    start = file.data_start(offset)  # type: ignore[attr-defined]
    size = file.size()  # type: ignore[attr-defined]
    stop = size if start is None else start
    return not any(file.pread(max(0, stop - offset), offset))  # type: ignore[attr-defined]


def outcome(files: Files, work: Callable[[Files], object]) -> object:
    try:
        return work(files)
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("seed", range(40))
def test_an_overlay_behaves_as_the_files_themselves_would(seed: int) -> None:
    rng = random.Random(seed)
    model, base = CrashableFiles(), CrashableFiles()
    for files in (model, base):
        for number, path in enumerate(["/r/a/1", "/r/a/2", "/r/b/1"]):
            files.put(path, random.Random(number).randbytes(5000) + bytes(3000))
    before = {path: base.content(path) for path in ("/r/a/1", "/r/a/2", "/r/b/1")}
    overlay = OverlayFiles(base)
    todo = operations(rng)
    for _ in range(120):
        work = next(todo)
        assert outcome(overlay, work) == outcome(model, work)
    assert {path: base.content(path) for path in before} == before
    assert base.names("/r/a") == ["1", "2"]


def test_maps_of_a_forgotten_file_are_given_back(tmp_path: Path) -> None:
    files = OverlayFiles()
    for number in range(200):  # 200 GiB of address space, were they kept
        path = f"{tmp_path}/{number}"
        with closing(files.open(path, create=True)) as file:
            file.truncate(GIB)
            file.pwrite(b"x" * mmap.PAGESIZE, 0)
        files.remove(path)
    with suppress(FileNotFoundError):
        files.remove(f"{tmp_path}/0")
    maps = Path("/proc/self/maps").read_text().splitlines()
    sizes = [int(e, 16) - int(s, 16) for s, e in (m.split()[0].split("-") for m in maps)]
    assert sum(size >= GIB for size in sizes) < 20
