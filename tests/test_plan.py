"""What --dry-run says of the real recipes, offline: parameters, bytes and steps by hand, hours against the paper's."""

import re
import shlex
import socket

import pytest
from conftest import ROOT, TINY

from cdlm import cli, plan, recipe, roofline
from cdlm.families.shapes import SHAPES
from cdlm.runs import Run

RECIPES = ROOT / "recipes"


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Nothing may open a connection."""

    def refuse(*args, **kwargs):
        raise AssertionError("a dry run opened a socket")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def dense(layers, hidden, heads, kv_heads, head_dim, mlp, vocab, *, bias=0, head_norms=0):
    """Parameters of a gated dense decoder with untied embeddings: per layer q, k, v, o, three MLP matrices, two norms."""
    attention = hidden * head_dim * 2 * (heads + kv_heads)
    return layers * (attention + 3 * hidden * mlp + 2 * hidden + bias + head_norms) + 2 * vocab * hidden + hidden


# What the model cards round: 7.62, 8.02, 4.41 (Qwen3-4B and a head of its own), 7.62.
PARAMETERS = {
    "dream-7b-instruct": dense(28, 3584, 28, 4, 128, 18944, 152064, bias=(28 + 2 * 4) * 128),
    "llada-8b-instruct": dense(32, 4096, 32, 32, 128, 12288, 126464),
    "sdar-4b-chat": dense(36, 2560, 32, 8, 128, 9728, 151936, head_norms=2 * 128),
    "tidar-qwen2.5-1.5b": dense(28, 1536, 12, 2, 128, 8960, 151936, bias=(12 + 2 * 2) * 128) - 151936 * 1536,  # tied
    "tidar-qwen3-8b": dense(36, 4096, 32, 8, 128, 12288, 151936, head_norms=2 * 128),
    "fast-dllm-v2-7b": dense(28, 3584, 28, 4, 128, 18944, 152064, bias=(28 + 2 * 4) * 128),
    # 19 layers of 256 experts, a shared one, a router and its bias (a buffer, not counted); the first layer's MLP is dense.
    "llada2-mini": (
        20 * (2048 * 128 * 2 * (16 + 4) + 2 * 2048 + 2 * 128) + 3 * 2048 * 5120 + 19 * (257 * 3 * 2048 * 512 + 256 * 2048)
        + 2 * 157184 * 2048 + 2048
    ),
}  # fmt: skip
NATIVE = {
    "dream-7b-instruct": "dream as qwen2", "llada-8b-instruct": "llada as llama", "sdar-4b-chat": "sdar as qwen3",
    "tidar-qwen2.5-1.5b": "causal as qwen2", "tidar-qwen3-8b": "causal as qwen3",
    "fast-dllm-v2-7b": "fast_dllm_v2 as qwen2", "llada2-mini": "llada2_moe as glm4_moe",
}  # fmt: skip


NAMED = {"tidar-qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B", "tidar-qwen3-8b": "Qwen/Qwen3-8B-Base"}


def dry(capsys, name: str, *arguments: str) -> list[str]:
    assert cli.main(["distill", str(RECIPES / f"{name}.yaml"), "--out", "nowhere", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def line(lines: list[str], start: str) -> str:
    (found,) = [text for text in lines if text.startswith(start)]
    return found


def hours(text: str) -> float:
    """The rough time that a line ends with, in hours."""
    number, unit = re.search(r"roughly (\d+(?:\.\d+)?) (s|min|h)\b", text).groups()
    return float(number) / {"s": 3600, "min": 60, "h": 1}[unit]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if not name.startswith("tidar")])
def test_a_plan_without_network_model_tokenizer_or_data(name, capsys):
    lines = dry(capsys, name)
    r = recipe.load(RECIPES / f"{name}.yaml")
    assert line(lines, "model") == f"model       {r.model}: {NATIVE[name]}, {PARAMETERS[name]:,} parameters, bfloat16, cuda"
    missing = [text for text in lines if text.startswith("not here")]
    assert missing[0] == f"not here    the model; its sizes are those of {RECIPES / name / 'config.json'}"
    prompts = 15000 if name == "llada-8b-instruct" else 7500
    assert r.data.prompts in missing[1] and f"{prompts} questions, as the recipe says" in missing[1]
    assert r.data.test in missing[2] and "1319 questions, as the recipe says" in missing[2]
    assert f"{2 * prompts} trajectories ({prompts} prompts x 2 temperatures)" in line(lines, "collect")
    steps = prompts // 2  # 16 x 2 prompts / 64
    assert f"{steps} steps of 64 rows (16.0 epochs), 3 forwards a step" in line(lines, "train")
    assert f"export      nowhere/export, {PARAMETERS[name] * 2 / 2**20:.1f} MiB" in lines
    parts = [hours(line(lines, stage)) for stage in ("collect", "train", "evaluate")]
    assert min(parts) > 0 and hours(line(lines, "in all")) == pytest.approx(sum(parts), abs=0.2)
    assert "of one A100 (312 TFLOP/s, 2.04 TB/s) at 50% of its roofline" in line(lines, "in all")


@pytest.mark.parametrize("name, card, queries", [("tidar-qwen2.5-1.5b", "H100", 64), ("tidar-qwen3-8b", "H200", 64)])
def test_a_plan_of_draft_and_verify(name, card, queries, capsys):
    """Nothing is collected; M is what is free on the card, and a forward of the training holds the answer's masks beside the text."""
    lines = dry(capsys, name)
    assert line(lines, "model") == f"model       {NAMED[name]}: {NATIVE[name]}, {PARAMETERS[name]:,} parameters, bfloat16, cuda"
    count = queries // 16 - 1
    assert line(lines, "decoding") == f"decoding    512 tokens, 16 drafts and {count} proposals a forward: {queries} query tokens"
    assert "tidar, all parameters: 59 steps of 512 rows (4.0 epochs), 1 forwards a step" in line(lines, "train")  # 4 x 7,500 / 512
    assert f"proposals 16, {count}; beta 0, 0.5" in line(lines, "evaluate") and not [text for text in lines if text.startswith("collect")]
    assert f"of one {card} " in line(lines, "in all")
    found = plan.Plan(Run(recipe.load(RECIPES / f"{name}.yaml"), ROOT / "nowhere"))
    _, (training,), _ = found._train(found.run)
    assert training.passes == pytest.approx(3 * (1024 + 512) / 1024)


def test_a_plan_of_a_model_with_canvases(capsys):
    """25.2B and 3.8B are of layers and tables, counted here layer by layer; the weights are those in bfloat16 and a vision tower.
    A step stores 256 slots of 64 values of 2 bytes, 64 ids of 4 and a total of 4; 7,500 canvases take at most 48."""
    lines = dry(capsys, "diffusiongemma-26b-a4b")
    d = 2816
    sliding, full = d * 256 * 2 * (16 + 8), d * 512 * (2 * 16 + 2)
    experts, mlp, router = 3 * d * 704, 3 * d * 2112, d * 128
    total = 262144 * d + 25 * sliding + 5 * full + 30 * (128 * experts + mlp + router)
    active = total - 30 * 120 * experts
    assert (round(total / 1e9, 1), round(active / 1e9, 1)) == (25.2, 3.8)
    assert "25.2B parameters in layers and tables, 3.8B active a token, and 0.02B of self-conditioning" in "\n".join(lines)
    memory = re.search(r"about collect ([\d.]+) GB, train ([\d.]+) GB of a card's 141 GB; weights ([\d.]+) GB", line(lines, "memory"))
    collect, train, weights = (float(number) for number in memory.groups())
    assert total * 2 / 1e9 < weights < 1.02 * total * 2 / 1e9 and weights < collect < 141 and weights < train < 141
    assert "in 1 canvases of 256, each in at most 48 steps; student 16" in line(lines, "decoding")
    size = 7500 * 48 * 256 * (64 * 6 + 4)
    assert f"at most {size / 2**30:.3f} GiB ({size:,} bytes)" in line(lines, "collect")
    assert "1875 steps of 64 rows (16.0 epochs), 3 forwards a step" in line(lines, "train")  # 16 x 7,500 / 64: a prompt, a trajectory
    parts = [hours(line(lines, stage)) for stage in ("collect", "train", "evaluate")]
    assert min(parts) > 0 and hours(line(lines, "in all")) == pytest.approx(sum(parts), abs=0.2)


# 15,000 x 256 rows of the model's width in 16 bits; the paper: "25-30 GiB per 15k samples", 25.6 and 29.3.
@pytest.mark.parametrize(("name", "width", "gib"), [("dream-7b-instruct", 3584, 25.6), ("llada-8b-instruct", 4096, 29.3)])
def test_the_papers_trajectory_bytes(name, width, gib, capsys):
    size = 15000 * 256 * width * 2
    lines = dry(capsys, name, "--set", "collect.num_prompts=7500")
    assert f"{size / 2**30:.3f} GiB ({size:,} bytes) of hidden rows" in line(lines, "collect")
    assert round(size / 2**30, 1) == gib


# The paper's training: about 32 hours of A100 for 15,000 trajectories of its 7B model, 64 for 30,000 of its 8B model.
@pytest.mark.parametrize(("name", "published"), [("dream-7b-instruct", 32), ("llada-8b-instruct", 64)])
def test_hours_of_training_are_near_the_papers(name, published, capsys):
    found = hours(line(dry(capsys, name), "train"))
    assert 0.7 * published < found < 1.3 * published


def test_hours_by_hand():
    """A forward of 2 rows of 512 + 256 tokens costs the sum of its operators; with LoRA a backward as much as a forward."""
    r = recipe.load(RECIPES / "dream-7b-instruct.yaml")
    card = roofline.HARDWARE["A100"]
    found = plan.Plan(Run(r, ROOT / "nowhere"))
    operators = roofline.operators(SHAPES["dream-7b"], "dlm", block=32, batch=2, context=512, generate=256)
    forward = sum(op.seconds(card) for op in operators)
    work = [plan.Work(10, 2, passes=3)]
    assert found.seconds(work, 512) == pytest.approx(10 * 3 * forward / plan.EFFICIENCY)
    _, (training,), _ = found._train(found.run)
    assert (training.forwards, training.rows, training.passes) == (3750 * 32, 2, 2 * 2 + 1)  # y and noise forth and back, y* forth


# A teacher that is a block diffusion model decodes as one: against a cache, in its own blocks, the student's last block whole.
@pytest.mark.parametrize(("name", "mode", "block", "forwards"), [
    ("dream-7b-instruct", "dlm", 32, 256), ("llada2-mini", "block", 32, 256 + 31), ("sdar-4b-chat", "block", 4, 256 + 3),
])
def test_a_teachers_forwards_are_those_of_its_own_decoding(name, mode, block, forwards):
    found = plan.Plan(Run(recipe.load(RECIPES / f"{name}.yaml"), ROOT / "nowhere"))
    words, (work,), _ = found._collect(found.run)
    assert (work.mode, work.block, work.rows) == (mode, block, 32) and work.forwards == forwards * 15000 / 32
    assert f"about {forwards} forwards each" in words and f"({15000 * forwards * found.config.hidden_size * 2:,} bytes)" in words


def test_a_students_block_must_be_made_of_the_teachers(capsys):
    assert cli.main(["distill", str(RECIPES / "llada2-mini.yaml"), "--dry-run", "--set", "decode.block_length=16"]) == 2
    assert "decode.block_length is 16; the teacher decodes in blocks of 32" in capsys.readouterr().err


def test_a_loss_that_is_off_and_all_parameters_change_the_work():
    def passes(*overrides):
        found = plan.Plan(Run(recipe.load(RECIPES / "dream-7b-instruct.yaml", list(overrides)), ROOT / "nowhere"))
        return found._train(found.run)[1][0].passes

    assert passes("train.dlm_weight=0") == 1 * 2 + 1
    assert passes("train.consistency_weight=0", "train.dlm_weight=0") == 2
    assert passes("train.lora=null") == 2 * 3 + 1


def test_another_card(capsys):
    first, second = (hours(line(dry(capsys, "dream-7b-instruct", "--hardware", card), "collect")) for card in ("a100", "mi300x"))
    assert 3 < first / second < 5  # bound by compute: 1307.4 / 312 = 4.2
    assert cli.main(["distill", str(RECIPES / "dream-7b-instruct.yaml"), "--dry-run", "--hardware", "A1000"]) == 2
    assert "unknown hardware 'A1000'; allowed: A100, H100" in capsys.readouterr().err
    assert cli.main(["distill", str(RECIPES / "dream-7b-instruct.yaml"), "--dry-run", "--set", "hardware=A1000"]) == 2
    assert "unknown hardware 'A1000'" in capsys.readouterr().err
    assert cli.main(["distill", str(RECIPES / "tiny.yaml"), "--hardware", "A100"]) == 2
    assert "--hardware is the card of a plan's times; it goes with --dry-run" in capsys.readouterr().err


def test_without_a_card_a_gpus_time_is_not_guessed(capsys):
    lines = dry(capsys, "dream-7b-instruct", "--set", "hardware=null")
    assert line(lines, "in all").startswith("in all      no time: device is cuda; name a card with --hardware, one of A100")
    assert not any("roughly" in text for text in lines)


def test_an_unknown_number_of_questions_is_said(capsys):
    lines = dry(capsys, "dream-7b-instruct", "--set", "evaluate.num_prompts=null")
    assert "how many questions the recipe does not say, so none count" in [t for t in lines if t.startswith("not here")][2]
    assert line(lines, "evaluate").startswith("evaluate    0 questions")


def test_a_budget_longer_than_the_model_is_refused_offline(capsys):
    arguments = ["distill", str(RECIPES / "llada-8b-instruct.yaml"), "--dry-run", "--set", "decode.max_new_tokens=3840"]
    assert cli.main(arguments) == 2
    assert "are 4352 positions; the model has 4096" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "named"), [
    ("config=nowhere.json", "config: no file at"),
    ("train.lora.targets=[attn_out]", "train.lora.targets names ['attn_out']; this model's linear layers: down_proj"),
])
def test_a_bad_value_of_a_real_recipe_is_refused_offline(value, named, capsys):
    assert cli.main(["distill", str(RECIPES / "llada-8b-instruct.yaml"), "--dry-run", "--set", value]) == 2
    assert named in capsys.readouterr().err


# ---- a stage's own plan, and the ablation's ---------------------------------------------------------------------------


STAGE_LINES = ("collect", "train", "evaluate", "export", "ablation")


def starts(text: str) -> list[str]:
    return [word for word in (row.split()[0] for row in text.splitlines()) if word in STAGE_LINES]


@pytest.mark.parametrize("stage", ["collect", "train", "evaluate", "export"])
def test_a_stage_prints_its_own_plan(stage, capsys):
    assert cli.main([stage, str(RECIPES / "smoke.yaml"), "--out", "nowhere", "--dry-run"]) == 0
    assert starts(capsys.readouterr().out) == [stage]


def test_a_stage_that_a_recipe_has_not(capsys):
    assert cli.main(["collect", str(RECIPES / "tiny-teacher.yaml"), "--dry-run"]) == 2
    assert "this recipe has no collect stage" in capsys.readouterr().err


def test_the_plan_of_the_ablation_is_its_four_trainings(capsys):
    """Forwards a step of the four: y; y and y*; y and y*; y, y* and noise."""
    assert cli.main(["ablate", str(RECIPES / "smoke.yaml"), "--out", "nowhere", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert starts(printed) == ["collect", *["ablation", "train", "evaluate"] * 4]
    names = re.findall(r"^ablation    (.*) -> nowhere/ablation/", printed, re.MULTILINE)
    assert names == ["distillation only", "consistency only", "distillation and consistency", "all three"]
    assert re.findall(r"12 steps of 16 rows .*, (\d) forwards a step", printed) == ["1", "2", "2", "3"]
    assert all("24 questions, student; " in text for text in printed.splitlines() if text.startswith("  evaluate"))


def test_the_plan_of_an_ablation_that_can_not_be_made(capsys):
    assert cli.main(["ablate", str(RECIPES / "smoke.yaml"), "--dry-run", "--set", "train.dlm_weight=0"]) == 2
    assert "train.dlm_weight is 0: the ablation has no weight to give it" in capsys.readouterr().err
    assert cli.main(["ablate", str(RECIPES / "tiny-teacher.yaml"), "--dry-run"]) == 2
    assert "ablate takes a recipe with train.objective cdlm; this one has mdlm" in capsys.readouterr().err


def test_a_scratch_model_is_counted(capsys):
    arguments = ["distill", str(RECIPES / "tiny-teacher.yaml"), "--dry-run", "--hardware", "h100", "--set", "train.num_examples=90"]
    assert cli.main(arguments) == 0
    printed = capsys.readouterr().out
    assert f"model       {TINY / 'scratch' / 'config.json'}: llama, 870,016 parameters, float32, cpu" in printed
    assert starts(printed) == ["train", "evaluate", "export"] and "of one H100" in printed


def test_questions_that_are_not_counted_do_not_divide(capsys):
    """An objective that trains on answers, its questions on the Hub and no number of them in the recipe."""
    assert cli.main(["distill", str(RECIPES / "tiny-a2d.yaml"), "--dry-run", "--set", "data.prompts=hub:a/b@main"]) == 0
    assert "1400 steps of 32 rows (of rows that are not counted here)" in capsys.readouterr().out


def test_the_later_stages_in_a_header_are_planned_before_the_first_has_run(capsys, monkeypatch):
    """The commands of the recipe's own header, each with --dry-run, from the repository's folder; nothing is fetched."""
    monkeypatch.chdir(ROOT)
    header = [line[1:].strip() for line in (RECIPES / "zaya1-8b-tidar.yaml").read_text().splitlines() if line.startswith("#")]
    commands = []
    for line in header:
        if line.startswith("cdlm distill ") and "--set" in line:
            commands.append(line)
        elif line.startswith("--set "):
            commands[-1] += " " + line
    assert len(commands) == 2 and all(command.count("--set") >= 4 for command in commands)
    for command, budget in zip(commands, (130016, 4096), strict=True):
        assert cli.main([*shlex.split(command)[1:], "--dry-run"]) == 0
        printed = capsys.readouterr().out
        assert "not here    the model; its sizes are those of" in printed
        assert f"decoding    {budget} tokens, 16 drafts and 5 proposals" in printed
    assert cli.main([*shlex.split(commands[0])[1:], "--dry-run", "--set", "decode.max_new_tokens=130032"]) == 2
    assert "131075 positions with the masks and drafts behind them" in capsys.readouterr().err


def test_what_one_process_does_alone_takes_as_long_on_eight_devices():
    found = [plan.Plan(Run(recipe.load(RECIPES / "dream-7b-instruct.yaml"), ROOT / "nowhere"), gpus=gpus) for gpus in (1, 8)]
    shared, alone = ([plan.Work(10, 2, alone=on)] for on in (False, True))
    one, eight = ([p.seconds(work, 512) for work in (shared, alone)] for p in found)
    assert one[0] == one[1] == eight[1] == pytest.approx(8 * eight[0])


def test_bytes_of_an_adapters_training_by_hand():
    """An adapter and its Adam state, in two checkpoints at once, and the student, in fp32. Rank 32 on seven targets of 28 layers."""
    found = plan.Plan(Run(recipe.load(RECIPES / "dream-7b-instruct.yaml"), ROOT / "nowhere"))
    wide, key, inner = 3584, 512, 18944
    trained = 28 * 32 * (2 * (wide + wide) + 2 * (wide + key) + 3 * (wide + inner))
    assert found.disk("train") == pytest.approx((2 * 3 + 1) * 4 * trained)
