"""Commands in documentation and script docstrings name real scripts, flags, values and files."""

import ast
import importlib.util
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed.run import get_args_parser

from nanochat import config
from nanochat.common import REPOSITORY

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *REPOSITORY.glob("docs/*.md")]
SHELL_SCRIPTS = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for folder in (".", "dev", "dev/launch", "scripts", "tests")
    for path in sorted(REPOSITORY.glob(f"{folder}/*.sh"))
}
PASSES_FLAGS_TO = {  # shell script -> the script that gets its flags, except --hourly_rate
    "dev/launch/slurm.sh": "base_train",
    "dev/learning.sh": "base_train",
    "scripts/train_golf.sh": "golf.base_train",
    "scripts/train_h100_extreme.sh": "recursion.base_train",
    "scripts/train_h100_fast.sh": "recursion.base_train",
}
MADE_BY_SETUP = {".venv/bin/activate"}
KEYWORDS = {*"do done then else elif fi if while until { } !".split(), "time", "nohup", "sudo"}
PROGRAMS = set(
    "apt-get cargo cat cd chmod cp curl docker echo export git head hf jq kill ls mkdir mv nice "
    "nvidia-smi openssl pip pre-commit printf pyright rm rsync ruff sbatch scancel scp screen "
    "split squeue ssh tail tensorboard test tmux touch uv uvx wandb wget".split()
)


class Parsed(NamedTuple):
    """A simple command: variables set for it alone, and its words."""

    variables: dict[str, str]
    words: list[str]


def commands_of(text: str) -> list[Parsed]:
    """Simple commands in the bash blocks of a page."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [command for block in blocks for command in parse_block(block)]


def parse_block(block: str) -> Iterator[Parsed]:
    """
    Split a bash block into simple commands. Removes comments, redirections and here-documents;
    a loop variable has its first value, a placeholder such as <n> the value 1.
    """
    block = re.sub(r"<<-?\s*['\"]?(\w+)['\"]?(.*?)\n.*?^\1$", r"\2", block, flags=re.M | re.S)
    block = block.replace("\\\n", " ")
    quoted_or_comment = r"""("[^"]*"|'[^']*')|(?:^|(?<=\s))#.*"""
    block = re.sub(quoted_or_comment, lambda m: m[1] or "", block, flags=re.MULTILINE)
    block = re.sub(r"<\w[^<>\n]*>", "1", block)
    block = re.sub(r"\d?>&\d|(?<=\s)\d(?=>)", "", block)
    lexer = shlex.shlex(block, posix=True, punctuation_chars=";&|()<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    values: dict[str, str] = {}
    words: list[str] = []
    tokens = [*lexer, "\n"]
    for before, token in zip(["", *tokens], tokens, strict=False):
        if set(token) <= set(";&|()\n"):
            if command := simple_command(words, values):
                yield command
            words = []
        elif not set(token) <= set("<>") and not set(before or "x") <= set("<>"):
            words.append(re.sub(r"\$\{?(\w+)\}?", lambda m: values.get(m[1], m[0]), token))


def simple_command(words: list[str], values: dict[str, str]) -> Parsed | None:
    """A command without keywords; assignments and loops are added to `values`."""
    while words and words[0] in KEYWORDS:
        words = words[1:]
    if words[:1] == ["for"]:
        values[words[1]] = words[3]
        return None
    variables: dict[str, str] = {}
    while words and re.match(r"\w+=", words[0]):
        name, _, value = words[0].partition("=")
        variables[name] = value
        words = words[1:]
    if words[:1] == ["export"]:
        variables |= {word.partition("=")[0]: word.partition("=")[2] for word in words[1:]}
    if not words or words[0] == "export":
        values |= variables
    return Parsed(variables, words) if words else None


class Checker:
    """Finds what is wrong with a command; flags are parsed, but no script runs."""

    def __init__(self, command: Callable):
        self.command = command

    def problem(self, parsed: Parsed) -> str | None:
        """What is wrong with the command, or None."""
        words = parsed.words
        if words[:2] == ["uv", "run"]:
            words = [word for word in words[2:] if word not in ("--no-sync", "--frozen")]
        match words:
            case ["python" | "python3", "-m", module, *flags]:
                return self.module_problem(module, flags)
            case ["python" | "python3", "-c", _, *_]:
                return None
            case ["python" | "python3", file, *_]:
                return missing(file)
            case ["torchrun", *rest]:
                return self.torchrun_problem(rest)
            case ["bash" | "source" | ".", file, *flags]:
                return self.shell_problem(file, flags, parsed.variables)
            case ["sbatch", *rest]:
                at = next((i for i, word in enumerate(rest) if word.endswith(".sh")), None)
                if at is None:
                    return "sbatch without a script"
                return self.shell_problem(rest[at], rest[at + 1 :], parsed.variables)
        if words[0] in PROGRAMS:
            return None
        return missing(words[0]) if "/" in words[0] else f"unknown program {words[0]}"

    def module_problem(self, module: str, flags: list[str]) -> str | None:
        """Problem of `python -m module flags`."""
        if importlib.util.find_spec(module.partition(".")[0]) is None:
            return f"no module {module}"
        if module == "pytest":
            return next(filter(None, map(missing, (f for f in flags if f.endswith(".py")))), None)
        if module.partition(".")[0] not in ("scripts", "dev", "tests", "nanochat"):
            return None
        path = REPOSITORY / f"{module.replace('.', '/')}.py"
        if not path.exists():
            return f"no module {module}"
        if not re.search(r"^    start\(", path.read_text(), re.MULTILINE):
            return None  # it has no parser
        status, text = self.command(module.removeprefix("scripts."), *flags)
        return text.strip() if status else None

    def torchrun_problem(self, words: list[str]) -> str | None:
        """Problem of `torchrun words`."""
        try:
            launch = get_args_parser().parse_args(words)
        except SystemExit:
            return "torchrun rejects its flags"
        flags = launch.training_script_args
        if not launch.module:
            return missing(launch.training_script)
        if flags and "--" not in words:
            return "needs -- before the flags of the script"
        return self.module_problem(launch.training_script, [f for f in flags if f != "--"])

    def shell_problem(self, file: str, flags: list[str], variables: dict[str, str]) -> str | None:
        """Problem of `variables bash file flags`."""
        if file.removeprefix("./") in MADE_BY_SETUP:
            return None
        text = SHELL_SCRIPTS.get(file)
        if text is None:
            return missing(file)
        for name in variables:
            if not any(re.search(rf"\b{name}\b", each) for each in SHELL_SCRIPTS.values()):
                return f"no shell script uses {name}"
        if file == "tests/run.sh":
            return None  # the flags are pytest's
        if script := PASSES_FLAGS_TO.get(file):
            flags = [flag for flag in flags if flag.partition("=")[0] != "--hourly_rate"]
            return self.module_problem(f"scripts.{script}", flags)
        unknown = [flag for flag in flags if flag.partition("=")[0] not in text]
        return f"{file} does not use {unknown[0]}" if unknown else None


def missing(file: str) -> str | None:
    """A message if a file is not in the repository."""
    return None if (REPOSITORY / file).exists() else f"no file {file}"


@pytest.fixture
def checker(command, monkeypatch) -> Checker:
    """Scripts parse their flags and return instead of running."""

    def parse_only(_, *settings, **more):
        start(lambda cfg: None, *settings, **more)

    start = config.start
    monkeypatch.setattr(config, "start", parse_only)
    return Checker(command)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_on_page_are_accepted(page: Path, checker):
    problems = []
    for parsed in commands_of(page.read_text()):
        if why := checker.problem(parsed):
            problems.append(f"{shlex.join(parsed.words)}\n    {why}")
    assert not problems, "\n".join([page.name, *problems])


def test_commands_in_docstrings_of_scripts_are_accepted(checker):
    problems, count = [], 0
    for path in [*REPOSITORY.glob("scripts/**/*.py"), *REPOSITORY.glob("dev/*.py")]:
        head = ast.get_docstring(ast.parse(path.read_text())) or ""
        lines = re.findall(
            r"^    (?:python -m|torchrun|bash) .*(?:(?<=\\)\n.*)*", head, re.MULTILINE
        )
        for parsed in parse_block("\n".join(lines).replace(" ...", "")):
            count += 1
            if why := checker.problem(parsed):
                problems.append(f"{path.name}: {shlex.join(parsed.words)}\n    {why}")
    assert count > 50 and not problems, "\n".join(problems)


def test_readme_commands_are_found():
    found = [" ".join(command.words) for command in commands_of(PAGES[0].read_text())]
    assert "bash speedrun.sh" in found
    assert sum("scripts.base_train" in words for words in found) >= 2


def parsed_words(text: str) -> list[list[str]]:
    return [command.words for command in parse_block(text)]


def test_block_is_split_like_bash():
    block = """\
# a comment isn't a command
A=1 B="x y" python -m a --b \\
    --c="1|2 # 3"      # that's all
source x && python -m b > out.txt 2>&1; cd y | tail
for n in 3 4; do
    run --n=$n --m=<number of rows>
done
cat > f <<'END'
don't parse this
END
"""
    assert parsed_words(block) == [
        ["python", "-m", "a", "--b", "--c=1|2 # 3"],
        ["source", "x"],
        ["python", "-m", "b"],
        ["cd", "y"],
        ["tail"],
        ["run", "--n=3", "--m=1"],
        ["cat"],
    ]
    assert next(parse_block(block)).variables == {"A": "1", "B": "x y"}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("python -m scripts.base_train --detph=4", "did you mean --depth"),
        ("python -m scripts.base_train --depth=four", "four"),
        ("python -m scripts.base_train --depth=0", "at least 1"),
        ("python -m scripts.base_train --d_model=64", "scripts.golf.base_train"),
        ("python -m scripts.train_base --depth=4", "no module"),
        ("torchrun --nproc_per_node=8 -m scripts.base_train -- --depth=x", "Error parsing --depth"),
        ("torchrun --nproc_per_node=8 -m scripts.base_train --depth=4", "needs --"),
        ("torchrun --procs=8 -m scripts.base_train", "torchrun rejects"),
        ("python -m dev.plan --profil=cpu", "did you mean --profile"),
        ("bash speedrunn.sh", "no file"),
        ("bash speedrun.sh --plans", "does not use"),
        ("PROFIL=cpu bash speedrun.sh", "no shell script uses"),
        ("sbatch --nodes=2 dev/launch/slurm.sh --deep=24", "unknown flag"),
        ("python -m pytest tests/test_none.py", "no file"),
        ("pyhton -m scripts.report", "unknown program"),
    ],
)
def test_wrong_command_is_found(line, why, checker):
    [parsed] = parse_block(line)
    found = checker.problem(parsed)
    assert found and why in found
