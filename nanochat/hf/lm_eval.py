"""
Our checkpoints under EleutherAI's evaluation harness, as its model `nanochat`.

    requests of lm-eval -> Question -> eval_core.read;  prompts -> Engine -> text up to a stop

A thin adapter: tokens are scored by the few-shot scorer and written by the engine, as everywhere
else. Every text begins with BOS. Needs the packages of the group `interop`.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from nanochat.chat_format import render, render_prompt
from nanochat.checkpoint import find_checkpoint, load_model, newest_stage
from nanochat.distributed import MachineConfig, init_machine
from nanochat.engine import Engine, Sampling
from nanochat.eval_chat import fit
from nanochat.eval_core import (
    CPU_PASS_TOKENS,
    GPU_PASS_TOKENS,
    Question,
    batches,
    fitted,
    read_safely,
    subject_of,
)
from nanochat.gpt import for_inference
from nanochat.preflight import choose_fused_engine
from nanochat.serve.scheduler import Answer, GenerationRequest
from nanochat.tokenizer import Tokenizer

MAX_GEN_TOKS = 256  # of an answer, where the task does not say

Scored = tuple[float, bool]  # nats with their sign turned, whether every token was the first choice


@register_model("nanochat")
class NanochatLM(LM):
    """
    model_args: source (base, mid, sft or rl; the last that has a checkpoint), tag, step, dtype.

    Raises MissingInput where there is no such checkpoint.
    """

    def __init__(
        self,
        source: str | None = None,
        tag: str | None = None,
        step: int | None = None,
        dtype: Any = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        **ignored: Any,
    ) -> None:
        super().__init__()
        kind: Any = (device or "").split(":")[0] or None
        if kind == "cuda" and not torch.cuda.is_available():
            kind = None  # the harness names a GPU where nobody said anything
        self.machine = init_machine(MachineConfig(kind, dtype))
        checkpoint = find_checkpoint(source or newest_stage(), tag, step)
        self.own_tokenizer = Tokenizer.read(checkpoint.folder / "tokenizer.json")
        self.model = for_inference(load_model(checkpoint, self.machine))
        self.subject = subject_of(self.model, self.own_tokenizer)
        self.fingerprint = checkpoint.fingerprint
        self.rendered: dict[str, list[int]] = {}  # prompts made of conversations, and their ids

    # ---- likelihoods -------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], **options: Any) -> list[Scored]:
        """Of each (context, continuation): requests in a row with one context share its reading."""
        questions, first = [], 0
        for _, group in itertools.groupby([r.args for r in requests], key=lambda pair: pair[0]):
            pairs = [self.split(*pair) for pair in group]
            ids, starts = zip(*pairs, strict=True)
            questions.append(fitted(first, ids, starts, None, self.subject.context))
            first += len(pairs)
        return self.score(questions, first)

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """The ids of both together, and where the continuation begins; never with a space."""
        before = self.encode(context)
        if context in self.rendered:
            return before + self.own_tokenizer.encode(continuation), len(before)
        kept = context.rstrip()
        return self.encode(context + continuation), len(self.encode(kept))

    def encode(self, text: str) -> list[int]:
        """The ids of a text behind BOS, or of the conversation that it renders."""
        known = self.rendered.get(text)
        return known or [self.own_tokenizer.bos_id, *self.own_tokenizer.encode(text)]

    def score(self, questions: Sequence[Question], count: int) -> list[Scored]:
        """Options of all questions, numbered through, whatever the order they are read in."""
        on_cpu = self.machine.device.type == "cpu"
        found: dict[int, Scored] = {}
        for batch in batches(questions, CPU_PASS_TOKENS if on_cpu else GPU_PASS_TOKENS):
            readings = read_safely(self.subject, batch, self.machine.device)
            for q, options in zip(batch, readings, strict=True):
                for n, reading in enumerate(options):
                    scored = len(q.options[n]) - q.starts[n]
                    found[q.number + n] = (-reading.nats * scored, reading.foretold)
        return [found[n] for n in range(count)]

    def loglikelihood_rolling(self, requests: Sequence[Any], **options: Any) -> list[float]:
        """Of whole texts, window by window, every token once."""
        questions, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                self.own_tokenizer.encode(request.args[0]),
                prefix_token=self.own_tokenizer.bos_id,
                max_seq_len=self.subject.context,
                context_len=1,
            )
            for before, after in map(make_disjoint_window, windows):
                ids = [*before, *after]
                starts = [len(before)]
                questions.append(Question(len(owners), [ids], starts, None, 0, False))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (nats, _) in zip(owners, self.score(questions, len(owners)), strict=True):
            sums[owner] += nats
        return sums

    # ---- generation --------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Any], **options: Any) -> list[str]:
        """The answer to each prompt, up to the first stop."""
        fused = choose_fused_engine(None, self.machine, MAX_GEN_TOKS * len(requests))
        engine = Engine(self.model, self.own_tokenizer, compiled=fused)
        answers, texts = {}, [""] * len(requests)
        for number, (context, wanted) in enumerate(request.args for request in requests):
            until = wanted.get("until") or []
            stop = (until,) if isinstance(until, str) else tuple(until)
            settings = sampling(wanted)
            room = engine.cache.capacity - min(settings.max_new_tokens, engine.cache.capacity // 2)
            prompt = fit(self.encode(context), room)
            generation = GenerationRequest(prompt, settings, stop=stop, parts=False)
            (completion,) = engine.submit(prompt, settings)
            answers[completion] = Answer(completion, self.own_tokenizer, generation, number)
        while engine.busy:
            for completion in engine.step():
                answer = answers[completion]
                texts[answer.index] += "".join(delta.text for delta in answer.advance())
                if answer.finish:
                    engine.cancel(completion)
        return texts

    # ---- conversations -----------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keeps its cache of requests under."""
        return f"nanochat-{self.fingerprint}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """A name for the only form of conversation there is."""
        return "nanochat"

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """A conversation as a prompt; its ids are remembered, so that no text can forge a turn."""
        if add_generation_prompt:
            ids = render_prompt(self.own_tokenizer, chat_history)
        else:  # the last turn is the beginning of an answer: it stays open
            ids = render(self.own_tokenizer, chat_history)[0][:-1]
        text = self.own_tokenizer.decode(ids)
        self.rendered[text] = ids
        return text


def sampling(wanted: dict[str, Any]) -> Sampling:
    """lm-eval's settings of generation as ours; greedy unless it asks for more."""
    most = wanted.get("max_gen_toks") or wanted.get("max_new_tokens") or MAX_GEN_TOKS
    temperature = wanted.get("temperature") or 0.0
    if not wanted.get("do_sample", temperature > 0):
        temperature = 0.0
    return Sampling(
        max_new_tokens=int(most),
        temperature=float(temperature),
        top_k=wanted.get("top_k") or None,
        top_p=wanted.get("top_p") or 1.0,
        seed=int(wanted.get("seed") or 0),
    )
