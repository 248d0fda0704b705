"""LoRA adapters put into a model that is to be trained."""

from torch import nn

from cdlm.families.base import DiffusionLM


def match_targets(hf: nn.Module, targets: list[str]) -> None:
    """Every LoRA target names a linear layer of the model, or a ValueError lists those there are."""
    linear = {name.rsplit(".", 1)[-1] for name, module in hf.named_modules() if isinstance(module, nn.Linear)}
    missing = [target for target in targets if target not in linear]
    if missing or not targets:
        raise ValueError(f"train.lora.targets names {missing or 'nothing'}; this model's linear layers: {', '.join(sorted(linear))}")


def add_lora(model: DiffusionLM, *, rank: int, alpha: int, targets: list[str], dropout: float = 0.0) -> nn.Module:
    """Put LoRA layers into the model (in place) and return the PeftModel; every target must match a module.

    The base weights stay frozen: with the adapter off (`peft_model.disable_adapter()`) the model is the teacher again.
    """
    return put_lora(model.hf, rank=rank, alpha=alpha, targets=targets, dropout=dropout, left_alone=model.left_alone)


def put_lora(
    hf: nn.Module, *, rank: int, alpha: int, targets: list[str], dropout: float, left_alone: str | None = None
) -> nn.Module:
    """`add_lora` on a transformers model. left_alone: modules that get no adapter, as PEFT's exclude_modules."""
    from peft import LoraConfig, get_peft_model

    match_targets(hf, targets)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=targets, exclude_modules=left_alone, lora_dropout=dropout, bias="none"
    )
    return get_peft_model(hf, config)
