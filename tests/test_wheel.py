"""A wheel, installed where there is no repository, trains, shows recipes and holds all that the package reads."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as a release is, without network: `hatchling` is part of the developers' extra."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("triax-*.whl")
    return path


def test_a_wheel_holds_every_file_of_the_package_and_the_recipes(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(
        ["git", "ls-files", "triax", "recipes"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]
    wanted = {f"triax/{name}" if name.startswith("recipes/") else name for name in files}
    assert wanted - names == set()
    endings = {Path(name).suffix for name in names}
    assert endings >= {".py", ".toml", ".typed", ".cu", ".cuh", ".c", ".h", ".html"}
    assert not [name for name in names if not name.startswith(("triax/", "triax-"))]


def test_an_installed_wheel_works_without_the_repository(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    # packages that triax needs come from where the tests run; the line is no place for their own .pth files, so the
    # checkout, which is installed there for development, stays out of sight
    (site / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")) + "\n")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--no-index",
        "-q",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True, timeout=120)

    def run(*words):
        command = [str(tmp_path / "venv" / "bin" / "triax"), *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = subprocess.run(
        [str(python), "-c", "import triax; print(triax.__file__)"], capture_output=True, text=True, cwd=tmp_path
    )
    assert Path(where.stdout.strip()).is_relative_to(site)
    assert "\ntiny " in run("recipe", "show")
    (tmp_path / "notes").mkdir()
    for number in range(4):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"note {number}: " + "some words, and more of them. " * 40)
    words = ['data.sources=[{kind = "folder", path = "notes"}]', "data.tokenizer.vocab_size=270", "train.tokens=512"]
    assert run("train", "nano", *words).startswith("runs/nano: 1 steps, 512 tokens")
    assert "Ended after 1 steps" in (tmp_path / "runs" / "nano" / "report.html").read_text()
