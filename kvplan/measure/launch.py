"""Starting a measuring process and reading what it says."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from select import POLLIN, poll
from typing import IO, Final

import msgspec

from kvplan.measure.faults import telling_line
from kvplan.measure.jobs import DECODER, Job, Message
from kvplan.units import format_limit

KILLED: Final = -signal.SIGKILL
WORKER: Final = "kvplan.measure.worker"
LIMIT_S: Final = 30 * 60.0
"""How long one message may take."""
_END_S: Final = 10.0
"""How long a killed process is waited for: one that hangs inside a driver stays until the driver lets it go."""
_LOOK_S: Final = 0.01
_POLL_MS_MAX: Final = 2**31 - 1
_CHUNK_BYTES: Final = 2**16


class WorkerDiedError(Exception):
    """A measuring process ended without finishing its job.

    Attributes:
        returncode: Its exit status; minus the signal that ended it.
        last_line: The last line it wrote to standard error that says something.
    """

    def __init__(self, returncode: int, last_line: str) -> None:
        super().__init__(last_line)
        self.returncode = returncode
        self.last_line = last_line

    @property
    def killed(self) -> bool:
        """Whether the system ended it, as Linux does when memory runs out."""
        return self.returncode == KILLED

    @property
    def reason(self) -> str:
        """What happened, in one line."""
        if self.returncode >= 0:
            return self.last_line or f"the measuring process ended with status {self.returncode}"
        name = signal.Signals(-self.returncode).name
        return f"the measuring process was ended by {name}" + (f": {self.last_line}" if self.last_line else "")


class WorkerHungError(WorkerDiedError):
    """A measuring process said nothing for too long and was ended.

    Attributes:
        limit_s: How long it was waited for.
    """

    def __init__(self, limit_s: float) -> None:
        super().__init__(KILLED, "")
        self.limit_s = limit_s

    @property
    def killed(self) -> bool:
        """No: kvplan ended it."""
        return False

    @property
    def reason(self) -> str:
        """What happened, in one line."""
        return (
            f"no answer within {format_limit(self.limit_s)}: the measuring process hung and was ended; "
            f"--cell-timeout allows more"
        )


Launch = Callable[[Job, float], Generator[Message, None, None]]


def launch(job: Job, limit_s: float = LIMIT_S) -> Generator[Message, None, None]:
    """Yield the messages of a process that works on *job*; closing the iterator ends the process.

    Args:
        job: What it is to measure.
        limit_s: How long it may take to its first message, from one to the next, and from the last to its end.

    Raises:
        WorkerHungError: It took longer.
        WorkerDiedError: The process ended otherwise than by finishing.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    # The job is a file, not a pipe: a process that hangs before it reads must not hold up the one that writes.
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryFile() as orders:
        orders.write(msgspec.json.encode(job))
        orders.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-m", WORKER], stdin=orders, stdout=subprocess.PIPE,
            stderr=errors, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            for line in _lines(process, limit_s):
                yield DECODER.decode(line)
            _await_end(process, limit_s)
        finally:
            end_group(process)
        if process.returncode:
            raise WorkerDiedError(process.returncode, telling_line(_read(errors)))


def _lines(process: "subprocess.Popen[bytes]", limit_s: float) -> Iterator[bytes]:
    """Yield each whole line; a process that dies in the middle of one has not said it."""
    if process.stdout is None:
        raise ValueError("the process has no pipe")
    with process.stdout as pipe:
        ready, rest = poll(), b""
        ready.register(pipe.fileno(), POLLIN)
        while ready.poll(min(limit_s * 1e3, _POLL_MS_MAX)):
            chunk = os.read(pipe.fileno(), _CHUNK_BYTES)
            if not chunk:
                return
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
    raise WorkerHungError(limit_s)


def _await_end(process: "subprocess.Popen[bytes]", limit_s: float) -> None:
    """Wait for the end of a process without reaping it: until that, nobody else gets the number of its group."""
    until = time.monotonic() + limit_s
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            raise WorkerHungError(limit_s)
        time.sleep(_LOOK_S)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started; how it ended by itself stays known."""
    if process.returncode is not None:
        return  # its number may be another's by now
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)


def _read(errors: IO[bytes]) -> str:
    errors.seek(0)
    return errors.read().decode(errors="replace")
