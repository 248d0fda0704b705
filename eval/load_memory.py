"""What loading and converting a checkpoint in a family's own format takes in memory, on generated checkpoints: one of about 1 GB whose
tensors keep their shapes, and a mixture of experts whose matrices are stacked.

    python eval/load_memory.py            # writes eval/results/load_memory.json

Each case runs in a process of its own; memory is the peak of its resident set above what it held before (VmHWM - VmRSS, Linux). Pages of
a memory-mapped file count there, though the kernel may take them back.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
SIZES = {"llada": {
    "d_model": 1024, "n_layers": 16, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 3584, "embedding_size": 8192, "vocab_size": 8192,
}, "lladamoe": {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "num_experts": 16,
    "expert_intermediate_size": 512, "dense_intermediate_size": 512, "moe_layer_freq": [1] * 8, "vocab_size": 8192,
}}  # fmt: skip
SHARD = {"llada": 256 * 2**20, "lladamoe": 64 * 2**20}
CHILD = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Qwen3MoeForCausalLM  # libraries are not what is measured
from cdlm import families
from cdlm.families import convert

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

what, folder, target = sys.argv[1:]
before = memory("VmRSS")
if what == "convert":
    convert.folder(Path(folder), Path(target), "native", families.FAMILIES)
    size = sum(file.stat().st_size for file in Path(target).glob("*.safetensors"))
else:
    model = families.load(folder, dtype=what)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
print(json.dumps({"result_bytes": size, "peak_bytes": memory("VmHWM") - before}))
"""


def generate(name: str, folder: Path, shard_bytes: int) -> None:
    """A random checkpoint in the format of tests/fixtures/<name>, with other sizes."""
    from cdlm.families import checkpoint, convert, find

    config = {**json.loads((ROOT / "tests/fixtures" / name / "config.json").read_text()), **SIZES[name]}
    module = find(config)
    shapes = convert._shapes(convert.skeleton(convert.native_config(config, module, module.facts(config))))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint.write(folder, (
        (key, tensor) for entry in module.entries(config)
        for key, tensor in zip(entry.family, entry.to_family([torch.randn(shapes[native]) * 0.02 for native in entry.native]), strict=True)
    ), shard_bytes)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "eval/results/load_memory.json")
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        cases = [(name, files, size) for name in SIZES for files, size in (("one file", 1 << 40), ("shards", SHARD[name]))]
        for name, files, shard_bytes in cases:
            folder = Path(scratch) / f"{name}-{files.replace(' ', '-')}"
            generate(name, folder, shard_bytes)
            largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
            for what in ("float32", "bfloat16", "convert"):
                command = [sys.executable, "-c", CHILD, what, str(folder), str(folder) + "-native"]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                row = {"format": name, "files": files, "what": what, "largest_file_bytes": largest, **json.loads(done.stdout)}
                found.append(row)
                result, peak, file = (row[key] / 2**20 for key in ("result_bytes", "peak_bytes", "largest_file_bytes"))
                said = f"result {result:.0f} MiB, peak {peak:.0f} MiB, largest file {file:.0f} MiB, float32 on disk"
                print(f"{name}, {files}, {what}: {said}")
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
    # A stacked matrix is whole in memory before it changes its dtype: 32 MiB in the mixture of experts here.
    over = [row for row in found if row["peak_bytes"] > row["result_bytes"] + row["largest_file_bytes"] + 32 * 2**20]
    if over:
        sys.exit(f"more than one shard above the model's own size: {over}")


if __name__ == "__main__":
    main()
