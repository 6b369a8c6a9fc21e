"""Pipeline stages change no gradient and no logged number, however layers are cut and microbatches follow."""

import contextlib
import functools
import time
from random import Random

import model as models
import numpy as np
import parallel
import pytest
import torch
from harness import (assert_equals, bit_equal, config, log_rows, losses_of, ragged, replaced, run_layout,
                     run_layouts, write_tokens)

# the first half is dense, so the first of two stages has no MoE layer
BASE = dict(n_layer=8, n_dense_layers=4, aux_loss_coef=0.1, aux_loss_scope="sequence", z_loss_coef=0.01)

# world, and the layout: by default 12 microbatches over all data-parallel ranks, overlap=pair
LAYOUTS = [
    (2, dict(pp=2)),
    (2, dict(pp=2, micro_batch=12)),
    (2, dict(pp=2, vpp=2, recompute=("full",))),
    (2, dict(pp=2, pp_layout=(1, 7), micro_batch=4, capacity_factor=4.0)),
    (2, dict(pp=2, vpp=4, overlap="none")),
    (4, dict(pp=2, ep=2)),
    (4, dict(pp=2, ep=1, micro_batch=2, recompute=("moe",))),
    (4, dict(pp=2, vpp=2, ep=2, pp_layout=(1, 4, 2, 1))),
    (4, dict(pp=4)),
    (4, dict(pp=4, micro_batch=4)),     # three microbatches
    (4, dict(pp=4, micro_batch=4, overlap="none", pp_layout=(3, 1, 1, 3))),
    (4, dict(pp=4, vpp=2, capacity_factor=4.0)),
    (4, dict(pp=4, vpp=2, micro_batch=3, recompute=("moe", "full"), overlap="none")),
]
TIED = [(2, dict(pp=2)), (4, dict(pp=2, ep=2)), (4, dict(pp=2, ep=1)), (4, dict(pp=4, vpp=2, micro_batch=3))]


@pytest.fixture(scope="module")
def reference(pool, tokens):
    """REF, and REF with tied embeddings."""
    return [pool.run(1, run_layout, dict(BASE, data=tokens, overlap="none", tie_embeddings=tied), 1)[0]
            for tied in (False, True)]


def of_world(layouts, world, **more):
    return [dict(BASE, **knobs, **more) for w, knobs in layouts if w == world]


@pytest.mark.parametrize("world", [2, 4])
def test_every_gradient_equals_one_process(pool, tokens, reference, world):
    for tied, layouts in enumerate((LAYOUTS, TIED)):
        variants = of_world(layouts, world, data=tokens, tie_embeddings=bool(tied))
        for rank, results in enumerate(pool.run(world, run_layouts, variants, world)):
            for knobs, result in zip(variants, results, strict=True):
                assert_equals(reference[tied], result, what=f"rank {rank}, {knobs}")


def test_cutting_into_stages_changes_no_bit(pool, tokens):
    """Every stage adds up its microbatches in the order in which one process does."""
    for more in ({}, dict(micro_batch=4, aux_loss_scope="global"), dict(micro_batch=4, recompute=("full",)),
                 dict(precision="bf16")):
        ref, = pool.run(1, run_layout, dict(BASE, data=tokens, overlap="none", **more), 1, steps=1)
        variants = [dict(BASE, data=tokens, overlap=overlap, pp=4, **more) for overlap in ("none", "pair")]
        for results in pool.run(4, run_layouts, variants, 4, steps=3):
            assert bit_equal(*results)
            assert ref["grads"].keys() == results[0]["grads"].keys()
            assert all(torch.equal(grad, results[0]["grads"][name]) for name, grad in ref["grads"].items())
            assert ref["loss"] == results[0]["loss"]


@pytest.mark.parametrize("world, more", [(2, dict(vpp=4)), (4, dict(vpp=2, ep=2)), (4, dict(ep=2, micro_batch=2))])
def test_pairs_change_no_bit(pool, tokens, world, more):
    base = dict(BASE, data=tokens, pp=2, bias_update_rate=0.01, **more)
    variants = [dict(base, overlap=o, recompute=r) for r in ((), ("full",)) for o in ("none", "pair")]
    for results in pool.run(world, run_layouts, variants, world, steps=2):
        assert all(bit_equal(results[0], result) for result in results)


# ---- late messages ----


class _Late:
    """A message that is NaN until waited for."""

    def __init__(self, x, work, hidden=None, delay=0.0):
        self.x, self.work, self.hidden, self.delay, self.copy = x, work, hidden, delay, x.clone()
        self.done = False

    def wait(self):
        time.sleep(self.delay)
        self.work.wait()
        if self.hidden is None:
            assert torch.equal(self.x, self.copy), "changed while it travelled"
        else:
            self.x.copy_(self.hidden)
        self.done = True

    def is_completed(self):
        return self.delay > 0


@contextlib.contextmanager
def late_messages():
    """→ a list of all messages. Those received are NaN until waited for, random times pass."""
    dist, random, messages = parallel.dist, Random(torch.distributed.get_rank()), []

    def irecv(x, *args, plain=dist.irecv, **kwargs):
        hidden = torch.empty_like(x)
        messages.append(_Late(x.fill_(torch.nan), plain(hidden, *args, **kwargs), hidden, random.random() * 2e-3))
        return messages[-1]

    def isend(x, *args, plain=dist.isend, **kwargs):
        time.sleep(random.random() * 2e-3)
        messages.append(_Late(x, plain(x, *args, **kwargs)))
        return messages[-1]

    with replaced(dist, "irecv", irecv), replaced(dist, "isend", isend):
        yield messages
    assert all(message.done for message in messages), "a message was never waited for"


def late_layouts(variants, world):
    """→ results; per variant, how many messages there were and the most that were sent and not waited for."""
    import train
    results, traffic, most = [], [], 0
    plain = parallel.Link.send

    def send(self, x):
        nonlocal most
        plain(self, x)
        most = max(most, len(self.outbox))

    for knobs in variants:
        most = 0
        with late_messages() as messages, replaced(parallel.Link, "send", send):
            results.append(run_layout(knobs, world, steps=1))
        traffic.append((len(messages), most))
    return results, traffic


@pytest.mark.parametrize("world", [2, 4])
def test_messages_that_arrive_late_change_no_bit(pool, tokens, world):
    base = dict(BASE, data=tokens)
    variants = [dict(base, **knobs) for knobs in (
        dict(pp=2, ep=world // 2), dict(pp=world, vpp=8 // world), dict(pp=world, overlap="none"),
        dict(pp=world, global_batch=24, pp_layout=(1, 7) if world == 2 else (1, 3, 2, 2)))]
    punctual = pool.run(world, run_layouts, variants, world, steps=1)
    ranks = pool.run(world, late_layouts, variants, world)
    for rank, (results, traffic) in enumerate(ranks):
        for knobs, plain, late, (_, most) in zip(variants, punctual[rank], results, traffic, strict=True):
            assert bit_equal(plain, late), (rank, knobs)
            assert 0 < most <= parallel.send_window(knobs["pp"], knobs.get("vpp", 1))
    for i, knobs in enumerate(variants):
        crossings = knobs["pp"] * knobs.get("vpp", 1) - 1
        # of every microbatch there and back, counted by sender and receiver, in two steps
        expected = crossings * knobs.get("global_batch", 12) * 2 * 2 * 2
        assert sum(traffic[i][0] for _, traffic in ranks) == expected, knobs


# ---- tied embeddings ----


def tied_copies(variants, world):
    """Per variant: this rank's stage, its embedding at first and after 3 steps (None: it has none), moments."""
    import train
    results = []
    for knobs in variants:
        with ragged():
            trainer = train.Trainer(config(**knobs), world)
            first = None if trainer.model.embedding is None else trainer.model.embedding.detach().clone()
            losses_of(trainer, 3)
        trainer.optimizer.fetch(None)
        families = [f for f in trainer.optimizer.families if "embedding" in f.params]
        assert len(families) == (first is not None) and all(len(f.params) == 1 for f in families)
        state = [t.clone() for f in families for t in f.moments.values()]
        table = trainer.model.embedding
        results.append((trainer.layout.pp.rank, first, None if table is None else table.detach().clone(), state))
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_both_copies_of_a_tied_embedding_stay_equal(pool, tokens, world):
    variants = of_world(TIED, world, data=tokens, tie_embeddings=True, optimizer="adamw", lr=1e-2)
    ranks = pool.run(world, tied_copies, variants, world)
    for knobs, results in zip(variants, zip(*ranks), strict=True):
        held = [result for result in results if result[1] is not None]
        assert {stage for stage, *_ in held} == {0, knobs["pp"] - 1}
        assert len(held) == 2 * world // knobs["pp"]
        for _, first, last, _ in held:
            assert torch.equal(last, held[0][2]) and not torch.equal(last, first), knobs
        by_stage = [[state for stage, _, _, state in held if stage == s] for s in (0, knobs["pp"] - 1)]
        for ours, theirs in zip(*by_stage, strict=True):
            assert len(ours) == 2 and all(map(torch.equal, ours, theirs)), "moments differ"


# ---- what is logged ----

SPEED = {"a2a_share", "gemm_efficiency", "memory_gb", "step_s", "tokens_per_s", "tflops_per_gpu", "mfu"}


@pytest.mark.parametrize("dense", [4, 6, 8], ids=["first stage dense", "three of four dense", "all dense"])
def test_every_rank_logs_what_one_process_logs(pool, tokens, dense):
    base = dict(BASE, data=tokens, out_dir=f"{tokens}/out", n_dense_layers=dense, bias_update_rate=0.01)
    one, = pool.run(1, log_rows, dict(base, overlap="none"), 1, steps=3, uneven=True)
    assert (one[0]["load_imbalance"] is None) == (one[0]["aux_loss"] == 0) == (dense == 8)
    for knobs in (dict(pp=2, ep=2), dict(pp=4), dict(pp=2, vpp=2, ep=1)):
        for rows in pool.run(4, log_rows, dict(base, **knobs), 4, steps=3, uneven=True):
            for a, b in zip(one, rows, strict=True):
                assert a.keys() == b.keys()
                for key in a.keys() - SPEED:
                    close = a[key] is b[key] is None or a[key] == pytest.approx(b[key], rel=1e-5, abs=1e-12)
                    assert close, (knobs, key, a[key], b[key])
                assert a["tflops_per_gpu"] == pytest.approx(4 * b["tflops_per_gpu"])


def biases(knobs, world):
    import train
    trainer = train.Trainer(config(**knobs), world)
    losses_of(trainer, 3)
    return {name: t.clone() for name, t in trainer.model.named_buffers()}


def test_every_layer_balances_by_its_own_counts(pool, tokens):
    base = dict(BASE, data=tokens, bias_update_rate=0.01, lr=0.0, min_lr=0.0)
    one, = pool.run(1, biases, base, 1)
    assert len({tuple(bias.tolist()) for bias in one.values()}) == 4, "layers differ, so a wrong one shows"
    for knobs in (dict(pp=2, ep=2), dict(pp=4, vpp=2)):
        ranks = pool.run(4, biases, dict(base, **knobs), 4)
        assert set().union(*ranks) == one.keys()
        for got in ranks:
            assert all(torch.equal(one[name], bias) for name, bias in got.items())


def start_of(knobs, world):
    """→ this stage's parameter names; parameter counts; the start table's lines about the pipeline; the bytes and
    calls of what a step sends to other stages."""
    import train
    trainer = train.Trainer(config(**knobs), world)
    parallel.ledger.take()
    sent = {group.name: row for (group, op), row in trainer.step(0).ledger.items() if op == "send"}
    return ([name for name, _ in trainer.model.named_parameters()], models.parameter_counts(trainer.model),
            list(train.Log(trainer).pipeline()), sent)


def test_the_start_table_and_the_ledger(pool, tokens):
    base = dict(BASE, data=tokens, out_dir=f"{tokens}/out", ep=1)
    for tied in (False, True):
        (names, counts, lines, sent), = pool.run(1, start_of, dict(base, tie_embeddings=tied), 1)
        assert lines == [] and sent == {}
        held = pool.run(4, start_of, dict(base, tie_embeddings=tied, pp=4, pp_layout=(1, 2, 2, 3)), 4)
        assert {name for mine, *_ in held for name in mine} == set(names)
        assert sum(len(mine) for mine, *_ in held) == len(names) + tied
        assert ["embedding" in mine for mine, *_ in held] == [True, False, False, tied]
        assert [{int(name.split(".")[1]) for name in mine if "layers" in name} for mine, *_ in held] == [
            {0}, {1, 2}, {3, 4}, {5, 6, 7}]
        for _, theirs, lines, _ in held:
            assert theirs == counts
            assert lines == ["  stage 0: layers 0, at most 8 microbatches in flight",
                             "  stage 1: layers 1-2, at most 6 microbatches in flight",
                             "  stage 2: layers 3-4, at most 4 microbatches in flight",
                             "  stage 3: layers 5-7, at most 2 microbatches in flight",
                             "  bubble 20.0% of a step with 12 microbatches, if all stages take equally long"]
        one_way = (12, 12 * 16 * 32 * 4)    # 12 microbatches of 16 tokens, 32 wide, fp32
        assert [sent for *_, sent in held] == [
            {"pp forward": one_way}, {"pp forward": one_way, "pp backward": one_way},
            {"pp forward": one_way, "pp backward": one_way}, {"pp backward": one_way}]
    knobs = dict(base, pp=2, vpp=2, overlap="none", micro_batch=3)
    assert pool.run(2, start_of, knobs, 2)[0][2] == [
        "  stage 0: layers 0-1, 4-5, at most 5 microbatches in flight, each on one of its 2 chunks",
        "  stage 1: layers 2-3, 6-7, at most 3 microbatches in flight, each on one of its 2 chunks",
        "  bubble 11.1% of a step with 4 microbatches, if all stages take equally long"]


def test_layers_are_cut_evenly_or_as_told():
    cut = lambda **knobs: [list(layers) for layers in parallel.stage_layers(config(**knobs))]
    assert cut(n_layer=6, pp=4) == [[0, 1], [2, 3], [4], [5]]
    assert cut(n_layer=5, pp=2, vpp=2) == [[0, 1], [2], [3], [4]]
    assert cut(n_layer=6, pp=3, pp_layout=(1, 4, 1)) == [[0], [1, 2, 3, 4], [5]]
    assert cut(n_layer=3) == [[0, 1, 2]]


# ---- evaluation, sampling ----


def use(knobs, world):
    """Losses of steps between evaluations and samples, those evaluations, and the samples."""
    import train
    with ragged():
        trainer = train.Trainer(config(**knobs), world)
        losses, values, samples = [], [], []
        for step in range(3):
            losses += [trainer.step(step).read()[0]]
            values.append(trainer.evaluate())
            samples.append(list(models.generate(trainer.model, range(5 + step), 4, temperature=0)))
            samples.append(list(models.generate(trainer.model, range(20), 3, seed=step)))
    return losses, values, samples


def plain_losses(knobs, world):
    import train
    with ragged():
        return losses_of(train.Trainer(config(**knobs), world), 3)


def test_evaluation_and_samples_equal_one_process_and_leave_no_trace(pool, tmp_path):
    train, val = (np.random.RandomState(n).randint(0, 64, 16 * n + 1) for n in (100, 30))
    data = write_tokens(tmp_path / "data", train, val)      # evaluated 12 windows at a time, and then 6
    base = dict(BASE, data=data, eval_steps=100, bias_update_rate=0.01)
    (losses, values, samples), = pool.run(1, use, base, 1)
    assert len(set(losses)) == len(set(values)) == 3
    for world, knobs in ((2, dict(pp=2, vpp=2, micro_batch=3)), (4, dict(pp=2, ep=2)), (4, dict(pp=4))):
        undisturbed = pool.run(world, plain_losses, dict(base, **knobs), world)
        for (got, evaluated, sampled), plain in zip(pool.run(world, use, dict(base, **knobs), world), undisturbed):
            assert got == pytest.approx(losses, rel=1e-5) and got == plain
            assert evaluated == pytest.approx(values, rel=1e-5)
            assert sampled == samples


# ---- a stage that breaks ----


def broken_first_stage(knobs, world):
    """A token of the first stage is NaN in the second step. → finite?, parameters changed?, per step; losses"""
    import train
    said = []
    with replaced(train, "peak_flops", lambda *_: None):
        trainer = train.Trainer(config(**knobs), world)
        log = train.Log(trainer)
        for step in range(3):
            before = [f.flat.clone() for f in trainer.optimizer.families]
            with contextlib.ExitStack() as stack:
                if step == 1 and trainer.layout.world.rank == 0:
                    attention = trainer.model.layers["0"].attention
                    stack.enter_context(replaced(attention, "forward", functools.partial(_nan, attention.forward)))
                result = trainer.step(step)
            result.spans["step"] = [(0.0, 1.0)]
            changed = not all(map(torch.equal, before, [f.flat for f in trainer.optimizer.families]))
            said.append((log.step(result), changed))
    return said, [row["loss"] for row in log.history]


def _nan(plain, x_TD, batch):
    y_TD = plain(x_TD, batch).clone()
    y_TD[5] = torch.nan
    return y_TD


def test_nan_on_the_first_stage_skips_the_step_on_all(pool, tokens):
    for knobs in (dict(pp=2, ep=2), dict(pp=4, vpp=2, tie_embeddings=True)):
        knobs = dict(BASE, data=tokens, out_dir=f"{tokens}/out", **knobs)
        for said, losses in pool.run(4, broken_first_stage, knobs, 4):
            assert said == [(True, True), (False, False), (True, True)], knobs
            assert [loss is None for loss in losses] == [False, True, False]
