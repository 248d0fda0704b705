"""CDLMTrainer: transformers' Trainer with the objectives of this package, and what engines need that wrap a model."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import Dataset
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from cdlm import data, files, losses, noise
from cdlm.families.base import DiffusionLM
from cdlm.processes import check_checkpoints, check_engine
from cdlm.trainer.checkpoints import WRITER_FAILED, plain_state, read_whole, renamed, written_by
from cdlm.trainer.config import CDLMConfig
from cdlm.trainer.objectives import LOSSES
from cdlm.trainer.rows import AnswerNoise, CanvasStates, Collator, Drawing, Epoch, LengthGrouped, Shuffled, WholeSteps


class CDLMTrainer(Trainer):
    """transformers' Trainer with the objectives of this package.

    teacher_head: the teacher's lm_head, for "cdlm"; it stays as it is, also when the student's own head is trained. lengths: of each row,
    by which rows stand together. grouped: how many do (None: those of a forward; of several processes, what one would take): a whole
    number of groups is a step, a whole number of forwards a group.
    Every loss is logged under its name, with its weight beside it. loss_is_scaled_for_ga is False: a loss is a mean over its
    micro-batch, and the Trainer divides by the number of micro-batches.

    Under `accelerate launch` the Trainer's own engine (DDP, FSDP2, DeepSpeed) wraps the model, and the micro-batches that one process would
    take go to the processes in turn; with that many fewer micro-batches a step, or smaller ones, the steps are the same ones. An engine
    gathers weights and reduces gradients around the forward of what it wraps, so all of an objective, its several forwards, the head and
    the losses, runs inside one call of the wrapped model. Checkpoints are written under all but DeepSpeed.
    """

    _tag_names = ["cdlm", "diffusion", "block-diffusion"]
    _name = "CDLM"
    _paper = {"title": "CDLM: Consistency Diffusion Language Models for Faster Sampling", "id": "2511.19269"}
    loss_is_scaled_for_ga = False
    args: CDLMConfig

    def __init__(
        self, model: DiffusionLM, args: CDLMConfig, train_dataset: Dataset, data_collator: Collator,
        teacher_head: nn.Module | None = None, lengths: Sequence[tuple[int, int]] | None = None, grouped: int | None = None,
        peft_model: Any = None, **kwargs: Any,
    ):
        stored_logits = isinstance(train_dataset, CanvasStates)
        if args.objective == "cdlm" and args.distill_weight > 0 and teacher_head is None and not stored_logits:
            raise ValueError("objective cdlm with distill_weight > 0 needs teacher_head, the teacher's lm_head")
        if args.n_gpu > 1:
            raise ValueError(f"one process has {args.n_gpu} GPUs; start one process a GPU: accelerate launch --num_processes {args.n_gpu}")
        if args.fp16:
            raise ValueError("fp16 is True; allowed: bf16, or the model's own dtype")
        wrapped = model.hf if peft_model is None else peft_model  # what checkpoints save; forwards go through `model`
        if args.gradient_checkpointing and peft_model is not None:
            model.hf.enable_input_require_grads()  # a checkpoint whose inputs need no gradient would give its adapters none
        super().__init__(model=wrapped, args=args, train_dataset=train_dataset, data_collator=data_collator, **kwargs)
        check_engine(str(args.device), shares_layers=model.redecides, engine=self.engine)
        if self.engine == "fsdp":
            check_checkpoints(self.accelerator.state.fsdp_plugin.state_dict_type.name)
        if self.engine == "fsdp" and args.bf16:  # accelerate's own would also round losses, and sum gradients, in bfloat16
            plugin = self.accelerator.state.fsdp_plugin
            plugin.mixed_precision_policy = replace(plugin.mixed_precision_policy, output_dtype=None, reduce_dtype=torch.float32)
        if self.engine == "deepspeed":
            self.args.save_strategy = SaveStrategy.NO  # its checkpoints are pickles, which are never read
        self.diffusion, self.teacher_head, self.lengths, self.grouped = model, teacher_head, lengths, grouped
        self._calls = False  # whether the model's forward is `_call`
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = defaultdict(int)
        self._epoch = Epoch(*([train_dataset] if isinstance(train_dataset, Drawing) else []))
        self.add_callback(self._epoch)

    def _get_train_sampler(self, train_dataset=None):
        args, rows = self.args, self.train_dataset if train_dataset is None else train_dataset
        each = args.train_batch_size
        grouped = self.grouped or each
        if grouped % each:
            raise ValueError(f"a forward has {each} rows, which do not divide a group of {grouped}")
        per_step = each * args.gradient_accumulation_steps * args.world_size
        order: Shuffled | LengthGrouped
        if self.lengths is None:
            order = Shuffled(len(rows), args.seed if args.data_seed is None else args.data_seed)
        else:
            order = LengthGrouped(self.lengths, grouped, args.seed, used=len(self.lengths) // per_step * per_step)
        sampler = WholeSteps(order, per_step, grouped, in_groups=isinstance(rows, AnswerNoise))
        self._epoch.listeners += (sampler,)
        return sampler

    def _prepare_input(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        """To the device and no more: the Trainer would also round noise to the dtype of an engine."""
        return {name: value.to(self.args.device) for name, value in data.items()}

    @property
    def head(self) -> losses.Head:
        """What makes logits of hidden rows. Losses ask it once a chunk, again in the backward, and processes have different numbers of
        chunks: of a head that FSDP shards the weights are there for all of a micro-batch, and what FSDP does around each call is left out,
        or one process would wait for weights that the other never sends."""
        head = self.diffusion.head
        return head.forward if isinstance(head, FSDPModule) else head

    def training_step(self, *args, **kwargs):
        """As the Trainer's; then a sharded head gives its weights back."""
        loss = super().training_step(*args, **kwargs)
        if isinstance(head := self.diffusion.head, FSDPModule):
            head.reshard()
        return loss

    @property
    def engine(self) -> str:
        """plain (one process, or DDP), fsdp or deepspeed. The last two shard weights, and their checkpoints have other files."""
        return "fsdp" if self.is_fsdp_enabled else "deepspeed" if self.is_deepspeed_enabled else "plain"

    def full_state(self) -> dict[str, Tensor] | None:
        """After training, all weights in the main process; None where no engine has sharded them. All processes call."""
        return None if self.engine == "plain" else self.accelerator.get_state_dict(self.model_wrapped)

    def end(self) -> None:
        """After the last call of a trainer: models that are loaded later are whole ones. transformers has them loaded in shares as long as
        the arguments of a training under ZeRO-3 are remembered."""
        if self.engine == "deepspeed":
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config

            unset_hf_deepspeed_config()

    def train(self, *args, **kwargs):
        """As the Trainer's, with the wrapped model's forward replaced meanwhile."""
        with self.calling():
            return super().train(*args, **kwargs)

    def load(self, checkpoint: str) -> None:
        """The weights of a checkpoint, without a step of training."""
        if self.engine == "plain":
            self._load_from_checkpoint(checkpoint)
        else:  # a sharded checkpoint is read into a model that is wrapped
            self._prepare_for_training(self.args.max_steps, self.get_train_dataloader(), checkpoint)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Inside, the trained module's forward calls what it is given, so that engines wrap all of an objective."""
        trained, self._calls = self.model, True
        trained.forward = _call
        try:
            yield
        finally:
            self._calls = False
            del trained.forward

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        objective = LOSSES[self.args.objective]
        if "index" in inputs:  # what dropout draws from: not the process, nor where a run was resumed
            torch.manual_seed(data.sample_seed(self.args.seed, self.state.global_step, int(inputs["index"][0])))

        def work() -> dict[str, Tensor]:
            if isinstance(head := self.diffusion.head, FSDPModule):
                head.unshard()
            return objective(self, inputs)

        # A closure, for engines cast the tensors that they see among arguments, and noise must not be rounded.
        parts = (model if self._calls else _call)(work)
        total = None
        for name, loss in parts.items():
            weight = self.args.weights.get(name, 1.0)
            self._require_finite(loss, name, inputs)
            self._sums[name] = self._sums.get(name, 0) + loss.detach()
            self._counts[name] += 1
            total = weight * loss if total is None else total + weight * loss
        return (total, {}) if return_outputs else total

    def _require_finite(self, loss: Tensor, name: str, inputs: dict[str, Tensor]) -> None:
        """A FloatingPointError that names the loss, the step and the samples of the micro-batch it is of, if it is no number."""
        try:
            losses.finite(loss, name)
        except FloatingPointError as error:
            named = getattr(self.train_dataset, "name", lambda index: f"row {index}")
            samples = ", ".join(named(index) for index in inputs["index"].tolist()) if "index" in inputs else "not known"
            raise FloatingPointError(f"{error}: step {self.state.global_step + 1}, samples: {samples}") from None

    def _save_checkpoint(self, model, trial):
        """The Trainer's checkpoint, with checksums written last and no pickle that nobody reads; older ones go after that.

        A FloatingPointError for weights that are no numbers: a checkpoint is always one to go on from.
        """
        where = Path(self._get_output_dir(trial=trial))
        folder = where / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
                raise FloatingPointError(f"{name} is no longer finite: step {self.state.global_step}; lower the learning rate")
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with files.names_path(folder):
                super()._save_checkpoint(model, trial)
        except RuntimeError as error:
            if not any(text in str(error) for text in WRITER_FAILED):
                raise
            raise files.NotWritten(f"{folder} can't be written: {' '.join(str(error).split())}") from error
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            with files.names_path(folder):
                (folder / "training_args.bin").unlink(missing_ok=True)
                files.seal(folder)
                files.sync_all(folder)
            rotate_checkpoints(str(where), self.args.save_total_limit)

    def _prepare_for_training(self, max_steps, train_dataloader, resume_from_checkpoint):
        """The Trainer's; weights of whole models are read here, before FSDP takes its shares of the model. See `head` for the rest."""
        if self.engine == "fsdp" and resume_from_checkpoint is not None and written_by(Path(resume_from_checkpoint)) == "plain":
            read_whole(self.model, Path(resume_from_checkpoint))
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if isinstance(head := self.diffusion.head, FSDPModule):
            head.set_reshard_after_forward(False, recurse=False)
            head.set_reshard_after_backward(False, recurse=False)
        sharding = getattr(getattr(self.model_wrapped, "optimizer", None), "parameter_offload", None)  # of DeepSpeed's engine, under ZeRO-3
        if sharding is not None:
            sharding.persistent_parameters += keep_gathered(self.diffusion.head)
        return prepared

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        """From safetensors alone, but for what FSDP reads of its own: the Trainer would also read weights from a pickle."""
        place = Path(resume_from_checkpoint)
        written = written_by(place)
        own = place.glob("pytorch_model_fsdp*.bin") if written == "fsdp" else ()  # accelerate reads that with weights_only, others do not
        if pickles := sorted({*place.glob("*model*.bin"), *place.glob("*model*.bin.index.json")} - {*own}):
            raise ValueError(f"{pickles[0]} is a pickle, which can run code; weights are read from safetensors alone: remove it")
        if written == self.engine:
            with plain_state(resume_from_checkpoint):
                super()._load_from_checkpoint(resume_from_checkpoint, model)
        elif self.engine == "plain":
            read_whole(self.model, place)

    def _load_optimizer_and_scheduler(self, checkpoint):
        with plain_state(checkpoint):
            if checkpoint is None or written_by(Path(checkpoint)) == self.engine:
                super()._load_optimizer_and_scheduler(checkpoint)
            else:
                self._translate_optimizer(Path(checkpoint))
                self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / "scheduler.pt", weights_only=True))

    def _translate_optimizer(self, checkpoint: Path) -> None:
        """The optimizer's state of whole models for FSDP, or the other way round: FSDP names parameters, and without it they are numbered
        in the order of their groups, which is the same one."""
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        order = [named[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]
        if self.engine == "plain":
            saved = torch.load(checkpoint / "optimizer.bin", map_location="cpu", weights_only=True)
            self.optimizer.load_state_dict(renamed(saved, {name: number for number, name in enumerate(order)}))
            return
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

        saved = {}
        if self.accelerator.is_main_process:  # which hands each its share
            saved = renamed(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True), dict(enumerate(order)))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_optimizer_state_dict(self.model, self.optimizer, saved, options=options)

    def _load_rng_state(self, checkpoint):
        with plain_state(checkpoint):
            super()._load_rng_state(checkpoint)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the mean of each loss since the last log, and its weight."""
        for name, value in self._sums.items():
            logs[f"{name}_loss"] = round(float(self.accelerator.gather(value).mean()) / self._counts[name], 6)
            if name in self.args.weights:
                logs[f"{name}_weight"] = self.args.weights[name]
        self._sums, self._counts = {}, defaultdict(int)
        super().log(logs, start_time)

    def noise_cap(self) -> float:
        progress = self.state.global_step / max(1, self.state.max_steps)
        return noise.rising_cap(progress, self.args.noise_first_cap, self.args.noise_ramp)


def _call(work: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The forward of a module in training."""
    return work()


def keep_gathered(head: nn.Module) -> list[Any]:
    """Let ZeRO-3 keep a module's weights whole in every process, as it does those of small modules, and do nothing around its calls, of
    which processes have different numbers; the weights that it sharded before."""
    parameters: list[Any] = list(head.parameters())  # with attributes of DeepSpeed's
    sharded = [parameter for parameter in parameters if not parameter.ds_persist]
    for parameter in sharded:
        parameter.ds_persist = True
    if sharded:
        sharded[0].all_gather(sharded)
    for module in head.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook.__module__.startswith("deepspeed.")]:
                del hooks[key]
    return sharded
