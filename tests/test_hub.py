"""What goes to the Hub: stock transformers loads it and decodes the same tokens, the card says what was measured, merging is safe."""

import json
import shutil

import mini
import pytest
import torch
import yaml
from conftest import TINY, random_model, random_prompts
from mini import contents, finished

from cdlm import families, hub
from cdlm.data import prompt_ids
from cdlm.decode import DecodeConfig, decode
from cdlm.exported.generate import generate
from cdlm.families.base import Facts
from cdlm.trainer import add_lora

QUESTIONS = ["copy:5naj", "reverse:d2arpvnw", "copy:wznybs", "sort:rxabf705ys", "copy:a"]

# Answers to the questions as the card tells a user to get them: alone, all at once, and with other arguments. No cdlm.
STOCK = """
import json
import torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, questions, arguments, snippet = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder)

def answer(texts, **kwargs):
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True) for text in texts
    ]
    inputs = tokenizer(rendered, add_special_tokens=False, return_tensors="pt", padding=True)
    out = model.generate(**inputs, custom_generate=folder, trust_remote_code=True, **kwargs)
    width = inputs["input_ids"].shape[1]
    assert torch.equal(out[:, :width], inputs["input_ids"]), "the prompt stays as it is"
    return out[:, width:].tolist()

found = {"alone": [answer([text])[0] for text in questions], "batches": [answer(questions, **kwargs) for kwargs in arguments]}
exec(snippet.replace("PATH_OR_REPO", folder).replace('"..."', repr(questions[0])).replace("print(", "found['snippet'] = ("))
found["classes"] = [type(model).__module__, type(tokenizer).__module__]
found["cdlm"] = [name for name, module in sys.modules.items() if name.split(".")[0] == "cdlm" and module is not None]
print("FOUND" + json.dumps(found))
"""
ARGUMENTS = [
    {}, {"max_new_tokens": 13}, {"max_new_tokens": 3}, {"block_length": 5}, {"confidence_threshold": 0.95}, {"confidence_threshold": 0.0},
    {"max_new_tokens": 21, "block_length": 4, "confidence_threshold": 0.3}, {"do_sample": False, "num_beams": 1},
]


@pytest.fixture(params=[False, True], ids=["full", "lora"])
def done(request, tmp_path_factory):
    return finished(tmp_path_factory, lora=request.param)


@pytest.fixture
def exported(tmp_path_factory):
    return finished(tmp_path_factory, lora=True).out / "export"


def snippet(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


def test_the_exported_folder_decodes_the_same_tokens_in_a_new_process_without_the_package(exported, tmp_path):
    card = (exported / "README.md").read_text()
    ended = mini.run_python(
        STOCK, exported, json.dumps(QUESTIONS), json.dumps(ARGUMENTS), snippet(card), folder=tmp_path, package=False
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.split("FOUND")[1])
    assert found["cdlm"] == [] and all(name.startswith("transformers.") for name in found["classes"])

    model = families.load(exported)
    tokenizer = families.load_tokenizer(exported, model.facts)
    rows = [prompt_ids(tokenizer, text, chat_template=True) for text in QUESTIONS]
    assert len({len(row) for row in rows}) > 2, "the batch has left padding"

    def ours(chosen: list[list[int]], max_new_tokens=mini.BUDGET, block_length=mini.BLOCK, confidence_threshold=mini.THRESHOLD, **_):
        from cdlm.data import pad_left

        config = DecodeConfig(max_new_tokens, block_length, confidence_threshold=confidence_threshold)
        return decode(model, *pad_left(chosen, model.facts.pad_token_id), config).ids_BN.tolist()

    assert found["alone"] == [ours([row])[0] for row in rows]
    assert len({tuple(row) for row in found["alone"]}) == len(rows), "the answers can be told apart"
    for kwargs, answers in zip(ARGUMENTS, found["batches"], strict=True):
        assert answers == ours(rows, **kwargs), kwargs
        assert all(len(answer) == kwargs.get("max_new_tokens", mini.BUDGET) for answer in answers)
    assert found["batches"][0] == found["alone"], "a batch equals its rows alone"
    assert found["snippet"] == tokenizer.decode(ours([rows[0]])[0], skip_special_tokens=True), "the card's code runs"


def exported_style(model, threshold=0.5, block=4):
    """A random model with the keys that an exported config.json has."""
    from cdlm.families import native

    for key, value in native.config_keys(Facts(**{**vars(model.facts), "block_length": block})).items():
        setattr(model.hf.config, key, value)
    model.hf.config.confidence_threshold = threshold
    return model


EXPORTED_FACTS = {
    "a teacher's own": {}, "shifted": {"logit_shift": True}, "from zero": {"block_origin": "zero", "prompt_attention": "block_causal"},
    "shifted, from zero": {"block_origin": "zero", "prompt_attention": "block_causal", "logit_shift": True},
    "causal prompt": {"prompt_attention": "causal", "logit_shift": True}, "block-causal prompt": {"prompt_attention": "block_causal"},
    "causal prompt, from zero": {"block_origin": "zero", "prompt_attention": "causal"},
}  # fmt: skip


@pytest.mark.parametrize("facts", EXPORTED_FACTS.values(), ids=EXPORTED_FACTS)
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_the_exported_decoder_equals_decode(threshold, facts):
    model = exported_style(random_model("llama", seed=2, facts=facts), threshold)
    prompt, valid = random_prompts([9, 2, 6, 13, 8], seed=4)
    prompt[0, -1] = model.facts.mask_token_id  # a mask token that the user typed stays
    prompt[2, -1] = model.facts.eos_token_ids[0]  # and an end token of a chat turn ends nothing
    for budget in (1, 4, 10, 18):
        out = generate(model.hf, input_ids=prompt, attention_mask=valid.long(), max_new_tokens=budget)
        expected = decode(model, prompt, valid, DecodeConfig(budget, 4, confidence_threshold=threshold))
        assert torch.equal(out[:, : prompt.shape[1]], prompt)
        assert torch.equal(out[:, prompt.shape[1] :], expected.ids_BN), budget


def test_the_exported_decoder_takes_as_many_forwards_as_decode():
    model = exported_style(random_model("llama", seed=2))
    prompt, valid = random_prompts([7], seed=4)
    count = []
    model.hf.register_forward_hook(lambda *_: count.append(1))
    generate(model.hf, input_ids=prompt, max_new_tokens=16)
    assert len(count) == decode(model, prompt, valid, DecodeConfig(16, 4, confidence_threshold=0.5)).forwards[0] > 2


@pytest.mark.parametrize("argument", [
    {"do_sample": True}, {"num_beams": 4}, {"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 50},
])
def test_the_exported_decoder_refuses_sampling(argument):
    model = exported_style(random_model("llama"))
    prompt, _ = random_prompts([5])
    with pytest.raises(ValueError, match=f"greedy.*{next(iter(argument))}"):
        generate(model.hf, input_ids=prompt, max_new_tokens=4, **argument)


def test_the_exported_decoder_refuses_sampling_asked_for_in_a_generation_config():
    from transformers import GenerationConfig

    model = exported_style(random_model("llama"))
    prompt, _ = random_prompts([5])
    with pytest.raises(ValueError, match="greedy"):
        generate(model.hf, input_ids=prompt, generation_config=GenerationConfig(do_sample=True, temperature=0.7, max_new_tokens=4))


def test_the_exported_decoder_refuses_what_has_no_exact_cache():
    model = exported_style(random_model("llama", facts={"block_origin": "zero"}))
    with pytest.raises(ValueError, match="no exact cache"):
        generate(model.hf, input_ids=random_prompts([5])[0], max_new_tokens=4)


@pytest.mark.parametrize("argument", [{"max_new_tokens": -1}, {"block_length": -2}, {"confidence_threshold": 1.5}])
def test_the_exported_decoder_refuses_values_out_of_range(argument):
    model = exported_style(random_model("llama"))
    with pytest.raises(ValueError, match=f"{next(iter(argument))} {next(iter(argument.values()))}"):
        generate(model.hf, input_ids=random_prompts([5])[0], **{"max_new_tokens": 4, **argument})


# ---- card ------------------------------------------------------------------------------------------------------------


def test_the_card_says_what_was_measured(done):
    card = (done.out / "export" / "README.md").read_text()
    report = json.loads((done.out / "report.json").read_text())
    assert card.startswith("---\n")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["license"] == "mit" and front["base_model"] == "someone/teacher" and front["library_name"] == "transformers"
    assert {"mini", "cdlm", "custom_generate"} <= set(front["tags"])
    (index,) = front["model-index"]
    assert index["name"] == "mini"
    stated = {
        (entry["dataset"]["type"], metric["type"]): metric["value"] for entry in index["results"] for metric in entry["metrics"]
    }
    measured = {}
    for row in report["results"]:
        if row["method"] == "student" and row["parameter"] == mini.THRESHOLD:
            for kind, key in (("accuracy", "accuracy"), ("tokens_per_forward", "tpf"), ("steps", "steps")):
                measured[row["task"], kind] = row[key]
    assert stated == measured and len(measured) == 9
    summary = report["summary"]
    assert f"student {summary['student_accuracy']:.1%} in {summary['student_steps_at_threshold']:.1f} steps" in card
    assert card.count("| student, cached |") == 3


def test_a_card_without_a_report_says_so():
    card = hub.card(
        "m", report=None, base_model=None, license="mit", tags=[], datasets=[],
        decode={"block_length": 8, "max_new_tokens": 16, "confidence_threshold": 0.9}, table="", lines=[], threshold=0.9,
    )
    front = yaml.safe_load(card.split("---\n")[1])
    assert "model-index" not in front and "base_model" not in front
    assert "Not measured yet." in card


# ---- merge -----------------------------------------------------------------------------------------------------------


def with_adapter(kind: str = "llama"):
    """A model with an adapter that changes it, and a probe."""
    model = random_model(kind)
    torch.manual_seed(1)
    peft_model = add_lora(model, rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"])
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.1)
    return peft_model, random_prompts([12])[0]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_merging_an_adapter_changes_no_logit(kind):
    peft_model, probe = with_adapter(kind)
    peft_model.eval()
    before = peft_model(input_ids=probe).logits
    with peft_model.disable_adapter():
        without = peft_model(input_ids=probe).logits
    assert float((before - without).abs().max()) > 0.1, "the adapter does something"
    merged = hub.merge_lora(peft_model, probe)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert torch.allclose(merged(input_ids=probe).logits, before, atol=1e-4)


@pytest.mark.parametrize("broken", ["noise", "unmerged"])
def test_a_merge_that_changes_the_logits_is_refused(monkeypatch, broken):
    peft_model, probe = with_adapter()
    merge = peft_model.merge_and_unload

    def noise():
        merged = merge()
        with torch.no_grad():
            merged.get_output_embeddings().weight.add_(0.01)
        return merged

    monkeypatch.setattr(peft_model, "merge_and_unload", noise if broken == "noise" else peft_model.unload)
    with pytest.raises(ValueError, match="merging the adapter changed the logits"):
        hub.merge_lora(peft_model, probe)


# ---- folder ----------------------------------------------------------------------------------------------------------

FACTS = Facts(mask_token_id=1, eos_token_ids=(2,), pad_token_id=0, block_length=8)


def save(folder, model, tokenizer, threshold: float | None = 0.7, card: str = "card", facts: Facts = FACTS):
    decoding = {} if threshold is None else {"confidence_threshold": threshold}
    hub.save(
        model, tokenizer, folder, facts=facts, max_new_tokens=16, decoding=decoding, card=card, with_decoder=threshold is not None
    )


def test_save_replaces_an_old_folder_whole_and_leaves_nothing_beside_it(tmp_path, tokenizer):
    for name in ("export", ".export.partial", ".export.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stale").write_text("of an earlier run")
    save(tmp_path / "export", random_model("llama"), tokenizer, card="new card")
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    names = set(contents(tmp_path / "export"))
    assert "stale" not in names
    weights = {"config.json", "model.safetensors", "generation_config.json"}
    assert weights | {"tokenizer.json", "custom_generate/generate.py", "README.md"} <= names
    assert (tmp_path / "export" / "README.md").read_text() == "new card"
    assert (tmp_path / "export" / "custom_generate" / "generate.py").read_bytes() == hub.GENERATE_FILE.read_bytes()


def test_a_save_that_fails_leaves_the_old_folder(tmp_path, monkeypatch, tokenizer):
    save(tmp_path / "export", random_model("llama"), tokenizer)
    before = contents(tmp_path / "export")

    def fail(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(shutil, "copyfile", fail)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path / "export", random_model("llama", seed=5), tokenizer)
    assert contents(tmp_path / "export") == before


def test_the_facts_are_in_config_json_and_read_back(tmp_path, tokenizer):
    model = random_model("llama")
    save(tmp_path / "export", model, tokenizer)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["mask_token_id"] == 1 and config["eos_token_id"] in (2, [2]) and config["pad_token_id"] == 0
    assert config["block_length"] == 8 and config["confidence_threshold"] == 0.7 and config["architectures"] == ["LlamaForCausalLM"]
    generation = json.loads((tmp_path / "export" / "generation_config.json").read_text())
    assert generation["max_new_tokens"] == 16 and generation["eos_token_id"] == [2] and generation["pad_token_id"] == 0
    again = families.load(tmp_path / "export")
    assert again.facts == FACTS
    for (name, old), (_, new) in zip(model.hf.state_dict().items(), again.hf.state_dict().items(), strict=True):
        assert torch.equal(old, new), name


# generate.py and the native family both read the end and pad tokens from config.json.
def test_facts_that_differ_from_the_models_config_are_the_ones_that_are_saved(tmp_path, tokenizer):
    facts = Facts(mask_token_id=1, eos_token_ids=(2, 5), pad_token_id=7, block_length=8)
    save(tmp_path / "export", random_model("llama"), tokenizer, facts=facts)
    assert families.load(tmp_path / "export").facts == facts


def test_a_model_without_a_threshold_gets_no_decoder(tmp_path, tokenizer):
    save(tmp_path / "export", random_model("llama"), tokenizer, threshold=None)
    assert not (tmp_path / "export" / "custom_generate").exists()
    assert "confidence_threshold" not in json.loads((tmp_path / "export" / "config.json").read_text())


def test_a_run_exports_the_facts_of_its_teacher_and_the_students_weights(done):
    teacher, exported = families.load(done.recipe.parent / "teacher"), families.load(done.out / "export")
    assert exported.facts == Facts(**{**vars(teacher.facts), "block_length": mini.BLOCK})
    if (done.out / "student" / "model.safetensors").is_file():
        student = families.load(done.out / "student").hf.state_dict()
        assert all(torch.equal(student[name], tensor) for name, tensor in exported.hf.state_dict().items())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_exported_folder_reads_text_as_the_tokenizer_it_was_given(tmp_path, tokenizer, kind):
    from transformers import AutoTokenizer

    texts = [json.loads(line)["prompt"] for line in (TINY / "test.jsonl").read_text().splitlines()[:40]]
    save(tmp_path / "export", random_model(kind), tokenizer)
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert [prompt_ids(again, t, chat_template=True) for t in texts] == [prompt_ids(tokenizer, t, chat_template=True) for t in texts]


def test_a_folder_that_would_read_text_otherwise_is_not_written(tmp_path, tokenizer):
    """transformers reads any tokenizer beside model_type qwen2 as its own Qwen2Tokenizer: other tokens, no error."""
    save(tmp_path / "export", random_model("llama"), tokenizer)
    before = contents(tmp_path / "export")
    with pytest.raises(ValueError, match="model_type 'qwen2' transformers reads this tokenizer as"):
        save(tmp_path / "export", random_model("qwen2"), tokenizer)
    assert contents(tmp_path / "export") == before


def test_the_exported_decoder_under_eager_attention_equals_decode():
    model = exported_style(random_model("llama", seed=2))
    prompt, valid = random_prompts([9, 2, 6], seed=4)
    expected = decode(model, prompt, valid, DecodeConfig(12, 4, confidence_threshold=0.5)).ids_BN
    model.hf.set_attn_implementation("eager")
    out = generate(model.hf, input_ids=prompt, attention_mask=valid.long(), max_new_tokens=12)
    assert torch.equal(out[:, prompt.shape[1] :], expected)
    model.hf.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2'; this file needs one that takes any mask: sdpa or eager"):
        generate(model.hf, input_ids=prompt, max_new_tokens=4)


@pytest.mark.parametrize("argument", [{"block_lenght": 2}, {"confidence_treshold": 0.1}])
def test_the_exported_decoder_refuses_an_argument_that_it_does_not_know(argument):
    model = exported_style(random_model("llama"))
    with pytest.raises(ValueError, match=f"unknown argument {next(iter(argument))}"):
        generate(model.hf, input_ids=random_prompts([5])[0], max_new_tokens=4, **argument)


@pytest.mark.parametrize("argument", [{"no_repeat_ngram_size": 1}, {"suppress_tokens": [5]}, {"stop_strings": ["a"]}, {"max_time": 3.0}])
def test_the_exported_decoder_refuses_what_transformers_knows_and_it_does_not_do(argument):
    model = exported_style(random_model("llama"))
    with pytest.raises(ValueError, match=f"not supported: .*{next(iter(argument))}"):
        generate(model.hf, input_ids=random_prompts([5])[0], max_new_tokens=4, **argument)


def test_the_exported_decoder_without_a_prompt():
    with pytest.raises(ValueError, match="no prompt: give input_ids"):
        generate(exported_style(random_model("llama")).hf, max_new_tokens=4)
