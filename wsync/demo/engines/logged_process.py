"""A child process with a readable log."""

import contextlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from subprocess import PIPE, Popen, TimeoutExpired

from wsync._core import PeerClosedError
from wsync.machine.fork_guard import Owner

_STOP_SECONDS = 10.0
_TAIL_NBYTES = 2000


class Child:
    """A running command.  Its standard input and output are pipes (the child takes the end of
    its input for the end of its parent), its standard error is a file that is read for messages.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        *,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        self.name = name
        self._owner = Owner()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        try:
            self.process = Popen(
                command,
                stdin=PIPE,
                stdout=PIPE,
                stderr=self._log,
                env={**os.environ, **(environment or {})},
                pass_fds=tuple(pass_fds),
                bufsize=0,
            )
        except BaseException:
            self._log.close()
            raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """The end of what the process wrote to its standard error."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _TAIL_NBYTES)
        return os.pread(descriptor, _TAIL_NBYTES, start).decode("utf-8", "replace").strip()

    def check_alive(self) -> None:
        """PeerClosedError with status and log if the process has ended."""
        status = self.process.poll()
        if status is not None:
            raise PeerClosedError(f"engine {self.name}: ended with {status}: {self.log()}")

    def close(self) -> None:
        """Ends the process; more than once does no harm, nor does it in a process that was forked
        from the one that started it."""
        if not self._owner:
            return
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.terminate()
        try:
            self.process.wait(_STOP_SECONDS)
        except TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._log.close()
