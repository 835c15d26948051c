"""python tests/counts.py [--list]

How large the package is, as a reader meets it: lines, files and functions that are long, import cycles, the largest
room, files outside of a model family's folder that name it, keys of [planner], and words of README, changelog and docs.
`--list` also prints each of them.
"""

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "mmtrain"
LONG_FUNCTION, LONG_FILE = 60, 400
MADE = ("coming_from.md", "config.md", "errors.md", "schedules.md")
"""Pages under docs/ that are made from code."""
FAMILIES = r"qwen2_vl|qwen3_vl|qwen2_5_vl|qwen2_audio|qwen2vl|qwen3vl|whisper|llava|siglip"


def sources() -> dict[str, str]:
    """Module name -> text of its file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("mmtrain", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


def long_functions(trees: dict[str, ast.Module]) -> list[str]:
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return [
        f"{module}.{node.name} ({node.end_lineno - node.lineno + 1})"
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, functions) and node.end_lineno and node.end_lineno - node.lineno + 1 > LONG_FUNCTION
    ]


def imports(tree: ast.Module, known: dict[str, ast.Module]) -> Iterator[str]:
    """Modules of the package that a file imports, at its top, in functions and for type checkers."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module


def cycles(trees: dict[str, ast.Module]) -> list[str]:
    """Groups of files that import each other, directly or through others (strongly connected, by Tarjan's method)."""
    graph = {module: sorted(set(imports(tree, trees))) for module, tree in trees.items()}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[str] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for other in graph[module]:
            if other not in index:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == index[module]:
            start = stack.index(module)
            group, stack[start:] = stack[start:], []
            if len(group) > 1:
                groups.append(", ".join(group))

    for module in graph:
        if module not in index:
            visit(module)
    return groups


def families(texts: dict[str, str]) -> dict[str, list[str]]:
    """Model family -> files outside of its folder that name it."""
    found: dict[str, list[str]] = {}
    for module, text in texts.items():
        plain = text.lower().replace("-", "_").replace(".", "_")
        names = {re.sub(r"qwen(\d)vl", r"qwen\1_vl", name) for name in re.findall(rf"(?<![a-z])(?:{FAMILIES})", plain)}
        for name in names:
            if f".families.{name}" not in module:
                found.setdefault(name, []).append(module)
    return found


def shared_names(trees: dict[str, ast.Module]) -> list[str]:
    """Names of types that mean several things: public classes and aliases of one name, unless they are one alias."""
    meanings: dict[str, dict[str, str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                meanings.setdefault(node.name, {})[module] = module
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, value = node.targets[0].id, ast.unparse(node.value).replace("npt.", "")
                if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name):
                    meanings.setdefault(name, {})[module] = value
    shared = {name: of for name, of in meanings.items() if len(set(of.values())) > 1 and not name.startswith("_")}
    return [f"{name}: {', '.join(of)}" for name, of in sorted(shared.items())]


def words() -> dict[str, int]:
    """Page at the top, or kind of page under docs/ -> its number of words."""
    top = ROOT.parent
    found = {name: _words(top / name) for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")}
    pages = {path.name: _words(path) for path in sorted((top / "docs").glob("*.md"))}
    found["docs, made from code"] = sum(pages.get(name, 0) for name in MADE)
    written = [name for name in pages if name not in MADE]
    found["docs, written"] = sum(pages[name] for name in written)
    found["docs, written, outside of code and tables"] = sum(
        _words(top / "docs" / name, prose=True) for name in written
    )
    return found


def _words(page: Path, *, prose: bool = False) -> int:
    text = page.read_text()
    if prose:
        text = re.sub(r"^```.*?^```$|^\|.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    return sum(any(map(str.isalnum, word)) for word in text.split())


def planner_keys() -> list[str]:
    """Keys of [planner]."""
    from mmtrain.config.planner import PlannerConfig

    return [field.name for field in fields(PlannerConfig)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[1], allow_abbrev=False)
    parser.add_argument("--list", action="store_true", help="also print what was counted")
    every = parser.parse_args().list
    texts = sources()
    trees = {module: ast.parse(text) for module, text in texts.items()}
    lines = {module: text.count("\n") for module, text in texts.items()}
    rooms = Counter(module.split(".")[1] for module in texts if "." in module)
    room, files = rooms.most_common(1)[0]
    rows = {
        "import cycles": cycles(trees),
        f"functions over {LONG_FUNCTION} lines": long_functions(trees),
        "names of types that mean several things": shared_names(trees),
        f"files over {LONG_FILE} lines": [f"{m} ({n})" for m, n in lines.items() if n > LONG_FILE],
    }
    print(f"lines: {sum(lines.values()):,} in {len(lines)} files")
    print(f"largest room: {room}, {files} files, {files / len(lines):.0%}")
    for name, found in rows.items():
        print(f"{name}: {len(found)}", *(found if every else []), sep="\n  " if every else "")
    for name, users in sorted(families(texts).items()):
        print(f"files that name {name}: {len(users)}", *(users if every else []), sep="\n  " if every else "")
    keys = planner_keys()
    print(f"keys of [planner]: {len(keys)}", *(keys if every else []), sep="\n  " if every else "")
    for name, count in words().items():
        print(f"words of {name}: {count:,}")


if __name__ == "__main__":
    main()
