"""What every test gets: one thread, fixed seeds, poisoned allocation and the small model T0."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import sys
from functools import wraps
from pathlib import Path

import pytest
import torch
import torch.utils._device
from hypothesis import HealthCheck, settings

from triax.config.model import Model

settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=20,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],  # a machine that pauses for a second says nothing of the code
)
settings.register_profile("soak", deadline=None, max_examples=500, print_blob=True)
settings.load_profile("ci")

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported


def pytest_runtest_setup():
    torch.manual_seed(0)


def _poisoned(allocate):
    """Fill what `allocate` returns with NaN when code of triax asked for it: a forgotten cell must not look like 0."""

    @wraps(allocate)
    def wrapper(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.startswith("triax.") and tensor.is_floating_point() and not tensor.is_meta:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return wrapper


@pytest.fixture(scope="session", autouse=True)
def poisoned_allocation():
    torch.utils._device._device_constructors()  # remembers the real ones, so that `with torch.device("meta")` works
    patch = pytest.MonkeyPatch()
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (torch.Tensor, "new_empty_strided"),
    ]:
        patch.setattr(owner, name, _poisoned(getattr(owner, name)))
    yield
    patch.undo()


@pytest.fixture(scope="session")
def kimi_data() -> Path:
    """Folder with the released vocabulary, which is no part of the package: `TRIAX_DATA` or beside the checkout."""
    folder = Path(os.environ.get("TRIAX_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not (folder / "kimi.tiktoken").is_file():
        pytest.skip(f"needs the released vocabulary kimi.tiktoken; found none in {folder}; set TRIAX_DATA")
    return folder


@pytest.fixture(scope="session")
def t0() -> Model:
    """Every part of K3 in four layers (KDA, KDA, KDA, MLA): the shape on which invariants are tried."""
    return Model.model_validate(
        {
            "vocab_size": 512,
            "width": 64,
            "num_layers": 4,
            "mla_layers": (3,),
            "num_dense_layers": 1,
            "dense_dim": 96,
            "activation": {"kind": "situ"},
            "kda": {"num_heads": 2, "head_dim": 32},
            "mla": {
                "num_heads": 2,
                "q_latent_dim": 48,
                "kv_latent_dim": 32,
                "nope_dim": 32,
                "rope_dim": 16,
                "value_dim": 32,
                "output_gate": True,
            },
            "moe": {"num_experts": 8, "top_k": 2, "num_shared_experts": 1, "expert_dim": 32, "latent_dim": 32},
            "residuals": {"kind": "block", "block_layers": 2},
        }
    )
