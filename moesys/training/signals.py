"""SIGTERM and Ctrl-C while a run is going on."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

_SHOW_CURSOR = b"\x1b[?25h"


class StopSignals:
    """Within its `with` block the first SIGTERM or Ctrl-C is noted in `received`, for an orderly end.

    A second Ctrl-C ends the process at once, with status 130. Repeated SIGTERMs change nothing: launchers send
    several. Signals that are ignored (nohup, a shell's background job) stay so, and outside of the main thread,
    where Python takes no signals, nothing is done at all.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._interrupts = 0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupts += number == signal.SIGINT
        if self._interrupts > 1:
            # The background save may have hold of anything, and nothing that it writes counts before it is whole.
            _say(
                b"ended at once; --resume goes on from the last checkpoint"
                + (_SHOW_CURSOR if os.isatty(2) else b"")
            )
            os._exit(130)
        if self.received is None:
            self.received = signal.Signals(number)
            again = b" (Ctrl-C again ends at once)" if number == signal.SIGINT else b""
            _say(f"{self.received.name}: stopping after this step and saving".encode() + again)


def _say(line: bytes) -> None:
    """Write a line to stderr, not through Python's buffers: the signal may have come in the middle of a write."""
    with suppress(OSError):  # nobody may be there to read it
        os.write(2, b"\n" + line + b"\n")
