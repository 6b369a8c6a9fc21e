"""bench.py, run as its users do."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

import bench

KNOBS = ["--nproc=2", "--seq_len=16", "--d_model=32", "--d_expert=16", "--n_layer=2", "--n_head=4", "--global_batch=4",
         "--steps=2", "--device=cpu"]
SMALL = [*KNOBS[:1], "--ep=2", *KNOBS[1:]]


def run(script, *args):
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, timeout=200)


@pytest.mark.parametrize("layout", [["--tp=2"], ["--pp=2", "--vpp=2", "--pp_layout=1,1,1,2", "--n_layer=5",
                                                  "--micro_batch=1"]], ids=["tp 2", "interleaved"])
def test_check_says_equal(tokens, tmp_path, layout):
    done = run(ROOT / "bench.py", "check", f"--data={tokens}", *KNOBS, *layout, f"--json={tmp_path}/c.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["equal"] and found["largest"] < 1e-5 and found["world"] == 2
    assert {"gradient norm", "embedding", "layers.1.moe.experts.w2"} <= {row["what"] for row in found["rows"]}
    assert all(row["what"] in done.stdout for row in found["rows"]) and "\nequal" in done.stdout


def test_ranks_end_with_a_bench_that_is_killed():
    rank = "import os, time, train; train.end_with_launcher(); print(os.getpid(), flush=True); time.sleep(100)"
    launcher = subprocess.Popen([sys.executable, "-c", f"import bench; bench.start_ranks(1, ['-c', {rank!r}])"],
                                cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(launcher.stdout.readline())
    launcher.kill()
    deadline = time.monotonic() + 15
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline, "it outlives its launcher"
        time.sleep(0.1)


def test_check_fails_where_a_gradient_is_wrong(tokens, tmp_path):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
                     "import bench, parallel\n"
                     "plain = parallel._Collective.backward\n"
                     "parallel._Collective.backward = staticmethod(lambda ctx, dy: plain(\n"
                     "    ctx, (1 + 1e-3 * (ctx.group.size > 1)) * dy))\n"
                     "sys.exit(bench.main(sys.argv[1:]))\n")
    done = run(wrong, "check", f"--data={tokens}", "--tp=2", *KNOBS)
    assert done.returncode == 1 and "NOT EQUAL" in done.stdout, done.stdout + done.stderr


def test_check_refuses_what_train_refuses(tokens):
    done = run(ROOT / "bench.py", "check", f"--data={tokens}", "--ep=3", *KNOBS)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "etp*ep = 1*3 = 3" in done.stderr


# ---- ab ----

def test_ab_alternates_on_the_same_data(tokens, tmp_path):
    done = run(ROOT / "bench.py", "ab", "--overlap=none", "--overlap=pair --recompute=full", f"--data={tokens}", *SMALL,
               "--micro_batch=1", "--rounds=3", f"--json={tmp_path}/ab.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "ab.json").read_text())
    a, b = found["variants"]
    assert [a["options"], b["options"]] == ["--overlap=none", "--overlap=pair --recompute=full"]
    for variant in (a, b):
        assert len(variant["turns_tokens_per_s"]) == 3 and variant["tokens_per_s"] > 0 and variant["tflops_gpu"] > 0
        assert {"expert_utilization", "overflow", "exposed_all_to_all", "gemm_efficiency"} <= variant.keys()
    # the same model sees the same data, so routing is the same: what is measured is measured on equal work
    assert a["expert_utilization"] == b["expert_utilization"] < 1 and a["overflow"] == b["overflow"]
    ratios = sorted(y / x for x, y in zip(a["turns_tokens_per_s"], b["turns_tokens_per_s"]))
    assert [found["ratio"][k] for k in ("low", "median", "high")] == ratios
    assert f"{ratios[1]:.3f} (median of 3, from {ratios[0]:.3f} to {ratios[2]:.3f})" in done.stdout
    assert "compared by force" not in done.stdout


def test_ab_compares_unequal_work_only_by_force(tokens):
    variants = ["--seq_len=8 --d_expert=32", "--seq_len=16"]
    common = [f"--data={tokens}", *[word for word in SMALL if "seq_len" not in word], "--rounds=1"]
    done = run(ROOT / "bench.py", "ab", *variants, *common)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "seq_len=8 and 16" in done.stderr and "d_expert=32 and 16" in done.stderr and "--force" in done.stderr
    done = run(ROOT / "bench.py", "ab", *variants, *common, "--force")
    assert done.returncode == 0 and "compared by force: they differ in " in done.stdout, done.stderr


@pytest.mark.parametrize("words, says", [
    (["--overlap=none"], "ab takes two variants"),
    (["--overlap=none", "--steps=3"], "--steps is of both variants"),
    (["--overlap=none", "--overlap=both"], "--overlap takes one of none, pair"),
    (["--ep=1", "--ep=3"], "etp*ep = 1*3 = 3"),
])
def test_ab_says_in_one_line_what_is_wrong(tokens, words, says):
    done = run(ROOT / "bench.py", "ab", *words, *([f"--data={tokens}", *SMALL] if len(words) > 1 else []))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and says in done.stderr, done.stderr


@pytest.mark.parametrize("name", sorted({"precision", "global_batch", "data", "seed", "seq_len", "top_k", "d_model",
                                         "force_balance"}))
def test_what_must_be_equal(name):
    assert name in bench.must_be_equal()


# ---- overlap ----

def test_overlap_measures_or_says_why_not(tokens, tmp_path):
    words = [f"--data={tokens}", *SMALL[1:], "--nproc=2", "--microbatches=2", "--rates=unlimited,200mbit", "--rounds=2",
             "--steps=1", f"--json={tmp_path}/overlap.json"]
    done = run(ROOT / "bench.py", "overlap", *[word for word in words if "global_batch" not in word])
    assert done.returncode == 0, done.stderr
    way, why = bench.private_network()
    if way is None:
        assert why in done.stdout and "Nothing was measured" in done.stdout
        return
    found = json.loads((tmp_path / "overlap.json").read_text())
    assert [(row["ranks"], row["rate"]) for row in found["rows"]] == [(2, "unlimited"), (2, "200mbit")]
    for row in found["rows"]:
        possible = min(row["compute_s"], row["none_s"] - row["compute_s"]) / 2
        assert 0 < row["compute_s"] < row["none_s"]
        assert row["ideal_s"] == pytest.approx(row["none_s"] - possible)
        assert row["hidden_share"] == pytest.approx((row["none_s"] - row["pair_s"]) / possible)
        assert f"{row['pair_s']:.3f}" in done.stdout


def test_overlap_without_permission_explains_itself(monkeypatch, capsys, tokens):
    for way, why in (("sh -c 'echo no such thing >&2; exit 1'", "no such thing"), (None, "there are no programs")):
        monkeypatch.setattr(bench.shutil, "which", lambda name: way)
        monkeypatch.setattr(bench.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, "", f"x\n{why}"))
        assert bench.overlap([f"--data={tokens}", "--device=cpu"]) == 0
        assert why in capsys.readouterr().out


def test_one_microbatch_is_never_hidden():
    assert bench.could_hide(8, 2.0, 1.0) == 7 / 8 and bench.could_hide(2, 0.5, 1.0) == 0.25


# ---- ablate ----

ABLATE = [word for word in SMALL if "steps" not in word] + ["--max_steps=2", "--eval_steps=1"]


def test_ablate_compares_runs_of_equal_seeds(tokens, tmp_path, monkeypatch, capsys):
    """What the runs found is made up here: 2 + seed, and a hundredth of the learning rate times the seed more."""
    launched = []

    def start_ranks(world, argv, stdout=None):
        launched.append((world, argv))
        cfg = bench.load(bench.train.Config, argv[1:])
        loss = (2 + cfg.seed) * (1 + cfg.lr * cfg.seed / 100)
        rows = [{"tokens_per_s": 1.0 + i} for i in range(10)] + [{"tokens_per_s": 1000.0, "val_loss": loss}]
        Path(cfg.out_dir, "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(bench, "start_ranks", start_ranks)
    assert bench.main(["ablate", "--knob=lr", "--values=0.0,1.0", "--seeds=1,5", f"--data={tokens}", *ABLATE, "--min_lr=0",
                       f"--json={tmp_path}/a.json"]) == 0
    assert [(cfg.seed, cfg.lr) for cfg in (bench.load(bench.train.Config, argv[1:]) for _, argv in launched)] == [
        (1, 0.0), (1, 1.0), (5, 0.0), (5, 1.0)]
    assert len({argv[-3] for _, argv in launched}) == 4 and {world for world, _ in launched} == {2}     # out_dirs
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["runs"]["1.0"] == [{"seed": 1, "val_loss": pytest.approx(3.03), "tokens_per_s": 6.5},
                                    {"seed": 5, "val_loss": pytest.approx(7.35), "tokens_per_s": 6.5}]
    lines = capsys.readouterr().out.splitlines()
    monkeypatch.setattr(bench, "start_ranks", lambda *args: 1)
    assert bench.main(["ablate", "--knob=lr", "--values=0.5", f"--data={tokens}", *ABLATE]) == 1
    assert "--lr=0.5 --seed=1 did not end with a finite loss" in capsys.readouterr().err
    assert lines[-2].split() == "0.0 5.0000 3.0000 7.0000 +0.00% +0.00% +0.00% 6".split()
    assert lines[-1].split() == "1.0 5.1900 3.0300 7.3500 +3.00% +1.00% +5.00% 6".split()


def test_ablate_trains(tokens):
    done = run(ROOT / "bench.py", "ablate", "--knob=lr", "--values=1e-2", "--seeds=5", f"--data={tokens}", *ABLATE[2:],
               "--nproc=1")
    assert done.returncode == 0 and "--lr=1e-2 --seed=5: validation loss 4." in done.stdout, done.stderr


@pytest.mark.parametrize("words, says", [
    (["--knob=lr"], "set --values"), (["--values=1,2"], "knob= is no knob"),
    (["--knob=seed", "--values=1"], "knob=seed is no knob"),
    (["--knob=top_k", "--values=2,9"], "top_k=9 is more than num_experts=8"),
    (["--knob=lr", "--values=0.1", "--eval_steps=0"], "eval_steps=0 leaves"),
    (["--knob=lr", "--values=fast"], "--lr takes a number"),
], ids=str)
def test_ablate_says_in_one_line_what_is_wrong(tokens, words, says, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(["ablate", f"--data={tokens}", *ABLATE, *words])
    lines = capsys.readouterr().err.splitlines()
    assert exit.value.code == 2 and len(lines) == 1 and says in lines[0], lines
