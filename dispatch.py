"""How tokens travel to their experts and back.

A plan is made from the router's choices alone and holds integers only. Every rank keeps S slots, each for
one assignment (one of a token's K choices), grouped by expert and therefore by destination rank:

    capacity mode   C slots per (this rank, expert), static shapes, nothing is read by the host. An empty
                    slot travels as it is and says so by a router weight of -1, which tells the receiver how
                    many rows of each segment are real. With capacity_scope=rank the experts of a destination
                    rank share their slots, sorted by expert, and fewer choices find them full; how many rows
                    each expert got travels first, as in dropless mode, but no host needs to know.
    dropless mode   as many slots as assignments; sizes travel first, as an exchange of their own.

That is dispatcher=alltoall: a token travels once for each expert that takes it. With dispatcher=allgather every
token travels once to every rank of the group, which then takes for its experts the rows it would have received,
the same choices dropped, and sends back one sum per token. That is less traffic where top_k is larger than the
ranks around, and it is how a rank without others works anyway: all tokens are already there.

Where an expert is cut into slices (expert tensor parallelism), all ranks that hold a slice get all its rows.
The receiver holds Q rows in (source rank, expert) order and works on R of them in expert-major order. All
moves are gathers through maps whose inverse is known (kernels.permute), so nothing is ever scattered.

Shapes: T tokens on this rank, D model width, E experts (all), L experts on this rank, K experts per token,
C slots per (source rank, expert), S slots = rows sent, Q rows received, R rows in expert-major order,
G tokens gathered, W ranks in the expert-parallel group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels import RECIPES, Groups, backend, from_e4m3, permute, to_e4m3, unpermute, wait_for
from settings import knob


# A kernel computes whole tiles of rows. Where the capacity of a segment is at least this, the tiles it does not
# fill cost less than moving all rows together first.
WIDE = 256


@dataclass
class DispatchConfig:
    dispatcher: str = knob("alltoall", "what travels: a row for each of a token's experts, or each token once to "
                           "all expert-parallel ranks (for few of them and a large top_k)",
                           choices=("alltoall", "allgather"))
    capacity_factor: float = knob(1.25, "slots per expert over the balanced share; 0: dropless", least=0)
    capacity_scope: str = knob("expert", "who has slots of its own: each expert, or each rank, shared by its experts",
                               choices=("expert", "rank"))
    drop_policy: str = knob("probs", "who goes first when an expert is full: the lowest router weight, or, by "
                            "position, the latest choice of the latest token", choices=("probs", "position"))
    on_overflow: str = knob("drop", "what a step does whose experts are full: drop choices, or rerun without any "
                            "limit and forget the first attempt", choices=("drop", "rerun"))
    dispatch_precision: str = knob("auto", "what tokens are on their way to the experts; fp8: e4m3 with a scale "
                                   "per 128 values; auto: as they are, as results and all gradients are anyway",
                                   choices=("auto", "fp8"))


def check(cfg):
    if 0 < cfg.capacity_factor < 0.01:
        return [f"capacity_factor={cfg.capacity_factor} leaves experts no room: set 0 for dropless, or about 1.25"]
    return []


def sharing(cfg, ep):
    """How many experts share a run of slots, with `ep` expert-parallel ranks."""
    return cfg.num_experts // ep if cfg.capacity_scope == "rank" else 1


def capacity(cfg, tokens, shared=1):
    """C, the slots that `shared` experts have together, for `tokens` per rank and microbatch: computed from the
    configuration, so that ranks agree by construction. A token takes an expert at most once, hence never more than
    it can choose, but for what a low precision fills up. 0: dropless."""
    C = min(math.ceil(cfg.capacity_factor * tokens * cfg.top_k * shared / cfg.num_experts),
            tokens * min(shared, cfg.top_k))
    align = RECIPES[cfg.precision].align if cfg.precision in RECIPES else 1
    return -(-C // align) * align


def _inverse(at, n):
    """Which entry of the map `at` leads to each of n places; -1 where none does, as in `at` where one leads nowhere."""
    places = torch.where(at < 0, n, at)     # those all go behind the last
    return torch.full([n + 1], -1, device=at.device).scatter_(0, places, torch.arange(len(at), device=at.device))[:n]


def _sorted(order, key):
    """`order` sorted by key[order]; equal ones stay as they are."""
    return order[key[order].argsort(stable=True)]


def _runs(values, n):
    """(where the run of each of 0 to n - 1 starts, how long it is) in sorted values. Not bincount: the host would
    wait for it."""
    ends = torch.searchsorted(values, torch.arange(n, device=values.device), right=True)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return starts, ends - starts


class Plan:
    """Where every assignment of this rank's tokens goes.

    experts_TK  chosen experts, -1 for a token that is not routed
    weights_TK  router weights; only their order is used, for drop_policy="probs"
    capacity    C, or 0 for dropless
    shared      how many experts, all of one rank, have these C slots together
    ep, etp     the groups to travel over
    gathered    dispatcher=allgather, or nobody to travel to
    align       > 1: an expert's rows are filled up to a multiple of this, and to a number that the host knows
    fp8         tokens travel as e4m3. Gradients do not, so that of the rounding is the identity

    slot_TK     the slot of each assignment, -1 if dropped or not routed
    choice_S    its inverse: the flat assignment t·K + k in each slot, -1 if the slot is empty (known in
                dropless mode once sizes have travelled)
    counts_E    assignments per expert before drops; kept_E after
    row_R, place_Q           received row ↔ expert-major row, once rows have arrived
    groups                   which of these rows are whose. Where experts take received rows as they lie, the maps
                             are None and R is Q
    choice_R, row_GK         if gathered, the flat choice g·K + k of the gathered tokens in each of the experts'
                             rows (-1: none), and the row of each choice (-1: dropped, or another rank's)
    """

    def __init__(self, experts_TK, weights_TK, num_experts, capacity, drop_policy, ep, etp, shared=1,
                 gathered=False, align=1, fp8=False):
        self.experts_TK, self.ep, self.etp, self.capacity, self.shared = experts_TK, ep, etp, capacity, shared
        self.align, self.fp8 = align, fp8
        self.num_experts, self.device = num_experts, experts_TK.device
        self.num_local, self.alone = num_experts // ep.size, ep.size * etp.size == 1
        self.gathered = gathered or self.alone
        # rows to and from every ep rank, and held by every etp rank before they share; None: equal, known without
        self.send = self.recv = self.share = self.groups = None
        T, K = experts_TK.shape

        # Assignments sorted by expert; within one, first the ones to keep. Not-routed ones sort last.
        expert = torch.where(experts_TK < 0, num_experts, experts_TK).flatten()
        position = torch.arange(T * K, device=self.device)
        if capacity and drop_policy == "position":     # all first choices, then all second ones (GShard)
            first = (torch.arange(K, device=self.device)[:, None]
                     + K * torch.arange(T, device=self.device)).flatten()
        elif capacity:
            first = weights_TK.detach().flatten().argsort(descending=True, stable=True)
        else:
            first = position
        order = _sorted(first, expert)
        starts_N, counts_N = _runs(expert[order], num_experts)
        self.counts_E, self.kept_E = counts_N, counts_N.clamp_max(capacity) if capacity else counts_N
        if capacity and shared > 1:
            # a rank's slots go to the first of all its experts' choices; the others sort last, like the not routed
            by_rank = _sorted(first, expert // shared)
            rank = expert[by_rank] // shared
            starts_W, _ = _runs(rank, self.ep.size)
            fits = position - starts_W[rank.clamp_max(self.ep.size - 1)] < capacity
            expert = expert.scatter(0, by_rank, torch.where(fits, expert[by_rank], num_experts))
            order = _sorted(first, expert)
            _, self.kept_E = _runs(expert[order], num_experts)
            starts_N, counts_N = _runs(expert[order] // shared, self.ep.size)

        run, runs = expert[order] // shared, num_experts // shared      # of slots, one per expert or rank
        if capacity:
            nth = position - starts_N[run.clamp_max(runs - 1)]
            slot = torch.where((run < runs) & (nth < capacity), run * capacity + nth, -1)
        else:
            slot = torch.where(run < runs, position, -1)
        self.slot_TK = torch.empty_like(slot).scatter_(0, order, slot).view(T, K)
        self.choice_S = _inverse(self.slot_TK.flatten(), runs * capacity or T * K)

    def travel(self, direction, rows=None, weights=None):
        """Coroutine, for the driver: rows [S, D] and their router weights [S] go "out" and arrive as [Q, …];
        results [Q, D] come "back" to their slots. Gradients travel the opposite way. "counts" exchanges
        what must be known first.

        Out: to the experts' ranks over ep, then to all ranks that share these experts over etp. Back: each of
        them has computed a part of every result; the parts go to the rank whose ep peers sent the row, are
        summed there, and go home over ep. Gathered tokens [T, D] and weights [T, K] take the same way: they
        arrive as [G, …], and what comes back are sums over all ranks."""
        if self.alone:
            yield       # no way to go, but every exchange is one turn
        if direction == "counts":
            return (yield from self._travel_counts())
        if not self.gathered:
            return (yield from (self._travel_out if direction == "out" else self._travel_back)(rows, weights))
        tensors = [rows] if weights is None else [rows, weights]
        if self.fp8 and direction == "out" and weights is not None and not self.alone:
            wire, = yield from self._gather(direction, [_pack(rows, weights, fp8=True)])
            return _unpack(wire, rows.shape[1], weights.shape[1], rows.dtype)
        return (yield from self._gather(direction, tensors))

    def _travel_counts(self):
        W, L, N = self.ep.size, self.num_local, self.etp.size
        if self.gathered:       # also the slot of every choice: from it follows the row it would have been
            told, = yield from self._gather("out", [torch.cat([self.kept_E, self.slot_TK.flatten()])])
            kept_QE, slot_QS = told.view(N * W, -1).split([self.num_experts, self.slot_TK.numel()], 1)
            counts_QL = kept_QE[:, self.ep.rank * L:(self.ep.rank + 1) * L]
        else:
            counts_WL = yield from self._hop(self.ep, self.kept_E, None, None)
            counts_QL = yield from self._hop(self.etp, counts_WL.repeat(N), None, None)
        rows_L = None
        if not self.capacity:
            host = torch.cat([self.kept_E, counts_QL.flatten()]).view(1 + N, W, L)
            if host.is_cuda:
                # the host needs the sizes, but the other microbatch need not stop for it
                host, event = host.to("cpu", non_blocking=True), torch.cuda.Event()
                event.record()
                yield
                event.synchronize()
            self.send, *sources = host.sum(2).tolist()
            self.recv, self.share = sources[self.etp.rank], [sum(s) for s in sources]
            self.choice_S, rows_L = self.choice_S[:sum(self.send)], host[1:].sum((0, 1)).tolist()
        self._arrange(counts_QL.reshape(N * W, L), rows_L)
        if self.gathered:
            self._take_rows(kept_QE, slot_QS)

    def _take_rows(self, kept_QE, slot_QS):
        """Which rows the gathered tokens are, given every source's kept choices per expert and slots: slots are
        numbered by expert, so a run of them is what that source would have sent here."""
        L, first = self.num_local, self.ep.rank * self.num_local
        if self.capacity:
            room_Q1 = torch.full_like(kept_QE[:, :1], len(self.choice_S) // self.ep.size)
            before_Q1 = room_Q1 * self.ep.rank
        else:
            room_Q1 = kept_QE[:, first:first + L].sum(1, keepdim=True)
            before_Q1 = kept_QE[:, :first].sum(1, keepdim=True)
        nth_QS = slot_QS - before_Q1
        received_QS = torch.where((nth_QS >= 0) & (nth_QS < room_Q1), room_Q1.cumsum(0) - room_Q1 + nth_QS, -1)
        if self.place_Q is not None:    # (of the -1 that is appended, the index is -1)
            received_QS = F.pad(self.place_Q, (0, 1), value=-1)[received_QS]
        self.row_GK = received_QS.reshape(-1, self.slot_TK.shape[1])
        self.choice_R = _inverse(self.row_GK.flatten(), self.groups.rows)

    def _gather(self, direction, tensors):
        """Coroutine: "out" all-gathers tensors over ep, then etp; "back" reduce-scatters them the other way."""
        hops = [(self.ep, "start_all_gather"), (self.etp, "start_all_gather")]
        if direction == "back":
            hops = [(self.etp, "start_reduce_scatter"), (self.ep, "start_reduce_scatter")]
        for group, collective in hops:
            if group.size > 1:
                travelling = [getattr(group, collective)(x) for x in tensors]
                yield
                wait_for([work for _, work in travelling], "exchange", self.device)
                tensors = [x for x, _ in travelling]
        return tensors

    def _travel_out(self, rows, weights):
        D, N, dtype = rows.shape[1], self.etp.size, rows.dtype
        wire = rows if weights is None else _pack(rows, weights, self.fp8)
        wire = yield from self._hop(self.ep, wire, self.send, self.recv)
        wire = yield from self._hop(self.etp, wire.repeat(N, 1) if N > 1 else wire, self.recv and N * [len(wire)],
                                    self.share)
        if weights is None:
            return [wire]
        rows, weights = _unpack(wire, D, from_fp8=dtype if self.fp8 else None)
        self._arrived(weights)
        return [rows, weights]

    def _travel_back(self, rows, weights):
        D, N = rows.shape[1], self.etp.size
        wire = rows if weights is None else _pack(rows, weights)
        if N > 1:
            own = len(wire) // N if self.share is None else self.share[self.etp.rank]
            wire = yield from self._hop(self.etp, wire, self.share, self.share and N * [own])
            if weights is None:
                wire = wire.view(N, own, D).sum(0)
            else:
                rows, weights = _unpack(wire, D)
                wire = _pack(rows.reshape(N, own, D).sum(0), weights.view(N, own).sum(0))
        wire = yield from self._hop(self.ep, wire, self.recv, self.send)
        return [wire] if weights is None else [*_unpack(wire, D)]

    def _hop(self, group, wire, send, recv):
        """Coroutine: one all-to-all, `yield`ing while it is in flight."""
        if group.size == 1:
            return wire
        out, work = group.all_to_all(wire.contiguous(), send, recv)
        yield
        wait_for([work], "exchange", self.device)
        return out

    @property
    def counts_first(self):
        """True where sizes must travel before rows. Slots of a single expert show how many are filled."""
        return not self.capacity or self.shared > 1 or self.gathered

    def _arrived(self, weights_Q):
        """Capacity mode learns the sizes from the rows themselves, where they did not travel first."""
        if self.groups is None:
            # not "weights >= 0": a NaN is a row too, and must reach the loss
            filled_Q = (weights_Q < 0).logical_not()
            self._arrange(filled_Q.view(-1, self.num_local, self.capacity).sum(2))

    def _arrange(self, counts_WL, rows_L=None):
        """The maps between received rows, in (source, expert) order, and expert-major rows. rows_L: how many there
        are for each expert, if the host knows."""
        W, L = counts_WL.shape
        if self.capacity >= WIDE and self.shared == self.align == 1 and backend.triton:
            self.row_R = self.place_Q = None
            self.groups = Groups.padded(counts_WL, self.capacity)
            return
        splits, room_L = rows_L, counts_WL.sum(0)   # what each expert has among expert-major rows
        if self.align > 1 and self.capacity:
            splits, room_L = [W * self.capacity] * L, torch.full_like(room_L, W * self.capacity)
        elif self.align > 1:
            splits, room_L = ([-(-n // self.align) * self.align for n in rows_L],
                              -(-room_L // self.align) * self.align)
        # where the run of each (source, expert) starts: among expert-major rows, and (base) among the received
        ends_L, counts = room_L.cumsum(0), counts_WL.flatten()
        starts = (counts_WL.cumsum(0) - counts_WL + ends_L - room_L).flatten()
        if self.capacity:
            Q = W * L // self.shared * self.capacity
            slots_WN1 = torch.arange(0, Q, self.capacity, device=self.device).view(W, -1, 1)
            counts_WNs = counts_WL.view(W, -1, self.shared)
            base = (slots_WN1 + counts_WNs.cumsum(2) - counts_WNs).flatten()
        else:
            Q, base = sum(self.share), counts.cumsum(0) - counts
        position = torch.arange(Q, device=self.device)
        run = torch.searchsorted(base, position, right=True) - 1
        nth = position - base[run]
        self.place_Q = torch.where(nth < counts[run], starts[run] + nth, -1)
        self.row_R = _inverse(self.place_Q, Q if splits is None else sum(splits))
        self.groups = Groups.packed(ends_L.to(torch.int32), len(self.row_R))
        self.groups.splits, self.groups.real_R = splits, self.row_R >= 0 if self.align > 1 else None

    @property
    def token_S(self):
        """The token in each slot, -1 if it is empty."""
        return self.choice_S // self.slot_TK.shape[1]

    @property
    def token_R(self):
        """The gathered token in each of the experts' rows, -1 if there is none."""
        return self.choice_R // self.slot_TK.shape[1]

    def expert_rows(self):
        """(row, slots) for the experts' first product, as `permute` takes them: which of the arrived rows each of
        theirs is, and where each arrived row went. (None, None): they take them as they lie."""
        if self.gathered:
            return self.token_R, self.row_GK
        return self.row_R, None if self.row_R is None else self.place_Q[:, None]

    def shape_home(self, rows):
        """The shape that results sent back have at home."""
        return (len(self.slot_TK) if self.gathered else len(self.choice_S), rows.shape[1])


def _pack(rows, weights, fp8=False):
    """Router weights (fp32), one or K of a row, ride behind it, and so do the scales of an fp8 row, so that one message
    carries all; the row is padded to whole 16 bytes."""
    tail = weights if weights.ndim == 2 else weights[:, None]
    if fp8:
        rows, scales = to_e4m3(rows)
        tail = torch.cat([tail, scales], 1)
    tail = tail.view(rows.dtype)
    pad = -(rows.shape[1] + tail.shape[1]) % (16 // rows.element_size())
    return torch.cat([rows, tail, rows.new_zeros(len(rows), pad)], 1)


def _unpack(wire, D, K=0, from_fp8=None):
    """→ rows […, D], and weights […, K], or […] if there is one a row. from_fp8: the dtype that e4m3 rows become."""
    scales_at = K or 1
    numbers = scales_at + (-(-D // 128) if from_fp8 else 0)
    # a copy, because only whole numbers of 4 bytes from the start of a memory can be read as fp32
    tail = wire[:, D:D + numbers * 4 // wire.element_size()].clone().view(torch.float32)
    rows = wire[:, :D]
    if from_fp8:
        rows = from_e4m3(rows, tail[:, scales_at:], from_fp8)
    return rows, tail[:, :K] if K else tail[:, 0].contiguous()


def dispatch(x_TD, weights_TK, plan):
    """Fill the slots: rows [S, D], weights [S] with -1 in empty slots, differentiable in both. Where tokens are
    gathered, the rows are x_TD itself and the weights weights_TK, and the experts gather from there."""
    if plan.gathered:
        return x_TD, weights_TK
    T, K = plan.slot_TK.shape
    rows_SD = permute(x_TD, plan.token_S, plan.slot_TK)
    weights_S = permute(weights_TK.reshape(T * K, 1), plan.choice_S, plan.slot_TK.view(T * K, 1)).flatten()
    return rows_SD, weights_S.masked_fill(plan.choice_S < 0, -1)


def combine(rows_SD, plan):
    """Each token's sum over its slots, [T, D]; a dropped assignment contributes zero."""
    return rows_SD if plan.gathered else unpermute(rows_SD, plan.slot_TK, plan.token_S)


def by_expert(weights, plan):
    """The router weights that arrived, [Q] or [G, K], in the order in which experts compute: [R]."""
    row, slots = (plan.choice_R, plan.row_GK.view(-1, 1)) if plan.gathered else plan.expert_rows()
    return weights if row is None else permute(weights.reshape(-1, 1), row, slots).flatten()


def by_source(rows_RD, plan):
    """Results in the order their rows were received, [Q, D]; where tokens are gathered, each one's sum over its
    rows here, [G, D]."""
    row, slots = plan.expert_rows()
    return rows_RD if row is None else unpermute(rows_RD, slots, row)
