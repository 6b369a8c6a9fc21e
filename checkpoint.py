"""Checkpoints: written aside and renamed when complete, verified before they are believed, loaded into any layout.

A checkpoint is a folder out_dir/step_000100 that holds

    shard-*.safetensors   one file per rank: the fp32 weights under their parameters' names, AdamW's averages
                          under "exp_avg." and "exp_avg_sq." + name, the routers' biases
    state.json            the step, the knobs, every rank's random numbers, size and checksum of every file

Nothing in it is ever unpickled. Every tensor is a DTensor in the shape of its parameter, whose placement follows
from Model.shards and the layout, so torch.distributed.checkpoint cuts it anew for whoever loads it.

A save goes into step_000100.partial. Rank 0 renames it when every file is on disk, and only then takes older
checkpoints away: whenever a run is killed, the newest folder with a proper name is whole. What happens to files
later (a truncated copy, a flipped bit) is found by size and checksum, which safetensors itself does not have.
"""

from __future__ import annotations

import base64
import dataclasses
import fcntl
import json
import os
import re
import shutil
import socket
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import model as models
import moe
import parallel
from settings import as_dict

STATE, FORMAT = "state.json", 1
# Knobs of model.py and moe.py that may change between a checkpoint and the run that goes on from it
FREE = {"seq_len", "aux_loss_coef", "aux_loss_scope", "z_loss_coef", "bias_update_rate", "force_balance"}


class CheckpointError(Exception):
    """What is wrong, in one line for the user. Raised on every rank alike."""


# --------------------------------------------------------------------------------------------------
# Ranks agree


def _all_told(group, mine):
    """Every rank's object, on every rank."""
    told = [mine]
    if group.size > 1:
        told = [None] * group.size
        dist.all_gather_object(told, mine, group=group.pg)
    return told


def _agreed(group, work, only_rank0=False):
    """The result of work() on this rank. If it fails on any rank, all raise the same CheckpointError."""
    value = problem = None
    if group.rank == 0 or not only_rank0:
        try:
            value = work()
        except CheckpointError as error:
            problem = str(error)
        except OSError as error:
            problem = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
    if problem := next(filter(None, _all_told(group, problem)), None):
        raise CheckpointError(problem)
    return value


def lock(out_dir, group):
    """Makes out_dir this run's own. Keep the returned file open: the lock ends with the process that holds it,
    however that ends. Collective."""
    def take():
        Path(out_dir).mkdir(parents=True, exist_ok=True)
        file = open(Path(out_dir) / ".lock", "a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise CheckpointError(f"out_dir={out_dir} is in use by another run ({file.read().strip()}): end that "
                                  f"run or choose another out_dir") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        return file

    return _agreed(group, take, only_rank0=True)


# --------------------------------------------------------------------------------------------------
# Tensors


class _Placements:
    """Where each tensor's local part lies in the whole, as DTensors say it."""

    def __init__(self, model, layout):
        self.model, self.layout = model, layout
        self.meshes = [self._mesh(dims) for dims in (parallel.DENSE[1:], parallel.EXPERTS[1:])]

    def _mesh(self, dims):
        """The ranks of this pipeline stage, as a mesh of the host: other stages hold other parameters, and what
        is written or read lies in host memory."""
        sizes, rank = self.layout.sizes, dist.get_rank()
        ranks = torch.tensor(sizes.members(rank, *dims)).view([getattr(sizes, d) for d in dims])
        groups = [parallel.process_group(sizes.members(rank, d)) for d in dims]
        return dist.DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=dims)

    def place(self, name, local):
        """`local`, this rank's part of parameter or buffer `name`, as a DTensor. No communication."""
        shards = self.model.shards(name)
        mesh = self.meshes[bool(set(shards) & set(parallel.EXPERTS[1:]))]
        kinds = [Shard(shards[dim]) if dim in shards else Replicate() for dim in mesh.mesh_dim_names]
        return DTensor.from_local(local, mesh, kinds, run_check=False)


def _buffers(model):
    """{name: buffer} of what is state without being a parameter: the routers' biases."""
    parameters = dict(model.named_parameters())
    return {name: buffer for name, buffer in model.state_dict().items() if name not in parameters}


def _whole(family, shard, start, count):
    """`count` elements from `start` of a family's flat tensor, of which this rank holds `shard`. They lie on one
    owner or, across the border of shards, on several; then all owners must call. → None where this rank holds
    nothing of them, the elements where it does."""
    end, own = start + count, family.own
    low, high = max(start, own.start), min(end, own.stop)
    if start // family.shard_size == (end - 1) // family.shard_size:
        return shard[start - own.start:end - own.start] if low < high else None
    # Bytes, because a sum of floats would turn -0 into 0; all other owners add zeros.
    whole = shard.new_zeros(count)
    if low < high:
        whole[low - start:high - start] = shard[low - own.start:high - own.start]
    family.owner.all_reduce(whole.view(torch.uint8))
    return whole


@torch.no_grad()
def _to_save(model, optimizer, layout):
    """{name: DTensor} of what this rank writes, on the host. The owner in whose shard a parameter begins writes
    all of it, so the work is spread as evenly as the shards, and beyond its own share a rank holds one gathered
    parameter at a time."""
    place, tensors = _Placements(model, layout).place, {}
    for family in optimizer.families:
        for kind, shard in optimizer.state(family).items():
            for name, shape, start in family.slots:
                flat = _whole(family, shard, start, shape.numel())
                if family.own.start <= start < family.own.stop and family.answers:
                    tensors[kind + name] = place(name, flat.cpu().view(shape))
    if layout.plane.rank == 0:
        tensors |= {name: place(name, buffer.cpu()) for name, buffer in _buffers(model).items()}
    return tensors


def _read(folder, tensors, group):
    """Fills the DTensors `tensors` from the checkpoint, whatever layout wrote it."""
    try:
        dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)),
                 process_group=parallel.process_group(group.ranks))
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be loaded: {_reason(error)}") from error


def _reason(error):
    """(In one line) why torch.distributed.checkpoint failed: the first rank's reason stands for all."""
    for rank, (cause, _) in sorted(getattr(error, "failures", {}).items()):
        return f"{getattr(cause, 'strerror', None) or cause} (rank {rank})".replace("\n", " ")
    return str(getattr(error, "strerror", None) or error).replace("\n", " ")


# --------------------------------------------------------------------------------------------------
# Random numbers


def _random_state(device):
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: base64.b64encode(state.numpy().tobytes()).decode() for kind, state in states.items()}


def _set_random_state(states, device):
    for kind, text in states.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if kind == "cpu":
            torch.set_rng_state(state)
        elif device.type == kind:
            torch.cuda.set_rng_state(state, device)


# --------------------------------------------------------------------------------------------------
# Files


def step_folder(out_dir, step):
    return Path(out_dir) / f"step_{step:06}"


def step_of(folder):
    """The step whose checkpoint a folder's name promises, or None."""
    found = re.fullmatch(r"step_(\d{6,})", Path(folder).name)
    return int(found[1]) if found else None


def folders(out_dir):
    """The checkpoints in out_dir by name, newest first; nobody has looked inside."""
    found = [path for path in Path(out_dir).glob("step_*") if step_of(path) is not None and path.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def _checksum(path):
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(2**22):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path):
    """What a folder lists reaches the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(folder):
    """A folder loses its name before it loses its files, so that nothing half removed looks whole."""
    if step_of(folder) is not None:
        folder = folder.rename(folder.with_suffix(".partial"))
    shutil.rmtree(folder)


def write_state(folder, state):
    text = json.dumps(state, sort_keys=True)
    with open(folder / STATE, "w") as file:
        file.write(json.dumps({"crc32": zlib.crc32(text.encode()), **state}, indent=1, sort_keys=True))
        file.flush()
        os.fsync(file.fileno())


def read_state(folder):
    path = Path(folder) / STATE
    try:
        state = json.loads(path.read_text())
        crc = state.pop("crc32")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path} is truncated or changed: it cannot be read") from None
    if zlib.crc32(json.dumps(state, sort_keys=True).encode()) != crc:
        raise CheckpointError(f"{path} has changed since it was written: its checksum differs")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {state['format']}, but this program reads format {FORMAT}")
    return state


def _flaw(path, size, crc):
    """What is wrong with a file, or None."""
    try:
        found = path.stat().st_size
        if found != size:
            return f"{path} has {found:,} of {size:,} bytes"
        return f"{path} has changed since it was written: its checksum differs" if _checksum(path) != crc else None
    except FileNotFoundError:
        return f"{path} is missing"
    except OSError as error:
        return f"{path}: {error.strerror}"


def damage(folder, group):
    """What is wrong with a checkpoint, a line for each file, [] if it is whole. Reads every byte; the ranks share
    the files. Collective."""
    try:
        files = read_state(folder)["files"]
        flaws = [_flaw(Path(folder) / name, *files[name]) for name in sorted(files)[group.rank::group.size]]
        # a stray file would be taken for a part of the tensors
        flaws += [f"{path} does not belong to it" for path in Path(folder).glob("*.safetensors")
                  if path.name not in files and group.rank == 0]
    except CheckpointError as error:
        flaws = [str(error)]
    return sorted({flaw for told in _all_told(group, flaws) for flaw in told if flaw})


# --------------------------------------------------------------------------------------------------
# Save, choose, load


def save(out_dir, step, keep, model, optimizer, layout, about):
    """Writes the state after `step` updates, then takes away all but the newest `keep` up to here. `about`: what
    state.json should hold besides. If anything fails on any rank, all raise CheckpointError, and what was there
    before still is. Collective."""
    final, world = step_folder(out_dir, step), layout.world
    partial = final.with_suffix(".partial")

    def begin():
        for remains in Path(out_dir).glob("step_*.partial"):
            shutil.rmtree(remains)
        partial.mkdir(parents=True)

    def finish():
        write_state(partial, {**about, "format": FORMAT, "step": step, "updates": optimizer.updates, "rng": rng,
                              "files": {name: entry for part in written for name, entry in part.items()}})
        _sync(partial)
        if final.exists():  # a damaged one that this run went back behind: kept, under another name
            final.rename(next(aside for n in range(1000)
                              if not (aside := final.with_suffix(f".damaged{n or ''}")).exists()))
        partial.rename(final)
        _sync(out_dir)
        for old in [f for f in folders(out_dir) if step_of(f) <= step][keep:]:
            _remove(old)

    try:
        _agreed(world, begin, only_rank0=True)
        try:
            dcp.save(_to_save(model, optimizer, layout), process_group=parallel.process_group(world.ranks),
                     storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True))
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{partial}: {_reason(error)}") from error
        names = sorted(path.name for path in partial.glob("*.safetensors"))[world.rank::world.size]
        measure = lambda: {name: [(partial / name).stat().st_size, _checksum(partial / name)] for name in names}
        written = _all_told(world, _agreed(world, measure))
        rng = _all_told(world, _random_state(layout.device))
        _agreed(world, finish, only_rank0=True)
    except CheckpointError as error:
        if world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"cannot save step {step}: {error}") from None


def choose(resume, out_dir, group):
    """The checkpoint to go on from: → (folder, its state, notes for the user), (None, None, []) to start anew.

    resume is none, auto (the newest in out_dir; where that is damaged, the newest whole one before it), or a
    path: a checkpoint, or a folder of them of which the newest counts. A damaged checkpoint that was named is
    refused, and so is whatever would have to be overwritten. Collective.
    """
    def candidates():
        own = folders(out_dir)
        if resume == "none" and own:
            raise CheckpointError(f"resume=none, but {out_dir} has checkpoints up to {own[0].name}: set "
                                  f"resume=auto or choose another out_dir")
        if resume in ("none", "auto"):
            return own
        found = [Path(resume)] if step_of(resume) is not None else folders(resume)
        if not found or not found[0].is_dir():
            raise CheckpointError(f"resume={resume}: there is no checkpoint (a folder step_000100, or one of "
                                  f"such)")
        if own and step_of(own[0]) > step_of(found[0]):
            raise CheckpointError(f"out_dir={out_dir} already has {own[0].name}, later than resume={found[0]}: "
                                  f"choose another out_dir, or set resume=auto to go on from there")
        return found[:1]

    notes = []
    for folder in _all_told(group, _agreed(group, candidates, only_rank0=True))[0]:
        flaws = damage(folder, group)
        if not flaws:
            if notes:
                notes[-1] += f"; going back to {folder}"
            return folder, read_state(folder), notes
        more = f" (and {len(flaws) - 1} more files)" if len(flaws) > 1 else ""
        notes.append(f"checkpoint {folder} is damaged: {flaws[0]}{more}")
    if notes:
        raise CheckpointError("; ".join(notes) + "; no whole checkpoint is left: restore one, or choose another "
                              "out_dir")
    return None, None, []


def changed_knobs(cfg, state):
    """[(name, then, now)] of the knobs that differ from those the checkpoint was made with."""
    now = as_dict(cfg)
    return [(name, then, now[name]) for name, then in state["config"].items() if name in now and now[name] != then]


def other_architecture(cfg, state):
    """The changed knobs with which the checkpoint's tensors would mean something else."""
    fixed = {f.name for part in (models.ModelConfig, moe.MoEConfig) for f in dataclasses.fields(part)} - FREE
    return [change for change in changed_knobs(cfg, state) if change[0] in fixed | {"optimizer"}]


@torch.no_grad()
def load(folder, state, model, optimizer, layout):
    """Weights, optimizer state, biases and this rank's random numbers from a checkpoint that `choose` found.
    Collective. A rank reads the parameters of which its own shard holds a part."""
    place, tensors, copies = _Placements(model, layout).place, {}, []
    for family in optimizer.families:
        for kind, shard in optimizer.state(family).items():
            for name, shape, start in family.slots:
                low, high = max(start, family.own.start), min(start + shape.numel(), family.own.stop)
                if low < high:
                    local = torch.empty(shape, dtype=shard.dtype)
                    tensors[kind + name] = place(name, local)
                    copies.append((shard[low - family.own.start:high - family.own.start],
                                   local.flatten()[low - start:high - start]))
    for name, buffer in _buffers(model).items():
        local = torch.empty(buffer.shape, dtype=buffer.dtype)
        tensors[name] = place(name, local)
        copies.append((buffer, local))
    _read(folder, tensors, layout.world)
    for into, local in copies:
        into.copy_(local)
    for family in optimizer.families:
        family.gather()
    optimizer.updates = state["updates"]
    if layout.world.rank < len(state["rng"]):
        _set_random_state(state["rng"][layout.world.rank], layout.device)


@torch.no_grad()
def load_weights(folder, model, layout):
    """Weights and biases alone, into a model that has memory but no optimizer."""
    place, tensors = _Placements(model, layout).place, {}
    targets = {**dict(model.named_parameters()), **_buffers(model)}
    for name, target in targets.items():
        tensors[name] = place(name, torch.empty(target.shape, dtype=torch.float32))
    _read(folder, tensors, layout.world)
    for name, target in targets.items():
        target.copy_(tensors[name].to_local())
