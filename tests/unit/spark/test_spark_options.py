"""Options: every one declared, every mistake named with its cure."""

import pytest

from sluicemq.client.core.names import Credentials
from sluicemq.errors import ConfigurationError
from sluicemq.spark.options import OPTIONS, READ, STREAM, WRITE, parse_options, render_options_table


def test_names_are_found_without_case_and_by_alias() -> None:
    options = parse_options({"TOPIC": "t", "namesrv": "a:1, b:2;c:3"}, READ)
    assert options["topic"] == "t"
    assert options.require("nameServers") == "a:1;b:2;c:3"


def test_defaults_stand_where_nothing_is_given() -> None:
    options = parse_options({})
    assert options["failOnDataLoss"] is True
    assert options["maxRecordsPerPartition"] == 1_000_000
    assert options["endingOffsets"] == "latest"


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown option 'filter.tag'.*'filter.tags'"):
        parse_options({"filter.tag": "UA"})


def test_what_spark_passes_along_is_no_option_of_ours() -> None:
    parse_options({"checkpointLocation": "/x", "queryName": "q"}, WRITE)


@pytest.mark.parametrize(
    ("name", "use"),
    [("endingOffsets", STREAM), ("maxOffsetsPerTrigger", READ), ("batchMessages", READ)],
)
def test_an_option_of_another_use_is_refused(name: str, use: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' is not supported for a {use}"):
        parse_options({name: "1" if name != "endingOffsets" else "latest"}, use)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("minPartitions", "0", "from 1 to"),
        ("minPartitions", "two", "whole number"),
        ("failOnDataLoss", "maybe", "true or false"),
        ("badProperties", "drop", "null or fail"),
        ("startingOffsets", "newest", "earliest, latest or JSON"),
        ("startingOffsets", '{"b": {"x": 1}}', "'x' is not a queue id"),
        ("startingOffsets", '{"b": {"0": -2}}', "a whole number, earliest, latest or a time"),
        ("startingTimestamp", "yesterday", "a Unix timestamp in milliseconds"),
        ("topic", " ", "empty"),
        ("startingTimestamp", "1732190400", "looks like seconds.*write 1732190400000"),
        ("endingTimestamp", "1732190400123456", "looks like microseconds.*write 1732190400123"),
        ("startingTimestamp", "1732190400123456789", "nanoseconds.*write 1732190400123"),
        ("filter.tags", "UA|AA", r"single \| is part of a tag; write 'UA\|\|AA'"),
        ("filter.tags", "A|||B", r"write 'A\|\|B'"),
        ("filter.tags", "*||UA", r"write \* alone"),
    ],
)
def test_a_bad_value_names_option_value_and_what_would_do(name: str, text: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why) as caught:
        parse_options({name: text})
    assert name in str(caught.value)
    assert repr(text) in str(caught.value)


def test_a_secret_is_not_repeated_in_an_error() -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_options({"secretKey": "   "})
    assert "secretKey" in str(caught.value)
    assert "   '" not in str(caught.value)


def test_times_are_milliseconds_or_iso() -> None:
    for text in ("1700000000123", "2023-11-14T22:13:20.123Z", "2023-11-14T22:13:20.123"):
        assert parse_options({"startingTimestamp": text})["startingTimestamp"] == 1700000000123


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("0", 0),
        ("5", 5),
        ("999999999", 999_999_999),
        ("-1", -1),
        ("1970-01-21T01:09:50.400Z", 1_732_190_400),
        ("9223372036854775807", (1 << 63) - 1),
        ("4000000000000", 4_000_000_000_000),
    ],
)
def test_a_number_that_no_other_unit_explains_is_milliseconds(text: str, time_ms: int) -> None:
    assert parse_options({"startingTimestamp": text})["startingTimestamp"] == time_ms


@pytest.mark.parametrize("text", ["UA", "UA||AA", " UA || AA ", "*", "", "||"])
def test_tag_expressions_that_mean_what_they_look_like_are_taken(text: str) -> None:
    assert parse_options({"filter.tags": text})["filter.tags"] == text


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"startingOffsets": "earliest", "startingTimestamp": "5"}, "given together"),
        ({"startingTimestamp": "5", "startingoffsets": '{"b": {"0": 1}}'}, "given together"),
        ({"endingOffsets": "latest", "endingTimestamp": "5"}, "given together"),
        ({"securityToken": "t"}, "without 'accessKey'"),
        ({"tls.verify": "none"}, "'tls.verify' is given, but TLS is not switched on"),
        ({"tls.serverName": "x", "tls.keyPassword": "p"}, "TLS is not switched on.*tls=true"),
    ],
)
def test_options_that_take_away_each_others_effect_are_refused(
    given: dict[str, str], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        parse_options(given)


def test_options_that_go_together_are_taken() -> None:
    parse_options({"startingTimestamp": "5", "endingOffsets": "latest"})
    parse_options({"startingOffsets": "earliest", "endingTimestamp": "5"})
    parse_options({"accessKey": "a", "secretKey": "s", "securityToken": "t"})
    for switch in ({"tls": "true"}, {"tls": "false"}, {"tls.ca": "/ca"}, {"useTLS": "true"}):
        parse_options({"tls.verify": "ca", **switch})


def test_offsets_may_be_words_numbers_and_tables() -> None:
    assert parse_options({"startingOffsets": "Latest"})["startingOffsets"] == "latest"
    table = parse_options({"endingOffsets": '{"b": {"0": 7, "1": "latest"}}'})["endingOffsets"]
    assert table == {"b": {0: 7, 1: "latest"}}


def test_credentials_need_both_keys() -> None:
    assert parse_options({}).credentials is None
    with pytest.raises(ConfigurationError, match="'secretKey' is missing"):
        _ = parse_options({"accessKey": "a"}).credentials
    both = parse_options({"accessKey": "a", "secretKey": "s"}).credentials
    assert both == Credentials("a", "s")


def test_the_table_for_the_documentation_has_every_option() -> None:
    table = render_options_table()
    assert all(f"`{option.name}`" in table for option in OPTIONS)
