"""Shared pieces of the tests: a tiny random model, the small world's tokenizer, and small recipes that run in seconds."""

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported: kernels run on CPU tensors

import pytest
import torch

# torch remembers its factory functions at the first use of a device context; a test that replaces torch.empty for a while must come after
# that, or models "on the meta device" are made in memory from then on.
with torch.device("meta"):
    torch.empty(0)

ROOT = Path(__file__).parent.parent
TINY = ROOT / "recipes" / "tiny"


def random_hf(kind: str = "qwen2", *, seed: int = 0, vocab: int = 58, heads: int = 4, kv_heads: int = 2, scale: float = 3.0):
    """A random stock model, 2 layers of width 32. Its weights are scaled up so that confidences spread out."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        kind, vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, eos_token_id=2,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    hf = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, scale * parameter.shape[1] ** -0.5)
    return hf.eval()


def random_model(kind: str = "qwen2", *, facts: dict | None = None, **values):
    """`random_hf` as a DiffusionLM: mask 1, eos 2, pad 0, as the small world's tokenizer has them."""
    from cdlm.families.base import DiffusionLM, Facts

    base = {"mask_token_id": 1, "eos_token_ids": (2,), "pad_token_id": 0}
    return DiffusionLM(random_hf(kind, **values), Facts(**{**base, **(facts or {})}), "native").eval()


def random_prompts(lengths: list[int], *, seed: int = 0, vocab: int = 58):
    """Left-padded random prompts of these lengths: ids [B, P] and the padding mask."""
    from cdlm.data import pad_left

    draw = torch.Generator().manual_seed(seed)
    return pad_left([torch.randint(3, vocab, (length,), generator=draw).tolist() for length in lengths], 0)


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY / "tokenizer", padding_side="left")


@pytest.fixture(autouse=True)
def one_thread():
    """The same numbers on every machine, and no fight for cores; models this small are only slowed down by a second thread."""
    torch.set_num_threads(1)
