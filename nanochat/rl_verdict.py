"""
What came of reinforcement learning: how well a model does before and after, and is it luck?

    rewards, outcomes of held-out questions -> Standing; two of them -> figures of the record

Knows no tasks but by name, and runs nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from nanochat import records, stats
from nanochat.eval_chat import Outcomes


class Standing(NamedTuple):
    """How well a model does."""

    rewards: list[float]
    """Mean reward of each of the first questions that are practised."""
    held_out: Outcomes

    @property
    def logged(self) -> dict[str, float]:
        """As the loop logs what it evaluates."""
        return {"pass_at_1": pass_at(self.held_out, 1).value}

    def __str__(self) -> str:
        reward, right = stats.mean(self.rewards), pass_at(self.held_out, 1)
        return (
            f"mean reward {reward.value:.4f} +- {reward.se:.4f} ({reward.n} questions), held-out "
            f"pass@1 {right.value:.4f} +- {right.se:.4f} ({right.n} questions)"
        )


def pass_at(outcomes: Outcomes, k: int) -> stats.Estimate:
    """pass@k over the held-out questions."""
    correct = [sum(score == 1 for score in scores) for scores in outcomes]
    return stats.mean_pass_at_k(len(outcomes[0]), correct, k)


def figures(
    metrics: Sequence[Mapping[str, Any]], names: Sequence[str], before: Standing, after: Standing
) -> dict[str, Any]:
    """
    Rewards and pass@k on both sides; of several tasks, the change of each. `names` are the tasks of
    the held-out questions, one by one.
    """
    steps = [entry for entry in metrics if "reward" in entry]
    values: dict[str, Any] = {"Number of iterations": len(steps)}
    values["Mean reward before"] = records.estimate(*stats.mean(before.rewards))
    values["Mean reward after"] = records.estimate(*stats.mean(after.rewards))
    values |= changed("Mean reward", before.rewards, after.rewards)
    if "kl" in steps[-1]:
        values["KL from the start, nats a token"] = steps[-1]["kl"]
    if all("rollout_seconds" in entry for entry in steps):
        share = sum(e["rollout_seconds"] for e in steps) / sum(e["step_seconds"] for e in steps)
        values["Time in rollouts"] = f"{share:.0%}"
    silent = [entry["without_signal"] for entry in steps]
    values["Groups without signal"] = f"{sum(silent) / len(silent):.1%}"
    for k in (1, 2, 4, 8, 16):
        if k <= len(before.held_out[0]):
            values[f"pass@{k} before"] = records.estimate(*pass_at(before.held_out, k))
            values[f"pass@{k} after"] = records.estimate(*pass_at(after.held_out, k))
    items = [[sum(o) / len(o) for o in standing.held_out] for standing in (before, after)]
    values |= changed("pass@1", *items)
    for name in sorted(set(names)) if len(set(names)) > 1 else ():
        of = [i for i, other in enumerate(names) if other == name]
        values |= changed(f"pass@1 {name}", *([scores[i] for i in of] for scores in items))
    return values


def changed(name: str, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    """By how much the same items moved, and whether that is more than noise."""
    found = stats.compare(before, after)
    return {
        f"{name} change": records.estimate(found.difference, found.n, found.se),
        f"{name} verdict": found.verdict,
    }
