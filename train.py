"""Train a mixture-of-experts language model.

    torchrun --nproc_per_node=4 train.py                                  four ranks, experts spread over them
    python train.py config/tiny.py --lr=1e-3                              one process, other settings
    python train.py --help                                                every knob

The same command again goes on from the newest checkpoint in out_dir. The file reads top to bottom: what is
checked, what a step is, what is logged, how a run ends early, and the loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import resource
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

LAUNCHER = os.getppid()     # asked before the slow imports, during which the launcher may die

import torch
import torch.distributed as dist

import checkpoint
import data
import dispatch
import kernels
import memory
import model as models
import moe
import optim
import parallel
from kernels import Clock, KernelConfig, clock, dtype_of, peak_flops
from parallel import execute, ledger, schedule
from settings import as_dict, knob, load, parse


@dataclass
class TrainConfig:
    data: str = knob("", "folder with train.bin and val.bin; empty: the Python standard library's sources")
    out_dir: str = knob("out", "folder for metrics.jsonl and checkpoints, of one run at a time")
    seed: int = knob(1337, "seed of initial values and data order", least=0)
    max_steps: int = knob(200, "optimizer steps", least=1)
    global_batch: int = knob(16, "sequences per optimizer step, over all ranks", least=1)
    micro_batch: int = knob(0, "sequences per data-parallel rank at once; 0: its whole share", least=0)
    log_interval: int = knob(10, "steps between console lines (metrics.jsonl has every step)", least=1)
    eval_interval: int = knob(100, "steps between evaluations; 0: only at the end", least=0)
    eval_steps: int = knob(8, "global batches of held-out text per evaluation, always the same; 0: none", least=0)
    save_interval: int = knob(100, "steps between checkpoints; 0: only at the end", least=0)
    keep: int = knob(2, "newest checkpoints that stay", least=1)
    resume: str = knob("auto", "auto: go on from the newest whole checkpoint in out_dir, if any; none: start anew, "
                       "in an out_dir without any; or the path of one")
    init_from: str = knob("", "hf:FOLDER starts from the weights of a model in Hugging Face's layout, whose "
                          "architecture it takes; upcycle:FOLDER from a dense one, whose MLP each expert copies")
    cuda_graph: bool = knob(False, "capture forward, backward and reduction once, and replay them (GPU and "
                            "capacity only; exchange and GEMM times are not measured then)")
    timeout_s: int = knob(600, "seconds after which a collective that some rank never joins ends the run", least=1)
    wandb: bool = knob(False, "log to Weights & Biases too (WANDB_MODE=offline: to files in out_dir)")
    wandb_project: str = knob("foldmoe", "its project there")
    run_name: str = knob("", "its name there; empty: theirs")
    on_nan: str = knob("stop", "a step whose gradients are not finite never changes the model; then stop, or "
                       "skip it and go on", choices=("stop", "skip"))
    device: str = knob("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))
    memory_report: bool = knob(False, "print what the first step's memory is made of")


@dataclass
class Config(KernelConfig, memory.MemoryConfig, parallel.ParallelConfig, dispatch.DispatchConfig, moe.MoEConfig,
             models.ModelConfig, optim.OptimConfig, TrainConfig):
    """Every knob, flat."""


# --------------------------------------------------------------------------------------------------
# Before anything is built


def check(cfg, world):
    """Every reason why `cfg` cannot train on `world` ranks."""
    problems = parallel.check(cfg, world)
    if not problems:
        dp = parallel.sizes_of(cfg, world).dp
        at_once = dp * max(cfg.micro_batch, 1)
        if cfg.global_batch % at_once:
            problems.append(f"global_batch={cfg.global_batch} is not a multiple of dp*micro_batch = {dp}*"
                            f"{max(cfg.micro_batch, 1)} = {at_once}: change global_batch or micro_batch")
        tokens = max(cfg.micro_batch, 1) * cfg.seq_len // cfg.cp
        if tokens % cfg.tp:
            problems.append(f"tp={cfg.tp} does not divide the micro_batch*seq_len/cp = {max(cfg.micro_batch, 1)}*"
                            f"{cfg.seq_len}/{cfg.cp} = {tokens} tokens: change tp or seq_len")
        if not cfg.global_batch % at_once:
            problems += parallel.check_microbatches(cfg, cfg.global_batch // at_once if cfg.micro_batch else 1)
    for part in (memory, dispatch, moe, models, optim):
        problems += part.check(cfg)
    problems += kernels.check(cfg, device_of(cfg)) + checkpoint.check_init(cfg, cfg.init_from)
    if cfg.cuda_graph and not cfg.capacity_factor:
        problems.append("cuda_graph=true replays fixed shapes, but capacity_factor=0 is dropless: set "
                        "capacity_factor to about 1.25 (with on_overflow=rerun nothing is lost), or cuda_graph=false")
    if cfg.cuda_graph and cfg.offload:
        problems.append(f"cuda_graph=true replays fixed addresses, but offload={','.join(cfg.offload)} sends tensors to "
                        f"memory that others use between replays: set cuda_graph=false, or leave offload out")
    if cfg.cuda_graph and device_of(cfg).type != "cuda":
        problems.append("cuda_graph=true needs a GPU, but the device is a CPU: set cuda_graph=false")
    if cfg.device == "cuda" and not torch.cuda.is_available():
        problems.append("device=cuda, but torch sees no GPU: set device=cpu or auto")
    elif device_of(cfg).type == "cuda" and int(os.environ.get("LOCAL_RANK", 0)) >= torch.cuda.device_count():
        problems.append(f"{os.environ.get('LOCAL_WORLD_SIZE')} ranks on a node with {torch.cuda.device_count()} "
                        f"GPUs: lower torchrun's --nproc_per_node")
    if Path(cfg.out_dir).exists() and not Path(cfg.out_dir).is_dir():
        problems.append(f"out_dir={cfg.out_dir} is a file: choose another out_dir")
    try:
        vocab_size = data.open_data(cfg.data, cfg.seq_len, cfg.vocab_size).vocab_size
        if not cfg.vocab_size and vocab_size % cfg.tp:
            problems.append(f"tp={cfg.tp} does not divide the data's vocabulary of {vocab_size}: set vocab_size to "
                            f"{-(-vocab_size // cfg.tp) * cfg.tp}")
    except data.DataError as error:
        problems.append(str(error))
    return problems


def device_of(cfg):
    cuda = cfg.device == "cuda" or cfg.device == "auto" and torch.cuda.is_available()
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")


def join(cfg):
    """Makes this process a rank of the job, if it is not one yet, and returns its device."""
    device = device_of(cfg)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    parallel.init(device, cfg.timeout_s)
    return device


# --------------------------------------------------------------------------------------------------
# A step


class Result:
    """What a step leaves behind for the log. Sums over all ranks are on their way to the host: reading them
    at once would stop a GPU, so `read` them a step later."""

    def __init__(self, step, lr, norm, sums, rerun=False):
        self.step, self.lr, self.rerun = step, lr, rerun
        self.spans, self.ledger, self.sums = clock.take(), ledger.take(), torch.cat([sums, norm[None].double()])
        if sums.is_cuda:
            self.sums = torch.empty_like(self.sums, device="cpu", pin_memory=True).copy_(self.sums, non_blocking=True)
        self.end = clock.mark(sums.device)

    def since(self, start):
        """Takes the step to have begun at `start` (Clock.mark): where the one before ended, since the host may be a step
        ahead of the device. Returns its end."""
        self.spans["step"] = [(start, self.end)]
        return self.end

    def read(self):
        if isinstance(self.end, torch.cuda.Event):
            self.end.synchronize()
        return self.sums.tolist()


class Trainer:
    """A model, its optimizer and its data on this rank. bench.py and the tests use the same one."""

    def __init__(self, cfg, world=None):
        self.device = join(cfg)
        sizes = parallel.sizes_of(cfg, world or torch.distributed.get_world_size())
        self.data = data.open_data(cfg.data, cfg.seq_len, cfg.vocab_size)
        self.cfg = cfg = dataclasses.replace(cfg, vocab_size=cfg.vocab_size or self.data.vocab_size,
                                             micro_batch=cfg.micro_batch or cfg.global_batch // sizes.dp)
        kernels.use(cfg, self.device)   # also says how many multiprocessors messages may have
        self.layout = parallel.Layout(sizes, self.device)
        self.microbatches = cfg.global_batch // (sizes.dp * cfg.micro_batch)
        self.capacity = dispatch.capacity(cfg, cfg.micro_batch * cfg.seq_len // (sizes.cp * sizes.tp),
                                          dispatch.sharing(cfg, sizes.ep))
        with torch.device("meta"):
            self.model = models.Model(cfg, self.layout)
        # of the cross entropy of the next token and of those beyond it, in the objective
        self.loss_weights = torch.tensor([1.0] + [cfg.mtp_coef / cfg.n_mtp for _ in range(cfg.n_mtp)],
                                         device=self.device)
        self.dtype = dtype_of(cfg.precision, self.device)
        self.optimizer = optim.Optimizer(cfg, self.model, self.layout, self.dtype, self.device)
        models.init_weights(self.model, cfg.seed)
        self.optimizer.start()
        self.graph = Graph(self) if cfg.cuda_graph else None

    def _batch(self, tokens, windows, **how):
        return moe.Batch(self.layout, *data.batch(tokens, windows, self.cfg.seq_len), **how)

    def batches(self, step, capacity=None):
        """This rank's microbatches of step `step` (from 0), with `capacity` slots (by default the configured ones;
        0: dropless)."""
        capacity = self.capacity if capacity is None else capacity
        cfg, n = self.cfg, self.data.train.n_windows(self.cfg.seq_len)
        for i in range(self.microbatches):
            ids = data.sample_ids(step, i, self.layout.dp.rank, global_batch=cfg.global_batch,
                                  micro_batch=cfg.micro_batch, dp=self.layout.dp.size)
            windows = [data.window_of(cfg.seed, j, n) for j in ids]
            yield self._batch(self.data.train, windows, capacity=capacity, n_mtp=cfg.n_mtp,
                              aux_scale=1 / (self.microbatches * self.layout.dp.size))

    def forward_backward(self, batches):
        """Leaves the gradient of the objective, summed over this rank's microbatches, in every .grad.
        → (this rank's sum of cross entropy, zero but on the last pipeline stage; the global number of valid
        tokens), on the device, each [1 + n_mtp]: of the next token and of those beyond it."""
        depths = [batches]      # a position's further tokens have their own valid labels and counted tokens
        for _ in range(self.cfg.n_mtp):
            depths.append([batch.ahead for batch in depths[-1]])
        counts = torch.stack([torch.stack([sum((b.labels_T != -100).sum() for b in depth) for depth in depths]),
                              torch.stack([sum(b.counted_T.sum() for b in depth) for depth in depths])])
        valid, counted = self.layout.plane.all_reduce(counts).clamp_min(1).unbind()
        for depth, *scales in zip(depths, self.loss_weights / valid, 1 / counted):
            for batch in depth:
                batch.loss_scale, batch.z_scale = scales
        self.optimizer.start_gather()
        self.optimizer.zero_grad()
        for layer in self.model.moes.values():
            layer.stats.reset()
        cells = schedule(self.layout.pp.rank, self.layout.pp.size, self.cfg.vpp, len(batches),
                         self.cfg.overlap == "pair")
        losses = execute(cells, self.model, batches, self.optimizer.ready)
        loss = sum(losses, torch.zeros_like(self.loss_weights))
        # a tensor-parallel group has one loss, which all its ranks computed
        return loss if self.layout.tp.rank == 0 else torch.zeros_like(loss), valid

    def gradients(self, batches):
        """forward_backward and the sum over ranks. → (what it returns, and the global gradient norm)."""
        return *self.forward_backward(batches), self.optimizer.reduce()

    def step(self, step):
        """One optimizer step (from 0)."""
        rank, world = self.layout.world.rank, self.layout.world.size
        loss, valid, norm = (self.graph or self.gradients)(list(self.batches(step)))
        rerun = self.cfg.on_overflow == "rerun" and self.overflowed()
        if rerun:   # everything that an attempt leaves behind is cleared or replaced by the next one
            loss, valid, norm = self.gradients(list(self.batches(step, capacity=0)))
        skip = ~norm.isfinite()
        finite = torch.zeros(world, dtype=torch.float64, device=self.device)
        finite[rank] = loss.isfinite().all()
        stats = [layer.stats for layer in self.model.moes.values()]
        zero, losses = loss.new_zeros(()), self.loss_weights * loss / valid
        # a row per MoE layer of the whole model, so that all ranks, whatever their stage holds, reduce alike
        loads = torch.zeros(models.n_moe_layers(self.cfg), 1 + self.cfg.num_experts, dtype=torch.float64,
                            device=self.device)
        for i, layer in self.model.moes.items():
            loads[i - self.cfg.n_dense_layers] = torch.cat([layer.stats.kept_E.sum()[None], layer.stats.counts_E])
        sums = torch.stack([losses[0], sum((s.aux for s in stats), zero), sum((s.z for s in stats), zero),
                            losses[1:].sum()])
        sums = torch.cat([sums.double(), finite, loads.flatten()])
        self.layout.world.all_reduce(sums)
        if self.cfg.bias_update_rate:
            loads = sums[4 + world:].view_as(loads)
            for i, layer in self.model.moes.items():
                layer.router.update_bias(loads[i - self.cfg.n_dense_layers, 1:], skip)
        lr = optim.learning_rate(self.cfg, step, self.cfg.max_steps)
        self.optimizer.step(lr, norm, skip)
        return Result(step + 1, lr, norm, sums, rerun)

    def overflowed(self):
        """Did any rank drop a choice since the last forward_backward began? The host waits for the answer."""
        stats = [layer.stats for layer in self.model.moes.values()]
        dropped = sum(((s.counts_E - s.kept_E).sum() for s in stats), torch.zeros((), dtype=torch.int64,
                                                                                  device=self.device))
        return self.layout.world.all_reduce(dropped).item() > 0

    def evaluate(self):
        """Mean cross entropy over the first eval_steps global batches of held-out text, or all there is.
        Dropless, and without a trace in counters, bias or gradients."""
        cfg, share = self.cfg, self.cfg.global_batch // self.layout.dp.size
        n = min(cfg.eval_steps * cfg.global_batch, self.data.val.n_windows(cfg.seq_len))
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for first in range(0, n, cfg.global_batch):
            for i in range(0, share, cfg.micro_batch):
                at = first + self.layout.dp.rank * share + i
                # every rank takes every step: where text runs out, its windows are padding
                windows = [w if w < n else -1 for w in range(at, at + cfg.micro_batch)]
                batch = self._batch(self.data.val, windows)
                loss = models.run(self.model, batch)    # zero but on the last stage
                total += torch.cat([loss.double(), (batch.labels_G != -100).sum()[None]])
        self.layout.onward.flush()
        loss, count = self.layout.world.all_reduce(total).tolist()
        clock.take(), ledger.take()     # no part of the next step
        return loss / (count / self.layout.pp.size)     # each stage counted the same labels

    def save(self, done, wandb_id=None):
        """The state after `done` steps, as a checkpoint in out_dir. Collective."""
        about = {"config": as_dict(self.cfg), "samples": done * self.cfg.global_batch, "wandb": wandb_id,
                 "data": str(self.data.folder.resolve()), "tokenizer": self.data.tokenizer}
        checkpoint.save(self.cfg.out_dir, done, self.cfg.keep, self.model, self.optimizer, self.layout, about)

    def close(self):
        """NCCL would not end before the last graph with its work in it has."""
        if self.graph and self.graph.graph:
            torch.cuda.synchronize()
            self.graph.graph.reset()

    def sample(self, length=128):
        """A continuation of the first held-out tokens."""
        prompt = self.data.val.ids[:32].tolist()
        ids = prompt + list(models.generate(self.model, prompt, length))
        return self.data.decode(ids) if self.data.tokenizer else str(ids)


class Graph:
    """Trainer.gradients as one CUDA graph: the host launches one thing instead of thousands.

    The first steps run as they are, on a stream of their own, so that libraries and communicators are set up. The
    next one is captured, beginning with the parameters' way to their owners, and from then on replayed: every tensor
    has its fixed place, and microbatches are copied to where the captured ones lie. What a capture leaves in Python
    (gradients of masters, the layers' statistics) is put back after each replay, because a repeated step or an
    evaluation may have come between.
    """

    WARM_UP = 3

    def __init__(self, trainer):
        self.trainer, self.calls, self.graph = trainer, 0, None

    def __call__(self, batches):
        self.calls += 1
        if self.calls == 1:
            self.stream = torch.cuda.Stream()
        if self.calls <= self.WARM_UP:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                results = self.trainer.gradients(batches)
            torch.cuda.current_stream().wait_stream(self.stream)
            return results
        if self.graph is None:
            self.capture(batches)
        for captured, batch in zip(self.batches, batches):
            captured.take(batch)
        self.graph.replay()
        for family, grad in self.grads:
            family.master.grad, family.stale = grad, False
        for layer, stats in self.stats:
            vars(layer.stats).update(stats)
        return self.results

    def capture(self, batches):
        families, layers = self.trainer.optimizer.families, self.trainer.model.moes.values()
        # whoever read the parameters since the last update: bringing them to their owners is captured
        self.trainer.optimizer.changed()
        self.batches, self.graph = batches, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.results = self.trainer.gradients(batches)
        self.grads = [(family, family.master.grad) for family in families]
        self.stats = [(layer, dict(vars(layer.stats))) for layer in layers]


# --------------------------------------------------------------------------------------------------
# What the user sees


def measure(trainer, result, peak, stop=False):
    """→ (the row of metrics.jsonl for a step, tokens per expert before drops [layers, E], whether some rank was
    asked to stop). Collective: ranks tell each other their times. peak: of this rank, FLOPS, or None."""
    cfg, world = trainer.cfg, trainer.layout.world
    (loss, aux, z, mtp, *rest), norm = (sums := result.read())[:-1], sums[-1]
    layers = models.n_moe_layers(cfg)
    loads = torch.tensor(rest[world.size:], dtype=torch.float64).view(layers, 1 + cfg.num_experts)
    kept, counts = loads[:, 0].sum().item(), loads[:, 1:]
    memory = (torch.cuda.max_memory_allocated() if trainer.device.type == "cuda"
              else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    mine = [*(sum(Clock.durations(result.spans, name)) for name in ("step", "exchange", "gemm")), memory / 1e9,
            peak or 0.0, stop]
    times = torch.zeros(world.size, len(mine), dtype=torch.float64)
    times[world.rank] = torch.tensor(mine)
    world.all_reduce(times)
    step_s, peak, stop = times[:, 0].max().item(), times[:, 4].mean().item(), bool(times[:, 5].any())
    tokens, assigned = cfg.global_batch * cfg.seq_len, counts.sum().item()
    dropped = 1 - kept / assigned if assigned else 0.0
    tflops = models.flops_per_token(cfg, 1 - dropped) * tokens / world.size / step_s / 1e12
    # three products, each forward and twice backward; a full recompute runs them again, one of experts two of them
    times_run = 3 + ("full" in cfg.recompute) + 2 / 3 * ("moe" in cfg.recompute)
    gemm_flops = kept * 6 * cfg.d_expert * cfg.d_model * times_run
    gemm_room = (times[:, 2] * times[:, 4]).sum().item()
    row = {
        "step": result.step, "tokens": result.step * tokens, "loss": loss,
        "aux_loss": aux / max(layers, 1), "z_loss": z / max(layers, 1),
        **({"mtp_loss": mtp} if cfg.n_mtp else {}), "lr": result.lr, "grad_norm": norm,
        "tokens_per_s": tokens / step_s, "tflops_per_gpu": tflops, "mfu": tflops * 1e12 / peak if peak else None,
        "drop_fraction": dropped, **({"rerun": int(result.rerun)} if cfg.on_overflow == "rerun" else {}),
        "load_imbalance": (counts.amax(1) / counts.mean(1)).mean().item() if assigned else None,
        "a2a_share": None if trainer.graph and trainer.graph.graph else (times[:, 1] / times[:, 0]).mean().item(),
        # (what Transformer Engine computes is not timed)
        "gemm_efficiency": gemm_flops / gemm_room if gemm_room and (
            cfg.emulate or cfg.precision not in kernels.RECIPES) else None,
        "memory_gb": times[:, 3].max().item(), "step_s": step_s}
    row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
    return row, counts, stop


def mean(rows, name):
    """Of a column, over the rows that have it; None if none has."""
    values = [row[name] for row in rows if row[name] is not None]
    return sum(values) / len(values) if values else None


def columns(rows):
    """What explains a slow run, as means over some rows: [(name, value or None where it was not measured, whether it
    is fine, advice if not)]. Nothing where no row saw a token routed."""
    rows = [row for row in rows if row["load_imbalance"]]
    if not rows:
        return []
    imbalance, overflow, exposed, efficiency = (
        mean(rows, name) for name in ("load_imbalance", "drop_fraction", "a2a_share", "gemm_efficiency"))
    return [
        ("expert utilization", 1 / imbalance, 1 / imbalance > 0.7,
         "some experts wait for the fullest: raise aux_loss_coef, or set bias_update_rate=1e-3"),
        ("overflow", overflow, overflow < 0.05, "tokens are dropped: raise capacity_factor"),
        ("exposed all-to-all", exposed, exposed is None or exposed < 0.15,
         "exchanges are not hidden: give overlap=pair two microbatches or more (lower micro_batch), or lower ep"),
        ("GEMM efficiency", efficiency, efficiency is None or efficiency > 0.5,
         "experts see too few rows at once: raise micro_batch or lower ep"),
    ]


class Log:
    """metrics.jsonl, the console and, if asked, wandb. Every rank calls it; rank 0 writes.

    folder, done, wandb_id: the checkpoint that the run goes on from, its step and run id. Rows up to there stay
    (or come along, from another out_dir); later ones will be written again.
    """

    def __init__(self, trainer, folder=None, done=0, wandb_id=None):
        self.trainer, self.cfg, self.history, self.stop = trainer, trainer.cfg, [], False
        self.rank, self.world = trainer.layout.world.rank, trainer.layout.world.size
        self.peak = peak_flops(trainer.device, kernels.multiplied_dtype(self.cfg, trainer.device))
        self.counts = models.parameter_counts(trainer.model)    # all ranks together
        self.file, rows = None, None
        if self.rank == 0:
            rows = self.reopen(Path(folder).parent if folder else None, done)
        self.board = Wandb(self.cfg, self.counts, wandb_id, rows)

    def reopen(self, source, done):
        """→ the rows of metrics.jsonl in `source` that stay. The file is never seen half written."""
        path, rows = Path(self.cfg.out_dir) / "metrics.jsonl", []
        path.parent.mkdir(parents=True, exist_ok=True)
        if source and (source / path.name).exists():
            for line in (source / path.name).read_text().splitlines():
                with contextlib.suppress(ValueError):   # a kill may have cut the last line
                    rows.append(json.loads(line))
        rows = [row for row in rows if row["step"] <= done]
        aside = path.with_suffix(".partial")
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows))
        aside.rename(path)
        self.file = open(path, "a")
        return rows

    def print(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def start(self):
        trainer, cfg, s = self.trainer, self.cfg, self.trainer.layout.sizes
        counts = self.counts
        local = sum(p.numel() for p in trainer.model.parameters())
        shard = sum(f.master.numel() for f in trainer.optimizer.families)
        size = torch.tensor([], dtype=trainer.dtype).element_size()
        width = lambda dtype: optim.DTYPES[dtype].itemsize
        moments = 2 * width(cfg.moment_dtype) * (cfg.optimizer == "adamw" and not cfg.offload_optimizer)
        state = local * (size + width(cfg.grad_dtype)) + shard * (moments + 4 * (size < 4))
        fullest = torch.tensor([local, state], device=trainer.device)   # pipeline stages differ
        local, state = trainer.layout.world.all_reduce(fullest, torch.distributed.ReduceOp.MAX).tolist()
        node, domain = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), parallel.nvl_domain(cfg)
        groups = {g.name: g for g in (*vars(trainer.layout).values(), *trainer.layout.owners.values())
                  if isinstance(g, parallel.Group) and g.size > 1}
        self.print(
            f"layout of {s.world} ranks   dense: pp {s.pp} · dp {s.dp} · cp {s.cp} · tp {s.tp}   "
            f"experts: pp {s.pp} · edp {s.edp} · ep {s.ep} · etp {s.etp}",
            *(f"  {g.name:6} {g.size:4} ranks, " + ("inside a node" if g.near(node) == 1 else
              "inside an NVLink domain" if g.near(domain) == 1 else "across NVLink domains") for g in groups.values()),
            f"device {trainer.device.type}, {str(trainer.dtype)[6:]}{self.precision()}, kernels "
            + ("triton" if kernels.backend.triton else "torch") + ", peak "
            + (f"{self.peak / 1e12:,.2f} TFLOPS per rank" if self.peak else "unknown: no MFU"),
            f"parameters {counts['total']:,} (active {counts['active']:,}, in experts {counts['experts']:,}), "
            + (f"and {counts['mtp']:,} for multi-token prediction, " if cfg.n_mtp else "")
            + f"{local:,} on the fullest rank",
            f"memory per rank for weights, gradients and optimizer: {state / 1e9:.2f} GB, activations come on top",
            f"batch {cfg.global_batch} sequences × {cfg.seq_len} tokens = {cfg.global_batch * cfg.seq_len:,} "
            f"= {s.dp} dp × {trainer.microbatches} microbatches × {cfg.micro_batch} sequences",
            *self.pipeline(),
            f"experts {cfg.num_experts}, top-{cfg.top_k}, "
            + (f"capacity {trainer.capacity} per source rank and {cfg.capacity_scope}" if trainer.capacity
               else "dropless"),
            f"data {len(trainer.data.train):,} tokens, {cfg.max_steps} steps are "
            f"{cfg.max_steps * cfg.global_batch / trainer.data.train.n_windows(cfg.seq_len):.2f} epochs")
        if cfg.force_balance:
            self.print("force_balance: routing is round-robin; speed is flattered and the model learns nothing useful")
        if s.ep > 1 and not parallel.inside_domain(cfg, s.ep, s.world):
            self.print(f"ep={s.ep} leaves the NVLink domain of {domain} ranks, so exchanges cross the network: "
                       f"the largest ep that stays inside is {parallel.largest_ep(cfg, s.world)} (nvl_domain sets the "
                       f"ranks of a domain)")
        if cfg.overlap == "pair" and trainer.microbatches == 1 and s.ep > 1:
            self.print("overlap=pair has a single microbatch, which runs alone: lower micro_batch to hide exchanges")
        ledger.take()   # what this table itself cost is no part of a step

    def precision(self):
        """What computes in less than the parameters' precision, if anything does."""
        cfg = self.cfg
        if cfg.precision not in kernels.RECIPES:
            return ""
        return (f" (layers {cfg.bf16_layers}-{cfg.n_layer - 1 - cfg.bf16_layers} in {cfg.precision}"
                + (", emulated" if cfg.emulate else "") + ")")

    def pipeline(self):
        """Lines about the pipeline's stages; none without one."""
        s, m, stages = self.trainer.layout.sizes, self.trainer.microbatches, parallel.stage_layers(self.cfg)
        if s.pp == 1:
            return
        for stage in range(s.pp):
            layers = ", ".join(f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
                               for layers in stages[stage::s.pp])
            most = parallel.in_flight(stage, s.pp, s.vpp, m, self.cfg.overlap == "pair")
            if self.cfg.n_mtp and stage == s.pp - 1:
                layers += f" and multi-token prediction ({self.cfg.n_mtp})"
            yield (f"  stage {stage}: layers {layers}, at most {most} microbatches in flight"
                   + (f", each on one of its {s.vpp} chunks" if s.vpp > 1 else ""))
        yield (f"  bubble {parallel.bubble(s.pp, s.vpp, m):.1%} of a step with {m} microbatches, if all stages "
               f"take equally long")

    def ledger(self, rows):
        """Traffic of one step as this rank sent it."""
        node, domain = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), parallel.nvl_domain(self.cfg)
        self.print(f"  {'traffic per step':16} {'collective':15} {'calls':>6} {'MB sent':>9} {'in node':>8} "
                   f"{'in domain':>10}",
                   *(f"  {group.name:16} {op:15} {calls:6} {sent / 1e6:9.2f} {group.near(node):8.0%} "
                     f"{group.near(domain):10.0%}" for (group, op), (calls, sent) in rows.items()))

    def memory(self, watch):
        """What the first step's memory was made of, on the rank where its peak was highest. Collective."""
        peaks = self.trainer.layout.world.gather_objects((watch.peak, self.rank, watch.apart, list(watch.table())))
        peak, rank, apart, lines = max(peaks)
        others = ", ".join(f"{name} {size / 1e6:,.1f} MB" for name, size in apart.items())
        self.print(f"  memory of the first step on rank {rank}, whose {peak / 1e6:,.1f} MB at the peak are the most; "
                   f"apart: {others}", *lines)

    def step(self, result, val_loss=None, stop=False):
        """→ True if the step was finite. Collective: ranks tell each other their times, and whether somebody was
        asked to stop: then self.stop is set on all of them."""
        cfg = self.cfg
        row, counts, self.stop = measure(self.trainer, result, self.peak, stop)
        if val_loss is not None:
            row["val_loss"] = val_loss if math.isfinite(val_loss) else None
        self.history.append(row)
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        speak = result.step % cfg.log_interval == 0 or result.step in (1, cfg.max_steps) or val_loss is not None
        if self.board.run:
            layers = range(cfg.n_dense_layers, cfg.n_layer + cfg.n_mtp)
            self.board.log(row, dict(zip(layers, counts)) if speak else {})
        if len(self.history) == 1:
            self.ledger(result.ledger)
        if speak:
            self.console(row)
        if row["grad_norm"] is not None:
            return True
        blame = [str(r) for r, finite in enumerate(result.read()[4:4 + self.world]) if not finite]
        self.print(f"step {result.step}: gradients are not finite, the model was left as it was"
                   + (f" (the loss was not finite on rank {', '.join(blame)})" if blame else ""))
        return False

    def console(self, row):
        def show(name, form, scale=1):
            return "–" if row[name] is None else format(row[name] * scale, form)

        recent = [r["step_s"] for r in self.history[-20:]]
        left = (self.cfg.max_steps - row["step"]) * sorted(recent)[len(recent) // 2]
        self.print(
            f"step {row['step']}/{self.cfg.max_steps} | loss {show('loss', '.4f')}"
            + (f" | val {row['val_loss']:.4f}" if row.get("val_loss") is not None else "")
            + (f" | mtp {show('mtp_loss', '.4f')}" if self.cfg.n_mtp else "")
            + f" | aux {show('aux_loss', '.4f')} | lr {row['lr']:.1e} | norm {show('grad_norm', '.2f')}"
            f" | {show('tokens_per_s', ',.0f')} tok/s | {show('tflops_per_gpu', '.3g')} TFLOPS/GPU"
            f" (MFU {show('mfu', '.0f', 100)} %) | drop {show('drop_fraction', '.1f', 100)} %"
            f" | imbalance {show('load_imbalance', '.2f')} | a2a {show('a2a_share', '.1f', 100)} %"
            f" | gemm {show('gemm_efficiency', '.0f', 100)} % | {show('memory_gb', '.2f')} GB"
            f" | eta {int(left) // 60}:{int(left) % 60:02}")

    def summary(self):
        """The four columns that explain a slow run, and what to do about the first that is out of range."""
        if found := columns([r for r in self.history if r["load_imbalance"]][-20:]):
            percent = lambda value: "–" if value is None else f"{value:.0%}"
            self.print(f"  {'mean of the last steps':24} {'value':>6}",
                       *(f"  {name:24} {percent(value):>6}" for name, value, *_ in found))
            self.print(next((f"  {name}: {advice}" for name, _, fine, advice in found if not fine),
                            "  all four columns are in range"))


class Wandb:
    """One run at Weights & Biases for the whole job, from rank 0. It may be missing, offline or break down at any
    time: that is a warning, once, and training goes on.

    A resumed run keeps its id and logs every step once. A run that was killed may have logged steps beyond its
    checkpoint (they come again with the same values, and are left out) or have lost its last ones (`rows`, the
    metrics up to the checkpoint, fill them in; None: this is another rank, and logs nothing).
    """

    def __init__(self, cfg, counts, run_id, rows):
        self.run, self.logged = None, 0
        if not cfg.wandb or rows is None:
            return
        with self.or_warn():
            import wandb
            self.wandb = wandb
            about = {**as_dict(cfg), **{f"parameters_{name}": count for name, count in counts.items()}}
            self.run = wandb.init(project=cfg.wandb_project, name=cfg.run_name or None, id=run_id, resume="allow",
                                  dir=cfg.out_dir, config=about, settings=wandb.Settings(silent=True))
            self.logged = max(self.run.step - 1, self.last_offline(cfg.out_dir))
            for row in rows:
                self.log(row, {})

    @property
    def id(self):
        return self.run and self.run.id

    @contextlib.contextmanager
    def or_warn(self):
        try:
            yield
        except Exception as error:
            self.run = None
            print(f"warning: wandb is off, training goes on without it: {type(error).__name__}: "
                  f"{str(error).strip().partition(chr(10))[0]}", file=sys.stderr, flush=True)

    def last_offline(self, out_dir):
        """The last step in what earlier offline runs with this id left on disk, or 0. Online the server knows."""
        from wandb.proto.wandb_internal_pb2 import Record

        files = Path(out_dir).glob(f"wandb/offline-run-*/run-{self.run.id}.wandb")
        found = (Record.FromString(data) for path in files for data in self.records(path))
        return max((record.history.step.num for record in found if record.HasField("history")), default=0)

    @staticmethod
    def records(path):
        """The records in a file of wandb's: 7 bytes, then a log as LevelDB writes it, in blocks of 32 KiB; a
        record is whole (kind 1), or in pieces: first, middle, last (2, 3, 4). A kill may have cut the end."""
        data, at, record = Path(path).read_bytes(), 7, b""
        while at + 7 <= len(data):
            room = 2**15 - at % 2**15
            if room < 7:    # too little for the head of a piece: its checksum, size and kind
                at += room
                continue
            size, kind = struct.unpack_from("<HB", data, at + 4)
            at += 7 + size
            if kind not in (1, 2, 3, 4) or at > len(data):
                return
            record += data[at - size:at]
            if kind in (1, 4):
                yield record
                record = b""

    def log(self, row, loads):
        """loads: {layer: tokens per expert before drops}; the histograms have a bar for each expert."""
        if self.run is None or row["step"] <= self.logged:
            return
        with self.or_warn():
            bars = {f"expert_load/layer_{layer}": self.wandb.Histogram(
                np_histogram=(load_E.tolist(), list(range(len(load_E) + 1)))) for layer, load_E in loads.items()}
            self.run.log({**row, **bars}, step=row["step"])
            self.logged = row["step"]

    def finish(self):
        if self.run is not None:
            with self.or_warn():
                self.run.finish()


# --------------------------------------------------------------------------------------------------
# How a run ends early


class Stop(SystemExit):
    """An end that all ranks reach alike, with the message for the user or an exit code."""


def end_with_launcher():
    """torchrun that is killed cannot end its workers, and they would race the next run: Linux ends them."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != LAUNCHER:    # it died before the line above
            os._exit(1)


class Watch:
    """Guards the loop, so that no rank outlives the others. `with Watch(...)`:

    - An exception on this rank, also a SystemExit that nobody agreed on, is printed and made known, and ends this
      process at once.
    - A failure elsewhere ends this process within a second or two, wherever it waits: a collective of NCCL would
      wait for ever.
    - A step that hangs, because some rank never joined a collective, prints where this rank stands, and ends it:
      after 8 s (on a GPU, where a kernel may have to be compiled, a minute) and five times the slowest step so far,
      or timeout_s if that is less, as for the first step. Seconds in which the whole process was suspended do not count.
    - SIGTERM only sets `asked`: the loop ends after its step. torchrun waits 30 s before it kills its workers.
    """

    def __init__(self, rank, timeout_s, device):
        self.rank, self.timeout_s, self.slowest, self.at, self.asked = rank, timeout_s, None, 0, False
        self.grace = 60 if device.type == "cuda" else 8
        self.ticks, self.limit, self.done = 0, math.inf, threading.Event()
        # a client of its own: the job's waits, under a lock, while NCCL makes a communicator
        self.store = dist.distributed_c10d._get_default_store().clone()
        self.main = threading.get_ident()

    @contextlib.contextmanager
    def step(self, number):
        """What happens inside is step `number` (from 1), and must not hang."""
        started = time.monotonic()
        self.at, self.ticks = number, 0
        self.limit = self.timeout_s if self.slowest is None else min(self.timeout_s, self.grace + 5 * self.slowest)
        yield
        self.limit = math.inf
        self.slowest = max(self.slowest or 0, time.monotonic() - started)

    def __enter__(self):
        self.before = signal.signal(signal.SIGTERM, self.ask)
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()
        return self

    def ask(self, *_):
        self.asked = True

    def watch(self):
        while not self.done.wait(1):
            self.ticks += 1
            try:
                failed = self.store.check(["failed"]) and self.store.get("failed").decode()
            except Exception:   # the store lives in the launcher or on rank 0
                failed = "the rank that keeps the store"
            if failed:
                self.leave(f"{failed} failed: this rank ends too")
            if self.ticks > self.limit:
                stack = "".join(traceback.format_stack(sys._current_frames()[self.main]))
                self.leave(f"has hung in step {self.at} for {self.ticks} s. It stands here:\n{stack}")

    def leave(self, why):
        print(f"rank {self.rank}: {why}", file=sys.stderr, flush=True)
        os._exit(1)

    def __exit__(self, kind, error, trace):
        self.done.set()
        if kind is None or issubclass(kind, Stop):
            self.thread.join()
            signal.signal(signal.SIGTERM, self.before)
            return
        lines = "".join(traceback.format_exception(kind, error, trace))
        print(f"rank {self.rank} failed in step {self.at}:\n{lines}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.store.set("failed", f"rank {self.rank}")
        os._exit(1)     # an orderly exit could wait for the other ranks


# --------------------------------------------------------------------------------------------------
# The loop


def end_all(world, line, code):
    """Ends all ranks with one line for the user, from rank 0."""
    if world.rank == 0:
        print(line, file=sys.stderr if code else sys.stdout, flush=True)
    dist.barrier()      # torchrun ends all ranks when the first has ended; the line must be out by then
    raise Stop(code) from None


def start(cfg, world):
    """→ (lock, folder and state of the checkpoint to go on from, or None). Ends the program, before anything is
    built, where that is all there is to do."""
    try:
        lock = checkpoint.lock(cfg.out_dir, world)
        folder, state, notes = checkpoint.choose(cfg.resume, cfg.out_dir, world)
        for note in notes if world.rank == 0 else ():
            print(f"warning: {note}", file=sys.stderr, flush=True)
        if folder is None:
            return lock, None, None
        vocab_size = cfg.vocab_size or data.open_data(cfg.data, cfg.seq_len).vocab_size
        cfg = dataclasses.replace(cfg, vocab_size=vocab_size)
        if other := checkpoint.other_architecture(cfg, state):
            knobs = ", ".join(f"{name}={then} (now {now})" for name, then, now in other)
            raise checkpoint.CheckpointError(f"{folder} is of another model: {knobs}. Set these back or choose "
                                             f"another out_dir")
    except checkpoint.CheckpointError as error:
        end_all(world, f"error: {error}", 2)
    if state["step"] >= cfg.max_steps:
        end_all(world, f"nothing to do: {folder} is at step {state['step']} of max_steps={cfg.max_steps}. Raise "
                       f"max_steps, or choose another out_dir than {cfg.out_dir}", 0)
    return lock, folder, state


def main(argv):
    end_with_launcher()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    # the architecture that init_from names stands before everything the user says
    argv = [*checkpoint.architecture_words(parse(Config, argv)[0].init_from), *argv]
    cfg = load(Config, argv, lambda cfg: check(cfg, ranks))
    join(cfg)
    try:
        run(cfg, ranks)
    finally:
        if sys.exc_info()[0] in (None, Stop):   # after another exception the other ranks may not be there
            parallel.finish()


def run(cfg, ranks):
    lock, folder, state = start(cfg, parallel.Group("world", tuple(range(ranks))))
    with lock or contextlib.nullcontext(), contextlib.closing(Trainer(cfg)) as trainer:
        done, wandb_id = 0, None
        if folder is not None:
            checkpoint.load(folder, state, trainer.model, trainer.optimizer, trainer.layout)
            # a run that branches off into another out_dir is another run
            done, wandb_id = state["step"], state["wandb"] if folder.parent.samefile(cfg.out_dir) else None
        elif cfg.init_from:
            try:
                checkpoint.start_from(cfg.init_from, trainer.model, trainer.layout)
            except checkpoint.CheckpointError as error:
                end_all(trainer.layout.world, f"error: {error}", 2)
            trainer.optimizer.start()
        trainer.optimizer.changed()     # the first step gathers parameters as all others do, and its traffic is shown
        log = Log(trainer, folder, done, wandb_id)
        log.start()
        if folder is not None:
            same = ("resume", "out_dir", "vocab_size", "micro_batch")
            changes = [f"{name} {then} → {now}" for name, then, now in checkpoint.changed_knobs(cfg, state)
                       if name not in same]
            log.print(f"going on from {folder}, step {done} of {cfg.max_steps}"
                      + (f", with other knobs than before: {', '.join(changes)}" if changes else ""))
        with Watch(log.rank, cfg.timeout_s, trainer.device) as watch:
            finished = train(trainer, log, watch, done)
        if finished:
            log.summary()
            if cfg.eval_steps:
                log.print("sample:", trainer.sample())
        log.board.finish()


def train(trainer, log, watch, done):
    """Steps done + 1 to max_steps. → False if it was asked to stop before."""
    cfg, pending = trainer.cfg, None    # the log runs one step behind, so that it never waits for the device

    def record(result, val_loss=None):
        if not log.step(result, val_loss, watch.asked) and cfg.on_nan == "stop":
            raise Stop(f"stopped at step {result.step} (on_nan=stop)")

    start = clock.mark(trainer.device)
    for step in range(done, cfg.max_steps):
        with watch.step(step + 1):
            watch_memory = contextlib.nullcontext()
            if cfg.memory_report and step == done:
                watch_memory = memory.Watch(trainer.device, **trainer.optimizer.held())
            with watch_memory:
                result = trainer.step(step)
            start = result.since(start)
            if pending:
                record(pending)
            end = step + 1 == cfg.max_steps
            evaluate = cfg.eval_steps and (end or cfg.eval_interval and (step + 1) % cfg.eval_interval == 0)
            save = end or log.stop or cfg.save_interval and (step + 1) % cfg.save_interval == 0
            if evaluate or save:
                result.read()
        if cfg.memory_report and step == done:
            log.memory(watch_memory)
        pending, stop = result, log.stop
        if evaluate or save:
            record(pending, trainer.evaluate() if evaluate else None)
            pending = None
        if save:
            try:
                trainer.save(step + 1, log.board.id)
            except checkpoint.CheckpointError as error:
                raise Stop(f"error: {error}" if log.rank == 0 else 1) from None
        if evaluate or save:
            start = clock.mark(trainer.device)
        if stop and not end:
            log.print(f"asked to stop: saved after step {step + 1} of {cfg.max_steps}; the same command goes on")
            return False
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
