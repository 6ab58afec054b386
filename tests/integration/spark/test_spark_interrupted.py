"""Ctrl-C while Spark starts: one line, and no JVM is left behind."""

import shutil
from pathlib import Path

import pytest

from interrupting import interrupted

PIPELINE = """
name: copied
cluster: {nameServers: "127.0.0.1:1"}
source: {topic: t}
transform: select body from source
sinks: [{kind: parquet, path: out}]
"""
JAVA = """#!/bin/sh
case "$*" in *pyspark-shell*) kill -INT $PPID;; esac
exec {java} "$@"
"""


@pytest.mark.parametrize("words", [["sql", "select 1"], ["pipeline", "run", "copied.yaml"]])
@pytest.mark.parametrize("module", ["pyspark.sql", "the start of Java"])
def test_ctrl_c_while_spark_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], module: str
) -> None:
    (tmp_path / "copied.yaml").write_text(PIPELINE)
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(JAVA.format(java=shutil.which("java")))
    java.chmod(0o755)
    if module == "the start of Java":
        monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    told = interrupted(tmp_path, module, *words)  # and waits for all that write to its stderr
    assert told.returncode == 130
    assert "sluice: interrupted.\n" in told.stderr  # Java writes there too, in between
    assert "Traceback" not in told.stderr
