"""What goes to the Hub: a folder that stock transformers loads, with a decoder beside the weights and a card.

The folder holds config.json (a stock architecture and the facts), model.safetensors, the tokenizer, generation_config.json,
custom_generate/generate.py and README.md, which is written last.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from cdlm import families
from cdlm.families import native
from cdlm.families.base import DiffusionLM, Facts

GENERATE_FILE = Path(__file__).parent / "exported" / "generate.py"


def merge_lora(peft_model: Any, probe_ids_BL: torch.Tensor, tolerance: float = 1e-4) -> Any:
    """The base model with the adapter merged into its weights; refused when a probe's logits change by more than `tolerance`
    (times 1,000 for models in 16 bits, whose own rounding is coarser)."""
    if next(peft_model.parameters()).dtype in (torch.bfloat16, torch.float16):
        tolerance *= 1000
    valid = torch.ones_like(probe_ids_BL)
    peft_model.eval()
    with torch.no_grad():
        before = peft_model(input_ids=probe_ids_BL, attention_mask=valid, use_cache=False).logits
        merged = peft_model.merge_and_unload()
        after = merged(input_ids=probe_ids_BL, attention_mask=valid, use_cache=False).logits
    difference = float((before - after).abs().max())
    if difference > tolerance:
        raise RuntimeError(f"merging the adapter changed the logits by {difference:.2e} (allowed {tolerance:.0e}); keep the adapter apart")
    return merged


def save(
    model: DiffusionLM, tokenizer: Any, folder: Path, *, facts: Facts, max_new_tokens: int, confidence_threshold: float | None, card: str
) -> None:
    """Write the folder whole beside its place, then put it there."""
    partial = folder.with_name(folder.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    config = model.hf.config
    for key, value in native.config_keys(facts).items():
        setattr(config, key, value)
    config.eos_token_id, config.pad_token_id = list(facts.eos_token_ids), facts.pad_token_id
    if confidence_threshold is not None:
        config.confidence_threshold = confidence_threshold
    generation = model.hf.generation_config
    generation.max_new_tokens, generation.max_length = max_new_tokens, None
    generation.eos_token_id, generation.pad_token_id = list(facts.eos_token_ids), facts.pad_token_id
    model.hf.save_pretrained(partial)
    families.save_tokenizer(tokenizer, partial)
    if confidence_threshold is not None:
        (partial / "custom_generate").mkdir()
        shutil.copyfile(GENERATE_FILE, partial / "custom_generate" / "generate.py")
    (partial / "README.md").write_text(card)
    if folder.exists():
        shutil.rmtree(folder)
    partial.replace(folder)


def card(
    name: str, *, report: dict[str, Any] | None, base_model: str | None, license: str, tags: list[str], datasets: list[str],
    decode: dict[str, Any], table: str, lines: list[str], has_decoder: bool = True,
    objective: str = "cdlm",
) -> str:
    """The model card, made from report.json: front matter with model-index, what was measured, and code that runs."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for row in (report or {}).get("results", []):
        own = ("student", decode["confidence_threshold"]) if has_decoder else ("autoregressive" if objective == "ar" else "teacher", None)
        if (row["method"], row["parameter"]) == own:
            for kind, value in (("accuracy", row["accuracy"]), ("tokens_per_forward", row["tpf"]), ("steps", row["steps"])):
                results.append(EvalResult(
                    task_type="text-generation", dataset_type=row["task"], dataset_name=row["task"], metric_type=kind, metric_value=value,
                ))
    kinds = [] if objective == "ar" else ["diffusion", "block-diffusion", "custom_generate"] if has_decoder else ["diffusion"]
    front = ModelCardData(
        license=license, base_model=base_model, base_model_relation="finetune" if base_model else None, library_name="transformers",
        pipeline_tag="text-generation", tags=["cdlm", *kinds, *tags],
        datasets=datasets or None, model_name=name, eval_results=results or None,
    )
    usage = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "PATH_OR_REPO"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder)
text = tokenizer.apply_chat_template([{"role": "user", "content": "..."}], tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
out = model.generate(**inputs, custom_generate=folder, trust_remote_code=True)
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```"""
    measured = "\n".join(f"- {line}" for line in lines) + "\n\n" + table if lines else "Not measured yet."
    trained = {
        "cdlm": "with consistency distillation (CDLM, arXiv 2511.19269)",
        "bd3lm": "with the loss of block diffusion (BD3-LM, arXiv 2503.09573)",
    }
    if has_decoder:
        what = f"""A block diffusion language model: answers are filled block by block, {decode['block_length']} slots each, many slots a
step, with an exact block key-value cache. Trained {trained[objective]} by `cdlm`."""
        use = f"""`custom_generate/generate.py` in this folder is the decoder, one file of torch and transformers.
`trust_remote_code=True` runs it, and nothing else.

{usage}

Arguments besides transformers' own: `max_new_tokens` ({decode['max_new_tokens']}), `block_length` ({decode['block_length']}),
`confidence_threshold` ({decode['confidence_threshold']}). Decoding is greedy."""
    elif objective == "ar":
        what = "An autoregressive language model, trained by `cdlm`. Family causal and objective bd3lm make a block diffusion model of it."
        use = "It loads and generates with stock transformers: `AutoModelForCausalLM.from_pretrained(FOLDER).generate(...)`."
    else:
        what = "A masked diffusion language model with full attention, trained by `cdlm` with the loss of arXiv 2502.09992."
        budget = decode["max_new_tokens"]
        use = f"`cdlm generate FOLDER --prompt TEXT --max-new-tokens {budget} --tokens-per-step 1`, or as the teacher of a recipe."
    return f"""---
{front.to_yaml()}
---

# {name}

{what}

## Use

{use}

## Measured

{measured}
"""
