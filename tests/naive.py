"""The layer's mathematics once more, as loops over tokens and plain autograd, on one process and all experts.

Nothing here shares code with the trainer's routing, dispatch, experts or driver.
"""

import torch
import torch.nn.functional as F


def choose(choice_E, top_k, n_groups=1, topk_groups=1):
    """One token's experts, best first, lowest number first among equals; groups by their best two."""
    choice_E = [float(c) for c in choice_E]
    size = len(choice_E) // n_groups
    value = [sum(sorted(choice_E[g * size:(g + 1) * size])[-2:]) for g in range(n_groups)]
    groups = sorted(range(n_groups), key=lambda g: (-value[g], g))[:topk_groups if n_groups > 1 else 1]
    allowed = [e for e in range(len(choice_E)) if e // size in groups]
    return sorted(allowed, key=lambda e: (-choice_E[e], e))[:top_k]


def kept(experts_TK, weights_TK, num_experts, capacity, drop_policy):
    """The set of (token, k) that get a slot."""
    who = set()
    for expert in range(num_experts):
        mine = [(t, k) for t, row in enumerate(experts_TK) for k, e in enumerate(row) if e == expert]
        if capacity:
            first = ((lambda tk: (-weights_TK[tk[0]][tk[1]], tk)) if drop_policy == "probs"
                     else (lambda tk: (tk[1], tk[0])))
            mine = sorted(mine, key=first)[:capacity]
        who |= set(mine)
    return who


def expert(x_D, w1_2FD, w2_DF):
    return w2_DF @ (F.silu(w1_2FD[0] @ x_D) * (w1_2FD[1] @ x_D))


def route(h_TD, counted_T, router_ED, bias_E, cfg):
    """→ experts (lists; empty for a token that is not counted), weights (lists of scalars), scores, logits."""
    logits_TE = h_TD.float() @ router_ED.T
    scores_TE = (torch.exp(logits_TE) / torch.exp(logits_TE).sum(1, keepdim=True) if cfg.score_fn == "softmax"
                 else 1 / (1 + torch.exp(-logits_TE)))
    experts, weights = [], []
    for t, counted in enumerate(counted_T.tolist()):
        choice = choose(scores_TE[t].detach() + bias_E, cfg.top_k, cfg.n_groups, cfg.topk_groups) if counted else []
        mine = [scores_TE[t, e] for e in choice]
        total = sum(mine) + 1e-20 if cfg.norm_topk else 1
        experts.append(choice)
        weights.append([cfg.route_scale * w / total for w in mine])
    return experts, weights, scores_TE, logits_TE


def moe(h_TD, counted_T, router_ED, bias_E, w1_E2FD, w2_EDF, cfg, capacity=0):
    """→ the routed experts' output, the number of assignments and of those kept, scores, logits, experts."""
    experts, weights, scores_TE, logits_TE = route(h_TD, counted_T, router_ED, bias_E, cfg)
    slots = kept(experts, weights, cfg.num_experts, capacity, cfg.drop_policy)
    y = [torch.zeros_like(x) for x in h_TD]
    for t, k in sorted(slots):
        y[t] = y[t] + weights[t][k] * expert(h_TD[t], w1_E2FD[experts[t][k]], w2_EDF[experts[t][k]])
    return torch.stack(y), sum(map(len, experts)), len(slots), scores_TE, logits_TE, experts


def balance(scores_TE, experts, members, cfg, loads=None):
    """Σ_e f_e·P_e over the tokens `members`; `loads`: lists of experts whose counts f uses, if not theirs."""
    chosen = [experts[t] for t in members] if loads is None else loads
    if not members:
        return 0.0
    total = 0.0
    for e in range(cfg.num_experts):
        n = sum(row.count(e) for row in chosen)
        f = cfg.num_experts / (cfg.top_k * len(chosen)) * n
        P = sum(scores_TE[t, e] / scores_TE[t].sum() for t in members) / len(members)
        total = total + f * P
    return total


def objective(model, batch, cfg, valid, counted, microbatches):
    """One microbatch's share of the loss, and of what training minimizes, on one process that holds every expert.
    valid, counted: tokens of the global batch with a label, and that are no padding."""
    from model import head_width, rope_table
    B, S = batch.shape
    batch.rope = rope_table(torch.arange(S), head_width(cfg), cfg.rope_theta)
    x_TD, loss, extra = model.embedding[batch.tokens_T.clamp_min(0)], 0.0, 0.0
    for block in model.layers.values():
        x_TD = x_TD + block.attention(block.norm1(x_TD), batch)
        h_TD = block.norm2(x_TD)
        feed_forward = block.mlp or block.moe.shared
        y_TD = 0.0
        if feed_forward is not None:
            w1_2FD, w2_DF = feed_forward.w1, feed_forward.w2
            y_TD = (F.silu(h_TD @ w1_2FD[0].T) * (h_TD @ w1_2FD[1].T)) @ w2_DF.T
        if block.moe is not None:
            router, experts = block.moe.router, block.moe.experts
            routed_TD, _, _, scores_TE, logits_TE, chosen = moe(
                h_TD, batch.counted_T, router.weight, router.bias_E, experts.w1, experts.w2, cfg, batch.capacity)
            y_TD = y_TD + routed_TD
            members = [[t for t in range(b * S, b * S + S) if batch.counted_T[t]] for b in range(B)]
            if cfg.aux_loss_scope == "batch":
                members = [sum(members, [])]
            aux = sum(balance(scores_TE, chosen, m, cfg) for m in members) / len(members)
            extra = extra + cfg.aux_loss_coef * aux / microbatches
            z = sum(torch.logsumexp(logits_TE[t], 0) ** 2 for t in sum(members, []))
            extra = extra + cfg.z_loss_coef * z / counted
        x_TD = x_TD + y_TD
    logits_TV = model.norm(x_TD) @ (model.embedding if model.head is None else model.head).T
    for t, label in enumerate(batch.labels_T.tolist()):
        if label != -100:
            loss = loss - logits_TV[t].log_softmax(0)[label] / valid
    return loss, loss + extra
