"""Test `sluice store`: its output, its exit codes, and that no command changes the store."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from sluicemq.cli import main
from sluicemq.cli.output import byte_progress
from waiting import limit

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "src"
GOLDEN = Path(__file__).parents[2] / "golden" / "store"
COMMANDS = {
    "info": [],
    "info as JSON": ["--json"],
    "ls": [],
    "ls -s": [],
    "verify": [],
    "dump": ["log", "queue", "index", "checkpoint", "config"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with tarfile.open(GOLDEN / "golden2.tar.gz") as tar:
        wanted = [m for m in tar.getmembers() if not m.name.endswith("timerwheel")]
        tar.extractall(tmp_path, wanted, filter="data")
        wheel = tar.extractfile("golden2/store/timerwheel")
        assert wheel is not None
        with (tmp_path / "golden2" / "store" / "timerwheel").open("wb") as file:  # 38 MB of holes
            while block := wheel.read(1 << 16):
                if block.strip(b"\0"):
                    file.write(block)
                else:
                    file.seek(len(block), 1)
            file.truncate(file.tell())
    return tmp_path / "golden2" / "store"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["store", *map(str, words)])


def lines(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code in (0, 1), result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def digest(root: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        state = path.stat()
        found.update(f"{path} {state.st_mode} {state.st_mtime_ns} {state.st_size}".encode())
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


def spoil(root: Path, at: int) -> None:
    path = root / "commitlog" / f"{0:020d}"
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("state", ["sound", "damaged", "interrupted"])
def test_no_command_changes_the_store(root: Path, name: str, state: str) -> None:
    if state == "damaged":
        spoil(root, 100)
    if state == "interrupted":
        (root / "abort").write_text("1")
    for path in root.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = digest(root)
    command, *options = name.removesuffix(" as JSON").split()
    result = run(command, root, *options, *COMMANDS[name])
    assert result.exit_code == (1 if name == "verify" and state == "damaged" else 0), result.output
    assert digest(root) == before
    for path in root.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def test_info_shows_the_state(root: Path) -> None:
    assert "stopped" in run("info", root).output
    (root / "abort").write_text("1")
    assert "was not stopped in order" in run("info", root).output
    (found,) = lines(run("info", root, "--json"))
    assert found["log"]["files"] == 2
    assert found["index"]["entries"] == 17
    assert found["queues"]["extensions"] == 7


def test_info_shows_the_process_that_locks_the_store(root: Path) -> None:
    code = (
        "import sys\nfrom sluicemq.files import SYSTEM_FILES\n"
        f"release = SYSTEM_FILES.lock({str(root / 'lock')!r})\n"
        "print('locked', flush=True)\nsys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        assert f"in use by process {holder.pid}" in run("info", root).output
    finally:
        holder.communicate(timeout=limit(20))


def test_ls_lists_queues_or_a_summary_of_topics(root: Path) -> None:
    queues = lines(run("ls", root, "-t", "TopicA", "--json"))
    assert [queue["queue_id"] for queue in queues] == [0, 1, 2, 3]
    assert queues[0]["offset_max"] == queues[0]["messages"] == 4
    topics = {line["topic"]: line for line in lines(run("ls", root, "-s", "--json"))}
    assert topics["TopicA"]["messages"] == sum(queue["messages"] for queue in queues)
    assert "No queues of X." in run("ls", root, "-t", "X").output


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (["-t", "TopicA"], 12),
        (["-t", "TopicA", "-q", "0", "--offsets", "1:2"], 2),
        (["-t", "TopicA", "-q", "0", "--offsets", "3:"], 1),
        (["-t", "TopicA", "-q", "0", "--offsets", "2"], 1),
        (["-t", "TopicA", "--tags", "TagD || Nothing"], 1),
        (["-t", "TopicA", "--tags", "*"], 12),
        (["--where", "a = '10' AND TAGS = 'TagA'"], 1),
        (["--key", "k2"], 1),
        (["--since", "1795226627285"], 1),
        (["--until", "1795226617151"], 1),
        (["--until", "2013-01-01T00:00"], 0),
        (["--limit", "3"], 3),
    ],
)
def test_dump_prints_the_selected_messages(root: Path, options: list[str], count: int) -> None:
    found = lines(run("dump", root, *options))
    assert len(found) == count
    assert all(line["kind"] == "message" for line in found)


def test_dump_of_queues_selects_by_tags_keys_and_times(root: Path) -> None:
    tagged = lines(run("dump", root, "queue", "-t", "TopicA", "--tags", "TagD"))
    assert [(line["queue_id"], line["offset"]) for line in tagged] == [(2, 2)]
    assert tagged[0]["extension"]["bitmap"] is not None
    (light,) = lines(run("dump", root, "queue", "-t", "%LMQ%q1"))
    assert "extension_address" not in light
    assert len(lines(run("dump", root, "queue", "--key", "k1"))) == 1
    assert len(lines(run("dump", root, "queue", "--since", "1795226627285"))) == 1
    entries = lines(run("dump", root, "index", "-t", "TopicA", "--key", "k2"))
    assert [line.get("position") for line in entries] == [None, 0]


def test_dump_continues_after_damage_and_reports_it(root: Path) -> None:
    sound = lines(run("dump", root))
    spoil(root, sound[2]["position"])
    found = lines(run("dump", root))
    assert [line["kind"] for line in found[:4]] == ["message", "message", "damage", "message"]
    assert found[3:] == sound[3:]
    assert (found[2]["position"], found[2]["end"]) == (sound[2]["position"], sound[3]["position"])


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--offsets", "x"], 2, "not a range"),
        (["--since", "yesterday"], 2, "not a time"),
        (["--tags", "a", "--where", "a = 1"], 2, "--tags and --where"),
        (["--where", "a ="], 1, "a ="),
        (["--where", "a = 1 b"], 1, "not valid at character 7"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    root: Path, options: list[str], code: int, text: str
) -> None:
    result = run("dump", root, *options)
    assert result.exit_code == code
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_verify_reports_a_directory_that_cannot_be_a_topic(root: Path) -> None:
    """The name of the directory is not UTF-8, as all topic names are. A broker ignores it."""
    directory = os.fsencode(root / "consumequeue") + b"/\xff/0"
    os.makedirs(directory)  # noqa: PTH103 - no text
    with open(directory + b"/" + b"0" * 20, "wb") as file:  # noqa: PTH123
        file.write(bytes(200))
    found = run("verify", root)
    assert found.exit_code == 1, found.exception
    assert "error: consumequeue/\\udcff/0/" in found.output
    (error, _) = lines(run("verify", "--json", root))
    assert error["place"].startswith("consumequeue/\\udcff/0/")


def test_the_exit_code_of_verify_depends_on_its_findings(root: Path, tmp_path: Path) -> None:
    result = run("verify", root)
    assert (result.exit_code, "no errors" in result.output) == (0, True)
    spoil(root, 89)
    result = run("verify", root)
    assert result.exit_code == 1
    assert re.search(r"^error: commitlog 0: .*CRC", result.output, re.MULTILINE)
    found = lines(run("verify", root, "--json"))
    assert found[-1]["severity"] == "summary"
    assert not found[-1]["clean"]
    assert {line["kind"] for line in found[:-1]} >= {"record-crc"}
    result = run("verify", tmp_path / "nothing")
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert "does not exist" in result.stderr


@pytest.mark.parametrize("command", ["info", "ls", "dump", "verify"])
def test_log_and_queues_may_be_in_other_directories(
    root: Path, tmp_path: Path, command: str
) -> None:
    first, second, queues = tmp_path / "a", tmp_path / "b", tmp_path / "queues"
    expected = run(command, root, "--json" if command != "dump" else "log").stdout
    for path, name in ((first, f"{0:020d}"), (second, f"{16384:020d}")):
        path.mkdir()
        shutil.move(root / "commitlog" / name, path / name)
    shutil.move(root / "consumequeue", queues)
    elsewhere = ["--commit-log", f"{first},{second}", "--consume-queue", queues]
    result = run(command, root, *elsewhere, "--json" if command != "dump" else "log")
    assert result.exit_code == 0, result.output
    if command == "info":
        assert json.loads(result.stdout)["queues"] == json.loads(expected)["queues"]
    else:
        assert result.stdout == expected


def test_a_pipe_that_closes_early_is_not_an_error(root: Path) -> None:
    result = subprocess.run(
        f"{sys.executable} -m sluicemq store dump {root} log queue config | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=limit(60),
        check=True,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
    )
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""


def test_an_os_error_of_a_reader_is_one_sentence(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(root))

    monkeypatch.setattr("sluicemq.files.SystemFiles.names", refuse)
    for command, code in (("info", 1), ("ls", 1), ("dump", 1), ("verify", 2)):
        result = run(command, root)
        assert result.exit_code == code
        assert f"{root} cannot be read: Permission denied." in result.stderr


class SteppingClock:
    """A clock that advances by one second at each reading."""

    now_s = 0.0

    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        self.now_s += 1
        return self.now_s


def test_progress_is_shown_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with byte_progress("verifying", clock=SteppingClock()) as progress:
        progress(1 << 20, 1 << 21)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with byte_progress("verifying", clock=SteppingClock()) as progress:
        for done in range(1 << 18, (1 << 21) + 1, 1 << 18):
            progress(done, 1 << 21)
    assert "verifying" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["verify", "repair", "backup"])
def test_ctrl_c_prints_how_many_bytes_were_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    def walk(_first: object, second: object = None, *_: object, **named: Any) -> None:
        progress = named.get("progress", second)
        progress(1_000, 5_000)
        raise KeyboardInterrupt

    name = {"backup": "back_up"}.get(word, word)
    monkeypatch.setattr(f"sluicemq.store.tools.{word}.{name}", walk)
    more = [str(tmp_path / "backup")] if word == "backup" else []
    result = run(word, root, *more)
    assert result.exit_code == 130
    what = {"verify": "verifying", "repair": "reading the log", "backup": "reading the log"}[word]
    assert result.stderr == f"sluice: interrupted: {what}: 1,000 of 5,000 bytes.\n"


# --- backup and restore


def test_a_store_of_rocketmq_is_backed_up_and_restored(root: Path, tmp_path: Path) -> None:
    before = digest(root)
    (first,) = lines(run("backup", root, tmp_path / "backup", "--json"))
    assert first["end"] == first["new_bytes"] + first["start"] > 0
    (second,) = lines(run("backup", root, tmp_path / "backup", "--json"))
    assert (second["end"], second["new_bytes"], second["moments"]) == (first["end"], 0, 1)
    assert digest(root) == before
    result = run("restore", tmp_path / "backup", tmp_path / "new")
    assert f"to {first['end']:,}" in result.output
    (*_, verdict) = lines(run("verify", tmp_path / "new", "--json"))
    (*_, original) = lines(run("verify", root, "--json"))
    assert verdict["clean"]
    assert verdict["records"] == original["records"]
    assert "is not empty" in run("restore", tmp_path / "backup", tmp_path / "new").stderr
    place = first["end"] // 3
    (found,) = lines(
        run("restore", tmp_path / "backup", tmp_path / "half", "--at", place, "--json")
    )
    assert found["end"] <= place


def test_an_os_error_of_a_writer_is_one_sentence(tmp_path: Path) -> None:
    result = run("backup", tmp_path, tmp_path / "backup")
    assert result.exit_code == 1
    assert "contains no commit log" in result.stderr
    assert "is not a backup" in run("restore", tmp_path, tmp_path / "new").stderr
