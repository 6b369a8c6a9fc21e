"""How tokens travel: into slots, to their experts and back, against loops; whatever the router does, and whatever
lies in memory that nobody wrote."""

import collections
import functools
from types import SimpleNamespace

import dispatch
import kernels
import naive
import pytest
import torch
import torch.nn.functional as F
from harness import (assert_equals, config, force_router, forced, log_rows, poisoned, ragged, route_table,
                     run_layout, run_layouts)
from torch.utils._python_dispatch import TorchDispatchMode

ALONE = SimpleNamespace(size=1, rank=0)


# ---- kernels ----


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_same_gradients(ours, plain, inputs):
    """Values and gradients of two expressions in `inputs`."""
    torch.testing.assert_close(ours, plain)
    direction = torch.randn_like(plain)
    for a, b in zip(*(torch.autograd.grad(y, inputs, direction, materialize_grads=True, retain_graph=True)
                      for y in (ours, plain))):
        torch.testing.assert_close(a, b)


def maps(T, K, S, seed=0):
    """(row_S, slot_TK): T·K choices, of which some hold one of S slots, in a random order."""
    random = torch.Generator().manual_seed(seed)
    slots = torch.randperm(S, generator=random)[:min(S, T * K) * 2 // 3]
    choices = torch.randperm(T * K, generator=random)[:len(slots)]
    row_S, slot_TK = torch.full([S], -1), torch.full([T * K], -1)
    row_S[slots], slot_TK[choices] = choices // K, slots
    return row_S, slot_TK.view(T, K)


@pytest.mark.parametrize("T, K, S", [(7, 1, 7), (5, 3, 4), (5, 2, 20)])
def test_permute_and_unpermute_against_autograd(T, K, S):
    row_S, slot_TK = maps(T, K, S)
    real = row_S >= 0
    x_TD, y_SD = double(T, 3), double(S, 3)
    # what an empty slot holds, forward or backward, is arbitrary
    assert_same_gradients(kernels.permute(x_TD, row_S, slot_TK)[real], x_TD[row_S[real]], [x_TD])
    rows = [[y_SD[s] for s in slots if s >= 0] for slots in slot_TK.tolist()]
    plain = torch.stack([sum(mine, torch.zeros(3, dtype=torch.float64)) for mine in rows])
    ours = kernels.unpermute(y_SD, slot_TK, row_S)
    torch.testing.assert_close(ours, plain)
    direction = torch.randn_like(plain)
    a, b = (torch.autograd.grad(x, y_SD, direction)[0] for x in (ours, plain))
    torch.testing.assert_close(a[real], b[real])


def test_what_empty_slots_hold_reaches_nothing():
    # slots 0 and 3 are empty
    row_S, slot_TK = torch.tensor([-1, 2, 0, -1, 0]), torch.tensor([[2, 4], [-1, -1], [1, -1]])
    y_SD = torch.ones(5, 3).where((row_S >= 0)[:, None], torch.nan)
    assert kernels.unpermute(y_SD, slot_TK, row_S).tolist() == [[2] * 3, [0] * 3, [1] * 3]
    x_TD = torch.randn(3, 3, requires_grad=True)
    kernels.permute(x_TD, row_S, slot_TK).backward(y_SD)
    assert x_TD.grad.tolist() == [[2] * 3, [0] * 3, [1] * 3]


def test_rows_without_tokens():
    none, x_TD = torch.zeros(0, dtype=torch.int64), double(0, 3)
    y_SD = kernels.permute(x_TD, torch.tensor([-1, -1]), torch.zeros(0, 2, dtype=torch.int64))
    assert y_SD.shape == (2, 3) and y_SD.isfinite().all()
    assert kernels.permute(double(4, 3), none, torch.full([4, 2], -1)).shape == (0, 3)
    assert (kernels.unpermute(double(0, 3), torch.full([4, 2], -1), none) == torch.zeros(4, 3)).all()


@pytest.mark.parametrize("R", [0, 1, 63, 64, 130])
@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_against_autograd(R, weighted):
    h_R2F, p_R = 3 * double(R, 10), double(R) if weighted else None
    gate, up = h_R2F.chunk(2, 1)
    plain = gate * torch.sigmoid(gate) * up * (p_R[:, None] if weighted else 1)
    assert_same_gradients(kernels.swiglu(h_R2F, p_R), plain, [h_R2F, p_R][:1 + weighted])


def test_swiglu_weighs_in_fp32():
    h_R2F, p_R = torch.randn(70, 64).bfloat16().requires_grad_(), torch.rand(70, requires_grad=True)
    y_RF = kernels.swiglu(h_R2F, p_R)
    y_RF.float().sum().backward()
    assert (y_RF.dtype, h_R2F.grad.dtype, p_R.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    gate, up = h_R2F.detach().float().chunk(2, 1)
    torch.testing.assert_close(p_R.grad, (F.silu(gate) * up).sum(1), rtol=0.03, atol=0.3)


@pytest.mark.parametrize("D, N", [(16, 8), (5, 3)], ids=["aligned", "odd"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts, spare", [([3, 0, 5, 1], 0), ([0, 4, 0, 0], 3), ([0, 0, 0, 0], 2), ([0, 0, 0, 0], 0),
                                           ([7, 9, 1, 2], 5)])
def test_grouped_gemm_against_autograd(counts, spare, dtype, D, N):
    """Rows past the last group are garbage, before and after, and reach nothing."""
    ends_L, real = torch.tensor(counts).cumsum(0).to(torch.int32), sum(counts)
    x_RD = torch.randn(real + spare, D).to(dtype)
    x_RD[real:] = torch.nan
    x_RD.requires_grad_()
    w_LND = torch.randn(4, N, D).to(dtype).requires_grad_()
    dy_RN = torch.randn(real + spare, N).to(dtype)
    dy_RN[real:] = torch.nan
    y_RN = kernels.grouped_gemm(x_RD, w_LND, kernels.Groups.packed(ends_L, len(x_RD)))
    dx_RD, dw_LND = torch.autograd.grad(y_RN, [x_RD, w_LND], dy_RN)
    assert dw_LND.shape == w_LND.shape and dw_LND.isfinite().all()
    x, w, start = x_RD.detach().double().requires_grad_(), w_LND.detach().double().requires_grad_(), 0
    for expert, count in enumerate(counts):
        rows = slice(start, start := start + count)
        plain = x[rows] @ w[expert].T
        dx, dw = torch.autograd.grad(plain, [x, w], dy_RN[rows].double(), materialize_grads=True)
        near = dict(rtol=2e-2, atol=5e-2) if dtype == torch.bfloat16 else dict(rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y_RN[rows].double(), plain, **near)
        torch.testing.assert_close(dx_RD[rows].double(), dx[rows], **near)
        torch.testing.assert_close(dw_LND[expert].double(), dw[expert], **near)
        assert count or not dw_LND[expert].any(), "an expert without rows has a gradient of zeros"


# ---- capacity ----


def plan(experts, weights=None, num_experts=2, capacity=0, policy="probs"):
    experts = torch.tensor(experts)
    weights = torch.zeros(experts.shape) if weights is None else torch.tensor(weights)
    made = dispatch.Plan(experts, weights, num_experts, capacity, policy, ALONE, ALONE)
    made.gathered = False   # as if rows travelled: alone they would not be moved into slots
    return made


def test_drops_by_hand():
    #            token  0       1       2       3         expert 0 is chosen by tokens 0, 1, 2, 3, expert 1 too
    experts = [[0, 1], [1, 0], [0, 1], [0, 1]]
    weights = [[.6, .4], [.9, .1], [.7, .3], [.5, .5]]
    # expert 0: .6, .1, .7, .5 → tokens 2, 0; expert 1: .4, .9, .3, .5 → tokens 1, 3
    p = plan(experts, weights, capacity=2)
    assert p.slot_TK.tolist() == [[1, -1], [2, -1], [0, -1], [-1, 3]]
    assert p.choice_S.tolist() == [4, 0, 2, 7]
    assert p.counts_E.tolist() == [4, 4] and p.kept_E.tolist() == [2, 2]
    # by position: first choices first. expert 0: tokens 0, 2, 3, then 1; expert 1: token 1, then 0, 2, 3
    p = plan(experts, weights, capacity=2, policy="position")
    assert p.slot_TK.tolist() == [[0, 3], [2, -1], [1, -1], [-1, -1]]
    assert p.choice_S.tolist() == [0, 4, 2, 1]


def test_ties_are_dropped_from_the_end():
    for policy in ("probs", "position"):
        p = plan([[0, 1]] * 5, capacity=3, policy=policy)
        assert p.slot_TK.tolist() == [[0, 3], [1, 4], [2, 5], [-1, -1], [-1, -1]]
    # position counts second choices after all first ones, a tie of weights does not
    experts = [[1, 0], [0, 1], [0, 1]]
    assert plan(experts, capacity=2).slot_TK.tolist() == [[2, 0], [1, 3], [-1, -1]]
    assert plan(experts, capacity=2, policy="position").slot_TK.tolist() == [[2, -1], [0, 3], [1, -1]]


def test_tokens_that_are_not_routed_take_no_slot():
    for capacity in (0, 1):
        p = plan([[-1, -1], [1, 0], [-1, -1]], [[9., 9.], [.5, .5], [9., 9.]], capacity=capacity)
        assert p.slot_TK.tolist() == [[-1, -1], [1, 0], [-1, -1]]
        assert p.counts_E.tolist() == p.kept_E.tolist() == [1, 1]


def test_a_dropped_assignment_contributes_nothing():
    p = plan([[0, 1], [0, 1]], [[.9, .1], [.2, .8]], capacity=1)
    assert p.slot_TK.tolist() == [[0, -1], [-1, 1]]
    y_SD = torch.tensor([[1.0, 2.0], [30.0, 40.0]], requires_grad=True)
    x_TD = dispatch.combine(y_SD, p)
    assert x_TD.tolist() == y_SD.tolist()
    weights_TK = torch.tensor([[.9, .1], [.2, .8]], requires_grad=True)
    tokens_TD = torch.randn(2, 2, requires_grad=True)
    rows_SD, weights_S = dispatch.dispatch(tokens_TD, weights_TK, p)
    (rows_SD.sum() + (weights_S * torch.tensor([3.0, 5.0])).sum()).backward()
    assert weights_TK.grad.tolist() == [[3, 0], [0, 5]]
    assert tokens_TD.grad.tolist() == [[1, 1], [1, 1]]


def test_an_empty_slot_says_so():
    p = plan([[0, 0], [0, 0]], [[.4, .3], [.2, .1]], num_experts=3, capacity=5)
    rows_SD, weights_S = dispatch.dispatch(torch.randn(2, 4), torch.rand(2, 2), p)
    assert rows_SD.shape == (15, 4) and rows_SD.isfinite().all()
    assert (weights_S[4:] == -1).all() and (weights_S[:4] >= 0).all()
    assert p.choice_S[4:].tolist() == [-1] * 11


def test_a_router_weight_that_is_nan_still_is_a_row():
    """Else NaN would silently become a dropped token."""
    p = plan([[0, 1], [1, 0], [0, 1]], [[torch.nan, .5], [.6, .4], [.9, .1]], num_experts=3, capacity=4)
    rows_SD, weights_S = dispatch.dispatch(torch.randn(3, 4), torch.tensor([[torch.nan, .5], [.6, .4], [.9, .1]]), p)
    for _ in p.travel("out", rows_SD, weights_S):
        pass
    assert p.groups.ends_L.tolist() == [3, 6, 6]
    assert dispatch.by_expert(weights_S, p)[:3].isnan().sum() == 1


def test_capacity_by_hand():
    c = lambda factor, tokens, k, e: dispatch.capacity(config(capacity_factor=factor, top_k=k, num_experts=e), tokens)
    assert c(4.0, 4, 2, 2) == 4             # 16 slots were meant, but there are 4 tokens
    assert c(1.0, 16, 2, 8) == 4
    assert c(1.25, 16, 2, 8) == 5
    assert c(1.0, 10, 1, 8) == 2            # 1.25, rounded up
    assert c(0.01, 16, 2, 8) == 1
    assert c(0.0, 16, 2, 8) == 0            # dropless


def test_capacity_comes_from_the_configuration(pool, tokens):
    """T 4, E 2, K 2, factor 4: every rank clamps to 4 slots, however many of its tokens are padding; = REF."""
    base = dict(data=tokens, seq_len=4, num_experts=2, global_batch=4)
    ref = pool.run(1, run_layout, dict(base, micro_batch=4), 1, steps=2)[0]
    assert [c for c, in pool.run(4, capacities, [dict(base, capacity_factor=4.0)], 4)] == [4] * 4
    for world, ep in ((1, 1), (2, 2), (4, 2), (4, 1)):
        variants = [dict(base, ep=ep, capacity_factor=4.0, drop_policy=policy) for policy in ("probs", "position")]
        for rank, results in enumerate(pool.run(world, run_layouts, variants, world, steps=2)):
            for result in results:
                assert_equals(ref, result, what=f"world {world}, rank {rank}")


def capacities(variants, world):
    import train
    return [train.Trainer(config(**knobs), world).capacity for knobs in variants]


# ---- one layer against loops ----


def layer_and_loops(variants, world):
    """Runs one MoE layer on random activations of this rank, and the same in loops over all ranks' tokens. Returns
    per variant ({name: (ours, by loops)}, (assignments, those kept))."""
    import moe
    import train
    from parallel import Tape, together

    results = []
    for seed, (knobs, ties) in enumerate(variants):
        cfg = config(**knobs)
        trainer = train.Trainer(cfg, world)
        layer, layout = trainer.model.moes[1], trainer.layout
        random = torch.Generator().manual_seed(100 * seed + layout.world.rank)
        T, D = cfg.micro_batch * cfg.seq_len, cfg.d_model
        h_TD, x_TD, g_TD = (torch.randn(T, D, generator=random) for _ in range(3))
        tokens_T = torch.randint(0, 64, [T], generator=random)
        tokens_T[::5] = -1
        router_ED, bias_E = (0.3 * torch.randn(8, n, generator=random) for n in (D, 1))
        for alike in (router_ED, bias_E := bias_E[:, 0].clone()):
            layout.world.all_reduce(alike)
        router_ED *= not ties
        bias_E *= 0.1 * (cfg.score_fn == "sigmoid")
        with torch.no_grad():
            layer.router.weight.copy_(router_ED)
            layer.router.bias_E.copy_(bias_E)
            layer.experts.w1.mul_(20), layer.experts.w2.mul_(50)

        h_TD.requires_grad_(), x_TD.requires_grad_()
        batch = moe.Batch(layout, tokens_T.view(cfg.micro_batch, cfg.seq_len), None, trainer.capacity)
        tape = Tape()
        y_TD, = together(tape.forward(layer(x_TD, h_TD, batch)))
        trainer.optimizer.zero_grad()
        together(tape.backward(g_TD))
        kernels.drain_weight_gradients()

        everyone = [layout.world.all_gather(t.detach()) for t in (h_TD, g_TD, tokens_T)]
        whole = [layout.ep.all_gather(w.detach()).requires_grad_() for w in (layer.experts.w1, layer.experts.w2)]
        weight, total = layer.router.weight.detach().clone().requires_grad_(), 0.0
        for rank, (h, g, ids) in enumerate(zip(*(t.split(T) for t in everyone))):
            h = h.clone().requires_grad_()
            y, n, kept, *_ = naive.moe(h, ids >= 0, weight, bias_E, *whole, cfg, trainer.capacity)
            if rank == layout.world.rank:
                mine, my_h, counts = y, h, (n, kept)
            total = total + (y * g).sum()
        dw1, dw2, dweight, dh = torch.autograd.grad(total, [*whole, weight, my_h], materialize_grads=True)
        for grad in (layer.experts.w1.grad, layer.experts.w2.grad):     # a rank's experts: its copies sum up
            layout.owners["ep", "etp"].all_reduce(grad)
        layout.plane.all_reduce(layer.router.weight.grad)
        own = slice(layer.experts.first, layer.experts.first + len(layer.experts.w1))
        pairs = {"y": (y_TD, x_TD.detach() + mine.detach()), "x": (x_TD.grad, g_TD), "h": (h_TD.grad, dh),
                 "w1": (layer.experts.w1.grad, dw1[own]), "w2": (layer.experts.w2.grad, dw2[own]),
                 "router": (layer.router.weight.grad, dweight)}
        results.append(({k: (a.clone(), b) for k, (a, b) in pairs.items()}, counts))
    return results


@pytest.mark.parametrize("world, ep", [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2)])
def test_layer_against_loops(pool, tokens, world, ep):
    base = dict(data=tokens, global_batch=2 * world, micro_batch=2, n_layer=2, n_shared_experts=0, ep=ep, d_expert=12)
    variants = [(dict(base, capacity_factor=c, drop_policy=p, score_fn=f, recompute=r, dispatcher=d), t)
                for c, p, f, r, t in (
        (0.0, "probs", "softmax", (), False), (0.0, "probs", "sigmoid", ("moe",), False),
        (0.5, "probs", "softmax", (), False), (0.5, "position", "sigmoid", (), False),
        (1.0, "probs", "sigmoid", ("moe",), False), (0.3, "probs", "softmax", (), True),
        (0.3, "position", "softmax", (), True), (4.0, "position", "softmax", (), False))
                for d in ("alltoall", "allgather")[:1 + (ep > 1)]]
    for rank, results in enumerate(pool.run(world, layer_and_loops, variants, world)):
        for (knobs, ties), (pairs, (assigned, held)) in zip(variants, results):
            what = f"rank {rank}, factor {knobs['capacity_factor']}, {knobs['drop_policy']}, ties {ties}"
            assert (held < assigned) == (0 < knobs["capacity_factor"] < 4), f"{what}: drops are what is tested"
            for name, (ours, plain) in pairs.items():
                # this rank's experts may have no tokens
                assert plain.norm() > 1e-4 or name in ("w1", "w2") and not plain.any(), (what, name)
                assert (ours - plain).norm() <= 1e-5 * plain.norm(), (what, name, (ours - plain).norm())


def uneven_tails(tokens, labels, windows):
    for row, w in enumerate(windows):
        tokens[row, 16 - w % 7:] = -1


def drops_by_hand(folder, world):
    """Logged drops of a step with a fixed routing, and the numbers that a count by hand needs."""
    import train
    knobs = dict(data=folder, global_batch=8, micro_batch=2, capacity_factor=0.8, out_dir=f"{folder}/out")
    prepare = functools.partial(force_router, table=SKEWED)
    row, = log_rows(knobs, world, uneven=uneven_tails, prepare=prepare)
    with ragged(uneven_tails):
        trainer = train.Trainer(config(**knobs), world)
        return row, trainer.capacity, [b.tokens_T.tolist() for b in trainer.batches(0)]


SKEWED = torch.stack([torch.arange(64) % 3 // 2, 2 + torch.arange(64) % 5], 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_dropped_fraction_is_dropped_over_valid_assignments(pool, tokens, world):
    ranks = pool.run(world, drops_by_hand, tokens, world)
    valid = dropped = 0
    for row, capacity, microbatches in ranks:
        assert capacity == 7                        # 0.8·32·2/8, rounded up
        for ids in microbatches:
            load = collections.Counter(e for t in ids if t >= 0 for e in SKEWED[t].tolist())
            valid += sum(load.values())
            dropped += sum(max(0, n - capacity) for n in load.values())
    assert 0.05 < dropped / valid < 0.9
    for row, *_ in ranks:
        assert row["drop_fraction"] == pytest.approx(dropped / valid, rel=1e-12)


# ---- gradients over expert-parallel ranks ----


def test_expert_and_upstream_gradients_do_not_depend_on_expert_parallelism(pool, tokens):
    """Neither ep times too large nor a rank's part: 4 experts on 1, 2 and 4 ranks, plain SGD."""
    base = dict(data=tokens, num_experts=4)
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=2)[0]
    for part in ("embedding", "layers.0.attention.wq", "layers.1.norm2.weight", "layers.1.moe.router.weight",
                 "layers.1.moe.shared.w1", "layers.1.moe.experts.w1", "layers.2.moe.experts.w2", "head"):
        assert ref["grads"][part].norm() > 1e-6 * ref["norm"], part
    for world, ep in ((2, 2), (2, 1), (4, 4), (4, 2)):
        for rank, result in enumerate(pool.run(world, run_layout, dict(base, ep=ep), world, steps=2)):
            assert_equals(ref, result, what=f"world {world}, ep {ep}, rank {rank}")


def parameters(variants, world):
    """Per variant: this rank's first expert and its parameters."""
    import train
    results = []
    for knobs in variants:
        model = train.Trainer(config(**knobs), world).model
        results.append((model.moes[1].experts.first, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return results


def test_every_expert_starts_from_its_own_values_in_every_layout(pool, tokens):
    whole = pool.run(1, parameters, [dict(data=tokens)], 1)[0][0][1]
    for layer in (1, 2):
        for leaf in ("w1", "w2"):
            experts = whole[f"layers.{layer}.moe.experts.{leaf}"]
            assert all(not torch.equal(experts[i], experts[j]) for i in range(8) for j in range(i)), (layer, leaf)
            spread = experts.flatten(1).std(1)
            assert (spread / spread.mean() - 1).abs().max() < 0.2
    assert not torch.equal(whole["layers.1.moe.experts.w1"], whole["layers.2.moe.experts.w1"])
    other = pool.run(1, parameters, [dict(data=tokens, seed=1)], 1)[0][0][1]
    assert not torch.equal(whole["layers.1.moe.experts.w1"], other["layers.1.moe.experts.w1"])
    for world, eps in ((2, (1, 2)), (4, (1, 2, 4))):
        for results in pool.run(world, parameters, [dict(data=tokens, ep=ep) for ep in eps], world):
            for ep, (first, params) in zip(eps, results):
                assert params.keys() == whole.keys()
                for name, param in params.items():
                    want = whole[name][first:first + 8 // ep] if ".experts." in name else whole[name]
                    assert torch.equal(param, want), (world, ep, name)


# ---- dispatcher=allgather ----


GATHERED = {
    "ep 4": dict(ep=4),
    "ep 2, etp 2": dict(ep=2, etp=2),
    "ep 2, edp 2, tp 2": dict(ep=2, tp=2),
    "pp 2, ep 2": dict(pp=2, ep=2),
    "recompute": dict(ep=4, recompute=("full",)),
    "recompute experts, one at a time": dict(ep=2, etp=2, recompute=("moe",), overlap="none", defer_wgrad=False),
}


def in_poisoned_memory(variants, world, **how):
    with poisoned():
        return run_layouts(variants, world, **how)


def test_gathered_tokens_give_the_same_gradients(pool, tokens):
    """Dropless, as one process; with little capacity, as with rows that travel one by one: the same is dropped."""
    base = dict(data=tokens, micro_batch=1, top_k=3)
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=1)[0]
    few = [dict(capacity_factor=0.7), dict(capacity_factor=0.7, capacity_scope="rank", drop_policy="position")]
    variants = []
    for i, knobs in enumerate(GATHERED.values()):
        variants += [base | knobs | dict(dispatcher="allgather")]
        variants += [base | knobs | few[i % 2] | dict(dispatcher=d) for d in ("alltoall", "allgather")]
    for rank, found in enumerate(pool.run(4, in_poisoned_memory, variants, 4, steps=1)):
        for name, (dropless, rows, gathered) in zip(GATHERED, zip(*[iter(found)] * 3)):
            assert_equals(ref, dropless, what=f"{name}, dropless, rank {rank}")
            assert_equals(rows, gathered, what=f"{name}, rank {rank}")
            assert abs(rows["norm"] - ref["norm"]) > 1e-4 * ref["norm"], "drops are what is tested"


def bytes_sent(variants, world):
    """{(group, collective): bytes} of one MoE layer's exchanges in one forward and backward, per variant."""
    import train
    from parallel import ledger
    sent = []
    for knobs in variants:
        trainer = train.Trainer(config(n_layer=1, n_dense_layers=0, **knobs), world)
        ledger.take()
        trainer.forward_backward(list(trainer.batches(0)))
        sent.append({(group.name, op): n for (group, op), (_, n) in ledger.take().items() if group.name in ("ep", "etp")})
    return sent


def test_the_ledger_counts_gathered_tokens(pool, tokens):
    """32 tokens a rank of 32 numbers, fp32, top-6 of 8: each goes to the other rank and back, twice."""
    base = dict(data=tokens, global_batch=4, top_k=6)
    T, D, K, E = 32, 32, 6, 8
    there, ints = (D + K) * T * 4, (T * K + 2 * E) * 8     # two microbatches each say how many choices experts have
    for capacity in (0.0, 1.0):
        variants = [dict(base, ep=2, dispatcher=d, capacity_factor=capacity) for d in ("allgather", "alltoall")]
        for gathered, rows in pool.run(2, bytes_sent, variants, 2):
            assert gathered == {("ep", "all-gather"): there + ints + T * D * 4,
                                ("ep", "reduce-scatter"): T * D * 4 + there}
            assert sum(rows.values()) > 1.5 * sum(gathered.values())
    for sent, in pool.run(4, bytes_sent, [dict(base, global_batch=8, ep=2, etp=2, dispatcher="allgather")], 4):
        assert sent["etp", "all-gather"] == 2 * sent["ep", "all-gather"]
        assert sent["etp", "reduce-scatter"] == 2 * sent["ep", "reduce-scatter"]


# ---- skewed routing ----


EVERY = [dict(capacity_factor=c, recompute=r)
         for c, r in ((0.0, ()), (0.0, ("moe",)), (0.0, ("full",)), (4.0, ()), (4.0, ("full",)))]


@pytest.mark.parametrize("preset, world, ep", [
    ("one rank empty", 4, 4), ("one rank empty", 2, 2), ("one expert empty", 4, 2), ("one expert empty", 1, 1),
    ("all to one", 4, 4)])
def test_experts_and_ranks_without_tokens(pool, tokens, preset, world, ep):
    """They take part in every exchange, forward and backward, and have gradients of zero."""
    base, prepare = dict(data=tokens, aux_loss_coef=0.01, aux_loss_scope="sequence"), forced(preset, ranks=ep)
    empty = sorted(set(range(8)) - set(route_table(preset, ranks=ep).flatten().tolist()))
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=1, prepare=prepare)[0]
    variants = [dict(base, ep=ep, **how) for how in EVERY]
    ranks = pool.run(world, run_layouts, variants, world, steps=1, prepare=prepare)
    for rank, results in enumerate(ranks):
        for how, result in zip(EVERY, results):
            for layer in (1, 2):
                for leaf in ("w1", "w2"):
                    grad = result["grads"][f"layers.{layer}.moe.experts.{leaf}"]
                    assert all((grad[e] == 0).all() == (e in empty) for e in range(8)), (rank, how)
            assert_equals(ref, result, what=f"{preset}, rank {rank}, {how}")


def idle_sources(tokens, labels, windows):
    """Every second sequence is nothing but padding."""
    for row, w in enumerate(windows):
        tokens[row, w % 2 * 16:] = -1
        labels[row, :w % 5] = -100


@pytest.mark.parametrize("world, ep", [(2, 2), (4, 4)])
def test_ranks_without_anything_to_send(pool, tokens, world, ep):
    ref = pool.run(1, run_layout, dict(data=tokens, micro_batch=12), 1, steps=1, uneven=idle_sources)[0]
    variants = [dict(data=tokens, ep=ep, **how) for how in EVERY]
    for rank, results in enumerate(pool.run(world, run_layouts, variants, world, steps=1, uneven=idle_sources)):
        for how, result in zip(EVERY, results):
            assert_equals(ref, result, what=f"rank {rank}, {how}")


def poisoned_layouts(variants, world, prepare):
    with poisoned():
        assert torch.empty(3).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
        return [run_layout(knobs, world, steps=2, prepare=p) for knobs in variants for p in (None, prepare)]


@pytest.mark.parametrize("world, ep", [(1, 1), (2, 2), (4, 4)])
def test_memory_that_nobody_wrote_reaches_nothing(pool, tokens, world, ep):
    # the first rank's experts are idle, so that even the first row is one that nobody wrote
    table = route_table("one rank empty", ranks=ep) + 8 // ep if ep > 1 else route_table("one expert empty") + 1
    prepare = functools.partial(force_router, table=table)
    refs = [pool.run(1, run_layout, dict(data=tokens, micro_batch=12), 1, steps=2, prepare=p)[0]
            for p in (None, prepare)]
    variants = [dict(data=tokens, ep=ep, **how) for how in EVERY]
    for rank, results in enumerate(pool.run(world, poisoned_layouts, variants, world, prepare)):
        for how, free, told in zip(EVERY, results[::2], results[1::2]):
            assert_equals(refs[0], free, what=f"rank {rank}, {how}")
            assert_equals(refs[1], told, what=f"rank {rank}, {how}, an idle rank or expert")


class Shapes(TorchDispatchMode):
    """Notes the shape of everything that is computed."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, torch.Tensor):
                self.seen.append((str(func), tuple(t.shape)))
        return out


def shapes_and_traffic(folder, world, capacity_factor, presets):
    """Per preset: all shapes of a forward and backward, and the bytes sent."""
    import parallel
    import train
    knobs = dict(data=folder, top_k=1, norm_topk=False, capacity_factor=capacity_factor, global_batch=4)
    results = []
    for preset in presets:
        trainer = train.Trainer(config(**knobs, ep=world), world)
        forced(preset, top_k=1)(trainer)
        batches = list(trainer.batches(0))
        parallel.ledger.take()
        with Shapes() as shapes:
            trainer.forward_backward(batches)
        sent = sum(size for (group, op), (calls, size) in parallel.ledger.take().items() if op == "all-to-all")
        results.append((sorted(shapes.seen), sent))     # when weight gradients are computed is the network's to say
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_skew_moves_no_memory_in_capacity_mode(pool, tokens, world):
    presets = ("balanced", "all to one", "one rank empty")
    for rank, results in enumerate(pool.run(world, shapes_and_traffic, tokens, world, 1.0, presets)):
        for preset, (shapes, sent) in zip(presets, results):
            assert len(shapes) > 500
            assert (shapes, sent) == results[0], f"rank {rank}, {preset}"


def test_skew_shows_in_dropless_mode(pool, tokens):
    """The check above would see a tensor that grows."""
    ranks = pool.run(2, shapes_and_traffic, tokens, 2, 0.0, ("balanced", "all to one"))
    assert all(balanced != skewed for balanced, skewed in ranks)


def test_skew_is_logged(pool, tokens):
    knobs = dict(data=tokens, out_dir=f"{tokens}/out", top_k=1, norm_topk=False, capacity_factor=1.0)
    for world in (1, 4):
        for rows in pool.run(world, log_rows, knobs, world, prepare=forced("all to one", top_k=1)):
            assert rows[0]["load_imbalance"] == 8                               # max over mean of 8 experts
            assert rows[0]["drop_fraction"] == pytest.approx(1 - 1 / 8)         # one expert's slots are full
