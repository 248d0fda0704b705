"""Nemotron-Labs-Diffusion: its names and back, its autoregressive mode, and the adapter that is for drafting forwards alone.

No checkpoint of it is at hand; the folders here are made by this file, with the keys that its own code and config have.
"""

import json
from pathlib import Path

import pytest
import torch
from conftest import random_prompts
from safetensors.torch import load_file, save_file

from cdlm import cli, families, masks
from cdlm.decode import DecodeConfig, decode
from cdlm.families import nemotron
from cdlm.speculate import SpeculateConfig, speculate

CONFIG = {
    "architectures": ["NemotronLabsDiffusionModel"], "attention_bias": False, "attention_dropout": 0.0, "block_size": 32, "bos_token_id": 1,
    "dlm_paradigm": "bidirectional", "eos_token_id": 11, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32, "intermediate_size": 48,
    "mask_token_id": 100, "max_position_embeddings": 64, "mlp_bias": False, "model_type": "nemotron_labs_diffusion",
    "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 0.25, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 256, "rope_theta": 1000000.0, "rope_type": "yarn",
    }, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 128,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    """A random checkpoint in the family's own format."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"encoder.embed_tokens.weight": (128, 32), "encoder.norm.weight": (32,), "diffusion_head.weight": (128, 32)}
    for number in range(2):
        root = f"encoder.layers.{number}."
        for name, shape in {
            "self_attn.q_proj": (64, 32), "self_attn.k_proj": (32, 32), "self_attn.v_proj": (32, 32), "self_attn.o_proj": (32, 64),
            "mlp.gate_proj": (48, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48), "input_layernorm": (32,),
            "post_attention_layernorm": (32,),
        }.items():  # fmt: skip
            shapes[f"{root}{name}.weight"] = shape
    where = tmp_path / "own"
    where.mkdir()
    scale = {key: 2.0 * shape[-1] ** -0.5 if len(shape) > 1 else 1.0 for key, shape in shapes.items()}
    tensors = {key: torch.randn(shape, generator=draw) * scale[key] for key, shape in shapes.items()}
    save_file(tensors, where / "model.safetensors", {"format": "pt"})
    (where / "config.json").write_text(json.dumps(CONFIG))
    return where


def adapter(folder: Path, rank: int = 8, layers: int = 2) -> Path:
    draw = torch.Generator().manual_seed(1)
    where = folder / nemotron.DRAFT_ADAPTER
    where.mkdir()
    tensors = {}
    for number in range(layers):
        root = f"base_model.model.encoder.layers.{number}.self_attn.o_proj."
        tensors[root + "lora_A.weight"] = torch.randn(rank, 64, generator=draw)
        tensors[root + "lora_B.weight"] = torch.randn(32, rank, generator=draw)
    save_file(tensors, where / "adapter_model.safetensors", {"format": "pt"})
    (where / "adapter_config.json").write_text(json.dumps({
        "base_model_name_or_path": "own", "peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["o_proj"],
        "lora_dropout": 0.0, "bias": "none", "task_type": "CAUSAL_LM",
    }))  # fmt: skip
    return where


def test_there_and_back_is_bit_identical(folder, tmp_path):
    native, back = tmp_path / "native", tmp_path / "back"
    assert cli.main(["convert", str(folder), str(native), "--to", "native"]) == 0
    assert cli.main(["convert", str(native), str(back), "--to", "family"]) == 0
    before, after = load_file(folder / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((back / "config.json").read_text()) == CONFIG


def test_it_is_found_and_its_facts_are_those_of_the_causal_mode(folder):
    model = families.load(folder)
    assert (model.family, type(model.hf).__name__) == ("nemotron_labs_diffusion", "Ministral3ForCausalLM")
    assert (model.facts.mask_token_id, model.facts.eos_token_ids, model.facts.block_length) == (100, (11,), 1)
    assert model.facts.logit_shift and model.facts.prompt_attention == "causal" and model.facts.draft_length == 32
    assert model.hf.config.rope_parameters["llama_4_scaling_beta"] == 0.1


def test_a_converted_folder_generates_with_stock_transformers_what_the_causal_mode_decodes(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    cli.main(["convert", str(folder), str(tmp_path / "native"), "--to", "native"])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    prompt, valid = random_prompts([7, 4], vocab=99)
    found = decode(families.load(folder), prompt, valid, DecodeConfig(10, 1, tokens_per_step=1, stop_at_eos=False)).ids_BN
    args = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "suppress_tokens": [100]}
    assert torch.equal(found, stock.generate(prompt, attention_mask=valid.long(), **args)[:, 7:])


def test_the_adapter_is_on_in_the_drafting_forward_and_off_elsewhere(folder):
    """Against weights with alpha / r B A = 2 B A added by hand."""
    prompt, valid = random_prompts([9, 5], vocab=99)

    def logits(model):
        with torch.no_grad():
            return model.sequence_logits(prompt, valid, valid.sum(1), 1)

    merged, base = families.load(folder), families.load(folder)
    where = adapter(folder)
    tensors = load_file(where / "adapter_model.safetensors")
    for number, layer in enumerate(merged.hf.model.layers):
        a, b = (tensors[f"base_model.model.encoder.layers.{number}.self_attn.o_proj.lora_{part}.weight"] for part in "AB")
        layer.self_attn.o_proj.weight.data += 2 * b @ a
    plain, wanted = logits(base), logits(merged)
    drafting = nemotron.drafting(base.hf, where)
    assert torch.equal(logits(base), plain)
    with drafting():
        assert torch.allclose(logits(base), wanted, atol=1e-4) and not torch.allclose(wanted, plain, atol=0.1)
    assert torch.equal(logits(base), plain)


def test_with_the_adapter_in_the_drafting_forwards_the_text_is_the_autoregressive_one(folder):
    """The linear layout: the prompt's forward, then in each step one that drafts (adapter on) and one that verifies (off)."""
    where = adapter(folder)
    prompt, valid = random_prompts([7, 4, 1], vocab=99)
    wanted = decode(families.load(folder), prompt, valid, DecodeConfig(12, 1, tokens_per_step=1))
    model = families.load(folder)
    drafting = nemotron.drafting(model.hf, where)
    adapted, on = [module for module in model.hf.modules() if hasattr(module, "lora_A")], []
    model.hf.model.register_forward_pre_hook(lambda *_: on.append({not module.disable_adapters for module in adapted}))
    found = speculate(model, prompt, valid, SpeculateConfig(12, 4, layout="linear"), adapter=drafting)
    assert torch.equal(found.ids_BN, wanted.ids_BN) and found.stop == wanted.stop
    assert on == [{False}, *([{True}, {False}] * max(found.steps))] and max(found.steps) > 2


def test_its_block_diffusion_mode_is_a_plain_loop(folder):
    """Blocks of 8 by confidence above 0.9, at least one slot a step, masks in the whole block; finished blocks are causal text."""
    tensors = load_file(folder / "model.safetensors")
    tensors["diffusion_head.weight"] *= 4  # confidences on either side of the threshold
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "block_size": 8}))
    mode = families.load(folder).diffusion_mode()
    prompt, valid = random_prompts([7, 4], vocab=99)
    found = decode(mode, prompt, valid, DecodeConfig(16, 8, confidence_threshold=0.9, stop_at_eos=False))
    for row in range(2):
        text, steps = prompt[row][valid[row]], 0
        for _ in range(2):
            block, length = torch.full((8,), 100), len(text)
            horizon = torch.tensor([[*range(length), *[length + 7] * 8]])
            seen = masks.clean(horizon, torch.arange(length + 8)[None], torch.ones(1, length + 8, dtype=torch.bool))
            while (block == 100).any():
                with torch.no_grad():
                    logits = mode.hf(input_ids=torch.cat([text, block])[None], attention_mask=masks.dense(seen)).logits[0, length:]
                probability = logits.softmax(dim=-1)
                probability[:, 100] = 0
                best, token = probability.max(dim=-1)
                best = best.masked_fill(block != 100, -1)
                sure = best > 0.9
                sure[best.argmax()] = True
                block, steps = torch.where(sure, token, block), steps + 1
            text = torch.cat([text, block])
        assert found.filled_BM[row].tolist() == text[-16:].tolist() and found.steps[row] == steps < 16


def test_a_stated_block_size_of_zero_is_not_the_usual_one(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "block_size": 0}))
    with pytest.raises(ValueError, match="draft_length is 0"):
        families.load(folder)


def test_an_adapter_of_another_model_is_refused(folder):
    where = adapter(folder, layers=3)
    with pytest.raises(ValueError, match=r"linear_spec_lora"):
        nemotron.drafting(families.load(folder).hf, where)


def test_what_the_native_class_cannot_express_is_refused(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    with pytest.raises(ValueError, match=r"config\.json has tie_word_embeddings True, which Ministral3 can't express"):
        families.load(folder)
