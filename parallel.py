"""Ranks: who holds what, who talks to whom, and how one rank's work is interleaved while tokens travel.

Two meshes fold over the same ranks and share only the pipeline dimension (slowest first):

    dense    (pp, dp, cp, tp)      attention, norms, router, shared experts, embedding, head
    experts  (pp, edp, ep, etp)    the routed experts

so tp·cp·dp = etp·ep·edp, and expert parallelism may span data-parallel, context and tensor ranks alike.

The second half is the driver. A block's forward is a generator that yields whenever tokens are about to
travel. The Tape of a microbatch launches that exchange on detached tensors, lets other coroutines run
while it is in flight, and resumes the generator with fresh autograd leaves; so the tape is a list of
autograd segments joined by exchanges, and backward is another coroutine that runs the segments in
reverse with the adjoint exchange between them. From this one mechanism come the overlap of one
microbatch's forward with another's backward, the shared expert beside the exchange, and recompute.
The schedule says which forwards and backwards a pipeline stage runs in which order, and beside which;
`execute` runs them and passes activations and gradients on to the neighbouring stages.

Shapes: T tokens on this rank, G = T·tp tokens of its tensor-parallel group, D model width, V vocabulary rows on
this rank, S sequence length, N whatever else, F width inside.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import functools
import itertools
import os
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from kernels import (Linear, TransformerEngine, after_weight_gradients, allow_onednn, backend, drain_weight_gradients,
                     linear, matrix, wait_for, weight_gradients_put_off)
from memory import Done, Saving, keep_freed, within
from settings import knob


@dataclass
class ParallelConfig:
    tp: int = knob(1, "tensor-parallel ranks: share each matrix and a sequence's tokens", least=1)
    cp: int = knob(1, "context-parallel ranks: share a sequence's tokens and its attention", least=1)
    pp: int = knob(1, "pipeline stages", least=1)
    vpp: int = knob(1, "virtual stages on each pipeline stage (interleaving)", least=1)
    pp_layout: tuple[int, ...] = knob((), "layers of each of the pp*vpp virtual stages; empty: as even as "
                                      "possible", least=1)
    ep: int = knob(0, "expert-parallel ranks; 0: the most that fit inside an NVLink domain", least=0)
    etp: int = knob(1, "tensor-parallel ranks inside an expert", least=1)
    overlap: str = knob("pair", "pair: one microbatch's forward beside another's backward; none: one at a time",
                        choices=("none", "pair"))
    defer_wgrad: bool = knob(True, "compute weight gradients while gradients of tokens travel, not before they leave")
    nvl_domain: int = knob(0, "ranks that share one NVLink domain; 0: the device's", least=0)


# --------------------------------------------------------------------------------------------------
# Layout

DENSE, EXPERTS = ("pp", "dp", "cp", "tp"), ("pp", "edp", "ep", "etp")


@dataclass(frozen=True)
class Sizes:
    """Sizes of every mesh dimension; the product of either mesh is the world. vpp: virtual stages per stage."""
    pp: int
    dp: int
    cp: int
    tp: int
    edp: int
    ep: int
    etp: int
    vpp: int = 1

    @property
    def world(self):
        return self.pp * self.dp * self.cp * self.tp

    def members(self, rank, *dims):
        """The ranks, in order, that differ from `rank` only along `dims` of one of the two meshes."""
        mesh = DENSE if set(dims) <= set(DENSE) else EXPERTS
        ranks = torch.arange(self.world).view([getattr(self, d) for d in mesh])
        at = (ranks == rank).nonzero()[0].tolist()
        return tuple(ranks[tuple(slice(None) if d in dims else i for d, i in zip(mesh, at))].flatten().tolist())


def _divisors(n):
    return [d for d in range(1, n + 1) if n % d == 0]


def _choices(values):
    *rest, last = map(str, values)
    return f"{', '.join(rest)} or {last}" if rest else last


def nvl_domain(cfg):
    """Ranks per NVLink domain: the knob, or 64 on a GB200/GB300 rack (72 GPUs, of which whole powers of two
    are of use), or the node."""
    if cfg.nvl_domain:
        return cfg.nvl_domain
    # ("H100 80GB HBM3" and "GH200" are none)
    rack = torch.cuda.is_available() and re.search(r"\bGB[23]00\b", torch.cuda.get_device_name())
    return 64 if rack else int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def inside_domain(cfg, ep, world):
    """Do ep*etp ranks side by side never lie in two NVLink domains?"""
    domain = nvl_domain(cfg)
    return world <= domain or domain % (ep * cfg.etp) == 0


def largest_ep(cfg, world):
    """The largest fitting ep that stays inside an NVLink domain, or 1."""
    return max(e for e in _divisors(world // cfg.pp // cfg.etp)
               if e == 1 or cfg.num_experts % e == 0 and inside_domain(cfg, e, world))


def sizes_of(cfg, world):
    """The Sizes that `cfg` means on `world` ranks. Call it after `check` found nothing."""
    plane = world // cfg.pp
    ep = cfg.ep or largest_ep(cfg, world)
    return Sizes(cfg.pp, plane // (cfg.tp * cfg.cp), cfg.cp, cfg.tp, plane // (cfg.etp * ep), ep, cfg.etp, cfg.vpp)


def one_rank(cfg):
    """`cfg` for a single process: the same model, nothing spread."""
    return dataclasses.replace(cfg, tp=1, cp=1, pp=1, vpp=1, pp_layout=(), ep=1, etp=1)


def stage_layers(cfg):
    """The blocks of every virtual stage, a range each, in the order in which tokens pass. What does not divide
    gives the first stages one more. Virtual stage j is chunk j // pp of pipeline stage j % pp."""
    n = cfg.pp * cfg.vpp
    counts = cfg.pp_layout or [cfg.n_layer // n + (j < cfg.n_layer % n) for j in range(n)]
    ends = list(itertools.accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends)]


def check(cfg, world):
    """Every reason why `cfg` cannot be laid out on `world` ranks."""
    problems = check_stages(cfg)
    dense, experts = cfg.tp * cfg.cp, cfg.etp * max(cfg.ep, 1)
    if world % cfg.pp:
        problems.append(f"pp={cfg.pp} does not divide the {world} ranks: set pp to {_choices(_divisors(world))}")
        return problems
    plane = world // cfg.pp
    if plane % dense:
        problems.append(f"tp*cp = {cfg.tp}*{cfg.cp} = {dense} does not divide the {plane} ranks of a pipeline stage: "
                        f"change tp or cp")
    if plane % experts:
        problems.append(f"etp*ep = {cfg.etp}*{cfg.ep} = {experts} does not divide the {plane} ranks of a pipeline "
                        f"stage: set ep to {_choices(d for d in _divisors(plane) if cfg.num_experts % d == 0)}, or 0")
    elif cfg.num_experts % max(cfg.ep, 1):
        problems.append(f"ep={cfg.ep} does not divide num_experts={cfg.num_experts}: "
                        f"set ep to {_choices(_divisors(cfg.num_experts))}")
    return problems


def check_stages(cfg):
    """Every reason why the layers of `cfg` cannot be cut into its pipeline stages."""
    stages, named = cfg.pp * cfg.vpp, f"pp*vpp = {cfg.pp}*{cfg.vpp} = {cfg.pp * cfg.vpp}"
    problems = []
    if cfg.vpp > 1 and cfg.pp == 1:
        problems.append(f"vpp={cfg.vpp} interleaves pipeline stages, but pp=1 has one: set vpp=1 or raise pp")
    if stages > cfg.n_layer:
        problems.append(f"{named} stages are more than n_layer={cfg.n_layer}: lower pp or vpp")
    if cfg.pp_layout:
        text, total = ",".join(map(str, cfg.pp_layout)), sum(cfg.pp_layout)
        if len(cfg.pp_layout) != stages:
            problems.append(f"pp_layout={text} names {len(cfg.pp_layout)} stages, but {named}: list as many")
        if total != cfg.n_layer:
            problems.append(f"pp_layout={text} sums to {total} layers, but n_layer={cfg.n_layer}: change either")
    return problems


def check_microbatches(cfg, m):
    """Why `cfg` cannot run m microbatches a step, if so."""
    if cfg.vpp > 1 and m % cfg.pp:
        return [f"vpp={cfg.vpp} interleaves microbatches in groups of pp={cfg.pp}, but a step has {m} of them "
                f"(global_batch / (dp*micro_batch)): change micro_batch or global_batch, or set vpp=1"]
    return []


_groups = {}    # how process groups are made


def init(device, timeout_s=600):
    """Join the job torchrun started, or make a job of one."""
    if dist.is_initialized():
        return
    timeout = _groups["timeout"] = datetime.timedelta(seconds=timeout_s)
    libraries = "gloo"
    if device.type == "cuda":
        # NCCL takes nothing that lies on the host, where all ranks together agree and add up what the log says
        libraries, _groups["backend"] = "cpu:gloo,cuda:nccl", "nccl"
    else:
        keep_freed()
        allow_onednn()
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > (os.cpu_count() or 1):
            # Where ranks share a core, none that wakes takes it from one that computes (measured: four ranks on two
            # cores are 8 % faster), and each stays where its data is cached (1.5 %). Threads that are started later,
            # gloo's too, follow.
            with contextlib.suppress(AttributeError, OSError):      # (Linux has it)
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[int(os.environ.get("LOCAL_RANK", 0)) % len(cores)]})
    if "RANK" in os.environ:
        dist.init_process_group(libraries, timeout=timeout)
    else:
        dist.init_process_group(libraries, store=dist.HashStore(), rank=0, world_size=1)


def finish():
    """Leaves the job. Nothing may refer to a group after that: gloo's threads would outlive the interpreter, which
    aborts a process whose work is done."""
    process_group.cache_clear()
    dist.destroy_process_group()


# torch renamed these two; the older names warn on every call
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@functools.cache
def process_group(ranks, traffic=""):
    """One process group per tuple of ranks, whatever it is used for: groups cost threads and descriptors. Only
    `traffic` that must not queue behind other messages has one more, by that name. Only members call this, so
    a rank makes its own few groups and not everybody's. torch names a group by its ranks and by how many
    groups its members have made, so all ranks must make equally many."""
    if len(ranks) == dist.get_world_size() and not traffic:
        return dist.group.WORLD
    how = dict(_groups)
    if how.get("backend") == "nccl":
        # A message is on its way before products take all multiprocessors. They leave comm_sms to what travels beside
        # them; of a pipeline's links there are four, and a receive holds what it takes until the neighbour sends.
        how["pg_options"] = options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = how["timeout"]
        if traffic and backend.comm_sms:
            links = 4 if traffic.startswith(("forward", "backward")) else 1
            options.config.max_ctas = max(backend.comm_sms // links, 1)
    return dist.new_group(list(ranks), use_local_synchronization=True, **how)


class Ledger:
    """Calls and bytes sent by this rank, per (group, collective), since the last `take`."""

    def __init__(self):
        self.rows = {}

    def add(self, group, op, sent_bytes):
        calls, total = self.rows.get((group, op), (0, 0))
        self.rows[group, op] = (calls + 1, total + sent_bytes)

    def take(self):
        rows, self.rows = self.rows, {}
        return rows


ledger = Ledger()


class Summed:
    """The work of a reduce_scatter on CPUs: its parts arrive, and are summed by who waits for them. (gloo's own is an
    all-reduce of which a rank keeps its part: twice the bytes.)"""

    def __init__(self, work, parts, out):
        self.work, self.parts, self.out = work, parts.view(-1, *out.shape), out

    def is_completed(self):
        return self.work.is_completed()

    def wait(self):
        self.work.wait()
        torch.sum(self.parts, 0, out=self.out)


class Group:
    """The ranks along some mesh dimensions, and the collectives among them. Alone, all are the identity."""

    def __init__(self, name, ranks, traffic=""):
        self.name, self.ranks, self.size, self.traffic = name, ranks, len(ranks), traffic
        self.rank = ranks.index(dist.get_rank())
        if self.size > 1:
            process_group(ranks, traffic)   # all members make it now

    @property
    def pg(self):
        return process_group(self.ranks, self.traffic)

    def near(self, block):
        """The share of this rank's peers inside the same aligned block of `block` ranks (node, domain)."""
        peers = [r for r in self.ranks if r != dist.get_rank()]
        return sum(r // block == dist.get_rank() // block for r in peers) / max(len(peers), 1)

    def all_reduce(self, x, op=dist.ReduceOp.SUM):
        """Reduces x in place and returns it."""
        if self.size > 1:
            ledger.add(self, "all-reduce", 2 * x.nbytes * (self.size - 1) // self.size)
            dist.all_reduce(x, op, group=self.pg)
        return x

    def sum(self, x):
        return self.all_reduce(x.clone())

    def start_all_gather(self, x, out=None):
        """Starts all_gather, into `out` if given, of which x may be this rank's part. Returns (out, work): out
        must not be read before work.wait(), nor x changed."""
        if self.size == 1:
            return x, Done
        out = x.new_empty(self.size * len(x), *x.shape[1:]) if out is None else out
        ledger.add(self, "all-gather", x.nbytes * (self.size - 1))
        return out, _all_gather(out, x.contiguous(), group=self.pg, async_op=True)

    def start_reduce_scatter(self, x):
        """Starts reduce_scatter, likewise."""
        if self.size == 1:
            return x, Done
        out, x = x.new_empty(len(x) // self.size, *x.shape[1:]), x.contiguous()
        ledger.add(self, "reduce-scatter", x.nbytes * (self.size - 1) // self.size)
        if x.is_cuda:
            return out, _reduce_scatter(out, x, group=self.pg, async_op=True)
        parts = torch.empty_like(x)
        return out, Summed(dist.all_to_all_single(parts, x, group=self.pg, async_op=True), parts, out)

    def all_gather(self, x):
        """[n, ...] on each rank → [size·n, ...] on all."""
        out, work = self.start_all_gather(x)
        work.wait()
        return out

    def reduce_scatter(self, x):
        """[size·n, ...] on each rank → this rank's [n, ...] of the sum."""
        out, work = self.start_reduce_scatter(x)
        work.wait()
        return out

    def all_to_all(self, x, send=None, recv=None):
        """Starts sending the i-th run of rows of x to rank i (`send`, `recv`: row counts; None: equal).
        Returns (out, work): out must not be read before work.wait(), nor x changed."""
        out = x.new_empty(sum(recv) if recv is not None else len(x), *x.shape[1:])
        own = send[self.rank] if send is not None else len(x) // self.size
        ledger.add(self, "all-to-all", (len(x) - own) * x[:1].nbytes if len(x) else 0)
        return out, dist.all_to_all_single(out, x, recv, send, group=self.pg, async_op=True)

    def gather_objects(self, x):
        """[x of each rank], any Python object: for what ranks say to each other, not for tensors of a step."""
        if self.size == 1:
            return [x]
        objects = [None] * self.size
        dist.all_gather_object(objects, x, group=self.pg)
        return objects


class Link:
    """One-way traffic along the ring of pipeline stages: activations to the next stage ("forward") or gradients
    to the one before ("backward"). Both ends see messages in the order of sending, which is all the matching
    there is. The way round, between the last stage and the first, exists when stages are interleaved. It has a
    group of its own: with two stages both ways join the same two ranks, and NCCL would make a message wait
    for one that travels against it."""

    def __init__(self, pp, vpp, way, device):
        self.name, self.inbox, self.outbox = f"pp {way}", collections.deque(), collections.deque()
        self.to = self.source = None
        if pp.size == 1:
            return
        straight, around = (pp.ranks, way), (pp.ranks, f"{way}, way round")
        for traffic in [straight, around][:1 + (vpp > 1)]:
            process_group(*traffic)     # all stages make it now

        def peer(stage):
            """(rank, group) of a neighbour; None beyond the ends. The group by its name, which holds nothing."""
            if 0 <= stage < pp.size:
                return pp.ranks[stage], straight
            return (pp.ranks[stage % pp.size], around) if vpp > 1 else None

        step = {"forward": 1, "backward": -1}[way]
        self.to, self.source = peer(pp.rank + step), peer(pp.rank - step)
        self.window = send_window(pp.size, vpp)
        self._greet(torch.zeros(1, device=device), begins=not 0 <= pp.rank - step < pp.size)

    def _greet(self, hello, begins):
        """NCCL connects two ranks at their first message, and the host waits for the other: here, one after the
        other along the ring, where nobody can wait in a circle."""
        if self.source and not begins:
            dist.recv(hello, self.source[0], group=process_group(*self.source[1]))
        if self.to:
            dist.send(hello, self.to[0], group=process_group(*self.to[1]))
        if self.source and begins:
            dist.recv(hello, self.source[0], group=process_group(*self.source[1]))

    def near(self, block):
        """1 if the receiver is inside the same aligned block of `block` ranks (node, domain), else 0."""
        return float(self.to[0] // block == dist.get_rank() // block)

    def post(self, x):
        """Starts to receive the next message into x."""
        rank, group = self.source
        self.inbox.append((x, dist.irecv(x, rank, group=process_group(*group))))

    def arrive(self):
        """The oldest message posted, waited for."""
        x, work = self.inbox.popleft()
        wait_for([work], "pipeline", x.device)
        return x

    def send(self, x):
        """Starts to send x, which must not change. Holds it until a window of later ones has been sent."""
        rank, group = self.to
        x = x.contiguous()
        ledger.add(self, "send", x.nbytes)
        self.outbox.append((x, dist.isend(x, rank, group=process_group(*group))))
        if len(self.outbox) > self.window:
            self.outbox.popleft()[1].wait()

    def flush(self):
        """Waits until everything sent has left."""
        while self.outbox:
            self.outbox.popleft()[1].wait()


class Layout:
    """This rank's place in both meshes and its groups: world, pp, dp, cp, tp, ep, etp, and

    plane   dp×cp×tp, the ranks of one pipeline stage: owners of replicated parameters
    batch   cp×tp, the ranks that hold the tokens of one microbatch of one data-parallel rank
    ends    the first and the last pipeline stage, owners of a parameter that both use (elsewhere: alone)

    owners has the ranks that own a parameter, by the mesh dimensions over which it is sliced: gradients and parameters
    travel beside the step, whose own messages must not queue behind them. Nor do exchanges (ep, etp) queue behind those
    of attention, of the same ranks.

    onward and homeward are the links to the neighbouring stages.
    """

    def __init__(self, sizes, device):
        self.sizes, self.device = sizes, device
        rank = dist.get_rank()
        group = lambda name, *dims, traffic="": Group(name, sizes.members(rank, *dims), traffic)
        self.world = group("world", *DENSE)
        self.plane = group("plane", "dp", "cp", "tp")
        self.batch = group("cp×tp", "cp", "tp")
        self.alone = Group("alone", (rank,))
        self.pp, self.dp, self.cp, self.tp = (group(d, d) for d in DENSE)
        self.ep, self.etp = (group(d, d, traffic="exchange") for d in ("ep", "etp"))
        owner = functools.partial(group, traffic="parameters")
        self.owners = {(): owner("plane", "dp", "cp", "tp"), ("tp",): owner("dp×cp", "dp", "cp"),
                       ("ep", "etp"): owner("edp", "edp")}
        self.onward, self.homeward = (Link(self.pp, sizes.vpp, way, device) for way in ("forward", "backward"))
        ends = (self.pp.ranks[0], self.pp.ranks[-1])
        if rank not in ends:
            ends = (rank,)
            process_group(ends, "none")     # not used, but all ranks must make equally many groups
        self.ends = Group("ends", tuple(dict.fromkeys(ends)))


# --------------------------------------------------------------------------------------------------
# Tensor and context parallelism: collectives that autograd goes through. Along a tensor-parallel group every rank
# holds other tokens of the residual stream (sequence parallelism); a sharded matrix first gathers them.


class _Collective(torch.autograd.Function):
    """A collective forward and its adjoint backward, by the names of Group's methods."""

    @staticmethod
    def forward(ctx, x, group, name, adjoint):
        ctx.group, ctx.adjoint = group, adjoint
        return getattr(group, name)(x)

    @staticmethod
    def backward(ctx, dy):
        return getattr(ctx.group, ctx.adjoint)(dy), None, None, None


def gather(x, group):
    """[n, ...] → [size·n, ...] of all ranks; every rank's use of it counts towards the gradient."""
    return _Collective.apply(x, group, "all_gather", "reduce_scatter")


def scatter(x, group):
    """[size·n, ...] → this rank's [n, ...] of the sum over ranks."""
    return _Collective.apply(x, group, "reduce_scatter", "all_gather")


def sum_over(x, group):
    """The sum of x over ranks, of which every rank uses its copy."""
    return _Collective.apply(x, group, "sum", "sum")


def column_linear(x_TD, weights, group, recipe=None):
    """Products of all the group's tokens with this rank's rows [out / size, in] of some weights: [G, out / size]
    each, G = T·size."""
    if isinstance(recipe, TransformerEngine):
        x_GD = gather(x_TD, group)
        return [recipe.linear(x_GD, matrix(w)) for w in weights]
    return Linear.apply(group, recipe, x_TD, *weights)


def row_linear(y_GF, w_DF, group, recipe=None):
    """This rank's tokens' product with a weight of which every rank holds some columns [out, in / size], given
    all tokens' share of the input: [T, out]."""
    return scatter(linear(y_GF, w_DF, recipe), group)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, logits_GV, labels_G):
        V = logits_GV.shape[1]
        at_G = labels_G - group.rank * V
        here_G, at_G = (at_G >= 0) & (at_G < V), at_G.clamp(0, V - 1)[:, None]
        logits_GV = logits_GV - group.all_reduce(logits_GV.amax(1), dist.ReduceOp.MAX)[:, None]
        label_G = torch.where(here_G, logits_GV.gather(1, at_G)[:, 0], 0)
        probs_GV = logits_GV.exp_()
        total_G, label_G = group.all_reduce(torch.stack([probs_GV.sum(1), label_G]))
        probs_GV.div_(total_G[:, None])
        valid_G = labels_G != -100
        ctx.save_for_backward(probs_GV, at_G, here_G & valid_G, valid_G)
        return torch.where(valid_G, total_G.log() - label_G, 0).sum()

    @staticmethod
    def backward(ctx, grad):
        probs_GV, at_G, here_G, valid_G = ctx.saved_tensors
        dlogits_GV = torch.where(valid_G[:, None], probs_GV * grad, 0)
        label_G = dlogits_GV.gather(1, at_G) - here_G[:, None] * grad
        return None, dlogits_GV.scatter_(1, at_G, label_G), None


def cross_entropy(logits_GV, labels_G, group):
    """The sum of cross entropy over the labels that are not -100, from this rank's share [G, V / size] of the
    vocabulary's logits, fp32; the same value on all ranks of the group. No rank ever holds all logits."""
    return _CrossEntropy.apply(group, logits_GV, labels_G)


def to_device(x, device):
    """A copy on the device for which the host does not wait."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def zigzag(seq_len, rank, size):
    """The positions in the sequence that context-parallel rank `rank` holds. Of 2·size chunks it takes the
    rank-th from both ends, so that all ranks see equally many causal pairs."""
    return torch.cat([torch.arange(first, end) for first, end in zigzag_runs(seq_len, rank, size)])


def zigzag_runs(seq_len, rank, size):
    """[(first, end)] of the consecutive positions among them."""
    if size == 1:
        return [(0, seq_len)]
    chunk = seq_len // (2 * size)
    return [(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank)]


def gather_sequence(tensors, group):
    """[N, S/size, …] each, of this rank's zigzag positions → [N, S, …] in the order of the sequence. All alike in
    shape: they travel together."""
    if group.size == 1:
        return tensors
    x_NSH = torch.cat(tensors)
    N, S = x_NSH.shape[:2]
    x = gather(x_NSH.view(1, N, 2, S // 2, *x_NSH.shape[2:]), group)
    x = torch.cat([x[:, :, 0], x[:, :, 1].flip(0)])     # [2·size, N, chunk, …]: the second halves run backward
    return x.transpose(0, 1).flatten(1, 2).chunk(len(tensors))


# --------------------------------------------------------------------------------------------------
# Coroutines


class Exchange:
    """A block's request to let tensors travel; `yield` it and get back what arrived.

    direction  "out" (tokens to their experts), "back" (results home), or "counts" (sizes alone, which
               carry no gradient; yields nothing back)
    plan       has travel(direction, *tensors), a generator that launches when first advanced, yields while
               in flight and returns what arrived. It holds integers only: what is differentiable goes
               into the request, or autograd would walk through it twice. out and back are adjoints.
    tensors    what travels
    carry      what the code after the yield still needs from before it
    beside     (function, tensor): computed while the tokens travel, forward and backward
    observe    called by the driver the first time these tokens travel in training, not on a recompute

    The yield returns (*arrived, *carry), and the result of `beside` last if there is one.
    """

    def __init__(self, direction, plan, *tensors, carry=(), beside=None, observe=None):
        self.direction, self.plan, self.tensors = direction, plan, tensors
        self.carry, self.beside, self.observe = carry, beside, observe


class Loss:
    """A coroutine's remark that the scalar `value`, made since the last exchange, is a term of the objective.
    Backward begins there when it comes to this segment, so what follows need not carry the value along."""

    def __init__(self, value):
        self.edge, self.grad = _edge(value), torch.ones_like(value)


class Rerun:
    """A request to run the coroutine `block(x, plan)` and keep only x and the plan of its exchanges for
    backward, which runs it again. The yield returns the block's output."""

    def __init__(self, block, x):
        self.block, self.x = block, x


class Begin:
    """A coroutine's remark that `block` begins here: behind it in backward, the block's gradients are complete."""

    def __init__(self, block):
        self.block = block


ADJOINT = {"out": "back", "back": "out"}
_anchor = torch.empty(0, requires_grad=True)    # gives what enters a segment a reason to require grad


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inlet, anchor, x):
        ctx.inlet = inlet
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.inlet.grad = grad
        return None, None, None


class Inlet:
    """Where a tensor enters a segment. Boxes the gradient that comes back there and holds no data: a tape
    that held the tensors it cuts would keep every exchanged buffer alive until backward."""

    def __init__(self, x):
        self.grad, self.like = None, (x.shape, x.dtype, x.device)

    @classmethod
    def enter(cls, x):
        """Returns (inlet, x as a fresh leaf)."""
        inlet = cls(x)
        return inlet, _Enter.apply(inlet, _anchor, x)

    def take(self):
        """The gradient, zeros if none came: every rank takes part in every exchange."""
        grad, self.grad = self.grad, None
        shape, dtype, device = self.like
        return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


def _edge(x):
    return get_gradient_edge(x) if x.requires_grad else None


def _backward(edges, grads):
    pairs = [(e, g) for e, g in zip(edges, grads) if e is not None]
    if pairs:
        with weight_gradients_put_off(), within("backward"):
            torch.autograd.backward(*map(list, zip(*pairs)))


def _exchanging(travel):
    """Coroutine: `travel`, whose memory is that of exchanges."""
    while True:
        with within("exchange"):
            try:
                next(travel)
            except StopIteration as end:
                return end.value
        yield


class _Cut:
    """The joint that an exchange leaves between two segments."""

    def __init__(self, request):
        self.plan, self.direction = request.plan, request.direction
        self.sent, self.carried = [_edge(x) for x in request.tensors], [_edge(x) for x in request.carry]
        self.beside = None

    def run_beside(self, function, x):
        """Runs function(x) as a segment of its own and returns its result, cut off."""
        inlet, entered = Inlet.enter(x.detach())
        y = function(entered)
        self.beside = (_edge(x), inlet, _edge(y))
        return y.detach()

    def enter(self, tensors):
        self.inlets, tensors = zip(*map(Inlet.enter, tensors))
        return tensors

    def backward(self):
        """Coroutine. Returns the edges of the segment before the cut, and their gradients."""
        grads = [inlet.take() for inlet in self.inlets]
        n = len(self.inlets) - len(self.carried) - (self.beside is not None)
        travel = _exchanging(self.plan.travel(ADJOINT[self.direction], *grads[:n]))
        next(travel)
        edges, carried = self.sent + self.carried, grads[n:n + len(self.carried)]
        if self.beside is not None:
            edge, inlet, result = self.beside
            _backward([result], grads[-1:])
            edges, carried = edges + [edge], carried + [inlet.take()]
        del grads
        yield
        arrived = yield from travel
        return edges, [*arrived, *carried]


class _RerunCut:
    """The joint that a whole recomputed block leaves."""

    def __init__(self, request):
        self.block, self.x, self.edge = request.block, request.x.detach(), _edge(request.x)

    def backward(self):
        inner = Tape(replay=True)
        inlet, x = Inlet.enter(self.x)
        yield from inner.forward(self.block(x, self.plan))
        del x
        yield from inner.backward(self.inlet.take())
        return [self.edge], [inlet.take()]


class Tape:
    """One microbatch's way through this rank's blocks, forward and back.

    record  keep what backward needs (False: evaluation, sampling)
    replay  this is a recompute: results need not come back again, since what follows them in the block is
            linear in them and backward needs no values; nor is it worth moving anything to the host
    parts   what autograd saves may be recomputed or wait on the host (memory.py)
    inlet   where the activations of the pipeline stage before came in, if they did
    """

    def __init__(self, record=True, replay=False, parts=True):
        self.record, self.replay, self.parts = record, replay, parts
        self.cuts, self.plan, self.inlet = [], None, None
        # behind so many cuts: the coroutine's Begin and Loss, and what has tensors on the host
        self.remarks, self.offloaded = collections.defaultdict(list), collections.defaultdict(list)

    @contextlib.contextmanager
    def _segment(self):
        """Around the forward of a segment, never across a yield: it would leak into the other microbatch."""
        saving = contextlib.nullcontext()
        if self.parts:
            saving = Saving(self.offloaded[len(self.cuts)], moves=not self.replay)
        with torch.set_grad_enabled(self.record), within("recompute" if self.replay else "forward"), saving:
            yield

    def forward(self, coroutine):
        """Coroutine: drives a model's coroutine to its end and returns its value, detached."""
        arrived = None
        while True:
            with self._segment():
                try:
                    request = coroutine.send(arrived)
                except StopIteration as end:
                    self.output = _edge(end.value) if self.record else None
                    return end.value.detach()
            arrived = None
            if isinstance(request, (Begin, Loss)):
                if self.record:
                    self.remarks[len(self.cuts)].append(request)
                continue
            served = (self._rerun if isinstance(request, Rerun) else self._exchange)(request)
            del request     # while tokens travel, only the coroutine itself holds its tensors
            arrived = yield from served

    def backward(self, grad, ready=None):
        """Coroutine: accumulates into every parameter's .grad, given the gradient of forward's value (None: it has
        none, and losses are all there is); weight gradients may still be put off at its end. ready(block) is called
        when all of a block are complete."""
        edges, grads = [self.output], [grad]
        while True:
            for behind in (len(self.cuts), len(self.cuts) - 1):     # one segment ahead
                for part in self.offloaded[behind]:
                    part.fetch()
            del self.offloaded[len(self.cuts)]
            remarks = self.remarks.pop(len(self.cuts), ())
            for remark in remarks:
                if isinstance(remark, Loss):
                    edges.append(remark.edge)
                    grads.append(remark.grad)
            _backward(edges, grads)
            for remark in remarks if ready else ():
                if isinstance(remark, Begin):
                    after_weight_gradients(functools.partial(ready, remark.block))
            if not self.cuts:
                return
            edges, grads = yield from self.cuts.pop().backward()

    def _exchange(self, request):
        plan, self.plan = request.plan, request.plan
        if request.observe is not None and not self.replay:
            request.observe()
        cut = _Cut(request) if self.record and request.tensors else None
        sent, carried = [x.detach() for x in request.tensors], [x.detach() for x in request.carry]
        beside, direction = request.beside, request.direction
        del request
        results = []
        if self.replay and direction == "back":
            arrived = [x[:1].new_zeros(()).expand(plan.shape_home(x)) for x in sent]
        else:
            travel = _exchanging(plan.travel(direction, *sent))
            next(travel)
            if beside is not None:
                with self._segment():
                    results = [cut.run_beside(*beside) if cut else beside[0](beside[1].detach())]
            del sent, beside
            yield
            arrived = (yield from travel) or ()
        if cut is None:
            return (*arrived, *carried, *results)
        self.cuts.append(cut)
        with torch.enable_grad():
            return cut.enter([*arrived, *carried, *results])

    def _rerun(self, request):
        inner = Tape(record=False)
        cut = _RerunCut(request) if self.record else None
        y = yield from inner.forward(request.block(request.x.detach(), None))
        if cut is None:
            return y
        cut.plan = inner.plan
        self.cuts.append(cut)
        with torch.enable_grad():
            cut.inlet, y = Inlet.enter(y)
        return y


def together(*coroutines):
    """Runs coroutines in turns, each until its next exchange is in flight. Returns their values."""
    values, live = [None] * len(coroutines), dict(enumerate(coroutines))
    while live:
        for i, coroutine in list(live.items()):
            try:
                next(coroutine)
            except StopIteration as end:
                values[i] = end.value
                del live[i]
    return values


# --------------------------------------------------------------------------------------------------
# The pipeline


def warm_up(stage, pp, vpp, m, pair):
    """Forward units that a stage runs before its first backward. A unit is a microbatch on one chunk. Interleaved
    or paired units need two per later stage: a unit's gradient is back only after twice as many turns."""
    per_stage = 2 if pair or vpp > 1 else 1
    return min((pp - 1 - stage) * per_stage + (vpp - 1) * pp + pair, vpp * m)


def in_flight(stage, pp, vpp, m, pair):
    """The most units whose activations a stage holds at once."""
    return min(warm_up(stage, pp, vpp, m, pair) + 1, vpp * m)


def send_window(pp, vpp):
    """Messages a stage may have sent and not yet know to have arrived: as many as the first stage can have units
    in flight, so that waiting for the oldest can never be what the others wait for."""
    return 2 * (pp - 1) + (vpp - 1) * pp + 2


def bubble(pp, vpp, m):
    """The share of time that equal stages stand idle."""
    return (pp - 1) / (vpp * m + pp - 1)


def schedule(stage, pp, vpp, m, pair):
    """This stage's cells in order, for m microbatches: lists of ("F" or "B", chunk, microbatch).

    One-forward-one-backward after the warm-up. With vpp > 1 chunks take turns, pp microbatches each
    (arXiv:2104.04473), which needs m % pp = 0. With `pair` a cell is the forward of a later unit beside the
    backward of an earlier one.
    """
    turn = pp if vpp > 1 else m
    units = [(chunk, i) for first in range(0, m, turn) for chunk in range(vpp)
             for i in range(first, min(first + turn, m))]
    forward = [[("F", chunk, i)] for chunk, i in units]
    backward = [[("B", vpp - 1 - chunk, i)] for chunk, i in units]
    ahead = warm_up(stage, pp, vpp, m, pair)
    cells = forward[:ahead]
    for n, back in enumerate(backward):
        later = forward[n + ahead] if n + ahead < len(forward) else []
        cells += [later + back] if pair else [cell for cell in (later, back) if cell]
    return cells


def execute(cells, model, batches, ready=None):
    """Runs a step's cells on this stage, forward and backward, with what travels between stages.

    model     model(batch, chunk, x_TD) is the coroutine of one chunk; model.layout knows the neighbours
    ready     called with the number of a block as soon as its gradients are those of all microbatches
    Returns what the last chunk returned for each microbatch, on the last stage; an empty list elsewhere.
    """
    onward, homeward = model.layout.onward, model.layout.homeward
    tapes, losses, early = {}, [], []
    parts = bool(model.cfg.recompute or model.cfg.offload)

    def forward(chunk, i):
        tape, x_TD = Tape(parts=parts), None
        if not model.is_first(chunk):
            tape.inlet, x_TD = Inlet.enter(onward.arrive())
        tapes[chunk, i], block = tape, model(batches[i], chunk, x_TD)
        del x_TD
        y = yield from tape.forward(block)
        if model.is_last(chunk):
            losses.append(y)
        else:
            onward.send(y)
        if early:
            next(early.pop(), None)

    def backward(chunk, i):
        tape = tapes.pop((chunk, i))
        last = i == len(batches) - 1    # of every chunk: microbatches come back in order
        yield from tape.backward(None if model.is_last(chunk) else homeward.arrive(), ready if last else None)
        if tape.inlet is not None:
            homeward.send(tape.inlet.take())

    def post(cell):
        for kind, chunk, i in cell:
            if kind == "F" and not model.is_first(chunk):
                onward.post(model.empty_stream(batches[i]))
            if kind == "B" and not model.is_last(chunk):
                homeward.post(model.empty_stream(batches[i]))

    # a cell's messages are asked for one cell ahead, to travel while the cell before it computes
    post(cells[0])
    coroutines = lambda cell: [(forward if kind == "F" else backward)(chunk, i) for kind, chunk, i in cell]
    now = coroutines(cells[0])
    for following in [*cells[1:], []]:
        post(following)
        later = coroutines(following)
        # A forward that needs no other stage is begun, up to its first exchange, when the one before it ends: the
        # backward beside that still has an exchange to hide. Then it is backward's turn.
        begins = len(following) == 2 and model.is_first(following[0][1])
        early[:] = later[:begins]
        together(*now)
        now = later[::-1] if begins else later
    drain_weight_gradients()
    onward.flush()
    homeward.flush()
    return losses
