"""
The optimizer: schedules, update rules for each role of parameter, Muon + AdamW over ranks.

    (step, num_steps) -> lr_factor, muon_momentum, decay_factor
    OptimConfig -> rules(...) -> role: Rule -> MuonAdamW: parameter groups, sharded or replicated

Master weights and optimizer state are float32.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanochat.distributed import Machine

# ---- Learning-rate schedules: pure functions of (step, num_steps) --------------------------------
# Nothing is remembered, so a resumed run continues exactly. A run that ends by the clock passes the
# number of steps that its pace so far allows.


@dataclass(frozen=True)
class ScheduleConfig:
    warmup_steps: int = 40
    """Steps in which the rates rise linearly to their peak; a short run never reaches it."""
    warmdown_ratio: float = 0.65
    """Share of the run, at its end, in which the rates fall linearly."""
    final_lr_frac: float = 0.05
    """What the rates fall to, as a fraction of the peak."""
    muon_momentum: float = 0.95
    """Muon's momentum after its own warmup, from 0.85 over the first 300 steps."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        for name in ("warmdown_ratio", "final_lr_frac", "muon_momentum"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a fraction in [0, 1], got {getattr(self, name)}")


def lr_factor(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """
    Trapezoid: up over the warmup, flat, down to the final fraction at the last step.

    Where a run is too short for both slopes the lower one counts: a run of 20 steps at its full
    rate would diverge, and with it two runs that differ by rounding alone.
    """
    up = (step + 1) / max(1, cfg.warmup_steps)
    left = (num_steps - step) / max(1.0, cfg.warmdown_ratio * num_steps)
    down = cfg.final_lr_frac + (1 - cfg.final_lr_frac) * left
    return min(up, down, 1.0)


def muon_momentum(step: int, num_steps: float, cfg: ScheduleConfig) -> float:
    """From 0.85 up over 300 steps, or a third of a shorter run."""
    ramp = max(1, min(300, num_steps // 3))
    return 0.85 + (cfg.muon_momentum - 0.85) * min(1.0, step / ramp)


def decay_factor(step: int, num_steps: float) -> float:
    """Weight decay falls linearly to 0 over the run (measured by nanochat, 2026-01-10)."""
    return 1 - step / num_steps


# ---- Update rules for each role of parameter -----------------------------------------------------


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
ROWS_FADE_EVERY = 16  # steps: fading reads a whole table, where an update reads a few of its rows


@dataclass(frozen=True)
class OptimConfig:
    embedding_lr: float = 0.3
    """Peak AdamW rate of the token embedding at width 768; falls with width^-0.5. Value
    embeddings and bigrams get half."""
    unembedding_lr: float = 0.008
    """Peak AdamW rate of the head at width 768; falls with width^-0.5."""
    weight_decay: float | None = None
    """Muon's decay. Default: from the horizon."""
    decay_rule: Literal["cautious", "decoupled"] = "cautious"
    """cautious: decay only where it agrees with the update, fading over the run. decoupled: every
    matrix weight shrinks by rate times decay before its update, to the end; its default is a
    quarter of the other's, which in sum is as much."""
    tied_lr: float = 0.05
    """Peak AdamW rate of a table that is both embedding and head (--tie_embeddings) at width 768;
    falls with width^-0.5."""
    matrix_lr: float = 0.02
    """Peak Muon rate of the matrices inside the layers."""
    grad_clip: float = 0.0
    """Largest gradient norm; longer gradients are scaled down to it. 0 = off."""
    scalar_lr: float = 0.5
    """Peak AdamW rate of the learned scalars at a batch of 524,288 tokens; falls with the root of
    the batch. The residual ones get a hundredth."""

    def __post_init__(self) -> None:
        rates = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "tied_lr")
        for name in (*rates, "grad_clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be zero or positive, got {getattr(self, name)}")


@dataclass(frozen=True)
class Rule:
    """How the parameters of one role move. `lr` is the peak; betas[0] is Muon's momentum."""

    kind: Literal["muon", "adamw", "rows"]
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.0
    cautious: bool = True
    """Of Muon: decay only where it agrees with the update."""


def rules(cfg: OptimConfig, d_model: int, lr_frac: float = 1.0) -> dict[str, Rule]:
    """
    The rule of every role, all rates times `lr_frac`.

    Values: nanochat's tuning log, 2026-03 (d12 on 8xH100).
    """
    table = (d_model / 768) ** -0.5
    cautious = cfg.decay_rule == "cautious"
    found = {
        "matrix": Rule("muon", cfg.matrix_lr, (0.95, 0.0), cfg.weight_decay or 0.0, cautious),
        "embedding": Rule("adamw", cfg.embedding_lr * table, (0.8, 0.995), 0.001),
        "bigram": Rule("rows", cfg.embedding_lr * table / 2, (0.0, 0.995), 0.01),
        "value_embedding": Rule("adamw", cfg.embedding_lr * table / 2, (0.8, 0.995), 0.01),
        "head": Rule("adamw", cfg.unembedding_lr * table, (0.8, 0.96), 0.01),
        "tied": Rule("adamw", cfg.tied_lr * table, (0.8, 0.95), 0.01),
        "residual": Rule("adamw", cfg.scalar_lr / 100, (0.8, 0.95)),
        "skip": Rule("adamw", cfg.scalar_lr, (0.96, 0.95)),
        "gate": Rule("adamw", cfg.unembedding_lr * table, (0.8, 0.95)),
        "gain": Rule("adamw", cfg.scalar_lr / 25, (0.8, 0.95)),
    }
    return {role: replace(rule, lr=rule.lr * lr_frac) for role, rule in found.items()}


def orthogonalize(g: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """
    Keep the singular vectors of `g` and push every singular value towards 1.

    g: (..., M, N), float. Returns the same shape and dtype.
    Raises ValueError below two dimensions: a vector has no singular vectors to keep.
    Source: Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/
    """
    if g.ndim < 2:
        raise ValueError(f"orthogonalize needs a matrix, got shape {tuple(g.shape)}")
    a, b, c = NEWTON_SCHULZ
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g  # (..., S, L), short side first
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # largest singular value <= 1
    for _ in range(steps):
        gram = x @ x.mT  # (..., S, S)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def muon_update(
    weight: Tensor,
    grad: Tensor,
    momentum: Tensor,
    lr: Tensor,
    beta: Tensor,
    decay: Tensor,
    dtype: torch.dtype,
    cautious: bool = True,
) -> None:
    """
    One Muon step in place on stacks (K, M, N); `dtype` is that of the Newton-Schulz products.

    Nesterov momentum, orthogonal direction, rate times sqrt(max(1, M/N)). `cautious` decay shrinks
    only weights that the update shrinks anyway (arXiv:2411.16085); the other kind shrinks all, by
    rate times `decay` (decoupled, arXiv:1711.05101).
    """
    momentum.lerp_(grad, 1 - beta)
    direction = orthogonalize(grad.lerp(momentum, beta).to(dtype)).to(weight.dtype)
    direction = direction * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
    shrunk = weight * ((direction * weight) > 0) if cautious else weight
    weight.sub_(lr * direction + lr * decay * shrunk)


def adamw_update(
    weight: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    lr: Tensor,
    beta1: Tensor,
    beta2: Tensor,
    decay: Tensor,
    step: Tensor,
) -> None:
    """One AdamW step (arXiv:1711.05101) in place, any shape; `step` counts from 1."""
    first.lerp_(grad, 1 - beta1)
    second.lerp_(grad * grad, 1 - beta2)
    scale = (1 - beta2**step).sqrt() / (1 - beta1**step)
    weight.mul_(1 - lr * decay)
    weight.sub_(lr * scale * first / (second.sqrt() + 1e-10))


def rows_update(
    weight: Tensor,
    met: Tensor,
    grad: Tensor,
    second: Tensor,
    lr: float,
    beta2: float,
    decay: float,
    step: int,
) -> None:
    """
    AdamW without first moment, in place, on a table of which a batch meets few rows: their numbers
    (R,) and gradients (R, N). What it does to all rows, to shrink them and their second moment, is
    done at every ROWS_FADE_EVERY-th step for as many; `step` counts from 1.
    """
    if step % ROWS_FADE_EVERY == 0:
        weight.mul_(1 - lr * decay * ROWS_FADE_EVERY)
        second.mul_(beta2**ROWS_FADE_EVERY)
    moment = second[met] + (1 - beta2) * grad * grad
    second[met] = moment
    weight[met] -= lr * (1 - beta2**step) ** 0.5 * grad / (moment.sqrt() + 1e-10)


# ---- The optimizer: parameters in groups, sharded over ranks -------------------------------------


def values(grad: Tensor) -> Tensor:
    """The numbers of a gradient, of one that is sparse those that it has."""
    return grad.values() if grad.is_sparse else grad


def rows_met(grad: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers (R,) and gradients (R, N) of the rows that a table's gradient is not zero in."""
    if grad.is_sparse:
        return grad.indices()[0], grad.values()
    met = grad.any(dim=1).nonzero()[:, 0]  # to_sparse would list every number first
    return met, grad[met]


@dataclass
class Part:
    """The share of one parameter, or of one stack of equal matrices, that this rank updates."""

    names: list[str]
    params: list[Tensor]
    rule: Rule
    spread: bool
    """True when each rank owns a slice; False when every rank repeats the same update."""
    state: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None

    @property
    def stacked(self) -> bool:
        return self.rule.kind == "muon"

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is remembered from step to step."""
        kinds = {"muon": ("momentum",), "adamw": ("first", "second"), "rows": ("second",)}
        return kinds[self.rule.kind]


class MuonAdamW:
    """
    The optimizer. `named_params` and `roles` come from the model, `table` from `rules`. With an
    `ema_decay`, a running average of the weights keeps that share of itself at every step.

    Per step: backward, then `reduce_gradients`, then `step` or `drop_gradients`.
    """

    def __init__(
        self,
        named_params: Mapping[str, Tensor],
        roles: Mapping[str, str],
        table: Mapping[str, Rule],
        machine: Machine,
        ema_decay: float = 0.0,
    ):
        self.machine, self.table, self.ema_decay = machine, table, ema_decay
        self.steps_taken = 0
        self.parts: list[Part] = []
        self.muon_kernel: Callable = muon_update
        self.adamw_kernel: Callable = adamw_update
        stacks: dict[tuple, Part] = {}
        for name, param in named_params.items():
            rule = table[roles[name]]
            if rule.kind == "muon":
                key = (roles[name], tuple(param.shape))
                part = stacks.setdefault(key, Part([], [], rule, machine.world_size > 1))
                part.names.append(name)
                part.params.append(param)
            else:
                rows = param.size(0) if param.ndim > 1 else 0
                few = rule.kind == "rows" and machine.device.type == "cpu"
                spread = machine.world_size > 1 and rows >= 1024 and not few
                self.parts.append(Part([name], [param], rule, spread))
        self.parts += stacks.values()
        for part in self.parts:
            local = self.local(part, self.whole(part, [p.detach() for p in part.params]))
            part.state = {k: torch.zeros_like(local, dtype=torch.float32) for k in part.kinds}
            if ema_decay:
                part.state["average"] = local.clone()

    # ---- who owns what -----------------------------------------------------------------------

    def whole(self, part: Part, tensors: list[Tensor]) -> Tensor:
        """All of a part as one tensor; its first dimension is padded to a multiple of ranks."""
        x = torch.stack(tensors) if part.stacked else tensors[0]
        missing = -x.size(0) % self.machine.world_size if part.spread else 0
        if missing:
            x = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return x

    def local(self, part: Part, whole: Tensor) -> Tensor:
        """This rank's slice of `whole(part, ...)`."""
        if not part.spread:
            return whole
        size = whole.size(0) // self.machine.world_size
        return whole[self.machine.rank * size : (self.machine.rank + 1) * size]

    def scatter_into(self, part: Part, whole: Tensor, targets: list[Tensor]) -> None:
        """Copy a whole part back into its parameters (or tensors shaped like them)."""
        pieces = whole[: len(targets)] if part.stacked else [whole[: targets[0].size(0)]]
        for target, piece in zip(targets, pieces, strict=True):
            target.copy_(piece)

    # ---- the step ----------------------------------------------------------------------------

    @torch.no_grad()
    def reduce_gradients(self) -> float:
        """
        Sum the gradients over the ranks, each rank keeping its slices; returns their global norm.

        All reductions are launched before the first is waited for. The parameters' own `.grad`
        are released.
        """
        waiting, sparse = [], []
        for part in self.parts:
            part.grad = self.whole(part, [self.gradient(p) for p in part.params])
            for p in part.params:
                p.grad = None
            if self.machine.world_size == 1:
                continue
            if part.spread:
                part.grad, work = reduce_scatter(part.grad, self.machine)
                waiting.append(work)
            elif part.rule.kind == "rows":
                sparse.append(part)
            else:
                waiting.append(dist.all_reduce(part.grad, async_op=True))
        with self.machine.waiting("the sum of gradients"):
            for work in waiting:
                work.wait()
            for part in sparse:
                part.grad = sum_rows(part.grad, self.machine)
            # on a GPU it is here that one waits: what is launched returns at once
            spread, common = self.squared_norm(spread=True), self.squared_norm(spread=False)
        return (self.machine.sum(spread)[0] + common) ** 0.5

    def gradient(self, p: Tensor) -> Tensor:
        """That of a parameter, zeros where it has none; of a sparse one, each row once."""
        if p.grad is None:
            return torch.zeros_like(p)
        return p.grad.coalesce() if p.grad.is_sparse else p.grad

    def squared_norm(self, spread: bool) -> float:
        """Sum of squares of this rank's reduced gradients, of the parts that are spread or not."""
        grads = [p.grad for p in self.parts if p.spread is spread and p.grad is not None]
        norms = [torch.linalg.vector_norm(values(g)) for g in grads]
        return float(torch.stack(norms).square().sum()) if grads else 0.0

    @torch.no_grad()
    def gradient_norms(self, group: Callable[[str], str]) -> dict[str, float]:
        """Norms of the reduced gradients, by the name that `group` gives a parameter's name."""
        names = [name for part in self.parts for name in part.names]
        squares = dict.fromkeys(sorted({group(name) for name in names}), 0.0)
        for part in self.parts:
            assert part.grad is not None, "gradient_norms without reduce_gradients"
            rows = part.grad.flatten(1) if part.stacked else values(part.grad).flatten()[None]
            first = self.machine.rank * len(rows) if part.spread and part.stacked else 0
            mine = part.spread or self.machine.is_main  # what all ranks hold counts once
            for name, square in zip(
                part.names[first:], rows.square().sum(1).tolist(), strict=False
            ):
                squares[group(name)] += square * mine
        summed = self.machine.sum(*squares.values())
        return {name: value**0.5 for name, value in zip(squares, summed, strict=True)}

    @torch.no_grad()
    def step(
        self,
        lr_factor: float,
        momentum: float = 0.95,
        decay_factor: float = 1.0,
        scale: float = 1.0,
        undo: bool = False,
    ) -> None:
        """
        Move the weights. Rates are the rules' peaks times `lr_factor`; `momentum` is Muon's;
        its decay is multiplied by `decay_factor`, the reduced gradients by `scale`. With `undo`
        weights and state end as they were.
        """
        self.steps_taken += 1
        waiting = []
        for part in self.parts:
            assert part.grad is not None, "step without reduce_gradients"
            if scale != 1.0:
                values(part.grad).mul_(scale)
            weight = self.local(part, self.whole(part, [p.detach() for p in part.params]))
            if part.spread:
                weight = weight.clone()
            with restored(weight, *part.state.values()) if undo else nullcontext():
                self.update(part, weight, lr_factor, momentum, decay_factor)
            part.grad = None
            if part.spread:
                waiting.append((part, *all_gather(weight, self.machine)))
            elif part.stacked:
                self.scatter_into(part, weight, part.params)
        for part, whole, work in waiting:
            with self.machine.waiting("the exchange of weights"):
                work.wait()
            self.scatter_into(part, whole, part.params)

    def kept_share(self) -> float:
        """What the average keeps of itself at this step: less at first, to forget the start."""
        return min(self.ema_decay, (1 + self.steps_taken) / (10 + self.steps_taken))

    def update(
        self, part: Part, weight: Tensor, lr_factor: float, momentum: float, decay_factor: float
    ) -> None:
        """Apply a part's rule to its slice, and average it. Rates travel as tensors: changing them
        recompiles nothing."""
        rule, grad = part.rule, part.grad

        def t(x: float) -> Tensor:
            return torch.tensor(x, dtype=torch.float32)

        if part.stacked:
            decay = rule.weight_decay * (decay_factor if rule.cautious else 1.0)
            self.muon_kernel(
                weight,
                grad,
                part.state["momentum"],
                t(rule.lr * lr_factor),
                t(momentum),
                t(decay),
                self.machine.dtype,
                rule.cautious,
            )
        elif rule.kind == "rows" and grad is not None:
            rows_update(
                weight,
                *rows_met(grad),
                part.state["second"],
                rule.lr * lr_factor,
                rule.betas[1],
                rule.weight_decay,
                self.steps_taken,
            )
        else:
            self.adamw_kernel(
                weight,
                grad,
                part.state["first"],
                part.state["second"],
                t(rule.lr * lr_factor),
                t(rule.betas[0]),
                t(rule.betas[1]),
                t(rule.weight_decay),
                t(float(self.steps_taken)),
            )
        if self.ema_decay:
            part.state["average"].lerp_(weight, 1 - self.kept_share())

    @torch.no_grad()
    def rehearse(self) -> None:
        """
        Reduce the gradients, take a step and undo it: what is compiled is compiled, and the device
        has held what a step holds.
        """
        steps_taken = self.steps_taken
        try:
            self.reduce_gradients()
            self.step(0.0, undo=True)
        finally:
            self.steps_taken = steps_taken

    @torch.no_grad()
    def take_average(self) -> bool:
        """Put the average of the weights in their place, where one is kept. Returns: is one?"""
        if not self.ema_decay:
            return False
        for part in self.parts:
            whole = part.state["average"]
            if part.spread:
                whole, work = all_gather(whole, self.machine)
                with self.machine.waiting("the gathering of averaged weights"):
                    work.wait()
            self.scatter_into(part, whole, part.params)
        return True

    def drop_gradients(self) -> None:
        """Forget all gradients, reduced or not: a step that must not reach the weights."""
        for part in self.parts:
            part.grad = None
            for p in part.params:
                p.grad = None

    def compile(self, **options: Any) -> None:
        """Fuse the update rules: one pass over weights and state."""
        self.muon_kernel = torch.compile(muon_update, dynamic=False, **options)
        self.adamw_kernel = torch.compile(adamw_update, dynamic=False, **options)

    # ---- state -------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """
        Whole state tensors by `<parameter>.<kind>`, on the CPU, on every rank that is main;
        other ranks take part in gathering and get an empty dict.
        """
        result: dict[str, Tensor] = {"steps_taken": torch.tensor(self.steps_taken)}
        for part in self.parts:
            for kind, value in part.state.items():
                if part.spread:
                    value, work = all_gather(value, self.machine)
                    with self.machine.waiting("the gathering of optimizer state"):
                        work.wait()
                        self.machine.synchronize()
                if not self.machine.is_main:
                    continue
                copies = [torch.empty(p.shape, dtype=torch.float32) for p in part.params]
                self.scatter_into(part, value.cpu(), copies)
                result |= {f"{n}.{kind}": c for n, c in zip(part.names, copies, strict=True)}
        return result if self.machine.is_main else {}

    def named_params(self) -> dict[str, Tensor]:
        """What this optimizer moves, by name."""
        return {n: p for part in self.parts for n, p in zip(part.names, part.params, strict=True)}

    def local_state(self) -> dict[str, Tensor]:
        """This rank's share of the state, named by the first parameter of each part."""
        return {
            f"{part.names[0]}.{kind}": value
            for part in self.parts
            for kind, value in part.state.items()
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """
        Take the state of a checkpoint written at any world size; every rank passes all of it.

        Raises ValueError naming what is missing or has another shape.
        """
        wanted = {f"{n}.{k}" for part in self.parts for n in part.names for k in part.state}
        if missing := sorted(wanted - set(tensors)):
            raise ValueError(f"optimizer state lacks {missing[0]} and {len(missing) - 1} more")
        for part in self.parts:
            for kind, value in part.state.items():
                pieces = [tensors[f"{n}.{kind}"].to(value) for n in part.names]
                for name, piece, p in zip(part.names, pieces, part.params, strict=True):
                    if piece.shape != p.shape:
                        raise ValueError(
                            f"optimizer state of {name} has shape {tuple(piece.shape)}, "
                            f"the model {tuple(p.shape)}"
                        )
                value.copy_(self.local(part, self.whole(part, pieces)))
        self.steps_taken = int(tensors["steps_taken"])


def state_bytes(params: Mapping[str, Tensor], roles: Mapping[str, str]) -> int:
    """Bytes of the optimizer state of all ranks together: one or two moments in fp32."""
    moments = {name: 1 if roles[name] in ("matrix", "bigram") else 2 for name in params}
    return sum(4 * p.numel() * moments[name] for name, p in params.items())


@contextmanager
def restored(*tensors: Tensor) -> Iterator[None]:
    """Give tensors their values back afterwards, from copies in the host's memory."""
    copies = [x.to("cpu", copy=True) for x in tensors]
    try:
        yield
    finally:
        for x, before in zip(tensors, copies, strict=True):
            x.copy_(before)


def reduce_scatter(whole: Tensor, machine: Machine) -> tuple[Tensor, Any]:
    """Start summing `whole` over the ranks; this rank's slice is valid after `.wait()`."""
    if machine.device.type == "cuda":
        mine = whole.new_empty(whole.size(0) // machine.world_size, *whole.shape[1:])
        return mine, dist.reduce_scatter_tensor(mine, whole, async_op=True)
    work = dist.all_reduce(whole, async_op=True)  # gloo adds all of it: simple, and enough on CPUs
    return whole.chunk(machine.world_size)[machine.rank], work


def sum_rows(grad: Tensor, machine: Machine) -> Tensor:
    """
    The sum of the ranks' gradients of one table (rows, N), of which each met few rows: only these
    travel. Sparse, every row once and in order, equal on all ranks.
    """
    rows, found = rows_met(grad)
    counts, work = all_gather(torch.tensor([len(rows)], device=rows.device), machine)
    work.wait()
    longest = int(counts.max())  # ranks send equally much: what is missing is row 0, plus nothing
    pad = longest - len(rows)
    rows, first = all_gather(F.pad(rows, (0, pad)), machine)
    found, second = all_gather(F.pad(found, (0, 0, 0, pad)), machine)
    first.wait()
    second.wait()
    summed = torch.sparse_coo_tensor(rows[None], found, grad.shape, check_invariants=False)
    return summed.coalesce()


def all_gather(mine: Tensor, machine: Machine) -> tuple[Tensor, Any]:
    """Start collecting the ranks' slices into one tensor, valid after `.wait()`."""
    whole = mine.new_empty(mine.size(0) * machine.world_size, *mine.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, mine.contiguous(), async_op=True)
