"""Conversations without waiting: what a client asks its servers, once for asyncio and for threads.

A `Talk` is a generator. It yields a `Call`, is sent the answer (or thrown the error), and returns
its result. A shell can do one thing: exchange a request for its answer. `operation` makes a Talk a
method of both shells:

    def offset_max(directory: Directory, queue: MessageQueue) -> Talk[int]: ...

    class AdminOperations:
        offset_max = operation(offset_max)

    await admin.offset_max(queue)      # of the asyncio Admin
    admin.offset_max(queue)            # of the blocking one
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
    """A request to one server. `timeout_s` None: as long as the shell allows.

    The answer is what came, whatever its code; of a one-way command it is the command itself. The
    shell sets `is_written` before it hands the request to the network: from then on the server may
    have it, whatever the error says.
    """

    address: str
    command: Command = field(repr=False)
    timeout_s: float | None = None
    is_written: bool = False


@dataclass(frozen=True, slots=True)
class Exclusive:
    """A part of a Talk that no two tasks of a shell are in at once for one key. Answered when it is
    over; its result is dropped."""

    key: str
    conversation: "Conversation[Any]"


@dataclass(frozen=True, slots=True)
class Sleep:
    """So many seconds pass: what is asked afterwards may be answered differently."""

    seconds: float


@dataclass(slots=True)
class Await:
    """What a function of the user returned. Its `value` is awaited where that can be done."""

    value: Any


Conversation = Generator[Call | Exclusive | Sleep | Await, Command, T]


_NOTHING = Command(0)


class BlockingShell(ABC):
    """Makes the calls of a Talk on the caller's thread."""

    directory: Any
    """What its operations are given first: a `core.directory.Directory`."""

    @abstractmethod
    def send_request(self, call: Call) -> Command:
        """The answer to a call. Raises SluiceError."""

    @abstractmethod
    def sleep(self, seconds: float) -> None:
        """Returns after so long."""

    def run(self, talk: Conversation[T]) -> T:
        """The result of a Talk."""
        answer = _NOTHING
        try:
            step = next(talk)
            while True:
                try:
                    if isinstance(step, Call):
                        answer = self.send_request(step)
                    elif isinstance(step, Exclusive):
                        answer = self.run(step.conversation)
                    elif isinstance(step, Sleep):
                        self.sleep(step.seconds)
                except BaseException as error:  # noqa: BLE001 - the Talk decides
                    step = talk.throw(error)
                else:
                    step = talk.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result


class AsyncioShell(ABC):
    """Makes the calls of a Talk in a task."""

    directory: Any
    """What its operations are given first: a `core.directory.Directory`."""

    @abstractmethod
    def send_request(self, call: Call) -> Awaitable[Command]:
        """The answer to a call. Raises SluiceError."""

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Returns after so long."""

    @abstractmethod
    def exclusive(self, key: str) -> AbstractAsyncContextManager[object]:
        """Held by one task at a time for each key."""

    async def await_value(self, value: Awaitable[Any]) -> Any:
        """Await what a function of the application returned, and return its result."""
        return await value

    async def run(self, talk: Conversation[T]) -> T:
        """The result of a Talk."""
        answer = _NOTHING
        try:
            step = next(talk)
            while True:
                try:
                    if isinstance(step, Call):
                        answer = await self.send_request(step)
                    elif isinstance(step, Exclusive):
                        async with self.exclusive(step.key):
                            answer = await self.run(step.conversation)
                    elif isinstance(step, Sleep):
                        await self.sleep(step.seconds)
                    elif isinstance(step.value, Awaitable):
                        answer = step.value = await self.await_value(step.value)
                except BaseException as error:  # noqa: BLE001 - the Talk decides
                    step = talk.throw(error)
                else:
                    step = talk.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result


class Operation(Protocol[P, T_co]):
    """A Talk as a method of a shell, with the parameters that follow its first one."""

    @overload
    def __get__(self, shell: BlockingShell, owner: Any = None) -> Callable[P, T_co]: ...
    @overload
    def __get__(
        self, shell: AsyncioShell, owner: Any = None
    ) -> Callable[P, Coroutine[Any, Any, T_co]]: ...


def operation(talk: Callable[Concatenate[Any, P], Conversation[T]]) -> Operation[P, T]:
    """Binds a function that makes a Talk; its first parameter becomes the shell's directory."""

    @functools.wraps(talk)
    def run(shell: BlockingShell, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            begun = talk(shell.directory, *arguments, **named)
        except TypeError as error:
            improve_type_error(error, run, named)
            raise
        return shell.run(begun)

    return cast("Operation[P, T]", run)
