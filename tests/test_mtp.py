"""Multi-token prediction: what its loss is, that no layout or grouping changes it, and what it leaves alone."""

import math

import harness
import model as models
import naive
import pytest
import torch
import torch.nn.functional as F
from harness import assert_equals, bit_equal, log_rows, ragged, run_layout, run_layouts

BASE = dict(n_layer=2, n_mtp=2, mtp_coef=0.7)


# ---- the loss, by hand ----


def through(block, x_TD, batch, counted_T, cfg):
    x_TD = x_TD + block.attention(block.norm1(x_TD), batch)
    h_TD = block.norm2(x_TD)
    if block.moe is None:
        w1_2FD, w2_DF = block.mlp.w1, block.mlp.w2
        return x_TD + (F.silu(h_TD @ w1_2FD[0].T) * (h_TD @ w1_2FD[1].T)) @ w2_DF.T
    router, experts = block.moe.router, block.moe.experts
    return x_TD + naive.moe(h_TD, counted_T, router.weight, router.bias_E, experts.w1, experts.w2, cfg)[0]


def root_mean_square(x_D, weight_D, eps):
    return x_D / (x_D.square().mean() + eps).sqrt() * weight_D


def sums_by_hand(model, batch, cfg):
    """[1 + n_mtp] sums of cross entropy of one microbatch, and of how many labels; position by position."""
    (B, S), depths = batch.shape, 1 + cfg.n_mtp
    tokens, labels = batch.tokens_BS.tolist(), batch.labels_BS.tolist()
    batch.rope = models.rope_table(torch.arange(S), models.head_width(cfg), cfg.rope_theta)
    x_TD = model.embedding[batch.tokens_BS.flatten().clamp_min(0)]
    for i in range(cfg.n_layer):
        x_TD = through(model.layers[str(i)], x_TD, batch, batch.tokens_BS.flatten() >= 0, cfg)
    state = {(b, t): root_mean_square(x_TD[b * S + t], model.norm.weight, cfg.norm_eps)
             for b in range(B) for t in range(S)}
    sums, counts = [torch.zeros(()) for _ in range(depths)], [0] * depths
    for k in range(depths):
        # position t of depth k knows the tokens t to t + k, and all of them must be there
        known = {(b, t): t + k < S and all(tokens[b][t + j] >= 0 for j in range(k + 1)) for b, t in state}
        if k:
            module = model.layers[str(cfg.n_layer + k - 1)]
            rows = []
            for (b, t), h_D in state.items():
                e_D = model.embedding[tokens[b][t + k] if known[b, t] else 0]
                pair = [root_mean_square(e_D, module.embed_norm.weight, cfg.norm_eps),
                        root_mean_square(h_D, module.state_norm.weight, cfg.norm_eps)]
                rows.append(module.proj @ torch.cat(pair))
            x_TD = through(module, torch.stack(rows), batch, torch.tensor(list(known.values())), cfg)
            state = {at: root_mean_square(x_D, module.norm.weight, cfg.norm_eps) for at, x_D in zip(state, x_TD)}
        for (b, t), h_D in state.items():
            if known[b, t] and labels[b][t + k] != -100:
                sums[k] = sums[k] - (model.head @ h_D).log_softmax(0)[labels[b][t + k]]
                counts[k] += 1
    return sums, counts


def here_and_by_hand(knobs):
    """→ (means per depth, gradients) as the trainer has them, and by hand; how many labels each depth has."""
    import train
    with ragged():
        trainer = train.Trainer(harness.config(**knobs), 1)
        with torch.no_grad():   # no norm may be neutral
            for name, p in trainer.model.named_parameters():
                if "norm" in name:
                    p.uniform_(0.5, 1.5)
        trainer.optimizer.start()
        here = harness.gradients_of(trainer)
        parts = [sums_by_hand(trainer.model, batch, trainer.cfg) for batch in trainer.batches(0)]
    sums, counts = (list(map(sum, zip(*part))) for part in zip(*parts))
    means = [s / n for s, n in zip(sums, counts)]
    objective = means[0] + sum(trainer.cfg.mtp_coef / trainer.cfg.n_mtp * mean for mean in means[1:])
    names, params = zip(*trainer.model.named_parameters())
    by_hand = dict(zip(names, torch.autograd.grad(objective, params)))
    return ([here["loss"], *here["mtp"]], here["grads"]), ([m.item() for m in means], by_hand), counts


def test_the_loss_is_that_of_a_loop_over_positions(pool, tokens):
    """Two microbatches with different numbers of labels, masked at the front and padded at the end."""
    knobs = dict(BASE, data=tokens, n_shared_experts=0, global_batch=4, micro_batch=2, seq_len=8)
    (means, grads), (means_by_hand, grads_by_hand), counts = pool.run(1, here_and_by_hand, knobs)[0]
    assert counts[0] > counts[1] > counts[2] > 0
    assert means == pytest.approx(means_by_hand, rel=1e-5)
    assert grads.keys() == grads_by_hand.keys()
    for name, grad in grads_by_hand.items():
        assert grad.norm() > 0 and (grads[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_tokens_and_labels_go_on_together():
    import moe
    import parallel
    parallel.init(torch.device("cpu"))
    layout = parallel.Layout(parallel.Sizes(1, 1, 1, 1, 1, 1, 1), torch.device("cpu"))
    batch = moe.Batch(layout, torch.tensor([[1, 2, 3, 4], [5, -1, 7, 8]]),
                      torch.tensor([[2, -100, 4, 9], [-1, 7, 8, 6]]), n_mtp=2)
    one, two = batch.ahead, batch.ahead.ahead
    assert one.tokens_G.tolist() == [2, 3, 4, -1, -1, -1, 8, -1] and two.ahead is None
    assert one.labels_G.tolist() == [-100, 4, 9, -100, -100, -100, 6, -100]
    assert two.tokens_G.tolist() == [3, 4, -1, -1, -1, -1, -1, -1]
    assert two.labels_G.tolist() == [4, 9] + 6 * [-100]
    assert two.counted_T.tolist() == [True, True] + 6 * [False]


# ---- no layout, grouping or length changes it ----

FEW = {
    1: [dict(micro_batch=1, recompute=("full",))],
    2: [dict(pp=2, vpp=2, micro_batch=3)],
    4: [dict(tp=2, cp=2, ep=4), dict(pp=2, cp=2, ep=2, recompute=("full",))],
}
MANY = {
    2: [dict(tp=2, overlap="none"), dict(pp=2, micro_batch=4)],
    4: [dict(ep=4, capacity_factor=4.0), dict(tp=4, ep=2, etp=2), dict(pp=4), dict(pp=2, vpp=2, ep=2, tp=2),
        dict(pp=2, ep=1, recompute=("moe",))],
    8: [dict(tp=2, cp=2, pp=2, ep=2, etp=2)],
}
MLA = dict(attention="mla", n_kv_head=0, qk_norm="none", kv_lora_rank=10, d_nope=6, d_rope=4, d_v=5)


@pytest.mark.parametrize("worlds, more", [
    pytest.param(FEW, dict(), id="two modules"),
    pytest.param({2: [dict(pp=2)], 4: [dict(pp=2, ep=2)]}, dict(tie_embeddings=True, n_mtp=1), id="one, tied"),
    pytest.param(MANY, dict(), id="more layouts", marks=pytest.mark.full),
    pytest.param(FEW | MANY, dict(tie_embeddings=True, **MLA), id="latent attention", marks=pytest.mark.full)])
def test_every_gradient_equals_one_process(pool, tokens, worlds, more):
    base = BASE | dict(data=tokens, micro_batch=3, n_layer=4) | more
    ref, = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=2)
    assert len(ref["mtp"]) == base["n_mtp"] and all(ref["mtp"])
    for world, layouts in worlds.items():
        for rank, results in enumerate(pool.run(world, run_layouts, [base | knobs for knobs in layouts], world,
                                                steps=2)):
            for knobs, result in zip(layouts, results, strict=True):
                assert_equals(ref, result, what=f"rank {rank}, {knobs}")


def test_pairs_and_recompute_change_no_bit(pool, tokens):
    base = dict(BASE, data=tokens, ep=1, pp=2, micro_batch=4, aux_loss_coef=0.1, z_loss_coef=0.01)
    variants = [dict(base, overlap=o, recompute=r) for r in ((), ("full",)) for o in ("none", "pair")]
    for results in pool.run(2, run_layouts, variants, 2, steps=2):
        assert all(bit_equal(results[0], result) and result["mtp"] == results[0]["mtp"] for result in results)


def test_the_norm_does_not_grow_with_the_sequence(pool, tmp_path):
    """Of a text with one token alone, all positions are alike: short and long sequences have the same gradient."""
    data = harness.write_tokens(tmp_path / "data", [5] * 1000)
    variants = [dict(BASE, data=data, seq_len=S, global_batch=B, micro_batch=m)
                for S, B, m in ((8, 4, 4), (32, 4, 1), (32, 8, 2))]
    short, *others = pool.run(1, run_layouts, variants, 1, steps=1, uneven=False)[0]
    for other in others:
        assert other["mtp"] == pytest.approx(short["mtp"], rel=1e-5)
        assert other["norm"] == pytest.approx(short["norm"], rel=1e-5)
        for name, grad in short["grads"].items():
            assert (other["grads"][name] - grad).norm() <= 1e-5 * short["norm"], name


# ---- what is logged, and what is left alone ----

SPEED = {"a2a_share", "gemm_efficiency", "memory_gb", "step_s", "tokens_per_s", "tflops_per_gpu", "mfu"}


def test_the_log_has_the_loss_with_its_coefficient(pool, tokens):
    base = dict(BASE, data=tokens, out_dir=f"{tokens}/out", aux_loss_coef=0.1, aux_loss_scope="sequence",
                bias_update_rate=0.01, n_layer=4, micro_batch=3)
    one, = pool.run(1, log_rows, base, 1, steps=3, uneven=True)
    ref, = pool.run(1, run_layout, base, 1, steps=0)
    assert one[0]["loss"] == pytest.approx(ref["loss"]) and one[0]["mtp_loss"] == pytest.approx(
        0.7 * sum(ref["mtp"]) / 2)
    for world, knobs in ((4, dict(pp=2, ep=2)), (2, dict(pp=2, vpp=2))):
        for rows in pool.run(world, log_rows, base | knobs, world, steps=3, uneven=True):
            for a, b in zip(one, rows, strict=True):
                for key in a.keys() - SPEED:
                    assert a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-12), (knobs, key)
    # where experts all score the same, every layer's z-loss is known, if its mean is over the layer's own tokens
    row, = pool.run(1, log_rows, dict(base, z_loss_coef=0.1), 1, uneven=True, prepare=harness.all_ties)[0]
    assert row["z_loss"] == pytest.approx(0.1 * math.log(8)**2)
    assert "mtp_loss" not in pool.run(1, log_rows, dict(base, n_mtp=0), 1)[0][0]


def uses(knobs, world):
    """Evaluation, a greedy sample, the first step's loss, and which layers counted how many choices in it."""
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    value, sample = trainer.evaluate(), list(models.generate(trainer.model, range(5), 4, temperature=0))
    loss = trainer.step(0).read()[0]
    moved = {i: layer.router.bias_E.abs().sum().item() > 0 for i, layer in trainer.model.moes.items()}
    counts = {i: int(layer.stats.counts_E.sum()) for i, layer in trainer.model.moes.items()}
    return value, sample, loss, moved, counts


def test_evaluation_and_sampling_know_nothing_of_it(pool, tokens):
    base = dict(BASE, data=tokens, eval_steps=2, bias_update_rate=0.01, micro_batch=12)
    with_it, = pool.run(1, uses, base, 1)
    without, = pool.run(1, uses, dict(base, n_mtp=0), 1)
    assert with_it[:3] == without[:3]
    assert with_it[3] == {1: True, 2: True, 3: True} and without[3] == {1: True}
    assert with_it[4] == {1: 12 * 16 * 2, 2: 12 * 15 * 2, 3: 12 * 14 * 2}, "no position beyond the end is routed"


def test_a_module_beyond_every_sequence_is_refused(tokens):
    assert models.check(harness.config(n_mtp=16)) == [
        "n_mtp=16 looks beyond every sequence of seq_len=16: lower n_mtp"]
