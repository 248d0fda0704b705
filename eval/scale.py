"""Growth on the small world's shape, measured: throughput against batch size, and peak memory against sequence length and vocabulary.

    python eval/scale.py [--parts batch,memory] [--out eval/results/scale.json]

batch: trajectories a second of collecting, and rows a second of training (objective cdlm, all three losses), on random models of the
teacher's shape with random prompts, in one thread; seconds are those that the process computes, so that other work on the machine does
not count. memory: the most bytes that tensors hold at once during the losses and their backward of one row, by
length and vocabulary, beside the same losses of whole logits; counted at every operator, so that it does not depend on the machine.
Prints tables as Markdown.
"""

import argparse
import json
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cdlm import data, losses, trajectories
from cdlm.decode import DecodeConfig
from cdlm.families.base import DiffusionLM, Facts

ROOT = Path(__file__).parent.parent
BUDGET, BLOCK, PROMPT = 64, 32, 48
SIZES = (1, 4, 16, 64)


class Peak(TorchDispatchMode):
    """The most bytes of storages that operators made and that live at once; what was there before is not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.held, self.most, self.known = 0, 0, set()

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        out = function(*arguments, **(options or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.note(tensor.untyped_storage())
        return out

    def note(self, storage: Any) -> None:
        if (key := storage._cdata) in self.known:
            return
        size = storage.nbytes()
        self.known.add(key)
        self.held += size
        self.most = max(self.most, self.held)

        def gone() -> None:
            self.known.discard(key)
            self.held -= size

        weakref.finalize(storage, gone)


def model(seed: int = 0) -> DiffusionLM:
    """A random model of the small world's shape, 0.87 M parameters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(ROOT / "recipes" / "tiny" / "teacher")
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    return DiffusionLM(hf, Facts(mask_token_id=1, eos_token_ids=(2,), pad_token_id=0), "native").eval()


def examples(count: int) -> list[data.Example]:
    """Random prompts and answers of the small world's lengths."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 57, (count, PROMPT + 24), generator=draw).tolist()
    return [data.Example(i, "all", "", "", row[:PROMPT], row[PROMPT:]) for i, row in enumerate(ids)]


def collecting(size: int, rows: int, folder: Path) -> float:
    """Trajectories a second of computing at a batch size; every decoding spends its whole budget."""
    screen = trajectories.Screen(drop=False)
    start = time.process_time()
    trajectories.collect(
        model(), examples(rows), folder, config=DecodeConfig(BUDGET, BLOCK, tokens_per_step=1, stop_at_eos=False), temperatures=[0.0],
        batch_size=size, shard_size=rows, seed=0, screen=screen, right=lambda example, ids: True, request={"size": size},
        say=lambda text: None,
    )  # fmt: skip
    return rows / (time.process_time() - start)


def training(size: int, steps: int, stored: Path, out: Path) -> float:
    """Rows a second of computing of optimizer steps at a batch size, the first step left out."""
    import copy

    from transformers import PrinterCallback, TrainerCallback

    from cdlm.trainer import CDLMConfig, CDLMTrainer, Collator, TrajectoryStates

    student, times = model(), []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    args = CDLMConfig(
        output_dir=str(out), block_length=BLOCK, max_steps=steps + 1, per_device_train_batch_size=size, save_strategy="no", use_cpu=True,
        disable_tqdm=True, dataloader_pin_memory=False, logging_steps=1000, dataloader_drop_last=True,
    )  # fmt: skip
    dataset = TrajectoryStates(trajectories.Trajectories(stored), student, BLOCK, seed=0)
    trainer = CDLMTrainer(
        student, args, dataset, Collator(student, BUDGET), teacher_head=copy.deepcopy(student.head).requires_grad_(False),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return steps * size / (times[-1] - times[0])


def peak(length: int, vocab: int, *, chunked: bool, width: int = 64) -> int:
    """Bytes at the height of distillation, consistency and restoring on one row of `length` slots, and of their backward."""
    draw = torch.Generator().manual_seed(0)
    hidden, teacher, later = (torch.randn(1, length, width, generator=draw) for _ in range(3))
    head, everywhere = torch.nn.Linear(width, vocab, bias=False).requires_grad_(False), torch.ones(1, length, dtype=torch.bool)
    token, level, slots = torch.zeros(1, length, dtype=torch.long), torch.full((1,), 0.5), torch.tensor([float(length)])
    hidden.requires_grad_()
    with Peak() as watch:
        if chunked:
            total = (
                losses.distillation_from_hidden(hidden, head, teacher, head, everywhere, vocab)
                + losses.consistency_from_hidden(hidden, head, later, head, everywhere, vocab)
                + losses.masked_diffusion_from_hidden(hidden, head, token, everywhere, level, slots, vocab)
            )
        else:
            logits = head(hidden)
            total = losses.distillation(logits, head(teacher), everywhere) + losses.consistency(logits, head(later), everywhere)
            total = total + losses.masked_diffusion(head(hidden), token, everywhere, level, slots)
        total.backward()
    return watch.most


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="batch,memory")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=int, default=64, help="most trajectories of a collection")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    if "batch" in args.parts.split(","):
        print("| batch | trajectories/s | training rows/s |\n|---:|---:|---:|")
        with tempfile.TemporaryDirectory() as folder:
            for size in sorted(SIZES, reverse=True):
                collected = collecting(size, min(args.rows, 4 * size), Path(folder) / str(size))
                trained = training(size, 3, Path(folder) / str(max(SIZES)), Path(folder) / "out")
                found[f"batch {size}"] = {"trajectories_per_second": collected, "rows_per_second": trained}
                print(f"| {size} | {collected:.2f} | {trained:.1f} |", flush=True)
    if "memory" in args.parts.split(","):
        print("\n| slots | vocabulary | whole logits | chunks |\n|---:|---:|---:|---:|")
        for vocab in (32_000, 128_000, 256_000):
            for length in (128, 256, 512, 1024):
                chunks = peak(length, vocab, chunked=True)
                whole = peak(length, vocab, chunked=False) if length * vocab <= 33_000_000 else None
                found[f"{length} slots, {vocab} tokens"] = {"whole": whole, "chunks": chunks}
                shown = "-" if whole is None else f"{whole / 2**20:.0f} MiB"
                print(f"| {length} | {vocab:,} | {shown} | {chunks / 2**20:.0f} MiB |", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
