"""What the proxy stands on: a broker in its own process, or a cluster behind name servers.

There is one form in which the proxy talks to brokers: requests of the remoting protocol. To them a
client of gRPC is a client like all: its `Link` carries its requests, and what they ask of it. What
belongs to brokers (retries, contract, lanes, dead letters) is decided there and nowhere twice.

A call is a Talk (`client.core.talks`): it yields requests and returns its answer. `ConversationRun`
holds one without a task, since a broker in the same process mostly answers in the same turn.
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
Answered = Callable[[Command | Exception], None]
Ask = Callable[[Call, Answered], None]
OnRequest = Callable[[Command, Callable[[Command], None]], None]
"""What a broker asks of a client, and how it is answered; a one-way request wants no answer."""
ITSELF: Final = Host("127.0.0.1", 0)
"""The address of the proxy as a client of its own, which may do all."""


class Link(Protocol):
    """A client of the proxy, as brokers see it."""

    def ask(self, call: Call, answered: Answered) -> None:
        """`answered` is called once, also from within: with what came, whatever its code, or with
        the error (ConnectionLostError, RequestTimeoutError)."""
        ...

    def close(self) -> None:
        """The client is gone: its long polls end, and groups lose a member."""
        ...


class Backend(Protocol):
    """Brokers, and what is known of them."""

    clock: Clock

    def link(self, remote: Host, local: Host, on_request: OnRequest) -> Link:
        """For a client at the address `remote`, which came in by `local`."""
        ...

    def route(self, topic: str) -> Conversation[TopicRoute]:
        """Its addresses are those that a Call takes. Raises RouteNotFoundError."""
        ...

    def topic(self, name: str) -> Conversation[TopicConfig | None]:
        """As one of its brokers keeps it; None: none does."""
        ...

    def group(self, name: str) -> Conversation[GroupConfig | None]:
        """As one of the brokers keeps it; None: none does."""
        ...

    def warnings(self) -> list[str]:
        """What an operator has to know, a sentence each."""
        ...


def masters_of(route: TopicRoute) -> dict[str, str]:
    """Broker name -> address of its master, as a Call takes it."""
    return {
        data.broker: data.addresses[MASTER_ID]
        for data in route.brokers
        if MASTER_ID in data.addresses
    }


_BEGIN = Command(0)


class ConversationRun(Generic[T]):
    """A Talk under way. It begins at once; `done` gets its result or its error."""

    __slots__ = ("_ask", "_done", "_talk")

    def __init__(
        self, talk: Conversation[T], ask: Ask, done: Callable[[T | Exception], None]
    ) -> None:
        self._talk = talk
        self._ask = ask
        self._done = done
        self._next(_BEGIN)

    def _next(self, answer: Command | Exception) -> None:
        try:
            if isinstance(answer, Exception):
                step = self._talk.throw(answer)
            else:
                step = next(self._talk) if answer is _BEGIN else self._talk.send(answer)
        except StopIteration as end:
            self._done(end.value)
        except Exception as error:  # noqa: BLE001 - whoever began it has to answer
            self._done(error)
        else:
            if isinstance(step, Call):
                self._ask(step, self._next)
            elif isinstance(step, Exclusive):  # a question more does no harm
                ConversationRun(step.conversation, self._ask, self._went_on)
            elif isinstance(step, Sleep):
                asyncio.get_running_loop().call_later(step.seconds, self._next, Command(0))
            elif isinstance(step.value, asyncio.Future):
                step.value.add_done_callback(partial(self._waited, step))
            else:
                raise TypeError(f"a call of the proxy waits for {step!r}")

    def _went_on(self, result: object) -> None:
        self._next(result if isinstance(result, Exception) else Command(0))

    def _waited(self, step: Await, future: asyncio.Future[object]) -> None:
        """What the backend looks up has been found."""
        if future.cancelled():
            self._next(ConnectionLostError("The proxy is closing."))
            return
        error = future.exception()
        step.value = None if error else future.result()
        self._went_on(error)
