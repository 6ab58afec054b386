"""docs/configuration.md, written from the table of keys.

    python -m sluicemq.config.document > docs/configuration.md

A test compares the file with this text, so that no key is undocumented.
"""

import sys
from collections.abc import Iterator

from sluicemq.config.changes import default_text
from sluicemq.config.inert import INERT, INERT_ALIASES, REFUSED
from sluicemq.config.keys import INT_MAX, Key, Kind, Part, keys_of

_HEAD = """\
# Configuration

<!-- Written by `python -m sluicemq.config.document`. Change src/sluicemq/config instead. -->

Brokers and name servers read RocketMQ's own files (`broker.conf`, `namesrv.conf`), given with `-c`:

```
sluice broker -c broker.conf
sluice nameserver -c namesrv.conf
sluice up --store /var/lib/sluice -c broker.conf
```

What wins, from weak to strong: the defaults below, the variable `NAMESRV_ADDR` (for `namesrvAddr`),
the file, options of the command line.

## Syntax

That of `java.util.Properties`: one `key = value` a line; `=`, `:` or a blank separates; `#` and `!`
begin a comment line; a `\\` at the end continues a line; `\\t \\n \\r \\f \\uXXXX` are escapes, a
backslash before anything else is dropped. Files are UTF-8, or ISO-8859-1 when they are not valid
UTF-8. In paths `~`, `$NAME`, `${NAME}` and `${user.home}` are replaced when the file is
read; a variable that is not set is an error.

## Where it differs from RocketMQ

- **Blanks at the end of a value are trimmed.** RocketMQ silently ignores a number that is followed
  by a blank and goes on with its default.
- **A bad value is an error** that names key, value and range. RocketMQ ignores it without a word;
  there, every text but `true` means false.
- **An unknown key is a warning** with the nearest known name. RocketMQ ignores it.
- **Keys of features that are not built** are accepted with a note, see the end. Where silence would
  be dangerous (access control, replication) they are refused unless they are `false`.
- `enablePropertyFilter` is `true` by default, and `metricsExporterType` is `PROM`.
- `storePathConsumeQueue` is honoured.

## At run time

Requests 25 and 318 (`mqadmin updateBrokerConfig`, `updateNamesrvConfig`) change keys of a running
server and write them to its file, whose previous edition stays as `.bak`; comments and order stay.
Without `-c` that file is `config/sluice.properties` in the store (of a name server
`~/namesrv/sluice.properties`), and a start without `-c` reads it.

A change is checked as at the start and refused as a whole when the server would not start with it.
*live* keys take effect at once, the others at the next start. Until then requests 26 and 319
(`mqadmin getBrokerConfig`, `getNamesrvConfig`), which show all keys, show the value in force and
below, as `sluicePending.KEY`, the one that waits; the remark of the answer names what waits.
RocketMQ shows the new value at once, whether or not anything uses it. A key without a value gets
its default.

Variables are replaced in files alone: a request's path with `$` or a leading `~` is refused, and
paths are shown as the file writes them, so that nobody reads the environment of a server this way.
What the command line or `tls.config.file` sets cannot be changed by a request, as it wins over the
file. `rocketmqHome`, `configBlackList`, `brokerConfigPath`, `configStorePath` and `kvConfigPath`
cannot either: the answer is code 16.

"""

_ADDRESSES = """\
## Which address clients are told

A broker tells its name servers one address, and clients connect to that. The first that applies:
`brokerIP1`; `bindAddress` when it is one address; the address from which it reaches its name
server; the first address of the machine that others can reach; 127.0.0.1. The start-up log says
which one and why.

A broker that knows itself as 127.0.0.1 or by an address of another network (docker, NAT, a second
interface) cannot be reached by some clients. SluiceMQ's name server therefore answers, per client,
an address that it can reach the way it came in: its own, when the broker runs on the same machine,
or the one the broker's registration came from. It never replaces a `brokerIP1` of our broker (a
Java broker does not tell that it was set), and says in its log what it replaces;
`sluiceReachableAddresses = false` turns it off. What it cannot know are ports that docker publishes
under another number, and address translation between the client and the name server: set
`brokerIP1` there.

"""

_RETENTION = """\
## Open files

A server needs open files for its connections and for the files of the store that are being read.
It takes what the system allows (it raises its soft limit to the hard one at the start) and gets
by with it, however many queues there are: 40,000 queues start, serve and recover with 1,024.
Nothing is to be set for many queues; for many connections it is.

| part | of `ulimit -n` 1,024 | of 20,000 |
|---|---|---|
| files of the store mapped for reading; the least used go | a quarter: 256 | at most 1,024 |
| kept for what is open for a moment: a table being saved, a queue being written | 64 | 64 |
| connections are accepted as long as fewer files than this are open | 704 | 18,912 |

A connection above that is closed and the log says so, with the cure: `ulimit -n` (also `-H`),
`LimitNOFILE=` of a systemd unit, `--ulimit nofile=` of a container. `sluiceConnectionsMax` is a
limit beside it. The first line of a server's log has the numbers.

## What is deleted, and when

The files of the commit log go in order, never the newest, each as a whole with all its topics:

- when a file was last written `fileReservedTime` hours ago: in the hours of `deleteWhen`, or at any
  hour while more than `diskMaxUsedSpaceRatio` of the disk are used, or when asked
  (`mqadmin deleteExpiredCommitLog`);
- whatever its age, while more than `diskSpaceCleanForciblyRatio` are used, unless
  `cleanFileForciblyEnable = false`. As soon as there is room it stops; RocketMQ deletes
  `deleteFileBatchMax` files without looking again. As in RocketMQ, a `diskMaxUsedSpaceRatio` above
  it comes first: then files are kept until sends are refused;
- above `diskSpaceWarningLevelRatio` sends are refused (code 14) with a text that names path, used,
  limit and free; reading goes on. The disk is then looked at every second, and sending works again
  by itself.

Used and free are what `df` shows. Consume queue and index files follow the log. A file also waits
until a checkpoint covers it, at most 10 s (SYNC_FLUSH: 60 s).

Nobody loses messages without a word. Before a file goes, each consumer group that has not read all
of it is logged with topic and number and counted in `sluicemq_messages_lost_total`; from
`sluiceRetentionWarningPercent` of `fileReservedTime` on, the log, `sluicemq_messages_at_risk`,
`sluicemq_loss_time_seconds` and `sluice group lag` say who is about to lose what, and when. A
consumer that comes too late goes on at the first message that is left (code 21), says so in its
log, and calls `on_moved` of `Sluice(...)`. `mqadmin cleanExpiredCQ` deletes files only: RocketMQ
also drops a queue all of whose messages are gone, which then counts from 0 and confuses its
consumers.

"""

_TITLES = {
    Part.BROKER: "Broker",
    Part.STORE: "Store (same file as the broker's)",
    Part.NAME_SERVER: "Name server",
}


def configuration_markdown() -> str:
    """The whole document."""
    return "".join(
        (_HEAD, *(_section(part) for part in Part), _RETENTION, _ADDRESSES, *_inert_section())
    )


def _section(part: Part) -> str:
    rows = "".join(_row(key) for key in keys_of(part))
    head = "| key | default | values | meaning |\n|---|---|---|---|\n"
    return f"## {_TITLES[part]}\n\n{head}{rows}\n"


def _row(key: Key) -> str:
    also = f" Also written {', '.join(f'`{alias}`' for alias in key.aliases)}." * bool(key.aliases)
    default = default_text(key)
    shown = f"`{default}`" if default else "–"
    live = " *live*" * key.live
    return f"| `{key.name}` | {shown} | {_values(key)} | {key.doc}{also}{live} |\n"


def _values(key: Key) -> str:
    match key.kind:
        case Kind.INTEGER if key.maximum == INT_MAX:
            return f"{key.minimum} or more"
        case Kind.INTEGER if key.minimum == key.maximum:
            return f"{key.minimum}"
        case Kind.INTEGER:
            return f"{key.minimum} to {key.maximum}"
        case Kind.CHOICE:
            return ", ".join(f"`{word}`" for word, _value in key.choices)
        case _:
            return key.kind.value


def _inert_section() -> Iterator[str]:
    yield "## Keys that are refused unless they are `false`\n\n"
    for name, reason in REFUSED.items():
        yield f"- `{name}`: {reason}.\n"
    yield "\n## Keys of RocketMQ without effect here\n\n"
    by_reason: dict[str, list[str]] = {}
    for name, reason in INERT.items():
        by_reason.setdefault(reason, []).append(name)
    for reason, names in by_reason.items():
        yield f"- {reason}: {', '.join(f'`{name}`' for name in names)}\n"
    spellings = ", ".join(f"`{alias}` ({name})" for alias, name in INERT_ALIASES.items())
    yield f"\nOther spellings: {spellings}.\n"


if __name__ == "__main__":
    sys.stdout.write(configuration_markdown())
