"""
Fuzzing with hypothesis: on broken input, code that reads files, conversations or requests either
works or raises a clear error.

The ordinary suite tries a few hundred inputs per test, the slow one (`-m slow`) thousands.
"""

import contextlib
import json
import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import open_checkpoint, save_checkpoint, stage_folder
from nanochat.common import json_text, seal, write_json
from nanochat.dataloader import Rows
from nanochat.logger import read_metrics
from nanochat.records import (
    Cost,
    Provenance,
    find_finished,
    inherited_run_id,
    read_history,
    read_records,
    write_record,
)
from nanochat.report import update
from nanochat.tokenizer import Tokenizer
from tasks.jsonl import JSONL
from tests.web_server import HELLO, post, serving, write_model

budgets = pytest.mark.parametrize(
    "budget", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)


@pytest.fixture
def fuzz(budget, record_property):
    """Run a check on `cases` x `budget` generated inputs, the same in every run."""

    def run(check, strategy, cases):
        tried = 0

        def counted(value):
            nonlocal tried
            tried += 1
            check(value)

        wanted = settings(
            max_examples=cases * budget,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        wanted(given(strategy)(counted))()
        record_property("bad inputs tried", tried)

    return run


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["a small text, ein kurzer Text, \u6c49\u5b57"], 280)


# ------------------------------------------------------------------------------------------------
# Generated inputs

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4)
    ),
    max_leaves=12,
)
edits = st.lists(
    st.tuples(
        st.sampled_from(["flip", "cut", "drop", "repeat", "put", "zero"]),
        st.floats(0, 1, exclude_max=True),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes) -> bytes:
    """Apply `changes`, drawn from `edits`, to `data`."""
    for kind, where, stuff in changes:
        i, n = int(where * len(data)), len(stuff)
        if kind == "flip" and data:
            data = data[:i] + bytes([data[i] ^ (stuff[0] or 1)]) + data[i + 1 :]
        elif kind == "cut":
            data = data[:i]
        elif kind == "drop":
            data = data[:i] + data[i + n :]
        elif kind == "repeat":
            data = data[: i + n] + data[i:]
        elif kind == "put":
            data = data[:i] + stuff + data[i:]
        elif kind == "zero":
            data = data[:i] + bytes(min(64 * n, len(data) - i)) + data[i + 64 * n :]
    return data


def replaced(original, path, value):
    """JSON with one element replaced; `path` is followed as far as possible."""
    if isinstance(original, dict) and original and path:
        name = sorted(original)[path[0] % len(original)]
        return {**original, name: replaced(original[name], path[1:], value)}
    if isinstance(original, list) and original and path:
        i = path[0] % len(original)
        return [*original[:i], replaced(original[i], path[1:], value), *original[i + 1 :]]
    return value


changes_of_json = st.tuples(st.lists(st.integers(0, 50), max_size=5), values)


# ------------------------------------------------------------------------------------------------
# Tokens and conversations


@budgets
def test_P1_any_token_ids_decode_or_raise(fuzz, tokenizer):
    def check(ids):
        with contextlib.suppress(ValueError):
            tokenizer.decode(ids)
            assert all(0 <= i < tokenizer.vocab_size for i in ids)

    fuzz(check, st.lists(st.integers(-3, tokenizer.vocab_size + 3) | st.integers()), 300)


@budgets
def test_damaged_tokenizer_is_reported(fuzz, tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    whole = path.read_bytes()

    def check(change):
        path.write_bytes(change(whole))
        try:
            found = Tokenizer.read(path)
        except ValueError as error:
            assert str(path) in str(error)
        else:  # a readable tokenizer works
            assert found.decode(found.encode("a b")) == "a b"

    bytewise = edits.map(lambda changes: lambda data: edited(data, changes))
    jsonwise = changes_of_json.map(
        lambda change: lambda data: json.dumps(replaced(json.loads(data), *change)).encode()
    )
    fuzz(check, bytewise | jsonwise, 300)


texts = st.text(max_size=30) | st.sampled_from(["<|bos|>", "<|assistant_start|>", "\ud800", "\0"])
contents = (
    texts
    | st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["text", "python", "python_output", "image"]), "text": texts}
        )
        | values,
        max_size=3,
    )
    | values
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | values, "content": contents}
)
plausible = st.lists(contents, max_size=6).map(
    lambda said: [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(said)]
)
conversations = plausible | st.lists(messages | values, max_size=5) | values


@budgets
def test_V12_any_conversation_renders_or_raises(fuzz, tokenizer):
    def check(conversation):
        try:
            ids, mask = render(tokenizer, conversation)
        except ValueError:
            return
        assert len(ids) == len(mask) and set(mask) <= {0, 1}
        assert ids[0] == tokenizer.bos_id not in ids[1:]
        starts = [tokenizer.special(f"<|{who}_start|>") for who in ("user", "assistant")]
        roles = [message["role"] == "assistant" for message in conversation]
        speakers = [role for i, role in enumerate(roles) if i == 0 or role != roles[i - 1]]
        assert [i for i in ids if i in starts] == [starts[role] for role in speakers]
        render_prompt(tokenizer, conversation)

    fuzz(check, conversations, 600)


@budgets
def test_broken_conversation_file_is_reported(fuzz, tmp_path):
    path = tmp_path / "mine.jsonl"

    def check(lines):
        path.write_bytes(b"\n".join(lines))
        with contextlib.suppress(ValueError):
            for split in ("train", "val"):
                try:
                    len(JSONL(split, str(path)))
                except ValueError as error:
                    assert "mine.jsonl" in str(error)
                    raise

    good = plausible.map(lambda c: json.dumps(c, default=str).encode())
    fuzz(check, st.lists(good | st.binary(max_size=30), max_size=4), 300)


# ------------------------------------------------------------------------------------------------
# Files of a run


@budgets
def test_R10_damaged_checkpoint_is_skipped(fuzz, tokenizer, tiny_gpt, base, capsys):
    folder = stage_folder("base") / "tiny"
    for step in (1, 2):
        save_checkpoint(folder, step, tiny_gpt, None, tokenizer, {"identity": {"seed": 0}})
    newest = folder / "step_000002"
    files = {path.name: path.read_bytes() for path in newest.iterdir()}

    def check(damage):
        name, changes = damage
        data = edited(files[name], changes)
        (newest / name).write_bytes(data)
        assert open_checkpoint(folder).step == (2 if data == files[name] else 1)
        (newest / name).write_bytes(files[name])

    fuzz(check, st.tuples(st.sampled_from(sorted(files)), edits), 300)
    capsys.readouterr()


@budgets
def test_damaged_record_is_reported_and_history_loses_one_line(fuzz, base):
    for section in ("Tokenizer training", "Base model training", "Chat RL"):
        where = Provenance("run", 0, {"data": "x"}, {"base": section})
        values = {"Loss": 1.5, "CORE": {"value": 0.1, "n": 10, "se": 0.1}}
        path = write_record(section, {"depth": 4}, values, where, Cost(1.0))
    history = path.parent / "records.jsonl"
    files = {file: file.read_bytes() for file in (path, history)}

    def check(damage):
        file, change = damage
        data = change(files[file])
        file.write_bytes(data)
        try:
            inherited_run_id({"base": "Chat RL"})
            assert len(read_history()) >= 3 - data.count(b"\n") or file == history
            find_finished("Chat RL", "no such key")
            read_records()
            update()
        except ValueError as error:
            assert path.name in str(error) and file == path
        finally:
            file.write_bytes(files[file])

    bytewise = edits.map(lambda changes: lambda data: edited(data, changes))
    jsonwise = changes_of_json.map(
        lambda change: (
            lambda data: b"\n".join(
                json.dumps(replaced(json.loads(line), *change)).encode()
                for line in ([data] if data.startswith(b"{\n") else data.splitlines())
            )
        )
    )
    fuzz(check, st.tuples(st.sampled_from(sorted(files)), bytewise | jsonwise), 60)


@budgets
def test_damaged_metrics_file_keeps_readable_lines(fuzz, tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": i, "loss": 9.0 - i, "lr": "nan"}) for i in range(5)]
    whole = "\n".join([*lines[:3], json.dumps({"resumed_at": 2}), *lines[2:], ""]).encode()

    def check(changes):
        path.write_bytes(edited(whole, changes))
        entries = read_metrics(path)
        assert [entry["step"] for entry in entries] == sorted({e["step"] for e in entries})

    fuzz(check, edits, 400)


@budgets
def test_R11_damaged_row_counts_are_reported(fuzz, tmp_path):
    counts = {"rows": 3, "documents": 2, "tokens": 30, "sha256": "0" * 64}
    recipe = {"fingerprint": "x", "max_seq_len": 9}
    rows = Rows(tmp_path, ["a"], "val", "uint16", 64, recipe)
    rows.bin_path("a").write_bytes(bytes(3 * 10 * 2))
    path = rows.counts_path("a")

    def check(change):
        write_json(path, seal(counts))
        path.write_bytes(change(path.read_bytes()))
        try:
            assert rows.counts("a") == counts
        except ValueError as error:
            assert str(path) in str(error)

    bytewise = edits.map(lambda changes: lambda data: edited(data, changes))
    jsonwise = changes_of_json.map(
        lambda change: lambda data: json_text(replaced(seal(counts), *change)).encode()
    )
    fuzz(check, bytewise | jsonwise, 300)


# ------------------------------------------------------------------------------------------------
# Requests


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(tmp_path_factory.mktemp("site")))
        write_model(context=64)
        with serving() as site:
            yield site


PATHS = ("/v1/chat/completions", "/v1/completions")
asked = {
    "model": "sft:tiny", "messages": HELLO, "max_tokens": 2, "temperature": 0.5, "top_p": 0.9,
    "stop": ["x"], "n": 1, "seed": 3, "stream": False, "logprobs": True, "top_logprobs": 2,
    "stream_options": None, "truncation": "auto",
}  # fmt: skip
continued = {"prompt": "Hello", "max_tokens": 2, "echo": True, "logprobs": 1, "n": 1, "stop": "x"}


@budgets
def test_V4_any_request_body_gets_a_valid_api_response(fuzz, site):
    def check(request):
        path, body = request
        answered = site.client.post(
            path, content=body, headers={"Content-Type": "application/json"}
        )
        assert answered.status_code in (200, 400, 404, 413, 422), answered.text
        if answered.status_code != 200:
            assert answered.json()["error"]["message"]

    def bodies(original):
        jsonwise = changes_of_json.map(lambda c: json.dumps(replaced(original, *c)).encode())
        whole = json.dumps(original).encode()
        return jsonwise | edits.map(lambda changes: edited(whole, changes))

    made_up = st.tuples(st.sampled_from(PATHS), st.binary(max_size=60))
    requests = st.one_of(
        st.tuples(st.just(PATHS[0]), bodies(asked)),
        st.tuples(st.just(PATHS[1]), bodies(continued)),
        made_up,
    )
    fuzz(check, requests, 200)
    assert site.content(max_tokens=2) is not None
    site.seconds_until_idle()


@budgets
def test_V6_any_connection_bytes_leave_the_server_running(fuzz, site):
    request = post(PATHS[0], {"messages": HELLO, "max_tokens": 2})

    def check(data):
        with site.raw() as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                answer = connection.recv(65536)
                assert not answer or answer.startswith(b"HTTP/1.1 ")
                assert not answer.startswith(b"HTTP/1.1 5"), answer

    fuzz(check, edits.map(lambda c: edited(request, c)) | st.binary(max_size=80), 150)
    assert site.client.get("/health").status_code == 200
    site.seconds_until_idle()
