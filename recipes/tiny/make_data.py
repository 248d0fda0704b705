"""Writes the small world: questions to train a teacher on, to distil, to validate and to test, as JSONL, and its tokenizer.

    python recipes/tiny/make_data.py            # rewrites the committed files, byte for byte

Four tasks with one exact answer each, and one with many right answers. A question stands in a frame of 25 or 41 slots, filled up
with dots, and its answer has the same frame: so an answer token stands at one of two distances from its cause, which a small
network can learn. Every character is one token, and so is the name of a task.

chain      `chain:3+?<?*?..` -> `3+1<3*1`: a state (a digit) goes through operations, each a fixed random permutation of
           the ten digits (TABLE). Permutations do not commute, so a step cannot be merged with the next one: every result
           needs the one before it, and a shallow network can only run a few steps ahead.
copy       the list again. Every slot can be filled at once.
reverse    the list backwards. Easy from a neighbour, harder without one.
sort       the list in ASCII order. Every slot depends on the whole list.
translate  `translate:rvdachkl..` -> `op0xnsw2`: word by word; a word is four characters and has four right translations, used
           with the frequencies of USAGE (in the files to distil the first alone: one author wrote its answers). This is the
           multimodality problem of non-autoregressive translation (Gu et al., arXiv 1711.02281): the letters of a word must
           agree on one translation, so letters written at the same time, each by its own odds, spell no word. The column
           "accept" is a regular expression that matches the right answers.

The items of a list are distinct. No question stands twice, within a file or across the files.
"""

import json
import random
from pathlib import Path

SEED = 20261129
HERE = Path(__file__).parent
OPERATIONS = "+-*/<>^~"
DIGITS = "0123456789"
ITEMS = DIGITS + "abcdefghijklmnopqrstuvwxyz"
FRAMES = (25, 41)
LENGTHS = {  # shortest and longest answer
    "chain": (16, 41), "copy": (16, 33), "reverse": (16, 33), "sort": (16, 25), "translate": (16, 33),
}
USAGE = (0.44, 0.19, 0.19, 0.18)  # how often each translation of a word is used, the commonest first
SIZES = {"train": 27_000, "validation": 400, "test": 400, "distill": 1_400, "distill-canvas": 1_600}
SHARES = {  # of the questions of a file; most are of tasks that lose most under the block-causal mask, or take most steps on canvases
    "train": {"chain": 3, "copy": 1, "reverse": 3, "sort": 3, "translate": 2},
    "distill": {"chain": 2, "copy": 1, "reverse": 4, "sort": 5, "translate": 3},
    "distill-canvas": {"chain": 6, "copy": 1, "reverse": 1, "sort": 2, "translate": 3},
}  # the others hold the tasks in equal numbers
SPECIAL = {"pad_token": "<|pad|>", "mask_token": "<|mask|>", "eos_token": "<|eos|>"}
ROLES = ("<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def permutations() -> dict[str, str]:
    """operation -> ten digits: the digit at place s is what the operation makes of state s."""
    rng = random.Random(SEED)
    return {op: "".join(rng.sample(DIGITS, 10)) for op in OPERATIONS}


def dictionary() -> dict[str, list[str]]:
    """word -> its translations, the commonest first. Nine words; the letters of a place occur at no other place."""
    rng = random.Random(SEED + 2)
    letters = rng.sample(ITEMS, len(ITEMS))
    words = ["".join(letters[place::4]) for place in range(4)]
    words = ["".join(column) for column in zip(*words, strict=True)]
    columns = [words]  # permutations of the words that differ everywhere, so that every word is used equally often
    while len(columns) <= len(USAGE):
        column = rng.sample(words, len(words))
        if all(a != b for other in columns for a, b in zip(other, column, strict=True)):
            columns.append(column)
    return {word: translations for word, *translations in zip(*columns, strict=True)}


TABLE = permutations()
WORDS = dictionary()


def run_chain(state: str, operations: str) -> str:
    """'3', '+<' -> '3+1<3': the start, then every operation with its result."""
    out = state
    for op in operations:
        state = TABLE[op][int(state)]
        out += op + state
    return out


def question(task: str, rng: random.Random, usage: tuple[float, ...] = USAGE) -> dict[str, str]:
    length = rng.randint(*LENGTHS[task])
    accept = {}
    if task == "chain":
        start, ops = rng.choice(DIGITS), "".join(rng.choices(OPERATIONS, k=length // 2))
        asked, answer = start + "".join(op + "?" for op in ops), run_chain(start, ops)
    elif task == "translate":
        words = rng.choices(list(WORDS), k=length // 4)
        asked, answer = "".join(words), "".join(rng.choices(WORDS[word], usage)[0] for word in words)
        accept = {"accept": "".join(f"({'|'.join(WORDS[word])})" for word in words)}
    else:
        asked = "".join(rng.sample(ITEMS, length))
        answer = {"copy": asked, "reverse": asked[::-1], "sort": "".join(sorted(asked))}[task]
    frame = min(width for width in FRAMES if width >= len(asked))
    return {"task": task, "prompt": f"{task}:{asked:.<{frame}}", "answer": answer, **accept}


def splits() -> dict[str, list[dict[str, str]]]:
    rng, seen, out = random.Random(SEED + 1), set(), {}
    tasks = list(LENGTHS)
    for split, size in SIZES.items():
        rows = []
        while len(rows) < size:
            if split in SHARES:
                task = rng.choices(tasks, weights=list(SHARES[split].values()))[0]
            else:
                task = tasks[len(rows) % len(tasks)]
            row = question(task, rng, (1, 0, 0, 0) if split.startswith("distill") else USAGE)
            body = row["prompt"].split(":")[1] + row["answer"]
            if row["prompt"] not in seen and not any(name in body for name in tasks):  # a list that spells a task's name
                seen.add(row["prompt"])
                rows.append(row if split != "train" else {key: row[key] for key in ("task", "prompt", "answer")})
        out[split] = rows
    return out


def tokenizer():
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL.values(), *ROLES, *LENGTHS, ":", "?", ".", *OPERATIONS, *ITEMS, "<|unk|>"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(LENGTHS) + "|."), behavior="isolated")
    core.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<|unk|>", additional_special_tokens=list(ROLES), padding_side="left",
        model_max_length=256, clean_up_tokenization_spaces=False, **SPECIAL,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    for split, rows in splits().items():
        path = HERE / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path.name}: {len(rows)} questions, {path.stat().st_size / 1e6:.2f} MB")
    tokenizer().save_pretrained(HERE / "tokenizer")
