"""Hub tasks on real data: every row of every dataset, and overlap between splits."""

import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from nanochat.lab.filters import RUN, index_passages, shared_items
from nanochat.sandbox import calculate
from tasks.base import Mixture, Task, answer_text, assistant, check_conversation, user
from tasks.buckets import buckets
from tasks.chats import JSONL
from tasks.hub import HubTask
from tasks.registry import TASKS
from tests.hub_server import hub_served

CHAT = "local/chat-instruct{val: test}"  # replaces SmolTalk's default dataset
NAMES = "arc_easy arc_challenge mmlu gsm8k aqua humaneval kmmlu smoltalk".split()
SPLITS = [(name, split) for name in NAMES for split in TASKS[name].splits]


@pytest.fixture(scope="module")
def base_of_module(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("base")


@pytest.fixture(autouse=True)
def base(base_of_module, monkeypatch) -> Path:
    """One base directory per module, so every file is fetched once."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(base_of_module))
    return base_of_module


@pytest.fixture
def serve(hub, monkeypatch):
    with hub_served(hub, monkeypatch) as start:
        yield start


def task_of(name: str, split: str) -> HubTask:
    task = TASKS[name](split, **({"source": CHAT} if name == "smoltalk" else {}))
    assert isinstance(task, HubTask)
    return task


# ---- Every row -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name, split", SPLITS)
def test_every_row_is_valid_and_its_reference_scores_1(serve, capsys, name, split):
    serve()
    task = task_of(name, split)
    assert len(task) and "skipped" not in capsys.readouterr().out
    for i, conversation in enumerate(task):
        check_conversation(conversation)
        if task.kind == "choice":
            assert conversation[-1]["content"] in task.letters(i)
        if task.kind != "talk" and name != "humaneval":  # has its own test
            assert task.score(i, answer_text(conversation[-1])) == 1.0


def test_calculator_reproduces_every_gsm8k_calculation(serve):
    serve()
    parts = [part for _, answer in task_of("gsm8k", "train") for part in answer["content"]]
    tools = [part["text"] for part in parts if part["type"] != "text"]  # call, result, call, ...
    assert [Fraction(calculate(c) or "") for c in tools[::2]] == [*map(Fraction, tools[1::2])]
    assert len(tools) == 2 * 23_716


def test_R27_training_mixture_fetches_no_evaluation_file(serve, monkeypatch, tmp_path):
    serve()
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    spec = f"arc_easy,arc_challenge,mmlu,kmmlu,gsm8k,aqua,aqua_letter,smoltalk:{CHAT}"
    sizes = {bucket.name: len(bucket.train) for bucket in buckets(spec)}
    assert sizes["mmlu"] == 9533  # auxiliary_train
    fetched = [path.name for path in tmp_path.rglob("*") if path.suffix in (".parquet", ".csv")]
    assert len(fetched) == 8 and all("train" in name for name in fetched)
    assert not re.search("test|val|dev", "".join(fetched))


# ---- Overlap -------------------------------------------------------------------------------------

# (training task, evaluation task) -> test items with 13 consecutive words from training, or shorter
# and found whole. On inspection, they are the same question in both (ARC), the same question with
# new numbers (GSM8K, AQuA), or common phrases, lists of numbers and lines of code (SmolTalk, MMLU).
KNOWN = {
    ("ARC-Easy", "ARC-Easy"): 21,
    ("ARC-Easy", "ARC-Challenge"): 2,
    ("ARC-Challenge", "ARC-Easy"): 4,
    ("ARC-Challenge", "ARC-Challenge"): 7,
    ("ARC-Challenge", "MMLU"): 2,
    ("MMLU", "ARC-Easy"): 26,
    ("MMLU", "ARC-Challenge"): 9,
    ("MMLU", "MMLU"): 4,
    ("KMMLU", "KMMLU"): 2,
    ("GSM8K", "GSM8K"): 3,
    ("AQUA", "AQUA"): 3,
    ("SmolTalk", "ARC-Easy"): 1,
    ("SmolTalk", "HumanEval"): 3,
}


def test_R27_train_and_test_share_only_known_items(serve):
    serve()
    train: list[Task] = [task_of(name, "train") for name in NAMES if name != "humaneval"]
    train[-1] = Mixture([train[-1]], count=10_000)  # a third of SmolTalk, to take only seconds
    held_out = [task_of(name, "test") for name in NAMES if name != "smoltalk"]
    index = index_passages(held_out)
    found = Counter((t.name, held_out[n].name) for t in train for n, _ in shared_items(t, index))
    assert found == KNOWN
    checked = set[tuple[int, int]]().union(*index.values())
    assert len(checked) > 0.97 * sum(map(len, held_out))


# ---- Overlap of texts ----------------------------------------------------------------------------

WORDS = [f"w{i}" for i in range(100)]


class Texts(JSONL):
    """One conversation per text."""

    def __init__(self, name: str, *texts: str):
        self.name, self.items = name, [[user(text), assistant("")] for text in texts]


def words(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def test_R27_items_with_shared_ngrams_are_found():
    train = Texts("seen", "Before: " + words(0, 20).upper().replace(" ", ", "), words(20, 50))
    held_out = Texts(
        "asked",
        words(60, 10) + " other",  # 10 words of a training item
        "And " + words(3, RUN) + "?",
        words(41, RUN - 1) + " z",  # one word short
        words(50, RUN) + " " + words(80, 5),
        words(3, RUN),  # again
        words(1, 12),  # whole, but shorter
        words(10, RUN),  # the end of one item and the beginning of another
        "a few words",  # too short to check
    )
    index = index_passages([Texts("empty", ""), held_out])
    assert set().union(*index.values()) == {(1, i) for i in range(7)}  # long enough
    assert shared_items(train, index) == {(1, 1), (1, 3), (1, 4), (1, 5)}
    assert shared_items(Texts("other", "nothing of the kind"), index) == set()
