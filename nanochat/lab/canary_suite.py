"""
What sentinels ask: a small suite, always the same, of the text that was pretrained on, of
conversations that are learned, and of answers to held-out ones.

    checkpoint -> pretraining_text; text, conversations -> Suite.measure -> figures by name

The suite renders its conversations itself, as a finished model will see them: whoever trains on
something else can be told by comparing. Knows no task, and judges nothing.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from nanochat.chat_format import Message, render, render_prompt
from nanochat.checkpoint import Checkpoint
from nanochat.common import Refused
from nanochat.dataloader import inputs_and_targets
from nanochat.dataset import DataConfig
from nanochat.distributed import Machine
from nanochat.engine import Completion, Engine, Sampling
from nanochat.eval_bpb import Batch
from nanochat.gpt import GPT, for_inference
from nanochat.lab.row_bpb import bits_by_row
from nanochat.loss import IGNORE
from nanochat.mixture import open_corpus, open_texts
from nanochat.packing import ensure
from nanochat.tokenizer import Tokenizer
from tasks.builtin import ensure_written

LONGEST = 128  # tokens of an answer
NGRAM = 4  # tokens whose repetition is counted
LOSSES = 64  # conversations that are taught, of all buckets together, whose loss is measured
ROWS = 8  # of them in a forward pass
COUNTED = 64  # of each bucket that are compared with the rows of the training


class Taught(Protocol):
    """Conversations of a bucket; `tasks.base.Task` is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, i: int) -> Sequence[Message]: ...


class Asked(Taught, Protocol):
    """Conversations whose answers can be looked at; `tasks.base.Task` is one."""

    def letters(self, i: int) -> tuple[str, ...]: ...
    def answered(self, answer: str) -> bool: ...


@dataclass
class Suite:
    """What is asked, always the same."""

    tokenizer: Tokenizer
    text: Sequence[Batch]
    chats: Mapping[str, Asked]
    """Held-out conversations by bucket, to answer."""
    taught: Mapping[str, Taught] = field(default_factory=dict)
    """Those of the training, by bucket."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the training tokens, by bucket."""
    num_answers: int = 16
    """Answers, to all buckets together; 0 = none."""

    def measure_parent(self, model: GPT) -> dict[str, float]:
        """Before a run: as `measure`, and what does not change."""
        found = self.measure(model)
        if self.text:
            found["knowing_nothing"] = self.knowing_nothing()
        return found

    def measure(self, model: GPT) -> dict[str, float]:
        """
        Every figure of the suite; those of the answers only where conversations are asked. All are
        of the inference copy: a compiled model would be compiled for each of their lengths.
        """
        model, found = for_inference(model), {}
        if self.text:
            sizes = self.tokenizer.token_bytes()
            found["text_bpb"] = bits_by_row(model, self.text, sizes, model.device).value
        return {**found, **self.conversations(model), **self.answers(model)}

    def knowing_nothing(self) -> float:
        """Bits per byte of the text where every token is as likely."""
        sizes = self.tokenizer.token_bytes()
        targets = np.concatenate([targets.ravel() for _, targets in self.text])
        lengths = np.where(targets == IGNORE, 0, sizes[targets])
        return math.log2(len(sizes)) * int((lengths > 0).sum()) / int(lengths.sum())

    @torch.no_grad()
    def conversations(self, model: GPT) -> dict[str, float]:
        """Nats per counted token of what is taught, as the mixture weighs its buckets."""
        nats: dict[str, float] = defaultdict(float)
        counted: Counter = Counter()
        tokens: Counter = Counter()
        some = [
            (name, self.rendered(name, i, model.cfg.max_seq_len))
            for name, i in picked(self.taught, LOSSES)
        ]
        for first in range(0, len(some), ROWS):
            group = some[first : first + ROWS]
            x = padded([ids for _, (ids, _) in group], self.tokenizer.bos_id, model.device)
            y = padded([said for _, (_, said) in group], IGNORE, model.device)
            sums = model.token_losses(x, y).double().sum(1).tolist()
            for (name, (ids, said)), loss in zip(group, sums, strict=True):
                nats[name] += loss
                counted[name] += sum(target != IGNORE for target in said)
                tokens[name] += len(ids)
        weights = {n: self.shares[n] * counted[n] / tokens[n] for n in nats if counted[n]}
        total = math.fsum(weights.values())
        loss = math.fsum(w * nats[n] / counted[n] for n, w in weights.items())
        return {"taught_loss": loss / total} if total else {}

    def beside(self, tokens: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        """
        Rows of a training, both (n, T), beside what is taught, rendered apart: the ratio of the
        shares of tokens that carry loss, from 1 up, and how much the tokens after which answers
        begin differ, from 0 to 1 (total variation). Empty where nothing is taught.
        """
        size = counted = 0.0
        leads: dict[int, float] = defaultdict(float)
        for name, bucket in self.taught.items():
            some = picked({name: bucket}, COUNTED)
            pairs = [self.rendered(name, i, tokens.shape[1]) for name, i in some]
            weight = self.shares[name]
            length = sum(len(ids) - 1 for ids, _ in pairs)  # rows are filled up with BOS
            for ids, said in pairs:
                counted += weight / length * sum(target != IGNORE for target in said)
                for lead in before_answers(np.array(ids), np.array(said)).tolist():
                    leads[lead] += weight / length
            size += weight
        if not (size and counted):
            return {}
        said = (targets != IGNORE).sum() / (tokens != self.tokenizer.bos_id).sum()
        ratio = float(said) * size / counted
        theirs = Counter(before_answers(tokens, targets).tolist())
        return {
            "counted": max(ratio, 1 / ratio) if ratio else math.inf,
            "lead": distance(leads, theirs),
        }

    def rendered(self, name: str, i: int, max_seq_len: int) -> tuple[list[int], list[int]]:
        """Tokens and targets of what is taught, IGNORE where one does not count."""
        ids, mask = render(self.tokenizer, self.taught[name][i], max_seq_len + 1)
        said = [token if own else IGNORE for token, own in zip(ids, mask, strict=True)]
        return ids[:-1], said[1:]

    def answers(self, model: GPT) -> dict[str, float]:
        """What the answers look like."""
        T = model.cfg.max_seq_len
        longest = min(LONGEST, T // 2)
        asked, prompts, taught = [], [], []  # only what a good answer to has half of that
        for name, i in picked(self.chats, self.num_answers):
            whole, _ = render(self.tokenizer, self.chats[name][i])
            prompt = render_prompt(self.tokenizer, self.chats[name][i])
            if len(whole) - len(prompt) <= longest / 2:
                asked.append((name, i))
                taught.append(len(whole) - len(prompt))
                prompts.append(prompt[longest - T :])  # of a long one the end is read
        if not asked:
            return {}
        engine = Engine(model, self.tokenizer, len(asked))
        groups = engine.generate(prompts, Sampling(longest, 0.0, None))
        said = [group[0] for group in groups]
        words = [self.tokenizer.decode(answer.ids) for answer in said]
        choices = [
            text.strip()
            for (name, i), text in zip(asked, words, strict=True)
            if self.chats[name].letters(i)
        ]
        readable = [self.chats[n].answered(t) for (n, _), t in zip(asked, words, strict=True)]
        most = max(Counter(choices).values()) / len(choices) if len(choices) >= 4 else math.nan
        ratio = max(1, sum(len(answer.ids) for answer in said)) / sum(taught)
        return {
            "length": max(ratio, 1 / ratio),
            "no_end": share(answer.finish == "length" for answer in said),
            "unreadable": 1 - share(readable),
            "repeated": sum(map(repeated, said)) / len(said),
            "one_letter": most,
        }


def picked(buckets: Mapping[str, Taught], num: int) -> list[tuple[str, int]]:
    """Bucket and place of so many conversations: at least two of each bucket, evenly spread."""
    found = []
    for name, bucket in buckets.items() if num else ():
        each = min(len(bucket), max(2, num // len(buckets)))
        found += [(name, i * len(bucket) // each) for i in range(each)]
    return found


def padded(rows: Sequence[Sequence[int]], filling: int, device: torch.device) -> torch.Tensor:
    """Rows of different lengths as one tensor, filled up at their ends."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filling] * (longest - len(row))] for row in rows], device=device)


def share(values: Any) -> float:
    """Of the values that are true."""
    known = list(values)
    return sum(known) / len(known)


def before_answers(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The tokens, (T) or (n, T), after which a run of counted targets begins; flat."""
    counted = targets != IGNORE
    begins = counted.copy()
    begins[..., 1:] &= ~counted[..., :-1]
    return tokens[begins]


def distance(one: Mapping[Any, float], other: Mapping[Any, float]) -> float:
    """Total variation of two distributions, given as weights: 0 equal, 1 nothing in common."""
    first, second = math.fsum(one.values()), math.fsum(other.values())
    if not (first and second):
        return float(first != second)
    both = one.keys() | other.keys()
    return sum(abs(one.get(x, 0) / first - other.get(x, 0) / second) for x in both) / 2


def repeated(answer: Completion) -> float:
    """Share of an answer's runs of NGRAM tokens that came before in it."""
    runs = [tuple(answer.ids[i : i + NGRAM]) for i in range(len(answer.ids) - NGRAM + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def pretraining_text(
    parent: Checkpoint, tokenizer: Tokenizer, max_seq_len: int, num_tokens: int, machine: Machine
) -> list[Batch]:
    """
    Validation rows of the text that the base model read, for the main rank, which alone measures;
    none, and a line, where the text is gone.
    """
    if not (parent.state["source"] and machine.is_main):
        return []
    found: list[Batch] = []
    try:
        with machine.working("opening the pretraining text"):  # the other ranks wait for it
            texts = open_texts(DataConfig(), None, parent.state["source"], ensure_written)
            corpus = open_corpus(texts, tokenizer, max_seq_len)
            for name, rows in corpus.rows.items():
                ensure(rows, texts.sources[name], tokenizer, 0)
            each = max(1, num_tokens // max_seq_len // len(corpus.rows))
            for rows in corpus.rows.values():
                found += [inputs_and_targets(b, IGNORE) for b in rows.val_batches(8, each)]
    except (OSError, ValueError, Refused) as error:
        machine.print0(f"the text that was pretrained on is not watched: {error}")
        return []
    return found
