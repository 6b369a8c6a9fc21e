"""Measure and compare.

    python bench.py check --nproc=8 --tp=2 --cp=2 --ep=4      is my layout's loss right?
    python bench.py kernels                                   GEMMs, gathers and SwiGLU beside what they replace
    python bench.py kernels --check                           correctness first, on the device at hand
    python bench.py kernels --tune                            on a GPU: proposes entries of kernels.TILES

Every command takes --help, and --json=FILE to keep what it prints. A figure is a median of repeated runs on an
idle machine and names its device. On a CPU `kernels` measures the torch back-end at a fraction of the rows and
widths: that shows that the table works, not what a GPU would do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import kernels
import optim
import parallel
import train
from settings import knob, load

# --------------------------------------------------------------------------------------------------
# Shared by the commands


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


def seconds(run, device, repeat=10):
    """The median time of `run()`, after two runs that warm up."""
    run(), run()
    times = []
    for _ in range(repeat):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_name(device):
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


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
# kernels


@dataclass
class KernelsConfig:
    program = "bench.py kernels"
    rows: int = knob(0, "rows a (source rank, expert) segment holds; 0: 32, 256 and 1024", least=0)
    check: bool = knob(False, "compare every product with float64 first, and fail where it is off")
    tune: bool = knob(False, "time other tiles and print the best as entries of kernels.TILES: GPU only")
    json: str = knob("", "file for all figures")
    device: str = knob("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))


# name: width D, expert width F, experts, expert-parallel ranks they are spread over
MODELS = {"DeepSeek-V3": (7168, 2048, 256, 64), "Qwen3-235B": (4096, 1536, 128, 32),
          "Qwen3-30B": (2048, 768, 128, 8)}
CPU_SCALE = 8       # on a CPU widths and ranks are an eighth, and rows at most 64


def check_kernels(cfg):
    if cfg.device == "cuda" and not torch.cuda.is_available():
        return ["device=cuda, but torch sees no GPU: set device=cpu or auto"]
    gpu = cfg.device != "cpu" and torch.cuda.is_available()
    if cfg.tune and not (gpu and kernels.triton):
        return ["tune=true needs a GPU and triton: tiles are chosen by timing them"]
    if cfg.json and not Path(cfg.json).absolute().parent.is_dir():
        return [f"json={cfg.json}: there is no such folder"]
    return []


def kernels_command(argv):
    cfg = load(KernelsConfig, argv, check_kernels)
    device = torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")
    gpu = device.type == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    kernels.backend.triton = gpu and kernels.triton is not None and torch.cuda.get_device_capability()[0] >= 9
    who = "Triton" if kernels.backend.triton else "the torch back-end"
    print(f"{device_name(device)}, {str(dtype)[6:]}: {who}, {time.strftime('%Y-%m-%d')}")
    if not gpu:
        print("no GPU: widths and ranks are an eighth of the models' and segments hold at most 64 rows; "
              "the full shapes need a GPU")
    results, failed = [], []
    for name, (D, F, experts, ep) in MODELS.items():
        scale = 1 if gpu else CPU_SCALE
        for C in [cfg.rows] if cfg.rows else (32, 256, 1024) if gpu else (8, 64):
            shape = Shape(name, D // scale, F // scale, experts // ep, ep // scale, C, dtype, device)
            if cfg.check:
                failed += shape.check()
            if cfg.tune:
                shape.tune()
            else:
                results += shape.measure()
    if cfg.json:
        about = dict(device=device_name(device), backend=who, dtype=str(dtype)[6:], date=time.strftime("%Y-%m-%d"))
        Path(cfg.json).write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    if cfg.check:
        print("\n".join(["check FAILED:", *failed]) if failed else "check: every product agrees with float64")
    if failed:
        raise SystemExit(1)


class Shape:
    """One model's experts on one rank of `W` that each send up to C rows to each of its L experts."""

    def __init__(self, name, D, F, L, W, C, dtype, device):
        self.name = f"{name} D={D} F={F} experts={L} ranks={W} rows={C}"
        self.D, self.F, self.L, self.C, self.device = D, F, L, C, device
        random = functools.partial(torch.randn, dtype=dtype, device=device)
        # an exchange at capacity factor 1.25 is four fifths full
        counts_WL = torch.full([W, L], max(C * 4 // 5, 1), device=device)
        self.padded, self.kept = kernels.Groups.padded(counts_WL, C), int(counts_WL.sum())
        ends_L = counts_WL.sum(0).cumsum(0).to(torch.int32)
        self.packed = kernels.Groups.packed(ends_L, self.kept)
        # received row ↔ expert-major row
        base_LW = (C * torch.arange(W * L, device=device)).view(W, L).t()
        nth = torch.arange(int(counts_WL[0, 0]), device=device)
        self.row_R = (base_LW[:, :, None] + nth).flatten()
        self.place_Q = torch.full([W * L * C], -1, device=device)
        self.place_Q[self.row_R] = torch.arange(self.kept, device=device)
        self.x_QD, self.w1, self.w2 = random(W * L * C, D), random(L, 2 * F, D), random(L, D, F)
        self.dh, self.p_R = random(W * L * C, 2 * F), torch.rand(self.kept, device=device)

    def products(self, groups, row_R=None):
        """{what: a function that computes it} for the first product of the experts."""
        dh = self.dh[:groups.rows]
        x = self.x_QD if row_R is not None or groups.room else self.x_QD[:groups.rows]
        return {"forward": lambda: kernels.gemm_rows(x, self.w1.transpose(1, 2), groups, row_R),
                "data gradient": lambda: kernels.gemm_rows(dh, self.w1, groups),
                "weight gradient": lambda: kernels.gemm_experts(dh, x, groups, row_R)}

    def layouts(self):
        return {"as received": (self.padded, None), "expert-major": (self.packed, None),
                "gathered on load": (self.packed, self.row_R)}

    def measure(self):
        """Prints the table of this shape; → its lines as dicts."""
        print(f"\n{self.name}")
        timed = functools.partial(seconds, device=self.device, repeat=10 if self.device.type == "cuda" else 3)
        flops, lines = 2 * self.kept * self.D * 2 * self.F, []
        x, dh, ends_L = self.x_QD[:self.kept], self.dh[:self.kept], self.packed.ends_L
        flat = self.w1[0]
        # what the same FLOPs cost as one matmul, and in torch's own grouped product or a loop over the experts
        dense = {"forward": lambda: x @ flat.t(), "data gradient": lambda: dh @ flat,
                 "weight gradient": lambda: dh.t() @ x}
        args = {"forward": (x, self.w1.transpose(1, 2)), "data gradient": (dh, self.w1),
                "weight gradient": (dh.t(), x)}
        print(f"  {'':17} {'TFLOPS':18} {'':>8} {'dense':>8} {'of dense':>9} {'grouped_mm':>11} {'loop':>8}")
        for what in dense:
            one = flops / timed(dense[what]) / 1e12
            torchs = flops / timed(lambda: kernels.grouped_mm(*args[what], ends_L)) / 1e12
            loop = flops / timed(lambda: kernels.grouped_mm_loop(*args[what], ends_L)) / 1e12
            for layout, (groups, row_R) in self.layouts().items():
                if row_R is not None and what == "data gradient":
                    continue
                ours = flops / timed(self.products(groups, row_R)[what]) / 1e12
                print(f"  {what:17} {layout:18} {ours:8.3f} {one:8.3f} {ours / one:9.0%} {torchs:11.3f} "
                      f"{loop:8.3f}")
                lines.append(dict(shape=self.name, kernel=what, layout=layout, tflops=ours, dense_tflops=one,
                                  grouped_mm_tflops=torchs, loop_tflops=loop))
        target = torch.empty_like(self.x_QD)
        copy = 2 * self.x_QD.nbytes / timed(lambda: target.copy_(self.x_QD)) / 1e9
        h = self.dh[:self.kept]
        y = kernels.swiglu(h, self.p_R)
        row, place = self.row_R, self.place_Q[:, None]
        moves = {
            "permute": (2 * x.nbytes, lambda: kernels.gather_rows(self.x_QD, row)),
            "unpermute": (x.nbytes + self.x_QD.nbytes, lambda: kernels.gather_sum(x, place)),
            "SwiGLU": (h.nbytes + y.nbytes, lambda: kernels.swiglu(h, self.p_R)),
            "SwiGLU backward": (2 * h.nbytes + y.nbytes, lambda: kernels.swiglu_backward(y, h, self.p_R))}
        print(f"  {'':17} {'GB/s':18} {'':>8} {'copy':>8} {'of copy':>9}")
        for what, (moved, run) in moves.items():
            ours = moved / timed(run) / 1e9
            print(f"  {what:17} {'':18} {ours:8.1f} {copy:8.1f} {ours / copy:9.0%}")
            lines.append(dict(shape=self.name, kernel=what, gb_per_s=ours, copy_gb_per_s=copy))
        return lines

    def check(self):
        """Every product against float64, an expert at a time; → what is off."""
        bad, limit = [], 1e-4 if self.x_QD.dtype == torch.float32 else 2e-2
        for layout, (groups, row_R) in self.layouts().items():
            runs = self.products(groups, row_R)
            y, dx, dw = (runs[what]() for what in ("forward", "data gradient", "weight gradient"))
            for expert in range(self.L):
                rows = torch.cat([torch.arange(s, s + n, device=self.device) for s, n in zip(
                    groups.starts_G[expert::self.L].tolist(), groups.counts_G[expert::self.L].tolist())])
                x = self.x_QD[rows if row_R is None else row_R[rows]].double()
                w, dh = self.w1[expert].double(), self.dh[rows].double()
                for what, ours, plain in (("forward", y[rows], x @ w.t()), ("data gradient", dx[rows], dh @ w),
                                          ("weight gradient", dw[expert], dh.t() @ x)):
                    error = ((ours - plain).abs().max() / plain.abs().max()).item()
                    if not error <= limit:
                        bad.append(f"  {self.name}: {what}, {layout}, expert {expert}: off by {error:.1e} of the "
                                   f"largest value")
        return bad

    def tune(self):
        """Times tiles that this GPU can hold, and prints the fastest."""
        print(f"\n{self.name}")
        major = torch.cuda.get_device_capability()[0]
        sizes = itertools.product((64, 128), (128, 256), (64, 128), (4, 8), (3, 4, 5))
        candidates = [kernels.Tile(*size) for size in sizes]
        for product, what in (("rows", "forward"), ("experts", "weight gradient")):
            times = {}
            for tile in candidates:
                kernels.tile_for = lambda *_, tile=tile: tile
                try:
                    times[tile] = seconds(self.products(self.padded)[what], self.device, repeat=5)
                except kernels.triton.runtime.errors.OutOfResources:
                    continue
            best = min(times, key=times.get)
            print(f"  ({min(major, 10)}, {product!r}): {best}   {times[best] * 1e3:.3f} ms at {self.C} rows")


# --------------------------------------------------------------------------------------------------

COMMANDS = {"check": check, "kernels": kernels_command}


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python bench.py {{{','.join(COMMANDS)}}} [--key=value ...]   (--help after a command)",
              file=sys.stderr)
        raise SystemExit(2)
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
