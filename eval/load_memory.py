"""What loading and converting a checkpoint in a family's own format takes in memory, on a generated checkpoint of about 1 GB.

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
SIZES = {
    "d_model": 1024, "n_layers": 16, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 3584, "embedding_size": 8192, "vocab_size": 8192,
}  # fmt: skip
SHARD = 256 * 2**20
CHILD = """
import json, sys
from pathlib import Path
from transformers import AutoModelForCausalLM, LlamaForCausalLM  # libraries are not what is measured
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


def generate(folder: Path, shard_bytes: int) -> None:
    """A random checkpoint in the format of tests/fixtures/llada, with other sizes."""
    from cdlm.families import checkpoint, convert, find

    config = {**json.loads((ROOT / "tests/fixtures/llada/config.json").read_text()), **SIZES}
    module = find(config)
    shapes = convert._shapes(convert.skeleton(convert.native_config(config, module, module.facts(config))))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint.write(folder, (
        (name, tensor) for entry in module.entries(config)
        for name, tensor in zip(entry.family, entry.to_family([torch.randn(shapes[key]) * 0.02 for key in entry.native]), strict=True)
    ), shard_bytes)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "eval/results/load_memory.json")
    asked = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        for files, shard_bytes in (("one file", 1 << 40), ("shards", SHARD)):
            folder = Path(scratch) / files.replace(" ", "-")
            generate(folder, shard_bytes)
            largest = max(file.stat().st_size for file in folder.glob("*.safetensors"))
            for what in ("float32", "bfloat16", "convert"):
                command = [sys.executable, "-c", CHILD, what, str(folder), str(folder) + "-native"]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
                row = {"files": files, "what": what, "largest_file_bytes": largest, **json.loads(done.stdout)}
                found.append(row)
                result, peak, file = (row[key] / 2**20 for key in ("result_bytes", "peak_bytes", "largest_file_bytes"))
                print(f"{files}, {what}: result {result:.0f} MiB, peak {peak:.0f} MiB, largest file {file:.0f} MiB (float32 on disk)")
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
    over = [row for row in found if row["what"] != "convert" and row["peak_bytes"] > row["result_bytes"] + row["largest_file_bytes"]]
    if over:
        sys.exit(f"more than one shard above the model's own size: {over}")


if __name__ == "__main__":
    main()
