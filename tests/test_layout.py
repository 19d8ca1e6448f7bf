"""Import direction, owners of third-party packages, declared dependencies, CI workflows."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

import nanochat
from nanochat.common import REPOSITORY

# Core modules in the order of the package docstring
CORE = re.findall(r"^    (\w+) {2,}\S", nanochat.__doc__ or "", re.MULTILINE)
TRACKS = "serve hf golf recursion lab bench".split()
# Third-party package -> the only modules that may import it
OWNERS = {
    "rustbpe": {"nanochat/tokenizer.py"},
    "tiktoken": {"nanochat/hf/tokenizer.py", "scripts/tok_eval.py"},
    "wandb": {"nanochat/logger.py"},
    "matplotlib": {"nanochat/plots.py"},
    "huggingface_hub": {"nanochat/hub.py"},
    "tyro": {"nanochat/config.py"},
    "safetensors": {"nanochat/checkpoint.py", "nanochat/hf/export.py"},
    "transformers": {
        *("nanochat/hf/eval_model.py", "nanochat/hf/modeling.py", "nanochat/bench/peers.py")
    },
    "lm_eval": {"nanochat/hf/lm_eval.py", "nanochat/bench/peers.py", "scripts/lm_eval.py"},
    "pooch": {"nanochat/eval_core.py"},
    "fastapi": {f"nanochat/serve/{name}.py" for name in ("server", "responses", "security")},
    "uvicorn": {"nanochat/serve/server.py", "nanochat/serve/security.py"},
    "pydantic": {
        f"nanochat/{name}.py"
        for name in ("serve/openai_api", "bench/table", "lab/variance", "records")
    },
    "prometheus_client": {"nanochat/serve/handler.py", "nanochat/serve/server.py"},
    "torch.distributed": {"nanochat/distributed.py", "nanochat/optim.py"},
}
NO_TORCH = (
    *("common", "config", "records", "sandbox"),
    *("dataset", "dataloader", "packing", "hub"),
)
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


def floor_of(name: str) -> int:
    """Layer of a module: 0 core, 1 tasks, 2 tracks, 3 scripts. Imports must not go up."""
    parts = name.replace(".", "/").split("/")
    if parts[0] == "nanochat":
        return 2 if len(parts) > 1 and parts[1] in TRACKS else 0
    return {"tasks": 1, "scripts": 3}[parts[0]]


def test_package_docstring_lists_every_core_module():
    found = {Path(f).stem for f in FILES if re.fullmatch(r"nanochat/\w+\.py", f)} - {"__init__"}
    assert found == set(CORE) and len(CORE) == len(set(CORE))


@pytest.mark.parametrize("module", CORE)
def test_core_module_imports_only_earlier_modules(module):
    above = {f"nanochat.{name}" for name in CORE[: CORE.index(module)]}
    core = {i for i in own_imports(f"nanochat/{module}.py") if floor_of(i) == 0}
    assert core <= above


@pytest.mark.parametrize("name", FILES)
def test_imports_do_not_go_up_a_layer(name):
    assert not {i for i in own_imports(name) if floor_of(i) > floor_of(name)}


@pytest.mark.parametrize("package", OWNERS)
def test_third_party_package_is_imported_only_by_its_owners(package):
    users = {f for f in FILES if any(f"{i}.".startswith(f"{package}.") for i in imports_of(f))}
    assert users <= OWNERS[package]


@pytest.mark.parametrize("module", NO_TORCH)
def test_data_modules_do_not_import_torch(module):
    nodes = ast.parse((REPOSITORY / f"nanochat/{module}.py").read_text()).body
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [a.name for node in nodes if isinstance(node, ast.Import) for a in node.names]
    assert not any(name.split(".")[0] == "torch" for name in names)


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tasks/")])
def test_tasks_import_only_modules_without_torch(name):
    light = {"common", "dataset", "hub", "mixture", "sandbox"}
    assert {i for i in own_imports(name) if i.startswith("nanochat.")} <= {
        f"nanochat.{module}" for module in light
    }
    assert not any(i.split(".")[0] == "torch" for i in imports_of(name))


def test_training_loop_imports_no_evaluation_or_stage():
    modules = ("dataset", "mixture", "engine", "eval_core", "eval_chat", "finetune", "rl")
    assert not own_imports("nanochat/train.py") & {f"nanochat.{m}" for m in modules}


def test_B18_every_import_is_a_declared_dependency():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    listed = [*project["project"]["dependencies"], *groups["interop"], *groups["fa3"]]
    modules = {"pyyaml": "yaml"}
    names = [re.split(r"[<>=\[; ]", line)[0].replace("-", "_") for line in listed]
    declared = {modules.get(name, name) for name in names}
    optional = {"flash_attn_interface"}  # used if installed, see attention.py
    ours = {"nanochat", "scripts", "tasks"}
    used = {i.split(".")[0] for f in FILES for i in imports_of(f)} - set(sys.stdlib_module_names)
    assert used - ours - optional <= declared
    assert declared <= used | {"tiktoken"}, "declared but never imported"


def test_only_common_and_distributed_read_the_environment():
    for name in FILES:
        text = (REPOSITORY / name).read_text()
        if name not in ("nanochat/common.py", "nanochat/distributed.py"):
            assert "os.environ.get" not in text and "os.getenv" not in text, name


def test_workflows_pin_actions_by_commit_and_use_no_secrets():
    paths = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    assert paths
    for path in paths:
        text = path.read_text()
        actions = re.findall(r"uses: (\S+)", text)
        assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action in actions), path
        assert "secrets" not in re.sub("#.*", "", text), path
