"""Gradients summed once, parameters updated once: the sharded optimizer (ZeRO-1).

A family is every parameter of a bucket (a block, some blocks, or all outside of blocks) with the same owner
group (the ranks that hold copies), dtype and weight decay. It lives in one flat parameter buffer and one flat
gradient buffer, of which every parameter and its .grad are views. Once a step the gradients are reduce-scattered
over the owners, each rank updates its shard, and the parameters are all-gathered back. Shards of all families are
disjoint over the world, so the global gradient norm is one all-reduce of local sums: no rule says who counts what.

Both travel while the step computes: a bucket's gradients leave as soon as the driver says that the last backward
is through with it, and its updated parameters arrive during the next forward, which waits for them block by block.
With overlap=none the same messages are waited for at once.

Gradients are sums. The loss is divided by the global number of valid tokens where it is made, and nothing
is averaged here, so no factor depends on a layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim.adamw import adamw

from memory import within
from settings import knob


@dataclass
class OptimConfig:
    optimizer: str = knob("adamw", "sgd has no momentum and no decay", choices=("adamw", "sgd"))
    lr: float = knob(3e-3, "peak learning rate", least=0)
    min_lr: float = knob(3e-4, "learning rate at the end of decay", least=0)
    warmup_steps: int = knob(20, "steps of linear warm-up", least=0)
    decay: str = knob("cosine", "after warm-up: cosine to min_lr, wsd (constant, then linear over the last fifth) "
                      "or constant", choices=("cosine", "wsd", "constant"))
    beta1: float = knob(0.9, "AdamW's average of gradients", least=0, most=1)
    beta2: float = knob(0.95, "AdamW's average of squared gradients", least=0, most=1)
    eps: float = knob(1e-8, "AdamW's epsilon", least=0)
    weight_decay: float = knob(0.1, "AdamW's decay of matrices; norms have none", least=0)
    grad_clip: float = knob(1.0, "largest global gradient norm; 0: no clipping", least=0)
    moment_dtype: str = knob("fp32", "AdamW's averages are kept in it", choices=("fp32", "bf16"))
    grad_dtype: str = knob("fp32", "gradients are summed in it, over microbatches and ranks (the router's always "
                           "in fp32)", choices=("fp32", "bf16"))
    offload_optimizer: bool = knob(False, "AdamW's averages wait in the host's memory for the update")


def check(cfg):
    if cfg.decay != "constant" and cfg.min_lr > cfg.lr:
        return [f"min_lr={cfg.min_lr} is above lr={cfg.lr}: lower min_lr or set decay=constant"]
    return []


def learning_rate(cfg, step, max_steps):
    """The rate of the update number `step` (from 0) of max_steps."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    done = (step - cfg.warmup_steps) / max(max_steps - cfg.warmup_steps, 1)
    if cfg.decay == "cosine":
        share = 0.5 * (1 + math.cos(math.pi * min(done, 1)))
    elif cfg.decay == "wsd":
        share = min(1, max(0, (1 - done) / 0.2))
    else:
        return cfg.lr
    return cfg.min_lr + share * (cfg.lr - cfg.min_lr)


def square_sum(x):
    """The sum of squares of a flat fp32 tensor, a scalar in fp64. By blocks: a CPU adds up a whole buffer in few
    fp32 accumulators, which at ten million elements is wrong in the fourth digit, by an amount that depends on
    how the buffer is sharded; the whole buffer in fp64 would cost twenty times the time. (A GPU's sums are trees.)"""
    return torch.nn.utils.get_total_norm([x] if x.is_cuda else x.split(2**16)).double() ** 2


# Consecutive blocks share a bucket until it has so many parameters: each message costs its latency.
BUCKET = 2**23


def buckets(model):
    """{block: the first one of its bucket}. Backward comes to the first one last."""
    first_of = {}
    for n, chunk in enumerate(model.chunks):
        first, size = None, BUCKET
        for i in [*chunk, *(model.mtp if model.is_last(n) else ())]:
            if size >= BUCKET:
                first, size = i, 0
            first_of[i] = first
            size += sum(p.numel() for p in model.layers[str(i)].parameters())
    return first_of


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def dice(count, updates):
    """A random 16-bit number for each of `count` places, int32: a hash of the place and of how many `updates`
    there were (a tensor). So it can be repeated, and there is no state to keep."""
    mixed = torch.arange(count, dtype=torch.int32, device=updates.device).mul_(0x27D4EB2F)
    mixed += updates.int() * 0x165667B1
    mixed ^= mixed >> 15
    mixed *= 0x2C1B3C6D
    return (mixed >> 16).bitwise_and_(0xFFFF)


def round_at_random(x, dice):
    """fp32 to bf16, up with the probability that makes the mean right. An average that moves by less than half a
    unit in bf16's last place, 0.4 %, would else stand still: with beta2=0.999 it could grow but hardly fall."""
    # the dice are added to the 16 bits that bf16 has not, and carry over or are lost
    return (x.view(torch.int32) + dice).bitwise_and_(-0x10000).view(torch.float32).to(torch.bfloat16)


# Elements of a shard that are updated at once where copies of its averages are made: what a CPU's cache holds
BLOCK = {"cpu": 2**17, "cuda": 2**24}


class Family:
    """Parameters that are reduced, updated and gathered as one. `ends`: the two pipeline stages that both hold
    them, or None. Such a family has the same members and owners on both, hence the same shards."""

    def __init__(self, owner, dtype, decays, ends=None, grad_dtype=torch.float32):
        self.owner, self.dtype, self.decays, self.ends, self.slots = owner, dtype, decays, ends, []
        self.stale, self.gathering, self.reducing = False, None, None
        self.grad_dtype = grad_dtype

    def allocate(self, named, device):
        """Gives `named` meta parameters their place: → {name: parameter}. Starts are aligned to 16 elements
        for the kernels, and so are shards, for what sends them."""
        end = 0
        for name, meta in named:
            self.slots.append((name, meta.shape, end))
            end += -(-meta.numel() // 16) * 16
        self.shard_size = -(-end // (16 * self.owner.size)) * 16
        size = self.shard_size * self.owner.size
        self._flat = torch.zeros(size, dtype=self.dtype, device=device)
        self.grad = torch.zeros(size, dtype=self.grad_dtype, device=device)
        self.own = slice(self.owner.rank * self.shard_size, (self.owner.rank + 1) * self.shard_size)
        self.params = {}
        for (name, _), view, grad in zip(named, self.split(self._flat), self.split(self.grad)):
            self.params[name] = param = nn.Parameter(view)
            param.grad_dtype = self.grad_dtype  # bf16 parameters accumulate into the fp32 buffer in place
            param.grad = grad
        # The fp32 master: the flat buffer itself where it is fp32 already.
        self.master = nn.Parameter(self._flat[self.own].float())
        return self.params

    def split(self, flat):
        """The parameter-shaped views of a whole flat buffer, in order."""
        return [flat[start:start + shape.numel()].view(shape) for _, shape, start in self.slots]

    @property
    def flat(self):
        """The parameters as they are after the last update."""
        self.fetch()
        return self._flat

    @torch.no_grad()
    def load_master(self):
        """After the parameters were written: the masters follow them."""
        self.master.copy_(self.flat[self.own])

    def start_reduce(self):
        """Starts to sum gradients over the owners. They must be complete, and must not change before the end."""
        if self.reducing is None:
            self.reducing = self.owner.start_reduce_scatter(self.grad)

    def finish_reduce(self):
        """This rank's shard of the sum becomes the master's gradient."""
        self.start_reduce()
        (grad, work), self.reducing = self.reducing, None
        work.wait()
        self.master.grad = grad.float()
        if self.ends:
            self.ends.all_reduce(self.master.grad)

    @property
    def answers(self):
        """False where another stage answers for the same shard: norm and checkpoint must have it once."""
        return self.ends is None or self.ends.rank == 0

    @torch.no_grad()
    def start_gather(self):
        """If the masters were updated: starts to bring them to every owner's parameters."""
        if self.stale and self.owner.size > 1:
            shard = self.master.detach().to(self.dtype)
            self.gathering = shard, self.owner.start_all_gather(shard, out=self._flat)[1]
            increment_version(self._flat)   # NCCL writes it unnoticed, but low precision asks whether weights changed
        elif self.stale and self.master.data_ptr() != self._flat.data_ptr():
            self._flat.copy_(self.master)
        self.stale = False

    def fetch(self):
        """The parameters may be read from here on."""
        self.start_gather()
        if self.gathering:
            self.gathering[1].wait()
            self.gathering = None


class Optimizer:
    """Owns the memory of `model` (built on the meta device), its gradients and its optimizer state."""

    def __init__(self, cfg, model, layout, dtype, device):
        self.cfg, self.layout = cfg, layout
        self.first_of, named = buckets(model), {}
        model.fetch = self.fetch
        for name, param in model.named_parameters():
            # a parameter made fp32 on purpose (the router) stays so in a bf16 model
            router = ".router." in name
            kind, grad_dtype = (torch.float32,) * 2 if router else (dtype, DTYPES[cfg.grad_dtype])
            ends = layout.ends if model.on_both_ends(name) else None
            block = int(name.split(".")[1]) if name.startswith("layers.") else None
            owner = layout.owners[tuple(model.shards(name))]
            key = self.first_of.get(block), owner.ranks, kind, param.ndim > 1, ends, grad_dtype
            named.setdefault(key, (owner, []))[1].append((name, param))
        self.families, self.of_bucket = [], {}
        # in the order in which forward needs them: what is outside of blocks, as the embedding, then the blocks
        outside_first = sorted(named.items(), key=lambda item: item[0][0] is not None)
        for (bucket, _, *kind), (owner, members) in outside_first:
            family = Family(owner, *kind)
            self.of_bucket.setdefault(bucket, []).append(family)
            for name, param in family.allocate(members, device).items():
                path, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(path), leaf, param)
            self.families.append(family)
        for name, buffer in model.named_buffers():
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
        self.count = torch.zeros((), device=device)     # updates, without those that were skipped
        place = dict(device=device)
        if cfg.offload_optimizer:
            place = dict(device="cpu", pin_memory=device.type == "cuda")
        for family in self.families if cfg.optimizer == "adamw" else ():
            family.moments = {name: torch.zeros(family.shard_size, dtype=DTYPES[cfg.moment_dtype], **place)
                              for name in ("exp_avg", "exp_avg_sq")}

    def start(self):
        """Call when the model's parameters have their values."""
        for family in self.families:
            family.load_master()

    def state(self, family):
        """What a checkpoint holds of a family, this rank's shards: {"": masters}, and AdamW's running averages
        under "exp_avg." and "exp_avg_sq."."""
        shards = {"": family.master.detach()}
        if self.cfg.optimizer == "adamw":
            if self.cfg.offload_optimizer and family.master.is_cuda:    # they may be on their way to the host
                torch.cuda.current_stream().synchronize()
            shards |= {f"{name}.": moment for name, moment in family.moments.items()}
        return shards

    @property
    def updates(self):
        """How many updates AdamW counts: steps without those that were skipped."""
        return int(self.count)

    @updates.setter
    def updates(self, count):
        self.count.fill_(count)

    def held(self):
        """The tensors of a step that outlive it, for memory.Watch."""
        return {"weights": [f._flat for f in self.families], "gradients": [f.grad for f in self.families],
                "optimizer": [shard for f in self.families for shard in self.state(f).values()]}

    def start_gather(self):
        """A step begins: updated parameters set out, in the order in which forward needs them."""
        for family in self.families:
            family.start_gather()
        if self.cfg.overlap == "none":
            for family in self.families:
                family.fetch()

    def fetch(self, block):
        """Waits for the parameters of a block, or with None for all outside of blocks."""
        for family in self.of_bucket.get(self.first_of.get(block), ()):
            family.fetch()

    def zero_grad(self):
        for family in self.families:
            if family.reducing:     # of a backward that is not wanted any more
                family.reducing[1].wait()
                family.reducing = None
            family.grad.zero_()

    def ready(self, block):
        """The gradients of a block are complete: they set out when those of its whole bucket are."""
        if self.first_of[block] == block:
            for family in self.of_bucket[block]:
                family.start_reduce()
                if self.cfg.overlap == "none":
                    family.reducing[1].wait()

    @within("optimizer")
    def reduce(self):
        """Sums every gradient over its owners. Returns the global gradient norm, a scalar on the device."""
        for family in self.families:
            family.start_reduce()
        for family in self.families:
            family.finish_reduce()
        squares = sum(square_sum(f.master.grad) for f in self.families if f.answers)
        return self.layout.world.all_reduce(squares).sqrt().float()

    @within("optimizer")
    @torch.no_grad()
    def step(self, lr, norm, skip):
        """One update at rate `lr` with gradients clipped to grad_clip. Where the device scalar `skip` is true
        nothing changes: neither parameters nor moments."""
        if self.cfg.grad_clip:
            for family in self.families:
                family.master.grad.mul_((self.cfg.grad_clip / (norm + 1e-6)).clamp_max(1))
        if self.cfg.optimizer == "adamw":
            for decays, portion in self._portions():
                self._adamw(portion, lr, self.cfg.weight_decay if decays else 0.0, skip.float())
            self.count += 1 - skip.float()
        else:
            for family in self.families:
                family.master.copy_(torch.where(skip, family.master, family.master - lr * family.master.grad))
        self.changed()

    def changed(self):
        """The masters were written: parameters follow when they are next used."""
        for family in self.families:
            family.stale = True

    def _portions(self):
        """(do they decay, [(master, its averages, gradient)]) of what is updated at once: everything, if averages
        are in fp32 and on the device, else a block after the other, to make copies of."""
        at_once = self.cfg.moment_dtype == "fp32" and not self.cfg.offload_optimizer
        for decays in (True, False):
            shards = [(f.master.detach(), *f.moments.values(), f.master.grad) for f in self.families
                      if f.decays == decays]
            if shards and at_once:
                yield decays, shards
            elif shards:
                size = BLOCK[self.count.device.type]
                for shard in shards:
                    yield from ((decays, [block]) for block in zip(*(t.split(size) for t in shard)))

    def _adamw(self, portion, lr, decay, found_inf):
        masters, *averages, grads = map(list, zip(*portion))
        device = grads[0].device
        # what is fp32 and on the device is updated where it lies
        wide = [[(t if t.device == device else t.to(device, non_blocking=True)).float() for t in moments]
                for moments in averages]
        updates = list(self.count.repeat(len(grads)).unbind())      # which it counts on
        adamw(masters, grads, *wide, [], updates, fused=True, found_inf=found_inf, amsgrad=False, maximize=False,
              lr=lr, beta1=self.cfg.beta1, beta2=self.cfg.beta2, weight_decay=decay, eps=self.cfg.eps)
        for stored, moment in zip(sum(averages, []), sum(wide, [])):
            if stored.dtype == torch.bfloat16:
                moment = round_at_random(moment, dice(len(moment), self.count))
            if stored is not moment:
                stored.copy_(moment, non_blocking=True)


def full_gradients(model, optimizer):
    """{name: the whole gradient of the whole parameter, fp32, on the host}, the same on all ranks, whatever the layout.
    Call after Optimizer.reduce. For comparisons: nothing in training needs it."""
    gradients = {}
    for family in optimizer.families:
        flat = family.owner.all_gather(family.master.grad)
        for (name, _, _), grad in zip(family.slots, family.split(flat)):
            for group, dim in model.shards(name).items():
                # contiguous runs of `dim` lie on consecutive ranks of the group
                parts = getattr(model.layout, group).all_gather(grad.contiguous()[None])
                grad = torch.cat(parts.unbind(0), dim)
            gradients[name] = grad.cpu().clone()
    stages = model.layout.pp.gather_objects(gradients)
    return {name: grad for stage in stages for name, grad in stage.items()}
