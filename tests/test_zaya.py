"""Family zaya: rows that name their predecessors, against transformers' own forward of each text by itself."""

import copy
import json
from dataclasses import replace

import mini
import pytest
import torch
import yaml
from conftest import ROOT, TINY, random_prompts
from test_speculate import LAYOUTS, Prophet, exactly

from cdlm import cli, data, families, masks, trajectories
from cdlm.decode import DecodeConfig, decode
from cdlm.families import native, zaya
from cdlm.families.base import Facts
from cdlm.families.wrap import wrap
from cdlm.speculate import SpeculateConfig, speculate

BASE = {"mask_token_id": 1, "eos_token_ids": (2,), "pad_token_id": 0}
CAUSAL = {"logit_shift": True, "prompt_attention": "causal", "block_length": 1}


def random_hf(seed: int = 0, **values):
    """ZAYA of 3 layers, width 32, 4 experts and the one that is skipped. Every parameter is random, biases and scales too."""
    from transformers import ZayaConfig, ZayaForCausalLM

    torch.manual_seed(seed)
    hf = ZayaForCausalLM(ZayaConfig(**{
        "vocab_size": 58, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "moe_intermediate_size": 24, "num_experts": 4, "router_hidden_size": 16, "max_position_embeddings": 256, "pad_token_id": 0,
        "eos_token_id": 2, "bos_token_id": None, "tie_word_embeddings": False,
        "rope_parameters": {"hybrid": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}}, **values,
    }))  # fmt: skip
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 2.0 * parameter[0].numel() ** -0.5 if "conv" in name else 2.0 * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.3)
        for layer in hf.model.layers:
            layer.self_attn.qk_norm.temp.fill_(1.2)
    return hf.eval()


def random_zaya(seed: int = 0, facts: dict | None = None, **values):
    return wrap(random_hf(seed, **values), Facts(**{**BASE, **(CAUSAL if facts is None else facts)}), "native")


def same(found, wanted, atol: float = 1e-5) -> None:
    assert wanted.abs().max() > 1
    assert torch.allclose(found, wanted, atol=atol), float((found - wanted).abs().max())


@torch.no_grad()
def reference(model, ids, valid=None):
    """Logits by transformers' own code, rows not aligned."""
    valid = torch.ones_like(ids) if valid is None else valid.long()
    own = copy.deepcopy(model.hf)
    for module in own.modules():
        module.__dict__.pop("forward", None)
    return own(input_ids=ids, attention_mask=valid, position_ids=(valid.cumsum(1) - 1).clamp(min=0), use_cache=False).logits


def test_a_causal_forward_is_transformers_own():
    """Prompts of 9, 4 and 1 tokens, padded on the left; row i - 1 of transformers predicts token i."""
    model = random_zaya()
    ids, valid = random_prompts([9, 4, 1])
    with torch.no_grad():
        found = model.sequence_logits(ids, valid, valid.sum(1), 1)
    real = valid[:, :-1]
    same(found[:, 1:][real], reference(model, ids, valid)[:, :-1][real])


def test_the_transformers_model_still_is_what_it_was():
    """The model that was wrapped, called and generating by transformers' own code with its own cache."""
    model = random_zaya()
    plain = random_hf()
    ids, valid = random_prompts([7, 3])
    with torch.no_grad():
        assert torch.equal(model.hf(ids, attention_mask=valid.long()).logits, plain(ids, attention_mask=valid.long()).logits)
        args = {"attention_mask": valid.long(), "max_new_tokens": 6, "do_sample": False}
        assert torch.equal(model.hf.generate(ids, **args), plain.generate(ids, **args))


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 5], [3, 1, 5]])
def test_committing_piece_by_piece_equals_one_forward(chunks):
    model = random_zaya()
    ids, valid = random_prompts([9, 5, 8])
    wanted = reference(model, ids, valid)
    cache, start, found = model.new_cache(valid.sum(1), 9), 0, []
    with torch.no_grad():
        for size in chunks:
            part = slice(start, start + size)
            position = cache.next_position_B[:, None] + masks.positions(valid[:, part])
            keys = torch.cat([cache.position_BK, position], dim=1), torch.cat([cache.valid_BK, valid[:, part]], dim=1)
            mask = model._mask(masks.clean(position, *keys))
            row = model._rows(ids[:, part], mask, position, cache)
            cache.commit(position, valid[:, part], row[:, -1])
            found.append(model.head(row))
            start += size
    same(torch.cat(found, 1)[valid], wanted[valid])


def test_a_forward_that_is_not_committed_leaves_no_trace():
    model = random_zaya()
    ids, valid = random_prompts([6, 4])
    block = torch.full((2, 3), 1)
    cache = model.prefill(ids, valid, 3, 1)
    with torch.no_grad():
        first = model.denoise(block, cache, 3)
        model.denoise(torch.full((2, 3), 7), cache, 3)
        assert torch.equal(model.denoise(block, cache, 3), first)


def blocks_of_masks(model, clean, start, length):
    """Logits of [clean text before `start`, masks], the masks' rows, by transformers' own code under a mask in which the masks see all."""
    own = copy.deepcopy(model.hf)
    for module in own.modules():
        module.__dict__.pop("forward", None)
    ids = torch.cat([clean[:, :start], torch.full((len(clean), length), model.facts.mask_token_id)], dim=1)
    allow = torch.ones(start + length, start + length, dtype=torch.bool).tril()
    allow[start:] = True
    with torch.no_grad():
        return own(input_ids=ids, attention_mask={"hybrid": allow[None, None], "conv": None}, use_cache=False).logits[:, start:]


def test_an_approximate_cache_is_refused():
    model = random_zaya(facts={})
    ids, valid = random_prompts([4])
    config = DecodeConfig(4, 4, tokens_per_step=1, block_causal=False, use_cache=False, approximate_cache="prefix")
    with pytest.raises(ValueError, match=r"^zaya: approximate_cache is for models whose attention alone mixes tokens"):
        decode(model, ids, valid, config)


@pytest.mark.parametrize("prompt_attention", masks.PROMPT_ATTENTION)
@pytest.mark.parametrize("origin", masks.ORIGINS)
def test_noisy_blocks_beside_clean_text_continue_from_the_text(prompt_attention, origin):
    """Block diffusion's training forward gives what cached decoding gives: prompts of 5, 8 and 2, 10 slots in blocks of 4."""
    from test_block_diffusion import by_cached_decoding, in_one_forward, noisy_answers

    model = random_zaya(facts={"prompt_attention": prompt_attention, "block_origin": origin, "logit_shift": True})
    prompt, valid, answer, noisy = noisy_answers([5, 8, 2], 10)
    with torch.no_grad():
        same(in_one_forward(model, noisy, prompt, valid, answer, 4), by_cached_decoding(model, noisy, prompt, valid, answer, 4), 1e-4)


def test_cached_decoding_equals_uncached_and_a_batch_each_row_alone():
    model = random_zaya(facts={"prompt_attention": "causal", "logit_shift": True})
    ids, valid = random_prompts([6, 3, 9])
    config = DecodeConfig(12, 4, confidence_threshold=0.5, stop_at_eos=False)
    whole = decode(model, ids, valid, config).ids_BN
    assert torch.equal(whole, decode(model, ids, valid, replace(config, use_cache=False)).ids_BN)
    for row in range(3):
        alone = decode(model, ids[row, valid[row]][None], valid[row, valid[row]][None], config)
        assert torch.equal(alone.ids_BN[0], whole[row])


def test_blocks_of_one_token_are_transformers_greedy_decoding():
    """Left-padded prompts, 12 new tokens, transformers' own generate with its own cache."""
    model = random_zaya()
    ids, valid = random_prompts([6, 3, 9])
    whole = decode(model, ids, valid, DecodeConfig(12, 1, tokens_per_step=1, stop_at_eos=False)).ids_BN
    args = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "suppress_tokens": [1]}
    wanted = random_hf().generate(ids, attention_mask=valid.long(), **args)
    assert torch.equal(whole, wanted[:, 9:])


@pytest.mark.parametrize("name, value, message", [
    ("cca_time0", 3, r"^zaya: cca_time0 is 3; a convolution here has 2 taps$"),
    ("layer_types", ["hybrid", "hybrid_sliding", "hybrid"], r"^zaya: layer_types has hybrid, hybrid_sliding; only hybrid layers"),
])  # fmt: skip
def test_what_the_masks_do_not_follow_is_refused(name, value, message):
    hf = random_hf()
    setattr(hf.config, name, value)
    with pytest.raises(ValueError, match=message):
        wrap(hf, Facts(**BASE), "native")


# ---- TiDAR's layouts -------------------------------------------------------------------------------------------------


def counted_before(valid, block_length):
    """Each row's predecessor in [clean | masks], counted one by one."""
    position, length = masks.positions(valid), valid.shape[1]
    before = torch.full((len(valid), 2 * length), -1)
    for b in range(len(valid)):
        for i in range(length):
            place = int(position[b, i])
            if not valid[b, i] or place == 0:
                continue
            before[b, i] = i - 1
            before[b, length + i] = i - 1 if place % block_length == 0 else length + i - 1
            if place < block_length:  # the first block: its masks follow nothing but one another
                before[b, length + i] = length + i - 1
    return before


@pytest.mark.parametrize("block_length", [1, 3, 4, 16])
def test_training_in_one_forward_is_a_causal_forward_and_a_forward_a_block(block_length):
    """Texts of 11 and 7 tokens. Clean half: transformers' causal logits. Block r: those of [clean text before it, masks]."""
    model = random_zaya()
    ids, valid = random_prompts([11, 7])
    packed, both = masks.tidar_training(valid, block_length), torch.cat([ids, torch.full_like(ids, 1)], dim=1)
    real = torch.cat([valid, valid], dim=1)
    assert torch.equal(packed.before_BQ[real], counted_before(valid, block_length)[real])
    with torch.no_grad():
        found = model.head(model.packed_hidden(both, packed.position_BQ, packed.sight, packed.before_BQ))
    same(found[:, :11][valid], reference(model, ids, valid)[valid])
    for row, length in enumerate((11, 7)):
        text = ids[row, valid[row]][None]
        for start in range(0, length, block_length):
            end = min(start + block_length, length)
            same(found[row, 22 - length + start : 22 - length + end], blocks_of_masks(model, text, start, end - start)[0])


def test_packing_by_mask_alone_is_wrong():
    """The same forward and mask, each row's predecessor taken to be the row before it, as transformers' own convolutions have it."""
    model = random_zaya()
    ids, valid = random_prompts([12])
    both = torch.cat([ids, torch.full_like(ids, 1)], dim=1)
    sight, position, before = masks.tidar_training(valid, 4)
    plain = torch.arange(24)[None] - 1
    with torch.no_grad():
        by_mask = model.head(model.packed_hidden(both, position, sight, plain))
        own = model.hf.get_decoder()(
            input_ids=both, position_ids=position, attention_mask={"hybrid": masks.dense(sight), "conv": None}, use_cache=False
        )
        same(by_mask, model.head(own.last_hidden_state))
        right = model.head(model.packed_hidden(both, position, sight, before))
    same(by_mask[:, :12], right[:, :12])
    apart = (by_mask - right).abs().amax(dim=-1)[0, 12:].view(3, 4)
    assert bool((apart > 0.1).all()), "every block of masks would follow the wrong token"


@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_a_step_of_draft_and_verify_is_a_forward_a_text(draft_length):
    """Prefixes of 9 and 5 tokens in the cache; drafts against transformers on [prefix, drafts], proposal r on [prefix, r drafts, masks]."""
    model, count = random_zaya(), draft_length
    prefix, valid = random_prompts([9, 5])
    draft, _ = random_prompts([count, count], seed=3)
    cache = model.prefill(prefix, valid, count * (count + 1), 1)
    sight, position, before = masks.tidar_decoding(cache.valid_BK, count)
    ids = torch.cat([draft, torch.full((2, count * count), 1)], dim=1)
    with torch.no_grad():
        found = model.head(model.packed_hidden(ids, position, sight, before, cache))
    for row, length in enumerate((9, 5)):
        text = torch.cat([prefix[row, valid[row]], draft[row]])[None]
        same(found[row, :count], reference(model, text)[0, length:])
        for r in range(1, count + 1):
            same(found[row, r * count : (r + 1) * count], blocks_of_masks(model, text, length + r, count)[0])


def state_of(cache, row):
    """What the layers keep of a row: keys and values of its real tokens, and the state of the last one."""
    found = []
    for layer in cache.layers:
        keys, values = (x[row, :, : layer.committed][:, cache.valid_BK[row]] for x in (layer.keys, layer.values))
        found += [keys, values, *(part[row] for part in layer.last)]
    return found


def step(model, cache, draft, accepted):
    """One forward of K drafts and K proposals, of which each row keeps its first `accepted` drafts. Logits of all rows."""
    count = draft.shape[1]
    sight, position, before = masks.tidar_decoding(cache.valid_BK, count)
    ids = torch.cat([draft, torch.full((len(draft), count * count), 1)], dim=1)
    with torch.no_grad():
        logits = model.head(model.packed_hidden(ids, position, sight, before, cache))
    cache.accept(accepted(logits) if callable(accepted) else accepted)
    return logits


@pytest.mark.parametrize("accepted", [[1, 1], [4, 2], [1, 3], [4, 4]])
def test_the_cache_after_a_step_is_that_of_the_committed_tokens_alone(accepted):
    """Rejected drafts and masks leave neither keys, values nor a state of convolutions and value shift behind, twice in a row."""
    model = random_zaya()
    prompt, valid = random_prompts([6, 9])
    cache = model.prefill(prompt, valid, 2 * 4 + 4 * 5, 1)
    text = [prompt[row, valid[row]] for row in range(2)]
    for seed in (3, 4):
        draft, _ = random_prompts([4, 4], seed=seed)
        step(model, cache, draft, accepted)
        text = [torch.cat([text[row], draft[row, : accepted[row]]]) for row in range(2)]
        for row in range(2):
            fresh = model.prefill(text[row][None], torch.ones(1, len(text[row]), dtype=torch.bool), 0, 1)
            assert cache.next_position_B[row] == len(text[row])
            for found, wanted in zip(state_of(cache, row), state_of(fresh, 0), strict=True):
                assert found.shape == wanted.shape and torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("draft_length", [1, 2, 4])
def test_greedy_draft_and_verify_over_these_forwards_is_transformers_greedy_decoding(draft_length):
    """Drafts from the proposals; two rows of different prompts, which accept different lengths. 16 tokens each."""
    model, count = random_zaya(), draft_length
    prompt, valid = random_prompts([6, 9], seed=7)
    wanted = random_hf().generate(prompt, attention_mask=valid.long(), max_new_tokens=16, do_sample=False, eos_token_id=None)[:, 9:]
    last = reference(model, prompt, valid)[:, -1].argmax(-1)
    cache = model.prefill(prompt, valid, 16 * count + count * (count + 1), 1)
    draft = torch.cat([last[:, None], wanted[:, 1:count]], dim=1)  # the first drafts are right, so that more than one is accepted
    text = [[], []]
    while min(len(t) for t in text) < 16:
        lengths = {}

        def accepted(logits, draft=draft, lengths=lengths):
            right = logits[:, : count - 1].argmax(-1) == draft[:, 1:]
            return lengths.setdefault("kept", (1 + right.long().cumprod(dim=1).sum(dim=1)).tolist())

        logits = step(model, cache, draft, accepted)
        kept = torch.tensor(lengths["kept"])
        for row in range(2):
            text[row] += draft[row, : kept[row]].tolist()
        proposed = logits[:, count:].view(2, count, count, -1)[torch.arange(2), kept - 1].argmax(-1)
        draft = torch.cat([logits[torch.arange(2), kept - 1].argmax(-1)[:, None], proposed[:, 1:]], dim=1)
    assert [t[:16] for t in text] == wanted.tolist()


class ProphetOfZaya(Prophet, zaya.ZayaLM):
    """A random ZAYA whose masks mostly know what greedy decoding will write; one position in five is wrong."""


@pytest.mark.parametrize("draft_length, proposals, layout", LAYOUTS)
@pytest.mark.parametrize("told", [False, True])
def test_speculate_is_autoregressive_greedy_token_for_token(draft_length, proposals, layout, told):
    """200 prompts of 1 to 12 tokens in one batch, rows that stop at different places; with drafts that never stand and some that do."""
    model = random_zaya(facts={**CAUSAL, "eos_token_ids": (17, 48)})
    prompt, valid = random_prompts([1 + i % 12 for i in range(200)], seed=2)
    wanted = decode(model, prompt, valid, DecodeConfig(10, 1, tokens_per_step=1))
    drafter = ProphetOfZaya(model, prompt, valid, 10) if told else model
    found = speculate(drafter, prompt, valid, SpeculateConfig(10, draft_length, proposals, layout))
    assert torch.equal(found.ids_BN, wanted.ids_BN) and found.stop == wanted.stop and "eos" in found.stop
    if told and draft_length == 8:
        assert any(sum(row[3:]) for row in found.accepted), "some steps keep three drafts and more"


def test_lossless_samples_have_the_autoregressive_distribution():
    model = wrap(random_hf(vocab_size=4), Facts(**{**BASE, "eos_token_ids": (1000,)}, **CAUSAL), "native")
    p_value, stood = exactly(model, 4, 4, 1500, SpeculateConfig(4, 2, 1, rule="lossless", temperature=2.0))
    assert min(stood[1:]) > 100 and p_value > 0.01, (p_value, stood)


# ---- files and stages ------------------------------------------------------------------------------------------------


def save(folder, seed=0, **state) -> None:
    """A folder with the small world's tokenizer; `state` goes into config.json."""
    from transformers import AutoTokenizer

    hf = random_hf(seed)
    for key, value in state.items():
        setattr(hf.config, key, value)
    hf.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "tokenizer").save_pretrained(folder)


def test_a_folder_of_the_architecture_is_recognised_with_causal_facts(tmp_path):
    save(tmp_path)
    model = families.load(tmp_path)
    assert (model.family, type(model)) == ("zaya", zaya.ZayaLM)
    assert (model.facts.mask_token_id, model.facts.logit_shift, model.facts.prompt_attention) == (1, True, "causal")
    ids, valid = random_prompts([5])
    with torch.no_grad():
        same(model.sequence_logits(ids, valid, valid.sum(1), 1)[:, 1:], random_hf()(ids).logits[:, :-1])


def test_a_run_on_zaya_with_an_adapter_decodes_as_it_was_measured_and_exports_no_decoder_of_masks(tmp_path):
    """Objective bd3lm, two steps, LoRA on projections of its attention. Stock transformers could not decode blocks of it."""
    mini.write(tmp_path)
    save(tmp_path / "zaya")
    values = mini.values(lora=True)
    del values["collect"], values["train"]["dlm_weight"]
    values["model"] = "zaya"
    values["evaluate"] = {"thresholds": [], "num_prompts": 4, "batch_size": 3, "latency_prompts": 1, "warmup_prompts": 0}
    values["train"] |= {"objective": "bd3lm", "steps": 2}
    values["train"]["lora"] = {"rank": 2, "alpha": 4, "targets": ["q_proj", "v_proj_delayed", "o_proj"]}
    (tmp_path / "zaya.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["distill", str(tmp_path / "zaya.yaml"), "--out", str(tmp_path / "out")]) == 0
    export = tmp_path / "out" / "export"
    assert not list(export.rglob("generate.py")) and "does not decode this model's blocks" in (export / "README.md").read_text()
    model, tokenizer = families.load(export), families.load_tokenizer(export, families.load(export).facts)
    said = [json.loads(line) for line in (tmp_path / "out" / "samples.jsonl").read_text().splitlines()]
    said = [row for row in said if row["method"] == "student(0.5)"]
    assert len(said) == 4
    for row in said:
        prompt = torch.tensor([data.prompt_ids(tokenizer, row["prompt"], chat_template=True)])
        out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), DecodeConfig(16, 8, confidence_threshold=0.5))
        assert tokenizer.decode(out.answer(0, model.facts.eos_token_ids)) == row["text"]


def test_a_drafting_zaya_teaches_a_block_causal_student(tmp_path):
    """All stages of objective cdlm: the diffusion mode of a model that states its draft_length decodes the trajectories."""
    mini.write(tmp_path)
    drafting = Facts(**BASE, **CAUSAL, draft_length=mini.BLOCK)
    save(tmp_path / "zaya", **native.config_keys(drafting))
    values = mini.values() | {"model": "zaya"}
    values["collect"]["temperatures"] = [0.0]
    values["train"]["steps"] = 2
    values["evaluate"] |= {"methods": ["student", "student_uncached"], "thresholds": [], "num_prompts": 2, "latency_prompts": 1}
    (tmp_path / "zaya.yaml").write_text(yaml.safe_dump(values))
    assert cli.main(["distill", str(tmp_path / "zaya.yaml"), "--out", str(tmp_path / "out")]) == 0
    student = families.load(tmp_path / "out" / "export")
    assert (student.family, student.facts.block_length, student.facts.draft_length) == ("native", mini.BLOCK, None)
    assert isinstance(student, zaya.ZayaLM) and not student.facts.logit_shift

    examples = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    teacher = families.load(tmp_path / "zaya").diffusion_mode()
    tokenizer = families.load_tokenizer(tmp_path / "zaya", teacher.facts)
    config = DecodeConfig(mini.BUDGET, mini.BLOCK, tokens_per_step=1)
    kept = trajectories.Trajectories(tmp_path / "out" / "trajectories")
    assert len(kept) == 6
    for one in kept:
        prompt = torch.tensor([data.prompt_ids(tokenizer, examples[one.example]["prompt"], chat_template=True)])
        found = decode(teacher, prompt, torch.ones_like(prompt, dtype=torch.bool), config)
        assert one.tokens.tolist() == found.filled_BM[0].tolist()

    report = json.loads((tmp_path / "out" / "report.json").read_text())
    rows = {row["method"]: row for row in report["results"] if row["task"] == "all"}
    assert all(rows["student"][name] == rows["student_uncached"][name] for name in ("accuracy", "steps", "output_tokens"))


def test_the_roofline_reads_its_sizes():
    """A ZAYA1-8B config gives the shape that is known under its name; convolutions and router are parts of a layer."""
    from cdlm import roofline
    from cdlm.families.shapes import SHAPES

    config = json.loads((ROOT / "recipes" / "zaya1-8b-tidar" / "config.json").read_text())
    found = roofline.shape_of_config(config, "config.json")
    assert replace(found, intermediate=0) == SHAPES["zaya1-8b"]
