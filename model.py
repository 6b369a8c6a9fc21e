"""The transformer: attention, blocks, multi-token prediction, head and loss, sampling, and what it all costs.

    python model.py config/deepseek_v3.py       parameters and FLOPs per token, without building anything

The residual stream is flat, x_TD: a rank's tokens in one row each. Model.forward is a coroutine (see
parallel.py): it yields whenever tokens travel, so run it with a Tape, or with `run` below.

Every parameter's initial values depend on (seed, name) alone, never on the layout, and every parameter
knows along which of its dimensions it is sliced over which mesh dimension (`shards`).

Shapes: T tokens on this rank, G = B·S = T·tp tokens of its tensor-parallel group, D model width, B sequences,
S positions of each on this rank, P positions of the whole sequence, H heads on this rank, V vocabulary rows on
this rank, d width of a head, N and R the parts of it without and with rotary positions (MLA), L latent width.
"""

from __future__ import annotations

import hashlib
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import moe
import parallel
from dispatch import DispatchConfig
from kernels import RECIPES, KernelConfig, linear, lookup, recipe_of, rms_norm, use
from memory import MemoryConfig, part
from moe import Batch, FeedForward, MoE
from parallel import (Begin, Loss, Rerun, Tape, column_linear, cross_entropy, gather, gather_sequence, one_rank,
                      row_linear, scatter, stage_layers, sum_over, together, zigzag_runs)
from settings import knob, load


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
    rope_scaling: str = knob("", "YaRN for sequences beyond those of pre-training: factor=40,original=4096, and "
                             "if need be beta_fast, beta_slow, mscale, mscale_all_dim; empty: none")
    qk_norm: str = knob("none", "normalize queries and keys per head, or over all heads together",
                        choices=("none", "head", "full"))
    norm_eps: float = knob(1e-6, "epsilon of every RMSNorm", least=0)
    tie_embeddings: bool = knob(False, "use the embedding as the head")
    attention: str = knob("gqa", "grouped-query, or multi-head latent attention", choices=("gqa", "mla"))
    q_lora_rank: int = knob(0, "mla: width of the queries' latent; 0: they come straight from the stream", least=0)
    kv_lora_rank: int = knob(64, "mla: width of the latent that keys and values come from", least=1)
    d_nope: int = knob(32, "mla: width of a head's part of queries and keys without positions", least=1)
    d_rope: int = knob(16, "mla: width of the part with rotary positions, whose key all heads share", least=2)
    d_v: int = knob(32, "mla: width of a head of values", least=1)
    n_mtp: int = knob(0, "modules for multi-token prediction: as many tokens beyond the next one are learned too",
                      least=0)
    mtp_coef: float = knob(0.3, "weight of their mean loss", least=0)


def check(cfg):
    problems = check_rope_scaling(cfg.rope_scaling)
    if cfg.attention == "mla":
        if cfg.d_rope % 2:
            problems.append(f"d_rope={cfg.d_rope} is odd, but rotary positions turn pairs: make d_rope even")
        if cfg.qk_norm != "none":
            problems.append(f"qk_norm={cfg.qk_norm} is of attention=gqa; attention=mla normalizes its latents: "
                            f"set qk_norm=none")
        if cfg.n_kv_head not in (0, cfg.n_head):
            problems.append(f"n_kv_head={cfg.n_kv_head}, but with attention=mla every head has its own keys: set "
                            f"n_kv_head=0")
    elif not cfg.d_head and cfg.d_model % cfg.n_head:
        problems.append(f"n_head={cfg.n_head} does not divide d_model={cfg.d_model}: change n_head or set d_head")
    elif head_width(cfg) % 2:
        problems.append(f"d_head={head_width(cfg)} is odd, but rotary positions turn pairs: make d_head even")
    kv = cfg.n_kv_head or cfg.n_head
    if cfg.n_head % kv:
        problems.append(f"n_kv_head={kv} does not divide n_head={cfg.n_head}")
    if cfg.n_head % cfg.tp:
        problems.append(f"tp={cfg.tp} does not divide n_head={cfg.n_head}: change tp or n_head")
    elif kv % cfg.tp and cfg.tp % kv:
        problems.append(f"tp={cfg.tp} and n_kv_head={kv}: one must divide the other")
    if cfg.n_dense_layers and cfg.d_ff % cfg.tp:
        problems.append(f"tp={cfg.tp} does not divide d_ff={cfg.d_ff}: change tp or d_ff")
    if cfg.vocab_size % cfg.tp:
        problems.append(f"tp={cfg.tp} does not divide vocab_size={cfg.vocab_size}: change tp, or set a larger "
                        f"vocab_size")
    if cfg.seq_len % (2 * cfg.cp if cfg.cp > 1 else 1):
        problems.append(f"seq_len={cfg.seq_len} is not a multiple of 2*cp = 2*{cfg.cp} = {2 * cfg.cp}: change seq_len "
                        f"or cp")
    if cfg.precision in RECIPES and not cfg.emulate:
        least = 32 if cfg.precision == "mxfp8" else 16
        off = [f"{name}={width}" for name, width in multiplied_widths(cfg).items() if width % least]
        if off:
            problems.append(f"{', '.join(off)}: not a multiple of {least}, as precision={cfg.precision} needs: change "
                            f"it, or set precision=bf16")
    if cfg.n_dense_layers > cfg.n_layer:
        problems.append(f"n_dense_layers={cfg.n_dense_layers} is more than n_layer={cfg.n_layer}")
    if cfg.n_mtp >= cfg.seq_len:
        problems.append(f"n_mtp={cfg.n_mtp} looks beyond every sequence of seq_len={cfg.seq_len}: lower n_mtp")
    return problems


def head_width(cfg):
    """Of queries and keys."""
    if cfg.attention == "mla":
        return cfg.d_nope + cfg.d_rope
    return cfg.d_head or cfg.d_model // cfg.n_head


def multiplied_widths(cfg):
    """{name: how long rows and columns of a rank's matrices are}, of those that low precision multiplies."""
    widths = {"d_model": cfg.d_model, "d_expert/etp": cfg.d_expert // cfg.etp}
    if cfg.n_dense_layers:
        widths["d_ff/tp"] = cfg.d_ff // cfg.tp
    if cfg.attention == "mla":
        return widths | {"heads*width/tp": cfg.n_head * head_width(cfg) // cfg.tp, "q_lora_rank": cfg.q_lora_rank,
                         "kv_lora_rank": cfg.kv_lora_rank, "kv_lora_rank+d_rope": cfg.kv_lora_rank + cfg.d_rope,
                         "heads*(d_nope+d_v)/tp": cfg.n_head * (cfg.d_nope + cfg.d_v) // cfg.tp,
                         "heads*d_v/tp": cfg.n_head * cfg.d_v // cfg.tp}
    kv = (cfg.n_kv_head or cfg.n_head) * head_width(cfg)
    return widths | {"heads*width/tp": cfg.n_head * head_width(cfg) // cfg.tp,
                     "key heads*width/tp": max(kv // cfg.tp, head_width(cfg))}


YARN = {"factor": None, "original": None, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.0,
        "mscale_all_dim": 0.0}


def yarn(text):
    """{name: number} of the knob rope_scaling, or None if it is empty. ValueError if it cannot be read."""
    if not text:
        return None
    given = {name.strip(): float(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    values = YARN | given
    if values.keys() != YARN.keys() or None in values.values() or not all(map(math.isfinite, values.values())):
        raise ValueError(text)
    return values


def check_rope_scaling(text):
    try:
        values = yarn(text)
    except ValueError:
        return [f"rope_scaling={text} cannot be read: it takes factor=NUMBER,original=TOKENS and if need be "
                f"{', '.join(list(YARN)[2:])}"]
    if values and not (values["factor"] >= 1 <= values["original"]
                       and values["beta_fast"] > values["beta_slow"] > 0):
        return [f"rope_scaling={text} needs factor and original of at least 1, and beta_fast > beta_slow > 0"]
    return []


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(width)), eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def rope_table(positions_S, width, theta, scaling=""):
    """cos and sin, [S, 1, width], fp32, of the rotary embedding (RoFormer, arXiv:2104.09864) in the layout
    of the Llama family: a head's first half turns with its second half.

    With YaRN (`scaling`; arXiv:2309.00071, section 3.2) pairs that turn more than beta_fast times within the
    original length keep their frequency, those that turn less than beta_slow times are slowed down by factor, and
    between them it is a linear mixture."""
    pair = torch.arange(width // 2, device=positions_S.device, dtype=torch.float32)
    frequency, size = theta ** (-2 * pair / width), 1.0
    if values := yarn(scaling):
        def pair_with(turns):
            return width * math.log(values["original"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(pair_with(values["beta_fast"])), 0)
        high = min(math.ceil(pair_with(values["beta_slow"])), width - 1)
        slowed = ((pair - low) / (high - low or 0.001)).clamp(0, 1)
        frequency = frequency * (1 - slowed) + frequency / values["factor"] * slowed
        if values["mscale"] and values["mscale_all_dim"]:
            size = yarn_size(values, values["mscale"]) / yarn_size(values, values["mscale_all_dim"])
        else:
            size = yarn_size(values, 1.0)
    angle = (positions_S[:, None].float() * frequency).repeat(1, 2)[:, None]
    return angle.cos() * size, angle.sin() * size


def yarn_size(values, mscale):
    """How much larger YaRN makes queries and keys (eq. 22; mscale is DeepSeek's addition to it)."""
    return 0.1 * mscale * math.log(values["factor"]) + 1


def _turned(x_BSHd, cos, sin):
    """Halves in place: as whole-tensor operations it would pass over memory twice as often."""
    y_BSHd, half = x_BSHd * cos, sin[..., :sin.shape[-1] // 2]
    (first, second), (x_first, x_second) = y_BSHd.chunk(2, -1), x_BSHd.chunk(2, -1)
    first.addcmul_(x_second, half, value=-1)
    second.addcmul_(x_first, half)
    return y_BSHd


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_BSHd, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _turned(x_BSHd, cos, sin)

    @staticmethod
    def backward(ctx, dy_BSHd):
        cos, sin = ctx.saved_tensors
        return _turned(dy_BSHd, cos, -sin), None, None


def rotate(x_BSHd, rope):
    return _Rotate.apply(x_BSHd, *(t.to(x_BSHd.dtype) for t in rope))


def rotate_pairs(x_BSHR, rope):
    """For weights whose neighbouring elements turn together, as DeepSeek's do. The result is in the order of
    `rotate`, which queries and keys share, so their products do not know."""
    return rotate(x_BSHR.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), rope)


class SplitRMSNorm(RMSNorm):
    """RMSNorm over a width of which every rank of `group` holds a part."""

    def __init__(self, width, eps, group):
        super().__init__(width // group.size, eps)
        self.group, self.width = group, width

    def forward(self, x):
        squares = sum_over(x.float().square().sum(-1, keepdim=True), self.group)
        return (x * (squares / self.width + self.eps).rsqrt()).to(x.dtype) * self.weight


def attend(q_BSHd, k_BPHd, v_BPHd, first, end, scale=None):
    """Causal attention of queries at positions first to end - 1 to all keys before `end`. scale: of the scores;
    None: d^-0.5."""
    k, v = k_BPHd[:, :end], v_BPHd[:, :end]
    mask = None
    if first and q_BSHd.is_cuda:    # queries are the last of the keys; this object spares the flash kernel a mask
        from torch.nn.attention.bias import causal_lower_right  # half a second, which a CPU need not pay
        mask = causal_lower_right(end - first, end)
    elif first:
        mask = torch.arange(first, end)[:, None] >= torch.arange(end)
    y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q_BSHd, k, v)), attn_mask=mask, scale=scale,
                                       is_causal=mask is None, enable_gqa=q_BSHd.shape[2] != k.shape[2])
    return y.transpose(1, 2)


def attend_zigzag(q_BSHd, k_BPHd, v_BPHd, cp, scale=None):
    """Causal attention of this context-parallel rank's queries to the whole sequence's keys."""
    runs = zigzag_runs(k_BPHd.shape[1], cp.rank, cp.size)
    found = [attend(q, k_BPHd, v_BPHd, *run, scale) for q, run in zip(q_BSHd.chunk(len(runs), 1), runs)]
    return found[0] if len(found) == 1 else torch.cat(found, 1)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions. Heads are spread over tp; with fewer heads of keys
    and values than tp ranks, their weights are whole on every rank, which uses the head it needs. Sequences are
    spread over cp, and keys and values gathered."""

    def __init__(self, cfg, layout, recipe=None):
        super().__init__()
        D, d, self.cfg, self.recipe = cfg.d_model, head_width(cfg), cfg, recipe
        self.d, self.qk_norm, self.tp, self.cp = d, cfg.qk_norm, layout.tp, layout.cp
        H, kv = cfg.n_head // layout.tp.size, cfg.n_kv_head or cfg.n_head
        self.kv_split = kv % layout.tp.size == 0
        self.kv_first = 0 if self.kv_split else layout.tp.rank * kv // layout.tp.size
        held = kv // layout.tp.size if self.kv_split else kv
        self.kv = held if self.kv_split else 1
        self.wq = nn.Parameter(torch.empty(H * d, D))
        self.wk, self.wv = nn.Parameter(torch.empty(held * d, D)), nn.Parameter(torch.empty(held * d, D))
        self.wo = nn.Parameter(torch.empty(D, H * d))
        if cfg.qk_norm == "head":
            self.q_norm, self.k_norm = RMSNorm(d, cfg.norm_eps), RMSNorm(d, cfg.norm_eps)
        elif cfg.qk_norm == "full":
            self.q_norm = SplitRMSNorm(cfg.n_head * d, cfg.norm_eps, layout.tp)
            self.k_norm = SplitRMSNorm(kv * d, cfg.norm_eps, layout.tp if self.kv_split else layout.alone)

    def forward(self, x_TD, batch):
        return row_linear(part(self.cfg, "attn", self.heads, x_TD, batch), self.wo, self.tp, self.recipe)

    def heads(self, x_TD, batch):
        """What all of this rank's heads found, side by side: [G, H·d]."""
        B, S = batch.shape
        # a norm over all heads needs all of them, before a rank picks its own
        pick = slice(self.kv_first * self.d, (self.kv_first + self.kv) * self.d)
        whole = self.kv_split or self.qk_norm == "full"     # (a slice's gradient cannot be put off)
        wk, wv = (self.wk, self.wv) if whole else (self.wk[pick], self.wv[pick])
        q, k, v = column_linear(x_TD, [self.wq, wk, wv], self.tp, self.recipe)
        if self.qk_norm == "full":
            q, k, v = self.q_norm(q), self.k_norm(k)[:, pick], v[:, pick]
        q, k, v = (t.view(B, S, -1, self.d) for t in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, batch.rope), rotate(k, batch.rope)
        k, v = gather_sequence([k, v], self.cp)
        return attend_zigzag(q, k, v, self.cp).reshape(B * S, -1)


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads come
    from one narrow latent of each token, and the rotary part of the key is one for all heads.

    The projections into latents are whole on every rank, for its own tokens. Those out of them are spread over
    tp by heads, so what travels, over tp and cp alike, is latents: kv_lora_rank + d_rope numbers a token."""

    def __init__(self, cfg, layout, recipe=None):
        super().__init__()
        D, H, self.cfg, self.tp, self.cp = cfg.d_model, cfg.n_head // layout.tp.size, cfg, layout.tp, layout.cp
        self.recipe = recipe
        self.latent, self.parts, self.d_v = cfg.kv_lora_rank, (cfg.d_nope, cfg.d_rope), cfg.d_v
        if cfg.q_lora_rank:
            self.wq_a = nn.Parameter(torch.empty(cfg.q_lora_rank, D))
            self.q_norm = RMSNorm(cfg.q_lora_rank, cfg.norm_eps)
        else:
            self.wq_a = None
        self.wq = nn.Parameter(torch.empty(H * head_width(cfg), cfg.q_lora_rank or D))
        self.wkv_a = nn.Parameter(torch.empty(cfg.kv_lora_rank + cfg.d_rope, D))
        self.kv_norm = RMSNorm(cfg.kv_lora_rank, cfg.norm_eps)
        self.wkv = nn.Parameter(torch.empty(H * (cfg.d_nope + cfg.d_v), cfg.kv_lora_rank))
        self.wo = nn.Parameter(torch.empty(D, H * cfg.d_v))
        values = yarn(cfg.rope_scaling)
        # where mscale_all_dim is given, YaRN's size is in the scale of all scores and not in the rotary part
        size = yarn_size(values, values["mscale_all_dim"]) if values and values["mscale_all_dim"] else 1.0
        self.scale = head_width(cfg) ** -0.5 * size ** 2

    def forward(self, x_TD, batch):
        return row_linear(part(self.cfg, "attn", self.heads, x_TD, batch), self.wo, self.tp, self.recipe)

    def heads(self, x_TD, batch):
        """What all of this rank's heads found, side by side: [G, H·d_v]."""
        (B, S), R = batch.shape, self.parts[1]
        from_TL = x_TD
        if self.wq_a is not None:
            from_TL = part(self.cfg, "norm", self.q_norm, linear(x_TD, self.wq_a, self.recipe))
        latent_TL, key_TR = linear(x_TD, self.wkv_a, self.recipe).split([self.latent, R], -1)
        sent = gather(torch.cat([self.kv_norm(latent_TL), key_TR], -1), self.tp)
        latent_BSL, key_BSR = sent.view(B, S, -1).split([self.latent, R], -1)
        key_BSR = rotate_pairs(key_BSR[:, :, None], batch.rope)[:, :, 0]    # here positions are still this rank's
        sent_BPL, = gather_sequence([torch.cat([latent_BSL, key_BSR], -1)], self.cp)
        q, k, v = part(self.cfg, "mla_up", self.up, from_TL, sent_BPL, batch)
        return attend_zigzag(q, k, v, self.cp, self.scale)[..., :self.d_v].reshape(B * S, -1)

    def up(self, from_TL, sent_BPL, batch):
        """Queries, keys and values of this rank's heads, all as wide as keys, out of their latents."""
        (B, S), (N, R) = batch.shape, self.parts
        q, = column_linear(from_TL, [self.wq], self.tp, self.recipe)
        q_nope, q_rope = q.view(B, S, -1, N + R).split([N, R], -1)
        q = torch.cat([q_nope, rotate_pairs(q_rope, batch.rope)], -1)
        latent_BPL, key_BPR = sent_BPL.split([self.latent, R], -1)
        kv = linear(latent_BPL.flatten(0, 1), self.wkv, self.recipe).view(*latent_BPL.shape[:2], -1, N + self.d_v)
        k_nope, v = kv.split([N, self.d_v], -1)
        k = torch.cat([k_nope, key_BPR[:, :, None].expand(-1, -1, k_nope.shape[2], -1)], -1)
        return q, k, F.pad(v, (0, max(N + R - self.d_v, 0)))    # flash kernels take one width only


class Block(nn.Module):
    def __init__(self, cfg, layout, number):
        super().__init__()
        self.recipe = recipe = recipe_of(cfg, number)
        dense = number < cfg.n_dense_layers
        self.cfg, attention = cfg, LatentAttention if cfg.attention == "mla" else Attention
        self.norm1, self.attention = RMSNorm(cfg.d_model, cfg.norm_eps), attention(cfg, layout, recipe)
        self.norm2 = RMSNorm(cfg.d_model, cfg.norm_eps)
        self.mlp = FeedForward(cfg, cfg.d_ff, layout.tp, "mlp", recipe) if dense else None
        self.moe = None if dense else MoE(cfg, layout, recipe)

    def forward(self, x_TD, batch, plan=None):
        """Coroutine."""
        x_TD = x_TD + self.attention(part(self.cfg, "norm", self.norm1, x_TD), batch)
        h_TD = part(self.cfg, "norm", self.norm2, x_TD)
        if self.mlp is not None:
            return x_TD + self.mlp(h_TD)
        return (yield from self.moe(x_TD, h_TD, batch, plan))


class MTPModule(Block):
    """A module for multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): from each position's state
    and the next token's embedding to the state that predicts the token after. The embedding comes first, and the
    state has passed the norm before the head, as the weights that DeepSeek released want it (the paper's formula
    has the state first)."""

    def __init__(self, cfg, layout, number):
        super().__init__(cfg, layout, number)
        self.embed_norm, self.state_norm = RMSNorm(cfg.d_model, cfg.norm_eps), RMSNorm(cfg.d_model, cfg.norm_eps)
        self.proj = nn.Parameter(torch.empty(cfg.d_model, 2 * cfg.d_model))
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps)      # before the head, which is the model's

    def enter(self, embedded_TD, x_TD):
        return linear(torch.cat([self.embed_norm(embedded_TD), self.state_norm(x_TD)], -1), self.proj,
                      self.recipe)


class Model(nn.Module):
    """What this rank's pipeline stage holds of the model, in vpp chunks of consecutive blocks. Names are those of
    the whole model: layers.17 is the same block whichever stage holds it. After the n_layer blocks the numbers go
    on with the modules for multi-token prediction, which stand on the last stage and share embedding and head."""

    def __init__(self, cfg, layout):
        super().__init__()
        self.cfg, self.layout, pp = cfg, layout, layout.pp
        self.chunks = stage_layers(cfg)[pp.rank::pp.size]
        begins, ends = pp.rank == 0, pp.rank == pp.size - 1
        self.mtp = range(cfg.n_layer, cfg.n_layer + cfg.n_mtp) if ends else range(0)
        table = lambda: nn.Parameter(torch.empty(cfg.vocab_size // layout.tp.size, cfg.d_model))
        self.embedding = table() if begins or (ends and self.embedding_is_shared) else None
        self.layers = nn.ModuleDict({str(i): Block(cfg, layout, i) for chunk in self.chunks for i in chunk})
        self.layers.update({str(i): MTPModule(cfg, layout, i) for i in self.mtp})
        self.fetch = lambda block: None     # waits for parameters on their way: an optimizer sets it
        self.norm = RMSNorm(cfg.d_model, cfg.norm_eps) if ends else None
        self.head = table() if ends and not cfg.tie_embeddings else None

    def is_first(self, chunk):
        """True where tokens enter."""
        return self.layout.pp.rank == 0 and chunk == 0

    def is_last(self, chunk):
        """True where the head is."""
        return self.norm is not None and chunk == len(self.chunks) - 1

    @property
    def embedding_is_shared(self):
        """True if the last stage uses it too: as the head, or for multi-token prediction."""
        return self.cfg.tie_embeddings or self.cfg.n_mtp > 0

    def on_both_ends(self, name):
        """True for a parameter that the first and the last of several stages both hold and must keep equal."""
        return name == "embedding" and self.embedding_is_shared and self.layout.pp.size > 1

    def empty_stream(self, batch):
        """An uninitialized x_TD for `batch`, as it comes from the stage before."""
        norm = next(iter(self.layers.values())).norm1.weight
        return norm.new_empty(len(batch.tokens_T), self.cfg.d_model)

    @property
    def moes(self):
        """The MoE layers on this rank, by the number of their block."""
        return {int(i): block.moe for i, block in self.layers.items() if block.moe is not None}

    def shards(self, name):
        """{mesh dimension: dimension of the parameter sliced over it}. What is in no mesh dimension is whole on
        every rank, and its gradient is a sum over all of them."""
        path, _, leaf = name.rpartition(".")
        if path.endswith("experts"):
            return {"ep": 0, "etp": 2}
        if path.endswith("mlp") or leaf == "wo":
            return {"tp": 1}
        if leaf in ("embedding", "head", "wq", "wkv") or self.cfg.qk_norm == "full" and path.endswith("q_norm"):
            return {"tp": 0}
        kv_split = (self.cfg.n_kv_head or self.cfg.n_head) % self.layout.tp.size == 0
        if kv_split and (leaf in ("wk", "wv") or self.cfg.qk_norm == "full" and path.endswith("k_norm")):
            return {"tp": 0}
        return {}

    def full_shape(self, name, shape):
        shape = list(shape)
        for group, dim in self.shards(name).items():
            shape[dim] *= getattr(self.layout.sizes, group)
        return shape

    def place(self, name, shape):
        """Where this rank's part of a parameter lies in the whole: a slice for each dimension."""
        index = [slice(0, size) for size in shape]
        for group, dim in self.shards(name).items():
            start = getattr(self.layout, group).rank * shape[dim]
            index[dim] = slice(start, start + shape[dim])
        return index

    def forward(self, batch, chunk=0, x_TD=None):
        """Coroutine of one chunk, given x_TD from the chunk before it (the first takes the tokens). Returns x_TD
        for the next one; the last returns, with labels, the sum of cross entropy over the tp group's valid
        tokens, [1 + batch.n_mtp] for the next token and those beyond it, fp32, whose gradient is a matter of Loss;
        and without, each sequence's logits after position batch.last, [B, V] of the whole vocabulary, fp32."""
        use(self.cfg, batch.tokens_T.device)
        width = self.cfg.d_rope if self.cfg.attention == "mla" else head_width(self.cfg)
        batch.rope = rope_table(batch.positions_S, width, self.cfg.rope_theta, self.cfg.rope_scaling)
        self.fetch(None)
        if self.is_first(chunk):
            x_TD = self.embed(batch.tokens_G)
        for i in self.chunks[chunk]:
            x_TD = yield from self.through((yield from self.begin(i)), x_TD, batch)
        if not self.is_last(chunk):
            return x_TD
        tp, (B, S) = self.layout.tp, batch.shape
        x_TD, head = part(self.cfg, "norm", self.norm, x_TD), self.embedding if self.head is None else self.head
        if batch.labels_G is not None:
            losses = [(yield from self.loss(x_TD, head, batch))]
            for i in self.mtp if batch.n_mtp else ():
                module, rope, batch = (yield from self.begin(i)), batch.rope, batch.ahead
                batch.rope = rope       # positions stay, tokens and labels go on
                x_TD = module.enter(self.embed(batch.tokens_G), x_TD)
                x_TD = yield from self.through(module, x_TD, batch)
                x_TD = part(self.cfg, "norm", module.norm, x_TD)
                losses.append((yield from self.loss(x_TD, head, batch)))
            return torch.stack(losses)
        here_S = (batch.positions_S == batch.last).to(x_TD.dtype)   # one context-parallel rank has the position
        x_BD = self.layout.cp.all_reduce(here_S @ tp.all_gather(x_TD).view(B, S, -1))
        return tp.all_gather(F.linear(x_BD, head).t()).t().float()

    def begin(self, i):
        """Coroutine: block i, whose parameters may be used from here on."""
        self.fetch(i)
        yield Begin(i)
        return self.layers[str(i)]

    def through(self, block, x_TD, batch):
        """Coroutine of one block."""
        if "full" in self.cfg.recompute:
            return (yield Rerun(lambda x, plan: block(x, batch, plan), x_TD))
        return (yield from block(x_TD, batch))

    def loss(self, x_TD, head, batch):
        """Coroutine: adds the cross entropy of the labels to the objective, and returns its sum, detached."""
        logits_GV, = column_linear(x_TD, [head], self.layout.tp)
        loss = cross_entropy(logits_GV.float(), batch.labels_G, self.layout.tp)
        yield Loss(loss * batch.loss_scale)
        return loss.detach()

    def embed(self, tokens_G):
        """Every rank looks up the tokens whose rows it has; their sum is scattered."""
        at_G = tokens_G.clamp_min(0) - self.layout.tp.rank * len(self.embedding)
        here_G = (at_G >= 0) & (at_G < len(self.embedding))
        x_GD = lookup(torch.where(here_G, at_G, 0), self.embedding)
        return scatter(x_GD.masked_fill(~here_G[:, None], 0), self.layout.tp)


def run(model, batch):
    """model.forward outside training, through all stages: no gradient, no statistics. A stage without the head
    returns zeros of the result's shape, so that a sum over stages is the result."""
    onward = model.layout.onward
    for chunk in range(len(model.chunks)):
        x_TD = None
        if not model.is_first(chunk):
            onward.post(model.empty_stream(batch))
            x_TD = onward.arrive()
        y = together(Tape(record=False).forward(model(batch, chunk, x_TD)))[0]
        if model.is_last(chunk):
            return y
        onward.send(y)
    shape = (batch.shape[0], model.cfg.vocab_size) if batch.labels_T is None else (1,)
    return torch.zeros(shape, device=y.device)


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
        full, index = model.full_shape(name, param.shape), model.place(name, param.shape)
        std = full[-1] ** -0.5
        if name == "embedding" and not model.cfg.tie_embeddings:
            std = 1
        elif name.endswith((".wo", ".w2")):
            std /= (2 * model.cfg.n_layer) ** 0.5
        first, end = index[0].start, index[0].stop
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
    ids, sizes = list(prompt), model.layout.sizes
    generator = torch.Generator().manual_seed(seed)
    for _ in range(length):
        context = ids[-model.cfg.seq_len:]
        padding = [-1] * (-len(context) % (2 * sizes.cp * sizes.tp))    # ranks share its positions evenly
        batch = Batch(model.layout, torch.tensor([context + padding]), None, last=len(context) - 1)
        logits_V = model.layout.pp.all_reduce(run(model, batch))[0].cpu()
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


def n_moe_layers(cfg):
    """With those of the modules for multi-token prediction."""
    return cfg.n_layer - cfg.n_dense_layers + cfg.n_mtp


def parameter_counts(model):
    """{"total", "experts", "active", "mtp"} of the whole model. Active: what one token uses, embedding and head
    included. Modules for multi-token prediction count in mtp alone: the trained model works without them. Pipeline
    stages add up what they hold, so all ranks must call it."""
    total = experts = mtp = 0
    modules = tuple(f"layers.{i}." for i in model.mtp)
    for name, param in model.named_parameters():
        if model.on_both_ends(name) and model.layout.pp.rank > 0:
            continue
        count = torch.Size(model.full_shape(name, param.shape)).numel()
        if name.startswith(modules):
            mtp += count
            continue
        total += count
        experts += count if ".experts." in name else 0
    counts = torch.tensor([total, experts, mtp], device=model.layout.device)
    total, experts, mtp = model.layout.pp.all_reduce(counts).tolist()
    active = total - experts + experts * model.cfg.top_k // model.cfg.num_experts
    return {"total": total, "experts": experts, "active": active, "mtp": mtp}


def flops_per_token(cfg, kept=1.0):
    """Model FLOPs per token, forward and backward, in a sequence of seq_len: matrix products and the causal
    half of attention, as MoE trainers publish them; router, recompute and embedding lookups not counted.
    Modules for multi-token prediction count as training runs them. `kept` is the share of expert assignments that
    were not dropped."""
    h, H, Q = cfg.d_model, cfg.n_head, cfg.n_head * head_width(cfg)
    if cfg.attention == "mla":
        r, c = cfg.q_lora_rank, cfg.kv_lora_rank
        # the norms of latents are counted: so do those who publish
        queries = r * (h + Q + 1) if r else h * Q
        linear = queries + c * (h + H * (cfg.d_nope + cfg.d_v) + 1) + h * cfg.d_rope + H * cfg.d_v * h
        scores = (Q + H * cfg.d_v) / 2
    else:
        KV = (cfg.n_kv_head or H) * head_width(cfg)
        linear, scores = 2 * h * (Q + KV), Q
    dense = 3 * cfg.d_ff * cfg.n_dense_layers
    sparse = 3 * cfg.d_expert * (cfg.top_k * kept + cfg.n_shared_experts) * n_moe_layers(cfg)
    attention = (cfg.n_layer + cfg.n_mtp) * (linear + scores * cfg.seq_len)
    entering = cfg.n_mtp * (3 * h + 2 * h * h)      # three norms and the projection
    return 6 * (h * (dense + sparse) + attention + entering + h * cfg.vocab_size * (1 + cfg.n_mtp))


@dataclass
class Architecture(KernelConfig, MemoryConfig, parallel.ParallelConfig, DispatchConfig, moe.MoEConfig, ModelConfig):
    """The knobs of which a model is made."""


def main(argv):
    """python model.py config/NAME.py [--key=value ...]: what a model has and costs, from shapes alone."""
    def architecture(cfg):
        cfg = one_rank(cfg)
        unset = [] if cfg.vocab_size else ["vocab_size=0 means that of the data: set it"]
        return check(cfg) + moe.check(cfg) + unset

    # a preset also speaks to the trainer, whose knobs mean nothing here
    cfg = one_rank(load(Architecture, argv, architecture, pass_over=True))
    parallel.init(torch.device("cpu"))
    layout = parallel.Layout(parallel.sizes_of(cfg, 1), torch.device("cpu"))
    with torch.device("meta"):
        model = Model(cfg, layout)
    counts = parameter_counts(model)
    parallel.finish()
    print(f"parameters   {counts['total']:>19,}", f"  in experts {counts['experts']:>19,}",
          f"  active     {counts['active']:>19,}",
          *([f"and for MTP  {counts['mtp']:>19,}"] if cfg.n_mtp else []),
          f"GFLOP/token  {flops_per_token(cfg) / 1e9:>19,.2f}   forward and backward, sequences of "
          f"{cfg.seq_len:,}",
          sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
