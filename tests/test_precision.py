"""Low precision: what numbers become, which products are rounded and how, and that rows which only fill up change
nothing."""

import collections
import itertools
import json
import math

import harness
import kernels
import pytest
import torch
from harness import bit_equal, config, run_layouts
from settings import load

RECIPES = list(kernels.RECIPES)


def snr(plain, x):
    """In dB."""
    plain, x = plain.double(), x.double()
    return 20 * torch.log10(plain.norm() / (x - plain).norm()).item()


# ---- fp32 by oneDNN ----

CPU = torch.device("cpu")


@pytest.fixture
def onednn():
    """As parallel.init leaves it, whether or not a job was joined."""
    with harness.replaced(kernels.backend, "onednn", False):
        kernels.allow_onednn()
        yield kernels.backend.onednn


@pytest.mark.parametrize("shape", [(1024, 256, 1024), (64, 512, 256), (37, 19, 51), (1, 8, 256)])
def test_products_are_fp32(onednn, shape):
    """Wherever oneDNN is allowed: rounded to bf16 they would be 1000 times further off."""
    torch.manual_seed(0)
    a, b = torch.randn(shape[0], shape[1]), torch.randn(shape[1], shape[2])
    exact = a.double() @ b.double()
    with kernels.onednn(CPU, 2**20):
        assert torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if onednn else "none")
        for y in (a @ b, (b.t() @ a.t()).t(), a.t().contiguous().t() @ b):
            assert (y.double() - exact).norm() < 2e-6 * exact.norm()


def test_onednn_is_not_asked_where_it_rounds(monkeypatch):
    plain = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: plain(a.bfloat16(), b.bfloat16()).float())
    with harness.replaced(kernels.backend, "onednn", True):
        kernels.allow_onednn()
        assert not kernels.backend.onednn
        before = torch.backends.mkldnn.matmul.fp32_precision
        with kernels.onednn(CPU, 2**20):
            assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_other_products_stay_as_torch_has_them(onednn):
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), kernels.onednn(CPU, 2**20):
        1 / 0
    assert torch.backends.mkldnn.matmul.fp32_precision == before
    for device, size in (("cuda", 2**20), ("cpu", 32 * 64)):
        with kernels.onednn(torch.device(device), size):
            assert torch.backends.mkldnn.matmul.fp32_precision == before


# ---- numbers ----

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def table(grid):
    """Every number of a grid that is not negative, in order."""
    if grid == kernels.E2M1:
        return torch.tensor(E2M1)
    dtype = torch.float8_e4m3fn if grid == kernels.E4M3 else torch.float8_e5m2
    return torch.arange(128, dtype=torch.uint8).view(dtype).double().nan_to_num(posinf=0).unique()


@pytest.mark.parametrize("grid", [kernels.E4M3, kernels.E5M2, kernels.E2M1], ids=["e4m3", "e5m2", "e2m1"])
def test_numbers_go_to_the_nearest_of_the_grid(grid):
    numbers = table(grid)
    assert numbers[-1] == grid.most
    between = (numbers[1:] + numbers[:-1]) / 2
    even = numbers[::2].repeat_interleave(2)[1:len(numbers)]    # a tie goes to the even one of its neighbours
    for x, nearest in ((numbers, numbers), (between, even), (between * (1 - 1e-6), numbers[:-1]),
                       (between * (1 + 1e-6), numbers[1:]), (numbers[-1:] * 3, numbers[-1:]),
                       (numbers[-1:] * torch.inf, numbers[-1:])):
        for sign in (1, -1):
            assert torch.equal(kernels.on_grid((sign * x).float(), grid), (sign * nearest).float())
    assert kernels.on_grid(torch.tensor([torch.nan]), grid).isnan()
    if grid != kernels.E2M1:
        x = torch.randn(10**5) * torch.tensor([1e-4, 1, 50]).repeat_interleave(34000)[:10**5]
        dtype = torch.float8_e4m3fn if grid == kernels.E4M3 else torch.float8_e5m2
        assert torch.equal(kernels.on_grid(x, grid), x.to(dtype).float())


# ---- blocks ----


def scale_by_hand(recipe, amax, whole_amax, most):
    if recipe.scales == "e4m3":
        whole = whole_amax / (most * 448)
        return min(table(kernels.E4M3).tolist(), key=lambda s: abs(s - amax / most / whole)) * whole
    return 2.0 ** math.ceil(math.log2(amax / most)) if recipe.scales == "pow2" else amax / most


def round_by_hand(name, x_MN, along, what=""):
    """One matrix, block by block."""
    recipe = kernels.RECIPES[name]
    grid = recipe.gradients if what == "gradient" else recipe.values
    sides = {"fp8": x_MN.shape, "fp8_block": (128, 128), "mxfp8": (32, 32), "nvfp4": (16, 16)}[name]
    rows, cols = sides if name == "fp8" or what == "weight" and name in ("fp8_block", "nvfp4") else (
        (sides[0], 1) if along == 0 else (1, sides[1]))
    y, numbers = x_MN.double().clone(), table(grid).double()
    for block in (part for band in y.split(rows) for part in band.split(cols, 1)):
        if block.any():
            s = scale_by_hand(recipe, block.abs().max().item(), x_MN.abs().max().double().item(), grid.most)
            nearest = (block.abs()[..., None] / max(s, 1e-300) - numbers).abs().argmin(-1)
            block.copy_(numbers[nearest] * s * block.sign())
    return y


@pytest.mark.parametrize("name", RECIPES)
def test_blocks_lie_along_the_sum_and_are_cut_at_edges(name):
    """Also where rows are those of several experts, and where there are no rows."""
    random, recipe = torch.Generator().manual_seed(0), kernels.RECIPES[name]
    for (M, N), along, what in itertools.product([(1, 1), (33, 50), (130, 140)], (0, 1), ("", "weight", "gradient")):
        # magnitudes that differ from block to block
        x = torch.randn(2, M, N, generator=random) * torch.exp2(4 * torch.randn(2, M, 1, generator=random))
        x[:, :, N // 2:] *= 2.0**-10
        plain = torch.stack([round_by_hand(name, m, along, what) for m in x])
        torch.testing.assert_close(kernels.rounded(recipe, x, along, what).double(), plain, rtol=1e-5, atol=0)
        if what != "weight":
            rows = kernels.rounded(recipe, x.flatten(0, 1), along, what, splits=[M, 0, M])
            torch.testing.assert_close(rows.double(), plain.flatten(0, 1), rtol=1e-5, atol=0)
    assert kernels.rounded(recipe, x[:, :0], 0, splits=None).shape == (2, 0, 140)


# of normal numbers, per recipe: activations, weights, gradients
SNR = {"fp8": (31.6, 31.6, 25.6), "fp8_block": (31.5, 31.5, 31.5), "mxfp8": (31.5, 31.5, 31.5), "nvfp4": (20.4, 19.1, 20.4)}


@pytest.mark.parametrize("name", RECIPES)
def test_how_much_is_lost(name):
    x, recipe = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)), kernels.RECIPES[name]
    for what, expected in zip(("", "weight", "gradient"), SNR[name]):
        for along in (0, 1):
            assert snr(x, kernels.rounded(recipe, x, along, what)) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extreme_numbers(name, dtype):
    recipe = kernels.RECIPES[name]
    for what in ("", "weight", "gradient"):
        assert not kernels.rounded(recipe, torch.zeros(40, 40, dtype=dtype), 1, what).any()
        for size in (1e38, 1e-36):
            x = (size * torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)).to(dtype)
            y = kernels.rounded(recipe, x, 0, what)
            assert y.dtype == dtype and y.isfinite().all() and snr(x, y) > 15, (what, size)
        tiny = torch.full((40, 40), 1e-40, dtype=dtype)     # below what a scale can follow: less is kept, or nothing
        assert (kernels.rounded(recipe, tiny, 1, what).abs() <= 2 * tiny).all()
        # powers of two are representable under every scale, and stay what they are
        x = torch.tensor([1.0, 2, 0, -1, 0.5, 1, -2, 0.5]).repeat(40, 5).to(dtype) * 448 / 256
        assert torch.equal(kernels.rounded(kernels.RECIPES["mxfp8"], x, 1, what), x)
        # one bad number is not made good
        for bad in (torch.nan, torch.inf):
            x[3, 7] = bad
            assert not kernels.rounded(recipe, x, 1, what)[3, 7].isfinite()


# ---- products ----


def product_by_hand(name, x, w, dy):
    """y, dx and dw of y = x wᵀ, each from operands rounded along its own sum."""
    r = lambda *args: round_by_hand(name, *args)
    return (r(x, 1) @ r(w, 1, "weight").T, r(dy, 1, "gradient") @ r(w, 0, "weight"), r(dy, 0, "gradient").T @ r(x, 0))


def assert_near(ours, plain, what=""):
    assert (ours.double() - plain).norm() <= 1e-5 * plain.norm(), what


@pytest.mark.parametrize("name", RECIPES)
def test_three_products_of_a_linear_layer(name):
    import parallel
    random, recipe = torch.Generator().manual_seed(1), kernels.RECIPES[name]
    x, dys = torch.randn(45, 70, generator=random), [torch.randn(45, n, generator=random) for n in (40, 24)]
    ws = [torch.randn(n, 70, generator=random) for n in (40, 24)]
    plain = [product_by_hand(name, x, w, dy) for w, dy in zip(ws, dys)]

    def assert_products(ys, xs):
        for y, dy, w, (y_plain, dx_plain, dw_plain) in zip(ys, dys, weights, plain):
            dx, dw = torch.autograd.grad(y, [xs, w], dy, retain_graph=True)
            for what, a, b in (("y", y, y_plain), ("dx", dx, dx_plain), ("dw", dw, dw_plain)):
                assert_near(a, b, what)

    x, weights = x.requires_grad_(), [w.requires_grad_() for w in ws]
    assert_products([kernels.linear(x, w, recipe) for w in weights], x)
    ys = parallel.column_linear(x, weights, harness.Alone, recipe)
    dx, *dws = torch.autograd.grad(ys, [x, *weights], dys)
    assert_near(dx, plain[0][1] + plain[1][1], "dx of both")
    for a, y, (y_plain, _, dw) in zip(dws, ys, plain):
        assert_near(a, dw, "dw")
        assert_near(y, y_plain, "y")


@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_fill_up_change_nothing(name):
    """Counts that no block divides, an expert without rows; and rows of garbage behind each expert's own. Outputs and
    gradients are those of the exact counts, and both those of a loop over the experts."""
    counts, recipe = [0, 1, 31, 32, 33], kernels.RECIPES[name]
    random = torch.Generator().manual_seed(2)
    w = torch.randn(5, 2, 24, 48, generator=random).requires_grad_()
    x, dy = torch.randn(97, 48, generator=random), torch.randn(97, 48, generator=random)
    results = []
    for splits in (counts, [-(-n // recipe.align) * recipe.align for n in counts], [128] * 5):
        row_R = torch.cat([torch.arange(start, start + split) for start, split in zip(
            [0, *itertools.accumulate(counts)], splits)])
        real_R = torch.cat([torch.arange(split) < count for split, count in zip(splits, counts)])
        assert real_R.sum() == 97
        groups = kernels.Groups.packed(torch.tensor(splits).cumsum(0).int(), sum(splits))
        groups.splits, groups.real_R = splits, real_R
        spread = lambda t: torch.full((len(real_R), 48), torch.nan).masked_scatter(real_R[:, None], t)
        # once as they lie, once gathered by a map in which filler rows have no source
        lying = spread(x).requires_grad_()
        y = kernels.grouped_gemm(lying, w, groups, recipe=recipe)
        dx, dw = torch.autograd.grad(y, [lying, w], spread(dy))
        results.append([y[real_R], dx[real_R], dw])
        source, slots = x.clone().requires_grad_(), real_R.nonzero()
        y = kernels.grouped_gemm(source, w, groups, torch.where(real_R, row_R, -1), slots, recipe)
        dx, dw = torch.autograd.grad(y, [source, w], spread(dy))
        results.append([y[real_R], dx, dw])
    parts = [t.split(counts) for t in (x, dy)]
    each = [product_by_hand(name, a, m.detach().flatten(0, 1), b) if len(a) else
            (a, a, torch.zeros(48, 48)) for a, b, m in zip(*parts, w)]
    plain = [torch.cat([e[0] for e in each]), torch.cat([e[1] for e in each]), torch.stack([e[2] for e in each])]
    for ours in results:
        for what, a, b, first in zip(("y", "dx", "dw"), ours, plain, results[0]):
            assert a.isfinite().all()
            torch.testing.assert_close(a, first, rtol=1e-6, atol=1e-5)
            assert_near(a.reshape(b.shape), b, what)
        assert not ours[2][0].any(), "an expert without rows has a gradient of zeros"


# ---- training ----

LOW = dict(emulate=True, n_layer=4, n_dense_layers=1, n_kv_head=2, d_model=64, d_expert=32, d_ff=64)


def rounded_weights(knobs, world):
    """→ the names of the parameters that a step rounds."""
    import train
    trainer, seen, plain = train.Trainer(config(**knobs), world), set(), kernels.rounded

    def watch(recipe, x, along, what="", splits=None):
        if recipe and what == "weight":
            seen.add((x.data_ptr(), along))
        return plain(recipe, x, along, what, splits)

    with harness.replaced(kernels, "rounded", watch):
        trainer.step(0)
        norms = {name: p.dtype for name, p in trainer.model.named_parameters()}
    return {name for name, p in trainer.model.named_parameters() for along in (0, 1)
            if (p.data_ptr(), along) in seen and (p.data_ptr(), 1 - along) in seen}, norms


@pytest.mark.parametrize("knobs", [dict(bf16_layers=1), dict(attention="mla", n_kv_head=0, qk_norm="none", q_lora_rank=16)],
                         ids=["gqa, bf16_layers 1", "mla"])
def test_what_is_rounded(tokens, pool, knobs):
    names, dtypes = pool.run(1, rounded_weights, LOW | dict(data=tokens, precision="mxfp8") | knobs, 1)[0]
    matrices = {"gqa": ["wq", "wk", "wv", "wo"], "mla": ["wq_a", "wq", "wkv_a", "wkv", "wo"]}
    first = knobs.get("bf16_layers", 0)
    expected = {f"layers.{i}.{name}" for i in range(first, 4 - first) for name in [
        *(f"attention.{m}" for m in matrices[knobs.get("attention", "gqa")]),
        *(f"{part}.{w}" for part in (["mlp"] if i == 0 else ["moe.experts", "moe.shared"]) for w in ("w1", "w2"))]}
    assert names == expected
    assert {name for name, dtype in dtypes.items() if dtype != torch.bfloat16} == {
        f"layers.{i}.moe.router.weight" for i in (1, 2, 3)}


LAYOUTS = {
    "ep 4": dict(ep=4),
    "ep 4, capacity": dict(ep=4, capacity_factor=1.0),
    "tp 2, ep 2, etp 2": dict(tp=2, ep=2, etp=2),
    "cp 2, ep 4": dict(cp=2, ep=4, micro_batch=2),
}


@pytest.mark.parametrize("name, least, layouts", [("fp8", 12, ["ep 4, capacity"]), ("nvfp4", 4, ["ep 4"]),
                                                   ("mxfp8", 12, ["tp 2, ep 2, etp 2", "cp 2, ep 4"])], ids=["fp8", "nvfp4", "mxfp8"])
def test_gradients_are_near_those_of_bf16_and_no_schedule_changes_a_bit(pool, tokens, name, least, layouts):
    base = LOW | dict(data=tokens, n_layer=2, global_batch=8)
    ways = [dict(), dict(overlap="none", defer_wgrad=False, recompute=("moe",)), dict(recompute=("full",))]
    variants = [base | LAYOUTS[layout] | way | dict(precision=precision) for layout in layouts
                for precision, way in [("bf16", {}), *((name, way) for way in ways)]]
    for rank, found in enumerate(pool.run(4, run_layouts, variants, 4, steps=2)):
        for layout, (ref, low, *others) in zip(layouts, zip(*[iter(found)] * 4)):
            assert all(bit_equal(low, other) for other in others), (layout, rank)
            if "capacity" in layout:    # room is rounded up, so other choices are kept
                continue
            for parameter, gradient in ref["grads"].items():
                assert low["grads"][parameter].isfinite().all()
                # routers see tiny gradients of differences, and choices may change
                if "router" not in parameter:
                    assert snr(gradient, low["grads"][parameter]) > least, (layout, rank, parameter)
            assert low["losses"] == pytest.approx(ref["losses"], rel=0.02)


def expert_without_tokens(knobs, world):
    import optim
    import train
    trainer = train.Trainer(config(**knobs), world)
    harness.force_router(trainer, harness.route_table("one expert empty"))
    trainer.forward_backward(list(trainer.batches(0)))
    trainer.optimizer.reduce()
    return optim.full_gradients(trainer.model, trainer.optimizer)


def test_an_expert_without_tokens(pool, tokens):
    for name, capacity in itertools.product(("fp8", "nvfp4"), (0.0, 1.5)):
        knobs = LOW | dict(data=tokens, n_layer=2, precision=name, ep=2, capacity_factor=capacity)
        for gradients in pool.run(2, expert_without_tokens, knobs, 2):
            assert all(gradient.isfinite().all() for gradient in gradients.values())
            for w in ("w1", "w2"):
                gradient = gradients[f"layers.1.moe.experts.{w}"]
                assert not gradient[7].any() and gradient[:7].flatten(1).any(1).all()


@pytest.mark.parametrize("capacity, splits", [(0, [16, 16, 16, 0]), (16, [16] * 4)])
def test_an_experts_rows_begin_where_its_split_does(capacity, splits):
    import dispatch
    experts_TK = torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2], [-1, -1]])
    plan = dispatch.Plan(experts_TK, torch.rand(5, 2), 4, capacity, "position", harness.Alone, harness.Alone, align=16)
    for direction in ("counts", "out"):
        for _ in plan.travel(direction, torch.zeros(5, 8), (plan.choice_S >= 0).float() - (plan.choice_S < 0).float()):
            pass
    assert plan.groups.splits == splits and plan.groups.ends_L.tolist() == torch.tensor(splits).cumsum(0).tolist()
    token_R, slots_TK = plan.expert_rows()
    found = [[t for t in part if t >= 0] for part in (part.tolist() for part in token_R.split(splits))]
    assert [sorted(part) for part in found] == [[0, 1, 3], [1, 2], [0, 2, 3], []]
    for part, own, real in zip(found, token_R.split(splits), plan.groups.real_R.split(splits)):
        assert own.tolist() == part + [-1] * (len(own) - len(part)) and real.tolist() == (own >= 0).tolist()
    for t, slots in enumerate(slots_TK.tolist()):
        assert all(token_R[slot] == t for slot in slots if slot >= 0)


def test_room_is_rounded_up():
    import dispatch
    c = lambda precision: dispatch.capacity(config(precision=precision, emulate=True, capacity_factor=1.0), 64)
    assert [c(p) for p in ("bf16", "fp8", "fp8_block", "mxfp8", "nvfp4")] == [16, 16, 16, 32, 128]
    assert dispatch.capacity(config(precision="nvfp4", capacity_factor=0.0), 64) == 0


@pytest.mark.parametrize("args, words", [
    (["--precision=mxfp8", "--emulate", "--capacity_factor=1", "--capacity_scope=rank"],
     ["capacity_scope=rank", "precision=mxfp8", "capacity_scope=expert"]),
    (["--precision=fp8", "--emulate", "--bf16_layers=2"], ["bf16_layers=2", "n_layer=4", "precision=fp8"]),
    (["--precision=fp4"], ["--precision", "nvfp4", "'fp4'"]),
], ids=["rank scope", "no layer left", "unknown"])
def test_what_cannot_be_is_one_line_and_exit_2(tokens, args, words, capsys):
    import train
    with pytest.raises(SystemExit) as exit:
        load(train.Config, [f"--data={tokens}", "--seq_len=16", "--device=cpu", *args], lambda cfg: train.check(cfg, 1))
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines


# ---- what travels ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_as_e4m3(dtype):
    random = torch.Generator().manual_seed(0)
    for T, D in ((5, 300), (0, 8), (3, 128), (1, 3)):
        x = (torch.randn(T, D, generator=random) * torch.exp2(6 * torch.randn(T, 1, generator=random))).to(dtype)
        codes, scales = kernels.to_e4m3(x)
        assert codes.dtype == torch.uint8 and codes.shape == x.shape and scales.shape == (T, -(-D // 128))
        y = kernels.from_e4m3(codes, scales, dtype)
        most = scales.repeat_interleave(128, 1)[:, :D] * 448
        # 3 bits of mantissa, subnormals from 2^-6 on; what bf16 then drops
        error = x.float().abs() * (2.0**-4 + (dtype == torch.bfloat16) * 2.0**-8) + most / 448 * 2.0**-10
        assert y.dtype == dtype and ((y.float() - x.float()).abs() <= error).all()
        assert (x.float().abs() <= most * (1 + 1e-6)).all() and (not T or (most / 448 > 0).all())
    x = torch.zeros(2, 130)
    x[1, 3] = torch.nan
    y = kernels.from_e4m3(*kernels.to_e4m3(x), torch.float32)
    assert not y[0].any() and y[1, 3].isnan() and not y[1, 128:].any()


def arrivals(variants, world):
    """→ per variant, what reaches this rank's experts in the first microbatch of the first layer, and the bytes that
    a step sends, {collective: bytes}."""
    import moe
    import parallel
    import train
    found = []
    for knobs in variants:
        trainer, rows, plain = train.Trainer(config(**knobs), world), [], moe.Experts.forward

        def watch(self, rows_QD, weights_Q, plan):
            rows.append((rows_QD.detach().clone(), weights_Q.detach().clone()))
            return plain(self, rows_QD, weights_Q, plan)

        parallel.ledger.take()
        with harness.replaced(moe.Experts, "forward", watch), harness.late_exchanges():
            trainer.gradients(list(trainer.batches(0)))
        sent = collections.Counter()
        for (_, op), (_, size) in parallel.ledger.take().items():
            sent[op] += size
        found.append((*rows[0], sent))
    return found


@pytest.mark.parametrize("knobs", [dict(ep=4), dict(ep=4, capacity_factor=1.0), dict(ep=2, etp=2),
                                   dict(ep=2, capacity_factor=1.0, capacity_scope="rank"),
                                   dict(ep=2, etp=2, dispatcher="allgather")],
                         ids=["dropless", "capacity", "etp", "rank scope", "gathered"])
def test_tokens_arrive_within_the_error_of_e4m3(pool, tokens, knobs):
    base = dict(data=tokens, n_layer=2, global_batch=8, d_model=136, n_kv_head=0, precision="bf16", **knobs)
    variants = [dict(base, dispatch_precision=p) for p in ("auto", "fp8")]
    for (rows, weights, plain_sent), (low, low_weights, low_sent) in pool.run(4, arrivals, variants, 4):
        filled = (weights >= 0).view(len(rows), -1).any(1)
        assert low_sent.total() < plain_sent.total()
        assert torch.equal(weights, low_weights) and low.dtype == torch.bfloat16
        rows, low = rows[filled].float(), low[filled].float()
        blocks = torch.cat([rows[:, :128].abs().amax(1, keepdim=True).expand(-1, 128),
                            rows[:, 128:].abs().amax(1, keepdim=True).expand(-1, 8)], 1)
        assert ((rows - low).abs() <= rows.abs() * 0.067 + blocks / 448 * 2.0**-10).all()
        assert 25 < snr(rows, low) < 40
    if "capacity_factor" in knobs and knobs.get("capacity_scope") != "rank":
        # A row and its weight: 272 + 4 bytes, or 136 + 2·4 + 4, filled up to multiples of 16. Out and, with its
        # gradient, home; results go home, and their gradients out, as rows alone.
        plain, low = plain_sent["all-to-all"], low_sent["all-to-all"]
        rows = plain / (288 + 272 + 272 + 288)
        assert rows == int(rows) and plain - low == rows * (288 - 160)


def one_layer(variants, world):
    """→ per variant, output and gradients of an MoE layer whose tokens are e4m3 numbers."""
    import moe
    import train
    from parallel import Tape, together
    found = []
    for knobs in variants:
        trainer = train.Trainer(config(**knobs), world)
        layer, random = trainer.model.moes[0], torch.Generator().manual_seed(trainer.layout.world.rank)
        codes = torch.randint(0, 0x7F, [16, 136], generator=random).to(torch.uint8).view(torch.float8_e4m3fn).float()
        codes[:, 0] = codes[:, 128] = 448
        h_TD, x_TD, g_TD = (codes / 64).requires_grad_(), torch.randn(16, 136, requires_grad=True), torch.randn(
            16, 136, generator=random)
        batch = moe.Batch(trainer.layout, torch.zeros(1, 16, dtype=torch.int64), None, trainer.capacity)
        tape = Tape()
        y, = together(tape.forward(layer(x_TD * 0, h_TD, batch)))
        trainer.optimizer.zero_grad()
        together(tape.backward(g_TD))
        kernels.drain_weight_gradients()
        found.append([y, h_TD.grad, *(p.grad.clone() for p in layer.parameters())])
    return found


def test_gradients_of_tokens_in_e4m3_are_those_of_tokens(pool, tokens):
    """Where e4m3 loses nothing, the way back must not either."""
    base = dict(data=tokens, n_layer=1, n_dense_layers=0, d_model=136, n_kv_head=0)
    layouts = [dict(ep=4), dict(ep=2, etp=2, capacity_factor=1.0), dict(ep=2, etp=2, dispatcher="allgather")]
    variants = [base | layout | dict(dispatch_precision=p) for layout in layouts for p in ("auto", "fp8")]
    for found in pool.run(4, one_layer, variants, 4):
        for plain, low in zip(found[::2], found[1::2]):
            assert all(torch.equal(a, b) for a, b in zip(plain, low))


def test_no_schedule_changes_a_bit_of_what_travels_in_e4m3(pool, tokens):
    base = dict(data=tokens, n_layer=2, n_dense_layers=0, global_batch=8, ep=4, dispatch_precision="fp8")
    ways = [dict(), dict(overlap="none", defer_wgrad=False), dict(recompute=("full",)), dict(dispatch_precision="auto")]
    for first, *others, plain in pool.run(4, run_layouts, [base | way for way in ways], 4, steps=2):
        assert all(bit_equal(first, other) for other in others)
        assert first["losses"] == pytest.approx(plain["losses"], rel=0.01) and first["losses"] != plain["losses"]
        for parameter, gradient in plain["grads"].items():
            assert "router" in parameter or snr(gradient, first["grads"][parameter]) > 15, parameter


def test_router_logits_in_bf16_if_asked():
    import moe
    x, logits = torch.randn(9, 32, requires_grad=True), {}
    weight = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    for precision in ("fp32", "bf16"):
        router = moe.Router(config(router_precision=precision))
        router.weight.data.copy_(weight)
        logits[precision] = router(x, torch.ones(9, dtype=torch.bool))[3]
        logits[precision].sum().backward()
        assert router.weight.dtype == router.weight.grad.dtype == logits[precision].dtype == torch.float32
        assert snr(x.detach().sum(0).expand(8, -1), router.weight.grad) > 35
    assert torch.equal(logits["fp32"], x @ weight.t())
    assert torch.equal(logits["bf16"], (x.bfloat16() @ weight.bfloat16().t()).float())
