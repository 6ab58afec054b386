"""What a replica that is not master does with requests that only the master answers: it passes them
on.

Java clients look at routes every 30 s. After a switch they go on asking the broker that was master,
and lose nothing by it:

    client ──── connection ────▶ replica ──── a tunnel of its own ────▶ master

Each connection of a client gets a tunnel when it first needs one, which begins with the client's
address (900306), signed by the replica: so the master knows who asks, messages keep where they were
born, requests keep their order, and what the master asks of the client (40, 39, 220) finds its way
back. The client's heartbeats go through its tunnel as well, the last one first (`presence.py`); a
tunnel that nothing but heartbeats use is closed, because the client has found the master by itself
then.

A request without a signature that has passed the door here is signed before it goes on. One of the
proxy is signed with the key of the account that asked, since handlers of the master look at rights
too; one from who may do all, by the replica. Without access control here nothing is signed: the
replica must not lend its rights to who has shown none.

A forwarded request bears a flag and is forwarded once: two replicas that think the other is master
would play ball. While nobody is master a request waits, up to `HOLD_S`, and is refused with 14
then, which clients try again. One that was written when its tunnel broke may have been carried out;
the client's connection is closed then, which says just that.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final

from sluicemq.acl.guard import Guard
from sluicemq.broker.admin.readonly import REFUSED_CODES
from sluicemq.broker.failover.presence import Presence
from sluicemq.broker.replication.requests import LOCAL_CODES
from sluicemq.errors import RequestError, RequestTimeoutError, SluiceError
from sluicemq.model.ids import Host
from sluicemq.net.channel import Channel, Dialer
from sluicemq.net.dispatch import Handler, Outcome, Peer, encode_response_to
from sluicemq.supervision import start_shared
from sluicemq.wire.codes import RequestCode as Code
from sluicemq.wire.codes import ResponseCode
from sluicemq.wire.declare import encode_header
from sluicemq.wire.frames import FLAG_ONEWAY, Command
from sluicemq.wire.headers import HeartbeatResponse
from sluicemq.wire.replicas import ForwardedForRequest
from sluicemq.wire.signature import ACCESS_KEY, sign_command

FLAG_FORWARDED: Final = 1 << 8
"""In a request's flags, of which RocketMQ knows the first two bits. Signatures do not cover it."""
NOT_MASTER: Final = "this replica is not master"
HOLD_S: Final = 2.5
"""Less than the 3 s that Java's producers wait."""
PAUSE_S: Final = 0.05
DIAL_S: Final = 1.0
ANSWER_S: Final = 60.0
"""Longer than any long poll."""
IDLE_S: Final = 40.0
RETIRE_S: Final = 5.0
WAITING_MAX: Final = 4096
"""Requests of one client that wait for the master; more are refused with 2."""

READS: Final = frozenset({
    Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.QUERY_CONSUMER_OFFSET, Code.GET_MAX_OFFSET,
    Code.GET_MIN_OFFSET, Code.SEARCH_OFFSET_BY_TIMESTAMP, Code.GET_EARLIEST_MSG_STORETIME,
})  # fmt: skip
"""What a slave answers by itself when it serves readers (slaveReadEnable)."""
FORWARDED: Final = (REFUSED_CODES - LOCAL_CODES) | frozenset({
    Code.SLUICE_LIST_DELAYED, Code.SLUICE_LIST_TRANSACTIONS, Code.PEEK_MESSAGE, Code.NOTIFICATION,
    Code.POLLING_INFO, Code.SLUICE_IN_FLIGHT, Code.UPDATE_CONSUMER_OFFSET,
    Code.GET_CONSUMER_LIST_BY_GROUP, Code.LOCK_BATCH_MQ, Code.UNLOCK_BATCH_MQ,
    Code.QUERY_ASSIGNMENT, Code.GET_CONSUMER_RUNNING_INFO, Code.CONSUME_MESSAGE_DIRECTLY,
    Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, Code.SLUICE_FILTERED_LAG, Code.SLUICE_GROUP_LANES,
})  # fmt: skip
AS_MEMBER: Final = frozenset({
    Code.PULL_MESSAGE, Code.LITE_PULL_MESSAGE, Code.POP_MESSAGE, Code.GET_CONSUMER_LIST_BY_GROUP,
})  # fmt: skip
"""What a master has to know the asking consumer for."""


class NotMasterError(RequestError):
    """Refused, and surely not carried out: this replica is not master, or nobody is.

    When: a slave is asked what only the master answers, during a switch.
    Then: nothing was done; clients try again by themselves.
    Fix: wait for the switch to end; `sluice cluster status` shows who is master.
    """

    def __init__(self, remark: str = NOT_MASTER) -> None:
        super().__init__(ResponseCode.SERVICE_NOT_AVAILABLE, f"{remark}, try again.")


class Forwarder:
    """The tunnels of one replica. Use it in the loop it was made in.

    `give` handles a request that nobody waits for, in the role of now; `signed` signs one of the
    replica's own; `guard` is that of the role of now, which knows who asks.
    """

    def __init__(self, dial: Dialer) -> None:
        self.give: Callable[[Command, Peer], object] = lambda command, peer: None
        self.signed: Callable[[Command], Command] = lambda command: command
        self.guard: Callable[[], Guard | None] = lambda: None
        self._dial = dial
        self._master = ""
        self._tunnels: dict[Peer, Tunnel] = {}
        self._presence = Presence()
        self._work: set[asyncio.Task[None]] = set()

    @property
    def master(self) -> str:
        """host:port of the master; "" while there is none, or it is this replica."""
        return self._master

    @master.setter
    def master(self, address: str) -> None:
        if address != self._master:
            self._master = address
            for tunnel in self._tunnels.values():
                tunnel.retire()

    def handlers(
        self, local: Mapping[int, Handler], *, is_slave: bool, serves_reads: bool
    ) -> dict[int, Handler]:
        """Those of a replica, made of its own. A slave's stay for what it answers by itself."""
        found = dict(local)
        if is_slave:
            forwarded = FORWARDED if serves_reads else FORWARDED | READS
            found |= dict.fromkeys(forwarded & local.keys(), self._forward)
        else:
            found |= {code: self._known(local[code]) for code in AS_MEMBER & local.keys()}
        for code in (Code.HEART_BEAT, Code.UNREGISTER_CLIENT):
            if code in local:
                found[code] = self._present(local[code], is_heard=serves_reads or not is_slave)
        return found

    def disconnected(self, peer: Peer) -> None:
        """A client is gone, and with it its tunnel."""
        self._presence.disconnected(peer, _now_s())
        if (tunnel := self._tunnels.pop(peer, None)) is not None:
            tunnel.retire()

    async def close(self) -> None:
        """Ends all tunnels; what waits for the master is given up."""
        for peer in tuple(self._tunnels):
            self.disconnected(peer)
        while work := tuple(self._work):
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)

    def _forward(self, command: Command, peer: Peer) -> Outcome:
        if command.flag & FLAG_FORWARDED:
            raise NotMasterError
        tunnel = self._tunnels.get(peer)
        told = self._presence.adopt(command, peer, _now_s())
        if tunnel is None:
            tunnel = self._tunnels[peer] = Tunnel(self, peer)
            told = self._presence.of(peer)
        if told is not None:
            self.begin(tunnel.carry(told))
        if tunnel.waiting >= WAITING_MAX:
            raise RequestError(ResponseCode.SYSTEM_BUSY, "too many requests wait for the master.")
        tunnel.used_s = _now_s()
        self.begin(tunnel.carry(self._signed(command)))

    def _known(self, local: Handler) -> Handler:
        """A master's: first it hears who asks."""

        def handle(command: Command, peer: Peer) -> Outcome:
            told = self._presence.adopt(command, peer, _now_s())
            if told is not None:
                self.give(told, peer)
            return local(command, peer)

        return handle

    def _present(self, local: Handler, *, is_heard: bool) -> Handler:
        """Who is there: remembered, and told to the master through the tunnel. A slave that serves
        no readers does not need to hear it (`is_heard`)."""

        def handle(command: Command, peer: Peer) -> Outcome:
            told = self._signed(command).copy()
            told.flag = FLAG_ONEWAY
            if command.code == Code.HEART_BEAT:
                self._presence.seen(told, peer)
            else:
                self._presence.forget(peer)
            tunnel = self._tunnels.get(peer)
            if tunnel is not None:
                if _now_s() - tunnel.used_s > IDLE_S:
                    self._tunnels.pop(peer).retire()
                else:
                    self.begin(tunnel.carry(told))
            if is_heard:
                return local(command, peer)
            return Command(ResponseCode.SUCCESS, encode_header(HeartbeatResponse()))

        return handle

    def _signed(self, command: Command) -> Command:
        """As whoever asks now, which is known only while its handler runs."""
        guard = self.guard()
        if guard is None or ACCESS_KEY in (command.fields or {}):
            return command
        command, account = command.copy(), guard.account
        if account is None:
            return self.signed(command)
        sign_command(command, account.access_key, account.secret_key)
        return command

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """What is done until the end, or that of the forwarder."""
        task = asyncio.get_running_loop().create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)

    async def connect(
        self, client: Host, on_request: Callable[[Command, Channel], None]
    ) -> Channel:
        """To the master, whoever that is by then, for a client. Raises NotMasterError when there is
        none for `HOLD_S`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + HOLD_S
        while loop.time() < end_s:
            if self._master:
                with contextlib.suppress(SluiceError, OSError):
                    channel = await self._dial(
                        self._master, timeout_s=DIAL_S, on_request=on_request
                    )
                    told = ForwardedForRequest(address=client.address, port=client.port)
                    channel.send_oneway(
                        self.signed(Command(Code.SLUICE_SPEAK_FOR, encode_header(told)))
                    )
                    return channel
            await asyncio.sleep(PAUSE_S)
        raise NotMasterError("no replica is master now")


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class Tunnel:
    """One client's way to the master."""

    def __init__(self, forwarder: Forwarder, peer: Peer) -> None:
        self.waiting = 0
        self.used_s = 0.0
        self._forwarder = forwarder
        self._peer = peer
        self._opening: asyncio.Task[Channel] | None = None

    def retire(self) -> None:
        """Who needs it again opens another one; what is under way has time to be answered."""
        opening, self._opening = self._opening, None
        if opening is not None:
            self._forwarder.begin(self._end(opening))

    async def _end(self, opening: asyncio.Task[Channel]) -> None:
        try:
            if not opening.done():
                opening.cancel()
            elif self.waiting:
                await asyncio.sleep(RETIRE_S)
        finally:
            with contextlib.suppress(asyncio.CancelledError, SluiceError):
                await (await opening).close()

    async def carry(self, command: Command) -> None:
        """A request to the master, and its answer back."""
        self.waiting += 1
        try:
            answer = await self._answer(command)
            if answer is not None:
                self._peer.write(encode_response_to(answer, command))
        except NotMasterError as error:
            if not command.is_oneway:
                refusal = Command(error.code, remark=error.remark)
                self._peer.write(encode_response_to(refusal, command))
        except RequestTimeoutError:
            pass  # the client has given it up long ago
        except (SluiceError, OSError):
            self._peer.close()
        finally:
            self.waiting -= 1

    async def _answer(self, command: Command) -> Command | None:
        """Asks again while nobody is master, up to `HOLD_S`."""
        loop = asyncio.get_running_loop()
        end_s = loop.time() + HOLD_S
        while True:
            try:
                return await self._exchange(command)
            except NotMasterError:
                if loop.time() >= end_s or self._peer.closed:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _exchange(self, command: Command) -> Command | None:
        """Raises NotMasterError when it was not carried out, other errors when nobody knows."""
        opening = self._opening
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception())):
            connecting = self._forwarder.connect(self._peer.remote, self._asked)
            opening = self._opening = start_shared(connecting)
        try:
            channel = await asyncio.shield(opening)
        except asyncio.CancelledError:
            if opening.cancelled():  # dropped: there is another master
                raise NotMasterError from None
            raise
        if channel.closed:
            if self._opening is opening:
                self._opening = None
            raise NotMasterError
        sent = command.copy(FLAG_FORWARDED)
        if command.is_oneway:
            channel.send_oneway(sent)
            return None
        answer = await channel.call(sent, ANSWER_S)
        if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE and NOT_MASTER in (
            answer.remark or ""
        ):
            raise NotMasterError
        return answer

    def _asked(self, command: Command, channel: Channel) -> None:
        """The master asks the client: a check of a transaction, what it does now."""
        if command.is_oneway:
            self._peer.send_oneway(command.copy())
            return
        opaque = command.opaque
        self._peer.send_request(
            command.copy(), lambda answer: channel.send_response(opaque, answer)
        )
