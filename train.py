"""Train a mixture-of-experts language model.

    torchrun --nproc_per_node=4 train.py                                  four ranks, experts spread over them
    python train.py config/tiny.py --lr=1e-3                              one process, other settings
    python train.py --help                                                every knob

The file reads top to bottom: what is checked, what a step is, what is logged, and the loop.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import data
import dispatch
import kernels
import model as models
import moe
import optim
import parallel
from kernels import Clock, KernelConfig, clock, dtype_of, peak_flops
from parallel import execute, ledger, schedule
from settings import knob, load


@dataclass
class TrainConfig:
    data: str = knob("", "folder with train.bin and val.bin; empty: the Python standard library's sources")
    out_dir: str = knob("out", "folder for metrics.jsonl")
    seed: int = knob(1337, "seed of initial values and data order", least=0)
    max_steps: int = knob(200, "optimizer steps", least=1)
    global_batch: int = knob(16, "sequences per optimizer step, over all ranks", least=1)
    micro_batch: int = knob(0, "sequences per data-parallel rank at once; 0: its whole share", least=0)
    log_interval: int = knob(10, "steps between console lines (metrics.jsonl has every step)", least=1)
    eval_interval: int = knob(100, "steps between evaluations; 0: only at the end", least=0)
    eval_steps: int = knob(8, "global batches of held-out text per evaluation, always the same; 0: none", least=0)
    on_nan: str = knob("stop", "a step whose gradients are not finite never changes the model; then stop, or "
                       "skip it and go on", choices=("stop", "skip"))
    device: str = knob("auto", "auto: a GPU if there is one", choices=("auto", "cpu", "cuda"))


@dataclass
class Config(KernelConfig, parallel.ParallelConfig, dispatch.DispatchConfig, moe.MoEConfig, models.ModelConfig,
             optim.OptimConfig, TrainConfig):
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
    for part in (dispatch, moe, models, optim):
        problems += part.check(cfg)
    problems += kernels.check(cfg, device_of(cfg))
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


# --------------------------------------------------------------------------------------------------
# A step


def n_moe_layers(cfg):
    return cfg.n_layer - cfg.n_dense_layers


class Result:
    """What a step leaves behind for the log. Sums over all ranks are on their way to the host: reading them
    at once would stop a GPU, so `read` them a step later."""

    def __init__(self, step, lr, norm, sums):
        self.step, self.lr, self.seconds = step, lr, 0.0
        self.spans, self.ledger, self.event = clock.take(), ledger.take(), None
        sums = torch.cat([sums, norm[None].double()])
        if sums.is_cuda:
            self.sums = torch.empty_like(sums, device="cpu", pin_memory=True).copy_(sums, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.sums = sums

    def read(self):
        if self.event is not None:
            self.event.synchronize()
        return self.sums.tolist()


class Trainer:
    """A model, its optimizer and its data on this rank. bench.py and the tests use the same one."""

    def __init__(self, cfg, world=None):
        self.device = device_of(cfg)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        parallel.init(self.device)
        sizes = parallel.sizes_of(cfg, world or torch.distributed.get_world_size())
        self.data = data.open_data(cfg.data, cfg.seq_len, cfg.vocab_size)
        self.cfg = cfg = dataclasses.replace(cfg, vocab_size=cfg.vocab_size or self.data.vocab_size,
                                             micro_batch=cfg.micro_batch or cfg.global_batch // sizes.dp)
        self.layout = parallel.Layout(sizes, self.device)
        self.microbatches = cfg.global_batch // (sizes.dp * cfg.micro_batch)
        self.capacity = dispatch.capacity(cfg, cfg.micro_batch * cfg.seq_len // (sizes.cp * sizes.tp))
        with torch.device("meta"):
            self.model = models.Model(cfg, self.layout)
        self.dtype = dtype_of(cfg.precision, self.device)
        kernels.use(cfg, self.device)
        self.optimizer = optim.Optimizer(cfg, self.model, self.layout, self.dtype, self.device)
        models.init_weights(self.model, cfg.seed)
        self.optimizer.start()

    def _batch(self, tokens, windows, **how):
        return moe.Batch(self.layout, *data.batch(tokens, windows, self.cfg.seq_len), **how)

    def batches(self, step):
        """This rank's microbatches of step `step` (from 0)."""
        cfg, n = self.cfg, self.data.train.n_windows(self.cfg.seq_len)
        for i in range(self.microbatches):
            ids = data.sample_ids(step, i, self.layout.dp.rank, global_batch=cfg.global_batch,
                                  micro_batch=cfg.micro_batch, dp=self.layout.dp.size)
            windows = [data.window_of(cfg.seed, j, n) for j in ids]
            yield self._batch(self.data.train, windows, capacity=self.capacity,
                              aux_scale=1 / (self.microbatches * self.layout.dp.size))

    def forward_backward(self, batches):
        """Leaves the gradient of the objective, summed over this rank's microbatches, in every .grad.
        → (this rank's sum of cross entropy, zero but on the last pipeline stage; the global number of valid
        tokens), on the device."""
        counts = torch.stack([sum((b.labels_T != -100).sum() for b in batches),
                              sum(b.counted_T.sum() for b in batches)])
        valid, counted = self.layout.plane.all_reduce(counts).clamp_min(1).unbind()
        for batch in batches:
            batch.z_scale = 1 / counted
        self.optimizer.zero_grad()
        for layer in self.model.moes.values():
            layer.stats.reset()
        cells = schedule(self.layout.pp.rank, self.layout.pp.size, self.cfg.vpp, len(batches),
                         self.cfg.overlap == "pair")
        losses = execute(cells, self.model, batches, (1 / valid).float())
        loss = sum(losses, torch.zeros((), device=self.device))
        # a tensor-parallel group has one loss, which all its ranks computed
        return loss if self.layout.tp.rank == 0 else torch.zeros_like(loss), valid

    def step(self, step):
        """One optimizer step (from 0)."""
        rank, world = self.layout.world.rank, self.layout.world.size
        loss, valid = self.forward_backward(list(self.batches(step)))
        norm = self.optimizer.reduce()
        skip = ~norm.isfinite()
        finite = torch.zeros(world, dtype=torch.float64, device=self.device)
        finite[rank] = loss.isfinite()
        stats = [layer.stats for layer in self.model.moes.values()]
        zero = loss.new_zeros(())
        # a row per MoE layer of the whole model, so that all ranks, whatever their stage holds, reduce alike
        loads = torch.zeros(n_moe_layers(self.cfg), 1 + self.cfg.num_experts, dtype=torch.float64,
                            device=self.device)
        for i, layer in self.model.moes.items():
            loads[i - self.cfg.n_dense_layers] = torch.cat([layer.stats.kept_E.sum()[None], layer.stats.counts_E])
        sums = torch.cat([torch.stack([(loss / valid).double(), sum((s.aux for s in stats), zero).double(),
                                       sum((s.z for s in stats), zero).double()]), finite, loads.flatten()])
        self.layout.world.all_reduce(sums)
        if self.cfg.bias_update_rate:
            loads = sums[3 + world:].view_as(loads)
            for i, layer in self.model.moes.items():
                layer.router.update_bias(loads[i - self.cfg.n_dense_layers, 1:], skip)
        lr = optim.learning_rate(self.cfg, step, self.cfg.max_steps)
        self.optimizer.step(lr, norm, skip)
        return Result(step + 1, lr, norm, sums)

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
                total += torch.stack([loss.double(), (batch.labels_G != -100).sum().double()])
        self.layout.onward.flush()
        loss, count = self.layout.world.all_reduce(total).tolist()
        return loss / (count / self.layout.pp.size)     # each stage counted the same labels

    def sample(self, length=128):
        """A continuation of the first held-out tokens."""
        prompt = self.data.val.ids[:32].tolist()
        ids = prompt + list(models.generate(self.model, prompt, length))
        return self.data.decode(ids) if self.data.tokenizer else str(ids)


# --------------------------------------------------------------------------------------------------
# What the user sees


class Log:
    """metrics.jsonl and the console. Every rank calls it; rank 0 writes."""

    def __init__(self, trainer):
        self.trainer, self.cfg, self.history = trainer, trainer.cfg, []
        self.rank, self.world = trainer.layout.world.rank, trainer.layout.world.size
        self.peak = peak_flops(trainer.device, trainer.dtype)
        Path(self.cfg.out_dir).mkdir(parents=True, exist_ok=True)
        self.file = open(Path(self.cfg.out_dir) / "metrics.jsonl", "w") if self.rank == 0 else None

    def print(self, *lines):
        if self.rank == 0:
            print(*lines, sep="\n", flush=True)

    def start(self):
        trainer, cfg, s = self.trainer, self.cfg, self.trainer.layout.sizes
        counts = models.parameter_counts(trainer.model)
        local = sum(p.numel() for p in trainer.model.parameters())
        shard = sum(f.master.numel() for f in trainer.optimizer.families)
        size = torch.tensor([], dtype=trainer.dtype).element_size()
        state = local * (size + 4) + shard * (8 * (cfg.optimizer == "adamw") + 4 * (size < 4))
        fullest = torch.tensor([local, state], device=trainer.device)   # pipeline stages differ
        local, state = trainer.layout.world.all_reduce(fullest, torch.distributed.ReduceOp.MAX).tolist()
        node, domain = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), parallel.nvl_domain(cfg)
        groups = [g for g in vars(trainer.layout).values() if isinstance(g, parallel.Group) and g.size > 1]
        self.print(
            f"layout of {s.world} ranks   dense: pp {s.pp} · dp {s.dp} · cp {s.cp} · tp {s.tp}   "
            f"experts: pp {s.pp} · edp {s.edp} · ep {s.ep} · etp {s.etp}",
            *(f"  {g.name:6} {g.size:4} ranks, " + ("inside a node" if g.near(node) == 1 else
              "inside an NVLink domain" if g.near(domain) == 1 else "across NVLink domains") for g in groups),
            f"device {trainer.device.type}, {str(trainer.dtype)[6:]}, kernels "
            + ("triton" if kernels.backend.triton else "torch") + ", peak "
            + (f"{self.peak / 1e12:,.2f} TFLOPS per rank" if self.peak else "unknown: no MFU"),
            f"parameters {counts['total']:,} (active {counts['active']:,}, in experts {counts['experts']:,}), "
            f"{local:,} on the fullest rank",
            f"memory per rank for weights, gradients and optimizer: {state / 1e9:.2f} GB, activations come on top",
            f"batch {cfg.global_batch} sequences × {cfg.seq_len} tokens = {cfg.global_batch * cfg.seq_len:,} "
            f"= {s.dp} dp × {trainer.microbatches} microbatches × {cfg.micro_batch} sequences",
            *self.pipeline(),
            f"experts {cfg.num_experts}, top-{cfg.top_k}, "
            + (f"capacity {trainer.capacity} per source rank and expert" if trainer.capacity else "dropless"),
            f"data {len(trainer.data.train):,} tokens, {cfg.max_steps} steps are "
            f"{cfg.max_steps * cfg.global_batch / trainer.data.train.n_windows(cfg.seq_len):.2f} epochs")
        if cfg.force_balance:
            self.print("force_balance: routing is round-robin; speed is flattered and the model learns nothing useful")
        if cfg.overlap == "pair" and trainer.microbatches == 1 and s.ep > 1:
            self.print("overlap=pair has a single microbatch, which runs alone: lower micro_batch to hide exchanges")
        ledger.take()   # what this table itself cost is no part of a step

    def pipeline(self):
        """Lines about the pipeline's stages; none without one."""
        s, m, stages = self.trainer.layout.sizes, self.trainer.microbatches, parallel.stage_layers(self.cfg)
        if s.pp == 1:
            return
        for stage in range(s.pp):
            layers = ", ".join(f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else f"{layers[0]}"
                               for layers in stages[stage::s.pp])
            most = parallel.in_flight(stage, s.pp, s.vpp, m, self.cfg.overlap == "pair")
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

    def step(self, result, val_loss=None):
        """→ True if the step was finite. Collective: ranks tell each other their times."""
        cfg, trainer = self.cfg, self.trainer
        (loss, aux, z, *rest), norm = (sums := result.read())[:-1], sums[-1]
        finite, layers = rest[:self.world], n_moe_layers(cfg)
        loads = torch.tensor(rest[self.world:], dtype=torch.float64).view(layers, 1 + cfg.num_experts)
        kept, counts = loads[:, 0].sum().item(), loads[:, 1:]
        memory = (torch.cuda.max_memory_allocated() if trainer.device.type == "cuda"
                  else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        mine = [result.seconds, Clock.seconds(result.spans, "exchange"), Clock.seconds(result.spans, "gemm"),
                memory / 1e9, self.peak or 0.0]
        times = torch.zeros(self.world, len(mine), dtype=torch.float64)
        times[self.rank] = torch.tensor(mine)
        trainer.layout.world.all_reduce(times)
        step_s, peak = times[:, 0].max().item(), times[:, 4].mean().item()
        tokens, assigned = cfg.global_batch * cfg.seq_len, counts.sum().item()
        dropped = 1 - kept / assigned if assigned else 0.0
        tflops = models.flops_per_token(cfg, 1 - dropped) * tokens / self.world / step_s / 1e12
        # three products, each forward and twice backward, and forward again where experts are recomputed
        gemm_flops = kept * 6 * cfg.d_expert * cfg.d_model * (4 if cfg.recompute else 3)
        gemm_room = (times[:, 2] * times[:, 4]).sum().item()
        row = {
            "step": result.step, "tokens": result.step * tokens, "loss": loss,
            "aux_loss": aux / max(layers, 1), "z_loss": z / max(layers, 1), "lr": result.lr, "grad_norm": norm,
            "tokens_per_s": tokens / step_s, "tflops_per_gpu": tflops, "mfu": tflops * 1e12 / peak if peak else None,
            "drop_fraction": dropped,
            "load_imbalance": (counts.amax(1) / counts.mean(1)).mean().item() if assigned else None,
            "a2a_share": (times[:, 1] / times[:, 0]).mean().item(),
            "gemm_efficiency": gemm_flops / gemm_room if gemm_room else None,
            "memory_gb": times[:, 3].max().item(), "step_s": step_s}
        if val_loss is not None:
            row["val_loss"] = val_loss
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self.history.append(row)
        if self.file:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        if result.step == 1:
            self.ledger(result.ledger)
        if result.step % cfg.log_interval == 0 or result.step in (1, cfg.max_steps) or val_loss is not None:
            self.console(row)
        if math.isfinite(norm):
            return True
        blame = [str(r) for r, ok in enumerate(finite) if not ok]
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
            + f" | aux {show('aux_loss', '.4f')} | lr {row['lr']:.1e} | norm {show('grad_norm', '.2f')}"
            f" | {show('tokens_per_s', ',.0f')} tok/s | {show('tflops_per_gpu', '.3g')} TFLOPS/GPU"
            f" (MFU {show('mfu', '.0f', 100)} %) | drop {show('drop_fraction', '.1f', 100)} %"
            f" | imbalance {show('load_imbalance', '.2f')} | a2a {show('a2a_share', '.1f', 100)} %"
            f" | gemm {show('gemm_efficiency', '.0f', 100)} % | {show('memory_gb', '.2f')} GB"
            f" | eta {int(left) // 60}:{int(left) % 60:02}")

    def summary(self):
        """The four columns that explain a slow run, and what to do about the first that is out of range."""
        rows = [r for r in self.history if r["load_imbalance"]][-20:]
        if not rows:
            return
        mean = lambda name: sum(r[name] or 0 for r in rows) / len(rows)
        columns = [
            ("expert utilization", 1 / mean("load_imbalance"), lambda v: v > 0.7,
             "some experts wait for the fullest: raise aux_loss_coef, or set bias_update_rate=1e-3"),
            ("overflow", mean("drop_fraction"), lambda v: v < 0.05, "tokens are dropped: raise capacity_factor"),
            ("exposed all-to-all", mean("a2a_share"), lambda v: v < 0.15,
             "exchanges are not hidden: give overlap=pair two microbatches or more (lower micro_batch), or lower ep"),
            ("GEMM efficiency", mean("gemm_efficiency"), lambda v: v > 0.5,
             "experts see too few rows at once: raise micro_batch or lower ep"),
        ]
        self.print(f"  {'mean of the last steps':24} {'value':>6}", *(f"  {n:24} {v:6.0%}" for n, v, _, _ in columns))
        self.print(next((f"  {name}: {advice}" for name, v, fine, advice in columns if not fine(v)),
                        "  all four columns are in range"))


# --------------------------------------------------------------------------------------------------
# The loop


def main(argv):
    world = int(os.environ.get("WORLD_SIZE", 1))
    cfg = load(Config, argv, lambda cfg: check(cfg, world))
    trainer = Trainer(cfg)
    log = Log(trainer)
    log.start()

    pending = None      # the log runs one step behind, so that it never waits for the device
    for step in range(cfg.max_steps):
        started = time.perf_counter()
        result = trainer.step(step)
        if pending and not log.step(pending) and cfg.on_nan == "stop":
            raise SystemExit(f"stopped at step {pending.step} (on_nan=stop)")
        evaluate = cfg.eval_steps and (step + 1 == cfg.max_steps
                                       or cfg.eval_interval and (step + 1) % cfg.eval_interval == 0)
        if evaluate or step + 1 == cfg.max_steps:
            result.read()
        result.seconds = time.perf_counter() - started
        pending = result
        if evaluate or step + 1 == cfg.max_steps:
            if not log.step(pending, trainer.evaluate() if evaluate else None) and cfg.on_nan == "stop":
                raise SystemExit(f"stopped at step {pending.step} (on_nan=stop)")
            pending = None

    log.summary()
    if cfg.eval_steps:
        log.print("sample:", trainer.sample())
    parallel.finish()


if __name__ == "__main__":
    main(sys.argv[1:])
