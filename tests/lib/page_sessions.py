"""Run the commands and programs of a page of the documentation as its reader would.

A page takes part with a comment `<!-- session: NAME -->`. Pages with the same name share a
directory and running servers, in the order of the site's navigation. Blocks are used in order:

- A block whose first line is a comment with a file name (`# consumer.py`) is saved under that name.
- In a block of the language `console`, lines that begin with `$ ` are commands, and the lines below
  one are its output. `cd` holds for the later commands of its terminal. At a line `^C` the reader
  presses Ctrl-C.
- `<!-- terminal: NAME -->` before a console block says in which terminal its commands run. With
  `, keeps running` the last command may go on: a later block of that terminal has its next output.
- `<!-- exit: N -->` before a block is the exit code of its last command, instead of 0.
- `<!-- not run: reason -->` leaves a block out.

Output is compared line by line. In an expected line, `…` stands for any text; alone on a line it
stands for any number of lines. A time stands for any time. A message id stands for any id, and a
later command that contains it gets the id that was printed.
Ports of the page are replaced by free ones in commands and files, and back in the output.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from fences import ROOT, Fence, fences, session_of
from sluicemq.cli.servers.ports import free_ports
from waiting import limit

SHOWN_PORTS: Final = (9876, 10911, 10909, 10912, 8081, 5557, 2379)
"""The ports that pages name; a session has a free one for each."""
COMMAND_S: Final = 30.0
"""A command without `keeps running` may take this long, and each awaited output."""

_FILE_NAME: Final = re.compile(r"(?:#|//|--) ([\w./-]+\.\w+)\n")
_ID: Final = r"\b[0-9A-F]{24,32}\b"
_TIME: Final = r"\b\d{4}-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\+\d\d:\d\d|Z)?"
_VARIABLE: Final = re.compile(f"(…|{_ID}|{_TIME})")


class PageError(AssertionError):
    """A page says something else than what happens. The text names the page and the line."""


def file_name_of(block: Fence) -> str | None:
    """Return the name in the first line of a block, if the block is a whole file."""
    named = _FILE_NAME.match(block.text)
    return named[1] if named and block.language != "console" else None


def list_sessions() -> dict[str, list[Path]]:
    """Return the pages of each session, in the order of the site's navigation."""
    docs = ROOT / "docs"
    entries = re.findall(
        r"[\w./*-]+\.md", (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    )

    def find_place(page: Path) -> tuple[int, str]:
        """Return the index of the page's entry: that with its name, else a pattern for it."""
        name = str(page.relative_to(docs))
        if name in entries:
            return entries.index(name), name
        return next(n for n, entry in enumerate(entries) if fnmatch(name, entry)), name

    sessions: dict[str, list[Path]] = {}
    for page in docs.rglob("*.md"):
        if name := session_of(page):
            sessions.setdefault(name, []).append(page)
    for pages in sessions.values():
        pages.sort(key=find_place)
    return sessions


def uses_spark(pages: list[Path]) -> bool:
    """Return whether the programs of a session use Spark, so that they need a JVM and a minute."""
    return any("sluicemq.spark" in page.read_text() for page in pages)


def share_of_sessions(part: int, parts: int) -> list[str]:
    """Return the names of every `parts`-th session without Spark, beginning with number `part`.

    Test files with a part each run at the same time.
    """
    names = [name for name, pages in sorted(list_sessions().items()) if not uses_spark(pages)]
    return names[part::parts]


def compare(
    expected: list[str], actual: list[str], *, may_go_on: bool = False
) -> tuple[str, dict[str, str]]:
    """Return what differs between expected lines and printed ones, and the printed message ids.

    The difference is "" if there is none; with `may_go_on` more lines may follow. The keys of the
    ids are those that the page shows at the same places.
    """
    pattern = []
    shown_ids = []
    for line in expected:
        if line.strip() == "…":
            pattern.append(r"(?:[^\n]*\n)*?")
            continue
        for part in _VARIABLE.split(line.rstrip()):
            if part == "…":
                pattern.append(r"[^\n]*?")
            elif re.fullmatch(_ID, part):
                pattern.append(f"({_ID})")
                shown_ids.append(part)
            elif re.fullmatch(_TIME, part):
                pattern.append(_TIME)
            else:
                pattern.append(re.escape(part))
        pattern.append(r"[ ]*\n")
    if not may_go_on:
        pattern.append(r"\Z")
    match = re.match("".join(pattern), "".join(line + "\n" for line in actual))
    if match:
        return "", dict(zip(shown_ids, match.groups(), strict=True))
    shown = "\n  ".join(["the page shows:", *expected])
    printed = "\n  ".join(["printed was:", *actual])
    return f"{shown}\n{printed}", {}


@dataclass
class Process:
    """A command that was started. `lines` are what it has printed, also to stderr."""

    command: str
    popen: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)
    compared: int = 0
    """The number of lines that an earlier block has shown."""

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            # The tests start Java with options that make it start faster.
            if not line.startswith("NOTE: Picked up JDK_JAVA_OPTIONS"):
                self.lines.append(line.rstrip("\n"))

    def wait(self, seconds: float) -> int:
        """Wait for the end, and for its last output. Raises subprocess.TimeoutExpired."""
        code = self.popen.wait(seconds)
        self._reader.join(seconds)
        return code

    def interrupt(self) -> None:
        """Send SIGINT to the command and its children, as Ctrl-C does."""
        os.killpg(self.popen.pid, signal.SIGINT)

    def kill(self) -> None:
        """End the command and its children, and close its output."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()


class Session:
    """A reader's computer: a directory with the files of the pages, and terminals."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "work"
        self.directory.mkdir()
        shutil.copytree(ROOT / "examples", self.directory / "examples")
        self._tools = directory / "bin"
        self._tools.mkdir()
        self.ports = dict(zip(SHOWN_PORTS, free_ports(len(SHOWN_PORTS)), strict=True))
        self.ports[10921] = self.ports[10911] + 10  # the second of several brokers
        self._terminals: dict[str, Process] = {}
        self._processes: list[Process] = []
        self._directories: dict[str, Path] = {}
        """The current directory of each terminal in which `cd` was used."""
        self._ids: dict[str, str] = {}
        """The ids of this run by those that the page shows."""
        self._write_tools()

    def _write_tools(self) -> None:
        """Write the commands `sluice`, `python` and `pip` of the reader's virtual environment."""
        shown = {"nameserver": 9876, "broker": 10911, "proxy": 8081, "metrics": 5557}
        ports = {name: self.ports[port] for name, port in shown.items()}
        sluice = f"""#!{sys.executable}
import sys
from sluicemq.cli import main
words = sys.argv[1:]
if words[:1] == ["up"]:
    for name, port in {ports!r}.items():
        if f"--{{name}}-port" not in words and not (name == "proxy" and "--no-proxy" in words):
            words += [f"--{{name}}-port", str(port)]
sys.argv[1:] = words
main(prog_name="sluice")
"""
        scripts = {
            "sluice": sluice,
            "python": f'#!/bin/sh\nexec {sys.executable} "$@"\n',
            "pip": "#!/bin/sh\nexit 0\n",
        }
        for name, text in scripts.items():
            path = self._tools / name
            path.write_text(text)
            path.chmod(0o755)

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if "SLUICE" not in name}
        return kept | {
            "PATH": f"{self._tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONUNBUFFERED": "1",
            "NAMESRV_ADDR": f"127.0.0.1:{self.ports[9876]}",
            "COLUMNS": "100",
            "NO_COLOR": "1",
        }

    def _to_real(self, text: str) -> str:
        text = re.sub(_ID, lambda shown: self._ids.get(shown[0], shown[0]), text)
        return re.sub(r"\b(\d{4,5})\b", lambda n: str(self.ports.get(int(n[0]), n[0])), text)

    def _to_shown(self, text: str) -> str:
        shown = {real: port for port, real in self.ports.items()}
        return re.sub(r"\b(\d{4,5})\b", lambda n: str(shown.get(int(n[0]), n[0])), text)

    def use(self, block: Fence) -> None:
        """Save the file of a block, or run its commands. Raises PageError if the output differs."""
        if block.reason:
            return
        file_name = file_name_of(block)
        if file_name is not None:
            path = self.directory / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._to_real(block.text))
        elif block.language == "console":
            self._use_console(block)

    def _use_console(self, block: Fence) -> None:
        terminal, _, mode = block.options.get("terminal", "main").partition(", ")
        entries = _split_console(block.text)
        for number, (command, output) in enumerate(entries):
            is_last = number == len(entries) - 1
            is_interrupted = "^C" in output
            expected = output[: output.index("^C")] if is_interrupted else output
            if command is not None and command.startswith("cd "):
                here = self._directories.get(terminal, self.directory)
                self._directories[terminal] = here / command[3:]
                continue
            if command is not None:
                process = self._start(terminal, command)
            elif terminal in self._terminals:
                process = self._terminals[terminal]
            else:
                raise PageError(f"{block}: nothing runs in the terminal {terminal}")
            keeps_running = is_last and (mode == "keeps running" or is_interrupted)
            if keeps_running:
                self._await_output(block, process, expected)
            if is_interrupted:
                process.interrupt()
                expected = output[output.index("^C") + 1 :]
            if not keeps_running or is_interrupted:
                exit_code = int(block.options.get("exit", "0")) if is_last else 0
                self._await_end(block, process, expected, exit_code)

    def _start(self, terminal: str, command: str) -> Process:
        popen = subprocess.Popen(
            ["bash", "-c", self._to_real(command)],
            cwd=self._directories.get(terminal, self.directory), env=self._environment(),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        process = self._terminals[terminal] = Process(command, popen)
        self._processes.append(process)
        return process

    def _await_output(self, block: Fence, process: Process, expected: list[str]) -> None:
        """Wait until the next lines of a process are the expected ones."""
        end_s = time.monotonic() + limit(COMMAND_S)
        while True:
            has_ended = process.popen.poll() is not None
            new = [self._to_shown(line) for line in process.lines[process.compared :]]
            difference, ids = compare(expected, new, may_go_on=True)
            if not difference:
                self._ids |= ids
                process.compared += _count_used_lines(expected, new)
                return
            if has_ended or time.monotonic() > end_s:
                raise PageError(f"{block}: $ {process.command}\n{difference}")
            time.sleep(0.05)

    def _await_end(
        self,
        block: Fence,
        process: Process,
        expected: list[str],
        exit_code: int,
    ) -> None:
        """Wait for the end of a process, and compare its exit code and its output."""
        try:
            code = process.wait(limit(COMMAND_S))
        except subprocess.TimeoutExpired:
            printed = "\n".join(process.lines[-20:])
            raise PageError(f"{block}: $ {process.command}: does not end\n{printed}") from None
        new = [self._to_shown(line) for line in process.lines[process.compared :]]
        difference, ids = compare(expected, new)
        self._ids |= ids
        if code != exit_code:
            difference = f"exit code {code} instead of {exit_code}\n{difference}" + "\n".join(new)
        if difference:
            raise PageError(f"{block}: $ {process.command}\n{difference}")

    def close(self) -> None:
        """End all commands that still run."""
        for process in self._processes:
            process.kill()


def _split_console(text: str) -> list[tuple[str | None, list[str]]]:
    """Split a console block into (command, lines of output); the command is None before the first.

    A command goes on in the next line after a backslash, or while a quote or here-document is open.
    """
    entries: list[tuple[str | None, list[str]]] = []
    lines = iter(text.splitlines())
    for line in lines:
        if line.startswith("$ "):
            command = line[2:]
            while command.endswith("\\"):
                command = command[:-1] + next(lines).lstrip("> ")
            entries.append((command, []))
        else:
            if not entries:
                entries.append((None, []))
            entries[-1][1].append(line)
    return entries


def _count_used_lines(expected: list[str], lines: list[str]) -> int:
    """Return the least number of lines that the expected ones match."""
    return next(
        number for number in range(len(lines) + 1) if not compare(expected, lines[:number])[0]
    )


def run_session(name: str, directory: Path) -> None:
    """Run all blocks of the pages of a session. Raises PageError at the first difference."""
    session = Session(directory)
    try:
        for page in list_sessions()[name]:
            for block in fences(page):
                session.use(block)
    finally:
        session.close()
