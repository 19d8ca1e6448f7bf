"""
Learning-rate schedules, update rules per parameter role, and Muon + AdamW sharded over ranks.

    (step, num_steps) -> lr_factor, muon_momentum, decay_factor
    OptimConfig -> make_rules -> role: Rule -> MuonAdamW: parameter groups, sharded or replicated

Master weights and optimizer state are float32. On a GPU, the plain model's matrices, token and
value embeddings are stored in the compute dtype (not in float16), which saves casts and halves the
weights sent between ranks.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from nanochat.distributed import DistContext
from nanochat.gpt import GPT

# ---- Learning-rate schedules: pure functions of (step, num_steps) --------------------------------
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
    left = (num_steps - step) / max(1.0, cfg.warmdown_ratio * num_steps)
    down = cfg.final_lr_frac + (1 - cfg.final_lr_frac) * left
    return min(up, down, 1.0)


def muon_momentum(step: int, num_steps: float) -> float:
    """Muon momentum: from 0.85 to 0.95 over 300 steps, or over a third of a shorter run."""
    ramp = max(1, min(300, num_steps // 3))
    return 0.85 + (0.95 - 0.85) * min(1.0, step / ramp)


def decay_factor(step: int, num_steps: float) -> float:
    """Linear decay of Muon's weight decay to 0 over the run (nanochat, 2026-01-10)."""
    return 1 - step / num_steps


# ---- Update rules by parameter role --------------------------------------------------------------

Tensors = Sequence[Tensor]
MOMENTS = {"muon": ("momentum",), "adamw": ("first", "second"), "rows": ("second",)}  # by rule kind
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
SCALAR_LR = 0.5  # peak learning rate of scalars at a batch of 524,288 tokens
TIED_LR = 0.05  # peak learning rate of a tied embedding and LM head at width 768
BUCKET_BYTES = 64 << 20  # matrices whose gradients are reduced together; small messages are slow
# Stored in the compute dtype by `round_weights`; gradients of embeddings are in that dtype too
ROUNDED_ROLES = ("embedding", "value_embedding", "matrix")
ROWS_FADE_EVERY = 16  # steps between decays of the whole embedding; updates touch only a few rows


LOGGED_ROLES = ("matrix", "embedding", "head")  # roles whose learning rates are logged


@dataclass(frozen=True)
class OptimConfig:
    embedding_lr: float = 0.3
    """Peak AdamW learning rate of the token embedding at width 768, scaled by width^-0.5. Value
    and hash-bigram embeddings use half."""
    unembedding_lr: float = 0.008
    """Peak AdamW learning rate of the LM head at width 768, scaled by width^-0.5."""
    weight_decay: float | None = None
    """Muon weight decay. Default: derived from the training horizon."""
    matrix_lr: float = 0.02
    """Peak Muon learning rate of the matrices inside the layers."""
    grad_clip: float = 0.0
    """Maximum global gradient norm; larger gradients are scaled down to it. 0 = no clipping."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 0 <= value < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {value}")


@dataclass(frozen=True)
class Rule:
    """Update rule of one parameter role. `lr` is the peak; Muon does not use `betas`."""

    kind: Literal["muon", "adamw", "rows"]
    lr: float
    betas: tuple[float, float] = (0.8, 0.95)
    weight_decay: float = 0.0
    cautious: bool = True
    """Muon only: decay only the weights that the update shrinks anyway."""


def make_rules(
    cfg: OptimConfig, d_model: int, lr_frac: float = 1.0, scalar_lr: float = SCALAR_LR
) -> dict[str, Rule]:
    """
    Update rule for each role, with learning rates multiplied by `lr_frac`.

    Source of the values: nanochat's tuning log, 2026-03 (d12 on 8xH100).
    """
    width = (d_model / 768) ** -0.5
    embedding_lr, head_lr = cfg.embedding_lr * width, cfg.unembedding_lr * width
    found = {
        "matrix": Rule("muon", cfg.matrix_lr, weight_decay=cfg.weight_decay or 0.0),
        "embedding": Rule("adamw", embedding_lr, (0.8, 0.995), 0.001),
        "bigram": Rule("rows", embedding_lr / 2, (0.0, 0.995), 0.01),
        "value_embedding": Rule("adamw", embedding_lr / 2, (0.8, 0.995), 0.01),
        "head": Rule("adamw", head_lr, (0.8, 0.96), 0.01),
        "tied": Rule("adamw", TIED_LR * width, (0.8, 0.95), 0.01),
        "residual": Rule("adamw", scalar_lr / 100, (0.8, 0.95)),
        "skip": Rule("adamw", scalar_lr, (0.96, 0.95)),
        "gate": Rule("adamw", head_lr, (0.8, 0.95)),
        "gain": Rule("adamw", scalar_lr / 25, (0.8, 0.95)),
    }
    return {role: replace(rule, lr=rule.lr * lr_frac) for role, rule in found.items()}


def orthogonalize(g: Tensor) -> Tensor:
    """
    Keep the singular vectors of `g` and push every singular value toward 1.

    g: (..., M, N), float. Returns the same shape and dtype.
    Source: Jordan et al., "Muon", 2024, https://kellerjordan.github.io/posts/muon/
    """
    a, b, c = NEWTON_SCHULZ
    tall = g.size(-2) > g.size(-1)
    x = g.mT if tall else g  # (..., S, L), short side first
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # largest singular value <= 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT  # (..., S, S)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Guard(NamedTuple):
    """Verdict on a step, as scalars on the device."""

    good: Tensor
    """Whether to update; otherwise the update changes nothing."""
    scale: Tensor
    """Factor on the reduced gradients."""


def apply_guard(guard: Guard, grad: Tensor, *factors: Tensor) -> tuple[Tensor, ...]:
    """
    Multiply a gradient by `guard.scale`. If `guard.good` is false, return zeros for gradient and
    factors, so that the update changes neither weights nor moments, without a branch on the device.
    """
    scaled = torch.where(guard.good, grad * guard.scale.to(grad.dtype), 0.0)
    return scaled, *(factor * guard.good for factor in factors)


def muon_update(
    weight: Tensor,
    grad: Tensor,
    state: Tensors,
    scalars: Tensors,
    dtype: Any,
    cautious: bool,
    guard: Guard,
) -> None:
    """
    In-place Muon step on stacks (K, M, N); `dtype` is that of the Newton-Schulz matmuls.

    state: momentum. scalars: learning rate, beta, weight decay. The orthogonalized Nesterov
    momentum is scaled by sqrt(max(1, M/N)). `cautious` decay shrinks only weights that the update
    shrinks anyway (arXiv:2411.16085); otherwise decay is decoupled (arXiv:1711.05101).
    """
    (momentum,), (lr, beta, decay) = state, scalars
    grad, lr, fresh = apply_guard(guard, grad, lr, 1 - beta)
    momentum.lerp_(grad, fresh)
    direction = orthogonalize(grad.lerp(momentum, beta).to(dtype)).to(weight.dtype)
    direction = direction * max(1.0, weight.size(-2) / weight.size(-1)) ** 0.5
    shrunk = weight * ((direction * weight) > 0) if cautious else weight
    weight.sub_(lr * direction + lr * decay * shrunk)


def adamw_update(
    weight: Tensor, grad: Tensor, state: Tensors, scalars: Tensors, guard: Guard
) -> None:
    """
    In-place AdamW step (arXiv:1711.05101), any shape.

    state: first and second moment. scalars: learning rate, betas, weight decay, step (from 1).
    """
    (first, second), (lr, beta1, beta2, decay, step) = state, scalars
    grad, lr, fresh1, fresh2 = apply_guard(guard, grad.float(), lr, 1 - beta1, 1 - beta2)
    first.lerp_(grad, fresh1)
    second.lerp_(grad * grad, fresh2)
    scale = (1 - beta2**step).sqrt() / (1 - beta1**step)
    weight.mul_(1 - lr * decay)
    weight.sub_(lr * scale * first / (second.sqrt() + 1e-10))


def sparse_adam_update(
    weight: Tensor, rows: Tensor, grad: Tensor, second: Tensor, rule: Rule, lr: float, step: int
) -> None:
    """
    In-place AdamW step without first moment, for an embedding when a batch touches few rows:
    `rows` (R,) with gradients `grad` (R, N). Decay of weights and second moments, which affects all
    rows, is applied every ROWS_FADE_EVERY steps. `step` counts from 1.
    """
    beta2, n = rule.betas[1], ROWS_FADE_EVERY
    if step % n == 0:
        weight.mul_(1 - lr * rule.weight_decay * n)
        second.mul_(beta2**n)
    moment = second[rows] + (1 - beta2) * grad * grad
    second[rows] = moment
    weight[rows] -= lr * (1 - beta2**step) ** 0.5 * grad / (moment.sqrt() + 1e-10)


# ---- Optimizer: parameter groups, sharded over ranks ---------------------------------------------


def grad_entries(grad: Tensor) -> Tensor:
    """Entries of a gradient; only the stored ones if it is sparse."""
    return grad.values() if grad.is_sparse else grad


def touched_rows(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Indices (R,) and gradients (R, N) of the rows with a nonzero gradient."""
    if grad.is_sparse:
        return grad.indices()[0], grad.values()
    rows = grad.any(dim=1).nonzero()[:, 0]  # to_sparse would index individual entries
    return rows, grad[rows]


@dataclass
class ParamGroup:
    """A parameter, or a stack of matrices of equal shape, and this rank's optimizer state."""

    names: list[str]
    params: list[Tensor]
    rule: Rule
    machine: DistContext
    sharded: bool
    """Whether each rank owns a slice; if not, all ranks apply the same update."""
    state: dict[str, Tensor] = field(default_factory=dict)
    grad: Tensor | None = None
    sums: list[Tensor | None] = field(default_factory=list)
    """If the parameters are rounded matrices: their gradients, accumulated in float32."""
    unfinished: int = 0
    """Number of gradients that the last backward pass has not completed."""

    @property
    def stacked(self) -> bool:
        return self.rule.kind == "muon"

    def stack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the group as one tensor, padded to equal slices if sharded."""
        x = torch.stack(list(tensors)) if self.stacked else tensors[0]
        missing = -x.size(0) % self.machine.world_size if self.sharded else 0
        return torch.cat((x, x.new_zeros(missing, *x.shape[1:]))) if missing else x

    def local_shard(self, tensors: Sequence[Tensor]) -> Tensor:
        """This rank's slice of the `stack` of tensors."""
        whole, machine = self.stack(tensors), self.machine
        return whole.chunk(machine.world_size)[machine.rank] if self.sharded else whole

    def weight(self) -> Tensor:
        """This rank's slice of the parameters, or of their float32 master weights."""
        master = self.state.get("master")
        return self.local_shard([p.detach() for p in self.params]) if master is None else master

    def unstack(self, whole: Tensor) -> Sequence[Tensor]:
        """Views of the parameters in their `stack`."""
        n = len(self.params)
        return whole[:n].unbind() if self.stacked else [whole[: self.params[0].size(0)]]

    def free_gradients(self) -> None:
        """Discard the parameters' gradients, but not `grad`."""
        self.sums = [None] * len(self.sums)
        for param in self.params:
            param.grad = None

    def assign(self, whole: Tensor) -> None:
        """Copy a stack into the parameters."""
        for param, piece in zip(self.params, self.unstack(whole), strict=True):
            param.copy_(piece)


class MuonAdamW:
    """
    Optimizer of a model's parameters; `table` maps roles to rules, see `make_rules`.

    Per step: `expect_last_pass`, the last backward pass, then `reduce_gradients`, then `step` or
    `drop_gradients`. On a GPU, only the update of hash-bigram embeddings waits for the device.
    """

    def __init__(self, model: GPT, table: Mapping[str, Rule], machine: DistContext):
        self.machine, self.steps_taken = machine, 0
        self.peak_lrs = {f"{role}_lr": table[role].lr for role in LOGGED_ROLES if role in table}
        self.muon_kernel: Callable = muon_update
        self.adamw_kernel: Callable = adamw_update
        groups, roles = dict[Any, ParamGroup](), model.param_roles()
        counts, many = Counter[Any](), machine.world_size > 1
        if model.bigrams is not None:
            model.bigrams.sparse = machine.device.type == "cpu"
        for name, param in model.named_parameters():
            rule = table[roles[name]]
            small = param.ndim < 2 or param.size(0) < 1024
            whole = small or (rule.kind == "rows" and machine.device.type == "cpu")
            sharded = many and (rule.kind == "muon" or not whole)
            key: Any = name
            if rule.kind == "muon":
                kind, each = (roles[name], tuple(param.shape)), 4 * param.numel()
                bucket = -(-BUCKET_BYTES // (each * machine.world_size)) * machine.world_size
                key = (*kind, counts[kind] // bucket if many else 0)
                counts[kind] += 1
            group = groups.setdefault(key, ParamGroup([], [], rule, machine, sharded))
            group.names.append(name)
            group.params.append(param)
        self.groups = sorted(groups.values(), key=lambda group: group.stacked)
        for group in self.groups:
            weight = group.weight()
            for kind in MOMENTS[group.rule.kind]:
                group.state[kind] = torch.zeros_like(weight, dtype=torch.float32)
        self.in_backward_order = sorted(self.groups, key=backward_position)
        self.to_reduce, self.reductions = list[ParamGroup](), list[Any]()
        for group in self.groups if many else ():
            self.register_hooks(group)

    def register_hooks(self, group: ParamGroup) -> None:
        """Call `finish_gradient` for each gradient of the group that a backward pass completes."""
        for i, param in enumerate(group.params):
            hook = partial(self.finish_gradient, group, i)
            param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def round_weights(self, model: GPT, dtype: torch.dtype) -> None:
        """
        Store the model's matrices, token and value embeddings in `dtype`, and this rank's slices of
        them in float32 as master weights, which only updates and checkpoints use; nothing in
        float16. The forward pass rounds to `dtype` anyway, except in fp8. Gradients of matrices
        still accumulate in float32.
        """
        roles = model.param_roles()
        for group in self.groups:
            wide = dtype in (torch.float32, torch.float16)  # float16 gradients would underflow
            rounded = roles[group.names[0]] in ROUNDED_ROLES and not wide
            if rounded and "master" not in group.state:
                group.state["master"] = group.weight().clone()
                for param in group.params:
                    param.data = param.data.to(dtype)
                if group.stacked:
                    group.sums = [None] * len(group.params)
                    if self.machine.world_size == 1:
                        self.register_hooks(group)

    def grad_bytes(self) -> int:
        """Bytes of all gradients before they are reduced."""
        return sum(
            p.numel() * (4 if group.sums else p.element_size())
            for group in self.groups
            for p in group.params
        )

    # ---- the step ----------------------------------------------------------------------------

    def expect_last_pass(self) -> None:
        """
        In the next backward pass, start each reduction once its gradients are complete. All ranks
        start reductions in the same order.
        """
        self.to_reduce = list(self.in_backward_order)
        for group in self.groups:
            group.unfinished = len(group.params)

    def finish_gradient(self, group: ParamGroup, i: int, param: Tensor) -> None:
        """Hook: a backward pass has completed the gradient of parameter `i` of the group."""
        if group.sums and param.grad is not None:
            total = group.sums[i]
            group.sums[i] = param.grad.float() if total is None else total.add_(param.grad)
            param.grad = None
        group.unfinished -= 1
        while self.to_reduce and self.to_reduce[0].unfinished <= 0:
            self.start_reduction(self.to_reduce.pop(0))

    @torch.no_grad()
    def start_reduction(self, group: ParamGroup) -> None:
        """Stack and free the gradients of a group, and start to sum them over ranks."""
        grads = group.sums or [p.grad for p in group.params]
        dtype = torch.float32 if group.sums else None
        filled = [
            torch.zeros_like(p, dtype=dtype) if g is None else g.coalesce() if g.is_sparse else g
            for p, g in zip(group.params, grads, strict=True)
        ]
        group.grad = group.stack(filled)
        group.free_gradients()
        if group.sharded:
            group.grad, work = reduce_scatter(group.grad, self.machine)
            self.reductions.append(work)
        elif self.machine.world_size > 1 and group.rule.kind != "rows":
            self.reductions.append(dist.all_reduce(group.grad, async_op=True))

    @torch.no_grad()
    def reduce_gradients(self) -> Tensor:
        """
        Sum the gradients over ranks; each rank keeps its slices. Returns the global gradient norm,
        a scalar on the device.

        Starts the reductions that the last pass has not, then waits for all. Frees the parameters'
        `.grad`.
        """
        for group in self.in_backward_order:
            if group.grad is None:
                self.start_reduction(group)
        with self.machine.waiting("gradient reduction"):
            for work in self.reductions:
                work.wait()
            for group in self.in_backward_order if self.machine.world_size > 1 else ():
                if group.rule.kind == "rows" and not group.sharded and group.grad is not None:
                    group.grad = sum_rows(group.grad, self.machine)
        self.to_reduce, self.reductions = [], []
        mine, common = self.squared_norm(sharded=True), self.squared_norm(sharded=False)
        return (self.machine.sum_on_device(mine)[0] + common).sqrt()

    def squared_norm(self, sharded: bool) -> Tensor | float:
        """Sum of squares of this rank's reduced gradients, in sharded or replicated groups."""
        grads = [g.grad for g in self.groups if g.sharded is sharded and g.grad is not None]
        norms = [
            torch.linalg.vector_norm(grad_entries(grad), dtype=torch.float32) for grad in grads
        ]
        return torch.stack(norms).square().sum() if grads else 0.0

    @torch.no_grad()
    def step(
        self,
        lr_factor: float,
        momentum: float = 0.95,
        decay_factor: float = 1.0,
        scale: Tensor | float = 1.0,
        good: Tensor | bool = True,
    ) -> None:
        """
        Update the weights. `lr_factor` multiplies the peak learning rates, `decay_factor` Muon's
        cautious weight decay, `scale` the reduced gradients; `momentum` is Muon's. Unless `good`,
        weights and state keep their values, and the caller takes 1 from `steps_taken` once it has
        read `good`.
        """
        self.steps_taken += 1
        guard = Guard(
            self.on_device(good, torch.bool), self.on_device(scale, self.machine.widest_dtype)
        )
        launched = []
        for group in self.groups:
            assert group.grad is not None, "step without reduce_gradients"
            weight, has_master = group.weight(), "master" in group.state
            self.update(group, weight, guard, lr_factor, momentum, decay_factor)
            group.grad = None
            weight = weight.to(group.params[0].dtype)
            if group.sharded:
                launched.append((group, *all_gather(weight, self.machine)))
            elif group.stacked or has_master:
                group.assign(weight)
        for group, whole, work in launched:
            with self.machine.waiting("weight all-gather"):
                work.wait()
            group.assign(whole)

    def on_device(self, x: Tensor | float, dtype: torch.dtype) -> Tensor:
        """
        A scalar on the device; always of one dtype, so that kernels are compiled once. A number is
        filled in there, because a copy would wait for the device.
        """
        if isinstance(x, Tensor):
            return x.to(dtype)
        return torch.full((), x, dtype=dtype, device=self.machine.device)

    def update(
        self,
        group: ParamGroup,
        weight: Tensor,
        guard: Guard,
        lr_factor: float,
        momentum: float,
        decay_factor: float,
    ) -> None:
        """Apply the group's rule to this rank's slice of the weights; factors as in `step`."""
        rule, grad, lr, step = group.rule, group.grad, group.rule.lr * lr_factor, self.steps_taken
        state = [group.state[kind] for kind in MOMENTS[rule.kind]]
        if rule.kind == "muon":
            decay = rule.weight_decay * (decay_factor if rule.cautious else 1.0)
            scalars = as_tensors(lr, momentum, decay)
            dtype, cautious = self.machine.dtype, rule.cautious
            if dtype == torch.float16:  # entries of a gradient can be below its range
                dtype = torch.float32
            self.muon_kernel(weight, grad, state, scalars, dtype, cautious, guard)
        elif rule.kind == "rows" and grad is not None:
            with self.machine.waiting("device synchronization"):
                good = bool(guard.good)  # finding the touched rows waits for the device anyway
            if not good:
                return
            grad_entries(grad).mul_(guard.scale)
            sparse_adam_update(weight, *touched_rows(grad), group.state["second"], rule, lr, step)
        else:
            scalars = as_tensors(lr, *rule.betas, rule.weight_decay, step)
            self.adamw_kernel(weight, grad, state, scalars, guard)

    @torch.no_grad()
    def rehearse(self) -> None:
        """
        Reduce the gradients and take a step that changes nothing, to compile the kernels and reach
        the peak memory of a step.
        """
        steps_taken = self.steps_taken
        try:
            self.reduce_gradients()
            self.step(0.0, good=False)
        finally:
            self.steps_taken = steps_taken

    def take_average(self) -> bool:
        """Replace the weights with their average, if any. Returns whether there is one."""
        return False

    def drop_gradients(self) -> None:
        """Discard all gradients, reduced or not, so that they never reach the weights."""
        for group in self.groups:
            group.grad = None
            group.free_gradients()
        for reduction in self.reductions:  # NCCL keeps its inputs until then
            reduction.wait()
        self.to_reduce, self.reductions = [], []

    def compile(self) -> None:
        """Compile the update rules into one pass over weights and state."""
        self.muon_kernel = torch.compile(muon_update, dynamic=False)
        self.adamw_kernel = torch.compile(adamw_update, dynamic=False)

    # ---- state -------------------------------------------------------------------------------

    @torch.no_grad()
    def state_dict(
        self, keep: Callable[[str, Tensor], Tensor] = lambda name, x: x, master: bool = False
    ) -> dict[str, Tensor]:
        """
        Full state tensors on the main rank, keyed by `<parameter>.<kind>`. All ranks gather one
        group at a time, so all must call this; the others get no tensors.

        keep: (key, tensor) -> tensor to return, such as a copy on the CPU. Default: the tensor
        itself, which may share memory with the state. master: instead, the master weights of
        rounded parameters by name.
        """
        result: dict[str, Tensor] = {}
        for group in self.groups:
            for kind in [kind for kind in group.state if (kind == "master") is master]:
                whole = group.state[kind]
                if group.sharded:
                    with self.machine.waiting(f"optimizer state gather ({kind})"):
                        whole = gather(whole, self.machine)
                if self.machine.is_main:
                    keys = [name if master else f"{name}.{kind}" for name in group.names]
                    result |= zip(keys, map(keep, keys, group.unstack(whole)), strict=True)
        if result and not master:
            result["steps_taken"] = torch.tensor(self.steps_taken)
        return result

    def local_state(self) -> dict[str, Tensor]:
        """This rank's shards of the state, keyed by the first parameter of each group."""
        return {f"{g.names[0]}.{kind}": x for g in self.groups for kind, x in g.state.items()}

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """
        Load checkpoint state saved with any world size; every rank passes the full state.

        Raises KeyError for a missing tensor, ValueError for a wrong shape.
        """
        for group in self.groups:
            assert "master" not in group.state, "load the state before round_weights"
            for kind, value in group.state.items():
                pieces = [tensors[f"{name}.{kind}"].to(value) for name in group.names]
                shape, wanted = tuple(pieces[0].shape), tuple(group.params[0].shape)
                if shape != wanted:
                    name = group.names[0]
                    raise ValueError(f"optimizer state of {name} has shape {shape}, not {wanted}")
                value.copy_(group.local_shard(pieces))
        self.steps_taken = int(tensors["steps_taken"])


def backward_position(group: ParamGroup) -> tuple[int, str]:
    """Sorts groups by the order in which a backward pass completes their gradients."""
    name = group.names[0]
    layers = [int(part) for part in name.split(".") if part.isdigit()]
    return -min(layers, default=1 << 20 if name.startswith("head") else -1), name


def state_bytes(model: GPT) -> int:
    """Bytes of the optimizer state over all ranks: one or two float32 moments."""
    roles, one = model.param_roles(), ("matrix", "bigram")
    params = model.named_parameters()
    return sum(4 * p.numel() * (1 if roles[name] in one else 2) for name, p in params)


def as_tensors(*numbers: float) -> list[Tensor]:
    """Scalars as tensors: changing them does not recompile a compiled function."""
    return [torch.tensor(x, dtype=torch.float32) for x in numbers]


def reduce_scatter(whole: Tensor, machine: DistContext) -> tuple[Tensor, Any]:
    """Start summing `whole` over ranks; the slice of this rank is valid after `.wait()`."""
    if machine.device.type == "cuda":
        mine = whole.new_empty(whole.size(0) // machine.world_size, *whole.shape[1:])
        return mine, dist.reduce_scatter_tensor(mine, whole, async_op=True)
    work = dist.all_reduce(whole, async_op=True)  # gloo: sums everything, which is fine on CPUs
    return whole.chunk(machine.world_size)[machine.rank], work


def sum_rows(grad: Tensor, machine: DistContext) -> Tensor:
    """
    Sum the ranks' gradients (rows, N) of an embedding, exchanging only the few touched rows.
    Returns a coalesced sparse tensor, equal on all ranks.
    """
    rows, found = touched_rows(grad)
    longest = int(gather(torch.tensor([len(rows)], device=rows.device), machine).max())
    pad = longest - len(rows)  # equal sizes on all ranks: pad with zero gradients of row 0
    rows = gather(F.pad(rows, (0, pad)), machine)
    found = gather(F.pad(found, (0, 0, 0, pad)), machine)
    summed = torch.sparse_coo_tensor(rows[None], found, grad.shape, check_invariants=False)
    return summed.coalesce()


def all_gather(mine: Tensor, machine: DistContext) -> tuple[Tensor, Any]:
    """Start collecting the ranks' slices into one tensor, valid after `.wait()`."""
    whole = mine.new_empty(mine.size(0) * machine.world_size, *mine.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, mine.contiguous(), async_op=True)


def gather(mine: Tensor, machine: DistContext) -> Tensor:
    """Collect the ranks' slices into one tensor."""
    whole, work = all_gather(mine, machine)
    work.wait()
    return whole
