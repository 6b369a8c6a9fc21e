"""cuda_graph=true as far as a CPU allows: a double for torch's CUDA graphs notes operations and does them again. That
shows which tensors a replay reads and writes and what is put back in Python, not that CUDA can capture the step."""

import contextlib
import types

import harness
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import parallel
import train


class Recorded(TorchDispatchMode):
    """In place of torch.cuda.CUDAGraph: every operation with its tensors, in the places where they were."""

    def __init__(self):
        super().__init__()
        self.operations, self.outside, self.replays = [], set(), 0
        self.made = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out, place = func(*args, **(kwargs or {})), lambda t: t.untyped_storage().data_ptr()
        tensors = lambda tree: [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
        self.outside |= {place(t) for t in tensors([args, kwargs])} - self.made.keys()
        self.made |= {place(t): t for t in tensors(out) if place(t) not in self.outside}
        self.operations.append((func, args, kwargs or {}, tensors(out)))
        return out

    def reset(self):
        self.operations = None

    def forget(self):
        """A capture computes nothing: what it made holds no values before the first replay."""
        for *_, out in self.operations:
            for t in out:
                if t.untyped_storage().data_ptr() in self.made:
                    t.detach().fill_(torch.nan if t.is_floating_point() else 0)

    @torch.no_grad()
    def replay(self):
        self.replays += 1
        for func, args, kwargs, out in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(out, tree_leaves(again)):
                if old.data_ptr() != new.data_ptr():    # neither a view nor written in place
                    old.copy_(new)


@contextlib.contextmanager
def graphs_on_a_cpu():
    stream = types.SimpleNamespace(wait_stream=lambda other: None)

    @contextlib.contextmanager
    def graph(recorded, capture_error_mode):
        with recorded:
            yield
        with torch.no_grad():
            recorded.forget()

    with contextlib.ExitStack() as stack:
        for name, double in dict(CUDAGraph=Recorded, graph=graph, Stream=lambda: stream, current_stream=lambda: stream,
                                 stream=lambda _: contextlib.nullcontext(), synchronize=lambda: None).items():
            stack.enter_context(harness.replaced(torch.cuda, name, double))
        yield


@contextlib.contextmanager
def broken(trainer):
    """Part of the last norm is NaN."""
    weight = trainer.model.norm.weight
    with torch.no_grad():
        kept = weight[0].clone()
        weight[0] = torch.nan
        yield
        weight[0] = kept


STEPS, BROKEN = 7, 4


def some_steps(knobs, world):
    """→ (whether it was a rerun and sums for the log, per step; evaluations; parameters; replays)."""
    trainer = train.Trainer(harness.config(**knobs), world)
    steps, losses = [], []
    # sums lie elsewhere than the gradients of this rank, as they do over several ranks
    apart = harness.replaced(parallel.Group, "start_reduce_scatter", lambda _, x: (x.clone(), parallel.Done))
    with apart, graphs_on_a_cpu() if knobs.get("cuda_graph") else contextlib.nullcontext():
        for step in range(STEPS):
            with broken(trainer) if step == BROKEN else contextlib.nullcontext():
                result = trainer.step(step)
            steps.append((result.rerun, torch.tensor(result.read()).nan_to_num(-1).tolist()))
            if step in (2, 4):     # before the capture, and between replays
                losses.append(trainer.evaluate())
        graph = trainer.graph and trainer.graph.graph
        trainer.close()
        assert not graph or graph.operations is None    # it refers to no communicator
    return steps, losses, [f.flat for f in trainer.optimizer.families], trainer.graph and trainer.graph.graph.replays


@pytest.mark.parametrize("more", [
    dict(optimizer="adamw", bias_update_rate=1e-2, aux_loss_coef=0.05, aux_loss_scope="global"),
    dict(on_overflow="rerun", capacity_factor=1.6, recompute=("full",), lr=0.3),
    dict(capacity_scope="rank", overlap="none", precision="bf16", optimizer="adamw"),
], ids=["adamw", "rerun", "bf16"])
def test_replayed_steps_are_those_without_graphs(pool, tokens, more):
    knobs = dict(dict(data=tokens, global_batch=4, micro_batch=2, n_layer=2, capacity_factor=1.25, eval_steps=1), **more)
    plain, graphed = (pool.run(1, some_steps, dict(knobs, cuda_graph=on), 1)[0] for on in (False, True))
    assert graphed[:2] == plain[:2] and all(map(torch.equal, plain[2], graphed[2]))
    assert graphed[3] == STEPS - train.Graph.WARM_UP
    assert len({tuple(sums) for _, sums in plain[0]}) == STEPS, "every step is another"
    assert plain[0][BROKEN][1][0] == -1 or more.get("precision") == "bf16"     # there the master mends it at once
    reruns = [rerun for rerun, _ in plain[0][train.Graph.WARM_UP:]]
    assert set(reruns) == ({True, False} if "on_overflow" in more else {False}), reruns


def test_what_cannot_be_captured_is_refused(tokens):
    problems = train.check(harness.config(data=tokens, cuda_graph=True, capacity_factor=0.0), 1)
    assert len(problems) == 2
    assert all(word in problems[0] for word in ("cuda_graph=true", "capacity_factor=0", "dropless"))
    assert all(word in problems[1] for word in ("cuda_graph=true", "GPU", "cuda_graph=false"))
    assert train.check(harness.config(data=tokens, capacity_factor=1.25), 1) == []
