"""A folder in a family's own format is a recipe's model like any other: all stages, and the checks before them."""

import json
import shutil
import socket

import mini
import pytest
import yaml
from conftest import ROOT

from cdlm import cli, families

FIXTURE = ROOT / "tests" / "fixtures" / "llada"
LETTERS = mini.ITEMS + ":"


def tokenizer(letters: str = LETTERS, mask: int = 159, eos: int = 158):
    """One token a character; end (which also pads) and mask are the last two of the fixtures' 160 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {letter: number for number, letter in enumerate(letters)}
    names |= {f"<{number}>": number for number in range(len(letters), 157)}
    found = Tokenizer(models.WordLevel({**names, "<unk>": 157, "<end>": eos, "<mask>": mask}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=found, unk_token="<unk>", eos_token="<end>", pad_token="<end>", mask_token="<mask>", model_max_length=256,
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}:",
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The llada fixture with a tokenizer, questions and a recipe; also the current folder."""
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE / name, teacher / name)
    tokenizer().save_pretrained(teacher)
    for name, rows in (("train", mini.questions(6, seed=1)), ("test", mini.questions(4, seed=2))):
        lines = [{"task": row["task"], "prompt": row["answer"], "answer": row["answer"]} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "mini.yaml").write_text(yaml.safe_dump(mini.values()))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("changes", "weights"), [
    ([], "model.safetensors"),
    (["family=llada"], "model.safetensors"),
    ([f"train.lora={{rank: 4, alpha: 8, targets: {mini.LORA['targets']}}}"], "adapter_model.safetensors"),
])
def test_all_stages_on_a_folder_in_a_familys_format(folder, capsys, changes, weights):
    sets = [text for change in changes for text in ("--set", change)]
    assert cli.main(["distill", "mini.yaml", "--out", "out", *sets]) == 0
    assert (folder / "out" / "student" / weights).is_file()
    report = json.loads((folder / "out" / "report.json").read_text())
    assert {row["method"] for row in report["results"]} >= {"teacher", "student", "teacher_block_causal"}
    exported = json.loads((folder / "out" / "export" / "config.json").read_text())
    assert exported["architectures"] == ["LlamaForCausalLM"] and exported["mask_token_id"] == 159
    assert families.load(folder / "out" / "export").facts.block_length == mini.BLOCK
    capsys.readouterr()
    assert cli.main(["generate", "out/export", "--prompt", "k3xw"]) == 0


def test_an_mdlm_run_starts_from_a_folder_in_a_familys_format(folder):
    sets = ["train.objective=mdlm", "collect=null", "evaluate.methods=[teacher]", "family=llada"]
    assert cli.main(["distill", "mini.yaml", "--out", "out", *[text for change in sets for text in ("--set", change)]]) == 0
    assert families.load(folder / "out" / "export").family == "native"


def test_a_dry_run_counts_what_the_family_has(folder, capsys):
    """2 layers of width 32: four 32 x 32 and three 32 x 64 matrices and two norms each, two 160 x 32 tables and a norm."""
    assert cli.main(["distill", "mini.yaml", "--dry-run"]) == 0
    count = 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 160 * 32 + 32
    assert f"teacher: llada as llama, {count:,} parameters" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["distill", "ablate", "train"])
@pytest.mark.parametrize(("change", "named"), [
    ("decode.max_new_tokens=240", "data.max_prompt_tokens 24 and decode.max_new_tokens 240 are 264 positions; the model has 256"),
    ("train.lora={rank: 2, alpha: 4, targets: [ff_proj]}", "train.lora.targets names ['ff_proj']; this model's linear layers: down_proj"),
    ("data.answer_key=response", "no text under 'response'"),
    ("collect.num_prompts=7", "data.prompts asks for 7 rows"),
])
def test_a_dry_run_refuses_what_the_run_would_refuse(folder, capsys, command, change, named):
    assert cli.main([command, "mini.yaml", "--dry-run", "--set", change]) == 2
    assert named in capsys.readouterr().err


def test_a_dry_run_refuses_the_tokenizer_of_another_model(folder, capsys):
    shutil.rmtree(folder / "teacher")
    folder.joinpath("teacher").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE / name, folder / "teacher" / name)
    tokenizer(mask=158, eos=159).save_pretrained(folder / "teacher")
    assert cli.main(["distill", "mini.yaml", "--dry-run"]) == 2
    assert "the tokenizer's mask token is 158, the checkpoint's is 159: not the tokenizer of this model" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "named"), [
    ({"n_layers": 3}, "teacher has num_hidden_layers 2; other.json (the recipe's config) says 3: not the model of this recipe"),
    ({"mlp_hidden_size": 96}, "intermediate_size 64; other.json (the recipe's config) says 96"),
    ({"embedding_size": 192}, "vocab_size 160; other.json (the recipe's config) says 192"),
])
def test_a_run_refuses_a_model_of_other_sizes_than_the_recipes_config(folder, capsys, change, named):
    config = json.loads((FIXTURE / "config.json").read_text())
    (folder / "other.json").write_text(json.dumps({**config, **change}))
    assert cli.main(["distill", "mini.yaml", "--out", "out", "--set", "config=other.json"]) == 2
    assert named in capsys.readouterr().err
    assert not list(folder.glob("out/*"))
    assert cli.main(["distill", "mini.yaml", "--dry-run", "--set", "config=other.json"]) == 2
    assert named in capsys.readouterr().err


def test_a_run_takes_a_model_whose_config_differs_in_no_size(folder, capsys):
    config = json.loads((FIXTURE / "config.json").read_text())
    (folder / "other.json").write_text(json.dumps({**config, "max_sequence_length": 512, "init_device": "meta"}))
    assert cli.main(["collect", "mini.yaml", "--out", "out", "--set", "config=other.json"]) == 0


def test_the_answers_column_of_the_test_questions_may_have_another_name(folder):
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    lines = [{"task": row["task"], "prompt": row["prompt"], "said": row["answer"]} for row in rows]
    (folder / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert cli.main(["distill", "mini.yaml", "--dry-run"]) == 2
    assert cli.main(["distill", "mini.yaml", "--dry-run", "--set", "data.test_answer_key=said"]) == 0


def cached(cache, model: str, files) -> None:
    """A repository as the Hub's cache keeps it."""
    place = cache / f"models--{model.replace('/', '--')}"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text("0" * 40)
    (place / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, place / "snapshots" / ("0" * 40) / file.name)


def test_a_dry_run_reads_a_model_of_the_hubs_cache_and_asks_nobody(folder, capsys, monkeypatch):
    import huggingface_hub

    def refuse(*args, **kwargs):
        raise AssertionError("a dry run opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    arguments = ["distill", "mini.yaml", "--dry-run", "--set", "model=someone/teacher", "--set", "config=teacher/config.json"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "not here    the model; its sizes are those of teacher/config.json" in printed
    assert "not here    the tokenizer for data.prompts, train.jsonl: 6 questions, as the recipe says" in printed
    cached(folder / "cache", "someone/teacher", [f for f in (folder / "teacher").iterdir() if f.suffix != ".safetensors"])
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert "not here" not in printed and "model       someone/teacher: llada as llama" in printed


def test_a_tokenizer_that_can_not_stand_beside_the_student_is_refused_before_any_work(folder, capsys):
    """Beside a qwen2 config transformers reads every tokenizer as Qwen2Tokenizer; training used to end with this error."""
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE.parent / "dream" / name, folder / "teacher" / name)
    for more in (["--dry-run"], ["--out", "out"]):
        assert cli.main(["distill", "mini.yaml", *more]) == 2
        assert "transformers reads this tokenizer as Qwen2Tokenizer, which splits text differently" in capsys.readouterr().err
    assert not list(folder.glob("out/*"))


@pytest.mark.parametrize("family", ["sdar", "llada2_moe"])
def test_all_stages_where_blocks_start_at_position_0(folder, family):
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(FIXTURE.parent / family / name, folder / "teacher" / name)
    block = 4 if family == "sdar" else 32
    sets = [f"decode.block_length={block}", "decode.max_new_tokens=32", "evaluate.methods=[teacher, student]"]
    assert cli.main(["distill", "mini.yaml", "--out", "out", *[text for change in sets for text in ("--set", change)]]) == 0
    assert families.load(folder / "out" / "export").facts.block_origin == "zero"


def test_the_ablation_checks_its_inputs_before_any_work(folder, capsys):
    assert cli.main(["ablate", "mini.yaml", "--out", "out", "--set", "decode.max_new_tokens=240"]) == 2
    assert "are 264 positions; the model has 256" in capsys.readouterr().err
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("facts", "sets", "named"), [
    ({"block_origin": "zero"}, [], "a block-causal student of it would have no exact cache"),
    ({"prompt_attention": "causal"}, [], "teacher is a causal LM: it can't fill slots under full attention"),
    ({"block_origin": "zero", "prompt_attention": "block_causal", "block_length": 3}, [], "the teacher decodes in blocks of 3"),
    ({"block_origin": "zero", "prompt_attention": "block_causal", "block_length": 8}, ["evaluate.methods=[student, teacher_dual_cache]"],
     "evaluate.methods has teacher_dual_cache; this teacher is a block diffusion model"),
])
def test_a_teacher_that_can_not_teach_is_refused_before_any_work(tmp_path, monkeypatch, capsys, facts, sets, named):
    mini.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    config = json.loads((tmp_path / "teacher" / "config.json").read_text())
    (tmp_path / "teacher" / "config.json").write_text(json.dumps({**config, **facts}))
    assert cli.main(["distill", "mini.yaml", "--out", "out", *[text for change in sets for text in ("--set", change)]]) == 2
    assert named in capsys.readouterr().err and not list(tmp_path.glob("out/*"))


def test_token_ids_of_a_hub_model_are_read_beside_its_config(tmp_path, monkeypatch):
    """A recipe with a copy of the config; the model's own config.json, on the Hub, states no mask token, its tokenizer does."""
    from cdlm import recipe, runs

    mini.write(tmp_path)
    place = tmp_path / "hub"
    shutil.copytree(FIXTURE.parent / "sdar", place)
    for file in place.iterdir():
        file.chmod(0o644)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, "mask_token_id": None}))
    tokenizer(mask=159, eos=158).save_pretrained(place)
    (tmp_path / "copy.json").write_text(json.dumps(config))
    values = ["model=hub", "config=copy.json", "train.lora=null", "decode.block_length=8"]
    run = runs.Run(recipe.load(tmp_path / "mini.yaml", values), tmp_path / "out")
    monkeypatch.setattr(runs.Run, "here", lambda self: None)  # as before anything was downloaded
    facts = run.check_inputs().facts
    assert (facts.mask_token_id, facts.block_length) == (159, 4)
