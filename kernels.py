"""Compute back-ends: the arithmetic that makes small experts fast.

Gathers, grouped products and SwiGLU exist twice: in plain torch, which runs everywhere and is the oracle, and
as Triton kernels for Hopper and Blackwell. The knob `gemm` chooses, `use` obeys it, and each function asks
`backend` once.

Everything here works on rows. A gather is described by two integer maps that are each other's inverse
(which row a slot holds, which slots a row went to), so that forward and backward are both gathers: no
scatter-add, no atomics, bit-reproducible. A grouped GEMM multiplies groups of rows, each by the weight of
its expert; how many rows a group has lives on the device, where no host reads it (see Groups).

Shapes: T tokens, D model width, F expert width, L experts on this rank, K experts per token,
R rows of a grouped GEMM, C rows of room per group, G groups.

Rows that belong to no group are never computed and hold garbage, as in every such kernel; callers only
ever read rows that a map points at.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from memory import Done, within
from settings import knob

# Not imported where it is used, as other optional packages are: a kernel finds its names in its module.
try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
    INTERPRETED = triton.knobs.runtime.interpret    # TRITON_INTERPRET=1: kernels run as Python, on any machine
    jit = triton.jit
except ImportError:
    triton, INTERPRETED = None, False
    jit = lambda function=None, **how: function or jit


@dataclass
class KernelConfig:
    precision: str = knob("auto", "parameters and arithmetic; auto: bf16 on a GPU, fp32 elsewhere; below that, "
                          "operands of linear layers and experts are rounded, and all else is bf16",
                          choices=("auto", "fp32", "bf16", "fp8", "fp8_block", "mxfp8", "nvfp4"))
    emulate: bool = knob(False, "round as a precision below bf16 does, in torch, instead of computing in it: on "
                         "any machine, to study what it does to the loss")
    bf16_layers: int = knob(0, "how many of the first and of the last layers stay bf16 where precision is lower",
                            least=0)
    gemm: str = knob("auto", "who computes experts, permutes and SwiGLU; auto: triton on a GPU from sm_90 on, "
                     "torch elsewhere", choices=("auto", "triton", "torch"))
    comm_sms: int = knob(16, "multiprocessors of a GPU that Triton's grouped GEMMs leave to exchanges, if there are "
                         "other ranks", least=0)


def check(cfg, device):
    """Why the kernels cannot run as `cfg` asks on `device`. (That there is such a device is not checked here.)"""
    if device.type == "cuda" and device.index >= torch.cuda.device_count():
        return []
    problems, size = check_precision(cfg, device), dtype_of(cfg.precision, device).itemsize
    if cfg.gemm == "triton":
        if triton is None:
            problems.append("gemm=triton, but triton is not installed: install it, or set gemm=torch")
        elif device.type == "cpu" and not INTERPRETED:
            problems.append("gemm=triton needs a GPU, and the device is cpu: set gemm=torch or auto (or, to test "
                            "kernels slowly, TRITON_INTERPRET=1 in the environment)")
        elif device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 9:
            problems.append(f"gemm=triton needs a GPU from sm_90 on, not {torch.cuda.get_device_name(device)}: "
                            f"set gemm=torch or auto")
        for name, width in (("d_model", cfg.d_model), ("d_expert/etp", cfg.d_expert // cfg.etp)):
            if width * size % 16:
                problems.append(f"{name}={width} is not a multiple of {16 // size}, as gemm=triton needs (rows of "
                                f"whole 16 bytes): change {name}, or set gemm=torch")
    if device.type == "cuda":
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        if cfg.comm_sms >= sms:
            problems.append(f"comm_sms={cfg.comm_sms} leaves none of this GPU's {sms} multiprocessors: lower it")
    return problems


@dataclass
class Backend:
    triton: bool = False
    comm_sms: int = 0
    defer_wgrad: bool = False
    onednn: bool = False


backend = Backend()


def use(cfg, device):
    """From here on this process computes as `cfg` says. Every forward pass begins with it, so that two models
    in one process can differ."""
    size = dtype_of(cfg.precision, device).itemsize
    auto = (triton is not None and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
            and cfg.d_model * size % 16 == cfg.d_expert // cfg.etp * size % 16 == 0)
    backend.triton = auto if cfg.gemm == "auto" else cfg.gemm == "triton"
    backend.comm_sms = cfg.comm_sms if dist.is_initialized() and dist.get_world_size() > 1 else 0
    backend.defer_wgrad = cfg.defer_wgrad


def dtype_of(precision, device):
    """The dtype of parameters and activations for the knob `precision` on `device`."""
    if precision == "auto":
        precision = "bf16" if device.type == "cuda" else "fp32"
    return torch.float32 if precision == "fp32" else torch.bfloat16


# --------------------------------------------------------------------------------------------------
# Time and peaks: what the efficiency columns are made of


class Clock:
    """Seconds spent per named span since the last `take`, without stopping a GPU to find out.

    On the CPU a span is wall time. On CUDA it is a pair of events on the current stream, read later. What a CUDA
    graph replays is not measured.
    """

    def __init__(self):
        self.spans = {}

    @contextlib.contextmanager
    def span(self, name, device):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            yield
            return
        start = self.mark(device)
        yield
        self.spans.setdefault(name, []).append((start, self.mark(device)))

    @staticmethod
    def mark(device):
        """This moment of the device."""
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self):
        """Returns the spans recorded so far, to be handed to `durations` once the device is done."""
        spans, self.spans = self.spans, {}
        return spans

    @staticmethod
    def durations(spans, name):
        """Seconds of every span `name`."""
        return [b - a if isinstance(a, float) else a.elapsed_time(b) / 1e3 for a, b in spans.get(name, ())]


clock = Clock()

# Dense TFLOPS of one GPU from the vendors' datasheets, by a part of the device's name. GB parts first:
# their names contain the name of the plain part.
PEAK_TFLOPS = {
    ("GB300", torch.bfloat16): 2500, ("GB200", torch.bfloat16): 2500,
    ("H200", torch.bfloat16): 989, ("H100 80GB HBM3", torch.bfloat16): 989,
    ("GB300", torch.float8_e4m3fn): 5000, ("GB200", torch.float8_e4m3fn): 5000,
    ("H200", torch.float8_e4m3fn): 1979, ("H100 80GB HBM3", torch.float8_e4m3fn): 1979,
    ("GB300", torch.float4_e2m1fn_x2): 15000, ("GB200", torch.float4_e2m1fn_x2): 10000,
}


def multiplied_dtype(cfg, device):
    """Of the numbers that matrices are multiplied in."""
    if cfg.precision in RECIPES and not cfg.emulate:
        return torch.float4_e2m1fn_x2 if cfg.precision == "nvfp4" else torch.float8_e4m3fn
    return dtype_of(cfg.precision, device)


def peak_flops(device, dtype):
    """FLOP/s this rank could reach at `dtype`, or None where unknown: a wrong MFU is worse than none.

    On a CPU there is no datasheet figure to trust, so large matmuls are timed: call it on all ranks at once,
    since they share the cores.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return next((1e12 * t for (part, d), t in PEAK_TFLOPS.items() if part in name and d == dtype), None)
    a = torch.ones(768, 768, dtype=dtype)
    with onednn(device, a.numel()):
        a @ a
        start = time.perf_counter()     # of all together: the fastest of them had a shared core to itself
        for _ in range(12):
            a @ a
    return 12 * 2 * 768**3 / (time.perf_counter() - start)


# --------------------------------------------------------------------------------------------------
# Gathers


def gather_rows(x_TD, row_R):
    """y[r] = x[row[r]]; where row is -1 the result is arbitrary but finite if x is."""
    if backend.triton:
        return _triton_gather(x_TD, row_R[:, None])
    if len(x_TD) == 0:
        return x_TD.new_zeros(len(row_R), *x_TD.shape[1:])
    return x_TD.index_select(0, row_R.clamp_min(0))


def gather_sum(y_RD, slot_TK):
    """x[t] = sum over k of y[slot[t, k]]; a slot of -1 contributes exactly zero, whatever y holds."""
    if backend.triton:
        return _triton_gather(y_RD, slot_TK)
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
# Low precision
#
# A linear layer has three products: forward (summed over the input's width), data gradient (over the output's) and
# weight gradient (over rows). Both operands of each are rounded in blocks along the dimension that is summed, from
# their full precision: so up to two roundings of a tensor exist. The gradient of rounding is the identity.


@dataclass(frozen=True)
class Grid:
    """Floating-point numbers with so many bits of mantissa; below the power `least` they are evenly spaced."""
    mantissa: int
    least: int
    most: float


E4M3, E5M2, E2M1 = Grid(3, -6, 448.0), Grid(2, -14, 57344.0), Grid(1, 0, 6.0)


@dataclass(frozen=True)
class Recipe:
    """How operands are rounded: with Transformer Engine's defaults, but for what `emulate` leaves out (below).

    block     numbers along the summed dimension that share a scale; 0: a whole matrix (of one expert) does
    square    weights have one scale per block × block, so that both their roundings are the same
    scales    fp32; pow2: powers of two, rounded up; e4m3: e4m3 times one fp32 scale of the whole matrix
    values, gradients   what numbers become after division by their scale
    align     an expert's rows are filled up to a multiple of this
    """
    block: int
    square: bool
    scales: str
    values: Grid
    gradients: Grid
    align: int


RECIPES = {
    "fp8": Recipe(0, False, "fp32", E4M3, E5M2, 16),
    "fp8_block": Recipe(128, True, "pow2", E4M3, E4M3, 16),
    "mxfp8": Recipe(32, False, "pow2", E4M3, E4M3, 32),
    # without the random Hadamard transform and the stochastic rounding of gradients that the hardware's recipe has
    "nvfp4": Recipe(16, True, "e4m3", E2M1, E2M1, 128),
}


def recipe_of(cfg, layer):
    """The recipe of block number `layer`, or None where it computes in what its parameters are. Modules for multi-token
    prediction come behind the last layer, and are not counted among those that stay bf16."""
    first_or_last = layer < cfg.bf16_layers or cfg.n_layer - cfg.bf16_layers <= layer < cfg.n_layer
    if cfg.precision not in RECIPES or first_or_last:
        return None
    return RECIPES[cfg.precision] if cfg.emulate else TransformerEngine(cfg.precision)


def check_precision(cfg, device):
    if cfg.precision not in RECIPES:
        return []
    problems = []
    if 2 * cfg.bf16_layers >= cfg.n_layer:
        problems.append(f"bf16_layers={cfg.bf16_layers} leaves none of the n_layer={cfg.n_layer} layers to "
                        f"precision={cfg.precision}: lower it, or set precision=bf16")
    if not cfg.emulate and (lack := TransformerEngine.lack(cfg.precision, device)):
        problems.append(f"precision={cfg.precision} needs Transformer Engine and a GPU that has {cfg.precision}, but "
                        f"{lack}: set precision=bf16, or emulate=true to see what it does to the loss")
    if cfg.capacity_factor and cfg.capacity_scope == "rank":
        problems.append(f"capacity_scope=rank gives an expert a number of rows that no host knows, as "
                        f"precision={cfg.precision} must: set capacity_scope=expert")
    return problems


_EXPONENT = 0x7F800000      # these bits of an fp32 number alone are the power of two at or below it


def _power(x):
    return (x.view(torch.int32) & _EXPONENT).view(torch.float32)


def on_grid(x, grid):
    """fp32 x rounded to the nearest number of the grid, ties to the even one, what is beyond its ends to these."""
    x = x.clamp(-grid.most, grid.most)
    step = _power(x).clamp_(min=2.0**grid.least).mul_(2.0**-grid.mantissa)
    return x.div_(step).round_().mul_(step)


def scales_of(amax, scales, grid):
    """What blocks with these largest magnitudes [..., m, 1, n, 1] are divided by, so that they fit the grid."""
    scale = (amax / grid.most).clamp_min(2.0**-126)     # the smallest normal number: nothing is divided by zero
    if scales == "pow2":
        below = _power(scale)
        return torch.where(below < scale, 2 * below, below)
    if scales == "e4m3":
        whole = scale.amax((-4, -2), keepdim=True) / E4M3.most
        return on_grid(scale / whole, E4M3) * whole
    return scale


def rounded(recipe, x, along, what="", splits=None):
    """x [..., M, N], as one operand of a product that sums over M (along=0) or N (1), in its own dtype: what the
    recipe can represent of it. what: "weight" or "gradient". splits: the rows are cut into matrices of so many."""
    if recipe is None or not x.numel():
        return x
    if splits is not None:
        return torch.cat([rounded(recipe, rows, along, what) for rows in x.split(splits)])
    (M, N), grid = x.shape[-2:], recipe.gradients if what == "gradient" else recipe.values
    square = recipe.square and what == "weight"
    rows = recipe.block or M if along == 0 or square or not recipe.block else 1
    cols = recipe.block or N if along == 1 or square or not recipe.block else 1
    # [..., m, rows, n, cols]; zeros fill up the last blocks
    blocks = F.pad(x.float(), (0, -N % cols, 0, -M % rows)).unflatten(-1, (-1, cols)).unflatten(-3, (-1, rows))
    scale = scales_of(blocks.abs().amax((-3, -1), keepdim=True), recipe.scales, grid)
    y = on_grid(blocks / scale.clamp_min(2.0**-126), grid).mul_(scale)
    return y.flatten(-4, -3).flatten(-2)[..., :M, :N].to(x.dtype)


def to_e4m3(x_TD, block=128):
    """→ (bytes [T, D] of e4m3 numbers, scales [T, D / block, rounded up], fp32): x is about numbers · scales."""
    blocks = F.pad(x_TD.float(), (0, -x_TD.shape[1] % block)).unflatten(1, (-1, block))
    scale = scales_of(blocks.abs().amax(2, keepdim=True), "fp32", E4M3)
    codes = (blocks / scale).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes.flatten(1)[:, :x_TD.shape[1]], scale[:, :, 0]


def from_e4m3(codes_TD, scales, dtype, block=128):
    """The inverse of to_e4m3, as far as there is one."""
    return (codes_TD.view(torch.float8_e4m3fn).float()
            * scales.repeat_interleave(block, 1)[:, :codes_TD.shape[1]]).to(dtype)


# --------------------------------------------------------------------------------------------------
# Matrix products


_queue = collections.deque()     # weight gradients put off: (segment, parameter, what computes its gradient)
_driven, _segment = False, 0


@contextlib.contextmanager
def weight_gradients_put_off():
    """Around the backward of a segment whose caller drains the queue at last. Elsewhere autograd is as usual. What is put
    off in here is computed while the driver waits for something (wait_for), or before the segment after the next: so
    long are its operands kept. Without defer_wgrad nothing is put off."""
    global _driven, _segment
    _segment += 1
    drain_weight_gradients(before=_segment - 1)
    _driven = True
    try:
        yield
    finally:
        _driven = False


def weight_gradient(w, compute):
    """For a backward: the gradient of w, or None where it will be, or was already, added to w.grad. compute(into) adds it
    to `into` and returns None, or returns it, as it must where `into` is None. Under the driver it is called when that
    next waits for something else: nobody needs a weight gradient before the step's end, but other ranks wait for the
    data gradient."""
    if not (_driven and w.is_leaf) or w.grad is None:
        return compute(None)
    if not backend.defer_wgrad:
        return compute(w.grad)
    _queue.append((_segment, w, functools.partial(compute, w.grad)))
    return None


def after_weight_gradients(call):
    """Runs call() in drain_weight_gradients, when all that is put off by now is computed."""
    _queue.append((_segment, None, call))


@contextlib.contextmanager
def onednn(device, size):
    """Within it oneDNN multiplies fp32 matrices on a CPU, once allow_onednn was called: 5 to 12 % faster than MKL (on a
    Zen 4), which torch takes unless results may be rounded to bf16. size: of the weight; for a small one it costs more
    to make the code than that saves."""
    if device.type != "cpu" or not backend.onednn or size < 2**14:
        yield
        return
    settings = torch.backends.mkldnn.matmul
    before, settings.fp32_precision = settings.fp32_precision, "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def allow_onednn():
    """Lets `onednn` be what it says where oneDNN does not really round: on all CPUs without AMX."""
    backend.onednn, x = torch.backends.mkldnn.is_available(), torch.full((256, 256), 1 + 2.0**-20)
    with onednn(x.device, x.numel()):
        backend.onednn = torch.equal(x @ torch.eye(256), x)


@within("weight gradients")
@torch.no_grad()
def drain_weight_gradients(before=math.inf, work=None):
    """Computes what segments `before` that one have put off, in the order in which it would have been computed, so
    that sums round alike; only until `work` is complete, if given."""
    while _queue and _queue[0][0] < before and not (work and work.is_completed()):
        _, w, compute = _queue.popleft()
        if (dw := compute()) is not None:
            w.grad.add_(dw)


def wait_for(works, name, device):
    """Waits for works that go on by themselves, and computes weight gradients meanwhile. The clock's span `name` is
    what is waited beyond that. A GPU is given all of them to do: only it knows when works are complete."""
    for work in works:
        drain_weight_gradients(work=None if device.type == "cuda" else work)
    with clock.span(name, device):
        for work in works:
            work.wait()


def matrix(w, first=0):
    """A view of a weight whose out dimensions, from `first` on, are one: [2, F, D] → [2·F, D]; with first=1,
    [L, 2, F, D] → [L, 2·F, D]."""
    return w.flatten(first, -2)


class Alone:
    """The group of a rank that needs nobody's help."""

    size = 1
    all_gather = staticmethod(lambda x: x)
    start_all_gather = start_reduce_scatter = staticmethod(lambda x: (x, Done))


class Linear(torch.autograd.Function):
    """Products of the tokens of all ranks of `group` with some weights [out, in] or [2, out, in], in the weights' dtype
    or the precision of `recipe`: x_TD → [G, out] each. x is kept as it is, and the weight gradients may be put off."""

    @staticmethod
    def forward(ctx, group, recipe, x_TD, *weights):
        ctx.group, ctx.recipe = group, recipe
        ctx.weights = weights   # the parameters themselves: what was saved comes back without its .grad
        ctx.save_for_backward(x_TD, *weights)
        x_GD = rounded(recipe, group.all_gather(x_TD.to(weights[0].dtype)), 1)
        with onednn(x_GD.device, weights[0].numel()):
            return tuple(F.linear(x_GD, rounded(recipe, matrix(w), 1, "weight")) for w in weights)

    @staticmethod
    def backward(ctx, *grads):
        (x_TD, *weights), recipe = ctx.saved_tensors, ctx.recipe
        # gathered tokens are not kept but gathered again, behind the data gradient, whose scatter then goes behind the
        # weight gradients
        x_GD, gathering = ctx.group.start_all_gather(x_TD)
        operands = ((rounded(recipe, dy, 1, "gradient"), rounded(recipe, matrix(w), 0, "weight"))
                    for dy, w in zip(grads, weights))
        with onednn(x_TD.device, weights[0].numel()):
            dx_GD = torch.matmul(*next(operands))
            for dy, w in operands:
                dx_GD.addmm_(dy, w)
        gathering.wait()
        dx_TD, scattering = ctx.group.start_reduce_scatter(dx_GD.to(x_TD.dtype))

        def gradient(w, dy, into):
            dy, x = rounded(recipe, dy, 0, "gradient"), rounded(recipe, x_GD.to(dy.dtype), 0)
            with onednn(x.device, w.numel()):
                if into is None or into.dtype != dy.dtype:
                    return (dy.t() @ x).view_as(w)
                matrix(into).addmm_(dy.t(), x)      # nothing in between is stored

        dw = [weight_gradient(w, functools.partial(gradient, w, dy)) for w, dy in zip(ctx.weights, grads)]
        if ctx.group.size > 1:
            wait_for([scattering], "scatter", x_TD.device)
        return None, None, dx_TD, *dw


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, at_G, w_VD):
        ctx.weight = w_VD
        ctx.save_for_backward(at_G)
        return F.embedding(at_G, w_VD)

    @staticmethod
    def backward(ctx, dy_GD):
        at_G, = ctx.saved_tensors
        of_table = lambda _: torch.ops.aten.embedding_dense_backward(dy_GD, at_G, len(ctx.weight), -1, False)
        return None, weight_gradient(ctx.weight, of_table)


def lookup(at_G, w_VD):
    """Rows at_G of the table w_VD. Its gradient takes its turn among those put off: the table may be the head too, and
    a sum must not depend on when the other part of it was computed."""
    return _Lookup.apply(at_G, w_VD)


def linear(x_TD, w_FD, recipe=None):
    """x_TD @ w_FD.T, as `Linear`."""
    if isinstance(recipe, TransformerEngine):
        return recipe.linear(x_TD, w_FD)
    return Linear.apply(Alone, recipe, x_TD, w_FD)[0]


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


class Groups:
    """Which rows go to which expert: group g has counts[g] rows from row starts[g] on, and expert g % L
    multiplies them. Starts and counts live on the device.

    packed  one group per expert, one behind the other: what dropless dispatch and by_expert produce
    padded  [W, L, C]: a group per (source rank, expert) with room for C rows each, as a capacity buffer arrives.
            A product leaves zeros in the room that is not used.

    Without a capacity, and in low precision, groups are packed and the host knows their sizes (splits). In low
    precision they may have been filled up with rows that belong to nobody (False in real_R).
    """

    splits = real_R = None

    def __init__(self, starts_G, counts_G, rows, experts, room=0):
        self.starts_G, self.counts_G, self.rows, self.experts, self.room = starts_G, counts_G, rows, experts, room
        self._tiles = {}

    @classmethod
    def packed(cls, ends_L, rows):
        """ends_L: int32, non-decreasing: expert l has the rows ends[l-1] to ends[l] of `rows`."""
        groups = cls(torch.cat([ends_L.new_zeros(1), ends_L[:-1]]), ends_L.diff(prepend=ends_L.new_zeros(1)), rows,
                     len(ends_L))
        groups.ends_L = ends_L
        return groups

    @classmethod
    def padded(cls, counts_WL, room):
        starts_G = room * torch.arange(counts_WL.numel(), device=counts_WL.device)
        return cls(starts_G, counts_WL.flatten(), counts_WL.numel() * room, counts_WL.shape[1], room)

    def tiles(self, block):
        """int32 [tiles, 5], the work list of a kernel that computes `block` rows at once: slab, first row in the
        slab, expert, rows that are real, rows to write (0: this tile does not exist). A slab is a piece of the
        buffer that one group owns, or the whole of a packed one: loads and stores clip at its end.

        How many tiles there are depends on the counts; how many there can be does not, and that is the shape.
        """
        if block in self._tiles:
            return self._tiles[block]
        G, device = len(self.counts_G), self.counts_G.device
        if self.room:
            per_group = -(-self.room // block)
            tile = torch.arange(G * per_group, device=device)
            group, nth = tile // per_group, tile % per_group
            slab, first = group, nth * block
            write = (self.room - first).clamp_max(block)
        else:
            ends_G = (-(-self.counts_G // block)).cumsum(0)
            tile = torch.arange(-(-self.rows // block) + min(G, self.rows), device=device)
            group = torch.searchsorted(ends_G, tile, right=True).clamp_max(G - 1)
            nth = tile - ends_G[group] - (-self.counts_G[group] // block)
            slab, first = torch.zeros_like(tile), self.starts_G[group] + nth * block
            write = (self.counts_G[group] - nth * block).clamp(0, block)
        real = (self.counts_G[group] - nth * block).clamp(0, block)
        table = torch.stack([slab, first, group % self.experts, real, write], 1).to(torch.int32)
        self._tiles[block] = table
        return table

    def runs(self, of=64):
        """(expert, slice of rows) for products one by one: a group is a run of whole `of`s and the rest, because oneDNN
        makes code for every number of rows it meets."""
        start = 0
        for expert, n in enumerate(self.splits):
            middle, end = start + n - n % of, start + n
            yield expert, slice(start, middle)
            yield expert, slice(middle, end)
            start = end

    def by_expert(self, x_RD):
        """A padded buffer as [L, W·C, D], zero where no row is: what a batched matmul takes."""
        real_GC = torch.arange(self.room, device=x_RD.device) < self.counts_G[:, None]
        x_GCD = torch.where(real_GC[:, :, None], x_RD.view(-1, self.room, x_RD.shape[1]), 0)
        return x_GCD.unflatten(0, (-1, self.experts)).transpose(0, 1).flatten(1, 2)

    def by_source(self, y_LRD):
        """The inverse of by_expert: [R, D]."""
        return y_LRD.unflatten(1, (-1, self.room)).transpose(0, 1).flatten(0, 2)

    def real(self, x_RD):
        """x_RD with zeros in the rows that only fill up: they would have a say in the scale of their neighbours."""
        return x_RD if self.real_R is None else torch.where(self.real_R[:, None], x_RD, 0)


def gemm_rows(x_RD, w_LDN, groups, row_R=None):
    """y[r] = x[r] @ w[l] for every row r of a group of expert l; x[row[r]] instead of x[r] where a map is given.
    Either way round the last two dimensions of w may lie in memory."""
    if backend.triton:
        return _triton_rows(x_RD, w_LDN, groups, row_R)
    if row_R is not None:
        x_RD = gather_rows(x_RD, row_R)
    if groups.room:
        return groups.by_source(groups.by_expert(x_RD) @ w_LDN)
    if groups.splits is not None and not x_RD.is_cuda:
        y_RN = x_RD.new_empty(len(x_RD), w_LDN.shape[2])
        with onednn(x_RD.device, w_LDN[0].numel()):
            for expert, rows in groups.runs():
                torch.mm(x_RD[rows], w_LDN[expert], out=y_RN[rows])
        return y_RN
    return grouped_mm(x_RD, w_LDN, groups.ends_L)


def gemm_experts(dy_RF, x_RD, groups, row_R=None, into=None):
    """dw[l] = sum over the rows r of expert l of dy[r] xᵀ[r], [L, F, D]; zeros for an expert without rows.
    `into`: an fp32 tensor that this is added to, with nothing in between stored."""
    if backend.triton:
        return _triton_experts(dy_RF, x_RD, groups, row_R, into)
    if row_R is not None:
        x_RD = gather_rows(x_RD, row_R)
    if groups.room:
        dw_LFD = groups.by_expert(dy_RF).transpose(1, 2) @ groups.by_expert(x_RD)
    elif groups.splits is not None and not x_RD.is_cuda:
        dw_LFD = into
        if into is None or into.dtype != x_RD.dtype:
            dw_LFD = x_RD.new_zeros(groups.experts, dy_RF.shape[1], x_RD.shape[1])
        for dw, dy, x in zip(dw_LFD, dy_RF.split(groups.splits), x_RD.split(groups.splits)):
            dw.addmm_(dy.t(), x)
    else:
        dw_LFD = grouped_mm(dy_RF.t(), x_RD, groups.ends_L)
    return dw_LFD if into is None or into is dw_LFD else into.add_(dw_LFD)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RD, w, groups, row_R, slot_TK, recipe):
        if row_R is not None and (recipe or not backend.triton):
            # torch cannot gather as it loads, nor is a scale known before: keep the gathered rows
            x_RD, row_R = gather_rows(x_RD, row_R), None
        x_RD = groups.real(x_RD)
        ctx.groups, ctx.weight = groups, w      # the parameter itself: what was saved comes back without its .grad
        ctx.recipe = recipe
        ctx.save_for_backward(x_RD, w, row_R, slot_TK)
        with clock.span("gemm", x_RD.device):
            return gemm_rows(rounded(recipe, x_RD, 1, splits=groups.splits),
                             rounded(recipe, matrix(w, 1), 1, "weight").transpose(1, 2), groups, row_R)

    @staticmethod
    def backward(ctx, dy_RF):
        x_RD, w, row_R, slot_TK = ctx.saved_tensors
        groups, weight, recipe = ctx.groups, ctx.weight, ctx.recipe
        dx_RD = dw = None
        dy_RF = groups.real(dy_RF.contiguous())
        with clock.span("gemm", x_RD.device):
            if ctx.needs_input_grad[0]:
                dx_RD = gemm_rows(rounded(recipe, dy_RF, 1, "gradient", groups.splits),
                                  rounded(recipe, matrix(w, 1), 0, "weight"), groups)

        def gradient(into):
            with clock.span("gemm", x_RD.device):
                dy = rounded(recipe, dy_RF, 0, "gradient", groups.splits)
                x = rounded(recipe, x_RD, 0, splits=groups.splits)
                if into is None or into.dtype != torch.float32:
                    return gemm_experts(dy, x, groups, row_R).view_as(weight)
                gemm_experts(dy, x, groups, row_R, into=matrix(into, 1))    # no dw in between

        if ctx.needs_input_grad[1]:
            dw = weight_gradient(weight, gradient)
        if dx_RD is not None and slot_TK is not None:
            dx_RD = gather_sum(dx_RD, slot_TK)
        return dx_RD, dw, None, None, None, None


def grouped_gemm(x_RD, w_LFD, groups, row_R=None, slot_TK=None, recipe=None):
    """y[r] = w[l] @ x[r] for every row r of a group of expert l.

    w_LFD: weights, [out, in] per expert, where out may be several dimensions. An expert without rows gets a
    weight gradient of zeros. With row_R and slot_TK, as in `permute`, x is gathered on the way in:
    y[r] = w[l] @ x[row[r]], and no gathered copy is kept where a kernel can do without. With a layer's `recipe`, in
    its precision; `groups` then know their splits. Replace gemm_rows and gemm_experts to try other kernels.
    """
    if isinstance(recipe, TransformerEngine):
        return recipe.grouped(x_RD if row_R is None else permute(x_RD, row_R, slot_TK), w_LFD, groups)
    return _GroupedGemm.apply(x_RD, w_LFD, groups, row_R, slot_TK, recipe)


class TransformerEngine:
    """A block's linear layers and experts through Transformer Engine (2.4 or newer), whose kernels compute what
    `rounded` only imitates.

    A module is made for each weight when it is first used. It computes with the parameter's own memory and writes
    gradients into the parameter's own .grad (its name for that is main_grad), so that flat buffers, optimizer and
    checkpoints know nothing of it. It computes a weight gradient at once, not when the queue is drained.
    """

    # its recipe, and what it calls that when asked whether this GPU has it
    NAMES = {"fp8": ("Float8CurrentScaling", "fp8"), "fp8_block": ("Float8BlockScaling", "fp8_block_scaling"),
             "mxfp8": ("MXFP8BlockScaling", "mxfp8"), "nvfp4": ("NVFP4BlockScaling", "nvfp4")}

    def __init__(self, precision):
        self.name, self.align = precision, RECIPES[precision].align
        self.modules, self.versions = {}, {}

    @classmethod
    def lack(cls, precision, device):
        """Why this process cannot compute so on `device`, or nothing."""
        if importlib.util.find_spec("transformer_engine") is None:
            return f"transformer_engine is not installed and the device is {device.type}"
        if device.type == "cpu":
            return "the device is cpu"
        try:
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe
            from transformer_engine.pytorch.fp8 import FP8GlobalStateManager
        except Exception as error:      # its libraries may be missing, or made for another torch
            return f"transformer_engine cannot be imported ({str(error).strip().partition(chr(10))[0]})"
        name, asked = cls.NAMES[precision]
        if not hasattr(recipe, name):
            return f"the one installed is too old for it (it has no {name})"
        if hasattr(te, f"is_{asked}_available"):    # from 2.9 on
            fine, reason = getattr(te, f"is_{asked}_available")(return_reason=True)
        else:
            fine, reason = getattr(FP8GlobalStateManager, f"is_{asked}_available")()
        return "" if fine else f"{torch.cuda.get_device_name(device)} has not: {reason.rstrip('.')}"

    def autocast(self):
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe
        recipe = getattr(recipe, self.NAMES[self.name][0])()
        if hasattr(te, "autocast"):     # from 2.9 on
            return te.autocast(enabled=True, recipe=recipe)
        return te.fp8_autocast(enabled=True, fp8_recipe=recipe)

    def linear(self, x_TD, w_FD):
        out, width = w_FD.shape
        module = self.module(w_FD, [w_FD], lambda te, **how: te.Linear(width, out, **how), ["weight"])
        missing = -len(x_TD) % self.align
        x = F.pad(x_TD, (0, 0, 0, missing)) if missing else x_TD.contiguous()
        with self.autocast():
            return module(x, is_first_microbatch=self.is_first(w_FD))[:len(x_TD)]

    def grouped(self, x_RD, w, groups):
        w_LFD = matrix(w, 1)
        L, out, width = w_LFD.shape
        if not groups.rows:     # nothing to compute, but it must have been computed from x
            return F.linear(x_RD, w_LFD[0].detach())
        module = self.module(w, w_LFD, lambda te, **how: te.GroupedLinear(L, width, out, **how),
                             [f"weight{i}" for i in range(L)])
        with self.autocast():
            y_RF = module(groups.real(x_RD), groups.splits, is_first_microbatch=self.is_first(w))
        return groups.real(y_RF)    # whose gradients are zero in filler rows too

    def module(self, w, parts, make, names):
        """The module that multiplies by `w`, a parameter or a view of one, cut into the matrices `parts`."""
        key = w.data_ptr(), w.shape
        if key not in self.modules:
            import transformer_engine.pytorch as te
            parameter = w if isinstance(w, torch.nn.Parameter) else w._base
            grad = parameter.grad
            module = make(te, bias=False, params_dtype=w.dtype, device=w.device, init_method=lambda weight: None,
                          fuse_wgrad_accumulation=grad is not None)
            self.modules[key] = module
            for name, part in zip(names, parts):
                weight = torch.nn.Parameter(part.detach(), requires_grad=parameter.requires_grad)
                if grad is not None:
                    offset = grad.storage_offset() + part.storage_offset() - parameter.storage_offset()
                    weight.main_grad = grad.as_strided(part.shape, part.stride(), offset)
                setattr(module, name, weight)
        return self.modules[key]

    def is_first(self, w):
        """Whether `w` has changed since this was last asked: then it is rounded anew, else what was kept of it
        serves. None, where no backward follows: nothing is kept. (Backward after True writes main_grad where it
        would else add to it. That is right because gradients begin as zeros and microbatches go back in the order
        in which they came.)"""
        if not torch.is_grad_enabled():
            return None
        key = w.data_ptr(), w.shape
        first, self.versions[key] = self.versions.get(key) != w._version, w._version
        return first


# --------------------------------------------------------------------------------------------------
# SwiGLU times router weight

# Rows worked on at once on a CPU, so that a block's temporaries stay in its cache: as whole-tensor
# operations the backward below took a third of a training step.
SWIGLU_ROWS = 256


def _row_blocks(*tensors):
    """Blocks of rows of each tensor, side by side; what is None stays None."""
    n = len(tensors[0])
    rows = SWIGLU_ROWS if tensors[0].device.type == "cpu" else max(n, 1)
    return zip(*([None] * -(-n // rows) if t is None else t.split(rows) for t in tensors)) if n else ()


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h_R2F, p_R):
        h_R2F = h_R2F.contiguous()
        ctx.save_for_backward(h_R2F, p_R)
        if backend.triton:
            return _triton_swiglu(h_R2F, p_R)
        y_RF = h_R2F.new_empty(len(h_R2F), h_R2F.shape[1] // 2)
        p_R1 = None if p_R is None else p_R[:, None]
        for gate, up, p, y in _row_blocks(*h_R2F.chunk(2, 1), p_R1, y_RF):
            act = F.silu(gate).mul_(up)
            y.copy_(act) if p is None else torch.mul(act, p, out=y)
        return y_RF

    @staticmethod
    def backward(ctx, dy_RF):
        return swiglu_backward(dy_RF, *ctx.saved_tensors)


def swiglu_backward(dy_RF, h_R2F, p_R):
    """The gradients of `swiglu` with respect to h and p."""
    if backend.triton:
        return _triton_swiglu_backward(dy_RF.contiguous(), h_R2F, p_R)
    dh_R2F = torch.empty_like(h_R2F)
    dp_R = None if p_R is None else torch.empty_like(p_R)
    p_R1 = None if p_R is None else p_R[:, None].to(dy_RF.dtype)
    for gate, up, dgate, dup, dy, p, dp in _row_blocks(*h_R2F.chunk(2, 1), *dh_R2F.chunk(2, 1), dy_RF, p_R1, dp_R):
        act = F.silu(gate)
        if p is not None:
            dp.copy_(torch.linalg.vecdot(dy, torch.mul(act, up, out=dup)))
            dy = dy * p
        torch.mul(dy, act, out=dup)
        torch.ops.aten.silu_backward.grad_input(torch.mul(dy, up, out=act), gate, grad_input=dgate)
    return dh_R2F, dp_R


def swiglu(h_R2F, p_R=None):
    """y_RF = p · silu(gate) · up, with h_R2F = [gate, up] side by side and p_R (fp32, optional) the
    router weight of each row."""
    return _SwiGLU.apply(h_R2F, p_R)


class _RMSNorm(torch.autograd.Function):
    """Keeps x and one number per row, as torch's own does on a GPU. On a CPU that keeps two more copies of x."""

    @staticmethod
    def forward(ctx, x_TD, weight_D, eps):
        x = x_TD.float()
        scale_T1 = torch.linalg.vecdot(x, x)[..., None].div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x_TD, weight_D, scale_T1)
        return (x * scale_T1).mul_(weight_D).to(x_TD.dtype)

    @staticmethod
    def backward(ctx, dy_TD):
        x_TD, weight_D, scale_T1 = ctx.saved_tensors
        x, dy, weight = x_TD.float(), dy_TD.float(), weight_D.float()
        both = dy * x
        dweight_D = both.flatten(0, -2).t() @ scale_T1.flatten()
        mean_T1 = (both @ weight)[..., None] / x.shape[-1]
        dx = (dy * weight).mul_(scale_T1).addcmul_(x, mean_T1.mul_(scale_T1**3), value=-1)
        return dx.to(x_TD.dtype), dweight_D.to(weight_D.dtype), None


def rms_norm(x_TD, weight_D, eps):
    if x_TD.is_cuda:
        return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
    return _RMSNorm.apply(x_TD, weight_D, eps)


# --------------------------------------------------------------------------------------------------
# Triton kernels
#
# Row offsets are 64-bit: 300,000 rows of 7,168 are more than 2³¹ elements. (Coordinates of a tensor descriptor
# are 32-bit, the addresses behind them are not.)


@dataclass(frozen=True)
class Tile:
    """What one program of a grouped GEMM computes at once: rows × cols, `inner` of the summed dimension a step."""
    rows: int
    cols: int
    inner: int
    warps: int
    stages: int


# By what a group has on average: from `rows` rows on, the entry serves. fp32 is for tests and small models: it is
# computed exactly, without tensor cores. Nothing is tuned at run time, so that runs can be repeated and captured;
# `python bench.py kernels --tune` times candidates on a GPU.
TILES = {
    # (sm_90 or sm_100 on, product): ((rows, tile), ...)
    (9, "rows"): ((96, Tile(128, 256, 64, 8, 3)), (0, Tile(64, 128, 64, 4, 4))),
    (9, "experts"): ((0, Tile(128, 256, 64, 8, 3)),),
    (10, "rows"): ((96, Tile(128, 256, 64, 8, 3)), (0, Tile(64, 128, 64, 4, 4))),
    (10, "experts"): ((0, Tile(128, 128, 64, 8, 4)),),      # twice the columns would spill where it accumulates
}
EXACT = Tile(64, 64, 32, 8, 2)
TEST = Tile(16, 32, 16, 4, 2)   # for the interpreter: small enough that small matrices have several
BAND = 8                        # row tiles that share the weight's tiles while these are in the cache


def tile_for(capability, product, dtype, rows_per_group):
    if INTERPRETED:
        return TEST
    if dtype == torch.float32:
        return EXACT
    entries = TILES[min(capability, 10), product]
    return next(tile for least, tile in entries if rows_per_group >= least)


def _device_of(x):
    """(compute capability, programs of a persistent kernel) for the device of x."""
    if x.device.type == "cpu":
        return 9, 3     # interpreted, one program after the other
    properties = torch.cuda.get_device_properties(x.device)
    return properties.major, properties.multi_processor_count - backend.comm_sms


@jit
def _locate(t, row_tiles, cols, BAND: tl.constexpr):
    """Work item t → (row tile, column tile): down BAND row tiles, then the next column."""
    band = t // (BAND * cols)
    height = tl.minimum(row_tiles - band * BAND, BAND)
    within = t % (BAND * cols)
    return band * BAND + within % height, within // height


# Without a capacity these numbers are others in every step: a kernel that is made for "divisible by 16" or "1" would be
# made again in the middle of a run.
VARYING = dict(do_not_specialize=["row_tiles", "room", "R"])


@jit(**VARYING)
def rows_kernel(x, w, y, x_ptr, y_ptr, tiles_ptr, row_ptr, row_tiles, N, K, room, x_stride, y_stride,
                GATHER: tl.constexpr, OUT_IN: tl.constexpr, PADDED: tl.constexpr, SPECIALIZE: tl.constexpr,
                BAND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr):
    """gemm_rows. x [slabs, room, K] or, gathered, [rows, K]; w [L, N, K] if OUT_IN, else [L, K, N];
    y [slabs, room, N], all three tensor descriptors. GATHER: "", "descriptor" or "pointers"."""
    cols = tl.cdiv(N, COLS)
    lane = tl.arange(0, ROWS)
    for t in tl.range(tl.program_id(0), row_tiles * cols, tl.num_programs(0), flatten=SPECIALIZE,
                      warp_specialize=SPECIALIZE):
        tile, n = _locate(t, row_tiles, cols, BAND)
        n = n * COLS
        entry = tiles_ptr + tile * 5
        slab = tl.load(entry)
        first = tl.load(entry + 1)
        expert = tl.load(entry + 2)
        real = tl.load(entry + 3)
        write = tl.load(entry + 4)
        r = slab.to(tl.int64) * room + first + lane
        if GATHER != "":
            source = tl.load(row_ptr + r, mask=lane < real, other=0)
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for k in range(0, tl.where(real > 0, K, 0), INNER):     # a tile without rows has nothing to add up
            if GATHER == "descriptor":
                a = x.gather(source.to(tl.int32), k)
            elif GATHER == "pointers":
                kk = k + tl.arange(0, INNER)
                a = tl.load(x_ptr + source.to(tl.int64)[:, None] * x_stride + kk[None, :], mask=kk[None, :] < K,
                            other=0)
            else:
                a = x.load([slab, first, k]).reshape(ROWS, INNER)
            if OUT_IN:
                b = w.load([expert, n, k]).reshape(COLS, INNER).T
            else:
                b = w.load([expert, k, n]).reshape(INNER, COLS)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        out = tl.where((lane < real)[:, None], acc, 0).to(y.dtype)
        if PADDED:
            y.store([slab, first, n], out.reshape(1, ROWS, COLS))
        elif write == ROWS:
            y.store([slab, first, n], out.reshape(1, ROWS, COLS))
        else:       # the rows behind are another group's
            nn = n + tl.arange(0, COLS)
            inside = (lane < write)[:, None] & (nn < N)[None, :]
            tl.store(y_ptr + r[:, None] * y_stride + nn[None, :], out, mask=inside)


@jit
def _expert_rows(dy, x, x_ptr, row_ptr, slab, first, m, n, N, room, real, x_stride, GATHER: tl.constexpr,
                 ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr):
    """INNER rows of dy and of x, at columns m and n."""
    a = dy.load([slab, first, m]).reshape(INNER, ROWS)
    if GATHER == "":
        b = x.load([slab, first, n]).reshape(INNER, COLS)
    else:
        lane = tl.arange(0, INNER)
        source = tl.load(row_ptr + slab.to(tl.int64) * room + first + lane, mask=lane < real, other=0)
        if GATHER == "descriptor":
            b = x.gather(source.to(tl.int32), n)
        else:
            nn = n + tl.arange(0, COLS)
            b = tl.load(x_ptr + source.to(tl.int64)[:, None] * x_stride + nn[None, :], mask=nn[None, :] < N,
                        other=0)
    return a, b


@jit(**VARYING)
def experts_kernel(dy, x, x_ptr, dw_ptr, row_ptr, starts_ptr, counts_ptr, L, sources, M, N, room, x_stride,
                   dw_stride, GATHER: tl.constexpr, PADDED: tl.constexpr, ACCUMULATE: tl.constexpr,
                   BAND: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, INNER: tl.constexpr):
    """gemm_experts: dw [L·M, N]. dy [slabs, room, M], x [slabs, room, N] or, gathered, [rows, N]."""
    rows, cols = tl.cdiv(M, ROWS), tl.cdiv(N, COLS)
    for t in range(tl.program_id(0), L * rows * cols, tl.num_programs(0)):
        expert = t // (rows * cols)
        m, n = _locate(t % (rows * cols), rows, cols, BAND)
        m, n = m * ROWS, n * COLS
        acc = tl.zeros([ROWS, COLS], tl.float32)
        for source in range(0, sources):
            group = source * L + expert
            count = tl.load(counts_ptr + group).to(tl.int32)
            slab = group if PADDED else 0 * group
            start = 0 * count if PADDED else tl.load(starts_ptr + group).to(tl.int32)
            whole = count // INNER * INNER
            for i in range(0, whole, INNER):
                a, b = _expert_rows(dy, x, x_ptr, row_ptr, slab, start + i, m, n, N, room, INNER, x_stride, GATHER,
                                    ROWS, COLS, INNER)
                acc = tl.dot(a.T, b, acc, input_precision="ieee")
            if whole < count:       # what lies behind the last row is anything, NaN too, on both sides
                a, b = _expert_rows(dy, x, x_ptr, row_ptr, slab, start + whole, m, n, N, room, count - whole,
                                    x_stride, GATHER, ROWS, COLS, INNER)
                real = (tl.arange(0, INNER) < count - whole)[:, None]
                acc = tl.dot(tl.where(real, a, 0).T, tl.where(real, b, 0), acc, input_precision="ieee")
        mm, nn = m + tl.arange(0, ROWS), n + tl.arange(0, COLS)
        out = dw_ptr + (expert.to(tl.int64) * M + mm)[:, None] * dw_stride + nn[None, :]
        inside = (mm < M)[:, None] & (nn < N)[None, :]
        if ACCUMULATE:      # no other program adds to this tile, so that the order of sums is fixed
            tl.atomic_add(out, acc, mask=inside, sem="relaxed")
        else:
            tl.store(out, acc.to(dw_ptr.dtype.element_ty), mask=inside)


@jit(**VARYING)
def gather_kernel(x_ptr, y_ptr, row_ptr, R, D, x_stride, y_stride, K: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr):
    """y[r] = sum over k of x[row[r, k]], -1 being a row of zeros."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    for d in range(0, D, COLS):
        col = (d + tl.arange(0, COLS))[None, :]
        total = tl.zeros([ROWS, COLS], tl.float32)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + r * K + k, mask=r < R, other=-1).to(tl.int64)[:, None]
            total += tl.load(x_ptr + row * x_stride + col, mask=(row >= 0) & (col < D), other=0)
        inside = (r < R)[:, None] & (col < D)
        tl.store(y_ptr + r[:, None] * y_stride + col, total.to(y_ptr.dtype.element_ty), mask=inside)


@jit(**VARYING)
def swiglu_kernel(h_ptr, p_ptr, y_ptr, R, F, h_stride, y_stride, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
                  COLS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h_row, y_row = h_ptr + r[:, None] * h_stride, y_ptr + r[:, None] * y_stride
    for f in range(0, F, COLS):
        col = (f + tl.arange(0, COLS))[None, :]
        inside = (r < R)[:, None] & (col < F)
        gate = tl.load(h_row + col, mask=inside, other=0).to(tl.float32)
        up = tl.load(h_row + F + col, mask=inside, other=0).to(tl.float32)
        y = gate * tl.sigmoid(gate) * up
        if WEIGHTED:
            y *= tl.load(p_ptr + r, mask=r < R, other=0)[:, None]
        tl.store(y_row + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@jit(**VARYING)
def swiglu_backward_kernel(dy_ptr, h_ptr, p_ptr, dh_ptr, dp_ptr, R, F, h_stride, y_stride, WEIGHTED: tl.constexpr,
                           ROWS: tl.constexpr, COLS: tl.constexpr):
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    h_row, dy_row = r[:, None] * h_stride, dy_ptr + r[:, None] * y_stride
    dp = tl.zeros([ROWS], tl.float32)
    p = tl.load(p_ptr + r, mask=r < R, other=0) if WEIGHTED else dp + 1
    for f in range(0, F, COLS):
        col = (f + tl.arange(0, COLS))[None, :]
        inside = (r < R)[:, None] & (col < F)
        gate = tl.load(h_ptr + h_row + col, mask=inside, other=0).to(tl.float32)
        up = tl.load(h_ptr + h_row + F + col, mask=inside, other=0).to(tl.float32)
        dy = tl.load(dy_row + col, mask=inside, other=0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dp += tl.sum(dy * silu * up, 1)
        dy *= p[:, None]
        dgate = dy * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(dh_ptr + h_row + col, dgate.to(dh_ptr.dtype.element_ty), mask=inside)
        tl.store(dh_ptr + h_row + F + col, (dy * silu).to(dh_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(dp_ptr + r, dp, mask=r < R)


# What follows launches them.

POINTWISE = dict(ROWS=8, COLS=256)      # 8 bf16 are 16 bytes: a warp reads 256 columns of a row at once


def _triton_gather(x_TD, row_RK):
    (R, K), D = row_RK.shape, x_TD.shape[1]
    y_RD = x_TD.new_empty(R, D)
    if x_TD.stride(1) != 1:
        x_TD = x_TD.contiguous()
    if R:
        gather_kernel[triton.cdiv(R, POINTWISE["ROWS"]),](
            x_TD, y_RD, row_RK.contiguous(), R, D, x_TD.stride(0), y_RD.stride(0), K, **POINTWISE)
    return y_RD


def _triton_swiglu(h_R2F, p_R):
    R, F = len(h_R2F), h_R2F.shape[1] // 2
    y_RF = h_R2F.new_empty(R, F)
    if R:
        swiglu_kernel[triton.cdiv(R, POINTWISE["ROWS"]),](
            h_R2F, p_R, y_RF, R, F, h_R2F.stride(0), F, p_R is not None, **POINTWISE)
    return y_RF


def _triton_swiglu_backward(dy_RF, h_R2F, p_R):
    R, F = dy_RF.shape
    dh_R2F, dp_R = torch.empty_like(h_R2F), None if p_R is None else torch.empty_like(p_R)
    if R:
        swiglu_backward_kernel[triton.cdiv(R, POINTWISE["ROWS"]),](
            dy_RF, h_R2F, p_R, dh_R2F, dp_R, R, F, h_R2F.stride(0), F, p_R is not None, **POINTWISE)
    return dh_R2F, dp_R


def gather_by(capability, gathered):
    """How a kernel reads rows that lie anywhere: Hopper has no tensor descriptor that gathers."""
    return "" if not gathered else "descriptor" if capability >= 10 or INTERPRETED else "pointers"


def specialized(capability, padded, gather):
    """Whether rows_kernel has warps for loads, products and stores of their own, so that one tile's stores hide
    behind the next one's loads. The compiler does it for Blackwell (3.9 does, 3.6 fails), and registers suffice
    only without a gather and without the second kind of store that packed groups need."""
    recent = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)
    return recent and capability >= 10 and padded and gather == ""


def _loadable(x):
    """x, or a copy where a tensor descriptor cannot read its rows: they must begin at multiples of 16 bytes."""
    aligned = all(n * x.itemsize % 16 == 0 for n in (x.stride(0), x.storage_offset()))
    return x if aligned and x.stride(1) == 1 else x.contiguous()


def _descriptor(x, *block):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(block))


def _slabs(x_RD, groups, *block):
    """A descriptor of x as [slabs, rows of a slab, D]."""
    return _descriptor(x_RD.view(-1, groups.room or groups.rows, x_RD.shape[1]), 1, *block)


def _rows_of(x_RD, groups, row_R, gather, inner_rows, inner_cols):
    """The descriptor through which a kernel reads x; unused where it gathers by pointers."""
    if gather:
        return _descriptor(x_RD, 1, inner_cols)
    return _slabs(x_RD, groups, inner_rows, inner_cols)


def _triton_rows(x_RD, w_LDN, groups, row_R):
    L, K, N = w_LDN.shape
    x_RD = _loadable(x_RD)
    out_in = w_LDN.stride(2) != 1
    w = w_LDN.transpose(1, 2) if out_in else w_LDN
    y_RN = x_RD.new_empty(groups.rows, N)
    if not groups.rows or not len(x_RD):
        return y_RN.zero_()
    capability, programs = _device_of(x_RD)
    tile = tile_for(capability, "rows", x_RD.dtype, groups.rows // len(groups.counts_G))
    gather = gather_by(capability, row_R is not None)
    table = groups.tiles(tile.rows)
    rows_kernel[min(programs, len(table) * triton.cdiv(N, tile.cols)),](
        _rows_of(x_RD, groups, row_R, gather, tile.rows, tile.inner),
        _descriptor(w, 1, *((tile.cols, tile.inner) if out_in else (tile.inner, tile.cols))),
        _slabs(y_RN, groups, tile.rows, tile.cols), x_RD, y_RN, table, row_R, len(table), N, K,
        groups.room or groups.rows, x_RD.stride(0), y_RN.stride(0), gather, out_in, bool(groups.room),
        specialized(capability, bool(groups.room), gather), BAND, tile.rows, tile.cols, tile.inner,
        num_warps=tile.warps, num_stages=tile.stages)
    return y_RN


def _triton_experts(dy_RF, x_RD, groups, row_R, into):
    (_, M), N, L = dy_RF.shape, x_RD.shape[1], groups.experts
    dy_RF, x_RD = _loadable(dy_RF), _loadable(x_RD)
    dw_LMN = into if into is not None else x_RD.new_empty(L, M, N)
    if not groups.rows or not len(x_RD):
        return dw_LMN if into is not None else dw_LMN.zero_()
    capability, programs = _device_of(x_RD)
    tile = tile_for(capability, "experts", x_RD.dtype, groups.rows // len(groups.counts_G))
    gather = gather_by(capability, row_R is not None)
    work = L * triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.cols)
    experts_kernel[min(programs, work),](
        _slabs(dy_RF, groups, tile.inner, tile.rows), _rows_of(x_RD, groups, row_R, gather, tile.inner, tile.cols),
        x_RD, dw_LMN, row_R, groups.starts_G, groups.counts_G, L, len(groups.counts_G) // L, M, N,
        groups.room or groups.rows, x_RD.stride(0), N, gather, bool(groups.room), into is not None, BAND,
        tile.rows, tile.cols, tile.inner, num_warps=tile.warps, num_stages=tile.stages)
    return dw_LMN
