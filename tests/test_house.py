"""The house holds itself to its own rules: names, and documents that run."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from triax import machine

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("triax", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def test_no_file_is_named_after_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    assert not [name_of(path) for path in SOURCES if nothing & set(path.relative_to(ROOT).with_suffix("").parts)]


def test_every_module_says_in_its_first_line_what_it_is_for():
    silent = [path for path in SOURCES if name_of(path).startswith("triax/") and not path.read_text().startswith('"""')]
    assert not [name_of(path) for path in silent]


def test_no_annotations_are_strings_by_future_import():
    assert not [name_of(p) for p in SOURCES if "from __future__ import " + "annotations" in p.read_text()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_the_documents_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for example in Sybil(parsers=[PythonCodeBlockParser()]).parse(page):
        example.evaluate()


def commands(page):
    """Give every line of a shell block that runs one of our own programs."""
    for block in re.findall(r"^\s*```(?:bash|console|sh)\n(.*?)```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            words = line.split("#")[0].split(" -- ")[0].split()  # what stands behind `--` is another program's
            if words and (words[0] in ("make", "triax", ".venv/bin/triax") or words[:2] == ["python", "-m"]):
                yield words


def targets():
    return set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def generator():
    spec = importlib.util.spec_from_file_location("generate_reference", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verb_of(words):
    return next(verb for size in (2, 1, 0) if (verb := tuple(words[:size])) in generator().verbs())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_documents_exist(page):
    from typer.main import get_command

    from triax.cli.app import app

    for words in commands(page):
        if words[0] == "make":
            assert set(words[1:]) <= targets(), words
        elif words[0] == "python":
            assert (ROOT / f"{words[2].replace('.', '/')}.py").is_file(), words
        else:
            verb = verb_of(words[1:])
            assert verb, words
            command = get_command(app)
            for word in verb:
                command = command.commands[word]
            known = {flag for option in command.params for flag in option.opts} | {"--help"}
            assert {word for word in words if word.startswith("--")} <= known, words


def test_make_has_the_words_that_are_promised():
    assert {"setup", "demo", "fix", "check", "test", "soak", "docs"} <= targets()


def test_continuous_integration_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text()


def test_the_page_of_settings_is_current():
    page = ROOT / "docs" / "reference" / "settings.md"
    assert page.read_text() == generator().settings_page(), "run `make docs`"
    assert (page.parent / "server.md").read_text() == generator().server_page(), "run `make docs`"


def test_the_page_of_commands_names_every_verb():
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == [" ".join(["triax", *verb]) for verb in generator().verbs()]


def test_links_between_the_documents_lead_somewhere():
    broken = [
        (name_of(page), link)
        for page in PAGES
        for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert not broken


def test_each_limit_that_names_a_test_names_one_that_exists():
    table = (ROOT / "docs/reference/limits.md").read_text().partition("|---|")[2].partition("\n\n")[0]
    rows = table.splitlines()[1:]
    assert len(rows) >= 5
    for row in rows:
        file, _, test = row.rstrip(" |").rpartition("|")[2].strip(" `").partition("::")
        assert f"def {test}(" in (ROOT / file).read_text(), row


def test_commands_of_later_work_are_not_there():
    later = {"rl", "distill", "synth", "eval"}
    assert not later & {word for verb in generator().verbs() for word in verb}, (
        "take them out of docs/reference/limits.md"
    )


def test_the_site_lists_every_page():
    menu = (ROOT / "mkdocs.yml").read_text()
    missing = [p for p in (ROOT / "docs").rglob("*.md") if p.relative_to(ROOT / "docs").as_posix() not in menu]
    dated = re.compile(r"records/\d{4}-")
    assert not [name_of(page) for page in missing if not dated.search(name_of(page))]


def test_nothing_that_is_tracked_names_a_machine_or_a_registry():
    if not (ROOT / ".git").exists():
        pytest.fail("the tests run in a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    pattern = re.compile(r"(^|[^.\w])/(w" + r"ork|home/\w+)/|https?://[^ ]*(py" + r"pi|np" + r"mjs|deb" + r"ian)")
    texts = [ROOT / name for name in listed if name and Path(name).suffix not in (".png", ".safetensors")]
    assert not [name_of(path) for path in texts if path.is_file() and pattern.search(path.read_text(errors="ignore"))]


def test_the_extras_that_doctor_looks_for_are_those_that_can_be_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert machine.EXTRAS.keys() == project["optional-dependencies"].keys()
    for extra, packages in machine.EXTRAS.items():
        listed = " ".join(project["optional-dependencies"][extra])
        assert all(package in listed for package in packages)


def test_help_does_not_load_torch():
    program = "import sys; from triax.cli.app import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    program += (
        "heavy = {'torch', 'pydantic', 'numpy', 'matplotlib', 'tokenizers'} & set(sys.modules)\nassert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_settings_load_without_torch():
    program = (
        "import sys, triax.config.load, triax.config.show, triax.machine, triax.log\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
