"""What every thread and task of this process does now, as text: our answer to Java's jstack.

Called on the keeper's thread, so it also works while the program's own loop is blocked, which is
when one wants to know. A task that waits is shown with all coroutines it waits in, down to the
innermost.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

DEPTH_MAX = 64


def stacks(loop: asyncio.AbstractEventLoop | None) -> str:
    """Threads, then the tasks of `loop`."""
    return "\n".join([*_threads(), *(_tasks(loop) if loop is not None else ())])


def _threads() -> Iterator[str]:
    names = {thread.ident: thread for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        thread = names.get(ident)
        name = thread.name if thread is not None else "(not a Python thread)"
        kind = " daemon" if thread is not None and thread.daemon else ""
        yield f'thread "{name}"{kind} id {ident}\n{"".join(traceback.format_stack(frame)).rstrip()}'


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in sorted(_all_tasks(loop), key=lambda task: task.get_name()):
        if task.done():
            continue
        lines = [_line(code, number) for code, number in _frames(task.get_coro())]
        yield f'task "{task.get_name()}"\n' + "\n".join(lines)


def _all_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    for _ in range(100):
        try:
            return asyncio.all_tasks(loop)
        except RuntimeError:  # one was born or died while we looked: another thread's loop
            continue
    return set()


def _frames(coroutine: Any) -> Iterator[tuple[CodeType, int]]:
    """From the outermost to the innermost that is awaited."""
    for _ in range(DEPTH_MAX):
        frame: FrameType | None = getattr(coroutine, "cr_frame", None)
        if frame is None:
            frame = getattr(coroutine, "ag_frame", None) or getattr(coroutine, "gi_frame", None)
        if frame is not None:
            yield frame.f_code, frame.f_lineno
        inner = getattr(coroutine, "cr_await", None)
        if inner is None:
            inner = getattr(coroutine, "ag_await", None) or getattr(coroutine, "gi_yieldfrom", None)
        if inner is None:
            return
        coroutine = inner


def _line(code: CodeType, number: int) -> str:
    return f'  File "{code.co_filename}", line {number}, in {code.co_qualname}'
