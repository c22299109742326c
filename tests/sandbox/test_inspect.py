"""The Inspect provider: Inspect's own checks of a provider, and a real evaluation."""

import asyncio
import gc
import inspect

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, scorer
from inspect_ai.solver import solver
from inspect_ai.util import SandboxEnvironmentSpec, sandbox
from inspect_ai.util._sandbox import self_check
from inspect_ai.util._sandbox.environment import SandboxUnavailableError

from triax.sandbox.adapter.inspect import TriaxConfig, TriaxSandboxEnvironment

NOT_HERE = {
    # the process backend runs all as the caller, who may be root, and has no other users
    "test_exec_as_user",
    "test_exec_permission_error",
    "test_read_file_not_allowed",
    "test_write_binary_file_without_permissions",
    "test_write_text_file_without_permissions",
}
CHECKS = {
    name: check
    for name, check in vars(self_check).items()
    if name.startswith("test_") and inspect.iscoroutinefunction(check) and name not in NOT_HERE
}
SLOW = {"test_exec_timeout_kills_process", "test_exec_timeout_kills_child_processes"}


def configured(tmp_path, **more):
    return TriaxConfig(backend="process", unsafe=True, folder=str(tmp_path / "inspect"), **more)


async def in_sandbox(config, act):
    made = await TriaxSandboxEnvironment.sample_init("checks", config, {})
    try:
        return await act(made["default"])
    finally:
        await TriaxSandboxEnvironment.sample_cleanup("checks", config, made, False)
        await TriaxSandboxEnvironment.task_cleanup("checks", config, True)


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in sorted(CHECKS)])
def test_inspects_own_check_of_a_provider_passes(tmp_path, name):
    asyncio.run(asyncio.wait_for(in_sandbox(configured(tmp_path), CHECKS[name]), 250))


def test_a_sandbox_that_failed_is_not_blamed_on_the_command(tmp_path):
    async def act(environment):
        await environment.sandbox._life.machine.kill()  # behind its owner's back, as a crash would
        with pytest.raises(SandboxUnavailableError):
            await environment.exec(["true"])

    asyncio.run(in_sandbox(configured(tmp_path), act))


@pytest.mark.filterwarnings(  # Inspect leaves streams of its own unclosed
    "ignore:Exception ignored in. <function MemoryObject:pytest.PytestUnraisableExceptionWarning"
)
def test_an_evaluation_runs_in_sandboxes_that_it_finds_by_name(tmp_path):
    """The provider is found by its entry point; each sample has files of its own."""

    @solver
    def work():
        async def solve(state, generate):
            await sandbox().write_file("seen.txt", state.input_text)
            result = await sandbox().exec(["sh", "-c", "cat seen.txt; ls | wc -l"])
            state.output.completion = result.stdout
            return state

        return solve

    @scorer(metrics=[accuracy()])
    def as_expected():
        async def score(state, target):
            return Score(value="C" if state.output.completion == f"{target.text}1\n" else "I")

        return score

    task = Task(
        dataset=[Sample(input=f"sample {n}", target=f"sample {n}") for n in range(3)],
        solver=work(),
        scorer=as_expected(),
        sandbox=SandboxEnvironmentSpec("triax", configured(tmp_path)),
    )
    (log,) = eval(task, model="mockllm/model", log_dir=str(tmp_path / "logs"), display="none")
    gc.collect()  # what Inspect left unclosed is found here, where it is forgiven, and in no other test
    assert log.status == "success", log.error
    assert log.results.scores[0].metrics["accuracy"].value == 1.0
    assert list((tmp_path / "inspect").glob("*/machines/*")) == []  # nothing is left


def test_a_provider_may_take_its_machines_from_a_server(server, tmp_path):
    async def act(environment):
        return (await environment.exec(["echo", "from afar"])).stdout

    config = TriaxConfig(url=server.url, folder=str(tmp_path / "remote"))
    assert asyncio.run(in_sandbox(config, act)) == "from afar\n"
    assert server.plane.host.sandboxes() == []


def test_a_configuration_that_says_nothing_we_know_is_refused():
    with pytest.raises(ValueError, match="speed"):
        TriaxSandboxEnvironment.config_deserialize({"speed": 3})
    with pytest.raises(ValueError, match="takes a TriaxConfig"):
        asyncio.run(TriaxSandboxEnvironment.sample_init("t", "compose.yaml", {}))
