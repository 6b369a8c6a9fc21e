"""Every way of folding four and eight ranks computes what one process computes."""

import harness
import pytest
import torch
from harness import assert_equals, bit_equal, log_rows, run_layout, run_layouts

import parallel


def factorizations(n, parts):
    """Every tuple of `parts` factors of n."""
    if parts == 1:
        return [(n,)]
    return [(d, *rest) for d in range(1, n + 1) if n % d == 0 for rest in factorizations(n // d, parts - 1)]


def layouts(world):
    """{name: knobs} of every layout of `world` ranks."""
    found = {}
    for pp in (1, 2, 4):    # the model below has four blocks
        for tp, cp, dp in factorizations(world // pp, 3):
            for etp, ep, edp in factorizations(world // pp, 3):
                knobs = dict(pp=pp, tp=tp, cp=cp, ep=ep, etp=etp)
                found["·".join(f"{k}{v}" for k, v in dict(knobs, dp=dp, edp=edp).items() if v > 1)] = knobs, dp
    return found


def check(pool, tokens, chosen, world, batch, **more):
    """Runs layouts, all with accumulation 3, dropless, ragged sequences and pairs, and compares with one process."""
    base = dict(data=tokens, global_batch=batch, n_layer=4, **more)
    ref = pool.run(1, run_layouts, [dict(base, micro_batch=batch)], 1)[0][0]
    variants = [dict(base, micro_batch=batch // 3 // dp) | knobs for knobs, dp in chosen.values()]
    for rank, found in enumerate(pool.run(world, run_layouts, variants, world, timeout=400)):
        for name, result in zip(chosen, found):
            assert_equals(ref, result, what=f"{name}, rank {rank}")


def some(found, at, step):
    return dict(list(found.items())[at:at + step])


FOUR, EIGHT = layouts(4), layouts(8)
assert len(FOUR) == 46 and len(EIGHT) == 145
STRIDE = 24     # of the layouts of eight ranks, every twenty-fourth runs here, all of them with -m full
NAMED = ["pp2·tp2·cp2·ep4", "pp2·tp4·ep2·etp2", "cp4·ep8·dp2", "pp2·tp2·ep4·dp2"]


@pytest.mark.parametrize("at", range(0, len(FOUR), 6))
def test_every_layout_of_four_ranks(pool, tokens, at):
    check(pool, tokens, some(FOUR, at, 6), 4, 12)


def test_named_layouts_of_eight_ranks(pool, tokens):
    check(pool, tokens, {name: EIGHT[name] for name in NAMED}, 8, 24, n_head=8)


def test_interleaved_layout_of_eight_ranks(pool, tokens):
    """Four microbatches, because interleaving wants a multiple of pp."""
    base = dict(data=tokens, global_batch=24, n_layer=8)
    ref = pool.run(1, run_layout, dict(base, micro_batch=24), 1)[0]
    for rank, found in enumerate(pool.run(8, run_layout, dict(base, micro_batch=3, pp=4, vpp=2, ep=2), 8)):
        assert_equals(ref, found, what=f"rank {rank}")


@pytest.mark.parametrize("at", range(0, len(EIGHT), 4 * STRIDE))
def test_some_layouts_of_eight_ranks(pool, tokens, at):
    check(pool, tokens, dict(list(some(EIGHT, at, 4 * STRIDE).items())[::STRIDE]), 8, 24, n_head=8)


@pytest.mark.full
@pytest.mark.parametrize("at", range(0, len(EIGHT), 6))
def test_every_layout_of_eight_ranks(pool, tokens, at):
    check(pool, tokens, some(EIGHT, at, 6), 8, 24, n_head=8)


WITH_EXPERTS_SPREAD = {name: found for name, found in FOUR.items() if found[0]["ep"] > 1}


@pytest.mark.full
def test_gathered_tokens_in_every_layout_of_four_ranks(pool, tokens):
    check(pool, tokens, WITH_EXPERTS_SPREAD, 4, 12, dispatcher="allgather", top_k=3)


def one_run_each(pool, tokens, layouts, **more):
    """Gradients of a layout are the same bits with pairs or without, with weight gradients put off or not."""
    variants = [dict(data=tokens, n_layer=4, global_batch=12, overlap=overlap, defer_wgrad=defer) | more | knobs
                for knobs in layouts.values() for overlap in ("none", "pair") for defer in (False, True)]
    for rank, found in enumerate(pool.run(4, run_layouts, variants, 4, steps=1, timeout=400)):
        for name, four in zip(layouts, zip(*[iter(found)] * 4)):
            assert all(bit_equal(four[0], other) for other in four[1:]), (name, rank)


@pytest.mark.full
@pytest.mark.parametrize("recompute", [(), ("full",), ("moe",)])
def test_overlap_changes_no_bit_in_any_layout(pool, tokens, recompute):
    accumulating = {name: dict(knobs, micro_batch=4 // dp) for name, (knobs, dp) in WITH_EXPERTS_SPREAD.items()}
    one_run_each(pool, tokens, accumulating, recompute=recompute)


CROSSED = {
    "2 KV heads, tp 4": dict(tp=4, ep=4),
    "2 KV heads, tp 4, etp 2": dict(tp=4, ep=2, etp=2),
    "tp 2, cp 2": dict(tp=2, cp=2, ep=4),
    "tp 2, etp 4": dict(tp=2, etp=4),
    "cp 4": dict(cp=4, ep=2, etp=2),
    "tp 2, ep 2": dict(tp=2, ep=2),
}
VARIANTS = {        # the first under all six layouts, two under three, the others under one
    "accumulation 1": dict(micro_batch=0),
    "capacity": dict(capacity_factor=4.0),
    "recompute": dict(recompute=("full",)),
    "recompute experts": dict(recompute=("moe",), capacity_factor=4.0),
    "qk_norm full": dict(qk_norm="full"),
    "tied, no norms of heads": dict(tie_embeddings=True, qk_norm="none"),
    "clipped": dict(grad_clip=0.05),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_else_may_be_switched(pool, tokens, variant):
    base = dict(data=tokens, global_batch=12, micro_batch=2) | VARIANTS[variant]
    even = variant == "accumulation 1"
    ref = pool.run(1, run_layout, dict(base, micro_batch=12, recompute=()), 1, uneven=not even)[0]
    crossed = some(CROSSED, 0, {"accumulation 1": 6, "capacity": 3, "recompute": 3}.get(variant, 1))
    results = pool.run(4, run_layouts, [base | knobs for knobs in crossed.values()], 4, uneven=not even)
    for rank, found in enumerate(results):
        for name, result in zip(crossed, found):
            assert_equals(ref, result, what=f"{name}, rank {rank}")


BITWISE = {
    "ep4": dict(ep=4, micro_batch=3),
    "tp2·ep2·etp2, recompute": dict(tp=2, ep=2, etp=2, recompute=("full",), micro_batch=3),
    "pp2·ep2": dict(pp=2, ep=2, micro_batch=2),
    "pp2·tp2·ep2, recompute, tied": dict(pp=2, tp=2, ep=2, recompute=("full",), tie_embeddings=True, micro_batch=4),
    "tp2·cp2·ep4, recompute experts": dict(tp=2, cp=2, ep=4, recompute=("moe",), capacity_factor=1.0, micro_batch=4),
    "cp4·ep2·etp2, allgather": dict(cp=4, ep=2, etp=2, dispatcher="allgather", capacity_factor=1.0, micro_batch=4),
}


def test_overlap_changes_no_bit(pool, tokens):
    one_run_each(pool, tokens, BITWISE)


def no_labels(tokens, labels, windows):
    for row, w in enumerate(windows):
        labels[row] = -100
        tokens[row, tokens.shape[1] - w % 7:] = -1


@pytest.mark.parametrize("scope", ["batch", "sequence", "global"])
def test_router_losses_do_not_depend_on_tp_or_cp(pool, tokens, scope):
    """With no other loss, and padding: every rank counts its own tokens, and the sums are everybody's."""
    base = dict(data=tokens, micro_batch=4, aux_loss_coef=0.1, z_loss_coef=0.01, aux_loss_scope=scope)
    ref = pool.run(1, run_layout, base, 1, uneven=no_labels)[0]
    assert ref["loss"] == 0 and ref["norm"] > 0
    folded = [dict(tp=2, cp=2, ep=4), dict(tp=4, ep=2, etp=2), dict(cp=4)]
    for rank, found in enumerate(pool.run(4, run_layouts, [base | knobs for knobs in folded], 4, uneven=no_labels)):
        for knobs, result in zip(folded, found):
            assert_equals(ref, result, what=f"{knobs}, rank {rank}")
    row = pool.run(1, log_rows, base, 1, uneven=no_labels)[0][0]
    for knobs in folded:
        for other in pool.run(4, log_rows, base | knobs, 4, uneven=no_labels):
            for name in ("aux_loss", "z_loss", "load_imbalance", "drop_fraction"):
                assert other[0][name] == pytest.approx(row[name], rel=1e-5), (knobs, name)


def copies_after_three_steps(variants, world):
    """→ of each layout, the names of parameters whose copies differ between their owners."""
    import train
    different = []
    for knobs in variants:
        trainer = train.Trainer(harness.config(**knobs), world)
        harness.losses_of(trainer, 3)
        names = []
        for family in trainer.optimizer.families:
            copies = family.owner.all_gather(family.flat[None])
            for name, start in ((name, start) for name, _, start in family.slots):
                size = trainer.model.get_parameter(name).numel()
                part = copies[:, start:start + size]
                names += [name] * (not torch.equal(part, part[:1].expand_as(part)))
        different.append((names, [len(f.slots) for f in trainer.optimizer.families], len(list(trainer.model.parameters()))))
    return different


def test_copies_stay_equal(pool, tokens):
    """Norms and routers over tp, experts over edp, and every parameter belongs to exactly one family."""
    folded = [dict(tp=2, ep=2), dict(tp=2, ep=1), dict(cp=2, tp=2, etp=2, ep=1), dict(tp=4, ep=2)]
    variants = [dict(data=tokens, micro_batch=2, optimizer="adamw", lr=1e-2, **knobs) for knobs in folded]
    for found in pool.run(4, copies_after_three_steps, variants, 4):
        for knobs, (names, slots, count) in zip(folded, found):
            assert names == [] and sum(slots) == count, (knobs, names)


def test_groups_of_64_ranks():
    """Members along a dimension are those whose rank, by the formula, differs in that coordinate alone."""
    meshes = [s for s in factorizations(64, 4)]
    for pp, a, b, c in meshes:
        sizes = parallel.Sizes(pp=pp, dp=a, cp=b, tp=c, edp=a, ep=b, etp=c)
        # rank = c + C·(b + B·(a + A·pp))
        at = {rank: (rank // (a * b * c), rank // (b * c) % a, rank // c % b, rank % c) for rank in range(64)}
        for names in (("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")):
            for i, name in enumerate(names):
                for rank in range(0, 64, 7):
                    alike = [r for r in range(64) if at[r][:i] + at[r][i + 1:] == at[rank][:i] + at[rank][i + 1:]]
                    assert list(sizes.members(rank, name)) == alike, (sizes, rank, name)
        plane = [r for r in range(64) if at[r][0] == at[63][0]]
        assert list(sizes.members(63, "dp", "cp", "tp")) == plane


def start_table(variants, world):
    """The start table's lines about leaving an NVLink domain, per variant."""
    import train
    said = []
    for knobs in variants:
        log = train.Log(train.Trainer(harness.config(**knobs), world))
        with harness.replaced(log, "print", lambda *lines: said[-1].extend(lines)):
            said.append([])
            log.start()
        said[-1] = [line for line in said[-1] if "leaves the NVLink domain" in line]
    return said


def test_the_start_table_warns_where_experts_leave_the_nvlink_domain(pool, tokens):
    base = dict(data=tokens, out_dir=f"{tokens}/out")
    variants = [dict(ep=4, nvl_domain=2), dict(ep=2, etp=2, nvl_domain=2), dict(ep=4, nvl_domain=4),
                dict(ep=2, nvl_domain=2), dict(nvl_domain=2), dict(ep=1, nvl_domain=1)]
    for said in pool.run(4, start_table, [base | knobs for knobs in variants], 4):
        four, folded, *others = said
        assert len(four) == 1 and all(word in four[0] for word in ("ep=4", "domain of 2 ranks", "inside is 2"))
        assert len(folded) == 1 and "ep=2" in folded[0] and "inside is 1" in folded[0]
        assert others == [[]] * 4


def test_the_largest_ep_never_crosses_a_border_of_domains():
    """Of 144 ranks in domains of 72: groups of 16 side by side would lie across the border, those of 8 do not."""
    ep = lambda world, **knobs: parallel.sizes_of(harness.config(num_experts=64, **knobs), world).ep
    assert ep(144, nvl_domain=72) == 8 and ep(64, nvl_domain=72) == 64 and ep(144, nvl_domain=72, etp=4) == 2
    assert ep(128, nvl_domain=64) == 64 and ep(128, nvl_domain=64, pp=4) == 32 and ep(12, nvl_domain=1) == 1


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_context_parallel_ranks_see_equally_many_pairs(size):
    S = 64
    seen = [sum(p + 1 for p in parallel.zigzag(S, rank, size).tolist()) for rank in range(size)]
    assert len(set(seen)) == 1 and sum(seen) == S * (S + 1) // 2
    assert sorted(sum((parallel.zigzag(S, rank, size).tolist() for rank in range(size)), [])) == list(range(S))


def sums(world):
    group = parallel.Group("all", tuple(range(world)))
    x = torch.arange(2.0 * world).view(-1, 1).add(256 if group.rank == 0 else 1).bfloat16()
    return group.reduce_scatter(x)


def test_a_reduce_scatter_rounds_once(pool):
    """In bf16, 256 + 1 is 256 again: 256, 1, 1 and 1 are 256 or, summed before they are rounded, 260."""
    for rank, found in enumerate(pool.run(4, sums, 4)):
        parts = torch.arange(8.0).add(256).bfloat16().float() + 3 * torch.arange(8.0).add(1)
        assert torch.equal(found, parts.bfloat16()[2 * rank:2 * rank + 2, None]), rank
        assert rank or found[0] == 260


def attention_memory(knobs, world):
    """(bytes that one attention keeps for backward, query-key pairs that its softmax computes, what it gathered)."""
    import model
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    batch = next(trainer.batches(0))
    batch.rope = model.rope_table(batch.positions_S, 8, 1e4)
    kept, plain, pairs = {}, model.attend, []

    def attend(q, k, v, first, end, *scale):
        pairs.append(sum(range(first + 1, end + 1)))
        assert q.shape[1] == end - first
        return plain(q, k, v, first, end, *scale)

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    attention = trainer.model.layers["0"].attention
    mine = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}
    parallel.ledger.take()
    with harness.replaced(model, "attend", attend), torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        x_TD = torch.randn(len(batch.tokens_T), 32, requires_grad=True)
        attention(x_TD, batch)
    sent = {op: n for (group, op), (_, n) in parallel.ledger.take().items() if group.name == "cp"}
    return sum(n for at, n in kept.items() if at not in mine), sum(pairs), sent


def test_attention_shrinks_with_cp(pool, tokens):
    base = dict(data=tokens, seq_len=64, global_batch=4, micro_batch=1)
    memory = {cp: pool.run(4, attention_memory, dict(base, cp=cp), 4) for cp in (1, 2, 4)}
    for cp, ranks in memory.items():
        assert {pairs for _, pairs, _ in ranks} == {64 * 65 // 2 // cp}, cp
        # two KV heads of 8, keys and values, fp32, of this rank's positions to every other rank
        assert all(sent.get("all-gather", 0) == 64 // cp * 2 * 2 * 8 * 4 * (cp - 1) for *_, sent in ranks), cp
    most = {cp: max(kept for kept, *_ in ranks) for cp, ranks in memory.items()}
    # (without cp there is one run of queries, whose result needs no copy to join another)
    assert most[2] < 0.8 * most[1] and most[4] < 0.75 * most[2], most
