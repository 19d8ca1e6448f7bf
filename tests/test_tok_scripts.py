"""tok_train and tok_eval end to end, with and without downloaded vocabularies."""

import json
import os
import socket
from collections import Counter
from pathlib import Path

import pytest

from nanochat.common import MissingInput
from nanochat.config import parse
from nanochat.dataset import FirstUseConfig, load_last_source, open_source
from nanochat.mixture import MixConfig, open_texts
from nanochat.tokenizer import SPECIAL_TOKENS, Tokenizer
from scripts import tok_eval, tok_train
from scripts.tok_eval import RIVALS, TokEval
from scripts.tok_train import TokTrain

SMALL = TokTrain(vocab_size=512, max_chars=200_000, data=FirstUseConfig(dataset="embedded"))
# Keys of the section in order, as in the original nanochat report
TRAINING_KEYS = (
    "train_time num_special_tokens token_bytes_min token_bytes_max token_bytes_mean token_bytes_std"
).split()
KINDS = "news korean code math science World-train World-val".split()


@pytest.fixture
def listener():
    """Port of a loopback server that accepts connections but never responds."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def redirect_downloads(monkeypatch, tmp_path: Path, port: int) -> None:
    """Redirect tiktoken's downloads to a local port, with an empty cache."""
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))


@pytest.fixture
def unreachable(monkeypatch, tmp_path):
    """Downloads fail: the connection is refused."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    redirect_downloads(monkeypatch, tmp_path, port)


def record(base: Path, name: str) -> dict:
    return json.loads((base / "report" / f"{name}.json").read_text())


def test_tok_train_saves_tokenizer_source_and_section(base):
    tok_train.main(SMALL)
    tokenizer = Tokenizer.load()
    assert tokenizer.vocab_size == 512
    found = record(base, "tokenizer-training")
    assert list(found["settings"])[:3] == ["max_chars", "doc_cap", "vocab_size"]
    assert list(found["values"])[: len(TRAINING_KEYS)] == TRAINING_KEYS
    lengths = tokenizer.token_bytes()[: -len(SPECIAL_TOKENS)]
    assert found["values"]["num_special_tokens"] == 9
    assert found["values"]["token_bytes_min"] == 1
    assert found["values"]["token_bytes_max"] == lengths.max()
    assert found["values"]["token_bytes_mean"] == pytest.approx(lengths.mean())
    assert found["values"]["characters"] == 200_000
    source = load_last_source("main")
    assert source and source["dataset"] == "embedded"
    assert found["settings"]["vocab_size"] == 512
    assert found["provenance"]["outputs"] == {"tokenizer": tokenizer.fingerprint}
    assert found["provenance"]["inputs"] == {"data": source["fingerprint"]}
    assert "## Tokenizer training" in (base / "report.md").read_text()


def test_P6_repeated_training_gives_the_same_file(base):
    tok_train.main(SMALL)
    tok_train.main(TokTrain(**{**vars(SMALL), "tokenizer_tag": "again"}))
    files = [base / "tokenizer" / tag / "tokenizer.json" for tag in ("main", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_skip_if_done_skips_only_an_identical_finished_run(base, capsys):
    def trains(**changes) -> bool:
        tok_train.main(TokTrain(**{**vars(SMALL), "skip_if_done": True, **changes}))
        return "finished already" not in capsys.readouterr().out

    assert trains()
    assert not trains()
    assert trains(vocab_size=600)
    assert not trains(vocab_size=600)
    (base / "tokenizer" / "main" / "tokenizer.json").write_text("{}")
    assert trains(vocab_size=600)


def corpus(folder: Path, **files: list[str]) -> FirstUseConfig:
    """Write a folder of jsonl files; the last one is the validation file."""
    folder.mkdir()
    for name, texts in files.items():
        lines = [json.dumps({"text": text}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return FirstUseConfig(dataset=str(folder))


def test_long_documents_are_truncated_and_max_chars_is_exact(base, tmp_path):
    data = corpus(tmp_path / "text", a=["x" * 50, "y" * 5], b=["z" * 10] * 9, c=["v"])
    counts, words = Counter(), Counter()
    documents = tok_train.read_documents([(open_source(data), 38)], 20, counts, words)
    assert list(documents) == ["x" * 20, "y" * 5, "z" * 10, "z" * 3]
    assert counts == {
        "documents": 4, "characters": 38, "text_bytes": 38, "shards_read": 2, "documents_cut": 1,
        "characters_cut": 30,
    }  # fmt: skip


def test_shards_after_max_chars_are_not_opened(base, tmp_path, monkeypatch):
    data = corpus(tmp_path / "text", a=["word " * 40], b=["other " * 40], c=["v"])
    source = open_source(data)
    opened = []
    read = type(source).documents
    monkeypatch.setattr(
        type(source), "documents", lambda self, shard: opened.append(shard) or read(self, shard)
    )
    list(tok_train.read_documents([(source, 100)], 10_000, Counter(), Counter()))
    assert opened == ["a.jsonl"]


def test_mixture_shares_apply_to_tokenizer_training(base, tmp_path):
    folders = {name: tmp_path / name for name in ("a", "b", "c")}
    for name, folder in folders.items():
        corpus(folder, text=[name * 10] * 50, val=["v"])
    own = tmp_path / "own.json"
    declared = {name: {"dataset": str(path)} for name, path in folders.items()}
    own.write_text(json.dumps({"mixture": "a=50%,b,c", "buckets": declared}))
    texts = open_texts(FirstUseConfig(), MixConfig(str(own)))
    shares = tok_train.divide_chars(texts, 200)
    read = "".join(tok_train.read_documents(shares, 100, Counter(), Counter()))
    assert {name: read.count(name) for name in folders} == {"a": 100, "b": 50, "c": 50}


def test_tokenizer_is_not_trained_on_the_validation_shard(base, tmp_path):
    data = corpus(tmp_path / "text", a=["the cat sat on the mat "] * 50, b=["quokka " * 500])
    tok_train.main(TokTrain(vocab_size=300, data=data))
    tokenizer = Tokenizer.load()
    assert not any("uo" in tokenizer.decode([i]) for i in range(tokenizer.vocab_size - 9))
    assert len(tokenizer.encode(" the cat")) < len(" the cat")
    assert record(base, "tokenizer-training")["values"]["documents"] == 50


def test_tok_eval_writes_its_section_without_rival_vocabularies(base, unreachable):
    tok_train.main(SMALL)
    tok_eval.main(TokEval())
    found = record(base, "tokenizer-evaluation")
    trained = record(base, "tokenizer-training")
    assert found["provenance"]["run_id"] == trained["provenance"]["run_id"]
    assert found["provenance"]["inputs"]["tokenizer"] == Tokenizer.load().fingerprint
    assert found["tables"] == []
    for rival in RIVALS:
        assert found["values"][f"Comparison with {rival}"].startswith("skipped: ")
    tokenizer = Tokenizer.load()
    for kind in KINDS:
        assert found["values"][f"bytes per token, {kind}"] >= 1
    news = tok_eval.SAMPLE_TEXTS["news"].read_text()
    assert found["values"]["bytes per token, news"] == pytest.approx(
        len(news.encode()) / len(tokenizer.encode(news))
    )
    assert "Comparison with GPT-2: skipped" in (base / "report.md").read_text()


def test_B17_hanging_vocabulary_download_times_out(base, listener, monkeypatch, tmp_path):
    redirect_downloads(monkeypatch, tmp_path, listener)
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 1.0)
    found = tok_eval.rival_counts(["a text"])
    assert found == dict.fromkeys(RIVALS, "skipped: no vocabulary within 1 s (TimeoutError)")


def die(*_):
    os._exit(1)


def test_B17_crashed_rival_process_does_not_stop_the_script(monkeypatch):
    monkeypatch.setattr(tok_eval, "count_rival", die)
    monkeypatch.setattr(tok_eval, "FETCH_SECONDS", 1.0)
    reason = "skipped: no vocabulary within 1 s (TimeoutError)"
    assert set(tok_eval.rival_counts([]).values()) == {reason}


def test_comparison_table_equals_the_original_report():
    texts = {"news": "n" * 1819, "korean": "k" * 893}
    table = tok_eval.compare_tokenizers("GPT-4", texts, [387, 364], {"news": 371, "korean": 723})
    assert table == {
        "title": "Comparison with GPT-4",
        "columns": [
            "Text Type",
            "Bytes",
            "GPT-4 Tokens",
            "GPT-4 Ratio",
            "Ours Tokens",
            "Ours Ratio",
            "Relative Diff %",
        ],
        "rows": [
            ["news", 1819, 387, "4.70", 371, "4.90", "+4.1%"],
            ["korean", 893, 364, "2.45", 723, "1.24", "-98.6%"],
        ],
    }


def test_rival_counts_match_gpt2_and_gpt4():
    names = (  # tiktoken's cache file names: two for gpt2, one for cl100k_base
        "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6",
        "6d1cbeee0f20b3d9449abfede4726ed8212e3aee",
        "9b5ad71b2ce5302211f9c61530b329a4922fc6a4",
    )
    cache = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or "/nowhere")
    if not all((cache / name).exists() for name in names):
        pytest.skip("TIKTOKEN_CACHE_DIR holds no vocabularies")
    # " SolidGoldMagikarp" is famously one token in GPT-2, but not in GPT-4
    assert tok_eval.rival_counts([" SolidGoldMagikarp"]) == {"GPT-2": [1], "GPT-4": [5]}


def test_failed_round_trip_raises(base):
    tok_train.main(SMALL)
    tokenizer = Tokenizer.load()
    tok_eval.count_tokens(tokenizer, "news", tok_eval.SAMPLE_TEXTS["news"].read_text())
    tokenizer.decode = lambda ids: "something else"
    with pytest.raises(AssertionError, match="news"):
        tok_eval.count_tokens(tokenizer, "news", tok_eval.SAMPLE_TEXTS["news"].read_text())


def test_tok_eval_without_a_tokenizer_names_the_command(base):
    with pytest.raises(MissingInput, match="python -m scripts.tok_train"):
        tok_eval.main(TokEval())


def test_sample_text_lengths_match_the_original_report():
    texts = {kind: path.read_text() for kind, path in tok_eval.SAMPLE_TEXTS.items()}
    sizes = {"news": 1819, "korean": 893, "code": 1259, "math": 1834, "science": 1112}
    assert {kind: len(text.encode()) for kind, text in texts.items()} == {
        kind: pytest.approx(size, rel=0.03) for kind, size in sizes.items()
    }
    compile(texts["code"], "sample", "exec")


def test_original_flags_work_with_dashes_and_underscores():
    cfg = parse(TokTrain(), args=["--max-chars=1000", "--doc_cap", "10", "--vocab_size=300"])
    assert (cfg.max_chars, cfg.doc_cap, cfg.vocab_size) == (1000, 10, 300)
    assert (TokTrain().max_chars, TokTrain().doc_cap, TokTrain().vocab_size) == (
        10_000_000_000,
        10_000,
        65_536,
    )
    with pytest.raises(ValueError, match="doc_cap"):
        TokTrain(doc_cap=0)
