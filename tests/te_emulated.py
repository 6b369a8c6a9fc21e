"""Transformer Engine's own Python layer on a machine without a GPU, under a stand-in for its compiled extension.

    python te_emulated.py            one JSON object with what the scenarios below found on a pretended GPU
    python te_emulated.py lack       only what that GPU lacks

The environment's CAPABILITY says which GPU: 10.0, 9.0.

It shows that kernels.TransformerEngine calls the real modules as they want to be called, that gradients find their
way and how large errors are; nothing about kernels, and nothing about speed. The stand-in rounds with the same
arithmetic as emulate=true (kernels.rounded, which has tests of its own), and hands the modules opaque objects for
whatever format they ask for.
"""

import functools
import importlib.machinery
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

os.environ["NVTE_PROJECT_BUILDING"] = "1"       # its package then does not look for its libraries
CAPABILITY = tuple(map(int, os.environ.get("CAPABILITY", "10.0").split(".")))

from conftest import ROOT  # noqa: F401  (finds the modules)

import torch

import harness
import kernels
import parallel


# ---- the stand-in ----


class Members(type):
    """An enumeration of the extension: whatever it is asked for is a member, a number of its own."""

    def __getattr__(cls, name):
        if name == "__members__":
            return cls.known
        if name.startswith("__"):
            raise AttributeError(name)
        cls.known[name] = member = Constant(len(cls.known))
        member.name = name
        setattr(cls, name, member)
        return member


class Constant(int):
    pass


class Extension(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value = Members(name, (), {"known": {}})
        else:
            def value(*args, **kwargs):
                raise NotImplementedError(f"the stand-in has no {name}")
        setattr(self, name, value)
        return value


tex = Extension("transformer_engine_torch")
for i in (1, 2, 3):     # used as indices, so their order matters
    for kind in ("INPUT", "WEIGHT", "OUTPUT"):
        getattr(tex.FP8FwdTensors, f"GEMM{i}_{kind}")
    for kind in ("OUTPUT", "INPUT"):
        getattr(tex.FP8BwdTensors, f"GRAD_{kind}{i}")
KINDS = {"Float8CurrentScalingQuantizer": "fp8", "Float8BlockQuantizer": "fp8_block", "MXFP8Quantizer": "mxfp8",
         "NVFP4Quantizer": "nvfp4"}


def implement(storage_class):
    """Gives the extension the few functions that linear layers need."""

    class Rounded(storage_class):
        """A matrix as an operand that is summed over its columns (rowwise) and over its rows (columnwise)."""

        def __init__(self, x, quantizer):
            self.quantizer, self._quantizer, self._dtype = quantizer, quantizer, x.dtype
            self.fill(x)

        def fill(self, x):
            q, matrix = self.quantizer, x.detach().reshape(-1, x.shape[-1])
            kind = KINDS[type(q).__name__]
            square = getattr(q, "block_scaling_dim", 1) == 2 or getattr(q, "with_2d_quantization", False)
            what = "gradient" if q.dtype.name == "kFloat8E5M2" else "weight" if square else ""
            assert kind not in ("mxfp8", "nvfp4") or len(matrix) % 16 == 0, f"{kind} of {len(matrix)} rows"
            assert matrix.shape[1] % 16 == 0
            self.seen, self.device, self.dtype = x.shape, x.device, x.dtype
            roundings.append((kind, what, tuple(x.shape)))
            self.row = kernels.rounded(kernels.RECIPES[kind], matrix, 1, what)
            self.column = kernels.rounded(kernels.RECIPES[kind], matrix, 0, what)

        def size(self, *dim):
            return self.seen[dim[0]] if dim else self.seen

        def quantize_(self, x, noop_flag=None):
            self.fill(x)

        def update_usage(self, *args, **kwargs):
            pass

        def prepare_for_saving(self):
            return [], self

        def restore_from_saved(self, tensors):
            return tensors

        def get_metadata(self):
            return {}

    def quantize(x, quantizer, out=None, noop=None, **options):
        if out is None:
            return Rounded(x, quantizer)
        out.fill(x)
        return out

    def operand(x, sums_columns):
        if isinstance(x, Rounded):
            return (x.row if sums_columns else x.column).float()
        return x.reshape(-1, x.shape[-1]).float()

    def product(A, transpose_A, B, transpose_B):
        a, b = operand(A, transpose_A), operand(B, not transpose_B)
        return (b.t() if transpose_B else b) @ (a.t() if transpose_A else a)

    def generic_gemm(A, transpose_A, B, transpose_B, out, quantizer, out_dtype, bias, bias_dtype, gelu, gelu_in, grad,
                     workspace, workspace_size, accumulate, *rest, **options):
        assert quantizer is None and not gelu and (bias is None or not bias.numel())
        y = product(A, transpose_A, B, transpose_B)
        if out is None:
            return y.to(TORCH[out_dtype.name]), None, None, None
        out.copy_(y + out if accumulate else y)
        return out, None, None, None

    def te_general_grouped_gemm(A, transpose_A, B, transpose_B, out, out_dtype, m_splits, bias, bias_dtype, single,
                                gelu, grad, workspace, workspace_size, accumulate, *rest):
        outs = out[0].split(list(m_splits)) if single else out
        for a, b, o in zip(A, B, outs):
            if 0 in o.shape:
                continue
            y = product(a, transpose_A, b, transpose_B)
            o.copy_(y + o if accumulate else y)
        return bias

    tex.quantize, tex.generic_gemm, tex.te_general_grouped_gemm = quantize, generic_gemm, te_general_grouped_gemm
    tex.split_quantize = lambda x, splits, quantizers, **options: [
        quantize(part, q) for part, q in zip(x.split(list(splits)), quantizers)]
    tex.bgrad_quantize = lambda dy, quantizer: (None, quantize(dy, quantizer))
    tex.get_num_cublas_streams = lambda: 4
    return Rounded


TORCH = {"kFloat32": torch.float32, "kBFloat16": torch.bfloat16}
roundings = []      # (kind, what, shape) of every matrix that was rounded


def here(factory):
    """`factory`, which makes on the CPU what is wanted on a GPU."""
    @functools.wraps(factory)
    def made(*args, **kwargs):
        device = kwargs.get("device")
        if isinstance(device, int) or device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)
    return made


def install():
    """→ transformer_engine.pytorch."""
    sys.modules["transformer_engine_torch"] = tex
    for name in ("onnx", "onnxscript", "onnxscript.onnx_opset", "einops"):     # for what is not used here
        try:
            __import__(name)
        except ImportError:
            sys.modules[name] = MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None), __path__=[])
    gpu = dict(major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=2**37, name="pretended")
    torch.cuda.is_available, torch.cuda.device_count, torch.cuda.current_device = lambda: True, lambda: 1, lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_properties = lambda *device: SimpleNamespace(**gpu)
    torch.cuda.get_device_capability = lambda *device: CAPABILITY
    torch.cuda.get_device_name = lambda *device: f"a pretended sm_{CAPABILITY[0]}{CAPABILITY[1]}"
    torch.version.cuda = "13.0"
    # tensors say that they are on a GPU, and what is made for one is made here
    torch.Tensor.is_cuda, torch.Tensor.cuda = True, lambda self, *args, **kwargs: self
    for name in ("empty", "zeros", "ones", "full", "eye", "tensor", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, here(getattr(torch, name)))
    import transformer_engine.common
    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.quantized_tensor import QuantizedTensorStorage
    gemm._NATIVE_GEMM_INPUT_STORAGES += (implement(QuantizedTensorStorage),)    # else it would want them in bf16 again
    return te


# ---- scenarios ----


def snr(plain, x):
    plain, x = plain.detach().double(), x.detach().double()
    return 20 * torch.log10(plain.norm() / (x - plain).norm().clamp_min(1e-30)).item()


def experts(precision):
    """A stacked weight whose gradient accumulates in a flat fp32 buffer, as Optimizer makes them, and two microbatches
    with one expert without rows: errors of outputs and gradients against fp32, and against emulate=true."""
    random, align = torch.Generator().manual_seed(0), kernels.RECIPES[precision].align
    D, N, counts = 64, 160, [0, 1, 31, 32, 33]
    splits = [-(-n // align) * align for n in counts]
    real_R = torch.cat([torch.arange(split) < count for split, count in zip(splits, counts)])
    groups = kernels.Groups.packed(torch.tensor(splits).cumsum(0).int(), sum(splits))
    groups.splits, groups.real_R = splits, real_R
    flat = torch.randn(16 + 5 * N * D, generator=random).bfloat16()
    buffer = torch.zeros(len(flat))
    w = torch.nn.Parameter(flat[16:].view(5, 2, N // 2, D))
    w.grad_dtype = torch.float32
    w.grad = buffer[16:].view(5, 2, N // 2, D)
    ours, found = kernels.TransformerEngine(precision), {}
    dw = dw_emulated = 0
    for microbatch in range(2):
        x = torch.randn(len(real_R), D, generator=random).bfloat16().masked_fill(~real_R[:, None], torch.nan)
        dy = torch.randn(len(real_R), N, generator=random).bfloat16().masked_fill(~real_R[:, None], torch.nan)
        before = len(roundings)
        xs = x.clone().requires_grad_()
        y = kernels.grouped_gemm(xs, w, groups, recipe=ours)
        found[f"weights rounded in microbatch {microbatch}"] = sum(
            shape == (N, D) for _, _, shape in roundings[before:])
        y.backward(dy)
        y = y.detach()[real_R]
        # in fp32, and emulated
        plain = SimpleNamespace(x=x.nan_to_num().float().requires_grad_(), w=w.detach().float().requires_grad_())
        emulated = SimpleNamespace(x=x.clone().requires_grad_(), w=w.detach().clone().requires_grad_())
        y_plain = torch.cat([rows @ m.flatten(0, 1).t() for rows, m in zip(plain.x.split(splits), plain.w)])
        y_plain.backward(dy.nan_to_num().float())
        y_emulated = kernels.grouped_gemm(emulated.x, emulated.w, groups, recipe=kernels.RECIPES[precision])
        y_emulated.backward(dy)
        dw, dw_emulated = dw + plain.w.grad, dw_emulated + emulated.w.grad.float()
        for what, a, b, c in (("y", y, y_plain, y_emulated), ("dx", xs.grad[real_R], plain.x.grad, emulated.x.grad)):
            found[what] = min(found.get(what, 99), snr(b[real_R], a))
            found[f"{what} emulated"] = min(found.get(f"{what} emulated", 99), snr(c[real_R], a))
    found["dw"], found["dw emulated"] = snr(dw, w.grad), snr(dw_emulated, w.grad)
    found["empty expert"] = w.grad[0].abs().max().item()
    found["outside"] = buffer[:16].abs().max().item()
    found["in the flat buffer"] = w.grad.data_ptr() == buffer[16:].data_ptr() and bool(buffer[16:].any())
    with torch.no_grad():
        flat.mul_(2)    # as an optimizer does; and the next microbatch sees it
        found["evaluated anew"] = snr(2 * y, kernels.grouped_gemm(x, w, groups, recipe=ours)[real_R])
    found["computed anew"] = snr(2 * y, kernels.grouped_gemm(x, w, groups, recipe=ours)[real_R])
    return found


def linears(precision):
    """column_linear with a parameter, with a slice of one, and with one of more dimensions; 13 rows, no multiple of
    anything."""
    random = torch.Generator().manual_seed(1)
    x, dys = torch.randn(13, 64, generator=random), [torch.randn(13, n, generator=random) for n in (96, 32, 64)]
    values = [torch.randn(n, 64, generator=random) for n in (96, 128, 64)]
    results = []
    for recipe in (None, kernels.RECIPES[precision], kernels.TransformerEngine(precision)):
        dtype = torch.bfloat16 if recipe else torch.float32
        ws = [torch.nn.Parameter(v.to(dtype)) for v in (values[0], values[1], values[2].view(2, 32, 64))]
        for w in ws:
            w.grad_dtype, w.grad = torch.float32, torch.zeros(w.shape)
        xs = x.detach().to(dtype).requires_grad_()
        ys = parallel.column_linear(xs, [ws[0], ws[1][32:64], ws[2].flatten(0, 1)], harness.Alone, recipe)
        torch.autograd.backward(ys, [dy.to(dtype) for dy in dys])
        results.append([*ys, xs.grad, *(w.grad for w in ws)])
    plain, emulated, ours = results
    return {"fp32": [snr(a, b) for a, b in zip(plain, ours)], "emulated": [snr(a, b) for a, b in zip(emulated, ours)],
            "outside of the slice": max(ours[5][:32].abs().max().item(), ours[5][64:].abs().max().item())}


TRAINING = {
    "capacity, experts recomputed": dict(capacity_factor=2.0, recompute=("moe",)),
    "dropless, blocks recomputed": dict(capacity_factor=0.0, recompute=("full",)),
    "latent attention": dict(attention="mla", n_kv_head=0, qk_norm="none", kv_lora_rank=32, d_rope=16),
}


def training(name, knobs, folder):
    """Two forward and backward passes of a whole model, with weights that change between them, against the same with
    emulate=true: the worst error of a gradient, and how often each weight was rounded in the last pass."""
    import optim
    import train
    small = dict(data=folder, precision=name, n_layer=2, d_model=64, d_expert=32, d_ff=64, global_batch=2, **knobs)
    found = []
    for emulate in (True, False):
        trainer = train.Trainer(harness.config(emulate=emulate, **small))
        for step in range(2):
            before = len(roundings)
            trainer.forward_backward(list(trainer.batches(step)))
            if step == 0:
                for family in trainer.optimizer.families:
                    family.flat.mul_(1.25)
        trainer.optimizer.reduce()
        found.append(optim.full_gradients(trainer.model, trainer.optimizer))
    weights = sum(what == "weight" for _, what, _ in roundings[before:])
    errors = {p: snr(grad, found[1][p]) for p, grad in found[0].items() if "router" not in p}
    return {"worst": min(errors.values()), "weights rounded": weights}


def main():
    torch.set_num_threads(1)
    install()
    torch.cuda.Event = MagicMock()
    found = {"lack": {name: kernels.TransformerEngine.lack(name, torch.device("cuda", 0)) for name in kernels.RECIPES}}
    if sys.argv[1:] != ["lack"]:
        for name in kernels.RECIPES:
            found[name] = {"experts": experts(name), "linears": linears(name)}
        with tempfile.TemporaryDirectory() as folder:
            harness.write_tokens(Path(folder), torch.randint(0, 64, [16 * 200 + 1],
                                                             generator=torch.Generator().manual_seed(0)).numpy())
            for what, knobs in TRAINING.items():
                found[what] = training("fp8_block", knobs, folder)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
