"""Attention on a GPU: first whether every backend is right there, then how fast each is. One script, about five minutes.

    make gpu-check                                  # writes eval/results/<device>.json
    python eval/gpu_check.py --smoke --out FILE     # two small shapes on a CPU, kernels interpreted: that this script works

Times are medians over device events after warm-up. FLOP counts the pairs that a mask lets through; bytes are q, k, v and the output,
once in a forward, three times in training. The share of the roofline is the bound of cdlm/roofline.py's card (the longer of FLOP
over peak and bytes over bandwidth) over the measured time.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
from triton.errors import TritonError

from cdlm import masks
from cdlm.attention import attend
from cdlm.families.shapes import SHAPES
from cdlm.roofline import HARDWARE

MODELS = ("llada-8b", "dream-7b", "llada2-mini", "zaya1-8b")
LENGTHS, BLOCKS, PREFIXES, GROUPS = (1, 7, 33, 70, 130), (1, 4, 16, 32), (0, 33), (1, 4)
BACKENDS = ("naive", "sdpa", "flex", "triton")
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def block_causal(batch: int, prompt: int, total: int, first: int, block: int, origin: str, device: str, pad: int = 0) -> masks.Sight:
    """Queries from `first` on; `pad` padding tokens on the left of the last row."""
    valid = torch.ones(batch, total, dtype=torch.bool, device=device)
    valid[-1, :pad] = False
    position = masks.positions(valid)
    prompts = torch.full((batch,), prompt, device=device)
    prompts[-1] -= pad
    return masks.clean(masks.horizon(position, prompts.clamp(min=1), block, origin=origin)[:, first:], position, valid)


def random(
    batch: int, heads: int, kv_heads: int, queries: int, keys: int, dim: int, dtype: torch.dtype, device: str
) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(queries * 7919 + keys)
    shapes = [(batch, heads, queries, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim), (batch, heads, queries, dim)]
    return [torch.randn(shape, generator=draw).to(device, dtype) for shape in shapes]


def masks_with_groups(device: str) -> list[masks.Sight]:
    """[noisy | clean], TiDAR's training and its decoding, with padding."""
    valid = torch.ones(2, 75, dtype=torch.bool, device=device)
    valid[1, :7] = False
    prompt, position = valid.sum(1) // 2, masks.positions(valid)
    clean = masks.Tokens(position, masks.horizon(position, prompt, 16), valid)
    noisy = prompt[:, None] + torch.arange(34, device=device)
    return [
        masks.noisy_clean(noisy, torch.ones_like(noisy, dtype=torch.bool), clean, prompt, 16),
        masks.tidar_training(valid, 16).sight,
        masks.tidar_decoding(valid, 8).sight,
    ]


def everything_of(
    backend: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, seen: Any
) -> dict[str, torch.Tensor]:
    """Outputs and gradients; where the backend gives a log-sum-exp that too, with a gradient through it."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    with_lse = backend in ("naive", "triton")
    out = attend(q, k, v, seen, backend=backend, need_lse=with_lse)
    found = {}
    if with_lse:
        out, lse = out
        found["lse"] = torch.where(lse.isinf(), 0.0, lse)
    gradients = torch.autograd.grad((out * d_out).sum(), (q, k, v), retain_graph=with_lse)
    found |= {"out": out, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    if with_lse:
        found["dq through lse"] = torch.autograd.grad(found["lse"].square().sum(), q)[0]
    return {name: x.detach().float() for name, x in found.items()}


def correctness(device: str, smoke: bool, deadline: float) -> dict[str, Any]:
    """Largest error of every backend against naive, over the largest value, for every dtype; raises where it is too large.

    triton goes through the whole grid (queries that see nothing, padding, prefixes, masks with groups, two key-value heads), sdpa
    and flex, which are torch's own, through one case in forty.
    """
    cases = list(itertools.product(LENGTHS, BLOCKS, PREFIXES, GROUPS, masks.ORIGINS, (0, 5)))
    if smoke:
        cases = [(33, 4, 33, 4, "zero", 5), (7, 16, 0, 1, "prompt_end", 0)]
    worst: dict[str, float] = {}
    checked = 0
    for dtype in (torch.float32,) if smoke else tuple(TOLERANCE):
        seens: list[tuple[str, masks.Sight, int]] = []
        for length, block, prefix, group, origin, pad in cases:
            total = prefix + length
            seen = block_causal(2, max(1, total // 3), total, prefix, block, origin, device, min(pad, total - 1))
            if pad:
                seen.horizon_BQ[0, -1] = -1  # a query that sees nothing
            seens.append((f"length {length}, block {block}, prefix {prefix}, group {group}, {origin}, pad {pad}", seen, group))
        seens += [(f"mask with groups {i}", seen, 3) for i, seen in enumerate(masks_with_groups(device))]
        for number, (case, seen, group) in enumerate(seens):
            if time.monotonic() > deadline:
                raise SystemExit("gpu-check: no time left for the correctness grid; give it more --seconds")
            dim = (64, 128, 256)[number % 3]
            queries, keys = seen.horizon_BQ.shape[1], seen.position_BK.shape[1]
            q, k, v, d_out = random(2, 2 * group, 2, queries, keys, dim, dtype, device)
            wanted = everything_of("naive", *(x.float() for x in (q, k, v, d_out)), seen)
            for backend in ("triton", "sdpa", "flex") if number % 40 == 0 and device != "cpu" else ("triton",):
                found = everything_of(backend, q, k, v, d_out, seen)
                checked += 1
                for name, b in found.items():
                    error = float((b - wanted[name]).abs().max() / wanted[name].abs().max().clamp(min=1e-3))
                    key = f"{backend}, {dtype}"
                    worst[key] = max(worst.get(key, 0.0), error)
                    if not error <= TOLERANCE[dtype]:
                        raise SystemExit(f"gpu-check: {name} of {backend} is off by {error:.2e} ({dtype}, {case}, head dim {dim})")
    return {"cases": checked, "largest_error": worst, "tolerance": {str(d): t for d, t in TOLERANCE.items()}}


def median_seconds(run: Callable[[], Any], device: str, limit: float = 0.25) -> float:
    """Median time of a run, at least 3 and until `limit` seconds, after one warm-up (which compiles).

    On a GPU ten runs stand between two events, so that what Python takes to launch one is hidden behind the one before.
    """
    run()
    times: list[float] = []
    began = time.monotonic()
    while len(times) < 3 or (time.monotonic() - began < limit and len(times) < 50):
        if device == "cpu":
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
        else:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            for _ in range(10):
                run()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last) / 1e4)
    return statistics.median(times)


def flash_attention() -> Callable[..., Any] | None:
    """flash-attn's function where it is installed, else AITER's; both take [B, L, H, D]."""
    for module in ("flash_attn", "aiter"):
        try:
            return __import__(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
    return None


def jobs(smoke: bool) -> list[dict[str, Any]]:
    """What is timed: prefill and training under the block-causal mask, and one block against a cache, which needs none."""
    if smoke:
        return [
            {"model": "zaya1-8b", "kind": "prefill", "queries": 32, "keys": 32, "backward": False},
            {"model": "zaya1-8b", "kind": "block", "queries": 16, "keys": 48, "backward": False},
        ]
    found: list[dict[str, Any]] = []
    for model in MODELS:
        lengths = (512, 1024, 2048, 4096, 8192)
        found += [{"model": model, "kind": "prefill", "queries": n, "keys": n, "backward": False} for n in lengths]
        found += [{"model": model, "kind": "training", "queries": n, "keys": n, "backward": True} for n in (768, 4096)]
        caches = (1024, 2048, 4096, 8192, 16384, 32768)
        found += [{"model": model, "kind": "block", "queries": 32, "keys": n + 32, "backward": False} for n in caches]
    return found


def measure(job: dict[str, Any], backend: str, device: str, card: Any, dtype: torch.dtype) -> dict[str, Any] | None:
    """One line of the result; None where a backend can't do it (too much memory, not installed, no mask)."""
    shape = SHAPES[job["model"]]
    if backend == "naive" and job["queries"] * job["keys"] * shape.heads > 2**30:
        return None
    q, k, v, d_out = random(1, shape.heads, shape.kv_heads, job["queries"], job["keys"], shape.head_dim, dtype, device)
    seen = None if job["kind"] == "block" else block_causal(1, job["queries"] // 2, job["keys"], 0, 32, "prompt_end", device)
    if backend == "flash-attn":
        flash = flash_attention()
        if flash is None or seen is not None:
            return None
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        run = lambda: flash(*rows, causal=False)  # noqa: E731
    elif job["backward"]:
        leaves = [x.requires_grad_() for x in (q, k, v)]
        run = lambda: torch.autograd.grad(attend(*leaves, seen, backend=backend), leaves, d_out)  # noqa: E731
    else:
        run = lambda: attend(q, k, v, seen, backend=backend)  # noqa: E731
    spent = median_seconds(run, device)
    pairs = float(seen.allow().sum()) if seen is not None else float(job["queries"] * job["keys"])
    # Backward: five products to the forward's two.
    flop = 4.0 * pairs * shape.heads * shape.head_dim * (3.5 if job["backward"] else 1.0)
    moved = (2 * q.numel() + 2 * k.numel()) * q.element_size() * (3 if job["backward"] else 1)
    bound = None if card is None else max(flop / card.bf16, moved / card.bandwidth)
    return {
        **job, "backend": backend, "dtype": str(dtype), "ms": spent * 1e3, "tflop_per_s": flop / spent / 1e12,
        "tb_per_s": moved / spent / 1e12, "share_of_roofline": None if bound is None else bound / spent,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="two small shapes on a CPU")
    parser.add_argument("--seconds", type=float, default=270.0, help="time for all; a measurement that does not fit is named")
    parser.add_argument("--out", type=Path, help="default: eval/results/<device>.json")
    args = parser.parse_args()
    if not args.smoke and not torch.cuda.is_available():
        print("gpu-check: no GPU here (torch.cuda.is_available() is false); --smoke runs two small shapes on a CPU", file=sys.stderr)
        return 2
    device = "cpu" if args.smoke else "cuda"
    name = platform.processor() or "cpu" if args.smoke else torch.cuda.get_device_name()
    words = name.upper().replace("-", " ").split()
    # By whole words, and no card whose form has another clock than the SXM module on the data sheet.
    card = next((HARDWARE[word] for word in words if word in HARDWARE and not {"PCIE", "NVL"} & set(words)), None)
    deadline = time.monotonic() + args.seconds
    out = args.out or Path(__file__).parent / "results" / f"{name.replace(' ', '-').replace('/', '-')}.json"
    began = time.monotonic()
    right = correctness(device, args.smoke, deadline)
    spent = time.monotonic() - began
    errors = ", ".join(f"{key} {error:.1e}" for key, error in right["largest_error"].items())
    print(f"{name}: the backends are naive in {right['cases']} cases, largest errors: {errors} ({spent:.0f} s)", flush=True)
    dtype = torch.float32 if args.smoke else torch.bfloat16
    lines, left_out = [], []
    # flex last: it compiles for every shape, and may not get through all.
    for backend in ("naive", "sdpa", "triton", "flash-attn", "flex"):
        for job in jobs(args.smoke):
            what = f"{backend:10} {job['model']:12} {job['kind']:8} {job['queries']}x{job['keys']}"
            if time.monotonic() > deadline:
                left_out.append(f"{what}: no time left")
                continue
            try:
                torch._dynamo.reset()  # flex compiles for this shape alone, and meets no limit on how often
                line = measure(job, backend, device, card, dtype)
            except (RuntimeError, ValueError, TritonError) as error:  # out of memory, or a compiler that gives up: named, not hidden
                left_out.append(f"{what}: {str(error).splitlines()[0][:120]}")
                continue
            if line is not None:
                lines.append(line)
                share = "" if line["share_of_roofline"] is None else f", {line['share_of_roofline']:.0%} of the roofline"
                rates = f"{line['tflop_per_s']:.1f} TFLOP/s, {line['tb_per_s']:.2f} TB/s"
                print(f"{what}: {line['ms']:.3f} ms, {rates}{share}", flush=True)
    result = {
        "device": name, "torch": torch.__version__, "triton": triton.__version__, "hip": torch.version.hip, "cuda": torch.version.cuda,
        "correctness": right, "left_out": left_out, "lines": lines,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"gpu-check: {len(lines)} lines, {len(left_out)} left out; {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
