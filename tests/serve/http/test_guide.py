"""The commands of the guide run as they are written, against a server of their own."""

import re
import shlex
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import SCRIPTED, make_folder, until_ready

pytestmark = pytest.mark.slow
GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "serve.md"


def commands():
    for block in re.findall(r"^```bash\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE):
        yield from (shlex.split(line)[1:] for line in block.splitlines())


@contextmanager
def ended(server):
    """End a server with the block: as an operator does, or at once where that or the block fails."""
    try:
        yield
        server.terminate()
        server.wait(100)
    finally:
        server.kill()


def test_every_command_of_the_guide_runs(tmp_path):
    make_folder(tmp_path / "Kimi-K3", context=8192)
    (tmp_path / "server.toml").write_text("[http]\nmax_queue = 99\n")
    listed = list(commands())
    servers = [words for words in listed if words[0] == "serve"]
    clients = [words for words in listed if words[0] != "serve"]
    assert (len(servers), len(clients)) == (4, 4)
    url = ""
    for number, words in enumerate(servers):
        # the port of the guide may be taken where tests run
        words = [word for word in words if "port" not in word] + ["http.port=0", "--engine", SCRIPTED]
        log = tmp_path / f"{number}.txt"
        with (
            log.open("w") as file,
            subprocess.Popen([sys.executable, "-m", "triax", *words], cwd=tmp_path, stderr=file) as server,
            ended(server),
        ):
            url = until_ready(log, server).replace("0.0.0.0", "127.0.0.1")
            if number == 0:
                for client in clients:
                    told = [word.replace("http://127.0.0.1:8000", url) for word in client]
                    command = [sys.executable, "-m", "triax", *told]
                    done = subprocess.run(command, cwd=tmp_path, input="hello\n", capture_output=True, text=True)
                    assert done.returncode == 0, done.stderr
                    assert "0 errors" in done.stdout or "Hello there!" in done.stdout
        assert server.returncode == 0
    assert (tmp_path / "agents.json").is_file()
    assert (tmp_path / "agents.png").is_file()
