"""Every kernel under CUDA's memory checker, on the smallest of its GPU tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

CHECKER = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
SMALLEST = {
    "attention_residual_fused": "errors and 70-2304-4",
    "cross_entropy": "errors and dtype1 and shape0",
    "kda_decode": "definition and 128-128 and stored0",
    "kda_flash": "errors and 3-128-128-random",
    "kda_hopper": "errors and lengths0 and True-random",
    "mla_decode": "definition and lengths0 and 96",
    "mla_largest": "maximum and dtype1 and shape0",
    "moe_fused": "errors and cuda and activation0 and zipf",
    "mx_experts": "definition and 128-128-False",
    "newton_schulz_symmetric": "products and 640",
    "rms_norm": "errors and shape0",
    "short_conv_fused": "errors and lengths0",
    "situ_glu_fused": "errors and caps0",
}


@pytest.mark.skipif(CHECKER is None, reason="compute-sanitizer comes with the CUDA toolkit")
@pytest.mark.parametrize("name", SMALLEST)
def test_kernels_touch_only_the_memory_they_are_given(name):
    tests = Path(__file__).with_name(f"test_{name}.py")
    options = ["-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:benchmark", "-p", "no:xdist"]
    # torch asks the driver for functions that it does not have; that is no error of memory
    command = [str(CHECKER), "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "9"]
    command += [sys.executable, "-m", "pytest", *options]
    run = subprocess.run([*command, str(tests), "-k", SMALLEST[name]], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in run.stdout
    assert " passed" in run.stdout
