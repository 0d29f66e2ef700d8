"""Starting a measuring process and reading what it says."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator
from typing import IO, Final

import msgspec

from kvplan.measure.jobs import DECODER, Job, Message

KILLED: Final = -signal.SIGKILL


class WorkerDiedError(Exception):
    """A measuring process ended without finishing its job.

    Attributes:
        returncode: Its exit status; minus the signal that ended it.
        last_line: The last line it wrote to standard error.
    """

    def __init__(self, returncode: int, last_line: str) -> None:
        super().__init__(last_line)
        self.returncode = returncode
        self.last_line = last_line

    @property
    def reason(self) -> str:
        """What happened, in one line."""
        if self.returncode >= 0:
            return self.last_line or f"the measuring process ended with status {self.returncode}"
        name = signal.Signals(-self.returncode).name
        return f"the measuring process was ended by {name}" + (f": {self.last_line}" if self.last_line else "")


Launch = Callable[[Job], Generator[Message, None, None]]


def launch(job: Job) -> Generator[Message, None, None]:
    """Yield the messages of a process that works on *job*; closing the iterator ends the process.

    Raises:
        WorkerDiedError: The process ended otherwise than by finishing.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvplan.measure.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            yield from _talk(process, msgspec.json.encode(job))
            returncode = process.wait()
        finally:
            process.kill()
            process.wait()
        if returncode:
            raise WorkerDiedError(returncode, _last_line(errors))


def _talk(process: "subprocess.Popen[bytes]", job: bytes) -> Iterator[Message]:
    if process.stdin is None or process.stdout is None:
        raise ValueError("the process has no pipes")
    with process.stdout as lines:
        try:
            with process.stdin as pipe:
                pipe.write(job)
        except BrokenPipeError:
            return  # it is gone already; its exit status says more
        for line in lines:
            if line.endswith(b"\n"):  # a process that dies in the middle of a line has not said it
                yield DECODER.decode(line)


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
