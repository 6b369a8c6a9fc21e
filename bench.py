"""Measure and compare.

    python bench.py check --nproc=8 --tp=2 --cp=2 --ep=4      is my layout's loss right?
    python bench.py kernels                                   GEMMs, gathers and SwiGLU beside what they replace
    python bench.py kernels --check                           correctness first, on the device at hand
    python bench.py kernels --tune                            on a GPU: proposes entries of kernels.TILES
    python bench.py ab "--overlap=none" "--overlap=pair"      any two variants, alternated in one run
    python bench.py overlap                                   what overlap hides on a network slowed down on purpose
    python bench.py memory config/deepseek_v3.py              what a block keeps, by recompute and offload
    python bench.py ablate --knob=precision --values=fp32,bf16     what a knob does to the loss, over several seeds

Every command takes --help, and --json=FILE to keep what it prints. A figure is a median of repeated runs on an
idle machine and names its device. On a CPU `kernels` measures the torch back-end at a fraction of the rows and
widths: that shows that the table works, not what a GPU would do.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import kernels
import memory
import optim
import parallel
import train
from settings import as_dict, knob, load

# --------------------------------------------------------------------------------------------------
# Shared by the commands


def start_ranks(nproc, argv, stdout=None, inside="", **env):
    """Runs the program `argv` on nproc ranks, `inside` a command that takes the rank's own. → 0 if all of them end
    well, else 1. (torchrun would answer a result that is not equal with a page about failed workers.)"""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
              "OMP_NUM_THREADS": max(1, (os.cpu_count() or 1) // nproc),
              "TORCHELASTIC_RUN_ID": "bench", **env}     # for train.end_with_launcher: this is one
    ranks = [subprocess.Popen([*inside.format(rank).split(), sys.executable, *argv], stdout=stdout, env=os.environ | {
        name: str(value) for name, value in {**shared, "RANK": rank, "LOCAL_RANK": rank}.items()})
        for rank in range(nproc)]
    try:
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            time.sleep(0.1)
        time.sleep(1)       # one failed: the others may still have something to say
    finally:
        for rank in ranks:
            rank.kill()
    return max((rank.wait() for rank in ranks), key=abs) and 1


def launch(nproc):
    """Runs this very command on nproc ranks and exits as they do, unless these are the ranks already."""
    if "RANK" not in os.environ:
        sys.exit(start_ranks(nproc, sys.argv))


def world_of(argv, nproc):
    """How many ranks a command will have, before its knobs are read: torchrun's, --nproc's, or the default."""
    given = next((a.partition("=")[2] for a in argv if a.startswith("--nproc=")), str(nproc))
    return int(os.environ.get("WORLD_SIZE", given if given.isdigit() else 1))


def say(*lines):
    """Prints from rank 0 alone."""
    if os.environ.get("RANK", "0") == "0":
        print(*lines, sep="\n", flush=True)


def say_error(problem):
    """Ends the command with one line, exit code 2."""
    if os.environ.get("RANK", "0") == "0":
        print(f"error: {problem}", file=sys.stderr, flush=True)
    raise SystemExit(2)


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
    """The median time of `run()`, after two runs that warm up. A GPU gets them all at once: what it takes to launch
    them is hidden, as in a step."""
    clock = kernels.Clock()
    run(), run()
    for _ in range(repeat):
        with clock.span("run", device):
            run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return statistics.median(clock.durations(clock.take(), "run"))


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
    world = world_of(argv, CheckConfig.nproc)
    cfg = load(CheckConfig, argv, lambda cfg: train.check(cfg, world))
    launch(cfg.nproc)
    cfg = dataclasses.replace(cfg, optimizer="sgd", decay="constant", warmup_steps=0, lr=0.1, capacity_factor=0.0,
                              aux_loss_coef=0.0, z_loss_coef=0.0, bias_update_rate=0.0, precision="fp32",
                              grad_dtype="fp32", dispatch_precision="auto", router_precision="fp32",
                              cuda_graph=False)
    norm, gradients, losses = gradients_and_losses(cfg, world, cfg.steps)
    fine = True     # says every rank but the one that looks
    if int(os.environ["RANK"]) == 0:
        one = dataclasses.replace(parallel.one_rank(cfg), recompute=(), offload=())
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
    parallel.finish()
    return 0 if fine else 1


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
        rate = lambda run: flops / timed(run) / 1e12
        # what the same FLOPs cost as one matmul, and in torch's own grouped product or a loop over the experts
        plain = {"forward": (x, self.w1.transpose(1, 2)), "data gradient": (dh, self.w1),
                 "weight gradient": (dh.t(), x)}
        for what, (a, b) in plain.items():
            dense = rate(lambda: a @ (b[0] if b.ndim == 3 else b))
            torchs, loop = (rate(lambda: product(a, b, ends_L)) for product in (kernels.grouped_mm,
                                                                                kernels.grouped_mm_loop))
            for layout, (groups, row_R) in self.layouts().items():
                if row_R is None or what != "data gradient":
                    ours = rate(self.products(groups, row_R)[what])
                    lines.append(dict(shape=self.name, kernel=what, layout=layout, tflops=ours, dense_tflops=dense,
                                      share=ours / dense, grouped_mm_tflops=torchs, loop_tflops=loop))
        say(*table(lines, {"kernel": "", "layout": "", "tflops": ".3f", "dense_tflops": ".3f", "share": ".0%",
                           "grouped_mm_tflops": ".3f", "loop_tflops": ".3f"}))
        target = torch.empty_like(self.x_QD)
        copy = 2 * self.x_QD.nbytes / timed(lambda: target.copy_(self.x_QD)) / 1e9
        y = kernels.swiglu(dh, self.p_R)
        row, place = self.row_R, self.place_Q[:, None]
        moves = {
            "permute": (2 * x.nbytes, lambda: kernels.gather_rows(self.x_QD, row)),
            "unpermute": (x.nbytes + self.x_QD.nbytes, lambda: kernels.gather_sum(x, place)),
            "SwiGLU": (dh.nbytes + y.nbytes, lambda: kernels.swiglu(dh, self.p_R)),
            "SwiGLU backward": (2 * dh.nbytes + y.nbytes, lambda: kernels.swiglu_backward(y, dh, self.p_R))}
        moved = []
        for what, (size, run) in moves.items():
            ours = size / timed(run) / 1e9
            moved.append(dict(shape=self.name, kernel=what, gb_per_s=ours, copy_gb_per_s=copy, share=ours / copy))
        say(*table(moved, {"kernel": "", "gb_per_s": ".1f", "copy_gb_per_s": ".1f", "share": ".0%"}))
        return lines + moved

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
        major, errors = torch.cuda.get_device_capability()[0], kernels.triton.runtime.errors
        sizes = itertools.product((64, 128), (128, 256), (64, 128), (4, 8), (3, 4, 5))
        candidates = [kernels.Tile(*size) for size in sizes]
        for product, what in (("rows", "forward"), ("experts", "weight gradient")):
            times = {}
            for tile in candidates:
                kernels.tile_for = lambda *_, tile=tile: tile
                try:
                    times[tile] = seconds(self.products(self.padded)[what], self.device, repeat=5)
                except (errors.OutOfResources, errors.PTXASError):
                    continue
            best = min(times, key=times.get)
            print(f"  ({min(major, 10)}, {product!r}): {best}   {times[best] * 1e3:.3f} ms at {self.C} rows")


# --------------------------------------------------------------------------------------------------
# ab: two variants, alternated


@dataclass
class AbConfig(train.Config):
    """Knobs of `python bench.py ab "OPTIONS A" "OPTIONS B"`; those behind the two count for both."""

    program = 'bench.py ab "OPTIONS A" "OPTIONS B"'

    nproc: int = knob(4, "ranks to start, unless torchrun started them", least=1)
    rounds: int = knob(5, "turns of each variant: A B A B ...", least=1)
    steps: int = knob(4, "optimizer steps in a turn", least=1)
    force: bool = knob(False, "compare variants that differ in model, precision, sequence length, batch or data")
    json: str = knob("", "file for the figures")


# What may differ of the model all the same: it changes what is learned, not what is computed
OF_LEARNING = {"aux_loss_coef", "aux_loss_scope", "z_loss_coef", "bias_update_rate"}


def must_be_equal():
    """Names of the knobs without which a ratio of speeds means nothing."""
    model = {field.name for part in (train.models.ModelConfig, train.moe.MoEConfig)
             for field in dataclasses.fields(part)}
    return model - OF_LEARNING | {"precision", "emulate", "bf16_layers", "global_batch", "data", "seed"}


def alternate(trainers, rounds, steps, peak=None):
    """Runs `steps` steps of each trainer in turn, `rounds` times, after one step each that warms up. All of them see
    the same data in the same order. → for each trainer, for each of its turns, the rows of metrics.jsonl; a step's
    time is the turn's divided by its steps, so that no step waits to be timed."""
    turns = [[] for _ in trainers]
    for trainer in trainers:
        trainer.step(0).read()
    for turn in range(rounds):
        for trainer, mine in zip(trainers, turns):
            parallel.ledger.take(), kernels.clock.take()
            torch.distributed.barrier()
            started = time.perf_counter()
            results = [trainer.step(1 + turn * steps + i) for i in range(steps)]
            results[-1].read()
            seconds = (time.perf_counter() - started) / steps
            for result in results:
                result.spans["step"] = [(0.0, seconds)]
            mine.append([train.measure(trainer, result, peak)[0] for result in results])
    return turns


def spread(values):
    """{"median", "low", "high"}"""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ab(argv):
    """Which of two variants is faster?"""
    options, common = argv[:2], argv[2:]
    if "--help" in argv or "-h" in argv:
        load(AbConfig, ["--help"])
    variants = [shlex.split(text) for text in options]
    if len(options) < 2:
        say_error('ab takes two variants, as in: python bench.py ab "--overlap=none" "--overlap=pair"')
    of_bench = {field.name for field in dataclasses.fields(AbConfig)} - {
        field.name for field in dataclasses.fields(train.Config)}
    for words in variants:
        for name in of_bench & {word.removeprefix("--").partition("=")[0] for word in words}:
            say_error(f"--{name} is of both variants: give it behind them")
    world = world_of(common, AbConfig.nproc)
    cfgs = [load(AbConfig, [*common, *words], lambda cfg: train.check(cfg, world)) for words in variants]
    a, b = map(as_dict, cfgs)
    if other := [f"{name}={a[name]} and {b[name]}" for name in a if name in must_be_equal() and a[name] != b[name]]:
        if not cfgs[0].force:
            say_error(f"the variants cannot be compared, they differ in {', '.join(other)}: make them equal, or add "
                      f"--force")
    launch(cfgs[0].nproc)
    trainers = [train.Trainer(cfg, world) for cfg in cfgs]
    peak = train.peak_flops(trainers[0].device, kernels.multiplied_dtype(cfgs[0], trainers[0].device))
    turns = alternate(trainers, cfgs[0].rounds, cfgs[0].steps, peak)
    rows, speeds = [], []
    for name, text, mine in zip("AB", options, turns):
        flat = sum(mine, [])
        speeds.append([train.mean(turn, "tokens_per_s") for turn in mine])
        rows.append({"": f"{name}: {text}", "tokens/s": statistics.median(speeds[-1]),
                     "TFLOPS/GPU": statistics.median(train.mean(turn, "tflops_per_gpu") for turn in mine),
                     **{what: value for what, value, *_ in train.columns(flat)}})
    ratio = spread([fast / slow for slow, fast in zip(*speeds)])
    about = (f"{device_name(trainers[0].device)}, {world} ranks, {trainers[0].dtype}, {cfgs[0].rounds} turns each of "
             f"{cfgs[0].steps} steps")
    shares = {what: ".0%" for what in rows[0] if what not in ("", "tokens/s", "TFLOPS/GPU")}
    say(about, *table(rows, {"": "", "tokens/s": ",.0f", "TFLOPS/GPU": ".3g", **shares}),
        f"B over A, tokens/s: {ratio['median']:.3f} (median of {cfgs[0].rounds}, from {ratio['low']:.3f} to "
        f"{ratio['high']:.3f})")
    if other:
        say(f"compared by force: they differ in {', '.join(other)}")
    if any(cfg.force_balance for cfg in cfgs):
        say("force_balance: routing was round-robin, which flatters speed")
    if trainers[0].layout.world.rank == 0:
        keys = {what: re.sub("[^a-z]", "_", what.lower().replace("/s", "_per_s")) for what in rows[0]}
        found = [{"options": text, **{keys[what]: value for what, value in row.items() if what},
                  "tokens_per_s": statistics.median(speed), "turns_tokens_per_s": speed}
                 for text, row, speed in zip(options, rows, speeds)]
        write_json(cfgs[0].json, {"about": about, "ratio": ratio, "different": other, "variants": found})
    for trainer in trainers:
        trainer.close()
    parallel.finish()
    return 0


# --------------------------------------------------------------------------------------------------
# overlap: what is hidden behind a slow network


@dataclass
class OverlapConfig(train.Config):
    """Knobs of `python bench.py overlap`. It sets overlap itself, and global_batch = dp·microbatches·micro_batch."""

    program = "bench.py overlap"

    nproc: tuple[int, ...] = knob((2, 4), "how many ranks, one comparison each", least=2)
    microbatches: int = knob(8, "microbatches in a step, of micro_batch (0: one) sequences", least=2)
    rates: tuple[str, ...] = knob(("unlimited", "2gbit", "1gbit", "500mbit"), "of each rank's link to the others, "
                                  "as tc spells them, or unlimited")
    rounds: int = knob(3, "turns of each, none and pair alternated", least=1)
    steps: int = knob(1, "optimizer steps in a turn", least=1)
    json: str = knob("", "file for the figures")


# Every rank lives in a network of its own and has one link to a hub, as GPUs have. On one link for all, a rank that
# comes late finds the others' tokens sent already, and overlap=none would hide some of its exchanges too.
HUB = "mount -t tmpfs none /run && ip link set lo up && ip link add hub type bridge && ip link set hub up"
LINK = """ip netns add rank{0} && ip link add port{0} type veth peer name eth0 netns rank{0} &&
    ip link set port{0} master hub up && ip -n rank{0} link set lo up &&
    ip -n rank{0} addr add 10.0.0.{1}/16 dev eth0 && ip -n rank{0} link set eth0 up"""
# The burst is as small as packets of 64 KiB allow: a larger one fills while ranks compute, and lets so much of the
# next exchange pass at once, as if it had been hidden.
FILTER = "tc qdisc replace dev {} root tbf rate {} burst 70kb latency 50ms"


def slow_network(device, rate):
    """Gives a device of this network namespace a rate for what it sends. → why not, or nothing."""
    command = f"tc qdisc del dev {device} root" if rate == "unlimited" else FILTER.format(device, rate)
    done = subprocess.run(command.split(), capture_output=True, text=True)
    # there is nothing to delete where the rate was not limited
    return done.stderr.strip() if done.returncode and rate != "unlimited" else ""


def private_network():
    """→ a command that runs another one where networks may be made that nobody else sees; or None, and why."""
    why = "there are no programs unshare, nsenter, mount, ip and tc (util-linux and iproute2)"
    if all(map(shutil.which, ("unshare", "nsenter", "mount", "ip", "tc"))):
        test = f"{HUB} && {LINK.format(0, 1)} && {FILTER.format('port0', '1gbit')}"
        for way in (["unshare", "-nm"], ["unshare", "-rnm"]):   # as root, or as root of a namespace of users
            done = subprocess.run([*way, "sh", "-c", test], capture_output=True, text=True)
            if done.returncode == 0:
                return way, ""
            why = (done.stderr.strip().splitlines() or ["it failed without a word"])[-1]
    return None, why


def variants_of(cfg, world):
    """The two settings to compare on `world` ranks: nothing runs beside an exchange, or all that can."""
    micro = cfg.micro_batch or 1
    dp = parallel.sizes_of(cfg, world).dp if world % (cfg.tp * cfg.cp * cfg.pp) == 0 else 1
    cfg = dataclasses.replace(cfg, micro_batch=micro, global_batch=dp * cfg.microbatches * micro)
    return [dataclasses.replace(cfg, overlap="none", defer_wgrad=False), dataclasses.replace(cfg, overlap="pair")]


def could_hide(m, compute_s, exchange_s):
    """The seconds of exchanges that a step of m microbatches can hide: one of them is first and has nothing beside
    it, and no more is hidden than there is work to hide it behind."""
    return (m - 1) / m * min(compute_s, exchange_s)


def overlap(argv):
    """How much of the exchanges do overlap=pair and defer_wgrad hide? The network is made on this machine, in
    namespaces of its own: it costs no computing time to be slow, and nothing outside notices."""
    ranks = int(os.environ.get("WORLD_SIZE", 0))
    check = lambda cfg: [f"on {world} ranks: {problem}" for world in ([ranks] if ranks else cfg.nproc)
                         for problem in train.check(variants_of(cfg, world)[0], world)]
    cfg = load(OverlapConfig, argv, check)
    if ranks:
        return overlap_on_a_rank(cfg, ranks)
    if "INSIDE" not in os.environ:
        way, why = private_network()
        if way is None:
            print("bench.py overlap makes a slow network of its own: unshare -nm, then for each rank a link (veth) to "
                  f"a bridge, and a token bucket filter (tc) on it. That is not possible here ({why}); it takes root, or "
                  "namespaces for users. Nothing was measured.")
            return 0
        return subprocess.run([*way, sys.executable, *sys.argv], env={**os.environ, "INSIDE": "1"}).returncode
    links = [LINK.format(rank, rank + 1) for rank in range(max(cfg.nproc))]
    subprocess.run(["sh", "-c", " && ".join([HUB, *links])], check=True)
    for rate in cfg.rates:
        if why := slow_network("lo", rate):
            say_error(f"rates: tc does not take {rate!r} ({why.splitlines()[0]})")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for world in cfg.nproc:
            found = Path(folder) / f"{world}.json"
            if code := start_ranks(world, sys.argv, inside="nsenter --net=/run/netns/rank{}", FIGURES=found,
                                   MASTER_ADDR="10.0.0.1", GLOO_SOCKET_IFNAME="eth0"):
                return code
            rows += json.loads(found.read_text())
    write_json(cfg.json, {"microbatches": cfg.microbatches, "rounds": cfg.rounds, "rows": rows})
    return 0


def overlap_on_a_rank(cfg, world):
    variants, m, rows = variants_of(cfg, world), cfg.microbatches, []
    trainers = [train.Trainer(variant, world) for variant in variants]
    for rate in cfg.rates:
        slow_network("eth0", rate)
        torch.distributed.barrier()
        none, pair = ([{name: train.mean(turn, name) for name in ("step_s", "a2a_share")} for turn in turns]
                      for turns in alternate(trainers, cfg.rounds, cfg.steps))
        for turn in none + pair:
            turn["wait_s"] = turn["step_s"] * turn["a2a_share"]
        middle = lambda turns, name: statistics.median(turn[name] for turn in turns)
        none_s, exchange_s, pair_s = middle(none, "step_s"), middle(none, "wait_s"), middle(pair, "step_s")
        compute_s = none_s - exchange_s
        possible_s = could_hide(m, compute_s, exchange_s)
        gains = spread([a["step_s"] / b["step_s"] for a, b in zip(none, pair)])
        rows.append({
            "ranks": world, "rate": rate, "compute_s": compute_s, "none_s": none_s, "pair_s": pair_s,
            "wait_none_s": exchange_s, "wait_pair_s": middle(pair, "wait_s"),
            "exchange_share": exchange_s / none_s,
            "hidden_share": (none_s - pair_s) / possible_s, "ideal_s": none_s - possible_s,
            "speedup": gains["median"], "speedup_low": gains["low"], "speedup_high": gains["high"],
            "ideal_speedup": none_s / (none_s - possible_s)})
    cfg = variants[0]
    say(f"{world} ranks with a link each, {m} microbatches of {cfg.micro_batch}×{cfg.seq_len} tokens per "
        f"rank, none and pair alternated {cfg.rounds} times; medians",
        *table(rows, {"rate": "", "none_s": ".3f", "compute_s": ".3f", "wait_none_s": ".3f", "exchange_share": ".0%",
                      "pair_s": ".3f", "wait_pair_s": ".3f", "ideal_s": ".3f", "hidden_share": ".0%",
                      "speedup": ".2f", "speedup_low": ".2f", "speedup_high": ".2f", "ideal_speedup": ".2f"}),
        "none: nothing runs beside an exchange, weight gradients neither; compute: the step with none, less the time "
        "it waited for exchanges; hidden: what pair saves, of the "
        "(m-1)/m·min(compute, wait) that it could; ideal: with all of that saved")
    if int(os.environ["RANK"]) == 0:
        write_json(os.environ["FIGURES"], rows)
    for trainer in trainers:
        trainer.close()
    parallel.finish()
    return 0


# --------------------------------------------------------------------------------------------------
# memory: what a block keeps for backward


@dataclass
class BlockMemoryConfig(train.Config):
    """Knobs of `python bench.py memory`; what recompute and offload ask for gets a line of its own."""

    program = "bench.py memory"

    json: str = knob("", "file for the figures")


def middle_stage(cfg, dense):
    """`cfg` with one block on each of three pipeline stages, of which the middle one holds nothing else, and
    static shapes: no kernel runs, so nobody could say how many rows a dropless exchange brings."""
    return dataclasses.replace(cfg, n_layer=3, n_dense_layers=3 if dense else 0, pp=3, vpp=1, pp_layout=(),
                               bf16_layers=0, ep=cfg.ep or 1, micro_batch=cfg.micro_batch or 1,
                               capacity_factor=cfg.capacity_factor or 1.0)


def check_block(cfg):
    plane = math.lcm(cfg.tp * cfg.cp, cfg.etp * max(cfg.ep, 1))
    parts = [part.check(cfg) for part in (memory, train.dispatch, train.moe, train.models)]
    parts.append(kernels.check_precision(cfg, torch.device("cpu")))
    return sum(parts, parallel.check(middle_stage(cfg, False), 3 * plane))


def pretend(cfg):
    """Makes this process the first rank of the middle stage of ranks that do not exist."""
    plane = math.lcm(cfg.tp * cfg.cp, cfg.etp * max(cfg.ep, 1))
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=plane, world_size=3 * plane)
    kernels.SWIGLU_ROWS = 2**13     # there is no cache to stay in, and fewer blocks are traced sooner


def block_memory(cfg):
    """Bytes of one block's forward and backward on one microbatch, from shapes alone: what it keeps between the
    two (apart from its input, which it keeps whatever the knobs say), what waits on the host, the peak of both."""
    world, cpu = torch.distributed.get_world_size(), torch.device("cpu")
    layout = parallel.Layout(parallel.sizes_of(cfg, world), cpu)
    dtype = torch.float32 if cfg.precision == "fp32" else torch.bfloat16
    with FakeTensorMode():
        with torch.device("meta"):
            model = train.models.Model(cfg, layout)
        optimizer = optim.Optimizer(cfg, model, layout, dtype, cpu)
        tokens = torch.zeros(cfg.micro_batch, cfg.seq_len, dtype=torch.int64)
        here = cfg.micro_batch * cfg.seq_len // (cfg.cp * cfg.tp)
        slots = train.dispatch.capacity(cfg, here, train.dispatch.sharing(cfg, layout.ep.size))
        batch = train.moe.Batch(layout, tokens, tokens, slots, aux_scale=1.0)
        x_TD, dy_TD = (torch.empty(here, cfg.d_model, dtype=dtype) for _ in range(2))
        tape = parallel.Tape()
        tape.inlet, entered = parallel.Inlet.enter(x_TD)
        with memory.Watch(cpu, **optimizer.held(), stream=[x_TD, dy_TD]) as watch:
            parallel.together(tape.forward(model(batch, 0, entered)))
            del entered
            memory.settle()
            kept, host = watch.total, watch.totals[memory.HOST]
            parallel.together(tape.backward(dy_TD))
            kernels.drain_weight_gradients()
    return kept, host, watch.peak


def memory_command(argv):
    """What would one block of my model keep for backward, and what does each choice save?"""
    cfg = load(BlockMemoryConfig, argv, check_block)
    pretend(cfg)
    rows = []
    for block in ("MoE", "dense")[:1 + (cfg.n_dense_layers > 0)]:
        plain = dataclasses.replace(middle_stage(cfg, block == "dense"), recompute=(), offload=())
        parts = [p for p in memory.PARTS if (p != "mla_up" or cfg.attention == "mla")
                 and p not in (("moe", "moe_act") if block == "dense" else ("mlp",))]
        cheap = tuple(p for p in parts if p in ("norm", "moe_act", "mla_up"))
        choices = [{}, *({"recompute": (p,)} for p in (*parts, "full")), {"recompute": cheap},
                   *({"offload": (p,)} for p in parts)]
        if cfg.recompute or cfg.offload:
            choices.append({"recompute": cfg.recompute, "offload": cfg.offload})
        everything, *_ = block_memory(plain)
        for choice in choices:
            kept, host, peak = block_memory(dataclasses.replace(plain, **choice))
            name = " ".join(f"{knob}={','.join(value)}" for knob, value in choice.items() if value)
            rows.append({"block": block, "choice": name or "keep everything", "kept MB": kept / 1e6,
                         "saved MB": (everything - kept) / 1e6, "host MB": host / 1e6, "peak MB": peak / 1e6})
    torch.distributed.destroy_process_group()
    print(f"one block, {plain.micro_batch}×{cfg.seq_len} tokens, tp {cfg.tp}, cp {cfg.cp}, ep {plain.ep}, etp "
          f"{cfg.etp}, {plain.capacity_factor} times the balanced share of slots. kept: for backward, apart from "
          f"the block's input; peak: of forward and backward, with torch's kernels")
    print(*table(rows, {"block": "", "choice": "", "kept MB": ",.1f", "saved MB": ",.1f", "host MB": ",.1f",
                        "peak MB": ",.1f"}), sep="\n")
    write_json(cfg.json, rows)
    return 0


# --------------------------------------------------------------------------------------------------
# ablate: what one knob does to the loss


@dataclass
class AblateConfig(train.Config):
    """Knobs of `python bench.py ablate`. Every run has an out_dir of its own, gone when it has ended."""

    program = "bench.py ablate"

    nproc: int = knob(4, "ranks of each run", least=1)
    values: tuple[str, ...] = knob((), "separated by commas; the first is what the others are compared with")
    seeds: tuple[int, ...] = knob((1, 2, 3), "one run each: other initial values, other order of the data", least=0)
    json: str = knob("", "file for the figures")
    knob: str = knob("", "the one that takes each of --values")     # last: here the name of the function ends


def ablate(argv):
    """Trains from scratch with every value and seed, one run after the other, as train.py would with the same words.
    Seeds turn slowest, so that a machine that grows slower is no value's fault."""
    of_bench = {field.name for field in dataclasses.fields(AblateConfig)} - {
        field.name for field in dataclasses.fields(train.Config)}
    common = [word for word in argv if word.removeprefix("--").partition("=")[0] not in of_bench]
    world = world_of(argv, AblateConfig.nproc)
    check_run = lambda cfg: train.check(cfg, world) + [
        problem for problem, found in (
            (f"knob={cfg.knob} is no knob of train.py that could be varied: --help lists them",
             cfg.knob not in as_dict(train.Config()) or cfg.knob in ("seed", "out_dir")),
            ("values has nothing to try: set --values=a,b", not cfg.values),
            ("eval_steps=0 leaves no validation loss to compare: set eval_steps=8", not cfg.eval_steps)) if found]
    cfg = load(AblateConfig, argv, check_run)
    runs = [(value, [*common, f"--{cfg.knob}={value}"]) for value in cfg.values]
    for _, words in runs:
        load(train.Config, words, lambda cfg: train.check(cfg, world))
    found = {value: [] for value in cfg.values}
    for seed, (value, words) in itertools.product(cfg.seeds, runs):
        with tempfile.TemporaryDirectory() as folder:
            own = [f"--seed={seed}", f"--out_dir={folder}", "--eval_interval=0", "--save_interval=0"]
            failed = start_ranks(world, [train.__file__, *words, *own], subprocess.DEVNULL)
            path = Path(folder) / "metrics.jsonl"
            rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        if failed or rows[-1].get("val_loss") is None:
            print(f"error: the run with --{cfg.knob}={value} --seed={seed} did not end with a finite loss",
                  file=sys.stderr)
            return 1
        speed = statistics.median(row["tokens_per_s"] for row in rows[len(rows) // 10:])
        found[value].append({"seed": seed, "val_loss": rows[-1]["val_loss"], "tokens_per_s": speed})
        print(f"--{cfg.knob}={value} --seed={seed}: validation loss {rows[-1]['val_loss']:.4f}, {speed:,.0f} tokens/s",
              flush=True)
    lines, first = [], None
    for value, results in found.items():
        losses = [result["val_loss"] for result in results]
        # by seeds: each of them begins with the same weights and sees the same data under every value
        first = first or losses
        against = [loss / other - 1 for loss, other in zip(losses, first)]
        lines.append({cfg.knob: value, "val loss": statistics.mean(losses), "low": min(losses), "high": max(losses),
                      f"against {cfg.values[0]}": statistics.mean(against), "from": min(against), "to": max(against),
                      "tokens/s": statistics.median(result["tokens_per_s"] for result in results)})
    formats = dict(zip(lines[0], ["", ".4f", ".4f", ".4f", "+.2%", "+.2%", "+.2%", ",.0f"]))
    print(f"{cfg.max_steps} steps on {world} ranks, {len(cfg.seeds)} seeds each; validation loss: mean, lowest and "
          f"highest; tokens/s: median", *table(lines, formats), sep="\n")
    write_json(cfg.json, {"knob": cfg.knob, "steps": cfg.max_steps, "ranks": world, "runs": found})
    return 0


# --------------------------------------------------------------------------------------------------

COMMANDS = {"check": check, "kernels": kernels_command, "ab": ab, "overlap": overlap, "memory": memory_command,
            "ablate": ablate}


def main(argv):
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python bench.py {{{','.join(COMMANDS)}}} [--key=value ...]   (--help after a command)",
              file=sys.stderr)
        raise SystemExit(2)
    train.end_with_launcher()
    return COMMANDS[argv[0]](argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
