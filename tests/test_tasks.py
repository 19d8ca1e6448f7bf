"""Tasks: questions, scoring, mixtures and disjoint splits."""

import json
import random
from collections import Counter
from decimal import Decimal

import pytest

from nanochat import chat_format
from nanochat.common import MissingInput, fingerprint
from nanochat.mixture import Tags
from scripts import chat_rl, chat_sft, mid_train
from scripts.chat_eval import default_tasks
from tasks import base, hub, registry
from tasks.aqua import AQuA, AQuALetter
from tasks.arc import ARCEasy
from tasks.base import LETTERS, Mixture, NumberTask, Subset, Task, answer_text, assistant, user
from tasks.buckets import (
    TAGS,
    buckets,
    held_out_questions,
    parse_task_mixture,
    rl_questions,
    task_of,
)
from tasks.gsm8k import GSM8K
from tasks.hub_chats import HubChats
from tasks.jsonl import HOLD_OUT_EVERY, JSONL
from tasks.mmlu import MMLU
from tasks.registry import key_of, make_task
from tasks.smoltalk import SmolTalk
from tasks.spelling import SimpleSpelling, SpellingBee
from tasks.world.drills import letter_questions


class Sums(NumberTask):
    """`size` random sums, each determined by split and index."""

    name = "Sums"
    splits = ("train", "test")

    def __init__(self, split: str, size: int = 10):
        super().__init__(split)
        self.size = size

    def __len__(self) -> int:
        return self.size

    def conversation(self, i: int) -> base.Conversation:
        rng = random.Random(f"{self.split}-{i}")
        a, b = rng.randrange(100), rng.randrange(100)
        return [user(f"What is {a} + {b}?"), assistant(f"#### {a + b}")]


# Rows in the format of each dataset
CHOICES = {"text": ["ash", "bog", "cup"], "label": ["1", "2", "3"]}
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
ROWS: dict[str, list[dict]] = {
    "allenai/ai2_arc": [{"question": "Which burns?", "choices": CHOICES, "answerKey": "3"}],
    "cais/mmlu": [{"question": " Which? ", "choices": ["p", "q", "r", "s"], "answer": 1}],
    "openai/gsm8k": [{"question": "How many?", "answer": "It is 2*3=<<2*3=6>>6.\n#### 6"}],
    "deepmind/aqua_rat": [
        {
            "question": "How far?",
            "options": ["A)1 (one)", "B)2", "C)3", "D)4", "E)5"],
            "rationale": "Answer: B would be too short. \n",
            "correct": "D",
        }
    ],
    "openai/openai_humaneval": [
        {"prompt": "def f():\n", "canonical_solution": "    pass", "test": "", "entry_point": "f"}
    ],
    "HAERAE-HUB/KMMLU": [{"question": "Which?", "answer": "3", **dict.fromkeys("ABCD", "x")}],
    **dict.fromkeys(
        ("a/b", "open-thoughts/OpenThoughts3-1.2M"),
        [{"conversations": [user(f"q{i}"), assistant("a")]} for i in range(40)],
    ),
    "microsoft/rStar-Coder": [
        {"question": f"q{i}", "response": "a", "is_passed": True} for i in range(40)
    ],
    "KOREAson/YiSang-HighQuality": [{"instruction": f"q{i}", "response": "a"} for i in range(40)],
    "HuggingFaceTB/smol-smoltalk": [{"messages": CHAT}, {"messages": CHAT[::-1]}],
}


@pytest.fixture
def loaded(monkeypatch) -> list[tuple[str, str]]:
    """Hub tasks load their rows from ROWS; returns the list of loaded (repo, stem)."""
    asked = []

    def load(repo, stem, columns, revision=None):
        asked.append((repo, stem))
        rows = [{column: row[column] for column in columns} for row in ROWS[repo]]
        return hub.TaskData(hub.TaskRows(hub.pa.Table.from_pylist(rows)), "c0ffee", {stem: "abc"})

    monkeypatch.setattr(hub, "load_split", load)
    return asked


# ------------------------------------------------------------------------------------------------
# Questions and scoring


def test_choice_question_lists_options_then_instruction():
    asked = base.choice_question("Which?", ["red", "green"], ("A", "B"))
    assert asked == "Which?\n- red=A\n- green=B\n\nAnswer with the letter only."
    assert base.choice_question("Which?", ["red"], ["A"], "Think.").endswith("=A\n\nThink.")


def test_gsm8k_notation_becomes_tool_calls():
    parts = base.with_tool_calls("So 48/2 = <<48/2=24>>24 and <<24+1=25>>")
    assert parts == [
        {"type": "text", "text": "So 48/2 = "},
        {"type": "python", "text": "48/2"},
        {"type": "python_output", "text": "24"},
        {"type": "text", "text": "24 and "},
        {"type": "python", "text": "24+1"},
        {"type": "python_output", "text": "25"},
    ]
    assert base.with_tool_calls("plain") == [{"type": "text", "text": "plain"}]
    assert answer_text(assistant(parts)) == "So 48/2 = 24 and "


@pytest.mark.parametrize(
    "answer, number",
    [
        ("#### 72", "72"),
        ("#### 1,234,567.", "1234567"),
        ("####$-3.50 each", "-3.5"),
        ("#### .5", "0.5"),
        ("#### 1 and then #### 2", "2"),
        ("72", None),
        ("#### many", None),
        ("#### ,", None),
    ],
)
def test_final_number_is_the_last_marked_one(answer, number):
    assert base.final_number(answer) == (None if number is None else Decimal(number))


@pytest.mark.parametrize(
    "answer, score",
    [
        ("Six times seven.\n#### 42<|assistant_end|>", 1.0),
        ("#### 42.0", 1.0),
        ("#### 41", 0.0),
        ("42", 0.0),
        ("<|python_start|>#### 42<|python_end|>", 0.0),
        ("<|python_start|>6*7<|python_end|><|output_start|>#### 42<|output_end|>", 0.0),
        ("<|output_start|>#### 41<|output_end|>#### 42", 1.0),
        ("<|python_start|>#### 42", 0.0),
        ("", 0.0),
    ],
)
def test_tool_calls_and_outputs_are_not_scored(answer, score):
    conversation = [user("6 * 7?"), assistant("#### 42")]
    assert Sums("test").score(conversation, answer) == score


def test_arc_options_are_lettered_by_position(loaded):
    task = ARCEasy("test")
    question, answer = task[0]
    assert question["content"].startswith("Which burns?\n- ash=A\n- bog=B\n- cup=C\n\n")
    assert answer["content"] == "C"
    assert task.letters(0) == ("A", "B", "C")
    scores = [task.score(task[0], said) for said in ("C", " C<|assistant_end|>", "c", "A")]
    assert scores == [1.0, 1.0, 0.0, 0.0]


def test_mmlu_answer_index_becomes_a_letter(loaded):
    task = MMLU("val")
    assert task[0][0]["content"].startswith("Which?\n- p=A\n")
    assert task[0][1]["content"] == "B"
    assert task.letters(0) == tuple("ABCD")


def test_gsm8k_answer_has_tool_calls_and_final_number(loaded):
    task = GSM8K("test")
    types = [part["type"] for part in task[0][1]["content"]]
    assert types == ["text", "python", "python_output", "text"]
    assert answer_text(task[0][1]).endswith("6.\n#### 6")
    assert task.score(task[0], "#### 6") == 1.0


@pytest.mark.parametrize(
    "answer, score",
    [
        ("So it is 4.\nAnswer: D", 1.0),
        ("Answer: A. No!\nAnswer: D.", 1.0),
        ("Answer: D, or rather\nAnswer: A", 0.0),
        ("answer: D", 0.0),
        ("Answer: d", 0.0),
        ("D", 0.0),
        ("Answer: Dozens", 0.0),
        ("<|output_start|>Answer: D<|output_end|>", 0.0),
        ("a rationale that is cut off before its", 0.0),
    ],
)
def test_aqua_scores_only_the_last_marker(loaded, answer, score):
    task = AQuA("test")
    assert task.score(task[0], answer) == score


@pytest.mark.parametrize("task_class", [AQuA, AQuALetter])
def test_aqua_questions_without_five_options_are_skipped(loaded, monkeypatch, capsys, task_class):
    whole = ROWS["deepmind/aqua_rat"][0]
    broken = [{**whole, "options": whole["options"][:4]}, {**whole, "correct": "F"}]
    monkeypatch.setitem(ROWS, "deepmind/aqua_rat", [broken[0], whole, broken[1], whole])
    task = task_class("val")
    assert len(task) == 2 and task[0] == task[1] == task_class("val")[1]
    assert "skipped 2 of 4 rows of deepmind/aqua_rat" in capsys.readouterr().out


def test_aqua_forms_have_one_instruction_each(loaded):
    reasoned, letter = AQuA("train"), AQuALetter("train")
    assert (reasoned.kind, letter.kind) == ("generate", "choice")
    assert reasoned.letters(0) == letter.letters(0) == tuple("ABCDE")
    options = "How far?\n- 1 (one)=A\n- 2=B\n- 3=C\n- 4=D\n- 5=E\n\n"
    question, answer = reasoned[0]
    assert question["content"].startswith(options + "Reason step by step")
    assert base.BY_LETTER not in question["content"]
    assert answer["content"] == "Answer: B would be too short.\nAnswer: D"
    assert letter[0] == [user(options + base.BY_LETTER), assistant("D")]
    assert letter.score(letter[0], "D") == 1.0
    assert letter.score(letter[0], "Answer: D") == 0.0


# ------------------------------------------------------------------------------------------------
# Subsets and mixtures


def test_task_index_out_of_range_raises():
    task = Sums("test", 3)
    assert list(task) == [task[0], task[1], task[2]]
    for outside in (-1, 3):
        with pytest.raises(IndexError, match="0 to 2"):
            task[outside]


def test_unknown_split_raises_with_the_valid_splits():
    with pytest.raises(ValueError, match="Sums has no split 'val'; it has train, test"):
        Sums("val")


def test_subset_is_clipped_to_the_task():
    task = Sums("test", 10)
    part = Subset(task, 3)
    assert list(part) == [task[0], task[1], task[2]]
    assert len(Subset(task, 99)) == 10 and len(Subset(task, 0)) == 0
    owner, number = part.locate(2)
    assert owner.score(owner[number], answer_text(task[2][1])) == 1.0
    with pytest.raises(IndexError):
        part[3]


def test_mixture_repeats_and_shuffles_its_tasks():
    few, many = Sums("train", 5), Sums("test", 20)
    mixed = Mixture([few, many, few], seed=3)
    texts = [fingerprint(c) for c in mixed]
    assert sorted(texts) == sorted(map(fingerprint, [*few, *many, *few]))
    assert texts != list(map(fingerprint, [*few, *many, *few]))
    assert texts == [fingerprint(c) for c in Mixture([few, many, few], seed=3)]
    assert texts != [fingerprint(c) for c in Mixture([few, many, few], seed=4)]
    for i in range(len(mixed)):
        task, number = mixed.locate(i)
        assert task[number] == mixed[i]
    with pytest.raises(ValueError, match="at least one"):
        Mixture([])


def test_shuffle_order_is_fixed():
    assert base.shuffled(10, 7) == [8, 6, 3, 1, 0, 5, 9, 7, 4, 2]


def test_identity_changes_with_data_options_and_wording(loaded, monkeypatch):
    def identity(*tasks: Task, seed: int = 0) -> str:
        return fingerprint(Mixture(tasks, seed).identity)

    task = AQuA("train")
    before = identity(task, Sums("train"))
    assert identity(AQuA("train"), Sums("train")) == before
    others = [
        identity(task, Sums("test")),
        identity(task, Sums("train", 11)),
        identity(Sums("train"), task),
        identity(task, Subset(Sums("train"), 5)),
        identity(task, Sums("train"), Sums("train")),
        identity(task, Sums("train"), seed=1),
        identity(AQuALetter("train"), Sums("train")),
    ]
    monkeypatch.setattr("tasks.aqua.INSTRUCTION", "Think, then say Answer: and the letter.")
    others.append(identity(AQuA("train"), Sums("train")))
    assert len({before, *others}) == len(others) + 1
    origin = task.identity
    assert (origin["commit"], origin["sha256"]) == ("c0ffee", {"raw/train": "abc"})


# ------------------------------------------------------------------------------------------------
# Custom conversations and word lists


def write_lines(path, *lines: object) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def greeting(i: int) -> list[dict]:
    return [user(f"Who are you, {i}?"), assistant(f"A model, {i}.")]


def test_jsonl_reads_lists_and_objects_into_disjoint_splits(tmp_path):
    both = [greeting(i) for i in range(400)]
    lines = [c if i % 2 else {"messages": c} for i, c in enumerate(both)]
    path = write_lines(tmp_path / "own.jsonl", *lines, both[0])
    train, val = JSONL("train", source=path), JSONL("val", source=path)
    assert len(train) + len(val) == 401
    assert 0.5 < len(val) * HOLD_OUT_EVERY / 400 < 2
    assert not {fingerprint(c) for c in train} & {fingerprint(c) for c in val}
    assert [c for c in train if c in both] == list(train)


@pytest.mark.parametrize(
    "line, message",
    [
        ({"text": "Hi"}, "expected a list"),
        (["Hi"], "expected a list"),
        ([], "alternate"),
        ([user("Hi")], "alternate.*'user'"),
        ([assistant("Hi"), user("Hi")], "alternate"),
        ([user("Hi"), user("Hi"), assistant("Hi")], "alternate"),
        ([{"role": "robot", "content": "Hi"}, assistant("Hi")], "'robot'"),
        ([user("Hi"), assistant("")], "message 2 is empty"),
        ([user("Hi"), {"role": "assistant", "content": 7}], "message 2"),
        ([{"role": "user", "content": [base.text("Hi")]}, assistant("Hi")], "message 1"),
        ([user("Hi"), assistant([{"type": "image", "text": "Hi"}])], "message 2"),
    ],
)
def test_jsonl_reports_the_invalid_line(tmp_path, line, message):
    path = write_lines(tmp_path / "own.jsonl", greeting(1), line)
    with pytest.raises(ValueError, match=rf"own\.jsonl, line 2: .*{message}"):
        len(JSONL("train", source=path))


@pytest.mark.parametrize("count", [2, 3, 10])
def test_jsonl_holds_out_at_least_one_conversation(tmp_path, count):
    path = write_lines(tmp_path / "own.jsonl", *map(greeting, range(count)))
    train, val = (list(JSONL(split, source=path)) for split in ("train", "val"))
    assert train and val and len(train) + len(val) == count


def test_jsonl_with_one_conversation_says_how_many_are_needed(tmp_path):
    path = write_lines(tmp_path / "own.jsonl", greeting(1), greeting(1))
    with pytest.raises(ValueError, match=r"own\.jsonl has one conversation; at least two"):
        len(JSONL("train", source=path))


def test_valid_conversation_can_be_rendered(tmp_path):
    parts = assistant([base.text("Let me see. "), *base.tool_call("2*3", "6"), base.text("6")])
    good = [{"role": "system", "content": "Be brief."}, user("2*3?"), parts, user("?"), parts]
    assert base.find_error(good) is None
    assert [role for role, _ in chat_format.merge_turns(good)] == ["user", "assistant"] * 2


def test_jsonl_rejects_missing_empty_or_broken_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl"):
        len(JSONL("train", source=str(tmp_path / "nowhere.jsonl")))
    with pytest.raises(ValueError, match="no conversation"):
        len(JSONL("train", source=write_lines(tmp_path / "empty.jsonl")))
    (tmp_path / "broken.jsonl").write_text('[{"role"\n')
    with pytest.raises(ValueError, match=r"broken\.jsonl, line 1: not JSON"):
        len(JSONL("train", source=str(tmp_path / "broken.jsonl")))


@pytest.mark.parametrize("kind", [SpellingBee, SimpleSpelling])
def test_spelling_splits_share_no_words(kind, tmp_path, word_list):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(f"word{a}{b}" for a in LETTERS for b in LETTERS) + "\nit's\nab\n")
    for words in (None, str(path)):
        seen = [set(kind(split, source=words).words) for split in kind.splits]
        assert all(seen) and sum(map(len, seen)) == len(set.union(*seen))
    assert not {"it's", "ab"} & set.union(*seen)


def test_spelling_bee_counts_letters_correctly(word_list):
    task = SpellingBee("train")
    counts = set()
    for conversation in Subset(task, 300):
        question, answer = conversation
        [call] = [part["text"] for part in answer["content"] if part["type"] == "python"]
        word, letter = call.replace('"', " ").replace("(", " ").split()[0::2][:2]
        assert f" {word}" in question["content"] and letter in question["content"]
        said = answer_text(answer)
        assert said.startswith("-".join(word) + "\n")
        assert said.endswith(f"#### {word.count(letter)}")
        assert said.count(f"\n{letter} ") == word.count(letter)
        assert task.score(conversation, said) == 1.0
        counts.add(word.count(letter))
    assert {0, 1, 2} <= counts


def test_spelling_bee_tests_only_new_letter_counts(word_list):
    counted = {(word.lower(), letter) for word, letter, _ in letter_questions("train")}
    task = SpellingBee("test")
    asked = {task.draw(task.generator(i)) for i in range(len(task))}
    assert len(asked) > 50 and not asked & counted


def test_spelling_without_a_word_list_names_the_script():
    with pytest.raises(MissingInput, match=r"no word list(.|\n)*scripts\.tok_train"):
        SpellingBee("train")[0]
    assert "no word list" in registry.why_unavailable("spelling")


def test_spelling_of_text_without_ascii_words_is_unavailable(base):
    path = base / "tokenizer" / "main" / "words.txt"
    path.parent.mkdir(parents=True)
    path.write_text("")
    assert "no words for split test" in registry.why_unavailable("spelling")


def test_simple_spelling_requires_the_full_word(word_list):
    task = SimpleSpelling("test")
    right = task[0][1]["content"]
    assert set(right[1::2]) == {"-"}
    assert task.score(task[0], f" {right}<|assistant_end|>") == 1.0
    assert task.score(task[0], right[2:]) == 0.0


def test_spelling_bee_works_with_a_short_word_list(tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"z{a * 4}" for a in LETTERS))
    for split in SpellingBee.splits:
        task = SpellingBee(split, source=str(tmp_path / "words.txt"))
        assert all("z" in message["content"] for message, _ in Subset(task, 50))


def test_word_file_without_words_raises(tmp_path):
    (tmp_path / "words.txt").write_text("1 2 3")
    with pytest.raises(ValueError, match="no words for split train in .*words.txt"):
        SpellingBee("train", source=str(tmp_path / "words.txt"))[0]


# ------------------------------------------------------------------------------------------------
# Tasks by name


def test_tasks_are_found_by_key_and_report_name():
    for key, entry in registry.TASKS.items():
        assert key_of(key) == key_of(entry.name) == key
    assert isinstance(make_task("ARC-Easy", "test"), ARCEasy)
    with pytest.raises(ValueError, match="unknown task 'gsm8'; did you mean gsm8k"):
        make_task("gsm8", "test")


@pytest.mark.parametrize(
    "spec, message",
    [
        ("", "'' in the mixture"),
        ("gsm8k,aqua,gsm8k=5", "gsm8k appears twice"),
        ("smaltalk", "did you mean smoltalk"),
        ("humaneval", "humaneval is evaluation-only"),
        ("aqua:local/own", "aqua takes no data source"),
        ("jsonl", "jsonl:<path>"),
    ],
)
def test_invalid_mixture_error_has_a_fix(spec, message):
    with pytest.raises(ValueError, match=message):
        buckets(spec)


def test_buckets_have_names_and_tags_and_load_lazily(loaded, tmp_path):
    path = write_lines(tmp_path / "own.jsonl", *map(greeting, range(400)))
    declared = {"mine": {"task": "jsonl", "source": str(path), "language": "ko"}}
    found = buckets(f"GSM8K*2,jsonl:{path}=7*3,mine=20%,smoltalk:a/b", declared)
    assert not loaded
    assert [bucket.name for bucket in found] == ["gsm8k", f"jsonl:{path}", "mine", "smoltalk:a/b"]
    assert len(found[1].train) == 7 and len(found[2].train) == len(JSONL("train", source=str(path)))
    assert len(found[1].val) == len(JSONL("val", source=str(path)))
    assert found[0].tags.answer_format == "number" and found[0].tags.parent == "gsm8k"
    assert found[2].tags == Tags(language="ko")
    assert found[1].tags == found[3].tags == Tags()  # custom data has no default tags
    assert found[0].train.split == "train" and found[0].val.split == "test"
    with pytest.raises(ValueError, match="mine is declared as"):
        buckets("mine:other", declared)
    with pytest.raises(ValueError, match="own': gsm8k takes no data source; remove it"):
        buckets("own", {"own": {"task": "gsm8k", "source": "me/gsm8k", "language": "ko"}})


def test_every_trainable_task_has_tags():
    trained = {key for key, entry in registry.TASKS.items() if "train" in entry.splits}
    assert trained - {"jsonl", "hub"} <= TAGS.keys() <= registry.TASKS.keys()


def test_rl_amounts_must_be_questions_or_repeats(loaded):
    twice = rl_questions("world_facts=5*2,world_spelling=3")
    assert len(twice) == 13
    for spec in ("world_facts=20%", "world_facts*1.5", "world_facts=500t"):
        with pytest.raises(ValueError, match="use a number of questions"):
            rl_questions(spec)
    with pytest.raises(ValueError, match="RL takes no budget of tokens"):
        rl_questions("world_facts=5@500000t")


@pytest.mark.parametrize("questions", [rl_questions, held_out_questions])
def test_questions_of_a_training_only_task_raise(questions):
    with pytest.raises(ValueError, match="smoltalk is training-only: it has no reference answers"):
        questions("gsm8k,smoltalk", 20)


def test_held_out_questions_are_balanced_over_tasks():
    asked = held_out_questions("world_facts=5,world_spelling*3,world_facts", 20)
    counts = Counter(asked.locate(i)[0].name for i in range(len(asked)))
    assert counts == {"World-Facts": 10, "World-Spelling": 10}
    assert {task.split for task in asked.tasks} == {"test"}
    for i in range(len(asked)):
        task, number = asked.locate(i)
        assert task[number] == asked[i] and task.locate(number) == (task, number)


def test_default_mixtures_and_tasks_are_valid(loaded):
    for stage in (mid_train, chat_sft):
        for spec in (stage.MIXTURE, stage.BUILTIN_MIXTURES["embedded"]):
            assert len(buckets(spec)) > 3
    for name in (*default_tasks({}), *default_tasks({"dataset": "embedded"})):
        assert make_task(name, "test").kind != "talk"
    for task in (chat_rl.TASK, chat_rl.BUILTIN_TASKS["embedded"]):
        assert len(held_out_questions(task, 4)) > 0


@pytest.mark.parametrize("key", registry.TASKS)
def test_R27_training_never_loads_an_evaluation_split(key, loaded, tmp_path, word_list):
    task = registry.TASKS[key]
    path = write_lines(tmp_path / "own.jsonl", *map(greeting, range(400)))
    sources = {"jsonl": f"jsonl:{path}", "hub": "hub:a/b{messages: conversations}"}
    spec = sources.get(key, key)
    if "train" not in task.splits:
        with pytest.raises(ValueError, match="evaluation-only"):
            buckets(spec)
        return
    trained = {fingerprint(c) for c in buckets(f"{spec}=2000")[0].train}
    if issubclass(task, hub.HubTask) and not issubclass(task, HubChats):
        [(_, stem)] = loaded
        assert stem.endswith("train")
        assert stem not in {task.stems[split] for split in task.splits if split != "train"}
    elif key not in ("world_chat", "smoltalk"):  # greetings repeat; both files have the same rows
        for split in task.splits[1:]:
            other = task_of(parse_task_mixture(spec)[0], split)
            assert not trained & {fingerprint(c) for c in other}


def test_smoltalk_skips_and_counts_invalid_rows(loaded):
    task = SmolTalk("train")
    assert list(task) == [CHAT]
    assert task.left_out == task.identity["left_out"] == 1
    with pytest.raises(ValueError, match="training-only"):
        task.score(CHAT, "Ho")
