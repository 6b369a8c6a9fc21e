import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import harness  # noqa: E402


@pytest.fixture(scope="session")
def pool():
    """Ranks that live for the whole test run: starting a job costs seconds, a layout in it milliseconds."""
    pool = harness.Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """A data folder of random tokens below 64."""
    ids = np.random.RandomState(0).randint(0, 64, 16 * 200 + 1)
    return harness.write_tokens(tmp_path_factory.mktemp("tokens"), ids)
