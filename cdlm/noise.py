"""How clean tokens become noisy, and how much a noise level weighs. Knows no model and no task.

A *process* says what noise is: `Absorbing` puts a mask token in a token's place, `Uniform` a token drawn from the whole vocabulary, which
may be the one that stood there. Behind uniform noise no token tells whether it is noise, so where noise stands is always said beside the
ids, by the process that put it there or by the sampler that left it there; nothing else asks a token what it is.

Shapes: B rows, L tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


def mask_tokens(
    ids_BL: Tensor, level: Tensor, maskable_BL: Tensor, mask_token_id: int, uniform_BL: Tensor
) -> tuple[Tensor, Tensor]:
    """Absorbing noise: each maskable token becomes the mask token with probability `level`.

    level: one a row [B], or one a token [B, L] (block diffusion: one a block).
    uniform_BL: draws from U[0, 1), given by the caller so that a row's noise does not depend on its batch.
    Returns the noisy ids and where they were masked, both [B, L]. (LLaDA, arXiv 2502.09992, equation 3 and
    CDLM, arXiv 2511.19269, equation 6: q(x_t | x_0) masks i.i.d. with probability t.)
    """
    masked_BL = maskable_BL & (uniform_BL < (level[:, None] if level.ndim == 1 else level))
    return torch.where(masked_BL, mask_token_id, ids_BL), masked_BL


def rising_cap(progress: float, first: float, ramp: float) -> float:
    """Upper end of the noise levels at `progress` (0..1) of training: from `first` to 1 over the first `ramp` of it.

    first=1 gives the plain U(0, 1) of the papers. A small network that starts with few masks first learns to compute
    one token from its neighbours, and then, level by level, from less.
    """
    if ramp <= 0:
        return 1.0
    return min(1.0, first + (1.0 - first) * progress / ramp)


def noise_level(uniform_B: Tensor, cap: float, floor: float) -> Tensor:
    """Noise levels t = floor + (cap - floor) u, u ~ U[0, 1). The weight of a level is 1 / t, so `floor` bounds it."""
    return floor + (cap - floor) * uniform_B


PROCESSES = ("absorbing", "uniform")
SLOTS = 32  # drawn at a time, for of each there is a row of fp64 as long as the vocabulary


class Draws:
    """Where random numbers come from. With seeds each row has a generator of its own, on the CPU, so that what it gets depends neither on
    its batch nor on the device. Without, all rows draw together from torch's default generator, in one call each time.

    rows below: numbers of the rows that draw, in the order of the answer; rows that draw together must be all of them.
    """

    def __init__(self, batch: int, device: torch.device | str = "cpu", seeds: Sequence[int] | None = None):
        if seeds is not None and len(seeds) != batch:
            raise ValueError(f"{len(seeds)} seeds for {batch} rows; give one for each row")
        self.batch, self.device = batch, device
        self.generators = None if seeds is None else [torch.Generator().manual_seed(seed) for seed in seeds]

    @property
    def together(self) -> bool:
        """Whether all rows draw together, so that a row's numbers depend on how often the others draw."""
        return self.generators is None

    def tokens(self, count: int, vocab_size: int, rows: Sequence[int]) -> Tensor:
        """`count` tokens a row, each one any of the vocabulary's, [rows, count]."""
        if self.generators is None:
            assert len(rows) == self.batch, "rows that draw together draw all at once"
            return torch.randint(0, vocab_size, (self.batch, count), device=self.device)
        return torch.stack([torch.randint(0, vocab_size, (count,), generator=self.generators[row]) for row in rows]).to(self.device)

    def choice(self, probability_ASV: Tensor, rows: Sequence[int]) -> Tensor:
        """One token a slot, drawn from its probabilities, [A, S].

        A row with a generator of its own takes one number a slot and the token at which the probabilities add up to it (fp64).
        """
        if self.generators is None:
            assert len(rows) == self.batch, "rows that draw together draw all at once"
            return torch.multinomial(probability_ASV.flatten(0, 1), 1).view(probability_ASV.shape[:2])
        out = []
        for probability_SV, row in zip(probability_ASV, rows, strict=True):
            number_S1 = torch.rand(probability_SV.shape[0], 1, generator=self.generators[row], dtype=torch.float64)
            drawn = []
            for part_SV, part_S1 in zip(probability_SV.split(SLOTS), number_S1.to(probability_SV.device).split(SLOTS), strict=True):
                up_to_SV = part_SV.double().cumsum(dim=-1)
                drawn.append(torch.searchsorted(up_to_SV, part_S1 * up_to_SV[:, -1:], right=True)[:, 0])
            out.append(torch.cat(drawn))
        return torch.stack(out).clamp(max=probability_ASV.shape[-1] - 1)


class Process(Protocol):
    """What noise is.

    marked: whether a slot's token says that it is noise. Where it does not, every slot stays open until its block is done.
    """

    marked: bool

    def blank(self, count: int, draws: Draws, rows: Sequence[int]) -> Tensor:
        """Slots that are noise alone, [rows, count]; they are what a block starts with."""

    def corrupt(
        self, ids_BL: Tensor, level: Tensor, where_BL: Tensor, uniform_BL: Tensor, token_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Each token of `where_BL` becomes noise with probability `level`, one a row [B] or one a token [B, L].

        uniform_BL: draws from U[0, 1) that decide where, given by the caller so that a row's noise does not depend on its batch.
        token_BL: further draws from U[0, 1), which choose the tokens; only a process that puts random tokens needs them.
        Returns the noisy ids and where noise was put, both [B, L].
        """


@dataclass(frozen=True)
class Absorbing:
    """Noise is the mask token; see `mask_tokens`."""

    mask_token_id: int
    marked = True

    def blank(self, count: int, draws: Draws, rows: Sequence[int]) -> Tensor:
        return torch.full((len(rows), count), self.mask_token_id, device=draws.device)

    def corrupt(
        self, ids_BL: Tensor, level: Tensor, where_BL: Tensor, uniform_BL: Tensor, token_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return mask_tokens(ids_BL, level, where_BL, self.mask_token_id, uniform_BL)


@dataclass(frozen=True)
class Uniform:
    """Noise is a token drawn uniformly from the vocabulary, the clean one included. (D3PM, arXiv 2107.03006, appendix A.2.1, uniform
    transitions; DiffusionGemma's noise.)"""

    vocab_size: int
    marked = False

    def blank(self, count: int, draws: Draws, rows: Sequence[int]) -> Tensor:
        return draws.tokens(count, self.vocab_size, rows)

    def corrupt(
        self, ids_BL: Tensor, level: Tensor, where_BL: Tensor, uniform_BL: Tensor, token_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if token_BL is None:
            raise ValueError("uniform noise puts random tokens: give token_BL, draws from U[0, 1) that choose them")
        noise_BL = where_BL & (uniform_BL < (level[:, None] if level.ndim == 1 else level))
        random_BL = (token_BL.double() * self.vocab_size).long().clamp(max=self.vocab_size - 1)
        return torch.where(noise_BL, random_BL, ids_BL), noise_BL


def process(name: str, mask_token_id: int | None, vocab_size: int) -> Process:
    """The process of this name ("absorbing" or "uniform")."""
    if name not in PROCESSES:
        raise ValueError(f"noise is {name!r}; allowed: {', '.join(PROCESSES)}")
    if name == "uniform":
        return Uniform(vocab_size)
    assert mask_token_id is not None, "absorbing noise has a mask token"
    return Absorbing(mask_token_id)
