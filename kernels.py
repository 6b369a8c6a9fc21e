"""Compute back-ends: the arithmetic that makes small experts fast.

Everything here works on rows. A gather is described by two integer maps that are each other's inverse
(which row a slot holds, which slots a row went to), so that forward and backward are both gathers: no
scatter-add, no atomics, bit-reproducible. A grouped GEMM multiplies consecutive runs of rows, one run
per expert, each by its own weight; run lengths live on the device.

Shapes: T tokens, D model width, F expert width, L experts on this rank, K experts per token,
R rows in expert-major order.

Rows past `ends[-1]` of a grouped GEMM are never computed and hold garbage, as in every such kernel;
callers only ever read rows that a map points at.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from settings import knob


@dataclass
class KernelConfig:
    precision: str = knob("auto", "parameters and arithmetic; auto: bf16 on a GPU, fp32 elsewhere",
                          choices=("auto", "fp32", "bf16"))


def dtype_of(precision, device):
    """The dtype of parameters and activations for the knob `precision` on `device`."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]


# --------------------------------------------------------------------------------------------------
# Time and peaks: what the efficiency columns are made of


class Clock:
    """Seconds spent per named span since the last `read`, without stopping a GPU to find out.

    On the CPU a span is wall time. On CUDA it is a pair of events on the current stream, read later.
    """

    def __init__(self):
        self.spans = {}

    @contextlib.contextmanager
    def span(self, name, device):
        mark = self._event if device.type == "cuda" else time.perf_counter
        start = mark()
        yield
        self.spans.setdefault(name, []).append((start, mark()))

    @staticmethod
    def _event():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self):
        """Returns the spans recorded so far, to be handed to `seconds` once the device is done."""
        spans, self.spans = self.spans, {}
        return spans

    @staticmethod
    def seconds(spans, name):
        return sum(b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in spans.get(name, ()))


clock = Clock()

# Dense TFLOPS of one GPU from the vendors' datasheets, by a part of the device's name. GB parts first:
# their names contain the name of the plain part.
PEAK_TFLOPS = {
    ("GB300", torch.bfloat16): 2500, ("GB200", torch.bfloat16): 2500,
    ("H200", torch.bfloat16): 989, ("H100 80GB HBM3", torch.bfloat16): 989,
}


def peak_flops(device, dtype):
    """FLOP/s this rank could reach at `dtype`, or None where unknown: a wrong MFU is worse than none.

    On a CPU there is no datasheet figure to trust, so a large matmul is timed: call it on all ranks at
    once, since they share the cores.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((1e12 * t for (part, d), t in PEAK_TFLOPS.items() if part in name and d == dtype), None)
    a, best = torch.ones(768, 768, dtype=dtype), float("inf")
    for _ in range(12):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * 768**3 / best


# --------------------------------------------------------------------------------------------------
# Gathers


def gather_rows(x_TD, row_R):
    """y[r] = x[row[r]]; where row is -1 the result is arbitrary but finite if x is."""
    if len(x_TD) == 0:
        return x_TD.new_zeros(len(row_R), *x_TD.shape[1:])
    return x_TD.index_select(0, row_R.clamp_min(0))


def gather_sum(y_RD, slot_TK):
    """x[t] = sum over k of y[slot[t, k]]; a slot of -1 contributes exactly zero, whatever y holds."""
    # -1 points at a row of zeros appended for it: masking instead would be slower, and 0·NaN is NaN
    padded = torch.cat([y_RD, y_RD.new_zeros(1, y_RD.shape[1])])
    return F.embedding_bag(torch.where(slot_TK < 0, len(y_RD), slot_TK), padded, mode="sum")


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, row_R, slot_TK):
        ctx.save_for_backward(slot_TK)
        return gather_rows(x_TD, row_R)

    @staticmethod
    def backward(ctx, dy_RD):
        return gather_sum(dy_RD, *ctx.saved_tensors), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_RD, slot_TK, row_R):
        ctx.save_for_backward(row_R)
        return gather_sum(y_RD, slot_TK)

    @staticmethod
    def backward(ctx, dx_TD):
        return gather_rows(dx_TD, *ctx.saved_tensors), None, None


def permute(x_TD, row_R, slot_TK):
    """Rows to slots: y_RD[r] = x_TD[row_R[r]]. `slot_TK` lists the slots each row went to (-1: none);
    only those receive gradient. Rows of y whose row_R is -1 are arbitrary."""
    return _Permute.apply(x_TD, row_R, slot_TK)


def unpermute(y_RD, slot_TK, row_R):
    """Slots back to rows, the adjoint of `permute`: x_TD[t] = sum over k of y_RD[slot_TK[t, k]]."""
    return _Unpermute.apply(y_RD, slot_TK, row_R)


# --------------------------------------------------------------------------------------------------
# Matrix products


def linear(x_TD, w_FD):
    return F.linear(x_TD, w_FD)


def grouped_mm(a, b, ends_L):
    """torch's grouped product: rows [ends[l-1], ends[l]) of `a` times b[l]; or, when `b` is 2-D too,
    one product per group over that run of the inner dimension. A loop where torch's own does not run."""
    aligned = all(s * a.element_size() % 16 == 0 for t in (a, b) for s in t.stride() if s != 1)
    if aligned and 0 not in a.shape and a.dtype != torch.float64:
        return F.grouped_mm(a, b, offs=ends_L)
    return grouped_mm_loop(a, b, ends_L)


def grouped_mm_loop(a, b, ends_L):
    """The oracle of `grouped_mm`: one matmul per group, group ends read on the host."""
    ends = [0, *ends_L.tolist()]
    if b.ndim == 2:
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in zip(ends, ends[1:])])
    y = a.new_zeros(len(a), b.shape[2])
    for w, i, j in zip(b, ends, ends[1:]):
        y[i:j] = a[i:j] @ w
    return y


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, w_LFD, ends_L):
        ctx.save_for_backward(x_RD, w_LFD, ends_L)
        with clock.span("gemm", x_RD.device):
            return grouped_mm(x_RD, w_LFD.transpose(1, 2), ends_L)

    @staticmethod
    def backward(ctx, dy_RF):
        x_RD, w_LFD, ends_L = ctx.saved_tensors
        dy_RF = dy_RF.contiguous()
        with clock.span("gemm", x_RD.device):
            dx_RD = grouped_mm(dy_RF, w_LFD, ends_L) if ctx.needs_input_grad[0] else None
            dw_LFD = grouped_mm(dy_RF.t(), x_RD, ends_L) if ctx.needs_input_grad[1] else None
        return dx_RD, dw_LFD, None


def grouped_gemm(x_RD, w_LFD, ends_L):
    """y[r] = w[l] @ x[r] for the expert l whose run of rows holds r: rows ends[l-1] to ends[l].

    x_RD: rows in expert-major order. w_LFD: weights, [out, in] per expert. ends_L: int32, on the
    device, non-decreasing. An expert without rows gets a weight gradient of zeros.
    Replace this one function to try another kernel.
    """
    return _GroupedGemm.apply(x_RD, w_LFD, ends_L)


# --------------------------------------------------------------------------------------------------
# SwiGLU times router weight

# Rows worked on at once on a CPU, so that a block's temporaries stay in its cache: as whole-tensor
# operations the backward below took a third of a training step.
SWIGLU_ROWS = 128


def _row_blocks(*tensors):
    n = len(tensors[0])
    step = SWIGLU_ROWS if tensors[0].device.type == "cpu" else max(n, 1)
    for i in range(0, n, step):
        yield [t[i:i + step] if t is not None else None for t in tensors]


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_R2F, p_R):
        ctx.save_for_backward(h_R2F, p_R)
        y_RF = h_R2F.new_empty(len(h_R2F), h_R2F.shape[1] // 2)
        for h, p, y in _row_blocks(h_R2F, p_R, y_RF):
            gate, up = h.chunk(2, 1)
            act = F.silu(gate) * up
            y.copy_(act if p is None else act.mul_(p[:, None]))
        return y_RF

    @staticmethod
    def backward(ctx, dy_RF):
        h_R2F, p_R = ctx.saved_tensors
        dh_R2F = torch.empty_like(h_R2F)
        dp_R = None if p_R is None else torch.empty_like(p_R)
        for h, p, dy, dh, dp in _row_blocks(h_R2F, p_R, dy_RF, dh_R2F, dp_R):
            gate, up = h.chunk(2, 1)
            dgate, dup = dh.chunk(2, 1)
            act = F.silu(gate)
            if p is not None:
                dp.copy_(torch.linalg.vecdot(dy, act * up))
                dy = dy * p[:, None].to(dy.dtype)
            torch.mul(dy, act, out=dup)
            torch.ops.aten.silu_backward.grad_input(dy * up, gate, grad_input=dgate)
        return dh_R2F, dp_R


def swiglu(h_R2F, p_R=None):
    """y_RF = p · silu(gate) · up, with h_R2F = [gate, up] side by side and p_R (fp32, optional) the
    router weight of each row."""
    return _SwiGLU.apply(h_R2F, p_R)


def rms_norm(x_TD, weight_D, eps):
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
