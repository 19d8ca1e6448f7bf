"""
Learning-rate schedules, and Muon + AdamW sharded over ranks.

    (step, num_steps) -> lr_factor, muon_momentum, decay_factor -> set_schedule
    rules by name and shape of the parameter -> MuonAdamW: gradients -> reduce_gradients -> step

Weights, gradients and optimizer state are float32. Matrices inside the layers are updated in stacks
of equal shape; each rank updates its slice of a stack or of a large embedding, and all ranks gather
the result.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn
from torch.optim.adamw import adamw

from nanochat.dist import DistContext
from nanochat.loss import compiled_version

# ---- Schedules: pure functions of (step, num_steps) ----------------------------------------------
# Stateless, so a resumed run follows the same schedule. A time-limited run passes the number of
# steps estimated from its throughput so far.


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int = 40
    """Number of linear learning-rate warmup steps; short runs never reach the peak."""
    warmdown_ratio: float = 0.65
    """Final fraction of the run with linear learning-rate decay."""
    final_lr_frac: float = 0.05
    """Final learning rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        for name in ("warmdown_ratio", "final_lr_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")


def lr_factor(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """
    Trapezoidal schedule: linear warmup, constant, linear decay that would reach `final_lr_frac` one
    step after the last.

    If a run is too short for both ramps, each step uses the lower of the two, and the peak is never
    reached: at the peak learning rate, a run of 20 steps would diverge, and rounding differences
    between two runs would grow.
    """
    up = (step + 1) / max(1, cfg.warmup_steps)
    down = cfg.final_lr_frac + (1 - cfg.final_lr_frac) * warmdown_left(step, num_steps, cfg)
    return min(up, down, 1.0)


def warmdown_left(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """Fraction of the warmdown that is left; above 1 before it begins."""
    return (num_steps - step) / max(1.0, cfg.warmdown_ratio * num_steps)


def muon_momentum(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """
    Muon momentum: from 0.85 to 0.97 over 400 steps or a third of a shorter run, and to 0.90 over
    the warmdown, where averaging over fewer steps follows the falling learning rate; the lower of
    both ramps.
    """
    up = 0.85 + (0.97 - 0.85) * step / max(1.0, min(400, num_steps / 3))
    down = 0.90 + (0.97 - 0.90) * warmdown_left(step, num_steps, cfg)
    return min(up, down, 0.97)


def decay_factor(step: int, num_steps: float) -> float:
    """Cosine decay of Muon's weight decay from 1 to 0 over the run."""
    return 0.5 * (1 + math.cos(math.pi * min(1.0, step / num_steps)))


def set_schedule(
    optimizer: "MuonAdamW", lr_factor: float, momentum: float, decay_factor: float
) -> None:
    """
    Scale the learning rates of all parameter groups; for Muon also set `momentum` and scale the
    weight decay.
    """
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * lr_factor
        if group.get("kind") == "muon":
            decay = group.setdefault("initial_decay", group["weight_decay"])
            group |= {"momentum": momentum, "weight_decay": decay * decay_factor}


# ---- Muon ----------------------------------------------------------------------------------------

MUON_BETA2 = 0.9  # of NorMuon's second moment
# Each step applies the odd polynomial a x + b x^3 + c x^5 to all singular values; together they map
# [0.001, 1] close to 1. Polar Express (arXiv:2505.16932), algorithm 1 with a lower bound of 1e-3,
# cushion 0.02 and, except in the last step, a safety factor of 1.02.
POLAR_EXPRESS = (
    (8.15655, -22.48329, 15.87877),
    (4.04190, -2.80866, 0.50005),
    (3.88394, -2.77070, 0.50642),
    (3.24553, -2.33935, 0.46136),
    (2.29378, -1.66273, 0.41814),
)


def orthogonalize(g: Tensor) -> Tensor:
    """
    Keep the singular vectors of `g` and push every singular value toward 1.

    g: (K, M, N), float. Returns the same shape and dtype. A matrix of gradients has few large
    singular values; after this, its small directions are learned as fast as the large ones. A
    polynomial of the matrix acts on its singular values, so a few matmuls do what an SVD would.
    Sources: Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/
    """
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g  # (K, S, L), short side first
    x = x / (1.01 * frobenius(x))  # all singular values below 1, also after rounding to bfloat16
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT  # (K, S, S)
        even = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b gram + c gram^2
        x = torch.baddbmm(x, even, x, beta=a)  # a x + even x
    return x.mT if tall else x


def fix_norm(g: Tensor) -> Tensor:
    """
    Scale matrices (..., M, N) to the Frobenius norm of orthonormal ones, sqrt(min(M, N)).
    Source: Muon+, arXiv:2602.21545.
    """
    return g * (min(g.shape[-2:]) ** 0.5 / frobenius(g))


def equalize_variance(g: Tensor, second: Tensor) -> Tensor:
    """
    Divide each row of the updates g (K, M, N) by the root of its mean square over the last steps,
    and set the norm of each matrix; columns if the matrices are wide. `second` holds the mean
    squares, (K, M, 1) or (K, 1, N), and is updated. Source: NorMuon, arXiv:2510.05491.
    """
    along = -1 if second.size(-1) == 1 else -2
    second.lerp_(g.square().mean(dim=along, keepdim=True), 1 - MUON_BETA2)
    return fix_norm(g * second.clamp(min=1e-30).rsqrt())


def frobenius(g: Tensor) -> Tensor:
    """Frobenius norms of matrices, (..., 1, 1), at least 1e-30."""
    return g.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-30)


def muon_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    second: Tensor,
    scalars: Sequence[Tensor],
    dtype: torch.dtype,
) -> None:
    """
    In-place Muon step on stacks of matrices (K, M, N); `dtype` is that of the orthogonalization.

    second: see `equalize_variance`. scalars: learning rate, momentum, weight decay. The decay is
    cautious (arXiv:2411.16085): it shrinks only weights that the update shrinks anyway.
    """
    lr, beta, decay = scalars
    momentum.lerp_(grad, 1 - beta)
    # Rows of the same norm: orthogonalization starts from better conditioned matrices.
    # Source: MuonEq, arXiv:2603.28254
    g = F.normalize(grad.lerp(momentum, beta), dim=-1, eps=1e-30)  # lerp: Nesterov
    g = fix_norm(orthogonalize(g.to(dtype)).float())
    g = equalize_variance(g, second)
    shrunk = weight * (g * weight > 0)
    weight.sub_(lr * g + lr * decay * shrunk)


# ---- AdamW ---------------------------------------------------------------------------------------

EPSILON = 1e-10  # of AdamW, so small that updates do not depend on the scale of gradients


def adamw_update(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, scalars: Sequence[Tensor]
) -> None:
    """
    In-place AdamW step (arXiv:1711.05101), any shape.

    scalars: learning rate, betas, weight decay, step (from 1).
    """
    lr, beta1, beta2, decay, step = scalars
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad * grad, 1 - beta2)
    scale = (1 - beta2**step).sqrt() / (1 - beta1**step)
    weight.mul_(1 - lr * decay)
    weight.sub_(lr * scale * first / (second.sqrt() + EPSILON))


def fused_adamw_update(
    weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, scalars: Sequence[Tensor]
) -> None:
    """
    `adamw_update` by PyTorch's kernel, which reads each tensor once: on a CPU 4 to 6 times as fast.
    """
    lr, beta1, beta2, decay, step = (x.item() for x in scalars)
    rates: Any = {"lr": lr, "beta1": beta1, "beta2": beta2, "weight_decay": decay}
    rates["eps"] = EPSILON * (1 - beta2**step) ** -0.5  # the kernel corrects the moment before
    before = torch.tensor(step - 1.0)  # the kernel counts from 0
    state = [first], [second], [], [before]
    adamw([weight], [grad], *state, fused=True, amsgrad=False, maximize=False, **rates)


# ---- The optimizer, sharded over ranks -----------------------------------------------------------

# edit here: update rules of any shape, by the kind of a `Rule`; "muon" is for stacks of matrices
UPDATES = {"adamw": adamw_update}
SHARDED_ROWS = 1024  # smallest number of rows of a parameter that AdamW shards


@dataclass(frozen=True)
class OptimConfig:
    embedding_lr: float | None = 0.3
    """Peak AdamW learning rate of the token embedding at width 768, scaled by width^-0.5. Value
    embeddings use half. Default after pretraining: that of the base model."""
    unembedding_lr: float | None = 0.008
    """Peak AdamW learning rate of the LM head at width 768, scaled by width^-0.5. Default after
    pretraining: that of the base model."""
    weight_decay: float | None = None
    """Muon weight decay. Default: derived from the training horizon; 0 after pretraining."""
    matrix_lr: float | None = 0.02
    """Peak Muon learning rate of the matrices inside the layers. Default after pretraining: that of
    the base model."""
    grad_clip: float = 0.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 = no clipping."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")

    def learning_rates(self) -> dict[str, Any]:
        """The peak learning rates by name; None stands for that of the base model."""
        return {name: getattr(self, name) for name in LEARNING_RATES}

    def with_learning_rates(self, base: Mapping[str, float]) -> Self:
        """With the `learning_rates` of the base model where none are set."""
        return replace(self, **{n: base[n] for n, x in self.learning_rates().items() if x is None})


LEARNING_RATES = ("embedding_lr", "unembedding_lr", "matrix_lr")
TUNING = OptimConfig(None, None, 0.0, None)  # after pretraining


@dataclass(frozen=True)
class Rule:
    """
    Update rule of some parameters: "muon" or a key of UPDATES. `lr` is the peak; Muon does not use
    `betas`.
    """

    kind: str
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.0


def choose_rule(name: str, param: Tensor, rules: Mapping[str, Rule]) -> Rule:
    """
    The rule of a parameter: that of the first part of its name, such as "blocks" or "head". What
    has none, or has Muon and is no matrix or stack of matrices, gets the rule "scalars".
    """
    rule = rules.get(name.split(".")[0])
    return rules["scalars"] if rule is None or (rule.kind == "muon" and param.ndim < 2) else rule


class MuonAdamW:
    """
    Muon for the matrices inside the layers, AdamW for all other parameters of `model`, or what
    `rules` says (`choose_rule`). `param_groups` are as in torch.optim.Optimizer, which is not used:
    it imports torch.compile, for seconds.

    Before the step, `reduce_gradients` sums the gradients over ranks and returns their norm;
    `gradients` are then this rank's slices. With one rank, nothing is sharded. Set `compiled` to
    compile the update rules.
    """

    def __init__(self, model: nn.Module, rules: Mapping[str, Rule], dist: DistContext):
        self.dist, self.compiled, self.steps_taken = dist, False, 0
        self.gradients: list[Tensor] = []
        groups: dict[Any, dict[str, Any]] = {}
        for name, param in model.named_parameters():
            rule = choose_rule(name, param, rules)
            if name.split(".")[0] not in rules:
                dist.print0(f"optimizer {name} has no rule of its own, and is updated as a scalar")
            key = param.shape if rule.kind == "muon" else name
            group = groups.setdefault(key, {"params": [], "param_names": [], **asdict(rule)})
            group["params"].append(param)
            group["param_names"].append(name)
        self.param_groups = list(groups.values())
        self.state: dict[Tensor, dict[str, Any]] = {}
        for group in self.param_groups:
            owner, stacked = group["params"][0], group["kind"] == "muon"
            large = stacked or (owner.ndim == 2 and owner.size(0) >= SHARDED_ROWS)
            group["sharded"] = dist.world_size > 1 and large
            weight = self.local_shard(group, group["params"])
            moments = {"first": torch.zeros_like(weight), "second": torch.zeros_like(weight)}
            if stacked:  # see `equalize_variance`
                along = -1 if owner.size(-2) >= owner.size(-1) else -2
                moments["second"] = moments["second"].narrow(along, 0, 1).clone()
            self.state[owner] = moments  # of the whole group, under its first parameter

    # ---- stacks and shards of a group --------------------------------------------------------

    def stack(self, group: dict[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of a group as one tensor, padded to equal slices if sharded."""
        x = torch.stack(list(tensors)) if group["kind"] == "muon" else tensors[0]
        missing = -x.size(0) % self.dist.world_size if group["sharded"] else 0
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def local_shard(self, group: dict[str, Any], tensors: Sequence[Tensor]) -> Tensor:
        """This rank's slice of the `stack` of tensors."""
        whole = self.stack(group, [x.detach() for x in tensors])
        return whole.chunk(self.dist.world_size)[self.dist.rank] if group["sharded"] else whole

    def unstack(self, group: dict[str, Any], whole: Tensor) -> Sequence[Tensor]:
        """Views of the parameters of a group in their `stack`."""
        params = group["params"]
        stacked = group["kind"] == "muon"
        return whole[: len(params)].unbind() if stacked else [whole[: params[0].size(0)]]

    def assign(self, group: dict[str, Any], whole: Tensor) -> None:
        """Copy a stack into the parameters of a group."""
        for param, piece in zip(group["params"], self.unstack(group, whole), strict=True):
            param.copy_(piece)

    # ---- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """
        Sum the gradients over ranks; each rank keeps its slices in `gradients`. Returns the global
        gradient norm, a scalar on the device. Frees the parameters' `.grad`.
        """
        self.gradients, pending = [], []
        for group in self.param_groups:
            params = group["params"]
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            grad = self.stack(group, grads)
            if group["sharded"]:
                whole, rows = grad, grad.size(0) // self.dist.world_size
                grad = whole.new_empty(rows, *whole.shape[1:])
                pending.append(distributed.reduce_scatter_tensor(grad, whole, async_op=True))
            elif self.dist.world_size > 1:
                pending.append(distributed.all_reduce(grad, async_op=True))
            self.gradients.append(grad)
            for param in params:
                param.grad = None
        for work in pending:
            work.wait()
        squares = {True: [], False: []}
        for group, grad in zip(self.param_groups, self.gradients, strict=True):
            squares[group["sharded"]].append(torch.linalg.vector_norm(grad).square())
        mine, common = (sum(squares[sharded]) for sharded in (True, False))
        return (self.dist.sum_on_device(mine)[0] + common).sqrt()

    def zero_grad(self) -> None:
        """Discard all gradients, reduced or not."""
        self.gradients = []
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update the weights with the learning rate, momentum and weight decay of each group."""
        if not self.gradients:
            self.reduce_gradients()
        self.steps_taken += 1
        launched = []
        for group, grad in zip(self.param_groups, self.gradients, strict=True):
            params = group["params"]
            weight = self.local_shard(group, params)
            self.update(group, weight, grad)
            if group["sharded"]:  # gathered while the next groups are updated
                launched.append((group, *all_gather(weight, self.dist)))
            elif group["kind"] == "muon":
                self.assign(group, weight)
        self.gradients = []
        for group, whole, work in launched:
            work.wait()
            self.assign(group, whole)

    def update(self, group: dict[str, Any], weight: Tensor, grad: Tensor) -> None:
        """Apply the rule of a group to this rank's slice of its weights."""
        state = self.state[group["params"][0]]
        args = weight, grad, state["first"], state["second"]
        if group["kind"] == "muon":
            dtype = self.dist.dtype
            if dtype == torch.float16:  # entries of a gradient can be below its range
                dtype = torch.float32
            tall = max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
            momentum = group.get("momentum", 0.95)
            scalars = as_tensors(tall * group["lr"], momentum, group["weight_decay"])
            # the compiler of torch 2.15 fails for matrices of one row, such as gates of one head
            compiled = self.compiled and weight.size(-2) > 1
            kernel = compiled_version(muon_update) if compiled else muon_update
            weight, grad, first, second = (x.flatten(0, -3) for x in args)  # also stacks of stacks
            kernel(weight, grad, first, second, scalars, dtype)
        else:
            each = (group["lr"], *group["betas"], group["weight_decay"], self.steps_taken)
            function = UPDATES[group["kind"]]
            kernel = compiled_version(function) if self.compiled else function
            if kernel is adamw_update and weight.device.type == "cpu":
                kernel = fused_adamw_update
            kernel(*args, as_tensors(*each))

    # ---- gradients and state of all ranks ----------------------------------------------------

    @torch.no_grad()
    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yield the reduced gradients by the names of their parameters. All ranks must iterate: they
        gather the slices.
        """
        for group, mine in zip(self.param_groups, self.gradients, strict=True):
            whole = gather(mine, self.dist) if group["sharded"] else mine
            yield from zip(group["param_names"], self.unstack(group, whole), strict=True)

    @torch.no_grad()
    def full_state(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yield the state of all parameters as (`<parameter>.<moment>`, tensor), one group at a time.
        All ranks must iterate: they gather the shards. Tensors may share memory with the state.
        """
        for group in self.param_groups:
            names, state = group["param_names"], self.state[group["params"][0]]
            for moment, mine in state.items():
                if not isinstance(mine, Tensor):  # a number, of the whole group
                    yield f"{names[0]}.{moment}", torch.tensor(mine)
                    continue
                whole = gather(mine, self.dist) if group["sharded"] else mine
                for name, x in zip(names, self.unstack(group, whole), strict=True):
                    yield f"{name}.{moment}", x
        yield "steps_taken", torch.tensor(self.steps_taken)

    @torch.no_grad()
    def load_full_state(self, tensors: Mapping[str, Tensor]) -> None:
        """
        Load `full_state` saved with any world size; every rank passes all tensors.

        Raises KeyError for a missing tensor.
        """
        for group in self.param_groups:
            names, state = group["param_names"], self.state[group["params"][0]]
            for moment, mine in state.items():
                if not isinstance(mine, Tensor):
                    state[moment] = tensors[f"{names[0]}.{moment}"].item()
                    continue
                pieces = [tensors[f"{name}.{moment}"].to(mine) for name in names]
                mine.copy_(self.local_shard(group, pieces))
        self.steps_taken = int(tensors["steps_taken"])


def as_tensors(*numbers: float) -> list[Tensor]:
    """Scalars as tensors: changing them does not recompile a compiled function."""
    return [torch.tensor(x, dtype=torch.float32) for x in numbers]


def all_gather(mine: Tensor, dist: DistContext) -> tuple[Tensor, Any]:
    """Start collecting the ranks' slices into one tensor, valid after `.wait()`."""
    whole = mine.new_empty(mine.size(0) * dist.world_size, *mine.shape[1:])
    return whole, distributed.all_gather_into_tensor(whole, mine.contiguous(), async_op=True)


def gather(mine: Tensor, dist: DistContext) -> Tensor:
    """Collect the ranks' slices into one tensor."""
    whole, work = all_gather(mine, dist)
    work.wait()
    return whole
