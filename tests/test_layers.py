"""The house: which room may import which, who may use which library, and where a checkpoint family may be named."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

PACKAGE = ROOT / "cdlm"
FLOORS = {
    0: ("masks", "noise", "unmask", "losses", "roofline", "files", "terminal"),
    1: ("attention", "cache"),
    2: ("families",),
    3: ("decode", "speculate", "data", "processes"),
    4: ("trajectories", "trainer"),
    5: ("evaluate", "hub", "exported", "importers", "canvases"),
    6: ("recipe", "cli", "runs", "methods", "stages", "plan", "memory", "ablate", "bench", "trace", "verify"),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}

# room -> the highest floor it may import from; a room may always import from itself. -1: nothing of the package.
HIGHEST = {
    "masks": -1, "noise": -1, "unmask": -1, "losses": -1, "roofline": -1, "files": -1, "terminal": -1,
    "attention": 0, "cache": -1,
    "families": 1,
    "decode": 2, "speculate": 2, "data": -1, "processes": -1,
    "trajectories": 3, "canvases": 4, "trainer": 3,
    "evaluate": 4, "hub": 3, "exported": -1, "importers": 4,
    "recipe": 6, "cli": 6, "runs": 6, "methods": 6, "stages": 6, "plan": 6, "memory": 0, "ablate": 6, "bench": 6, "trace": 6, "verify": 6,
}  # fmt: skip
NEVER = {("trainer", "decode"), ("canvases", "trainer")}

# room -> libraries it may use besides the standard one. A room that is not here answers to HEAVY only.
LIBRARIES = {
    "masks": {"torch"}, "noise": {"torch"}, "unmask": {"torch"}, "losses": {"torch"}, "roofline": set(),
    "files": {"safetensors"}, "terminal": set(),
    "attention": {"torch", "transformers", "triton"}, "cache": {"torch", "transformers"},
    "families": {"torch", "transformers", "huggingface_hub", "safetensors"},
    "decode": {"torch"}, "speculate": {"torch"}, "data": {"torch", "datasets", "tokenizers", "pyarrow", "huggingface_hub", "jinja2"},
    "exported": {"torch", "transformers"}, "recipe": {"yaml"}, "processes": {"torch", "accelerate"},
}  # fmt: skip
HEAVY = {
    "triton": {"attention"},
    "trl": {"trainer", *FLOORS[6]},
    "peft": {"trainer", *FLOORS[6]},
    "lm_eval": {"evaluate"},
    "matplotlib": {"evaluate"},
    "datasets": {"data"},
}

FAMILY_NAMES = ("llada", "dream", "sdar", "zaya", "gemma", "qwen", "nemotron")  # TiDAR is a way of decoding here, which any family may have
FILES = sorted(PACKAGE.rglob("*.py"))


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def module_name(file: Path, root: Path = PACKAGE) -> str:
    """cdlm/families/__init__.py -> cdlm.families"""
    parts = file.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(name: str) -> str:
    """cdlm.families.native -> families; the package itself is ''."""
    return [*name.split("."), ""][1]


def imports(tree: ast.AST, name: str, is_package: bool) -> list[str]:
    """Every module that is imported, inside functions too, `from cdlm import data` being cdlm.data."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = name.split(".")[: len(name.split(".")) - node.level + is_package] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            found += [f"cdlm.{alias.name}" for alias in node.names] if target == "cdlm" else [target]
    return found


def wrong_imports(tree: ast.AST, name: str, is_package: bool = False) -> list[str]:
    """What a module may not import, with the reason."""
    here, wrong = room(name), []
    for target in imports(tree, name, is_package):
        top, there = target.split(".")[0], room(target)
        if top == "cdlm":
            if there in ("", "__version__", here) or not here:
                continue
            if there not in FLOOR:
                wrong.append(f"{name} imports {there} from cdlm, which is no room: import it from where it is written")
            elif FLOOR[there] > HIGHEST[here] or (here, there) in NEVER:
                wrong.append(f"{name} (floor {FLOOR[here]}) imports {target} (floor {FLOOR[there]})")
        elif top not in sys.stdlib_module_names:
            if here in LIBRARIES and top not in LIBRARIES[here]:
                wrong.append(f"{name} imports {top}; {here} may use {', '.join(sorted(LIBRARIES[here])) or 'nothing'}")
            elif here not in HEAVY.get(top, {here}):
                wrong.append(f"{name} imports {top}, which belongs to {', '.join(sorted(HEAVY[top]))}")
    return wrong


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_no_upward_import(file):
    name = module_name(file)
    assert room(name) in {*FLOOR, ""}, f"{name} has no floor; give it one here and in the design"
    assert wrong_imports(parse(file), name, file.name == "__init__.py") == []


def test_the_table_is_about_rooms():
    assert set(HIGHEST) == set(FLOOR) and set(LIBRARIES) <= set(FLOOR)
    assert all(HIGHEST[name] < floor or floor == 6 for name, floor in FLOOR.items())


@pytest.mark.parametrize(
    "name, text",
    [
        ("cdlm.masks", "from cdlm import noise"),
        ("cdlm.losses", "import transformers"),
        ("cdlm.cache", "from cdlm.families.base import Facts"),
        ("cdlm.families.base", "from ..decode import decode"),
        ("cdlm.families.base", "def f():\n    from cdlm import decode"),
        ("cdlm.decode", "import cdlm.data"),
        ("cdlm.decode", "from cdlm import generate"),
        ("cdlm.data", "if True:\n    import transformers"),
        ("cdlm.trainer", "from cdlm.decode import decode"),
        ("cdlm.trainer", "from .trajectories import Trajectory"),
        ("cdlm.trajectories", "import peft"),
        ("cdlm.hub", "from cdlm.trajectories import replay"),
        ("cdlm.evaluate.run", "from cdlm import recipe"),
        ("cdlm.exported.generate", "from cdlm import unmask"),
        ("cdlm.recipe", "import torch"),
        ("cdlm.plan", "import triton"),
    ],
)
def test_an_upward_import_is_found(name, text):
    assert len(wrong_imports(ast.parse(text), name)) == 1


@pytest.mark.parametrize(
    "name, text",
    [
        ("cdlm.families.base", "from cdlm import masks\nfrom cdlm.cache import BlockCache\nfrom .native import facts"),
        ("cdlm.trainer", "from cdlm import data, losses, noise\nimport trl, peft, torch"),
        ("cdlm.evaluate.report", "from cdlm.evaluate.run import result\nfrom cdlm.trajectories import replay\nimport json"),
        ("cdlm.stages", "from cdlm import recipe, trainer, hub, __version__"),
    ],
)
def test_a_downward_import_is_allowed(name, text):
    assert wrong_imports(ast.parse(text), name) == []


def test_the_package_itself_imports_nothing_until_it_is_used():
    top = [node for node in parse(PACKAGE / "__init__.py").body if isinstance(node, ast.Import | ast.ImportFrom)]
    found = imports(ast.Module(body=top, type_ignores=[]), "cdlm", True)
    assert [name for name in found if name.split(".")[0] not in sys.stdlib_module_names] == []


def named_in_code(tree: ast.Module) -> list[tuple[int, str]]:
    """Lines and texts of code that hold a family's name: identifiers and string constants. Docstrings and comments may cite."""
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, with_docstring) and ast.get_docstring(node) is not None and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in docstrings:
            continue
        for _, value in ast.iter_fields(node):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and any(name in text.lower() for name in FAMILY_NAMES):
                    found.append((getattr(node, "lineno", 0), text))
    return found


@pytest.mark.parametrize("file", [f for f in FILES if room(module_name(f)) != "families"], ids=module_name)
def test_no_family_is_named_outside_families(file):
    assert named_in_code(parse(file)) == []


@pytest.mark.parametrize(
    "text",
    ["def load_llada(): ...", "import dream_utils", "x = 'GSAI-ML/LLaDA-8B'", "f(sdar=1)", "a.is_qwen", "class Dream: ...",
     "f'{x} for Gemma'", "def f(zaya): ...", "from nemotron import x as y", "{'nemotron': 1}", "def f():\n    'doc'\n    'Dream'"],
)  # fmt: skip
def test_a_family_named_in_code_is_found(text):
    assert len(named_in_code(ast.parse(text))) >= 1


def test_docstrings_and_comments_may_cite():
    text = '"""LLaDA, arXiv 2502.09992."""\n\ndef f():\n    """As Dream does."""\n    # qwen\n    return 1\n\nclass C:\n    """SDAR."""\n'
    assert named_in_code(ast.parse(text)) == []


LIGHT = """
import sys

heavy = set(sys.argv[2].split(","))
asked = set()


class Listen:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in heavy:
            asked.add(name.split(".")[0])
        return None


sys.meta_path.insert(0, Listen)
__import__(sys.argv[1])
print("asked:", sorted(asked))
"""
NOT_ON_IMPORT = ["triton", "trl", "peft", "lm_eval", "transformers", "datasets"]


@pytest.mark.parametrize("name, heavy", [("cdlm", NOT_ON_IMPORT), ("cdlm.recipe", [*NOT_ON_IMPORT, "torch"])])
def test_a_plain_import_is_light(name, heavy):
    """In a new process. A library that is not installed is heard too, when its import is asked for."""
    run = [sys.executable, "-c", LIGHT, name, ",".join(heavy)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "asked: []"


def test_an_import_that_is_not_light_is_heard(tmp_path):
    (tmp_path / "loud.py").write_text("try:\n    import triton\nexcept ImportError:\n    pass\n")
    run = [sys.executable, "-c", LIGHT, "loud", ",".join(NOT_ON_IMPORT)]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout.strip() == "asked: ['triton']", done.stderr


def asks_which_noise(tree: ast.AST) -> list[int]:
    """Lines that ask a model's facts for the name of its noise, or compare one. What a process object offers may be asked."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "noise" and ast.unparse(node.value).split(".")[-1].endswith("facts"):
            found.append(node.lineno)
        if isinstance(node, ast.Compare):
            sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
            if any(side.split(".")[-1] == "noise" or side.endswith(("['noise']", "get('noise')")) for side in sides):
                found.append(node.lineno)
        if isinstance(node, ast.Constant) and node.value == "absorbing":
            found.append(node.lineno)
        if isinstance(node, ast.Name | ast.Attribute) and ast.unparse(node).split(".")[-1] in ("Absorbing", "Uniform"):
            found.append(getattr(node, "lineno", 0))
    return found


@pytest.mark.parametrize("file", [f for f in FILES if FLOOR.get(room(module_name(f)), 9) > 2], ids=module_name)
def test_nothing_above_the_families_asks_which_noise_it_is(file):
    assert asks_which_noise(parse(file)) == []


@pytest.mark.parametrize("text", [
    "model.facts.noise", "if facts.noise == 'uniform': ...", "noise != 'uniform'", "config['noise'] == x", "x = 'absorbing'",
    "isinstance(process, noise.Uniform)", "type(p) is Absorbing",
])  # fmt: skip
def test_a_question_for_the_noise_is_found(text):
    assert asks_which_noise(ast.parse(text))


def test_a_process_may_be_asked_what_it_does():
    assert asks_which_noise(ast.parse("model.noise.corrupt(x)\nif model.noise.marked: ...\nobjective == 'uniform'")) == []
