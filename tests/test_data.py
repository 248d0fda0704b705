"""Reading files and rows: what is accepted, and that an error names the file and the row."""

import json
from fnmatch import fnmatch

import pytest
import torch
from conftest import TINY

from cdlm import data

ROWS = [
    {"task": "copy", "prompt": "copy:abc...", "answer": "abc"},
    {"task": "reverse", "prompt": "reverse:4frj", "answer": "jrf4"},
    {"task": "sort", "prompt": "sort:3a1", "answer": "13a"},
]


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path, rows):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def read(path, tokenizer, **values):
    given = {
        "prompt_key": "prompt", "answer_key": "answer", "group_key": "task", "chat_template": True, "max_prompt_tokens": 32,
        "max_new_tokens": 16,
    }  # fmt: skip
    return data.read_examples(path, tokenizer, **{**given, **values})


def test_parquet_and_jsonl_give_the_same_rows(tmp_path, tokenizer):
    files = jsonl(tmp_path / "rows.jsonl", ROWS), parquet(tmp_path / "rows.parquet", ROWS)
    assert data.read_rows(files[0]) == data.read_rows(files[1]) == ROWS
    assert read(files[0], tokenizer) == read(files[1], tokenizer)


def test_rows_keep_numbers_and_order(tmp_path):
    rows = [{"a": 1, "b": None}, {"a": 0.5, "b": ["x"]}]
    assert data.read_rows(jsonl(tmp_path / "rows.jsonl", rows)) == rows


@pytest.mark.parametrize(
    "name, text, wanted",
    [
        ("rows.jsonl", '{"a": 1}\n{"a": \n', r"rows\.jsonl, line 2 is not JSON"),
        ("rows.jsonl", '{"a": 1}\n\n{"a": 2}\n', r"rows\.jsonl, line 2 is not JSON"),
        ("rows.jsonl", '{"a": 1}\n{"a": 2}\n[1, 2]\n', r"rows\.jsonl, line 3 is \[1, 2\]; every line is an object"),
        ("rows.jsonl", "", r"rows\.jsonl holds no rows"),
        ("rows.csv", "a,b\n1,2\n", r"rows\.csv ends in '\.csv'; allowed: \.jsonl, \.parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, text, wanted):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=wanted):
        data.read_rows(tmp_path / name)


def test_only_a_newline_ends_a_line(tmp_path):
    """JSON may hold U+2028 and its kin inside a string; str.splitlines would take them for ends of lines."""
    rows = [{"prompt": "a\u2028b\u2029c\x85d", "answer": "é"}, {"prompt": "e", "answer": "f"}]
    file = tmp_path / "rows.jsonl"
    file.write_bytes("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    assert b"\xe2\x80\xa8" in file.read_bytes()
    assert data.read_rows(file) == rows
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert data.read_rows(file) == rows


def test_a_file_that_is_not_utf_8_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes('{"prompt": "caf\u00e9", "answer": "b"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"rows\.jsonl is not UTF-8"):
        data.read_rows(tmp_path / "rows.jsonl")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no data file at .*nothing\.jsonl"):
        data.read_rows(tmp_path / "nothing.jsonl")


def test_examples_hold_text_tokens_and_group(tmp_path, tokenizer):
    """The chat template of the small world: <|user|> text <|assistant|>; an answer carries no special token."""
    examples = read(jsonl(tmp_path / "rows.jsonl", ROWS), tokenizer)
    assert [e.index for e in examples] == [0, 1, 2]
    assert [{"task": e.group, "prompt": e.prompt, "answer": e.answer} for e in examples] == ROWS
    for e in examples:
        assert tokenizer.decode(e.prompt_ids) == f"<|user|>{e.prompt}<|assistant|>"
        assert tokenizer.decode(e.answer_ids) == e.answer
        assert tokenizer.eos_token_id not in e.answer_ids


def test_prompt_without_template_is_its_own_text(tokenizer):
    assert tokenizer.decode(data.prompt_ids(tokenizer, "abc", chat_template=False)) == "abc"


def test_a_template_that_is_not_there_is_refused(tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ValueError, match=r"data\.chat_template is true, but the tokenizer has no chat template"):
        data.prompt_ids(bare, "abc", chat_template=True)
    assert data.prompt_ids(bare, "abc", chat_template=False) == data.prompt_ids(tokenizer, "abc", chat_template=False)


CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + CONTENT }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_tokenizer(content="m['content']"):
    """A byte-level tokenizer with four special tokens (ids from 256 on), a first one before plain text, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|bos|>", "<|mask|>", "<|user|>", "<|assistant|>"])
    made.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 256)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<|bos|>", chat_template=CHAT.replace("CONTENT", content))


@pytest.mark.parametrize("content", ["m['content']", "m['content'] | trim"])
@pytest.mark.parametrize("text", ["a<|mask|>b", "<|assistant|>", " <|user|> \n", "<|mask|><|mask|>", "<|bos|>x", "plain"])
def test_text_of_special_tokens_in_a_prompt_is_text_unless_asked(content, text):
    """What is read is the text, whatever it spells; the special tokens are those that the tokenizer and the template add."""
    tokenizer = byte_tokenizer(content)
    for wrapped, added in ((False, [256]), (True, [258, 259])):
        ids = data.prompt_ids(tokenizer, text, chat_template=wrapped)
        assert [token for token in ids if token >= 256] == added
        shown = text.strip() if wrapped and "trim" in content else text
        assert tokenizer.decode([token for token in ids if token < 256]) == shown
        asked = data.prompt_ids(tokenizer, text, chat_template=wrapped, special_tokens=True)
        assert (asked == ids) == (text == "plain")
        assert len([token for token in asked if token >= 256]) == len(added) + text.count("<|")


def test_a_template_that_changes_what_it_wraps_is_refused_with_text_of_special_tokens():
    tokenizer = byte_tokenizer("m['content'] | upper")
    assert data.prompt_ids(tokenizer, "ab", chat_template=True)
    with pytest.raises(ValueError, match=r"'a<\|mask\|>' stands in a chat .*data\.special_tokens"):
        data.prompt_ids(tokenizer, "a<|mask|>", chat_template=True)


@pytest.mark.parametrize("contents", [["a", "b", "c"], ["", "", ""], [" a ", "\n", "a"], ["]", "[", "]["], ["a"]])
@pytest.mark.parametrize("change", [str, str.strip, str.rstrip])
def test_parts_of_a_chat_are_the_turns_between_what_the_template_wrote(contents, change):
    def rendered(turns):
        return "".join(f"[{i}]{change(turn)}" for i, turn in enumerate(turns)) + "[end]"

    parts = data.chat_parts(contents, rendered, "a flag")
    assert "".join(text for text, _ in parts) == rendered(contents)
    assert [text for text, own in parts if not own] == [change(content) for content in contents]
    assert [text for text, own in parts if own] == [f"[{i}]" for i in range(len(contents))] + ["[end]"]


def test_a_turn_that_a_template_leaves_out_is_refused():
    with pytest.raises(ValueError, match="the chat template changes what it wraps"):
        data.chat_parts(["a", " "], lambda turns: f"[{turns[0]}]", "a flag")


def test_without_a_group_key_all_rows_are_one_group(tmp_path, tokenizer):
    file = jsonl(tmp_path / "rows.jsonl", [{"prompt": "copy:ab", "answer": "ab"}])
    assert [e.group for e in read(file, tokenizer, group_key=None)] == ["all"]


def test_limit_takes_the_first_rows(tmp_path, tokenizer):
    file = jsonl(tmp_path / "rows.jsonl", ROWS)
    assert [e.answer for e in read(file, tokenizer, limit=2)] == ["abc", "jrf4"]
    assert len(read(file, tokenizer, limit=3)) == 3
    with pytest.raises(ValueError, match=r"collect\.num_prompts asks for 4 rows; .*rows\.jsonl has 3"):
        read(file, tokenizer, limit=4, what="collect.num_prompts")
    with pytest.raises(ValueError, match=r"evaluate\.num_prompts asks for 0 rows"):
        read(file, tokenizer, limit=0, what="evaluate.num_prompts")


def test_lengths_at_their_limit_are_accepted(tmp_path, tokenizer):
    """'abcde' is 5 tokens and an end token: 6 fit. '<|user|>copy:a<|assistant|>' is 5 tokens, a task name being one."""
    file = jsonl(tmp_path / "rows.jsonl", [{"task": "copy", "prompt": "copy:a", "answer": "abcde"}])
    (example,) = read(file, tokenizer, max_prompt_tokens=5, max_new_tokens=6)
    assert (len(example.prompt_ids), len(example.answer_ids)) == (5, 5)


@pytest.mark.parametrize(
    "row, values, wanted",
    [
        ({}, {"max_prompt_tokens": 4}, r"row 2: the prompt has 5 tokens, allowed are 1 to 4 \(data\.max_prompt_tokens\)"),
        ({"prompt": ""}, {"chat_template": False}, r"row 2: the prompt has 0 tokens"),
        ({}, {"max_new_tokens": 5}, r"row 2: answer and end token are 6 tokens, decode\.max_new_tokens is 5"),
        ({"prompt": "copy:é"}, {}, r"row 2 holds text the tokenizer does not know: 'copy:é'"),
        ({"answer": "É"}, {}, r"row 2 holds text the tokenizer does not know: .*'É'"),
        ({}, {"answer_key": "solution"}, r"no text under 'solution'; its columns are task, prompt, answer"),
        ({"answer": 12}, {}, r"row 2 has no text under 'answer'"),
        ({"task": None}, {}, r"row 2 has no text under 'task'"),
    ],
)
def test_a_row_that_does_not_fit_is_named(tmp_path, tokenizer, row, values, wanted):
    good = {"task": "copy", "prompt": "copy:a", "answer": "a"}
    second = {"task": "copy", "prompt": "copy:a", "answer": "abcde", **row}
    if "max_prompt_tokens" in values:
        good["prompt"] = "a"
    file = jsonl(tmp_path / "rows.jsonl", [good, second])
    with pytest.raises(ValueError, match=wanted) as caught:
        read(file, tokenizer, **values)
    assert "rows.jsonl, row " in str(caught.value)


def test_pad_left():
    """Padding is known by place: a pad token that a prompt really holds stays valid."""
    ids, valid = data.pad_left([[7, 8, 9], [5], [0, 4]], 0)
    assert ids.tolist() == [[7, 8, 9], [0, 0, 5], [0, 0, 4]]
    assert valid.tolist() == [[True, True, True], [False, False, True], [False, True, True]]
    assert ids.dtype == torch.long and valid.dtype == torch.bool


def test_pad_left_to_a_width():
    ids, valid = data.pad_left([[7], [8, 9]], 3, width=4)
    assert ids.tolist() == [[3, 3, 3, 7], [3, 3, 8, 9]]
    assert valid.sum(dim=1).tolist() == [1, 2]


def test_fill_budget():
    assert data.fill_budget([5, 6], 5, 2) == [5, 6, 2, 2, 2]
    assert data.fill_budget([], 1, 2) == [2]
    assert data.fill_budget([5, 6], 2, 2) == [5, 6]  # an answer that was cut to the budget has no end token
    with pytest.raises(AssertionError):
        data.fill_budget([5, 6], 1, 2)


def test_sample_seed_is_the_same_everywhere():
    """The first 7 bytes of sha256("0,1,2"), little endian; a changed number would change every recorded run."""
    assert data.sample_seed(0, 1, 2) == 49_493_528_823_381_696
    assert 0 <= data.sample_seed(10**30) < 2**56
    torch.Generator().manual_seed(data.sample_seed(0, 1, 2))


def test_sample_seeds_are_distinct():
    """Neither the order of the parts nor how their digits join may collide."""
    parts = [(seed, epoch, row) for seed in range(3) for epoch in range(12) for row in range(123)]
    assert len({data.sample_seed(*p) for p in parts}) == len(parts)
    assert data.sample_seed(1, 23) != data.sample_seed(12, 3) != data.sample_seed(123)
    assert data.sample_seed(1, 2) != data.sample_seed(2, 1)


@pytest.mark.parametrize("name", ["train", "validation", "test", "distill"])
def test_the_small_world_reads(name, tokenizer):
    examples = read(TINY / f"{name}.jsonl", tokenizer, max_prompt_tokens=64, max_new_tokens=64, limit=40)
    assert len({e.group for e in examples}) > 1
    assert all(tokenizer.decode(e.answer_ids) == e.answer for e in examples)


def example(answer, accept=None):
    return data.Example(0, "all", "?", answer, [3], [4], accept)


def test_a_right_answer_is_the_whole_reference():
    assert example("3+4").is_right("3+4") and example("3+4").is_right(" 3+4\n")
    for wrong in ("3+4<", "3 +4", "", "33"):  # "+" is no pattern here
        assert not example("3+4").is_right(wrong)
    assert not example("ab").is_right("AB")


def test_with_a_pattern_every_text_that_matches_it_wholly_is_right():
    several = example("abcd", "(ab|xy)(cd|zw)")
    assert all(several.is_right(text) for text in ("abcd", "xycd", "abzw", " xyzw "))
    assert not any(several.is_right(text) for text in ("axcd", "abc", "abcdz", ""))


def test_the_accept_column_may_be_missing_in_a_row(tmp_path, tokenizer):
    rows = [{"task": "copy", "prompt": "ab", "answer": "ab", "accept": "ab|ba"}, {"task": "copy", "prompt": "ab", "answer": "ab"}]
    file = jsonl(tmp_path / "rows.jsonl", rows)
    assert [e.accept for e in read(file, tokenizer, accept_key="accept")] == ["ab|ba", None]
    assert [e.accept for e in read(file, tokenizer)] == [None, None]


def test_an_accept_column_that_no_test_question_has_is_a_mistake(tmp_path, tokenizer):
    row = {"task": "copy", "prompt": "ab", "answer": "ab"}
    file = jsonl(tmp_path / "rows.jsonl", [row, {**row, "accepts": "ab"}, {**row, "note": "-"}])
    assert len(read(file, tokenizer, accept_key="accept")) == 3  # questions to train on need none
    with pytest.raises(ValueError, match=r"no row of .*rows\.jsonl has 'accept' .*; its columns are task, prompt, answer, accepts, note$"):
        read(file, tokenizer, accept_key="accept", what="data.test")


@pytest.mark.parametrize(
    ("accept", "said"),
    [("ba", "which does not match the answer 'ab'"), ("(ab", "no regular expression"), (5, "no regular expression")],
)
def test_a_bad_pattern_is_refused_with_its_row(tmp_path, tokenizer, accept, said):
    file = jsonl(tmp_path / "rows.jsonl", [{"task": "copy", "prompt": "ab", "answer": "ab", "accept": accept}])
    with pytest.raises(ValueError, match="row 1") as error:
        read(file, tokenizer, accept_key="accept")
    assert said in str(error.value) and repr(accept) in str(error.value)


# ---- rows that do not fit ---------------------------------------------------------------------------------------------

LONG = [
    {"task": "copy", "prompt": "a", "answer": "ab"}, {"task": "copy", "prompt": "a" * 40, "answer": "a"},
    {"task": "copy", "prompt": "b", "answer": "abcdefgh"}, {"task": "copy", "prompt": "c", "answer": "c"},
]  # fmt: skip


@pytest.mark.parametrize(("long_prompts", "long_answers", "kept", "said"), [
    ("drop", "drop", ["ab", "c"],
     "data: of 4 rows of *rows.jsonl, 1 prompts of more than 32 tokens dropped, 1 answers of 4 tokens or more dropped"),
    ("drop", "cut", ["ab", "abcd", "c"],
     "data: of 4 rows of *rows.jsonl, 1 prompts of more than 32 tokens dropped, 1 answers of 4 tokens or more cut"),
])
def test_rows_that_are_too_long_are_dropped_or_cut_when_asked_and_counted(tmp_path, tokenizer, long_prompts, long_answers, kept, said):
    """A cut answer fills the budget of 4 without an end token; its text, by which answers are judged, stays whole."""
    heard = []
    file = jsonl(tmp_path / "rows.jsonl", LONG)
    examples = read(file, tokenizer, max_new_tokens=4, long_prompts=long_prompts, long_answers=long_answers, say=heard.append)
    assert [tokenizer.decode(e.answer_ids) for e in examples] == kept
    assert len(heard) == 1 and fnmatch(heard[0], said)
    assert {e.answer for e in examples} <= {row["answer"] for row in LONG}


def test_a_limit_counts_the_rows_that_fit(tmp_path, tokenizer):
    file = jsonl(tmp_path / "rows.jsonl", LONG)
    values = {"max_new_tokens": 4, "long_prompts": "drop", "long_answers": "drop", "say": lambda text: None}
    assert [e.index for e in read(file, tokenizer, limit=2, **values)] == [0, 3]
    with pytest.raises(ValueError, match=r"data asks for 3 rows; .*rows\.jsonl has 2 that fit"):
        read(file, tokenizer, limit=3, **values)


def test_nothing_is_said_where_all_rows_fit(tmp_path, tokenizer):
    heard = []
    read(jsonl(tmp_path / "rows.jsonl", ROWS), tokenizer, long_prompts="drop", long_answers="cut", say=heard.append)
    assert heard == []


# ---- chat columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [
    [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"},
     {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
    [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "ba"}],
    [{"from": "user", "value": "ab"}, {"from": "assistant", "value": "ba"}],
])
def test_a_chat_column_gives_its_first_turns(tmp_path, tokenizer, chat):
    for file in (jsonl(tmp_path / "rows.jsonl", [{"chat": chat}]), parquet(tmp_path / "rows.parquet", [{"chat": chat}])):
        (example,) = read(file, tokenizer, prompt_key="chat", answer_key="chat", group_key=None)
        assert (example.prompt, example.answer) == ("ab", "ba")


@pytest.mark.parametrize("chat", [
    [], [{"role": "user", "content": "ab"}], [{"role": "assistant", "content": "ba"}], ["ab", "ba"],
    [{"role": "user", "content": "ab"}, {"role": "assistant", "content": None}], {"role": "user", "content": "ab"},
])
def test_a_chat_without_both_turns_is_an_error_that_names_the_row(tmp_path, tokenizer, chat):
    file = jsonl(tmp_path / "rows.jsonl", [{"chat": chat}])
    with pytest.raises(ValueError, match=r"rows\.jsonl, row 1 has no text under 'chat'; its columns are chat"):
        read(file, tokenizer, prompt_key="chat", answer_key="chat", group_key=None)


def test_a_json_file_is_a_list_of_rows(tmp_path):
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    assert data.read_rows(tmp_path / "rows.json") == ROWS
    (tmp_path / "rows.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=r"rows\.json is no list of objects"):
        data.read_rows(tmp_path / "rows.json")


# ---- the Hub ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "parts"), [
    ("hub:a/b@main", ("a/b", None, "main", "train")),
    ("hub:a/b/c@main:test", ("a/b", "c", "main", "test")),
    ("hub:a/b@refs/convert/parquet:train[:20]", ("a/b", None, "refs/convert/parquet", "train[:20]")),
])
def test_the_name_of_a_data_set_of_the_hub(value, parts):
    found = data.parse_hub(value, "train")
    assert (found.name, found.config, found.revision, found.split) == parts
    assert data.parse_hub(str(found), "other") == found


@pytest.mark.parametrize("value", ["hub:a@main", "hub:a/b", "hub:a/b@", "hub:a/b/c/d@main", "hub:@main", "hub:a/b@main:", "hub:a/b@x y"])
def test_a_data_set_of_the_hub_needs_user_name_and_revision(value):
    with pytest.raises(ValueError, match="is not of the form hub:USER/NAME"):
        data.parse_hub(value, "train")

# ---- text that a tokenizer does not know ------------------------------------------------------------------------------


def split_tokenizer(vocabulary: dict[str, int], unk: str | None, pattern: str, behavior: str):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = models.WordLevel(vocabulary, unk_token=unk) if unk else models.BPE(vocabulary, [])
    found = Tokenizer(model)
    found.pre_tokenizer = pre_tokenizers.Split(pattern, behavior)
    return PreTrainedTokenizerFast(tokenizer_object=found, unk_token=unk)


def test_unknown_text_is_what_becomes_the_unknown_token(tokenizer):
    assert data.unknown_text(tokenizer, "sort:k3xw.") == ""
    assert data.unknown_text(tokenizer, "sort:kQ3Q!") == "Q!"


def test_unknown_text_is_what_is_dropped():
    """A byte-pair model without an unknown token drops what it has no token for, and says nothing."""
    found = split_tokenizer({"a": 0, "b": 1}, None, " ", "removed")
    assert found("ab cab", add_special_tokens=False)["input_ids"] == [0, 1, 0, 1]
    assert data.unknown_text(found, "ab cab") == "c", "a space between words is no loss"
    assert data.unknown_text(found, "ab ab") == ""


def test_a_byte_level_tokenizer_knows_everything():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    found = Tokenizer(models.BPE({letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert data.unknown_text(PreTrainedTokenizerFast(tokenizer_object=found), "Ünknown 日本 \n🙂") == ""
