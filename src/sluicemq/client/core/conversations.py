"""Describe what a client asks its servers, as generators that do no I/O.

A *conversation* is a generator. It yields steps, of which the most common is a `Call`: a request to
one server. It is sent the response, or the error is thrown into it, and it returns its result with
`return`. Because a conversation does no I/O, one implementation serves both shells: `AsyncioShell`
runs it in a task, `BlockingShell` on the caller's thread. A step is one of:

    Call        send a request and receive its response
    Exclusive   run another conversation, one at a time for each key
    Sleep       wait
    Await       await what a function of the application returned

`operation` turns a function that makes a conversation into a method of both shells:

    def offset_max(directory: Directory, queue: MessageQueue) -> Conversation[int]: ...

    class AdminOperations:
        offset_max = operation(offset_max)

    await admin.offset_max(queue)      # on the asyncio Admin
    admin.offset_max(queue)            # on the blocking Admin
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar, cast, overload

from sluicemq.hints import improve_type_error
from sluicemq.wire.frames import Command

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


CALL_TIMEOUT_S: Final = 5.0
"""How long a request waits for its response, unless its `Call` or its client says otherwise."""


@dataclass(slots=True)
class Call:
    """A request to one server, as a step of a conversation.

    The conversation is sent the response, whatever its code. For a one-way request, which has no
    response, it is sent the request itself. `timeout_s` limits the call in seconds; None means the
    shell's own limit. The shell sets `is_written` before it hands the request to the network. From
    then on the server may have received the request, whatever error follows.
    """

    address: str
    command: Command = field(repr=False)
    timeout_s: float | None = None
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A conversation that at most one task of a shell runs at a time for each `key`.

    As a step, it runs `conversation` to its end and drops the result; other tasks with the same key
    wait meanwhile. What `conversation` raises is thrown into the outer conversation.
    """

    key: str
    conversation: "Conversation[Any]"


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause of `seconds` seconds, as a step of a conversation."""

    seconds: float


@dataclass(slots=True)
class Await:
    """A value that a function of the application returned, as a step of a conversation.

    An asyncio shell awaits `value` if it is awaitable, and replaces it by the result. A blocking
    shell leaves `value` as it is.
    """

    value: Any


Conversation = Generator[Call | Exclusive | Sleep | Await, Command, T]


_NO_RESPONSE = Command(0)


class BlockingShell(ABC):
    """A base class that runs conversations on the caller's thread."""

    directory: Any
    """The first argument of every operation: a `core.directory.Directory`."""

    @abstractmethod
    def send_request(self, call: Call) -> Command:
        """Send the request of `call` and return its response. Raise SluiceError if it fails."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Block the calling thread for `seconds` seconds."""

    def run(self, conversation: Conversation[T]) -> T:
        """Run a conversation to its end on this thread, and return its result.

        A conversation is a generator that yields steps, for example a `Call` to a server. Each step
        is carried out, and its response is sent into the generator. If a step fails, its error is
        thrown into the generator, which may catch it. Raises what the generator raises.
        """
        response = _NO_RESPONSE
        try:
            step = next(conversation)
            while True:
                try:
                    if isinstance(step, Call):
                        response = self.send_request(step)
                    elif isinstance(step, Exclusive):
                        response = self.run(step.conversation)
                    elif isinstance(step, Sleep):
                        self.sleep(step.seconds)
                except BaseException as error:  # noqa: BLE001 - thrown into the conversation
                    step = conversation.throw(error)
                else:
                    step = conversation.send(response)
        except StopIteration as done:  # the generator has returned
            conversation_result: T = done.value
            return conversation_result


class AsyncioShell(ABC):
    """A base class that runs conversations in the current asyncio task."""

    directory: Any
    """The first argument of every operation: a `core.directory.Directory`."""

    @abstractmethod
    def send_request(self, call: Call) -> Awaitable[Command]:
        """Return an awaitable that sends the request of `call` and returns its response.

        Awaiting it raises SluiceError if the call fails.
        """

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Wait `seconds` seconds."""

    @abstractmethod
    def exclusive(self, key: str) -> AbstractAsyncContextManager[object]:
        """Return an async context manager that one task at a time can hold for each `key`."""

    async def await_value(self, awaitable: Awaitable[Any]) -> Any:
        """Await what a function of the application returned, and return its result."""
        return await awaitable

    async def run(self, conversation: Conversation[T]) -> T:
        """Run a conversation to its end, and return its result.

        A conversation is a generator that yields steps, for example a `Call` to a server. Each step
        is awaited, and its response is sent into the generator. If a step fails or is cancelled,
        the error is thrown into the generator, which may catch it. Raises what the generator
        raises.
        """
        response = _NO_RESPONSE
        try:
            step = next(conversation)
            while True:
                try:
                    if isinstance(step, Call):
                        response = await self.send_request(step)
                    elif isinstance(step, Exclusive):
                        async with self.exclusive(step.key):
                            response = await self.run(step.conversation)
                    elif isinstance(step, Sleep):
                        await self.sleep(step.seconds)
                    elif isinstance(step.value, Awaitable):
                        response = step.value = await self.await_value(step.value)
                except BaseException as error:  # noqa: BLE001 - thrown into the conversation
                    step = conversation.throw(error)
                else:
                    step = conversation.send(response)
        except StopIteration as done:  # the generator has returned
            conversation_result: T = done.value
            return conversation_result


class Operation(Protocol[P, T_co]):
    """A descriptor that makes a conversation a method of a shell.

    The method takes the parameters of the function except its first one, which is the shell's
    directory.
    """

    @overload
    def __get__(self, shell: BlockingShell, owner: Any = None) -> Callable[P, T_co]: ...
    @overload
    def __get__(
        self, shell: AsyncioShell, owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


def operation(function: Callable[Concatenate[Any, P], Conversation[T]]) -> Operation[P, T]:
    """Turn a function that makes a conversation into a method that runs it.

    A conversation is a generator of requests to servers. The method belongs to a shell, the part of
    a client that does the I/O: a blocking shell returns the result, an asyncio shell returns a
    coroutine. The first argument of `function` is the shell's `directory`; callers pass the others.
    If they do not fit, the TypeError gets a hint that names the parameters.
    """

    @functools.wraps(function)
    def run(shell: BlockingShell, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            conversation = function(shell.directory, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, run, named)
            raise
        return shell.run(conversation)

    return cast("Operation[P, T]", run)
