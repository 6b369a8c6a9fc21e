"""Slots that a rank's experts share, steps repeated without a limit, weight gradients put off, gradients and
parameters that travel beside the step, and the shapes that may not change and host reads that a step must not make."""

import collections
import contextlib
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

    def plan_of(experts_TK, weights_TK, E, _, *how):
        kept = dispatch.Plan(experts_TK, weights_TK, E, capacity, *how).slot_TK >= 0
        plan = dispatch.Plan(experts_TK, weights_TK, E, 0, *how)
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


class Flying:
    """A message that is complete as soon as it is launched (`fast`), or not before somebody waits for it."""

    def __init__(self, work, fast, waited=lambda: None):
        self.work, self.fast, self.waited = work, fast, waited

    def is_completed(self):
        return self.fast

    def wait(self):
        self.waited()
        self.work.wait()


def order_of_work(knobs, world, fast):
    """→ what one microbatch's backward does: launches, waits and expert weight gradients, in order."""
    import kernels
    import parallel
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    events, send, multiply = [], parallel.Group.all_to_all, kernels.gemm_experts

    def all_to_all(*args):
        events.append("launch")
        out, work = send(*args)
        return out, Flying(work, fast, lambda: events.append("wait"))

    def gemm_experts(*args, **kwargs):
        events.append("weight gradient")
        return multiply(*args, **kwargs)

    with harness.replaced(parallel.Group, "all_to_all", all_to_all), harness.replaced(
            kernels, "gemm_experts", gemm_experts):
        trainer.forward_backward(list(trainer.batches(0)))
    assert not kernels._queue
    return events


@pytest.mark.parametrize("defer", (True, False))
def test_weight_gradients_are_computed_while_gradients_travel(pool, tokens, defer):
    knobs = dict(data=tokens, global_batch=4, micro_batch=1, ep=4, capacity_factor=1.0, defer_wgrad=defer)
    for events in pool.run(4, order_of_work, knobs, 4, False):
        at = [i for i, event in enumerate(events) if event == "weight gradient"]
        assert len(at) == 4     # two products in each of two layers
        flying = [events[:i].count("launch") - events[:i].count("wait") for i in at]
        assert flying == [int(defer)] * 4, events


def test_weight_gradients_that_need_not_wait_are_computed_two_segments_later(pool, tokens):
    """Or at the end: operands are not kept for longer, however fast the network is."""
    knobs = dict(data=tokens, global_batch=4, micro_batch=1, ep=4, capacity_factor=1.0)
    for events in pool.run(4, order_of_work, knobs, 4, True):
        backward = [event for event in events if event != "launch"][4:]     # behind the waits of forward
        # experts, attention; then those of the layer before; the last segment is the first attention
        assert backward == ["wait", "wait", "weight gradient", "weight gradient", "wait", "wait",
                            "weight gradient", "weight gradient"], events


# ---- gradients and parameters beside the step ----


def one_bucket_per_block():
    import optim
    return harness.replaced(optim, "BUCKET", 1)


def run_by_blocks(variants, world):
    with one_bucket_per_block():
        return run_layouts(variants, world, steps=2)


BESIDE = {
    "dp 4": dict(ep=1),
    "ep 2, edp 2": dict(ep=2),
    "tp 2, ep 1, recompute": dict(tp=2, ep=1, recompute=("full",)),
    "pp 2, vpp 2, tied": dict(pp=2, vpp=2, ep=1, n_layer=4, tie_embeddings=True),
    "pp 2, ep 2": dict(pp=2, ep=2),
}


def test_blocks_reduced_during_backward_are_those_of_one_process(pool, tokens):
    base = dict(data=tokens, micro_batch=1)
    layouts = dict(BESIDE) | {"one at a time": dict(ep=1, overlap="none")}
    ref = pool.run(1, run_layout, dict(base, micro_batch=12), 1, steps=2)[0]
    tied = pool.run(1, run_layout, dict(base, micro_batch=12, n_layer=4, tie_embeddings=True), 1, steps=2)[0]
    for rank, found in enumerate(pool.run(4, run_by_blocks, [base | knobs for knobs in layouts.values()], 4)):
        for (name, knobs), result in zip(layouts.items(), found):
            assert_equals(tied if "tied" in name else ref, result, what=f"{name}, rank {rank}")


def steps_and_readers(knobs, world, late):
    """Losses of three steps with AdamW, an evaluation and a sample right behind them, what was saved, and the
    parameters; with gradients and parameters that arrive late, or not."""
    import checkpoint
    import train
    with one_bucket_per_block(), harness.late_exchanges() if late else contextlib.nullcontext():
        trainer = train.Trainer(harness.config(**knobs), world)
        losses, said = harness.losses_of(trainer, 2), [trainer.evaluate()]
        losses += harness.losses_of(trainer, 1)
        said.append(trainer.sample(4))
        losses += harness.losses_of(trainer, 1)
        saved = {n: t.to_local().clone() for n, t in checkpoint._to_save(trainer.model, trainer.optimizer,
                                                                        trainer.layout).items()}
        return losses, said, saved, [f.flat.clone() for f in trainer.optimizer.families]


def test_parameters_that_arrive_late_change_no_bit(pool, tokens):
    """What travels is NaN until waited for: training, evaluation, samples and checkpoints wait."""
    for name, knobs in BESIDE.items():
        knobs = dict(data=tokens, micro_batch=1, optimizer="adamw", lr=1e-2, eval_steps=1, precision="bf16",
                     global_batch=8) | knobs
        punctual = pool.run(4, steps_and_readers, dict(knobs, overlap="none"), 4, late=False)
        for rank, (a, b) in enumerate(zip(punctual, pool.run(4, steps_and_readers, knobs, 4, late=True))):
            assert a[:2] == b[:2], (name, rank)
            assert a[2].keys() == b[2].keys() and all(torch.equal(a[2][n], b[2][n]) for n in a[2]), (name, rank)
            assert all(map(torch.equal, a[3], b[3])), (name, rank)


def order_of_reduction(knobs, world):
    """→ what happens in a step from its first reduction on: exchanges launched, and blocks reduced."""
    import optim
    import parallel
    import train
    events, plain_send, plain_ready = [], parallel.Group.all_to_all, optim.Optimizer.ready
    with one_bucket_per_block():
        trainer = train.Trainer(harness.config(**knobs), world)

    def all_to_all(*args):
        events.append("exchange")
        out, work = plain_send(*args)
        return out, Flying(work, fast=False)

    def ready(optimizer, block):
        events.append(block)
        plain_ready(optimizer, block)
        for family in optimizer.of_bucket[block]:
            assert family.reducing is not None and len(family.slots) < 20
        launched = {i for i in range(4) if any(f.reducing for f in optimizer.of_bucket[i])}
        assert launched == set(range(block, 4)), "the blocks behind it, and no other"

    with harness.replaced(parallel.Group, "all_to_all", all_to_all), harness.replaced(optim.Optimizer, "ready", ready):
        trainer.forward_backward(list(trainer.batches(0)))
    return events


def test_a_block_is_reduced_while_the_next_ones_gradients_travel(pool, tokens):
    """The last microbatch's backward, two exchanges in each of four blocks: a block is done when the exchange of the
    next one has been launched, and weight gradients that were put off till then are computed."""
    knobs = dict(data=tokens, global_batch=8, micro_batch=1, n_layer=4, n_dense_layers=0, ep=2, capacity_factor=1.0)
    back = 2 * ["exchange"]
    for defer in (True, False):
        for events in pool.run(4, order_of_reduction, dict(knobs, defer_wgrad=defer), 4):
            assert events[-12:] == [*back, "exchange", 3, *back, 2, *back, 1, "exchange", 0]
            assert not {0, 1, 2, 3} & set(events[:-12]), "once a step"


# ---- static shapes ----


def shapes_of(variants, world, steps=10):
    """Per variant, the different lists of shapes that `steps` differently skewed batches send, receive and multiply."""
    import kernels
    import train
    results, plain_travel, plain_rows = [], dispatch.Plan.travel, kernels.gemm_rows
    for knobs in variants:
        trainer, seen, lists = train.Trainer(harness.config(**knobs), world), [], set()
        note = lambda what, tensors: seen.append((what, *(tuple(t.shape) for t in tensors or ())))

        def travel(plan, direction, *tensors):
            note(f"sent {direction}", tensors)
            arrived = yield from plain_travel(plan, direction, *tensors)
            note(f"arrived {direction}", arrived)
            return arrived

        def gemm_rows(x_RD, w_LDN, groups, row_R=None):
            note("experts", [x_RD, w_LDN])
            return plain_rows(x_RD, w_LDN, groups, row_R)

        with harness.replaced(dispatch.Plan, "travel", travel), harness.replaced(kernels, "gemm_rows", gemm_rows):
            table, token = torch.zeros(64, 2, dtype=torch.int64), torch.arange(64)
            harness.force_router(trainer, table)
            for step in range(steps):
                # first choices from seven experts to one, second choices from one to seven, and padding
                table.copy_(torch.stack([token % (7 - step % 7), 7 - token % (1 + step % 7)], 1))
                with harness.ragged(lambda tokens, *_: tokens[:, step:].fill_(-1) if step % 3 else None):
                    trainer.step(step)
                lists.add(tuple(seen))
                seen.clear()
        results.append([len(found) for found in lists])
    return results


def test_shapes_do_not_depend_on_routing(pool, tokens):
    base = dict(data=tokens, micro_batch=1, global_batch=8, capacity_factor=1.25, n_layer=2)
    static = [dict(ep=4), dict(ep=2, etp=2, capacity_scope="rank", recompute=("full",)),
              dict(ep=2, tp=2, dispatcher="allgather"), dict(ep=1, dispatcher="allgather", capacity_scope="rank")]
    for results in pool.run(4, shapes_of, [base | knobs for knobs in [*static, dict(ep=4, capacity_factor=0.0)]], 4):
        *found, dropless = results
        assert all(len(lists) == 1 and lists[0] > 20 for lists in found), found
        assert len(dropless) > 1, "the batches are skewed"


# ---- no host reads ----

STATIC = dict(ep=4, micro_batch=1, capacity_factor=1.25, precision="bf16", d_expert=32, optimizer="adamw",
              aux_loss_coef=0.01, z_loss_coef=0.01, bias_update_rate=1e-3)


def trace(tokens, knobs, sabotage=""):
    script = Path(__file__).parent / "host_reads.py"
    return subprocess.run([sys.executable, str(script), tokens, repr(knobs), sabotage], capture_output=True, text=True,
                          timeout=200)


STATIC_VARIANTS = {
    "expert": {},
    "rank": dict(capacity_scope="rank", ep=2, recompute=("norm", "moe_act", "attn", "full"), moment_dtype="bf16",
                 grad_dtype="bf16", n_mtp=1),
    "tp, low precision": dict(tp=2, ep=2, etp=2, score_fn="sigmoid", drop_policy="position", precision="nvfp4",
                              emulate=True, dispatch_precision="fp8"),
    "allgather": dict(ep=2, dispatcher="allgather"),
}


@pytest.mark.parametrize("more", STATIC_VARIANTS.values(), ids=STATIC_VARIANTS)
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
