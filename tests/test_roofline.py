"""The roofline against the paper's numbers, against hand counts, and against real weights."""

import json

import pytest
from conftest import TINY

from cdlm import cli, roofline
from cdlm.families.shapes import SHAPES

# CDLM, arXiv 2511.19269, arithmetic intensity on A100 in FLOP a byte; prompt 512, generation 256.
PAPER = [
    ("llama-3.1-8b", "ar", 32, {1: 1.0, 2: 2.0, 4: 4.0, 8: 7.8, 128: 71.3}),
    ("llada-8b", "dlm", 32, {1: 438.9, 2: 619.2, 4: 779.3, 64: 1028.6, 128: 1039.7}),
    ("llada-8b", "block", 4, {1: 4.0}),
    ("llada-8b", "block", 16, {1: 15.8}),
    ("llada-8b", "block", 32, {1: 31.1}),
]


@pytest.mark.parametrize(
    "name, mode, block, batch, wanted", [(n, m, b, batch, ai) for n, m, b, found in PAPER for batch, ai in found.items()]
)
def test_the_papers_intensities_within_a_tenth(name, mode, block, batch, wanted):
    ops = roofline.operators(SHAPES[name], mode, block=block, batch=batch, context=512, generate=256)
    assert roofline.intensity(ops) == pytest.approx(wanted, rel=0.1)


def test_the_papers_ridge():
    assert roofline.HARDWARE["A100"].ridge == pytest.approx(153.0, abs=0.1)


def test_block_proposals_of_zyphra():
    """"About 3" on MI300X and "about 5" on MI355X: ridge 246.7 / (4 x 16) = 3.85, and 314.6 / 64 = 4.92."""
    shape = SHAPES["zaya1-8b"]
    assert roofline.attention_proposals(shape, roofline.HARDWARE["MI300X"], 16) == pytest.approx(1307.4 / 5.3 / 64)
    assert int(roofline.attention_proposals(shape, roofline.HARDWARE["MI300X"], 16)) == 3
    assert round(roofline.attention_proposals(shape, roofline.HARDWARE["MI355X"], 16)) == 5


def test_distinct_experts():
    assert roofline.distinct_experts(16, 1, 16) == pytest.approx(10.3, abs=0.01)  # 16 (1 - (15/16)^16)
    assert roofline.distinct_experts(16, 1, 1) == pytest.approx(1.0)
    assert roofline.distinct_experts(128, 8, 1) == pytest.approx(8.0)


def test_a_forward_counted_by_hand():
    """1 layer, width 4, 2 heads of 2, 1 key-value head, MLP 6, vocabulary 10; 3 queries against 5 + 2/2 = 6 cached keys."""
    shape = roofline.Shape(layers=1, hidden=4, heads=2, kv_heads=1, head_dim=2, intermediate=6, vocab=10)
    ops = {op.name: op for op in roofline.operators(shape, "block", block=3, batch=1, context=5, generate=2)}
    assert ops["attention: q"].flop == 2 * 3 * 4 * 4 and ops["attention: q"].bytes == 2 * (16 + 3 * 8)
    assert ops["attention: k"].flop == 2 * 3 * 4 * 2 and ops["attention: k"].bytes == 2 * (8 + 3 * 6)
    assert ops["attention: scores and values"].flop == 4 * 3 * 9 * 4
    assert ops["attention: scores and values"].bytes == 2 * (2 * 9 * 2 + 2 * 3 * 4)
    assert ops["mlp: down"].flop == 2 * 3 * 6 * 4 and ops["mlp: product"].bytes == 2 * 3 * 18
    assert ops["lm_head"].flop == 2 * 3 * 4 * 10 and ops["lm_head"].bytes == 2 * (40 + 3 * 14)
    assert shape.parameters == 4 * 2 * 2 * 3 + 3 * 4 * 6 + 2 * 40
    assert shape.kv_bytes(7, 2) == 2 * 1 * 2 * 2 * 7


@pytest.mark.parametrize("name, billions", [
    ("llada-8b", 8.02), ("dream-7b", 7.62), ("llama-3.1-8b", 8.03), ("qwen2.5-7b", 7.62), ("llada2-mini", 16.3), ("zaya1-8b", 8.8),
    ("diffusiongemma-26b-a4b", 25.2),
])  # fmt: skip
def test_parameters_are_those_of_the_model_cards(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_config_is_counted_as_the_real_model_is():
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = roofline.shape_of_config(json.loads((TINY / "teacher" / "config.json").read_text()), "config.json")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(TINY / "teacher"))
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.parameters == matrices


def test_a_moe_config_is_counted_as_the_real_model_is():
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False,
    )
    shape = roofline.shape_of_config(config.to_dict(), "config.json")
    assert shape.parameters == sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters() if p.ndim > 1)
    assert shape.experts == 6 and shape.experts_per_token == 2


def test_layers_with_heads_of_their_own_are_counted_as_the_real_model_is():
    """Matrices of the class itself, norms and scales aside: full layers with their heads and no value projection, an MLP beside the
    experts, self-conditioning. From its config as transformers writes it, and as people write it."""
    import dgemma

    hf = dgemma.random_hf()
    matrices = sum(p.numel() for name, p in hf.named_parameters() if p.ndim > 1 and "vision" not in name)
    written = json.loads(hf.config.to_json_string(use_diff=False))
    by_hand = {**written, "text_config": {**written["text_config"], "global_head_dim": 16, "num_global_key_value_heads": 1}}
    del by_hand["text_config"]["per_layer_config"]
    for config in (written, by_hand):
        shape = roofline.shape_of_config(config, "config.json")
        assert shape.parameters == matrices and shape.conditioning == 48
        assert shape.parameters - shape.active_parameters == 4 * 2 * 3 * 32 * 16  # two of four experts in each of four layers
        sliding, full = 2 * 8 * min(100, 16), 16 * 100
        assert shape.kv_bytes(100, 2) == 2 * 2 * (3 * sliding + full)
    named = roofline.operators(shape, "block", block=8, batch=1, context=64, generate=16)
    assert sum(op.flop for op in named if op.name == "attention: v") == 3 * 2 * 8 * 32 * 16


def test_a_sliding_layer_keeps_its_window():
    shape = roofline.Shape(layers=6, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=8, vocab=9, sliding_layers=5, window=100)
    assert shape.kv_bytes(1000, 2) == 2 * 4 * 2 * (1000 + 5 * 100)


def test_a_sliding_layer_of_a_vanilla_model_sees_its_window_too():
    shape = roofline.Shape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=8, vocab=9, sliding_layers=1, window=100)
    ops = {op.name: op for op in roofline.operators(shape, "dlm", block=8, batch=1, context=900, generate=100)}
    full, near = ops["attention: scores and values"], ops["attention: scores and values, sliding"]
    assert full.flop == 4 * 1000 * 1000 * 8 and near.flop == 4 * 1000 * 100 * 8 and near.bytes == full.bytes


def test_the_largest_memory_bound_batch_is_the_last_one_under_the_ridge():
    shape, card, given = SHAPES["llada-8b"], roofline.HARDWARE["A100"], {"block": 32, "context": 512, "generate": 256}
    batch = roofline.largest_memory_bound_batch(shape, card, "block", **given)
    found = [roofline.intensity(roofline.operators(shape, "block", batch=b, **given)) for b in (batch, batch + 1)]
    assert found[0] < card.ridge <= found[1]
    assert roofline.largest_memory_bound_batch(shape, card, "dlm", **given) == 0


def test_what_a_line_says_follows_from_the_operators():
    shape, card = SHAPES["llada2-mini"], roofline.HARDWARE["MI300X"]
    found = roofline.analyse(shape, card, "block", batch=2, tpf=4.0)
    ar = roofline.analyse(shape, card, "ar", batch=2)
    assert found["seconds_per_forward"] == pytest.approx(sum(op["seconds"] for op in found["operators"]))
    assert found["tokens_per_second"] == pytest.approx(2 * 4.0 / found["seconds_per_forward"])
    assert found["speedup_over_ar"] == pytest.approx(found["tokens_per_second"] / ar["tokens_per_second"])
    assert found["bound"] == "memory" and ar["speedup_over_ar"] == pytest.approx(1.0)
    assert roofline.analyse(SHAPES["llada-8b"], roofline.HARDWARE["A100"], "block", batch=100000)["fits"] is False


def test_free_proposals_by_hand():
    """A card of 100 FLOP a byte, 4 query heads a key-value head, a long cache: attention of q queries does about 4 q FLOP a byte, so 25
    queries are free. In blocks of 5 that is one of drafts and 4 of proposals; the weights' products reach the ridge at 100 queries."""
    shape = roofline.Shape(layers=2, hidden=8192, heads=64, kv_heads=16, head_dim=128, intermediate=8192, vocab=8192)
    card = roofline.Hardware("hand", 100e12, None, 1e12, 80e9)
    given = {"block": 5, "context": 10**6, "generate": 2}
    assert roofline.attention_proposals(shape, card, 5) == pytest.approx(5) and roofline.free_proposals(shape, card, **given) == 4
    for count, bound in ((4, "memory"), (5, "compute")):
        ops = {op.name: op for op in roofline.operators(shape, "tidar", batch=1, proposals=count, **given)}
        assert ops["attention: scores and values"].bound(card) == bound and ops["mlp: gate"].bound(card) == "memory"
    # At batch 8 the weights' products meet 80 queries with one proposal and 120 with two; at batch 16 already 160 with one.
    assert [roofline.free_proposals(shape, card, batch=batch, **given) for batch in (8, 16)] == [1, 0]
    assert roofline.queries("tidar", 5, 1, 1) == 30 and roofline.queries("tidar", 5, 1, 1, proposals=2) == 15


@pytest.mark.parametrize("card", roofline.HARDWARE)
@pytest.mark.parametrize("name", ["zaya1-8b", "llama-3.1-8b"])
def test_one_proposal_more_than_is_free_is_not(card, name):
    shape, hardware, given = SHAPES[name], roofline.HARDWARE[card], {"block": 16, "batch": 1, "context": 4096, "generate": 256}
    most = roofline.free_proposals(shape, hardware, **given)
    bounds = [
        {op.bound(hardware) for op in roofline.operators(shape, "tidar", proposals=count, **given)} for count in (max(1, most), most + 1)
    ]
    assert 0 <= most < 16 and "compute" in bounds[1] and (most == 0 or bounds[0] == {"memory"})


def test_the_proposals_that_auto_takes_cost_no_more_than_the_tokens_they_bring():
    """Of zaya1-8b on MI300X four proposals leave all bound by memory, but such a forward reads nearly all experts."""
    shape, hardware, given = SHAPES["zaya1-8b"], roofline.HARDWARE["MI300X"], {"block": 16, "batch": 1, "context": 512, "generate": 256}
    over = [roofline.forward_over_one(shape, hardware, count, **given) for count in range(1, 17)]
    most = roofline.free_proposals(shape, hardware, **given)
    for tpf in (1.5, 3.0, over[0], over[most - 1], 100.0):
        wanted = sum(longer <= tpf for longer in over[:most])
        assert roofline.best_proposals(shape, hardware, tpf=tpf, **given) == wanted
    assert roofline.best_proposals(shape, hardware, tpf=over[0] * 0.99, **given) == 0


def test_a_number_of_proposals_is_priced(capsys):
    """16 drafts and 2 proposals of 16: 48 query tokens, by hand."""
    found = roofline.analyse(SHAPES["llama-3.1-8b"], roofline.card("H100"), "tidar", block=16, tpf=4.0, proposals=2)
    ops = roofline.operators(SHAPES["llama-3.1-8b"], "tidar", block=16, batch=1, context=512, generate=256, proposals=2)
    assert found["queries"] == 48 and found["seconds_per_forward"] == sum(op.seconds(roofline.card("H100")) for op in ops)
    assert cli.main(["roofline", "llama-3.1-8b", "--hardware", "H100", "--mode", "tidar", "--block", "16", "--proposals", "2"]) == 0
    assert " 48 " in capsys.readouterr().out


def test_the_command_prints_writes_and_draws(tmp_path, capsys):
    arguments = ["roofline", "zaya1-8b", "--hardware", "MI300X,H100", "--mode", "ar,block,tidar", "--block", "16", "--operators"]
    assert cli.main([*arguments, "--json", str(tmp_path / "a" / "x.json"), "--plot", str(tmp_path / "b" / "x.png")]) == 0
    said = capsys.readouterr().out
    assert "MI300X: attention over a long cache takes in about 3.9 blocks of 16" in said and "experts: down" in said
    assert "MI300X: 4 proposals of 16 beside 16 drafts (80 query tokens) leave no operator bound by compute" in said
    one, all_queries = (
        sum(op.seconds(roofline.card("MI300X")) for op in roofline.operators(
            SHAPES["zaya1-8b"], mode, block=16, batch=1, context=512, generate=256, proposals=4
        )) for mode in ("ar", "tidar")
    )  # fmt: skip
    assert f"such a forward takes {all_queries / one:.2f} times as long" in said and all_queries / one > 2, "more experts are read"
    results = json.loads((tmp_path / "a" / "x.json").read_text())["results"]
    assert [(r["hardware"], r["mode"]) for r in results] == [(h, m) for h in ("MI300X", "H100") for m in ("ar", "block", "tidar")]
    assert (tmp_path / "b" / "x.png").read_bytes().startswith(b"\x89PNG")


def test_a_block_that_no_mode_uses_is_not_looked_at(capsys):
    assert cli.main(["roofline", "llada-8b", "--hardware", "H100", "--mode", "ar,dlm", "--generate", "16"]) == 0


def test_a_card_in_any_case_is_the_same_card(capsys):
    printed = []
    for cards in ("mi325x,h100", "MI325X,H100", "Mi325x,h100"):
        assert cli.main(["roofline", "llada-8b", "--hardware", cards, "--mode", "ar"]) == 0
        printed.append(capsys.readouterr().out)
    assert len(set(printed)) == 1 and "MI325X " in printed[0]


def test_every_card_is_shown_unless_some_are_named(capsys):
    assert cli.main(["roofline", "llada-8b", "--mode", "ar"]) == 0
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert sorted(shown) == sorted(roofline.HARDWARE)


@pytest.mark.parametrize("value, text", [
    (0, "0"), (7, "7"), (999.4, "999"), (999.6, "1 k"), (867_600, "868 k"), (8.02e9, "8.02 G"), (1.6e10, "16 G"), (2e18, "2e+03 P"),
])
def test_numbers_have_three_digits_and_a_prefix(value, text):
    assert roofline.count(value) == text
    assert roofline.count(value, "B") == (text + "B" if text[-1].isalpha() else f"{text} B")


@pytest.mark.parametrize("seconds, text", [
    (1.5, "1.5 s"), (0.00298, "2.98 ms"), (5.453e-7, "545 ns"), (1.37e-6, "1.37 us"), (0.9996, "1 s"), (9.996e-4, "1 ms"),
])
def test_durations_have_a_unit_that_leaves_digits(seconds, text):
    assert roofline.duration(seconds) == text


def test_a_small_model_is_not_printed_as_zero(capsys):
    """The small world's teacher: 866,816 weights in matrices, in 16 bits 1.7 MB, less than a microsecond a forward."""
    assert cli.main(["roofline", str(TINY / "teacher"), "--hardware", "H100", "--mode", "ar,block", "--generate", "64", "--operators"]) == 0
    printed = capsys.readouterr().out
    assert "867 k parameters" in printed and "1.73 MB" in printed and "862 ns" in printed
    assert not any(cell in printed for cell in ("0.00 ", " 0.0 ", " 0.00\n"))


def test_a_folder_is_read(capsys):
    assert cli.main(["roofline", str(TINY / "teacher"), "--hardware", "H100", "--mode", "ar"]) == 0
    assert "H100" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, said", [
    (["llada-8b", "--hardware", "MI300"], "unknown hardware 'MI300'; allowed: A100, H100, H200, B200, MI300X, MI325X, MI355X"),
    (["llada-8b", "--mode", "mtp"], "unknown mode 'mtp'; allowed: ar, dlm, block, tidar"),
    (["llada-9b"], "no model 'llada-9b': neither a file or folder here nor one of llada-8b"),
    (["llada-8b", "--batch", "0"], "batch is 0; it must be at least 1"),
    (["llada-8b", "--tpf", "33"], "tpf is 33.0; it must be above 0 and at most the block length, 32"),
    (["llada-8b", "--mode", "tidar", "--proposals", "33"], "proposals is 33; it must be between 1 and the block length, 32"),
    (["llada-8b", "--proposals", "2"], "proposals is 2; it must be between 1 and the block length, 32, and is of mode tidar"),
    (["llada-8b", "--block", "512"], "block is 512; it must be at most the tokens generated, 256"),
    (["llada-8b", "--generate", "16"], "block is 32; it must be at most the tokens generated, 16"),
    (["llada-8b", "--plot", "x.txt"], "--plot x.txt: allowed endings: .png, .pdf, .svg"),
])  # fmt: skip
def test_bad_input_is_one_line(arguments, said, capsys):
    assert cli.main(["roofline", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"cdlm: error: {said}") and error.count("\n") == 1


def test_a_config_without_sizes_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    assert cli.main(["roofline", str(tmp_path)]) == 2
    assert "config.json has none of num_hidden_layers, n_layers" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[1]")
    assert cli.main(["roofline", str(tmp_path)]) == 2
    assert "config.json holds [1]; it must be an object" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[" * 100_000)
    assert cli.main(["roofline", str(tmp_path)]) == 2
    assert "config.json is nested too deep" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 0}')
    assert cli.main(["roofline", str(tmp_path)]) == 2
    assert "has 0 attention heads" in capsys.readouterr().err
