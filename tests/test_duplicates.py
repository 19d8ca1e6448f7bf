"""The library has no duplicate functions."""

import ast
from collections import defaultdict

from nanochat.common import REPOSITORY

MIN_STATEMENTS = 4  # including nested ones; shorter bodies may be equal by chance


def shape(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Body without docstring, names, constants and annotations; None if it is too short."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    nodes = [node for statement in body for node in ast.walk(statement)]
    if sum(isinstance(node, ast.stmt) for node in nodes) < MIN_STATEMENTS:
        return None
    for node in nodes:
        for field, value in ast.iter_fields(node):
            if isinstance(node, ast.Constant) or isinstance(value, str):
                setattr(node, field, None)
            elif field in ("annotation", "returns"):
                setattr(node, field, None)
    return "\n".join(map(ast.dump, body))


def test_no_functions_differ_only_in_names_and_constants():
    groups = defaultdict(list)
    for folder in ("nanochat", "tasks", "scripts"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            nodes = ast.walk(ast.parse(path.read_text()))
            functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            names = [f"{path.relative_to(REPOSITORY)}:{f.lineno} {f.name}" for f in functions]
            for function, name in zip(functions, names, strict=True):
                groups[shape(function)].append(name)
    equal = [names for body, names in groups.items() if body and len(names) > 1]
    assert not equal, "\n".join(map(", ".join, equal))
