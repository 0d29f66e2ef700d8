"""`kvplan kernels`: time the kernels alone, without a model, or look inside those for a GPU without one."""

import sys

import typer

from kvplan.errors import InputError


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""
    kernels = typer.Typer(no_args_is_help=True)
    bench = typer.Typer(no_args_is_help=True)
    bench.command("decode")(bench_decode_command)
    kernels.command("inspect")(inspect_command)
    kernels.add_typer(bench, name="bench", help="Time kvplan's kernels beside torch's attention in one run.")
    app.add_typer(kernels, name="kernels", help="Look at the kernels alone, without a model.")


def bench_decode_command(
    formats: list[str] = typer.Option(
        [],
        "-f",
        "--format",
        help="Format to time; may be repeated. Default: bf16 int8 int4 kivi-k4v4-g64 kivi-k2v2-g64.",
        show_default=False,
    ),
    batch: int = typer.Option(1, min=1, help="Sequences."),
    query_heads: int = typer.Option(32, min=1, help="Query heads."),
    kv_heads: int = typer.Option(8, min=1, help="KV heads."),
    head_dim: int = typer.Option(128, min=1, help="Elements of a head."),
    tokens: int = typer.Option(32768, min=1, help="Tokens that each sequence holds."),
    threads: int = typer.Option(1, min=1, help="Threads."),
    block_size: int = typer.Option(64, min=1, help="Tokens of a page."),
    repeats: int = typer.Option(15, min=1, help="Samples of each implementation."),
    device: str = typer.Option("cpu", help="cpu, cuda, cuda:1, a UUID, or auto: a GPU if there is one."),
    traffic: bool = typer.Option(False, "--traffic", help="Count DRAM traffic with Nsight Compute's ncu; on a GPU."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Time one layer's decode attention: kvplan's kernels, torch's attention and the machine's read bandwidth.

    All of them in one run, interleaved, on caches that outgrow the device's own cache.
    """
    from kvplan.measure.checks import require_packages

    require_packages()
    from kvplan.core.specs import DeviceKind
    from kvplan.measure.bench import DEFAULT_FORMATS, DecodeCase, bench_decode
    from kvplan.measure.devices import open_device
    from kvplan.measure.held import hold
    from kvplan.measure.traffic import TrafficCase, measure_traffic
    from kvplan.runtime.ops import default_kernel, load_ops, require_compiled

    case = DecodeCase(
        batch=batch, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim, tokens=tokens, threads=threads
    )
    machine = open_device(device)
    on_gpu = machine.info.kind is DeviceKind.CUDA
    if traffic and not on_gpu:
        raise InputError("the counters are a GPU's", where="--traffic", hint="give --device cuda, or leave it out")
    kernel = default_kernel(machine.torch_name)
    ops = load_ops(kernel, threads, machine.torch_name)
    require_compiled(ops)
    chosen = tuple(dict.fromkeys(formats)) or DEFAULT_FORMATS
    bench = bench_decode(machine, ops, case, formats=chosen, block_tokens=block_size, samples=repeats)
    held = hold(bench, machine.info, block_tokens=block_size) if on_gpu else None
    moved = None
    if traffic:
        machine.start_cell()  # what torch holds of the GPU is in the way of the process that is counted
        moved = {
            name: measure_traffic(
                TrafficCase(case=case, format=name, block_tokens=block_size, kernel=kernel, device=machine.torch_name)
            )
            for name in chosen
        }
    if as_json:
        from kvplan.report.json import dump, plain

        sys.stdout.write(dump({**plain(bench), "held": held, "traffic": moved}) + "\n")
        return
    from kvplan.measure.environment import disturbance
    from kvplan.report.bench import print_bench
    from kvplan.report.console import open_console

    print_bench(open_console(), bench, held=held, traffic=moved)
    if disturbed := disturbance(bench.conditions):
        sys.stderr.write(f"disturbed: {disturbed} meanwhile; measure again on a quiet machine\n")


def inspect_command(
    formats: list[str] = typer.Option(
        [], "-f", "--format", help="Format; may be repeated. Default: one of each kind.", show_default=False
    ),
    op: str = typer.Option(
        "decode",
        help="Whose kernels: decode, received (decode that says what weight each token received), append, dequantize, "
        "read (of memory, without more), or all.",
    ),
    arch: str = typer.Option(
        "sm_80,sm_89,sm_90,sm_100,sm_120,gfx942",
        help="Architectures, with commas: sm_80, sm_89, sm_90, sm_100, sm_120, gfx942.",
    ),
    head_dim: int = typer.Option(128, min=1, help="Elements of a head."),
    kv_heads: int = typer.Option(8, min=1, help="KV heads."),
    gqa: int = typer.Option(4, min=1, max=16, help="Query heads of a KV head."),
    block_size: int = typer.Option(128, min=1, help="Tokens of a page."),
    batch: int = typer.Option(1, min=1, help="Sequences."),
    tokens: int = typer.Option(32768, min=1, help="Tokens that each sequence holds."),
    queries: int = typer.Option(1, min=1, max=32, help="Query tokens of each sequence, or tokens to append to it."),
    query_type: str = typer.Option("bf16", help="Type of queries and of tokens to append: bf16, fp16 or fp32."),
    softcap: float = typer.Option(None, min=0, help="Softcap of the scores. Default: none.", show_default=False),
    positions: bool = typer.Option(False, "--positions", help="Queries stand elsewhere than at the sequence's end."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Compile the GPU kernels ahead of time and count what they are made of; no GPU is needed.

    Registers, spills, shared memory, occupancy, and of the main loop: instructions for each element of K and V, integer
    conversions and the widest load. From these, the least time that a kernel and the whole call can take.
    """
    from kvplan.measure.checks import require_packages

    require_packages()
    from kvplan.measure.inspection import FORMATS, Shape, inspect_kernels, operations, predicted_calls

    shape = Shape(
        head_dim=head_dim, kv_heads=kv_heads, gqa=gqa, block_size=block_size, batch=batch, tokens=tokens,
        queries=queries, query_type=query_type, softcap=softcap or None, positions=positions,
    )  # fmt: skip
    found = inspect_kernels(
        operations(op), tuple(dict.fromkeys(formats)) or FORMATS, tuple(dict.fromkeys(arch.split(","))), shape
    )
    calls = predicted_calls(found)
    if as_json:
        from kvplan.report.json import dump

        sys.stdout.write(dump({"kernels": found, "calls": calls}) + "\n")
        return
    from kvplan.report.console import open_console
    from kvplan.report.inspection import print_inspected

    print_inspected(open_console(), found, calls)
