"""The command line: what a run writes, and what bad input says before anything is built."""

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import harness
import numpy as np
import pytest
import train
from settings import load

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--n_layer=2", "--n_dense_layers=1", "--d_model=32", "--n_head=2", "--d_ff=48", "--d_expert=16",
         "--seq_len=16", "--global_batch=8", "--max_steps=5", "--n_shared_experts=1", "--device=cpu"]
KEYS = {"step", "tokens", "loss", "aux_loss", "z_loss", "lr", "grad_norm", "tokens_per_s", "tflops_per_gpu", "mfu",
        "drop_fraction", "load_imbalance", "a2a_share", "gemm_efficiency", "memory_gb", "step_s"}


def run(folder, ranks, *args):
    """train.py as a user starts it; → (finished process, rows of metrics.jsonl)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    start = [sys.executable] if ranks == 1 else [
        sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    done = subprocess.run([*start, str(ROOT / "train.py"), *SMALL, *args, "--out_dir=out"], cwd=folder,
                          capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done, [json.loads(line) for line in open(folder / "out" / "metrics.jsonl")]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Bytes to train on, of which a run can print a sample."""
    ids = np.frombuffer((ROOT / "parallel.py").read_bytes(), dtype=np.uint8)
    return harness.write_tokens(tmp_path_factory.mktemp("text"), ids, vocab_size=256)


def test_one_process_and_four_ranks_write_the_same_loss(tmp_path, text):
    knobs = [f"--data={text}", "--optimizer=sgd", "--lr=0.1", "--capacity_factor=0", "--aux_loss_coef=0",
             "--eval_interval=2", "--eval_steps=2", "--memory_report"]
    rows = []
    layouts = (1, 1, []), (4, 2, ["--pp=2", "--ep=2", "--micro_batch=1"]), (4, 1, ["--tp=2", "--cp=2", "--ep=4"])
    for i, (ranks, pp, more) in enumerate(layouts):
        (tmp_path / str(i)).mkdir()
        done, written = run(tmp_path / str(i), ranks, *knobs, *more)
        rows.append(written)
        assert ("stage 1: layers 1, at most 2 microbatches in flight" in done.stdout) == (pp == 2)
        traffic = done.stdout.split("traffic per step")[1].split("step 1/")[0]
        assert ("\n  pp forward  " in traffic) == (pp == 2) and "\n  pp  " not in traffic
        assert done.stdout.count("memory of the first step") == done.stdout.count("\n  forward/attn ") == 1
        for word in (f"experts: pp {pp}", "parameters 43,424", "traffic per step", "step 5/5",
                     "expert utilization", "sample:"):
            assert word in done.stdout, (ranks, word, done.stdout)
    assert [[r["step"] for r in run_] for run_ in rows] == [[1, 2, 3, 4, 5]] * len(layouts)
    for one, four in [pair for other in rows[1:] for pair in zip(rows[0], other)]:
        assert KEYS <= one.keys() == four.keys()
        assert four["tokens"] == one["tokens"] == one["step"] * 8 * 16
        for key in ("loss", "grad_norm", "val_loss"):
            assert math.isclose(one.get(key, 0), four.get(key, 0), rel_tol=1e-5), (key, one, four)
        assert four["drop_fraction"] == 0 and four["load_imbalance"] == pytest.approx(one["load_imbalance"])
        assert all(v is None or math.isfinite(v) for v in four.values())
        assert four["a2a_share"] > 0 == one["a2a_share"]
    assert ["val_loss" in r for r in rows[0]] == [False, True, False, True, True]
    assert rows[0][-1]["val_loss"] < rows[0][1]["val_loss"]


def test_help_names_every_knob_by_file():
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for name in ("kernels.py", "parallel.py", "dispatch.py", "moe.py", "model.py", "optim.py", "train.py",
                 "capacity_factor", "aux_loss_scope", "eval_interval"):
        assert name in done.stdout


BAD = [
    (["--capcity_factor=1"], 1, ["capcity_factor", "capacity_factor"]),
    (["--tp=two"], 1, ["tp", "two", "int"]),
    (["--cp=3", "--seq_len=12"], 4, ["tp*cp = 1*3 = 3", "4 ranks"]),
    (["--tp=2", "--cp=4", "--n_head=4"], 4, ["tp*cp = 2*4 = 8", "4 ranks"]),
    (["--etp=3", "--d_expert=48"], 4, ["etp*ep = 3", "4 ranks"]),
    (["--etp=4", "--d_expert=6"], 4, ["etp=4", "d_expert=6"]),
    (["--tp=4", "--n_head=2"], 4, ["tp=4", "n_head=2"]),
    (["--tp=2", "--n_head=6", "--d_head=8", "--n_kv_head=3"], 4, ["tp=2", "n_kv_head=3"]),
    (["--tp=4", "--n_dense_layers=1", "--d_ff=6"], 4, ["tp=4", "d_ff=6"]),
    (["--tp=4", "--vocab_size=66"], 4, ["tp=4", "vocab_size=66"]),
    (["--cp=4", "--seq_len=12"], 4, ["seq_len=12", "2*cp = 2*4 = 8"]),
    (["--tp=4", "--seq_len=18"], 4, ["tp=4", "18"]),
    (["--tp=4", "--num_experts=8", "--ep=2", "--etp=4"], 4, ["etp*ep = 4*2 = 8", "4 ranks"]),
    (["--pp=3"], 4, ["pp=3", "4 ranks", "set pp to 1, 2 or 4"]),
    (["--pp=2", "--ep=4"], 4, ["etp*ep = 1*4 = 4", "2 ranks of a pipeline stage", "set ep to 1 or 2"]),
    (["--pp=4", "--n_layer=3"], 4, ["pp*vpp = 4*1 = 4", "n_layer=3"]),
    (["--pp=2", "--vpp=4", "--micro_batch=1"], 4, ["pp*vpp = 2*4 = 8", "n_layer=4"]),
    (["--pp=2", "--pp_layout=1,1,2"], 4, ["pp_layout=1,1,2", "3 stages", "pp*vpp = 2*1 = 2"]),
    (["--pp=2", "--pp_layout=1,2"], 4, ["pp_layout=1,2", "3 layers", "n_layer=4"]),
    (["--pp=2", "--pp_layout=0,4"], 4, ["pp_layout", "'0,4'", "at least 1"]),
    (["--vpp=2"], 4, ["vpp=2", "pp=1"]),
    (["--pp=2", "--vpp=2"], 4, ["vpp=2", "pp=2", "has 1"]),
    (["--pp=4", "--vpp=2", "--n_layer=8", "--micro_batch=1", "--global_batch=6"], 4, ["vpp=2", "pp=4", "has 6"]),
    (["--pp=2", "--global_batch=5"], 4, ["global_batch=5", "dp*micro_batch = 2*1 = 2"]),
    (["--ep=3"], 4, ["etp*ep = 1*3 = 3", "4 ranks", "set ep to 1, 2 or 4"]),
    (["--ep=4", "--num_experts=6"], 4, ["ep=4", "num_experts=6"]),
    (["--top_k=9"], 1, ["top_k=9", "num_experts=8"]),
    (["--top_k=1"], 1, ["top_k=1", "norm_topk"]),
    (["--n_groups=3"], 1, ["n_groups=3", "num_experts=8"]),
    (["--n_groups=4", "--topk_groups=1", "--top_k=3"], 1, ["top_k=3", "topk_groups=1"]),
    (["--seq_len=9999"], 1, ["seq_len", "9999"]),
    (["--vocab_size=10"], 1, ["vocab_size=10", "64"]),
    (["--data=nowhere"], 1, ["data=nowhere"]),
    (["--global_batch=6"], 4, ["global_batch=6", "4"]),
    (["--global_batch=8", "--micro_batch=3"], 1, ["global_batch=8", "micro_batch", "3"]),
    (["--n_head=3"], 1, ["n_head=3", "d_model=256"]),
    (["--n_kv_head=3"], 1, ["n_kv_head=3", "n_head=4"]),
    (["--min_lr=1"], 1, ["min_lr=1", "lr"]),
    (["--recompute=all"], 1, ["recompute", "all", "moe"]),
    (["--device=cuda"], 1, ["device=cuda"]),
]


@pytest.mark.parametrize("args, world, words", BAD, ids=[" ".join(args) for args, _, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(args, world, words, tokens, capsys, monkeypatch):
    for rank in range(world):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit) as exit:
            load(train.Config, [f"--data={tokens}", "--seq_len=16", *args], lambda cfg: train.check(cfg, world))
        assert exit.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (rank == 0), lines
        assert rank or all(word in lines[0] for word in words), lines


def test_all_problems_at_once(tokens, capsys):
    with pytest.raises(SystemExit):
        load(train.Config, [f"--data={tokens}", "--seq_len=16", "--top_k=9", "--ep=3", "--n_head=3", "--typo=1"],
             lambda cfg: train.check(cfg, 4))
    assert len(capsys.readouterr().err.splitlines()) == 4
    with pytest.raises(SystemExit):     # all that is wrong with one knob, too
        load(train.Config, [f"--data={tokens}", "--seq_len=16", "--tp=3"], lambda cfg: train.check(cfg, 4))
    error = capsys.readouterr().err
    for words in ("tp*cp = 3*1 = 3", "n_head=4", "vocabulary of 64"):
        assert words in error


def past_the_end(knobs, world):
    trainer = train.Trainer(harness.config(**knobs), world)
    return harness.losses_of(trainer, 6)


def test_ranks_run_out_of_data_together(pool, tmp_path):
    """10 windows, 4 at a time: the third step takes the last two of one epoch and the first two of the next."""
    data = harness.write_tokens(tmp_path / "few", np.random.RandomState(1).randint(0, 64, 16 * 10 + 1))
    knobs = dict(data=data, global_batch=4, max_steps=6)
    one = pool.run(1, past_the_end, knobs, 1)[0]
    for four in pool.run(4, past_the_end, knobs, 4):
        assert len(four) == 6 and np.allclose(four, one, rtol=1e-5)
