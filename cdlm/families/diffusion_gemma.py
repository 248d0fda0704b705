"""Family "diffusion_gemma": DiffusionGemma (Google), block diffusion with uniform noise, on transformers' own class; text alone.

One stack of layers has two modes. As the encoder it is a causal LM that writes keys and values: of the prompt (`prefill`) and of each
finished block (`commit`), a forward of its own. As the decoder it refines a canvas, the active block: every slot sees all that is
committed and the whole canvas, and nothing is written. Rows predict their own position (logits are not shifted), and behind the head
logits are capped. The decoder is told what the step before saw (self-conditioning, `Seen`); at a canvas's first step, nothing.

Sliding layers: an encoder row sees the last `sliding_window` tokens, itself included; a canvas sees the last `sliding_window - 1`
committed tokens, from each of its slots, and itself whole. Positions are counted over real tokens; transformers counts padding on the
left too, which rotary embeddings do not notice.

All weights of the decoder but self-conditioning are the encoder's. An adapter is put on each of the two by name, so a weight that both
read can't take in either one's adapter: merging is refused. The vision tower is loaded and left alone.

Shapes: B rows, P prompt tokens, S or N slots of the canvas, C tokens to commit, K keys, D hidden width, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from cdlm import masks
from cdlm.cache import BlockCache, WholeCache
from cdlm.families.base import DiffusionLM, Facts, Seen

NAME = "diffusion_gemma"
MODEL_TYPE = "diffusion_gemma"
ORIGINS = dict.fromkeys(("eos_token_id", "eos_token_ids", "pad_token_id"), "config.json, text_config")
SAME_NAMES = ("max_denoising_steps", "t_min", "t_max", "stability_threshold")  # in generation_config.json and in DecodeConfig
THEIR_THRESHOLD = "confidence_threshold"  # DecodeConfig's entropy_threshold: a mean entropy, no confidence
SAMPLER, BOUND = "EntropyBoundSamplerConfig", "entropy_bound"
LIMITS = {  # of generation_config.json's values: types, the least, words
    BOUND: ((int, float), 1e-9, "a number above 0"), THEIR_THRESHOLD: ((float,), 1e-9, "a number above 0, with a point"),
    "max_denoising_steps": ((int,), 1, "a whole number, 1 or more"), "stability_threshold": ((int,), 0, "a whole number, 0 or more"),
    "t_min": ((int, float), 0, "a number of at least 0"), "t_max": ((int, float), 1e-9, "a number above 0"),
}  # fmt: skip
FULL, SLIDING = "full_attention", "sliding_attention"


def matches(config: dict[str, Any]) -> bool:
    """Does this config.json say that it belongs here?"""
    return config.get("model_type") == MODEL_TYPE


def stated(config: dict[str, Any]) -> dict[str, Any]:
    """The facts that hold for every model of this type; the length of a block is the canvas's."""
    return {
        "noise": "uniform", "block_length": config.get("canvas_length", 256), "prompt_attention": "causal",
    }


def facts(config: dict[str, Any]) -> Facts:
    """The facts of a checkpoint; token ids that config.json does not state itself are those of its text_config."""
    text = config.get("text_config") or {}
    eos, pad = (config.get(key) if config.get(key) is not None else text.get(key) for key in ("eos_token_id", "pad_token_id"))
    if eos is None:
        raise ValueError(f"neither config.json nor its text_config states eos_token_id; a {NAME} checkpoint needs an end token")
    ends = tuple(eos) if isinstance(eos, list) else (eos,)
    return Facts(mask_token_id=None, eos_token_ids=ends, pad_token_id=ends[0] if pad is None else pad, **stated(config))


def check_generation(path: Any, stated: dict[str, Any]) -> None:
    """A ValueError unless generation_config.json holds values of this sampler, as transformers takes them. It looks a class up by the name
    that the file gives, and calls it with what the file gives: here it is one class, with one value."""
    file = f"{path}/generation_config.json"
    sampler = stated.get("sampler_config")
    known = isinstance(sampler, dict) and sampler.get("_cls_name") == SAMPLER and {*sampler} <= {"_cls_name", BOUND}
    if sampler is not None and not known:
        raise ValueError(f"{file} has sampler_config {str(sampler)[:80]}; allowed: _cls_name {SAMPLER} with {BOUND}")
    for name, (kinds, least, words) in LIMITS.items():
        value = (sampler or {}).get(BOUND) if name == BOUND else stated.get(name)
        if value is not None and not (type(value) in kinds and least <= value < float("inf")):
            raise ValueError(f"{file} has {name} {value!r}; it must be {words}")
    low, high = (stated[name] if stated.get(name) is not None else default for name, default in (("t_min", 0.4), ("t_max", 0.8)))
    if not low < high:
        raise ValueError(f"{file} has t_min {low} and t_max {high}; t_min must be below t_max")


def start(hf: Any, *, copying: bool) -> None:
    """What a model from nothing needs beside weights N(0, 1 / fan_in). Embeddings are multiplied with the root of the width and are the
    head too, so they start as N(0, 1 / width). Attention has the scale 1: the norms of queries and keys start at head_dim ** -1/4, so
    that scores are N(0, 1) all the same. copying: each o_proj is the transpose of what makes its values, which is k_proj in full layers.
    """
    table = hf.get_input_embeddings().weight
    table.normal_(0.0, table.shape[1] ** -0.5)
    for module in hf.model.decoder.modules():  # the encoder's weights too
        if not hasattr(module, "q_norm"):
            continue
        for norm in (module.q_norm, module.k_norm):
            norm.weight.fill_(module.head_dim**-0.25)
        if copying:
            value = (module.k_proj if module.v_proj is None else module.v_proj).weight.unflatten(0, (-1, module.head_dim))
            module.o_proj.weight.copy_(value.repeat_interleave(module.num_key_value_groups, dim=0).flatten(0, 1).T)


class CappedHead(nn.Module):
    """lm_head and the cap behind it: cap tanh(logits / cap), in fp32."""

    def __init__(self, lm_head: nn.Module, cap: float):
        super().__init__()
        self.lm_head, self.cap = lm_head, cap

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.lm_head(hidden).to(torch.float32) / self.cap) * self.cap


class DiffusionGemmaLM(DiffusionLM):
    """DiffusionGemma's two modes as one diffusion LM. `hf` is DiffusionGemmaForBlockDiffusion, adapters included."""

    objectives = ("uniform", "cdlm")
    redecides = True
    held_logits = 1 << 23  # of self-conditioning's look in training: 32 MiB in fp32, and as much of their probabilities
    commits_apart = True
    left_alone = r".*(vision_tower|embed_vision).*"
    own_attention = "sdpa"

    def __init__(self, hf: nn.Module, facts: Facts, family: str):
        super().__init__(hf, facts, family)
        _refuse(self.hf.config, facts)

    @property
    def head(self) -> nn.Module:
        return CappedHead(self.hf.lm_head, self.hf.final_logit_softcapping)

    @property
    def own_decoding(self) -> dict[str, Any]:
        """generation_config.json's values, transformers' own where it states none."""
        generation = self.hf.generation_config
        default = generation._get_default_generation_params()
        found = {name: getattr(generation, name) for name in default}
        found = {name: default[name] if value is None else value for name, value in found.items()}
        return {
            "order": "entropy", "entropy_bound": found["sampler_config"].entropy_bound, "entropy_threshold": found[THEIR_THRESHOLD],
            **{name: found[name] for name in SAME_NAMES},
        }

    def state_decoding(self, values: dict[str, Any]) -> None:
        self._state(self.hf.generation_config, values)

    def _state(self, generation: Any, values: dict[str, Any]) -> None:
        """Values of `decode.DecodeConfig` under transformers' names, in place."""
        from transformers.models.diffusion_gemma.generation_diffusion_gemma import EntropyBoundSamplerConfig

        generation.sampler_config = EntropyBoundSamplerConfig(entropy_bound=float(values["entropy_bound"]))
        for name, value in ((THEIR_THRESHOLD, float(values["entropy_threshold"])), *((name, values[name]) for name in SAME_NAMES)):
            setattr(generation, name, value)

    def own_generate(
        self, prompt_BP: Tensor, valid_BP: Tensor, max_new_tokens: int, values: dict[str, Any], *, stop_at_eos: bool = True,
        after_block: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, list[int]]:
        """As in the base class. transformers gives tokens a forward, from which the steps come, and does not cut its last canvas. Of a
        row of padding alone it says nothing: its steps are then all of the batch, its own where it stands alone or takes the most."""
        pad, kept = self.facts.pad_token_id, self.hf.generation_config
        generation = type(kept)(
            max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=list(self.facts.eos_token_ids) if stop_at_eos else None
        )
        self._state(generation, values)
        encoded = refined = 0

        def count(*_: Any) -> None:
            nonlocal refined
            refined += 1

        def note(*_: Any) -> None:
            nonlocal encoded
            encoded += 1
            if after_block is not None and encoded > 1:  # the first encodes the prompt, each other one a finished canvas
                after_block(encoded - 2)

        hooks = [self.hf.model.encoder.register_forward_hook(note), self.hf.model.decoder.register_forward_hook(count)]
        self.hf.generation_config = generation  # generate takes from there what a given one leaves open, end tokens too
        try:
            out = self.hf.generate(input_ids=prompt_BP, attention_mask=valid_BP.long())
        finally:
            self.hf.generation_config = kept
            for hook in hooks:
                hook.remove()
        if after_block is not None:
            after_block(encoded - 1)
        ids_BN = out.sequences[:, prompt_BP.shape[1] :]
        tokens_B = (ids_BN != pad).sum(dim=1)
        steps_B = torch.where(tokens_B > 0, tokens_B / out.tokens_per_forward, refined)
        return ids_BN[:, :max_new_tokens], steps_B.round().long().tolist()

    @property
    def unmergeable(self) -> str | None:
        return "encoder and decoder read the same weights, each with an adapter of its own; merging either would change or untie the other"

    def _encode(self, ids_BC: Tensor, valid_BC: Tensor, position_BC: Tensor, cache: "BlockCache | _Written | None") -> Tensor:
        """Raw rows of causal text behind what is committed, [B, C, D]; with a cache, keys and values are written into its room."""
        key_position, key_valid = position_BC, valid_BC
        if isinstance(cache, BlockCache):
            key_position = torch.cat([cache.position_BK, position_BC], dim=1)
            key_valid = torch.cat([cache.valid_BK, valid_BC], dim=1)
        seen = masks.dense(masks.clean(position_BC, key_position, key_valid))
        near = key_position[:, None, None, :] > position_BC[:, None, :, None] - self.text_config.sliding_window
        sliding = seen & near
        own = {FULL: seen, SLIDING: sliding | ~sliding.any(dim=-1, keepdim=True)}  # a padding row looks somewhere; nobody reads it
        return self.hf.model.encoder(
            input_ids=ids_BC, attention_mask=own, position_ids=position_BC, cache=_Nothing() if cache is None else cache,
        ).last_hidden_state  # fmt: skip

    def _refine(self, canvas_BS: Tensor, cache: BlockCache, seen: Seen | None) -> Tensor:
        """Rows of a canvas behind what is committed, [B, S, D]."""
        prefix = _Prefix(cache, self.text_config)
        mask: dict[str, Tensor | None] = {FULL: None, SLIDING: None}
        if cache.padded:
            for kind in mask:
                valid_BK = torch.cat([prefix.valid(kind), torch.ones_like(canvas_BS, dtype=torch.bool)], dim=1)
                mask[kind] = valid_BK[:, None, None, :].expand(-1, 1, canvas_BS.shape[1], -1)
        told = {} if seen is None else self._told(seen)
        with self._soft(seen):
            return self.hf.model.decoder(
                decoder_input_ids=canvas_BS, cache=prefix, decoder_attention_mask=mask,
                decoder_position_ids=cache.next_position_B[:, None] + torch.arange(canvas_BS.shape[1], device=canvas_BS.device), **told,
            ).last_hidden_state  # fmt: skip

    def _told(self, seen: Seen) -> dict[str, Tensor]:
        """Self-conditioning as the decoder's own arguments, where it is told whole logits."""
        if seen.ids_BSK is not None:
            return {}
        told = {"self_conditioning_logits": seen.logits_BSK}
        return told if seen.on_B is None else {**told, "self_conditioning_mask": seen.on_B}

    @contextlib.contextmanager
    def _soft(self, seen: Seen | None) -> Iterator[None]:
        """Inside, the decoder's self-conditioning is told the mean embedding of the k tokens that `seen` names, which the decoder has
        no argument for: no [S, V] tensor is made."""
        if seen is None or seen.ids_BSK is None:
            yield
            return
        table = self.hf.model.decoder.embed_tokens
        weight_BSK = seen.logits_BSK.softmax(dim=-1, dtype=torch.float32).to(table.weight.dtype)
        soft_BSD = torch.einsum("bsk,bskd->bsd", weight_BSK, table(seen.ids_BSK))
        if seen.on_B is not None:
            soft_BSD = soft_BSD * seen.on_B[:, None, None].to(soft_BSD.dtype)
        with self._told_embedding(soft_BSD):
            yield

    @contextlib.contextmanager
    def _told_embedding(self, soft_BSD: Tensor) -> Iterator[None]:
        """Inside, self-conditioning is told these embeddings in place of zeros."""
        hook = self.hf.model.decoder.self_conditioning.register_forward_pre_hook(lambda module, given: (given[0], soft_BSD))
        try:
            yield
        finally:
            hook.remove()

    def answer_hidden(
        self, prompt_BP: Tensor, prompt_valid_BP: Tensor, slots_BN: Tensor, block_length: int | None, seen: Seen | None = None
    ) -> Tensor:
        """Rows of one canvas of N slots behind a clean prompt: the encoder over the prompt, the decoder over the canvas, with gradients
        through both. What is finished of an answer stands in the prompt."""
        cache = self.new_cache(prompt_valid_BP.sum(dim=1), prompt_BP.shape[1])
        self.commit(prompt_BP, prompt_valid_BP, cache, slots_BN.shape[1])
        return self._refine(slots_BN, cache, seen)

    def text_and_canvas(
        self, ids_BL: Tensor, valid_BL: Tensor, start_B: Tensor, canvas_BS: Tensor, told_B: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The encoder over clean text and the decoder over one canvas a row that begins at column start_B of it, in one pass of each:
        rows as of `clean_hidden` [B, L, D], and as of `answer_hidden` with the text before the canvas as its prompt [B, S, D].

        told_B: rows whose self-conditioning is told what a first pass over the same canvas, without gradients and told nothing, saw: the
        mean embedding under its probabilities, not divided by a temperature. The mean is a constant too: no gradient flows through it
        into the table, as one does where only the first pass's logits are constants.
        """
        position_BL, text = masks.positions(valid_BL), _Written(len(self.text_config.layer_types))
        row_BLD = self._encode(ids_BL, valid_BL, position_BL, text)
        column_L = torch.arange(ids_BL.shape[1], device=ids_BL.device)
        before_BL = valid_BL & (column_L < start_B[:, None])
        near_BL = before_BL & (column_L >= start_B[:, None] - (self.text_config.sliding_window - 1))
        canvas = torch.ones_like(canvas_BS, dtype=torch.bool)
        mask = {
            kind: torch.cat([seen_BL, canvas], dim=1)[:, None, None, :].expand(-1, 1, canvas_BS.shape[1], -1)
            for kind, seen_BL in ((FULL, before_BL), (SLIDING, near_BL))
        }
        first_B1 = (valid_BL & (column_L < start_B[:, None])).sum(dim=1, keepdim=True)
        position_BS = first_B1 + torch.arange(canvas_BS.shape[1], device=ids_BL.device)

        def refine() -> Tensor:
            return self.hf.model.decoder(
                decoder_input_ids=canvas_BS, cache=text, decoder_attention_mask=mask, decoder_position_ids=position_BS,
            ).last_hidden_state

        if not bool(told_B.any()):
            return self._shifted(row_BLD), refine()
        with torch.no_grad():
            soft_BSD = self._mean_embedding(refine()) * told_B[:, None, None]
        with self._told_embedding(soft_BSD):
            return self._shifted(row_BLD), refine()

    def _mean_embedding(self, row_BSD: Tensor) -> Tensor:
        """The mean embedding under each row's probabilities, [B, S, D], with at most `held_logits` logits held at a time."""
        table = self.hf.model.decoder.embed_tokens
        parts = row_BSD.flatten(0, 1).split(max(1, self.held_logits // table.weight.shape[0]))
        soft = [self.head(part).softmax(dim=-1, dtype=torch.float32).to(table.weight.dtype) @ table.weight for part in parts]
        return (torch.cat(soft) * table.embed_scale.to(table.weight.dtype)).view_as(row_BSD)

    @staticmethod
    def _shifted(row_BLD: Tensor) -> Tensor:
        """Causal rows such that row i predicts token i."""
        return torch.cat([torch.zeros_like(row_BLD[:, :1]), row_BLD[:, :-1]], dim=1)

    def clean_hidden(self, ids_BL: Tensor, valid_BL: Tensor) -> Tensor:
        """Aligned rows of the encoder over clean text, [B, L, D]: row i is the causal row before token i, and predicts it. The first
        real token of a row is predicted by nothing: its row means nothing."""
        return self._shifted(self._encode(ids_BL, valid_BL, masks.positions(valid_BL), None))

    def denoise(
        self, block_BS: Tensor, cache: BlockCache, block_length: int, commit: tuple[Tensor, Tensor] | None = None, seen: Seen | None = None,
    ) -> Tensor:
        """As in the base class; `commit` takes a forward of its own, by the encoder."""
        if commit is not None:
            self.commit(*commit, cache, block_length)
        return self._refine(block_BS, cache, seen)

    def commit(self, ids_BC: Tensor, valid_BC: Tensor, cache: BlockCache, block_length: int) -> None:
        position_BC = cache.next_position_B[:, None] + masks.positions(valid_BC)
        row_BCD = self._encode(ids_BC, valid_BC, position_BC, cache)
        cache.commit(position_BC, valid_BC, row_BCD[:, -1])

    def sequence_hidden(
        self, ids_BL: Tensor, valid_BL: Tensor, prompt_length_B: Tensor | None = None, block_length: int | None = None
    ) -> Tensor:
        """Refused: a canvas has no row without its prompt behind it; see `answer_hidden` and `clean_hidden`."""
        raise ValueError(f"{NAME}: a canvas is refined against the encoder's cache; there is no forward over prompt and canvas as one text")

    def noisy_clean_hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: encoder and decoder are two forwards."""
        raise ValueError(f"{NAME}: clean text and noisy blocks can't share a forward; train on one canvas a row")

    def packed_hidden(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: draft and verify needs clean rows and masks in one forward."""
        raise ValueError(f"{NAME}: clean text and drafts can't share a forward; draft and verify is for models that were trained with it")

    def new_whole_cache(self, length: int) -> WholeCache:
        """Refused: what is committed is exact."""
        raise ValueError(f"{NAME}: approximate_cache is for full attention; the encoder's cache is exact")


class _Prefix:
    """What is committed in a block cache, in the form that the decoder reads: it only ever puts its own keys behind these."""

    is_compileable = False

    def __init__(self, cache: BlockCache, text_config: Any):
        self.cache, self.window = cache, text_config.sliding_window
        self.layers = [
            SimpleNamespace(keys=layer.keys[:, :, first : layer.committed], values=layer.values[:, :, first : layer.committed])
            for layer, first in ((layer, self.first(kind)) for layer, kind in zip(cache.layers, text_config.layer_types, strict=True))
        ]

    def first(self, kind: str) -> int:
        """The slot at which a layer of this kind begins to look. All rows end at one slot, so this is the same for all."""
        return max(self.cache.valid_BK.shape[1] - (self.window - 1), 0) if kind == SLIDING else 0

    def valid(self, kind: str) -> Tensor:
        return self.cache.valid_BK[:, self.first(kind) :]


class _Written:
    """Keys and values of one encoder pass, in the form that the decoder reads; gradients flow through them."""

    is_compileable = False

    def __init__(self, layers: int):
        self.layers = [SimpleNamespace(keys=None, values=None) for _ in range(layers)]

    def update(self, key_states: Tensor, value_states: Tensor, layer: int, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.layers[layer] = SimpleNamespace(keys=key_states, values=value_states)
        return key_states, value_states


class _Nothing:
    """The cache of a forward that keeps none: keys and values pass through."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def _refuse(config: Any, facts: Facts) -> None:
    """A ValueError for what is not followed here."""
    text = config.get_text_config()
    if text.use_bidirectional_attention == "all":
        raise ValueError(f"{NAME}: use_bidirectional_attention is 'all'; only an encoder that is causal over text is allowed")
    if not text.final_logit_softcapping:
        raise ValueError(f"{NAME}: final_logit_softcapping is {text.final_logit_softcapping!r}; the head caps its logits above 0")
    if facts.block_length != config.canvas_length:
        raise ValueError(f"{NAME}: block_length is {facts.block_length}, canvas_length {config.canvas_length}; they are one number")
