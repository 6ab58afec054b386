"""The interface between the proxy and the brokers that it serves: `Backend` and `ClientSession`.

There are two backends: a broker in the same process (`local.py`) and a cluster behind name servers
(`cluster.py`).

The proxy talks to brokers only in requests of the remoting protocol. For a broker, a gRPC client is
a client like any other: its `ClientSession` carries its requests to brokers and the brokers'
requests to it. The rules of consumer groups (retries, contract, lanes, dead letters) are therefore
implemented once, in the broker.

Each gRPC call is served by a conversation (`client.core.conversations`), a generator that yields
requests and returns the response. `ConversationRunner` runs it with callbacks instead of a task,
because a broker in the same process mostly responds in the same iteration of the event loop.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Generic, Protocol, TypeVar

from sluicemq.client.core.conversations import Await, Call, Conversation, Exclusive, Sleep
from sluicemq.clock import Clock
from sluicemq.errors import ConnectionLostError
from sluicemq.model.ids import Host
from sluicemq.model.topic import MASTER_ID, GroupConfig, TopicConfig, TopicRoute
from sluicemq.wire.frames import Command

T = TypeVar("T")
OnResponse = Callable[[Command | Exception], None]
"""A callback that gets the response to a request, or the error that occurred instead."""
SendRequest = Callable[[Call, OnResponse], None]
"""A function that sends a request and calls the callback once with the result."""
OnRequest = Callable[[Command, Callable[[Command], None]], None]
"""A callback for a request from a broker to a client, and the function that sends its response.

A one-way request needs no response.
"""
PROXY_HOST: Final = Host("127.0.0.1", 0)
"""The address of the proxy when it acts as a client on its own behalf, with all permissions."""


class ClientSession(Protocol):
    """One client of the proxy, as the brokers see it."""

    def send(self, call: Call, on_response: OnResponse) -> None:
        """Send a request to the broker at `call.address`.

        `on_response` is called exactly once, possibly before this method returns. It gets the
        response with any response code, or the error (ConnectionLostError, RequestTimeoutError).
        """
        ...

    def close(self) -> None:
        """End the session because the client has disconnected.

        Brokers end its long polls and remove it from its groups.
        """
        ...


class Backend(Protocol):
    """The brokers that a proxy serves, and lookups of their routes and settings."""

    clock: Clock

    def open_session(self, remote: Host, local: Host, on_request: OnRequest) -> ClientSession:
        """Return a new session for a client at the address `remote`.

        `local` is the address at which the client reached the proxy. `on_request` is called with
        each request that a broker sends to the client.
        """
        ...

    def fetch_route(self, topic: str) -> Conversation[TopicRoute]:
        """Return the route of a topic. Its addresses can be used as `Call.address`.

        Raises RouteNotFoundError if the topic does not exist.
        """
        ...

    def fetch_topic_config(self, name: str) -> Conversation[TopicConfig | None]:
        """Return the settings of a topic as one broker has them; None if it does not exist."""
        ...

    def fetch_group_config(self, name: str) -> Conversation[GroupConfig | None]:
        """Return the settings of a group as one broker has them; None if it does not exist."""
        ...

    def list_warnings(self) -> list[str]:
        """Return the current warnings for the operator, one sentence each."""
        ...


def master_addresses(route: TopicRoute) -> dict[str, str]:
    """Return the address of each broker's master, by broker name.

    Brokers without a master are left out.
    """
    addresses = {}
    for broker_data in route.brokers:
        if MASTER_ID in broker_data.addresses:
            addresses[broker_data.broker] = broker_data.addresses[MASTER_ID]
    return addresses


_START = Command(0)
"""The value by which `_resume` recognises the first step of a conversation."""


class ConversationRunner(Generic[T]):
    """One running conversation, driven by callbacks.

    It starts when it is created, and needs no task. `on_done` is called once with the result of
    the conversation or the exception that it raised.
    """

    __slots__ = ("_conversation", "_on_done", "_send")

    def __init__(
        self,
        conversation: Conversation[T],
        send: SendRequest,
        on_done: Callable[[T | Exception], None],
    ) -> None:
        """Start the conversation, and run it to its first pending step.

        A conversation is a generator that yields steps, such as requests to a broker. `send(call,
        on_response)` sends a request. `on_done` is called once with the result or the exception of
        the conversation, possibly before this method returns.
        """
        self._conversation = conversation
        self._send = send
        self._on_done = on_done
        self._resume(_START)

    def _resume(self, response: Command | Exception) -> None:
        """Continue the conversation with a response or an exception, and start its next step.

        If the conversation ends, `on_done` is called with its result or exception.
        """
        try:
            if isinstance(response, Exception):
                step = self._conversation.throw(response)
            elif response is _START:
                step = next(self._conversation)
            else:
                step = self._conversation.send(response)
        except StopIteration as end:
            self._on_done(end.value)
        except Exception as error:  # noqa: BLE001 - the caller responds with it
            self._on_done(error)
        else:
            if isinstance(step, Call):
                self._send(step, self._resume)
            elif isinstance(step, Exclusive):
                # The lock is not taken: sending the same request twice does no harm here.
                ConversationRunner(step.conversation, self._send, self._resume_after_conversation)
            elif isinstance(step, Sleep):
                asyncio.get_running_loop().call_later(step.seconds, self._resume, Command(0))
            elif isinstance(step.value, asyncio.Future):
                step.value.add_done_callback(partial(self._resume_after_future, step))
            else:
                raise TypeError(f"The proxy cannot run the step {step!r} of a conversation.")

    def _resume_after_conversation(self, outcome: object) -> None:
        """Continue after an inner conversation has ended.

        If `outcome` is an exception, it is raised in the outer conversation. Any other result is
        dropped.
        """
        if isinstance(outcome, Exception):
            self._resume(outcome)
        else:
            self._resume(Command(0))  # the outer conversation ignores this value

    def _resume_after_future(self, step: Await, future: asyncio.Future[object]) -> None:
        """Continue after the future of an `Await` step has completed.

        Its result is stored in `step.value`. An exception is raised in the conversation; it is
        ConnectionLostError if the future was cancelled.
        """
        if future.cancelled():
            self._resume(ConnectionLostError("The proxy is closing."))
            return
        error = future.exception()
        step.value = None if error else future.result()
        self._resume_after_conversation(error)
