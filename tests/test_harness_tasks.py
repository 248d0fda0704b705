"""`cdlm eval` from the command to the files, and the tasks in eval/tasks against the harness's own, on the same rows."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import evaluate
import lm_eval
import pytest
from conftest import ROOT
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import TaskIndex
from mini import save_teacher

from cdlm import cli, data
from cdlm.evaluate import harness, harness_run

TASKS, HARNESS = ROOT / "eval" / "tasks", Path(lm_eval.__file__).parent
GSM8K = ROOT / "tests" / "fixtures" / "gsm8k" / "test_20.jsonl"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness") / "teacher"
    save_teacher(folder)
    return folder


@pytest.fixture(autouse=True)
def few_tasks(monkeypatch):
    """Of the harness's own tasks, of which there are thousands of files, only those asked for here are read."""
    read = TaskIndex._iter_yaml_files
    kept = ("gsm8k-cot.yaml", "humaneval.yaml", "humaneval_instruct.yaml", "mbpp.yaml", "mbpp_instruct.yaml")

    def few(root: Path):
        folders = [root / name for name in ("gsm8k", "humaneval", "mbpp")] if root.is_relative_to(HARNESS) else [root]
        return [path for folder in folders for path in read(folder) if path.name in kept or not root.is_relative_to(HARNESS)]

    monkeypatch.setattr(TaskIndex, "_iter_yaml_files", staticmethod(few))


def problems(count: int) -> list[dict[str, str]]:
    """Rows in HumanEval's form."""
    return [
        {
            "task_id": f"Mine/{i}", "entry_point": f"add_{i}",
            "prompt": f'def add_{i}(a):\n    """Adds {i}; "quoted", {{braces}}.\n    """\n',
            "canonical_solution": f"    return a + {i}\n", "test": f"def check(candidate):\n    assert candidate(1) == {i + 1}\n",
        }
        for i in range(count)
    ]  # fmt: skip


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prompts(task, **values) -> list[tuple]:
    """What the harness asks a model, and what it compares with."""
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=None, rank=0, world_size=1, **values)
    return [(one.args, task.doc_to_target(one.doc)) for one in task.instances]


def local(name: str, **metadata):
    return TaskManager(include_path=str(TASKS), metadata=metadata).load([name])["tasks"][name]


def own(monkeypatch, name: str, rows: list[dict]):
    """The harness's task as it is, over these rows in place of the Hub's."""
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: {"test": datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(evaluate, "load", lambda *a, **k: type("Metric", (), {"compute": staticmethod(lambda **k: ({}, {}))}))
    return TaskManager().load([name])["tasks"][name]


def chat(history, add_generation_prompt=True):
    return "".join(f"<{turn['role']}>{turn['content']}" for turn in history) + ("<assistant>" if add_generation_prompt else "")


FORMATS = [{}, {"apply_chat_template": True, "fewshot_as_multiturn": True, "chat_template": chat, "tokenizer_name": "x"}]


@pytest.mark.parametrize("form", FORMATS, ids=["raw", "chat"])
def test_gsm8k_local_asks_what_gsm8k_cot_asks(monkeypatch, form):
    rows = data.read_rows(GSM8K)
    ours = prompts(local("gsm8k_local", gsm8k_file=str(GSM8K)), **form)
    theirs = prompts(own(monkeypatch, "gsm8k_cot", rows), **form)
    assert len(ours) == 20 and ours == theirs
    assert ours[0][0][0].count("Q: ") == 9 and rows[0]["question"] in ours[0][0][0]


def test_gsm8k_local_scores_as_gsm8k_cot_does(monkeypatch):
    rows = data.read_rows(GSM8K)[:4]
    answers = [row["answer"].split("#### ")[1] for row in rows]
    said = [f"The answer is {answers[0]}.", f"so {answers[1]}", "The answer is -7.", "no number"]
    scores = []
    for task in (local("gsm8k_local", gsm8k_file=str(GSM8K)), own(monkeypatch, "gsm8k_cot", rows)):
        task.set_fewshot_seed(1234)
        task.build_all_requests(limit=4, rank=0, world_size=1)
        for one, text in zip(task.instances, said, strict=True):
            one.resps.append(text)
        task.apply_filters()
        scores.append({
            name: [task.process_results(one.doc, [one.filtered_resps[name]])["exact_match"] for one in task.instances]
            for name in ("strict-match", "flexible-extract")
        })  # fmt: skip
    assert scores[0] == scores[1] == {"strict-match": [1.0, 0.0, 0.0, 0.0], "flexible-extract": [1.0, 1.0, 0.0, 0.0]}


@pytest.mark.parametrize("form", FORMATS, ids=["raw", "chat"])
def test_humaneval_local_asks_what_humaneval_instruct_asks(monkeypatch, tmp_path, form):
    file = write(tmp_path / "problems.jsonl", problems(20))
    ours = prompts(local("humaneval_local", humaneval_file=str(file)), **form)
    theirs = prompts(own(monkeypatch, "humaneval_instruct", problems(20)), **form)
    assert len(ours) == 20 and ours == theirs


def test_humaneval_local_scores_programs(monkeypatch, tmp_path):
    file = write(tmp_path / "problems.jsonl", problems(4))
    task, judge = local("humaneval_local", humaneval_file=str(file)), own(monkeypatch, "humaneval_instruct", problems(4))
    said = ["    return a + 0\n```\nDone.", "    return a\n", "    return a + 2", "    return ("]
    for one in (task, judge):
        one.build_all_requests(limit=4, rank=0, world_size=1)
        for instance, text in zip(one.instances, said, strict=True):
            instance.resps.append(text)
        one.apply_filters()
    programs = [[one.filtered_resps["create_test"] for one in t.instances] for t in (task, judge)]
    assert programs[0] == programs[1]
    scores = [task.process_results(doc, [p])["pass@1"] for doc, p in zip(problems(4), programs[0], strict=True)]
    assert scores == [1.0, 0.0, 1.0, 0.0]
    assert task.UNSAFE_CODE


def test_scoring_that_is_broken_is_found_before_a_model_is_asked(monkeypatch, tmp_path):
    task = local("humaneval_local", humaneval_file=str(write(tmp_path / "problems.jsonl", problems(1))))
    module = __import__("sys").modules[type(task).__module__]
    monkeypatch.setattr(module, "runs", lambda program: True)
    with pytest.raises(ValueError, match="must score 0 scored 1"):
        task.build_all_requests(limit=1, rank=0, world_size=1)
    monkeypatch.setattr(module, "runs", lambda program: False)
    with pytest.raises(ValueError, match="must score 1 scored 0"):
        task.build_all_requests(limit=1, rank=0, world_size=1)


def test_a_program_that_does_not_end_has_failed(tmp_path):
    task = local("humaneval_local", humaneval_file=str(write(tmp_path / "problems.jsonl", problems(1))))
    runs = __import__("sys").modules[type(task).__module__].runs
    assert runs("pass") and not runs("while True: pass", seconds=0.5) and not runs("raise SystemExit(3)")


class CodeEval:
    """The Hub's code_eval, as far as these tasks call it: programs are run, where the environment allows it. broken: what it says of every
    program instead."""

    def __init__(self, broken: float | None = None):
        self.broken = broken

    def compute(self, references, predictions, k):
        if os.environ.get("HF_ALLOW_CODE_EVAL") != "1":
            raise ValueError("code_eval executes untrusted code")
        with tempfile.TemporaryDirectory() as folder:
            file, passed = Path(folder) / "program.py", []
            for reference, programs in zip(references, predictions, strict=True):
                for program in programs:
                    file.write_text(f"{program}\n{reference}\n")
                    passed.append(subprocess.run([sys.executable, "-I", str(file)], capture_output=True, timeout=20).returncode == 0)
        return {f"pass@{n}": sum(passed) / len(passed) if self.broken is None else self.broken for n in k}, {}


MBPP = {
    "task_id": 11, "text": "Write a function that doubles.", "code": "def twice(a):\n    return 2 * a", "test_setup_code": "",
    "test_list": ["assert twice(1) == 2", "assert twice(2) == 4", "assert twice(3) == 6"], "challenge_test_list": [],
}  # fmt: skip
CODE = ("humaneval", "humaneval_instruct", "mbpp", "mbpp_instruct")


def hub_code(monkeypatch, metric: CodeEval) -> None:
    """The Hub's code tasks as they are, over one row each, scored by `metric`."""
    short = {"task_id": "s", "prompt": "def f(a):\n", "entry_point": "f", "test": "def check(c):\n    assert c(1) == 1\n"}
    rows = {"openai/openai_humaneval": [short], "google-research-datasets/mbpp": [MBPP]}
    monkeypatch.setenv("HF_ALLOW_CODE_EVAL", "1")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, path, **k: {"test": datasets.Dataset.from_list(rows[path])})
    monkeypatch.setattr(evaluate, "load", lambda *a, **k: metric)
    for name in [name for name in sys.modules if name.startswith("lm_eval.tasks.") and name.endswith(".utils")]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize("name", CODE)
def test_the_hubs_code_tasks_are_tried_through_their_own_metric(monkeypatch, name):
    hub_code(monkeypatch, CodeEval())
    task = TaskManager().load([name])["tasks"][name]
    harness_run.try_metric(name, task)
    (doc, start) = next((doc, start) for needed, doc, start in harness_run.KNOWN if needed <= set(task.eval_docs[0]))
    form = {"mbpp_instruct": "\n{}```"}.get(name, "{}")
    assert harness_run.scores(task, doc, form.format(start + "    return b + a\n")) == [1.0]
    assert harness_run.scores(task, doc, form.format(start + "    return 5\n")) == [0.0]


@pytest.mark.parametrize("broken", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("name", ["humaneval_instruct", "mbpp_instruct"])
def test_a_code_task_whose_metric_is_broken_is_refused_before_a_model_is_read(monkeypatch, capsys, name, broken):
    hub_code(monkeypatch, CodeEval(broken))
    assert cli.main(["eval", "nowhere", "--tasks", name, "--confirm_run_unsafe_code"]) == 2
    said = capsys.readouterr().err
    assert f"task {name}: a right program must score 1 and a wrong one 0" in said and f"[{broken}] and [{broken}]" in said


def test_a_metric_that_fails_or_may_not_run_is_one_error_too(monkeypatch, capsys):
    hub_code(monkeypatch, CodeEval())
    flags = ["eval", "nowhere", "--tasks", "mbpp_instruct", "--confirm_run_unsafe_code"]
    right = CodeEval.compute
    monkeypatch.setattr(CodeEval, "compute", lambda *a, **k: 1 / 0 if "a + b" in k["predictions"][0][0] else right(*a, **k))
    assert cli.main(flags) == 2
    assert "task mbpp_instruct: its metric fails on a known program: ZeroDivisionError" in capsys.readouterr().err
    hub_code(monkeypatch, CodeEval())
    monkeypatch.delenv("HF_ALLOW_CODE_EVAL")
    assert cli.main(flags) == 2
    said = capsys.readouterr().err
    assert "task mbpp_instruct can't be loaded: ValueError: code_eval executes untrusted code" in said and "HF_ALLOW_CODE_EVAL=1" in said


def test_a_code_task_of_another_form_is_refused(monkeypatch, capsys, tmp_path):
    (tmp_path / "odd.yaml").write_text(
        "task: odd\nunsafe_code: true\noutput_type: generate_until\ntest_split: test\ndoc_to_text: x\ndoc_to_target: y\n"
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {write(tmp_path / 'rows.jsonl', [{'question': 'q'}])}}}}}\n"
        "metric_list: [{metric: exact_match}]\n"
    )
    flags = ["--tasks", "odd", "--include_path", str(tmp_path)]
    assert cli.main(["eval", "nowhere", *flags]) == 2 and "--confirm_run_unsafe_code" in capsys.readouterr().err
    assert cli.main(["eval", "nowhere", *flags, "--confirm_run_unsafe_code"]) == 2
    assert "neither HumanEval's nor MBPP's form" in capsys.readouterr().err


def test_a_code_task_from_the_command_to_the_score(monkeypatch, teacher, tmp_path, capsys):
    hub_code(monkeypatch, CodeEval())
    out = tmp_path / "out"
    flags = ["--tasks", "humaneval_instruct", "--gen_kwargs", "max_gen_toks=8", "--output_path", str(out)]
    assert run(teacher, *flags) == 2 and "--confirm_run_unsafe_code" in capsys.readouterr().err and not out.exists()
    assert run(teacher, *flags, "--confirm_run_unsafe_code") == 0
    found = json.loads(next(out.rglob("results_*.json")).read_text())["results"]["humaneval_instruct"]
    assert found["pass@1,create_test"] == 0.0 and found["steps,none"] > 0


def test_small_world_takes_every_accepted_answer():
    task = local("small_world")
    rows = list(task.eval_docs)
    assert len(rows) == 400
    exact = next(row for row in rows if row["accept"] is None)
    several = next(row for row in rows if row["accept"] is not None)
    words = several["accept"].split("(")[-1].rstrip(")").split("|")
    other = several["answer"][:-4] + next(word for word in words if word not in several["answer"])
    for row, text, wanted in ((exact, f" {exact['answer']}\n", 1.0), (exact, exact["answer"][:-1], 0.0), (several, other, 1.0),
                              (several, several["answer"] + "x", 0.0), (exact, "", 0.0)):  # fmt: skip
        assert task.process_results(row, [text]) == {"acc": wanted}
    assert {row["task"] for row in local("small_world_sort").eval_docs} == {"sort"}


# the command


def run(teacher, *flags: str) -> int:
    return cli.main(["eval", str(teacher), *flags])


def test_a_run_from_the_command_to_its_files(teacher, tmp_path, capsys):
    """Fourteen questions, one of which the model's own answer is right for; costs beside the score; a second run decodes nothing."""
    rows = [{"task": "copy", "prompt": f"copy:{i:05d}abc", "answer": "?"} for i in range(14)]
    lm = harness.CDLM(str(teacher), confidence_threshold=0.5, block_length=8)
    prompt = lm.apply_chat_template([{"role": "user", "content": rows[3]["prompt"]}])
    from test_harness import generation

    (rows[3]["answer"],) = lm.generate_until(generation([prompt]))
    file = write(tmp_path / "rows.jsonl", rows)
    flags = [
        "--tasks", "small_world", "--apply_chat_template", "--batch_size", "4", "--output_path", str(tmp_path / "out"), "--log_samples",
        "--model_args", "confidence_threshold=0.5", "block_length=8", "--gen_kwargs", "max_gen_toks=16",
        "--metadata", f"small_world_file={file}",
    ]  # fmt: skip
    assert run(teacher, *flags) == 0
    said = capsys.readouterr().out
    assert "|small_world|" in said and "tpf" in said
    (path,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(path.read_text())
    score, config = found["results"]["small_world"], found["config"]["cdlm"]
    assert score["acc,none"] == 1 / 14
    samples = [json.loads(line) for line in next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()]
    costs = [sample["costs"][0] for sample in samples]
    assert len(costs) == 14
    for name in harness.COSTS:
        assert score[f"{name},none"] == pytest.approx(sum(cost[name] for cost in costs) / 14)
    tokens = sum(cost["output_tokens"] for cost in costs)
    assert score["tpf,none"] == pytest.approx(tokens / sum(cost["forwards"] for cost in costs))
    assert score["tps,none"] == pytest.approx(tokens / sum(cost["seconds"] for cost in costs))
    assert config["decode"]["confidence_threshold"] == 0.5 and config["facts"]["mask_token_id"] == 1
    assert config["apply_chat_template"] is True and config["fewshot_as_multiturn"] is True and found["chat_template"]
    assert config["versions"]["lm_eval"] == "0.4.13" and config["batch_size"] == 4 and found["n-shot"] == {"small_world": 0}

    kept = (tmp_path / "out" / "finished.jsonl").read_bytes()
    assert run(teacher, *flags) == 0
    assert (tmp_path / "out" / "finished.jsonl").read_bytes() == kept
    assert json.loads(max((tmp_path / "out").rglob("results_*.json")).read_text())["results"]["small_world"] == score


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--tasks", "no_such_task"], ["Tasks not found: no_such_task", "lm-eval ls tasks"]),
        (["--tasks", "gsm8k_cot"], ["gsm8k_cot", "can't be read", "gsm8k_local"]),
        (["--tasks", "humaneval_instruct", "--confirm_run_unsafe_code"], ["humaneval_instruct", "can't be read"]),
        (["--tasks", "gsm8k_local"], ["--metadata gsm8k_file=FILE"]),
        (["--tasks", "gsm8k_local", "--metadata", "gsm8k_file=EMPTY"], ["holds no rows"]),
        (["--tasks", "gsm8k_local", "--metadata", "gsm8k_file=OTHER"], ["row 1 has no question, answer", "task_id"]),
        (["--tasks", "humaneval_local", "--metadata", "humaneval_file=OTHER"], ["--confirm_run_unsafe_code"]),
        (["--tasks", "small_world", "--model_args", "treshold=0.5"], ["unknown treshold", "confidence_threshold"]),
        (["--tasks", "small_world", "--limit", "0"], ["--limit is 0", "above 0"]),
        (["--tasks", "small_world", "--limit", "-2"], ["--limit is -2"]),
        (["--tasks", "small_world", "--samples", '{"small_world": [0, 400]}'], ["documents 0 to 399", "[0, 400]"]),
        (["--tasks", "small_world", "--samples", '{"small_world": []}'], ["no documents of task small_world"]),
        (["--tasks", "small_world", "--samples", '{"other": [0]}'], ["--samples names other", "small_world"]),
        (["--tasks", "small_world_chain", "--metadata", "small_world_file=COPIES"], ["small_world_chain has no questions"]),
        (["--tasks", "small_world", "--samples", '[1]'], ["--samples is [1]"]),
        (["--tasks", "small_world", "--samples", '{"small_world": ["a"]}'], ["--samples is", '{"task": [0, 5]}']),
        (["--tasks", "small_world", "--samples", '{"small_world": "all"}'], ["--samples is"]),
        (["--tasks", "small_world", "--samples", "no_such_file"], ["--samples is 'no_such_file'"]),
        (["--tasks", "small_world", "--model", "hf"], ["--model hf"]),
        (["--tasks", "small_world", "--apply_chat_template", "other"], ["--apply_chat_template other"]),
        (["--tasks", "small_world", "--apply_chat_template", "--cache_requests", "true"], ["--cache_requests with --apply_chat_template"]),
        (["--tasks", "small_world", "--model_args", "special_tokens=1"], ["special_tokens is 1", "true or false"]),
        (["--tasks", "small_world", "--num_fewshot", "-1"], ["--num_fewshot is -1"]),
        (["--tasks", "small_world", "--output_path", "=OTHER"], ["--output_path", "is a file"]),
        (["--tasks", "small_world", "--output_path", "=OTHER/more/x.json"], ["--output_path", "OTHER.jsonl is a file"]),
        (["--tasks", "small_world", "--hf_hub_log_args", "nonsense=1"], ["--hf_hub_log_args", "nonsense"]),
        (["--tasks", "small_world", "--model_args", "block_length=x"], ["block_length is 'x'", "a whole number"]),
        (["--tasks", "small_world", "--model_args", "confidence_threshold=high"], ["confidence_threshold is 'high'", "a number"]),
        (["--tasks", "small_world", "--model_args", "stop_at_eos=5"], ["stop_at_eos is 5", "true or false"]),
        (["--tasks", "small_world", "--device", "meta"], ["device is 'meta'"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "until=5"], ["task small_world", "until is [5]"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "max_gen_toks=abc"], ["task small_world", "abc"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "max_gen_toks=2.5"], ["task small_world", "a whole number"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "temperature=hot", "do_sample=true"], ["task small_world", "hot"]),
        (["--tasks", "small_world", "--batch_size", "auto"], ["batch_size is 'auto'"]),
        (["--tasks", "small_world", "--device", "cuda:7"], ["device is 'cuda:7'"]),
        (["--tasks", "small_world", "--include_path", "nowhere"], ["--include_path nowhere"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "max_gen_toks=0"], ["max_new_tokens is 0"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "max_gen_toks=999"], ["small_world", "max_gen_toks", "256"]),
        (["--tasks", "small_world", "--limit", "2", "--gen_kwargs", "beams=4"], ["beams"]),
    ],
    ids=lambda value: " ".join(value[1:4]) if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line(teacher, tmp_path, capsys, flags, words):
    (tmp_path / "EMPTY.jsonl").write_text("")
    write(tmp_path / "OTHER.jsonl", problems(1))
    write(tmp_path / "COPIES.jsonl", [{"task": "copy", "prompt": "copy:ab", "answer": "ab"}])
    for name in ("EMPTY", "OTHER", "COPIES"):
        flags = [flag.replace(f"={name}", f"{'=' * (flag[0] != '=')}{tmp_path / name}.jsonl") for flag in flags]
    assert run(teacher, *flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cdlm: error: ")]
    assert all(word in line for word in words), line


def test_more_processes_than_questions_are_refused(monkeypatch, teacher, capsys):
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert run(teacher, "--tasks", "small_world", "--limit", "2") == 2
    assert "small_world has 2 questions for 3 processes; start at most 2" in capsys.readouterr().err


def test_a_group_has_the_costs_of_its_tasks(teacher, tmp_path, capsys):
    (tmp_path / "pair.yaml").write_text(
        "group: pair\ntask: [small_world_copy, small_world_sort]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    )
    rows = [{"task": task, "prompt": f"{task}:{i}", "answer": "?"} for task, count in (("copy", 3), ("sort", 1)) for i in range(count)]
    file = write(tmp_path / "rows.jsonl", rows)
    flags = ["--tasks", "pair", "--include_path", str(tmp_path), "--metadata", f"small_world_file={file}", "--gen_kwargs", "max_gen_toks=8"]
    assert run(teacher, *flags, "--output_path", str(tmp_path / "out")) == 0
    found = json.loads(next((tmp_path / "out").rglob("results_*.json")).read_text())
    pair, copy, sort = (found["results"][name] for name in ("pair", "small_world_copy", "small_world_sort"))
    assert pair["steps,none"] == pytest.approx((3 * copy["steps,none"] + sort["steps,none"]) / 4)
    assert found["groups"]["pair"]["tpf,none"] == pair["tpf,none"] > 0


def test_the_recorded_command_holds_no_secret_of_the_environment(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "sekret-value-0123")
    file = write(tmp_path / "rows.jsonl", [{"task": "copy", "prompt": "copy:abc", "answer": "abc"}])
    out = tmp_path / "sekret-value-0123"
    flags = ["--tasks", "small_world", "--apply_chat_template", "--output_path", str(out), "--gen_kwargs", "max_gen_toks=8",
             "--model_args", "confidence_threshold=0.5", "block_length=8", "--metadata", f"small_world_file={file}"]  # fmt: skip
    assert run(teacher, *flags) == 0
    (path,) = out.rglob("results_*.json")
    command = json.loads(path.read_text())["config"]["cdlm"]["command"]
    assert "--output_path" in command and "sekret-value-0123" not in " ".join(command)


def test_the_papers_commands_in_the_readme_are_flags_of_the_harness():
    """Each is read by the harness's own parser; few-shot examples and lengths are the paper's."""
    asked = {}
    for line in (ROOT / "README.md").read_text().splitlines():
        before, command, after = line.partition("cdlm eval MODEL ")
        if command and before in ("    ", "    HF_ALLOW_CODE_EVAL=1 ") and "[any" not in after:
            cfg = harness_run.configured("MODEL", shlex.split(after))
            asked[",".join(cfg.tasks)] = cfg
    paper = {"gsm8k_cot": 8, "minerva_math": 4, "humaneval_instruct": None, "mbpp_instruct": 0}  # humaneval_instruct has none by itself
    assert {name: asked[name].num_fewshot for name in paper} == paper
    for name in paper:
        assert asked[name].gen_kwargs == {"max_gen_toks": 256} and asked[name].apply_chat_template is True
        assert asked[name].fewshot_as_multiturn is False
        assert asked[name].confirm_run_unsafe_code == (name in ("humaneval_instruct", "mbpp_instruct"))


def test_flags_that_are_the_harnesss_own_business_pass(teacher, capsys):
    chosen = ["--samples", '{"small_world_copy": [2]}']
    for flags in (["--trust_remote_code"], ["--tasks", "small_world_copy,"], chosen, ["--seed", "None"]):
        asked = ["--tasks", "small_world_copy", "--gen_kwargs", "max_gen_toks=8", *(["--limit", "1"] if "--samples" not in flags else [])]
        assert run(teacher, *asked, *flags) == 0
        assert "|small_world_copy|" in capsys.readouterr().out


def test_chosen_documents_keep_their_numbers_in_whatever_order_they_are_typed(teacher, tmp_path):
    rows = [{"task": "copy", "prompt": f"copy:{i}", "answer": "?"} for i in range(4)]
    flags = [
        "--tasks", "small_world", "--metadata", f"small_world_file={write(tmp_path / 'rows.jsonl', rows)}",
        "--gen_kwargs", "max_gen_toks=8", "--samples", '{"small_world": [3, 1, 3]}',
        "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    assert run(teacher, *flags) == 0
    found = [json.loads(line) for line in next((tmp_path / "out").rglob("samples_*.jsonl")).read_text().splitlines()]
    assert [(row["doc_id"], row["doc"]["prompt"]) for row in found] == [(1, "copy:1"), (3, "copy:3")]
    assert all(len(row["costs"]) == 1 for row in found)


def test_another_models_tokenizer_is_refused(teacher, tmp_path, capsys):
    import shutil

    shutil.copytree(teacher, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "mask_token_id": 3}))
    assert run(tmp_path / "model", "--tasks", "small_world") == 2
    assert "not the tokenizer of this model" in capsys.readouterr().err


def test_costs_find_chosen_documents():
    costs = {("t", 0): [{"n": 1}], ("t", 1): [{"n": 2}]}
    lm = type("L", (), {"costs": costs, "gather_object": lambda self, own: [own]})()
    results = {"results": {}, "samples": {"t": [{"doc_id": 4, "filter": "none"}, {"doc_id": 9, "filter": "none"}]}}
    harness.add_costs(results, lm, {"t": [4, 9]})
    assert [sample["costs"] for sample in results["samples"]["t"]] == [[{"n": 1}], [{"n": 2}]]


def test_finished_samples_stand_beside_the_results():
    assert harness_run.beside("out/x.json") == Path("out/finished.jsonl") and harness_run.beside("out") == Path("out/finished.jsonl")
    assert harness_run.beside(None) is None
