"""CDLMConfig: TrainingArguments with the values of this package's objectives. Knows their names; knows no loss."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from cdlm import losses

OBJECTIVES = ("cdlm", "mdlm", "bd3lm", "ar", "tidar", "uniform")


@dataclass
class CDLMConfig(TrainingArguments):
    """TrainingArguments with the values of consistency distillation.

    The three weights default to the paper's for Dream (1.0, 0.5, 0.01), its w_m multiplied by L_g = 256 because the loss here
    is a mean over the budget where equation 6 is a sum. A weight of 0 skips that loss and the forward it needs.
    """

    objective: str = field(
        default="cdlm", metadata={"help": "cdlm: three losses on trajectories; on answers: mdlm, bd3lm, ar, tidar, uniform."}
    )
    block_length: int = field(default=32, metadata={"help": "Slots of a block."})
    distill_weight: float = field(default=1.0, metadata={"help": "Weight of equation 4."})
    consistency_weight: float = field(default=0.5, metadata={"help": "Weight of equation 5."})
    dlm_weight: float = field(default=2.56, metadata={"help": "Weight of equation 6 (0.01 x 256 in the paper's units)."})
    noise_floor: float = field(default=0.02, metadata={"help": "Smallest noise level t; the largest weight is its inverse."})
    noise_first_cap: float = field(default=1.0, metadata={"help": "Largest noise level at the start of training; 1 is U(0, 1)."})
    noise_ramp: float = field(default=0.0, metadata={"help": "Share of training over which the largest level rises to 1."})
    complementary: bool = field(default=False, metadata={"help": "bd3lm: each row with its mask and with the complement of it."})
    alpha: float = field(default=1.0, metadata={"help": "tidar: weight of the autoregressive loss beside the diffusion loss, which has 1."})
    ar_weight: float = field(default=1.0, metadata={"help": "uniform: weight of the encoder's next-token loss beside the diffusion loss."})
    self_conditioning: float = field(
        default=0.5, metadata={"help": "Canvases: probability that a row is told what the step before saw; otherwise it is told nothing."}
    )
    finish: float = field(default=0.5, metadata={"help": "cdlm on canvases: probability that y* is the finished canvas."})
    learning_rate: float = field(default=2e-5, metadata={"help": "Peak learning rate."})
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Schedule of the learning rate."})
    warmup_steps: float = field(default=0.05, metadata={"help": "Warm-up steps; below 1, their share of all steps."})
    remove_unused_columns: bool = field(default=False, metadata={"help": "Batches carry columns that no forward names."})
    report_to: str = field(default="none", metadata={"help": "Where to report besides the log."})
    bf16: bool = field(default=False, metadata={"help": "Forwards in bfloat16 (autocast); weights keep their dtype, losses are fp32."})

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}; allowed: {', '.join(OBJECTIVES)}")
        for name in ("distill_weight", "consistency_weight", "dlm_weight", "alpha", "ar_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; a weight is 0 or above, and finite")
        for name in ("self_conditioning", "finish"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a probability is between 0 and 1")
        if self.objective == "cdlm" and not any(self.weights.values()):
            raise ValueError("distill_weight, consistency_weight and dlm_weight are all 0: nothing would be trained")
        if self.complementary and (self.objective != "bd3lm" or self.noise_first_cap < 1):
            raise ValueError(
                "complementary masks belong to objective bd3lm with noise_first_cap 1 (the complement of few masks is many); "
                f"objective is {self.objective}, noise_first_cap {self.noise_first_cap}"
            )
        if not 0 < self.noise_floor < self.noise_first_cap <= 1:
            raise ValueError(f"0 < noise_floor < noise_first_cap <= 1 must hold; got {self.noise_floor} and {self.noise_first_cap}")
        super().__post_init__()

    @property
    def weights(self) -> dict[str, float]:
        """Of each loss; 1 for one that is not named."""
        if self.objective == "tidar":
            return losses.tidar_weights(self.alpha)
        if self.objective == "uniform":
            return {"ar": self.ar_weight}
        if self.objective != "cdlm":
            return {}
        return {"distill": self.distill_weight, "consistency": self.consistency_weight, "dlm": self.dlm_weight}
