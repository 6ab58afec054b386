"""Tests of the parser of `sluice mqadmin`, its output formats and the files that it writes."""

import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluicemq.client.core.requests import request_error
from sluicemq.errors import ConfigurationError, RequestError
from sluicemq.model.topic import GroupConfig, MessageQueue, TopicConfig
from sluicemq.mqadmin import commands, groups, java
from sluicemq.mqadmin.commands import (
    Command,
    FlagValues,
    Session,
    WrongFlagsError,
    failure_lines,
    find_command,
    overview_lines,
    parse_arguments,
    parse_flag_declarations,
    run,
    usage_lines,
)
from sluicemq.mqadmin.table import COMMANDS
from sluicemq.mqadmin.topics import parse_attributes
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command as Frame

ROUTE = Command("topicRoute", parse_flag_declarations("t:topic=! l:list"), "", None)
MAKE = Command(
    "make", parse_flag_declarations("(b:broker=|c:cluster=) bn:brokerName= :long="), "", None
)


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
def test_a_flag_is_accepted_in_each_form_of_the_java_tool(words: str) -> None:
    assert parse_arguments(ROUTE, words.split()) == {"topic": "T", "list": ""}


def test_a_negative_number_is_a_value_not_a_flag() -> None:
    assert parse_arguments(MAKE, ["-b", "x", "--long", "-1"]) == {"broker": "x", "long": "-1"}
    assert parse_arguments(MAKE, ["-bn", "x", "-c", "d"]) == {"brokerName": "x", "cluster": "d"}


@pytest.mark.parametrize(
    ("command", "words", "text"),
    [
        (ROUTE, "-l", "Missing required option: t"),
        (ROUTE, "-t", "Missing argument for option: t"),
        (ROUTE, "-t T -x", "Unrecognized option: -x"),
        (MAKE, "", "Missing required option: [-b broker, -c cluster]"),
        (find_command(COMMANDS, "updateOrderConf"), "", "Missing required options: t, m"),
    ],
)
def test_wrong_flags_are_named_in_the_error(command: Command, words: str, text: str) -> None:
    with pytest.raises(WrongFlagsError, match=r".") as caught:
        parse_arguments(command, words.split())
    assert str(caught.value) == text
    assert caught.value.exit_code == 1


def test_usage_has_the_layout_of_the_java_tool() -> None:
    assert list(usage_lines(ROUTE)) == [
        "usage: mqadmin topicRoute [-h] [-l] [-n <arg>] -t <arg>",
        " -h,--help",
        " -l,--list",
        " -n,--namesrvAddr <arg>",
        " -t,--topic <arg>",
    ]
    first = next(usage_lines(MAKE))
    assert (
        first
        == "usage: mqadmin make -b <arg> | -c <arg> [-bn <arg>] [-h] [--long <arg>] [-n <arg>]"
    )


def test_the_table_has_96_commands_of_5_5_and_five_of_4_9_without_duplicates() -> None:
    assert len(COMMANDS) == 96 + 5
    assert len({command.name.lower() for command in COMMANDS}) == 96 + 5
    for command in COMMANDS:
        assert (command.run is None) == bool(command.refusal), command.name
        names = [flag.long for flag in command.all_flags]
        assert len(names) == len(set(names)), command.name
    assert len(list(overview_lines(COMMANDS))) == 96 + 5 + 3


def run_tool(*words: str) -> tuple[int, str, str]:
    """Run mqadmin without a cluster. Return exit code, standard output and standard error."""
    out: list[str] = []
    errors: list[str] = []
    code = run(COMMANDS, words, out.append, errors.append, lambda names: 1 / 0)  # type: ignore
    return code, "".join(out), "\n".join(errors)


def test_help_unknown_and_unsupported_commands_need_no_cluster() -> None:
    assert run_tool()[1].startswith("The most commonly used mqadmin commands are:\n   updateTopic ")
    assert run_tool("help", "topicroute")[1].startswith("usage: mqadmin topicRoute [-h]")
    assert run_tool("topicRoute", "-h") == (0, run_tool("help", "topicRoute")[1], "")
    assert run_tool("noSuch") == (0, "The sub command noSuch not exist.\n", "")
    assert run_tool("topicRoute")[0] == 1
    code, out, errors = run_tool("getControllerConfig", "-a", "x")
    assert (code, out) == (1, "")
    assert errors.startswith("getControllerConfig is not supported.")
    assert "sluice cluster status" in errors


def test_an_error_has_its_code_and_remark_where_scripts_search_for_them() -> None:
    error = request_error(Frame(17, remark="No topic route info"), "h:1")
    assert list(failure_lines(ROUTE, error))[:2] == [
        "org.apache.rocketmq.tools.command.SubCommandException: topicRoute command failed",
        "Caused by: org.apache.rocketmq.client.exception.MQBrokerException: CODE: 17  "
        "DESC: No topic route info BROKER: h:1",
    ]


@pytest.mark.parametrize(
    ("model", "code"), [("BROADCASTING", 2002), (None, 206), ("CLUSTERING", None)]
)
def test_a_group_without_offsets_says_why(model: str | None, code: int | None) -> None:
    """`model` None stands for a group without members."""

    class FakeAdmin:
        def consume_stats(self, group: str, topic: str | None) -> Any:
            return SimpleNamespace(queues={})

        def group_connections(self, group: str) -> Any:
            if model is None:
                raise RequestError(ResponseCode.CONSUMER_NOT_ONLINE, "not online")
            return SimpleNamespace(message_model=model)

    session: Any = SimpleNamespace(admin=FakeAdmin())
    if code is None:
        assert not groups._fetch_consume_stats(session, "g", None).queues
        return
    with pytest.raises(RequestError) as caught:
        groups._fetch_consume_stats(session, "g", None)
    assert caught.value.code == code


def test_values_are_formatted_as_by_java() -> None:
    assert java.format_value({"a": None, "b": [True, 1]}) == "{a=null, b=[true, 1]}"
    assert java.format_permission(6) == "RW-"
    assert java.format_queue(MessageQueue("T", "b", 3)) == (
        "MessageQueue [topic=T, brokerName=b, queueId=3]"
    )
    assert java.format_topic_config(TopicConfig("T", 2, 2), {"+a": "b"}) == (
        "TopicConfig [topicName=T, readQueueNums=2, writeQueueNums=2, perm=RW-, "
        "topicFilterType=SINGLE_TAG, topicSysFlag=0, order=false, attributes={+a=b}]"
    )
    policy = java.group_config_fields(GroupConfig("G"))["groupRetryPolicy"]
    assert policy == (
        "GroupRetryPolicy{type=CUSTOMIZED, exponentialRetryPolicy=null, customizedRetryPolicy=null}"
    )
    assert java.format_version(493) == "V5_4_0"
    assert java.format_version(3) == "V3"
    assert java.format_json({"a": {0: "x"}, "b": None}) == '{\n\t"a":{\n\t\t0:"x"\n\t}\n}'


def test_times_are_parsed_in_both_forms() -> None:
    assert java.parse_time("-1") == -1
    written = java.format_time(1_700_000_000_123)
    assert java.parse_time(written.replace(" ", "#").replace(",", ":")) == 1_700_000_000_123
    assert java.format_time_seconds(1_700_000_000_123) == written[:-4]
    with pytest.raises(ConfigurationError, match="yyyy-MM-dd"):
        java.parse_time("yesterday")


def test_attributes_are_parsed_as_changes() -> None:
    assert parse_attributes("+a=b,-c") == {"a": "b", "c": None}
    with pytest.raises(ConfigurationError, match=r"\+a=b"):
        parse_attributes("a=b")


def test_flag_values_as_integers_and_booleans() -> None:
    values = FlagValues({"count": "3", "order": "TRUE", "bad": "x"})
    assert (values.get_int("count"), values.get_int("none", 7)) == (3, 7)
    assert values.get_bool("order")
    assert not values.get_bool("none")
    with pytest.raises(ConfigurationError, match="must be an integer, got 'x'"):
        values.get_int("bad")


@pytest.mark.parametrize("name", ["../../x", "..", "/etc/x", "a/../b", "plain"])
def test_a_file_name_cannot_leave_its_directory(tmp_path: Path, name: str) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    path = Path(session.save_file(f"{tmp_path}/out", name, b"body"))
    assert path.resolve().parent == tmp_path / "out"
    assert path.read_bytes() == b"body"
    session.save_file(f"{tmp_path}/out", name, b"b")
    assert path.read_bytes() == b"b"


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a directory of the test instead of /tmp."""
    monkeypatch.setattr(commands, "TEMPORARY_DIRECTORY", str(tmp_path))
    return tmp_path


def test_only_the_owner_can_read_default_directories(shared: Path) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "rocketmq").mkdir()
    (shared / "rocketmq").chmod(0o777)  # as Java's tool leaves it, with its umask
    path = Path(session.save_file(f"{shared}/rocketmq/msgbodys", "id", b"body"))
    for one, mode in ((path, 0o600), (path.parent, 0o700), (path.parent.parent, 0o700)):
        assert stat.S_IMODE(one.stat().st_mode) == mode


@pytest.mark.parametrize("prepared", ["rocketmq", "rocketmq/msgbodys"])
def test_a_symbolic_link_in_a_default_directory_is_an_error(shared: Path, prepared: str) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "victim/msgbodys").mkdir(parents=True)
    (shared / prepared).parent.mkdir(exist_ok=True)
    (shared / prepared).symlink_to(shared / "victim")
    with pytest.raises(ConfigurationError, match="is a symbolic link"):
        session.save_file(f"{shared}/rocketmq/msgbodys", "id", b"body")
    assert not list((shared / "victim").rglob("id"))


def test_a_default_directory_of_another_user_is_an_error(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (shared / "rocketmq").mkdir()
    monkeypatch.setattr("os.geteuid", lambda: 12_345)
    with pytest.raises(ConfigurationError, match="another user"):
        session.save_file(f"{shared}/rocketmq/export", "x.json", b"{}")


def test_a_symbolic_link_with_the_name_of_a_file_is_replaced(tmp_path: Path) -> None:
    session = Session(None, None, print)  # type: ignore[arg-type]
    (tmp_path / "id").symlink_to(tmp_path / "victim")
    path = Path(session.save_file(str(tmp_path), "id", b"body"))
    assert path.read_bytes() == b"body"
    assert not (tmp_path / "victim").exists()
