"""Kills a run at random moments until it is done, and compares it with one that was left alone.

    python tests/kill_often.py [kills]        (default 10)

Each time the launcher alone, or all of its processes, get a SIGKILL after a random time in training; every second
time while a save is held open between its tensors and its last file. The same command goes on. In the end every
step must stand once in metrics.jsonl, with the loss and the gradient norm of the undisturbed run, bit by bit.
"""

import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from conftest import ROOT
import harness
import test_lasting as lasting

STEPS, RANKS = 400, 2
SLOW = """
plain_save = checkpoint.write_state
def slow(folder, state):
    open("saving", "w").write(str(folder))
    time.sleep(0.5)
    plain_save(folder, state)
checkpoint.write_state = slow
"""


def main(kills):
    folder, chance = Path(tempfile.mkdtemp()), random.Random()
    ids = np.frombuffer((ROOT / "parallel.py").read_bytes(), dtype=np.uint8)
    data = harness.write_tokens(folder / "data", ids, vocab_size=256)
    args = [f"--data={data}", f"--max_steps={STEPS}", "--save_interval=3"]
    whole, out = folder / "whole", folder / "killed"
    code, said = lasting.end(lasting.launch(whole, RANKS, *args), whole, 600)
    assert code == 0, said

    for kill in range(kills):
        in_save, alone = kill % 2 == 1, chance.random() < 0.5
        before = len(lasting.rows_of(out))
        (out / "saving").unlink(missing_ok=True)
        job = lasting.launch(out, RANKS, *args, extra=SLOW if in_save else "", pause=0.02)
        begun = lambda: "going on from" in (out / "said").read_text() or kill == 0 and lasting.rows_of(out)
        lasting.until((out / "saving").exists if in_save else begun, job, out)
        time.sleep(chance.random() * (0.4 if in_save else 1.5))
        lasting.os.kill(job.pid, 9) if alone else lasting.os.killpg(job.pid, 9)
        job.wait()
        lasting.gone(out, RANKS)
        there = ", ".join(path.name for path in sorted((out / "out").glob("step_*")))
        print(f"kill {kill + 1}: {'in a save' if in_save else 'in training'}, "
              f"{'the launcher alone' if alone else 'all processes'}, at step {len(lasting.rows_of(out))} "
              f"(before: {before}); on disk: {there}", flush=True)

    code, said = lasting.end(lasting.launch(out, RANKS, *args), out, 600)
    assert code == 0, said
    lasting.assert_same_run(lasting.rows_of(whole), lasting.rows_of(out))
    print(f"{kills} kills, {STEPS} steps: every step stands once, with loss and gradient norm of the undisturbed run")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
