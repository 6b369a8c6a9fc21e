"""Checkpoints: what is saved under one layout is found, bit by bit, under any other, or the damage is named."""

import contextlib
import errno
import hashlib
import json
import resource
import shutil

import checkpoint
import pytest
import torch
from harness import config, losses_of, replaced
from safetensors import safe_open

ADAM = dict(optimizer="adamw", lr=1e-3, min_lr=1e-3, score_fn="sigmoid", bias_update_rate=1e-2, micro_batch=3,
            capacity_factor=0.0, max_steps=9)


# ---- on the ranks ----


def whole_state(trainer):
    """{name: whole tensor} of weights, moments and biases, the same on all ranks whatever the layout."""
    state = {"updates": torch.tensor(trainer.optimizer.updates)}
    for family in trainer.optimizer.families:
        for kind, shard in trainer.optimizer.state(family).items():
            flat = family.owner.all_gather(shard)
            for (name, _, _), x in zip(family.slots, family.split(flat)):
                for group, dim in trainer.model.shards(name).items():
                    parts = getattr(trainer.layout, group).all_gather(x.contiguous()[None])
                    x = torch.cat(parts.unbind(0), dim)
                state[kind + name] = x.clone()
    for name, buffer in trainer.model.named_buffers():
        state[name] = buffer.clone()
    return {name: x for stage in trainer.layout.pp.gather_objects(state) for name, x in stage.items()}


def three_losses(trainer, done):
    return [trainer.step(step).read()[0] for step in range(done, done + 3)]


def save_run(out_dir, knobs, world, steps):
    """Trains, saves, and goes on. → (whole state when it was saved, the next three losses)."""
    import train
    trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
    losses_of(trainer, steps)
    trainer.save(steps)
    return whole_state(trainer), three_losses(trainer, steps)


def load_run(out_dir, knobs, world, again=None):
    """Loads the newest checkpoint into a fresh trainer, saves it again in the folder `again`, and goes on."""
    import train
    trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
    folder, state, notes = checkpoint.choose("auto", out_dir, trainer.layout.world)
    assert notes == [] and not checkpoint.other_architecture(trainer.cfg, state)
    checkpoint.load(folder, state, trainer.model, trainer.optimizer, trainer.layout)
    for family in trainer.optimizer.families:   # the parameters in use follow the masters
        assert torch.equal(family.flat[family.own], family.master.to(family.dtype))
    if again:
        trainer.cfg.out_dir = again
        trainer.save(state["step"])
    return whole_state(trainer), three_losses(trainer, state["step"])


def same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- other layouts ----


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_checkpoint_loads_under_any_layout_and_back(pool, tokens, tmp_path, precision):
    """Saved on 4 ranks with EP 4; each other layout loads that, saves it again, and EP 4 loads what it saved."""
    knobs = dict(ADAM, data=tokens, precision=precision, moment_dtype=precision, offload_optimizer=precision == "bf16")
    close = 1e-5 if precision == "fp32" else 1e-2   # gradients in bf16 are rounded after sums in another order
    saved = pool.run(4, save_run, f"{tmp_path}/first", dict(knobs, ep=4), 4, steps=4)
    state, losses = saved[0]
    assert state["updates"] == 4
    assert any(name.endswith("bias_E") and x.any() for name, x in state.items())
    assert all(x.any() for name, x in state.items() if name.startswith("exp_avg"))
    for i, (world, ep) in enumerate([(4, 4), (4, 2), (4, 1), (2, 2), (2, 1), (1, 1)]):
        layout = dict(knobs, ep=ep, micro_batch=12 // world if world == 1 else 3)
        there = pool.run(world, load_run, f"{tmp_path}/first", layout, world, again=f"{tmp_path}/{i}")
        for loaded, next_losses in there:
            same_bits(state, loaded)
            assert next_losses == pytest.approx(losses, rel=close)
            if (world, ep) == (4, 4):
                assert next_losses == losses
        back = pool.run(4, load_run, f"{tmp_path}/{i}", dict(knobs, ep=4), 4)
        for loaded, next_losses in back:
            same_bits(state, loaded)
            assert next_losses == losses, "on the layout that saved first, not a bit may differ"


FOLDED = {"tp2·etp2·ep2": dict(tp=2, etp=2, ep=2), "cp2·tp2·ep4": dict(cp=2, tp=2, ep=4),
          "pp2·ep2": dict(pp=2, ep=2), "pp2·vpp2·etp2": dict(pp=2, vpp=2, etp=2, ep=1),
          "pp2·tp2": dict(pp=2, tp=2, ep=1), "pp4": dict(pp=4, ep=1), "tp4·etp4": dict(tp=4, etp=4, ep=1)}


@pytest.mark.parametrize("tied", [False, True], ids=["head and MTP", "tied"])
def test_folded_layouts_load_each_other(pool, tokens, tmp_path, tied):
    """Each loads what the one before it saved and saves it for the next; nothing changes on the way."""
    knobs = dict(ADAM, data=tokens, n_layer=4, tie_embeddings=tied, n_mtp=int(not tied))
    state, losses = pool.run(4, save_run, f"{tmp_path}/0", dict(knobs, ep=4), 4, steps=3)[0]
    for i, (name, layout) in enumerate(FOLDED.items()):
        there = pool.run(4, load_run, f"{tmp_path}/{i}", knobs | layout, 4, again=f"{tmp_path}/{i + 1}")
        for rank, (loaded, next_losses) in enumerate(there):
            same_bits(state, loaded)
            assert next_losses == pytest.approx(losses, rel=1e-5), (name, rank)
    back = pool.run(1, load_run, f"{tmp_path}/{len(FOLDED)}", dict(knobs, micro_batch=12), 1)[0]
    same_bits(state, back[0])
    assert back[1] == pytest.approx(losses, rel=1e-5)


def test_every_element_is_written_once(pool, tokens, tmp_path):
    """No expert is missing or there twice, and the ranks share the work."""
    knobs = dict(ADAM, data=tokens, ep=2)
    state, _ = pool.run(4, save_run, str(tmp_path), knobs, 4, steps=1)[0]
    found, sizes = {}, []
    for path in sorted((tmp_path / "step_000001").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            offsets = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():
                found.setdefault(name, []).append((offsets[name]["saved_offsets"], file.get_tensor(name)))
        sizes.append(path.stat().st_size)
    assert found.keys() == state.keys() - {"updates"}
    for name, parts in found.items():
        assert sum(part.numel() for _, part in parts) == state[name].numel(), name
        for offset, part in parts:
            at = tuple(slice(o, o + n) for o, n in zip(offset, part.shape))
            assert torch.equal(state[name][at], part), name
    assert len(sizes) == 4 and max(sizes) < 2 * min(sizes)


def test_sgd_has_no_moments(pool, tokens, tmp_path):
    knobs = dict(data=tokens, optimizer="sgd", ep=2)
    state, losses = pool.run(4, save_run, str(tmp_path), knobs, 4, steps=2)[0]
    loaded, next_losses = pool.run(4, load_run, str(tmp_path), knobs, 4)[0]
    same_bits(state, loaded)
    assert next_losses == losses and not any(name.startswith("exp_avg") for name in state)


# ---- exact resume ----


def ids_of_steps(out_dir, knobs, world, steps, save_after=None):
    """The windows that each step read on this rank; from the checkpoint in out_dir if there is one."""
    import data
    import train
    seen, plain = [], data.window_of
    with replaced(data, "window_of", lambda *args: seen.append(plain(*args)) or seen[-1]):
        trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
        folder, state, _ = checkpoint.choose("auto", out_dir, trainer.layout.world)
        if folder:
            checkpoint.load(folder, state, trainer.model, trainer.optimizer, trainer.layout)
        done, rows = state["step"] if folder else 0, {}
        for step in range(done, steps):
            seen.clear()
            loss = trainer.step(step).read()[0]
            rows[step] = (list(seen), loss)
            if step + 1 == save_after:
                trainer.save(step + 1)
                break
    return rows


def test_resume_under_accumulation_reads_the_same_samples(pool, tokens, tmp_path):
    """Stopped after 7 of 12 steps of 3 microbatches; then on as many data-parallel ranks, and on half."""
    knobs = dict(ADAM, data=tokens, micro_batch=1, max_steps=12)
    whole = pool.run(4, ids_of_steps, f"{tmp_path}/whole", dict(knobs, ep=4), 4, 12)
    pool.run(4, ids_of_steps, f"{tmp_path}/out", dict(knobs, ep=4), 4, 12, save_after=7)
    for world, micro_batch in ((4, 1), (2, 2)):
        layout = dict(knobs, ep=world, micro_batch=micro_batch)
        rest = pool.run(world, ids_of_steps, f"{tmp_path}/out", layout, world, 12)
        assert list(rest[0]) == list(range(7, 12))
        for step in range(7, 12):
            samples = lambda run: [w for rank in run for w in rank[step][0]]
            assert sorted(samples(rest)) == sorted(samples(whole)) and len(samples(rest)) == 12
            if world == 4:
                assert [rank[step] for rank in rest] == [rank[step] for rank in whole]
            elif step < 10:
                assert rest[0][step][1] == pytest.approx(whole[0][step][1], rel=1e-5)


def random_numbers(out_dir, knobs, world):
    """What this rank draws after a save, and after loading that."""
    import train
    trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
    torch.manual_seed(100 + trainer.layout.world.rank)
    torch.rand(7)
    trainer.save(1)
    drawn = torch.rand(5).tolist()
    torch.manual_seed(0)
    folder, state, _ = checkpoint.choose("auto", out_dir, trainer.layout.world)
    checkpoint.load(folder, state, trainer.model, trainer.optimizer, trainer.layout)
    return drawn, torch.rand(5).tolist()


def test_every_rank_gets_its_own_random_numbers_back(pool, tokens, tmp_path):
    drawn, again = zip(*pool.run(4, random_numbers, str(tmp_path), dict(ADAM, data=tokens), 4))
    assert again == drawn and len(set(map(tuple, drawn))) == 4


# ---- damage ----


def save_steps(out_dir, knobs, world, steps):
    import train
    trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
    for step in steps:
        trainer.save(step)


def choose_on(resume, out_dir, world):
    """→ (name of the folder, notes), or the error."""
    import parallel
    try:
        folder, state, notes = checkpoint.choose(resume, out_dir, parallel.Group("world", tuple(range(world))))
        assert folder is None or state["step"] == checkpoint.step_of(folder)
        return folder and folder.name, notes
    except checkpoint.CheckpointError as error:
        return str(error)


def flip(path, where):
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def shard(folder):
    return sorted(folder.glob("*.safetensors"))[1]


def cut_short(folder):
    path = shard(folder)
    path.write_bytes(path.read_bytes()[:-5])
    return path.name, "bytes"


def bit_in_numbers(folder):
    flip(shard(folder), 0.99)
    return shard(folder).name, "checksum"


def bit_in_header(folder):
    flip(shard(folder), 0.001)
    return shard(folder).name, "checksum"


def bit_in_state(folder):
    path = folder / "state.json"
    text = path.read_text()
    path.write_text(text.replace('"seed": 1337', '"seed": 1336'))
    assert path.read_text() != text
    return path.name, "checksum"


def state_cut_short(folder):
    path = folder / "state.json"
    path.write_bytes(path.read_bytes()[:200])
    return path.name, "cannot be read"


def shard_missing(folder):
    path = shard(folder)
    path.unlink()
    return path.name, "missing"


def state_missing(folder):
    (folder / "state.json").unlink()
    return "state.json", "missing"


def stray_shard(folder):
    shutil.copy(shard(folder), folder / "shard-00009-model-00001-of-00001.safetensors")
    return "shard-00009", "does not belong"


def contents(folder):
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def three_checkpoints(pool, tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    pool.run(2, save_steps, str(folder), dict(ADAM, data=tokens, keep=3), 2, [2, 4, 6])
    return folder


@pytest.mark.parametrize("harm", [cut_short, bit_in_numbers, bit_in_header, bit_in_state, state_cut_short,
                                  shard_missing, state_missing, stray_shard])
def test_damage_is_named_and_the_checkpoint_before_is_taken(pool, three_checkpoints, tmp_path, harm):
    out = tmp_path / "out"
    shutil.copytree(three_checkpoints, out)
    name, words = harm(out / "step_000006")
    before = contents(out)
    for folder, notes in pool.run(2, choose_on, "auto", str(out), 2):
        assert folder == "step_000004" and len(notes) == 1
        for word in ("step_000006", name, words, "going back to", "step_000004"):
            assert word in notes[0], notes
    for resume in (str(out / "step_000006"), str(out)):
        for error in pool.run(2, choose_on, resume, str(tmp_path / "new"), 2):
            assert isinstance(error, str) and name in error and words in error and "\n" not in error
    harm(out / "step_000004"), harm(out / "step_000002")
    before = contents(out)
    for error in pool.run(2, choose_on, "auto", str(out), 2):
        assert all(word in error for word in ("step_000006", "step_000004", "step_000002", "no whole checkpoint"))
        assert "\n" not in error
    assert contents(out) == before and not (tmp_path / "new").exists()


def test_which_checkpoint_is_chosen(pool, three_checkpoints, tmp_path):
    out, empty = three_checkpoints, tmp_path / "empty"
    choose = lambda *args: pool.run(1, choose_on, *map(str, args), 1)[0]
    assert choose("auto", out) == ("step_000006", []) == choose(out, empty)
    assert choose("none", empty) == choose("auto", empty) == (None, [])
    assert choose(out / "step_000002", empty) == ("step_000002", [])
    assert choose(out / "step_000006", out) == ("step_000006", [])
    before = contents(out)
    for resume, out_dir, words in (("none", out, ("resume=none", "step_000006")),
                                   (out / "step_000002", out, ("step_000006", "later", "step_000002")),
                                   (out / "step_000003", empty, ("step_000003", "no checkpoint")),
                                   (tmp_path, empty, (str(tmp_path), "no checkpoint"))):
        error = choose(resume, out_dir)
        assert isinstance(error, str) and all(word in error for word in words), error
    assert contents(out) == before


def test_old_checkpoints_go_and_a_damaged_one_stays_under_another_name(pool, tokens, tmp_path):
    """A run that went back behind a damaged checkpoint reaches its step again."""
    knobs = dict(ADAM, data=tokens, keep=2)
    names = lambda: sorted(path.name for path in tmp_path.glob("step_*"))
    (tmp_path / "step_000001.partial").mkdir()      # what a killed save left
    pool.run(2, save_steps, str(tmp_path), knobs, 2, [2, 4, 6])
    assert names() == ["step_000004", "step_000006"]
    bit_in_numbers(tmp_path / "step_000006")
    harmed = contents(tmp_path / "step_000006")
    pool.run(2, save_steps, str(tmp_path), knobs, 2, [5])
    assert names() == ["step_000004", "step_000005", "step_000006"], "only checkpoints up to here may be removed"
    pool.run(2, save_steps, str(tmp_path), knobs, 2, [6])
    assert names() == ["step_000005", "step_000006", "step_000006.damaged"]
    assert contents(tmp_path / "step_000006.damaged") == harmed
    assert pool.run(2, choose_on, "auto", str(tmp_path), 2) == [("step_000006", [])] * 2


# ---- a disk that is full ----


@contextlib.contextmanager
def small_files(limit):
    """No file of this process may grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def no_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device", "state.json")


def save_to_full_disk(out_dir, knobs, world, full):
    """→ the errors of saves for which the disk is full on one rank, and of one that has space again."""
    import train
    trainer = train.Trainer(config(out_dir=out_dir, **knobs), world)
    trainer.save(2)
    hindrances = {"tensors": small_files(1000) if trainer.layout.world.rank == 1 else contextlib.nullcontext(),
                  "state": replaced(checkpoint, "write_state", no_space)}
    errors = []
    for hindrance in (hindrances[full], contextlib.nullcontext()):
        try:
            with hindrance:
                trainer.save(4)
            errors.append(None)
        except checkpoint.CheckpointError as error:
            errors.append(str(error))
        trainer.layout.world.all_reduce(torch.zeros(1))     # all have left, or come back
        if len(errors) == 1:
            import os
            errors.append(sorted(os.listdir(out_dir)))
            trainer.layout.world.all_reduce(torch.zeros(1))     # all have left, or come back
    return errors


@pytest.mark.parametrize("full, words", [("tensors", ["step_000004.partial", "rank 1", "too large"]),
                                         ("state", ["state.json", "No space left"])])
def test_a_full_disk_fails_on_all_ranks_and_leaves_what_was_there(pool, tokens, tmp_path, full, words):
    results = pool.run(4, save_to_full_disk, str(tmp_path), dict(ADAM, data=tokens, keep=1), 4, full)
    for failed, left, again in results:
        assert failed == results[0][0] and "\n" not in failed
        assert all(word in failed for word in ["cannot save step 4", *words]), failed
        assert left == ["step_000002"]
        assert again is None
    assert pool.run(2, choose_on, "auto", str(tmp_path), 2) == [("step_000004", [])] * 2


# ---- a model without its optimizer ----


def save_to_own_disks(folders, knobs, world):
    """→ what is wrong, if rank r writes to folders[r]."""
    import train
    trainer = train.Trainer(config(out_dir=folders[torch.distributed.get_rank()], **knobs), world)
    try:
        trainer.save(2)
    except checkpoint.CheckpointError as error:
        return str(error)


def test_disks_that_nodes_do_not_share_are_found_before_anything_is_lost(pool, tokens, tmp_path):
    own = [str(tmp_path / name) for name in ("first", "first", "second", "second")]
    before = tmp_path / "first" / "step_000001"
    before.mkdir(parents=True)
    for folder, told in zip(own, pool.run(4, save_to_own_disks, own, dict(data=tokens, ep=4), 4)):
        assert told == f"cannot save step 2: out_dir={folder} must lie on a file system that all nodes share"
    assert before.is_dir() and not (tmp_path / "first" / "step_000002").exists()


def weights_for_sampling(out_dir, device="cpu"):
    import parallel
    import sample
    parallel.init(torch.device(device))
    folder, state = sample.checkpoint.open_checkpoint(out_dir)
    model = sample.load_model(folder, state, torch.device(device))
    # what only some GPUs compute is sampled in bf16
    state["config"] |= {"precision": "mxfp8", "emulate": False}
    assert sample.load_model(folder, state, torch.device(device)).cfg.precision == "bf16"
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sample_loads_the_whole_model_on_one_process(pool, tokens, tmp_path, precision):
    knobs = dict(ADAM, data=tokens, ep=4, precision=precision)
    state, _ = pool.run(4, save_run, str(tmp_path), knobs, 4, steps=1)[0]
    model = pool.run(1, weights_for_sampling, str(tmp_path))[0]
    assert model.keys() == {name for name in state if not name.startswith("exp_avg")} - {"updates"}
    for name, x in model.items():
        routers = ".router." in name
        assert x.dtype == (torch.float32 if routers or precision == "fp32" else torch.bfloat16), name
        assert torch.equal(state[name].to(x.dtype), x), name
