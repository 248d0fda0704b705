"""What exists only because a Trainer calls it: datasets that draw states, a collator, CDLMConfig and CDLMTrainer.

Six objectives. "cdlm" trains a block-causal student from a teacher's trajectories with three losses (CDLM, arXiv 2511.19269,
algorithm 2). The others train on prompts and answers: "mdlm" a bidirectional masked diffusion LM (LLaDA, arXiv 2502.09992, SFT
loss), "bd3lm" a block diffusion LM (BD3-LM, arXiv 2503.09573), "ar" an autoregressive one, "tidar" an autoregressive one that also drafts
blocks of its own text from masks (TiDAR, arXiv 2511.08923), "uniform" a block diffusion LM whose noise is random tokens, on one canvas
of a row at a time, with self-conditioning (Chen et al., arXiv 2208.04202). The losses stand in `losses.py`.

rows.py: what a batch is made of. objectives.py: what losses it has. loop.py: the Trainer. checkpoints.py, adapters.py, config.py.

Draws of a row do not depend on its batch, on the device or on the number of processes. Dropout alone is drawn by forwards: from a seed of
(seed, step, first row), so what it does depends on which rows share a forward.
"""

from cdlm.trainer.adapters import add_lora, match_targets, put_lora
from cdlm.trainer.checkpoints import check_engine
from cdlm.trainer.config import OBJECTIVES, CDLMConfig
from cdlm.trainer.loop import CDLMTrainer
from cdlm.trainer.objectives import LOSSES, canvas_losses, cdlm_losses, tidar_losses, uniform_losses, whole
from cdlm.trainer.rows import (
    AnswerNoise,
    CanvasNoise,
    CanvasStates,
    Collator,
    InGroup,
    LengthGrouped,
    Shuffled,
    TrajectoryStates,
    WholeSteps,
)

__all__ = [
    "LOSSES", "OBJECTIVES", "AnswerNoise", "CDLMConfig", "CDLMTrainer", "CanvasNoise", "CanvasStates", "Collator", "InGroup",
    "LengthGrouped", "Shuffled", "TrajectoryStates", "WholeSteps", "add_lora", "canvas_losses", "cdlm_losses", "check_engine",
    "match_targets", "put_lora", "tidar_losses", "uniform_losses", "whole",
]  # fmt: skip
