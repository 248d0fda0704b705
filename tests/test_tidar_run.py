"""A recipe with objective tidar from end to end on a corner of the small world, and its result as a teacher of objective cdlm."""

import json
import shutil

import mini
import pytest
import torch
import yaml
from conftest import TINY, random_model, random_prompts

from cdlm import cli, families, hub, masks, roofline, runs
from cdlm import recipe as recipes
from cdlm.decode import DecodeConfig, decode
from cdlm.evaluate import speculation
from cdlm.evaluate.assisted import GenerateConfig, generate
from cdlm.families.base import Facts
from cdlm.speculate import SpeculateConfig, speculate

K = 4
AR = ["train.objective=ar", "train.alpha=1.0", "evaluate.proposals=[]", "evaluate.draft_model=null", "evaluate.methods=[autoregressive]"]


def values(*, lora=False) -> dict:
    """The mini recipe with its random teacher taken as a causal LM."""
    out = mini.values(lora=lora)
    del out["collect"], out["train"]["dlm_weight"], out["evaluate"]["thresholds"], out["evaluate"]["truncated_steps"]
    out["name"], out["family"], out["decode"] = "mini-tidar", "causal", {"max_new_tokens": mini.BUDGET, "block_length": K}
    out["train"] |= {"objective": "tidar", "alpha": 0.5}
    out["evaluate"] |= {"proposals": [1], "betas": [0.5], "draft_model": "teacher"}
    return out


def write(folder, **changes):
    path = mini.write(folder)
    path.write_text(yaml.safe_dump({**values(), **changes}, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The recipe and the folder of a finished run."""
    folder = tmp_path_factory.mktemp("tidar")
    recipe = write(folder)
    assert cli.main(["distill", str(recipe), "--out", str(folder / "out")]) == 0
    return recipe, folder / "out"


def test_the_report_measures_drafts_beside_autoregressive_decoding(run):
    report = json.loads((run[1] / "report.json").read_text())
    rows = {(row["method"], row["parameter"]): row for row in report["results"] if row["task"] == "all"}
    assert list(dict.fromkeys(method for method, _ in rows)) == list(recipes.METHODS_OF["tidar"])
    assert {m for (name, m) in rows if name == "tidar"} == {1, K}
    own = rows["student_autoregressive", None]
    for name in (("tidar", K), ("tidar", 1), ("tidar_linear", None)):
        assert rows[name]["accuracy"] == own["accuracy"] and rows[name]["output_tokens"] == own["output_tokens"]
    base = rows["autoregressive", None]
    for name in ("transformers_greedy", "prompt_lookup", "assisted"):
        assert rows[name, None]["output_tokens"] == base["output_tokens"] and rows[name, None]["accuracy"] == base["accuracy"]
    assert base["tpf"] == 1 and base["queries_per_forward"] == 1 and rows["transformers_greedy", None]["queries_per_forward"] == 1
    assert rows["tidar", K]["queries_per_forward"] == K * (K + 1) and rows["tidar", 1]["queries_per_forward"] == 2 * K
    assert rows["assisted", None]["tpf"] > 2, "a model that drafts for itself is always right"
    assert sum(rows["tidar", K]["accepted"]) == rows["tidar", K]["steps"] * rows["tidar", K]["n"]
    assert all(row["latency_n"] == 2 for row in rows.values())

    found = report["speculation"]
    assert (found["draft_length"], found["proposals"]) == (K, K) and len(found["rows"]) == len(rows)
    base_row, fast = found["rows"][0], next(row for row in found["rows"] if row["method"] == "tidar")
    assert base_row["times_faster"] == 1 and fast["times_faster"] == pytest.approx(base_row["median_s"] / fast["median_s"])
    assert [row["card"] for row in found["cards"]] == list(roofline.HARDWARE)
    text = (run[1] / "report.md").read_text()
    assert "## draft and verify" in text and "| transformers, prompt lookup |" in text and "- draft and verify in one forward: " in text


def test_the_samples_of_draft_and_verify_are_the_models_own(run):
    answers: dict[str, list[str]] = {}
    for line in (run[1] / "samples.jsonl").read_text().splitlines():
        row = json.loads(line)
        answers.setdefault(row["method"], []).append(row["text"])
    assert answers["tidar(4)"] == answers["tidar(1)"] == answers["tidar_linear"] == answers["student_autoregressive"]
    assert answers["autoregressive"] == answers["transformers_greedy"] == answers["prompt_lookup"] == answers["assisted"]


def test_the_export_is_a_stock_model_that_drafts(run):
    from transformers import AutoModelForCausalLM

    model = families.load(run[1] / "export")
    assert model.facts.draft_length == K and model.facts.block_length == 1
    assert model.facts.logit_shift and model.facts.prompt_attention == "causal"
    prompt, valid = random_prompts([5])
    stock = AutoModelForCausalLM.from_pretrained(run[1] / "export").generate(
        prompt, attention_mask=valid.long(), max_new_tokens=6, do_sample=False, eos_token_id=2, suppress_tokens=[1]
    )
    found = speculate(model, prompt, valid, SpeculateConfig(6, K))
    count = found.output_tokens[0]
    assert found.ids_BN[0, :count].tolist() == stock[0, 5 : 5 + count].tolist()
    card = (run[1] / "export" / "README.md").read_text()
    assert "arXiv 2511.08923" in card and f"draft_length={K}" in card and "tokens_per_forward" in card


def test_an_adapter_is_trained_and_measured_beside_its_base(tmp_path):
    recipe = write(tmp_path)
    recipe.write_text(yaml.safe_dump({**values(lora=True), "name": "lora"}))
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "student" / "adapter_config.json").is_file()
    assert families.load(tmp_path / "out" / "export").facts.draft_length == K
    rows = {row["method"]: row for row in json.loads((tmp_path / "out" / "report.json").read_text())["results"] if row["task"] == "all"}
    assert rows["autoregressive"]["output_tokens"] == rows["transformers_greedy"]["output_tokens"]
    assert rows["tidar"]["output_tokens"] == rows["student_autoregressive"]["output_tokens"]


def test_transformers_generation_is_counted():
    """Beside the model's own decoding; an assistant of the same weights is always right, and its forwards are not counted."""
    model = random_model("llama", facts={"logit_shift": True, "prompt_attention": "causal"})
    prompt, valid = random_prompts([5, 3, 7])
    wanted = speculate(model, prompt, valid, SpeculateConfig(9, 1))
    called = []
    for config in (GenerateConfig(9), GenerateConfig(9, prompt_lookup=3), GenerateConfig(9, assistant=random_model("llama").hf)):
        found = generate(model, prompt, valid, config, callback=called.append)
        assert torch.equal(found.ids_BN, wanted.ids_BN) and found.stop == wanted.stop and found.output_tokens == wanted.output_tokens
        if config == GenerateConfig(9):
            assert found.forwards == wanted.forwards and found.queries == wanted.queries
        else:
            assert all(a <= b for a, b in zip(found.forwards, wanted.forwards, strict=True))
            assert all(a > b for a, b in zip(found.queries, found.steps, strict=True))
    families.set_attention(model.hf, "sdpa", "cpu")  # this package's own: generate has transformers' for as long as it runs
    packing = model.hf.config._attn_implementation
    assert packing.startswith("cdlm_") and torch.equal(generate(model, prompt, valid, GenerateConfig(9)).ids_BN, wanted.ids_BN)
    assert model.hf.config._attn_implementation == packing
    assert [note.block for note in called] == [0] * 7, "once for the batch, once a row where there are drafts"
    assert sum(found.forwards) < sum(wanted.forwards) / 2
    with pytest.raises(ValueError, match="both given"):
        GenerateConfig(9, prompt_lookup=3, assistant=model.hf)


def test_what_a_run_drafts_with_is_what_the_recipe_says(tmp_path):
    """auto takes what pays on the recipe's card, null the paper's K."""
    path = write(tmp_path)
    model = families.load(tmp_path / "teacher", family="causal")
    shape = roofline.shape_of_config(model.hf.config.to_dict(), "here")
    most = roofline.best_proposals(shape, roofline.card("A100"), block=K, context=24, generate=16, size=4)
    for stated, wanted in ((None, K), (3, 3), ("auto", most)):
        text = "null" if stated is None else stated
        recipe = recipes.load(path, [f"decode.proposals={text}", "hardware=A100"])
        assert runs.proposals_of(recipe, model.hf.config) == wanted
        assert (runs.slow_proposals(recipe, model.hf.config) is None) == (most >= 1)
    assert most >= 1


@pytest.mark.parametrize(
    "changes, message",
    [
        (["decode.proposals=5"], "decode.proposals is 5; it must be between 1 and decode.block_length, 4"),
        (["decode.proposals=most"], "decode.proposals is 'most'; allowed: a number from 1 to 4, auto, null"),
        (["decode.proposals=auto"], "decode.proposals is auto; it needs hardware, a card of A100"),
        (["decode.proposals=1.5"], "decode.proposals is 1.5; it must be a whole number or text or null"),
        (["evaluate.proposals=[0]"], "evaluate.proposals is 0; it must be between 1 and"),
        (["evaluate.betas=[2.0]"], "evaluate.betas is 2.0; it must be between 0 and 1"),
        (["evaluate.draft_model=nowhere"], "evaluate.draft_model: no folder at"),
        (["evaluate.betas=[]"], "evaluate.betas is []; evaluate.methods has tidar_mix"),
        (["train.alpha=.nan"], "train.alpha is nan; it must be at least 0"),
        ([*AR, "decode.proposals=0"], "decode.proposals is 0; objective ar does not read it"),
        ([*AR, "evaluate.betas=[7.0]"], "evaluate.betas is [7.0]; objective ar does not read it"),
        (["evaluate.draft_model=null", "evaluate.methods=[assisted]"], "evaluate.methods has assisted; it needs evaluate.draft_model"),
        (["train.alpha=-1"], "train.alpha is -1.0; it must be at least 0"),
        (["train.objective=ar"], "train.alpha is 0.5; objective ar does not read it"),
        (["train.objective=ar", "train.alpha=1.0"], "evaluate.proposals is"),
        (["model=null"], "exactly one of model and scratch"),
        (["collect.num_prompts=3"], "collect: objective tidar trains on answers"),
        (["evaluate.methods=[student]"], "evaluate.methods is 'student'; allowed: autoregressive"),
        (["push.repo_id=a/b", "push.adapter_only=true"], "push.adapter_only is true; objective tidar exports the merged model alone"),
    ],
)
def test_a_bad_recipe_is_one_error(run, changes, message):
    with pytest.raises(ValueError) as caught:
        recipes.load(run[0], changes)
    assert message in str(caught.value)


def test_a_model_that_is_not_causal_is_refused(run, tmp_path, capsys):
    shutil.copytree(run[0].parent, tmp_path / "here", ignore=shutil.ignore_patterns("out"))
    recipe = tmp_path / "here" / run[0].name
    assert cli.main(["distill", str(recipe), "--set", "family=null", "--out", str(tmp_path / "out")]) == 2
    assert "objective tidar needs a causal model with shifted logits" in capsys.readouterr().err


@pytest.mark.parametrize("change, message", [
    ("evaluate.draft_model=other", "evaluate.draft_model: the tokenizer in"),
    ("decode.max_new_tokens=228", "data.max_prompt_tokens 24 and decode.max_new_tokens 228 are 258 positions with the masks and drafts"),
    ("model=stretched", "the model's rope_type is 'dynamic'; draft and verify needs positions that are the same"),
])  # fmt: skip
def test_what_can_not_draft_is_refused_before_any_work(run, tmp_path, capsys, change, message):
    """A draft model of other tokens; masks behind the model's last position; positions that depend on the length."""
    here = tmp_path / "here"
    shutil.copytree(run[0].parent, here, ignore=shutil.ignore_patterns("out"))
    for name in ("other", "stretched"):
        shutil.copytree(here / "teacher", here / name)
    stored = json.loads((here / "other" / "tokenizer.json").read_text())
    stored["model"]["vocab"]["one more"] = 1 + max(stored["model"]["vocab"].values())
    (here / "other" / "tokenizer.json").write_text(json.dumps(stored))
    config = json.loads((here / "stretched" / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    (here / "stretched" / "config.json").write_text(json.dumps(config))
    assert cli.main(["distill", str(here / run[0].name), "--set", change, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.glob("out/*"))


def test_the_cards_code_does_what_was_measured(run):
    """Its own number of proposals, and a plain prompt where the recipe has no chat template."""
    card = (run[1] / "export" / "README.md").read_text()
    assert f"SpeculateConfig({mini.BUDGET}, draft_length={K}, proposals={K})" in card and "apply_chat_template" in card
    given = {"base_model": None, "license": "mit", "tags": [], "datasets": [], "table": "", "lines": [], "threshold": None}
    stated = {"max_new_tokens": 8, "block_length": 4, "confidence_threshold": 0.9, "proposals": "auto"}
    plain = hub.card("x", report=None, decode=stated, objective="tidar", chat_template=False, **given)
    assert 'inputs = tokenizer("...", return_tensors="pt")' in plain and "apply_chat_template" not in plain
    assert "SpeculateConfig(8, draft_length=4)" in plain


def test_mean_drafts_that_stand():
    assert speculation.stood([0, 1, 3]) == 1.75 and speculation.stood(None) is None and speculation.stood([0, 0]) is None


# ---- a model trained with objective tidar as a teacher ---------------------------------------------------------------


def test_diffusion_mode_fills_a_block_behind_causal_text():
    """Three blocks by cached decoding, one slot a step, against forwards of [text | block]: the text causal, the block bidirectional."""
    model = random_model("llama", facts={"logit_shift": True, "prompt_attention": "causal", "block_length": 1, "draft_length": K})
    prompt, valid = random_prompts([5, 3])
    mode = model.diffusion_mode()
    assert (mode.facts.logit_shift, mode.facts.block_length, mode.facts.text_attention) == (False, K, "causal")
    found = decode(mode, prompt, valid, DecodeConfig(3 * K, K, tokens_per_step=1, stop_at_eos=False)).filled_BM
    for row in range(2):
        text = prompt[row][valid[row]]
        for _ in range(3):
            block = torch.full((K,), 1)
            for _ in range(K):
                length = len(text)
                horizon = torch.tensor([[*range(length), *[length + K - 1] * K]])
                seen = masks.clean(horizon, torch.arange(length + K)[None], torch.ones(1, length + K, dtype=torch.bool))
                with torch.no_grad():
                    logits = model.hf(input_ids=torch.cat([text, block])[None], attention_mask=masks.dense(seen)).logits[0, length:]
                probability = logits.softmax(dim=-1)
                probability[:, 1] = 0
                best, token = probability.max(dim=-1)
                place = int(best.masked_fill(block != 1, -1).argmax())
                block[place] = token[place]
            text = torch.cat([text, block])
        assert found[row].tolist() == text[-3 * K :].tolist()


def test_only_a_model_that_drafts_has_a_diffusion_mode():
    with pytest.raises(ValueError, match="states no draft_length"):
        random_model("llama").diffusion_mode()
    for bad in (0, True, "4"):
        with pytest.raises(ValueError, match="draft_length is"):
            Facts(mask_token_id=1, eos_token_ids=(2,), pad_token_id=0, draft_length=bad)


def test_a_tidar_model_teaches_a_block_causal_student(run, tmp_path):
    """collect, train, evaluate and export of objective cdlm, from the exported model; the student is a plain block diffusion LM."""
    folder = tmp_path / "here"
    shutil.copytree(run[0].parent, folder, ignore=shutil.ignore_patterns("out"))
    shutil.copytree(run[1] / "export", folder / "drafter")
    recipe = folder / "cdlm.yaml"
    stated = mini.values()
    stated |= {"model": "drafter", "name": "from-tidar"}
    stated["decode"]["block_length"] = K
    stated["evaluate"] |= {"methods": ["teacher", "student"]}
    recipe.write_text(yaml.safe_dump(stated))
    assert cli.main(["distill", str(recipe), "--out", str(tmp_path / "out")]) == 0
    student = families.load(tmp_path / "out" / "export")
    assert (student.facts.block_length, student.facts.draft_length, student.facts.text_attention) == (K, None, "block_causal")
    assert not student.facts.logit_shift and student.facts.prompt_attention == "causal"
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {row["method"] for row in report["results"]} == {"teacher", "student"}


def test_the_page_and_the_command_show_the_drafts(run, capsys):
    page = (run[1] / "report.html").read_text()
    assert "<h2>Draft and verify</h2>" in page and "transformers, smaller model drafts" in page
    assert cli.main(["evaluate", str(run[0]), "--out", str(run[1])]) == 0  # done already: the table again
    printed = capsys.readouterr().out
    assert "draft and verify in one forward: " in printed and "tokens a forward of 20.0 query tokens" in printed


def test_the_small_worlds_draft_model_is_a_quarter_and_helps():
    """Ten test questions: the text is that of the larger model, in well under half of its forwards."""
    from cdlm import data

    large, small = (families.load(TINY / name, family="causal") for name in ("ar", "ar-draft"))
    sizes = [sum(p.numel() for p in model.parameters()) for model in (large, small)]
    assert 3.5 < sizes[0] / sizes[1] < 4.5 and (TINY / "ar-draft" / "model.safetensors").stat().st_size < 1_000_000
    tokenizer = families.load_tokenizer(TINY / "ar", large.facts)
    rows = [json.loads(line)["prompt"] for line in (TINY / "test.jsonl").read_text().splitlines()[:10]]
    prompt, valid = data.pad_left([data.prompt_ids(tokenizer, text, chat_template=True) for text in rows], 0)
    plain = speculate(large, prompt, valid, SpeculateConfig(64, 1))
    helped = generate(large, prompt, valid, GenerateConfig(64, assistant=small.hf))
    assert torch.equal(helped.ids_BN, plain.ids_BN)
    assert sum(helped.forwards) < 0.5 * sum(plain.forwards)
