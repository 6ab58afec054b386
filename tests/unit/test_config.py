"""Property files, the table of keys, and what follows from it."""

import dataclasses
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluicemq.config import (
    KEYS,
    BrokerConfig,
    Change,
    Configs,
    Key,
    NameServerConfig,
    Part,
    ProxyConfig,
    StoreConfig,
    change_settings,
    decode_properties_file,
    edit_properties,
    load_broker_config,
    load_local_proxy_config,
    load_name_server_config,
    load_proxy_config,
    parse_properties,
    settings_text,
)
from sluicemq.config.inert import INERT, REFUSED
from sluicemq.config.keys import Kind, value_text
from sluicemq.config.proxying import ProxyLimits
from sluicemq.errors import ConfigurationError, PermissionDeniedError

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "configuration.md"
IGNORED = ROOT / "docs" / "reference" / "ignored-settings.md"
HOME = {"HOME": "/home/mq"}
VALUES = {
    Part.BROKER: BrokerConfig, Part.STORE: StoreConfig, Part.NAME_SERVER: NameServerConfig,
    Part.PROXY: ProxyConfig,
}  # fmt: skip


def text_of(*settings: BrokerConfig | StoreConfig | NameServerConfig | ProxyConfig) -> str:
    configs = configs_of(*settings)
    return settings_text(configs, configs)


def configs_of(*settings: BrokerConfig | StoreConfig | NameServerConfig | ProxyConfig) -> Configs:
    return {part: one for one in settings for part, kind in VALUES.items() if type(one) is kind}


def changed(
    text: str, *settings: BrokerConfig | StoreConfig | NameServerConfig | ProxyConfig
) -> Change:
    configs = configs_of(*settings or (BrokerConfig(), StoreConfig()))
    return change_settings(configs, configs, text, ("brokerConfigPath", "configStorePath"))


# The sample of seed 000 (an article on filters and access control).
SEED_CONF = """\
brokerClusterName = DefaultCluster
brokerName = broker-a
brokerId = 0
deleteWhen = 04
fileReservedTime = 48
brokerRole = ASYNC_MASTER
flushDiskType = ASYNC_FLUSH

# 以上为 broker.conf 的默认配置
autoCreateTopicEnable = false
autoCreateSubscriptionGroup = false
aclEnable = true
"""


# ---------------------------------------------------------------------------------- syntax


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("a=b", "a", "b"),
        ("a = b", "a", "b"),
        ("a:b", "a", "b"),
        ("a b", "a", "b"),
        ("a\tb", "a", "b"),
        ("   a   =   b c", "a", "b c"),
        ("a", "a", ""),
        ("a=", "a", ""),
        ("a==b", "a", "=b"),
        ("a = = b", "a", "= b"),
        (r"a\=b=c", "a=b", "c"),
        (r"a\ b=c", "a b", "c"),
        (r"a=x\ty", "a", "x\ty"),
        (r"a=x\qy", "a", "xqy"),
        (r"a=\u4e2d\u6587", "a", "中文"),
        (r"a=\ud83d\ude00", "a", "😀"),
        ("a=x\\\n    y", "a", "xy"),
        ("a=x\\\\", "a", "x\\"),
        ("a=b   ", "a", "b"),
        ("\ufeffa=b", "a", "b"),
        ("a=b\r\n", "a", "b"),
        ("path=C:\\\\store", "path", "C:\\store"),
    ],
)
def test_a_line_is_read_as_java_reads_it(line: str, key: str, value: str) -> None:
    assert parse_properties(line) == {key: value}


def test_comments_and_empty_lines_are_nothing_and_the_last_value_wins() -> None:
    assert parse_properties("# a=1\n! b=2\n\n   # c=3\na=4\na=5\n") == {"a": "5"}


def test_a_comment_that_ends_in_a_backslash_does_not_continue() -> None:
    assert parse_properties("# note \\\na=1\n") == {"a": "1"}


@pytest.mark.parametrize("text", [r"a=\u12", r"a=\uxyzw", r"a=\u+123"])
def test_a_broken_unicode_escape_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="four hex digits"):
        parse_properties(text)


def test_a_file_that_is_not_utf_8_is_latin_1_as_in_java() -> None:
    assert decode_properties_file("name=中".encode()) == "name=中"
    assert decode_properties_file(b"name=caf\xe9") == "name=café"


def test_editing_keeps_comments_order_and_other_keys() -> None:
    text = "# mine\nb = 2\na = 1\n\na = 3\nlong = x\\\n  y\n"
    edited = edit_properties(text, {"a": "9", "new": "n\\1", "long": "z"})
    assert edited == "# mine\nb = 2\na=9\n\nlong=z\nnew=n\\\\1\n"
    assert parse_properties(edited) == {"b": "2", "a": "9", "long": "z", "new": "n\\1"}


def test_editing_an_empty_file_writes_the_changes_alone() -> None:
    assert edit_properties("", {"a": "1"}) == "a=1\n"


# ----------------------------------------------------------------------------------- table


def test_every_key_names_a_field_and_every_field_has_one_key() -> None:
    for part, cls in VALUES.items():
        no_settings = {"origin", "inner_account"}
        fields = sorted(one.name for one in dataclasses.fields(cls) if one.name not in no_settings)
        assert sorted(key.field for key in KEYS if key.part is part) == fields


def test_no_name_means_two_things() -> None:
    for parts in ((Part.BROKER, Part.STORE), (Part.NAME_SERVER,), (Part.PROXY,)):
        names = [n for key in KEYS if key.part in parts for n in (key.name, *key.aliases)]
        assert len(names) == len(set(names))
    names = {key.name for key in KEYS if key.part is not Part.NAME_SERVER}
    assert not names & INERT.keys()
    assert set(REFUSED) <= INERT.keys()


def test_every_default_is_within_its_own_range() -> None:
    broker, store, _ = load_broker_config("", environment=HOME)
    texts = text_of(broker, store) + text_of(NameServerConfig()) + text_of(ProxyConfig())
    for key in KEYS:
        assert f"{key.name}=" in texts
    assert load_broker_config(text_of(broker, store), environment=HOME)[2] == []


@pytest.mark.parametrize("page", [DOCUMENT, IGNORED], ids=lambda page: page.name)
def test_the_document_is_up_to_date(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
    with_tables = runpy.run_path(str(ROOT / "tools" / "settings_tables.py"))["with_tables"]
    command = f"python tools/settings_tables.py {page.relative_to(ROOT)}"
    assert text == with_tables(text), f"run {command}"


def test_the_document_has_the_table_of_each_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "tools")])
    subjects = runpy.run_path(str(ROOT / "tools" / "settings_tables.py"))["SUBJECTS"]
    tables = {f"{part}: {subject}" for part, by_name in subjects.items() for subject in by_name}
    tables |= {f"{part}: others" for part in Part if part is not Part.STORE}
    tables |= {"all servers", "refused"}
    assert set(re.findall("<!-- written: (.*?) -->", DOCUMENT.read_text())) == tables


def test_the_document_names_every_key_and_alias() -> None:
    text = DOCUMENT.read_text()
    for key in KEYS:
        for name in (key.name, *key.aliases):
            assert f"`{name}`" in text
    ignored = IGNORED.read_text()
    for name in INERT:
        assert f"`{name}`" in ignored


# --------------------------------------------------------------------------------- loading


def test_the_sample_of_the_article_loads() -> None:
    broker, store, warnings = load_broker_config(SEED_CONF, environment=HOME)
    assert (broker.broker_name, broker.cluster_name, broker.broker_id) == (
        "broker-a",
        "DefaultCluster",
        0,
    )
    assert broker.auto_create_topic is False
    assert broker.auto_create_group is False
    assert store.flush_sync is False
    assert (store.file_reserved_hours, store.delete_hours) == (48, ("04",))
    assert warnings == []


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("storePathConsumerQueue=/q", "consume_queue_path", "/q"),
        ("mapedFileSizeCommitLog=1048576", "commit_log_file_bytes", 1048576),
        ("mapedFileSizeConsumeQueue=2000", "consume_queue_file_bytes", 2000),
        ("mappedFileSizeConsumeQueue=2001", "consume_queue_file_bytes", 2020),
        ("flushDiskType=SYNC_FLUSH", "flush_sync", True),
        ("maxMessageSize=65536   ", "message_bytes_max", 65536),
        ("storePathRootDir=${HOME}/store/", "root", "/home/mq/store"),
        ("storePathRootDir=$HOME/a$HOME", "root", "/home/mq/a/home/mq"),
        ("storePathRootDir=~/store", "root", "/home/mq/store"),
        ("storePathRootDir=${user.home}/store", "root", "/home/mq/store"),
    ],
)
def test_a_store_key_sets_its_field(line: str, field: str, value: object) -> None:
    _, store, _ = load_broker_config(line, environment=HOME)
    assert getattr(store, field) == value


@pytest.mark.parametrize(
    ("line", "field", "value", "taken"),
    [
        ("diskMaxUsedSpaceRatio=5", "disk_used_ratio_max", 5, 10),
        ("diskMaxUsedSpaceRatio=99", "disk_used_ratio_max", 99, 95),
        ("diskSpaceCleanForciblyRatio=20", "disk_forced_ratio", 20, 30),
        ("diskSpaceCleanForciblyRatio=86", "disk_forced_ratio", 86, 85),
        ("diskSpaceWarningLevelRatio=30", "disk_warning_ratio", 30, 35),
        ("diskSpaceWarningLevelRatio=98", "disk_warning_ratio", 98, 90),
    ],
)
def test_disk_ratios_are_brought_into_the_real_broker_s_limits_and_that_is_said(
    line: str, field: str, value: int, taken: int
) -> None:
    _, store, warnings = load_broker_config(line, environment=HOME)
    assert getattr(store, field) == taken
    assert warnings == [f"{line.partition('=')[0]} = {value} is taken as {taken}."]


def test_java_s_system_properties_for_the_disk_win_over_the_keys() -> None:
    text = "diskSpaceWarningLevelRatio=80\nrocketmq.broker.diskSpaceWarningLevelRatio=0.7"
    _, store, warnings = load_broker_config(text, environment=HOME)
    assert (store.disk_warning_ratio, warnings) == (70, [])
    options = {
        "JAVA_OPT": "-server -Xmx8g -Drocketmq.broker.diskSpaceCleanForciblyRatio=0.65",
        "JAVA_OPT_EXT": "-Drocketmq.broker.diskSpaceWarningLevelRatio=0.99",
    }
    _, store, warnings = load_broker_config(text, environment=HOME | options)
    assert (store.disk_forced_ratio, store.disk_warning_ratio) == (65, 90)
    assert warnings == ["diskSpaceWarningLevelRatio = 99 is taken as 90."]


def test_a_system_property_that_is_no_fraction_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"Write a fraction, as in 0\.85"):
        load_broker_config("rocketmq.broker.diskSpaceWarningLevelRatio=90%", environment=HOME)


def test_a_changed_system_property_goes_to_the_file_under_the_name_of_its_key() -> None:
    text = "rocketmq.broker.diskSpaceWarningLevelRatio=0.85"
    change = changed(text)
    assert change.in_force[Part.STORE].disk_warning_ratio == 85
    assert change.entries == {"diskSpaceWarningLevelRatio": "85"}


@pytest.mark.parametrize("text", ["24", "04;noon", "-1", "4;5.5"])
def test_an_hour_of_deletion_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"deleteWhen = .* is not an hour.*04;16"):
        load_broker_config(f"deleteWhen = {text}", environment=HOME)


def test_several_hours_of_deletion_are_separated_by_semicolons() -> None:
    _, store, _ = load_broker_config("deleteWhen = 04; 16", environment=HOME)
    assert store.delete_hours == ("04", "16")


def test_the_store_paths_lie_below_the_root_unless_given() -> None:
    store = StoreConfig(root="/data")
    assert (store.commit_log_path, store.consume_queue_path) == (
        "/data/commitlog",
        "/data/consumequeue",
    )
    assert StoreConfig(root="/data", commit_log_path="/fast").commit_log_path == "/fast"


def test_name_servers_come_from_the_environment_then_the_file_then_the_command_line() -> None:
    environment = HOME | {"NAMESRV_ADDR": "env:9876"}

    def names(text: str, overrides: dict[str, str]) -> tuple[str, ...]:
        return load_broker_config(text, overrides=overrides, environment=environment)[
            0
        ].name_server_addresses

    assert names("", {}) == ("env:9876",)
    assert names("namesrvAddr = a:1; b:2 ;", {}) == ("a:1", "b:2")
    assert names("namesrvAddr = a:1", {"namesrvAddr": "c:3"}) == ("c:3",)


def test_sql92_is_on_unless_the_file_says_otherwise() -> None:
    assert load_broker_config("", environment=HOME)[0].enable_property_filter is True
    text = "enablePropertyFilter = False"
    assert load_broker_config(text, environment=HOME)[0].enable_property_filter is False


def test_an_unknown_key_is_a_warning_with_the_nearest_name() -> None:
    text = "brokerNam=x\nzzz=1\nfileReserveTime=4\nnonsense=1"
    _, _, warnings = load_broker_config(text, environment=HOME)
    assert warnings == [
        "brokerNam is not a known key and is ignored. Did you mean 'brokerName'?",
        "zzz is not a known key and is ignored.",
        "fileReserveTime is not a known key and is ignored. Did you mean 'fileReservedTime'?",
        # Similar to zoneName, which has no effect either.
        "nonsense is not a known key and is ignored.",
    ]


def test_an_alias_beside_the_key_itself_is_ignored_with_a_warning() -> None:
    text = "mapedFileSizeCommitLog=65536\nmappedFileSizeCommitLog=8388608"
    _, store, warnings = load_broker_config(text, environment=HOME)
    assert store.commit_log_file_bytes == 8388608
    assert warnings == [
        "mapedFileSizeCommitLog is ignored because mappedFileSizeCommitLog is set too."
    ]


def test_the_spelling_of_4_x_counts() -> None:
    broker, _, warnings = load_broker_config("haSlaveFallbehindMax=6000", environment=HOME)
    assert broker.gap_bytes_max == 6000
    assert warnings == []


@pytest.mark.parametrize(
    "name", ["transactionTimeOut", "transactionMsgTimeout", "transactionTimeout"]
)
def test_every_spelling_of_the_time_of_transactions_counts(name: str) -> None:
    broker, _, _ = load_broker_config(f"{name}=7000", environment=HOME)
    assert broker.transaction_timeout_ms == 7000


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("listenPort=70000", ("listenPort", "70000", "0 to 65535")),
        ("listenPort=1_000", ("listenPort", "1_000", "0 to 65535")),
        ("listenPort=١٢٣", ("listenPort", "whole number")),
        ("maxMessageSize=4M", ("maxMessageSize", "4M", "1 to 15728640")),
        ("mapedFileSizeCommitLog=-1", ("mapedFileSizeCommitLog", "-1", "65536 to")),
        ("longPollingEnable=yes", ("longPollingEnable", "yes", "true or false")),
        ("flushDiskType=SYNC", ("flushDiskType", "SYNC", "ASYNC_FLUSH or SYNC_FLUSH")),
        ("brokerRole=SLAVE", ("brokerId = 0", "brokerId = 1")),
        ("brokerRole=SLAVE\nbrokerId=1\nsluiceConsensus=etcd://h:1", ("brokerRole", "Consensus")),
        ("sluiceConsensus=etcd://h:1", ("brokerId = 0", "1 or more")),
        ("enableDLegerCommitLog=true", ("enableDLegerCommitLog", "sluice up --replicas")),
        ("storePathRootDir=${NOPE}/x", ("storePathRootDir", "NOPE", "not set")),
        ("authenticationEnabled=TRUE", ("authenticationEnabled", "false")),
    ],
)
def test_a_bad_value_is_an_error_that_names_key_value_and_range(
    line: str, parts: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load_broker_config(line, environment=HOME)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "line", ["authenticationEnabled=false", "authorizationEnabled=", "enableDLegerCommitLog=False"]
)
def test_a_refused_key_may_be_false(line: str) -> None:
    assert len(load_broker_config(line, environment=HOME)[2]) == 1


@pytest.mark.parametrize(("written", "taken"), [(5000, 10_000), (30_000, 30_000), (90_000, 60_000)])
def test_the_registration_period_is_clamped_as_in_the_real_broker(written: int, taken: int) -> None:
    broker, _, _ = load_broker_config(f"registerNameServerPeriod={written}", environment=HOME)
    assert broker.register_period_ms == taken


def test_a_synchronous_master_waits_for_a_slave_unless_the_file_says_otherwise() -> None:
    def loaded(text: str) -> tuple[int, list[str]]:
        broker, _, warnings = load_broker_config(text, environment=HOME)
        return broker.in_sync_replicas, warnings

    assert loaded("brokerRole = SYNC_MASTER") == (2, [])
    assert loaded("brokerRole = ASYNC_MASTER\ninSyncReplicas = 3") == (1, [])
    assert loaded("brokerRole = SYNC_MASTER\ninSyncReplicas = 3") == (3, [])
    replicas, (warning,) = loaded("brokerRole = SYNC_MASTER\ninSyncReplicas = 1")
    assert replicas == 1
    assert "before a slave has them" in warning


def test_a_master_of_the_file_has_the_id_0() -> None:
    assert load_broker_config("brokerId = 3", environment=HOME)[0].broker_id == 0
    text = "brokerId = 3\nbrokerRole = SLAVE"
    assert load_broker_config(text, environment=HOME)[0].broker_id == 3


def test_messages_larger_than_a_file_are_warned_of() -> None:
    _, _, warnings = load_broker_config("mappedFileSizeCommitLog=65536", environment=HOME)
    assert len(warnings) == 1
    assert "maxMessageSize = 4194304" in warnings[0]


# ------------------------------------------------------------------------------ round trip


def test_the_text_of_a_broker_loads_to_the_same_broker() -> None:
    for text in (
        "",
        SEED_CONF,
        "namesrvAddr=a:1;b:2\nbrokerIP1=1.2.3.4\nmetricsExporterType=DISABLE",
    ):
        broker, store, _ = load_broker_config(text, environment=HOME)
        again = load_broker_config(text_of(broker, store), environment={})
        assert again[:2] == (broker, store)


def test_the_text_of_a_name_server_loads_to_the_same_name_server() -> None:
    config, warnings = load_name_server_config(
        "orderMessageEnable=true\nlistenPort=1\nclusterTest=true", environment=HOME
    )
    assert warnings == [
        "These keys have no effect, because SluiceMQ does not need it: clusterTest."
    ]
    assert load_name_server_config(text_of(config), environment=HOME) == (
        config,
        [],
    )


def test_a_change_is_in_force_for_live_keys_and_pending_for_others() -> None:
    broker, store, _ = load_broker_config("", environment=HOME)
    text = "autoCreateTopicEnable=false\nmapedFileSizeCommitLog=8388608\n"
    change = changed(text, broker, store)
    live = dataclasses.replace(broker, auto_create_topic=False)
    assert change.in_force == configs_of(live, store)
    assert change.at_next_start[Part.STORE].commit_log_file_bytes == 8388608
    assert change.pending == ["mappedFileSizeCommitLog", "maxHashSlotNum", "maxIndexNum"]
    assert "mappedFileSizeCommitLog takes effect at the next start." in change.warnings
    shown = settings_text(change.in_force, change.at_next_start).splitlines()
    assert "mappedFileSizeCommitLog=1073741824" in shown
    assert "sluicePending.mappedFileSizeCommitLog=8388608" in shown


ONE_A_REASON = {
    reason: name for name, reason in INERT.items() if name not in REFUSED | {"configBlackList": ""}
}


@pytest.mark.parametrize("name", sorted(ONE_A_REASON.values()))
def test_a_request_to_change_a_key_without_effect_is_refused_and_a_file_loads(name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        changed(f"{name}=1")
    assert name in str(caught.value)
    assert INERT[name] in str(caught.value)
    _, _, warnings = load_broker_config(f"{name}=1", environment=HOME)
    assert warnings == [f"These keys have no effect, because {INERT[name]}: {name}."]


def test_a_request_to_change_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Did you mean 'fileReservedTime'\?"):
        changed("fileReservedTimes=48")
    with pytest.raises(ConfigurationError, match="Nothing was changed"):
        changed("orderMessageEnabled=true", NameServerConfig())


def test_keys_without_effect_beside_others_are_named_in_the_remark() -> None:
    change = changed("fileReservedTime=48\nlistenPort=1\nclusterTest=true\nbrokrName=b")
    assert change.entries == {"fileReservedTime": "48", "listenPort": "1"}
    assert change.remark is not None
    for words in (
        "next start: listenPort",
        "clusterTest",
        "brokrName",
        "Did you mean 'brokerName'?",
    ):
        assert words in change.remark
    assert changed("fileReservedTime=48").remark is None
    assert changed("fileReservedTime=72\nclusterTest=true").remark is not None


def test_a_pending_change_is_checked_with_the_pending_ones_before_it() -> None:
    first = changed("enabledAppendPropCRC=true")
    with pytest.raises(ConfigurationError, match="forceVerifyPropCRC"):
        changed("forceVerifyPropCRC=true")
    second = change_settings(first.in_force, first.at_next_start, "forceVerifyPropCRC=true", ())
    assert second.pending == ["enabledAppendPropCRC", "forceVerifyPropCRC"]
    back = change_settings(
        first.in_force, second.at_next_start, "enabledAppendPropCRC=\nforceVerifyPropCRC=false", ()
    )
    assert back.pending == []


def test_a_pending_root_takes_the_paths_below_it_along() -> None:
    change = changed("storePathRootDir=/other/")
    store = change.at_next_start[Part.STORE]
    assert (store.root, store.commit_log_path) == ("/other", "/other/commitlog")
    given = StoreConfig(root="/old", commit_log_path="/fast/log")
    change = changed("storePathRootDir=/other", BrokerConfig(), given)
    assert change.at_next_start[Part.STORE].commit_log_path == "/fast/log"


def test_what_is_already_so_is_no_change() -> None:
    text = "storePathRootDir=${HOME}/x\ntls.server.keyPassword=1234\nbrokerName=b"
    broker, store, _ = load_broker_config(text, environment=HOME)
    answer = text_of(broker, store).replace(f"brokerConfigPath={broker.config_path}\n", "")
    lines = [line for line in answer.splitlines() if not line.startswith("brokerConfigPath")]
    change = changed("\n".join(lines), broker, store)
    assert (change.entries, change.pending) == ({}, [])
    assert change.at_next_start[Part.BROKER].tls_key_password == "1234"


@pytest.mark.parametrize(
    "text",
    ["/x/${PATH}", "/x/$PATH", "~/x", "/x/${user.home}", "\\u0024{PATH}", "/x/${NO_SUCH_VARIABLE}"],
)
@pytest.mark.parametrize("name", ["tls.server.trustCertPath", "storePathRootDir"])
def test_no_request_reads_the_environment(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must not use variables.*Write the path"):
        changed(f"{name}={text}")
    if name.startswith("tls"):
        with pytest.raises(ConfigurationError, match="must not use variables"):
            changed(f"{name}={text}", NameServerConfig())


def test_answers_show_paths_as_the_file_writes_them() -> None:
    environment = HOME | {"SECRET": "hunter2", "CERTIFICATES": "/etc/hunter2"}
    text = "storePathRootDir=/data/${SECRET}/\ntls.server.certPath=$CERTIFICATES/a.pem"
    broker, store, _ = load_broker_config(text, environment=environment)
    assert (store.root, broker.tls_certificate) == ("/data/hunter2", "/etc/hunter2/a.pem")
    shown = text_of(broker, store)
    assert "hunter2" not in shown
    assert "storePathRootDir=/data/${SECRET}\n" in shown
    assert "storePathCommitLog=/data/${SECRET}/commitlog\n" in shown
    assert "tls.server.certPath=$CERTIFICATES/a.pem\n" in shown
    config, _ = load_name_server_config("kvConfigPath=/d/${SECRET}/kv", environment=environment)
    assert config.kv_config_path == "/d/hunter2/kv"
    assert "hunter2" not in text_of(config)


@pytest.mark.parametrize(
    "line",
    [
        "brokerClusterName=../../etc",
        "brokerClusterName=..",
        "brokerName=a/b",
        f"brokerName={'n' * 128}",
        "msgTraceTopicName=a b",
        "brokerIP1=1.2.3.4/24",
        "bindAddress=here there",
        "namesrvAddr=nowhere",
        "namesrvAddr=a:9876;b:99999",
        "regionId=a\\u0001b",
        "messageDelayLevel=1x",
        "deleteWhen=25",
    ],
)
def test_a_value_is_checked_alike_at_the_start_and_in_a_request(line: str) -> None:
    name = line.partition("=")[0]
    with pytest.raises(ConfigurationError, match=name) as at_start:
        load_broker_config(line, environment=HOME)
    with pytest.raises(ConfigurationError, match=name) as by_request:
        changed(line)
    assert str(at_start.value) == str(by_request.value)


@given(
    st.dictionaries(
        st.sampled_from([key for key in KEYS if key.part in (Part.BROKER, Part.STORE)]),
        st.text(alphabet="ab1;:/\\\\ ${}~=#!\t\\u00e9\\u2028|.,-", max_size=12)
        | st.sampled_from(["${SECRET}", "~/x", "/a b/c", "true", "SYNC_FLUSH", "1s 2s", "05;16"]),
        max_size=4,
    )
)
def test_the_next_start_reads_what_a_request_has_written(changes: dict[Key, str]) -> None:
    lines = "\n".join(
        f"{key.name}={value.replace(chr(92), chr(92) * 2)}" for key, value in changes.items()
    )
    try:
        change = changed(lines)
    except (ConfigurationError, PermissionDeniedError):
        return
    text = edit_properties("", change.entries)
    broker, store, _ = load_broker_config(text, environment=HOME | {"SECRET": "hunter2"})
    started = configs_of(broker, store)
    for key in (key for key in changes if key.field not in ("register_period_ms", "acl_files")):
        value = getattr(started[key.part], key.field)
        if change.entries.get(key.name):
            assert value == getattr(change.at_next_start[key.part], key.field), key.name
        assert "hunter2" not in str(value)


def test_what_the_command_line_says_cannot_be_changed_by_a_request() -> None:
    broker, store, _ = load_broker_config("", overrides={"listenPort": "1"}, environment=HOME)
    with pytest.raises(ConfigurationError, match="listenPort is set on the command line"):
        changed("listenPort=2", broker, store)
    assert changed("listenPort=1", broker, store).entries == {}


@pytest.mark.parametrize("name", ["configBlackList", "brokerConfigPath", "rocketmqHome"])
def test_a_key_of_the_black_list_cannot_be_changed(name: str) -> None:
    with pytest.raises(PermissionDeniedError, match="black list") as caught:
        changed(f"traceOn=false\n{name}=/x")
    assert caught.value.code == 16


def test_a_bad_value_in_a_change_changes_nothing() -> None:
    with pytest.raises(ConfigurationError, match="waitSecondsForService"):
        changed("waitSecondsForService=soon", NameServerConfig())


def test_only_known_keys_of_a_change_go_to_the_file_under_their_own_names() -> None:
    text = "mapedFileSizeCommitLog=65536\nnope=1\nenableDLegerCommitLog=false"
    assert changed(text).entries == {"mappedFileSizeCommitLog": "65536"}


def test_choices_are_written_as_they_are_read() -> None:
    for key in KEYS:
        if key.kind is Kind.CHOICE:
            assert len({value for _word, value in key.choices}) == len(key.choices)


def test_a_log_over_several_paths_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="storePathCommitLog = /a,/b names several"):
        load_broker_config("storePathCommitLog = /a,/b")


def test_queue_extensions_are_answered_with_what_replaces_them() -> None:
    _broker, store, warnings = load_broker_config("enableConsumeQueueExt = true")
    assert "columns replace ConsumeQueueExt" in warnings[0]
    assert not store.checksum_property


def test_checksums_are_asked_for_in_the_words_of_rocketmq() -> None:
    text = "enabledAppendPropCRC = true\nforceVerifyPropCRC = true"
    _broker, store, warnings = load_broker_config(text)
    assert (store.checksum_property, store.checksum_property_required, warnings) == (True, True, [])
    with pytest.raises(ConfigurationError, match="discard every message"):
        load_broker_config("forceVerifyPropCRC = true")


# ---- the proxy


def test_a_proxy_reads_the_json_of_rocketmqs() -> None:
    text = """{
      "rocketMQClusterName": "c1", "namesrvAddr": "a:9876;b:9876", "grpcServerPort": 18081,
      "proxyMode": "CLUSTER", "tlsTestModeEnable": false, "tlsCertPath": "~/proxy.pem",
      "enableACL": true, "grpcThreadPoolNums": 20, "grpcServerPrt": 1, "namesrvDomain": null
    }"""
    config, warnings = load_proxy_config(text, environment=HOME, path="/etc/mq/rmq-proxy.json")
    assert (config.cluster, config.listen_port) == ("c1", 18081)
    assert config.name_server_addresses == ("a:9876", "b:9876")
    assert (config.tls_test_mode, config.tls_certificate) == (False, "/home/mq/proxy.pem")
    assert config.acl_files[0] == "/etc/mq/plain_acl.yml"
    assert len(warnings) == 2
    assert "Did you mean 'grpcServerPort'?" in warnings[0]
    assert "grpcThreadPoolNums" in warnings[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a flat JSON object"),
        ('{"a": {}}', "not a flat JSON object"),
        ('{"proxyMode": "LOCAL"}', "proxyMode"),
        ('{"grpcServerPort": "x"}', "grpcServerPort"),
    ],
)
def test_what_is_no_settings_of_a_proxy_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_proxy_config(text, environment=HOME)


def test_a_proxy_without_a_file_has_its_defaults() -> None:
    config, warnings = load_proxy_config("", overrides={"grpcServerPort": "0"}, environment=HOME)
    assert (config.listen_port, config.cluster, warnings) == (0, None, [])


# ---- the proxy in a broker's process


def local_proxy(
    text: str, conf: str = "", **overrides: str
) -> tuple[BrokerConfig, ProxyLimits, list[str]]:
    broker, _, _ = load_broker_config(conf, overrides=overrides, environment=HOME)
    return load_local_proxy_config(text, broker, environment=HOME)


def test_a_proxy_in_a_broker_reads_its_own_file() -> None:
    text = """{
      "proxyMode": "local", "brokerConfigPath": "/etc/mq/broker.conf", "grpcServerPort": 18081,
      "tlsCertPath": "~/proxy.pem", "tlsTestModeEnable": false, "minInvisibleTimeMillsForRecv": 1
    }"""
    conf = "brokerName=b\nbindAddress=10.0.0.1\ntls.server.certPath=/broker.pem\ngrpcServerPort=1"
    config, limits, warnings = local_proxy(text, conf)
    assert (config.proxy_port, config.tls_certificate) == (18081, "/home/mq/proxy.pem")
    assert not config.tls_test_mode
    assert (config.broker_name, config.bind_address) == ("b", "10.0.0.1")
    assert (limits.invisible_ms_min, limits.invisible_ms_max) == (1, 43_200_000)
    assert warnings == []


def test_the_command_line_wins_over_the_file_of_the_proxy() -> None:
    text = '{"grpcServerPort": 18081, "bindAddress": "10.0.0.2"}'
    config, _, _ = local_proxy(text, grpcServerPort="0", bindAddress="127.0.0.1")
    assert (config.proxy_port, config.bind_address) == (0, "127.0.0.1")


def test_what_the_broker_decides_is_named() -> None:
    text = """{
      "proxyMode": "CLUSTER", "namesrvAddr": "a:9876", "metricsPromExporterPort": 1,
      "plainAclFile": "x.yml", "grpcThreadPoolNums": 3, "grpcServerPrt": 1
    }"""
    _, _, warnings = local_proxy(text)
    said = " ".join(warnings)
    for words in (
        "proxyMode is taken as LOCAL", "namesrvAddr", "metricsPromExporterPort", "plainAclFile",
        "grpcThreadPoolNums", "Did you mean 'grpcServerPort'?",
    ):  # fmt: skip
        assert words in said


def test_a_proxy_is_not_left_open_that_wants_access_control() -> None:
    with pytest.raises(ConfigurationError, match="true for the proxy but not for the broker"):
        local_proxy('{"enableACL": true}')
    config, _, warnings = local_proxy('{"enableACL": true}', "aclEnable=true")
    assert (config.acl_enable, warnings) == (True, [])


KEYS_OF_PROXY = [key for key in KEYS if key.part is Part.PROXY]


@pytest.mark.parametrize("key", KEYS_OF_PROXY, ids=[key.name for key in KEYS_OF_PROXY])
def test_every_key_of_a_proxy_counts_in_a_broker_or_is_named(key: Key) -> None:
    text = value_text(key, key.default() if callable(key.default) else key.default)
    text = text or ("x:1" if key.kind is Kind.SERVERS else "x")
    text = {"false": "true", "true": "false"}.get(text, text)
    text = str(int(text) + 1) if text.isdigit() else text
    if len(key.choices) > 1:
        text = key.choices[-1][0]
    conf = "aclEnable=true"
    config, limits, warnings = local_proxy(json.dumps({key.name: text}), conf)
    broker, no_limits, _ = local_proxy("{}", conf)
    changed = (config, limits) != (broker, no_limits)
    assert changed or key.name in " ".join(warnings) or key.field in ("acl_enable", "mode")


@pytest.mark.parametrize("sign", ["", "-", "+"])
def test_a_number_of_5000_digits_is_refused_with_its_range(sign: str) -> None:
    """Python's int() raises for more than 4,300 digits."""
    with pytest.raises(ConfigurationError) as refused:
        load_broker_config(f"listenPort = {sign}{'9' * 5000}")
    text = str(refused.value)
    assert "Write a whole number from 0 to 65535." in text
    assert len(text) < 300
