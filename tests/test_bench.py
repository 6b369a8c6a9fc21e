"""bench.py, run as its users do."""

import json
import subprocess
import sys

from conftest import ROOT

KNOBS = ["--nproc=2", "--seq_len=16", "--d_model=32", "--d_expert=16", "--n_layer=2", "--n_head=4", "--global_batch=4",
         "--steps=2", "--device=cpu"]

def run(script, *args):
    return subprocess.run([sys.executable, str(script), *args], capture_output=True, text=True, timeout=200)


def test_check_says_equal(tokens, tmp_path):
    done = run(ROOT / "bench.py", "check", f"--data={tokens}", "--tp=2", *KNOBS, f"--json={tmp_path}/c.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "c.json").read_text())
    assert found["equal"] and found["largest"] < 1e-5 and found["world"] == 2
    assert {"gradient norm", "embedding", "layers.1.moe.experts.w2"} <= {row["what"] for row in found["rows"]}
    assert all(row["what"] in done.stdout for row in found["rows"]) and "\nequal" in done.stdout


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
