"""What a stage holds in the memory of one device, under each engine of recipes/accelerate/, and what it leaves on disk.

Counted on the meta device: a model of the recipe's sizes without weights, its parameters by dtype and whether they are trained, and the
tensors that autograd keeps in a forward. Attention counts as a fused kernel, whose scores are never stored. Knows what each engine
shards; knows no card and no recipe's file. Not counted: the driver's own memory, fragmentation, buffers of communication; so a stage
fits when it needs at most HEADROOM of a card.

one_gpu, ddp: everything in each process; DDP has a second copy of the gradients, its buckets. fsdp2, zero3: weights, gradients and
optimizer state in shares, and for the time of a forward the weights of two layers (FSDP2: one computes, one is fetched; ZeRO-3: up to
LIVE parameters), with the embeddings and the head. All load a whole model before they shard it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cdlm import losses

ENGINES = ("one_gpu", "ddp", "fsdp2", "zero3")
SHARDED = ("fsdp2", "zero3")
HEADROOM = 0.9
LIVE = 10**9  # DeepSpeed's stage3_max_live_parameters
LOSS_COPIES = 9  # of a chunk of logits in fp32 that three losses of one chunk each hold at their backward (of several 7; LOG.md)
CHOICE_COPIES = 4  # that choosing tokens holds


@dataclass(frozen=True)
class Model:
    """Bytes of a model in training: of all weights (how many: `parameters`), of those that are trained, of its largest layer, of embeddings
    and head; of what a forward keeps for its backward (`kept`), and with gradient checkpointing of one layer's part of that (`layer_kept`,
    else 0)."""

    parameters: int
    weights: float
    trained: float
    layer: float
    ends: float
    kept: float = 0.0
    layer_kept: float = 0.0


@dataclass
class Held:
    """What a stage holds, by name, in bytes."""

    parts: dict[str, float] = field(default_factory=dict)
    load: float = 0.0  # before the stage shards what it loaded

    @property
    def total(self) -> float:
        return max(self.load, sum(self.parts.values()))


def bytes_of(parameters: Any) -> float:
    """Of some parameters, each counted once."""
    return float(sum(p.numel() * p.element_size() for p in {id(p): p for p in parameters}.values()))


def layers_of(hf: Any) -> nn.ModuleList:
    """The decoder's layers: its longest list of modules."""
    lists = [module for module in hf.get_decoder().modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len)


def kept_for_backward(hf: Any, rows: int, length: int) -> float:
    """Bytes that autograd keeps in a forward of `rows` sequences up to the final norm, parameters aside; on any device, meta too."""
    parameters = {p.untyped_storage()._cdata for p in hf.parameters()}
    seen: dict[int, Tensor] = {}
    config = hf.config.get_text_config()
    heads, head_dim = config.num_attention_heads, getattr(config, "head_dim", None)
    length += length == head_dim  # else queries, [length, head_dim], look like scores

    def note(tensor: Tensor) -> Tensor:
        scores = tensor.shape[-2:] == (length, length) and tensor.numel() == rows * heads * length**2
        if not scores and tensor.untyped_storage()._cdata not in parameters:
            seen[tensor.untyped_storage()._cdata] = tensor  # held, so that no other storage gets its number
        return tensor

    device = next(hf.parameters()).device
    ids = torch.zeros(rows, length, dtype=torch.long, device=device)
    position = torch.arange(length, device=device).expand(rows, length)
    mask = torch.zeros(rows, 1, length, length, dtype=torch.bool, device=device)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        hf.get_decoder()(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False)
    return float(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))


def kept_by_experts(shape: Any, rows: int, length: int, size: int) -> float:
    """The same by arithmetic, for models whose routing can't run without values: per token and layer 12 rows of the model's width (two in
    fp32 by each norm), queries, keys, values and their rotated copies, and five of an MLP's inner rows for each expert that a token goes
    to. An estimate."""
    inner = shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    width = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return rows * length * shape.layers * size * (12.0 * shape.hidden + 2 * width + 5 * inner)


def measure(hf: Any, rows: int, length: int, *, checkpointing: bool, shape: Any = None) -> Model:
    """The sizes of a model on the meta device as it would be trained; its trained parameters require gradients, no others.

    shape: of a mixture of experts, whose kept bytes are then estimated from it.
    """
    layers = layers_of(hf)
    ends = [module for module in (hf.get_input_embeddings(), hf.get_output_embeddings()) if module is not None]
    size = next(hf.parameters()).element_size()
    kept = kept_for_backward(hf.train(), rows, length) if shape is None else kept_by_experts(shape, rows, length, size)
    layer_kept = 0.0
    if checkpointing:  # each layer keeps its input; one layer at a time is computed again
        layer_kept = kept / len(layers)
        kept = float(rows * length * hf.config.get_text_config().hidden_size * size * len(layers))
    return Model(
        parameters=sum(p.numel() for p in hf.parameters()), weights=bytes_of(hf.parameters()),
        trained=bytes_of(p for p in hf.parameters() if p.requires_grad),
        layer=max(bytes_of(layer.parameters()) for layer in layers), ends=bytes_of(p for module in ends for p in module.parameters()),
        kept=kept, layer_kept=layer_kept,
    )  # fmt: skip


def training(
    model: Model, engine: str, devices: int, *, forwards: int, teacher_head: float, slots: int, vocab: int
) -> Held:
    """What training holds. forwards: those of a micro-batch whose backward is still to come. teacher_head: bytes of its copy. slots: at
    most so many rows of logits in a loss."""
    shares = devices if engine in SHARDED else 1
    held = Held({
        "weights": model.weights / shares,
        "gradients": model.trained * (2 if engine == "ddp" else 1) / shares,
        "optimizer": 2 * model.trained / shares,
        "activations": forwards * model.kept + model.layer_kept,
        "losses": float(LOSS_COPIES * 4 * min(losses.CHUNK_VALUES, slots * vocab)),
    })  # fmt: skip
    if teacher_head:
        held.parts["teacher's head"] = teacher_head
    if engine in SHARDED:
        whole = 2 * model.layer if engine == "fsdp2" else LIVE / model.parameters * model.weights
        held.parts["gathered"] = min(whole + model.ends, model.weights)
        held.load = model.weights
    return held


def decoding(
    weights: Mapping[str, float], *, rows: int, length: int, block: int, vocab: int, size: int, inner: float, cache: float
) -> Held:
    """What decoding holds, the same under every engine, for each process decodes with whole models. inner: values of a token's widest
    layer. cache: bytes of keys and values."""
    return Held({
        **weights, "cache": cache, "activations": rows * length * inner * size,
        "logits": float(rows * block * vocab * (size + CHOICE_COPIES * 4)),
    })  # fmt: skip
