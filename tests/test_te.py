"""Transformer Engine, in three tiers: the calls fit the signatures of its versions; its real Python layer computes under
a stand-in for its kernels; its kernels do, on a GPU. Only the first needs nothing installed."""

import contextlib
import importlib.machinery
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import harness
import kernels
import pytest
import torch
from settings import load

# What the adapter calls, by version, as its sources declare it: transformer_engine/pytorch/module/linear.py and
# grouped_linear.py (class Linear, class GroupedLinear), fp8.py (2.4) and quantization.py (from 2.9 on).
LINEAR = ("in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size get_rng_state_tracker "
          "rng_tracker_name init_method bias return_bias params_dtype parallel_mode parameters_split device ub_overlap_ag "
          "ub_overlap_rs ub_overlap_rs_dgrad ub_bulk_dgrad ub_bulk_wgrad ub_name delay_wgrad_compute symmetric_ar_type")
GROUPED = ("num_gemms in_features out_features sequence_parallel fuse_wgrad_accumulation tp_group tp_size "
           "get_rng_state_tracker rng_tracker_name init_method bias return_bias params_dtype parallel_mode device "
           "ub_overlap_rs ub_overlap_ag ub_name delay_wgrad_compute")
FP8_AUTOCAST = "enabled calibrating fp8_recipe fp8_group _graph"
AUTOCAST = "enabled calibrating recipe amax_reduction_group _graph"
SIGNATURES = {
    "2.4.0": dict(linear=f"{LINEAR} name", grouped=GROUPED, autocast=None,
                  forward="inp is_first_microbatch fp8_output fp8_grad", grouped_forward="inp m_splits is_first_microbatch"),
    "2.9.0": dict(linear=f"{LINEAR} save_original_input name", grouped=f"{GROUPED} save_original_input",
                  autocast=AUTOCAST, forward="inp is_first_microbatch fp8_output fp8_grad",
                  grouped_forward="inp m_splits is_first_microbatch"),
    "2.20.2": dict(linear=f"{LINEAR} save_original_input name",
                   grouped=f"{GROUPED} save_original_input single_grouped_weight single_grouped_bias name "
                   "use_grouped_tensor", autocast=AUTOCAST, forward="inp is_first_microbatch fp8_output fp8_grad",
                   grouped_forward="inp m_splits is_first_microbatch out dgrad_out"),
}
NEEDED = {"linear": 2, "grouped": 3, "forward": 1, "grouped_forward": 2}      # how many have no default


def signature(words, needed):
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind, default=inspect.Parameter.empty if i < needed else None)
                              for i, name in enumerate(words.split())])


# ---- 1: the contract ----


def pretended(version, calls):
    """Modules that take what this version takes, and multiply in fp32."""
    declared = SIGNATURES[version]

    def bound(what, args, kwargs):
        given = signature(declared[what], NEEDED.get(what, 0)).bind(*args, **kwargs).arguments
        calls.append((what, given))
        return given

    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, fused, first):
            ctx.save_for_backward(x)
            ctx.w, ctx.fused, ctx.first = w, fused, first
            return (x.float() @ w.float().t()).to(x.dtype)

        @staticmethod
        def backward(ctx, dy):
            dw = dy.float().t() @ ctx.saved_tensors[0].float()
            if ctx.fused:   # as its modules do: written in the first microbatch, then added
                ctx.w.main_grad.copy_(dw if ctx.first else ctx.w.main_grad + dw)
            return (dy.float() @ ctx.w.float()).to(dy.dtype), None if ctx.fused else dw.to(ctx.w.dtype), None, None

    class Linear(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bound("linear", args, kwargs)
            assert not given["bias"]
            self.fused = given["fuse_wgrad_accumulation"]
            self.weight = torch.nn.Parameter(torch.full([given["out_features"], given["in_features"]], torch.nan,
                                                        dtype=given["params_dtype"], device=given["device"]))
            given["init_method"](self.weight)

        def forward(self, *args, **kwargs):
            given = bound("forward", args, kwargs)
            assert inside and len(given["inp"]) % 16 == 0
            return Multiply.apply(given["inp"], self.weight, self.fused, given["is_first_microbatch"])

    class GroupedLinear(torch.nn.Module):
        def __init__(self, *args, **kwargs):
            super().__init__()
            given = bound("grouped", args, kwargs)
            assert not given["bias"]
            self.fused = given["fuse_wgrad_accumulation"]
            for i in range(given["num_gemms"]):
                self.register_parameter(f"weight{i}", torch.nn.Parameter(torch.full(
                    [given["out_features"], given["in_features"]], torch.nan, dtype=given["params_dtype"])))

        def forward(self, *args, **kwargs):
            given = bound("grouped_forward", args, kwargs)
            splits = given["m_splits"]
            assert inside and type(splits) is list and sum(splits) == len(given["inp"]) and not any(
                n % 16 for n in splits) and given["inp"].isfinite().all()
            return torch.cat([Multiply.apply(x, getattr(self, f"weight{i}"), self.fused, given["is_first_microbatch"])
                              for i, x in enumerate(given["inp"].split(splits))])

    inside = []

    @contextlib.contextmanager
    def autocast(*args, **kwargs):
        words = declared["autocast"] or FP8_AUTOCAST
        given = signature(words, 0).bind(*args, **kwargs).arguments
        assert given["enabled"] is True
        inside.append(given["recipe" if declared["autocast"] else "fp8_recipe"])
        yield
        inside.pop()

    def module(name, **contents):
        made = types.ModuleType(name)
        made.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made.__path__ = []
        vars(made).update(contents)
        return made

    names = ["Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling"] + ["NVFP4BlockScaling"] * (version != "2.4.0")
    recipe = module("transformer_engine.common.recipe", **{name: type(name, (), {}) for name in names})
    answers = {"fp8": (True, ""), "mxfp8": (False, "Device compute capability 10.0 or higher required."),
               "fp8_block_scaling": (True, ""), "nvfp4": (False, "No.")}
    manager = type("FP8GlobalStateManager", (), {
        f"is_{what}_available": classmethod(lambda cls, answer=answer: answer) for what, answer in answers.items()})
    asked = {f"is_{what}_available": lambda return_reason=False, answer=answer: answer if return_reason else answer[0]
             for what, answer in answers.items()}
    te = module("transformer_engine.pytorch", Linear=Linear, GroupedLinear=GroupedLinear, fp8_autocast=autocast,
                **({} if declared["autocast"] is None else dict(autocast=autocast, **asked)))
    return {"transformer_engine": module("transformer_engine", pytorch=te), "transformer_engine.pytorch": te,
            "transformer_engine.pytorch.fp8": module("transformer_engine.pytorch.fp8", FP8GlobalStateManager=manager),
            "transformer_engine.common": module("transformer_engine.common", recipe=recipe),
            "transformer_engine.common.recipe": recipe}


@pytest.mark.parametrize("version", SIGNATURES)
@pytest.mark.parametrize("knobs", [dict(capacity_factor=2.0), dict(recompute=("full",), capacity_factor=0.0),
                                   dict(attention="mla", n_kv_head=0, qk_norm="none", kv_lora_rank=32, d_rope=16)],
                         ids=["capacity", "dropless, recompute", "mla"])
def test_calls_fit_and_gradients_are_those_of_bf16(tokens, monkeypatch, version, knobs, pool):
    """With modules that round nothing, two passes of a whole model with three microbatches each. On a rank of the pool:
    this process has no job."""
    calls, (found, ref) = pool.run(1, passes_under, version, dict(knobs, data=tokens))[0]
    for name, gradient in ref.items():
        error = (found[name] - gradient).norm() / gradient.norm()      # sums in bf16 and in fp32
        assert error < (0.1 if "router" in name or "norm" in name else 0.05), (name, error)
    first = [given for what, given in calls if what in ("forward", "grouped_forward")]
    modules = sum(what in ("linear", "grouped") for what, _ in calls)
    # each weight is rounded once for each pass, and not for passes that no gradient follows
    assert sum(given["is_first_microbatch"] is True for given in first) == 2 * modules
    per_pass = 3 * modules * (2 if "recompute" in knobs else 1)
    assert len(first) == 2 * per_pass
    assert sum(given["is_first_microbatch"] is None for given in first) == ("recompute" in knobs) * per_pass


def passes_under(version, knobs):
    import optim
    import train
    calls, results = [], []
    modules = pretended(version, calls)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        for precision in ("fp8", "bf16"):
            small = dict(n_layer=2, d_model=64, d_expert=32, d_ff=64, global_batch=3, precision=precision)
            trainer = train.Trainer(harness.config(**small | knobs), 1)
            for step in range(2):
                trainer.forward_backward(list(trainer.batches(step)))
                trainer.optimizer.reduce()
                results += [optim.full_gradients(trainer.model, trainer.optimizer)] * step
                for family in trainer.optimizer.families:   # in place, as the optimizer does, but equally for both
                    family.flat.mul_(1.1)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module
    return [(what, {k: v for k, v in given.items() if k == "is_first_microbatch"}) for what, given in calls], results


@pytest.mark.parametrize("version, precision, words", [
    ("2.20.2", "mxfp8", ["mxfp8", "pretended sm_90", "10.0"]), ("2.4.0", "mxfp8", ["mxfp8", "pretended sm_90", "10.0"]),
    ("2.4.0", "nvfp4", ["nvfp4", "too old", "NVFP4BlockScaling"]), ("2.9.0", "fp8", []), ("2.4.0", "fp8_block", []),
])
def test_a_gpu_is_asked_for_the_recipe(monkeypatch, version, precision, words):
    for name, module in pretended(version, []).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a pretended sm_90")
    lack = kernels.TransformerEngine.lack(precision, torch.device("cuda", 0))
    assert all(word in lack for word in words[1:]) and bool(lack) == bool(words), lack
    cfg = harness.config(precision=precision)
    problems = kernels.check_precision(cfg, torch.device("cuda", 0))
    assert len(problems) == bool(words) and all(word in problems[0] for word in words)


@pytest.mark.parametrize("installed", [True, False])
def test_without_it_or_a_gpu_is_one_line_and_exit_2(tokens, capsys, monkeypatch, installed):
    import train
    spec = importlib.machinery.ModuleSpec("transformer_engine", None) if installed else None
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(SystemExit) as exit:
        load(train.Config, [f"--data={tokens}", "--seq_len=16", "--device=cpu", "--precision=fp8"],
             lambda cfg: train.check(cfg, 1))
    lines = capsys.readouterr().err.splitlines()
    words = ["precision=fp8", "Transformer Engine", "cpu", "emulate=true"] + ["not installed"] * (not installed)
    assert exit.value.code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_widths_that_it_does_not_take(tokens):
    import model
    cfg = harness.config(precision="mxfp8", d_model=48, d_expert=48, n_head=3, n_kv_head=3, d_head=16, etp=2, d_ff=64)
    problems = model.check(cfg)
    assert len(problems) == 1 and all(word in problems[0] for word in (
        "d_model=48", "d_expert/etp=24", "heads*width/tp=48", "multiple of 32", "precision=mxfp8")), problems
    assert "d_ff" not in problems[0]
    assert model.check(harness.config(precision="mxfp8", emulate=True, d_model=48, n_head=3, n_kv_head=3)) == []


# ---- 2: its real Python layer ----

NO_TE = "transformer_engine is not installed (pip install --no-deps transformer-engine==2.20.2 brings its Python layer)"
installed = pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason=NO_TE)


@pytest.fixture(scope="module")
def emulated():
    """What te_emulated.py found on a pretended sm_100."""
    return te_emulated("10.0")


def te_emulated(capability, *words):
    done = subprocess.run([sys.executable, Path(__file__).parent / "te_emulated.py", *words], capture_output=True, text=True,
                          timeout=500, env={**os.environ, "CAPABILITY": capability})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@installed
@pytest.mark.parametrize("name", kernels.RECIPES)
def test_real_modules_against_fp32_and_emulation(emulated, name):
    found = emulated[name]["experts"]
    # gradients in e5m2 have two bits of mantissa
    least = {"fp8": (25, 24, 24), "nvfp4": (14, 14, 14)}.get(name, (25, 25, 25))
    for what, dB in zip(("y", "dx", "dw"), least):
        assert found[what] >= dB, found
    # what the emulation rounds is what its modules ask to be rounded; weight gradients differ by what bf16 drops
    assert found["y emulated"] > 60 and found["dx emulated"] > 60 and found["dw emulated"] > 45, found
    assert found["weights rounded in microbatch 0"] == 5 and found["weights rounded in microbatch 1"] == 0, found
    assert found["in the flat buffer"] and found["empty expert"] == found["outside"] == 0, found
    assert found["evaluated anew"] > 60 and found["computed anew"] > 60, found
    linears = emulated[name]["linears"]
    assert min(linears["fp32"][:3]) >= least[0] and min(linears["fp32"][3:]) >= least[1], linears
    assert min(linears["emulated"]) > 45 and linears["outside of the slice"] == 0, linears


@installed
def test_real_modules_in_a_model(emulated):
    found = [value for value in emulated.values() if "worst" in value]
    assert len(found) == 3
    for value in found:
        assert value["worst"] > 20, emulated
    capacity, dropless, latent = [value["weights rounded"] for value in found]
    # four of attention (of latent attention too), two of the dense and of the shared feed-forward, two of each expert
    assert capacity == latent == 2 * 4 + 2 + 2 + 2 * 8
    assert dropless == 3 * capacity     # the pass that recompute throws away keeps nothing: two microbatches more


@installed
def test_the_real_package_has_the_signatures_above():
    """Of the version that is installed, if it is one of them."""
    from importlib.metadata import version
    installed = version("transformer_engine")
    if installed not in SIGNATURES:
        pytest.skip(f"transformer_engine {installed} is none of {', '.join(SIGNATURES)}")
    import ast
    root = Path(importlib.util.find_spec("transformer_engine").origin).parent / "pytorch"

    def declared(file, *path):
        node = ast.parse((root / file).read_text())
        for name in path:
            node = next(inner for inner in node.body if getattr(inner, "name", None) == name)
        if isinstance(node, ast.ClassDef):      # autocast is a function or a class
            return declared(file, *path, "__init__")
        names = [arg.arg for arg in node.args.args if arg.arg != "self"]
        return " ".join(names), len(names) - len(node.args.defaults)

    ours = SIGNATURES[installed]
    for what, file, *path in (("linear", "module/linear.py", "Linear", "__init__"),
                              ("grouped", "module/grouped_linear.py", "GroupedLinear", "__init__"),
                              ("forward", "module/linear.py", "Linear", "forward"),
                              ("grouped_forward", "module/grouped_linear.py", "GroupedLinear", "forward")):
        assert declared(file, *path) == (ours[what], NEEDED[what])
    if ours["autocast"]:
        assert declared("quantization.py", "autocast") == (ours["autocast"], 0)
    else:
        assert declared("fp8.py", "fp8_autocast") == (FP8_AUTOCAST, 0)


@installed
def test_mxfp8_is_refused_on_an_older_gpu():
    lack = te_emulated("9.0", "lack")["lack"]
    assert lack["fp8"] == lack["fp8_block"] == ""
    for name in ("mxfp8", "nvfp4"):
        assert "a pretended sm_90" in lack[name] and "10.0" in lack[name], lack


# ---- 3: its kernels ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@installed
@pytest.mark.parametrize("name", kernels.RECIPES)
def test_its_kernels_compute_what_is_emulated(name):
    device = torch.device("cuda", 0)
    if lack := kernels.TransformerEngine.lack(name, device):
        pytest.skip(lack)
    counts, align = [0, 1, 31, 32, 33], kernels.RECIPES[name].align
    splits = [-(-n // align) * align for n in counts]
    groups = kernels.Groups.packed(torch.tensor(splits, device=device).cumsum(0).int(), sum(splits))
    groups.splits = splits
    groups.real_R = torch.cat([torch.arange(split) < count for split, count in zip(splits, counts)]).to(device)
    results = []
    for recipe in (kernels.RECIPES[name], kernels.TransformerEngine(name)):
        random = torch.Generator(device).manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=random, device=device, dtype=torch.bfloat16)
        w, x, dy = torch.nn.Parameter(draw(5, 2, 128, 256)), draw(sum(splits), 256).requires_grad_(), draw(sum(splits), 256)
        w.grad_dtype, w.grad = torch.float32, torch.zeros(w.shape, device=device)
        y = kernels.grouped_gemm(x, w, groups, recipe=recipe)
        y.backward(dy)
        results.append([y[groups.real_R], x.grad[groups.real_R], w.grad])
    for a, b in zip(*results):
        error = 20 * torch.log10(a.double().norm() / (a.double() - b.double()).norm())
        assert b.isfinite().all() and error > (14 if name == "nvfp4" else 25), error
