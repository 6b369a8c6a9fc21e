"""Measure and compare.

    python bench.py check --nproc=8 --tp=2 --cp=2 --ep=4      is my layout's loss right?

Every command takes --help, and --json=FILE to keep what it prints.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import torch

import optim
import parallel
import train
from settings import knob, load


def launch(nproc):
    """Runs this very command on nproc ranks and exits as they do, unless these are the ranks already. (torchrun
    would answer a result that is not equal with a page about failed workers.)"""
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // nproc)}
    ranks = [subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {
        name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()})
        for rank in range(nproc)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        time.sleep(1)       # one failed: the others may still have something to say
    finally:
        for rank in ranks:
            rank.kill()
    sys.exit(max((rank.wait() for rank in ranks), key=abs) and 1)


def table(rows, formats):
    """Lines of a table from dicts; formats is {column: format of its values}, in order."""
    cells = [list(formats)] + [["–" if row[c] is None else format(row[c], f) for c, f in formats.items()]
                               for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths)))
            for line in cells]


def write_json(path, value):
    if path:
        with open(path, "w") as file:
            json.dump(value, file, indent=1)


# --------------------------------------------------------------------------------------------------
# check: a layout against one process

TOLERANCE = 1e-4


@dataclass
class CheckConfig(train.Config):
    """Knobs of `python bench.py check`."""

    program = "bench.py check"

    nproc: int = knob(4, "ranks to start, unless torchrun started them", least=1)
    steps: int = knob(3, "SGD steps to compare", least=1)
    json: str = knob("", "file for the figures")


def gradients_and_losses(cfg, world, steps):
    trainer = train.Trainer(cfg, world)
    trainer.forward_backward(list(trainer.batches(0)))
    norm = trainer.optimizer.reduce().item()
    gradients = optim.full_gradients(trainer.model, trainer.optimizer)
    return norm, gradients, [trainer.step(i).read()[0] for i in range(steps)]


def check(argv):
    """Is my loss right? Runs a few SGD steps under a layout and on one process, and compares every gradient.
    What may differ between layouts for a good reason is switched off: dropping, the auxiliary losses (their
    means are taken over other tokens), low precision."""
    nproc = next((a.partition("=")[2] for a in argv if a.startswith("--nproc=")), CheckConfig.nproc)
    world = int(os.environ.get("WORLD_SIZE", nproc if str(nproc).isdigit() else 1))
    cfg = load(CheckConfig, argv, lambda cfg: train.check(cfg, world))
    launch(cfg.nproc)
    cfg = dataclasses.replace(cfg, optimizer="sgd", decay="constant", warmup_steps=0, lr=0.1, capacity_factor=0.0,
                              aux_loss_coef=0.0, z_loss_coef=0.0, bias_update_rate=0.0, precision="fp32")
    norm, gradients, losses = gradients_and_losses(cfg, world, cfg.steps)
    if int(os.environ["RANK"]) == 0:
        one = dataclasses.replace(cfg, **{name: 1 for name in ("tp", "cp", "pp", "ep", "etp")}, recompute=())
        ref_norm, ref_gradients, ref_losses = gradients_and_losses(one, 1, cfg.steps)
        apart = lambda a, b: abs(a - b) / max(abs(a), 1e-30)
        rows = [{"what": f"loss, {cfg.steps} steps", "difference": max(map(apart, ref_losses, losses))},
                {"what": "gradient norm", "difference": apart(ref_norm, norm)}]
        rows += [{"what": name, "difference": ((a - gradients[name]).norm() / a.norm().clamp_min(1e-30)).item()}
                 for name, a in ref_gradients.items()]
        worst = max(row["difference"] for row in rows)
        fine = worst <= TOLERANCE       # false for NaN too
        print(f"{world} ranks against one, dropless, fp32, SGD, no auxiliary losses; largest relative differences")
        print(*table(rows[:2] + sorted(rows[2:], key=lambda row: -row["difference"]),
                     {"what": "", "difference": ".1e"}), sep="\n")
        print(f"{'equal' if fine else 'NOT EQUAL'}: largest difference {worst:.1e}, allowed {TOLERANCE:.0e}")
        write_json(cfg.json, {"world": world, "largest": worst, "equal": fine, "rows": rows})
    else:
        fine = True
    verdict = torch.tensor(float(fine))
    torch.distributed.broadcast(verdict, 0)
    parallel.finish()
    return 0 if verdict else 1


# --------------------------------------------------------------------------------------------------

COMMANDS = {"check": check}


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        print(__doc__.strip(), file=sys.stderr)
        return 2
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
