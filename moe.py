"""The mixture-of-experts layer: who is called, how evenly, and what the called ones compute.

Routing is fp32 from fp32 weights, whatever the precision of the rest (unless router_precision asks to see what
happens otherwise); counters are int64 and the balancing bias is fp32, and a module-wide cast reaches none of
them. To try another router, change Router.choose (which experts) or Router.scores (their weights); the rest of the
trainer only sees experts_TK and weights_TK.

Shapes: T tokens on this rank, D model width, E experts (all), L experts on this rank, K experts per token,
F expert width, B sequences, Q rows received, R rows in expert-major order.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import nn

from dispatch import Plan, by_expert, by_source, combine, dispatch, sharing
from kernels import grouped_gemm, linear, swiglu
from memory import part
from parallel import Exchange, Layout, Loss, column_linear, row_linear, to_device, zigzag
from settings import knob


@dataclass
class MoEConfig:
    num_experts: int = knob(8, "routed experts per MoE layer", least=1)
    top_k: int = knob(2, "experts per token", least=1)
    d_expert: int = knob(512, "width of a routed expert", least=1)
    n_shared_experts: int = knob(0, "experts every token visits, each d_expert wide", least=0)
    score_fn: str = knob("softmax", "how logits become scores", choices=("softmax", "sigmoid"))
    norm_topk: bool = knob(True, "renormalize the router weights over a token's top_k")
    route_scale: float = knob(1.0, "factor on the router weights")
    n_groups: int = knob(1, "groups of experts a token chooses from first", least=1)
    topk_groups: int = knob(1, "groups it keeps, by the sum of their two best scores", least=1)
    aux_loss_coef: float = knob(0.01, "weight of the load-balancing loss; 0: off", least=0)
    aux_loss_scope: str = knob("batch", "tokens it balances over: one microbatch, each sequence, or the global "
                               "batch so far", choices=("batch", "sequence", "global"))
    z_loss_coef: float = knob(0.0, "weight of the loss on the size of router logits; 0: off", least=0)
    bias_update_rate: float = knob(0.0, "step of the bias that balances without a loss; 0: off", least=0)
    router_precision: str = knob("fp32", "of the router's logits; bf16 is there to see what it does to the loss",
                                 choices=("fp32", "bf16"))
    force_balance: bool = knob(False, "route round-robin, whatever the router says: for benchmarks only")


def check(cfg):
    problems = []
    if cfg.d_expert % cfg.etp:
        problems.append(f"etp={cfg.etp} does not divide d_expert={cfg.d_expert}: change etp or d_expert")
    if cfg.top_k > cfg.num_experts:
        problems.append(f"top_k={cfg.top_k} is more than num_experts={cfg.num_experts}: lower top_k")
    if cfg.top_k == 1 and cfg.norm_topk:
        problems.append("norm_topk=true with top_k=1 makes every router weight 1, so the router never learns: "
                        "set norm_topk=false")
    if cfg.num_experts % cfg.n_groups:
        problems.append(f"n_groups={cfg.n_groups} does not divide num_experts={cfg.num_experts}")
    elif cfg.n_groups > 1:
        if cfg.topk_groups > cfg.n_groups:
            problems.append(f"topk_groups={cfg.topk_groups} is more than n_groups={cfg.n_groups}")
        if cfg.num_experts // cfg.n_groups < 2:
            problems.append(f"n_groups={cfg.n_groups} leaves {cfg.num_experts // cfg.n_groups} expert per group, "
                            f"but a group is scored by its best two: lower n_groups")
        if cfg.top_k > cfg.topk_groups * (cfg.num_experts // cfg.n_groups):
            problems.append(f"top_k={cfg.top_k} is more than the experts in topk_groups={cfg.topk_groups} groups of "
                            f"{cfg.num_experts // cfg.n_groups}: raise topk_groups")
    elif cfg.topk_groups != 1:
        problems.append(f"topk_groups={cfg.topk_groups} needs n_groups > 1")
    if cfg.force_balance and cfg.bias_update_rate:
        problems.append("force_balance=true ignores the bias: set bias_update_rate=0")
    return problems


@dataclass
class Batch:
    """One microbatch of whole sequences, cut to what this rank sees of it: the blocks work on T tokens, of which
    the ranks of a tensor-parallel group together hold G, a context-parallel rank's part of every sequence.

    tokens_BS    token ids, -1 for padding: embedded, but never routed, counted or given a slot
    labels_BS    next tokens, -100: no loss (None: logits are wanted, of position `last` alone)
    capacity     slots per expert; 0: dropless, as evaluation and sampling always are
    n_mtp        how many tokens beyond the next one are to be predicted too
    loss_scale   weight of the sum of cross entropy in the objective
    aux_scale    1 / (microbatches · dp), so that the objective is the mean over both
    z_scale      1 / counted tokens of the global batch

    Made of these: positions_S in the sequence, shape (B, S) with G = B·S, tokens_G, labels_G, and of this rank
    alone tokens_T, labels_T, counted_T and sequence_T, the sequence each token belongs to. ahead: with n_mtp, the
    same positions as the next module for multi-token prediction sees them (else None).
    """
    layout: Layout
    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor | None
    capacity: int = 0
    n_mtp: int = 0
    loss_scale: torch.Tensor | float = 1.0
    aux_scale: float = 0.0
    z_scale: torch.Tensor | float = 0.0
    last: int = -1

    def __post_init__(self):
        cp, tp, device = self.layout.cp, self.layout.tp, self.layout.device
        tokens_BS, labels_BS = self.tokens_BS, self.labels_BS
        positions_S = zigzag(tokens_BS.shape[1], cp.rank, cp.size)
        if labels_BS is not None:
            labels_BS = torch.where(tokens_BS >= 0, labels_BS, -100)
        # cut before it moves to the device: labels were shifted on the whole sequence, so none is lost at an edge
        tokens_G, labels_G, positions_S = (None if t is None else to_device(t, device) for t in (
            tokens_BS[:, positions_S].flatten(), labels_BS if labels_BS is None else labels_BS[:, positions_S].flatten(),
            positions_S))
        self.tokens_G, self.labels_G, self.positions_S = tokens_G, labels_G, positions_S
        self.shape = B, S = len(tokens_BS), len(positions_S)
        own = slice(B * S // tp.size * tp.rank, B * S // tp.size * (tp.rank + 1))
        self.tokens_T, self.labels_T = tokens_G[own], labels_G if labels_G is None else labels_G[own]
        self.counted_T = self.tokens_T >= 0
        self.sequence_T = torch.arange(B * S, device=device)[own] // S
        self.train = self.aux_scale > 0
        self.ahead = self._shifted() if self.n_mtp else None

    def _shifted(self):
        """One token further on in each sequence: at each position the token after, and the label after its label.
        Where that is padding, or beyond the end, the position is padding too. Whole sequences are shifted, before
        they are cut, so no label is lost at an edge."""
        further = lambda x_BS, fill: nn.functional.pad(x_BS[:, 1:], (0, 1), value=fill)
        tokens_BS = torch.where(self.tokens_BS >= 0, further(self.tokens_BS, -1), -1)
        labels_BS = further(self.labels_BS, -100)
        return dataclasses.replace(self, tokens_BS=tokens_BS, labels_BS=labels_BS, n_mtp=self.n_mtp - 1)

    def take(self, other):
        """Becomes another microbatch of the same shape, in place."""
        for name in ("tokens_G", "labels_G", "counted_T"):      # tokens_T and labels_T are parts of these
            getattr(self, name).copy_(getattr(other, name))
        if self.ahead is not None:
            self.ahead.take(other.ahead)


class Router(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.d_model, dtype=torch.float32))
        self.register_buffer("bias_E", torch.zeros(cfg.num_experts, dtype=torch.float32))

    def _apply(self, fn, recurse=True):
        """Moves to another device reach the router; casts do not."""
        def move(t):
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)
        return super()._apply(move, recurse)

    def scores(self, logits_TE):
        return logits_TE.softmax(1) if self.cfg.score_fn == "softmax" else logits_TE.sigmoid()

    def choose(self, scores_TE):
        """The top_k experts of every token by score plus bias, best first: [T, K]. No gradient.
        A stable sort, not topk: equal scores must be broken the same way everywhere."""
        cfg, choice_TE = self.cfg, scores_TE + self.bias_E
        if cfg.n_groups > 1:
            # DeepSeek-V3's group-limited routing, as in its own inference code: masked with -inf
            groups_TGe = choice_TE.unflatten(1, (cfg.n_groups, -1))
            best_TG = groups_TGe.topk(2, 2).values.sum(2)
            keep = best_TG.sort(dim=1, descending=True, stable=True).indices[:, :cfg.topk_groups]
            dropped_TG = torch.ones_like(best_TG, dtype=torch.bool).scatter_(1, keep, False)
            choice_TE = groups_TGe.masked_fill(dropped_TG[:, :, None], -torch.inf).flatten(1)
        return choice_TE.sort(dim=1, descending=True, stable=True).indices[:, :cfg.top_k]

    def forward(self, x_TD, counted_T, experts_TK=None):
        """→ experts_TK (-1: not routed), weights_TK, scores_TE, logits_TE. Pass experts_TK to keep an
        earlier choice: a recompute must not route again, or rounding could break a tie the other way."""
        cfg = self.cfg
        weight = self.weight.bfloat16() if cfg.router_precision == "bf16" else self.weight
        logits_TE = linear(x_TD, weight).float()    # in the weight's precision
        scores_TE = self.scores(logits_TE)
        if experts_TK is None:
            if cfg.force_balance:
                position = torch.arange(len(x_TD) * cfg.top_k, device=x_TD.device)
                experts_TK = (position % cfg.num_experts).view(-1, cfg.top_k)
            else:
                experts_TK = self.choose(scores_TE.detach())
            experts_TK = torch.where(counted_T[:, None], experts_TK, -1)
        weights_TK = scores_TE.gather(1, experts_TK.clamp_min(0))
        if cfg.norm_topk:
            weights_TK = weights_TK / (weights_TK.sum(1, keepdim=True) + 1e-20)
        return experts_TK, weights_TK * cfg.route_scale, scores_TE, logits_TE

    @torch.no_grad()
    def update_bias(self, counts_E, skip):
        """Auxiliary-loss-free balancing (arXiv:2408.15664): once a step, from the global batch's counts,
        each expert's bias moves by a fixed step towards the mean load. Nothing happens where `skip`."""
        step = self.cfg.bias_update_rate * torch.sign(counts_E.mean() - counts_E).float()
        self.bias_E += torch.where(skip, 0, step)


class ExpertStats:
    """What one MoE layer saw in this step on this rank. Filled by the driver on a step's first pass alone;
    read and cleared by the training loop."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts_E = self.kept_E = self.aux = self.z = 0
        self.so_far = 0     # tokens and choices of the global batch so far, for aux_loss_scope="global"

    def add(self, plan, aux, z):
        self.counts_E = self.counts_E + plan.counts_E
        self.kept_E = self.kept_E + plan.kept_E
        self.aux, self.z = self.aux + aux, self.z + z
        self.so_far = plan.load


class Experts(nn.Module):
    """This rank's routed experts, or its slice of them along F: w1 [L, 2, F, D] (gate, up), w2 [L, D, F]."""

    def __init__(self, cfg, layout, recipe=None):
        super().__init__()
        L, F, self.cfg = cfg.num_experts // layout.ep.size, cfg.d_expert // layout.etp.size, cfg
        self.recipe = recipe
        self.first = L * layout.ep.rank
        self.w1 = nn.Parameter(torch.empty(L, 2, F, cfg.d_model))
        self.w2 = nn.Parameter(torch.empty(L, cfg.d_model, F))

    def forward(self, rows_QD, weights_Q, plan):
        """y = w2 · (p · silu(gate) · up): the router weight p multiplies the hidden activation, so that
        backward needs no expert output. The first product gathers its rows itself."""
        y_RF = part(self.cfg, "moe", self.hidden, rows_QD, weights_Q, plan)
        return by_source(grouped_gemm(y_RF, self.w2, plan.groups, recipe=self.recipe), plan)

    def hidden(self, rows_QD, weights_Q, plan):
        p_R = by_expert(weights_Q, plan)
        h_R2F = grouped_gemm(rows_QD, self.w1, plan.groups, *plan.expert_rows(), recipe=self.recipe)
        return part(self.cfg, "moe_act", swiglu, h_R2F, p_R)


class FeedForward(nn.Module):
    """SwiGLU, cut along F over `group`: w1 [2, F, D] (gate, up), w2 [D, F]. name: of its part in the block."""

    def __init__(self, cfg, d_ff, group, name, recipe=None):
        super().__init__()
        self.cfg, self.name, self.group, self.recipe, F = cfg, name, group, recipe, d_ff // group.size
        self.w1 = nn.Parameter(torch.empty(2, F, cfg.d_model))
        self.w2 = nn.Parameter(torch.empty(cfg.d_model, F))

    def forward(self, x_TD):
        return row_linear(part(self.cfg, self.name, self.hidden, x_TD), self.w2, self.group, self.recipe)

    def hidden(self, x_TD):
        h_G2F, = column_linear(x_TD, [self.w1], self.group, self.recipe)
        return swiglu(h_G2F)


class MoE(nn.Module):
    def __init__(self, cfg, layout, recipe=None):
        super().__init__()
        self.cfg, self.layout, self.stats = cfg, layout, ExpertStats()
        self.align = recipe.align if recipe else 1
        self.shared_slots = sharing(cfg, layout.ep.size)
        self.router = Router(cfg)
        self.experts = Experts(cfg, layout, recipe)
        # whole on every rank, for its own tokens
        self.shared = FeedForward(cfg, cfg.n_shared_experts * cfg.d_expert, layout.alone, "moe",
                                  recipe) if cfg.n_shared_experts else None

    def forward(self, x_TD, h_TD, batch, plan=None):
        """Coroutine: x_TD plus the layer's output for h_TD. `plan` comes from an earlier pass when this one
        recomputes."""
        cfg = self.cfg
        experts_TK, weights_TK, scores_TE, logits_TE = self.router(h_TD, batch.counted_T,
                                                                   plan and plan.experts_TK)
        if plan is None:
            plan = Plan(experts_TK, weights_TK, cfg.num_experts, batch.capacity, cfg.drop_policy,
                        self.layout.ep, self.layout.etp, self.shared_slots, cfg.dispatcher == "allgather",
                        self.align, cfg.dispatch_precision == "fp8")
            plan.load = self.load(plan, batch) if batch.train else None
            if plan.counts_first:
                yield Exchange("counts", plan)
        observe = None
        if batch.train:
            aux, z = self.aux_loss(scores_TE, plan, batch), self.z_loss(logits_TE, batch)
            yield Loss(aux + z)
            observe = functools.partial(self.stats.add, plan, aux.detach(), z.detach())
        rows, weights = dispatch(h_TD, weights_TK, plan)
        rows, weights, x_TD, *shared = yield Exchange(
            "out", plan, rows, weights, carry=(x_TD,), beside=self.shared and (self.shared, h_TD),
            observe=observe)
        rows, x_TD = yield Exchange("back", plan, self.experts(rows, weights, plan), carry=(sum(shared, x_TD),))
        return x_TD + combine(rows, plan)

    def _members(self, batch):
        """[1, T] counted tokens, or [B, T] those of each sequence."""
        counted_T = batch.counted_T.float()
        if self.cfg.aux_loss_scope != "sequence":
            return counted_T[None]
        sequences_B = torch.arange(batch.shape[0], device=counted_T.device)
        return counted_T * (batch.sequence_T == sequences_B[:, None])

    def load(self, plan, batch):
        """int64 [scope, E + 1]: choices per expert and counted tokens, in the scope of the aux loss. Integers,
        so they need no gradient and a recompute can keep them."""
        members_BT = self._members(batch)
        chosen_TE = members_BT.new_zeros(members_BT.shape[1], self.cfg.num_experts)
        chosen_TE.scatter_(1, plan.experts_TK.clamp_min(0), 1.0)
        load = (members_BT @ torch.cat([chosen_TE, torch.ones_like(chosen_TE[:, :1])], 1)).long()
        if self.cfg.aux_loss_scope == "global":
            return self.layout.plane.all_reduce(load) + self.stats.so_far
        return self.layout.batch.all_reduce(load)

    def aux_loss(self, scores_TE, plan, batch):
        """coef · mean over scopes of Σ_e f_e·P_e (Switch Transformer, arXiv:2101.03961, eq. 4, for any K):
        f_e = E/(K·T)·choices of e, P_e = mean normalized score, over the T counted tokens. Exactly coef when
        balanced and uniform. P is this rank's share; gradients and logs sum the shares."""
        E = self.cfg.num_experts
        probs_TE = scores_TE / scores_TE.sum(1, keepdim=True) if self.cfg.score_fn == "sigmoid" else scores_TE
        members_BT = self._members(batch)
        tokens_B = plan.load[:, -1:].float()
        if self.cfg.aux_loss_scope == "global":     # P is this microbatch's mean, f the batch's so far
            tokens_B = self.layout.batch.all_reduce(members_BT.sum(1, keepdim=True))
        f_BE = plan.load[:, :-1] * (E / self.cfg.top_k) / plan.load[:, -1:].clamp_min(1)
        P_BE = members_BT @ probs_TE / tokens_B.clamp_min(1)
        return self.cfg.aux_loss_coef * batch.aux_scale * (f_BE * P_BE).sum(1).mean()

    def z_loss(self, logits_TE, batch):
        """coef · mean(logsumexp²) over the counted tokens of the global batch (ST-MoE, arXiv:2202.08906)."""
        z_T = logits_TE.logsumexp(1).square()
        return self.cfg.z_loss_coef * batch.z_scale * (z_T * batch.counted_T).sum()
