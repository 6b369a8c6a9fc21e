"""The transformer: attention, blocks, head and loss, sampling, and what it all costs.

The residual stream is flat, x_TD: a rank's tokens in one row each. Model.forward is a coroutine (see
parallel.py): it yields whenever tokens travel, so run it with a Tape, or with `run` below.

Every parameter's initial values depend on (seed, name) alone, never on the layout, and every parameter
knows along which of its dimensions it is sliced over which mesh dimension (`shards`).

Shapes: T = B·S tokens on this rank, D model width, B sequences, S sequence length, H heads, V vocabulary.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from kernels import linear, rms_norm, use
from moe import Batch, FeedForward, MoE
from parallel import Rerun, Tape, together
from settings import knob


@dataclass
class ModelConfig:
    vocab_size: int = knob(0, "rows of the embedding and head; 0: what the data has", least=0)
    n_layer: int = knob(4, "blocks", least=1)
    n_dense_layers: int = knob(0, "first blocks with a dense feed-forward instead of experts", least=0)
    d_model: int = knob(256, "width of the residual stream", least=1)
    d_ff: int = knob(1024, "width of a dense feed-forward", least=1)
    n_head: int = knob(4, "attention heads", least=1)
    n_kv_head: int = knob(0, "heads of keys and values (grouped-query attention); 0: n_head", least=0)
    d_head: int = knob(0, "width of a head; 0: d_model / n_head", least=0)
    seq_len: int = knob(256, "tokens per sequence", least=1)
    rope_theta: float = knob(10000.0, "base of the rotary position frequencies", least=1)
    qk_norm: str = knob("none", "normalize queries and keys per head, or over all heads together",
                        choices=("none", "head", "full"))
    norm_eps: float = knob(1e-6, "epsilon of every RMSNorm", least=0)
    tie_embeddings: bool = knob(False, "use the embedding as the head")


def check(cfg):
    problems = []
    if not cfg.d_head and cfg.d_model % cfg.n_head:
        problems.append(f"n_head={cfg.n_head} does not divide d_model={cfg.d_model}: change n_head or set d_head")
    elif head_width(cfg) % 2:
        problems.append(f"d_head={head_width(cfg)} is odd, but rotary positions turn pairs: make d_head even")
    if cfg.n_kv_head and cfg.n_head % cfg.n_kv_head:
        problems.append(f"n_kv_head={cfg.n_kv_head} does not divide n_head={cfg.n_head}")
    if cfg.n_dense_layers > cfg.n_layer:
        problems.append(f"n_dense_layers={cfg.n_dense_layers} is more than n_layer={cfg.n_layer}")
    return problems


def head_width(cfg):
    return cfg.d_head or cfg.d_model // cfg.n_head


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rope_table(positions_S, width, theta):
    """cos and sin, [S, 1, width], fp32, of the rotary embedding (RoFormer, arXiv:2104.09864) in the layout
    of the Llama family: a head's first half turns with its second half."""
    frequency = theta ** (-torch.arange(0, width, 2, device=positions_S.device, dtype=torch.float32) / width)
    angle = (positions_S[:, None].float() * frequency).repeat(1, 2)[:, None]
    return angle.cos(), angle.sin()


def rotate(x_BSHd, rope):
    cos, sin = (t.to(x_BSHd.dtype) for t in rope)
    first, second = x_BSHd.chunk(2, -1)
    return x_BSHd * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, cfg):
        super().__init__()
        D, d = cfg.d_model, head_width(cfg)
        self.d, self.qk_norm, self.heads = d, cfg.qk_norm, (cfg.n_head, cfg.n_kv_head or cfg.n_head)
        H, G = self.heads
        self.wq = nn.Parameter(torch.empty(H * d, D))
        self.wk, self.wv = nn.Parameter(torch.empty(G * d, D)), nn.Parameter(torch.empty(G * d, D))
        self.wo = nn.Parameter(torch.empty(D, H * d))
        if cfg.qk_norm != "none":
            widths = (d, d) if cfg.qk_norm == "head" else (H * d, G * d)
            self.q_norm, self.k_norm = (RMSNorm(w, cfg.norm_eps) for w in widths)

    def forward(self, x_TD, batch):
        B, S = batch.shape
        q, k, v = (linear(x_TD, w) for w in (self.wq, self.wk, self.wv))
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(B, S, -1, self.d) for t in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, batch.rope), rotate(k, batch.rope)
        y_BHSd = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True,
                                                enable_gqa=self.heads[0] != self.heads[1])
        return linear(y_BHSd.transpose(1, 2).reshape(B * S, -1), self.wo)


class Block(nn.Module):
    def __init__(self, cfg, layout, dense):
        super().__init__()
        self.norm1, self.attention = RMSNorm(cfg.d_model, cfg.norm_eps), Attention(cfg)
        self.norm2 = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = FeedForward(cfg.d_model, cfg.d_ff) if dense else None
        self.moe = None if dense else MoE(cfg, layout)

    def forward(self, x_TD, batch, plan=None):
        """Coroutine."""
        x_TD = x_TD + self.attention(self.norm1(x_TD), batch)
        h_TD = self.norm2(x_TD)
        if self.mlp is not None:
            return x_TD + self.mlp(h_TD)
        return (yield from self.moe(x_TD, h_TD, batch, plan))


class Model(nn.Module):
    def __init__(self, cfg, layout):
        super().__init__()
        self.cfg, self.layout = cfg, layout
        self.embedding = nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))
        self.layers = nn.ModuleDict({str(i): Block(cfg, layout, dense=i < cfg.n_dense_layers)
                                     for i in range(cfg.n_layer)})
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.head = None if cfg.tie_embeddings else nn.Parameter(torch.empty(cfg.vocab_size, cfg.d_model))

    @property
    def moes(self):
        """The MoE layers on this rank, by the number of their block."""
        return {int(i): block.moe for i, block in self.layers.items() if block.moe is not None}

    def shards(self, name):
        """{mesh dimension: dimension of the parameter sliced over it}."""
        return {"ep": 0} if ".experts." in name else {}

    def full_shape(self, name, shape):
        shape = list(shape)
        for group, dim in self.shards(name).items():
            shape[dim] *= getattr(self.layout.sizes, group)
        return shape

    def forward(self, batch):
        """Coroutine. With labels: the sum of cross entropy over this rank's valid tokens, fp32. Without: the
        logits after each sequence's last token, [B, V], fp32."""
        B, S = batch.shape
        use(self.cfg, batch.tokens_T.device)
        batch.rope = rope_table(torch.arange(S, device=batch.tokens_T.device), head_width(self.cfg),
                                self.cfg.rope_theta)
        x_TD = F.embedding(batch.tokens_T.clamp_min(0), self.embedding)
        for block in self.layers.values():
            if "full" in self.cfg.recompute:
                x_TD = yield Rerun(lambda x, plan, block=block: block(x, batch, plan), x_TD)
            else:
                x_TD = yield from block(x_TD, batch)
        if batch.labels_T is None:
            x_TD = x_TD.view(B, S, -1)[:, -1]
        logits_TV = linear(self.norm(x_TD), self.embedding if self.head is None else self.head).float()
        if batch.labels_T is None:
            return logits_TV
        return F.cross_entropy(logits_TV, batch.labels_T, ignore_index=-100, reduction="sum")


def run(model, batch):
    """model.forward outside training, driven to its end: no gradient, no statistics."""
    return together(Tape(record=False).forward(model(batch)))[0]


# --------------------------------------------------------------------------------------------------
# Initial values

ROWS = 4096     # rows drawn from one seed, so that a rank draws only the blocks it holds


@torch.no_grad()
def init_weights(model, seed):
    """Normal with variance 1/d_in, so that normalized inputs give outputs of unit size at any width; output
    projections scaled by 1/sqrt(2·n_layer) as in GPT-2; an embedding that is not also the head has variance 1;
    norms are 1. Values depend on (seed, name, block of rows) alone; an expert is a block of its own. A rank
    draws whole blocks and keeps its slice."""
    for name, param in model.named_parameters():
        if "norm" in name:
            param.fill_(1)
            continue
        full, shards = model.full_shape(name, param.shape), model.shards(name)
        std = full[-1] ** -0.5
        if name == "embedding" and model.head is not None:
            std = 1
        elif name.endswith((".wo", ".w2")):
            std /= (2 * model.cfg.n_layer) ** 0.5
        index = [slice(None)] * param.ndim
        for group, dim in shards.items():
            start = getattr(model.layout, group).rank * param.shape[dim]
            index[dim] = slice(start, start + param.shape[dim])
        first, end = index[0].start or 0, (index[0].start or 0) + param.shape[0]
        rows = 1 if ".experts." in name else ROWS
        for at in range(first // rows * rows, end, rows):
            digest = hashlib.blake2b(f"{seed}/{name}/{at}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            drawn = torch.randn(min(rows, full[0] - at), *full[1:], generator=generator)
            low, high = max(first, at), min(end, at + len(drawn))
            param[low - first:high - first] = std * drawn[(slice(low - at, high - at), *index[1:])]


# --------------------------------------------------------------------------------------------------
# Sampling


def generate(model, prompt, length, temperature=0.8, top_k=40, seed=0):
    """Yields `length` token ids that continue the ids `prompt`. All ranks call it alike and draw alike;
    the context is the last seq_len tokens; temperature 0 takes the likeliest."""
    device, ids = model.embedding.device, list(prompt)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        context = torch.tensor(ids[-model.cfg.seq_len:], device=device)
        logits_V = run(model, Batch(context, None, (1, len(context))))[0].cpu()
        if temperature == 0:
            ids.append(int(logits_V.argmax()))
        else:
            logits_V = logits_V / temperature
            if 0 < top_k < len(logits_V):
                logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
            ids.append(int(torch.multinomial(logits_V.softmax(0), 1, generator=generator)))
        yield ids[-1]


# --------------------------------------------------------------------------------------------------
# What it costs


def parameter_counts(model):
    """{"total", "experts", "active"} of the whole model. Active: what one token uses, embedding and head
    included."""
    total = experts = 0
    for name, param in model.named_parameters():
        count = torch.Size(model.full_shape(name, param.shape)).numel()
        total += count
        experts += count if ".experts." in name else 0
    active = total - experts + experts * model.cfg.top_k // model.cfg.num_experts
    return {"total": total, "experts": experts, "active": active}


def flops_per_token(cfg, kept=1.0):
    """Model FLOPs per token, forward and backward, in a sequence of seq_len: matrix products and the causal
    half of attention, as MoE trainers publish them; router, recompute and embedding lookups not counted.
    `kept` is the share of expert assignments that were not dropped."""
    h, Q = cfg.d_model, cfg.n_head * head_width(cfg)
    KV = (cfg.n_kv_head or cfg.n_head) * head_width(cfg)
    dense = 3 * cfg.d_ff * cfg.n_dense_layers
    sparse = 3 * cfg.d_expert * (cfg.top_k * kept + cfg.n_shared_experts) * (cfg.n_layer - cfg.n_dense_layers)
    attention = cfg.n_layer * (2 * h * (Q + KV) + Q * cfg.seq_len)
    return 6 * (h * (dense + sparse) + attention + h * cfg.vocab_size)
