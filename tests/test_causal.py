"""Family causal: any stock causal LM as a block diffusion LM, and the mask token that it gets."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY, random_prompts

from cdlm import families
from cdlm.decode import DecodeConfig, decode
from cdlm.families import causal, native
from cdlm.families.base import DiffusionLM, Facts

KINDS = ("llama", "qwen2", "qwen3", "mistral")
WORDS = ("<|endoftext|>", "<|eos|>", "<|unk|>", *(f"w{i}" for i in range(37)))  # 40 tokens, no mask; a qwen2 adds the first by itself


def save_tokenizer(folder, **special):
    """A tokenizer of whole words, with these special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, **{"unk_token": "<|unk|>", "eos_token": "<|eos|>", **special}).save_pretrained(folder)


def save(folder, kind="llama", *, vocab=40, tied=False, seed=0, config=None, special=None):
    """A random causal LM with a tokenizer beside it, as one finds it: no mask token anywhere."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {"eos_token_id": 1, "pad_token_id": None, "bos_token_id": None, "sliding_window": None, **(config or {})}
    made = AutoConfig.for_model(
        kind, vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, tie_word_embeddings=tied, **values,
    )
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 3.0 * parameter.shape[1] ** -0.5)
    hf.save_pretrained(folder)
    save_tokenizer(folder, **(special or {}))
    return hf.eval()


def greedy(hf, ids, valid, mask: int | None):
    """transformers' own cached generate, 20 tokens; the mask token, which is no text, is kept out."""
    return hf.generate(
        ids, attention_mask=valid.long(), do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None, pad_token_id=0,
        suppress_tokens=[mask] if mask is not None else None,
    )[:, ids.shape[1] :]


def one_by_one(model, ids, valid):
    return decode(model, ids, valid, DecodeConfig(20, 1, tokens_per_step=1, stop_at_eos=False)).filled_BM


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_one_token_are_transformers_greedy_generate(tmp_path, kind, tied):
    """Contract 5, with the mask token added: once into a spare row of the embeddings, once into a new one."""
    for name, vocab in (("spare", 48), ("grown", 40)):
        hf = save(tmp_path / name, kind, vocab=vocab, tied=tied, seed=3)
        ids, valid = random_prompts([8, 5, 11], vocab=40)
        model = families.load(tmp_path / name, family="causal")
        assert model.facts.mask_token_id == 40 and type(model.hf) is type(hf)
        assert torch.equal(one_by_one(model, ids, valid), greedy(hf, ids, valid, 40 if vocab > 40 else None))
        assert torch.equal(one_by_one(model, ids, valid), greedy(model.hf, ids, valid, 40))


def test_the_facts():
    facts = causal.facts({"mask_token_id": 7, "eos_token_id": [1, 2]})
    assert facts == Facts(7, (1, 2), 1, logit_shift=True, block_origin="prompt_end", prompt_attention="causal", block_length=None)


@pytest.mark.parametrize("vocab", [40, 41, 48])
@pytest.mark.parametrize("tied", [False, True])
def test_a_new_mask_tokens_row_is_the_mean_of_the_others(tmp_path, vocab, tied):
    """With 40 tokens the mask is 40. Rows 40 to 47 of a vocabulary of 48 belong to no token and do not count."""
    hf = save(tmp_path, vocab=vocab, tied=tied)
    model = families.load(tmp_path, family="causal")
    before, after = hf.get_input_embeddings().weight, model.hf.get_input_embeddings().weight
    assert after.shape[0] == model.hf.config.vocab_size == max(vocab, 41)
    for old, new in ((before, after), (hf.lm_head.weight, model.head.weight)):
        assert torch.allclose(new[40], old[:40].mean(dim=0), atol=1e-6)
        assert torch.equal(new[:40], old[:40]) and torch.equal(new[41:vocab], old[41:vocab])
    assert (model.head.weight is after) is tied
    if vocab > 40:
        assert not torch.allclose(before[40], after[40], atol=1e-2), "a spare row is written too"


def test_loading_twice_gives_the_same(tmp_path):
    save(tmp_path)
    states = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        states.append(families.load(tmp_path, family="causal").hf.state_dict())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_a_mask_token_that_is_there_is_taken_and_left_as_it_is(tmp_path):
    hf = save(tmp_path / "tokenizer", special={"mask_token": "w9"})
    found = families.load(tmp_path / "tokenizer", family="causal")
    assert found.facts.mask_token_id == WORDS.index("w9")
    assert all(torch.equal(value, found.hf.state_dict()[key]) for key, value in hf.state_dict().items())
    hf = save(tmp_path / "config", vocab=48, config={"mask_token_id": 44})
    found = families.load(tmp_path / "config", family="causal")
    assert found.facts.mask_token_id == 44


@pytest.mark.parametrize("special, config", [({"mask_token": "<|eos|>"}, {}), ({"mask_token": "w1", "pad_token": "w1"}, {}),
                                             ({}, {"mask_token_id": 1})])  # fmt: skip
def test_pad_and_eos_are_never_the_mask(tmp_path, special, config):
    save(tmp_path, special=special, config=config)
    with pytest.raises(ValueError, match="is also the pad or an end-of-sequence token"):
        families.load(tmp_path, family="causal")


def test_end_tokens_of_tokenizer_generation_config_and_config(tmp_path):
    """The tokenizer's first, for training ends answers with it; nothing twice. pad: the tokenizer's, config.json's, the first end."""
    save(tmp_path, config={"eos_token_id": [5, 6]})
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 1]}))
    assert families.load(tmp_path, family="causal").facts.eos_token_ids == (1, 7, 5, 6)
    (tmp_path / "generation_config.json").unlink()
    facts = families.load(tmp_path, family="causal").facts
    assert (facts.eos_token_ids, facts.pad_token_id) == ((1, 5, 6), 1)
    save(tmp_path, config={"pad_token_id": 4})
    assert families.load(tmp_path, family="causal").facts.pad_token_id == 4
    save(tmp_path, config={"pad_token_id": 4}, special={"pad_token": "<|endoftext|>"})
    assert families.load(tmp_path, family="causal").facts.pad_token_id == 0


def test_no_end_token_is_refused(tmp_path):
    save(tmp_path, config={"eos_token_id": None}, special={"eos_token": None})
    with pytest.raises(ValueError, match="has an end-of-sequence token"):
        families.load(tmp_path, family="causal")


def test_the_tokenizer_has_the_mask_token_and_can_be_saved(tmp_path):
    save(tmp_path / "source")
    model = families.load(tmp_path / "source", family="causal")
    tokenizer = families.load_tokenizer(tmp_path / "source", model.facts)
    assert tokenizer.mask_token_id == 40 and tokenizer.mask_token == "<|mask|>"
    assert tokenizer("w1<|mask|>w2", add_special_tokens=False)["input_ids"] == [WORDS.index("w1"), 40, WORDS.index("w2")]
    native.state(model.hf.config, model.facts)
    model.hf.save_pretrained(tmp_path / "saved")
    families.save_tokenizer(tokenizer, tmp_path / "saved")
    again = families.load(tmp_path / "saved")
    assert again.family == "native" and again.facts == model.facts
    assert all(torch.equal(value, again.hf.state_dict()[key]) for key, value in model.hf.state_dict().items())
    assert families.load_tokenizer(tmp_path / "saved", again.facts).mask_token_id == 40
    named = families.load(tmp_path / "saved", family="causal")  # a trained mask token is not set back
    assert all(torch.equal(value, named.hf.state_dict()[key]) for key, value in model.hf.state_dict().items())


def test_it_is_never_guessed_but_named_in_the_error(tmp_path):
    save(tmp_path)
    with pytest.raises(ValueError, match=r"no family recognises model_type 'llama'; .*stock causal LM: family causal makes"):
        families.load(tmp_path)
    with pytest.raises(ValueError, match=r"no family recognises model_type 'nonsense'") as caught:
        families.find({"model_type": "nonsense"})
    assert "stock causal" not in str(caught.value)


def test_a_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path):
    save(tmp_path, vocab=30)
    with pytest.raises(ValueError, match="has a token of id 39; the model's embeddings have 30 rows"):
        families.load(tmp_path, family="causal")


def test_a_window_is_refused_unless_it_holds_everything(tmp_path):
    save(tmp_path, "mistral", config={"sliding_window": 16})
    with pytest.raises(ValueError, match="attention has a window of 16"):
        families.load(tmp_path, family="causal")
    save(tmp_path, "mistral", config={"sliding_window": 256})
    assert families.load(tmp_path, family="causal").facts.logit_shift


def test_ids_with_holes_are_refused(tmp_path):
    """Forty ids in use, the last of them 40: the next token that is added would get 40 too."""
    save(tmp_path, vocab=48)
    file = tmp_path / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["vocab"]["w36"] = 40
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=r"ids have holes: the next one, 40, is that of 'w36'"):
        families.load(tmp_path, family="causal")


def test_inspect_says_where_the_tokens_come_from(tmp_path, capsys):
    from cdlm import cli

    save(tmp_path)
    assert cli.main(["inspect", str(tmp_path), "--family", "causal"]) == 0
    printed = capsys.readouterr().out
    assert "mask_token_id      40               from the tokenizer or generation_config.json" in printed
    assert "LlamaForCausalLM" in printed and "prompt_attention   causal" in printed


def test_generate_from_the_command_line_is_autoregressive(tmp_path, capsys):
    """With the small world's tokenizer, which has a mask token: what is printed is transformers' greedy answer."""
    from cdlm import cli

    hf = save(tmp_path, vocab=58, config={"eos_token_id": 2})
    for file in (TINY / "tokenizer").iterdir():
        shutil.copy(file, tmp_path / file.name)
    tokenizer = families.load_tokenizer(tmp_path, families.load(tmp_path, family="causal").facts)
    assert cli.main(["generate", str(tmp_path), "--family", "causal", "--prompt", "copy:ab", "--max-new-tokens", "8",
                     "--tokens-per-step", "1"]) == 0  # fmt: skip
    from cdlm.data import prompt_ids

    ids = torch.tensor([prompt_ids(tokenizer, "copy:ab", chat_template=True)])
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, suppress_tokens=[1], pad_token_id=0)
    answer = [t for t in out[0, ids.shape[1] :].tolist() if t != 2]
    assert tokenizer.decode(answer) in capsys.readouterr().out


def drafting_model(kind, **config):
    """A random model of another architecture than the loader's attention takes, or one with a trait, without files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(
        kind, vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, pad_token_id=0,
        eos_token_id=2, bos_token_id=None, **config,
    )
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 2.0 * parameter.shape[1] ** -0.5)
    return DiffusionLM(hf, Facts(40, (2,), 0, logit_shift=True, prompt_attention="causal"), "causal").eval()


@pytest.mark.parametrize("kind, config", [("mpt", {}), ("xglm", {"ffn_dim": 48}), ("rwkv", {"attention_hidden_size": 32})])
def test_a_model_that_does_not_follow_positions_and_masks_is_refused(kind, config):
    """Distances by the place of a key in the forward (alibi), positions that the model counts for itself, a state."""
    with pytest.raises(ValueError, match=r"^here: \w+ForCausalLM computes other logits under this package's positions and masks than by"):
        causal.check(drafting_model(kind, **config), "here")


def test_a_scale_behind_the_head_is_refused():
    with pytest.raises(ValueError, match="or it scales or caps its logits"):
        causal.check(drafting_model("granite", intermediate_size=48, num_key_value_heads=2, logits_scaling=8.0), "here")


def test_a_model_that_takes_no_masks_is_refused():
    with pytest.raises(ValueError, match=r"^here: FalconForCausalLM does not take the positions, masks and cache of this package \("):
        causal.check(drafting_model("falcon", alibi=True), "here")


def test_loading_asks(tmp_path, monkeypatch):
    save(tmp_path)
    asked = []
    monkeypatch.setattr(causal, "check", lambda model, where: asked.append((model.family, where)))
    families.load(tmp_path, family="causal")
    assert asked == [("causal", tmp_path)]


def test_a_window_by_another_name_is_refused():
    from transformers import GPTNeoConfig

    with pytest.raises(ValueError, match=r"^family causal: this model has attention_types .*; only full attention can be block-causal"):
        causal.prepare(SimpleNamespace(config=GPTNeoConfig()), None, "here")


@pytest.mark.parametrize("kind, config", [("gpt2", {}), ("llama", {"intermediate_size": 48}), ("olmo2", {"intermediate_size": 48})])
def test_what_follows_them_is_taken_in_either_precision(kind, config):
    model = drafting_model(kind, **config)
    for dtype in (torch.float32, torch.bfloat16):
        causal.check(model.to(dtype), "here")
