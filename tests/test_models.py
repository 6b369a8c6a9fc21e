"""Models that others published: what they have and cost, latent attention under every kind of layout, and the
presets."""

import functools
import re
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
from harness import assert_equals, run_layout, run_layouts

import parallel

ROOT = Path(__file__).resolve().parent.parent
PRESETS = sorted(path.name for path in (ROOT / "config").glob("*.py"))


# ---- what a model has and costs ----

# total, in experts, active, GFLOP per token in sequences of 4096
PUBLISHED = {
    "deepseek_v3": (671_026_404_352, 653_908_770_816, 37_552_282_624, 259.99),
    "qwen3_235b_a22b": (235_093_634_560, 227_096_395_776, 22_190_763_520, 148.03),
    "qwen3_30b_a3b": (30_532_122_624, 28_991_029_248, 3_353_032_704, 23.01),
    "mixtral_8x7b": (46_702_792_704, 45_097_156_608, 12_879_925_248, 79.7),
}


def run_model_py(*words):
    return subprocess.run([sys.executable, "model.py", *words], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name):
    import model
    import settings
    done = run_model_py(f"config/{name}.py")
    assert done.returncode == 0, done.stderr
    found = [float(re.search(rf"{word} +([\d,.]+)", done.stdout)[1].replace(",", ""))
             for word in ("parameters", "in experts", "active", "GFLOP/token")]
    *counts, gflops = PUBLISHED[name]
    assert found[:3] == counts
    assert found[3] == pytest.approx(gflops, rel=1e-3)
    if name == "deepseek_v3":   # the module: a block, three norms more, and a projection
        attention = 1536 * (7168 + 128 * 192 + 1) + 512 * (7168 + 128 * 256 + 1) + 7168 * 64 + 128 * 128 * 7168
        experts = 7168 * 2048 * 3 * (256 + 1) + 256 * 7168
        assert f"{attention + experts + 2 * 7168 + 3 * 7168 + 2 * 7168**2:,}" in done.stdout
        cfg, *_ = settings.parse(model.Architecture, [str(ROOT / "config/deepseek_v3.py"), "--n_mtp=0"], True)
        assert model.flops_per_token(cfg) / 1e9 == pytest.approx(249.8, rel=1e-3)


def test_counts_need_a_possible_model():
    done = run_model_py("config/deepseek_v3.py", "--qk_norm=head", "--d_rope=63", "--rope_scaling=factor=4")
    assert done.returncode == 2 and done.stdout == ""
    for word in ("rope_scaling=factor=4", "d_rope=63", "qk_norm=head"):
        assert word in done.stderr
    assert len(done.stderr.splitlines()) == 3, done.stderr


# ---- presets ----

RANKS = {"deepseek_v3": 256, "qwen3_235b_a22b": 256, "qwen3_30b_a3b": 8, "mixtral_8x7b": 8}


@pytest.fixture(scope="module")
def long_tokens(tmp_path_factory):
    return harness.write_tokens(tmp_path_factory.mktemp("long"), torch.zeros(5000))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_can_be_laid_out(preset, long_tokens):
    import settings
    import train
    words = [str(ROOT / "config" / preset), f"--data={long_tokens}", "--device=cpu"]
    cfg, problems, _ = settings.parse(train.Config, words)
    assert problems == []
    assert train.check(cfg, RANKS.get(preset[:-3], 4)) == []


# ---- rotary positions and attention ----


def test_rotation_and_its_gradient():
    import model
    torch.manual_seed(0)
    cos, sin = model.rope_table(torch.arange(3, 8), 6, 1e4)
    x_BSHd = torch.randn(2, 5, 3, 6, dtype=torch.float64, requires_grad=True)
    turned = torch.view_as_complex(torch.stack(x_BSHd.chunk(2, -1), -1)) * torch.complex(cos, sin)[..., :3]
    expected = torch.view_as_real(turned).unbind(-1)
    torch.testing.assert_close(model.rotate(x_BSHd, (cos, sin)), torch.cat(expected, -1))
    assert torch.autograd.gradcheck(lambda x: model.rotate(x, (cos.double(), sin.double())), x_BSHd)


@pytest.mark.parametrize("S", [1, 2, 5, 8, 17])
@pytest.mark.parametrize("kv", [4, 2])
def test_attention_is_softmax_of_scores(S, kv):
    import model
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, S, heads, 8, requires_grad=True) for heads in (4, kv, kv))
    y = model.attend_zigzag(q, k, v, harness.Alone)
    wide = [t.repeat_interleave(4 // kv, 2).transpose(1, 2) for t in (k, v)]
    scores = (q.transpose(1, 2) @ wide[0].mT / 8**0.5).masked_fill(torch.ones(S, S).triu(1).bool(), -torch.inf)
    expected = (scores.softmax(-1) @ wide[1]).transpose(1, 2)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for found, wanted in zip(torch.autograd.grad(y, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


# ---- multi-head latent attention ----

MLA = dict(attention="mla", n_kv_head=0, qk_norm="none", q_lora_rank=12, kv_lora_rank=10, d_nope=6, d_rope=4,
           d_v=5)
YARN = "factor=4,original=8,beta_fast=4,beta_slow=1,mscale=1,mscale_all_dim=0.7"
LAYOUTS = {
    "tp 4": dict(tp=4, ep=4),
    "cp 4": dict(cp=4, ep=2, etp=2),
    "tp 2, cp 2": dict(tp=2, cp=2, ep=4),
    "tp 2, dp 2": dict(tp=2, ep=2),
    "pp 2, cp 2": dict(pp=2, cp=2, ep=2),
}
MLA_VARIANTS = {
    "latent queries": dict(),
    "full queries": dict(q_lora_rank=0),
    "yarn": dict(rope_scaling=YARN),
    "values wider than keys": dict(d_v=16),
}


@pytest.mark.parametrize("variant", [name if i == 2 else pytest.param(name, marks=pytest.mark.full)
                                     for i, name in enumerate(MLA_VARIANTS)])
def test_latent_attention_under_every_layout(pool, tokens, variant):
    base = dict(data=tokens, micro_batch=2, **MLA) | MLA_VARIANTS[variant]
    ref = pool.run(1, run_layout, dict(base, micro_batch=12, recompute=()), 1)[0]
    for rank, found in enumerate(pool.run(4, run_layouts, [base | knobs for knobs in LAYOUTS.values()], 4)):
        for name, result in zip(LAYOUTS, found):
            assert_equals(ref, result, what=f"{name}, rank {rank}")


def what_attention_sends(knobs, world):
    """Bytes that one attention gathers over cp, forward, and the tokens this rank has."""
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    batch, sent = next(trainer.batches(0)), {}
    forward = type(trainer.model.layers["0"].attention).forward

    def watched(attention, x_TD, batch):
        parallel.ledger.take()
        y = forward(attention, x_TD, batch)
        sent.update({op: n for (group, op), (_, n) in parallel.ledger.take().items() if group.name == "cp"})
        return y

    trainer.model.layers["0"].attention.forward = functools.partial(watched, trainer.model.layers["0"].attention)
    parallel.together(parallel.Tape(record=False).forward(trainer.model(batch)))
    return sent, len(batch.tokens_T)


def test_context_parallel_ranks_exchange_latents_alone(pool, tokens):
    knobs = dict(data=tokens, micro_batch=2, cp=4, **MLA)
    for sent, T in pool.run(4, what_attention_sends, knobs, 4):
        assert sent == {"all-gather": T * (10 + 4) * 4 * 3}


def turned_one_by_one(x_R, position, frequencies):
    """A head's rotary part, whose neighbours turn together as complex numbers."""
    pairs = torch.view_as_complex(x_R.double().view(-1, 2)) * torch.polar(torch.ones(len(frequencies)).double(),
                                                                         position * frequencies.double())
    return torch.view_as_real(pairs)


def test_rotary_pairs_are_neighbours():
    import model
    x_R, positions = torch.randn(8), torch.tensor([5])
    cos, sin = model.rope_table(positions, 8, 1e4)
    turned = model.rotate_pairs(x_R.view(1, 1, 1, 8), (cos, sin)).flatten()
    frequencies = 1e4 ** (-torch.arange(0, 8, 2) / 8)
    expected = turned_one_by_one(x_R, 5, frequencies).t().flatten()
    torch.testing.assert_close(turned.double(), expected, rtol=1e-5, atol=1e-5)


# ---- Hugging Face: transformers computes the same, with the same weights ----

COMMON = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
              intermediate_size=48, num_experts_per_tok=2)
SCALED = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=8, beta_fast=4.0,
              beta_slow=1.0, mscale=1.0, mscale_all_dim=0.7)
DEEPSEEK = COMMON | dict(num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=8, n_shared_experts=1,
                         n_group=4, topk_group=2, kv_lora_rank=10, qk_rope_head_dim=4, qk_nope_head_dim=6,
                         v_head_dim=5, first_k_dense_replace=1)
QWEN = COMMON | dict(head_dim=16, num_experts=8, moe_intermediate_size=16)
MODELS = {
    "qwen3_moe": ("Qwen3MoeConfig", QWEN | dict(norm_topk_prob=True)),
    "qwen3_moe, not renormalized": ("Qwen3MoeConfig", QWEN | dict(norm_topk_prob=False, mlp_only_layers=[0],
                                                                 tie_word_embeddings=True)),
    "deepseek_v3": ("DeepseekV3Config", DEEPSEEK | dict(q_lora_rank=12, rope_parameters=SCALED)),
    "deepseek_v3, full queries": ("DeepseekV3Config", DEEPSEEK | dict(q_lora_rank=None, n_shared_experts=2)),
    "olmoe": ("OlmoeConfig", COMMON | dict(num_experts=8, intermediate_size=16, pad_token_id=None,
                                           eos_token_id=2)),
    "mixtral": ("MixtralConfig", COMMON | dict(num_local_experts=8, intermediate_size=16)),
}
MIXTURES = list(MODELS)
SPREAD = {
    "tp2·ep4": dict(tp=2, ep=4),
    "cp2·ep4": dict(cp=2, ep=4),
    "pp2·ep2": dict(pp=2, ep=2),
}


def make_model(name, **more):
    """A model of transformers with random weights, none of which is a neutral one."""
    transformers = pytest.importorskip("transformers")
    kind, sizes = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes | more))
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "norm" in key:
                p.uniform_(0.5, 1.5)
            else:
                p.normal_(std=0.5 if "embed" in key else 2 * p.shape[-1] ** -0.5)
        for key, buffer in model.named_buffers():
            if "correction_bias" in key:
                buffer.uniform_(0.1, 0.9)
    return model.eval()


def knobs_of(folder, source="hf"):
    """Of the folder's architecture, and what the tests' small model has else is off."""
    import checkpoint
    off = dict(n_dense_layers=0, n_shared_experts=0, n_kv_head=0, qk_norm="none")
    return off | checkpoint.read_config(folder, checkpoint.SOURCES[source])[1]


def start_from(folder, knobs, world, source="hf"):
    import checkpoint
    import train
    trainer = train.Trainer(harness.config(**{**knobs_of(folder, source), **knobs}), world)
    checkpoint.start_from(f"{source}:{folder}", trainer.model, trainer.layout)
    trainer.optimizer.start()
    return trainer


def first_batch(knobs):
    import train
    batch, = train.Trainer(harness.config(**knobs, micro_batch=12), 1).batches(0)
    return batch.tokens_BS, batch.labels_BS


def computed_here(folder, variants, world, tokens_BS, source="hf"):
    """Logits [B, S, V] of tokens_BS, loss and every gradient of step 0, under each layout."""
    import model
    import moe
    results = []
    for knobs in variants:
        trainer = start_from(folder, knobs, world, source)
        result = harness.gradients_of(trainer)
        rows = [model.run(trainer.model, moe.Batch(trainer.layout, tokens_BS, None, last=last))
                for last in range(tokens_BS.shape[1])]
        trainer.layout.onward.flush()
        result["logits"] = trainer.layout.pp.all_reduce(torch.stack(rows, 1).contiguous())
        results.append(result)
    return results


def weights_here(folder, knobs, world):
    """Every whole weight, as `folder` has them."""
    import optim
    trainer = start_from(folder, knobs, world)
    for family in trainer.optimizer.families:
        family.master.grad = family.master.detach().clone()
    return optim.full_gradients(trainer.model, trainer.optimizer)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """{name: (folder, model of transformers)}, made when first asked for."""
    @functools.cache
    def made(name):
        folder = tmp_path_factory.mktemp("hf") / "model"
        model = make_model(name)
        model.save_pretrained(folder)
        return folder, model

    return made


@pytest.mark.parametrize("name", MIXTURES)
def test_transformers_computes_the_same(pool, tokens, folders, tmp_path, name):
    folder, model = folders(name)
    base = dict(data=tokens, micro_batch=2)
    tokens_BS, labels_BS = pool.run(1, first_batch, dict(data=tokens))[0]
    logits = model(tokens_BS).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten())
    model.zero_grad()
    loss.backward()
    # the gradients go the way of weights: transformers writes them under its names, and they are read here
    carrier = make_model(name)
    with torch.no_grad():
        for key, p in model.named_parameters():
            carrier.get_parameter(key).copy_(p.grad)
    carrier.save_pretrained(tmp_path / "gradients")
    expected = pool.run(1, weights_here, str(tmp_path / "gradients"), base, 1)[0]

    runs = {"one process": pool.run(1, computed_here, str(folder), [base], 1, tokens_BS[:3])[0][0]}
    spread = pool.run(4, computed_here, str(folder), [base | knobs for knobs in SPREAD.values()], 4, tokens_BS[:3])
    for rank, found in enumerate(spread):
        runs |= {f"{layout}, rank {rank}": result for layout, result in zip(SPREAD, found)}
    for what, result in runs.items():
        torch.testing.assert_close(result["logits"], logits[:3].detach(), rtol=0, atol=1e-4,
                                   msg=lambda m: f"{what}: {m}")
        assert result["loss"] == pytest.approx(loss.item(), rel=1e-4), what
        assert result["grads"].keys() == expected.keys()
        for key, grad in expected.items():
            assert grad.norm() > 0, key
            error = (result["grads"][key] - grad).norm() / grad.norm()
            assert error < 1e-4, (what, key, error.item())


def save_here(folder, out_dir, knobs, world):
    start_from(folder, dict(knobs, out_dir=out_dir), world).save(1)


def run_checkpoint_py(*words):
    return subprocess.run([sys.executable, "checkpoint.py", *map(str, words)], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)


def tensors_in(folder):
    from safetensors.torch import load_file
    return {key: x for path in folder.glob("*.safetensors") for key, x in load_file(path).items()}


def same_tensors(a, b):
    a, b = tensors_in(a), tensors_in(b)
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


@pytest.mark.parametrize("name", MIXTURES)
def test_round_trip_through_folded_ranks(pool, tokens, folders, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    folder, model = folders(name)
    pool.run(4, save_here, str(folder), f"{tmp_path}/out", dict(data=tokens, tp=2, ep=4, optimizer="adamw"), 4)
    done = run_checkpoint_py("export", tmp_path / "out", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    same_tensors(folder, tmp_path / "back")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(info[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    x = torch.arange(32).view(2, 16)
    assert torch.equal(again.eval()(x).logits, model(x).logits)
    assert not (tmp_path / "back.partial").exists()


def go_on(out_dir, folder, knobs, world):
    import checkpoint
    import train
    trainer = train.Trainer(harness.config(**{**knobs, **knobs_of(folder)}, out_dir=out_dir), world)
    found, state, notes = checkpoint.choose("auto", out_dir, trainer.layout.world)
    assert found and not notes and not checkpoint.other_architecture(trainer.cfg, state)
    checkpoint.load(found, state, trainer.model, trainer.optimizer, trainer.layout)
    return harness.losses_of(trainer, 2)


def losses_from(folder, knobs, world):
    return harness.losses_of(start_from(folder, knobs, world), 2)


def test_import_then_train_is_init_from(pool, tokens, folders, tmp_path):
    folder, _ = folders("qwen3_moe")
    done = run_checkpoint_py("import", folder, tmp_path / "out")
    assert done.returncode == 0, done.stderr
    knobs = dict(data=tokens, micro_batch=2, ep=2, optimizer="adamw", lr=1e-2)
    assert pool.run(2, go_on, f"{tmp_path}/out", str(folder), knobs, 2) == \
        pool.run(2, losses_from, str(folder), knobs, 2)
    again = run_checkpoint_py("import", folder, tmp_path / "out")
    assert again.returncode == 2 and "step_000000" in again.stderr and len(again.stderr.splitlines()) == 1


def test_import_over_several_ranks(folders, tmp_path):
    """Stages, heads and experts are spread; the first stage has no MoE layer."""
    folder, _ = folders("deepseek_v3")
    words = ["--nproc_per_node=4", "checkpoint.py", "import", str(folder), f"{tmp_path}/out", "--pp=2", "--tp=2",
             "--ep=2", "--pp_layout=1,2"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", *words], cwd=ROOT, capture_output=True,
                          text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    done = run_checkpoint_py("export", tmp_path / "out", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    same_tensors(folder, tmp_path / "back")


@pytest.mark.parametrize("source, name, more", [
    ("hf", "mixtral", 0),
    ("upcycle", "llama", 3 * (7 * 3 * 32 * 48 + 8 * 32))])      # 7 MLPs more a layer, and a router
def test_train_starts_from_a_folder(tokens, folders, tmp_path, source, name, more):
    folder, model = folders(name)
    words = [sys.executable, "train.py", f"--init_from={source}:{folder}", f"--data={tokens}",
             f"--out_dir={tmp_path}/out", "--device=cpu", "--max_steps=1", "--global_batch=2", "--seq_len=16",
             "--eval_steps=0", "--capacity_factor=0"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    count = sum(p.numel() for p in model.parameters())
    assert f"parameters {count + more:,} (" in done.stdout


# ---- DeepSeek's module for multi-token prediction ----


def with_module(folder):
    """Writes a DeepSeek-V3 whose fourth block is the module's. → (model, module), both of transformers"""
    from safetensors.torch import save_file
    from transformers.modeling_layers import MtpLayer
    model = make_model("deepseek_v3", num_hidden_layers=4)
    model.save_pretrained(folder)
    block = model.model.layers[3]
    model.model.layers = model.model.layers[:3]
    module = MtpLayer(model.config, type(block), type(model.model.norm), 3)
    module.mtp_block = block
    torch.manual_seed(1)
    own = {"enorm.weight": module.enorm.weight, "hnorm.weight": module.hnorm.weight,
           "eh_proj.weight": module.eh_proj.weight, "shared_head.norm.weight": module.post_norm.weight}
    with torch.no_grad():
        for name, p in own.items():
            p.uniform_(0.5, 1.5) if p.ndim == 1 else p.normal_(std=0.2)
    own |= {"embed_tokens.weight": model.model.embed_tokens.weight,
            "shared_head.head.weight": model.lm_head.weight}
    save_file({f"model.layers.3.{name}": p.detach().clone() for name, p in own.items()} | tensors_in(folder),
              folder / "model.safetensors")
    change_config(num_hidden_layers=3, num_nextn_predict_layers=1)(folder)
    return model, module


def test_the_module_of_deepseek_computes_the_same(pool, tokens, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    model, module = with_module(folder)
    tokens_BS, labels_BS = pool.run(1, first_batch, dict(data=tokens))[0]
    state = model.model(tokens_BS).last_hidden_state
    embedded, here = model.model.embed_tokens(tokens_BS[:, 1:]), torch.arange(15)[None]
    ahead = module(embedded, state[:, :-1], model.model.rotary_emb(embedded, here),
                   torch.where(torch.ones(15, 15).tril() > 0, 0.0, -torch.inf)[None, None], here, None)
    entropy = torch.nn.functional.cross_entropy
    loss = entropy(model.lm_head(state).flatten(0, 1), labels_BS.flatten())
    beyond = entropy(model.lm_head(ahead).flatten(0, 1), labels_BS[:, 1:].flatten())
    (loss + 0.3 * beyond).backward()
    expected = {"embedding": model.model.embed_tokens, "head": model.lm_head, "norm.weight": model.model.norm,
                "layers.3.proj": module.eh_proj, "layers.3.embed_norm.weight": module.enorm,
                "layers.3.state_norm.weight": module.hnorm, "layers.3.norm.weight": module.post_norm,
                "layers.3.moe.router.weight": module.mtp_block.mlp.gate,
                "layers.3.attention.wkv": module.mtp_block.self_attn.kv_b_proj,
                "layers.1.attention.wo": model.model.layers[1].self_attn.o_proj}
    base = dict(data=tokens, micro_batch=2, n_mtp=1, mtp_coef=0.3)
    runs = [(1, [base]), (4, [base | knobs for knobs in SPREAD.values()])]
    for world, variants in runs:
        for results in pool.run(world, computed_here, str(folder), variants, world, tokens_BS[:1]):
            for knobs, result in zip(variants, results):
                assert result["loss"] == pytest.approx(loss.item(), rel=1e-4)
                assert result["mtp"] == pytest.approx([beyond.item()], rel=1e-4), knobs
                for key, theirs in expected.items():
                    error = (result["grads"][key] - theirs.weight.grad).norm() / theirs.weight.grad.norm()
                    assert error < 1e-4, (knobs, key, error.item())
    # there and back; and without the module
    pool.run(4, save_here, str(folder), f"{tmp_path}/out", dict(base, pp=2, ep=2, optimizer="adamw"), 4)
    done = run_checkpoint_py("export", tmp_path / "out", tmp_path / "back")
    assert done.returncode == 0, done.stderr
    same_tensors(folder, tmp_path / "back")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert again.config.num_mtp_layers == 1
    assert torch.equal(again.eval()(tokens_BS).logits, model(tokens_BS).logits)
    plain = pool.run(1, computed_here, str(folder), [dict(base, n_mtp=0)], 1, tokens_BS[:1])[0][0]
    assert plain["loss"] == pytest.approx(loss.item(), rel=1e-4) and plain["mtp"] == []


# ---- dense models become mixtures ----

DENSE = {
    "llama": ("LlamaConfig", {}),
    "qwen3, tied, first block dense": ("Qwen3Config", dict(head_dim=16, tie_word_embeddings=True)),
}
DENSE_SIZES = {name: value for name, value in COMMON.items() if name != "num_experts_per_tok"}
MODELS |= {name: (kind, DENSE_SIZES | more) for name, (kind, more) in DENSE.items()}


def experts_of(folder, knobs, world):
    """This rank's part of one layer's experts, and its router's weight."""
    layer = start_from(folder, knobs, world, "upcycle").model.moes[1]
    return [p.detach().clone() for p in (layer.experts.w1, layer.experts.w2, layer.router.weight)]


@pytest.mark.parametrize("name", DENSE)
def test_upcycling_changes_no_output(pool, tokens, folders, name):
    folder, model = folders(name)
    tokens_BS, labels_BS = pool.run(1, first_batch, dict(data=tokens))[0]
    logits = model(tokens_BS).logits.detach()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels_BS.flatten()).item()
    base = dict(data=tokens, micro_batch=2, num_experts=8, top_k=3, n_dense_layers=int("dense" in name))
    for world, knobs in ((1, dict(score_fn="sigmoid")), (4, dict(ep=4, tp=2))):
        ranks = pool.run(world, computed_here, str(folder), [base | knobs], world, tokens_BS[:3], "upcycle")
        for result, in ranks:
            torch.testing.assert_close(result["logits"], logits[:3], rtol=0, atol=1e-4)
            assert result["loss"] == pytest.approx(loss, rel=1e-4)
            assert result["grads"]["layers.1.moe.experts.w1"].flatten(1).norm(dim=1).unique().numel() == 8
    mlp = model.model.layers[1].mlp
    expected = torch.stack([mlp.gate_proj.weight, mlp.up_proj.weight]).detach(), mlp.down_proj.weight.detach()
    for w1, w2, router in pool.run(4, experts_of, str(folder), dict(base, ep=4), 4):
        assert w1.shape == (2, 2, 48, 32) and all(torch.equal(own, expected[0]) for own in w1)
        assert all(torch.equal(own, expected[1]) for own in w2)
        assert router.std() == pytest.approx(32**-0.5, rel=0.2), "tokens must take different experts"


HINDRANCES = {
    ("upcycle", "llama", "--d_expert=32"): "d_expert=48 there, 32 here (intermediate_size)",
    ("upcycle", "llama", "--n_head=8"): "n_head=4 there, 8 here (num_attention_heads)",
    ("upcycle", "llama", "--n_dense_layers=1", "--d_ff=64"): "d_ff=48 there, 64 here (intermediate_size)",
    ("upcycle", "llama", "--qk_norm=head"): "qk_norm=none there, head here (or it would not begin as the dense",
    ("upcycle", "llama", "--n_shared_experts=1"): "n_shared_experts=0 there, 1 here (or it",
    ("upcycle", "llama", "--norm_topk=false"): "norm_topk=True there, False here (or it",
    ("upcycle", "llama", "--norm_topk=false", "--top_k=1"): "needs top_k=2 or more",
    ("upcycle", "llama", "--n_mtp=1"): "n_mtp=1, but ",
    ("upcycle", "mixtral"): "has model_type=mixtral; known are llama, qwen3; init_from=hf:FOLDER takes this one",
    ("hf", "llama"): "olmoe, deepseek_v3; init_from=upcycle:FOLDER takes this one",
    ("hf", "deepseek_v3", "--n_mtp=1"): "has no model.layers.3.eh_proj.weight: set n_mtp=0",
    ("hf", "mixtral", "--n_head=8"): "n_head=4 there, 8 here (num_attention_heads)",
    ("hf:/nowhere", ""): "/nowhere/config.json: No such file",
    ("megatron:/x", ""): "is not of the form hf:FOLDER or upcycle:FOLDER",
}


@pytest.mark.parametrize("case", HINDRANCES, ids=" ".join)
def test_what_does_not_fit_is_named_in_one_line(folders, tokens, case):
    import checkpoint
    import settings
    import train
    kind, name, *words = case
    source = f"{kind}:{folders(name)[0]}" if name else kind
    argv = [*checkpoint.architecture_words(source), f"--init_from={source}", f"--data={tokens}", "--seq_len=16",
            *words]
    cfg, problems, _ = settings.parse(train.Config, argv)
    found, = problems + train.check(cfg, 1)
    assert HINDRANCES[case] in found and "\n" not in found, found


# ---- FP8 ----


def test_fp8_blocks_are_dequantized(pool, tokens, folders, tmp_path):
    """Blocks of 8 × 12 that slices of ranks cut through: equal to a folder that holds the products."""
    import json

    from safetensors.torch import save_file
    folder, _ = folders("deepseek_v3")
    small, wide, (m, n) = {}, {}, (8, 12)
    for key, x in tensors_in(folder).items():
        if key.endswith("_proj.weight"):
            scale = torch.rand(-(-x.shape[0] // m), -(-x.shape[1] // n)) + 0.5
            spread = scale.repeat_interleave(m, 0)[:x.shape[0]].repeat_interleave(n, 1)[:, :x.shape[1]]
            small[key], small[f"{key}_scale_inv"] = (x / spread).to(torch.float8_e4m3fn), scale
            wide[key] = small[key].float() * spread
        else:
            small[key] = wide[key] = x
    for name, tensors in (("small", small), ("wide", wide)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = {"weight_block_size": [m, n]}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    expected = pool.run(1, weights_here, f"{tmp_path}/wide", dict(data=tokens), 1)[0]
    for layout in (dict(tp=2, ep=4), dict(tp=4, etp=2, ep=2)):
        for found in pool.run(4, weights_here, f"{tmp_path}/small", dict(data=tokens, **layout), 4):
            assert found.keys() == expected.keys()
            assert [key for key in found if not torch.equal(found[key], expected[key])] == []


# ---- what is wrong with a folder ----


def harmed(change):
    def harm(folder):
        from safetensors.torch import load_file, save_file
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
    return harm


def cut_short(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_config(**entries):
    def harm(folder):
        import json
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    return harm


EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"
HARM = {
    "missing": (harmed(lambda t: t.pop(EXPERT)), ["model", f"has no {EXPERT}"]),
    "too much": (harmed(lambda t: t.update({"model.layers.1.mlp.bias": torch.ones(3)})),
                 ["model.safetensors", "has model.layers.1.mlp.bias"]),
    "a block too many": (harmed(lambda t: t.update({"model.layers.3.input_layernorm.weight": torch.ones(32)})),
                         ["model.safetensors", "has model.layers.3.input_layernorm.weight"]),
    "misshapen": (harmed(lambda t: t.update({EXPERT: torch.ones(16, 31)})),
                  ["model.safetensors", EXPERT, "[16, 31]", "[16, 32]"]),
    "cut short": (cut_short, ["model.safetensors", "truncated"]),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), ["model.safetensors", "missing"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json", "No such file"]),
    "unknown": (change_config(model_type="llama5"), ["model_type=llama5", "mixtral"]),
    "scaled otherwise": (change_config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}),
                         ["config.json", "llama3"]),
    "with biases": (change_config(attention_bias=True), ["attention_bias=True"]),
}


def error_here(folder, knobs, world):
    import checkpoint
    import train
    trainer = train.Trainer(harness.config(**knobs), world)
    before = [p.clone() for p in trainer.model.parameters()]
    try:
        checkpoint.load_hf(folder, trainer.model, trainer.layout)
    except checkpoint.CheckpointError as error:
        assert all(map(torch.equal, before, trainer.model.parameters())), "changed before the error"
        return str(error)


@pytest.mark.parametrize("harm", HARM)
def test_a_bad_folder_is_named_in_one_line(pool, tokens, folders, tmp_path, harm):
    import shutil
    folder, _ = folders("qwen3_moe")
    shutil.copytree(folder, tmp_path / "model")
    knobs = dict(data=tokens, ep=4, tp=2) | knobs_of(folder)
    change, words = HARM[harm]
    change(tmp_path / "model")
    errors = pool.run(4, error_here, str(tmp_path / "model"), knobs, 4)
    assert len(set(errors)) == 1 and errors[0] and "\n" not in errors[0], errors
    assert [word for word in words if word not in errors[0]] == [], errors[0]
    if harm == "missing":
        done = run_checkpoint_py("import", tmp_path / "model", tmp_path / "out")
        assert done.returncode == 2 and done.stderr == f"error: {errors[0]}\n"
        assert list((tmp_path / "out").glob("step*")) == []


def test_a_model_without_a_name_there_is_not_exported(pool, tokens, tmp_path):
    pool.run(2, save_plain, f"{tmp_path}/out", dict(data=tokens, ep=2), 2)
    done = run_checkpoint_py("export", tmp_path / "out", tmp_path / "back")
    assert done.returncode == 2 and "n_shared_experts=1" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "back").exists()


def test_what_is_exported_already_is_not_exported_again(folders, tmp_path):
    folder, _ = folders(MIXTURES[0])
    done = run_checkpoint_py("export", folder, tmp_path / "back")
    assert done.returncode == 2 and done.stderr == f"error: {folder} is in Hugging Face's layout already\n"
    assert not (tmp_path / "back").exists()


def save_plain(out_dir, knobs, world):
    import train
    train.Trainer(harness.config(out_dir=out_dir, **knobs), world).save(1)
