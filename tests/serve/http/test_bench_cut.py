"""`triax bench serve` that a person ends early."""

import json
import signal
import subprocess
import sys

from .test_faults import figure, until


def test_an_interrupt_tells_what_had_ended(server, tmp_path):
    before = figure(server, "triax_ttft_seconds_count")
    command = [sys.executable, "-m", "triax", "bench", "serve", server.url, "--requests", "1000000", "--prompt", "8"]
    command += ["--answer", "4", "--json", "--out", str(tmp_path / "r.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: figure(server, "triax_ttft_seconds_count") > before + 50)
            process.send_signal(signal.SIGINT)
            told, said = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert "interrupted" in said
    tree = json.loads(told)
    assert tree["interrupted"]
    assert 0 < tree["requests"] < 1_000_000
    assert len(json.loads((tmp_path / "r.json").read_text())["measured"]) == tree["requests"]
    until(lambda: figure(server, "triax_active_requests") == 0)
