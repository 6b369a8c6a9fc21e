"""What backward finds of what forward made, and how much memory that takes.

Autograd saves tensors for backward. A block gives its parts names, and the knobs below say, by these names, what
becomes of the tensors that are saved inside a part, and of the part's results, whoever saves those:

    recompute   they are not kept: backward runs the part again, from its arguments
    offload     they wait in the host's memory, and come back one segment before backward needs them

The arguments of a part go where whatever made them, or the part around it, says. So all choices combine, parts
may lie within parts, and a part that costs little but has large results (a norm, an activation) saves as much as
one that costs a lot. A part makes no exchange; collectives inside it run again in backward, on all ranks alike.
Routing choices are made outside of all parts, and kept.

The second half measures: every storage that lives, by the part and the operation that made it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from settings import knob

PARTS = ("norm", "moe_act", "mla_up", "attn", "mlp", "moe")


@dataclass
class MemoryConfig:
    recompute: tuple[str, ...] = knob(
        (), "what backward runs again instead of finding it kept: cheap results (norm, moe_act: experts' SwiGLU, "
        "mla_up: queries, keys and values from latents), parts (attn, mlp, moe: the experts) or full blocks",
        choices=(*PARTS, "full"))
    offload: tuple[str, ...] = knob((), "parts whose tensors wait for backward in the host's memory",
                                    choices=PARTS)


def check(cfg):
    return [f"{name}={','.join(given)}: mla_up is of attention=mla: leave it out"
            for name, given in (("recompute", cfg.recompute), ("offload", cfg.offload))
            if "mla_up" in given and cfg.attention != "mla"]


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3     # malloc.h of the GNU C library


def keep_freed():
    """Without a GPU: what this process frees it keeps for the next tensors, of which large ones take large pages. To
    give it back and to be given it again, zeroed, in pages of 4 KiB took 8 % of the default run's time."""
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")      # torch reads it
    with contextlib.suppress(AttributeError, OSError):      # (another C library)
        for parameter, size in ((M_MMAP_THRESHOLD, 2**25), (M_TRIM_THRESHOLD, 2**30), (M_TOP_PAD, 2**26)):
            ctypes.CDLL(None).mallopt(parameter, size)


# --------------------------------------------------------------------------------------------------
# Parts


def part(cfg, name, function, *args):
    """function(*args), as the part `name` of a block: cfg.recompute and cfg.offload say what backward will find of
    it. The same arguments must give the same results."""
    with within(name):
        recompute, offload = name in cfg.recompute, name in cfg.offload
        if not (recompute or offload) or not torch.is_grad_enabled():
            return function(*args)
        with contextlib.ExitStack() as policies:
            if offload:
                policy = policies.enter_context(Offloaded(function))
            if recompute:   # inside the other, which moves the arguments
                policy = policies.enter_context(Recomputed(function, args))
            results = function(*args)
        policy.answer_for(results, args)
        return results


_open = []                                      # what decides about saved tensors now, innermost last
_makers = weakref.WeakValueDictionary()         # storage → the policy of the part whose result it is


def _id(x):
    return x.untyped_storage()._cdata


def _geometry(x):
    return x.size(), x.stride(), x.storage_offset()


class Kept:
    """Stands for a saved tensor until backward asks for it."""

    __slots__ = ("source", "value", "__weakref__")

    def __init__(self, source):
        self.source, self.value = source, None

    def get(self):
        if self.value is None:
            self.source.restore()   # gives everything that stands for a tensor of this source its value
        return self.value


def _found(kept):
    return kept.get() if isinstance(kept, Kept) else kept


class Saving:
    """While it is open, results of parts are saved as their parts want it, and everything else as `keep` says:
    here, plainly. offloaded: what has tensors on the host because of it; moves: whether anything goes there."""

    repeats = False     # True: it sees the same again, where only parts inside it are there to answer for results

    def __init__(self, offloaded=None, moves=False):
        self.offloaded, self.moves = [] if offloaded is None else offloaded, moves
        self.around = weakref.ref(_open[-1] if _open else self)

    def save(self, x):
        x = x.detach()      # the graph refers to what is returned here, which must not refer to the graph
        maker = _makers.get(_id(x))
        if maker is None or self.repeats and maker.around() is not self:
            return self.keep(x)
        return maker.keep_result(x)

    def keep(self, x):
        return x

    def __enter__(self):
        _open.append(self)
        self.hooks = saved_tensors_hooks(self.save, _found)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)
        del self.hooks      # they refer to this, which must go when the last tensor does
        _open.pop()


class Policy(Saving):
    """What becomes of a part's tensors."""

    def answer_for(self, results, args):
        """From here on `keep_result` decides about `results`, unless they are arguments handed through."""
        own = {_id(a) for a in args if isinstance(a, torch.Tensor)}
        # a weak reference does not keep the memory, but its address: nothing else can be mistaken for the result
        self.results = {_id(x): (n, StorageWeakRef(x.untyped_storage()))
                        for n, x in enumerate(results if isinstance(results, tuple) else (results,))
                        if _id(x) not in own}
        _makers.update(dict.fromkeys(self.results, self))


class Recomputed(Policy):
    repeats = True

    def __init__(self, function, args):
        super().__init__()
        keep = _open[-1].save if _open else torch.detach
        self.function = function
        self.args = [(keep(a), a.requires_grad) if isinstance(a, torch.Tensor) else (a, None) for a in args]
        self.inside, self.views = [], []

    def keep(self, x):
        kept = Kept(self)
        self.inside.append(weakref.ref(kept))
        return kept

    def keep_result(self, x):
        kept = Kept(self)
        self.views.append((weakref.ref(kept), self.results[_id(x)][0], _geometry(x)))
        return kept

    def restore(self):
        replay = _Replay()
        args = [a if grad is None else _found(a).detach().requires_grad_(grad) for a, grad in self.args]
        with torch.enable_grad(), within("recompute"), replay:
            results = self.function(*args)
        results = results if isinstance(results, tuple) else (results,)
        for kept, x in zip(self.inside, replay.saved, strict=True):     # the same is saved, in the same order
            if (kept := kept()) is not None:
                kept.value = x
        for kept, n, geometry in self.views:
            if (kept := kept()) is not None:
                kept.value = results[n].detach().as_strided(*geometry)
        self.function = self.args = None


class _Replay(Saving):
    """Collects what autograd would save. Its own graph keeps nothing."""

    repeats = True

    def __init__(self):
        super().__init__()
        self.saved = []

    def keep(self, x):
        self.saved.append(x)


SMALL = 2**16   # bytes; fewer are not worth a copy


class Offloaded(Policy):
    def __init__(self, function):
        super().__init__()
        owner = getattr(function, "__self__", function)
        self.weights = {_id(p) for p in owner.parameters()} if isinstance(owner, nn.Module) else set()
        self.moved = {}
        outermost = _open[0] if _open else Saving()
        self.moves = outermost.moves
        outermost.offloaded.append(self)    # which also keeps this until others have saved the results

    def __enter__(self):
        self.before = len(_leaving)
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        settle(self.before)

    def keep(self, x):
        if not self.moves or x.nbytes < SMALL or _id(x) in self.weights:
            return x
        place = _id(x), x.dtype
        if place not in self.moved:
            self.moved[place] = Moved(x)
        return self.moved[place].stand_for(x)

    keep_result = keep

    def fetch(self):
        for moved in self.moved.values():
            moved.fetch()


_leaving = []   # (tensor on its way to the host, what to wait for before its memory may serve others)


def settle(first=None):
    """Lets go of the first tensors that left, or of all. (A GPU waits until they have arrived, the host does not.)
    What one offloaded part sends away has the time of the next one to arrive."""
    for _, left in _leaving[:first]:
        left.wait()
    del _leaving[:first]


class Moved:
    """A storage on the host, whole, since several saved tensors may be views of it."""

    def __init__(self, x):
        flat = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
        self.device, self.address = x.device, StorageWeakRef(x.untyped_storage())
        with within(HOST):
            self.host, left = start_copy(flat, torch.device("cpu"))
        _leaving.append((flat, left))
        self.back, self.views = None, []

    def stand_for(self, x):
        kept = Kept(self)
        self.views.append((weakref.ref(kept), _geometry(x)))
        return kept

    def fetch(self):
        if self.host is not None and self.back is None:
            with within("fetched"):
                self.back, self.arrived = start_copy(self.host, self.device)

    def restore(self):
        self.fetch()
        self.arrived.wait()
        for kept, geometry in self.views:
            if (kept := kept()) is not None:
                kept.value = self.back.as_strided(*geometry)
        self.back = self.host = None


class Done:
    """Work that there is nothing to wait for."""
    wait = staticmethod(lambda: None)


@functools.cache
def _copy_stream(device):
    return torch.cuda.Stream(device)


def start_copy(x, device):
    """Starts to copy x, to or from pinned memory on a stream of its own. Returns (copy, work): before work.wait()
    the copy must not be read, nor x changed or let go."""
    if not x.is_cuda and device.type == "cpu":
        return x.clone(), Done
    stream = _copy_stream(x.device if x.is_cuda else device)
    copy = torch.empty_like(x, device=device, pin_memory=device.type == "cpu")
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copy.copy_(x, non_blocking=True)
    return copy, stream.record_event()


# --------------------------------------------------------------------------------------------------
# Measuring


_where = []


@contextlib.contextmanager
def within(name):
    """What is made in here belongs to `name`. (Also a decorator.)"""
    _where.append(name)
    try:
        yield
    finally:
        _where.pop()


HOST = "on the host"


class Watch(TorchDispatchMode):
    """While it is open, counts the bytes of every storage on `device` that is made and still lives. What was there
    before is not counted; `apart` names some of that: {"weights": tensors, ...}.

    live, at_peak   {(where, operation): bytes} now, and when the total was largest; where: the names of `within`
    most            {where: the most bytes it ever had}
    """

    def __init__(self, device, **apart):
        super().__init__()
        self.device, self.apart = device, {}
        self.alive = {}     # storages by address; weak references keep the address theirs
        for name, tensors in apart.items():
            self.apart[name] = sum(self.new(x.untyped_storage()) for x in tensors)
        self.live, self.most, self.totals = collections.Counter(), collections.Counter(), collections.Counter()
        self.peak, self.at_peak = 0, {}

    def new(self, storage, gone=None):
        """Bytes of a storage not seen before, else 0. `gone` is called when it dies."""
        if storage._cdata in self.alive:
            return 0
        self.alive[storage._cdata] = weakref.ref(storage, gone), StorageWeakRef(storage)
        return storage.nbytes()

    @property
    def total(self):
        return self.live.total()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                self.note(x, function)
        return results

    def note(self, x, function):
        storage = x.untyped_storage()
        address, size = storage._cdata, storage.nbytes()
        on_host = HOST in _where or x.device.type != self.device.type
        place = HOST if on_host else "/".join(_where) or "elsewhere", function._schema.name.partition("::")[2]

        def gone(_):
            del self.alive[address]
            self.count(place, -size)

        if self.new(storage, gone):
            self.count(place, size)

    def count(self, place, size):
        where, _ = place
        self.totals[where] += size
        self.most[where] = max(self.most[where], self.totals[where])
        if where != HOST:
            self.live[place] += size
            if size > 0 and self.total > self.peak:
                self.peak, self.at_peak = self.total, self.live.copy()

    def table(self, operations=3):
        """Lines: bytes by where they were made, at the peak and at most, and the operations that made the most."""
        rows = {where: [] for where in self.most}
        for (where, operation), size in self.at_peak.items():
            rows[where].append((size, operation))
        held = lambda where: sum(size for size, _ in rows[where])
        yield f"  {'activations, made in':32} {'MB at peak':>11} {'most MB':>9}  largest at the peak"
        for where in sorted(rows, key=lambda where: (-held(where), -self.most[where])):
            largest = sorted(rows[where], reverse=True)[:operations]
            words = ", ".join(f"{operation} {size / 1e6:,.1f}" for size, operation in largest if size >= 5e4)
            yield f"  {where:32} {held(where) / 1e6:11,.1f} {self.most[where] / 1e6:9,.1f}  {words}".rstrip()
        yield f"  {'all together':32} {self.peak / 1e6:11,.1f}"
