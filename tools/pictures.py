"""Draw the pictures of the documentation as SVG files: `python tools/pictures.py`.

Each picture is a function that places boxes, arrows and texts on a canvas. The files follow the color
scheme of the reader's system, because each contains a style sheet for light and dark. They have a
background of their own, so that they can be read on a page of either scheme.

`--check` writes nothing, and exits with 1 if a file differs from what would be written.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

DIRECTORY: Final = Path(__file__).parents[1] / "docs" / "images" / "pictures"
LINE_HEIGHT: Final = 18
STYLE: Final = """
svg { --back: #ffffff; --ink: #1f2328; --soft: #59636e; --line: #8c959f; --fill: #f6f8fa;
  --main: #ddf4ff; --main-line: #0969da; --good: #dafbe1; --good-line: #1a7f37;
  --bad: #ffebe9; --bad-line: #cf222e; --wait: #fff8c5; --wait-line: #9a6700; }
@media (prefers-color-scheme: dark) {
  svg { --back: #0d1117; --ink: #e6edf3; --soft: #9198a1; --line: #656c76; --fill: #151b23;
    --main: #12263f; --main-line: #4493f8; --good: #12261e; --good-line: #3fb950;
    --bad: #30171a; --bad-line: #f85149; --wait: #272115; --wait-line: #d29922; }
}
.back { fill: var(--back); }
text { font: 14px system-ui, "Segoe UI", "Noto Sans", sans-serif; fill: var(--ink); }
.bold { font-weight: 600; }
.soft { fill: var(--soft); font-size: 13px; }
.code { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 13px; }
.head { font-size: 16px; font-weight: 600; }
rect, path, line { stroke-width: 1.5; }
.plain { fill: var(--fill); stroke: var(--line); }
.main { fill: var(--main); stroke: var(--main-line); }
.good { fill: var(--good); stroke: var(--good-line); }
.bad { fill: var(--bad); stroke: var(--bad-line); }
.wait { fill: var(--wait); stroke: var(--wait-line); }
.frame { fill: none; stroke: var(--line); stroke-dasharray: 5 4; }
.arrow { fill: none; stroke: var(--soft); }
.arrow.good { fill: none; stroke: var(--good-line); }
.arrow.bad { fill: none; stroke: var(--bad-line); }
.arrow.main { fill: none; stroke: var(--main-line); }
.arrow.wait { fill: none; stroke: var(--wait-line); }
.dashed { stroke-dasharray: 5 4; }
.tip { fill: context-stroke; stroke: none; }
.rule { stroke: var(--line); stroke-width: 1; }
"""

Point = tuple[float, float]


@dataclass
class Picture:
    """A canvas of `width` x `height` units. `title` and `text` describe it to screen readers."""

    width: int
    height: int
    title: str
    text: str
    parts: list[str] = field(default_factory=list)

    def write(self, x: float, y: float, text: str, look: str = "", anchor: str = "middle") -> None:
        """Write one line of text with its baseline at `y`."""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{look}">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, look: str = "plain"
    ) -> None:
        """Draw a box with centered lines of text. The first one is bold."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{look}"/>'
        )
        baseline = y + height / 2 - (len(lines) - 1) * LINE_HEIGHT / 2 + 5
        for number, line in enumerate(lines):
            text_look = "soft" if number else "bold"
            self.write(x + width / 2, baseline + number * LINE_HEIGHT, line, text_look)

    def frame(self, x: float, y: float, width: float, height: float, title: str) -> None:
        """Draw a dashed frame around other parts, with its title at the upper left."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" class="frame"/>'
        )
        self.write(x + 12, y + 22, title, "bold", "start")

    def arrow(
        self,
        *points: Point,
        label: Sequence[str] = (),
        at: Point | None = None,
        anchor: str = "middle",
        look: str = "",
    ) -> None:
        """Draw a line through `points` that ends in an arrow, with lines of `label`.

        `at` is the baseline of the first line. By default the label is above the middle of the line.
        """
        path = " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="M{path}" class="arrow {look}" marker-end="url(#tip)"/>')
        if not label:
            return
        if at is None:
            (x0, y0), (x1, y1) = points[0], points[-1]
            at = ((x0 + x1) / 2, (y0 + y1) / 2 - 8 - (len(label) - 1) * LINE_HEIGHT)
        for number, line in enumerate(label):
            self.write(at[0], at[1] + number * LINE_HEIGHT, line, "soft", anchor)

    def line(self, x0: float, y0: float, x1: float, y1: float, look: str = "rule") -> None:
        """Draw a straight line without an arrow."""
        self.parts.append(f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" class="{look}"/>')

    def render(self) -> str:
        """Return the picture as the text of an SVG file."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
                f'width="{self.width}" height="{self.height}" role="img" '
                'aria-labelledby="title text">',
                f'<title id="title">{escape(self.title)}</title>',
                f'<desc id="text">{escape(self.text)}</desc>',
                f"<style>{STYLE}</style>",
                '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" '
                'markerHeight="8" orient="auto-start-reverse">'
                '<path d="M0 0 L10 5 L0 10 z" class="tip"/></marker></defs>',
                f'<rect class="back" width="{self.width}" height="{self.height}" rx="8"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def draw_message_route() -> Picture:
    """Draw how a message gets from its producer to two groups, with retries and dead letters."""
    picture = Picture(
        980,
        470,
        "The route of a message",
        "A producer asks the name server for the brokers of a topic and sends to a queue of one of "
        "them. Each group receives the messages that its filter matches. A rejected message is "
        "delivered again from the group's retry topic, and after 16 retries it goes to the group's "
        "dead-letter topic.",
    )
    picture.box(330, 20, 240, 54, "Name server", "knows the brokers of each topic")
    picture.box(20, 170, 150, 64, "Producer", "send(topic, body)")
    picture.frame(300, 120, 300, 330, "Broker")
    picture.box(320, 152, 260, 54, "Commit log", "every message, in order of arrival")
    for number in range(4):
        picture.box(320 + number * 66, 250, 60, 34)
        picture.write(350 + number * 66, 272, f"queue {number}", "soft")
    picture.write(450, 306, "topic orders", "soft")
    picture.box(320, 330, 260, 40, "%RETRY%billing", look="wait")
    picture.box(320, 396, 260, 40, "%DLQ%billing", look="bad")
    picture.box(780, 140, 180, 64, "Group mails", "where amount > 100", look="main")
    picture.box(780, 262, 180, 64, "Group billing", "all messages, 2 members", look="main")

    picture.arrow(
        (95, 170), (95, 47), (330, 47), label=["1  Which broker has orders?"], at=(212, 38)
    )
    picture.arrow((170, 194), (320, 180), label=["2  send"], at=(235, 176))
    picture.arrow((450, 206), (450, 250), label=["index"], at=(458, 234), anchor="start")
    picture.arrow((584, 258), (780, 172), label=["3  matches only"], at=(664, 196), look="main")
    picture.arrow((584, 272), (780, 284), label=["3  everything"], at=(692, 268), look="main")
    picture.arrow(
        (840, 326), (840, 346), (580, 346),
        label=["4  rejected: again after 10 s, 30 s, …"], at=(718, 338), look="wait",
    )  # fmt: skip
    picture.arrow((580, 362), (900, 362), (900, 326), look="wait")
    picture.arrow(
        (450, 370),
        (450, 396),
        label=["5  after 16 retries"],
        at=(458, 388),
        anchor="start",
        look="bad",
    )
    return picture


def draw_transaction() -> Picture:
    """Draw a transactional send whose producer dies before it can commit."""
    picture = Picture(
        980,
        520,
        "A transaction with a crash",
        "The producer stores a prepared message that no consumer can see, commits its database "
        "transaction, and dies before it commits the message. After check_after_s the broker asks "
        "a producer of the same group, which looks into the database and commits.",
    )
    columns = {"Producer": 150, "Database": 380, "Broker": 610, "Consumer": 850}
    for name, x in columns.items():
        picture.box(x - 75, 20, 150, 36, name, look="main" if name == "Broker" else "plain")
        picture.line(x, 56, x, 500)
    producer, database, broker, consumer = columns.values()

    def step(y: float, start: float, end: float, text: str, look: str = "") -> None:
        picture.arrow((start, y), (end, y), label=[text], at=((start + end) / 2, y - 8), look=look)

    step(96, producer, broker, "1  prepared message, invisible to consumers")
    step(132, producer, database, "2  INSERT order 17; COMMIT")
    picture.box(
        producer - 110,
        156,
        220,
        44,
        "The process dies here",
        "it never sends the commit",
        look="bad",
    )
    picture.box(
        broker + 14,
        150,
        180,
        96,
        "check_after_s",
        "the broker waits",
        "for the outcome",
        look="wait",
    )
    step(276, broker, producer, "3  check: was transaction 17 committed?", "wait")
    picture.write(20, 300, "another process of", "soft", "start")
    picture.write(20, 318, "the same group", "soft", "start")
    step(336, producer, database, "4  SELECT order 17: it is there")
    step(392, producer, broker, "5  commit", "good")
    step(448, broker, consumer, "6  message", "good")
    picture.write(
        490, 490, "If order 17 is missing, the answer is rollback, and no consumer sees the message.",
        "soft",
    )  # fmt: skip
    return picture


def draw_failover() -> Picture:
    """Draw the parts of a cluster that fails over, and what happens when a master is killed."""
    picture = Picture(
        980,
        560,
        "Failover: topology and timeline",
        "Two replicas of a broker hold leases in etcd. The clients find the master through a name "
        "server. When the master is killed, its lease ends after 3 seconds, the slave becomes "
        "master, and sends succeed again after 3.3 seconds in the median.",
    )
    picture.box(30, 110, 170, 64, "Clients", "retry within timeout_ms")
    picture.box(310, 20, 200, 54, "Name servers", "route: who is master")
    picture.box(310, 130, 200, 64, "Replica 1: master", "takes all writes", look="good")
    picture.box(310, 236, 200, 64, "Replica 2: slave", "forwards writes to replica 1", look="main")
    picture.box(720, 172, 220, 76, "etcd", "the record: master, in-sync set", "leases of 3 s")
    picture.arrow((115, 110), (115, 47), (310, 47), label=["route"], at=(210, 38))
    picture.arrow((200, 150), (310, 160), label=["send"], at=(254, 146))
    picture.arrow((410, 130), (410, 74), label=["register"], at=(420, 106), anchor="start")
    picture.arrow(
        (410, 194),
        (410, 236),
        label=["log, before it is acknowledged"],
        at=(420, 220),
        anchor="start",
    )
    picture.arrow((510, 156), (720, 196), label=["lease"], at=(622, 164))
    picture.arrow((510, 274), (720, 228), label=["lease"], at=(622, 274))

    picture.write(30, 350, "The master is killed", "head", "start")
    axis = 470
    picture.line(60, axis, 940, axis)
    events: list[tuple[float, str, tuple[str, ...], str]] = [
        (60, "0 s", ("kill -9 of replica 1", "sends fail and are retried"), "bad"),
        (330, "3 s", ("its lease ends (at once if", "its connections break)"), "wait"),
        (540, "3.2 s", ("replica 2 wins the election", "and registers as master"), "main"),
        (730, "3.3 s", ("the retried send", "is acknowledged"), "good"),
    ]
    for x, time, lines, look in events:
        picture.parts.append(f'<circle cx="{x}" cy="{axis}" r="7" class="{look}"/>')
        picture.write(x, axis + 28, time, "bold", "start" if x < 100 else "middle")
        for number, line in enumerate(lines):
            picture.write(
                x, axis - 18 - (len(lines) - 1 - number) * LINE_HEIGHT, line, "soft",
                "start" if x < 100 else "middle",
            )  # fmt: skip
    picture.arrow((800, axis), (940, axis))
    picture.write(876, axis - 18, "replica 1 returns", "soft")
    picture.write(876, axis + 28, "as a slave", "soft")
    picture.write(
        30, 540, "Median of 50 kills with our client: make bench-failover. "
        "Every acknowledged message is there afterwards.", "soft", "start",
    )  # fmt: skip
    return picture


def draw_predicates() -> Picture:
    """Draw who decides which predicate of a Spark query."""
    picture = Picture(
        980,
        430,
        "Which predicate is decided where",
        "The broker evaluates tags, keys and SQL92 on properties and sends only matches. The source "
        "leaves out queues and shortens ranges. Spark applies the whole condition to what arrives.",
    )
    picture.box(
        30,
        24,
        920,
        44,
        "load_where(spark, condition, …)   ·   sluice sql   ·   a pipeline's source",
        look="plain",
    )
    columns = [
        (30, "1  Planned by the source", "main", [
            ("queue_id = 3", "other queues are not read"),
            ("queue_offset >= 1200", "shorter range"),
            ("store_time > '2026-11-01'", "shorter range, by the time index"),
        ], "before anything is read"),
        (345, "2  Decided by the broker", "good", [
            ("tags = 'UA'", "tag codes of the queue"),
            ("keys = 'order-17'", "key index, and SQL92"),
            ("dep_delay > 60", "SQL92 on a property column"),
        ], "only matches cross the network"),
        (660, "3  Left to Spark", "wait", [
            ("length(body) > 100", "bodies are not parsed"),
            ("origin > 'J'", "Java and Spark order texts differently"),
            (".where(…) on a frame", "Spark does not tell the source"),
        ], "every other row is read"),
    ]  # fmt: skip
    for x, title, look, rows, below in columns:
        picture.box(x, 116, 290, 38, title, look=look)
        picture.arrow((x + 145, 68), (x + 145, 116))
        for number, (predicate, how) in enumerate(rows):
            y = 184 + number * 54
            picture.write(x + 10, y, predicate, "code", "start")
            picture.write(x + 10, y + 20, how, "soft", "start")
        picture.write(x + 10, 354, below, "bold", "start")
    picture.line(30, 376, 950, 376)
    picture.write(
        490,
        404,
        "Spark applies the whole condition again to what arrives, so a frame is never wrong.",
        "",
    )
    return picture


def draw_layers() -> Picture:
    """Draw the layers of the source tree: each one imports only from those below it."""
    picture = Picture(
        980,
        480,
        "The layers of SluiceMQ",
        "Commands and the console are on top of Spark, pipelines, proxy and mqadmin. Below them are "
        "client, broker and name server, then acl, net, store and filter, then record and wire, and "
        "at the bottom configuration, values and files. Imports go downwards only.",
    )
    rows: list[tuple[str, str, tuple[str, ...], str]] = [
        ("what users start", "commands and pages", ("cli", "console", "testing"), "main"),
        ("around the cluster", "use the layers below", ("spark", "pipelines", "proxy", "operate", "mqadmin", "rocketmq"), "plain"),
        ("the three parties", "no imports among them", ("client", "broker", "nameserver"), "good"),
        ("their parts", "a part imports no other part", ("acl", "net", "store", "filter"), "plain"),
        ("formats", "bytes stored and sent", ("record", "wire", "engine"), "wait"),
        ("the base", "values, settings, files, time", ("config", "model", "files", "clock", "errors"), "plain"),
    ]  # fmt: skip
    for number, (title, text, names, look) in enumerate(rows):
        y = 20 + number * 74
        picture.write(20, y + 24, title, "bold", "start")
        picture.write(20, y + 44, text, "soft", "start")
        width = (720 - (len(names) - 1) * 10) / len(names)
        for place, name in enumerate(names):
            picture.box(240 + place * (width + 10), y, width, 54, name, look=look)
        if number:
            picture.arrow((228, y - 22), (228, y + 2))
    return picture


def draw_life() -> Picture:
    """Draw the life of a message inside a broker, from its arrival to its delivery."""
    picture = Picture(
        980,
        400,
        "The life of a message in the broker",
        "A frame is decoded and handled without waiting. The record is appended in memory. At the "
        "end of the turn of the event loop, one write and one fsync serve all connections. Only "
        "then is the message visible, the producer is answered, and parked pulls are continued.",
    )
    steps: list[tuple[str, tuple[str, ...], str]] = [
        ("Receive", ("net: frames of a chunk,", "access control"), "plain"),
        ("Handle", ("broker/produce: topic,", "permission, limits"), "plain"),
        ("Append", ("store/writer: record and", "queue unit, in memory"), "wait"),
        ("Commit", ("group_commit: one write", "and fsync for all"), "wait"),
        ("Publish", ("visible to readers;", "the producer is answered"), "good"),
    ]
    for number, (title, lines, look) in enumerate(steps):
        x = 20 + number * 192
        picture.box(x, 60, 172, 84, title, *lines, look=look)
        if number:
            picture.arrow((x - 20, 102), (x, 102))
    picture.write(20, 36, "A send", "head", "start")
    picture.write(960, 36, "no reader sees it before this step", "soft", "end")
    picture.write(20, 222, "A pull", "head", "start")
    pulls: list[tuple[str, tuple[str, ...], str]] = [
        ("Park", ("the queue has nothing", "new: the pull waits"), "plain"),
        ("Filter", ("tag codes and property", "columns, in blocks"), "main"),
        ("Read", ("matching slices", "of the mapped log"), "main"),
        ("Deliver", ("the stored bytes,", "as they are"), "good"),
    ]
    for number, (title, lines, look) in enumerate(pulls):
        x = 212 + number * 192
        picture.box(x, 246, 172, 84, title, *lines, look=look)
        if number:
            picture.arrow((x - 20, 288), (x, 288))
    picture.arrow(
        (874, 144),
        (874, 190),
        (298, 190),
        (298, 246),
        label=["wakes the parked pulls of its queue"],
        at=(590, 182),
        look="good",
    )
    picture.write(
        20,
        372,
        "After a restart, readers see exactly what the log holds. Queues and indexes are derived from it.",
        "soft",
        "start",
    )
    return picture


BENCHMARK: Final = (
    ("single sends, 64 in flight", 1.5, 17),
    ("64 senders, one in flight each", 10, 40),
    ("batches of 32", 1.4, 3.3),
    ("pulls of 32", 0.41, 1.7),
    ("delivered by a tag of 1 %", 0.7, 7.1),
    ("delivered by SQL92 of 1 %", 1.3, 30),
    ("batches of 32, pure Python", 3.8, 3.3),
)
"""Rows of `make bench`: the load, and the broker's CPU time for a message in µs, ours and RocketMQ's."""


def draw_benchmark() -> Picture:
    """Draw the CPU time of a message as bars, ours above RocketMQ's."""
    picture = Picture(
        980,
        110 + len(BENCHMARK) * 48,
        "Broker CPU per message, SluiceMQ and RocketMQ 5.5.0",
        "Bars of the CPU time for each message in microseconds. "
        + "; ".join(f"{load}: {ours} against {java}" for load, ours, java in BENCHMARK),
    )
    picture.write(20, 32, "Broker CPU for each message, in µs (shorter is better)", "head", "start")
    picture.parts.append('<rect x="620" y="18" width="16" height="16" class="main"/>')
    picture.write(644, 31, "SluiceMQ", "soft", "start")
    picture.parts.append('<rect x="740" y="18" width="16" height="16" class="plain"/>')
    picture.write(764, 31, "RocketMQ 5.5.0, warm JVM", "soft", "start")
    longest = max(max(ours, java) for _, ours, java in BENCHMARK)
    for number, (load, ours, java) in enumerate(BENCHMARK):
        y = 62 + number * 48
        picture.write(250, y + 22, load, "", "end")
        for offset, value, look in ((0, ours, "main"), (18, java, "plain")):
            width = max(value / longest * 620, 2)
            picture.parts.append(
                f'<rect x="264" y="{y + offset}" width="{width:.0f}" height="15" class="{look}"/>'
            )
            picture.write(272 + width, y + offset + 12, f"{value:g}", "soft", "start")
    bottom = 62 + len(BENCHMARK) * 48
    ratios = "  ·  ".join(f"{java / ours:.1f}x" for _, ours, java in BENCHMARK)
    picture.write(20, bottom + 24, f"RocketMQ's time divided by ours: {ratios}", "soft", "start")
    return picture


def draw_spark_result() -> Picture:
    """Draw what the Spark program of the README prints, as a terminal."""
    lines = [
        "+----+--------------+",
        "|tags|avg(dep_delay)|",
        "+----+--------------+",
        "|  UA|         853.0|",
        "+----+--------------+",
    ]
    picture = Picture(420, 40 + len(lines) * 20, "The result of the Spark program", " ".join(lines))
    for number, line in enumerate(lines):
        picture.parts.append(
            f'<text x="24" y="{40 + number * 20}" text-anchor="start" class="code" '
            f'xml:space="preserve">{escape(line)}</text>'
        )
    return picture


PICTURES: Final[dict[str, Callable[[], Picture]]] = {
    "message-route.svg": draw_message_route,
    "transaction.svg": draw_transaction,
    "failover.svg": draw_failover,
    "spark-predicates.svg": draw_predicates,
    "layers.svg": draw_layers,
    "life-of-a-message.svg": draw_life,
    "benchmark.svg": draw_benchmark,
    "spark-result.svg": draw_spark_result,
}


def main() -> int:
    """Write the pictures, or compare them with the files. Return the exit code."""
    is_check = "--check" in sys.argv[1:]
    outdated = []
    for name, draw in PICTURES.items():
        path = DIRECTORY / name
        text = draw().render()
        if path.exists() and path.read_text() == text:
            continue
        outdated.append(name)
        if not is_check:
            DIRECTORY.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    print("\n".join(f"{'outdated' if is_check else 'wrote'} {name}" for name in outdated))
    return int(is_check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
