"""The order of the layers, and that the pure part never loads torch."""

import ast
import re
import subprocess
import sys
import textwrap
from pathlib import Path

from mmtrain.config.model import MODULES

ROOT = Path(__file__).resolve().parent.parent

LAYERS = [
    "errors",
    "schedule",
    "config",
    "families",
    "spec",
    "modality",
    "costs",
    "planner",
    "simulator",
    "run_page",
    "launch",
    "models",
    "data",
    "parallel",
    "observe",
    "checkpoint",
    "training",
    "export",
    "inference",
    "local",
    "commands",
]
"""Whole packages and files of the top level; `families.NAME.adapter` belongs to models. A unit imports only units above
it, and its own files without a cycle."""

PURE = LAYERS[: LAYERS.index("models")]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- layers -->\n", "<!-- end of layers -->\n"


def unit(module: str) -> str:
    if re.fullmatch(r"mmtrain\.families\.\w+\.adapter", module):
        return "models"
    return module.partition(".")[2].partition(".")[0]


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "mmtrain").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of ours that a file imports when it runs: at its top, or inside of a function."""
    tree = ast.parse(path.read_text())
    found = set()
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if _is_type_checking(node):
            skipped.update(ast.walk(node))
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known:
                    found.add(full)
                elif node.module in known:
                    found.add(node.module)
    return found


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_the_layers_are_the_packages():
    assert {unit(module) for module in modules()} - {""} == set(LAYERS)
    assert len(LAYERS) <= 21


def test_units_import_only_units_above_them():
    known = modules()
    wrong = []
    for module, path in known.items():
        for other in imports(path, known):
            mine, theirs = unit(module), unit(other)
            if theirs and mine and LAYERS.index(theirs) > LAYERS.index(mine):
                wrong.append(f"{module} ({mine}) imports {other} ({theirs})")
    assert wrong == []


def test_there_are_no_import_cycles():
    known = modules()
    graph = {module: imports(path, known) for module, path in known.items()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_the_pure_part_never_loads_torch():
    pure = [m for m in modules() if unit(m) in PURE]
    assert len(pure) > 20
    script = "import sys\n" + "".join(f"import {m}\n" for m in pure)
    script += "print([m for m in ('torch', 'transformers', 'datasets') if m in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert answer.stdout.strip() == "[]"


def test_only_one_file_imports_torchtitan():
    users = [
        m
        for m, path in modules().items()
        if "import torchtitan" in path.read_text() or "from torchtitan" in path.read_text()
    ]
    assert users == ["mmtrain.parallel.titan"]


def test_private_names_of_torch_live_in_one_file():
    names = (r"\btorch\.[\w.]*\._[a-z]", r"from torch[\w.]* import (?:.*, )?_", r"torch\.distributed\.pipelining")
    private = re.compile("|".join((*names, r"(?<!self)\._(?:parameters|buffers|modules)\b", r"\btorch\._[a-z]")))
    users = [m for m, path in modules().items() if private.search(path.read_text())]
    assert users == ["mmtrain.parallel.torch_private"]


MODULE_NAMES = {*MODULES, *MODULES.values()}
GENERIC = ("planner", "parallel", "training")


def named(tree: ast.AST) -> set[str]:
    """Names of modules that code spells: as identifiers, or as keys in strings. Prose has spaces, and may."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found |= set(re.split(r"\W+", node.value))
        names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name", "asname")]
        found |= {name.strip("_") for name in names if isinstance(name, str)}
    return found & MODULE_NAMES


def test_the_walk_sees_names_and_keys():
    spelled = ast.parse("x.encoder; f(dit=1); y['vae']; a = 'language.lm_head'; b = 'a language model'")
    assert named(spelled) == {"encoder", "dit", "vae", "language"}


def test_code_outside_of_models_and_modalities_names_no_module():
    files = [f for name in GENERIC for f in [ROOT / "mmtrain" / name, *(ROOT / "mmtrain" / name).rglob("*.py")]]
    trees = {f: ast.parse(f.read_text()) for f in files if f.is_file()}
    assert len(trees) > 60
    assert {str(f): names for f, tree in trees.items() if (names := named(tree))} == {}


def page_of_layers() -> str:
    """The block of `docs/architecture.md` that `python -m tests.test_layers` writes."""
    rows = (("pure", PURE), ("torch", LAYERS[len(PURE) :]))
    lines = [
        line
        for name, units in rows
        for line in textwrap.wrap(
            "  ".join(units), width=115, initial_indent=f"{name:8}", subsequent_indent=" " * 8, break_on_hyphens=False
        )
    ]
    return "\n".join(["", "```", *lines, "```", "", ""])


def test_the_page_shows_the_layers():
    text = PAGE.read_text()
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)] == page_of_layers()


if __name__ == "__main__":
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + page_of_layers() + END + rest.split(END)[1])
