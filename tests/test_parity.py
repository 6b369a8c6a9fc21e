"""No layout changes the mathematics: every gradient equals one process's, whatever is spread over whom."""

import pytest
from harness import assert_equals, bit_equal, run_layout

WORLDS = [(world, ep) for world in (1, 2, 4) for ep in (1, 2, 4) if world % ep == 0]


@pytest.fixture(scope="module")
def reference(pool, tokens):
    """REF per number of sequences at once: 12 sequences as 12 microbatches or as one."""
    return {mb: pool.run(1, run_layout, dict(data=tokens, overlap="none", micro_batch=mb), 1)[0] for mb in (1, 12)}


@pytest.mark.parametrize("capacity_factor", [0.0, 4.0], ids=["dropless", "capacity"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world, ep", WORLDS)
def test_every_gradient_equals_one_process(pool, tokens, reference, world, ep, accumulation, capacity_factor):
    knobs = dict(data=tokens, ep=ep, micro_batch=12 // world // accumulation, capacity_factor=capacity_factor)
    plain = pool.run(world, run_layout, dict(knobs, overlap="none"), world)
    paired = pool.run(world, run_layout, dict(knobs, overlap="pair"), world)
    for rank in range(world):
        assert_equals(reference[12], plain[rank], what=f"rank {rank}")
        assert bit_equal(plain[rank], paired[rank]), f"overlap changed a bit on rank {rank}"


def test_reference_does_not_depend_on_accumulation(reference):
    assert_equals(reference[1], reference[12])
