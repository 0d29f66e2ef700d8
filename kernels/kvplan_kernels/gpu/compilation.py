"""Kernels compiled ahead of time, exactly as a launch would have them compiled: no GPU is needed."""

from dataclasses import dataclass
from typing import Any

from kvplan_kernels.gpu.targets import Launch


@dataclass(frozen=True, kw_only=True, slots=True)
class Compilation:
    """What Triton's compiler takes, as `triton.compiler.ASTSource` names it.

    Attributes:
        kernel: The kernel.
        signature: Type of each argument, "constexpr" of constants.
        constants: Their values, by the argument's index.
        attributes: By the argument's index, what is known of it.
        options: Warps and stages.
    """

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]


def gpu_target(arch: str) -> Any:
    """Return Triton's target for *arch*: sm_90 and the like are NVIDIA's, gfx942 and the like AMD's."""
    from triton.backends.compiler import GPUTarget

    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)


def compilation(launch: Launch, arch: str) -> Compilation:
    """Return how Triton would compile the kernel of *launch* on *arch*, found the way its launcher finds it.

    The launcher's own functions tell which numbers become constants, and which arguments are multiples of 16.
    """
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend, kernel = make_backend(gpu_target(arch)), launch.kernel
    bind: Any = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(**launch.arguments, **launch.options)
    pack: Any = kernel._pack_args  # noqa: SLF001 - what the launcher calls; there is no public name
    _, signature, constants, attributes = pack(backend, dict(options), bound, specialization, options)
    return Compilation(
        kernel=kernel, signature=signature, constants=constants, attributes=attributes, options=launch.options
    )


def compiled(asked: Compilation, arch: str) -> Any:
    """Return Triton's compiled kernel: `asm` by kind of code, `metadata`."""
    import triton
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=asked.kernel, signature=asked.signature, constexprs=asked.constants, attrs=asked.attributes
    )  # fmt: skip
    return triton.compile(source, target=gpu_target(arch), options=asked.options)
