"""`cdlm eval`: the harness's own `run` command for the model `cdlm`, with what decoding cost beside its scores.

All flags are the harness's and are read by its own parser. What is added: eval/tasks of this repository is always searched for tasks,
everything that can be refused is refused before the model is loaded, finished samples are kept beside the results, and the results hold
steps, forwards, TPF and TPS.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import errors
from lm_eval import simple_evaluate
from lm_eval._cli.run import Run
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from cdlm.evaluate.harness import CDLM, add_costs

TASKS = Path(__file__).parents[2] / "eval" / "tasks"


def configured(model: str, arguments: list[str]) -> EvaluatorConfig:
    """The harness's configuration of flags as the user typed them."""
    parser = argparse.ArgumentParser(prog="cdlm eval MODEL")
    Run.create(parser.add_subparsers(dest="command"))
    flags = parser.parse_args(["run", *arguments])
    cfg = EvaluatorConfig.from_cli(flags)
    cfg.device = flags.device or "cpu"  # the harness's own default is a GPU, whether there is one or not
    if "pretrained" in cfg.model_args:
        raise ValueError(f"--model_args pretrained={cfg.model_args['pretrained']}: the model is the first argument, {model}")
    if cfg.wandb_args or cfg.trackio_args:
        raise ValueError("--wandb_args and --trackio_args are not supported; log what lm_eval.simple_evaluate(model='cdlm', ...) returns")
    if cfg.include_path is not None and not Path(cfg.include_path).is_dir():
        raise ValueError(f"--include_path {cfg.include_path}: no such folder")
    cfg.model, cfg.include_path = "cdlm", [str(path) for path in (TASKS, cfg.include_path) if path is not None]
    return cfg


def find_tasks(cfg: EvaluatorConfig) -> TaskManager:
    """The harness's task manager; `cfg.tasks` becomes the names it knows. What can't be run is a ValueError, before a model is loaded."""
    cfg.tasks = [name for part in ([cfg.tasks] if isinstance(cfg.tasks, str) else cfg.tasks) for name in part.split(",")]
    try:
        # The harness's own index is thousands of files; it is read only when a name is not among the included ones.
        manager = TaskManager(include_path=cfg.include_path, include_defaults=False, metadata=cfg.metadata)
        if any(task not in manager.all_tasks for task in cfg.tasks):
            manager = cfg.process_tasks(cfg.metadata)
    except ValueError as error:
        raise ValueError(f"{error}. `lm-eval ls tasks` lists the harness's, {TASKS} holds this repository's") from None
    for task in cfg.tasks:
        name = task if isinstance(task, str) else task.get("task")
        try:
            loaded = manager.load([task])
        except (OSError, errors.HTTPError) as error:
            raise ValueError(
                f"task {name}: its data or metric can't be read: {type(error).__name__}: {error}; a task of the Hub needs the "
                "network once, gsm8k_local, humaneval_local and small_world read files"
            ) from None
        unsafe = [name for name, one in loaded["tasks"].items() if getattr(one, "UNSAFE_CODE", False)]
        if unsafe and not cfg.confirm_run_unsafe_code:
            raise ValueError(f"task {', '.join(unsafe)} runs code that the model wrote; --confirm_run_unsafe_code says that it may")
    return manager


def beside(output_path: str | None) -> Path | None:
    """Where finished samples are kept: in the folder of the results, None where no results are written."""
    if not output_path:
        return None
    path = Path(output_path)
    return (path.parent if path.suffix == ".json" else path) / "finished.jsonl"


def run(model: str, arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate a checkpoint; returns the harness's results without samples, which are in files where --log_samples asks for them."""
    cfg = configured(model, arguments)
    manager = find_tasks(cfg)
    own = dict(cfg.model_args)
    cfg.model_args = {"pretrained": model, **own}
    lm = CDLM(**{
        "pretrained": model, "batch_size": cfg.batch_size, "device": cfg.device,
        "resume": beside(cfg.output_path), **own,
    })  # fmt: skip
    tracker = EvaluationTracker(**cfg.hf_hub_log_args, **({"output_path": cfg.output_path} if cfg.output_path else {}))
    python_seed, numpy_seed, torch_seed, fewshot_seed = cfg.seed or [None] * 4
    results = simple_evaluate(
        model=lm, model_args=cfg.model_args, tasks=cfg.tasks, num_fewshot=cfg.num_fewshot, batch_size=lm.batch_size, device=str(lm.device),
        use_cache=cfg.use_cache, limit=cfg.limit, samples=cfg.samples, check_integrity=cfg.check_integrity, write_out=cfg.write_out,
        log_samples=True, evaluation_tracker=tracker, system_instruction=cfg.system_instruction,
        apply_chat_template=cfg.apply_chat_template, fewshot_as_multiturn=bool(cfg.fewshot_as_multiturn), gen_kwargs=cfg.gen_kwargs,
        task_manager=manager, predict_only=cfg.predict_only, random_seed=python_seed, numpy_random_seed=numpy_seed,
        torch_random_seed=torch_seed, fewshot_random_seed=fewshot_seed, confirm_run_unsafe_code=cfg.confirm_run_unsafe_code,
        metadata=cfg.metadata, **cfg.cache_requests,
    )  # fmt: skip
    add_costs(results, lm, cfg.samples)
    results["config"]["cdlm"] |= {
        "apply_chat_template": cfg.apply_chat_template, "fewshot_as_multiturn": bool(cfg.fewshot_as_multiturn),
        "num_fewshot": cfg.num_fewshot, "system_instruction": cfg.system_instruction, "command": ["cdlm", "eval", model, *arguments],
    }  # fmt: skip
    samples = results.pop("samples")
    if cfg.show_config:
        say(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False))
    tracker.save_results_aggregated(results=results, samples=samples)
    if cfg.log_samples:
        for task in results["configs"]:
            tracker.save_results_samples(task_name=task, samples=samples[task])
    say(f"{model}, {lm.decoding}, limit {cfg.limit}, num_fewshot {cfg.num_fewshot}, chat template {bool(cfg.apply_chat_template)}")
    for column in ("results", "groups"):
        if column in results:
            say(make_table(results, column))
    return results
