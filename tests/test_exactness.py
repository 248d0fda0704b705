"""Exactness on the small world: 200 test questions, the committed weights under the block-causal mask, fp32."""

import pytest
from conftest import ROOT, TINY

from cdlm import data, families
from cdlm.decode import DecodeConfig, changed, decode


@pytest.fixture(scope="module")
def world():
    model = families.load(TINY / "teacher")
    tokenizer = families.load_tokenizer(TINY / "teacher", model.facts)
    examples = data.read_examples(
        ROOT / "recipes" / "tiny" / "test.jsonl", tokenizer, prompt_key="prompt", answer_key="answer", group_key="task",
        accept_key="accept",
        chat_template=True, max_prompt_tokens=64, max_new_tokens=64, limit=200,
    )
    return model, examples


def answers(world, config: DecodeConfig, batch: int, pads: int = 0) -> list[tuple[list[int], int]]:
    """Tokens and steps of every question, decoded `batch` at a time behind `pads` more padding tokens."""
    model, examples = world
    out = []
    for start in range(0, len(examples), batch):
        rows = [example.prompt_ids for example in examples[start : start + batch]]
        ids, valid = data.pad_left(rows, 0, max(len(row) for row in rows) + pads)
        found = decode(model, ids, valid, config)
        out += [(found.ids_BN[i].tolist(), found.steps[i]) for i in range(len(rows))]
    return out


CACHED = DecodeConfig(max_new_tokens=64, block_length=32, confidence_threshold=0.9)


def test_cached_is_uncached_batch_8_is_batch_1_and_padding_changes_nothing(world):
    cached = answers(world, CACHED, 8)
    assert len({tuple(ids) for ids, _ in cached}) > 150  # the questions have answers of their own
    assert cached == answers(world, changed(CACHED, use_cache=False), 40)
    assert cached == answers(world, CACHED, 1)
    assert cached == answers(world, CACHED, 8, pads=7)
    assert not any(1 in ids for ids, _ in cached)


def test_a_budget_that_is_no_multiple_of_the_block(world):
    model, examples = world
    some = (model, examples[:24])
    for budget in (1, 33, 50):
        config = changed(CACHED, max_new_tokens=budget)
        found = answers(some, config, 8)
        assert all(len(ids) == budget for ids, _ in found)
        assert found == answers(some, changed(config, use_cache=False), 8)


def test_the_teacher_solves_its_tasks_one_token_a_step(world):
    """Eight questions of each task; `make teacher` measures all 400."""
    model, examples = world
    tokenizer = families.load_tokenizer(TINY / "teacher", model.facts)
    right = 0
    for start in range(0, 40, 20):
        rows = examples[start : start + 20]
        ids, valid = data.pad_left([row.prompt_ids for row in rows], 0)
        config = DecodeConfig(64, 32, tokens_per_step=1, block_causal=False, use_cache=False)
        out = decode(model, ids, valid, config)
        right += sum(row.is_right(tokenizer.decode(out.answer(i, (2,)))) for i, row in enumerate(rows))
    assert right >= 39
