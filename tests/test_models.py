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
    "deepseek_v3": (671_026_404_352, 653_908_770_816, 37_552_282_624, 249.8),
    "qwen3_235b_a22b": (235_093_634_560, 227_096_395_776, 22_190_763_520, 148.03),
    "qwen3_30b_a3b": (30_532_122_624, 28_991_029_248, 3_353_032_704, 23.01),
    "mixtral_8x7b": (46_702_792_704, 45_097_156_608, 12_879_925_248, 79.7),
}


def run_model_py(*words):
    return subprocess.run([sys.executable, "model.py", *words], cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_those_published(name):
    done = run_model_py(f"config/{name}.py")
    assert done.returncode == 0, done.stderr
    found = [float(re.search(rf"{word} +([\d,.]+)", done.stdout)[1].replace(",", ""))
             for word in ("parameters", "in experts", "active", "GFLOP/token")]
    *counts, gflops = PUBLISHED[name]
    assert found[:3] == counts
    assert found[3] == pytest.approx(gflops, rel=1e-3)


def test_counts_need_a_possible_model():
    done = run_model_py("config/deepseek_v3.py", "--qk_norm=head", "--d_rope=63", "--rope_scaling=factor=4")
    assert done.returncode == 2 and done.stdout == ""
    assert [word for word in ("rope_scaling=factor=4", "d_rope=63", "qk_norm=head") if word not in done.stderr] == []
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


# ---- multi-head latent attention ----

MLA = dict(attention="mla", n_kv_head=0, qk_norm="none", q_lora_rank=12, kv_lora_rank=10, d_nope=6, d_rope=4, d_v=5)
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
    "yarn, recompute": dict(rope_scaling=YARN, recompute=("full",)),
    "values wider than keys": dict(d_v=16),
}


@pytest.mark.parametrize("variant", MLA_VARIANTS)
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
