"""Who is called: the router's choices and weights, what balances them, what it counts, and what never counts."""

import moe
import naive
import pytest
import torch
from harness import (all_ties, assert_equals, config, force_router, forced, gradients_of, log_rows,
                     losses_of, low_bias, ragged, replaced, run_layout, run_layouts, watch_routing)

LAYERS = 2      # MoE layers of the small model


def router(**knobs):
    cfg = config(**knobs)
    torch.manual_seed(0)
    module = moe.Router(cfg)
    torch.nn.init.normal_(module.weight, std=0.4)
    return cfg, module, torch.randn(40, cfg.d_model), torch.arange(40) % 5 != 3


# ---- choices and weights ----


@pytest.mark.parametrize("groups", [(1, 1), (4, 1), (4, 2), (2, 1)], ids="{0[1]} of {0[0]} groups".format)
@pytest.mark.parametrize("bias", [0, -2], ids="bias {}".format)
@pytest.mark.parametrize("norm_topk, route_scale", [(True, 2.5), (False, 1.0)])
@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_router_agrees_with_loops(score_fn, norm_topk, route_scale, bias, groups):
    cfg, module, x_TD, counted_T = router(score_fn=score_fn, norm_topk=norm_topk, route_scale=route_scale,
                                          n_groups=groups[0], topk_groups=groups[1], num_experts=16)
    module.bias_E.copy_(bias + torch.randn(16) * (bias != 0))
    experts_TK, weights_TK, scores_TE, logits_TE = module(x_TD, counted_T)
    experts, weights, scores, logits = naive.route(x_TD, counted_T, module.weight, module.bias_E, cfg)
    torch.testing.assert_close(logits_TE, logits)
    torch.testing.assert_close(scores_TE, scores)
    for t, counted in enumerate(counted_T):
        assert experts_TK[t].tolist() == (experts[t] if counted else [-1, -1])
        if counted:
            torch.testing.assert_close(weights_TK[t], torch.stack(weights[t]))


def test_bias_chooses_but_does_not_weigh():
    cfg, module, x_TD, counted_T = router(score_fn="sigmoid", norm_topk=False)
    before = module(x_TD, counted_T)
    module.bias_E[5] = 10
    experts_TK, weights_TK, scores_TE, _ = module(x_TD, counted_T)
    assert torch.equal(scores_TE, before[2])
    assert (experts_TK[counted_T, 0] == 5).all()
    assert torch.equal(weights_TK[counted_T, 0], scores_TE[counted_T, 5])


@pytest.mark.parametrize("groups", [(1, 1), (4, 2)])
@pytest.mark.parametrize("bias", [0.0, -2.0])
def test_ties_go_to_the_lowest_index(groups, bias):
    cfg, module, x_TD, counted_T = router(num_experts=64, top_k=3, n_groups=groups[0], topk_groups=groups[1])
    torch.nn.init.zeros_(module.weight)
    module.bias_E.fill_(bias)
    assert (module(x_TD, counted_T)[0][counted_T] == torch.tensor([0, 1, 2])).all()
    module.bias_E[40:] += 1     # ties again, but not from the start
    assert (module(x_TD, counted_T)[0][counted_T] == torch.tensor([40, 41, 42])).all()


def test_group_masking_holds_when_every_score_is_negative():
    # filling masked groups with 0 would make them the best
    cfg, module, x_TD, counted_T = router(score_fn="sigmoid", num_experts=8, n_groups=2, topk_groups=1)
    module.bias_E.copy_(torch.tensor([-2.0] * 4 + [-3.0] * 4))
    assert (module(x_TD, counted_T)[0][counted_T] < 4).all()


def test_force_balance_is_round_robin():
    cfg, module, x_TD, counted_T = router(force_balance=True, num_experts=5, norm_topk=False)
    experts_TK, weights_TK, scores_TE, _ = module(x_TD, counted_T)
    for t in range(40):
        expected = [(2 * t) % 5, (2 * t + 1) % 5]
        assert experts_TK[t].tolist() == (expected if counted_T[t] else [-1, -1])
        if counted_T[t]:
            assert weights_TK[t].tolist() == scores_TE[t, expected].tolist()


def test_an_earlier_choice_is_kept():
    cfg, module, x_TD, counted_T = router(norm_topk=False)
    earlier_TK = torch.stack([torch.full([40], 7), torch.full([40], 0)], 1).where(counted_T[:, None], -1)
    experts_TK, weights_TK, scores_TE, _ = module(x_TD, counted_T, earlier_TK)
    assert torch.equal(experts_TK, earlier_TK)
    assert torch.equal(weights_TK[counted_T], scores_TE[counted_T][:, [7, 0]])


def test_top_1_that_could_never_learn_is_refused():
    assert any("norm_topk" in problem for problem in moe.check(config(top_k=1, norm_topk=True)))
    assert not moe.check(config(top_k=1, norm_topk=False))


def test_top_1_learns(pool, tokens):
    variants = [dict(data=tokens, top_k=1, norm_topk=False, score_fn=f, capacity_factor=c)
                for f in ("softmax", "sigmoid") for c in (0.0, 1.0)]
    for knobs, result in zip(variants, pool.run(1, run_layouts, variants, 1, steps=0)[0]):
        for name, grad in result["grads"].items():
            if ".router." in name:
                assert grad.norm() > 1e-6 * result["norm"], (knobs, name)


# ---- the auxiliary losses ----


def identical(tokens, labels, windows):
    """Every sequence is the same one."""
    tokens[:] = (torch.arange(tokens.shape[1]) * 7) % 64
    labels[:] = (tokens + 7) % 64
    labels[:, ::3] = -100
    tokens[:, -2:] = -1


SCOPES = ("batch", "sequence", "global")


def test_aux_loss_does_not_grow_with_accumulation(pool, tokens):
    """Identical microbatches: four of them, on one rank or two, are the same as one."""
    base = dict(data=tokens, aux_loss_coef=1.0, z_loss_coef=0.1)
    once = [dict(base, global_batch=1, aux_loss_scope=scope) for scope in SCOPES]
    four = [dict(base, global_batch=4, aux_loss_scope=scope) for scope in SCOPES]
    refs = pool.run(1, run_layouts, once, 1, steps=1, uneven=identical)[0]
    plain = pool.run(1, run_layout, dict(base, global_batch=1, aux_loss_coef=0.0), 1, steps=1, uneven=identical)[0]
    for ref in refs:    # the auxiliary loss has a say in what is compared
        grads = "layers.1.moe.router.weight", "layers.1.attention.wq"
        assert all((ref["grads"][n] - plain["grads"][n]).norm() > 0.01 * plain["grads"][n].norm() for n in grads)
    for world in (1, 2):
        for rank, results in enumerate(pool.run(world, run_layouts, four, world, steps=1, uneven=identical)):
            for scope, ref, result in zip(SCOPES, refs, results):
                assert_equals(ref, result, what=f"{scope}, world {world}, rank {rank}")


def test_sequence_aux_loss_does_not_depend_on_grouping(pool, tokens):
    """4 sequences at once, one by one, and over ranks."""
    base = dict(data=tokens, global_batch=4, aux_loss_coef=1.0, z_loss_coef=0.1, aux_loss_scope="sequence")
    ref = pool.run(1, run_layout, dict(base, micro_batch=4), 1, steps=1)[0]
    for world, variants in ((1, [1, 2]), (2, [1, 2]), (4, [1])):
        knobs = [dict(base, micro_batch=m) for m in variants]
        for rank, results in enumerate(pool.run(world, run_layouts, knobs, world, steps=1)):
            for m, result in zip(variants, results):
                assert_equals(ref, result, what=f"micro_batch {m}, world {world}, rank {rank}")


def rows_of(variants, world, **how):
    return [log_rows(knobs, world, **how) for knobs in variants]


def test_logged_losses_know_nothing_of_recompute_and_accumulation(pool, tokens, tmp_path):
    base = dict(data=tokens, out_dir=str(tmp_path), global_batch=4, micro_batch=4, aux_loss_coef=1.0,
                z_loss_coef=0.1, aux_loss_scope="sequence")
    variants = [dict(base, recompute=r, micro_batch=m) for r in ((), ("moe",), ("full",)) for m in (4, 1)]
    variants += [dict(base, aux_loss_coef=0.0, z_loss_coef=0.0)]
    *rows, plain = (rows[0] for rows in pool.run(1, rows_of, variants, 1, uneven=True)[0])
    assert rows[0]["aux_loss"] > 0.5 and rows[0]["z_loss"] > 0.1 and plain["aux_loss"] == plain["z_loss"] == 0
    for knobs, row in zip(variants, rows):
        for name in ("aux_loss", "z_loss", "drop_fraction", "load_imbalance", "grad_norm"):
            assert row[name] == pytest.approx(rows[0][name], rel=1e-5), (knobs, name)
        assert row["loss"] == pytest.approx(plain["loss"], rel=1e-6), f"{knobs}: loss is cross entropy alone"
    assert rows[0]["grad_norm"] != pytest.approx(plain["grad_norm"], rel=1e-3)


def test_balanced_and_uniform_logs_exactly_the_coefficient(pool, tokens, tmp_path):
    shapes = [(1, 4, 1), (1, 8, 2), (3, 6, 3), (5, 16, 4)]
    variants = [dict(data=tokens, out_dir=str(tmp_path), global_batch=12, micro_batch=m, n_layer=n, n_dense_layers=d,
                     num_experts=e, top_k=k, norm_topk=k > 1, force_balance=True, aux_loss_coef=0.03, ep=1,
                     score_fn=score, aux_loss_scope=scope)
                for (n, e, k), d in zip(shapes, (0, 0, 1, 0)) for m in (1, 3)
                for score, scope in (("softmax", "batch"), ("sigmoid", "sequence"), ("softmax", "global"))]
    for world in (1, 2):
        for results in pool.run(world, rows_of, variants, world, prepare=all_ties):
            for knobs, rows in zip(variants, results):
                assert rows[0]["aux_loss"] == pytest.approx(0.03, rel=2e-6), (world, knobs)
                assert rows[0]["load_imbalance"] == 1


def half_padded(tokens, labels, windows):
    """Between none and all of a sequence is padding, and some labels are ignored."""
    for row, w in enumerate(windows):
        tokens[row, 16 - (4 * w) % 20:] = -1
        labels[row, :w % 3] = -100


def seen_routing(knobs, world):
    """What the layers routed in one step, and what was booked for it."""
    import train
    with ragged(half_padded):
        trainer = train.Trainer(config(**knobs), world)
        seen = watch_routing(trainer)
        trainer.forward_backward(list(trainer.batches(0)))
    stats = {n: (layer.stats.aux.item(), layer.stats.z.item(), layer.stats.counts_E) for n, layer in
             trainer.model.moes.items()}
    return [dict(s, batch=None, counted=s["batch"].counted_T, shape=s["batch"].shape) for s in seen], stats


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
@pytest.mark.parametrize("scope", SCOPES)
def test_aux_and_z_loss_by_hand(pool, tokens, scope, score_fn):
    """Two ranks, two microbatches of three partly padded sequences each."""
    knobs = dict(data=tokens, global_batch=12, micro_batch=3, aux_loss_coef=0.5, z_loss_coef=0.25, score_fn=score_fn,
                 aux_loss_scope=scope, n_layer=2, ep=2)
    ranks = pool.run(2, seen_routing, knobs, 2)
    cfg, per_rank = config(**knobs), [seen for seen, _ in ranks]
    counted = sum(s["counted"].sum().item() for seen in per_rank for s in seen)
    assert all(len(seen) == 2 for seen in per_rank) and 0 < counted < 12 * 16
    for rank, (seen, stats) in enumerate(ranks):
        aux = z = 0.0
        counts = [0] * 8
        for m, s in enumerate(seen):
            B, S = s["shape"]
            experts, scores = s["experts"].tolist(), s["scores"].double()
            sequences = [[t for t in range(b * S, b * S + S) if s["counted"][t]] for b in range(B)]
            everyone = sum(sequences, [])
            if scope == "sequence":
                aux += sum(naive.balance(scores, experts, members, cfg) for members in sequences) / B
            elif scope == "batch":
                aux += naive.balance(scores, experts, everyone, cfg)
            else:
                so_far = [e for other in per_rank for o in other[:m + 1]
                          for e, c in zip(o["experts"].tolist(), o["counted"]) if c]
                aux += naive.balance(scores, experts, everyone, cfg, so_far)
            z += sum(torch.logsumexp(s["logits"][t].double(), 0).item() ** 2 for t in everyone)
            for t in everyone:
                for e in experts[t]:
                    counts[e] += 1
        got_aux, got_z, got_counts = stats[1]
        assert got_aux == pytest.approx(0.5 * float(aux) / 4, rel=1e-5), f"rank {rank}"
        assert got_z == pytest.approx(0.25 * z / counted, rel=1e-5), f"rank {rank}"
        assert got_counts.tolist() == counts


# ---- padding ----


def disguise_padding(trainer, scale):
    """Adds noise to what padded tokens look like after the first block's attention."""
    attention = trainer.model.layers["0"].attention
    plain, generator = attention.forward, torch.Generator().manual_seed(0)

    def forward(x_TD, batch):
        y_TD = plain(x_TD, batch)
        return y_TD + scale * torch.randn(y_TD.shape, generator=generator) * (~batch.counted_T)[:, None]

    attention.forward = forward


def tail_padded(tokens, labels, windows):
    """The second half of each sequence is padding, whatever its labels say."""
    tokens[:, tokens.shape[1] // 2:] = -1


def padding_seen(variants, world, scale):
    """Gradients, counts, drops, aux and z of one step, in which no padded token may hold a slot."""
    import train
    plain, plans, results = moe.Plan, [], []

    def plan(*args):
        plans.append(plain(*args))
        return plans[-1]

    with ragged(tail_padded), replaced(moe, "Plan", plan):
        for knobs in variants:
            trainer = train.Trainer(config(**knobs), world)
            disguise_padding(trainer, scale)
            result = gradients_of(trainer)
            stats = [layer.stats for layer in trainer.model.moes.values()]
            result["booked"] = [(s.counts_E.tolist(), s.kept_E.tolist(), s.aux.item(), s.z.item()) for s in stats]
            for p in plans:
                T, K = p.slot_TK.shape
                padded = torch.arange(T) % 16 >= 8
                assert (p.slot_TK[padded] == -1).all() and (p.experts_TK[padded] == -1).all()
                held = p.choice_S[p.choice_S >= 0] // K
                assert len(held) == p.kept_E.sum() > 0 and not padded[held].any()
            plans.clear()
            results.append(result)
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_padding_is_never_routed_counted_or_given_a_slot(pool, tokens, world):
    variants = [dict(data=tokens, global_batch=8, micro_batch=2, aux_loss_coef=1.0, z_loss_coef=0.1, recompute=r,
                     capacity_factor=factor, aux_loss_scope=scope, drop_policy=policy, force_balance=balance)
                for factor, scope, policy, balance, r in (
                    (0.0, "batch", "probs", False, ()), (0.3, "sequence", "position", False, ("full",)),
                    (0.3, "global", "probs", False, ()), (0.3, "batch", "probs", True, ()))]
    quiet, loud = (pool.run(world, padding_seen, variants, world, scale) for scale in (0.0, 1e3))
    for rank in range(world):
        for knobs, a, b in zip(variants, quiet[rank], loud[rank]):
            assert_equals(a, b, what=f"rank {rank}, {knobs}")
            assert a["booked"] == b["booked"]
            for counts, kept, _, _ in a["booked"]:
                assert sum(counts) == 8 // world * 8 * 2
                assert (sum(kept) < sum(counts)) == (knobs["capacity_factor"] > 0)


# ---- counters and bias ----


def test_a_module_wide_cast_leaves_the_router_alone():
    _, module, x_TD, counted_T = router(score_fn="sigmoid", bias_update_rate=1e-3)
    outer = torch.nn.ModuleDict({"router": module, "other": torch.nn.Linear(2, 2)})
    module.bias_E.fill_(0.5)
    weight = module.weight.clone()
    for cast in (lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double()):
        cast(outer)
        assert outer["other"].weight.dtype != torch.float32
        assert module.weight.dtype == module.bias_E.dtype == torch.float32
        assert torch.equal(module.weight, weight)
    module.update_bias(torch.tensor([0.0] + [8.0] * 7, dtype=torch.float64), torch.tensor(False))
    assert module.bias_E.tolist() == pytest.approx([0.501] + [0.499] * 7, abs=1e-7)
    logits = module(x_TD.bfloat16(), counted_T)[3]
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x_TD.bfloat16().float() @ weight.T)


def count_many(folder):
    """40,840 tokens in one microbatch of a bf16 model, all for expert 0."""
    import train
    knobs = dict(data=folder, seq_len=20, global_batch=2042, micro_batch=2042, n_layer=1, n_dense_layers=0, d_model=8,
                 d_head=4, n_head=1, n_kv_head=1, d_expert=4, n_shared_experts=0, top_k=1, norm_topk=False,
                 aux_loss_coef=0.1, precision="bf16", bias_update_rate=1e-3, num_experts=4)
    trainer = train.Trainer(config(**knobs), 1)
    forced("all to one", num_experts=4, top_k=1)(trainer)
    layer = trainer.model.moes[0]
    layer.router.bias_E.fill_(0.5)
    trainer.step(0)
    kinds = {n: p.dtype for n, p in trainer.model.named_parameters()}
    return kinds, layer.stats.counts_E, layer.stats.kept_E, layer.stats.so_far, layer.router.bias_E


def test_a_bf16_model_counts_exactly(pool, tokens):
    kinds, counts, kept, load, bias = pool.run(1, count_many, tokens)[0]
    assert kinds["embedding"] == torch.bfloat16 and kinds["layers.0.moe.router.weight"] == torch.float32
    assert counts.dtype == kept.dtype == load.dtype == torch.int64
    assert counts.tolist() == kept.tolist() == [40840, 0, 0, 0]
    assert load.tolist() == [[40840, 0, 0, 0, 40840]]
    assert bias.tolist() == pytest.approx([0.499] + [0.501] * 3, abs=1e-7)


def bias_after(variants, world, steps=1):
    """Per variant, the bias of each layer after training, and the token ids this rank saw in each step."""
    import train
    results = []
    for knobs in variants:
        with ragged():
            trainer = train.Trainer(config(**knobs), world)
            force_router(trainer, LOPSIDED)
            ids = []
            for step in range(steps):
                ids.append(torch.cat([b.tokens_T for b in trainer.batches(step)]))
                trainer.step(step)
        results.append(([layer.router.bias_E for layer in trainer.model.moes.values()], ids))
    return results


LOPSIDED = torch.stack([torch.arange(64) % 5, 5 + torch.arange(64) % 7 // 3], 1)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_bias_moves_once_a_step_from_the_global_counts(pool, tokens, world):
    variants = [dict(data=tokens, global_batch=16, micro_batch=m, bias_update_rate=0.01, recompute=r, ep=e)
                for m, r, e in ((1, (), 0), (1, ("full",), world), (2, (), 1), (4, (), 1))]
    ranks = pool.run(world, bias_after, variants, world)
    for i, knobs in enumerate(variants):
        count = torch.zeros(8, dtype=torch.int64)
        for results in ranks:
            ids = results[i][1][0]
            for token in ids[ids >= 0].tolist():
                count[LOPSIDED[token]] += 1
        expected = 0.01 * torch.sign(count.double().mean() - count).float()
        assert len(expected.unique()) > 1
        for rank, results in enumerate(ranks):
            assert len(results[i][0]) == LAYERS
            for bias in results[i][0]:
                assert torch.equal(bias, expected), (knobs, rank)


def trained(folder, world, evaluate):
    """Three steps, with an evaluation before and after each or without."""
    import train
    knobs = dict(data=folder, optimizer="adamw", lr=1e-2, bias_update_rate=0.01, aux_loss_coef=0.1, eval_steps=1,
                 capacity_factor=1.0, aux_loss_scope="global", score_fn="sigmoid")
    trainer = train.Trainer(config(**knobs), world)
    layers, rows, traces = trainer.model.moes.values(), [], 0

    def state():
        tensors = [t for layer in layers for t in (layer.stats.counts_E, layer.stats.kept_E, layer.stats.so_far,
                                                   layer.stats.aux, layer.stats.z, layer.router.bias_E)]
        tensors += [f.grad for f in trainer.optimizer.families] + [f.flat for f in trainer.optimizer.families]
        return [torch.as_tensor(t).clone() for t in tensors]

    for step in range(3):
        if evaluate:
            trainer.evaluate()
        rows.append(trainer.step(step).read())
        if evaluate:
            before = state()
            trainer.evaluate()
            traces += not all(map(torch.equal, before, state()))
    return rows, state(), traces


@pytest.mark.parametrize("world", [1, 2])
def test_evaluation_leaves_no_trace(pool, tokens, world):
    with_, without = (pool.run(world, trained, tokens, world, e) for e in (True, False))
    for (rows, state, traces), (other_rows, other_state, _) in zip(with_, without):
        assert traces == 0
        assert rows == other_rows
        assert all(map(torch.equal, state, other_state))


def skipped(folder):
    """The bias and the losses around a step that is not finite."""
    import train
    trainer = train.Trainer(config(data=folder, bias_update_rate=0.01), 1)
    before = losses_of(trainer, 1), [layer.router.bias_E.clone() for layer in trainer.model.moes.values()]
    trainer.model.norm.forward = lambda x: x * torch.nan
    trainer.step(1)
    return before[1], [layer.router.bias_E for layer in trainer.model.moes.values()]


def test_bias_stays_when_a_step_is_skipped(pool, tokens):
    before, after = pool.run(1, skipped, tokens)[0]
    assert all(b.any() for b in before) and all(map(torch.equal, before, after))


# ---- a negative bias and ties through the whole trainer ----


@pytest.mark.parametrize("prepare", [all_ties, low_bias], ids=lambda f: f.__name__)
def test_ties_and_negative_scores_route_alike_in_every_layout(pool, tokens, prepare):
    base = dict(data=tokens, score_fn="sigmoid", n_groups=4, topk_groups=2, aux_loss_coef=0.1,
                aux_loss_scope="sequence")
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=2, prepare=prepare)[0]
    for world, variants in ((2, [dict(base, ep=2)]), (4, [dict(base, ep=4), dict(base, ep=2, micro_batch=3)])):
        for rank, results in enumerate(pool.run(world, run_layouts, variants, world, steps=2,
                                                   prepare=prepare)):
            for knobs, result in zip(variants, results):
                assert_equals(ref, result, what=f"rank {rank} of {world}, {knobs['ep']}")
