"""The small world: its files are what its generator writes, its answers are right, its splits are apart."""

import importlib.util
import json
import re
from functools import cache
from itertools import product

import pytest
from conftest import ROOT, TINY

SPLITS = ("train", "validation", "test", "distill", "distill-canvas")


@cache
def generator():
    spec = importlib.util.spec_from_file_location("make_data", TINY / "make_data.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (TINY / f"{split}.jsonl").read_text().splitlines()]


def everything() -> list[dict[str, str]]:
    return [row for split in SPLITS for row in rows(split)]


def test_the_generator_writes_the_committed_questions():
    made = generator().splits()
    assert set(made) == set(SPLITS)
    for split in SPLITS:
        written = "".join(json.dumps(row) + "\n" for row in made[split]).encode()
        assert written == (TINY / f"{split}.jsonl").read_bytes(), split


def test_the_generator_writes_the_committed_tokenizer(tmp_path):
    generator().tokenizer().save_pretrained(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in (TINY / "tokenizer").iterdir()}
    for name in names:
        assert (tmp_path / name).read_bytes() == (TINY / "tokenizer" / name).read_bytes(), name


def test_no_question_stands_twice():
    prompts = [row["prompt"] for row in everything()]
    assert len(prompts) == len(set(prompts))


def test_validation_and_test_hold_every_task_in_equal_numbers():
    for split in ("validation", "test"):
        tasks = [row["task"] for row in rows(split)]
        assert len(tasks) == 400
        assert {task: tasks.count(task) for task in set(tasks)} == dict.fromkeys(("chain", "copy", "reverse", "sort", "translate"), 80)


@pytest.mark.parametrize("split", SPLITS)
def test_every_answer_is_right(split):
    table = generator().TABLE
    for row in rows(split):
        task, question = row["prompt"].split(":")
        assert task == row["task"]
        asked, answer = question.rstrip("."), row["answer"]
        if task == "chain":
            assert len(answer) == len(asked)
            assert answer[0] == asked[0]
            state = answer[0]
            for place in range(1, len(asked), 2):
                assert asked[place + 1] == "?" and answer[place] == asked[place]
                state = table[asked[place]][int(state)]
                assert answer[place + 1] == state, row
        elif task == "translate":
            words = [asked[i : i + 4] for i in range(0, len(asked), 4)]
            for place, word in enumerate(words):
                assert answer[4 * place : 4 * place + 4] in generator().WORDS[word], row
            assert len(answer) == len(asked)
        else:
            right = {"copy": list(asked), "reverse": list(reversed(asked)), "sort": sorted(asked)}[task]
            assert list(answer) == right, row
            assert len(set(asked)) == len(asked)


def test_operations_are_permutations_that_do_not_commute():
    table = generator().TABLE
    assert len(table) == 8
    assert all(sorted(digits) == list("0123456789") for digits in table.values())
    assert len(set(table.values())) == 8

    def after(state: str, *operations: str) -> str:
        for op in operations:
            state = table[op][int(state)]
        return state

    different = {(a, b) for a, b in product(table, table) if any(after(s, a, b) != after(s, b, a) for s in "0123456789")}
    # No two different operations commute, so no step of a chain can change places with its neighbour.
    assert different == {(a, b) for a, b in product(table, table) if a != b}


def test_a_word_has_four_translations_that_share_no_letter_at_any_place():
    words = generator().WORDS
    assert len(words) == 9 and sorted("".join(words)) == sorted(generator().ITEMS), "every letter has its own word and place"
    for word, translations in words.items():
        assert len(translations) == len(generator().USAGE) == 4
        assert all(other in words for other in translations)
        assert len({word, *translations}) == 5
    for place in range(4):  # the n-th translations are all words once, so no word is likelier than another
        assert sorted(translations[place] for translations in words.values()) == sorted(words)


def test_translations_are_used_as_often_as_usage_says():
    used = [0, 0, 0, 0]
    for row in rows("train"):
        if row["task"] == "translate":
            asked = row["prompt"].split(":")[1].rstrip(".")
            for i in range(0, len(asked), 4):
                used[generator().WORDS[asked[i : i + 4]].index(row["answer"][i : i + 4])] += 1
    total = sum(used)
    assert total > 10_000
    for share, wanted in zip(used, generator().USAGE, strict=True):
        assert abs(share / total - wanted) < 4 * (wanted * (1 - wanted) / total) ** 0.5, "four standard errors"


def test_accept_matches_right_translations_only():
    given = [row for split in ("validation", "test", "distill") for row in rows(split) if "accept" in row]
    assert {row["task"] for row in given} == {"translate"}
    for row in given:
        asked = row["prompt"].split(":")[1].rstrip(".")
        choices = [generator().WORDS[asked[i : i + 4]] for i in range(0, len(asked), 4)]
        assert re.fullmatch(row["accept"], "".join(choice[-1] for choice in choices))
        mixed = choices[0][0][:2] + choices[0][1][2:]  # two letters of one translation, two of another
        assert not re.fullmatch(row["accept"], mixed + "".join(choice[0] for choice in choices[1:]))
        assert not re.fullmatch(row["accept"], asked), "no word translates to itself"


def test_the_examples_in_the_texts_are_right():
    made = generator()
    text = (TINY / "make_data.py").read_text() + (ROOT / "README.md").read_text()
    chains = set(re.findall(r"`(\d(?:[-+*/<>^~]\d){3})`", text))
    assert chains == {made.run_chain("3", "+<*")}
    words = [made.WORDS["rvda"], made.WORDS["chkl"]]
    examples = set(re.findall(r"`(?:translate:rvdachkl[.]*)`[^`]*`(\w{8})`", text))
    assert examples and all(example[:4] in words[0] and example[4:] in words[1] for example in examples)


def test_run_chain_by_hand():
    table = generator().TABLE
    first = table["+"][3]
    second = table["<"][int(first)]
    assert generator().run_chain("3", "+<") == f"3+{first}<{second}"


def test_lengths(tokenizer):
    from cdlm.data import prompt_ids

    prompts, answers = set(), set()
    for row in [*rows("validation"), *rows("test"), *rows("distill"), *rows("train")[:1000]]:
        prompts.add(len(prompt_ids(tokenizer, row["prompt"], chat_template=True)))
        answers.add(len(tokenizer(row["answer"], add_special_tokens=False)["input_ids"]))
    assert len(prompts) > 1, "prompts of unequal length"
    assert 16 <= min(prompts) and max(prompts) <= 64
    assert 16 <= min(answers) and max(answers) < 64, "an answer and its end token fit into 64 slots"
    assert len(answers) > 10


def test_special_tokens_are_three_and_apart(tokenizer):
    ids = [tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert None not in ids and len(set(ids)) == 3
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.padding_side == "left"


def test_the_tokenizer_reads_back_every_answer_and_knows_every_character(tokenizer):
    from cdlm.data import prompt_ids

    special = {tokenizer.mask_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    for row in [*rows("validation"), *rows("test"), *rows("distill"), *rows("train")[:2000]]:
        ids = tokenizer(row["answer"], add_special_tokens=False)["input_ids"]
        assert len(ids) == len(row["answer"]), "a character of an answer is a token"
        assert tokenizer.decode(ids) == row["answer"]
        assert not special & set(ids)
        assert not special & set(prompt_ids(tokenizer, row["prompt"], chat_template=True))


def test_a_prompt_is_one_user_turn(tokenizer):
    from cdlm.data import prompt_ids

    ids = prompt_ids(tokenizer, "copy:ab", chat_template=True)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "copy", ":", "a", "b", "<|assistant|>"]
