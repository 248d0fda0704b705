"""What a plan for several devices says: bytes by hand, what autograd really keeps, and hours beside the paper's."""

import re

import pytest
import torch
from conftest import ROOT, random_hf

from cdlm import cli, memory
from cdlm.memory import Model, training

RECIPES = ROOT / "recipes"
MODEL = Model(parameters=100, weights=200.0, trained=40.0, layer=20.0, ends=30.0, kept=7.0, layer_kept=3.0)


@pytest.mark.parametrize(
    "engine, gradients, optimizer, weights, gathered, load",
    [("one_gpu", 40, 80, 200, 0, 0), ("ddp", 80, 80, 200, 0, 0), ("fsdp2", 10, 20, 50, 2 * 20 + 30, 200), ("zero3", 10, 20, 50, 200, 200)],
)
def test_training_by_hand(engine, gradients, optimizer, weights, gathered, load):
    """Four devices, two forwards of 7 bytes and a layer's 3 computed again. Losses: 5 x 6 logits, 4 bytes, 9 copies. ZeRO-3 may hold 1e9
    parameters whole, which is all of these."""
    held = training(MODEL, engine, 4, forwards=2, teacher_head=11.0, slots=5, vocab=6)
    wanted = {
        "weights": weights, "gradients": gradients, "optimizer": optimizer, "activations": 17, "losses": 1080, "teacher's head": 11,
        **({"gathered": gathered} if gathered else {}),
    }  # fmt: skip
    assert held.parts == wanted and held.load == load and held.total == sum(wanted.values())


def test_what_is_loaded_may_be_the_most():
    held = training(Model(10**10, 2e10, 0.0, 1.0, 1.0), "fsdp2", 8, forwards=1, teacher_head=0.0, slots=1, vocab=1)
    assert held.total == held.load == 2e10


def test_losses_do_not_grow_with_vocabulary_times_slots():
    held = [training(MODEL, "ddp", 1, forwards=1, teacher_head=0.0, slots=slots, vocab=256_000).parts["losses"] for slots in (512, 4096)]
    assert held[0] == held[1] == 9 * 4 * 2**23


def trained(hf, only: str | None = None):
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(only is None or only in name)
    return hf


def test_the_meta_device_keeps_what_a_real_one_keeps():
    """As many bytes on the meta device as of real tensors, where attention's scores are left out of both; twice as many for twice the rows
    or tokens; fewer where fewer weights are trained."""
    real, meta = trained(random_hf("llama")), trained(random_hf("llama").to("meta"))
    assert {p.device.type for p in meta.parameters()} == {"meta"}
    one = memory.kept_for_backward(meta, 1, 24)
    assert memory.kept_for_backward(meta, 2, 24) == pytest.approx(2 * one, rel=0.02)  # position embeddings are of all rows
    assert memory.kept_for_backward(meta, 1, 48) == pytest.approx(2 * one, rel=0.02)
    assert memory.kept_for_backward(real, 1, 24) == pytest.approx(one, rel=0.06)  # a CPU's fused attention keeps the mask as floats too
    assert memory.kept_for_backward(trained(meta, "q_proj"), 1, 24) < 0.9 * one


def test_gradient_checkpointing_keeps_inputs_of_layers():
    """2 layers x 24 tokens x 32 values of 4 bytes, and half of what two layers keep."""
    hf = trained(random_hf("llama").to("meta"))
    plain, checkpointed = (memory.measure(hf, 1, 24, checkpointing=on) for on in (False, True))
    assert (checkpointed.kept, checkpointed.layer_kept) == (2 * 24 * 32 * 4, plain.kept / 2)
    assert plain.layer_kept == 0 and plain.weights == plain.trained == 4 * plain.parameters


def plan(capsys, name: str, *arguments: str) -> str:
    assert cli.main(["plan", str(RECIPES / f"{name}.yaml"), "--out", "nowhere", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("name", "published"), [("dream-7b-instruct", 32), ("llada-8b-instruct", 64)])
@pytest.mark.parametrize("gpus", [4, 8])
def test_device_hours_of_training_are_near_the_papers(name, published, gpus, capsys):
    """arXiv 2511.19269: 4 A100 for 8 and 16 hours. The plan of the recipe as it is says which share of the roofline it takes."""
    text = plan(capsys, name, "--gpus", str(gpus), "--card", "A100")
    found = re.search(r"^train +(?:[\d.]+ GB (?:fits|too much) +){4}([\d.]+) +([\d.]+)", text, re.MULTILINE)
    hours, device_hours = map(float, found.groups())
    assert published / 1.5 < device_hours < published * 1.5 and device_hours == pytest.approx(gpus * hours, rel=0.02)
    assert f"{gpus} A100" in text and "at 50% of its roofline" in text


def test_a_plan_for_eight_cards(capsys):
    """8.02 G parameters in bfloat16 are 16.0 GB, and an eighth of that with the adapter's under the engines that shard. LoRA of rank 64 on
    seven layers: 32 x 64 x (4 x 8192 + 3 x 16384) = 168 M in fp32."""
    text = plan(capsys, "llada-8b-instruct", "--gpus", "8", "--card", "MI300X")
    lines = {line.split(":")[0]: line for line in text.splitlines() if line.startswith("train, ")}
    assert "weights 16.7 GB, gradients 1.34 GB, optimizer 1.34 GB" in lines["train, ddp"]
    assert "weights 2.09 GB, gradients 83.9 MB, optimizer 168 MB" in lines["train, fsdp2"]
    assert "loading 16.7 GB" in lines["train, zero3"] and "teacher's head 1.04 GB" in lines["train, one_gpu"]
    stages = [line.split()[0] for line in text.split("stage ")[1].splitlines()[1:5]]
    assert stages == ["collect", "train", "evaluate", "export"]
    assert "8 of them, training 4 x 2 rows a step on each" in text
    assert re.search(r"^collect .* 63\.\d GB$", text, re.MULTILINE)  # 30,000 x 256 x 4096 x 2 = 62.9 GB of hidden rows, and 0.2 of tokens


def test_a_plan_of_canvases(capsys):
    """7,500 canvases of at most 48 steps, each 256 slots of 64 values of 2 bytes, 64 ids of 4 and a total of 4: 35.8 GB."""
    text = plan(capsys, "diffusiongemma-26b-a4b", "--gpus", "8", "--card", "H200")
    assert 7500 * 48 * 256 * (64 * 6 + 4) == 35_758_080_000
    assert re.search(r"^collect .* 35\.8 GB$", text, re.MULTILINE) and "teacher's head" not in text  # canvases have logits


def test_the_line_of_a_card_is_of_the_table_of_devices(capsys):
    """There is one count: without --gpus its line of collecting and training, with them its table, which says it for one device too."""
    table = plan(capsys, "tiny", "--gpus", "1", "--card", "MI300X")
    assert cli.main(["distill", str(RECIPES / "tiny.yaml"), "--out", "nowhere", "--dry-run", "--hardware", "MI300X"]) == 0
    line = capsys.readouterr().out
    collect, train = (re.search(rf"^{stage} +([\d.]+ [kMG]?B) fits", table, re.MULTILINE).group(1) for stage in ("collect", "train"))
    assert f"memory      about collect {collect}, train {train} of a card's 192 GB" in line and "memory      about" not in table


def test_the_same_by_dry_run(capsys):
    assert cli.main(["train", str(RECIPES / "tiny.yaml"), "--out", "nowhere", "--dry-run", "--gpus", "2", "--card", "H100"]) == 0
    text = capsys.readouterr().out
    assert "2 H100" in text and "fsdp2" in text and "collect " not in text.split("memory      of one device")[1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["plan", "--gpus", "0"], "--gpus is 0; it must be at least 1"),
        (["plan", "--gpus", "7"], "7 processes can't share evenly"),
        (["plan", "--card", "H1"], "unknown hardware 'H1'; allowed: A100"),
        (["train", "--gpus", "2"], "--gpus belongs to a plan"),
        (["ablate", "--dry-run", "--gpus", "2"], "ablate has no plan for several devices"),
    ],
)
def test_bad_flags_are_refused(arguments, said, capsys):
    command, *flags = arguments
    assert cli.main([command, str(RECIPES / "dream-7b-instruct.yaml"), "--out", "nowhere", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_mixture_of_experts_is_estimated(capsys):
    """Its routing can't run without values; the plan is made all the same."""
    text = plan(capsys, "llada2-mini", "--gpus", "2", "--card", "H100")
    assert re.search(r"train, ddp: weights .* activations [\d.]+ GB", text)


def test_parameters_are_counted_once():
    weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    assert memory.bytes_of([weight, weight]) == 8
