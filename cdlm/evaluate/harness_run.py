"""`cdlm eval`: the harness's own `run` command for the model `cdlm`, with what decoding cost beside its scores.

All flags are the harness's and are read by its own parser. What is added: eval/tasks of this repository is always searched for tasks,
everything that can be refused is refused before the model is loaded, finished samples are kept beside the results, and the results hold
steps, forwards, TPF and TPS. Under `accelerate launch` every process comes here; the first one writes and says.
"""

import argparse
import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import errors
from lm_eval import simple_evaluate
from lm_eval._cli.run import Run
from lm_eval.api.instance import Instance
from lm_eval.api.task import Task
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

from cdlm import files, processes, terminal
from cdlm.evaluate.harness import CDLM, add_costs
from cdlm.processes import launched

TASKS = Path(__file__).parents[2] / "eval" / "tasks"


def configured(model: str, arguments: list[str]) -> EvaluatorConfig:
    """The harness's configuration of flags as the user typed them."""
    parser = argparse.ArgumentParser(prog="cdlm eval MODEL")
    Run.create(parser.add_subparsers(dest="command"))
    flags = parser.parse_args(["run", *arguments])
    if not flags.tasks and not flags.config:
        raise ValueError(f"--tasks is missing: name tasks, as in --tasks A,B; `lm-eval ls tasks` lists the harness's, {TASKS} holds others")
    cfg = EvaluatorConfig.from_cli(flags)
    cfg.device = flags.device or "cpu"  # the harness's own default is a GPU, whether there is one or not
    if "pretrained" in cfg.model_args:
        raise ValueError(f"--model_args pretrained={cfg.model_args['pretrained']}: the model is the first argument, {model}")
    if cfg.wandb_args or cfg.trackio_args:
        raise ValueError("--wandb_args and --trackio_args are not supported; log what lm_eval.simple_evaluate(model='cdlm', ...) returns")
    if cfg.include_path is not None and not Path(cfg.include_path).is_dir():
        raise ValueError(f"--include_path {cfg.include_path}: no such folder")
    if cfg.model_args.get("trust_remote_code"):  # the harness passes its flag for data sets on to the model, which runs no foreign code
        cfg.model_args = {name: value for name, value in cfg.model_args.items() if name != "trust_remote_code"}
    if flags.model not in (None, "cdlm"):
        raise ValueError(f"--model {flags.model}: cdlm eval runs the model cdlm; lm-eval run takes the others")
    if isinstance(cfg.apply_chat_template, str):
        raise ValueError(f"--apply_chat_template {cfg.apply_chat_template}: give the flag alone; it applies the tokenizer's own template")
    if cfg.apply_chat_template and cfg.cache_requests.get("cache_requests"):
        raise ValueError("--cache_requests with --apply_chat_template: a cached chat does not say what the template wrote; leave one out")
    if cfg.num_fewshot is not None and cfg.num_fewshot < 0:
        raise ValueError(f"--num_fewshot is {cfg.num_fewshot}; it must be at least 0")
    if cfg.output_path and (kept := beside(cfg.output_path)):
        place = next(folder for folder in kept.absolute().parents if folder.exists())
        if not place.is_dir():
            raise ValueError(f"--output_path {cfg.output_path}: {place} is a file")
    if cfg.limit is not None and not cfg.limit > 0:
        raise ValueError(f"--limit is {cfg.limit:g}; it must be above 0: a number of samples a task, or below 1 a share of them")
    cfg.model, cfg.include_path = "cdlm", [str(path) for path in (TASKS, cfg.include_path) if path is not None]
    return cfg


def find_tasks(cfg: EvaluatorConfig) -> TaskManager:
    """The harness's task manager; `cfg.tasks` becomes the names it knows. What can't be run is a ValueError, before a model is loaded."""
    cfg.tasks = [name for part in ([cfg.tasks] if isinstance(cfg.tasks, str) else cfg.tasks) for name in part.split(",") if name]
    try:
        # The harness's own index is thousands of files; it is read only when a name is not among the included ones.
        manager = TaskManager(include_path=cfg.include_path, include_defaults=False, metadata=cfg.metadata)
        if any(task not in manager.all_tasks for task in cfg.tasks):
            manager = cfg.process_tasks(cfg.metadata)
    except ValueError as error:
        raise ValueError(f"{error}. `lm-eval ls tasks` lists the harness's, {TASKS} holds this repository's") from None
    tasks: dict[str, Task] = {}
    for task in cfg.tasks:
        name = task if isinstance(task, str) else task.get("task")
        try:
            loaded = manager.load([task])["tasks"]
        except (OSError, errors.HTTPError) as error:
            raise ValueError(
                f"task {name}: its data or metric can't be read: {type(error).__name__}: {error}; a task of the Hub needs the "
                "network once, gsm8k_local, humaneval_local and small_world read files"
            ) from None
        except IndexError as error:  # the harness looks at the first one
            raise ValueError(f"task {name} has no questions, or can't be loaded: {error}") from None
        except ImportError as error:
            raise ValueError(f"task {name} needs packages that are not here: {error}") from None
        except (ValueError, TypeError, LookupError, AssertionError) as error:
            code = cfg.confirm_run_unsafe_code and os.environ.get("HF_ALLOW_CODE_EVAL") != "1"
            hint = "; code tasks of the Hub need HF_ALLOW_CODE_EVAL=1 in the environment" if code else ""
            raise ValueError(f"task {name} can't be loaded: {type(error).__name__}: {error}{hint}") from None
        unsafe = [name for name, one in loaded.items() if getattr(one, "UNSAFE_CODE", False)]
        if unsafe and not cfg.confirm_run_unsafe_code:
            raise ValueError(f"task {', '.join(unsafe)} runs code that the model wrote; --confirm_run_unsafe_code says that it may")
        tasks |= loaded
    check_samples(cfg, tasks)
    for name, one in tasks.items():
        if getattr(one, "UNSAFE_CODE", False):
            try_metric(name, one)
    return manager


def check_samples(cfg: EvaluatorConfig, tasks: dict[str, Task]) -> None:
    """Refuse a task without questions, documents that it does not have, and more processes than questions. `cfg.samples` gets sorted: the
    harness takes documents in their own order, and would number them in the order that was typed."""
    lists = cfg.samples.values() if isinstance(cfg.samples, dict) else [cfg.samples or []]
    if not isinstance(cfg.samples or {}, dict) or not all(isinstance(part, list) and all(type(n) is int for n in part) for part in lists):
        raise ValueError(f"--samples is {cfg.samples!r}; it must be as " + '{"task": [0, 5]}, typed or in a file')
    if unknown := sorted(set(cfg.samples or {}) - set(tasks)):
        raise ValueError(f"--samples names {', '.join(unknown)}; the tasks are {', '.join(tasks)}")
    cfg.samples = {name: sorted(set(chosen)) for name, chosen in cfg.samples.items()} if cfg.samples else None
    processes = launched()
    for name, task in tasks.items():
        total = len(task.eval_docs)
        chosen = (cfg.samples or {}).get(name)
        if not total or chosen == []:
            raise ValueError(f"task {name} has no questions" if not total else f"--samples gives no documents of task {name}")
        if chosen and (chosen[0] < 0 or chosen[-1] >= total):
            raise ValueError(f"--samples: task {name} has documents 0 to {total - 1}, asked for are {chosen}")
        asked = len(chosen) if chosen else min(total, get_sample_size(task, cfg.limit) or total)
        if asked < processes:
            raise ValueError(f"task {name} has {asked} questions for {processes} processes; start at most {asked}")


SOLUTION = "    return a + b\n"
# A row of HumanEval's form and one of MBPP's, each with the columns that tell the form and with what a completion begins with.
KNOWN: tuple[tuple[set[str], dict[str, Any], str], ...] = (
    ({"prompt", "entry_point", "test"}, {
        "task_id": "known", "prompt": "def add(a, b):\n", "suffix": "", "entry_point": "add", "canonical_solution": SOLUTION,
        "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n    assert candidate(-1, 1) == 0\n",
    }, ""),
    ({"code", "test_list"}, {
        "task_id": 0, "text": "Write a function that adds two numbers.", "prompt": "Write a function that adds two numbers.",
        "code": "def add(a, b):\n" + SOLUTION, "test_list": ["assert add(2, 3) == 5", "assert add(-1, 1) == 0", "assert add(0, 0) == 0"],
        "test": "assert add(2, 3) == 5\nassert add(-1, 1) == 0\n", "test_imports": [], "test_setup_code": "", "challenge_test_list": [],
    }, "def add(a, b):\n"),
)  # fmt: skip
# How an answer may be written; which of them a task reads is up to its filter.
FORMS = ("{}", "{}```", "\n{}```", "```python\n{}```")


def scores(task: Task, doc: dict[str, Any], text: str) -> list[float]:
    """What a task's own filters and metrics make of an answer, every value of them."""
    repeats = task.config.repeats or 1
    found: list[float] = []
    for each in task._filters:
        one = Instance("generate_until", doc, ("", {}), 0, (task.config.task, 0, repeats), resps=[text] * repeats)
        each.apply([one])
        found += task.process_results(doc, list(one.filtered_resps.values())).values()
    return found


def try_metric(name: str, task: Task) -> None:
    """A right program must score 1 and a wrong one 0 through the task's own filters and metric, or nothing that it says is worth anything.

    A task whose rows have neither HumanEval's nor MBPP's form is refused: no program is known that solves one.
    """
    columns = set(task.eval_docs[0])
    fitting = [(doc, start) for needed, doc, start in KNOWN if needed <= columns]
    if not fitting:
        raise ValueError(
            f"task {name}: its rows have neither HumanEval's nor MBPP's form, so its metric can't be tried on a known program; they have "
            f"{', '.join(sorted(columns))}"
        )
    doc, start = fitting[0]
    right, wrong = start + SOLUTION, start + SOLUTION.replace("+", "*")
    try:
        found = [tuple(sorted(set(scores(task, doc, form.format(text)))) for text in (right, wrong)) for form in FORMS]
    except Exception as error:  # the metric is anybody's code
        raise ValueError(f"task {name}: its metric fails on a known program: {type(error).__name__}: {error}") from error
    if ([1.0], [0.0]) not in found:
        pairs = ", ".join(f"{good} and {bad}" for good, bad in found)
        raise ValueError(f"task {name}: a right program must score 1 and a wrong one 0; by the task's own metric they score {pairs}")


def beside(output_path: str | None) -> Path | None:
    """Where finished samples are kept: in the folder of the results, None where no results are written."""
    if not output_path:
        return None
    path = Path(output_path)
    return (path.parent if path.suffix == ".json" else path) / "finished.jsonl"


def run(model: str, arguments: list[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Evaluate a checkpoint; returns the harness's results without samples, which are in files where --log_samples asks for them.

    Of several processes only the first returns results, writes and says; the others return an empty dict. One evaluation at a time keeps
    its finished samples in a folder; a second is a ValueError before the model is loaded.
    """
    cfg = configured(model, arguments)
    manager = find_tasks(cfg)
    kept = cfg.model_args.get("resume") or beside(cfg.output_path)
    device = str(cfg.device or "cpu")
    processes.check_device(device)
    group = processes.start(device)
    with contextlib.ExitStack() as held:
        with group.main_first():  # else the others would wait for one that is refused
            if kept and group.main:
                held.enter_context(files.locked_place(Path(kept)))
        return _run(cfg, manager, model, arguments, say)


def _run(
    cfg: EvaluatorConfig, manager: TaskManager, model: str, arguments: list[str], say: Callable[[str], None]
) -> dict[str, Any]:
    """`run` with everything read, for the one that may write."""
    try:
        tracker = EvaluationTracker(**cfg.hf_hub_log_args, **({"output_path": cfg.output_path} if cfg.output_path else {}))
    except TypeError as error:
        raise ValueError(f"--hf_hub_log_args {cfg.hf_hub_log_args}: {error}") from None
    own = dict(cfg.model_args)
    cfg.model_args = {"pretrained": model, **own}
    lm = CDLM(**{
        "pretrained": model, "batch_size": cfg.batch_size, "device": cfg.device,
        "resume": beside(cfg.output_path), **own,
    })  # fmt: skip
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
    if results is None:  # not the first process
        return {}
    results["config"]["cdlm"] |= {
        "apply_chat_template": cfg.apply_chat_template, "fewshot_as_multiturn": bool(cfg.fewshot_as_multiturn),
        "num_fewshot": cfg.num_fewshot, "system_instruction": cfg.system_instruction,
        "command": [terminal.without_secrets(word) for word in ("cdlm", "eval", model, *arguments)],
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
