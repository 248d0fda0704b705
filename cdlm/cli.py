"""What did the user type? Parses the command line and calls the stages; heavy modules are loaded by the command that needs them."""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from cdlm import files, processes, terminal

SHARED = ("distill", "collect", "train", "evaluate", "export", "ablate", "eval")  # whose work several processes share


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error is said."""

    def error(self, message: str) -> NoReturn:
        if "--debug" in message.partition("unrecognized arguments:")[2].split():
            message += "; --debug stands before COMMAND, as in cdlm --debug distill RECIPE"
        self.exit(2, f"cdlm: error: {terminal.line(' '.join(message.split()))} (see {self.prog} --help)\n")


def _say(text: str) -> None:
    """A line of progress: no control character and no secret of the environment goes out."""
    print(terminal.line(text), flush=True)


def _parser() -> argparse.ArgumentParser:
    from cdlm import __version__

    top = _Parser(prog="cdlm", description="Fewer, cheaper steps for block diffusion language models.")
    top.add_argument("--version", action="version", version=f"cdlm {__version__}")
    top.add_argument("--debug", action="store_true", help="before COMMAND: show where an error comes from, too")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    helps = {
        "distill": "run all stages of a recipe that are not yet done, and print the table",
        "collect": "the teacher decodes the prompts; store its trajectories",
        "train": "train the student on them",
        "evaluate": "measure teacher, baselines and student; write report.json, report.md, report.html, pareto.png",
        "export": "write a folder that stock transformers loads",
        "ablate": "train and measure the student with each combination of the losses, and print the table",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("recipe", type=Path, metavar="RECIPE", help="a YAML file, as in recipes/")
        command.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value, as in train.steps=100")
        command.add_argument("--out", type=Path, metavar="DIR", help="where to write (default: runs/<name of the recipe>)")
        command.add_argument("--dry-run", action="store_true", help="print what would be done, and exit")
        _add_devices(command)
    planned = commands.add_parser("plan", help="what a recipe would take: time, memory of each device under each engine, disk")
    planned.add_argument("recipe", type=Path, metavar="RECIPE", help="a YAML file, as in recipes/")
    planned.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the recipe")
    planned.add_argument("--out", type=Path, metavar="DIR", help="where the run would be (default: runs/<name of the recipe>)")
    _add_devices(planned)
    bench = commands.add_parser("bench", help="a run's student beside all baselines; growth with length; time around forwards")
    bench.add_argument("recipe", type=Path, metavar="RECIPE", help="a YAML file, as in recipes/")
    bench.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the recipe")
    bench.add_argument("--out", type=Path, metavar="DIR", help="the run's folder, whose bench/ is written (default: runs/<name>)")
    bench.add_argument("--parts", type=_names, default=None, metavar="A,B", help="which of table, growth, overhead (default: all)")
    bench.add_argument("--batches", type=_numbers, default=[1, 4, 16], metavar="A,B", help="batch sizes of the table's latencies")
    bench.add_argument("--lengths", type=_numbers, default=[256, 512, 1024, 2048, 4096], metavar="A,B", help="answer tokens of growth")
    bench.add_argument("--prompt-tokens", type=int, default=32, help="tokens of the random prompt")
    bench.add_argument("--steps-per-block", type=int, default=1, help="steps of every block")
    bench.add_argument("--repeats", type=int, default=1, help="decode each length so often; the median counts")
    compare = commands.add_parser("compare", help="two evaluated runs side by side, question by question")
    compare.add_argument("a", type=Path, metavar="A", help="the folder of a run, as runs/tiny")
    compare.add_argument("b", type=Path, metavar="B", help="the folder of another run on the same questions")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    push = commands.add_parser("push", help="send an exported folder, or that of a recipe, to the Hub")
    push.add_argument("target", type=Path, metavar="FOLDER|RECIPE", help="a model's folder, or a recipe whose export is done")
    push.add_argument("--repo-id", metavar="USER/NAME", help="the repository; made if it is not there (default: the recipe's push.repo_id)")
    push.add_argument("--private", action="store_true", help="only you can see it")
    push.add_argument("--adapter-only", action="store_true", help="the LoRA adapter alone, not the merged model")
    push.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a value of the recipe")
    push.add_argument("--out", type=Path, metavar="DIR", help="where the recipe's run is (default: runs/<name of the recipe>)")
    push.add_argument("--dry-run", action="store_true", help="list what would be sent, and exit")
    generate = commands.add_parser("generate", help="answer a prompt with a diffusion model")
    generate.add_argument("model", metavar="MODEL", help="a folder or a Hub repository")
    generate.add_argument("--prompt", required=True, help="text of the prompt")
    generate.add_argument("--raw", action="store_true", help="do not wrap the prompt with the chat template")
    generate.add_argument("--special-tokens", action="store_true", help="read the text of special tokens in the prompt as those tokens")
    generate.add_argument("--max-new-tokens", type=int, help="budget (default: the model's)")
    generate.add_argument("--block-length", type=int, help="slots of a block (default: the model's)")
    generate.add_argument("--confidence-threshold", type=float, help="reveal above this probability (default: the model's, else 0.9)")
    generate.add_argument("--tokens-per-step", type=int, help="reveal so many slots a step, instead of a threshold")
    generate.add_argument("--steps", type=int, help="spend so many steps on the whole budget, instead of a threshold")
    generate.add_argument("--steps-per-block", type=int, help="spend so many steps on a block; with a threshold, at most so many")
    generate.add_argument("--order", help="slots revealed first: confidence (default), entropy, margin or sequential")
    generate.add_argument("--max-denoising-steps", type=int, help="most steps of a block, where every step decides every slot")
    generate.add_argument("--t-min", type=float, help="temperature of such a block's last step")
    generate.add_argument("--t-max", type=float, help="temperature of its first step")
    generate.add_argument("--stability-threshold", type=int, help="such a block is done early when its tokens are those of so many steps")
    generate.add_argument("--entropy-threshold", type=float, help="and its mean entropy is below this (nats)")
    generate.add_argument("--entropy-bound", type=float, help="a step's slots have entropies that add up to no more (with --order entropy)")
    generate.add_argument("--top-k", type=int, help="choose among the k most probable tokens")
    generate.add_argument("--top-p", type=float, help="choose among the fewest tokens whose probabilities add up to p")
    generate.add_argument("--attention", choices=("block_causal", "full"), help="default: block_causal if the model states a block length")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    generate.add_argument("--family", help="read the checkpoint as this family")
    generate.add_argument("--dtype", default="float32", help="float32, bfloat16 or float16")
    generate.add_argument("--device", default="cpu", help="cpu, cuda ...")
    generate.add_argument("--trace", action="store_true", help="show the blocks filling up, step by step")
    evaluation = commands.add_parser("eval", help="lm-eval's tasks, with what decoding cost beside the scores")
    evaluation.add_argument("model", metavar="MODEL", help="a folder (an adapter's too) or a Hub repository")
    evaluation.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="FLAGS",
        help="of lm-eval run, after MODEL: --tasks A,B, --limit, --num_fewshot, --apply_chat_template, --output_path ...; "
        "--model_args holds how to decode, as in confidence_threshold=0.95",
    )
    inspect = commands.add_parser("inspect", help="what a checkpoint is: family, native class, facts and where each came from, parameters")
    inspect.add_argument("model", metavar="PATH", help="a folder or a Hub repository")
    inspect.add_argument("--family", help="read it as this family")
    convert = commands.add_parser("convert", help="a checkpoint from its family's format into a stock transformers class, or back")
    convert.add_argument("source", type=Path, metavar="SRC", help="a folder")
    convert.add_argument("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    convert.add_argument("--to", required=True, help="native or family")
    convert.add_argument("--family", help="read SRC as this family")
    bring = commands.add_parser("import", help="published trajectories into a folder to train on, so that no teacher need run")
    bring.add_argument("format", metavar="FORMAT", help="d3llm or tad: who wrote the file")
    bring.add_argument("source", metavar="SOURCE", help="a .jsonl, .json or .parquet file, a folder, or hub:USER/NAME@REVISION[:SPLIT]")
    bring.add_argument("target", type=Path, metavar="DST", help="a folder that does not exist yet")
    bring.add_argument("--model", required=True, help="the model that will be trained: a folder or a Hub repository")
    bring.add_argument("--family", help="read it as this family")
    bring.add_argument("--block-length", type=int, default=32, help="slots of a block")
    bring.add_argument("--max-new-tokens", type=int, help="budget (default: that of the first row); longer rows are cut to it")
    bring.add_argument("--order", default="teacher", help="teacher: rows that did not go block by block are left out; block: reordered")
    bring.add_argument("--answer-key", metavar="COLUMN", help="text of the reference answer (default: the teacher's own answer)")
    bring.add_argument("--max-prompt-tokens", type=int, default=512, help="rows with longer prompts are left out")
    bring.add_argument("--limit", type=int, metavar="ROWS", help="read so many rows")
    bring.add_argument("--correct-only", action="store_true", help="leave out answers that the file calls wrong")
    verify = commands.add_parser("verify", help="compare a run's files with the checksums that were written with them")
    verify.add_argument("folder", type=Path, metavar="FOLDER", help="of a run, of trajectories, or of a model that was exported")
    verify.add_argument("--seal", action="store_true", help="write the checksums anew: what is there now is taken for good")
    roof = commands.add_parser("roofline", help="what decoding would cost on an accelerator, operator by operator")
    roof.add_argument("model", metavar="MODEL", help="a folder, a config.json, or a known shape (an unknown name lists them)")
    cards = ["MI300X", "MI325X", "MI355X", "H100", "H200", "B200", "A100"]
    roof.add_argument("--hardware", type=_names, default=cards, metavar="A,B", help="cards, in any case (default: all)")
    roof.add_argument("--mode", type=_names, default=["ar", "dlm", "block"], metavar="A,B", help="ar, dlm, block, tidar")
    roof.add_argument("--block", type=int, default=32, help="block length")
    roof.add_argument("--batch", type=int, default=1, help="sequences at a time")
    roof.add_argument("--context", type=int, default=512, help="tokens of the prompt")
    roof.add_argument("--generate", type=int, default=256, help="tokens generated (the budget)")
    roof.add_argument("--tpf", type=float, default=3.0, help="tokens a forward, for block and tidar")
    roof.add_argument("--proposals", type=int, metavar="M", help="blocks of masks a forward, for tidar (default: as a block is long)")
    roof.add_argument("--operators", action="store_true", help="also print every operator")
    roof.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    roof.add_argument("--plot", type=Path, metavar="FILE", help="draw the roofline there (png, pdf, svg)")
    kernels = commands.add_parser("kernels", help="compile the attention kernels for GPUs that need not be here")
    targets = ["gfx942", "gfx950", "sm_90", "sm_100"]
    kernels.add_argument("--targets", type=_names, default=targets, metavar="A,B", help="what to compile for")
    kernels.add_argument("--json", type=Path, metavar="FILE", help="write the table there")
    return top


def _add_devices(command: argparse.ArgumentParser) -> None:
    """The flags of a plan."""
    card = "the card of a plan's times and memory, as in roofline (default: the recipe's)"
    command.add_argument("--hardware", "--card", metavar="CARD", help=card)
    command.add_argument("--gpus", type=int, metavar="N", help="of a plan: devices, whose memory it tells under each engine")


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",") if word]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, as 256,512") from None


class _Terminated(BaseException):
    """SIGTERM, as an exception: what was being written is taken back on the way out."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the body as an exception, where signals can be heard (in the main thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> NoReturn:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0; 2 after one line that says what was wrong with the input, with --debug below a traceback; 143 or 130 after one line
    when SIGTERM or Ctrl-C ended it. A fault of this package ends with a traceback, which is filtered as everything is that is printed."""
    if arguments is None:  # this process is the command
        sys.excepthook = _show
    try:
        with _terminable():
            return _main(arguments)
    except (_Terminated, KeyboardInterrupt) as ended:
        by, status = ("SIGTERM", 143) if isinstance(ended, _Terminated) else ("Ctrl-C", 130)
        if processes.first():
            print(f"cdlm: ended by {by}; what was finished is kept, and the same command goes on from there", file=sys.stderr)
        return status


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """A traceback without secrets and control characters."""
    print(terminal.line("".join(traceback.format_exception(kind, error, trace)).rstrip()), file=sys.stderr)


def _main(arguments: list[str] | None) -> int:
    args = _parser().parse_args(arguments)
    args.typed = sys.argv[1:] if arguments is None else arguments
    from safetensors import SafetensorError

    try:
        processes.check_launcher()
        if not _is_shared(args) and not processes.first():
            return 0
        own = {
            "generate": _generate, "roofline": _roofline, "kernels": _kernels, "inspect": _inspect, "convert": _convert,
            "import": _import, "push": _push, "eval": _eval, "bench": _bench, "compare": _compare, "verify": _verify,
        }
        if args.command in own:
            return own[args.command](args)
        return _stages(args)
    except processes.Refused:  # said by the process that refused it
        return 2
    except (ValueError, OSError, FloatingPointError, SafetensorError) as error:
        if args.debug:
            print(terminal.line(traceback.format_exc().rstrip()), file=sys.stderr)
        print(f"cdlm: error: {terminal.line(' '.join(str(error).split()))}", file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if processes.launched() > 1 and _is_of_another_process(error):
            words = f"process {os.environ.get('RANK')} ends because another one did, whose error says why"
            print(f"cdlm: error: {words}", file=sys.stderr)
            return 2
        if not _is_out_of_memory(error):
            raise
        if args.debug:
            print(terminal.line(traceback.format_exc().rstrip()), file=sys.stderr)
        words = " ".join(str(error).split()).split(" If reserved but unallocated")[0]
        print(
            f"cdlm: error: out of memory ({terminal.line(words) or 'no bytes named'}). What was finished is kept; {_smaller(args.command)}",
            file=sys.stderr,
        )
        return 2


def _is_of_another_process(error: Exception) -> bool:
    """Whether this process was waiting for one that has ended; gloo says so in a plain RuntimeError."""
    import torch.distributed

    lost = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    return isinstance(error, torch.distributed.DistError) or any(words in str(error).lower() for words in lost)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device, or this machine's memory, had no room for a tensor or an object."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _smaller(command: str) -> str:
    """What to make smaller."""
    if command in ("generate", "eval"):
        return "take a smaller --max-new-tokens, batch or dtype" if command == "generate" else "take a smaller --batch_size or dtype"
    return (
        "take smaller batches (collect.batch_size, train.batch_size with more train.accumulation, evaluate.batch_size), "
        "train.gradient_checkpointing, or more devices: cdlm plan RECIPE tells what a device would hold"
    )


def _is_shared(args: argparse.Namespace) -> bool:
    """Whether all processes that were launched take part in a command; in others the first does all, and the rest end at once."""
    if args.command == "push":
        return _is_recipe(args.target) and not args.dry_run
    return args.command in SHARED and not getattr(args, "dry_run", False)


def _is_recipe(target: Path) -> bool:
    return target.suffix in (".yaml", ".yml") and not target.is_dir()


@contextlib.contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Be the only run in a folder. Of the processes of one run the first asks for all."""
    with files.locked(out) if processes.first() else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def _checked(run, first: str) -> Iterator[None]:
    """The folder of a run is this command's alone, and its inputs are sound; a folder that is not there yet is made only then."""
    with contextlib.ExitStack() as held:
        with run.processes.main_first():
            if there := run.out.is_dir():
                held.enter_context(_alone_in(run.out))
            _require(run, first)
            run.check_inputs()
            if not there:
                run.out.mkdir(parents=True, exist_ok=True)
                held.callback(_leave_if_empty, run.out)
                held.enter_context(_alone_in(run.out))
        yield


@contextlib.contextmanager
def _folder(out: Path) -> Iterator[None]:
    """A folder that is this command's alone; one in which nothing was written goes again."""
    out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        held.callback(_leave_if_empty, out)
        held.enter_context(_alone_in(out))
        yield


def _leave_if_empty(folder: Path) -> None:
    """A folder in which nothing was written goes again."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _stages(args: argparse.Namespace) -> int:
    from cdlm import recipe as recipes

    recipe = recipes.load(args.recipe, args.set)
    out = args.out or Path("runs") / recipe.name
    from cdlm import plan, runs

    run = runs.Run(recipe, out, say=_say, command=_typed(args))
    if args.command == "plan":
        _say(plan.text(run, runs.stages_of(recipe), args.hardware, 1 if args.gpus is None else args.gpus))
        return 0
    if args.gpus is not None and not args.dry_run:
        raise ValueError("--gpus belongs to a plan; it goes with --dry-run (accelerate launch starts the processes of a run)")
    if args.hardware is not None and not args.dry_run:
        raise ValueError("--hardware is the card of a plan's times; it goes with --dry-run (a run takes the recipe's device)")
    if args.dry_run and args.command == "ablate":
        if args.gpus is not None:
            raise ValueError("--gpus: ablate has no plan for several devices; cdlm plan tells that of one training")
        _say(plan.ablation(run, args.hardware))
        return 0
    if args.dry_run:
        _say(plan.text(run, runs.stages_of(recipe) if args.command == "distill" else [args.command], args.hardware, args.gpus))
        return 0
    processes.check_device(recipe.device)
    processes.check_checkpoints()
    _quiet()
    run.processes = processes.start(recipe.device)
    if not run.processes.main:
        run.say = _silent
    if args.command == "ablate":
        from cdlm import ablate

        with contextlib.ExitStack() as held:
            with run.processes.main_first():
                ablate.check(run)
                held.enter_context(_folder(out))
            run.say(ablate.run(run))
        return 0
    wanted = runs.stages_of(recipe) if args.command == "distill" else [args.command]
    with _checked(run, wanted[0]):
        return _run(args, run, wanted)


def _run(args: argparse.Namespace, run, wanted: list[str]) -> int:
    """The wanted stages, one after the other."""
    from cdlm import runs, stages

    out, began = run.out, time.monotonic()
    for stage in wanted:  # a stage that holds the result of other values stops the run before any work
        run.processes.agreed(partial(runs.is_done, run, stage))
    for stage in wanted:
        run.processes.agreed(partial(stages.check_places, run, stage))
    if "train" in wanted:
        run.processes.agreed(partial(stages.check_training, run))
    if "push" in wanted and not runs.is_done(run, "push"):
        from cdlm import hub

        hub.check_token()
    if run.processes.main:
        stages.remove_leftovers(run)
        if "train" in wanted and runs.is_done(run, "train"):
            stages.remove_checkpoints(run)
    for stage in wanted:
        if run.processes.agreed(partial(runs.is_done, run, stage)):  # all have asked before the first of them writes
            run.say(f"{stage}: done already")
            continue
        start = time.monotonic()
        getattr(stages, stage)(run)
        _release()
        run.processes.agreed(partial(_require_done, run, stage))
        run.say(f"{stage}: done in {time.monotonic() - start:.0f} s")
    if run.processes.main and args.command in ("distill", "evaluate"):
        _print_table(run)
        run.say(f"all in {time.monotonic() - began:.0f} s; {out / 'report.md'}, {out / 'report.html'}, {out / 'pareto.png'}")
    return 0


def _require_done(run, stage: str) -> None:
    from cdlm import runs

    if not runs.is_done(run, stage):
        raise ValueError(f"process {run.processes.rank} does not see the result of {stage} in {run.out}; all processes need that folder")


def _silent(text: str) -> None:
    """What processes say of which another one speaks."""


def _release() -> None:
    """Give back what the stage before held: its models are garbage by now, some in cycles, and a GPU's memory is kept for reuse."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _typed(args: argparse.Namespace) -> str:
    """The command of a stage as the user typed it."""
    return terminal.without_secrets(_command(args))


def _command(args: argparse.Namespace) -> str:
    if args.command == "bench":
        return shlex.join(["cdlm", *args.typed])
    out = ["--out", str(args.out)] if args.out is not None else []
    return shlex.join(["cdlm", args.command, str(args.recipe), *(word for value in args.set for word in ("--set", value)), *out])


def _quiet() -> None:
    """No progress bars and remarks of transformers between our own lines, unless TRANSFORMERS_VERBOSITY asks for them."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"transformers\.")  # of names that peft still asks it for


def _require(run, stage: str) -> None:
    """A stage started alone needs the one before it."""
    from cdlm import runs

    order = runs.stages_of(run.recipe)
    if stage not in order:
        raise ValueError(f"this recipe has no {stage} stage; it has {', '.join(order)}")
    for before in order[: order.index(stage)]:
        if not runs.is_done(run, before):
            raise ValueError(f"{stage} needs the result of {before}, which is not in {run.out}: run cdlm {before} (or distill) first")


def _print_table(run) -> None:
    import json

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from cdlm.evaluate import report, speculation

    found = json.loads((run.out / "report.json").read_text())
    console = Console(width=max(180, Console().width))
    own, drafted = found["summary"], found.get("speculation")
    shown = report.own_rows(found, found["results"])
    table = Table(title=f"{escape(terminal.line(run.recipe.name))}: batch {found['results'][0]['batch']}, latency at batch 1")
    for i, name in enumerate(("task", *report.COLUMNS)):
        table.add_column(name, justify="left" if i < 2 else "right", no_wrap=True)
    for row, cells in zip(shown, report.table(shown), strict=True):
        table.add_row(escape(terminal.line(row["task"])), *cells, style="bold" if row["task"] == "all" else None)
    console.print(table)
    for line in report.summary_lines(own) + (speculation.lines(drafted) if drafted else []):
        console.print(line, highlight=False, markup=False)


def _write_file(path: Path, value: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(path, value)


def _verify(args: argparse.Namespace) -> int:
    from cdlm import verify

    if args.seal:
        with contextlib.ExitStack() as held:
            verify.artifacts(args.folder)  # an error for a folder that holds none
            for folder in verify.to_lock(args.folder):
                held.enter_context(files.locked(folder))
            for file in verify.seal(args.folder):
                _say(f"{file}: written")
        return 0
    wrong = 0
    for file, faults in verify.check(args.folder):
        total = "" if str(file) in faults else f" of {len(files.read_sums(file))}"
        _say(f"{file}: {f'{len(faults)}{total} files damaged' if faults else 'all files as they were written'}")
        for path, why in faults.items():
            print(f"cdlm: error: {terminal.line(f'{path} is {why}')}", file=sys.stderr)
        wrong += len(faults)
    return 1 if wrong else 0


def _inspect(args: argparse.Namespace) -> int:
    from cdlm import families
    from cdlm.families import convert

    config = families.read_config(args.model)
    for line in convert.describe(args.model, config, families.find(config, args.family)):
        _say(line)
    return 0


def _convert(args: argparse.Namespace) -> int:
    from cdlm import families
    from cdlm.families import convert

    convert.folder(args.source, args.target, args.to, families.FAMILIES, args.family)
    _say(f"{args.target}: {args.to} format")
    return 0


def _import(args: argparse.Namespace) -> int:
    from cdlm import importers

    asked = importers.Importing(
        args.format, block_length=args.block_length, max_new_tokens=args.max_new_tokens, order=args.order, answer_key=args.answer_key,
        max_prompt_tokens=args.max_prompt_tokens, limit=args.limit, correct_only=args.correct_only,
    )
    importers.import_folder(asked, args.source, args.target, args.model, family=args.family, say=_say)
    _say(f"in a recipe, instead of collect:  trajectories: {args.target.resolve()}")
    return 0


def _push(args: argparse.Namespace) -> int:
    from cdlm import hub

    if _is_recipe(args.target):
        flags = [("push.repo_id", args.repo_id), ("push.private", args.private), ("push.adapter_only", args.adapter_only)]
        args.set += [f"{key}={str(value).lower() if value is True else value}" for key, value in flags if value]
        args.recipe, args.hardware, args.gpus = args.target, None, None
        return _push_run(args) if args.dry_run else _stages(args)
    if args.set or args.out is not None:
        raise ValueError(f"--set and --out belong to a recipe; {args.target} is not a YAML file")
    if args.repo_id is None:
        raise ValueError("--repo-id is missing: the repository to send the folder to, of the form user/name")
    shipment = hub.pack(args.target, args.repo_id, adapter_only=args.adapter_only)
    if not args.dry_run:
        hub.check_token()
    _say(hub.listing(shipment, args.private))
    if not args.dry_run:
        _say(hub.push(shipment, private=args.private, say=_say))
    return 0


def _bench(args: argparse.Namespace) -> int:
    from cdlm import bench, runs
    from cdlm import recipe as recipes

    if processes.launched() > 1:
        raise ValueError(f"bench keeps the clock in one process; {processes.launched()} were launched")

    growing = {"prompt_tokens": args.prompt_tokens, "repeats": args.repeats, "steps_per_block": args.steps_per_block}
    recipe = recipes.load(args.recipe, args.set)
    out = args.out or Path("runs") / recipe.name
    redecides = runs.Run(recipe, out).redecides()
    parts = args.parts or bench.parts_of(recipe, redecides)
    bench.check(recipe, parts, args.batches, args.lengths, growing, redecides)
    processes.check_device(recipe.device)
    _quiet()
    with _folder(out):
        _say(bench.run(recipe, out, parts, args.batches, args.lengths, growing, command=_typed(args), say=_say))
    return 0


def _compare(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from cdlm.evaluate import compare, report

    a, b = compare.read(args.a), compare.read(args.b)
    entries = compare.compare(a, b)
    _say("\n".join([report.markdown_table(compare.table(entries), compare.COLUMNS), *compare.remarks(a, b, entries)]))
    if args.json is not None:
        plain = [
            {**entry, "points": asdict(entry["points"]), "faster": None if entry["faster"] is None else asdict(entry["faster"])}
            for entry in entries
        ]
        _write_file(args.json, {"a": str(args.a), "b": str(args.b), "methods": plain})
    return 0


def _push_run(args: argparse.Namespace) -> int:
    """What `cdlm push RECIPE` would send."""
    from cdlm import hub, runs
    from cdlm import recipe as recipes

    recipe = recipes.load(args.recipe, args.set)
    run = runs.Run(recipe, args.out or Path("runs") / recipe.name)
    _require(run, "push")
    assert recipe.push is not None
    _say(hub.listing(hub.pack(run.exported, recipe.push.repo_id, adapter_only=recipe.push.adapter_only), recipe.push.private))
    return 0


def _eval(args: argparse.Namespace) -> int:
    if find_spec("lm_eval") is None:
        raise ValueError("cdlm eval needs lm-eval: pip install 'cdlm[eval]'")
    _quiet()
    from cdlm.evaluate import harness_run

    harness_run.run(args.model, args.flags, say=_say)
    return 0


def _roofline(args: argparse.Namespace) -> int:
    from cdlm import roofline
    from cdlm.families.shapes import SHAPES

    given = {"block": args.block, "batch": args.batch, "context": args.context, "generate": args.generate, "tpf": args.tpf}
    given["proposals"] = args.proposals
    roofline.check(hardware=args.hardware, modes=args.mode, **given)
    if args.model in SHAPES:
        shape = SHAPES[args.model]
    elif Path(args.model).exists():
        from cdlm.families.decoder import read_json

        file = Path(args.model) / "config.json" if Path(args.model).is_dir() else Path(args.model)
        shape = roofline.shape_of_config(read_json(file), str(file))
    else:
        raise ValueError(f"no model {args.model!r}: neither a file or folder here nor one of {', '.join(SHAPES)}")
    if args.plot is not None and args.plot.suffix not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--plot {args.plot}: allowed endings: .png, .pdf, .svg")
    if args.plot is not None and find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'cdlm[report]'")
    found = [roofline.analyse(shape, roofline.card(card), mode, **given) for card in args.hardware for mode in args.mode]
    size = f"{roofline.count(shape.parameters)} parameters"
    _say(f"{args.model}: {size}, batch {args.batch}, {args.context} + {args.generate} tokens, blocks of {args.block}")
    _say(roofline.table(found))
    for f in found:
        if f["proposals"] is not None:
            free = f"about {f['proposals']:.1f} blocks of {args.block}"
            _say(f"{f['hardware']}: attention over a long cache takes in {free} a forward before it is bound by compute")
            _say(f"{f['hardware']}: {_free(f, args.block, args.tpf)}")
        if args.operators:
            _say(f"\n{f['hardware']}, {f['mode']}:\n{roofline.operator_table(f)}")
    if args.json is not None:
        _write_file(args.json, {"model": args.model, **given, "results": found})
    if args.plot is not None:
        from cdlm.evaluate import roofline_plot

        args.plot.parent.mkdir(parents=True, exist_ok=True)
        roofline_plot.draw(found, args.plot, f"{args.model}, batch {args.batch}")
    return 0


def _free(found: dict, block: int, tpf: float) -> str:
    """What a forward takes in before it is bound by compute, what that costs all the same, and what `proposals: auto` picks."""
    count, best = found["free_proposals"], found["best_proposals"]
    if not count:
        return f"with one proposal of {block} beside {block} drafts some operator is bound by compute already"
    picked = f"the most that take at most {tpf:g} are {best}" if best else f"at {tpf:g} tokens a forward not even one proposal pays"
    return (
        f"{count} proposals of {block} beside {block} drafts ({block * (count + 1)} query tokens) leave no operator bound by "
        f"compute; such a forward takes {found['free_forward_over_one']:.2f} times as long as one of a single token; {picked}"
    )


def _kernels(args: argparse.Namespace) -> int:
    if find_spec("triton") is None:
        raise ValueError("triton is not installed: pip install 'cdlm[kernels]'")
    from cdlm.attention import machine_code

    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # what triton 3.9 does unasked; said, so that it does not warn
    machine_code.check_targets(args.targets)
    found = machine_code.survey(args.targets, workers=os.cpu_count() or 1)
    _say(machine_code.table(found))
    if args.json is not None:
        _write_file(args.json, machine_code.as_json(found))
    faults = [f"{r.kernel} on {r.target} at head dimension {r.head_dim}: {r.fault}" for r in found if r.fault]
    for fault in faults:
        print(f"cdlm: error: {terminal.line(fault)}", file=sys.stderr)
    return 1 if faults else 0


def _generate(args: argparse.Namespace) -> int:
    import torch

    from cdlm import data, families
    from cdlm.decode import decode, resolve, slots

    processes.check_device(args.device)
    _quiet()
    config = families.read_config(args.model)
    model = families.load(args.model, family=args.family, dtype=args.dtype, device=args.device)
    tokenizer = families.load_tokenizer(args.model, model.facts)
    if not 0 <= args.seed < 2**63:
        raise ValueError(f"seed is {args.seed}; it must be between 0 and 2**63 - 1")
    try:
        args.prompt.encode()
    except UnicodeEncodeError:
        raise ValueError("--prompt is not valid UTF-8") from None
    if not args.prompt.strip():
        raise ValueError(f"--prompt is {args.prompt!r}; it must hold some text")
    unknown = data.unknown_text(tokenizer, args.prompt, special_tokens=args.special_tokens)
    if unknown:
        raise ValueError(f"--prompt holds text that the tokenizer of {args.model} does not know: {unknown!r}")
    decoding = resolve(
        model, config, attention=args.attention, max_new_tokens=args.max_new_tokens, block_length=args.block_length,
        confidence_threshold=args.confidence_threshold, tokens_per_step=args.tokens_per_step, steps=args.steps,
        steps_per_block=args.steps_per_block, order=args.order, temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
        max_denoising_steps=args.max_denoising_steps, entropy_bound=args.entropy_bound, t_min=args.t_min, t_max=args.t_max,
        stability_threshold=args.stability_threshold, entropy_threshold=args.entropy_threshold,
    )
    budget = decoding.max_new_tokens
    wrapped = tokenizer.chat_template is not None and not args.raw
    ids = data.prompt_ids(tokenizer, args.prompt, chat_template=wrapped, special_tokens=args.special_tokens)
    room = getattr(model.text_config, "max_position_embeddings", None)
    longest = len(ids) + slots(model.facts, budget, decoding.block_length)
    if room is not None and longest > room:
        raise ValueError(f"the prompt's {len(ids)} tokens and a budget of {budget} are {longest} positions; the model has {room}")
    prompt = torch.tensor([ids], device=model.device)
    seeds = [args.seed] if decoding.draws else None
    if args.trace:
        from cdlm.trace import Trace

        with Trace(tokenizer, decoding, eos_token_ids=model.facts.eos_token_ids) as trace:
            out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), decoding, callback=trace, seeds=seeds)
    else:
        out = decode(model, prompt, torch.ones_like(prompt, dtype=torch.bool), decoding, seeds=seeds)
    text = tokenizer.decode(out.answer(0, model.facts.eos_token_ids))
    print(terminal.visible(text) if sys.stdout.isatty() else text)
    commits = f"and {out.commit_forwards[0]} commit forwards" if model.commits_apart else f"{out.commit_forwards[0]} of them with a commit"
    print(
        f"{out.steps[0]} steps{'' if model.commits_apart else ','} {commits}, {out.output_tokens[0]} tokens, "
        f"{out.tokens_per_forward[0]:.2f} tokens a forward, stopped at {out.stop[0]}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
