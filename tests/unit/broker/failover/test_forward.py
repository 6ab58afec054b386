"""A replica that is not master passes on what only the master answers."""

import asyncio
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest

from sluicemq.acl.guard import Access, Guard
from sluicemq.acl.loading import RuleSource
from sluicemq.acl.verdict import SUB
from sluicemq.broker.failover.forward import MASTER_WAIT_S, NOT_MASTER, Forwarder, NotMasterError
from sluicemq.files import SYSTEM_FILES
from sluicemq.net.channel import Channel
from sluicemq.net.dispatch import Authorize, Dispatcher, Handler, Outcome, Peer
from sluicemq.net.network import MemoryNetwork
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.frames import Command
from sluicemq.wire.signature import ACCESS_KEY, sign_command

pytestmark = pytest.mark.slow

MASTER, OTHER, REPLICA = "10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"


class World:
    """Masters that say who they are, and a replica before them."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.forwarder = Forwarder(self.network.dial)
        self.seen: dict[str, list[tuple[int, Peer]]] = {MASTER: [], OTHER: [], REPLICA: []}
        self.refuses: set[str] = set()

    def handlers(self, name: str) -> dict[int, Handler]:
        def handle(command: Command, peer: Peer) -> Command:
            self.seen[name].append((command.code, peer))
            if name in self.refuses:
                raise NotMasterError
            return Command(0, {"by": name, "body": bytes(command.body).decode()})

        codes = (Code.SEND_MESSAGE_V2, Code.HEART_BEAT, Code.PULL_MESSAGE, Code.GET_BROKER_CONFIG)
        return dict.fromkeys(map(int, codes), handle)

    async def serve(
        self,
        name: str,
        handlers: Mapping[int, Handler] | None = None,
        before: Authorize | None = None,
    ) -> None:
        host, _, port = name.partition(":")
        listener = self.network.listener(
            Dispatcher(handlers or self.handlers(name), authorize=before),
            on_disconnect=self.forwarder.disconnected,
        )
        await listener.start(host, [int(port)])

    async def replica(self, *, serves_reads: bool = False) -> Channel:
        local = self.handlers(REPLICA)
        made = self.forwarder.handlers(local, is_slave=True, serves_reads=serves_reads)
        await self.serve(REPLICA, made)
        return await self.network.dial(REPLICA)


def send(text: str) -> Command:
    return Command(Code.SEND_MESSAGE_V2, {"topic": "t"}, text.encode())


async def test_a_send_is_answered_by_the_master_and_a_question_to_the_replica_by_itself() -> None:
    world = World()
    await world.serve(MASTER)
    channel = await world.replica()
    world.forwarder.master = MASTER
    answers = await asyncio.gather(*(channel.call(send(f"{i}"), 5) for i in range(50)))
    assert [it.fields for it in answers] == [{"by": MASTER, "body": f"{i}"} for i in range(50)]
    assert len({peer for _, peer in world.seen[MASTER]}) == 1
    own = await channel.call(Command(Code.GET_BROKER_CONFIG), 5)
    assert own.fields is not None
    assert own.fields["by"] == REPLICA
    await world.forwarder.close()


async def test_the_master_is_told_first_for_whom_a_tunnel_speaks() -> None:
    world = World()
    told: list[Command] = []
    handlers = world.handlers(MASTER)

    def speak_for(command: Command, peer: Peer) -> None:
        assert not world.seen[MASTER]
        told.append(command)

    await world.serve(MASTER, {**handlers, Code.SLUICE_SPEAK_FOR: speak_for})
    world.forwarder.sign = lambda command: Command(command.code, {**command.fields, "by": "us"})
    channel = await world.replica()
    world.forwarder.master = MASTER
    assert (await channel.call(send("x"), 5)).code == 0
    (peer,) = {peer for _, peer in world.seen[REPLICA]} or {None}
    assert peer is None, "the replica has handled nothing"
    (command,) = told
    (tunnelled,) = world.forwarder._tunnels
    host = tunnelled.remote
    assert command.fields == {"address": host.address, "port": str(host.port), "by": "us"}
    await world.forwarder.close()


RULES = """accounts:
- {accessKey: replica, secretKey: '12345678', admin: true}
- {accessKey: bob-smith, secretKey: '87654321', groupPerms: [G=SUB]}
"""


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    (tmp_path / "plain_acl.yml").write_text(RULES)
    found = Guard(RuleSource(SYSTEM_FILES, str(tmp_path / "plain_acl.yml")))
    found.load()
    return found


async def test_what_the_proxy_asks_for_an_account_has_the_rights_of_that_account(
    guard: Guard,
) -> None:
    """Handlers of the master look at rights too: whose record lies at the place that 36 names."""
    of_master, world = copy(guard), World()

    def send_back(command: Command, peer: Peer) -> Command:
        Access(of_master).require("SECRET", SUB)
        return Command(0)

    def sign(command: Command) -> Command:
        sign_command(command, "replica", "12345678")
        return command

    codes = Code.CONSUMER_SEND_MSG_BACK, Code.HEART_BEAT
    handlers: dict[int, Handler] = {**world.handlers(MASTER), codes[0]: send_back}
    await world.serve(MASTER, handlers, before=of_master.refuse_command)
    made = world.forwarder.handlers(handlers, is_slave=True, serves_reads=False)

    def in_the_name(handler: Handler) -> Handler:
        def handle(command: Command, peer: Peer) -> Outcome:
            assert command.fields is not None
            guard.account = guard.rules.accounts.get(command.fields.get("remark", ""))
            return handler(command, peer)

        return handle

    await world.serve(REPLICA, {code: in_the_name(it) for code, it in made.items()})
    channel = await world.network.dial(REPLICA)
    world.forwarder.master, world.forwarder.sign = MASTER, sign
    world.forwarder.get_guard = lambda: guard

    async def asked(who: str, code: int = codes[0]) -> str:
        fields = {"offset": "0", "group": "G", "delayLevel": "0", "remark": who}
        body = b'{"clientID":"c","consumerDataSet":[]}'
        answer = await channel.call(Command(code, fields, body), 5)
        return answer.remark or ""

    found = await asyncio.gather(asked("bob-smith"), asked(""))
    assert ["No default permission for topic:SECRET" in it for it in found] == [True, False]
    heard = len(world.seen[MASTER])
    assert await asked("bob-smith", codes[1]) == ""
    await asyncio.sleep(0.01)
    assert len(world.seen[MASTER]) == heard + 1
    assert of_master.account is not None
    assert of_master.account.access_key == "bob-smith"
    await world.forwarder.close()


async def test_what_is_signed_stays_so_and_without_access_control_nothing_is_signed(
    guard: Guard,
) -> None:
    world = World()
    signatures: list[str | None] = []

    def take(command: Command, peer: Peer) -> Command:
        signatures.append((command.fields or {}).get(ACCESS_KEY))
        return Command(0)

    await world.serve(MASTER, {**world.handlers(MASTER), Code.SEND_MESSAGE_V2: take})
    world.forwarder.sign = lambda command: replace(
        command, fields={**(command.fields or {}), ACCESS_KEY: "replica"}
    )
    channel = await world.replica()
    world.forwarder.master = MASTER
    signed = send("x")
    signed.fields = {**(signed.fields or {}), ACCESS_KEY: "client"}
    guards: list[Guard | None] = []
    world.forwarder.get_guard = lambda: guards[-1]
    for each in (None, guard):
        guards.append(each)
        for command in (send("x"), signed):
            assert (await channel.call(command, 5)).code == 0
    assert signatures == [None, "client", "replica", "client"]
    await world.forwarder.close()


async def test_pulls_are_forwarded_unless_the_replica_serves_readers() -> None:
    for serves_reads, by in ((False, MASTER), (True, REPLICA)):
        world = World()
        await world.serve(MASTER)
        channel = await world.replica(serves_reads=serves_reads)
        world.forwarder.master = MASTER
        answer = await channel.call(Command(Code.PULL_MESSAGE), 5)
        assert answer.fields is not None
        assert answer.fields["by"] == by
        await world.forwarder.close()


async def test_requests_wait_while_nobody_is_master_and_then_go_in_order() -> None:
    world = World()
    channel = await world.replica()
    calls = [asyncio.ensure_future(channel.call(send(f"{i}"), 5)) for i in range(5)]
    await asyncio.sleep(0.1)
    await world.serve(OTHER)
    world.forwarder.master = OTHER
    answers = await asyncio.gather(*calls)
    assert [it.fields and it.fields["body"] for it in answers] == list("01234")
    await world.forwarder.close()


async def test_who_waited_long_enough_is_told_to_try_again() -> None:
    world = World()
    channel = await world.replica()
    began = asyncio.get_running_loop().time()
    answer = await channel.call(send("x"), 10)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert asyncio.get_running_loop().time() - began < MASTER_WAIT_S + 0.5
    await world.forwarder.close()


async def test_a_forwarded_request_is_not_forwarded_again() -> None:
    world = World()
    channel = await world.replica()
    world.forwarder.master = REPLICA  # it thinks so, and that is it itself
    answer = await channel.call(send("x"), 10)
    assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE
    assert "try again" in (answer.remark or "")
    await world.forwarder.close()


async def test_one_that_is_master_no_more_is_asked_again_and_then_the_next() -> None:
    world = World()
    await world.serve(MASTER)
    await world.serve(OTHER)
    world.refuses.add(MASTER)
    channel = await world.replica()
    world.forwarder.master = MASTER
    call = asyncio.ensure_future(channel.call(send("x"), 5))
    await asyncio.sleep(0.12)
    assert len(world.seen[MASTER]) > 1
    world.forwarder.master = OTHER
    answer = await call
    assert answer.fields is not None
    assert answer.fields["by"] == OTHER
    assert NOT_MASTER
    await world.forwarder.close()


async def test_a_request_that_was_written_when_the_tunnel_broke_ends_the_connection() -> None:
    world = World()

    def lose(command: Command, peer: Peer) -> None:
        peer.close()

    await world.serve(MASTER, {int(Code.SEND_MESSAGE_V2): lose})
    channel = await world.replica()
    world.forwarder.master = MASTER
    call = asyncio.ensure_future(channel.call(send("x"), 5))
    await asyncio.wait([call])
    assert "closed before the response" in str(call.exception())
    await world.forwarder.close()


async def test_the_last_heartbeat_goes_first_and_the_master_asks_back() -> None:
    world = World()
    await world.serve(MASTER)
    asked: list[int] = []

    def on_request(command: Command, channel: Channel) -> Command | None:
        asked.append(command.code)
        return Command(0, body=b"running")

    await world.replica()
    channel = await world.network.dial(REPLICA, on_request=on_request)
    await channel.call(Command(Code.HEART_BEAT, body=b"{}"), 5)
    assert world.seen[MASTER] == []
    world.forwarder.master = MASTER
    await channel.call(send("x"), 5)
    assert [code for code, _ in world.seen[MASTER]] == [Code.HEART_BEAT, Code.SEND_MESSAGE_V2]
    peer = world.seen[MASTER][0][1]
    peer.send_oneway(Command(Code.NOTIFY_CONSUMER_IDS_CHANGED))
    answers: list[Command] = []
    peer.send_request(Command(Code.GET_CONSUMER_RUNNING_INFO), answers.append)
    await asyncio.sleep(0.05)
    assert asked == [Code.NOTIFY_CONSUMER_IDS_CHANGED, Code.GET_CONSUMER_RUNNING_INFO]
    assert [bytes(it.body) for it in answers] == [b"running"]
    await channel.call(Command(Code.HEART_BEAT, body=b"{}"), 5)
    await asyncio.sleep(0.01)
    assert [code for code, _ in world.seen[MASTER]].count(Code.HEART_BEAT) == 2
    await channel.close()
    await asyncio.sleep(0.05)
    assert peer.closed
    await world.forwarder.close()


def heartbeat(group: str) -> Command:
    body = b'{"clientID":"c","consumerDataSet":[{"groupName":"%s"}]}' % group.encode()
    return Command(Code.HEART_BEAT, {}, body)


async def test_who_comes_back_is_known_before_its_next_heartbeat() -> None:
    world = World()
    await world.serve(MASTER)
    channel = await world.replica()
    world.forwarder.master = MASTER
    await channel.call(heartbeat("g"), 5)
    await channel.close()
    again = await world.network.dial(REPLICA)
    await again.call(Command(Code.PULL_MESSAGE, {"consumerGroup": "other"}), 5)
    assert [code for code, _ in world.seen[MASTER]] == [Code.PULL_MESSAGE]
    await again.call(Command(Code.PULL_MESSAGE, {"consumerGroup": "g"}), 5)
    await again.call(Command(Code.PULL_MESSAGE, {"consumerGroup": "g"}), 5)
    third = await world.network.dial(REPLICA)
    await third.call(Command(Code.PULL_MESSAGE, {"consumerGroup": "g"}), 5)
    assert [code for code, _ in world.seen[MASTER]] == [
        Code.PULL_MESSAGE, Code.HEART_BEAT, Code.PULL_MESSAGE, Code.PULL_MESSAGE,
        Code.PULL_MESSAGE,
    ]  # fmt: skip
    await world.forwarder.close()


async def test_a_new_master_hears_first_who_asks() -> None:
    world = World()
    given: list[Command] = []
    world.forwarder.handle_one_way = lambda command, peer: given.append(command)
    made = world.forwarder.handlers(world.handlers(MASTER), is_slave=False, serves_reads=False)
    await world.serve(MASTER, made)
    first = await world.network.dial(MASTER)
    await first.call(heartbeat("g"), 5)
    await first.close()
    second = await world.network.dial(MASTER)
    await second.call(Command(Code.PULL_MESSAGE, {"consumerGroup": "g"}), 5)
    assert [bytes(it.body) for it in given] == [heartbeat("g").body]
    assert given[0].is_oneway
