"""Checkpoints in families' own formats: against what the families' own code computed, there and back, and what is refused."""

import json
import shutil
from pathlib import Path

import oracle
import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from cdlm import cli, families
from cdlm.families import checkpoint, convert

FIXTURES = ROOT / "tests" / "fixtures"
NAMES = ("dream", "llada", "llada2_moe", "lladamoe", "sdar")
KIND = {"dream": "Qwen2", "llada": "Llama", "llada2_moe": "Glm4Moe", "lladamoe": "Qwen3Moe", "sdar": "Qwen3"}


def copy(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURES / name / file, folder / file)
    return folder


def change(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_familys_own_code(name):
    model = families.load(FIXTURES / name)
    assert type(model.hf).__name__ == f"{KIND[name]}ForCausalLM"
    found = oracle.logit_differences(model, load_file(FIXTURES / name / "reference.safetensors"))
    assert found and all(difference <= 1e-4 for difference in found.values()), found


@pytest.mark.parametrize("name", NAMES)
def test_decoded_tokens_are_those_of_the_familys_own_code(name):
    """All of them, but for LLaDA2's: those are samples (its code samples at temperature 0), which the oracle proves."""
    found = oracle.token_matches(families.load(FIXTURES / name), load_file(FIXTURES / name / "reference.safetensors"))
    wanted = {"dream": 3, "llada": 2, "llada2_moe": 2, "lladamoe": 1, "sdar": 3}
    assert len(found) == wanted[name]
    if name == "llada2_moe":
        assert set(found.values()) == {oracle.SAMPLED}
    else:
        assert all(match[0] == match[1] > 0 for match in found.values()), found


def test_the_oracle_tells_a_greedy_reference_from_a_sampled_one():
    """What this package decodes greedily is seen as greedy, with one token changed it is not."""
    from cdlm.decode import DecodeConfig, decode

    model, prompt = families.load(FIXTURES / "llada2_moe"), load_file(FIXTURES / "llada2_moe" / "reference.safetensors")["gen_prompt"]
    config = DecodeConfig(16, 4, confidence_threshold=0.08, steps_per_block=4, stop_at_eos=False)
    answer = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), config).ids_BN[:, :15]
    assert oracle.could_be_greedy(model, prompt, answer, 4)
    answer[0, 5] += 1
    assert not oracle.could_be_greedy(model, prompt, answer, 4)


def test_the_oracle_fails_on_a_token_that_differs_and_on_a_key_it_does_not_know(tmp_path):
    folder, reference = copy(tmp_path, "sdar"), load_file(FIXTURES / "sdar" / "reference.safetensors")
    save_file(reference, folder / "reference.safetensors")
    assert oracle.check(folder) == 0
    changed = {**reference, "gen_tokens_sequential_block4_len16": reference["gen_tokens_sequential_block4_len16"].clone()}
    changed["gen_tokens_sequential_block4_len16"][0, -1] = 3
    save_file(changed, folder / "reference.safetensors")
    assert oracle.check(folder) == 1
    save_file({**reference, "gen_tokens_by_magic": reference["gen_prompt"].clone()}, folder / "reference.safetensors")
    assert oracle.check(folder) == 1


def test_the_oracle_script_fails_on_other_weights(tmp_path, capsys):
    folder = copy(tmp_path, "llada")
    shutil.copyfile(FIXTURES / "llada" / "reference.safetensors", folder / "reference.safetensors")
    assert oracle.check(folder) == 0
    tensors = load_file(folder / "model.safetensors")
    tensors["model.transformer.blocks.0.attn_out.weight"] *= -1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert oracle.check(folder) == 1
    assert "logits_full: largest difference" in capsys.readouterr().out


@pytest.mark.parametrize("name", NAMES)
def test_there_and_back_is_bit_identical(name, tmp_path):
    native, back = tmp_path / "native", tmp_path / "back"
    assert cli.main(["convert", str(FIXTURES / name), str(native), "--to", "native"]) == 0
    assert cli.main(["convert", str(native), str(back), "--to", "family"]) == 0
    before, after = load_file(FIXTURES / name / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert tensor.dtype == after[key].dtype and torch.equal(tensor, after[key]), key
    assert json.loads((back / "config.json").read_text()) == json.loads((FIXTURES / name / "config.json").read_text())


@pytest.mark.parametrize("name", NAMES)
def test_a_converted_folder_is_stock_and_keeps_the_facts(name, tmp_path):
    from transformers import AutoModelForCausalLM

    cli.main(["convert", str(FIXTURES / name), str(tmp_path / "native"), "--to", "native"])
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "native")
    again, original = families.load(tmp_path / "native"), families.load(FIXTURES / name)
    assert again.facts == original.facts and again.family == "native"
    for (key, a), b in zip(original.hf.state_dict().items(), stock.state_dict().values(), strict=True):
        assert torch.equal(a, b), key


def test_shards_are_read_as_one_file_is(tmp_path):
    folder, whole = tmp_path / "sharded", load_file(FIXTURES / "sdar" / "model.safetensors")
    folder.mkdir()
    shutil.copyfile(FIXTURES / "sdar" / "config.json", folder / "config.json")
    checkpoint.write(folder, whole.items(), shard_bytes=40_000)
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2 and not list(folder.glob("*.partial"))
    a, b = families.load(folder), families.load(FIXTURES / "sdar")
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    next(folder.glob("model-00002*")).unlink()
    with pytest.raises(ValueError, match=r"index\.json names model-00002-of-.*download the missing shard"):
        families.load(folder)


def test_load_keeps_half_precision(tmp_path):
    folder = copy(tmp_path, "llada")
    save_file({k: v.bfloat16() for k, v in load_file(folder / "model.safetensors").items()}, folder / "model.safetensors", {"format": "pt"})
    model = families.load(folder, dtype="bfloat16")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_remote_code_is_not_run(tmp_path):
    folder = copy(tmp_path, "dream")
    change(folder, auto_map={"AutoModel": "modeling_dream.DreamModel", "AutoConfig": "configuration_dream.DreamConfig"})
    (folder / "modeling_dream.py").write_text("raise SystemExit('remote code ran')\n")
    (folder / "configuration_dream.py").write_text("raise SystemExit('remote code ran')\n")
    assert families.load(folder).facts.logit_shift is True


REFUSED = {
    "no mask token": ("llada", {"mask_token_id": None}, "config.json has no mask_token_id"),
    "pad is the mask": ("dream", {"pad_token_id": 159}, "mask_token_id 159 is also the pad"),
    "alibi": ("llada", {"alibi": True}, "alibi True, which Llama can't express; allowed: False"),
    "an expert bias": ("lladamoe", {"moe_router_enable_expert_bias": True}, "moe_router_enable_expert_bias True, which Qwen3-MoE can't"),
    "a shared expert": ("lladamoe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size 8"),
    "another score": ("llada2_moe", {"score_function": "softmax"}, "score_function 'softmax', which GLM-4-MoE can't express"),
    "a wrong vocabulary": ("sdar", {"vocab_size": 161}, r"model.embed_tokens.weight has shape \(160, 32\).*says \(161, 32\)"),
    "a layer too many": ("dream", {"num_hidden_layers": 3}, "has no tensor model.layers.2.input_layernorm.weight"),
    "a layer too few": ("dream", {"num_hidden_layers": 1}, "no place for model.layers.1.input_layernorm.weight"),
}  # fmt: skip


@pytest.mark.parametrize("name, values, said", REFUSED.values(), ids=REFUSED)
def test_a_config_that_does_not_fit_is_refused(name, values, said, tmp_path):
    folder = copy(tmp_path, name)
    change(folder, **values)
    with pytest.raises(ValueError, match=said):
        families.load(folder)


def test_bad_files_are_refused_with_file_and_key(tmp_path):
    folder = copy(tmp_path, "sdar")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.safetensors: model\.norm\.weight holds NaN"):
        families.load(folder)
    data = (FIXTURES / "sdar" / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        families.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no model\.safetensors.*pytorch_model\.bin is a pickle"):
        families.load(folder)


def test_convert_writes_whole_folders_only(tmp_path, capsys):
    folder = copy(tmp_path, "llada")
    change(folder, alibi=True)
    assert cli.main(["convert", str(folder), str(tmp_path / "out"), "--to", "native"]) == 2
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("*.partial"))
    (tmp_path / "there").mkdir()
    assert cli.main(["convert", str(FIXTURES / "llada"), str(tmp_path / "there"), "--to", "native"]) == 2
    assert "there exists; convert writes a new folder" in capsys.readouterr().err
    assert cli.main(["convert", str(FIXTURES / "llada"), str(tmp_path / "x"), "--to", "gguf"]) == 2
    assert "--to is 'gguf'; allowed: native, family" in capsys.readouterr().err
    assert cli.main(["convert", str(ROOT / "recipes" / "tiny" / "teacher"), str(tmp_path / "x"), "--to", "family"]) == 2
    assert "was not converted from a family" in capsys.readouterr().err


def test_inspect_says_what_a_checkpoint_is(capsys):
    assert cli.main(["inspect", str(FIXTURES / "sdar")]) == 0
    said = capsys.readouterr().out
    assert "family      sdar" in said and "native      Qwen3ForCausalLM" in said
    count = sum(tensor.numel() for tensor in load_file(FIXTURES / "sdar" / "model.safetensors").values())
    assert f"parameters  {count:,}" in said
    assert "block_length       4                from config.json, block_size" in said
    assert "block_origin       zero             from the family, sdar" in said


def other_shape(tmp_path: Path, name: str, **values) -> tuple[Path, dict[str, torch.Tensor]]:
    """A checkpoint in a family's format with other sizes than the fixture's, and its tensors under native names."""
    folder = tmp_path / f"{name}-other"
    folder.mkdir()
    config = {**json.loads((FIXTURES / name / "config.json").read_text()), **values}
    (folder / "config.json").write_text(json.dumps(config))
    module = families.find(config)
    skeleton = convert._skeleton(convert.native_config(config, module, module.facts(config)))
    draw = torch.Generator().manual_seed(0)
    native = {key: torch.randn(shape, generator=draw) for key, shape in convert._shapes(skeleton).items()}
    entries = module.entries(config)
    family = {
        key: tensor.contiguous()
        for entry in entries for key, tensor in zip(entry.family, entry.to_family([native[k] for k in entry.native]), strict=True)
    }  # fmt: skip
    save_file(family, folder / "model.safetensors", {"format": "pt"})
    return folder, {key: native[key] for entry in entries for key in entry.native}


SHAPES = {
    "llada, grouped heads": ("llada", {"n_kv_heads": 2}, {"num_key_value_heads": 2}),
    "llada, one key head": ("llada", {"n_kv_heads": None, "multi_query_attention": True}, {"num_key_value_heads": 1}),
    "llada, all heads": ("llada", {"n_kv_heads": None}, {"num_key_value_heads": 4}),
    "llada, more rows than tokens": ("llada", {"embedding_size": 192}, {"vocab_size": 192}),
    "llada, tied": ("llada", {"weight_tying": True}, {"tie_word_embeddings": True}),
    "llada, deeper and wider": ("llada", {"n_layers": 3, "d_model": 48, "mlp_hidden_size": 40}, {"hidden_size": 48}),
    "dream, tied": ("dream", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "sdar, tied": ("sdar", {"tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "lladamoe, more experts": ("lladamoe", {"num_experts": 6, "num_key_value_heads": 2}, {"num_experts": 6, "norm_topk_prob": False}),
    "llada2_moe, two dense layers": ("llada2_moe", {"first_k_dense_replace": 2}, {"first_k_dense_replace": 2, "norm_topk_prob": True}),
}  # fmt: skip


@pytest.mark.parametrize("name, values, wanted", SHAPES.values(), ids=SHAPES)
def test_other_shapes_of_a_family(name, values, wanted, tmp_path):
    folder, native = other_shape(tmp_path, name, **values)
    hf = families.load(folder).hf
    assert {key: getattr(hf.config, key) for key in wanted} == wanted
    state = hf.state_dict()
    assert all(torch.equal(state[key], tensor) for key, tensor in native.items())
    if hf.config.tie_word_embeddings:
        assert hf.get_output_embeddings().weight.data_ptr() == hf.get_input_embeddings().weight.data_ptr()
    cli.main(["convert", str(folder), str(tmp_path / "n"), "--to", "native"])
    cli.main(["convert", str(tmp_path / "n"), str(tmp_path / "f"), "--to", "family"])
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "f" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_fast_dllm_v2_is_a_shifted_qwen2_with_blocks_of_32():
    config = json.loads((FIXTURES / "dream" / "config.json").read_text())
    facts = families.find({**config, "model_type": "Fast_dLLM_Qwen"}).facts({**config, "model_type": "Fast_dLLM_Qwen"})
    assert (facts.logit_shift, facts.block_length, facts.block_origin, facts.prompt_attention) == (True, 32, "zero", "block_causal")
    assert families.find({**config, "model_type": "Fast_dLLM_Qwen"}).facts({**config, "bd_size": 8}).block_length == 8


FACTS = {  # spec of the families: shift, block length, where blocks start, how prompt rows look at one another
    "llada": (False, None, "prompt_end", "bidirectional"), "lladamoe": (False, None, "prompt_end", "bidirectional"),
    "dream": (True, None, "prompt_end", "bidirectional"), "sdar": (False, 4, "zero", "block_causal"),
    "llada2_moe": (False, 32, "zero", "block_causal"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_facts_of_a_family(name):
    config = json.loads((FIXTURES / name / "config.json").read_text())
    facts = families.find(config).facts(config)
    assert (facts.logit_shift, facts.block_length, facts.block_origin, facts.prompt_attention) == FACTS[name]
    assert (facts.mask_token_id, facts.eos_token_ids, facts.pad_token_id) == (159, (158,), 158)
