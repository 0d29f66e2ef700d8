"""A measuring process in plain Python that dies or hangs on the cells that KVPLAN_TEST_FAULTS names by format.

It starts in no time, so that a test can set a short limit; what it measures is nothing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

QUIET = {"load_average": 1, "steal_share": 0.0, "foreign_cpu_share": 0.01}
ABORT = """\
terminate called after throwing an instance of 'c10::AcceleratorError'
  what():  CUDA error: uncorrectable ECC error encountered
Search for `cudaErrorECCUncorrectable' in https://docs.nvidia.com/cuda/cuda-runtime-api for more information.
For more detailed error information, run with CUDA_LOG_FILE=stderr
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at /pytorch/c10/cuda/CUDAException.cpp:42 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x98 (0x7f390a0f9648 in /torch/lib/libc10.so)
frame #31: clone3 + 0x2c (0x7f3ab7b29c6c in /lib/x86_64-linux-gnu/libc.so.6)
"""
FAULTS = json.loads(os.environ["KVPLAN_TEST_FAULTS"])


def say(message: dict) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def suffer(fault: str) -> None:
    if fault == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with Path(os.environ["KVPLAN_TEST_CHILDREN"]).open("a") as pids:
            pids.write(f"{child.pid}\n")
        time.sleep(600)
    if fault == "slow":
        time.sleep(1.2)
    if fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "aborted":
        sys.stderr.write(ABORT)
        sys.stderr.flush()
        os.abort()


job = json.loads(sys.stdin.buffer.read())
suffer(FAULTS.get("start", ""))
say({"type": "started", "base": {}})
for group in job["groups"]:
    for key in group:
        suffer(FAULTS.get(key["format"], ""))
    for key in group:
        say({"type": "measured", "key": key, "status": "ok", "figures": {"tpot_s": [1.0]}, "conditions": QUIET})
suffer(FAULTS.get("end", ""))
