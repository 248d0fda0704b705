"""What goes to the Hub, and how: a folder that stock transformers loads, with a decoder beside the weights and a card.

The folder holds config.json (a stock architecture and the facts), model.safetensors, the tokenizer, generation_config.json,
custom_generate/generate.py, .eval_results/ and README.md, which is written last; and adapter/, a folder of its own, when the student is
an adapter. `pack` chooses what of a folder is sent and `push` sends it, with huggingface_hub; neither changes a file.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from cdlm import families, terminal
from cdlm import files as disk
from cdlm.families import adapter as adapters
from cdlm.families import checkpoint, native
from cdlm.families.base import DiffusionLM, Facts

GENERATE_FILE = Path(__file__).parent / "exported" / "generate.py"
PLACE = "PATH_OR_REPO"  # stands in a card for where the folder will be


def merge_lora(peft_model: Any, probe_ids_BL: torch.Tensor, tolerance: float = 1e-4) -> Any:
    """The base model with the adapter merged into its weights; refused when a probe's logits change by more than `tolerance`
    (times 1,000 for models in 16 bits, whose own rounding is coarser)."""
    if next(peft_model.parameters()).dtype in (torch.bfloat16, torch.float16):
        tolerance *= 1000
    valid = torch.ones_like(probe_ids_BL)
    peft_model.eval()
    with torch.no_grad():
        before = peft_model(input_ids=probe_ids_BL, attention_mask=valid, use_cache=False).logits
        merged = peft_model.merge_and_unload()
        after = merged(input_ids=probe_ids_BL, attention_mask=valid, use_cache=False).logits
    difference = float((before - after).abs().max())
    if difference > tolerance:
        raise ValueError(f"merging the adapter changed the logits by {difference:.2e} (allowed {tolerance:.0e}); keep the adapter apart")
    return merged


def save(
    model: DiffusionLM, tokenizer: Any, folder: Path, *, facts: Facts, max_new_tokens: int, decoding: dict[str, Any], card: str,
    eval_results: str | None = None, adapter: Callable[[Path], None] | None = None, with_decoder: bool = True,
) -> None:
    """Write the folder whole beside its place, then put it there, with checksums of all but its card. The decoder beside the weights knows
    masks only, so a model for which they do not suffice gets none. adapter: writes the adapter into a folder, as `save_adapter` does.

    decoding: values of `decode.DecodeConfig` that the folder says it decodes with, where its class has a place for them.
    """
    config = model.hf.config
    native.state(config, facts)
    if decoding:
        model.state_decoding(decoding)
    generation = model.hf.generation_config
    generation.max_new_tokens, generation.max_length = max_new_tokens, None
    generation.eos_token_id, generation.pad_token_id = list(facts.eos_token_ids), facts.pad_token_id
    with disk.replacing_folder(folder) as partial:
        model.hf.save_pretrained(partial)
        families.save_tokenizer(tokenizer, partial)
        if adapter is not None:
            adapter(partial / "adapter")
        _finish(partial, card, eval_results, with_decoder=with_decoder and model.masks_suffice)


def _finish(folder: Path, card: str, eval_results: str | None, with_decoder: bool) -> None:
    """Decoder, results and card, the card last."""
    if with_decoder:
        (folder / "custom_generate").mkdir()
        shutil.copyfile(GENERATE_FILE, folder / "custom_generate" / "generate.py")
    if eval_results is not None:
        (folder / ".eval_results").mkdir()
        (folder / ".eval_results" / "cdlm.yaml").write_text(eval_results)
    disk.write_text(folder / "README.md", card)


def save_adapter(
    source: Path, tokenizer: Any, folder: Path, *, base_model: str | None, family: str, facts: Facts, max_new_tokens: int,
    decoding: dict[str, Any], card: str, eval_results: str | None = None, with_decoder: bool = True,
) -> None:
    """An adapter as a folder that others can use: PEFT's two files, facts.json, the tokenizer and a card, with checksums of all but the
    card. folder: empty, or not there yet; it is not put in place whole, which is up to the caller (`files.replacing_folder`).

    source: what PEFT saved. Its adapter_config.json names the folder that the base was read from; base_model takes that place, and
    null when there is none, which `pack` refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / adapters.CONFIG).read_text()) | {"base_model_name_or_path": base_model}
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set, in any order
    (folder / adapters.CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    shutil.copyfile(source / adapters.WEIGHTS, folder / adapters.WEIGHTS)
    stated = adapters.facts_json(facts, adapter_family=family, max_new_tokens=max_new_tokens, **decoding)
    (folder / adapters.FACTS).write_text(json.dumps(stated, indent=2) + "\n")
    tokenizer.save_pretrained(folder)
    _finish(folder, card, eval_results, with_decoder)
    disk.seal(folder)


def eval_results_yaml(
    report: dict[str, Any], benchmark: str, threshold: float | None, date: str, objective: str = "cdlm", redecides: bool = False
) -> str:
    """`.eval_results/cdlm.yaml`: the accuracy of the exported model on a Hub dataset (task `default`) and its tasks, as the Hub's
    leaderboards read it.

    benchmark: the dataset; threshold: the student's own (None: a model without a block decoder), or its entropy bound where every step
    decides every slot (`redecides`); date: ISO 8601.
    """
    import yaml
    from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

    entries = [
        EvalResultEntry(
            dataset_id=benchmark, task_id="default" if row["task"] == "all" else row["task"], value=row["accuracy"], date=date,
            notes=f"accuracy; {row['n']} questions, {row['steps']:.2f} steps, {row['tpf']:.2f} tokens per forward"
            + (f", {'entropy bound' if redecides else 'confidence threshold'} {threshold:g}" if threshold is not None else ""),
        )
        for row in own_rows(report, threshold, objective)
    ]
    return yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False)


def own_rows(report: dict[str, Any], threshold: float | None, objective: str = "cdlm") -> list[dict[str, Any]]:
    """The rows of report.json that are about the exported model as it decodes by default."""
    alone: tuple[str, float | None] = ("autoregressive" if objective == "ar" else "teacher", None)
    if objective == "tidar":
        alone = ("tidar", report.get("speculation", {}).get("proposals"))
    own = alone if threshold is None else ("student", threshold)
    return [row for row in report["results"] if (row["method"], row["parameter"]) == own]


def card(
    name: str, *, report: dict[str, Any] | None, base_model: str | None, license: str, tags: list[str], datasets: list[str],
    decode: dict[str, Any], table: str, lines: list[str], threshold: float | None, adapter: bool = False, stock: bool = True,
    objective: str = "cdlm", sampler: dict[str, Any] | None = None, chat_template: bool = True,
) -> str:
    """The model card, made from report.json: front matter with model-index, what was measured, and code that runs.

    threshold: as in `eval_results_yaml`. adapter: of the adapter alone, not of the merged model; stock: transformers and the decoder
    beside the weights suffice. sampler: how a model decodes that decides every slot at every step. chat_template: whether prompts were
    wrapped with it; the code does as the measurement did.
    """
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for row in own_rows(report or {"results": []}, threshold, objective):
        for kind, value in (("accuracy", row["accuracy"]), ("tokens_per_forward", row["tpf"]), ("steps", row["steps"])):
            results.append(EvalResult(
                task_type="text-generation", dataset_type=row["task"], dataset_name=row["task"], metric_type=kind, metric_value=value,
            ))
    relation = "adapter" if adapter else "finetune"
    kinds = [] if objective == "ar" else ["diffusion", "speculative-decoding"] if objective == "tidar" else ["diffusion"]
    has_decoder = threshold is not None and sampler is None
    if has_decoder:
        kinds += ["block-diffusion", *(["custom_generate"] if stock else []), *(["lora"] if adapter else [])]
    front = ModelCardData(
        license=license, base_model=base_model, base_model_relation=relation if base_model else None,
        library_name="peft" if adapter else "transformers", pipeline_tag="text-generation", tags=["cdlm", *kinds, *tags],
        datasets=datasets or None, model_name=name, eval_results=results or None,
    )
    measured = "\n".join(f"- {line}" for line in lines) + "\n\n" + table if lines or table else "Not measured yet."
    trained = {
        "cdlm": "with consistency distillation (CDLM, arXiv 2511.19269)",
        "bd3lm": "with the loss of block diffusion (BD3-LM, arXiv 2503.09573)", "uniform": "on canvases with uniform noise",
    }
    if sampler is not None:
        what = f"""A block diffusion language model without a mask token: each step decides every slot of a canvas of
{decode['block_length']} anew, and finished canvases are encoded causally. Trained {trained[objective]} by `cdlm`."""
        if adapter:
            what += f"\nThis is the LoRA adapter alone, which is not merged; it stands on {base_model or 'its base'}."
        use = _usage_of_sampler(sampler, adapter, chat_template)
    elif has_decoder:
        what = f"""A block diffusion language model: answers are filled block by block, {decode['block_length']} slots each, many slots a
step, with an exact block key-value cache. Trained {trained[objective]} by `cdlm`."""
        if adapter:
            what += f"\nThis is the LoRA adapter alone; it stands on {base_model or 'its base'} and was measured merged into it."
        use = _usage(decode, adapter, stock, chat_template)
    elif objective == "ar":
        what = "An autoregressive language model, trained by `cdlm`. Family causal and objective bd3lm make a block diffusion model of it."
        use = "It loads and generates with stock transformers: `AutoModelForCausalLM.from_pretrained(FOLDER).generate(...)`."
    elif objective == "tidar":
        what = (
            f"An autoregressive language model that drafts {decode['block_length']} tokens of its own text from masks and verifies them in "
            "the same forward (TiDAR, arXiv 2511.08923), trained by `cdlm`."
        )
        picked = (report or {}).get("speculation", {}).get("proposals", decode["proposals"])
        drafts = f"draft_length={decode['block_length']}" + (f", proposals={picked}" if isinstance(picked, int) else "")
        use = f"""With stock transformers it is an autoregressive model: `AutoModelForCausalLM.from_pretrained(FOLDER).generate(...)`.
Drafts need `cdlm`; the text is the same (in 16 bits up to rounding, where two tokens are as good as equal):

```python
import torch
from cdlm import families
from cdlm.speculate import SpeculateConfig, speculate

model = families.load("FOLDER")
tokenizer = families.load_tokenizer("FOLDER", model.facts)
{_prompt(chat_template)}
prompt = inputs["input_ids"]
config = SpeculateConfig({decode['max_new_tokens']}, {drafts})
answer = speculate(model, prompt, torch.ones_like(prompt, dtype=torch.bool), config)
print(tokenizer.decode(answer.answer(0, model.facts.eos_token_ids)), answer.tokens_per_forward)
```"""
    else:
        what = "A masked diffusion language model with full attention, trained by `cdlm` with the loss of arXiv 2502.09992."
        budget = decode["max_new_tokens"]
        use = f"`cdlm generate FOLDER --prompt TEXT --max-new-tokens {budget} --tokens-per-step 1`, or as the teacher of a recipe."
    return f"""---
{front.to_yaml()}
---

# {terminal.markdown(name)}

{what}

## Use

{use}

## Measured

{measured}
"""


def _prompt(chat_template: bool) -> str:
    """The card's lines that make inputs of a prompt."""
    if not chat_template:
        return 'inputs = tokenizer("...", return_tensors="pt")'
    return """text = tokenizer.apply_chat_template([{"role": "user", "content": "..."}], tokenize=False, add_generation_prompt=True)
inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")"""


def _usage(decode: dict[str, Any], adapter: bool, stock: bool, chat_template: bool) -> str:
    """The card's code, and what is to be known about it."""
    budget, block, threshold = decode["max_new_tokens"], decode["block_length"], decode["confidence_threshold"]
    if not stock:
        base = "does not make this adapter's base of its repository; `cdlm` does (needs `peft`)"
        return f"""Transformers alone {base if adapter else "does not decode this model's blocks; `cdlm` does"}:

```python
import cdlm
from transformers import AutoTokenizer

folder = "{PLACE}"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = cdlm.load(folder)
{_prompt(chat_template)}
config = cdlm.DecodeConfig({budget}, {block}, confidence_threshold={threshold})
out = cdlm.generate(model, inputs["input_ids"], inputs["attention_mask"].bool(), config)
print(tokenizer.decode(out.answer(0, model.facts.eos_token_ids), skip_special_tokens=True))
```"""
    values = ""
    if adapter:
        values = f"\n    block_length={block}, confidence_threshold={threshold}, max_new_tokens={budget},"
    call = f"**inputs, custom_generate=folder, trust_remote_code=True{',' if adapter else ''}{values}" + ("\n" if adapter else "")
    loads = "  # the base model, with the adapter put on it by peft" if adapter else ""
    said = "Pass them with an adapter: its base's config.json has other values or none. " if adapter else ""
    return f"""`custom_generate/generate.py` in this folder is the decoder, one file of torch and transformers.
`trust_remote_code=True` runs it, and nothing else.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "{PLACE}"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForCausalLM.from_pretrained(folder){loads}
{_prompt(chat_template)}
out = model.generate({call})
print(tokenizer.decode(out[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

Arguments besides transformers' own: `max_new_tokens` ({budget}), `block_length` ({block}),
`confidence_threshold` ({threshold}). {said}Decoding is greedy."""


def _usage_of_sampler(sampler: dict[str, Any], adapter: bool, chat_template: bool) -> str:
    """The card's code for a model whose class in transformers has a diffusion decoding of its own."""
    steps, bound = sampler["max_denoising_steps"], sampler["entropy_bound"]
    if adapter:
        return f"`cdlm generate {PLACE} --prompt TEXT` puts it on its base (needs `peft`), and takes at most {steps} steps a canvas."
    return f"""Stock transformers decodes it; `generation_config.json` has it take at most {steps} steps a canvas, entropy bound {bound:g}.

```python
from transformers import AutoModelForImageTextToText, AutoTokenizer

folder = "{PLACE}"
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
model = AutoModelForImageTextToText.from_pretrained(folder)
{_prompt(chat_template)}
out = model.generate(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
print(tokenizer.decode(out.sequences[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True))
```

`cdlm generate {PLACE} --prompt TEXT --trace` shows how slots are decided again."""


# ---- push ------------------------------------------------------------------------------------------------------------

FOLDERS_AT_HOME = {
    "checkpoints": "training state", "checkpoint-*": "training state", "trajectories*": "trajectories", "*cache*": "a cache",
    "wandb": "logs", "runs": "logs", "logs": "logs", "adapter": "the adapter; --adapter-only sends it", ".eval_results": "",  # sent
    ".*": "hidden",
}  # fmt: skip
FILES_AT_HOME = {
    ".*": "hidden", "*.partial": "not written to its end", "*request.json": "a note of the run", "collection.json": "a note of the run",
    "manifest.json": "a note of the run", "trainer_state.json": "training state", "training_args*": "training state",
    "optimizer*": "training state", "scheduler*": "training state", "rng_state*": "training state",
    "shard-*": "trajectories", "*.parquet": "trajectories", "*.jsonl": "a log or data",
    **dict.fromkeys(("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt", "*.npy", "*.npz"), "may be a pickle, which can run code"),
    **dict.fromkeys(("*token", "*tokens", "*token.*", "*tokens.*", "*credential*", "*secret*", "*.pem", "*.key"), "may hold a token"),
}  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
FILES_SENT = (
    "README.md", "LICENSE*", "NOTICE*", "*config.json", "facts.json", "vocab.json", "merges.txt", "vocab.txt", "requirements.txt",
    "*.model", "*.tiktoken", "*.jinja", "*.safetensors.index.json", "*.py", ".eval_results/*.yaml", "*.png", "*.jpg", "*.svg", "*.webp",
)  # fmt: skip


@dataclass(frozen=True)
class Shipment:
    """What would be sent to a repository. files: path there -> the bytes, or the file that holds them; left_out: path -> why."""

    folder: Path
    repo_id: str
    files: dict[str, Path | bytes]
    weights: list[str]
    left_out: dict[str, str]

    def size(self, path: str) -> int:
        content = self.files[path]
        return len(content) if isinstance(content, bytes) else content.stat().st_size


def check_repo_id(repo_id: str, what: str = "--repo-id") -> None:
    """A ValueError unless it has the form user/name, in letters that the Hub takes."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise ValueError(f"{what} is {repo_id!r}; it must have the form user/name ({error})") from None
    if repo_id.count("/") != 1:
        raise ValueError(f"{what} is {repo_id!r}; it must have the form user/name")


def check_token() -> None:
    """A ValueError that says how to log in when no access token is to be found."""
    from huggingface_hub import get_token

    if not get_token():
        raise ValueError(
            "no access token for the Hub: set HF_TOKEN to one with write permission, or log in with `hf auth login`; nothing was sent"
        )


def pack(folder: Path, repo_id: str, *, adapter_only: bool = False) -> Shipment:
    """Choose what of a model's folder goes to the repository; the folder is read, never written, and no request is made.

    A ValueError for what is no model folder: without config.json (or adapter_config.json), without whole safetensors, with an
    adapter whose base is a folder of this machine, or with an access token in a file that belongs to the model; and for weights
    that are not what was written, by their checksums where there are some.
    """
    check_repo_id(repo_id)
    if not folder.is_dir():
        raise ValueError(f"no folder at {folder}")
    disk.require_sound_weights(folder)
    source = _adapter_folder(folder) if adapter_only else folder
    is_adapter = adapter_only or (not (source / "config.json").is_file() and (source / adapters.CONFIG).is_file())
    if is_adapter:
        weights = _adapter_weights(source)
    else:
        if not (source / "config.json").is_file():
            hint = f"; did you mean {folder / 'export'}?" if (folder / "export" / "config.json").is_file() else ""
            raise ValueError(f"{folder} has no config.json (or {adapters.CONFIG}): it is not a model's folder{hint}")
        families.read_config(source)
        weights = checkpoint.Files(source).names
    files: dict[str, Path | bytes] = {}
    left_out: dict[str, str] = {}
    for path in _walk(source):
        name = path.relative_to(source).as_posix()
        why = _why_not(path, source, weights, is_adapter)
        if why is None:
            files[name] = path
        else:
            left_out[name + "/" * (path.is_dir() and not path.is_symlink())] = why
    for name in weights:
        if name not in files:
            raise ValueError(f"{source / name} can't be sent: {left_out.get(name, 'it is not in the folder')}")
    _refuse_access_tokens([source / name for name in files if name not in weights])
    if "README.md" in files:
        try:
            text = (source / "README.md").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{source / 'README.md'} is not UTF-8: {error}") from None
        files["README.md"] = text.replace(PLACE, repo_id).encode()
    return Shipment(source, repo_id, files, weights, left_out)


def _adapter_folder(folder: Path) -> Path:
    """Where the adapter of an exported folder is: the folder itself, or adapter/ in it."""
    for place in (folder, folder / "adapter"):
        if (place / adapters.CONFIG).is_file():
            return place
    raise ValueError(
        f"--adapter-only: neither {folder} nor {folder / 'adapter'} has {adapters.CONFIG}; a student without LoRA has no adapter"
    )


def _adapter_weights(folder: Path) -> list[str]:
    """The weights of an adapter that others can use: readable, and on a base which others can have."""
    base = adapters.base_of(folder / adapters.CONFIG)
    if Path(base).is_absolute() or base.startswith(".") or base.count("/") > 1 or Path(base).exists():
        raise ValueError(
            f"{folder / adapters.CONFIG} names the base {base!r}, a folder of this machine; "
            "name the base's Hub repository in the recipe (export.base_model) and export again"
        )
    adapters.keys(folder)
    return [adapters.WEIGHTS]


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder in the order of their names; what stays at home whole, and links to folders, as one."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and not _folder_at_home(path.name):
            yield from _walk(path)
        else:
            yield path


def _folder_at_home(name: str) -> str:
    """Why a folder of that name is left out whole; empty for one that is looked into."""
    return next((why for pattern, why in FOLDERS_AT_HOME.items() if fnmatchcase(name.lower(), pattern)), "")


def _why_not(path: Path, folder: Path, weights: list[str], is_adapter: bool) -> str | None:
    """Why a file stays at home; None for one that is sent."""
    inside = path.relative_to(folder)
    if path.is_symlink():
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(folder.resolve()):
            return "a link out of the folder"
        if not target.is_file():
            return "a link to what is no file"
        if (why := _why_not(target, folder.resolve(), weights, is_adapter)) is not None:
            return f"a link to {target.name}: {why}"
    for part in inside.parts if path.is_dir() else inside.parts[:-1]:
        if why := _folder_at_home(part):
            return why
    if not path.is_file():
        return "not a file"
    name = inside.name
    if inside.suffix == ".safetensors" and inside.as_posix() not in weights:
        return "not the model's weights"
    if inside.as_posix() in weights:
        return None
    if name == "config.json" and is_adapter:
        return "a model's, not an adapter's"
    if name in TOKENIZER_FILES:
        return None
    for pattern, why in FILES_AT_HOME.items():
        if fnmatchcase(name.lower(), pattern):
            return why
    wanted = any(fnmatchcase(name, pattern) or fnmatchcase(inside.as_posix(), pattern) for pattern in FILES_SENT)
    return None if wanted else "not a part of a model's folder"


def _refuse_access_tokens(files: list[Path]) -> None:
    """A ValueError that names a file which holds an access token: this machine's, a secret of the environment, or what looks like one."""
    from huggingface_hub import get_token

    own = get_token()
    for path in files:
        content = path.read_bytes()
        if terminal.holds_secret(content) or (own and len(own) > 8 and own.encode() in content):
            raise ValueError(
                f"{path} holds what looks like an access token or private key, or a secret of the environment: take it out; nothing was "
                "sent"
            )


def listing(shipment: Shipment, private: bool) -> str:
    """What will be sent and what is left out, a line each."""
    sizes = {name: shipment.size(name) for name in shipment.files}
    head = f"{shipment.folder} -> {shipment.repo_id}{' (private)' if private else ''}: {len(sizes)} files, {sum(sizes.values()):,} bytes"
    width = max(len(f"{size:,}") for size in sizes.values())
    lines = [head, *(f"  send {size:>{width},}  {name}" for name, size in sizes.items())]
    return "\n".join([*lines, *(f"  leave out  {name}: {why}" for name, why in shipment.left_out.items())])


def push(shipment: Shipment, *, private: bool, say: Callable[[str], None] = print) -> str:
    """Send it: the repository is made if it is not there, the weights go first, and one commit shows all files at once.

    Returns the address of the commit. An OSError when it fails, which says what has arrived and how to go on; nothing local is
    changed either way. Sent again, what has arrived is not sent again.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HTTPError

    from cdlm import __version__

    check_token()
    api, repo_id = HfApi(library_name="cdlm", library_version=__version__), shipment.repo_id
    arrived: list[str] = []
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        is_private = bool(api.model_info(repo_id).private) if private else True
        if is_private:
            additions = {name: CommitOperationAdd(name, content) for name, content in shipment.files.items()}
            for name in shipment.weights:
                api.preupload_lfs_files(repo_id, [additions[name]], free_memory=False)
                arrived.append(name)
                say(f"{name} has arrived")
            address = api.create_commit(repo_id, list(additions.values()), commit_message="Upload by cdlm").commit_url
            missing = sorted(set(shipment.files) - set(api.list_repo_files(repo_id)))
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise OSError(_failed(shipment, error, arrived)) from error
    if not is_private:
        raise ValueError(f"{repo_id} is there already and public; make it private on its page, or leave out --private. Nothing was sent.")
    if missing:
        raise OSError(f"{repo_id} took the commit {address} without {', '.join(missing)}: does a .gitignore there name them?")
    return address


def _failed(shipment: Shipment, error: Exception, arrived: list[str]) -> str:
    """What went wrong, what has arrived, and how to go on."""
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error
    status = getattr(getattr(cause, "response", None), "status_code", None)
    why = f"{error} {cause}" if cause is not error else str(error) or type(error).__name__
    hints = {
        401: "the Hub does not accept this token: set HF_TOKEN, or log in with `hf auth login`, then ",
        403: f"this token may not write to {shipment.repo_id}: take one with write permission or another repository, then ",
    }
    there = f"{', '.join(arrived)} arrived and will not be sent again" if arrived else "no weights arrived"
    return (
        f"the push to {shipment.repo_id} failed ({why}). So far {there}; nothing shows in the repository before the last step, one commit. "
        f"{shipment.folder} is as it was; {hints.get(status or 0, '')}go on with the same command."
    )
