"""Compiling a Triton kernel for a GPU that is not there, in a process in which nothing is interpreted."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from triax.kernels import nvrtc

COMPILE = """
import json, os, re, subprocess, sys, tempfile
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triax.kernels.device import assembler

tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
for wanted in json.load(sys.stdin):
    kernel = getattr(import_module(wanted["module"]), wanted["kernel"])
    given, constants = wanted["types"], wanted["constants"]
    signature = {name: "constexpr" if name in constants else given[name] for name in kernel.arg_names}
    aligned = {}
    for place, name in enumerate(kernel.arg_names):
        kinds = [] if name in constants else given[name]
        if isinstance(kinds, list):
            aligned |= {(place, i): [["tt.divisibility", 16]] for i in range(len(kinds))}
        elif kinds not in ("fp32", "i32u"):
            aligned[(place,)] = [["tt.divisibility", 16]]
    kinds = {"i32u": "i32"}
    signature = {
        name: tuple(kind) if isinstance(kind, list) else kinds.get(kind, kind) for name, kind in signature.items()
    }
    with assembler():
        compiled = triton.compile(
            ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned),
            target=GPUTarget("cuda", 90, 32), options=wanted["options"],
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
        sass = subprocess.run([tool, "--dump-sass", file.name], capture_output=True, text=True).stdout
    registers, stack = map(int, re.search(r"REG:(\\d+) STACK:(\\d+)", usage).groups())
    print(json.dumps({"registers": registers, "stack": stack, "shared": compiled.metadata.shared, "sass": sass}))
"""


class Compiled(NamedTuple):
    """What the compiler made of a kernel."""

    registers: int
    stack: int
    """Bytes of registers spilled, a thread."""
    shared: int
    sass: str


def compile_for_hopper(wanted):
    """Compile kernels; `types` names arguments (`*bf16`, `i32` divisible by 16, `i32u` any, `fp32`, a list a tuple)."""
    environment = {n: x for n, x in os.environ.items() if n != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE],
        input=json.dumps(wanted), env=environment, cwd=root, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return [Compiled(**json.loads(line)) for line in run.stdout.splitlines()]


@pytest.fixture(scope="session")
def hopper():
    return compile_for_hopper


@pytest.fixture(scope="session")
def assembled(tmp_path_factory):
    """Compile CUDA C++ to machine code and read it back: `assembled(source, defines)`."""
    disassembler = Path(pytest.importorskip("triton").__file__).parent / "backends/nvidia/bin/cuobjdump"
    pytest.importorskip("cuda.bindings.nvrtc", reason="the compiler comes with cuda-bindings and nvidia-cuda-nvrtc")

    def compile(source, defines):
        code = tmp_path_factory.mktemp("cuda") / "kernel.cubin"
        code.write_bytes(nvrtc.compile(source, dict(defines), "sm_90a"))

        def shown(what):
            return subprocess.run([disassembler, what, code], capture_output=True, text=True).stdout

        registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", shown("--dump-resource-usage")).groups())
        return Compiled(registers, stack, 0, shown("--dump-sass"))

    return compile
