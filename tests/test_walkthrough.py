"""A guided tour of the project: three sentences become a model that talks, and a report."""

import math

import numpy as np
import torch

from nanochat import report
from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import build_model
from nanochat.engine import Engine, Sampling
from nanochat.gpt import GPTConfig
from nanochat.loss import IGNORE
from nanochat.optim import MuonAdamW, OptimConfig
from nanochat.records import Cost, write_record
from nanochat.rows import Packer
from nanochat.scaling import make_rules
from nanochat.tokenizer import Tokenizer

SENTENCES = [
    "The cat sat on the mat and looked at the moon.",
    "A dog ran to the river and drank the cold water.",
    "The moon rose over the river while the cat slept.",
]
CHAT = [
    {"role": "user", "content": "Where did the cat sit?"},
    {"role": "assistant", "content": "On the mat."},
]


def test_three_sentences_become_a_chat_model_and_a_report(dist):
    # Byte pair encoding: frequent pairs of bytes become tokens, and decoding gives the text back
    tokenizer = Tokenizer.train(SENTENCES, vocab_size=300)
    assert tokenizer.decode(tokenizer.encode(SENTENCES[0])) == SENTENCES[0]

    # Documents, each after a BOS token, are packed into rows of T + 1 tokens
    T, packer = 32, Packer(33, tokenizer.bos_id, np.int64)
    packed = [packer.add(*tokenizer.encode_flat(SENTENCES * 20)), packer.finish()]
    rows = torch.from_numpy(np.concatenate(packed))  # (N, T + 1)
    assert (rows[:, 0] == tokenizer.bos_id).all()

    # A transformer; Muon updates its matrices, AdamW the rest
    cfg = GPTConfig(300, n_layer=2, d_model=128, n_head=2, n_kv_head=2, head_dim=32, max_seq_len=T)
    model = build_model(cfg, dist.device, dist.dtype, seed=0)
    optimizer = MuonAdamW(model, make_rules(OptimConfig(matrix_lr=0.05), cfg.d_model), dist)

    # Ten steps of pretraining: predict each next token. At first, all 300 are equally likely
    losses = []
    for _ in range(10):
        loss = model.loss(rows[:, :-1], rows[:, 1:]) / rows[:, 1:].numel()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert abs(losses[0] - math.log(300)) < 0.1 and losses[-1] < 0.3 * losses[0]

    # The model continues a text ...
    engine, greedy = Engine(model, tokenizer), Sampling(max_new_tokens=16, temperature=0.0)
    [[sample]] = engine.generate([[tokenizer.bos_id, *tokenizer.encode("The cat sat")]], greedy)
    assert tokenizer.decode(sample.ids).startswith(" on the mat")

    # ... and fine-tuning, with a loss on the answer alone, makes it reply
    ids, mask = (torch.tensor([x]) for x in render(tokenizer, CHAT))
    targets = torch.where(mask == 1, ids, IGNORE)
    for _ in range(10):
        loss = model.loss(ids[:, :-1], targets[:, 1:]) / mask.sum()
        loss.backward()
        optimizer.step()
    [[reply]] = engine.generate([render_prompt(tokenizer, CHAT[:1])], greedy)
    assert tokenizer.decode(reply.ids) == "On the mat." and reply.finish == "stop"

    # What a stage found becomes a section of report.md
    values = {"First loss": losses[0], "Last loss": losses[-1]}
    write_record("Base model training", {"steps": 10}, values, {}, Cost(1.0))
    text = report.update().read_text()
    assert "## Base model training" in text and f"- Last loss: {losses[-1]:.4f}" in text
