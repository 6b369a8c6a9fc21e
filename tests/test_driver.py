"""The driver and the step around it: what is interleaved, recomputed, late or broken changes no number."""

import contextlib
import functools
import os
import random
import time

import kernels
import model as models
import naive
import parallel
import pytest
import torch
from harness import (SMALL, all_ties, assert_equals, bit_equal, config, forced, gradients_of, late_exchanges,
                     log_rows, losses_of, ragged, replaced, run_layout, run_layouts)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

LOSSES = dict(aux_loss_coef=0.1, z_loss_coef=0.01)


# ---- the tape ----


def tape_and_autograd(variants):
    """Per variant, gradients of a step by the trainer, and of the same objective written without it."""
    import train
    results = []
    with ragged():
        for knobs in variants:
            trainer = train.Trainer(config(**knobs), 1)
            ours, model, cfg = gradients_of(trainer), trainer.model, trainer.cfg
            batches = list(trainer.batches(0))
            valid = sum((b.labels_T != -100).sum().item() for b in batches)
            counted = sum(b.counted_T.sum().item() for b in batches)
            names, params = zip(*model.named_parameters())
            parts = [naive.objective(model, b, cfg, valid, counted, len(batches)) for b in batches]
            loss, total = (sum(column) for column in zip(*parts))
            grads = dict(zip(names, torch.autograd.grad(total, params)))
            norm = sum(g.double().square().sum() for g in grads.values()).sqrt().item()
            results.append((ours, {"loss": loss.item(), "norm": norm, "grads": grads}))
    return results


def test_a_step_is_plain_autograd(pool, tokens):
    """The tape, its exchanges and recomputes against one straight graph, auxiliary losses and drops included."""
    base = dict(data=tokens, global_batch=4, **LOSSES)
    variants = [dict(base, capacity_factor=c, micro_batch=m, overlap=o, recompute=r, n_shared_experts=s,
                     aux_loss_scope=scope, tie_embeddings=tie)
                for c, m, o, r, s, scope, tie in (
                    (0.0, 1, "pair", (), 1, "batch", False), (0.7, 1, "none", (), 0, "sequence", True),
                    (0.7, 2, "pair", ("full",), 2, "batch", False), (0.0, 2, "pair", ("moe",), 1, "sequence", True),
                    (0.7, 4, "pair", ("moe", "full"), 1, "batch", False))]
    for knobs, (ours, plain) in zip(variants, pool.run(1, tape_and_autograd, variants)[0]):
        assert_equals(plain, ours, what=f"{knobs}")


@pytest.mark.parametrize("world, ep", [(1, 1), (2, 2), (4, 2)])
def test_recompute_and_overlap_change_no_bit(pool, tokens, world, ep):
    hows = [dict(overlap=o, recompute=r) for r in ((), ("moe",), ("full",)) for o in ("none", "pair")]
    for capacity, shared in ((0.0, 1), (0.8, 0), (0.8, 2)):
        variants = [dict(data=tokens, global_batch=8, ep=ep, capacity_factor=capacity, n_shared_experts=shared,
                         aux_loss_scope="global", bias_update_rate=0.01, **LOSSES, **how) for how in hows]
        for rank, results in enumerate(pool.run(world, run_layouts, variants, world, steps=2)):
            for how, result in zip(hows, results):
                assert bit_equal(results[0], result), (rank, capacity, shared, how)


class Counted:
    """Storages that are still alive."""

    def __init__(self):
        self.seen = []

    def note(self, tensors, what):
        self.seen += [(what, StorageWeakRef(t.untyped_storage())) for t in tensors or () if t.numel()]

    def alive(self):
        """What nobody lets go. gloo's threads may hold what they sent a moment longer than wait() takes."""
        deadline = time.monotonic() + 2
        while (held := [what for what, storage in self.seen if not storage.expired()]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return held


def buffers_alive(variants, world):
    """Per variant: how many exchanged tensors there were, and which were alive after forward and after backward."""
    import dispatch
    import train
    counted, results = Counted(), []
    plain_travel, plain_all_to_all = dispatch.Plan.travel, parallel.Group.all_to_all

    def travel(self, direction, *tensors):
        counted.note(tensors, f"sent {direction}")
        arrived = yield from plain_travel(self, direction, *tensors)
        counted.note(arrived, f"arrived {direction}")
        return arrived

    def all_to_all(self, x, *sizes):
        out, work = plain_all_to_all(self, x, *sizes)
        counted.note([x, out], "on the wire") if x.is_floating_point() else None
        return out, work

    with replaced(dispatch.Plan, "travel", travel), replaced(parallel.Group, "all_to_all", all_to_all):
        for knobs in variants:
            trainer = train.Trainer(config(**knobs), world)
            batch, tape = next(iter(trainer.batches(0))), parallel.Tape()
            parallel.together(tape.forward(trainer.model(batch)))
            after_forward = len(counted.seen), counted.alive()
            parallel.together(tape.backward(torch.tensor(1.0)))
            kernels.drain_weight_gradients()
            results.append((after_forward, (len(counted.seen), counted.alive())))
            counted.seen.clear()
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_the_tape_holds_no_exchanged_buffer(pool, tokens, world):
    variants = [dict(data=tokens, ep=world, capacity_factor=c, recompute=r)
                for c in (0.0, 1.0) for r in ((), ("full",))]
    for results in pool.run(world, buffers_alive, variants, world):
        for knobs, ((n, after_forward), (m, after_backward)) in zip(variants, results):
            assert m > n >= 8, "exchanges are watched"
            # where no row travels, what is sent is the tokens themselves, which the router keeps anyway
            tokens_kept = {"sent out", "arrived out"} if world == 1 and not knobs["recompute"] else set()
            assert set(after_forward) <= tokens_kept and after_backward == [], knobs
    kept, = pool.run(2, buffers_alive, [dict(data=tokens, ep=2, recompute=("moe",))], 2)[0]
    # recomputing the experts keeps what they received: so a kept buffer is seen
    assert kept[0][1] and set(kept[0][1]) <= {"sent out", "arrived out", "on the wire"} and kept[1][1] == []


def unused_arrivals():
    """Rank 0 of two doubles what arrives, rank 1 makes no use of it. → the gradient of what this rank sent."""
    import dispatch
    layout = parallel.Layout(parallel.Sizes(1, 2, 1, 1, 1, 2, 1), torch.device("cpu"))
    experts_TK = torch.tensor([[0], [1], [1]])
    x_TD, weights_TK = torch.ones(3, 4, requires_grad=True), torch.ones(3, 1, requires_grad=True)
    tape = parallel.Tape()

    def block():
        plan = dispatch.Plan(experts_TK, weights_TK, 2, 0, "probs", layout.ep, layout.etp)
        yield parallel.Exchange("counts", plan)
        rows, weights, x = yield parallel.Exchange("out", plan, *dispatch.dispatch(x_TD * 1, weights_TK, plan),
                                                   carry=(x_TD * 1,))
        return x.sum() + (2 * rows).sum() if layout.world.rank == 0 else x.sum()

    parallel.together(tape.forward(block()))
    parallel.together(tape.backward(torch.tensor(1.0)))
    kernels.drain_weight_gradients()
    return x_TD.grad.tolist()


def test_a_rank_that_uses_nothing_of_what_arrived_takes_part(pool):
    assert pool.run(2, unused_arrivals) == [[[3.0] * 4, [1.0] * 4, [1.0] * 4]] * 2


# ---- interleaving ----


def test_together_returns_values_in_order_and_takes_turns():
    turns, random_ = [], random.Random(0)

    def worker(name, yields):
        for i in range(yields):
            turns.append((i, name))
            time.sleep(random_.random() * 1e-3)
            yield
        return name * 2

    assert parallel.together(worker("a", 3), worker("b", 0), worker("c", 5)) == ["aa", "bb", "cc"]
    assert turns == [(0, "a"), (0, "c"), (1, "a"), (1, "c"), (2, "a"), (2, "c"), (3, "c"), (4, "c")]
    assert parallel.together() == []


def late_layouts(variants, world):
    results, launched = [], 0
    for knobs in variants:
        with late_exchanges() as exchanges:
            results.append(run_layout(knobs, world, steps=1))
        launched += len(exchanges)
    return results, launched


@pytest.mark.parametrize("world", [2, 4])
def test_exchanges_that_arrive_late_change_no_bit(pool, tokens, world):
    """What arrives is NaN until waited for, and everything takes a random time."""
    base = dict(data=tokens, global_batch=3 * world, ep=world, **LOSSES)
    variants = [dict(base, capacity_factor=c, recompute=r, overlap=o, dispatcher=d)
                for c, r, d in ((0.0, (), "alltoall"), (0.0, ("full",), "alltoall"), (1.0, (), "alltoall"),
                                (1.0, ("full",), "alltoall"), (1.0, ("moe",), "alltoall"),
                                (0.0, (), "allgather"), (1.0, ("full",), "allgather"))
                for o in ("pair", "none")]
    punctual = pool.run(world, run_layouts, [v for v in variants if v["overlap"] == "none"], world, steps=1)
    for rank, (results, launched) in enumerate(pool.run(world, late_layouts, variants, world)):
        assert launched > len(variants) * 20
        for knobs, result, i in zip(variants, results, range(len(variants))):
            assert bit_equal(punctual[rank][i // 2], result), (rank, knobs)


# ---- recompute near ties, repeatability ----


def noisy_replay(variants, world):
    """Identical logits everywhere, with noise whenever a microbatch passes a layer again."""
    import train
    results = []
    for knobs in variants:
        with ragged():
            trainer = train.Trainer(config(**knobs), world)
            all_ties(trainer)
            replays = [0]
            for number, layer in trainer.model.moes.items():
                add_noise(number, layer, replays)
            results.append((gradients_of(trainer), replays[0]))
    return results


def add_noise(number, layer, replays):
    plain, scores, seen, generator = layer.forward, layer.router.scores, [], torch.Generator().manual_seed(number)

    def forward(x_TD, h_TD, batch, plan=None):
        replay = any(batch is b for b in seen)
        seen.append(batch)
        replays[0] += replay

        def noisy(logits_TE):
            return scores(logits_TE + replay * 1e-6 * torch.randn(logits_TE.shape, generator=generator))

        layer.router.scores = noisy     # used before the layer first yields
        return (yield from plain(x_TD, h_TD, batch, plan))

    layer.forward = forward


@pytest.mark.parametrize("score_fn", ["softmax", "sigmoid"])
def test_recompute_keeps_the_choices_made_near_ties(pool, tokens, score_fn):
    base = dict(data=tokens, micro_batch=3, score_fn=score_fn, norm_topk=False)
    variants = [dict(base, capacity_factor=c, recompute=r) for c in (0.0, 0.5) for r in ((), ("full",))]
    refs = [r for r, _ in pool.run(1, noisy_replay, [dict(v, recompute=(), micro_batch=3) for v in variants], 1)[0]]
    for world, ep in ((1, 1), (2, 2), (4, 4)):
        for rank, results in enumerate(pool.run(world, noisy_replay, [dict(v, ep=ep) for v in variants], world)):
            for knobs, ref, (result, replays) in zip(variants, refs, results):
                assert replays == (2 * 4 // world if knobs["recompute"] else 0)
                assert_equals(ref, result, what=f"world {world}, rank {rank}, {knobs}")


def twice(variants, world):
    """Losses of 20 steps and the parameters after them, two times."""
    import train
    results = []
    for knobs in variants:
        for _ in range(2):
            with ragged():
                trainer = train.Trainer(config(**knobs), world)
                losses = losses_of(trainer, 20)
            results.append((losses, [f.flat for f in trainer.optimizer.families]))
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_the_same_seed_gives_the_same_bits(pool, tokens, world):
    base = dict(data=tokens, global_batch=4, optimizer="adamw", lr=1e-2, bias_update_rate=1e-3, **LOSSES)
    variants = [dict(base, capacity_factor=0.8), dict(base, capacity_factor=0.0, recompute=("full",))]
    for results in pool.run(world, twice, variants, world):
        for (losses, flats), (again, flats_again) in zip(results[::2], results[1::2]):
            assert len(set(losses)) == 20 and losses == again
            assert all(map(torch.equal, flats, flats_again))
        assert results[0][0] != results[2][0], "drops make a difference, so the comparison sees one"


class Collisions(TorchDispatchMode):
    """Finds additions into a place that several sources share: their order is the device's to choose."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1].rstrip("_")
        if name in ("scatter_add", "scatter_reduce"):
            _, dim, index, source, *_ = args
            places, real = (t.movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (index, source != 0))
            shared = any(len(i[r]) != len(i[r].unique()) for i, r in zip(places, real))
        elif name in ("index_add", "index_reduce"):
            shared = len(args[2]) != len(args[2].unique())
        elif name == "index_put":
            shared = len(args) > 3 and args[3]
        else:
            shared = False
        if shared:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def collisions(variants):
    import train
    results = []
    for knobs in variants:
        with ragged():
            trainer = train.Trainer(config(**knobs), 1)
            batches = list(trainer.batches(0))
            with Collisions() as mode:
                trainer.forward_backward(batches)
        results.append(mode.found)
    return results


def test_nothing_is_added_in_an_order_of_chance(pool, tokens):
    variants = [dict(data=tokens, capacity_factor=c, recompute=r, **LOSSES) for c, r in ((0.0, ()), (0.8, ("full",)))]
    assert pool.run(1, collisions, variants)[0] == [[], []]
    with Collisions() as mode:
        torch.zeros(3).index_add_(0, torch.tensor([1, 1]), torch.ones(2))
        torch.zeros(3).scatter_add_(0, torch.tensor([1, 2]), torch.ones(2))
        torch.zeros(3).scatter_add_(0, torch.tensor([1, 1]), torch.ones(2))
    assert mode.found == ["index_add", "scatter_add"]


# ---- steps that are not finite ----


@contextlib.contextmanager
def broken(trainer, rank):
    """One token on one rank comes out of the first block's attention as NaN."""
    attention = trainer.model.layers["0"].attention
    plain = attention.forward

    def forward(x_TD, batch):
        y_TD = plain(x_TD, batch).clone()
        if trainer.layout.world.rank == rank:
            y_TD[5] = torch.nan
        return y_TD

    attention.forward = forward
    yield
    attention.forward = plain


def around_a_broken_step(variants, world):
    """Per variant: what the log says of steps 1 to 4, of which the second breaks, and what that changed."""
    import train
    results = []
    for knobs in variants:
        with replaced(train, "peak_flops", lambda *_: None):
            trainer = train.Trainer(config(**knobs), world)
            log, said, changed = train.Log(trainer), [], None
            for step in range(4):
                before = state_of(trainer)
                with broken(trainer, world - 1) if step == 1 else contextlib.nullcontext():
                    result = trainer.step(step)
                result.spans["step"] = [(0.0, 1.0)]
                said.append(log.step(result))
                if step == 1:
                    changed = [n for n, t in state_of(trainer).items() if not torch.equal(t, before[n])]
                else:
                    assert not torch.equal(state_of(trainer)["master 0"], before["master 0"])
        results.append((said, changed, [r["loss"] for r in log.history], [r["grad_norm"] for r in log.history]))
    return results


def state_of(trainer):
    for family in trainer.optimizer.families:
        family.fetch()
    state = {n: t.detach().clone() for n, t in trainer.model.state_dict().items()}
    for i, family in enumerate(trainer.optimizer.families):
        state[f"master {i}"] = family.master.detach().clone()
        if trainer.cfg.optimizer == "adamw":
            state |= {f"{k} {i}": v.clone() for k, v in family.moments.items()}
            state["updates"] = trainer.optimizer.count.clone()
    return state


@pytest.mark.parametrize("world, ep", [(1, 1), (2, 2), (4, 2)])
def test_nan_in_one_token_on_one_rank_skips_the_step_everywhere(pool, tokens, world, ep):
    base = dict(data=tokens, out_dir=f"{tokens}/out", global_batch=8, ep=ep, bias_update_rate=0.01, aux_loss_coef=0.1)
    variants = [dict(base, capacity_factor=c, optimizer=o, recompute=r, moment_dtype=m, grad_dtype=m)
                for c, o, r, m in ((0.0, "adamw", (), "fp32"), (1.0, "adamw", ("full",), "bf16"),
                                   (1.0, "sgd", (), "fp32"))]
    for rank, results in enumerate(pool.run(world, around_a_broken_step, variants, world)):
        for knobs, (finite, changed, losses, norms) in zip(variants, results):
            assert finite == [True, False, True, True], (rank, knobs)
            assert changed == [], (rank, knobs)
            assert [x is None for x in losses] == [x is None for x in norms] == [False, True, False, False]


def main_on_rank(argv):
    """train.main as torchrun would start it, with NaN in the second step of rank 3. → how it ended, how many
    steps were taken."""
    import train
    plain, taken = train.Trainer.step, []

    def step(self, n):
        taken.append(n)
        with broken(self, 3) if n == 1 else contextlib.nullcontext():
            return plain(self, n)

    os.environ |= {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8"}
    with replaced(train.Trainer, "step", step), replaced(parallel, "finish", lambda: None):
        try:
            train.main(argv)
            return None, len(taken)
        except SystemExit as end:
            return end.code, len(taken)
        finally:
            del os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]


def test_every_rank_stops_after_the_same_step(pool, tokens, tmp_path):
    argv = [f"--{k}={v}" for k, v in dict(SMALL, data=tokens, global_batch=8, max_steps=4).items()]
    stop = pool.run(8, main_on_rank, [*argv, "--on_nan=stop", f"--out_dir={tmp_path}/a"])
    assert len(set(stop)) == 1 and stop[0][0] not in (None, 0) and "step 2" in str(stop[0][0])
    assert stop[0][1] <= 3, "it may be one step ahead"
    skip = pool.run(8, main_on_rank, [*argv, "--on_nan=skip", f"--out_dir={tmp_path}/b"])
    assert skip == [(None, 4)] * 8


def ignored(tokens, labels, windows):
    labels[:] = -100


def padded(tokens, labels, windows):
    tokens[:] = -1


@pytest.mark.parametrize("change", [ignored, padded])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_without_labels_has_loss_zero(pool, tokens, world, change):
    for capacity, recompute in ((0.0, ()), (0.0, ("full",)), (1.0, ())):
        knobs = dict(data=tokens, out_dir=f"{tokens}/out", ep=world, capacity_factor=capacity, recompute=recompute,
                     z_loss_coef=0.0)
        for rows in pool.run(world, log_rows, knobs, world, steps=2, uneven=change):
            assert [(row["loss"], row["grad_norm"]) for row in rows] == [(0, 0)] * 2
            assert rows[0]["drop_fraction"] is not None


# ---- every parameter learns ----


def updates(variants, world):
    """Per variant: how often each parameter is in a family, and which (expert's) parameters one step left alone."""
    import train
    results = []
    for knobs in variants:
        trainer = train.Trainer(config(**knobs), world)
        params = dict(trainer.model.named_parameters())
        families = trainer.optimizer.families
        times = {name: sum(slot[0] == name for f in families for slot in f.slots) for name in params}
        inside = lambda t, flat: flat.data_ptr() <= t.data_ptr() < flat.data_ptr() + flat.nbytes
        for name, p in params.items():
            family, = [f for f in families if name in f.params]
            assert p.requires_grad and inside(p, family.flat) and inside(p.grad, family.grad), name
        before = {name: p.detach().clone() for name, p in params.items()}
        trainer.step(0)
        for family in families:
            family.fetch()
        still = []
        for name, p in params.items():
            rows = zip(p, before[name]) if ".experts." in name else [(p, before[name])]
            still += [f"{name} {i}" for i, (a, b) in enumerate(rows) if torch.equal(a, b)]
        results.append((times, still))
    return results


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_parameter_is_in_one_family_and_learns(pool, tokens, world):
    variants = [dict(data=tokens, ep=e, optimizer=o, lr=0.1, tie_embeddings=tie, qk_norm=qk, n_shared_experts=s,
                     n_dense_layers=d, precision=p)
                for e, o, tie, qk, s, d, p in (
                    (world, "sgd", False, "head", 1, 1, "fp32"), (1, "adamw", True, "full", 2, 0, "fp32"),
                    (0, "adamw", False, "none", 0, 1, "bf16"), (world, "adamw", False, "full", 1, 2, "bf16"))]
    for rank, results in enumerate(pool.run(world, updates, variants, world)):
        for knobs, (times, still) in zip(variants, results):
            assert set(times.values()) == {1}, times
            assert still == [], (rank, knobs)


# ---- one mean over all valid tokens ----


VALID = (11, 101, 37, 3)


def few_labels(order, tokens, labels, windows):
    """The i-th window of `order` has VALID[i % 4] valid tokens."""
    for row, w in enumerate(windows):
        if w in order:
            labels[row, VALID[order.index(w) % 4]:] = -100


def mean_of_few(knobs, world):
    """Gradients of a step whose sequences have very different numbers of labels; evaluation, of as many."""
    import data
    import train
    trainer = train.Trainer(config(**knobs), world)
    n = trainer.data.train.n_windows(trainer.cfg.seq_len)
    order = [data.window_of(trainer.cfg.seed, i, n) for i in range(4)]
    with ragged(functools.partial(few_labels, order)):
        result = gradients_of(trainer)
    with ragged(functools.partial(few_labels, list(range(n)))):
        result["losses"] = [trainer.evaluate()]     # not a whole number of batches: the last one has padding
    return result


def test_loss_is_the_mean_over_valid_tokens_not_over_microbatches(pool, tokens):
    base = dict(data=tokens, seq_len=128, global_batch=4, eval_steps=100)
    ref, = pool.run(1, mean_of_few, dict(base, micro_batch=4), 1)
    hand, = pool.run(1, mean_by_hand, base)
    assert ref["loss"] == pytest.approx(hand, rel=1e-6)
    for world, micro_batch in ((1, 1), (2, 1), (2, 2), (4, 1)):
        knobs = dict(base, micro_batch=micro_batch, capacity_factor=4.0)
        for rank, result in enumerate(pool.run(world, mean_of_few, knobs, world)):
            assert_equals(ref, result, what=f"world {world}, micro_batch {micro_batch}, rank {rank}")


def mean_by_hand(knobs):
    """Cross entropy sequence by sequence, weighed by their numbers of labels."""
    import data
    import train
    trainer = train.Trainer(config(**knobs), 1)
    total, n = 0.0, trainer.data.train.n_windows(128)
    for i, valid in enumerate(VALID):
        window = data.window_of(trainer.cfg.seed, i, n)
        with ragged(functools.partial(few_labels, [None] * i + [window])):
            batch, = [b for j, b in enumerate(trainer.batches(0)) if j == i]
        total += models.run(trainer.model, batch).item()
        assert (batch.labels_T != -100).sum() == valid
    return total / sum(VALID)


# ---- FLOPs ----


def test_the_norm_of_a_large_buffer_does_not_depend_on_how_it_is_sharded():
    """At ten million elements plain fp32 sums are off by 5e-4; small models never show it."""
    import optim
    x = 1e-3 * torch.randn(12_000_000, generator=torch.Generator().manual_seed(0))
    exact = x.double().square().sum()
    for shards in (1, 4):
        total = sum(optim.square_sum(part) for part in x.chunk(shards))
        assert abs(total - exact) <= 1e-6 * exact


def test_flops_by_hand():
    """Multiply-adds per token: attention, dense layer, two MoE layers of 2 routed and 1 shared expert, head."""
    attention = 3 * (2 * 32 * (32 + 16) + 32 * 16)
    assert models.flops_per_token(config()) == 6 * (attention + 3 * 32 * 48 + 2 * 3 * 3 * 32 * 16 + 32 * 64) == 159744
    # Qwen3-30B-A3B at a sequence length of 4096
    large = config(vocab_size=151936, n_layer=48, n_dense_layers=0, d_model=2048, n_head=32, n_kv_head=4, d_head=128,
                   seq_len=4096, num_experts=128, top_k=8, d_expert=768, n_shared_experts=0)
    assert models.flops_per_token(large) == 23_006_281_728
    for experts in (2, 4, 64):
        assert models.flops_per_token(config(num_experts=experts)) == 159744
    assert models.flops_per_token(config(), kept=0.5) == 159744 - 6 * 2 * 3 * 32 * 16


@pytest.mark.parametrize("world", [1, 2, 4])
def test_logged_flops_depend_neither_on_experts_nor_on_layout(pool, tokens, world):
    base = dict(data=tokens, out_dir=f"{tokens}/out")
    for experts, ep, recompute in ((4, 1, ()), (8, world, ()), (16, world, ("full",))):
        for row, in pool.run(world, log_rows, dict(base, num_experts=experts, ep=ep, recompute=recompute), world):
            per_token = row["tflops_per_gpu"] * 1e12 * world * row["step_s"] / (12 * 16)
            assert per_token == pytest.approx(159744, rel=1e-9)
            assert row["mfu"] == pytest.approx(row["tflops_per_gpu"], rel=1e-9)
    knobs = dict(base, ep=world, capacity_factor=0.5)
    for row, in pool.run(world, log_rows, knobs, world, prepare=forced("one expert empty")):
        assert 0.2 < row["drop_fraction"] < 0.9
        expected = 159744 - row["drop_fraction"] * 6 * 2 * 2 * 3 * 32 * 16
        assert row["tflops_per_gpu"] * 1e12 * world / (12 * 16) == pytest.approx(expected, rel=1e-9)
