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

    python checkpoint.py import DIR out_dir      from a model in Hugging Face's layout (second half of this file)
    python checkpoint.py export out_dir DIR      to one
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
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard

import model as models
import moe
import parallel
from settings import as_dict, knob
from settings import load as load_settings

STATE, FORMAT = "state.json", 1
# Knobs of model.py and moe.py that may change between a checkpoint and the run that goes on from it
FREE = {"seq_len", "mtp_coef", "aux_loss_coef", "aux_loss_scope", "z_loss_coef", "bias_update_rate",
        "force_balance", "router_precision"}


class CheckpointError(Exception):
    """What is wrong, in one line for the user. Raised on every rank alike."""


# --------------------------------------------------------------------------------------------------
# Ranks agree


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
    if problem := next(filter(None, group.gather_objects(problem)), None):
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
    whole = shard.new_zeros(count, device=family.grad.device)   # (averages may wait on the host)
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
    return sorted({flaw for told in group.gather_objects(flaws) for flaw in told if flaw})


def open_checkpoint(path):
    """→ (folder, its state) of a checkpoint, of the newest one in an out_dir, or of a Hugging Face folder, whose
    state has no step. For one process. Raises CheckpointError."""
    if (Path(path) / "config.json").is_file():
        return Path(path), describe(path)
    folder = Path(path) if step_of(path) is not None else next(iter(folders(path)), None)
    if folder is None or not folder.is_dir():
        raise CheckpointError(f"{path}: there is no checkpoint (a folder step_000100, or one of such)")
    state = read_state(folder)
    if flaws := damage(folder, parallel.Group("world", (0,))):
        raise CheckpointError(f"checkpoint {folder} is damaged: {flaws[0]}")
    return folder, state


# --------------------------------------------------------------------------------------------------
# Save, choose, load


def save(out_dir, step, keep, model, optimizer, layout, about):
    """Writes the state after `step` steps. Otherwise as `write`."""
    write(out_dir, step, keep, lambda: _to_save(model, optimizer, layout), layout,
          {**about, "updates": optimizer.updates})


def write(out_dir, step, keep, tensors, layout, about):
    """Writes a checkpoint of what tensors() returns, DTensors, then takes away all but the newest `keep` up to
    here. `about`: what state.json should hold besides. If anything fails on any rank, all raise CheckpointError, and
    what was there before still is. Collective."""
    final, world = step_folder(out_dir, step), layout.world
    partial = final.with_suffix(".partial")

    def begin():
        for remains in Path(out_dir).glob("step_*.partial"):
            shutil.rmtree(remains)
        partial.mkdir(parents=True)

    def finish():
        write_state(partial, {**about, "format": FORMAT, "step": step, "rng": rng,
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
            dcp.save(tensors(), process_group=parallel.process_group(world.ranks),
                     storage_writer=dcp.HuggingFaceStorageWriter(str(partial), save_distributed=True))
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{partial}: {_reason(error)}") from error
        names, *others = world.gather_objects(sorted(path.name for path in partial.glob("*.safetensors")))
        if any(other != names for other in others):
            raise CheckpointError(f"out_dir={out_dir} must lie on a file system that all nodes share")
        names = names[world.rank::world.size]
        measure = lambda: {name: [(partial / name).stat().st_size, _checksum(partial / name)] for name in names}
        written = world.gather_objects(_agreed(world, measure))
        rng = world.gather_objects(_random_state(layout.device))
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
    for folder in group.gather_objects(_agreed(group, candidates, only_rank0=True))[0]:
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


def config_of(state, cls):
    """The settings with which a checkpoint was made, as far as `cls` knows them, for one process."""
    known = {field.name for field in dataclasses.fields(cls)}
    saved = {name: tuple(value) if isinstance(value, list) else value for name, value in state["config"].items()}
    return parallel.one_rank(cls(**{name: value for name, value in saved.items() if name in known}))


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
            if kind and state.get("weights_only"):  # an imported model: AdamW's averages begin at zero
                continue
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
    optimizer.changed()
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


# --------------------------------------------------------------------------------------------------
# Hugging Face's layout: folders with config.json and model-*.safetensors, as published models come


def _swiglu(ours, theirs, gate="gate_proj", up="up_proj", down="down_proj"):
    return {f"{ours}.w1": (f"{theirs}.{gate}.weight", f"{theirs}.{up}.weight"),
            f"{ours}.w2": f"{theirs}.{down}.weight"}


# Our names to theirs. A pair is our dimension of gate and up, {e} our dimension of experts. What is not OUTSIDE
# stands below layers.N. here and below model.layers.N. there.
OUTSIDE = {"embedding": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head": "lm_head.weight"}
BLOCK = {"norm1.weight": "input_layernorm.weight", "norm2.weight": "post_attention_layernorm.weight",
         "attention.wo": "self_attn.o_proj.weight"}
GQA = {"attention.wq": "self_attn.q_proj.weight", "attention.wk": "self_attn.k_proj.weight",
       "attention.wv": "self_attn.v_proj.weight"}
QK_NORM = {"attention.q_norm.weight": "self_attn.q_norm.weight",
           "attention.k_norm.weight": "self_attn.k_norm.weight"}
MLA = {"attention.wq_a": "self_attn.q_a_proj.weight", "attention.q_norm.weight": "self_attn.q_a_layernorm.weight",
       "attention.wq": "self_attn.q_b_proj.weight", "attention.wkv_a": "self_attn.kv_a_proj_with_mqa.weight",
       "attention.kv_norm.weight": "self_attn.kv_a_layernorm.weight",
       "attention.wkv": "self_attn.kv_b_proj.weight"}
EXPERTS = {"moe.router.weight": "mlp.gate.weight"} | _swiglu("moe.experts", "mlp.experts.{e}")
MTP = {"embed_norm.weight": "enorm.weight", "state_norm.weight": "hnorm.weight", "proj": "eh_proj.weight",
       "norm.weight": "shared_head.norm.weight"}
# Each module for multi-token prediction comes with copies of these
COPIES = {"embedding": "embed_tokens.weight", "head": "shared_head.head.weight"}

# Knobs to entries of config.json; further on, of each architecture: more of them, what it fixes, and its tensors.
ENTRIES = {"vocab_size": "vocab_size", "n_layer": "num_hidden_layers", "d_model": "hidden_size",
           "n_head": "num_attention_heads", "n_kv_head": "num_key_value_heads", "norm_eps": "rms_norm_eps",
           "tie_embeddings": "tie_word_embeddings", "top_k": "num_experts_per_tok"}
ARCHITECTURES = {
    "qwen3_moe": dict(
        name="Qwen3MoeForCausalLM", fixed={"qk_norm": "head"},
        entries={"d_head": "head_dim", "d_ff": "intermediate_size", "num_experts": "num_experts",
                 "d_expert": "moe_intermediate_size", "norm_topk": "norm_topk_prob"},
        tensors=BLOCK | GQA | QK_NORM | _swiglu("mlp", "mlp") | EXPERTS),
    "mixtral": dict(
        name="MixtralForCausalLM", fixed={"norm_topk": True},
        entries={"d_head": "head_dim", "num_experts": "num_local_experts", "d_expert": "intermediate_size"},
        tensors=BLOCK | GQA | {"moe.router.weight": "block_sparse_moe.gate.weight"}
        | _swiglu("moe.experts", "block_sparse_moe.experts.{e}", "w1", "w3", "w2")),
    "olmoe": dict(
        name="OlmoeForCausalLM", fixed={"qk_norm": "full"},
        entries={"num_experts": "num_experts", "d_expert": "intermediate_size", "norm_topk": "norm_topk_prob"},
        tensors=BLOCK | GQA | QK_NORM | EXPERTS),
    "deepseek_v3": dict(
        name="DeepseekV3ForCausalLM", fixed={"attention": "mla", "score_fn": "sigmoid"},
        entries={"n_dense_layers": "first_k_dense_replace", "d_ff": "intermediate_size",
                 "num_experts": "n_routed_experts", "d_expert": "moe_intermediate_size",
                 "n_shared_experts": "n_shared_experts", "norm_topk": "norm_topk_prob",
                 "route_scale": "routed_scaling_factor", "n_groups": "n_group", "topk_groups": "topk_group",
                 "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank", "d_nope": "qk_nope_head_dim",
                 "d_rope": "qk_rope_head_dim", "d_v": "v_head_dim", "n_mtp": "num_nextn_predict_layers"},
        tensors=BLOCK | MLA | MTP | _swiglu("mlp", "mlp") | _swiglu("moe.shared", "mlp.shared_experts") | EXPERTS
        | {"moe.router.bias_E": "mlp.gate.e_score_correction_bias"}),
}
# Dense models whose MLP every expert of a layer can begin as. Where a token's router weights sum to 1 and nothing
# is dropped, the first step computes what the dense model does.
DENSE_MLP = _swiglu("mlp", "mlp") | _swiglu("moe.experts", "mlp")
DENSE_ENTRIES = {"d_head": "head_dim", "d_ff": "intermediate_size", "d_expert": "intermediate_size"}
DENSE = {
    "llama": dict(fixed={}, entries=DENSE_ENTRIES, tensors=BLOCK | GQA | DENSE_MLP),
    "qwen3": dict(fixed={"qk_norm": "head"}, entries=DENSE_ENTRIES, tensors=BLOCK | GQA | QK_NORM | DENSE_MLP),
}
# what that takes, and what they are where config.json says nothing
UPCYCLED = {"norm_topk": True, "route_scale": 1.0, "n_shared_experts": 0, "attention": "gqa", "qk_norm": "none",
            "n_kv_head": 0, "d_head": 0, "tie_embeddings": False, "rope_scaling": ""}
SOURCES = {"hf": ARCHITECTURES, "upcycle": DENSE}   # what stands before the folder in init_from
SYNONYMS = {"num_experts": "num_local_experts", "n_routed_experts": "num_local_experts",
            "num_local_experts": "num_experts"}
# Entries that change what a model computes, and the only value of each that is known here
ONLY = {"attention_bias": False, "mlp_bias": False, "clip_qkv": None, "sliding_window": None, "hidden_act": "silu",
        "decoder_sparse_step": 1,
        "rope_interleave": True, "moe_layer_freq": 1, "partial_rotary_factor": 1.0}
YARN_ENTRIES = {"original": "original_max_position_embeddings"}     # the others have one name here and there


def architecture_of(cfg):
    """{knob: value} of all that decides what a checkpoint's tensors mean, spelled one way: what follows from other
    knobs is written out, and what the model does not use is left out."""
    fixed = {f.name for part in (models.ModelConfig, moe.MoEConfig) for f in dataclasses.fields(part)} - FREE
    values = {name: getattr(cfg, name) for name in fixed} | {"n_kv_head": cfg.n_kv_head or cfg.n_head,
                                                             "d_head": models.head_width(cfg),
                                                             "rope_scaling": models.yarn(cfg.rope_scaling)}
    unused = {"q_lora_rank", "kv_lora_rank", "d_nope", "d_rope", "d_v"}
    if cfg.attention == "mla":
        unused = {"d_head", "n_kv_head"}
    if not cfg.n_dense_layers:
        unused |= {"d_ff"}
    return {name: value for name, value in values.items() if name not in unused}


def read_config(folder, known=ARCHITECTURES):
    """The architecture's name and the knobs that a Hugging Face folder's config.json means, but n_mtp, which is
    the user's choice: a folder may have no weights for the modules that its config.json speaks of."""
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise CheckpointError(f"{path} is truncated or no JSON") from None
    kind, knobs = _knobs_of(config, path, known)
    return kind, {name: value for name, value in knobs.items() if name != "n_mtp"}


def _knobs_of(config, path, known=ARCHITECTURES):
    kind = config.get("model_type")
    if kind not in known:
        other = next((f"; init_from={source}:FOLDER takes this one" for source, kinds in SOURCES.items()
                      if kind in kinds), "")
        raise CheckpointError(f"{path} has model_type={kind}; known are {', '.join(known)}{other}")
    if not config.get("use_sliding_window", True):
        config = config | {"sliding_window": None}
    for name, value in ONLY.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"{path} has {name}={config[name]}, but only {name}={value} can be run here")
    architecture, knobs = known[kind], {}
    optional = {"n_kv_head", "d_head", "q_lora_rank", "tie_embeddings", "n_mtp"} | ({"top_k"} if known is DENSE
                                                                                    else set())
    for knob, entry in (ENTRIES | architecture["entries"]).items():
        value = config.get(entry, config.get(SYNONYMS.get(entry)))
        if value is not None:
            knobs[knob] = value
        elif knob not in optional:
            raise CheckpointError(f"{path} has no {entry}")
    if kind == "qwen3_moe":
        dense = config.get("mlp_only_layers") or []
        if dense != list(range(len(dense))):
            raise CheckpointError(f"{path} has mlp_only_layers={dense}, but only first layers can be dense here")
        knobs["n_dense_layers"] = len(dense)
    if kind == "deepseek_v3":
        knobs.pop("n_kv_head", None)    # of no meaning there
    return kind, knobs | architecture["fixed"] | _rope_knobs(config, path)


def _rope_knobs(config, path):
    """Old folders have rope_theta and rope_scaling, new ones rope_parameters with both."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if kind == "default":
        return {"rope_theta": float(theta)}
    names = {entry: name for name, entry in ({name: name for name in models.YARN} | YARN_ENTRIES).items()}
    strange = [name for name, value in rope.items() if name not in names and value is not None]
    if kind != "yarn" or strange or rope.get("factor") is None:
        raise CheckpointError(f"{path} scales rotary positions by {kind} with {rope}, which cannot be run here")
    text = ",".join(f"{names[name]}={float(value)!r}" for name, value in rope.items() if value is not None)
    return {"rope_theta": float(theta), "rope_scaling": text}


def config_json(cfg, dtype):
    """(architecture, contents of config.json) for the model of `cfg`; CheckpointError where none can say it."""
    ours, misfits = architecture_of(cfg), {}
    for kind, architecture in ARCHITECTURES.items():
        entries = {entry: getattr(cfg, knob) for knob, entry in (ENTRIES | architecture["entries"]).items()}
        entries |= {"num_key_value_heads": cfg.n_kv_head or cfg.n_head, "q_lora_rank": cfg.q_lora_rank or None}
        if "head_dim" in entries:
            entries["head_dim"] = models.head_width(cfg)
        if kind == "qwen3_moe":
            entries |= {"mlp_only_layers": list(range(cfg.n_dense_layers)), "decoder_sparse_step": 1}
        length, yarn = cfg.seq_len, models.yarn(cfg.rope_scaling)
        if yarn:
            entries["rope_scaling"] = {"type": "yarn", "rope_type": "yarn"} | {
                YARN_ENTRIES.get(name, name): value for name, value in yarn.items() if value}
            entries["rope_scaling"]["original_max_position_embeddings"] = int(yarn["original"])
            length = max(length, int(yarn["original"] * yarn["factor"]))
        contents = {"architectures": [architecture["name"]], "model_type": kind, "hidden_act": "silu",
                    "attention_bias": False, "max_position_embeddings": length, "rope_theta": cfg.rope_theta,
                    "torch_dtype": str(dtype)[6:], **entries}
        # what another reader would make of it must be this model and no other
        theirs = architecture_of(dataclasses.replace(type(cfg)(), **_knobs_of(contents, "config.json")[1]))
        misfits[kind] = [f"{name}={ours.get(name)}" for name in sorted(ours.keys() | theirs.keys())
                         if ours.get(name) != theirs.get(name)]
        if not misfits[kind]:
            return kind, contents
    kind = min(misfits, key=lambda kind: len(misfits[kind]))
    raise CheckpointError(f"no architecture of transformers known here has this model: closest is {kind}, which "
                          f"has no {', '.join(misfits[kind])}")


def architecture_words(source):
    """["--name=value"] of the architecture in `source`, the value of init_from; for the front of a command line,
    so that what the user says wins (and `check_init` objects)."""
    kind, _, folder = source.partition(":")
    if kind not in SOURCES:
        return []
    try:
        _, knobs = read_config(folder, SOURCES[kind])
    except CheckpointError:
        return []
    return [f"--{name}={value}" for name, value in knobs.items()]


def check_init(cfg, source):
    """Why `cfg` cannot start from `source`, the value of init_from, if so."""
    if not source:
        return []
    kind, _, folder = source.partition(":")
    if kind not in SOURCES or not folder:
        return [f"init_from={source} is not of the form hf:FOLDER or upcycle:FOLDER"]
    try:
        architecture, knobs = read_config(folder, SOURCES[kind])
        module = f"model.layers.{cfg.n_layer + cfg.n_mtp - 1}.eh_proj.weight"
        if cfg.n_mtp and module not in _Folder(Path(folder)).at:
            return [f"n_mtp={cfg.n_mtp}, but {folder} has no {module}: set n_mtp=0"]
    except CheckpointError as error:
        return [str(error)]
    # a dense model says nothing of the router, so that is as the user wants it
    base = dataclasses.replace(cfg, **UPCYCLED) if kind == "upcycle" else type(cfg)(n_mtp=cfg.n_mtp)
    now, then = architecture_of(cfg), architecture_of(dataclasses.replace(base, **knobs))
    why = ENTRIES | SOURCES[kind][architecture]["entries"]
    if kind == "upcycle":
        why = dict.fromkeys(UPCYCLED, "or it would not begin as the dense model") | why
        if cfg.top_k == 1:
            return [f"init_from={source} needs top_k=2 or more, and norm_topk=true: a token's router weights must "
                    f"sum to 1 to begin as the dense model, and still be learned"]
    other = [f"{name}={then.get(name)} there, {now.get(name)} here" + (f" ({why[name]})" if name in why else "")
             for name in sorted(now.keys() | then.keys()) if now.get(name) != then.get(name)]
    return [f"init_from={source} is another model: {'; '.join(other)}"] if other else []


class _Folder:
    """The tensors of a Hugging Face folder, read in slices."""

    def __init__(self, folder):
        from safetensors import SafetensorError, safe_open

        index, one = folder / "model.safetensors.index.json", folder / "model.safetensors"
        try:
            files = json.loads(index.read_text())["weight_map"] if index.exists() else None
        except (ValueError, KeyError):
            raise CheckpointError(f"{index} cannot be read") from None
        self.folder, self.at, self.used, path = folder, {}, set(), one
        try:
            for path in sorted({folder / name for name in files.values()}) if files else [one]:
                file = safe_open(path, "pt")
                self.at |= {key: (path, file) for key in file.keys()}
        except (OSError, SafetensorError) as error:
            missing = isinstance(error, FileNotFoundError)
            reason = "is missing" if missing else f"is truncated or no safetensors: {error}"
            raise CheckpointError(f"{path} {reason}".replace("\n", " ")) from None
        for key in sorted(files or {}):
            if key not in self.at:
                raise CheckpointError(f"{folder / files[key]} has no {key}, which {index.name} says it has")
        config = json.loads((folder / "config.json").read_text())
        self.block = (config.get("quantization_config") or {}).get("weight_block_size", [128, 128])

    def check(self, key, shape):
        if key not in self.at:
            raise CheckpointError(f"{self.folder} has no {key}")
        path, file = self.at[key]
        found = list(file.get_slice(key).get_shape())
        if found != list(shape):
            raise CheckpointError(f"{path}: {key} has shape {found}, but this model's is {list(shape)}")
        self.used |= {key, f"{key}_scale_inv"}

    def read(self, key, index):
        """The part `index` (a slice for each dimension) of a tensor. What is stored in FP8 comes with a scale for
        each block of rows and columns."""
        path, file = self.at[key]
        x = file.get_slice(key)[tuple(index)]
        scale = f"{key}_scale_inv"
        if scale not in self.at:
            return x
        covering = tuple(slice(i.start // n, -(-i.stop // n)) for i, n in zip(index, self.block))
        scale = self.at[scale][1].get_slice(scale)[covering].float()
        for dim, (i, n) in enumerate(zip(index, self.block)):
            scale = scale.repeat_interleave(n, dim).narrow(dim, i.start % n, i.stop - i.start)
        return x.float() * scale


def _tensors(kind, cfg):
    straight = {} if cfg.q_lora_rank else {"attention.wq": "self_attn.q_proj.weight"}
    return (ARCHITECTURES | DENSE)[kind]["tensors"] | straight


def _pieces(tensors, name, index):
    """[(their name, where in our tensor, slices of theirs)] that make up the part `index` of our tensor `name`;
    [] if this architecture does not have it."""
    layer = re.match(r"(layers\.\d+\.)?", name)[0]
    theirs = tensors.get(name[len(layer):]) if layer else OUTSIDE.get(name)
    if theirs is None:
        return []
    prefix = f"model.{layer}" if layer else ""
    index, numbers, parts = list(index), [None], theirs if isinstance(theirs, tuple) else [theirs]
    if ".experts." in name:
        numbers = range(index[0].start, index[0].stop)
        index = index[1:]
    if isinstance(theirs, tuple):
        index = index[1:]
    found = []
    for i, e in enumerate(numbers):
        for j, part in enumerate(parts):
            where = (i,) * (e is not None) + (j,) * isinstance(theirs, tuple)
            found.append((prefix + part.format(e=e), where, index))
    return found


@torch.no_grad()
def load_hf(folder, model, layout, known=ARCHITECTURES):
    """Weights and biases of `model` from a Hugging Face folder, of which each rank reads only its own slices. A
    DENSE model's MLP goes to every expert, and the routers keep their random initial values.
    Collective; whatever is missing, too much, misshapen or cut short is found before anything is changed."""
    folder = Path(folder)
    targets = {**dict(model.named_parameters()), **_buffers(model)}

    def look():
        kind, _ = read_config(folder, known)
        source, tensors = _Folder(folder), _tensors(kind, model.cfg)
        for name, target in targets.items():
            pieces = _pieces(tensors, name, model.place(name, target.shape))
            # a bias is zero where an architecture has none
            if not pieces and not (name.endswith("bias_E") or known is DENSE and ".router." in name):
                raise CheckpointError(f"{folder} is a {kind}, which has nothing for this model's {name}")
            for key, where, _ in pieces:
                source.check(key, model.full_shape(name, target.shape)[len(where):])
        return kind, source, tensors

    kind, source, tensors = _agreed(layout.world, look)
    used = set().union(*layout.world.gather_objects(source.used))

    def ignored(key):
        """The copy of a tied head, tables that follow from the configuration, and behind DeepSeek's last block the
        modules for multi-token prediction that this model has not, and of the others the copies."""
        beyond = re.match(r"model\.layers\.(\d+)\.(.*)", key)
        beyond = beyond and (int(beyond[1]) - model.cfg.n_layer, beyond[2])
        return (key == "lm_head.weight" and model.cfg.tie_embeddings or key.endswith("rotary_emb.inv_freq")
                or kind == "deepseek_v3" and beyond and (beyond[0] >= model.cfg.n_mtp or
                                                         beyond[0] >= 0 and beyond[1] in COPIES.values()))

    def strangers():
        if strange := [key for key in sorted(source.at) if key not in used and not ignored(key)]:
            more = f" (and {len(strange) - 1} more)" if len(strange) > 1 else ""
            raise CheckpointError(f"{source.at[strange[0]][0]} has {strange[0]}{more}, which this model has not")

    def read():
        for name, target in targets.items():
            for key, where, index in _pieces(tensors, name, model.place(name, target.shape)):
                target[where].copy_(source.read(key, index))

    _agreed(layout.world, strangers)
    _agreed(layout.world, read)


def start_from(source, model, layout):
    """What the value of init_from means, in a model that has its initial values. Otherwise as load_hf."""
    kind, _, folder = source.partition(":")
    load_hf(folder, model, layout, SOURCES[kind])


def describe(folder):
    """What state.json would say of a Hugging Face folder."""
    _, knobs = read_config(folder)
    stored = json.loads((Path(folder) / "config.json").read_text())
    knobs |= {"precision": "bf16" if "bfloat16" in (stored.get("dtype"), stored.get("torch_dtype")) else "fp32",
              "seq_len": min(stored.get("max_position_embeddings", 4096), 4096)}
    tokenizer = "tokenizer.json" if (Path(folder) / "tokenizer.json").exists() else None
    return {"config": knobs, "samples": 0, "wandb": None, "data": str(Path(folder).resolve()),
            "tokenizer": tokenizer, "updates": 0, "weights_only": True}


# --------------------------------------------------------------------------------------------------
# python checkpoint.py import | export


class ImportConfig(models.Architecture):
    """Knobs of `python checkpoint.py import DIR OUT_DIR`."""

    program = "checkpoint.py import DIR OUT_DIR"


@dataclasses.dataclass
class ExportConfig:
    """Knobs of `python checkpoint.py export OUT_DIR DIR`."""

    program = "checkpoint.py export OUT_DIR DIR"

    dtype: str = knob("auto", "of the tensors; auto: bf16 if the run's precision was that or lower, else fp32",
                      choices=("auto", "fp32", "bf16"))


def import_hf(folder, out_dir, argv):
    """A Hugging Face folder as checkpoint out_dir/step_000000, without optimizer state, in the layout that `argv`
    and torchrun say. out_dir/config.py holds the architecture's knobs."""
    source, ranks = f"hf:{folder}", int(os.environ.get("WORLD_SIZE", 1))
    cfg = load_settings(ImportConfig, [*architecture_words(source), *argv], lambda cfg: check_init(cfg, source),
                        models.check, moe.check, lambda cfg: parallel.check(cfg, ranks))
    parallel.init(torch.device("cpu"))
    layout = parallel.Layout(parallel.sizes_of(cfg, ranks), torch.device("cpu"))
    held = lock(out_dir, layout.world)      # by rank 0, until it ends

    def free():
        if own := folders(out_dir):
            raise CheckpointError(f"{out_dir} already has {own[0].name}: choose another out_dir")

    _agreed(layout.world, free, only_rank0=True)
    with torch.device("meta"):
        model = models.Model(cfg, layout)
    model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    load_hf(folder, model, layout)
    place = _Placements(model, layout).place
    tensors = {name: place(name, p.detach()) for name, p in model.named_parameters()
               if layout.owners[tuple(model.shards(name))].rank == 0
               and not (model.on_both_ends(name) and layout.pp.rank)}
    if layout.plane.rank == 0:
        tensors |= {name: place(name, buffer) for name, buffer in _buffers(model).items()}
    about = describe(folder)
    knobs = about["config"]
    knobs |= {"n_mtp": cfg.n_mtp} if cfg.n_mtp else {}
    write(out_dir, 0, 1, lambda: tensors, layout, about)
    if layout.world.rank == 0:
        text = "".join(f"{name} = {value!r}\n" for name, value in knobs.items())
        (Path(out_dir) / "config.py").write_text(f'"""The model of {folder}."""\n{text}')
        print(f"{step_folder(out_dir, 0)} holds the model of {folder}; go on from it with\n"
              f"  train.py {out_dir}/config.py --out_dir={out_dir} --data=...")
    if held:
        held.close()


@torch.no_grad()
def export_hf(path, folder, dtype, file_bytes=5 * 10**9):
    """A checkpoint (or the newest one of an out_dir), whatever its layout, as a Hugging Face folder, on one
    process that holds a file's tensors at a time. The folder has its name only when it is complete."""
    from safetensors.torch import save_file

    folder, parts = Path(folder), []
    parallel.init(torch.device("cpu"))
    source, state = open_checkpoint(path)
    if "step" not in state:
        raise CheckpointError(f"{path} is in Hugging Face's layout already")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists and is not empty: choose another folder")
    cfg = config_of(state, models.Architecture)
    if dtype == "auto":
        dtype = "fp32" if cfg.precision in ("auto", "fp32") else "bf16"
    dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
    kind, contents = config_json(cfg, dtype)
    tensors, layout = _tensors(kind, cfg), parallel.Layout(parallel.sizes_of(cfg, 1), torch.device("cpu"))
    with torch.device("meta"):
        model = models.Model(cfg, layout)
    place, room = _Placements(model, layout).place, 0
    for name, target in {**dict(model.named_parameters()), **_buffers(model)}.items():
        size = target.numel() * dtype.itemsize
        if not parts or size > room:
            parts.append([])
            room = file_bytes
        parts[-1].append((name, target.shape))
        room -= size
    partial, files, total = folder.with_name(f"{folder.name}.partial"), {}, 0
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        for number, part in enumerate(parts, 1):
            whole = {name: torch.empty(shape) for name, shape in part}
            _read(source, {name: place(name, x) for name, x in whole.items()}, layout.world)
            out, file = {}, f"model-{number:05}-of-{len(parts):05}.safetensors"
            for name, x in whole.items():
                pieces = _pieces(tensors, name, [slice(0, n) for n in x.shape])
                if not pieces and x.any():
                    raise CheckpointError(f"{name} of {source} is not zero, but {kind} has no place for it")
                kept = torch.float32 if name.endswith("bias_E") else dtype
                out |= {key: x[where].to(kept).contiguous() for key, where, _ in pieces}
                if name in COPIES:
                    out |= {f"model.layers.{cfg.n_layer + i}.{COPIES[name]}": x.to(kept, copy=True)
                            for i in range(cfg.n_mtp)}
            save_file(out, partial / file, {"format": "pt"})
            files |= dict.fromkeys(out, file)
            total += sum(x.nbytes for x in out.values())
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))
        (partial / "config.json").write_text(json.dumps(contents, indent=1, sort_keys=True))
        tokenizer = Path(state.get("data") or "") / "tokenizer.json"
        if state.get("tokenizer") == "tokenizer.json" and tokenizer.exists():
            shutil.copy(tokenizer, partial)
        if folder.exists():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    print(f"{folder} holds {source} as {contents['architectures'][0]}, {total / 1e9:.3f} GB")


def main(argv):
    usage = ("usage: checkpoint.py import DIR OUT_DIR [--key=value ...]   (under torchrun: with --ep=8, say)\n"
             "       checkpoint.py export OUT_DIR DIR [--dtype=bf16]")
    named = [word for word in argv[1:] if not word.startswith("--")]
    if argv[:1] not in (["import"], ["export"]) or len(named) != 2:
        print(usage, file=sys.stderr)
        sys.exit(2)
    rest = [word for word in argv[1:] if word.startswith("--")]
    try:
        if argv[0] == "import":
            import_hf(*named, rest)
        else:
            export_hf(*named, load_settings(ExportConfig, rest).dtype)
        parallel.finish()
    except (CheckpointError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
