"""The Triton kernels, run as Python by Triton's interpreter, against loops in float64 and the torch back-end.

Whether a kernel is compiled or interpreted is decided when kernels.py is imported, so these tests run in processes
of their own, started with TRITON_INTERPRET=1. (bf16 means nothing in the interpreter.)
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
import torch.nn.functional as F
from harness import assert_equals, poisoned, replaced
from settings import load

ROOT = Path(__file__).resolve().parent.parent
pool = None


@pytest.fixture(scope="module", autouse=True)
def interpreter():
    global pool
    pool = harness.Pool(4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool.run(1, int)    # the processes start now
    yield
    pool.close()


def interpreted(test):
    """The body of `test` runs in the interpreter's process."""
    @functools.wraps(test)
    def elsewhere(**params):
        pool.run(1, _call, test.__name__, **params)
    return elsewhere


def _call(name, **params):
    import kernels
    assert kernels.INTERPRETED
    torch.manual_seed(0)
    with back_end("triton"):
        globals()[name].__wrapped__(**params)


def back_end(name):
    import kernels
    return replaced(kernels.backend, "triton", name == "triton")


def assert_near(a, b, tolerance):
    """Equal up to `tolerance` of the largest value; NaN is equal to nothing."""
    assert a.shape == b.shape
    if b.numel():
        error = (a.double() - b.double()).abs().max().item()
        assert error <= tolerance * max(b.abs().max().item(), 1e-30), error


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


# ---- grouped GEMM ----

# Rows of each of four experts; an interpreted tile has 16 rows.
COUNTS = {"uneven, some empty": [5, 0, 21, 16], "one huge": [0, 0, 83, 0], "none": [0, 0, 0, 0],
          "one row": [0, 1, 0, 0], "whole tiles": [16, 32, 0, 16], "one off": [15, 17, 33, 1]}
# Rows of each (source rank, expert), with room for 20 or 32.
COUNTS_WL = [[[20, 0, 3], [16, 20, 0]], [[0, 0, 0], [0, 0, 0]], [[1, 2, 20], [0, 0, 17], [20, 20, 20]]]


def layouts():
    import kernels
    for spare, (name, counts) in enumerate(COUNTS.items()):
        ends_L = torch.tensor(counts).cumsum(0).to(torch.int32)
        yield f"{name}, {spare} spare", kernels.Groups.packed(ends_L, sum(counts) + spare)
    for counts, room in zip(COUNTS_WL, (20, 32, 20)):
        yield f"{counts} of {room}", kernels.Groups.padded(torch.tensor(counts), room)
    # as nothing in the trainer has it: gaps between the groups, two groups an expert
    yield "gaps", kernels.Groups(torch.tensor([3, 40, 22, 80]), torch.tensor([17, 33, 0, 5]), rows=90, experts=2)


def rows_of(groups):
    """[(expert, the rows of one group)], read on the host."""
    return [(g % groups.experts, torch.arange(start, start + count)) for g, (start, count)
            in enumerate(zip(groups.starts_G.tolist(), groups.counts_G.tolist()))]


def problem(groups, dtype, D, N, gathered):
    """→ x, w, dy, row_R, slot_TK and a mask of real rows; NaN wherever no group's row lies."""
    real_R = torch.zeros(groups.rows, dtype=torch.bool)
    for _, rows in rows_of(groups):
        real_R[rows] = True
    row_R = slot_TK = None
    x = torch.randn(groups.rows, D)
    if gathered:    # 3 tokens more than are used, each real row reads one; two rows read the same
        n = int(real_R.sum())
        row_R = torch.full([groups.rows], -1)
        row_R[real_R] = torch.randperm(n).clamp_min(min(1, n - 1))
        x = torch.randn(n + 3, D)
        slot_TK = torch.full([n + 3, 2], -1)
        for token in range(n + 3):
            slots = (row_R == token).nonzero()[:, 0]
            slot_TK[token, :len(slots)] = slots
            if not len(slots):
                x[token] = torch.nan
    else:
        x[~real_R] = torch.nan
    dy = torch.randn(groups.rows, N)
    dy[~real_R] = torch.nan
    return x.to(dtype), torch.randn(groups.experts, N, D).to(dtype), dy.to(dtype), row_R, slot_TK, real_R


def by_loop(groups, x, w, dy, row_R):
    """The three products in float64, a group at a time; zeros where no row is."""
    x, w, dy = x.double(), w.double(), dy.double()
    y, dx, dw = x.new_zeros(groups.rows, w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    for expert, rows in rows_of(groups):
        source = rows if row_R is None else row_R[rows]
        y[rows] = x[source] @ w[expert].T
        dx.index_add_(0, source, dy[rows] @ w[expert])
        dw[expert] += dy[rows].T @ x[source]
    return y, dx, dw


def products(groups, x, w, dy, row_R, slot_TK):
    """The same three by grouped_gemm, and the gradient once more, added to ones in fp32."""
    import kernels
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = kernels.grouped_gemm(x, w, groups, row_R, slot_TK)
    dx, dw = torch.autograd.grad(y, [x, w], dy, retain_graph=True)
    w.grad_dtype = torch.float32
    w.grad = sink = torch.ones(w.shape)
    torch.autograd.backward(y, dy, inputs=[w])
    assert w.grad is sink
    return y.detach(), dx, dw, sink - 1


def assert_products(groups, dtype, D, N, gathered, what):
    x, w, dy, row_R, slot_TK, real_R = problem(groups, dtype, D, N, gathered)
    plain = by_loop(groups, x.nan_to_num(), w, dy.nan_to_num(), row_R)
    with poisoned():
        ours = products(groups, x, w, dy, row_R, slot_TK)
    plain += plain[-1:]
    names = ("y", "dx", "dw", "dw added")
    has_rows = {"y": real_R, "dx": slice(None) if gathered else real_R, "dw": slice(None), "dw added": slice(None)}
    for name, a, b in zip(names, ours, plain):
        assert a.dtype == (torch.float32 if name == "dw added" else dtype), (what, name)
        try:
            assert_near(a[has_rows[name]], b[has_rows[name]], TOLERANCE[dtype])
        except AssertionError as error:
            raise AssertionError(f"{what}, {name}: {error}") from None
    if groups.room:     # room that nobody uses is zero, though memory was NaN
        assert (ours[0][~real_R] == 0).all() and (gathered or (ours[1][~real_R] == 0).all()), what
    # the torch back-end, which knows only the layouts that the trainer makes
    if groups.room or hasattr(groups, "ends_L"):
        with back_end("torch"), poisoned():
            torchs = products(groups, x, w, dy, row_R, slot_TK)
        for name, a, b in zip(names, ours, torchs):
            assert_near(a[has_rows[name]], b[has_rows[name]].double(), TOLERANCE[dtype])


@DTYPES
@pytest.mark.parametrize("gather", ["", "descriptor", "pointers"])
@interpreted
def test_three_products_of_every_layout(dtype, gather):
    import kernels
    D, N = (20, 36) if dtype == torch.float32 else (24, 40)     # no multiples of a tile
    with replaced(kernels, "gather_by", lambda capability, gathered: gather if gathered else ""):
        for what, groups in layouts():
            assert_products(groups, dtype, D, N, bool(gather), what)


@interpreted
def test_tiles_of_the_real_table():
    import kernels
    tile = kernels.TILES[9, "rows"][0][1]
    with replaced(kernels, "TEST", tile):
        packed = kernels.Groups.packed(torch.tensor([130, 130, 137]).to(torch.int32), 140)
        padded = kernels.Groups.padded(torch.tensor([[130, 0], [7, 129]]), 130)
        assert_products(packed, torch.float32, 68, 260, False, "packed")
        assert_products(padded, torch.float32, 68, 260, False, "padded")


@interpreted
def test_weights_of_several_output_dimensions():
    """Gate and up are a dimension of their own, and their gradient has their shape."""
    import kernels
    groups = kernels.Groups.packed(torch.tensor([3, 9], dtype=torch.int32), 9)
    x, w = torch.randn(9, 16), torch.randn(2, 2, 12, 16, requires_grad=True)
    y = kernels.grouped_gemm(x, w, groups)
    y.sum().backward()
    torch.testing.assert_close(y[4], torch.einsum("fgd,d->fg", w[1], x[4]).flatten())
    torch.testing.assert_close(w.grad[1], x[3:].sum(0).expand(2, 12, 16))


@interpreted
def test_every_program_count_gives_the_same():
    """What a persistent kernel leaves free changes nothing but time."""
    import kernels
    groups = kernels.Groups.packed(torch.tensor([40, 41, 99], dtype=torch.int32), 99)
    args = problem(groups, torch.float32, 48, 80, False)[:5]
    results = []
    for programs in (1, 2, 7, 1000):
        with replaced(kernels, "_device_of", lambda x: (9, programs)):
            results.append(products(groups, *args))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other))


# ---- gathers and SwiGLU ----


@DTYPES
@pytest.mark.parametrize("D", [1, 24, 300])
@interpreted
def test_permute_and_unpermute(dtype, D):
    import kernels
    T, K, S = 7, 3, 12
    choice_S = torch.cat([torch.randperm(T * K)[:9], torch.full([3], -1)])[torch.randperm(S)]
    row_S = torch.where(choice_S < 0, -1, choice_S // K)
    slot_TK = torch.full([T * K], -1)
    slot_TK[choice_S[choice_S >= 0]] = (choice_S >= 0).nonzero()[:, 0]
    slot_TK, real = slot_TK.view(T, K), choice_S >= 0
    x, dy = torch.randn(T, D).to(dtype).requires_grad_(), torch.randn(S, D).to(dtype)
    y, dx = torch.randn(S, D).to(dtype), torch.randn(T, D).to(dtype)
    dy[~real] = y[~real] = torch.nan    # what an empty slot holds reaches nothing
    y.requires_grad_()
    sums = lambda y: torch.stack([sum((y[s].double() for s in row if s >= 0), torch.zeros(D).double())
                                  for row in slot_TK.tolist()])
    with poisoned():
        there, back = kernels.permute(x, row_S, slot_TK), kernels.unpermute(y, slot_TK, row_S)
        grads = torch.autograd.grad([there, back], [x, y], [dy, dx])
    assert torch.equal(there[real], x[row_S[real]]) and (there[~real] == 0).all()
    assert torch.equal(grads[1][real], dx[row_S[real]])
    assert_near(back, sums(y.detach()), TOLERANCE[dtype])
    assert_near(grads[0], sums(dy), TOLERANCE[dtype])
    with back_end("torch"):
        assert_near(kernels.unpermute(y, slot_TK, row_S), back.double(), TOLERANCE[dtype])
    assert kernels.permute(x, row_S[:0], torch.full([T, K], -1)).shape == (0, D)


@DTYPES
@pytest.mark.parametrize("R, width", [(0, 8), (1, 8), (13, 24), (9, 520)])
@pytest.mark.parametrize("weighted", [True, False])
@interpreted
def test_swiglu(dtype, R, width, weighted):
    import kernels
    h, p = 3 * torch.randn(R, 2 * width), torch.rand(R, requires_grad=True) if weighted else None
    h, dy = h.to(dtype).requires_grad_(), torch.randn(R, width).to(dtype)
    inputs = [h, p][:1 + weighted]
    with poisoned():
        y = kernels.swiglu(h, p)
        ours = [y, *torch.autograd.grad(y, inputs, dy)]
    gate, up = h.double().chunk(2, 1)
    y = F.silu(gate) * up * (p.double()[:, None] if weighted else 1)
    plain = [y, *torch.autograd.grad(y, inputs, dy.double())]
    assert [t.dtype for t in ours] == [dtype, dtype, torch.float32][:2 + weighted]
    for a, b in zip(ours, plain):
        assert_near(a, b, TOLERANCE[dtype])
    with back_end("torch"):
        y = kernels.swiglu(h, p)
        for a, b in zip(ours, [y, *torch.autograd.grad(y, inputs, dy)]):
            assert_near(a, b, TOLERANCE[dtype])


# ---- 64-bit offsets ----


def far_apart(rows, width):
    """Rows so far apart that the last begins 2³¹ elements behind the first: memory is only used where written."""
    return torch.empty_strided([rows, width], [2**31 // (rows - 1), 1], dtype=torch.float16)


@interpreted
def test_row_offsets_are_64_bit():
    import kernels
    R = 5
    x, y, h, dh = far_apart(R, 16), far_apart(R, 32), far_apart(R, 32), far_apart(R, 32)
    small = torch.randn(R, 32).half()
    x.copy_(small[:, :16])
    h.copy_(small)
    step = x.stride(0)

    kernels.gather_kernel[1,](x, y, torch.arange(R).flip(0), R, 16, step, step, 1, **kernels.POINTWISE)
    assert torch.equal(y[:, :16].clone(), small[:, :16].flip(0))

    p, dp, act = torch.rand(R), torch.empty(R), far_apart(R, 16)
    kernels.swiglu_kernel[1,](h, p, act, R, 16, step, step, True, **kernels.POINTWISE)
    kernels.swiglu_backward_kernel[1,](x, h, p, dh, dp, R, 16, step, step, True, **kernels.POINTWISE)
    assert torch.equal(act.clone(), kernels.swiglu(small, p))
    plain = kernels._triton_swiglu_backward(small[:, :16].contiguous(), small, p)
    assert torch.equal(dh.clone(), plain[0]) and torch.equal(dp, plain[1])

    # One group of five rows, read through a map or as they lie, written by pointers as fewer than a tile
    groups = kernels.Groups.packed(torch.tensor([R], dtype=torch.int32), R)
    w, reverse = torch.randn(1, 32, 16).half(), torch.arange(R).flip(0)
    for gather, rows in (("", None), ("pointers", reverse)):
        with replaced(kernels, "gather_by", lambda *_: gather):
            near = kernels.gemm_rows(small[:, :16].contiguous(), w.transpose(1, 2), groups, rows)
        tile, desc = kernels.TEST, kernels._descriptor
        kernels.rows_kernel[1,](
            desc(x[None], 1, tile.rows, tile.inner), desc(w, 1, tile.cols, tile.inner),
            desc(y[None], 1, tile.rows, tile.cols), x, y, groups.tiles(tile.rows), rows, 1, 32, 16, R,
            step, step, gather, True, False, False, 8, tile.rows, tile.cols, tile.inner)
        assert torch.equal(y.clone(), near), gather

    # Five experts, one row each, whose gradients lie far apart: [16 · 5, 32] with every row a step further
    groups = kernels.Groups.packed(torch.arange(1, R + 1, dtype=torch.int32), R)
    dw, dy = far_apart(R, 32), torch.randn(R, 8).half()
    near = kernels.gemm_experts(dy, small, groups, reverse)[:, 0]
    tile = kernels.TEST
    with replaced(kernels, "gather_by", lambda *_: "pointers"):
        kernels.experts_kernel[1,](
            kernels._descriptor(dy[None], 1, tile.inner, tile.rows), None, h, dw, reverse, groups.starts_G,
            groups.counts_G, R, 1, 1, 32, R, step, step, "pointers", False, False, 8, tile.rows, tile.cols,
            tile.inner)
    assert torch.equal(dw.clone(), near)


@interpreted
def test_rows_are_read_where_they_lie():
    """Rows that arrived lie in longer ones, with their router weights behind them: they are not copied first."""
    import kernels
    groups = kernels.Groups.padded(torch.tensor([[3, 0], [8, 5]]), 8)
    wire, w = torch.randn(32, 48), torch.randn(2, 32, 16)
    rows, whole = wire[:, :32], wire[:, :32].contiguous()
    assert kernels._loadable(rows) is rows
    for odd in (wire[:, 1:33], torch.randn(32, 47)[:, :32], torch.randn(32, 32).t()):
        assert kernels._loadable(odd).is_contiguous()
    assert torch.equal(kernels.gemm_rows(rows, w, groups), kernels.gemm_rows(whole, w, groups))
    dy = torch.randn(32, 16)
    assert torch.equal(kernels.gemm_experts(dy, rows, groups), kernels.gemm_experts(dy, whole, groups))


# ---- training ----


def runs(knobs, world, wide):
    """Gradients and two steps by both back-ends; torch's grouped product must not run under Triton."""
    import dispatch
    import kernels
    results = []
    for gemm in ("torch", "triton"):
        with replaced(dispatch, "WIDE", wide), replaced(kernels, "TEST", kernels.Tile(64, 64, 64, 4, 2)), \
                replaced(kernels, "grouped_mm", kernels.grouped_mm if gemm == "torch" else None):
            results.append(harness.run_layout(dict(knobs, gemm=gemm), world, steps=2))
        assert kernels.backend.triton == (gemm == "triton")
    kernels.backend.triton = False
    return results


@pytest.mark.parametrize("world, wide, knobs", [
    (1, 256, dict(capacity_factor=0.0)),
    (1, 1, dict(capacity_factor=1.25)),
    (4, 1, dict(capacity_factor=1.0, micro_batch=1)),
    (2, 256, dict(capacity_factor=1.0, recompute=("moe",))),
    (2, 1, dict(capacity_factor=1.0, dispatch_precision="fp8", n_dense_layers=0, n_layer=1)),
], ids=["dropless", "capacity", "capacity as received, ep 4", "capacity compact, ep 2, recompute",
        "as received, with weights behind scales"])
def test_training_equals_the_torch_back_end(tokens, world, wide, knobs):
    knobs = dict(data=tokens, global_batch=4, ep=world, **{"n_layer": 2, "micro_batch": 2, **knobs})
    for torchs, tritons in pool.run(world, runs, knobs, world, wide):
        assert_equals(torchs, tritons)


# ---- what cannot run says so ----


@pytest.mark.parametrize("args, change, words", [
    ([], {}, ["gemm=triton needs a GPU", "cpu", "gemm=torch"]),
    ([], dict(triton=None), ["gemm=triton", "not installed", "gemm=torch"]),
    (["--d_expert=18"], dict(INTERPRETED=True), ["d_expert/etp=18", "multiple of 4", "gemm=torch"]),
    (["--d_model=36", "--n_head=2", "--precision=bf16"], dict(INTERPRETED=True), ["d_model=36", "multiple of 8"]),
    (["--comm_sms=-1"], dict(INTERPRETED=True), ["comm_sms", "at least 0", "-1"]),
], ids=["no GPU", "no triton", "odd width", "odd width in bf16", "negative comm_sms"])
def test_a_back_end_that_cannot_run_is_one_line_and_exit_2(tokens, args, change, words, capsys, monkeypatch):
    import kernels
    import train
    for name, value in change.items():
        monkeypatch.setattr(kernels, name, value)
    with pytest.raises(SystemExit) as exit:
        load(train.Config, [f"--data={tokens}", "--seq_len=16", "--device=cpu", "--gemm=triton", *args],
             lambda cfg: train.check(cfg, 1))
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines


def test_trains_where_triton_is_not_installed(tmp_path, tokens):
    """The import alone must not need it."""
    code = ("import sys; sys.modules['triton'] = None; import kernels, train; assert kernels.triton is None; "
            f"train.main(['--data={tokens}', '--n_layer=1', '--d_model=16', '--n_head=2', '--d_expert=8', "
            "'--seq_len=16', '--global_batch=2', '--max_steps=1', '--eval_steps=0', '--device=cpu'])")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0 and "step 1/1" in done.stdout, done.stderr


# ---- python bench.py kernels ----


def test_bench_kernels_on_a_cpu(tmp_path, capsys, monkeypatch):
    import bench
    import kernels
    monkeypatch.setattr(bench, "MODELS", {"Tiny": (128, 64, 32, 16)})
    bench.main(["kernels", "--check", "--rows=8", "--device=cpu", f"--json={tmp_path}/k.json"])
    text = capsys.readouterr().out
    for word in ("the torch back-end", "no GPU", "full shapes need a GPU", "weight gradient", "as received",
                 "Tiny D=16 F=8 experts=2 ranks=2 rows=8", "expert-major", "gathered on load", "SwiGLU backward",
                 "every product agrees"):
        assert word in text, word
    written = json.loads((tmp_path / "k.json").read_text())
    assert written["backend"] == "the torch back-end" and written["device"].startswith("CPU")
    products = [line for line in written["results"] if "tflops" in line]
    assert len(products) == 8 and all(line["tflops"] > 0 < line["loop_tflops"] for line in products)

    # a wrong product is found, and named
    plain = kernels.gemm_experts
    monkeypatch.setattr(kernels, "gemm_experts", lambda *args: plain(*args) * 1.01)
    with pytest.raises(SystemExit) as exit:
        bench.main(["kernels", "--check", "--rows=8", "--device=cpu"])
    text = capsys.readouterr().out
    assert exit.value.code == 1 and "weight gradient, as received, expert 1" in text and "forward, " not in text


@pytest.mark.parametrize("argv, words", [
    (["kernels", "--tune", "--device=cpu"], ["tune=true", "GPU"]),
    (["kernels", "--json=no/where.json"], ["no/where.json"]),
    (["kernel"], ["usage", "kernels"]), ([], ["usage", "kernels"])], ids=str)
def test_bench_refuses_in_one_line(argv, words, capsys):
    import bench
    with pytest.raises(SystemExit) as exit:
        bench.main(argv)
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(lines) == 1 and all(word in lines[0] for word in words), lines
