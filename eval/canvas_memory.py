"""Peak memory of the training losses of a canvas of 256 slots at a vocabulary of 262,144, and of decoding one, on a model of width 64.

    python eval/canvas_memory.py          # writes eval/results/canvas_memory.json

The logits of the canvas, [256, 262144] in fp32, are 256 MiB. A case is one forward and backward, in a process of its own; memory is the
peak of its resident set above what it held with the model, its gradients' room included (VmHWM - VmRSS, Linux). "plain" makes the logits
of the canvas whole, as a loss of logits does; with self-conditioning it has them twice. The script fails if a loss of this package holds
as much as two such tensors. "decoding" takes three steps, the model's forwards included; its factor is what `cdlm plan` counts with.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SLOTS, VOCABULARY, WIDTH, PROMPT, TOP_K = 256, 262_144, 64, 64, 64
CASES = ("uniform", "cdlm", "plain", "decoding")
CHILD = """
import json, sys
from pathlib import Path
import torch
from torch.nn import functional as F
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
from cdlm import families, trainer
from cdlm.decode import DecodeConfig, decode
from cdlm.families.base import Facts, Seen
from cdlm.families.wrap import wrap

def memory(name):
    return next(int(line.split()[1]) * 1024 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))

what, slots, vocabulary, width, prompt, k = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
config = DiffusionGemmaConfig(
    text_config={
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 32, "num_global_key_value_heads": 2, "num_experts": 2,
        "top_k_experts": 1, "moe_intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 1024,
    },
    vision_config={
        "model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 0, "num_attention_heads": 1,
        "num_key_value_heads": 1, "head_dim": 8, "position_embedding_size": 4,
    },
    canvas_length=slots,
)
hf = DiffusionGemmaForBlockDiffusion(config)
hf.set_attn_implementation("sdpa")
module = families.FAMILIES["diffusion_gemma"]
facts = Facts(mask_token_id=None, eos_token_ids=(1,), pad_token_id=0, **module.stated(config.to_dict()))
model = wrap(hf, facts, module.NAME)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)

class Training:
    diffusion = model
    args = trainer.CDLMConfig(output_dir="unused", objective="cdlm" if what == "cdlm" else "uniform", block_length=slots, use_cpu=True,
                              self_conditioning=1.0, report_to="none")
    def noise_cap(self):
        return 1.0

answer = torch.randint(3, vocabulary, (1, slots))
batch = {
    "prompt": torch.randint(3, vocabulary, (1, prompt)), "prompt_valid": torch.ones(1, prompt, dtype=torch.bool), "answer": answer,
    "length": torch.tensor([slots]), "canvas": torch.zeros(1), "told": torch.zeros(1), "level": torch.full((1,), 0.5),
    "uniform": torch.rand(1, slots), "token": torch.rand(1, slots),
}
if what == "cdlm":
    some = torch.arange(slots)[None] % 2 == 0
    target = {"target": torch.randn(1, slots, k), "target_ids": torch.randint(vocabulary, (1, slots, k)),
              "target_total": torch.full((1, slots), 20.0)}
    seen = {"seen": torch.randn(1, slots, k), "seen_ids": torch.randint(vocabulary, (1, slots, k))}
    batch |= {**target, **seen, "seen_star": seen["seen"], "seen_star_ids": seen["seen_ids"], "told": torch.ones(1, dtype=torch.bool),
              "y": answer, "y_star": answer, "open": torch.ones(1, slots, dtype=torch.bool), "open_star": some,
              "reference": batch["prompt"], "reference_valid": batch["prompt_valid"]}
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew here
if what == "decoding":
    config = DecodeConfig(slots, slots, order="entropy", entropy_bound=0.1, max_denoising_steps=3, t_min=0.4, t_max=0.8,
                          stability_threshold=1, entropy_threshold=0.005)
    assert decode(model, batch["prompt"], batch["prompt_valid"], config, seeds=[0]).steps == [3]
    print(json.dumps({"losses": {}, "peak_bytes": memory("VmHWM") - before}))
    sys.exit()
if what == "plain":
    rows = model.answer_hidden(batch["prompt"], batch["prompt_valid"], answer, slots)
    with torch.no_grad():
        seen = Seen(model.head(rows))
    logits = model.head(model.answer_hidden(batch["prompt"], batch["prompt_valid"], answer, slots, seen))
    found = {"diffusion": F.cross_entropy(logits.flatten(0, 1), answer.flatten())}
else:
    found = trainer.LOSSES[Training.args.objective](Training(), batch)
sum(found.values()).backward()
print(json.dumps({"losses": {name: round(loss.item(), 4) for name, loss in found.items()}, "peak_bytes": memory("VmHWM") - before}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=ROOT / "eval/results/canvas_memory.json")
    asked = parser.parse_args()
    whole = SLOTS * VOCABULARY * 4
    found: list[dict] = []
    for case in CASES:
        numbers = map(str, (SLOTS, VOCABULARY, WIDTH, PROMPT, TOP_K))
        done = subprocess.run([sys.executable, "-c", CHILD, case, *numbers], cwd=ROOT, capture_output=True, text=True, check=True)
        found.append({"case": case, "slots": SLOTS, "vocabulary": VOCABULARY, "width": WIDTH, **json.loads(done.stdout)})
        peak = found[-1]["peak_bytes"]
        print(f"{case}: peak {peak / 2**20:.0f} MiB, {peak / whole:.2f} times the logits of a canvas ({whole / 2**20:.0f} MiB)")
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
    if over := [row["case"] for row in found if row["losses"] and row["case"] != "plain" and row["peak_bytes"] >= 2 * whole]:
        sys.exit(f"as much as the logits of a canvas twice: {', '.join(over)}")


if __name__ == "__main__":
    main()
