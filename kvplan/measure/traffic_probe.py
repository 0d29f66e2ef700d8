"""The process that `ncu` watches: one decode call between the start and the stop of CUDA's profiler.

`python -m kvplan.measure.traffic_probe CASE`, CASE a `TrafficCase` as JSON; it writes nothing but its last words.
"""

import sys
from contextlib import AbstractContextManager, nullcontext

import msgspec
import torch

from kvplan.errors import KvplanError
from kvplan.measure.beds import Group, PagedBed
from kvplan.measure.faults import FAULT, last_words
from kvplan.measure.traffic import TrafficCase
from kvplan.runtime.ops import load_ops, wait
from kvplan_kernels.cache import AttentionOptions


def main() -> int:
    """Run the case on the command line; return the exit status."""
    try:
        call_once(msgspec.json.decode(sys.argv[1], type=TrafficCase))
    except Exception as error:
        sys.stderr.write(f"{error if isinstance(error, KvplanError) else last_words(error)}\n")
        return FAULT
    return 0


def call_once(traffic: TrafficCase) -> None:
    """Call the decode operation twice, the second time with the profiler on: then nothing is left to compile."""
    case = traffic.case
    torch.set_num_threads(case.threads)
    ops = load_ops(traffic.kernel, case.threads, traffic.device)
    bed = PagedBed(traffic.layout(), (Group(sequences=case.batch, tokens=case.tokens),), ops, copies=1)
    query = torch.zeros(case.batch, 1, case.query_heads, case.head_dim, dtype=torch.bfloat16, device=traffic.device)
    options = AttentionOptions(scale=case.head_dim**-0.5)
    bed.decode(query, options)
    wait(traffic.device)
    with _profiled(traffic.device):
        bed.decode(query, options)
        wait(traffic.device)


def _profiled(device: str) -> AbstractContextManager[None]:
    """Return the stretch that `--profile-from-start off` leaves to be profiled; on a processor there is none."""
    return torch.cuda.profiler.profile() if device.startswith("cuda") else nullcontext()


if __name__ == "__main__":
    sys.exit(main())
