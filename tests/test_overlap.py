"""Slots that a rank's experts share, steps repeated without a limit, weight gradients put off, and the host reads
that a step must not make."""

import collections
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import assert_equals, bit_equal, run_layout, run_layouts

import dispatch

Ranks = collections.namedtuple("Ranks", "size rank", defaults=(0,))


# ---- capacity_scope=rank ----


def in_turn(experts_TK, weights_TK, capacity, policy, per_rank):
    """Which choices find a slot, one after the other: the set of (t, k)."""
    T, K = experts_TK.shape
    choices = [(t, k) for k in range(K) for t in range(T)]
    if policy == "probs":
        choices = sorted([(t, k) for t in range(T) for k in range(K)], key=lambda tk: -weights_TK[tk])
    left, kept = collections.Counter(), set()
    for t, k in choices:
        if (expert := experts_TK[t, k].item()) >= 0 and left[expert // per_rank] < capacity:
            left[expert // per_rank] += 1
            kept.add((t, k))
    return kept


@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("per_rank", [1, 2, 4, 8])
def test_slots_go_to_the_first_of_a_ranks_choices(policy, per_rank):
    torch.manual_seed(per_rank)
    T, K, E = 12, 2, 8
    for capacity in (1, 3, 7, 24):
        experts_TK = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
        experts_TK[3] = -1
        weights_TK = torch.rand(T, K)
        plan = dispatch.Plan(experts_TK, weights_TK, E, capacity, policy, Ranks(E // per_rank), Ranks(1), per_rank)
        kept = in_turn(experts_TK, weights_TK, capacity, policy, per_rank)
        assert {tuple(at) for at in (plan.slot_TK >= 0).nonzero().tolist()} == kept
        count = lambda choices: [sum(experts_TK[tk] == e for tk in choices) for e in range(E)]
        assert plan.counts_E.tolist() == count([(t, k) for t in range(T) for k in range(K)])
        assert plan.kept_E.tolist() == count(kept)
        assert len(plan.choice_S) == E // per_rank * capacity
        for slot, choice in enumerate(plan.choice_S.tolist()):
            if choice >= 0:
                assert plan.slot_TK.flatten()[choice] == slot
                assert experts_TK.flatten()[choice] // per_rank == slot // capacity
        for run in plan.choice_S.view(-1, capacity):
            filled = run >= 0
            assert not (filled[1:] & ~filled[:-1]).any(), "empty slots come last"
            experts = experts_TK.flatten()[run[filled]]
            assert torch.equal(experts, experts.sort().values)


def test_slots_per_rank_follow_from_the_configuration():
    cfg = harness.config(capacity_factor=1.25, capacity_scope="rank", num_experts=8, top_k=2)
    assert [dispatch.capacity(cfg, 100, dispatch.sharing(cfg, ep)) for ep in (8, 4, 2, 1)] == [32, 63, 125, 200]
    cfg.capacity_scope = "expert"
    assert [dispatch.capacity(cfg, 100, dispatch.sharing(cfg, ep)) for ep in (8, 1)] == [32, 32]


SHARED = dict(capacity_scope="rank", n_layer=3)
EXPERTS = {
    "ep 4": dict(ep=4),
    "ep 2, etp 2": dict(ep=2, etp=2),
    "tp 2, ep 2": dict(tp=2, ep=2),
    "pp 2, ep 2": dict(pp=2, ep=2),
    "recompute": dict(ep=4, recompute=("full",)),
    "one at a time": dict(ep=2, overlap="none"),
}


def test_room_for_all_is_dropless(pool, tokens):
    base = dict(data=tokens, micro_batch=1, **SHARED)
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1)[0]
    variants = [base | dict(capacity_factor=4.0) | knobs for knobs in EXPERTS.values()]
    for rank, found in enumerate(pool.run(4, layouts_in_poisoned_memory, variants, 4)):
        for name, result in zip(EXPERTS, found):
            assert_equals(ref, result, what=f"{name}, rank {rank}")


def layouts_in_poisoned_memory(variants, world):
    with harness.poisoned():
        return run_layouts(variants, world)


def masked_run(knobs, world):
    """What a run in capacity mode should compute, dropless: a router weight of zero for what finds no slot."""
    import moe
    cfg = harness.config(**knobs)
    capacity = dispatch.capacity(cfg, 16 * cfg.micro_batch, dispatch.sharing(cfg, cfg.ep))
    lost = []

    def plan_of(experts_TK, weights_TK, E, _, *rest):
        kept = dispatch.Plan(experts_TK, weights_TK, E, capacity, *rest).slot_TK >= 0
        plan = dispatch.Plan(experts_TK, weights_TK, E, 0, *rest)
        plan.kept_TK = kept
        lost.append((plan.slot_TK >= 0).sum().item() - kept.sum().item())
        return plan

    plain = moe.dispatch
    with harness.replaced(moe, "Plan", plan_of), harness.replaced(
            moe, "dispatch", lambda x, weights, plan: plain(x, torch.where(plan.kept_TK, weights, 0), plan)):
        result = run_layout(dict(knobs, capacity_factor=0.0), world)
    return result, sum(lost)


@pytest.mark.parametrize("scope", ["rank", "expert"])
def test_drops_are_zeros(pool, tokens, scope):
    knobs = dict(data=tokens, micro_batch=1, ep=4, capacity_scope=scope, capacity_factor=0.75)
    ours = pool.run(4, run_layout, knobs, 4)
    for rank, (ref, lost) in enumerate(pool.run(4, masked_run, knobs, 4)):
        assert lost > 0
        assert_equals(ref, ours[rank], what=f"rank {rank}")


def test_sharing_drops_less(pool, tokens):
    base = dict(data=tokens, micro_batch=3, ep=2, capacity_factor=1.0)
    drops = {scope: pool.run(2, harness.log_rows, dict(base, capacity_scope=scope), 2)[0][0]["drop_fraction"]
             for scope in ("expert", "rank")}
    assert 0 < drops["rank"] < drops["expert"], drops


# ---- on_overflow=rerun ----

RERUN = dict(ep=4, micro_batch=1, capacity_factor=1.5, on_overflow="rerun", aux_loss_coef=0.05,
             aux_loss_scope="global", bias_update_rate=1e-2)


def rerun_against_dropless(knobs, world, steps=10):
    """→ (steps that were repeated, [what differed between those and a dropless step from the same state])."""
    import train
    ours, other = (train.Trainer(harness.config(**k), world) for k in (knobs, dict(knobs, capacity_factor=0.0)))
    reruns, different = 0, []
    for step in range(steps):
        with torch.no_grad():
            for a, b in zip(ours.optimizer.families, other.optimizer.families):
                b.flat.copy_(a.flat)
            for a, b in zip(ours.model.buffers(), other.model.buffers()):
                b.copy_(a)
        other.optimizer.start()
        results = [t.step(step) for t in (ours, other)]
        if results[0].rerun:
            reruns += 1
            pairs = [(f"gradient {a.slots[0][0]}", a.master.grad, b.master.grad)
                     for a, b in zip(ours.optimizer.families, other.optimizer.families)]
            pairs += [("weights", a.flat, b.flat) for a, b in zip(ours.optimizer.families, other.optimizer.families)]
            pairs += [("bias", a, b) for a, b in zip(ours.model.buffers(), other.model.buffers())]
            pairs += [("losses and loads", *(r.sums for r in results))]
            different += [(step, name) for name, a, b in pairs if not torch.equal(a, b)]
        assert not results[1].rerun
    return reruns, different


@pytest.mark.parametrize("overlap", ["pair", "none"])
def test_a_rerun_is_a_dropless_step(pool, tokens, overlap):
    for reruns, different in pool.run(4, rerun_against_dropless, dict(RERUN, data=tokens, overlap=overlap), 4):
        assert reruns >= 5 and different == []


def losses_and_reruns(knobs, world, steps):
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    results = [trainer.step(i) for i in range(steps)]
    return [r.read()[0] for r in results], [r.rerun for r in results]


def test_losses_with_reruns_are_those_of_dropless(pool, tokens):
    """Also where the first attempt fits, and where no stage but one sees the overflow."""
    for more in ({}, dict(pp=2, ep=2, n_dense_layers=2), dict(capacity_factor=2.5)):
        knobs = dict(RERUN, data=tokens, bias_update_rate=0.0) | more
        ours, reruns = pool.run(4, losses_and_reruns, knobs, 4, steps=10)[0]
        ref, none = pool.run(4, losses_and_reruns, dict(knobs, capacity_factor=0.0), 4, steps=10)[0]
        assert ours == pytest.approx(ref, rel=1e-5) and not any(none) and any(reruns), (more, reruns)
    assert not all(reruns)


def test_the_log_tells_of_reruns(pool, tokens):
    rows = pool.run(4, harness.log_rows, dict(RERUN, data=tokens), 4, steps=2)[0]
    assert [row["rerun"] for row in rows] == [1, 1] and [row["drop_fraction"] for row in rows] == [0, 0]


# ---- defer_wgrad ----

DEFERRED = {
    "ep 4": dict(ep=4),
    "tp 2, ep 2": dict(tp=2, ep=2),
    "ep 2, etp 2": dict(ep=2, etp=2),
    "pp 2, ep 2": dict(pp=2, ep=2),
    "recompute": dict(ep=4, recompute=("full",)),
    "recompute experts": dict(ep=4, recompute=("moe",), capacity_factor=1.0),
    "tied": dict(pp=2, ep=2, tie_embeddings=True, n_head=2),
}


def test_deferred_or_not_paired_or_not_gradients_are_bit_equal(pool, tokens):
    variants = [dict(data=tokens, micro_batch=1, overlap=overlap, defer_wgrad=defer) | knobs
                for knobs in DEFERRED.values() for overlap in ("none", "pair") for defer in (False, True)]
    for rank, found in enumerate(pool.run(4, run_layouts, variants, 4, steps=1)):
        for name, four in zip(DEFERRED, zip(*[iter(found)] * 4)):
            assert all(bit_equal(four[0], other) for other in four[1:]), (name, rank)


def order_of_work(knobs, world):
    """→ what one microbatch's backward does: launches, waits and expert weight gradients, in order."""
    import kernels
    import parallel
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    events, send, multiply = [], parallel.Group.all_to_all, kernels.gemm_experts

    class Waited:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("wait")
            self.work.wait()

    def all_to_all(*args):
        events.append("launch")
        out, work = send(*args)
        return out, Waited(work)

    def gemm_experts(*args, **kwargs):
        events.append("weight gradient")
        return multiply(*args, **kwargs)

    with harness.replaced(parallel.Group, "all_to_all", all_to_all), harness.replaced(
            kernels, "gemm_experts", gemm_experts):
        trainer.forward_backward(list(trainer.batches(0)))
    assert not kernels._queue
    return events


def test_weight_gradients_are_computed_while_gradients_travel(pool, tokens):
    knobs = dict(data=tokens, global_batch=4, micro_batch=1, ep=4, capacity_factor=1.0)
    for defer in (True, False):
        for events in pool.run(4, order_of_work, dict(knobs, defer_wgrad=defer), 4):
            at = [i for i, event in enumerate(events) if event == "weight gradient"]
            assert len(at) == 4     # two products in each of two layers
            flying = [events[:i].count("launch") - events[:i].count("wait") for i in at]
            assert flying == [int(defer)] * 4, events


# ---- no host reads ----

STATIC = dict(ep=4, micro_batch=1, capacity_factor=1.25, precision="bf16", d_expert=32, optimizer="adamw",
              aux_loss_coef=0.01, z_loss_coef=0.01, bias_update_rate=1e-3)


def trace(tokens, knobs, sabotage=""):
    script = Path(__file__).parent / "host_reads.py"
    return subprocess.run([sys.executable, str(script), tokens, repr(knobs), sabotage], capture_output=True, text=True,
                          timeout=200)


@pytest.mark.parametrize("more", [{}, dict(capacity_scope="rank", ep=2, recompute=("full",)),
                                  dict(tp=2, ep=2, etp=2, score_fn="sigmoid", drop_policy="position",
                                       precision="nvfp4", emulate=True, dispatch_precision="fp8")],
                         ids=["expert", "rank", "tp, low precision"])
def test_a_step_with_capacity_reads_nothing(tokens, more):
    done = trace(tokens, STATIC | more)
    assert done.returncode == 0 and "no host reads" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("read", ["x.cpu()", "x.to(device=torch.device('cpu'))", "bool(x.sum())"])
def test_the_trace_sees_host_reads(tokens, read):
    done = trace(tokens, STATIC, read)
    assert done.returncode != 0 and ("the host reads a tensor" in done.stderr), done.stderr[-3000:]


def test_what_may_read_is_seen_to_read(tokens):
    """Dropless mode and repeated steps need the host."""
    for more in (dict(capacity_factor=0.0), dict(on_overflow="rerun")):
        assert "the host reads a tensor" in trace(tokens, STATIC | more).stderr
