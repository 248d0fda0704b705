"""Losses: arithmetic by hand, the direction of the divergence, how means are taken, and where gradients go."""

import math

import pytest
import torch
from conftest import random_model, random_prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from cdlm import losses


def logits_of(*rows: list[float]) -> torch.Tensor:
    """Logits whose softmax is these probabilities, shifted by a constant that must not matter."""
    return torch.tensor(rows).log() + 3.0


def random_case(seed: int, rows: int, length: int = 5, vocab: int = 7):
    """Logits of a student and a target [B, L, V], and a set [B, L] that may be empty in some rows."""
    draw = torch.Generator().manual_seed(seed)
    student, target = (2 * torch.randn(rows, length, vocab, generator=draw) for _ in range(2))
    chosen = torch.rand(rows, length, generator=draw) < 0.5
    chosen[torch.rand(rows, generator=draw) < 0.3] = False
    return student.requires_grad_(), target, chosen


def test_forward_kl_by_hand():
    """p = (1/2, 1/2), q = (1/4, 3/4).

    KL(p || q) = 1/2 ln(2) + 1/2 ln(2/3) = 1/2 ln(4/3) = 0.143841
    KL(q || p) = 1/4 ln(1/2) + 3/4 ln(3/2)            = 0.130812
    """
    p, q = logits_of([0.5, 0.5]), logits_of([0.25, 0.75])
    assert losses.forward_kl(p, q).item() == pytest.approx(0.5 * math.log(4 / 3), abs=1e-6)
    assert losses.forward_kl(p, q).item() == pytest.approx(0.143841, abs=1e-6)
    assert losses.forward_kl(q, p).item() == pytest.approx(0.130812, abs=1e-6)


def test_forward_kl_pays_for_what_the_student_leaves_out():
    """p = (1/2, 1/2, ~0). A student on one of p's two modes costs far more than one that covers both and wastes a third.

    q = (1/3, 1/3, 1/3): ln(3/2) = 0.405.  q = (0.998, 0.001, 0.001): 1/2 ln(0.5/0.998) + 1/2 ln(0.5/0.001) = 2.762.
    """
    p = logits_of([0.5, 0.5, 1e-9]).expand(2, 3)
    q = logits_of([1 / 3, 1 / 3, 1 / 3], [0.998, 0.001, 0.001])
    torch.testing.assert_close(losses.forward_kl(p, q), torch.tensor([0.405465, 2.761730]), atol=1e-5, rtol=0)


def test_forward_kl_is_computed_in_fp32():
    p, q = (torch.randn(4, 9, generator=torch.Generator().manual_seed(s)).bfloat16() for s in (0, 1))
    found = losses.forward_kl(p, q)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, losses.forward_kl(p.float(), q.float()), atol=0, rtol=0)


def test_token_distillation_by_hand():
    """Row 0: -ln(1/4) and -ln(1/2), mean (ln 4 + ln 2) / 2 = 3/2 ln 2. Row 1: -ln(3/4). Mean 1/2 (3/2 ln 2 + ln 4/3) = 0.663702.

    Slots outside the set, and what stands in them, do not count.
    """
    logits = torch.stack([logits_of([0.25, 0.75], [0.5, 0.5], [0.1, 0.9]), logits_of([0.25, 0.75], [0.25, 0.75], [0.1, 0.9])])
    token = torch.tensor([[0, 1, 0], [0, 1, 1]])
    chosen = torch.tensor([[True, True, False], [False, True, False]])
    found = losses.token_distillation(logits, token, chosen)
    assert found.item() == pytest.approx((1.5 * math.log(2) + math.log(4 / 3)) / 2, abs=1e-6)
    assert found.item() == pytest.approx(0.663702, abs=1e-6)


def test_token_distillation_is_distillation_from_a_point_mass():
    student, _, chosen = random_case(5, rows=3)
    token = torch.randint(7, chosen.shape, generator=torch.Generator().manual_seed(1))
    target = torch.full(student.shape, -1e4).scatter(-1, token[..., None], 0.0)
    torch.testing.assert_close(losses.token_distillation(student, token, chosen), losses.distillation(student, target, chosen))


def test_means_are_taken_per_row_then_over_rows():
    """Row 0: (1 + 2 + 3) / 3 = 2. Row 1: 10. Mean 6; a mean over all four values would be 4. A third, empty row: 12 / 3 = 4."""
    chosen = torch.tensor([[True, True, True], [False, True, False]])
    values = torch.tensor([1.0, 2.0, 3.0, 10.0])
    assert losses.mean_over_sets(values, chosen).item() == pytest.approx(6.0)
    empty = torch.cat([chosen, torch.zeros(1, 3, dtype=torch.bool)])
    assert losses.mean_over_sets(values, empty).item() == pytest.approx(4.0)


@pytest.mark.parametrize("loss", [losses.distillation, losses.consistency])
def test_divergence_losses_by_hand(loss):
    """One row, three slots, the last not in the set. KL of the first is 1/2 ln(4/3), of the second 0: mean 1/4 ln(4/3)."""
    target = logits_of([0.5, 0.5], [0.2, 0.8], [0.9, 0.1])[None]
    student = logits_of([0.25, 0.75], [0.2, 0.8], [0.1, 0.9])[None]
    found = loss(student, target, torch.tensor([[True, True, False]]))
    assert found.item() == pytest.approx(0.25 * math.log(4 / 3), abs=1e-6)


def test_masked_diffusion_by_hand():
    """Uniform logits over 2 tokens: cross-entropy ln 2 everywhere.

    Row 0: 2 of 4 slots masked, t = 1/2, L_g = 4: (1/4) * 2 * (1 / (1/2)) * ln 2 = ln 2.
    Row 1: 1 of 4 slots masked, t = 1/4, L_g = 2: (1/2) * 1 * 4 * ln 2 = 2 ln 2.     Mean of rows: 1.5 ln 2.
    """
    masked = torch.tensor([[True, False, True, False], [False, True, False, False]])
    target = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0]])
    found = losses.masked_diffusion(torch.zeros(2, 4, 2), target, masked, torch.tensor([0.5, 0.25]), torch.tensor([4.0, 2.0]))
    assert found.item() == pytest.approx(1.5 * math.log(2), abs=1e-6)


@given(seed=st.integers(0, 500), rows=st.integers(1, 4), length=st.integers(1, 6))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_masked_diffusion_is_the_double_loop(seed, rows, length):
    logits, _, masked = random_case(seed, rows, length)
    draw = torch.Generator().manual_seed(seed)
    target = torch.randint(0, 7, (rows, length), generator=draw)
    level = 0.02 + 0.98 * torch.rand(rows, generator=draw)
    slots = torch.randint(length, length + 5, (rows,), generator=draw).float()
    wanted = 0.0
    for b in range(rows):
        row = 0.0
        for i in range(length):
            if masked[b, i]:
                scores = logits[b, i].tolist()
                row += (math.log(sum(map(math.exp, scores))) - scores[target[b, i]]) / float(level[b])
        wanted += row / float(slots[b]) / rows
    assert losses.masked_diffusion(logits, target, masked, level, slots).item() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(seed=st.integers(0, 500), rows=st.integers(2, 5))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_a_batch_is_the_mean_of_its_rows(seed, rows):
    """So the loss of a step does not depend on how its rows are cut into micro-batches of equal size."""
    student, target, chosen = random_case(seed, rows)
    level = 0.1 + 0.9 * torch.rand(rows, generator=torch.Generator().manual_seed(seed))
    tokens, slots = target.argmax(dim=-1), torch.full((rows,), 5.0)
    for whole, parts in (
        (losses.distillation(student, target, chosen),
         [losses.distillation(student[b : b + 1], target[b : b + 1], chosen[b : b + 1]) for b in range(rows)]),
        (losses.consistency(student, target, chosen),
         [losses.consistency(student[b : b + 1], target[b : b + 1], chosen[b : b + 1]) for b in range(rows)]),
        (losses.masked_diffusion(student, tokens, chosen, level, slots),
         [losses.masked_diffusion(student[b : b + 1], tokens[b : b + 1], chosen[b : b + 1], level[b : b + 1], slots[b : b + 1])
          for b in range(rows)]),
    ):  # fmt: skip
        torch.testing.assert_close(whole, torch.stack(parts).mean(), atol=1e-6, rtol=1e-5)


def test_values_outside_the_set_do_not_matter():
    student, target, chosen = random_case(5, 3)
    before = losses.distillation(student, target, chosen)
    other = student.detach().clone()
    other[~chosen] = 50.0
    assert torch.equal(losses.distillation(other, target, chosen), before.detach())
    torch.autograd.backward(before)
    assert (student.grad[~chosen] == 0).all() and (student.grad[chosen] != 0).any()


def empty_losses(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    nothing = torch.zeros(logits.shape[:2], dtype=torch.bool)
    rows = logits.shape[0]
    return {
        "distillation": losses.distillation(logits, torch.randn(logits.shape), nothing),
        "consistency": losses.consistency(logits, torch.randn(logits.shape), nothing),
        "masked_diffusion": losses.masked_diffusion(
            logits, torch.zeros(nothing.shape, dtype=torch.long), nothing, torch.full((rows,), 0.5), torch.full((rows,), 4.0)
        ),
    }


@pytest.mark.parametrize("name", ["distillation", "consistency", "masked_diffusion"])
def test_an_empty_set_gives_a_zero_that_reaches_the_parameters(name):
    head = torch.nn.Linear(3, 6)
    loss = empty_losses(head(torch.ones(2, 4, 3)))[name]
    assert loss.item() == 0.0
    loss.backward()
    assert head.weight.grad is not None and (head.weight.grad == 0).all()


@pytest.mark.parametrize("loss", [losses.distillation, losses.consistency])
def test_the_target_gets_no_gradient(loss):
    student, target, chosen = random_case(1, 3)
    target.requires_grad_()
    assert chosen.any()
    loss(student, target, chosen).backward()
    assert target.grad is None
    assert student.grad.abs().sum() > 0


def test_the_consistency_target_gets_no_gradient_through_shared_weights():
    """One head gives both sides. Its gradient equals the one with a constant target, and not the one through both sides."""
    head = torch.nn.Linear(3, 6)
    early, later = torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    everywhere = torch.ones(2, 4, dtype=torch.bool)
    (found,) = torch.autograd.grad(losses.consistency(head(early), head(later), everywhere), head.weight)
    (wanted,) = torch.autograd.grad(losses.consistency(head(early), head(later).detach().clone(), everywhere), head.weight)
    p, q = head(later).log_softmax(-1), head(early).log_softmax(-1)
    (through_both,) = torch.autograd.grad((p.exp() * (p - q)).sum(-1).mean(), head.weight)
    assert torch.equal(found, wanted)
    assert not torch.allclose(found, through_both, atol=1e-3)


def test_gradient_of_a_slot_is_student_minus_teacher():
    """d KL(p || softmax(z)) / dz = softmax(z) - p; two slots of one row, so each carries half."""
    student, target = logits_of([0.25, 0.75], [0.6, 0.4])[None].requires_grad_(), logits_of([0.5, 0.5], [0.1, 0.9])[None]
    losses.distillation(student, target, torch.ones(1, 2, dtype=torch.bool)).backward()
    torch.testing.assert_close(student.grad, torch.tensor([[[-0.125, 0.125], [0.25, -0.25]]]), atol=1e-6, rtol=0)


def test_contract_8_student_equal_to_teacher():
    """The same weights on the same state: zero distillation and consistency loss, zero gradient in every parameter."""
    model = random_model()
    ids, valid = random_prompts([3, 5])
    slots = torch.full((2, 4), model.facts.mask_token_id)
    whole, valid = torch.cat([ids, slots], dim=1), torch.cat([valid, torch.ones_like(slots, dtype=torch.bool)], dim=1)
    with torch.no_grad():
        hidden = model.sequence_hidden(whole, valid)
        teacher = model.head(hidden)
    student = model.sequence_logits(whole, valid)
    chosen = whole == model.facts.mask_token_id
    for loss in (losses.distillation, losses.consistency):
        value = loss(student, teacher, chosen)
        assert abs(value.item()) < 1e-7
        for gradient in torch.autograd.grad(value, list(model.parameters()), retain_graph=True):
            assert gradient.abs().max() < 1e-6
    other = losses.distillation(student, teacher.roll(1, dims=-1), chosen)  # another teacher: the same test sees a gradient
    assert other.item() > 0.1 and max(g.abs().max() for g in torch.autograd.grad(other, list(model.parameters()))) > 1e-3


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_finite_raises_with_the_name_of_the_loss(value):
    with pytest.raises(FloatingPointError, match=f"consistency loss is {value}"):
        losses.finite(torch.tensor(value), "consistency")


def test_finite_gives_the_loss_back():
    loss = torch.tensor(0.0, requires_grad=True)
    assert losses.finite(loss, "distill") is loss


def heads(seed: int, rows: int, length: int = 5, width: int = 3, vocab: int = 7):
    """Hidden rows of a student and a target [B, L, D], a head for each, and a set [B, L] that may be empty in some rows."""
    draw = torch.Generator().manual_seed(seed)
    student, target = (torch.randn(rows, length, width, generator=draw) for _ in range(2))
    own, other = torch.nn.Linear(width, vocab), torch.nn.Linear(width, vocab)
    with torch.no_grad():
        for parameter in (*own.parameters(), *other.parameters()):
            parameter.copy_(2 * torch.randn(parameter.shape, generator=draw))
    chosen = torch.rand(rows, length, generator=draw) < 0.6
    chosen[torch.rand(rows, generator=draw) < 0.2] = False
    return student.requires_grad_(), target, own, other, chosen


def both_ways(seed: int, rows: int) -> dict[str, tuple]:
    """Each loss of logits and of hidden rows, as (value, gradients of the rows and of the head)."""
    student, target, own, other, chosen = heads(seed, rows)
    draw = torch.Generator().manual_seed(seed)
    token = torch.randint(0, 7, chosen.shape, generator=draw)
    level, length = 0.1 + 0.9 * torch.rand(rows, generator=draw), torch.full((rows,), 5.0)
    student_logits, target_logits = own(student), other(target)
    pairs = {
        "distillation": (
            losses.distillation(student_logits, target_logits, chosen),
            losses.distillation_from_hidden(student, own, target, other, chosen, 7),
        ),
        "consistency": (
            losses.consistency(student_logits, own(target), chosen),
            losses.consistency_from_hidden(student, own, target, own, chosen, 7),
        ),
        "token_distillation": (
            losses.token_distillation(student_logits, token, chosen), losses.token_distillation_from_hidden(student, own, token, chosen, 7),
        ),
        "masked_diffusion": (
            losses.masked_diffusion(student_logits, token, chosen, level, length),
            losses.masked_diffusion_from_hidden(student, own, token, chosen, level, length, 7),
        ),
        "next_token": (losses.next_token(student_logits, token, chosen), losses.next_token_from_hidden(student, own, token, chosen, 7)),
    }  # fmt: skip
    wanted = [student, own.weight, own.bias]
    return {
        name: tuple((loss, *torch.autograd.grad(loss, wanted, retain_graph=True)) for loss in pair) for name, pair in pairs.items()
    }


@given(seed=st.integers(0, 500), rows=st.integers(1, 4), rows_of_a_chunk=st.integers(1, 9))
@settings(deadline=None, derandomize=True, max_examples=40)
def test_a_loss_of_hidden_rows_is_the_loss_of_their_logits(seed, rows, rows_of_a_chunk):
    """Value and gradients, however the slots are cut into chunks, the last of them shorter; empty sets too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "CHUNK_VALUES", 7 * rows_of_a_chunk)
        for name, (of_logits, of_hidden) in both_ways(seed, rows).items():
            for found, wanted in zip(of_hidden, of_logits, strict=True):
                torch.testing.assert_close(found, wanted, atol=2e-6, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


def most_logits(loss, rows: int, vocab: int, monkeypatch) -> tuple[int, int]:
    """The most fp32 values that one tensor holds, and all that autograd keeps for the backward, of a loss of so many slots."""
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(losses, "CHUNK_VALUES", 4 * vocab)
    hidden, head = torch.randn(1, rows, 2, requires_grad=True), torch.nn.Linear(2, vocab, bias=False)
    everywhere, token = torch.ones(1, rows, dtype=torch.bool), torch.zeros(1, rows, dtype=torch.long)
    largest, kept = 0, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            out = function(*arguments, **(options or {}))
            for part in out if isinstance(out, tuple | list) else [out]:
                if isinstance(part, torch.Tensor):
                    largest = max(largest, part.numel())
            return out

    def keep(tensor):
        nonlocal kept
        kept += tensor.numel()
        return tensor

    with Watch():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            value = loss(hidden, head, token, everywhere, vocab)
        value.backward()
    return largest, kept


@pytest.mark.parametrize("name", ["distillation", "consistency", "cross-entropy"])
def test_what_a_loss_holds_does_not_grow_with_vocabulary_times_length(name, monkeypatch):
    """Chunks of four slots: at 16 times the slots no tensor is larger than four rows of logits or the head's gradient, and what is kept
    for the backward is as much as the hidden rows, whatever the vocabulary."""
    loss = {
        "distillation": lambda h, head, token, chosen, v: losses.distillation_from_hidden(
            h, head, h.detach() * 2, head, chosen, v
        ),
        "consistency": lambda h, head, token, chosen, v: losses.consistency_from_hidden(
            h, head, h.detach() * 2, head, chosen, v
        ),
        "cross-entropy": losses.next_token_from_hidden,
    }[name]
    sizes = {(rows, vocab): most_logits(loss, rows, vocab, monkeypatch) for rows in (8, 128) for vocab in (100, 1000)}
    for (_, vocab), (largest, _) in sizes.items():
        assert largest == 4 * vocab
    assert sizes[128, 1000][1] == sizes[128, 100][1] < 20 * 128
