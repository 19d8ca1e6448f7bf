"""
Our own modules as text: which ones a module needs, and what they say.

    "gpt" -> gpt, attention, block_attention, kv_cache, loss -> their sources

For what carries its code along or is charged for it: an export, an artifact.
"""

import ast
from pathlib import Path

import nanochat


def source_of(module: str) -> str:
    """The text of one of our modules."""
    return (Path(nanochat.__path__[0]) / f"{module}.py").read_text(encoding="utf-8")


def code_of(module: str) -> list[str]:
    """A module and all of ours that it imports, directly or not."""
    found, waiting = [], [module]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += own_imports(source_of(name))
    return found


def own_imports(text: str) -> list[str]:
    """Which of our modules a module imports."""
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes]
    return [name.split(".")[1] for name in modules if name.startswith("nanochat.")]
