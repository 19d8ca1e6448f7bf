"""
What a base model says: seven fixed prompts, continued greedily.

    model, tokenizer -> prompt + 16 tokens, seven times

The prompts are those of the seed report, so that report cards can be laid side by side.
"""

import torch

from nanochat.gpt import GPT, for_inference
from nanochat.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is | The chemical symbol of gold is | If yesterday was Friday, then "
    "tomorrow will be | The opposite of hot is | The planets of the solar system are: | My "
    "favorite color is | If 5*x + 3 = 13, then x is"
).split(" | ")
NEW_TOKENS = 16


@torch.no_grad()
def continue_greedily(model: GPT, tokenizer: Tokenizer, prompt: str, new_tokens: int) -> str:
    """`prompt` behind BOS and its most likely continuation, decoded; reads the whole each time."""
    device = model.device
    ids = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    for _ in range(new_tokens):
        window = torch.tensor([ids[-model.cfg.max_seq_len :]], device=device)
        ids.append(int(model(window)[0, -1].argmax()))
    return tokenizer.decode(ids)


def samples(model: GPT, tokenizer: Tokenizer) -> dict[str, str]:
    """
    `sample 0` to `sample 6`, as the report names them. The inference copy generates: a compiled
    model would be compiled for each of their lengths.
    """
    model = for_inference(model)
    return {
        f"sample {i}": continue_greedily(model, tokenizer, prompt, NEW_TOKENS)
        for i, prompt in enumerate(PROMPTS)
    }
