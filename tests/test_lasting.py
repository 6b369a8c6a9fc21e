"""Runs that are killed, stopped, broken or repeated: nothing is lost, nothing hangs, nothing is written twice."""

import contextlib
import fcntl
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import unittest.mock
from pathlib import Path

import checkpoint
import harness
import numpy as np
import parallel
import pytest
import torch
from harness import replaced
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SMALL = ["--n_layer=2", "--n_dense_layers=1", "--d_model=32", "--n_head=2", "--d_ff=48", "--d_expert=16",
         "--seq_len=16", "--global_batch=8", "--device=cpu", "--eval_steps=0", "--out_dir=out"]

# What a test puts before train.py's main: each rank notes its process, draws a random number in every step, and
# can be told to misbehave in one.
HOOK = """
import os, sys, time
sys.path.insert(0, {root!r})
import torch, train, checkpoint
rank = int(os.environ.get("RANK", 0))
open(f"pid.{{rank}}", "w").write(str(os.getpid()))
plain = train.Trainer.step
torch.manual_seed(rank)

def step(self, n):
    with open(f"drawn.{{rank}}", "a") as file:
        print(n + 1, torch.rand(()).item(), file=file)
    time.sleep({pause})
    misbehave(self, n + 1)
    return plain(self, n)

def misbehave(trainer, n):
    pass

train.Trainer.step = step
{extra}
train.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    ids = np.frombuffer((ROOT / "parallel.py").read_bytes(), dtype=np.uint8)
    return harness.write_tokens(tmp_path_factory.mktemp("text"), ids, vocab_size=256)


def launch(folder, ranks, *args, extra="", pause=0.0):
    """Starts train.py under torchrun in `folder` as a process group of its own, with the hook before its main."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "hook.py").write_text(HOOK.format(root=str(ROOT), extra=extra, pause=pause))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "said", "w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}",
             "hook.py", *SMALL, *args], cwd=folder, stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"})


def end(job, folder, timeout=120):
    """→ exit code, everything the job said."""
    try:
        code = job.wait(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError("still running:\n" + (folder / "said").read_text()) from None
    return code, (folder / "said").read_text()


def rows_of(folder):
    path = folder / "out" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True)
            if line.endswith("\n")] if path.exists() else []


def until(condition, job, folder, timeout=120):
    deadline = time.monotonic() + timeout
    while not condition():
        assert job.poll() is None, "ended early:\n" + (folder / "said").read_text()
        assert time.monotonic() < deadline, "waited in vain:\n" + (folder / "said").read_text()
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(folder, ranks, timeout=60):
    deadline = time.monotonic() + timeout
    pids = [int((folder / f"pid.{rank}").read_text()) for rank in range(ranks)]
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "workers outlive their launcher"
        time.sleep(0.05)


def assert_same_run(whole, other, upto=None):
    """The same steps once, with the same loss and gradient norm bit by bit."""
    key = lambda row: (row["step"], row["loss"], row["grad_norm"], row["lr"], row["aux_loss"], row["tokens"])
    assert [key(row) for row in other] == [key(row) for row in whole][:upto]


def wandb_rows(folder):
    """{run id: [rows in the order they were logged]} and the configurations, from the runs' own files."""
    import train
    from wandb.proto.wandb_internal_pb2 import Record
    runs, configs = {}, []
    for path in sorted((folder / "out" / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, train.Wandb.records(path)):
            if record.HasField("run"):
                update = record.run.config.update
                configs.append({u.key or u.nested_key[0]: json.loads(u.value_json) for u in update})
            if record.HasField("history"):
                row = {}
                for item in record.history.item:
                    *outer, name = list(item.nested_key) or [item.key]
                    inside = row.setdefault(outer[0], {}) if outer else row
                    inside[name] = json.loads(item.value_json)
                runs.setdefault(path.stem, []).append({**row, "step": record.history.step.num})
    return runs, configs


# ---- killed ----


SLOW_SAVE = """
plain_save = checkpoint.write_state
def slow(folder, state):
    if state["step"] == 6:
        open("saving", "w").write(str(folder))
        time.sleep(60)
    plain_save(folder, state)
if not os.path.exists("saving"):
    checkpoint.write_state = slow
"""


def test_a_run_killed_in_a_step_and_in_a_save_goes_on_as_if_nothing_had_happened(tmp_path, text):
    """First kill: the launcher alone, in a step; second: everything, when all tensors of a save are written."""
    args = [f"--data={text}", "--max_steps=9", "--save_interval=2", "--keep=2", "--wandb", "--log_interval=2"]
    whole, out = tmp_path / "whole", tmp_path / "killed"
    code, said = end(launch(whole, 2, *args), whole)
    assert code == 0, said

    job = launch(out, 2, *args, pause=0.15)
    until(lambda: len(rows_of(out)) >= 3, job, out)
    os.kill(job.pid, signal.SIGKILL)    # torchrun's process alone: its workers must follow
    job.wait()
    gone(out, 2)
    reached = len(rows_of(out))
    assert 3 <= reached < 9
    with open(out / "out" / "metrics.jsonl", "a") as file:
        file.write('{"step": 99, "lo')     # a row cut by the kill

    job = launch(out, 2, *args, extra=SLOW_SAVE)
    until((out / "saving").exists, job, out)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    gone(out, 2)
    assert (out / "out" / "step_000006.partial").exists() and not (out / "out" / "step_000006").exists()
    assert "going on from out/step_00000" in (out / "said").read_text()

    code, said = end(launch(out, 2, *args), out)
    assert code == 0 and "going on from out/step_000004, step 4 of 9" in said, said
    assert_same_run(rows_of(whole), rows_of(out))
    assert sorted(path.name for path in (out / "out").glob("step_*")) == ["step_000008", "step_000009"]
    for rank in range(2):   # the last draw of each step is the one that counted
        drawn = [dict(line.split() for line in open(f / f"drawn.{rank}")) for f in (whole, out)]
        assert drawn[0] == drawn[1] and len(drawn[0]) == 9
    assert open(whole / "drawn.0").read() != open(whole / "drawn.1").read()

    # every step stands once in the files of one wandb run
    runs, configs = wandb_rows(out)
    (run_id, rows), = runs.items()
    assert len(list((out / "out" / "wandb").glob("offline-run-*"))) == 3
    assert [row["step"] for row in rows] == list(range(1, 10)), "every step once, in order"
    for row, logged in zip(rows_of(out), rows):
        assert logged["loss"] == row["loss"]

    done = subprocess.run([sys.executable, str(ROOT / "sample.py"), "out", "--prompt=def ", "--length=20"],
                          cwd=out, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("def ") and len(done.stdout) > 12, done.stderr
    assert "step_000009" in done.stderr


def test_workers_that_are_not_in_the_loop_yet_end_with_their_launcher(tmp_path, text):
    """Nobody watches the others there, and a rerun would meet their lock."""
    busy = "checkpoint.lock = lambda *_: (open(f'busy.{rank}', 'w').close(), time.sleep(100))\n"
    job = launch(tmp_path, 2, f"--data={text}", "--max_steps=2", extra=busy)
    until(lambda: all((tmp_path / f"busy.{rank}").exists() for rank in range(2)), job, tmp_path)
    os.kill(job.pid, signal.SIGKILL)
    job.wait()
    gone(tmp_path, 2)


# ---- failures ----


FAILURES = {
    "raise": ("if n == 2 and rank == 1: raise ValueError('boom in step 2')",
              ["rank 1 failed in step 2", "ValueError: boom in step 2", "in misbehave"]),
    "raise alone": ("if n == 2 and rank == 0: time.sleep(100)\n    if n == 2: raise ValueError('boom in step 2')",
                    ["rank 1 failed in step 2", "ValueError: boom in step 2",
                     "rank 0: rank 1 failed: this rank ends"]),
    "skip": ("if n == 2 and rank == 1: trainer.layout.world.all_reduce = lambda x, *_: x",
             ["rank 1", "has hung in step 2", "It stands here", "trainer.step(step)"]),
    "leave": ("if n == 2 and rank == 1: sys.exit(0)",
              ["rank 1 failed in step 2", "SystemExit: 0", "in misbehave"]),
    "vanish": ("if n == 2 and rank == 1: os._exit(0)", ["rank 0 failed in step 2", "by peer"]),
}


@pytest.fixture(scope="module")
def failed(tmp_path_factory, text):
    """All forms of failure at once, as jobs side by side. {form: (exit code, what it said, folder, seconds)}"""
    jobs = {}
    for form, (line, _) in FAILURES.items():
        folder = tmp_path_factory.mktemp(form)
        mark = f"\n    if n == 2: open(f'failed.{{rank}}', 'w').write(str(time.time()))\n    {line}\n"
        jobs[form] = folder, launch(folder, 2, f"--data={text}", "--max_steps=50", "--save_interval=1", pause=0.05,
                                    extra=f"def misbehave(trainer, n):{mark}")
    ends = {}
    for form, (folder, job) in jobs.items():
        code, said = end(job, folder)
        ends[form] = code, said, folder
    return ends


@pytest.mark.parametrize("form", FAILURES)
def test_one_rank_that_fails_ends_all(failed, form):
    code, said, folder = failed[form]
    assert code != 0
    for words in FAILURES[form][1]:
        assert words in said, said
    gone(folder, 2)
    assert checkpoint.folders(folder / "out")[0].name == "step_000001", "nothing is saved after a failure"
    assert [row["step"] for row in rows_of(folder)] == [1]


# ---- asked to stop ----


def test_sigterm_to_the_launcher_saves_and_wandb_goes_on(tmp_path, text):
    """The run is stopped, and loses its last checkpoint: it takes the last step again, which wandb already has."""
    args = [f"--data={text}", "--save_interval=1", "--wandb", "--log_interval=1", "--run_name=mine"]
    out = tmp_path / "out"
    job = launch(out, 4, *args, "--max_steps=40", pause=0.15)
    until(lambda: len(rows_of(out)) >= 2, job, out)
    os.kill(job.pid, signal.SIGTERM)
    _, said = end(job, out)
    gone(out, 4)
    reached = len(rows_of(out))
    assert f"asked to stop: saved after step {reached} of 40" in said and 2 <= reached < 40, said
    assert checkpoint.step_of(checkpoint.folders(out / "out")[0]) == reached
    shutil.rmtree(checkpoint.folders(out / "out")[0])

    args.append(f"--max_steps={reached + 3}")
    code, said = end(launch(out, 4, *args), out)
    assert code == 0 and f"step {reached - 1} of {reached + 3}, with other knobs than before" in said, said
    assert "max_steps 40" in said
    rows = rows_of(out)
    assert [row["step"] for row in rows] == list(range(1, reached + 4))
    runs, configs = wandb_rows(out)
    (run_id, logged), = runs.items()    # one id
    assert [row["step"] for row in logged] == list(range(1, reached + 4)), "every step once, in order"
    for row, seen in zip(rows, logged):
        # the step that was taken twice took another time, and other max_steps mean another learning rate
        for name in ("loss", "grad_norm", "drop_fraction") if row["step"] == reached else row:
            assert seen[name] == row[name], (row["step"], name)
        bars = seen["expert_load/layer_1"]
        assert bars["_type"] == "histogram" and len(bars["values"]) == 8
        assert sum(bars["values"]) == 8 * 16 * 2, "every token chose two experts"
    state = checkpoint.read_state(checkpoint.folders(out / "out")[0])
    assert run_id == f"run-{state['wandb']}"
    for found in configs:
        assert (found["num_experts"], found["top_k"]) == (8, 2)
        assert found["parameters_total"] > found["parameters_active"] > 0


# ---- main in a pool ----


@pytest.fixture(scope="module")
def pool():
    """A whole job is all ranks of a pool: here four."""
    pool = harness.Pool(4)
    yield pool
    pool.close()


def main_on_rank(argv, prepare=None):
    """train.main as torchrun would start it. → (exit code or message, stdout, stderr)."""
    import train
    out, err = io.StringIO(), io.StringIO()
    rank = torch.distributed.get_rank()
    os.environ |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "RANK": str(rank)}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(parallel, "finish", lambda: None))
            if prepare:
                stack.enter_context(replaced(train.Trainer, "step", prepare(train.Trainer.step, rank)))
            stack.enter_context(contextlib.redirect_stdout(out))
            stack.enter_context(contextlib.redirect_stderr(err))
            train.main(argv)
        code = None
    except SystemExit as error:
        code = error.code
    finally:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "RANK"):
            del os.environ[name]
    return code, out.getvalue(), err.getvalue()


def arguments(tokens, out_dir, **knobs):
    knobs = {**harness.SMALL, "optimizer": "adamw", "lr": 1e-3, "min_lr": 1e-3, "data": tokens, "global_batch": 8,
             "max_steps": 6, "save_interval": 2, "out_dir": str(out_dir), **knobs}
    return [f"--{name}={value}" for name, value in knobs.items()]


def rows(out_dir):
    return [json.loads(line) for line in open(out_dir / "metrics.jsonl")]


def terminated(plain, rank):
    """Rank 2 alone gets a SIGTERM in its third step."""
    def step(self, n):
        if rank == 2 and n == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, n)
    return step


class nan_in_step:
    """In one step, one gradient of the last rank is not finite."""

    def __init__(self, number):
        self.number = number

    def __call__(self, plain, rank):
        def step(trainer, n):
            if rank < 3 or n + 1 != self.number:
                return plain(trainer, n)
            reduce = trainer.optimizer.reduce

            def broken():
                trainer.optimizer.families[0].grad[0] = torch.nan
                return reduce()

            with replaced(trainer.optimizer, "reduce", broken):
                return plain(trainer, n)
        return step


def test_one_worker_asked_to_stop_stops_all_after_the_same_step(pool, tokens, tmp_path):
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "whole"))
    stopped = pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out", save_interval=0), terminated)
    assert [code for code, *_ in stopped] == [None] * 4
    at = checkpoint.step_of(checkpoint.folders(tmp_path / "out")[0])
    assert at in (3, 4) and f"saved after step {at} of 6" in stopped[0][1]
    assert_same_run(rows(tmp_path / "whole"), rows(tmp_path / "out"), at)
    going_on = pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out", save_interval=0))
    assert f"going on from {tmp_path}/out/step_{at:06}" in going_on[0][1]
    assert_same_run(rows(tmp_path / "whole"), rows(tmp_path / "out"))


def sample_on(argv):
    import sample
    out, err, code = io.StringIO(), io.StringIO(), 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            sample.main(argv)
    except SystemExit as error:
        code = error.code
    return code, out.getvalue(), err.getvalue()


def test_sample_prints_text_or_one_line(pool, tokens, tmp_path):
    pool.run(4, main_on_rank, arguments(tokens, tmp_path, max_steps=2, save_interval=1, ep=4, capacity_factor=0.5))
    sampled = lambda *argv: pool.run(1, sample_on, [str(tmp_path), "--prompt=1 + 2", "--length=20", *argv])[0]
    texts = [sampled(*argv) for argv in ((), ("--seed=0",), ("--seed=1",), ("--temperature=0", "--seed=2"),
                                         ("--temperature=0", "--seed=3"), ("--top_k=1", "--seed=4"))]
    for code, out, err in texts:
        assert code == 0 and out.startswith("1 + 2") and len(out) == len("1 + 2") + 20 + 1, (out, err)
        assert "step_000002, after 2 steps" in err
    (_, a, _), (_, b, _), (_, c, _), *greedy = texts
    assert a == b != c and len({out for _, out, _ in greedy}) == 1
    old = pool.run(1, sample_on, [f"{tmp_path}/step_000001", "--prompt=1", "--length=1"])[0]
    assert old[0] == 0 and "after 1 steps" in old[2]
    (path := next((tmp_path / "step_000001").glob("*.safetensors"))).write_bytes(path.read_bytes()[:-1])
    for argv, words in (([str(tmp_path / "nowhere")], ["nowhere", "no checkpoint"]),
                        ([str(tmp_path / "step_000001")], ["damaged", path.name]),
                        ([str(tmp_path), "--prompt="], ["--prompt is empty"]),
                        ([str(tmp_path), "--prompt=def"], ["--prompt='def'", "102", "64"]),
                        ([str(tmp_path), "--lenght=3"], ["lenght", "length"]),
                        ([], ["usage: sample.py OUT_DIR"])):
        code, out, err = pool.run(1, sample_on, argv)[0]
        assert code == 2 and out == "" and len(err.splitlines()) == 1 and all(word in err for word in words), err


def export_on(out_dir, folder):
    import checkpoint
    checkpoint.export_hf(out_dir, folder, "auto")


def test_sample_with_a_tokenizer_here_and_exported(pool, tokens, tmp_path):
    """A folder in Hugging Face's layout says what the checkpoint says, and goes on without the data's folder."""
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(64)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    data = tmp_path / "data"
    shutil.copytree(tokens, data)
    tokenizer.save(str(data / "tokenizer.json"))
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"tokenizer": "tokenizer.json"}))
    pool.run(4, main_on_rank, arguments(data, tmp_path / "out", max_steps=2, ep=4, n_shared_experts=0))
    pool.run(1, export_on, str(tmp_path / "out"), str(tmp_path / "hf"))
    sampled = lambda folder, *argv: pool.run(1, sample_on, [str(tmp_path / folder), "--prompt=w3 w4", "--length=6",
                                                            *argv])[0]
    for argv in ((), ("--top_k=0", "--seed=2"), ("--temperature=0",)):
        code, out, err = sampled("out", *argv)
        assert code == 0 and len(out.split()) == 8 and all(word in words for word in out.split()), (out, err)
        again = sampled("hf", *argv)
        assert again[:2] == (0, out) and again[2].startswith(f"{tmp_path}/hf, temperature"), again
    data.rename(tmp_path / "moved")
    code, out, err = sampled("out")
    assert code == 2 and f"no {data}/tokenizer.json" in err and "--data=FOLDER" in err and err.count("\n") == 1
    assert sampled("out", f"--data={tmp_path}/moved")[0] == sampled("hf")[0] == 0
    (tmp_path / "hf" / "tokenizer.json").unlink()
    assert sampled("hf")[0] == 2 and sampled("hf", f"--data={tmp_path}/moved")[0] == 0


def test_the_same_command_on_a_finished_run_says_so(pool, tokens, tmp_path):
    argv = arguments(tokens, tmp_path / "out", max_steps=2)
    pool.run(4, main_on_rank, argv)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.read_bytes() for path in files}
    for rank, (code, out, err) in enumerate(pool.run(4, main_on_rank, argv)):
        assert code == 0 and err == ""
        lines = out.splitlines()
        assert len(lines) == (rank == 0)
        for word in ("nothing to do", "step_000002", "max_steps=2", f"{tmp_path}/out"):
            assert rank or word in lines[0]
    for argv, words in (
            (arguments(tokens, tmp_path / "out", resume="none"), ["resume=none", "step_000002"]),
            (arguments(tokens, tmp_path / "out", d_model=64, top_k=1, norm_topk=False),
             ["step_000002", "d_model=32 (now 64)", "top_k=2 (now 1)", "norm_topk=True (now False)"]),
            (arguments(tokens, tmp_path / "out", optimizer="sgd"), ["optimizer=adamw (now sgd)"]),
            (arguments(tokens, tmp_path / "out", vocab_size=65), ["vocab_size=64 (now 65)"]),
            (arguments(tokens, tmp_path / "b", resume=tmp_path / "nowhere"), ["nowhere", "no checkpoint"])):
        for rank, (code, out, err) in enumerate(pool.run(4, main_on_rank, argv)):
            assert code == 2 and out == ""
            lines = err.splitlines()
            assert len(lines) == (rank == 0), err
            assert rank or all(word in lines[0] for word in words) and lines[0].startswith("error: "), err
    assert before == {path: path.read_bytes() for path in before}


def test_an_out_dir_in_use_is_refused(pool, tokens, tmp_path):
    with open(tmp_path / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write("process 7 on there")
        lock.flush()
        for rank, (code, out, err) in enumerate(pool.run(4, main_on_rank, arguments(tokens, tmp_path))):
            assert code == 2 and out == "" and len(err.splitlines()) == (rank == 0)
            assert rank or f"out_dir={tmp_path} is in use by another run (process 7 on there)" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]
    assert pool.run(4, main_on_rank, arguments(tokens, tmp_path, max_steps=1))[0][0] is None, "free again"


def test_a_step_that_is_not_finite_is_never_saved(pool, tokens, tmp_path):
    """NaN on one rank in step 4, which would be saved: all stop, and the same command starts again from step 2."""
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "whole"))
    for code, *_ in pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out"), nan_in_step(4)):
        assert "stopped at step 4 (on_nan=stop)" in str(code)
    assert [path.name for path in checkpoint.folders(tmp_path / "out")] == ["step_000002"]
    assert pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out"))[3][0] is None
    assert_same_run(rows(tmp_path / "whole"), rows(tmp_path / "out"))


def test_a_skipped_step_is_remembered(pool, tokens, tmp_path):
    """AdamW counts the updates that happened. Resumed after a skipped step: as uninterrupted."""
    skip = dict(on_nan="skip", bias_update_rate=1e-2)
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "whole", **skip), nan_in_step(2))
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out", max_steps=3, **skip), nan_in_step(2))
    assert checkpoint.read_state(tmp_path / "out" / "step_000003")["updates"] == 2
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "out", **skip))
    assert_same_run(rows(tmp_path / "whole"), rows(tmp_path / "out"))


def test_evaluation_leaves_no_trace_in_checkpoints(pool, tokens, tmp_path):
    """Trained with an evaluation after each step or without any: the same bits."""
    for out, evaluate in (("with", dict(eval_interval=1, eval_steps=1)), ("without", dict(eval_steps=0))):
        pool.run(4, main_on_rank, arguments(tokens, tmp_path / out, bias_update_rate=1e-2, score_fn="sigmoid",
                                            max_steps=4, vocab_size=256, **evaluate))
    found = []
    for out in ("with", "without"):
        files = sorted((tmp_path / out / "step_000004").glob("*.safetensors"))
        found.append({(path.name, name): x for path in files for name, x in load_file(path).items()})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 40
    for name, x in found[0].items():
        assert torch.equal(x, found[1][name]), name


def test_a_save_that_fails_ends_the_run_in_one_line(pool, tokens, tmp_path):
    for rank, (code, out, err) in enumerate(pool.run(4, full_disk_at_4, arguments(tokens, tmp_path))):
        assert code == 1 if rank else all(word in code for word in ("cannot save step 4", "No space left")), code
        assert "\n" not in str(code) and err == ""
    assert [path.name for path in tmp_path.glob("step_*")] == ["step_000002"]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def full_disk_at_4(argv):
    import errno
    plain = checkpoint.write_state

    def full(folder, state):
        if state["step"] == 4:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        plain(folder, state)

    with replaced(checkpoint, "write_state", full):
        return main_on_rank(argv)


class BrokenRun:
    id, step = "abc", 0

    def log(self, row, step):
        if step == 2:
            raise BrokenPipeError("the service is gone")


def no_server(**_):
    raise ConnectionError("no route to the server\nlong explanation")


def main_without_wandb(argv, how):
    """wandb is not installed, or cannot start, or breaks down in the second step."""
    import wandb
    if how == "missing":
        hindrance = unittest.mock.patch.dict(sys.modules, {"wandb": None})
    else:
        hindrance = replaced(wandb, "init", no_server if how == "no network" else lambda **_: BrokenRun())
    with hindrance:
        return main_on_rank(argv)


@pytest.mark.parametrize("how, words", [
    ("missing", "ModuleNotFoundError"), ("no network", "no route to the server"), ("breaks down", "service is gone")])
def test_without_wandb_there_is_one_warning_and_training_goes_on(pool, tokens, tmp_path, how, words):
    argv = [*arguments(tokens, tmp_path, max_steps=4), "--wandb"]
    for rank, (code, out, err) in enumerate(pool.run(4, main_without_wandb, argv, how)):
        assert code is None
        lines = err.splitlines()
        assert len(lines) == (rank == 0), err
        assert rank or "warning: wandb is off" in lines[0] and words in lines[0], err
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_run_branches_off_into_another_out_dir(pool, tokens, tmp_path):
    """The metrics up to there come along, and what it came from is left alone."""
    pool.run(4, main_on_rank, arguments(tokens, tmp_path / "a"))
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    argv = arguments(tokens, tmp_path / "b", resume=tmp_path / "a" / "step_000004", lr=5e-4, min_lr=5e-4)
    code, out, _ = pool.run(4, main_on_rank, argv)[0]
    assert code is None and "lr 0.001 → 0.0005" in out
    assert_same_run(rows(tmp_path / "a"), rows(tmp_path / "b")[:4], 4)
    assert [row["step"] for row in rows(tmp_path / "b")] == list(range(1, 7))
    assert [row["lr"] for row in rows(tmp_path / "b")][3:] == [1e-3, 5e-4, 5e-4]
    assert before == {path: path.read_bytes() for path in before}
    code, _, err = pool.run(4, main_on_rank, argv)[0]
    assert code == 2 and "already has step_000006" in err, "the same path again would go back behind what is there"
