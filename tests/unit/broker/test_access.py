"""Access control at a broker: the door, the quick way, what handlers decide, changes by request."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from simulation.stepped import SteppedBroker, SteppedClient, pull_fields, send_fields
from sluicemq.acl.guard import Guard
from sluicemq.broker.metrics import BrokerCollector
from sluicemq.config import BrokerConfig
from sluicemq.errors import ConfigurationError
from sluicemq.files import overwrite_text
from sluicemq.model.subscription import Subscription
from sluicemq.testing.files import CrashableFiles
from sluicemq.wire.bodies import ConsumerData, Heartbeat, encode_heartbeat
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.popping import ReceiptHandle
from sluicemq.wire.signature import sign_command

PATH = "/store/conf/plain_acl.yml"
RULES = """\
accounts:
- accessKey: writer1
  secretKey: secret-of-writer
  topicPerms: [T=PUB, U=PUB]
- accessKey: reader1
  secretKey: secret-of-reader
  defaultGroupPerm: SUB
  topicPerms: [T=SUB]
- accessKey: operator
  secretKey: secret-of-operator
  admin: true
"""
SECRETS = ("secret-of-writer", "secret-of-reader", "secret-of-operator")


def write(files: CrashableFiles, text: str, path: str = PATH) -> None:
    files.make_directory("/store/conf")
    if files.exists(path):
        overwrite_text(files, path, text)
        return
    file = files.open(path, create=True)
    file.pwrite(text.encode(), 0)
    file.close()


def start(rules: str = RULES, *, holds_announcements: bool = False) -> SteppedBroker:
    files = CrashableFiles()
    write(files, rules)
    config = BrokerConfig(
        broker_name="broker-a", metrics_enable=False, acl_enable=True, acl_files=(PATH,)
    )
    return SteppedBroker(config=config, files=files, holds_announcements=holds_announcements)


class Account:
    """A client that signs."""

    def __init__(self, broker: SteppedBroker, name: str = "", secret: str = "") -> None:
        self.broker, self.name, self.secret = broker, name, secret
        self.client: SteppedClient = broker.connect("10.0.0.9")
        self._opaque = 0

    def signed(self, code: int, fields: dict[str, object], body: bytes = b"") -> Command:
        self._opaque += 1
        command = Command(
            code, {name: str(value) for name, value in fields.items()}, body, self._opaque
        )
        if self.name:
            sign_command(command, self.name, self.secret)
        return command

    def call(
        self, code: int, fields: dict[str, object] | None = None, body: bytes = b""
    ) -> Command:
        command = self.signed(code, fields or {}, body)
        self.client.feed(command)
        self.broker.settle()
        return self.client.answers[command.opaque]


@pytest.fixture
def broker() -> SteppedBroker:
    return start()


def writer(broker: SteppedBroker) -> Account:
    return Account(broker, "writer1", "secret-of-writer")


def reader(broker: SteppedBroker) -> Account:
    return Account(broker, "reader1", "secret-of-reader")


def operator(broker: SteppedBroker) -> Account:
    return Account(broker, "operator", "secret-of-operator")


def test_sends_pass_with_the_right_signature_and_permission_alone(broker: SteppedBroker) -> None:
    assert writer(broker).call(310, send_fields("T"), b"one").code == 0
    for account, words in (
        (Account(broker), "No accessKey is configured"),
        (Account(broker, "nobody1", "x"), "No acl config for nobody1"),
        (Account(broker, "writer1", "wrong"), "Check signature failed"),
        (reader(broker), "No permission for topic:T"),
    ):
        answer = account.call(310, send_fields("T"), b"two")
        assert answer.code == 1
        assert (answer.remark or "").startswith("org.apache.rocketmq.acl.common.AclException: ")
        assert words in (answer.remark or "")
    assert broker.store.queue_offsets("T", 0)[1] == 1


def test_a_refused_one_way_request_gets_no_answer(broker: SteppedBroker) -> None:
    account = Account(broker)
    command = account.signed(310, send_fields("T"))
    command.flag = FLAG_ONEWAY
    account.client.feed(command)
    broker.settle()
    assert account.client.log == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda command: command.fields.update(b="U2"),
        lambda command: command.fields.update(i="UNIQ_KEY\x01ZZ99\x02"),
        lambda command: command.fields.update(Signature="AAAA"),
        lambda command: command.fields.pop("Signature"),
        lambda command: command.fields.update(extra="x"),
        lambda command: command.fields.update(AccessKey="reader1"),
        lambda command: setattr(command, "body", b"other"),
    ],
)
def test_the_quick_way_refuses_what_the_usual_way_refuses(
    broker: SteppedBroker, spoil: Callable[[Command], object]
) -> None:
    account = writer(broker)
    for _ in range(3):  # the quick way knows account, topic and fields from now on
        assert account.call(310, send_fields("T"), b"body").code == 0
    command = account.signed(310, send_fields("T"), b"body")
    spoil(command)
    account.client.feed(command)
    broker.settle()
    assert account.client.answers[command.opaque].code == 1
    assert broker.store.queue_offsets("T", 0)[1] == 3


def test_plain_sends_take_the_quick_way_past_the_guard(
    broker: SteppedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    account = writer(broker)
    for _ in range(3):
        account.call(310, send_fields("T"), b"body")
    monkeypatch.setattr(Guard, "check", None)  # the usual way would fail now
    assert account.call(310, send_fields("T"), b"body").code == 0


def test_no_place_in_the_log_is_a_way_around_permissions(broker: SteppedBroker) -> None:
    broker_writer, one = writer(broker), reader(broker)
    for topic in ("T", "U"):
        assert broker_writer.call(310, send_fields(topic), topic.encode()).code == 0
    places = {topic: broker.store.reader.read(topic, 0, 0, 1) for topic in ("T", "U")}
    offset = {topic: len(bytes(b"".join(places["T"].data))) * (topic == "U") for topic in places}
    assert one.call(33, {"offset": offset["T"]}).code == 0
    answer = one.call(33, {"offset": offset["U"]})
    assert (answer.code, "No default permission for topic:U" in (answer.remark or "")) == (1, True)
    back = {"group": "G", "delayLevel": 1, "originMsgId": "", "originTopic": "T"}
    assert "topic:U" in (one.call(36, back | {"offset": offset["U"]}).remark or "")
    assert one.call(36, back | {"offset": offset["T"]}).code == 0
    assert one.call(11, pull_fields("U")).code == 1
    assert one.call(12, {"topic": "U", "key": "k", "maxNum": 1, "beginTimestamp": 0,
                         "endTimestamp": 1}).code == 1  # fmt: skip


def test_a_transaction_ends_by_who_may_send_to_its_topic(broker: SteppedBroker) -> None:
    half = "TRAN_MSG\x01true\x02PGROUP\x01P\x02UNIQ_KEY\x01AB13\x02"
    assert writer(broker).call(310, send_fields("U", half, f=4), b"half").code == 0
    end = {"producerGroup": "P", "tranStateTableOffset": 0, "commitLogOffset": 0,
           "commitOrRollback": 8, "topic": "T", "msgId": "", "transactionId": ""}  # fmt: skip
    rules = RULES.replace("topicPerms: [T=SUB]", "topicPerms: [T=PUB|SUB]")
    write(broker.files, rules)
    guard = broker.core.guard
    assert guard is not None
    guard.apply_checked_files(guard.check_files())
    answer = reader(broker).call(37, end)
    assert "topic:U" in (answer.remark or "")
    assert writer(broker).call(37, end | {"topic": "U"}).code == 0


@pytest.mark.parametrize(
    ("topics", "refused"),
    [
        (["T"], ""),
        (["%RETRY%G", "T"], ""),
        (["U", "%RETRY%G", "T"], "topic:U"),
        (["%RETRY%G", "T", "U"], "topic:U"),
    ],
)
def test_a_heartbeat_is_refused_for_any_topic_that_the_account_may_not_read(
    broker: SteppedBroker, topics: list[str], refused: str
) -> None:
    consumer = ConsumerData("G", subscriptions=tuple(map(Subscription, topics)))
    beat = encode_heartbeat(Heartbeat("c1", (), (consumer,)))
    answer = reader(broker).call(34, {}, beat)
    assert answer.code == (1 if refused else 0), answer.remark
    assert refused in (answer.remark or "")
    assert ("G" in broker.core.consumers.groups) == (not refused)


@pytest.mark.parametrize(("topic", "is_refused"), [("%RETRY%G_T", False), ("%RETRY%G_U", True)])
def test_acknowledging_a_retry_needs_the_permission_of_the_topic_it_comes_from(
    broker: SteppedBroker, topic: str, is_refused: bool
) -> None:
    fields = {"consumerGroup": "G", "topic": topic, "queueId": 0, "offset": 0,
              "extraInfo": ReceiptHandle(
                  0, 1, 60_000, 0, 1, "broker-a", 0, 0, 0).encode()}  # fmt: skip
    remark = reader(broker).call(200051, fields).remark or ""
    assert ("No default permission for topic:U" in remark) == is_refused
    assert ("permission" in remark) == is_refused


def test_administration_needs_an_admin(broker: SteppedBroker) -> None:
    for code in (17, 25, 26, 28, 43, 50, 51, 52, 53, 54, 200, 207, 215, 222, 307, 309, 900121):
        assert "Need admin permission" in (reader(broker).call(code, {}).remark or ""), code
    assert operator(broker).call(28).code == 0


def test_a_change_is_answered_when_slaves_have_it() -> None:
    broker = start(holds_announcements=True)
    admin = operator(broker)
    changes: tuple[tuple[int, dict[str, object]], ...] = (
        (50, {"accessKey": "newcomer", "secretKey": "secret-of-it", "admin": "false"}),
        (51, {"accessKey": "newcomer"}),
        (53, {"globalWhiteAddrs": "10.1.1.1"}),
    )
    for code, fields in changes:
        command = admin.signed(code, fields)
        admin.client.feed(command)
        broker.settle()
        assert command.opaque not in admin.client.answers
        broker.finish_announcements()
        assert admin.client.answers[command.opaque].code == 0


def test_accounts_change_by_request_and_are_in_force_before_the_answer(
    broker: SteppedBroker,
) -> None:
    admin = operator(broker)
    fields: dict[str, object] = {
        "accessKey": "newcomer", "secretKey": "secret-of-it", "admin": "false",
        "topicPerms": "T=PUB|SUB,N=PUB", "groupPerms": "G=SUB", "defaultTopicPerm": "DENY",
    }  # fmt: skip
    assert admin.call(50, fields).code == 0
    assert Account(broker, "newcomer", "secret-of-it").call(310, send_fields("N")).code == 0
    assert admin.call(50, {"accessKey": "newcomer", "topicPerms": "T=PUB"}).code == 0
    assert Account(broker, "newcomer", "secret-of-it").call(310, send_fields("N")).code == 1
    assert Account(broker, "newcomer", "secret-of-it").call(310, send_fields("T")).code == 0
    version = json.loads((admin.call(52).fields or {})["version"])
    assert version["counter"] == 2
    assert admin.call(53, {"globalWhiteAddrs": "10.1.1.1,10.2.*.*"}).code == 0
    shown = json.loads(bytes(admin.call(54).body))
    assert shown["globalWhiteAddrs"] == ["10.1.1.1", "10.2.*.*"]
    assert {one["secretKey"] for one in shown["plainAccessConfigs"]} == {"******"}
    assert admin.call(51, {"accessKey": "newcomer"}).code == 0
    assert Account(broker, "newcomer", "secret-of-it").call(310, send_fields("T")).code == 1
    assert writer(broker).call(310, send_fields("T")).code == 0, "the others are as they were"


FULL = {
    "secretKey": "secret-of-it", "admin": "false", "topicPerms": "T=PUB", "groupPerms": "G=SUB",
    "defaultTopicPerm": "PUB", "defaultGroupPerm": "SUB", "whiteRemoteAddress": "10.3.3.3",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("topicPerms", []), ("groupPerms", []), ("whiteRemoteAddress", ""),
        ("secretKey", "secret-of-it"), ("defaultTopicPerm", "PUB"), ("defaultGroupPerm", "SUB"),
        ("admin", False),
    ],
)  # fmt: skip
def test_an_empty_field_clears_a_list_and_an_absent_one_changes_nothing(
    name: str, after: object, broker: SteppedBroker
) -> None:
    def entry() -> dict[str, object]:
        text = broker.files.open(PATH).pread(10_000, 0).decode()
        accounts = yaml.safe_load(text)["accounts"]
        return next(one for one in accounts if one["accessKey"] == "newcomer")

    admin = operator(broker)
    assert admin.call(50, {"accessKey": "newcomer", **FULL}).code == 0
    before = entry()
    assert admin.call(50, {"accessKey": "newcomer"}).code == 0
    assert entry() == before
    for empty in ("", " ") if name.endswith("Perms") else ("",):
        assert admin.call(50, {"accessKey": "newcomer", name: empty}).code == 0
        assert entry() == before | {name: after}


def test_permissions_that_are_taken_away_are_gone_before_the_answer(broker: SteppedBroker) -> None:
    assert writer(broker).call(310, send_fields("T")).code == 0
    assert operator(broker).call(50, {"accessKey": "writer1", "topicPerms": ""}).code == 0
    assert writer(broker).call(310, send_fields("T")).code == 1
    assert operator(broker).call(50, {"accessKey": "writer1", "topicPerms": "T=PUB"}).code == 0
    assert writer(broker).call(310, send_fields("T")).code == 0


@pytest.mark.parametrize(
    ("code", "fields", "failed"),
    [
        (50, {"accessKey": "newcomer", "secretKey": "short"}, 209),
        (50, {"accessKey": "writer1", "topicPerms": "T=ANYTHING"}, 209),
        (51, {"accessKey": "nobody1"}, 210),
        (53, {"globalWhiteAddrs": "10.*.1.1"}, 211),
        (53, {"globalWhiteAddrs": "", "aclFileFullPath": "/store/../etc/passwd"}, 211),
    ],
)
def test_what_would_not_load_is_not_written(
    broker: SteppedBroker, code: int, fields: dict[str, object], failed: int
) -> None:
    before = broker.files.open(PATH).pread(10_000, 0)
    answer = operator(broker).call(code, fields)
    assert answer.code == failed
    assert not any(secret in (answer.remark or "") for secret in SECRETS)
    assert broker.files.open(PATH).pread(10_000, 0) == before


def test_of_a_thousand_edits_under_traffic_no_request_sees_a_mixture(broker: SteppedBroker) -> None:
    """Each edition has one account whose secret and only topic carry its number."""
    guard = broker.core.guard
    assert guard is not None

    def edition(number: int) -> str:
        name, topic = f"secret-{number:05d}", f"T{number % 7}"
        return (
            f"accounts:\n- accessKey: account1\n  secretKey: {name}\n  topicPerms: [{topic}=PUB]\n"
        )

    for number in range(1000):
        write(broker.files, edition(number))
        found = guard.check_files()
        before, after = max(number - 1, 0), number
        for now, edit in ((before, number > 0), (after, True)):
            if now == after:
                guard.apply_checked_files(found)
            if not edit:
                continue
            account = Account(broker, "account1", f"secret-{now:05d}")
            topics = {
                topic for topic in range(7) if account.call(310, send_fields(f"T{topic}")).code == 0
            }
            assert topics == {now % 7}
            stale = Account(broker, "account1", f"secret-{now ^ 1:05d}")
            assert stale.call(310, send_fields(f"T{(now ^ 1) % 7}")).code == 1


def test_status_and_metrics_tell_who_was_refused_and_no_secret(broker: SteppedBroker) -> None:
    from prometheus_client import generate_latest
    from prometheus_client.core import CollectorRegistry

    for account in (Account(broker), Account(broker, "invented", "x"), reader(broker)):
        account.call(310, send_fields("T"))
    write(broker.files, "accounts: nonsense")
    guard = broker.core.guard
    assert guard is not None
    guard.apply_checked_files(guard.check_files())
    status = json.loads(bytes(operator(broker).call(900121).body))
    assert status["refused"] == {"": 1, "?": 1, "reader1": 1}
    assert "a list of accounts" in status["error"]
    assert status["sinceMs"] == broker.clock.now_ms()
    registry = CollectorRegistry()
    registry.register(BrokerCollector(lambda: broker.core))
    page = generate_latest(registry).decode()
    assert 'access_key="reader1"' in page
    assert "sluicemq_access_rules_stale{" in page
    for text in (page, json.dumps(status), repr(guard.rules), repr(vars(guard).get("rules"))):
        assert not any(secret in text for secret in SECRETS)


def test_without_access_control_its_requests_say_so() -> None:
    broker = SteppedBroker()
    account = Account(broker)
    assert "aclEnable is false" in (account.call(54).remark or "")
    assert json.loads(bytes(account.call(900121).body)) == {"enabled": False}


def test_a_start_without_the_file_is_refused_with_a_cure() -> None:
    config = BrokerConfig(acl_enable=True, acl_files=("/nowhere/plain_acl.yml",))
    with pytest.raises(ConfigurationError, match=r"/nowhere/plain_acl\.yml") as caught:
        SteppedBroker(config=config)
    assert "plainAclFile" in caught.value.fix


def test_a_forged_destination_does_not_keep_readers_from_a_message(broker: SteppedBroker) -> None:
    """REAL_TOPIC says where a message is bound for in the topics in which messages wait. In any
    other topic a producer may have written it."""
    forged = send_fields("T", "UNIQ_KEY\x01AB12\x02REAL_TOPIC\x01U\x02REAL_QID\x010\x02")
    place = (writer(broker).call(310, forged, b"x").fields or {})["msgId"]
    assert reader(broker).call(33, {"offset": int(place[16:], 16)}).code == 0
    delayed = send_fields("U", "UNIQ_KEY\x01AB13\x02DELAY\x013\x02")
    place = (writer(broker).call(310, delayed, b"x").fields or {})["msgId"]
    assert reader(broker).call(33, {"offset": int(place[16:], 16)}).code == 1


@pytest.mark.parametrize(
    "topic",
    [
        "SCHEDULE_TOPIC_XXXX",
        "rmq_sys_wheel_timer",
        "RMQ_SYS_TRANS_HALF_TOPIC",
        "RMQ_SYS_TRANS_OP_HALF_TOPIC",
        "TRANS_CHECK_MAX_TIME_TOPIC",
        "rmq_sys_sluice_staging",
        "rmq_sys_sluice_epochs",
        "rmq_sys_REVIVE_LOG_DefaultCluster",
    ],
)
def test_no_default_opens_the_topics_that_hold_messages_of_all(topic: str) -> None:
    rules = (
        RULES
        + """\
- accessKey: anybody1
  secretKey: secret-of-anybody
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: SUB
"""
    )
    account = Account(start(rules), "anybody1", "secret-of-anybody")
    assert "No default permission" in (account.call(11, pull_fields(topic)).remark or "")
    assert "No default permission" not in (account.call(11, pull_fields("T")).remark or "")


# ------------------------------------------- what docs/security.md says that signatures do not do


def recorded(broker: SteppedBroker, code: int, fields: dict[str, object], body: bytes = b"") -> Any:
    """Return a signed request of the operator as a reader of the network has it, after the broker
    has answered it."""
    account = operator(broker)
    command = account.signed(code, fields, body)
    account.client.feed(command)
    broker.settle()
    return command


def replayed(broker: SteppedBroker, command: Command) -> Command:
    """Return the answer to a recorded request that somebody without an account sends."""
    stranger = broker.connect("10.0.0.66")
    stranger.feed(command)
    broker.settle()
    return stranger.answers[command.opaque]


GROUP_CONFIG = json.dumps({"groupName": "Victim", "retryMaxTimes": 3}).encode()


def made(broker: SteppedBroker) -> SteppedBroker:
    """Create the topic and the group Victim."""
    account = operator(broker)
    assert account.call(310, send_fields("Victim"), b"precious").code == 0
    assert account.call(200, {}, GROUP_CONFIG).code == 0
    return broker


def test_a_recorded_request_deletes_a_topic_under_another_code(broker: SteppedBroker) -> None:
    """The request code is not signed: GET_TOPIC_STATS_INFO (202) becomes
    DELETE_TOPIC_IN_BROKER (215)."""
    command = recorded(made(broker), 202, {"topic": "Victim"})
    assert "Victim" in broker.core.topics
    command.code = 215
    assert replayed(broker, command).code == 0
    assert "Victim" not in broker.core.topics


def test_a_recorded_request_deletes_a_group_under_another_name_of_its_field(
    broker: SteppedBroker,
) -> None:
    """Names of fields are not signed: only their order counts."""
    command = recorded(made(broker), 202, {"topic": "Victim"})
    fields = dict(command.fields or {})
    fields["groupName"] = fields.pop("topic")
    command.code, command.fields = 207, fields
    assert broker.core.groups.get_or_create("Victim") is not None
    assert replayed(broker, command).code == 0
    assert "Victim" not in broker.core.groups.table


def test_a_recorded_send_is_accepted_at_any_time_and_by_every_server(
    broker: SteppedBroker,
) -> None:
    """Neither the time nor the server is signed."""
    command = recorded(broker, 310, send_fields("T"), b"pay 5")
    broker.clock.advance(400 * 24 * 3600)
    assert replayed(broker, command).code == 0
    assert broker.store.queue_offsets("T", 0)[1] == 2
    other = start()
    assert replayed(other, command).code == 0
    assert other.store.queue_offsets("T", 0)[1] == 1


def test_characters_move_from_one_value_to_the_next(broker: SteppedBroker) -> None:
    """Where a value ends is not signed: `queueId` stands before `topic`."""
    command = recorded(made(broker), 30, {"queueId": 0, "topic": "0Victim"})
    fields = dict(command.fields or {})
    assert fields["queueId"] + fields["topic"] == "00Victim"
    command.fields = fields | {"queueId": "00", "topic": "Victim"}
    answer = replayed(broker, command)
    assert (answer.code, (answer.fields or {})["offset"]) == (0, "1")


def test_a_recorded_request_can_be_made_one_way(broker: SteppedBroker) -> None:
    """Flags are not signed: the caller is not told."""
    command = recorded(broker, 310, send_fields("T"), b"pay 5")
    command.flag = FLAG_ONEWAY
    stranger = broker.connect("10.0.0.66")
    stranger.feed(command)
    broker.settle()
    assert stranger.log == []
    assert broker.store.queue_offsets("T", 0)[1] == 2


def test_values_and_body_of_a_recorded_request_cannot_be_changed(broker: SteppedBroker) -> None:
    command = recorded(broker, 310, send_fields("T"), b"pay 5")
    command.body = b"pay 9"
    assert "Check signature failed" in (replayed(broker, command).remark or "")
    command.body, command.fields = b"pay 5", {**(command.fields or {}), "b": "U"}
    assert "Check signature failed" in (replayed(broker, command).remark or "")


def test_the_page_on_security_names_each_gap_and_recommends_tls_first() -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    first, _, rest = page.partition("## What a signature does not do")
    assert "**Set up TLS first**" in first.partition("## Protected mode")[0]
    for gap in ("the time", "the request code", "the server", "names of fields", "flags"):
        assert f"| {gap}" in rest
    assert "deletes the topic as DELETE_TOPIC_IN_BROKER (215)" in rest
