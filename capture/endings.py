"""Signals that ask a process to end unwind a command as an exception does."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import ExtensionFileLoader
from queue import SimpleQueue
from types import FrameType
from typing import Any

from capture.process import ENDINGS

__all__ = ["Ended", "orderly_ends"]

_INITIALIZES = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}
_FIRST_LOOK, _LAST_LOOK = 0.05, 1.0  # seconds between two looks at whether the exception is on its way


class Ended(BaseException):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)


@contextmanager
def orderly_ends() -> Iterator[None]:
    """A signal to end raises in the main thread: workers, locks and temporary directories go as the command unwinds.

    What the exception comes through may swallow it, as a destructor does. So it is raised again until it arrives here,
    wherever nothing is handling it. It is not raised while torch or an extension module is imported, whose C++ runs
    Python and swallows what that raises or aborts. A second signal does at once what it did outside. One that is
    ignored (``nohup``), or has another handler, stays so.

    Raises:
        Ended: a signal came. For SIGINT too: of a KeyboardInterrupt that comes through code which C code runs Python
            takes note, and then ends the process by the signal instead of with its status.
    """
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    outside = {number: signal.getsignal(number) for number in ENDINGS if signal.getsignal(number) in defaults}
    ending = _Ending(outside)
    for number in outside:
        signal.signal(number, ending.heed)
    try:
        yield
    finally:
        ending.stop()
        if ending.error is not None:  # also where something else came of it, or nothing
            raise ending.error


class _Ending:
    """What one signal to end has led to so far."""

    def __init__(self, outside: Mapping[signal.Signals, Any]) -> None:
        self.error: Ended | None = None
        self._outside = outside
        self._over = False
        self._looking = False
        self._first: SimpleQueue[int] = SimpleQueue()  # a signal's handler may call its put
        self._main = threading.get_ident()
        self._watcher = threading.Thread(target=self._watch, name="endings", daemon=True)
        self._watcher.start()

    def heed(self, number: int, frame: FrameType | None) -> None:
        """The signals' handler."""
        if self._looking:
            self._looking = False
        elif self.error is None:
            self.error = Ended(number)
            self._first.put(number)
        else:
            self._over = True
            self._restore()
            signal.raise_signal(number)
        if self.error is not None and not (self._over or self._is_handled() or _is_initializing(frame)):
            raise self.error

    def stop(self) -> None:
        self._over = True
        self._first.put(0)
        self._watcher.join()
        self._restore()

    def _watch(self) -> None:
        number, pause = self._first.get(), _FIRST_LOOK
        while number:
            time.sleep(pause)
            if self._over:
                return
            if not self._is_handled():
                self._looking = True
                signal.pthread_kill(self._main, number)  # which another thread cannot raise anything in
                pause = min(2 * pause, _LAST_LOOK)

    def _is_handled(self) -> bool:
        """Whether the main thread is unwinding because of ``error``."""
        current: Any = sys._current_exceptions().get(self._main)
        if isinstance(current, tuple):  # Python 3.11
            current = current[1]
        while current is not None and current is not self.error:
            current = current.__context__
        return current is not None

    def _restore(self) -> None:
        for number, handler in self._outside.items():
            signal.signal(number, handler)


def _is_initializing(frame: FrameType | None) -> bool:
    """Whether torch or an extension module is being imported."""
    while frame is not None:
        if frame.f_code in _INITIALIZES:
            return True
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "torch":
            return True
        frame = frame.f_back
    return False
