"""Checkpoints in families' own formats: against what the families' own code computed, there and back, and what is refused."""

import json
import re
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
    skeleton = convert.skeleton(convert.native_config(config, module, module.facts(config)))
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
    "sdar, mixture of experts": (
        "sdar", {"model_type": "sdar_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        {"model_type": "qwen3_moe", "num_experts": 6, "norm_topk_prob": True},
    ),
    "sdar, grouped heads": ("sdar", {"num_attention_heads": 8, "num_key_value_heads": 2}, {"num_key_value_heads": 2}),
    "dream, all heads": ("dream", {"num_key_value_heads": 4, "num_hidden_layers": 3}, {"num_key_value_heads": 4}),
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


def test_sdars_block_is_4_where_its_config_says_nothing():
    config = json.loads((FIXTURES / "sdar" / "config.json").read_text())
    del config["block_size"]
    assert families.find(config).facts(config).block_length == 4
    moe = {**config, "model_type": "sdar_moe", "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    with pytest.raises(ValueError, match="none of: norm_topk_prob"):
        families.find(moe).native_config(moe)
    with pytest.raises(ValueError, match=r"decoder_sparse_step 2, which Qwen3 can't express"):
        families.find(moe).native_config({**moe, "decoder_sparse_step": 2, "norm_topk_prob": True})


# ---- token ids that config.json does not state -------------------------------------------------------------------------


def beside(folder: Path, *, mask: str | dict | None = None, eos: str | None = None, generation: dict | None = None, decoder=None) -> None:
    """tokenizer_config.json, tokenizer.json and generation_config.json with these special tokens: <end> is 158, <m> is 159."""
    tokens = {"mask_token": mask, "eos_token": eos}
    stated = {key: token for key, token in tokens.items() if token is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps({**stated, **({"added_tokens_decoder": decoder} if decoder else {})}))
    added = [{"id": 158, "content": "<end>"}, *([] if decoder else [{"id": 159, "content": "<m>"}])]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": {"a": 3}}}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


IDS = {
    "config.json is asked first": ({"mask_token_id": 150}, {"mask": "<m>"}, (150, (158,)), "config.json"),
    "then the tokenizer": ({"mask_token_id": None}, {"mask": "<m>"}, (159, (158,)), "tokenizer_config.json"),
    "a token as an object": ({"mask_token_id": None}, {"mask": {"content": "<m>"}}, (159, (158,)), "tokenizer_config.json"),
    "in the older decoder": (
        {"mask_token_id": None}, {"mask": "<m>", "decoder": {"157": {"content": "<m>"}}}, (157, (158,)), "tokenizer_config.json",
    ),
    "then generation_config.json": (
        {"mask_token_id": None}, {"generation": {"mask_token_id": 156}}, (156, (158,)), "generation_config.json",
    ),
    "the tokenizer before generation_config.json": (
        {"mask_token_id": None}, {"mask": "<m>", "generation": {"mask_token_id": 156}}, (159, (158,)), "tokenizer_config.json",
    ),
    "an end token of the tokenizer": ({"eos_token_id": None, "pad_token_id": 3}, {"eos": "<end>"}, (159, (158,)), "config.json"),
    "further end tokens": ({}, {"generation": {"eos_token_id": [7, 158, 8]}}, (159, (158, 7, 8)), "config.json"),
}  # fmt: skip


@pytest.mark.parametrize("config, files, wanted, source", IDS.values(), ids=IDS)
def test_token_ids_are_read_in_order(tmp_path, capsys, config, files, wanted, source):
    folder = copy(tmp_path, "sdar")
    change(folder, **config)
    beside(folder, **files)
    facts = families.load(folder).facts
    assert (facts.mask_token_id, facts.eos_token_ids) == wanted
    assert cli.main(["inspect", str(folder)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("mask_token_id"))
    assert line.split()[1] == str(wanted[0]) and f"from {source}" in line


def test_a_mask_token_that_no_file_states_is_refused_and_pad_is_no_stand_in(tmp_path):
    folder = copy(tmp_path, "sdar")
    change(folder, mask_token_id=None)
    beside(folder, eos="<end>", generation={"eos_token_id": 158, "pad_token_id": 158})
    with pytest.raises(ValueError, match=r"config\.json has no mask_token_id, and neither tokenizer nor generation_config.json names"):
        families.load(folder)


@pytest.mark.parametrize("change_to, said", [
    ({"mask_token_id": 160}, "mask_token_id is 160; the model has embeddings for ids 0 to 159"),
    ({"eos_token_id": [158, 900]}, "eos_token_id is 900"), ({"mask_token_id": "159"}, "mask_token_id is '159'; it must be a whole number"),
])  # fmt: skip
def test_ids_outside_the_vocabulary_are_refused(tmp_path, change_to, said):
    folder = copy(tmp_path, "llada")
    change(folder, **change_to)
    with pytest.raises(ValueError, match=said):
        families.load(folder)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    """The small world's tokenizer: its mask is 1, the checkpoint's 159."""
    folder = copy(tmp_path, "llada")
    for file in (ROOT / "recipes" / "tiny" / "tokenizer").iterdir():
        shutil.copyfile(file, folder / file.name)
    with pytest.raises(ValueError, match="the tokenizer's mask token is 1, the checkpoint's is 159: not the tokenizer of this model"):
        families.load_tokenizer(folder, families.load(folder).facts)


# ---- folders under a stock architecture --------------------------------------------------------------------------------


def stock(tmp_path: Path, **tensors) -> Path:
    """The small world's teacher with some tensors replaced (None: left out)."""
    folder = tmp_path / "stock"
    shutil.copytree(ROOT / "recipes" / "tiny" / "teacher", folder)
    for file in folder.iterdir():
        file.chmod(0o644)
    kept = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({k: v for k, v in kept.items() if v is not None}, folder / "model.safetensors", {"format": "pt"})
    return folder


STOCK = {
    "a tensor is missing": ({"model.layers.1.mlp.up_proj.weight": None}, "has no tensor model.layers.1.mlp.up_proj.weight"),
    "one too many": ({"model.extra.weight": torch.zeros(2)}, "LlamaForCausalLM has no place for model.extra.weight"),
    "another shape": ({"lm_head.weight": torch.zeros(56, 128)}, r"model.safetensors: lm_head.weight has shape \(56, 128\).*\(58, 128\)"),
    "not a number": ({"model.norm.weight": torch.full((128,), torch.nan)}, "model.safetensors: model.norm.weight holds NaN"),
}


@pytest.mark.parametrize("tensors, said", STOCK.values(), ids=STOCK)
def test_a_stock_folder_that_is_not_whole_is_refused(tmp_path, tensors, said, capsys):
    folder = stock(tmp_path, **tensors)
    with pytest.raises(ValueError, match=said):
        families.load(folder)
    assert cli.main(["generate", str(folder), "--prompt", "copy:abc"]) == 2
    assert "cdlm: error: " in capsys.readouterr().err


def test_a_stock_folder_with_a_pickle_or_half_a_file_is_refused(tmp_path):
    folder = stock(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"model\.safetensors can't be read"):
        families.load(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        families.load(folder)


@pytest.mark.parametrize("values, said", [
    ({"alibi": True}, "alibi True, which Llama can't express"), ({"mask_token_id": None}, "config.json has no mask_token_id"),
    ({"embedding_size": 170}, r"wte\.weight has shape \(160, 32\); config.json says \(170, 32\)"),
    ({"n_layers": 3}, "has no tensor model.transformer.blocks.2"),
])  # fmt: skip
def test_inspect_says_what_is_refused_and_why(tmp_path, capsys, values, said):
    folder = copy(tmp_path, "llada")
    change(folder, **values)
    assert cli.main(["inspect", str(folder)]) == 2
    printed = capsys.readouterr()
    assert "family      llada" in printed.out and re.search(said, printed.err) and printed.err.count("\n") == 1


def test_inspect_reads_the_files_but_no_weights(tmp_path, capsys):
    folder = copy(tmp_path, "llada")
    assert cli.main(["inspect", str(folder)]) == 0
    assert "weights     21 tensors in model.safetensors" in capsys.readouterr().out
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert cli.main(["inspect", str(folder)]) == 2
    assert "is a pickle" in capsys.readouterr().err


def test_a_tokenizer_that_names_code_of_its_own_is_read_without_it(tmp_path):
    """As Dream's: vocab.json and merges.txt, and a class in the repository. Also where there is a tokenizer.json."""
    folder = copy(tmp_path, "dream")
    letters = {token: i for i, token in enumerate([*"abcdefgh", "ab", *(f"unused{i}" for i in range(9, 158))])}
    (folder / "vocab.json").write_text(json.dumps(letters))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    special = {"158": {"content": "<end>", "special": True}, "159": {"content": "<m>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "added_tokens_decoder": special, "eos_token": "<end>", "pad_token": "<end>", "mask_token": "<m>",
    }))  # fmt: skip
    (folder / "tokenization_dream.py").write_text("raise SystemExit('remote code ran')\n")
    tokenizer = families.load_tokenizer(folder, families.load(folder).facts)
    assert tokenizer("abc")["input_ids"] == [8, 2] and tokenizer.mask_token_id == 159
    tokenizer.save_pretrained(tmp_path / "fast")
    shutil.copyfile(tmp_path / "fast" / "tokenizer.json", folder / "tokenizer.json")
    (folder / "vocab.json").unlink()
    assert families.load_tokenizer(folder, families.load(folder).facts)("abc")["input_ids"] == [8, 2]
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="its tokenizer is code of the repository, which is not run"):
        families.load_tokenizer(folder, families.load(folder).facts)


def test_a_students_own_block_length_goes_back_into_the_familys_config(tmp_path):
    cli.main(["convert", str(FIXTURES / "sdar"), str(tmp_path / "native"), "--to", "native"])
    change(tmp_path / "native", block_length=8)
    cli.main(["convert", str(tmp_path / "native"), str(tmp_path / "family"), "--to", "family"])
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (FIXTURES / "sdar", tmp_path / "family"))
    assert after == {**before, "block_size": 8} and families.load(tmp_path / "family").facts.block_length == 8


@pytest.mark.parametrize("values, said", [
    ({"eos_token_id": "2"}, "eos_token_id is '2'; it must be a whole number"), ({"eos_token_id": [[2]]}, r"eos_token_id is \[\[2\]\]"),
    ({"block_size": "4"}, "block_length is '4'; it must be a whole number"), ({"hidden_size": "abc"}, "can't be read as qwen3"),
    ({"vocab_size": -4}, "config.json makes no model"), ({"mask_token_id": -1}, "mask_token_id is -1; the model has embeddings for ids 0"),
])  # fmt: skip
@pytest.mark.parametrize("command", ["inspect", "generate"])
def test_values_of_a_wrong_kind_are_one_line(tmp_path, capsys, values, said, command):
    folder = copy(tmp_path, "sdar")
    change(folder, **values)
    assert cli.main([command, str(folder), *(["--prompt", "x"] if command == "generate" else [])]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_model_type_that_is_no_text_is_one_line(tmp_path, capsys):
    folder = copy(tmp_path, "sdar")
    change(folder, model_type=["llama"])
    assert cli.main(["inspect", str(folder)]) == 2
    assert "no family recognises model_type ['llama']" in capsys.readouterr().err


@pytest.mark.parametrize("kind, values", [("granite", {"logits_scaling": 8.0}), ("cohere", {"logit_scale": 0.25})])
def test_a_class_that_scales_its_logits_is_refused(tmp_path, kind, values):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.for_model(
        kind, vocab_size=58, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        pad_token_id=0, eos_token_id=2, bos_token_id=None, **values,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny" / "tokenizer").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="scales or caps its logits"):
        families.load(tmp_path, family="causal")


def test_what_stands_beside_a_target_is_not_touched(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("kept")
    assert cli.main(["convert", str(FIXTURES / "llada"), str(tmp_path / "out"), "--to", "native"]) == 0
    assert (tmp_path / "out.partial" / "mine").read_text() == "kept" and not list(tmp_path.glob(".*.partial"))
    (tmp_path / "found.partial").write_text("kept")
    assert cli.main(["roofline", "llada-8b", "--json", str(tmp_path / "found.json")]) == 0
    assert (tmp_path / "found.partial").read_text() == "kept"


def test_an_adapter_that_names_itself_or_has_broken_facts_is_one_error(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(ValueError, match="names itself as its base"):
        families.read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(FIXTURES / "llada")}))
    for text, said in (("[]", r"facts\.json holds \[\]"), ("{", r"facts\.json is not JSON")):
        (tmp_path / "facts.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            families.read_config(tmp_path)
