"""Ends a command that must not outlive its lock, whatever becomes of the process that holds the lock.

That process may be killed: then the pipe from it to the guardian ends. Or it stands still (SIGSTOP, Ctrl-Z): then no later
deadline comes through the pipe. In both cases the guardian kills the command and what it has started. It is a process of its
own, forked before there are threads, connections or an event loop, and in a session of its own, so that what is meant for the
terminal or the group does not reach it.
"""

import fcntl
import os
import select
import signal
import struct
from contextlib import suppress

from .timing import boot_clock

_WORD = struct.Struct("dq")  # until when, and which group; short enough to be written and read as a whole
_LONGEST_LOOK = 1.0  # poll() waits by a clock that may stop while the machine sleeps


class Guardian:
    """Watches over one group of processes: `fork`, `watch` again and again, `dismiss`."""

    def __init__(self, pid: int, pipe: int) -> None:
        self._pid = pid
        self._pipe = pipe

    @classmethod
    def fork(cls) -> "Guardian":
        reading, writing = (_apart_from_the_terminal(end) for end in os.pipe())
        pid = os.fork()
        if pid:
            os.close(reading)
            os.set_blocking(writing, False)  # full, if somebody has stopped the guardian
            return cls(pid, writing)
        try:
            os.close(writing)
            _guard(reading)
        finally:
            os._exit(0)

    def watch(self, group: int, until: float) -> None:
        """Let the group live until then, by the boot's clock, unless a later word comes. Also the group itself may say so."""
        with suppress(OSError):  # nobody is there any more
            os.write(self._pipe, _WORD.pack(until, group))

    def rest(self) -> None:
        """The command has ended. Its group's number may soon be another's, who must not be killed."""
        self.watch(0, 0.0)

    def dismiss(self) -> None:
        """Nothing is to be watched any more."""
        self.rest()
        os.close(self._pipe)
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)  # somebody may have stopped it
            os.waitpid(self._pid, 0)


def _guard(pipe: int) -> None:
    os.setsid()
    for kind in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
        signal.signal(kind, signal.SIG_IGN)
    _let_go_of_the_terminal()
    group, until = 0, float("inf")
    # select() takes no descriptor beyond 1023, and whoever started this may have left that many open.
    words = select.poll()
    words.register(pipe, select.POLLIN)
    while boot_clock() < until:
        if not words.poll(1000 * max(0.0, min(_LONGEST_LOOK, until - boot_clock()))):
            continue
        word = os.read(pipe, _WORD.size)
        if len(word) < _WORD.size:  # whoever held the lock is gone
            break
        until, group = _WORD.unpack(word)
        if not group:
            return
    if group:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def _apart_from_the_terminal(descriptor: int) -> int:
    """Where the standard ones were closed, a pipe's ends may have taken their places."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


def _let_go_of_the_terminal() -> None:
    """Whoever reads what the command prints waits for the last that could print."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nowhere, descriptor)
