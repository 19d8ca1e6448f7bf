"""Packed conversations stay whole, keep their masks, and always have loss."""

import numpy as np
import pytest

from nanochat import chat_packing
from nanochat.chat_format import render
from nanochat.chat_packing import encode, open_chat_rows, pack_encoded, signed_ids
from nanochat.common import UsageError, base_dir, read_sealed
from nanochat.loss import IGNORE
from nanochat.tokenizer import Tokenizer
from nanochat.train import inputs_and_targets

TOKENIZER = Tokenizer.train(["what is it"], 265)


def chat(question, answer):
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def skipped_of(encoded):
    return read_sealed(base_dir() / "rows" / encoded.fingerprint / "encoded.json")["skipped"]


def packed(conversations, max_seq_len=63, name="x"):
    rows = open_chat_rows({"rows": name}, TOKENIZER, max_seq_len)
    encoded = encode({"name": name}, conversations, TOKENIZER, max_seq_len)
    counts = pack_encoded(rows, "train", encoded, TOKENIZER)
    pack_encoded(rows, "val", encoded, TOKENIZER)
    return rows, {**counts, "trained": encoded.trained, "skipped": skipped_of(encoded)}


def stored(rows):
    return np.fromfile(rows.bin_path("train"), rows.dtype).reshape(-1, rows.row_length)


def conversations_in(rows):
    """Yield the signed ids of every conversation in the rows, without padding."""
    bos = ~TOKENIZER.bos_id
    for row in stored(rows):
        starts = [*np.nonzero(row == bos)[0], len(row)]
        for a, b in zip(starts, starts[1:], strict=False):
            if b - a > 1:
                yield tuple(row[a:b].tolist())


def test_every_conversation_is_in_one_row_with_its_mask():
    chats = [chat("q" * (i % 23), "a" * (1 + i % 17)) for i in range(200)]
    rows, counts = packed(chats)
    expected = sorted(tuple(signed_ids(*render(TOKENIZER, c)).tolist()) for c in chats)
    assert sorted(conversations_in(rows)) == expected
    assert counts["documents"] == 200 and counts["documents_cut"] == counts["dropped"] == 0
    assert counts["trained"] == sum(sum(render(TOKENIZER, c)[1]) for c in chats)
    filled = sum(len(e) for e in expected) / (counts["rows"] * 64)
    assert filled > 0.9


def test_encoded_files_hold_the_rendered_conversations(base, monkeypatch, capsys):
    monkeypatch.setattr(chat_packing, "BATCH", 7)
    chats = [chat("q" * (i % 23), "a" * (1 + i % 70) if i % 9 else "") for i in range(100)]
    found = encode({"name": "x"}, chats, TOKENIZER, 31)
    assert "encoding 100 conversations" in capsys.readouterr().out
    signed = [signed_ids(*render(TOKENIZER, c, 32)) for c in chats]
    expected = [s[1:] for s in signed if (s >= 0).any()]
    assert skipped_of(found) == 100 - len(expected)
    assert found.trained == sum(int((s >= 0).sum()) for s in signed)
    folder = next((base / "rows").iterdir())
    assert (folder / "ids.bin").read_bytes() == np.concatenate(expected).tobytes()
    assert np.array_equal(np.load(folder / "ends.npy"), np.cumsum([0, *map(len, expected)]))


def test_invalid_conversation_is_reported():
    chats = [*[chat("q", "a")] * 400, [{"role": "user", "content": 7}]]
    with pytest.raises(ValueError, match="message 0: content must be a string or a list of parts"):
        encode({"name": "x"}, chats, TOKENIZER, 31)


def test_B2_conversation_longer_than_a_row_is_truncated(capsys):
    chats = [chat("q", "a" * 500), *[chat("q", "short")] * 30, chat("q" * 500, "a")]
    rows, counts = packed(chats)
    found = list(conversations_in(rows))
    assert len(found) == 31  # the last one lost its whole answer, so it has no loss
    printed = "of 32 conversations, 1 fill a row of 63 tokens (what is longer is cut) and 1 have no"
    assert printed in capsys.readouterr().out
    assert counts["skipped"] == 1 and counts["documents_cut"] == 0
    assert max(len(f) for f in found) == 64
    one_epoch = counts["rows"]
    first, second = (
        {tuple(r) for r in rows.row_ids(step, one_epoch, seed=0)[:, 1:].tolist()} for step in (0, 1)
    )
    assert first == second and len(first) == one_epoch  # each epoch has every row once


def test_conversations_without_loss_are_skipped():
    chats = [chat("q", "a"), [{"role": "user", "content": "alone"}]] * 20
    rows, counts = packed(chats)
    assert counts["skipped"] == 20
    assert ((stored(rows) >= 0).sum(axis=1) > 0).all()
    with pytest.raises(ValueError, match="no conversation to train on"):
        packed([[{"role": "user", "content": "alone"}]], name="y")


def flip(path):
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)


def test_R28_damaged_rows_are_packed_again():
    chats = [chat("q" * i, "answer") for i in range(30)]
    rows, _ = packed(chats)
    path = rows.bin_path("train")
    whole = path.read_bytes()
    flip(path)
    with pytest.raises(UsageError, match="train.bin is damaged"):
        open_chat_rows({"rows": "x"}, TOKENIZER, 63).batch(0, 4, seed=0)
    packed(chats)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("name", ["ids.bin", "ends.npy", "encoded.json"])
def test_R28_damaged_encodings_are_rewritten(name, base, capsys):
    chats = [chat("q" * i, "answer") for i in range(30)]
    encode({"name": "x"}, chats, TOKENIZER, 63)
    [path] = base.glob(f"rows/*/{name}")
    whole = path.read_bytes()
    flip(path)
    encode({"name": "x"}, chats, TOKENIZER, 63)
    assert path.read_bytes() == whole
    assert f"{path} " in (output := capsys.readouterr().out) and "again" in output


def test_signed_rows_become_inputs_and_targets():
    ids, mask = render(TOKENIZER, chat("hi", "ho"))
    row = signed_ids(ids, mask)[None]
    tokens, targets = inputs_and_targets(row)
    assert tokens[0].tolist() == ids[:-1]
    assert targets[0].tolist() == [
        i if m else IGNORE for i, m in zip(ids[1:], mask[1:], strict=True)
    ]


def test_rows_depend_on_conversations_and_tokenizer():
    a = open_chat_rows({"name": "x"}, TOKENIZER, 63)
    b = open_chat_rows({"name": "y"}, TOKENIZER, 63)
    c = open_chat_rows({"name": "x"}, Tokenizer.train(["that was it"], 270), 63)
    d = open_chat_rows({"name": "x"}, TOKENIZER, 31)
    assert len({r.folder for r in (a, b, c, d)}) == 4
    assert open_chat_rows({"name": "x"}, TOKENIZER, 63).fingerprint == a.fingerprint
