"""Import directions, and a declared dependency for every import."""

import ast
import re
import sys
import tomllib

import nanochat
from nanochat.common import REPOSITORY

TRACKS = "serve hf golf recursion lab bench".split()
CORE = re.findall(r"^    (\w+) {2,}\S", nanochat.__doc__ or "", re.MULTILINE)  # in reading order
FILES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("nanochat", "scripts", "tasks")
    for path in (REPOSITORY / folder).rglob("*.py")
)


def imports_of(name: str) -> set[str]:
    """Dotted names of all imports in a file; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse((REPOSITORY / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Our modules and packages that a file imports, such as nanochat.gpt and nanochat.lab."""
    found = {i for i in imports_of(name) if i.split(".")[0] in ("nanochat", "tasks", "scripts")}
    return {".".join(i.split(".")[:2]) for i in found}


def layer_of(name: str) -> int:
    """Layer of a module: 0 core, 1 tasks, 2 tracks, 3 scripts."""
    parts = name.replace(".", "/").split("/")
    if parts[0] == "nanochat":
        return 2 if len(parts) > 1 and parts[1] in TRACKS else 0
    return {"tasks": 1, "scripts": 3}[parts[0]]


def test_imports_do_not_go_up_a_layer():
    for name in FILES:
        assert not {i for i in own_imports(name) if layer_of(i) > layer_of(name)}, name


def test_core_modules_import_only_earlier_ones():
    assert {f"nanochat/{m}.py" for m in CORE} | {"nanochat/__init__.py"} == {
        f for f in FILES if re.fullmatch(r"nanochat/\w+\.py", f)
    }
    for i, module in enumerate(CORE):
        core = {i for i in own_imports(f"nanochat/{module}.py") if layer_of(i) == 0}
        assert core <= {f"nanochat.{name}" for name in CORE[:i]}, module


def test_B18_every_import_is_a_declared_dependency():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    listed = [*project["project"]["dependencies"], *groups["interop"], *groups["fa3"]]
    names = [re.split(r"[<>=\[; ]", line)[0].replace("-", "_") for line in listed]
    declared = {
        {"pyyaml": "yaml", "markdown_it_py": "markdown_it"}.get(name, name) for name in names
    }
    optional = {"flash_attn_interface", "gigatoken"}  # if installed: attention.py, bench/
    ours = {"nanochat", "scripts", "tasks"}
    used = {i.split(".")[0] for f in FILES for i in imports_of(f)} - set(sys.stdlib_module_names)
    assert used - ours - optional <= declared
    assert declared <= used | {"tiktoken"}  # each declared package is imported


def test_scripts_of_the_core_import_no_track():
    users = set("bench chat_web export import_hf lm_eval".split())
    for name in FILES:
        if (script := re.fullmatch(r"scripts/(\w+)\.py", name)) and script[1] not in users:
            assert 2 not in map(layer_of, own_imports(name)), name
