"""The order of the floors, the owners of outside things, and that every import is declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from nanochat.common import REPOSITORY

# Reading order: a module imports only from modules above it.
FLOORS = """
    common config environment hardware stopping meeting watch machine stats own_code
    sandbox_child sandbox tools
    tokenizer chat_format transcript stops sample_texts
    world_tables world_facts world_drills world_stories world world_tasks world_talk world_suite
    disk hub text_files hub_repo source local_source hub_source dataset
    mixture arms packing rows interleaving mixed_rows row_writer texts chat_rows chat_mix
    block_attention attention kv_cache bigrams loss gpt refine
    presets quantize update_rules optim schedule scaling
    bench_table sampling decode engine
    record_shape records held_out variance runlog kernels preflight
    eval_bpb merge soup refine_figures refine_verdict guard train
    checkpoint sentinel_suite sentinels run_checkpoints stage samples
    plots sections summary contrast search sweep lab figures report study
    artifact artifact_size eval_core suites pretrain_exam finetune eval_chat rl rl_verdict
    serving hf_tokenizer hf hf_modeling hf_model lm_eval_model
    train_bench engine_bench eval_bench tokenizer_bench start_bench peer_bench
    model_library openai_api respond server_metrics desk gate server
""".split()
# An outside package, and the only modules that import it.
OWNERS = {
    "rustbpe": {"nanochat/tokenizer.py"},
    "tiktoken": {"nanochat/tokenizer.py", "scripts/tok_eval.py"},
    "wandb": {"nanochat/runlog.py"},
    "matplotlib": {"nanochat/plots.py"},
    "huggingface_hub": {"nanochat/hub.py"},
    "tyro": {"nanochat/config.py"},
    "safetensors": {"nanochat/checkpoint.py", "nanochat/hf.py"},
    "transformers": {f"nanochat/{name}.py" for name in ("hf_model", "hf_modeling", "peer_bench")},
    "lm_eval": {"nanochat/lm_eval_model.py", "nanochat/peer_bench.py", "scripts/lm_eval.py"},
    "pooch": {"nanochat/suites.py"},
    "fastapi": {"nanochat/server.py", "nanochat/respond.py"},
    "uvicorn": {"nanochat/server.py", "nanochat/gate.py"},
    "pydantic": {"nanochat/openai_api.py", "nanochat/record_shape.py"},
    "prometheus_client": {"nanochat/server_metrics.py"},
    "torch.distributed": {"nanochat/machine.py", "nanochat/optim.py"},
}
NO_TORCH = (
    *("common", "config", "records", "sandbox", "tools"),
    *("dataset", "packing", "rows", "row_writer", "world"),
)
FILES = sorted(
    path.relative_to(REPOSITORY).as_posix()
    for folder in ("nanochat", "scripts", "tasks")
    for path in (REPOSITORY / folder).glob("*.py")
)


def imports_of(name: str) -> set[str]:
    """Dotted names of all imports of a file, wherever they stand; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse((REPOSITORY / name).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str, package: str) -> set[str]:
    """Which modules of one of our packages a file imports."""
    return {i.split(".")[1] for i in imports_of(name) if i.startswith(f"{package}.")}


def test_every_module_stands_on_a_floor():
    modules = {Path(f).stem for f in FILES if f.startswith("nanochat/")} - {"__init__"}
    assert modules == set(FLOORS)


@pytest.mark.parametrize("module", FLOORS)
def test_a_module_imports_only_from_above(module):
    above = set(FLOORS[: FLOORS.index(module)])
    assert own_imports(f"nanochat/{module}.py", "nanochat") <= above


@pytest.mark.parametrize("name", FILES)
def test_packages_keep_their_direction(name):
    for package in {"nanochat": ("tasks", "scripts"), "tasks": ("scripts",)}.get(
        name.split("/")[0], ("scripts",)
    ):
        assert not own_imports(name, package)


@pytest.mark.parametrize("package", OWNERS)
def test_an_outside_thing_has_one_owner(package):
    users = {f for f in FILES if any(f"{i}.".startswith(f"{package}.") for i in imports_of(f))}
    assert users <= OWNERS[package]


@pytest.mark.parametrize("module", NO_TORCH)
def test_the_data_floor_needs_no_torch(module):
    assert not any(i.split(".")[0] == "torch" for i in imports_of(f"nanochat/{module}.py"))


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tasks/")])
def test_tasks_know_nothing_of_tokens_and_models(name):
    floor = {"common", "hub", "hub_repo", "mixture", "sandbox", "text_files", "tools"}
    assert {i for i in own_imports(name, "nanochat") if not i.startswith("world")} <= floor
    assert not any(i.split(".")[0] == "torch" for i in imports_of(name))


def test_train_knows_no_model_tokenizer_or_evaluation():
    known = own_imports("nanochat/train.py", "nanochat")
    assert not known & {"gpt", "tokenizer", "dataset", "rows", "eval_bpb", "checkpoint"}


def test_B18_every_import_is_a_declared_dependency():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    listed = [*project["project"]["dependencies"], *project["dependency-groups"]["interop"]]
    modules = {"pyyaml": "yaml"}
    names = [re.split(r"[<>=\[; ]", line)[0].replace("-", "_") for line in listed]
    declared = {modules.get(name, name) for name in names}
    optional = {"flash_attn_interface"}  # used where it is installed, see attention.py
    ours = {"nanochat", "scripts", "tasks"}
    used = {i.split(".")[0] for f in FILES for i in imports_of(f)} - set(sys.stdlib_module_names)
    assert used - ours - optional <= declared
    assert declared <= used | {"tiktoken"}, "declared but never imported"


def test_no_module_reads_the_environment_but_the_two_that_may():
    for name in FILES:
        text = (REPOSITORY / name).read_text()
        if name not in ("nanochat/common.py", "nanochat/machine.py"):
            assert "os.environ.get" not in text and "os.getenv" not in text, name
