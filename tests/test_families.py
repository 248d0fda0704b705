"""Families: facts, the native folder, loading, models from nothing, and the one-position shift."""

import json
import shutil

import pytest
import torch
from conftest import TINY, random_model, random_prompts

from cdlm import families
from cdlm.families import native, scratch
from cdlm.families.base import DiffusionLM, Facts

BASE = {"mask_token_id": 1, "eos_token_ids": (2,), "pad_token_id": 0}
FACTS = [
    Facts(**BASE),
    Facts(mask_token_id=9, eos_token_ids=(2, 7), pad_token_id=2, block_length=32),
    Facts(**BASE, block_length=4, block_origin="zero", logit_shift=True, prompt_attention="block_causal"),
    Facts(**BASE, prompt_attention="causal"),
]


@pytest.mark.parametrize("values", [{"mask_token_id": 0}, {"mask_token_id": 2}, {"eos_token_ids": (5, 1)}])
def test_a_mask_token_that_is_also_pad_or_eos_is_refused(values):
    with pytest.raises(ValueError, match=r"mask_token_id \d is also the pad or an end-of-sequence token"):
        Facts(**{**BASE, **values})


def test_facts_without_an_end_token_or_with_an_empty_block_are_refused():
    with pytest.raises(ValueError, match=r"^eos_token_ids is empty; decoding needs at least one end-of-sequence token$"):
        Facts(**{**BASE, "eos_token_ids": ()})
    with pytest.raises(ValueError, match=r"^eos_token_ids is empty"):
        native.facts({**native.config_keys(FACTS[0]), "pad_token_id": 0, "eos_token_id": []})
    for length in (0, -4):
        with pytest.raises(ValueError, match=f"^block_length is {length}; a block holds at least 1 token$"):
            Facts(**BASE, block_length=length)


def test_eos_may_be_pad():
    assert Facts(mask_token_id=1, eos_token_ids=(2,), pad_token_id=2).pad_token_id == 2


@pytest.mark.parametrize("name, wrong, allowed", [
    ("noise", "gaussian", "absorbing, uniform"),
    ("block_origin", "end", "prompt_end, zero"),
    ("prompt_attention", "full", "bidirectional, block_causal, causal"),
])  # fmt: skip
def test_an_unknown_choice_is_refused_with_what_is_allowed(name, wrong, allowed):
    with pytest.raises(ValueError, match=f"^{name} is '{wrong}'; allowed: {allowed}$"):
        Facts(**BASE, **{name: wrong})


@pytest.mark.parametrize("facts", FACTS)
def test_native_config_round_trip(facts):
    """Through JSON, as config.json holds it; pad and eos stand under transformers' own keys."""
    stock = {"model_type": "qwen2", "pad_token_id": facts.pad_token_id, "eos_token_id": list(facts.eos_token_ids)}
    config = json.loads(json.dumps({**stock, **native.config_keys(facts)}))
    assert not native.matches(stock) and native.matches(config)
    assert native.facts(config) == facts


def test_native_takes_a_single_eos():
    config = {**native.config_keys(FACTS[0]), "pad_token_id": 0, "eos_token_id": 2}
    assert native.facts(config).eos_token_ids == (2,)


@pytest.mark.parametrize("key", ["mask_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("how", ["absent", "null"])
def test_native_guesses_no_token(key, how):
    config = {**native.config_keys(FACTS[0]), "pad_token_id": 0, "eos_token_id": 2}
    config[key] = None
    if how == "absent":
        del config[key]
    with pytest.raises(ValueError, match=rf"config\.json has no {key}"):
        native.facts(config)


def test_find():
    assert families.find({"diffusion_family": "native"}) is native
    assert families.find({"model_type": "qwen2"}, "native") is native
    with pytest.raises(ValueError, match=r"unknown family 'nativ'; known: .*native"):
        families.find({"diffusion_family": "native"}, "nativ")
    with pytest.raises(ValueError, match=r"no family recognises model_type 'qwen2'; known: .*native.*Name one with family="):
        families.find({"model_type": "qwen2"})


def test_every_family_has_its_own_name_and_offers_what_load_needs():
    for name, module in families.FAMILIES.items():
        assert module.NAME == name
        assert callable(module.matches) and callable(module.facts)


def save(model: DiffusionLM, folder):
    """A native folder, without tokenizer."""
    for key, value in native.config_keys(model.facts).items():
        setattr(model.hf.config, key, value)
    model.hf.config.eos_token_id, model.hf.config.pad_token_id = list(model.facts.eos_token_ids), model.facts.pad_token_id
    model.hf.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("facts", [{}, {"block_length": 4, "logit_shift": True, "eos_token_ids": (2, 5)}])
def test_a_saved_folder_loads_with_the_same_logits_and_facts(tmp_path, facts):
    model = random_model(facts=facts)
    loaded = families.load(save(model, tmp_path))
    assert loaded.facts == model.facts and loaded.family == "native" and not loaded.training
    ids, valid = random_prompts([6, 9])
    with torch.no_grad():
        wanted, found = model.sequence_logits(ids, valid), loaded.sequence_logits(ids, valid)
    assert wanted.abs().max() > 0.1
    assert torch.equal(found, wanted)


def test_load_dtype(tmp_path):
    folder = save(random_model(), tmp_path)
    assert next(families.load(folder, dtype="bfloat16").parameters()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="dtype is 'float8'; allowed: float32, bfloat16, float16"):
        families.load(folder, dtype="float8")


def test_load_refuses_a_folder_without_diffusion_facts(tmp_path):
    random_model().hf.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no family recognises model_type 'qwen2'"):
        families.load(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json has no mask_token_id"):
        families.load(tmp_path, family="native")


def test_read_config(tmp_path):
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert families.read_config(tmp_path) == {"a": 1}
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        families.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"config\.json holds \[1, 2\]; it must be an object with named values"):
        families.read_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json; a model is a folder with"):
        families.read_config(tmp_path)
    for path in (tmp_path / "nothing", "nothing", "runs/no/model"):
        with pytest.raises(ValueError, match=f"no model at {path}: neither a folder here nor a Hub repository of the form user/name"):
            families.read_config(path)


def test_save_tokenizer_reads_back_what_it_wrote(tmp_path, tokenizer):
    """transformers picks a tokenizer class by the config.json beside it: qwen2's splits this text otherwise, llama's does not."""
    for kind in ("llama", "qwen2"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    families.save_tokenizer(tokenizer, tmp_path / "llama")
    assert families.load_tokenizer(tmp_path / "llama", Facts(**BASE)).tokenize("copy:a1") == ["copy", ":", "a", "1"]
    with pytest.raises(ValueError, match=r"model_type 'qwen2' transformers reads this tokenizer as .*; use a model_type that"):
        families.save_tokenizer(tokenizer, tmp_path / "qwen2")


def test_load_tokenizer_pads_on_the_left():
    tokenizer = families.load_tokenizer(TINY / "tokenizer", Facts(**BASE))
    assert tokenizer.padding_side == "left"
    assert (tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)


@pytest.mark.parametrize("values, name", [({"mask_token_id": 5}, "mask token is 1, the checkpoint's is 5"),
                                          ({"pad_token_id": 2}, "pad token is 0, the checkpoint's is 2"),
                                          ({"eos_token_ids": (5, 6)}, r"eos token is 2, the checkpoint's are \[5, 6\]")])  # fmt: skip
def test_load_tokenizer_refuses_the_tokenizer_of_another_model(values, name):
    with pytest.raises(ValueError, match=f"the tokenizer's {name}"):
        families.load_tokenizer(TINY / "tokenizer", Facts(**{**BASE, **values}))


def test_the_tokenizers_end_token_may_be_one_of_several():
    assert families.load_tokenizer(TINY / "tokenizer", Facts(**{**BASE, "eos_token_ids": (5, 2)})).eos_token_id == 2


def config_file(folder, **values):
    """A stock config, 2 layers of width 64; `values` replace some of it."""
    config = {
        "model_type": "qwen2", "vocab_size": 58, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256, "tie_word_embeddings": False, **values,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def build(folder, init, seed=0, **values):
    return scratch.build(config_file(folder, **values), TINY / "tokenizer", init=init, seed=seed)


def parameters(model):
    return dict(model.hf.named_parameters())


@pytest.mark.parametrize("init", ["fan_in", "copying"])
def test_scratch_keeps_the_size_of_activations(tmp_path, init):
    """Weights N(0, 1 / fan_in): the standard deviation of a [64, 64] matrix is 1/8 within 3 of its own deviations."""
    named = parameters(build(tmp_path, init))
    assert {name.rsplit(".", 1)[1] for name in named} == {"weight", "bias"}
    for name, parameter in named.items():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.ndim == 1:
            assert (parameter == 1).all(), name
        else:
            wanted = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5
            assert abs(parameter.std() / wanted - 1) < 3 / (2 * parameter.numel()) ** 0.5, name
            assert abs(parameter.mean()) < 4 * wanted / parameter.numel() ** 0.5, name


def test_scratch_default_is_the_architectures_own(tmp_path):
    named = parameters(build(tmp_path, "default"))
    assert named["model.layers.0.self_attn.q_proj.weight"].std().item() == pytest.approx(0.02, rel=0.05)
    assert named["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.05)


def test_scratch_copying_pairs_lm_head_and_o_proj(tmp_path):
    """lm_head = embedding * 64 ** -0.5; o_proj = v_proj^T in every layer. fan_in has neither."""
    for init, paired in (("copying", True), ("fan_in", False)):
        named = parameters(build(tmp_path, init))
        assert torch.allclose(named["lm_head.weight"], named["model.embed_tokens.weight"] / 8) == paired
        for layer in range(2):
            attention = f"model.layers.{layer}.self_attn"
            assert torch.equal(named[f"{attention}.o_proj.weight"], named[f"{attention}.v_proj.weight"].T) == paired


def test_scratch_copying_leaves_a_tied_head_alone(tmp_path):
    model = build(tmp_path, "copying", tie_word_embeddings=True)
    assert model.head.weight is model.hf.get_input_embeddings().weight
    assert model.head.weight.std().item() == pytest.approx(1.0, rel=0.05)


def test_scratch_copying_refuses_grouped_heads(tmp_path):
    with pytest.raises(ValueError, match=r"o_proj is \(64, 64\).*\(64, 32\); it needs as many key-value heads as heads"):
        build(tmp_path, "copying", num_key_value_heads=2)
    build(tmp_path, "fan_in", num_key_value_heads=2)


def test_scratch_takes_its_facts_from_the_tokenizer_and_its_numbers_from_the_seed(tmp_path):
    one, same, other = (build(tmp_path, "copying", seed=seed) for seed in (3, 3, 4))
    assert one.facts == Facts(**BASE) and one.family == "native"
    assert native.facts(json.loads(one.hf.config.to_json_string())) == one.facts
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(one.head.weight, other.head.weight)


def test_scratch_refusals(tmp_path):
    with pytest.raises(ValueError, match=r"scratch\.init is 'xavier'; allowed: default, fan_in, copying"):
        build(tmp_path, "xavier")
    with pytest.raises(ValueError, match=r"config\.json has vocab_size 57; the tokenizer has 58 tokens"):
        build(tmp_path, "fan_in", vocab_size=57)
    shutil.copytree(TINY / "tokenizer", tmp_path / "tokenizer")
    stated = json.loads((tmp_path / "tokenizer" / "tokenizer_config.json").read_text())
    del stated["mask_token"]
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(stated))
    with pytest.raises(ValueError, match="has no mask token"):
        scratch.build(config_file(tmp_path), tmp_path / "tokenizer", init="fan_in", seed=0)


@pytest.mark.parametrize("block_length", [None, 3])
def test_contract_1_row_i_of_a_shifted_model_is_raw_row_i_minus_1(block_length):
    """The same weights with and without logit_shift; nothing comes before the first row, so it is zero."""
    raw, shifted = random_model(), random_model(facts={"logit_shift": True})
    ids, valid = random_prompts([7, 10])
    arguments = (ids, valid, torch.tensor([4, 6]), block_length)
    with torch.no_grad():
        before, after = raw.sequence_hidden(*arguments), shifted.sequence_hidden(*arguments)
        assert torch.equal(after[:, 1:], before[:, :-1])
        assert (after[:, 0] == 0).all() and not torch.equal(after[:, 1:], before[:, 1:])
        assert torch.equal(shifted.sequence_logits(*arguments), shifted.head(after))


def test_contract_1_holds_against_a_cache():
    """Slot 0 of a block is predicted by the last committed row, the end of the prompt or of the block before."""
    raw, shifted = random_model(), random_model(facts={"logit_shift": True})
    ids, valid = random_prompts([5, 3])
    prompt_length, block = valid.sum(dim=1), 4
    first, second = (torch.randint(3, 57, (2, block), generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    whole = torch.cat([ids, first, second], dim=1)
    real = torch.cat([valid, torch.ones(2, 2 * block, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        rows = raw.sequence_hidden(whole, real, prompt_length, block)
        cache = shifted.new_cache(prompt_length, ids.shape[1] + 2 * block)
        found = shifted.denoise(first, cache, block, commit=(ids, valid))
        torch.testing.assert_close(found, rows[:, 4:8], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shifted.denoise(first, cache, block), rows[:, 4:8], atol=1e-5, rtol=1e-5)
        found = shifted.denoise(second, cache, block, commit=(first, torch.ones_like(first, dtype=torch.bool)))
        torch.testing.assert_close(found, rows[:, 8:12], atol=1e-5, rtol=1e-5)


def test_an_unshifted_model_is_the_stock_model_with_full_attention():
    """One row without padding: the raw rows of transformers' decoder under a mask of ones."""
    model = random_model()
    ids, valid = random_prompts([8])
    with torch.no_grad():
        everywhere = torch.ones(1, 1, 8, 8, dtype=torch.bool)
        raw = model.hf(input_ids=ids, attention_mask=everywhere, use_cache=False).logits
        causal = model.hf(input_ids=ids, use_cache=False).logits
        found = model.sequence_logits(ids, valid)
    torch.testing.assert_close(found, raw, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, causal, atol=1e-2)
