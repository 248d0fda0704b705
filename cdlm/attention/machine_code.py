"""What the kernels become on a GPU that is not there: compiled for a target on any machine, and read.

Registers, spills, shared memory (LDS on AMD), matrix instructions, and how many waves or warps the registers leave room for on a
SIMD. Sources of the limits: AMD's CDNA3 and CDNA4 ISA guides (512 vector registers a lane and 8 waves a SIMD at most, 64 and
160 KiB of LDS), NVIDIA's tuning guides for Hopper and Blackwell (64 K registers and 4 partitions an SM, 227 KiB a block).
"""

import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Target:
    """A GPU by what limits a kernel on it. matrix: pattern of its matrix instructions."""

    backend: str
    arch: str | int
    warp: int
    shared_limit: int
    matrix: str
    cards: str


TARGETS = {
    "gfx942": Target("hip", "gfx942", 64, 64 * 1024, r"v_mfma_\w+", "MI300X, MI325X"),
    "gfx950": Target("hip", "gfx950", 64, 160 * 1024, r"v_mfma_\w+", "MI355X"),
    "sm_90": Target("cuda", 90, 32, 227 * 1024, r"(?:wgmma\.mma_async|mma\.sync)[\w.]*", "H100, H200"),
    "sm_100": Target("cuda", 100, 32, 227 * 1024, r"(?:tcgen05\.mma|mma\.sync)[\w.:]*", "B200"),
}
KERNELS = ("attention_forward", "attention_backward_q", "attention_backward_kv")
HEAD_DIMS = (64, 128, 256)  # 32 takes the tiles of 64


@dataclass(frozen=True)
class Report:
    """One kernel on one target.

    spills: vector registers that did not fit (AMD), or bytes of stack a thread (NVIDIA). scratch: bytes of memory a lane (AMD).
    scalar_spills: scalar registers kept in lanes of vector registers (AMD); that costs little and is no fault. waves: on a SIMD.
    """

    kernel: str
    target: str
    head_dim: int
    dtype: str
    rows: int
    keys: int
    warps: int
    stages: int
    registers: int
    spills: int
    scratch: int
    scalar_spills: int
    shared: int
    shared_limit: int
    matrix: dict[str, int]
    waves: int

    @property
    def fault(self) -> str:
        """Why this kernel must not be shipped, or nothing."""
        if self.spills or self.scratch:
            return f"spills {self.spills}, {self.scratch} bytes of scratch"
        if self.shared > self.shared_limit:
            return f"{self.shared} bytes of shared memory, {self.shared_limit} allowed"
        if not self.matrix:
            return "no matrix instruction"
        return ""


def _source(kernel: str, head_dim: int, dtype: str, rows: int, keys: int, group: int) -> Any:
    from triton.compiler import ASTSource

    from cdlm.attention import kernels

    function = getattr(kernels, kernel)
    names = function.arg_names
    constants = {"GROUP": group, "D": head_dim, "ROWS": rows, "KEYS": keys, "PRECISION": "ieee"}
    values = ("q_ptr", "k_ptr", "v_ptr", "o_ptr", "do_ptr", "dq_ptr", "dk_ptr", "dv_ptr")

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in values:
            return f"*{dtype}"
        if name in ("lse_ptr", "delta_ptr"):
            return "*fp32"
        if name.endswith("_ptr"):
            return "*i32"
        return "fp32" if name.startswith("scale") else "i32"

    # As the launcher finds them at run time: addresses and strides that are multiples of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name.endswith(("_batch", "_head", "_step"))
    }
    return ASTSource(
        fn=function, signature={name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()}, attrs=aligned,
    )  # fmt: skip


def _amd(assembly: str) -> tuple[int, int, int, int, int]:
    """Vector registers, spills, scratch, scalar spills, and waves on a SIMD."""

    def number(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", assembly)[-1])

    registers = number("vgpr_count")
    waves = min(8, 512 // (-(-registers // 8) * 8))
    return registers, number("vgpr_spill_count"), number("private_segment_fixed_size"), number("sgpr_spill_count"), waves


def _nvidia(cubin: bytes) -> tuple[int, int, int, int, int]:
    """Registers, stack, local memory, 0, and warps on a partition of an SM."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", said)}
    return used["REG"], used["STACK"], used["LOCAL"], 0, min(16, 16384 // (-(-used["REG"] // 8) * 8 * 32))


def compile_one(kernel: str, target_name: str, head_dim: int, dtype: str, shape: Any, group: int = 4) -> Report:
    """Compile a kernel for a target and read the machine code. shape: fused.Shape."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = TARGETS[target_name]
    made = triton.compile(
        _source(kernel, head_dim, dtype, shape.rows, shape.keys, group), target=GPUTarget(target.backend, target.arch, target.warp),
        options={"num_warps": shape.warps, "num_stages": shape.stages},
    )  # fmt: skip
    text = made.asm["amdgcn"] if target.backend == "hip" else made.asm["ptx"]
    registers, spills, scratch, scalar, waves = _amd(text) if target.backend == "hip" else _nvidia(made.asm["cubin"])
    return Report(
        kernel, target_name, head_dim, dtype, shape.rows, shape.keys, shape.warps, shape.stages, registers, spills, scratch, scalar,
        made.metadata.shared, target.shared_limit, dict(Counter(re.findall(target.matrix, text))), waves,
    )  # fmt: skip


def check_targets(names: list[str]) -> None:
    """A ValueError for an unknown target or none, or where kernels can't be compiled."""
    if not names:
        raise ValueError(f"no target given; allowed: {', '.join(TARGETS)}")
    for name in names:
        if name not in TARGETS:
            raise ValueError(f"unknown target {name!r}; allowed: {', '.join(TARGETS)}")
    from cdlm.attention.fused import interpreted

    if interpreted():
        raise ValueError("TRITON_INTERPRET is 1: kernels are interpreted, not compiled; unset it")


def survey(names: list[str], workers: int = 2) -> list[Report]:
    """Every kernel and head dimension on these targets, in bf16, with the shapes that are in use."""
    from cdlm.attention.fused import shapes_of

    check_targets(names)
    jobs = [
        (kernel, name, dim, "bf16", shapes_of(name, 2, dim)[place])
        for name in names for dim in HEAD_DIMS for place, kernel in enumerate(KERNELS)
    ]  # fmt: skip
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_one, *zip(*jobs, strict=True)))


def table(reports: list[Report]) -> str:
    """The survey as text, one line a kernel."""
    head = (
        "kernel", "target", "head dim", "tile", "warps", "registers", "spills", "scalar", "shared KiB", "matrix instructions", "waves", "",
    )  # fmt: skip
    lines = [head]
    for r in reports:
        matrix = ", ".join(f"{count} {name}" for name, count in r.matrix.items()) or "none"
        shared = f"{r.shared / 1024:.1f} of {r.shared_limit // 1024}"
        lines.append((
            r.kernel.removeprefix("attention_"), r.target, str(r.head_dim), f"{r.rows}x{r.keys}", str(r.warps), str(r.registers),
            str(r.spills), str(r.scalar_spills), shared, matrix, str(r.waves), r.fault,
        ))  # fmt: skip
    width = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, width, strict=True)).rstrip() for line in lines)


def as_json(reports: list[Report]) -> dict[str, Any]:
    """The survey as it is written to a file."""
    import triton

    return {"triton": triton.__version__, "kernels": [{**asdict(r), "fault": r.fault} for r in reports]}
