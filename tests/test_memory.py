"""What is recomputed or waits on the host changes no bit of any gradient, and saves what a hand count says."""

import contextlib
import gc
import json
import subprocess
import sys
import weakref

import kernels
import memory
import parallel
import pytest
import torch
from conftest import ROOT
from harness import bit_equal, config, gradients_of, replaced, run_layout

MLA = dict(attention="mla", qk_norm="none", n_kv_head=0, q_lora_rank=20, kv_lora_rank=24, d_nope=12, d_rope=8,
           d_v=16)
SMALL = dict(n_layer=2, global_batch=4, micro_batch=1, aux_loss_coef=0.1, z_loss_coef=0.01, **MLA)
PARTS, CHEAP = memory.PARTS, ("norm", "moe_act", "mla_up")
CHOICES = [*(((p,), ()) for p in (*PARTS, "full")), *(((), (p,)) for p in PARTS),
           (CHEAP, ("attn", "moe")), (PARTS, PARTS), ((*PARTS, "full"), PARTS),
           (("norm", "attn"), ("norm", "mla_up", "moe_act"))]


class Late:
    """A copy on a stream that does nothing before somebody waits, and then everything up to there, in order. Until
    then the copy is NaN, and what is copied must be there, and as it was."""

    def __init__(self, x, stream):
        self.stream, self.source, self.done = stream, weakref.ref(x), False
        behind_another = any(earlier.copy is x for earlier in stream)
        self.was = None if behind_another else x.clone()
        self.copy = torch.full_like(x, torch.nan if x.is_floating_point() else -7)
        stream.append(self)

    def wait(self):
        for copy in self.stream[:self.stream.index(self) + 1]:
            copy.run()

    def run(self):
        if self.done:
            return
        source = self.source()
        assert source is not None, "let go before it was copied"
        if self.was is not None:
            assert source.nan_to_num().equal(self.was.nan_to_num()), "changed before it was copied"
        self.copy.copy_(source)
        self.done = True


@contextlib.contextmanager
def late_copies():
    """→ the copies that were made, of which all must have been waited for."""
    stream = []
    with replaced(memory, "start_copy", lambda x, device: ((late := Late(x, stream)).copy, late)), replaced(
            memory, "SMALL", 0):
        yield stream
        memory.settle()
    assert all(copy.done for copy in stream)


def layouts_with_late_copies(variants, world):
    """Per variant: its gradients, and how many copies it made."""
    results = []
    for knobs in variants:
        with late_copies() as made:
            results.append((run_layout(knobs, world, steps=0), len(made)))
    assert not memory._open and not memory._where
    return results


LAYOUTS = {
    "one rank": (1, dict()),
    "tp 2, ep 4": (4, dict(tp=2, ep=4, capacity_factor=0.8)),
    "pp 2, ep 2": (4, dict(pp=2, ep=2, capacity_factor=0.8, n_dense_layers=1)),
}
MORE = {    # fewer choices each
    "dropless, cp 2, etp 2": (4, dict(cp=2, ep=2, etp=2)),
    "interleaved, tp 2": (4, dict(pp=2, vpp=2, tp=2, ep=2, n_layer=4, global_batch=4, capacity_factor=0.8)),
    "gqa, tied, one at a time": (1, dict(attention="gqa", n_kv_head=2, qk_norm="full", overlap="none",
                                         tie_embeddings=True, capacity_factor=1.0, defer_wgrad=False)),
}


@pytest.mark.parametrize("name", [*LAYOUTS, *MORE])
def test_no_choice_changes_a_bit(pool, tokens, name):
    world, knobs = (LAYOUTS | MORE)[name]
    base = dict(SMALL, data=tokens) | knobs
    choices = CHOICES if name in LAYOUTS else CHOICES[-4:]
    if base["attention"] == "gqa":
        choices = [tuple(tuple(p for p in c if p != "mla_up") for c in choice) for choice in choices]
    variants = [base, *(dict(base, recompute=r, offload=o) for r, o in choices)]
    (references, *by_choice) = zip(*pool.run(world, layouts_with_late_copies, variants, world))
    assert all(copies == 0 and plain["norm"] > 0 for plain, copies in references)
    for choice, results in zip(choices, by_choice):
        assert all(bit_equal(plain, result) for (plain, _), (result, _) in zip(references, results)), choice
        copies = sum(copies for _, copies in results)       # (a stage may hold no such part)
        assert (copies > 0) == (len(choice[1]) > 0), choice


def leftovers(knobs):
    """What is alive after a step, without a search for cycles."""
    import train
    seen = weakref.WeakSet()

    def noted(plain):
        def init(self, *args, **kwargs):
            seen.add(self)
            plain(self, *args, **kwargs)
        return init

    trainer = train.Trainer(config(**knobs), 1)
    gc.collect()
    gc.disable()
    try:
        with contextlib.ExitStack() as stack:
            for kind in (memory.Saving, memory.Moved):
                stack.enter_context(replaced(kind, "__init__", noted(kind.__init__)))
            stack.enter_context(replaced(memory, "SMALL", 0))
            gradients_of(trainer)
        memory.settle()
        return len(seen), len(memory._makers)
    finally:
        gc.enable()


def test_nothing_is_left_behind(pool, tokens):
    for recompute, offload in CHOICES[-4:]:
        knobs = dict(SMALL, data=tokens, recompute=recompute, offload=offload)
        assert pool.run(1, leftovers, knobs) == [(0, 0)], (recompute, offload)


def test_an_address_that_serves_again_means_another_tensor():
    knobs = config(recompute=("norm",))
    with replaced(memory, "SMALL", 0), memory.Saving(moves=True) as segment, memory.Offloaded(torch.exp) as policy:
        kept, nodes = [], []
        for i in range(50):
            kept.append(policy.save(torch.full((8,), float(i))))
            memory.settle()     # nothing but the copy is left
            nodes.append(memory.part(knobs, "norm", torch.exp, torch.ones(8, requires_grad=True)).grad_fn)
            assert isinstance(segment.save(torch.ones(8)), torch.Tensor), "taken for a result that is gone"
    assert [k.get().tolist() for k in kept] == [[float(i)] * 8 for i in range(50)]


def order_of_fetches(knobs):
    """→ events of one microbatch's backward: ("backward", number of cuts left) and ("fetch", cuts before)."""
    import train
    trainer, events = train.Trainer(config(**knobs), 1), []
    batch, tape = next(iter(trainer.batches(0))), parallel.Tape()
    fetch, backward = memory.Offloaded.fetch, parallel._backward

    def fetching(self):
        behind, = [n for n, parts in tape.offloaded.items() if self in parts]
        events.append(("fetch", behind))
        fetch(self)

    def running(*args):
        events.append(("backward", len(tape.cuts)))
        backward(*args)

    with replaced(memory, "SMALL", 0), replaced(memory.Offloaded, "fetch", fetching), replaced(
            parallel, "_backward", running):
        parallel.together(tape.forward(trainer.model(batch)))
        assert all(moved.back is None for parts in tape.offloaded.values() for p in parts
                   for moved in p.moved.values()), "nothing comes back in forward"
        cuts = len(tape.cuts)
        parallel.together(tape.backward(torch.tensor(1.0)))
        kernels.drain_weight_gradients()
    return cuts, events


def test_tensors_come_back_one_segment_ahead(pool, tokens):
    knobs = dict(SMALL, data=tokens, n_layer=3, n_shared_experts=0, offload=("attn", "moe"))
    cuts, events = pool.run(1, order_of_fetches, knobs)[0]
    assert cuts == 4    # out and back in each of two layers
    for behind in range(cuts):
        first = events.index(("fetch", behind))
        assert ("backward", behind + 1) in events[first:], "before the segment after it runs backward"
        assert ("backward", behind + 2) not in events[first:], "and not earlier"


# ---- what a block of DeepSeek-V3 keeps, by hand ----

T, D, H = 4096, 7168, 128               # tokens, width, heads
WIDE, V = 128 + 64, 128                 # a head's keys (and queries), values
Q_LATENT, KV_LATENT = 1536, 512 + 64    # with the rotary key
R, F = T * 8, 2048                      # rows: each token goes to 8 experts, which are F wide
D_FF = 18432
BF16, FP32 = 2, 4                       # bytes

# What a choice no longer keeps, in bytes.
NORM = BF16 * T * (2 * D + Q_LATENT)                # results of both norms and of the queries' latent's
MOE_ACT = BF16 * R * F                              # silu(gate)·up·p
MLA_UP = BF16 * T * H * 3 * WIDE                    # queries, keys, and values padded to their width
# What goes in stays. The latent of queries before its norm and after, that of keys and values before its norm and,
# with its rotated key, after; what attention found, its log-sum-exp, and a copy without the padding
ATTN = MLA_UP + BF16 * T * (2 * Q_LATENT + 2 * KV_LATENT) + T * H * (BF16 * (WIDE + V) + FP32)
# Gate and up, and what comes of them, of routed and shared experts. Received rows stay, in place of their copies
# in the order of experts, which weigh as much
MOE = BF16 * 3 * (R * F + T * F)
MLP = BF16 * 3 * T * D_FF
# Attention and its norm; the stream after attention, norm2's result, received rows, experts, three fp32 matrices
# of router logits and scores (below 1 % all together)
FULL = ATTN + BF16 * T * D + BF16 * T * 2 * D + BF16 * R * D + MOE + 3 * FP32 * T * 256
SAVED = {"recompute=norm": NORM, "recompute=moe_act": MOE_ACT, "recompute=mla_up": MLA_UP, "recompute=attn": ATTN,
         "recompute=moe": MOE, "recompute=full": FULL, "recompute=norm,moe_act,mla_up": NORM + MOE_ACT + MLA_UP}
SAVED_DENSE = {"recompute=mlp": MLP}


def test_each_choice_saves_what_a_hand_count_says(tmp_path):
    found = tmp_path / "found.json"
    done = subprocess.run([sys.executable, "bench.py", "memory", "config/deepseek_v3.py", "--capacity_factor=1",
                           f"--json={found}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = {(row["block"], row["choice"]): row for row in json.loads(found.read_text())}
    for block, by_hand in (("MoE", SAVED), ("dense", SAVED_DENSE)):
        for choice, size in by_hand.items():
            assert rows[block, choice]["saved MB"] == pytest.approx(size / 1e6, rel=0.02), choice
    none, full = (rows["MoE", choice]["kept MB"] for choice in ("keep everything", "recompute=full"))
    assert full < 0.002 * none, "the plan of an exchange is all there is beside the stream"
    # what an offloaded part saves, arguments and results included, is on the host and nowhere else
    attn = rows["MoE", "offload=attn"]
    assert attn["host MB"] == attn["saved MB"] == pytest.approx((ATTN + BF16 * T * D) / 1e6, rel=0.02)


# ---- measuring ----


def test_storages_are_counted_once_while_they_live():
    cpu, weights = torch.device("cpu"), torch.ones(1000)
    with memory.Watch(cpu, weights=[weights, weights.view(10, 100)], nothing=[]) as watch:
        a = weights[:500] * 2           # 500 fp32
        views = a.view(5, 100), a[3:]
        weights.add_(1)
        with memory.within("one"), memory.within("two"):
            b = torch.ones(300)
        total = watch.total
        del a
        with memory.within(memory.HOST):
            away = b.clone()
        assert watch.total == total == 800 * 4
        del views, b
        c = torch.ones(100)
    assert watch.apart == {"weights": 4000, "nothing": 0}
    assert watch.total == 400 and watch.peak == 3200 and watch.totals[memory.HOST] == away.nbytes == 1200
    assert watch.at_peak == {("elsewhere", "mul"): 2000, ("one/two", "ones"): 1200}
    assert watch.most["one/two"] == 1200 and watch.totals["one/two"] == 0 and len(c) == 100
    lines = list(watch.table())
    assert lines[1].split() == ["elsewhere", "0.0", "0.0"] and lines[-1].split()[-1] == "0.0"


def watched_step(knobs, world):
    """→ what one step prints, and what it still holds when it is over."""
    import train
    trainer = train.Trainer(config(**knobs), world)
    log, said = train.Log(trainer), []
    log.print = lambda *lines: said.extend(lines)
    with memory.Watch(trainer.device, **trainer.optimizer.held()) as watch:
        trainer.forward_backward(list(trainer.batches(0)))
        trainer.optimizer.zero_grad()   # lets go of the sums over ranks that are under way
    log.memory(watch)
    gc.collect()
    return said, watch.total, watch.peak


def test_the_report_names_parts_and_loses_nothing(pool, tokens):
    knobs = dict(SMALL, data=tokens, out_dir=f"{tokens}/out", seq_len=64, ep=2, optimizer="adamw",
                 capacity_factor=1.0)
    plain, less = (pool.run(2, watched_step, dict(knobs, recompute=r), 2) for r in ((), (*CHEAP, "attn", "moe")))
    for said, left, peak in (*plain, *less):
        assert said == plain[0][0] or said == less[0][0]        # the same on all ranks
        assert left < 0.02 * peak, "what is left are counts and losses"
    rows = {line.split()[0]: line for line in plain[0][0]}
    assert rows.keys() > {"memory", "forward", "forward/attn", "forward/attn/mla_up", "forward/norm", "exchange",
                          "forward/moe", "forward/moe/moe_act", "backward", "weight", "elsewhere", "all"}
    assert "recompute" not in "".join(plain[0][0])
    assert "backward/recompute/attn/mla_up" not in rows and any(
        line.split()[0].startswith("backward/recompute/") for line in less[0][0])
    assert all(a[2] > b[2] for a, b in zip(plain, less)), "less at the peak"


# ---- optimizer state and gradients in bf16, or on the host ----


def test_chance_rounds_to_the_right_mean():
    import optim
    count = 2**18
    for updates in (1.0, 1000.0):
        dice = optim.dice(count, torch.tensor(updates))
        assert dice.min() >= 0 and dice.max() < 2**16 and len(dice.unique()) > 60_000
        for value in (1 + 0.3 * 2**-7, -(1 + 0.9 * 2**-7), 3.1e-9):
            x = torch.full((count,), value)
            y = optim.round_at_random(x, dice)
            assert y.dtype == torch.bfloat16 and len(y.unique()) == 2
            assert y.double().mean().item() == pytest.approx(value, rel=1e-4)
        exact = torch.randn(count).bfloat16()
        assert torch.equal(optim.round_at_random(exact.float(), dice), exact)
    assert not torch.equal(dice, optim.dice(count, torch.tensor(1001.0)))


def averages_that_fall(knobs):
    """Squares of gradients averaged to 1, then gradients of zero: how far their average falls in 50 steps."""
    import train
    trainer = train.Trainer(config(**knobs), 1)
    for family in trainer.optimizer.families:
        family.moments["exp_avg_sq"].fill_(1)
        family.master.grad = torch.zeros_like(family.master)
    for _ in range(50):
        trainer.optimizer.step(0.0, torch.tensor(1.0), torch.tensor(False))
    moments = [m for f in trainer.optimizer.families for m in f.moments.values()]
    return [f.moments["exp_avg_sq"].double().mean().item() for f in trainer.optimizer.families], {
        (m.dtype, m.nbytes // len(m)) for m in moments}


def test_an_average_of_squares_forgets_in_bf16_too(pool, tokens):
    knobs = dict(data=tokens, n_layer=1, optimizer="adamw", beta2=0.999, moment_dtype="bf16")
    means, kinds = pool.run(1, averages_that_fall, knobs)[0]
    assert kinds == {(torch.bfloat16, 2)}
    assert means == pytest.approx([0.999**50] * len(means), rel=0.005)


def losses_and_parameters(variants, world):
    import optim
    import train
    results = []
    for knobs in variants:
        with replaced(optim, "BLOCK", {"cpu": 1024}):   # several blocks per shard
            trainer = train.Trainer(config(**knobs), world)
            dtypes = {(".router." in name, p.grad.dtype) for name, p in trainer.model.named_parameters()}
            first = gradients_of(trainer)
            losses = [trainer.step(step).read()[0] for step in range(8)]
        results.append((losses, [f.flat.clone() for f in trainer.optimizer.families], dtypes, first))
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_narrow_averages_and_gradients_learn_alike(pool, tokens, world):
    base = dict(data=tokens, n_layer=2, ep=world, optimizer="adamw", lr=1e-2, beta2=0.99, micro_batch=2)
    variants = [base, dict(base, offload_optimizer=True), dict(base, moment_dtype="bf16"),
                dict(base, moment_dtype="bf16", offload_optimizer=True), dict(base, grad_dtype="bf16")]
    for results in pool.run(world, losses_and_parameters, variants, world):
        (losses, flats, _, exact), *others = results
        offloaded, narrow, both, rounded = others
        assert losses == offloaded[0] and all(map(torch.equal, flats, offloaded[1]))
        assert narrow[0] == both[0] and all(map(torch.equal, narrow[1], both[1]))
        assert losses != narrow[0] == pytest.approx(losses, rel=2e-3)
        assert losses != rounded[0] == pytest.approx(losses, rel=2e-3)
        assert rounded[2] == {(False, torch.bfloat16), (True, torch.float32)}
        for name, grad in exact["grads"].items():
            error = (grad - rounded[3]["grads"][name]).norm() / grad.norm()
            assert error < 0.01 and (error > 1e-4 or ".router." in name), name


def save_and_load(knobs, then, out_dir, world):
    """→ averages saved under `knobs` and as found under `then`, each [(name, shards)]."""
    import checkpoint
    import train
    found = []
    for settings in (knobs, then):
        trainer = train.Trainer(config(out_dir=out_dir, **settings), world)
        if found:
            folder, state, _ = checkpoint.choose("auto", out_dir, trainer.layout.world)
            checkpoint.load(folder, state, trainer.model, trainer.optimizer, trainer.layout)
        else:
            trainer.step(0), trainer.step(1), trainer.save(2)
        assert trainer.optimizer.updates == 2
        found.append([m.clone() for f in trainer.optimizer.families for m in f.moments.values()])
    return found


@pytest.mark.parametrize("now, then", [("fp32", "bf16"), ("bf16", "fp32")])
def test_averages_load_in_another_precision(pool, tokens, tmp_path, now, then):
    base = dict(data=tokens, n_layer=2, ep=2, optimizer="adamw", lr=1e-2)
    knobs = [dict(base, moment_dtype=dtype) for dtype in (now, then)]
    for saved, found in pool.run(2, save_and_load, *knobs, f"{tmp_path}/out", 2):
        for a, b in zip(saved, found, strict=True):
            assert a.dtype != b.dtype and a.any() and torch.equal(a.to(b.dtype), b)


# ---- what is refused ----


@pytest.mark.parametrize("words, said", [
    (["--recompute=mla_up"], "recompute=mla_up: mla_up is of attention=mla: leave it out"),
    (["--offload=attn,mla_up"], "offload=attn,mla_up: mla_up is of attention=mla: leave it out"),
    (["--offload=full"], "--offload takes any of norm, moe_act, mla_up, attn, mlp, moe, separated by commas, "
     "not 'full'"),
    (["--moment_dtype=fp16"], "--moment_dtype takes one of fp32, bf16, not 'fp16'"),
])
def test_bad_choices_are_refused_in_a_line(tokens, words, said, capsys):
    import train
    with pytest.raises(SystemExit) as end:
        train.load(train.Config, [f"--data={tokens}", *words], lambda cfg: train.check(cfg, 1))
    assert end.value.code == 2 and capsys.readouterr().err == f"error: {said}\n"
