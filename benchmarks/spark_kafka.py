"""The same rows through Kafka and Spark's own connector, for `spark_read.py --kafka`.

One Kafka broker (KRaft, loopback), four partitions, the user's three properties as headers, the tag
as key. Jars come from Maven Central by `mvn` and are kept in the user's cache directory. Where the
connector's token provider cannot be had, the classes in `kafka/` stand in for it: without
authentication the real ones do nothing either.
"""

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluicemq.spark.jvm import make_cache_directory

KAFKA = "org.apache.kafka:kafka_2.13:4.3.1"
CONNECTOR = "org.apache.spark:spark-sql-kafka-0-10_2.13:4.2.0"
# What the connector needs when its own list of dependencies cannot be resolved.
CONNECTOR_PARTS = (
    "org.apache.commons:commons-pool2:2.12.0",
    "org.apache.kafka:kafka-clients:3.9.1",
)
STAND_IN = Path(__file__).parent / "kafka"
TOPIC = "bench"


class MissingError(Exception):
    """Why there is no comparison."""


def start(directory: Path) -> "Kafka | str":
    """A running broker, or the reason why there is none."""
    try:
        require("mvn", "java", "javac")
        cache = make_cache_directory() / "bench-kafka"
        broker_jars = fetch(cache / "broker", KAFKA)
        return Kafka(directory / "kafka", broker_jars, connector(cache))
    except MissingError as reason:
        return str(reason)


def require(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            raise MissingError(f"{tool} is not on the PATH")


def fetch(directory: Path, *artifacts: str, alone: str | None = None) -> str:
    """The jars of artifacts with what they need, as a class path; `alone` without its needs."""
    libraries = directory / "lib"
    if not libraries.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "pom.xml").write_text(pom(artifacts, alone))
        command = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime",
                   f"-DoutputDirectory={libraries}"]  # fmt: skip
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(libraries, ignore_errors=True)
            raise MissingError(f"mvn cannot resolve {', '.join(artifacts)}")
    return os.pathsep.join(sorted(str(path) for path in libraries.glob("*.jar")))


def pom(artifacts: tuple[str, ...], alone: str | None) -> str:
    def dependency(artifact: str, exclusions: str = "") -> str:
        group, name, version = artifact.split(":")
        return (
            f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
            f"<version>{version}</version>{exclusions}</dependency>"
        )

    nothing_else = (
        "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion>"
        "</exclusions>"
    )
    listed = "".join(map(dependency, artifacts))
    if alone is not None:
        listed += dependency(alone, nothing_else)
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>sluicemq</groupId><artifactId>bench</artifactId><version>1</version>"
        f"<dependencies>{listed}</dependencies></project>"
    )


def connector(cache: Path) -> str:
    """Spark's Kafka connector as a list of jars for `spark.jars`."""
    try:
        jars = fetch(cache / "connector", CONNECTOR)
    except MissingError:
        jars = fetch(cache / "connector-parts", *CONNECTOR_PARTS, alone=CONNECTOR)
        jars = os.pathsep.join((jars, stand_in(cache)))
    return ",".join(jars.split(os.pathsep))


def stand_in(cache: Path) -> str:
    """Compiles the stand-in against the jars of pyspark."""
    import pyspark

    jar = cache / "token-stand-in.jar"
    if not jar.exists():
        classes = cache / "classes"
        sources = [str(path) for path in sorted(STAND_IN.glob("*.java"))]
        jars = str(Path(pyspark.__file__).parent / "jars" / "*")
        subprocess.run(["javac", "-cp", jars, "-d", str(classes), *sources], check=True)
        subprocess.run(["jar", "cf", str(jar), "-C", str(classes), "."], check=True)
    return str(jar)


class Kafka:
    """One broker in a process of its own."""

    def __init__(self, directory: Path, jars: str, connector_jars: str) -> None:
        self.connector_jars = connector_jars
        port, controller = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        directory.mkdir()
        config = directory / "server.properties"
        config.write_text(
            "process.roles=broker,controller\nnode.id=1\n"
            f"controller.quorum.bootstrap.servers=127.0.0.1:{controller}\n"
            f"listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}\n"
            "controller.listener.names=CONTROLLER\nnum.partitions=4\n"
            "offsets.topic.replication.factor=1\nshare.coordinator.state.topic.min.isr=1\n"
            f"log.dirs={directory / 'logs'}\n"
        )
        java = ["java", "-Xmx1g", "-cp", jars]
        subprocess.run(
            [*java, "kafka.tools.StorageTool", "format", "--standalone", "-t",
             uuid.uuid4().hex[:22], "-c", str(config)],
            check=True, capture_output=True,
        )  # fmt: skip
        log = (directory / "kafka.log").open("w")
        self.process = subprocess.Popen([*java, "kafka.Kafka", str(config)], stdout=log, stderr=log)
        self._await(port)

    def _await(self, port: int) -> None:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            if self.process.poll() is not None:
                break
            time.sleep(0.2)
        raise MissingError("the Kafka broker did not start")

    def publish(self, frame: Any) -> None:
        """Writes the rows of our own topic: body, tag as key, the user's properties as headers."""
        entries = "map_entries(map_filter(properties, (k, v) -> k in ('region', 'price', 'kind')))"
        headers = (
            f"transform({entries}, e -> struct(e.key as key, cast(e.value as binary) as value))"
        )
        rows = frame.selectExpr(
            "body as value", "tags as key", "queue_id as partition", f"{headers} as headers"
        )
        writer = rows.write.format("kafka").option("kafka.bootstrap.servers", self.address)
        writer.option("topic", TOPIC).option("includeHeaders", "true").save()

    def frame(self, spark: Any) -> Any:
        reader = spark.read.format("kafka").option("kafka.bootstrap.servers", self.address)
        return reader.option("subscribe", TOPIC).option("includeHeaders", "true").load()

    def stream(self, spark: Any) -> Any:
        reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", self.address)
        reader = reader.option("subscribe", TOPIC).option("startingOffsets", "earliest")
        return reader.option("includeHeaders", "true").load()

    def measure(
        self, spark: Any, measure: Callable[..., dict[str, Any]], messages: int, hits: int
    ) -> dict[str, dict[str, Any]]:
        """Times of all rows, and of the 1 % whose key Spark has to look for."""
        frame = self.frame(spark)
        return {
            "kafka": measure(frame, messages, "value"),
            "kafka, key 1 %": measure(frame.where("cast(key as string) = 'hit'"), hits, "value"),
        }

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
