"""Forwarding: a replica that is not the master passes requests on to the master.

Java clients read routes every 30 s. After a switch of the master they keep sending to the old one.
Forwarding lets these requests succeed:

    client ──── connection ────▶ replica ──── tunnel of this client ────▶ master

Each client connection gets a tunnel when it first needs one. The first command of a tunnel is
SLUICE_SPEAK_FOR (900306) with the client's address, signed by the replica. So the master knows the
client, messages keep their born host, and requests keep their order. Requests of the master to the
client (NOTIFY_CONSUMER_IDS_CHANGED 40, CHECK_TRANSACTION_STATE 39, RESET_CONSUMER_CLIENT_OFFSET
220) return through the tunnel. The client's heartbeats are forwarded too, and a new tunnel begins
with the last one (`presence.py`). A tunnel that carries nothing but heartbeats for `IDLE_S` is
closed, because the client has then found the master by itself.

Signatures: an unsigned request that this replica has admitted is signed before it is forwarded. A
request of the proxy is signed with the key of the account for which the proxy acts, because
handlers of the master check permissions too. A request without an account, which may do everything,
is signed by the replica. Without access control nothing is signed: the replica must not lend its
permissions to a client that has proved none.

A forwarded request has the flag `FLAG_FORWARDED` and is not forwarded again. Otherwise two replicas
that each take the other for the master would forward it for ever.

While there is no master a request waits for `MASTER_WAIT_S`. It is then refused with
SERVICE_NOT_AVAILABLE (14), after which clients try again. If a tunnel breaks after a request was
written, the request may have been carried out. Then the client's connection is closed, which tells
the client that the outcome is unknown.
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
"""A bit of a request's flags. RocketMQ uses only the first two, and signatures do not cover it."""

NOT_MASTER: Final = "this replica is not master"
"""The beginning of the remark by which a replica recognises that another one is not the master.
Replicas of older releases send and read it, so it must not change."""

MASTER_WAIT_S: Final = 2.5
"""The time for which a request waits for a master. Java's producers wait 3 s for an answer."""

PAUSE_S: Final = 0.05
"""The time between two attempts to reach a master."""

DIAL_S: Final = 1.0
"""The timeout of a connection attempt to the master."""

ANSWER_S: Final = 60.0
"""The timeout of an answer of the master. It is longer than any long poll."""

IDLE_S: Final = 40.0
"""The time after which a tunnel is closed if it has carried nothing but heartbeats."""

RETIRE_S: Final = 5.0
"""The time for which a retired tunnel waits for answers to the requests in flight."""

WAITING_MAX: Final = 4096
"""The number of requests of one client that may wait for answers of the master. Further ones are
refused with SYSTEM_BUSY (2)."""

READ_CODES: Final = frozenset(
    {
        Code.PULL_MESSAGE,
        Code.LITE_PULL_MESSAGE,
        Code.QUERY_CONSUMER_OFFSET,
        Code.GET_MAX_OFFSET,
        Code.GET_MIN_OFFSET,
        Code.SEARCH_OFFSET_BY_TIMESTAMP,
        Code.GET_EARLIEST_MSG_STORETIME,
    }
)
"""The requests that a slave answers itself if consumers may read from it (slaveReadEnable)."""

FORWARDED_CODES: Final = (REFUSED_CODES - LOCAL_CODES) | frozenset(
    {
        Code.SLUICE_LIST_DELAYED,
        Code.SLUICE_LIST_TRANSACTIONS,
        Code.PEEK_MESSAGE,
        Code.NOTIFICATION,
        Code.POLLING_INFO,
        Code.SLUICE_IN_FLIGHT,
        Code.UPDATE_CONSUMER_OFFSET,
        Code.GET_CONSUMER_LIST_BY_GROUP,
        Code.LOCK_BATCH_MQ,
        Code.UNLOCK_BATCH_MQ,
        Code.QUERY_ASSIGNMENT,
        Code.GET_CONSUMER_RUNNING_INFO,
        Code.CONSUME_MESSAGE_DIRECTLY,
        Code.INVOKE_BROKER_TO_GET_CONSUMER_STATUS,
        Code.SLUICE_FILTERED_LAG,
        Code.SLUICE_GROUP_LANES,
    }
)
"""The requests that a slave always forwards."""

MEMBER_CODES: Final = frozenset(
    {
        Code.PULL_MESSAGE,
        Code.LITE_PULL_MESSAGE,
        Code.POP_MESSAGE,
        Code.GET_CONSUMER_LIST_BY_GROUP,
    }
)
"""The requests for which the master must know that the client is a member of its group."""


class NotMasterError(RequestError):
    """The request was refused and not carried out, because this replica is not the master.

    When: a slave gets a request that only the master can answer, and there is no master now.
    Then: nothing was done; clients try again by themselves.
    Fix: wait for the switch to end; `sluice cluster status` shows which replica is master.
    """

    def __init__(self, remark: str = NOT_MASTER) -> None:
        super().__init__(ResponseCode.SERVICE_NOT_AVAILABLE, f"{remark}, try again.")


class Forwarder:
    """The tunnels of one replica to the master, one for each client connection that needs one.

    Use it only in the event loop in which it was created.
    """

    def __init__(self, dial: Dialer) -> None:
        """Create a forwarder that connects to the master with `dial`.

        The three callables below do nothing until `start_replica` sets them.
        """
        self.handle_one_way: Callable[[Command, Peer], object] = lambda command, peer: None
        """`handle_one_way(command, peer)` handles a one-way command in the present role."""
        self.sign: Callable[[Command], Command] = lambda command: command
        """`sign(command)` returns a command of the replica itself, signed if it has credentials."""
        self.get_guard: Callable[[], Guard | None] = lambda: None
        """`get_guard()` returns the guard of the present role; None without access control."""
        self._dial = dial
        self._master = ""
        self._tunnels: dict[Peer, Tunnel] = {}
        self._presence = Presence()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def master(self) -> str:
        """The host:port of the master; "" if there is none, or if it is this replica."""
        return self._master

    @master.setter
    def master(self, address: str) -> None:
        """Set the address of the master; "" means that there is none.

        If it has changed, the connections of all tunnels to the old master are closed.
        """
        if address != self._master:
            self._master = address
            for tunnel in self._tunnels.values():
                tunnel.retire()

    def handlers(
        self, local: Mapping[int, Handler], *, is_slave: bool, serves_reads: bool
    ) -> dict[int, Handler]:
        """Return the handlers of a replica by request code, which may forward to the master.

        `local` are the broker's own handlers by request code. The result has the same codes, with
        these changes. `serves_reads` says whether consumers may read from a slave.

        - A slave forwards requests with FORWARDED_CODES to the master. It also forwards those with
          READ_CODES if it does not serve reads.
        - A master handles requests with MEMBER_CODES itself. But first it makes the client a member
          of its groups again, if the client lost its connection in the change of roles.
        - Both remember heartbeats. Only a master, and a slave that serves reads, handle them.
        """
        handlers = dict(local)

        forwarded_codes: set[int] = set()
        if is_slave:
            forwarded_codes |= FORWARDED_CODES
        if is_slave and not serves_reads:
            forwarded_codes |= READ_CODES
        for code in forwarded_codes & local.keys():
            handlers[code] = self._forward
        if not is_slave:
            for code in MEMBER_CODES & local.keys():
                handlers[code] = self._wrap_to_restore_membership(local[code])

        # Only a replica that delivers messages needs to know the members of groups.
        delivers_messages = serves_reads or not is_slave
        for code in (Code.HEART_BEAT, Code.UNREGISTER_CLIENT):
            if code in local:
                handlers[code] = self._wrap_to_remember_heartbeat(
                    local[code], runs_local=delivers_messages
                )
        return handlers

    def disconnected(self, peer: Peer) -> None:
        """Retire the tunnel of a client whose connection was lost, and keep its heartbeat."""
        self._presence.disconnected(peer, _now_s())
        if (tunnel := self._tunnels.pop(peer, None)) is not None:
            tunnel.retire()

    async def close(self) -> None:
        """Close all tunnels, and cancel requests that wait for the master."""
        for peer in tuple(self._tunnels):
            self.disconnected(peer)
        while tasks := tuple(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _forward(self, command: Command, peer: Peer) -> Outcome:
        """Start to forward the request of the client `peer` to the master, and return None.

        The request goes through the client's tunnel, a connection to the master for this client.
        The answer is written to the client when it arrives. If the client has no tunnel yet, one is
        opened, and the client's last heartbeat is sent first, so that the master knows the client's
        groups. A client that has sent no heartbeat takes over the heartbeat of a lost connection
        from the same IP address, if there is one.

        Raises NotMasterError if another replica has forwarded the request already, and RequestError
        if too many requests of the client are waiting.
        """
        if command.flag & FLAG_FORWARDED:
            raise NotMasterError
        adopted_heartbeat = self._presence.adopt(command, peer, _now_s())

        # A master that does not know the client yet needs its heartbeat before the request: a new
        # tunnel sends the client's last heartbeat, an existing one only a heartbeat adopted now.
        tunnel = self._tunnels.get(peer)
        if tunnel is None:
            tunnel = self._tunnels[peer] = Tunnel(self, peer)
            first_heartbeat = self._presence.heartbeat_of(peer)
        else:
            first_heartbeat = adopted_heartbeat
        if first_heartbeat is not None:
            self.start_task(tunnel.forward(first_heartbeat))

        if tunnel.waiting_count >= WAITING_MAX:
            raise RequestError(
                ResponseCode.SYSTEM_BUSY,
                f"too many requests are waiting for the master (limit {WAITING_MAX} per client).",
            )
        tunnel.last_used_s = _now_s()
        self.start_task(tunnel.forward(self._sign_for_account(command)))

    def _wrap_to_restore_membership(self, local: Handler) -> Handler:
        """Return a handler that restores the client's membership in its group, then calls `local`.

        It is for requests whose client must be a member of the group. If the client has sent no
        heartbeat over its connection yet, the handler looks for a member of the group that has lost
        its connection and had the same IP address. It handles the last heartbeat of that connection
        as if the client had sent it. Then it returns the result of `local`.
        """

        def handle(command: Command, peer: Peer) -> Outcome:
            heartbeat = self._presence.adopt(command, peer, _now_s())
            if heartbeat is not None:
                self.handle_one_way(heartbeat, peer)
            return local(command, peer)

        return handle

    def _wrap_to_remember_heartbeat(self, local: Handler, *, runs_local: bool) -> Handler:
        """Return a handler for HEART_BEAT and UNREGISTER_CLIENT.

        The handler remembers the heartbeat of the client, and forgets it when the client
        unregisters. If the client has a tunnel to the master, the command is also sent through it,
        without waiting for an answer. A tunnel that has carried only heartbeats for IDLE_S seconds
        is closed instead. Then the handler returns the result of `local` if `runs_local` is true,
        else an answer with the code SUCCESS.
        """

        def handle(command: Command, peer: Peer) -> Outcome:
            forwarded = self._sign_for_account(command).copy()
            forwarded.flag = FLAG_ONEWAY
            if command.code == Code.HEART_BEAT:
                self._presence.record_heartbeat(forwarded, peer)
            else:
                self._presence.forget(peer)

            self._forward_heartbeat(forwarded, peer)
            if runs_local:
                return local(command, peer)
            return Command(ResponseCode.SUCCESS, encode_header(HeartbeatResponse()))

        return handle

    def _forward_heartbeat(self, command: Command, peer: Peer) -> None:
        """Forward a heartbeat through the client's tunnel, or close the tunnel if it is idle.

        A tunnel is idle if it has carried only heartbeats for IDLE_S seconds. Do nothing if the
        client has no tunnel.
        """
        tunnel = self._tunnels.get(peer)
        if tunnel is None:
            return
        if _now_s() - tunnel.last_used_s > IDLE_S:
            self._tunnels.pop(peer).retire()
        else:
            self.start_task(tunnel.forward(command))

    def _sign_for_account(self, command: Command) -> Command:
        """Return a copy of `command`, signed with the key of the account that sent it.

        If the client has no account, the copy is signed with the key of the replica. `command`
        itself is returned if it has a signature already, or if there is no access control. Call
        this only while the handler of `command` runs, because the guard, which checks access
        rights, knows the account only then.
        """
        guard = self.get_guard()
        if guard is None or ACCESS_KEY in (command.fields or {}):
            return command
        signed = command.copy()
        account = guard.account
        if account is None:
            return self.sign(signed)
        sign_command(signed, account.access_key, account.secret_key)
        return signed

    def start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` as a task. `close` cancels it if it has not ended."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def connect(
        self, client: Host, on_request: Callable[[Command, Channel], None]
    ) -> Channel:
        """Open a connection to the master that acts for the client at the address `client`.

        The first command on it is SLUICE_SPEAK_FOR, which tells the master the client's address.
        `on_request(command, channel)` is called with each request that the master sends.

        If there is no master, or it cannot be reached, the attempt is repeated every PAUSE_S
        seconds. Raises NotMasterError after MASTER_WAIT_S seconds.
        """
        header = ForwardedForRequest(address=client.address, port=client.port)
        deadline_s = _now_s() + MASTER_WAIT_S
        while _now_s() < deadline_s:
            if self._master:
                with contextlib.suppress(SluiceError, OSError):
                    channel = await self._dial(
                        self._master, timeout_s=DIAL_S, on_request=on_request
                    )
                    speak_for = Command(Code.SLUICE_SPEAK_FOR, encode_header(header))
                    channel.send_oneway(self.sign(speak_for))
                    return channel
            await asyncio.sleep(PAUSE_S)
        raise NotMasterError("no replica is master now")


def _now_s() -> float:
    """Return the time of the running loop's monotonic clock, in seconds."""
    return asyncio.get_running_loop().time()


class Tunnel:
    """The connection to the master that carries the requests of one client connection.

    It connects with the first request, and again after `retire`.
    """

    def __init__(self, forwarder: Forwarder, peer: Peer) -> None:
        """Create a tunnel for the client connection `peer`. It connects with the first command.

        `forwarder` makes the connection to the master and runs the tunnel's tasks.
        """
        self.waiting_count = 0
        """The number of requests that wait for an answer or for a master."""
        self.last_used_s = 0.0
        """The monotonic time of the last request that was not a heartbeat."""
        self._forwarder = forwarder
        self._peer = peer
        self._connect_task: asyncio.Task[Channel] | None = None
        """The task that connects, or has connected, to the master; None if there is none.

        All requests that come while the task runs wait for the same task."""

    def retire(self) -> None:
        """Start to close the connection to the master. The next request opens another one.

        If requests are waiting for answers, the connection stays open for `RETIRE_S` seconds.
        """
        connect_task = self._connect_task
        self._connect_task = None
        if connect_task is not None:
            self._forwarder.start_task(self._close_later(connect_task))

    async def _close_later(self, connect_task: asyncio.Task[Channel]) -> None:
        """Close the connection that `connect_task` has opened, or cancel the task if it still runs.

        If requests are waiting for answers over the connection, it is closed after RETIRE_S
        seconds.
        """
        try:
            if not connect_task.done():
                connect_task.cancel()
            elif self.waiting_count:
                await asyncio.sleep(RETIRE_S)
        finally:
            # The awaited task raises CancelledError if it was cancelled above.
            with contextlib.suppress(asyncio.CancelledError, SluiceError):
                channel = await connect_task
                await channel.close()

    async def forward(self, command: Command) -> None:
        """Send a command to the master, and write the answer to the client.

        A one-way command has no answer. Errors are not raised:

        - If there is no master, an answer with the code SERVICE_NOT_AVAILABLE is written.
        - If the master does not answer within ANSWER_S seconds, nothing is written.
        - After any other error the command may have been carried out. The connection of the client
          is closed, which tells the client that the outcome is unknown.
        """
        self.waiting_count += 1
        try:
            answer = await self._call_with_retries(command)
            if answer is not None:
                self._peer.write(encode_response_to(answer, command))
        except NotMasterError as error:
            if not command.is_oneway:
                refusal = Command(error.code, remark=error.remark)
                self._peer.write(encode_response_to(refusal, command))
        except RequestTimeoutError:
            pass  # The client has stopped waiting long ago.
        except (SluiceError, OSError):
            self._peer.close()
        finally:
            self.waiting_count -= 1

    async def _call_with_retries(self, command: Command) -> Command | None:
        """Send a command to the master, and return the answer, or None if it is a one-way command.

        If it was not carried out because there is no master, it is sent again every PAUSE_S
        seconds. Raises NotMasterError after MASTER_WAIT_S seconds, or when the client has
        disconnected, and the other errors of `_call_once` at once.
        """
        deadline_s = _now_s() + MASTER_WAIT_S
        while True:
            try:
                return await self._call_once(command)
            except NotMasterError:
                if _now_s() >= deadline_s or self._peer.closed:
                    raise
            await asyncio.sleep(PAUSE_S)

    async def _call_once(self, command: Command) -> Command | None:
        """Send a command to the master once. Return its answer; None if the command is one-way.

        Raises NotMasterError if the command was not carried out, because the tunnel was retired or
        closed or the other replica is not the master. After any other error it is unknown whether
        the command was carried out.
        """
        channel = await self._open_channel()

        forwarded = command.copy(FLAG_FORWARDED)
        if command.is_oneway:
            channel.send_oneway(forwarded)
            return None
        answer = await channel.call(forwarded, ANSWER_S)
        remark = answer.remark or ""
        if answer.code == ResponseCode.SERVICE_NOT_AVAILABLE and NOT_MASTER in remark:
            raise NotMasterError
        return answer

    async def _open_channel(self) -> Channel:
        """Return the connection to the master that all requests of this tunnel use.

        The tunnel connects first if it has no connection, or if the last attempt failed. Calls
        during an attempt wait for the same attempt.

        Raises NotMasterError if `retire` was called during the attempt, if the connection is closed
        by now, or if no master was found in time. The next call connects again.
        """
        connect_task = self._connect_task
        if connect_task is None or _has_failed(connect_task):
            work = self._forwarder.connect(self._peer.remote, self._on_request_of_master)
            connect_task = self._connect_task = start_shared(work)

        # Other requests wait for the same task, so the end of this request must not cancel it.
        try:
            channel = await asyncio.shield(connect_task)
        except asyncio.CancelledError:
            if connect_task.cancelled():  # The tunnel was retired: there is another master.
                raise NotMasterError from None
            raise

        if channel.closed:
            # `retire` may have replaced the task during the await.
            if self._connect_task is connect_task:
                self._connect_task = None
            raise NotMasterError
        return channel

    def _on_request_of_master(self, command: Command, channel: Channel) -> None:
        """Pass a request of the master on to the client, and the client's answer to the master.

        `channel` is the connection to the master. A one-way request has no answer.
        """
        if command.is_oneway:
            self._peer.send_oneway(command.copy())
            return
        opaque = command.opaque
        self._peer.send_request(
            command.copy(), lambda answer: channel.send_response(opaque, answer)
        )


def _has_failed(connect_task: asyncio.Task[Channel]) -> bool:
    """Return whether an attempt to connect has ended without a connection."""
    if not connect_task.done():
        return False
    return connect_task.cancelled() or connect_task.exception() is not None
