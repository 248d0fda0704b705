"""DiffusionGemma against transformers' own class: the same logits, whatever is committed how, and folders that both load."""

import json

import dgemma
import pytest
import torch
from conftest import random_prompts

from cdlm import families
from cdlm.families import diffusion_gemma, native
from cdlm.families.base import Facts, Seen

VOCAB, CANVAS = 128, 8
LENGTHS = [5, 23, 19]  # shorter and longer than the window of 16


@pytest.fixture(scope="module")
def model():
    return dgemma.random_model()


@pytest.fixture(scope="module")
def batch():
    prompt, valid = random_prompts(LENGTHS, vocab=VOCAB)
    draw = torch.Generator().manual_seed(1)
    canvases = torch.randint(0, VOCAB, (2, len(LENGTHS), CANVAS), generator=draw)
    return prompt, valid, canvases, torch.randn(len(LENGTHS), CANVAS, VOCAB, generator=draw)


def own(hf, prompt, valid, canvas, **more):
    """transformers' forward; its decoder needs the padding mask over prompt and canvas."""
    mask = torch.cat([valid, torch.ones_like(canvas, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        return hf(input_ids=prompt, attention_mask=valid, decoder_input_ids=canvas, decoder_attention_mask=mask, **more)


def test_rows_are_those_of_transformers_own_forward(model, batch):
    """Left padding, sliding layers over prompts longer than the window, the cap behind the head, self-conditioning on and off."""
    prompt, valid, (canvas, _), logits = batch
    with torch.no_grad():
        for seen, more in (
            (None, {}), (Seen(logits), {"self_conditioning_logits": logits}),
            (Seen(logits, on_B=torch.tensor([True, False, True])),
             {"self_conditioning_logits": logits, "self_conditioning_mask": torch.tensor([True, False, True])}),
        ):  # fmt: skip
            found = model.head(model.answer_hidden(prompt, valid, canvas, CANVAS, seen))
            wanted = own(model.hf, prompt, valid, canvas, **more).logits
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert wanted.std() > 1 and wanted.abs().max() > 10  # so that the cap of 30 bends them


def test_self_conditioning_by_the_largest_logits(model, batch):
    """With all V of them it is that by whole logits; with k of them, that by logits where the others are -inf."""
    prompt, valid, (canvas, _), logits = batch
    with torch.no_grad():
        for k in (VOCAB, 3):
            top = logits.topk(k, dim=-1)
            few = torch.full_like(logits, -torch.inf).scatter(-1, top.indices, top.values)
            wanted = model.answer_hidden(prompt, valid, canvas, CANVAS, Seen(few))
            found = model.answer_hidden(prompt, valid, canvas, CANVAS, Seen(top.values, top.indices))
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
        told = model.answer_hidden(prompt, valid, canvas, CANVAS, Seen(top.values, top.indices, torch.tensor([True, True, False])))
        torch.testing.assert_close(told[:2], found[:2])
        torch.testing.assert_close(told[2], model.answer_hidden(prompt, valid, canvas, CANVAS)[2])
    assert not torch.allclose(told[2], found[2], atol=1e-2)


def test_a_committed_canvas_is_what_the_encoder_makes_of_it(model, batch):
    """Prompt and canvas committed one after the other, or both in one prompt: the same rows in the next canvas, and nothing but what is
    committed changes the cache."""
    prompt, valid, (first, second), logits = batch
    ones = torch.ones_like(first, dtype=torch.bool)
    with torch.no_grad():
        cache = model.prefill(prompt, valid, 2 * CANVAS, CANVAS)
        before = [(layer.keys[:, :, : layer.committed].clone(), layer.values[:, :, : layer.committed].clone()) for layer in cache.layers]
        rows = model.denoise(first, cache, CANVAS, seen=Seen(logits))
        for layer, (keys, values) in zip(cache.layers, before, strict=True):
            assert torch.equal(layer.keys[:, :, : layer.committed], keys) and torch.equal(layer.values[:, :, : layer.committed], values)
        torch.testing.assert_close(rows, model.answer_hidden(prompt, valid, first, CANVAS, Seen(logits)), atol=1e-4, rtol=1e-4)
        again = model.head(model.denoise(second, cache, CANVAS, commit=(first, ones)))
    assert cache.position_BK.shape[1] == prompt.shape[1] + CANVAS and cache.next_position_B.tolist() == [n + CANVAS for n in LENGTHS]
    wanted = own(model.hf, torch.cat([prompt, first], 1), torch.cat([valid, ones], 1), second).logits
    torch.testing.assert_close(again, wanted, atol=1e-4, rtol=1e-4)


def test_a_row_is_the_same_alone_and_with_its_padding(model, batch):
    prompt, valid, (canvas, _), _ = batch
    with torch.no_grad():
        whole = model.answer_hidden(prompt, valid, canvas, CANVAS)
        for row, length in enumerate(LENGTHS):
            alone = model.answer_hidden(prompt[row : row + 1, -length:], valid[row : row + 1, -length:], canvas[row : row + 1], CANVAS)
            torch.testing.assert_close(alone, whole[row : row + 1], atol=1e-4, rtol=1e-4)


def test_clean_rows_are_the_encoders_one_place_on(model, batch):
    """Row i predicts token i: it is transformers' encoder row i - 1."""
    prompt, valid, (canvas, _), _ = batch
    with torch.no_grad():
        found = model.clean_hidden(prompt, valid)
    wanted = own(model.hf, prompt, valid, canvas).encoder_last_hidden_state
    torch.testing.assert_close(found[:, 1:][valid[:, :-1]], wanted[:, :-1][valid[:, :-1]], atol=1e-4, rtol=1e-4)


def test_gradients_are_those_of_transformers_own_forward(batch):
    """Through decoder, cache and encoder, self-conditioning included: a sum of squares of the logits, by both ways."""
    prompt, valid, (canvas, _), logits = batch
    mask = torch.cat([valid, torch.ones_like(canvas, dtype=torch.bool)], dim=1)
    found = []
    for ours in (True, False):
        model = dgemma.random_model()
        if ours:
            out = model.head(model.answer_hidden(prompt, valid, canvas, CANVAS, Seen(logits)))
        else:
            out = model.hf(
                input_ids=prompt, attention_mask=valid, decoder_input_ids=canvas, decoder_attention_mask=mask,
                self_conditioning_logits=logits,
            ).logits
        out.square().mean().backward()
        found.append({name: p.grad for name, p in model.hf.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 50
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], atol=1e-3 * float(found[1][name].abs().max()) + 1e-6, rtol=1e-3, msg=name)
    assert not any("vision" in name for name in found[0])


@pytest.mark.parametrize("call", ["sequence_hidden", "noisy_clean_hidden", "packed_hidden", "new_whole_cache"])
def test_what_two_modes_can_not_do_is_refused(model, call):
    with pytest.raises(ValueError, match=r"^diffusion_gemma: "):
        getattr(model, call)(*([None] * {"sequence_hidden": 2, "new_whole_cache": 1}.get(call, 5)))


def test_facts_of_a_checkpoint():
    """Token ids come from text_config where config.json states none itself; the noise has no mask token."""
    config = {"model_type": "diffusion_gemma", "canvas_length": 256, "text_config": {"eos_token_id": 1, "pad_token_id": 0}}
    assert families.find(config) is diffusion_gemma
    wanted = Facts(
        mask_token_id=None, eos_token_ids=(1, 106, 50), pad_token_id=0, block_length=256, noise="uniform", prompt_attention="causal",
    )
    assert diffusion_gemma.facts({**config, "eos_token_id": [1, 106, 50]}) == wanted
    assert diffusion_gemma.facts(config).eos_token_ids == (1,)
    with pytest.raises(ValueError, match="needs an end token"):
        diffusion_gemma.facts({**config, "text_config": {}})
    assert wanted.unfilled_id == 0 and Facts(mask_token_id=5, eos_token_ids=(1,), pad_token_id=0).unfilled_id == 5


@pytest.mark.parametrize("values, message", [
    ({"mask_token_id": 4}, "mask_token_id is 4; uniform noise has no mask token, leave it null"),
    ({"block_length": None}, "block_length is None; a model of uniform noise has a canvas of a fixed number of slots"),
    ({"block_length": 4}, "diffusion_gemma: block_length is 4, canvas_length 8; they are one number"),
])  # fmt: skip
def test_facts_that_contradict_the_noise_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        dgemma.random_model(facts=values)


def test_configs_that_are_not_followed_are_refused():
    with pytest.raises(ValueError, match="use_bidirectional_attention is 'all'"):
        dgemma.random_model(use_bidirectional_attention="all")


@pytest.mark.parametrize("name", ["native", "diffusion_gemma"])
def test_a_saved_folder_loads_as_either_family_with_the_same_tied_weights(tmp_path, batch, name):
    prompt, valid, (canvas, _), _ = batch
    model = dgemma.random_model()
    if name == "native":
        native.state(model.hf.config, model.facts)
    model.hf.save_pretrained(tmp_path)
    loaded = families.load(tmp_path)
    assert loaded.family == name and loaded.facts == model.facts and type(loaded) is type(model)
    text, decoder = loaded.hf.model.encoder.language_model, loaded.hf.model.decoder
    assert text.layers[0].mlp.up_proj.weight is decoder.layers[0].mlp.up_proj.weight
    assert loaded.hf.lm_head.weight is decoder.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded.answer_hidden(prompt, valid, canvas, CANVAS), model.answer_hidden(prompt, valid, canvas, CANVAS))
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["canvas_length"] == CANVAS and config["model_type"] == "diffusion_gemma"


def test_attention_is_transformers_own(tmp_path):
    dgemma.random_hf().save_pretrained(tmp_path)
    assert families.load(tmp_path, attention="sdpa").hf.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=r"attention is 'triton'; .* diffusion_gemma takes transformers' own sdpa: auto or sdpa"):
        families.load(tmp_path, attention="triton")


def test_an_adapter_is_not_merged_into_tied_weights():
    """With the adapters of encoder and decoder alike nonzero, merging changes a weight twice: so it is refused, and why is said."""
    assert dgemma.random_model().unmergeable.startswith("encoder and decoder read the same weights")


@pytest.mark.parametrize("values, words", [
    ({"confidence_threshold": 1}, "confidence_threshold 1; it must be a number above 0, with a point"),
    ({"confidence_threshold": 0.0}, "confidence_threshold 0.0; it must be a number above 0"),
    ({"stability_threshold": -1}, "stability_threshold -1; it must be a whole number, 0 or more"),
    ({"max_denoising_steps": True}, "max_denoising_steps True; it must be a whole number, 1 or more"),
    ({"t_min": 0.9}, "t_min 0.9 and t_max 0.8; t_min must be below t_max"),
    ({"sampler_config": {"entropy_bound": 0.1}}, "allowed: _cls_name EntropyBoundSamplerConfig with entropy_bound"),
    ({"sampler_config": {"_cls_name": "torch", "entropy_bound": 0.1}}, "allowed: _cls_name EntropyBoundSamplerConfig with entropy_bound"),
    ({"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1, "foo": 1}}, "allowed: _cls_name"),
    ({"sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0}}, "entropy_bound 0; it must be a number above 0"),
])  # fmt: skip
def test_a_sampler_that_transformers_would_not_take_is_refused_by_its_file(tmp_path, values, words):
    """transformers ends some of these in AttributeError or TypeError, and looks _cls_name up among the names of its module."""
    dgemma.random_hf().save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    known = {"t_max": 0.8, "t_min": 0.4} if "t_min" in values else {}
    file.write_text(json.dumps({**json.loads(file.read_text()), **known, **values}))
    with pytest.raises(ValueError, match=r"generation_config\.json has ") as error:
        families.load(tmp_path)
    assert words in str(error.value)
