"""The simulated machine, loaded once: test folders are no packages."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def simulation():
    name = "serve_cache_simulation"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / "simulation.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
