"""What the tests share: a pool of ranks started once, small models, runs whose every gradient can be compared.

The reference, REF, is one process, fp32, the same weights and global batch. Functions below that take a
`world` run on every rank of a sub-world of the pool.
"""

import contextlib
import itertools
import json
import multiprocessing
import pickle
import sys
import tempfile
import traceback

import numpy as np
import torch

RANKS = 4

SMALL = dict(vocab_size=64, n_layer=3, n_dense_layers=1, d_model=32, d_ff=48, n_head=4, n_kv_head=2, qk_norm="head",
             seq_len=16, num_experts=8, top_k=2, d_expert=16, n_shared_experts=1, global_batch=12, micro_batch=1,
             capacity_factor=0.0, aux_loss_coef=0.0, optimizer="sgd", lr=0.1, min_lr=0.1, warmup_steps=0,
             decay="constant", device="cpu", max_steps=5, eval_steps=0)


# ---- the pool ----


class Pool:
    """RANKS processes joined in one gloo job. `run(world, fn, *args)` calls fn(*args) on the first `world` of
    them and returns the results in rank order. A failure shows the traceback of the rank that failed."""

    def __init__(self):
        self.workers = []

    def _start(self):
        spawn = multiprocessing.get_context("spawn")
        folder = tempfile.mkdtemp()
        for rank in range(RANKS):
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, f"{folder}/store", theirs), daemon=True)
            process.start()
            self.workers.append((process, mine))

    def run(self, world, fn, *args, timeout=120):
        if not self.workers:
            self._start()
        job = pickle.dumps((fn, args))
        for _, pipe in self.workers[:world]:
            pipe.send_bytes(job)
        results, failures = [], []
        for rank, (_, pipe) in enumerate(self.workers[:world]):
            # once a rank failed, the others may wait for it for ever
            if pipe.poll(timeout if not failures else 5):
                ok, value = pickle.loads(pipe.recv_bytes())
                (results if ok else failures).append(value if ok else f"rank {rank}:\n{value}")
            else:
                failures.append(f"rank {rank}: no answer")
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return results

    def close(self):
        for process, _ in self.workers:
            process.kill()
            process.join()
        self.workers = []


def _serve(rank, store, pipe):
    torch.set_num_threads(1)
    # torch names a group by its ranks and by how many groups this rank has made before. In one job all ranks
    # make equally many; here the ranks of a small world make more than the others.
    torch.distributed.distributed_c10d._hash_ranks_to_str = lambda ranks: "ranks_" + "_".join(map(str, ranks))
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    while True:
        fn, args = pickle.loads(pipe.recv_bytes())
        try:
            answer = (True, fn(*args))
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


# ---- what happens on a rank ----


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

    data.batch = batch
    try:
        yield
    finally:
        data.batch = plain


def gradients_of(trainer, step=0):
    """One forward and backward: loss, grad norm and every whole gradient, on every rank."""
    import optim
    loss, valid = trainer.forward_backward(list(trainer.batches(step)))
    norm = trainer.optimizer.reduce()
    loss = trainer.layout.world.all_reduce((loss / valid).double())
    return {"loss": loss.item(), "norm": norm.item(), "grads": optim.full_gradients(trainer.model, trainer.optimizer)}


def losses_of(trainer, steps):
    rows = [trainer.step(step).read() for step in range(steps)]
    return [row[0] for row in rows]


def run_layout(knobs, world, steps=5, uneven=True, prepare=None):
    """The gradients of the first step and the losses of `steps` SGD steps under a layout."""
    import train
    with ragged() if uneven else contextlib.nullcontext():
        trainer = train.Trainer(config(**knobs), world)
        if prepare:
            prepare(trainer)
        result = gradients_of(trainer)
        result["losses"] = losses_of(trainer, steps)
    return result


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
    for i, (a, b) in enumerate(itertools.zip_longest(ref.get("losses", []), got.get("losses", []))):
        assert close(a, b), (what, f"step {i}", a, b)


def bit_equal(a, b):
    return (a["loss"], a["norm"], a.get("losses")) == (b["loss"], b["norm"], b.get("losses")) and all(
        torch.equal(a["grads"][name], b["grads"][name]) for name in a["grads"])
