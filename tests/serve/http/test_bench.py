"""`triax bench serve` against a real server, and its arithmetic against figures made by hand."""

import json
import subprocess
import sys

import pytest
from PIL import Image

from triax.errors import ConfigError
from triax.serve.bench import Bench, Load, Measured, percentile, report

from .test_faults import figure


def test_figures_are_those_that_clients_feel():
    one = Measured(0, 1.0, 0.5, 3.5, [0.5, 1.5], prompt_tokens=10, cached_tokens=4, answer_tokens=3)
    late = Measured(1, 2.0, 0.1, 2.1, [], prompt_tokens=10, cached_tokens=0, answer_tokens=1)
    tree = report(Load(), [one, late, Measured(0, 0.0, error="broken")], 4.0)
    assert tree["ttft_s"] == {"mean": 0.3, "p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert tree["tpot_s"]["p50"] == 1.0
    assert tree["itl_s"]["mean"] == 1.0
    assert tree["answer_tokens_per_s"] == 1.0
    assert tree["cached_share"] == 0.2
    assert tree["errors"] == {"broken": 1}
    assert tree["ttft_s_by_turn"] == {"0": 0.5, "1": 0.1}
    assert percentile([], 50) == 0.0


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 200.0}, {"turns": 3, "shared_tokens": 20}])
def test_every_request_is_asked_and_answered_in_full(server, load):
    before = figure(server, "triax_ttft_seconds_count")
    tree = Bench(server.url, Load(requests=7, prompt_tokens=30, answer_tokens=9, **load)).run()
    assert (tree["requests"], tree["errors"]) == (7, {})
    assert {one["answer_tokens"] for one in tree["measured"]} == {9}
    assert figure(server, "triax_ttft_seconds_count") == before + 7
    longest = max(one["prompt_tokens"] for one in tree["measured"])
    assert longest == (20 + 3 * 30 + 2 * 9 if "turns" in load else 30)
    assert all(one["ttft_s"] > 0 for one in tree["measured"])


def test_the_command_writes_report_and_plot(server, tmp_path):
    command = [sys.executable, "-m", "triax", "bench", "serve", server.url, "--requests", "3", "--prompt", "8"]
    command += ["--answer", "4", "--json", "--out", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["load"]["prompt_tokens"] == 8
    assert len(json.loads((tmp_path / "r.json").read_text())["measured"]) == 3
    with Image.open(tmp_path / "r.png") as picture:
        assert picture.size[0] > 1000


def test_what_goes_wrong_is_told(server):
    tree = Bench(server.url, Load(requests=2, prompt_tokens=100_000)).run()
    assert list(tree["errors"].values()) == [2]
    assert "does not fit" in next(iter(tree["errors"]))
    with pytest.raises(ConfigError, match="no server of this API"):
        Bench("http://127.0.0.1:9", Load()).run()
    with pytest.raises(ConfigError, match="is no address of a server; found `localhost:8000`"):
        Bench("localhost:8000", Load())
    with pytest.raises(ConfigError, match="turns is out of range"):
        Load(turns=0)
