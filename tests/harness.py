"""What the tests share: a pool of ranks started once, small models, runs whose every gradient can be compared.

The reference, REF, is one process, fp32, the same weights and global batch. Functions below that take a
`world` run on every rank of a sub-world of the pool.
"""

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from multiprocessing.connection import wait
from random import Random

import numpy as np
import torch

RANKS = 8

SMALL = dict(vocab_size=64, n_layer=3, n_dense_layers=1, d_model=32, d_ff=48, n_head=4, n_kv_head=2, qk_norm="head",
             seq_len=16, num_experts=8, top_k=2, d_expert=16, n_shared_experts=1, global_batch=12, micro_batch=1,
             capacity_factor=0.0, aux_loss_coef=0.0, optimizer="sgd", lr=0.1, min_lr=0.1, warmup_steps=0,
             decay="constant", device="cpu", max_steps=5, eval_steps=0)


# ---- the pool ----


class Pool:
    """Processes joined in one gloo job. `run(world, fn, *args, **kwargs)` calls fn on the first `world` of
    them and returns the results in rank order. A failure shows the traceback of the rank that failed."""

    def __init__(self, ranks=RANKS):
        self.ranks, self.workers = ranks, []

    def _start(self):
        spawn = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        for rank in range(self.ranks):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, self.ranks, f"{folder}/store", theirs), daemon=True)
            process.start()
            self.workers.append((process, mine))

    def run(self, world, fn, *args, timeout=120, **kwargs):
        if not self.workers:
            self._start()
        job = pickle.dumps(functools.partial(fn, *args, **kwargs))
        for _, pipe in self.workers[:world]:
            pipe.send_bytes(job)
        results, failures = {}, []
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self.workers[:world])}
        while waiting:
            # once a rank failed, the others may wait for it for ever
            ready = wait(waiting, 5 if failures else timeout)
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ok, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    ok, value = False, "died"
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}:\n{value}")
            if not ready:
                failures += [f"rank {rank}: no answer" for rank in waiting.values()]
                break
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [results[rank] for rank in range(world)]

    def close(self):
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []


def _serve(rank, ranks, store, pipe):
    import memory
    torch.set_num_threads(1)
    memory.keep_freed()     # both as in parallel.init, where ranks share cores
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # torch names a group by its ranks and by how many groups this rank has made before. In one job all ranks
    # make equally many; here the ranks of a small world make more than the others, so only groups of the same
    # ranks are counted.
    c10d = torch.distributed.distributed_c10d

    def name(ranks):
        ranks = "ranks_" + "_".join(map(str, ranks)) + ":"
        return ranks + str(sum(other.startswith(ranks) for other in c10d._world.pg_names.values()))

    c10d._hash_ranks_to_str = name
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    while True:
        job = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, job())
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(answer))


# ---- data and configuration ----


def write_tokens(folder, train, val=None, vocab_size=64):
    folder.mkdir(parents=True, exist_ok=True)
    for name, ids in (("train", train), ("val", train if val is None else val)):
        np.asarray(ids, dtype=np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.json").write_text(json.dumps({"vocab_size": vocab_size, "dtype": "uint16", "tokenizer": "bytes"}))
    return str(folder)


def config(**knobs):
    import train
    return train.Config(**{**SMALL, **knobs})


class Alone:
    """A group of one, without a job."""
    size, rank = 1, 0
    all_gather = reduce_scatter = staticmethod(lambda x: x)
    start_all_gather = start_reduce_scatter = staticmethod(lambda x: (x, Alone))
    wait = staticmethod(lambda: None)


# ---- what happens on a rank ----


@contextlib.contextmanager
def replaced(owner, name, value):
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


@contextlib.contextmanager
def ragged(change=None):
    """Data whose sequences have different numbers of valid tokens: some labels are ignored, some tails are
    padding. `change(tokens, labels, windows)` edits them in place instead."""
    import data
    plain = data.batch

    def batch(tokens, windows, seq_len):
        t, y = plain(tokens, windows, seq_len)
        if change:
            change(t, y, windows)
        else:
            for row, w in enumerate(windows):
                y[row, :w % 5] = -100
                t[row, seq_len - w % 7:] = -1
        return t, y

    with replaced(data, "batch", batch):
        yield


def data_as(uneven):
    """False: full sequences; True: ragged ones; a function: what it makes of them."""
    return ragged(uneven if callable(uneven) else None) if uneven else contextlib.nullcontext()


def gradients_of(trainer, step=0):
    """One forward and backward: loss, grad norm and every whole gradient, on every rank."""
    import optim
    loss, valid = trainer.forward_backward(list(trainer.batches(step)))
    norm = trainer.optimizer.reduce()
    loss, *mtp = trainer.layout.world.all_reduce((loss / valid).double()).tolist()
    return {"loss": loss, "mtp": mtp, "norm": norm.item(),
            "grads": optim.full_gradients(trainer.model, trainer.optimizer)}


def losses_of(trainer, steps):
    rows = [trainer.step(step).read() for step in range(steps)]
    return [row[0] for row in rows]


def run_layout(knobs, world, steps=5, uneven=True, prepare=None):
    """The gradients of the first step and the losses of `steps` SGD steps under a layout."""
    import train
    with data_as(uneven):
        trainer = train.Trainer(config(**knobs), world)
        if prepare:
            prepare(trainer)
        result = gradients_of(trainer)
        result["losses"] = losses_of(trainer, steps)
    return result


def run_layouts(variants, world, **how):
    """run_layout for several sets of knobs in one go."""
    return [run_layout(knobs, world, **how) for knobs in variants]


def log_rows(knobs, world, steps=1, uneven=False, prepare=None):
    """What the log writes about the first steps, a row each. Every step is said to take a second, and the peak
    to be 1 TFLOPS."""
    import train
    with data_as(uneven), replaced(train, "peak_flops", lambda *_: 1e12):
        trainer = train.Trainer(config(**knobs), world)
        if prepare:
            prepare(trainer)
        log = train.Log(trainer)
        for step in range(steps):
            result = trainer.step(step)
            result.spans["step"] = [(0.0, 1.0)]
            log.step(result)
    return log.history


def assert_equals(ref, got, tolerance=1e-5, what=""):
    """Loss, norm, losses, and every gradient by its norm; a gradient that is exactly zero must be so."""
    assert ref["grads"].keys() == got["grads"].keys()
    close = lambda a, b: abs(a - b) <= tolerance * max(abs(a), 1e-30)
    assert close(ref["loss"], got["loss"]), (what, ref["loss"], got["loss"])
    assert close(ref["norm"], got["norm"]), (what, ref["norm"], got["norm"])
    for name, a in ref["grads"].items():
        b = got["grads"][name]
        assert a.shape == b.shape, (what, name, a.shape, b.shape)
        assert b.isfinite().all(), (what, name)
        error = (a - b).norm() / a.norm() if a.norm() > 0 else b.norm()
        assert error <= tolerance, (what, name, error.item())
    for key in ("losses", "mtp"):
        for i, (a, b) in enumerate(itertools.zip_longest(ref.get(key, []), got.get(key, []))):
            assert close(a, b), (what, key, i, a, b)


def bit_equal(a, b):
    return (a["loss"], a["norm"], a.get("losses")) == (b["loss"], b["norm"], b.get("losses")) and all(
        torch.equal(a["grads"][name], b["grads"][name]) for name in a["grads"])


# ---- routers that do as they are told ----


def force_router(trainer, table):
    """Every MoE layer sends token id v to the experts table[v]; gradients still flow through the weights."""
    def told(layer, plain):
        def forward(x_TD, h_TD, batch, plan=None):
            # the layer routes before it first yields, so no other microbatch can come between these two lines
            layer.router.choose = lambda scores_TE: table[batch.tokens_T.clamp_min(0)]
            return (yield from plain(x_TD, h_TD, batch, plan))
        return forward

    for layer in trainer.model.moes.values():
        layer.forward = told(layer, layer.forward)


def route_table(preset, num_experts=8, top_k=2, ranks=4, vocab_size=64):
    """[V, K] for force_router. "one expert empty" and "one rank empty" leave out the last of them."""
    if preset == "all to one":
        return torch.arange(top_k).expand(vocab_size, top_k)
    used = {"balanced": num_experts, "one expert empty": num_experts - 1,
            "one rank empty": num_experts - num_experts // ranks}[preset]
    return (torch.arange(vocab_size)[:, None] + torch.arange(top_k)) % used


def forced(preset, **sizes):
    """A `prepare` for run_layout and log_rows."""
    return functools.partial(force_router, table=route_table(preset, **sizes))


@torch.no_grad()
def all_ties(trainer):
    """Every expert scores the same for every token."""
    for layer in trainer.model.moes.values():
        layer.router.weight.zero_()
    trainer.optimizer.start()


def low_bias(trainer):
    """Score plus bias is negative everywhere."""
    for layer in trainer.model.moes.values():
        layer.router.bias_E.fill_(-2)


def watch_routing(trainer):
    """→ a list that gets {layer, batch, replay, experts, weights, scores, logits} whenever a layer routes."""
    seen, batches = [], {}

    def watched(number, layer, plain):
        def forward(x_TD, h_TD, batch, plan=None):
            replay = (number, id(batch)) in batches
            batches[number, id(batch)] = batch
            route = type(layer.router).forward

            def router(*args):
                experts, weights, scores, logits = out = route(layer.router, *args)
                seen.append(dict(layer=number, batch=batch, replay=replay, experts=experts, weights=weights.detach(),
                                 scores=scores.detach(), logits=logits.detach()))
                return out

            layer.router.forward = router
            return (yield from plain(x_TD, h_TD, batch, plan))
        return forward

    for number, layer in trainer.model.moes.items():
        layer.forward = watched(number, layer, layer.forward)
    return seen


# ---- unkind machinery ----


@contextlib.contextmanager
def poisoned():
    """Memory that nobody wrote holds NaN, and so do the rows that a grouped GEMM does not compute."""
    import kernels
    import train  # noqa: F401  (what modules make when they are imported stays as it is)

    def fill(t):
        return t.fill_(torch.nan) if t.is_floating_point() else t

    with contextlib.ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            filled = lambda *args, plain=getattr(owner, name), **kwargs: fill(plain(*args, **kwargs))
            stack.enter_context(replaced(owner, name, filled))
        plain_mm = kernels.grouped_mm

        def grouped_mm(a, b, ends_L):
            y = plain_mm(a, b, ends_L)
            if b.ndim == 3:
                y[ends_L[-1]:] = torch.nan
            return y

        stack.enter_context(replaced(kernels, "grouped_mm", grouped_mm))
        yield


class _Late:
    def __init__(self, x, launch, random, out):
        self.x, self.copy, self.random, self.done = x, x.clone(), random, False
        self.hidden, self.work = launch(self.copy)
        self.within = out is not None   # what is sent may be a part of what arrives, and is NaN too
        self.out = torch.empty_like(self.hidden) if out is None else out
        # bytes are e4m3 numbers, and 255 of them NaN
        self.out.fill_(torch.nan if x.is_floating_point() else 255 if x.dtype == torch.uint8 else -1)

    @torch.no_grad()
    def wait(self):
        time.sleep(self.random.random() * 2e-3)
        self.work.wait()
        assert self.within or torch.equal(*(t.nan_to_num() for t in (self.x, self.copy))), "changed while it travelled"
        if not self.done:
            self.out.copy_(self.hidden)
        self.done = True

    def is_completed(self):
        return self.random.random() < 0.5   # whoever asks must not care


@contextlib.contextmanager
def late_exchanges():
    """What an all-to-all, all-gather or reduce-scatter delivers is NaN until its wait() returns, launches and waits
    take a random time, and what was sent may not change before. → the list of what was launched; all of it must
    have been awaited."""
    import parallel
    random, launched = Random(torch.distributed.get_rank()), []

    def late(plain):
        @torch.no_grad()
        def start(self, x, *sizes, out=None):
            if self.size == 1:
                return plain(self, x, *sizes)
            time.sleep(random.random() * 2e-3)
            launched.append(_Late(x, lambda copy: plain(self, copy, *sizes), random, out))
            return launched[-1].out, launched[-1]
        return start

    with contextlib.ExitStack() as stack:
        for name in ("all_to_all", "start_all_gather", "start_reduce_scatter"):
            stack.enter_context(replaced(parallel.Group, name, late(getattr(parallel.Group, name))))
        yield launched
    assert all(work.done for work in launched), "an exchange was never awaited"
