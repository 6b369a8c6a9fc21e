"""What a job asks of torch and of the machine: of GPUs, checked where there are none, and of cores."""

import datetime
import os
import threading
import time
import types

import harness
import kernels
import parallel
import pytest
import torch
import torch.distributed as dist
from harness import replaced


def test_a_job_on_gpus_has_a_back_end_for_what_lies_on_the_host(monkeypatch):
    """Rows of the log, verdicts and checkpoints' words are on the host, of which NCCL knows nothing. All other groups
    are NCCL's, with the knob's timeout, on streams whose messages go before products."""
    asked, made = [], []
    options = lambda is_high_priority_stream: types.SimpleNamespace(high=is_high_priority_stream,
                                                                    config=types.SimpleNamespace(max_ctas=None))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **how: asked.append((backend, how["timeout"])))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", types.SimpleNamespace(Options=options), raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, **how: made.append((ranks, how)))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(parallel, "_groups", {})
    monkeypatch.setattr(kernels.backend, "comm_sms", 12)
    monkeypatch.setenv("RANK", "0")
    parallel.init(torch.device("cuda"), 70)
    parallel.process_group.cache_clear()
    try:
        for traffic in ("", "exchange", "parameters", "forward"):
            parallel.process_group((0, 1, 2, 3), traffic)
        parallel.process_group((0, 2))
    finally:
        parallel.process_group.cache_clear()
    limit = datetime.timedelta(seconds=70)
    assert asked == [("cpu:gloo,cuda:nccl", limit)]
    assert [ranks for ranks, _ in made] == 3 * [[0, 1, 2, 3]] + [[0, 2]]   # the first was the world itself
    assert [how["pg_options"].config.max_ctas for _, how in made] == [12, 12, 3, None]
    for _, how in made:
        assert how["backend"] == "nccl" and how["timeout"] == how["pg_options"]._timeout == limit
        assert how["pg_options"].high
    assert made[0][1]["pg_options"] is not made[1][1]["pg_options"]     # torch writes the group's name into them


def test_ranks_that_share_cores_stay_on_one_each(monkeypatch):
    pinned = []
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **how: None)
    monkeypatch.setattr(parallel, "_groups", {})
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "sched_setscheduler", lambda *_: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 3})     # of those that this job may use
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: pinned.append(cores))
    for ranks in (4, 2):
        for rank in range(ranks):
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            parallel.init(torch.device("cpu"))
    assert pinned == [{3}, {5}, {3}, {5}]       # two ranks have a core each, and need nothing


@pytest.mark.parametrize("name, domain", [("NVIDIA GB200", 64), ("NVIDIA GB300", 64), ("NVIDIA H100 80GB HBM3", 8),
                                          ("NVIDIA GH200 480GB", 8), ("NVIDIA B200", 8)])
def test_only_racks_are_nvlink_domains_beyond_the_node(monkeypatch, name, domain):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert parallel.nvl_domain(harness.config()) == domain


def unnoticed_gathers(knobs, world):
    """For each step, whether low precision would take each parameter for changed; gathers leave no trace in versions,
    as NCCL's do not."""
    import train

    def start_all_gather(self, x, out=None):
        return plain(self, x, None if out is None else out.data)

    trainer, plain = train.Trainer(harness.config(**knobs), world), parallel.Group.start_all_gather
    adapter, changed = kernels.TransformerEngine.__new__(kernels.TransformerEngine), []
    adapter.versions = {}
    with replaced(parallel.Group, "start_all_gather", start_all_gather):
        for step in range(3):
            trainer.forward_backward(list(trainer.batches(step)))
            asked = [[adapter.is_first(p) for p in trainer.model.parameters()] for _ in range(2)]
            changed.append([all(asked[0]), any(asked[1])])
            trainer.optimizer.step(0.1, trainer.optimizer.reduce(), torch.tensor(False))
    return changed


def test_weights_that_arrive_unnoticed_are_rounded_again(pool, tokens):
    for changed in pool.run(2, unnoticed_gathers, dict(data=tokens, precision="bf16", n_layer=2), 2):
        assert changed == 3 * [[True, False]]


def multiprocessors(knobs, world):
    import train
    train.Trainer(harness.config(**knobs), world)
    return kernels.backend.comm_sms


def test_only_who_exchanges_leaves_multiprocessors_free(pool, tokens):
    for knobs, left in ({}, 16), (dict(comm_sms=4), 4):
        assert pool.run(2, multiprocessors, dict(data=tokens, **knobs), 2) == 2 * [left]
    with replaced(kernels, "backend", kernels.Backend(comm_sms=4)):     # (this process has no job)
        kernels.use(harness.config(), torch.device("cpu"))
        assert kernels.backend.comm_sms == 0


def test_a_failure_is_seen_while_the_store_is_waited_for(monkeypatch):
    """NCCL makes a communicator by waiting for a key, and its store lets nobody else in meanwhile."""
    import train
    monkeypatch.setattr(train.Watch, "leave", lambda self, why: left.append((time.monotonic(), why)))
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client, left = dist.TCPStore("127.0.0.1", server.port, timeout=datetime.timedelta(seconds=6)), []
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: client)

    def wait():
        with pytest.raises(dist.DistStoreError):
            client.get("never")

    with train.Watch(1, 600, torch.device("cpu")):
        started, waiting = time.monotonic(), threading.Thread(target=wait)
        waiting.start()
        server.set("failed", "rank 3")
        waiting.join()
    assert "rank 3 failed" in left[0][1] and left[0][0] - started < 4


def clocks(knobs, world):
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    trainer.step(0)
    trainer.evaluate()
    after = kernels.clock.take(), parallel.ledger.take()
    result = trainer.step(1)
    first = train.Clock.mark(trainer.device)
    second = result.since(first)
    return after, second is result.end, result.spans["step"] == [(first, second)]


def test_an_evaluation_is_no_part_of_the_next_step(pool, tokens):
    for (spans, ledger), ends, span in pool.run(2, clocks, dict(data=tokens, eval_steps=1), 2):
        assert not spans and not ledger and ends and span
