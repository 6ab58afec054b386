"""How mqadmin's words are read, and how its values look."""

import stat
from pathlib import Path

import pytest

from sluicemq.client.core.requests import request_error
from sluicemq.errors import ConfigurationError
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.mqadmin import commands, java
from sluicemq.mqadmin.commands import (
    Command,
    Given,
    Session,
    WrongFlagsError,
    failure,
    find,
    overview,
    parse,
    parse_flags,
    run,
    usage,
)
from sluicemq.mqadmin.table import COMMANDS
from sluicemq.mqadmin.topics import parse_attributes
from sluicemq.wire.frames import Command as Frame

ROUTE = Command("topicRoute", parse_flags("t:topic=! l:list"), "", None)
MADE = Command("make", parse_flags("(b:broker=|c:cluster=) bn:brokerName= :long="), "", None)


@pytest.mark.parametrize(
    "words",
    [
        "-t T -l",
        "-tT -l",
        "-t=T -l",
        "--topic T --list",
        "-topic T -list",
        "--topic=T -l",
        "x -t T -l",
    ],
)
def test_a_flag_has_the_forms_that_the_tool_takes(words: str) -> None:
    assert parse(ROUTE, words.split()) == {"topic": "T", "list": ""}


def test_a_number_below_zero_is_a_value_and_no_flag() -> None:
    assert parse(MADE, ["-b", "x", "--long", "-1"]) == {"broker": "x", "long": "-1"}
    assert parse(MADE, ["-bn", "x", "-c", "d"]) == {"brokerName": "x", "cluster": "d"}


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        (ROUTE, "-l", "Missing required option: t"),
        (ROUTE, "-t", "Missing argument for option: t"),
        (ROUTE, "-t T -x", "Unrecognized option: -x"),
        (MADE, "", "Missing required option: [-b broker, -c cluster]"),
        (find(COMMANDS, "updateOrderConf"), "", "Missing required options: t, m"),
    ],
)
def test_wrong_flags_are_named(command: Command, words: str, text: str) -> None:
    with pytest.raises(WrongFlagsError, match=r".") as caught:
        parse(command, words.split())
    assert str(caught.value) == text
    assert caught.value.exit_code == 1


def test_usage_is_laid_out_as_the_tool_does() -> None:
    assert list(usage(ROUTE)) == [
        "usage: mqadmin topicRoute [-h] [-l] [-n <arg>] -t <arg>",
        " -h,--help", " -l,--list", " -n,--namesrvAddr <arg>", " -t,--topic <arg>",
    ]  # fmt: skip
    first = next(usage(MADE))
    assert (
        first
        == "usage: mqadmin make -b <arg> | -c <arg> [-bn <arg>] [-h] [--long <arg>] [-n <arg>]"
    )


def test_there_are_the_96_commands_of_5_5_and_five_of_4_9_and_none_twice() -> None:
    assert len(COMMANDS) == 96 + 5
    assert len({command.name.lower() for command in COMMANDS}) == 96 + 5
    for command in COMMANDS:
        assert (command.run is None) == bool(command.refusal), command.name
        names = [flag.long for flag in command.all_flags]
        assert len(names) == len(set(names)), command.name
    assert len(list(overview(COMMANDS))) == 96 + 5 + 3


def told(*words: str) -> tuple[int, str, str]:
    out: list[str] = []
    errors: list[str] = []
    code = run(COMMANDS, words, out.append, errors.append, lambda names: 1 / 0)  # type: ignore
    return code, "".join(out), "\n".join(errors)


def test_help_unknown_commands_and_refusals_need_no_cluster() -> None:
    assert told()[1].startswith("The most commonly used mqadmin commands are:\n   updateTopic ")
    assert told("help", "topicroute")[1].startswith("usage: mqadmin topicRoute [-h]")
    assert told("topicRoute", "-h") == (0, told("help", "topicRoute")[1], "")
    assert told("noSuch") == (0, "The sub command noSuch not exist.\n", "")
    assert told("topicRoute")[0] == 1
    code, out, errors = told("getControllerConfig", "-a", "x")
    assert (code, out) == (1, "")
    assert errors.startswith("getControllerConfig is refused.")
    assert "sluice cluster status" in errors


def test_an_error_has_code_and_text_where_people_look_for_them() -> None:
    error = request_error(Frame(17, remark="No topic route info"), "h:1")
    assert list(failure(ROUTE, error))[:2] == [
        "org.apache.rocketmq.tools.command.SubCommandException: topicRoute command failed",
        "Caused by: org.apache.rocketmq.client.exception.MQBrokerException: CODE: 17  "
        "DESC: No topic route info BROKER: h:1",
    ]


def test_values_look_as_java_shows_them() -> None:
    assert java.shown({"a": None, "b": [True, 1]}) == "{a=null, b=[true, 1]}"
    assert java.permission(6) == "RW-"
    assert java.message_queue(MessageQueue("T", "b", 3)) == (
        "MessageQueue [topic=T, brokerName=b, queueId=3]"
    )
    assert java.topic_config(TopicConfig("T", 2, 2), {"+a": "b"}) == (
        "TopicConfig [topicName=T, readQueueNums=2, writeQueueNums=2, perm=RW-, "
        "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false, attributes={+a=b}]"
    )
    policy = java.group_fields(GroupConfig("G"))["groupRetryPolicy"]
    assert policy == (
        "GroupRetryPolicy{type=CUSTOMIZED, exponentialRetryPolicy=null, customizedRetryPolicy=null}"
    )
    assert java.version(493) == "V5_4_0"
    assert java.version(3) == "V3"
    assert java.pretty({"a": {0: "x"}, "b": None}) == '{\n\t"a":{\n\t\t0:"x"\n\t}\n}'


def test_times_are_read_in_both_forms() -> None:
    assert java.parse_time("-1") == -1
    written = java.time_text(1_700_000_000_123)
    assert java.parse_time(written.replace(" ", "#").replace(",", ":")) == 1_700_000_000_123
    assert java.second_text(1_700_000_000_123) == written[:-4]
    with pytest.raises(ConfigurationError, match="yyyy-MM-dd"):
        java.parse_time("yesterday")


def test_attributes_are_changes() -> None:
    assert parse_attributes("+a=b,-c") == {"a": "b", "c": None}
    with pytest.raises(ConfigurationError, match=r"\+a=b"):
        parse_attributes("a=b")


def test_numbers_and_truths() -> None:
    given = Given({"count": "3", "order": "TRUE", "bad": "x"})
    assert (given.number("count"), given.number("none", 7)) == (3, 7)
    assert given.truth("order")
    assert not given.truth("none")
    with pytest.raises(ConfigurationError, match="Give a number"):
        given.number("bad")


@pytest.mark.parametrize("name", ["../../x", "..", "/etc/x", "a/../b", "plain"])
def test_a_name_that_somebody_else_chose_stays_in_its_directory(tmp_path: Path, name: str) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    path = Path(session.save(f"{tmp_path}/out", name, b"body"))
    assert path.resolve().parent == tmp_path / "out"
    assert path.read_bytes() == b"body"
    session.save(f"{tmp_path}/out", name, b"b")
    assert path.read_bytes() == b"b"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory in the place of /tmp."""
    monkeypatch.setattr(commands, "TEMPORARY", str(tmp_path))
    return tmp_path


def test_default_directories_are_their_owners_alone(shared: Path) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "rocketmq").mkdir()
    (shared / "rocketmq").chmod(0o777)  # as Java's tool leaves it, by the umask
    path = Path(session.save(f"{shared}/rocketmq/msgbodys", "id", b"body"))
    for one, mode in ((path, 0o600), (path.parent, 0o700), (path.parent.parent, 0o700)):
        assert stat.S_IMODE(one.stat().st_mode) == mode


@pytest.mark.parametrize("prepared", ["rocketmq", "rocketmq/msgbodys"])
def test_a_link_that_somebody_prepared_is_refused(shared: Path, prepared: str) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "victim/msgbodys").mkdir(parents=True)
    (shared / prepared).parent.mkdir(exist_ok=True)
    (shared / prepared).symlink_to(shared / "victim")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        session.save(f"{shared}/rocketmq/msgbodys", "id", b"body")
    assert not list((shared / "victim").rglob("id"))


def test_a_default_directory_of_somebody_else_is_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "rocketmq").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 12_345)
    with pytest.raises(ConfigurationError, match="another user"):
        session.save(f"{shared}/rocketmq/export", "x.json", b"{}")


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (tmp_path / "id").symlink_to(tmp_path / "victim")
    path = Path(session.save(str(tmp_path), "id", b"body"))
    assert path.read_bytes() == b"body"
    assert not (tmp_path / "victim").exists()
