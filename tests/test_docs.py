"""Commands and examples in the documents and in the heads of scripts work as they stand."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from nanochat import config
from nanochat.common import REPOSITORY
from nanochat.eval_chat import score_answer
from tasks import registry
from tasks.buckets import buckets, held_out_questions

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")]
HEADS = [*REPOSITORY.glob("scripts/**/*.py"), *REPOSITORY.glob("dev/*.py")]
LAUNCH = re.compile(r"\b(torchrun|python3? -m|bash|sbatch) [^\n`]*")
QUICK = """
data --max_seq_len=256
chat_cli -i sft -p "Where does Mira live?"
export
lab.hold_out --final="kmmlu|humaneval"
lab.hold_out
report
report --reset
base_train --depth=2 --max_seq_len=128 --num_iterations=20 --total_batch_size=2048 --model_tag=ex
"""  # commands of the pages that take seconds with small models
ENDS = {"|", "||", "&&", "&", ";", ">", ">>", "2>&1", "2>", "<", "done"}


def commands_in(text: str) -> list[list[str]]:
    """Words of each launched module or shell script; placeholders and variables are 1."""
    text = re.sub(r"\$\{?\w+\}?|<\w[^<>\n]*>", "1", text.replace("\\\n", " "))
    commands = []
    for match in LAUNCH.finditer(text):
        words = shlex.split(match[0].replace(";", " ; ").rstrip(")"), comments=True)
        end = next((i for i, word in enumerate(words) if word in ENDS), len(words))
        commands.append(words[:end])
    return commands


@pytest.fixture
def faults_in(command, monkeypatch):
    """Function that finds the wrong commands in a text; flags are parsed, but no script runs."""
    start = config.start
    monkeypatch.setattr(config, "start", lambda _, *rest, **more: start(print, *rest, **more))

    def fault(words):
        if words[0] in ("bash", "sbatch"):
            return [file for file in words if file.endswith(".sh") and not Path(file).exists()]
        module, *flags = words[words.index("-m") + 1 :]
        if not module.startswith(("scripts.", "dev.")):
            return None
        text = Path(f"{module.replace('.', '/')}.py").read_text()
        if not re.search(r"^    start\(", text, re.MULTILINE):
            return None  # it has another parser
        flags = [flag for flag in flags if flag not in ("--", "...")]
        status, text = command(module.removeprefix("scripts."), *flags)
        return text.strip() if status else None

    monkeypatch.chdir(REPOSITORY)
    return lambda lines: list(filter(None, map(fault, commands_in("\n".join(lines)))))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_on_page_are_accepted(page: Path, faults_in):
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert not faults_in(blocks)


def test_quick_commands_of_the_pages_work(tuned, command):
    written = "\n".join(page.read_text() for page in PAGES)
    found = [words[words.index("-m") + 1 :] for words in commands_in(written) if "-m" in words]
    for line in QUICK.strip().splitlines():
        script, *flags = shlex.split(line)
        assert [f"scripts.{script}", *flags] in found, line
        command.works(script, *flags)


def test_commands_in_heads_of_scripts_are_accepted(faults_in):
    heads = [ast.get_docstring(ast.parse(path.read_text())) or "" for path in HEADS]
    lines = re.findall(r"^    .*(?:(?<=\\)\n.*)*", "\n".join(heads), re.MULTILINE)
    assert len(lines) > 50 and not faults_in(lines)


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "dev" / "LOG.md"], ids=lambda p: p.name)
def test_links_lead_to_files_and_headings(page: Path):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles
            ], target


def test_quoted_code_stands_in_the_named_file():
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    quotes = re.findall(r"^```python\n# (\S+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(quotes) > 10
    for name, code in quotes:
        quoted = {line for line in code.splitlines() if line.strip() != "..."}
        assert quoted <= {*(REPOSITORY / name).read_text().splitlines()}, name


def test_task_example_works_for_training_and_scoring(monkeypatch):
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    [code] = re.findall(r"```python\n(from tasks.base import .*?)```", text, re.DOTALL)
    scope = {"__name__": "example"}
    exec(code, scope)
    monkeypatch.setitem(registry.TASKS, "capitals", scope["Capitals"])
    [bucket] = buckets("capitals*4")
    assert len(bucket.train) == 3 and len(bucket.val) == 2
    task = held_out_questions("capitals", 2)
    scores = [score_answer(task, 0, answer) for answer in ("Lima", "Oslo", "Perhaps Lima")]
    assert sorted(scores) == [0.0, 0.0, 1.0]
