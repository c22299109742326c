"""The commands and the program of docs/guides/sandbox.md, run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

GUIDE = (Path(__file__).parents[2] / "docs/guides/sandbox.md").read_text()
SHELL = re.findall(r"```sh\n(.*?)```", GUIDE, re.DOTALL)
PYTHON = re.findall(r"```py\n(.*?)```", GUIDE, re.DOTALL)


def shell(text, folder):
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        ["sh", "-ec", text], cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=240
    )


def test_one_command_runs_without_a_server(tmp_path):
    ran = shell(SHELL[0], tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "hello\n"), ran.stderr
    assert list((tmp_path / "runs/sandboxes").iterdir()) == []


def test_a_server_is_started_used_from_a_shell_and_ended(tmp_path):
    words = SHELL[1].replace("port=49980", "port=0").split()
    program = [str(Path(sys.executable).parent / words[0]), *words[1:]]
    with subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r"http://\S+", server.stdout.readline())[0]
            used = shell(re.sub(r"(triax sandbox \w+)", rf"\1 --url {url}", SHELL[2]), tmp_path)
        finally:
            server.terminate()
            assert server.wait(200) == 0
    assert used.returncode == 0, used.stderr
    assert used.stdout.startswith("draft\ndraft\n")
    assert "running" in used.stdout


def test_the_program_for_the_stock_client_runs(server, capsys):
    exec(PYTHON[0], {"url": server.url})
    assert capsys.readouterr().out == "1\n2\n3\n\n['3', '1', '2']\n"
