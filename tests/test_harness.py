"""lm-eval: the model `cdlm` against the decoder and against the harness's own model."""

import itertools
import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import lm_eval
import pytest
import torch
from conftest import TINY, random_hf, random_model
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from mini import questions, save_teacher

from cdlm import cli, data, families
from cdlm.evaluate import harness, likelihood
from cdlm.evaluate.harness import CDLM

PROMPTS = ["copy:abc", "reverse:0123456789", "sort:zyx", "copy:k3xw"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A random full-attention model with the small world's tokenizer, as a folder."""
    folder = tmp_path_factory.mktemp("harness") / "teacher"
    save_teacher(folder)
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """A random stock causal LM, as a folder."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("harness") / "stock"
    random_hf("llama", scale=1.5).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "tokenizer").save_pretrained(folder)
    return folder


def generation(prompts: list[str], **gen_kwargs) -> list[Instance]:
    values = {"until": [], "max_gen_toks": 16, **gen_kwargs}
    return [Instance("generate_until", {}, (prompt, dict(values)), 0, ("t", i, 1)) for i, prompt in enumerate(prompts)]


def scoring(pairs: list[tuple[str, str]]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, 0, ("t", i, 1)) for i, pair in enumerate(pairs)]


def lm_of(folder: Path, **values) -> CDLM:
    return CDLM(str(folder), **{"confidence_threshold": 0.5, "block_length": 8, "say": lambda text: None, **values})


# generation


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("attention", ["full", "block_causal"])
def test_the_same_prompt_gives_the_text_of_generate(teacher, capsys, batch_size, attention):
    lm = lm_of(teacher, batch_size=batch_size, attention=attention)
    texts = lm.generate_until(generation(PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        flags = ["--raw", "--max-new-tokens", "16", "--block-length", "8", "--confidence-threshold", "0.5", "--attention", attention]
        assert cli.main(["generate", str(teacher), "--prompt", prompt, *flags]) == 0
        assert capsys.readouterr().out == text + "\n"
    assert len(set(texts)) > 1


def test_a_templated_chat_gives_the_text_of_generate(teacher, capsys):
    lm = lm_of(teacher, attention="full")
    prompt = lm.apply_chat_template([{"role": "user", "content": "copy:abc"}])
    (text,) = lm.generate_until(generation([prompt]))
    flags = ["--max-new-tokens", "16", "--block-length", "8", "--confidence-threshold", "0.5", "--attention", "full"]
    assert cli.main(["generate", str(teacher), "--prompt", "copy:abc", *flags]) == 0
    assert capsys.readouterr().out == text + "\n"
    assert lm.chat_template(True) == lm.tokenizer.chat_template


def test_text_of_special_tokens_stays_text_but_for_the_templates_own(teacher):
    """The small world's ids: 1 is <|mask|>, 2 <|eos|>, 3 <|user|>, 4 <|assistant|>; a turn's own text of them is read in pieces."""
    lm, asked = lm_of(teacher), lm_of(teacher, special_tokens=True)
    assert 1 not in lm.tok_encode("copy:a<|mask|>") and asked.tok_encode("copy:a<|mask|>") == [6, 10, 31, 1]
    assert lm.tok_encode("copy:a") == asked.tok_encode("copy:a") == [6, 10, 31]
    turns = [("user", "copy:<|user|>"), ("assistant", "b<|eos|>"), ("user", "copy:c")]
    chat = [{"role": role, "content": content} for role, content in turns]
    ids = lm.tok_encode(lm.apply_chat_template(chat))
    assert [token for token in ids if token < 5] == [3, 4, 2, 3, 4] and ids[-4:] == [6, 10, 33, 4]
    assert [token for token in asked.tok_encode(asked.apply_chat_template(chat)) if token < 5] == [3, 3, 4, 2, 2, 3, 4]


def test_a_continuation_behind_a_chat_adds_nothing_to_it(teacher):
    """The tokenizer puts <|pad|> (0) before a plain text; a chat brings what it needs. White space at a context's end is the
    continuation's, as in the harness."""
    from tokenizers.processors import TemplateProcessing

    lm = lm_of(teacher)
    lm.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|pad|> $A", special_tokens=[("<|pad|>", 0)])
    chat = lm.apply_chat_template([{"role": "user", "content": "copy:a"}])
    assert lm._encode_pair(chat, "ab") == ([3, 6, 10, 31, 4], [31, 32])
    before, after = lm._encode_pair(chat, "a<|eos|>")
    assert before == [3, 6, 10, 31, 4] and after[0] == 31 and 2 not in after
    assert lm._encode_pair("copy:a", "b") == ([0, 6, 10, 31], [32])
    open_turn = lm.apply_chat_template([{"role": "user", "content": "copy:<|eos|>"}, {"role": "assistant", "content": "a"}], False)
    before, after = lm._encode_pair(open_turn, "b")
    assert before[-2:] == [4, 31] and after == [32] and 2 not in before


def test_samples_do_not_depend_on_where_the_models_folder_is(teacher, tmp_path):
    """Times and paths tell finished samples of one model from another's; draws are of the seed, the document and the request."""
    shutil.copytree(teacher, tmp_path / "copy")
    (tmp_path / "copy" / "config.json").touch()
    asked = generation(PROMPTS, do_sample=True, temperature=1.0)
    here, there, other = (lm_of(folder, seed=seed).generate_until(asked)
                          for folder, seed in ((teacher, 0), (tmp_path / "copy", 0), (teacher, 1)))  # fmt: skip
    assert here == there != other


def test_sampling_is_repeatable_and_repeats_differ(teacher):
    same = generation(["copy:abc"] * 2, do_sample=True, temperature=1.0)
    first, second = (lm_of(teacher, seed=7).generate_until(same) for _ in range(2))
    assert first == second and first[0] != first[1]
    assert lm_of(teacher, seed=8).generate_until(same) != first


def test_greedy_where_do_sample_is_false(teacher):
    cold, greedy = generation(["copy:abc"], do_sample=False, temperature=0.9), generation(["copy:abc"])
    assert lm_of(teacher).generate_until(cold) == lm_of(teacher).generate_until(greedy)


def test_text_ends_before_the_first_stop_string(teacher):
    (whole,) = lm_of(teacher).generate_until(generation(["copy:abc"]))
    assert len(whole) > 6
    (cut,) = lm_of(teacher).generate_until(generation(["copy:abc"], until=[whole[4:6], whole[2:4]]))
    assert cut == whole[: min(whole.index(whole[4:6]), whole.index(whole[2:4]))]
    assert harness.trim("abc", []) == "abc" and harness.trim("abc", ["x", ""]) == "abc" and harness.trim("abc", ["a"]) == ""


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("attention", ["full", "block_causal"])
def test_decoding_stops_at_a_stop_string_and_the_text_is_the_whole_one_cut(teacher, batch_size, attention):
    """Every second prompt has two characters of its own text as its stop string, the others one that never comes."""
    prompts = [row["prompt"] for row in questions(12, seed=4)]
    whole, lm = (lm_of(teacher, attention=attention, batch_size=batch_size) for _ in range(2))
    texts = whole.generate_until(generation(prompts, max_gen_toks=40))
    requests = generation(prompts, max_gen_toks=40)
    for i, text in enumerate(texts):
        requests[i].args[1]["until"] = [text[3:5]] if i % 2 == 0 and len(text) > 4 else ["no such string"]
    assert lm.generate_until(requests) == [harness.trim(text, r.args[1]["until"]) for text, r in zip(texts, requests, strict=True)]
    fewer = 0
    for i, request in enumerate(requests):
        (before,), (after,), (stop,) = whole.costs["t", i], lm.costs["t", i], request.args[1]["until"]
        if stop not in texts[i]:
            assert all(before[name] == after[name] for name in (*harness.COSTS, "text", "stop"))
            continue
        assert after["stop"] == "until" and after["steps"] <= before["steps"] and after["forwards"] <= before["forwards"]
        fewer += after["steps"] < before["steps"]
        ids = lm.tokenizer(after["text"], add_special_tokens=False)["input_ids"]
        assert lm.tokenizer.decode(ids) == after["text"]
        assert after["output_tokens"] == next(n for n in range(1, len(ids) + 1) if stop in lm.tokenizer.decode(ids[:n]))
    assert fewer >= 2


def test_a_settled_text_is_cut_alike_whatever_follows():
    """All texts, pairs of stop strings and continuations of up to three letters of two."""
    words = ["".join(letters) for length in range(4) for letters in itertools.product("ab", repeat=length)]
    settled = 0
    for text, *until in itertools.product(words, words, words):
        if harness.settled(text, until):
            settled += 1
            assert {harness.trim(text + more, until) for more in words} == {harness.trim(text, until)} != {text}
    assert settled > 500


def test_a_longer_stop_string_that_may_still_come_is_waited_for():
    assert harness.settled("xc", ["c"]) and not harness.settled("x", ["c"]) and not harness.settled("x", [""])
    assert not harness.settled("abc", ["abcd", "c"]) and harness.trim("abcd", ["abcd", "c"]) == ""
    assert harness.settled("abce", ["abcd", "c"])


def test_costs_are_those_of_the_decoder(teacher):
    from cdlm.decode import decode

    lm = lm_of(teacher, attention="block_causal")
    lm.generate_until(generation(PROMPTS))
    for i, prompt in enumerate(PROMPTS):
        ids, valid = data.pad_left([lm.tok_encode(prompt)], 0)
        out = decode(lm.model, ids, valid, replace(lm.decoding, max_new_tokens=16))
        (found,) = lm.costs["t", i]
        assert {name: [found[name]] for name in harness.COSTS} == {name: getattr(out, name) for name in harness.COSTS}


def test_the_summary_by_hand():
    rows = [
        {"steps": 2, "commit_forwards": 1, "forwards": 4, "output_tokens": 6, "seconds": 0.5},
        {"steps": 4, "commit_forwards": 1, "forwards": 6, "output_tokens": 14, "seconds": 1.5},
    ]
    found = harness.summary(rows)  # 20 tokens in 10 forwards and 2 s
    assert found == {"steps": 3, "commit_forwards": 1, "forwards": 5, "output_tokens": 10, "tpf": 2, "tps": 10}


# a run that was killed


def test_finished_samples_are_not_decoded_again(teacher, tmp_path, monkeypatch):
    wanted = lm_of(teacher).generate_until(generation(PROMPTS))
    file = tmp_path / "finished.jsonl"
    first = lm_of(teacher, resume=file)
    decoded = []
    monkeypatch.setattr(harness, "decode", lambda *a, **k: decoded.append(1) or _decode_or_die(decoded, 3, *a, **k))
    with pytest.raises(KeyboardInterrupt):
        first.generate_until(generation(PROMPTS))
    assert len(file.read_text().splitlines()) == 2
    file.write_bytes(file.read_bytes() + b'{"key": "cut sho')
    said, before = [], len(decoded)
    second = lm_of(teacher, resume=file, say=said.append)
    monkeypatch.setattr(harness, "decode", lambda *a, **k: decoded.append(1) or _decode_or_die(decoded, 99, *a, **k))
    assert second.generate_until(generation(PROMPTS)) == wanted
    assert len(decoded) - before == 2 and said[0] == "eval: 2 of 4 samples were finished before"
    assert sorted(row[0]["finished_before"] for row in second.costs.values()) == [False, False, True, True]
    assert all(json.loads(line)["key"] for line in file.read_text().splitlines())


def _decode_or_die(decoded, at, *args, **kwargs):
    from cdlm.decode import decode

    if len(decoded) == at:
        raise KeyboardInterrupt
    return decode(*args, **kwargs)


def test_another_decoding_or_model_does_not_take_finished_samples(teacher, tmp_path):
    file = tmp_path / "finished.jsonl"
    lm_of(teacher, resume=file).generate_until(generation(["copy:abc"]))
    lm_of(teacher, resume=file).generate_until(generation(["copy:abc"]))
    assert len(file.read_text().splitlines()) == 1
    lm_of(teacher, resume=file, confidence_threshold=0.6).generate_until(generation(["copy:abc"]))
    assert len(file.read_text().splitlines()) == 2
    save_teacher(tmp_path / "other", seed=5)
    lm_of(tmp_path / "other", resume=file).generate_until(generation(["copy:abc"]))
    assert len(file.read_text().splitlines()) == 3
    content = file.read_text()
    for damaged, words in (
        ("nonsense\n", r"line 1 is no finished sample"), (content.replace('"steps": ', '"steps": 1', 1), r"line 1 is not what was written"),
        (content[:9] + ("0" if content[9] != "0" else "1") + content[10:], r"line 1 is not what was written"),
    ):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=words):
            lm_of(teacher, resume=file)


def test_time_left_is_said_from_the_tenth_sample_on():
    said = []
    progress = harness.Progress(30, said.append, every=0.0)
    progress.add(9)
    assert said == []
    progress.add(1)
    assert len(said) == 1 and said[0].startswith("eval: 10 of 30 samples in ") and "left" in said[0]


def test_a_kill_at_any_byte_of_the_file_loses_only_the_line_that_was_cut(teacher, tmp_path):
    file = tmp_path / "finished.jsonl"
    wanted = lm_of(teacher, resume=file).generate_until(generation(PROMPTS[:2]))
    content = file.read_bytes()
    first = content.index(b"\n") + 1
    for length in (0, 1, first - 1, first, first + 1, len(content) - 1):
        file.write_bytes(content[:length])
        assert len(harness.Finished(file).rows) == (length >= first)
        assert file.read_bytes() == (content[:first] if length >= first else b"")
        assert lm_of(teacher, resume=file).generate_until(generation(PROMPTS[:2])) == wanted


def test_a_batch_of_finished_samples_is_on_the_disk_before_the_next_one(teacher, tmp_path, monkeypatch):
    """Three samples in batches of two: after each batch one fsync of the file, with the lines of the whole batch in it."""
    file, lines, real = tmp_path / "finished.jsonl", [], os.fsync

    def seen(number):
        if os.readlink(f"/proc/self/fd/{number}") == str(file):
            lines.append(len(file.read_bytes().splitlines()))
        real(number)

    monkeypatch.setattr(os, "fsync", seen)
    lm_of(teacher, resume=file, batch_size=2).generate_until(generation(PROMPTS[:3]))
    assert lines == [2, 3]


def test_processes_keep_files_of_their_own_and_read_all(tmp_path):
    """What another process is writing is never touched."""
    for rank in (0, 1, 11):
        harness.Finished(tmp_path / "a[1].jsonl", rank).add({f"key{rank}": {"text": str(rank)}})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a[1].jsonl", "a[1].rank1.jsonl", "a[1].rank11.jsonl"]
    other = tmp_path / "a[1].rank1.jsonl"
    other.write_bytes(other.read_bytes() + b'{"key": "half')
    before = other.read_bytes()
    assert harness.Finished(tmp_path / "a[1].jsonl").rows == {f"key{rank}": {"text": str(rank)} for rank in (0, 1, 11)}
    assert other.read_bytes() == before and harness.Finished(tmp_path / "a[1].jsonl", 2).rows.keys() == {"key0", "key1", "key11"}


# likelihoods


def test_likelihoods_of_a_causal_model_are_the_harnesss_own(stock):
    pairs = [("copy:abc", "abc"), ("sort:zyx", "x"), ("copy:", "0123456789"), ("", "abc"), ("reverse:12", "21")]
    ours = CDLM(str(stock), family="causal", batch_size=3, special_tokens=True, say=lambda text: None)  # as the harness reads
    judge = HFLM(pretrained=str(stock), device="cpu", batch_size=1, dtype="float32")
    wanted = judge.loglikelihood(scoring(pairs), disable_tqdm=True)
    found = ours.loglikelihood(scoring(pairs))
    for (likely, greedy), (other, is_greedy) in zip(found, wanted, strict=True):
        assert math.isclose(likely, other, rel_tol=1e-5) and greedy == is_greedy
    (first,) = ours.generate_until(generation(["copy:abc"], max_gen_toks=3))
    assert ours.loglikelihood(scoring([("copy:abc", first)]))[0][1] is True
    long = "".join(PROMPTS) * 10  # two windows of the model's 256 positions
    assert len(ours.tok_encode(long)) > 256
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0, ("t", 0, 1)) for text in ("copy:abc", long)]
    for value, other in zip(ours.loglikelihood_rolling(rolling), judge.loglikelihood_rolling(rolling, disable_tqdm=True), strict=True):
        assert math.isclose(value, other, rel_tol=1e-5)


def test_a_diffusion_model_refuses_likelihoods_and_names_the_flag(teacher):
    lm = lm_of(teacher)
    with pytest.raises(ValueError, match="nelbo_samples=N"):
        lm.loglikelihood(scoring([("copy:abc", "abc")]))
    with pytest.raises(ValueError, match="loglikelihood_rolling"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("copy:abc",), 0, ("t", 0, 1))])


def cross_entropy(model, prompt, answer, masked):
    """-log p of each masked slot, from a plain forward under full attention."""
    ids = torch.tensor([prompt + [1 if i in masked else token for i, token in enumerate(answer)]])
    with torch.no_grad():
        logits = model.hf(input_ids=ids, attention_mask=torch.zeros(1, 1, ids.shape[1], ids.shape[1])).logits[0, len(prompt) :]
    return [-logits[i].log_softmax(-1)[answer[i]].item() for i in masked]


def test_the_nelbo_by_hand():
    model, prompt, answer = random_model(scale=1.5), [5, 6, 7], [8, 9]
    # One slot: it is always masked, so the bound is -log p itself.
    one = likelihood.nelbo(model, prompt, [8], samples=3, seed=0, block_length=None)
    assert math.isclose(one, cross_entropy(model, prompt, [8], [0])[0], rel_tol=1e-5)
    # Two slots and two masks: one mask takes both, level 1; the other takes one, level 1/2, so its cross-entropy counts twice.
    both = sum(cross_entropy(model, prompt, answer, [0, 1]))
    left, right = (2 * cross_entropy(model, prompt, answer, [i])[0] for i in (0, 1))
    found = {round(likelihood.nelbo(model, prompt, answer, samples=2, seed=seed, block_length=None), 4) for seed in range(12)}
    assert found == {round((both + left) / 2, 4), round((both + right) / 2, 4)}
    many = likelihood.nelbo(model, prompt, answer, samples=4000, seed=0, block_length=None, batch_size=500)
    assert math.isclose(many, (both + (left + right) / 2) / 2, rel_tol=0.02)


@pytest.mark.parametrize("origin", ["prompt_end", "zero"])
def test_the_nelbo_of_blocks_adds_up_block_by_block(origin):
    """Blocks of one token: each is masked behind clean text, so the bound is exact: the sum of -log p(token | text before it)."""
    model = random_model(scale=1.5, facts={"block_length": 1, "block_origin": origin})
    prompt, answer, wanted = [5, 6, 7], [8, 9, 10], 0.0
    for i in range(3):
        ids = torch.tensor([prompt + answer[:i] + [1]])
        with torch.no_grad():
            logits = model.sequence_logits(ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor([3]), 1)[0, -1]
        wanted -= logits.log_softmax(-1)[answer[i]].item()
    assert math.isclose(likelihood.nelbo(model, prompt, answer, samples=2, seed=0, block_length=1), wanted, rel_tol=1e-5)


def test_masks_take_every_number_of_slots_equally_often():
    block = torch.tensor([0, 0, 0, 1, 1])
    masked, level = likelihood.maskings(block, 6, torch.Generator().manual_seed(0))
    for number, size in ((0, 3), (1, 2)):
        count = masked[:, block == number].sum(dim=1)
        assert sorted(count.tolist()) == sorted(list(range(1, size + 1)) * (6 // size))
        assert torch.equal(level[:, block == number], (count / size)[:, None].expand(-1, size))


def test_an_estimate_says_whether_greedy_decoding_writes_it(teacher):
    lm = lm_of(teacher, nelbo_samples=4)
    (text,) = lm_of(teacher, tokens_per_step=1, confidence_threshold=None).generate_until(generation(["copy:abc"], max_gen_toks=4))
    found = lm.loglikelihood(scoring([("copy:abc", text), ("copy:abc", text + "0")]))
    assert found[0][1] == (len(lm.tok_encode(text)) == 4) and found[1][1] is False
    assert all(math.isfinite(value) and value < 0 for value, _ in found)
    assert lm.get_model_info()["cdlm"]["nelbo_samples"] == 4


# the harness's own function


TASK = {
    "task": "mine", "output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}", "test_split": "test",
    "generation_kwargs": {"until": [], "max_gen_toks": 16}, "metric_list": [{"metric": "exact_match"}],
}  # fmt: skip


def test_simple_evaluate_takes_the_models_name_and_an_object(teacher):
    """Both give the same scores and samples; the second question's answer is the model's own text."""
    (_, text, *_) = lm_of(teacher).generate_until(generation(PROMPTS))
    rows = [{"prompt": prompt, "answer": text if i == 1 else "?"} for i, prompt in enumerate(PROMPTS)]
    task = {**TASK, "custom_dataset": lambda **ignored: {"test": datasets.Dataset.from_list(rows)}}
    manager = TaskManager(include_path=None, include_defaults=False)
    lm = lm_of(teacher)
    args = f"pretrained={teacher},confidence_threshold=0.5,block_length=8"
    results = [
        lm_eval.simple_evaluate(model="cdlm", model_args=args, tasks=[task], batch_size=2, device="cpu", task_manager=manager),
        lm_eval.simple_evaluate(
            model="cdlm", model_args={"pretrained": str(teacher), "confidence_threshold": 0.5, "block_length": 8}, tasks=[task],
            task_manager=manager,
        ),
        lm_eval.simple_evaluate(model=lm, tasks=[task], task_manager=manager),
    ]  # fmt: skip
    for found in results:
        assert found["results"]["mine"]["exact_match,none"] == 1 / 4
        assert found["samples"]["mine"] == results[0]["samples"]["mine"]
        assert found["config"]["cdlm"]["decode"]["block_length"] == 8 and found["config"]["cdlm"]["processes"] == 1
    harness.add_costs(results[2], lm)
    steps = [lm.costs["mine", i][0]["steps"] for i in range(4)]
    assert results[2]["results"]["mine"]["steps,none"] == sum(steps) / 4
    assert [sample["costs"][0]["steps"] for sample in results[2]["samples"]["mine"]] == steps


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(teacher, tmp_path):
    from transformers import AutoTokenizer

    shutil.copytree(teacher, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    tokenizer.add_tokens(["more", "and more"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"the tokenizer has 60 tokens, the model 58: not the tokenizer of this model"):
        lm_of(tmp_path / "model")


# adapters


def test_an_adapters_folder_is_the_merged_model(teacher, tmp_path):
    from peft import LoraConfig, get_peft_model

    from cdlm.families.adapter import facts_json

    model = families.load(teacher)
    peft = get_peft_model(model.hf, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    peft.save_pretrained(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(teacher)}))
    (tmp_path / "adapter" / "facts.json").write_text(json.dumps(facts_json(model.facts)))
    families.load_tokenizer(teacher, model.facts).save_pretrained(tmp_path / "adapter")
    merged = peft.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / "merged" / name).write_bytes((teacher / name).read_bytes())
    ours, wanted = (lm_of(tmp_path / name).generate_until(generation(PROMPTS)) for name in ("adapter", "merged"))
    assert ours == wanted and ours != lm_of(teacher).generate_until(generation(PROMPTS))
