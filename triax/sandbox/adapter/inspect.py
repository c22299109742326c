"""A sandbox provider for Inspect: `sandbox="triax"` gives every sample a sandbox of its own.

Inspect finds it by the entry point `inspect_ai`. Without a configuration each task owns a folder below `runs/inspect`
and takes the strongest backend of this machine; with one, it may name a backend, an image, or the address of a server.

Source: UKGovernmentBEIS/inspect_ai, util/_sandbox/environment.py (the contract of a provider).
"""

import asyncio
import contextlib
import signal
import uuid
from pathlib import Path
from typing import Any, ClassVar, Literal, overload

from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUserUnsupportedError,
    sandboxenv,
)
from inspect_ai.util._sandbox.environment import SandboxUnavailableError
from pydantic import BaseModel, ConfigDict

from triax.errors import SandboxError
from triax.sandbox.backend.choose import choose
from triax.sandbox.backend.remote import RemoteBackend
from triax.sandbox.backend.remote_calls import Service
from triax.sandbox.host import Host
from triax.sandbox.protocol import Backend, Network, Resources, Result, Spec
from triax.sandbox.sandbox import Sandbox


class TriaxConfig(BaseModel, frozen=True):
    """What a task may say of its sandboxes."""

    model_config = ConfigDict(extra="forbid")

    backend: str = "auto"
    """How machines are made; `auto` takes the strongest that this machine can run."""
    unsafe: bool = False
    """Allow the backend `process`, which isolates nothing."""
    image: str | None = None
    """Root filesystem, OCI layout, or on a server the name of a template; none for the backend's own."""
    url: str | None = None
    """A server whose machines are used; none for machines of this process."""
    key: str | None = None
    """The server's API key."""
    folder: str = "runs/inspect"
    """Where the files of local machines lie."""
    cpus: float = 1.0
    """Cores of a sandbox."""
    memory_mib: int = 512
    """Memory of a sandbox."""
    disk_mib: int = 2048
    """Disk of a sandbox."""
    internet: bool = False
    """Whether a sandbox may reach everything."""
    env: tuple[tuple[str, str], ...] = ()
    """Variables of every command, each a name and a value; Inspect asks that a configuration can be hashed."""


class _Task:
    """The host of one task's sandboxes."""

    def __init__(self, host: Host, service: Service | None) -> None:
        self.host = host
        self.service = service

    async def close(self) -> None:
        await self.host.close(keep=False)
        if self.service is not None:
            await self.service.close()


@sandboxenv(name="triax")
class TriaxSandboxEnvironment(SandboxEnvironment):
    """One sandbox of a sample.

    Args:
        sandbox: The sandbox.
    """

    tasks: ClassVar[dict[tuple[str, TriaxConfig], _Task]] = {}

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__()
        self.sandbox = sandbox

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return a configuration from its plain form."""
        return TriaxConfig.model_validate(config)

    @classmethod
    async def task_init(cls, task_name: str, config: Any) -> None:
        """Own a folder, or reach a server, before the first sample."""
        await cls._task(task_name, _read(config))

    @classmethod
    async def _task(cls, task_name: str, config: TriaxConfig) -> _Task:
        name = (task_name, config)
        known = cls.tasks.get(name)
        if known is not None:
            return known
        # two runs of one task may go on at the same time; each owns a folder of its own
        folder = Path(config.folder) / uuid.uuid4().hex[:12]
        service: Service | None = None
        backend: Backend
        if config.url is not None:
            service = Service(config.url, config.key)
            backend = RemoteBackend(service, owner=f"inspect-{folder.name}")
        else:
            backend = await choose(config.backend, folder / "machines", unsafe=config.unsafe)
        task = _Task(await Host.open(folder / "state", backend), service)
        cls.tasks[name] = task
        return task

    @classmethod
    async def sample_init(cls, task_name: str, config: Any, metadata: dict[str, str]) -> dict[str, SandboxEnvironment]:
        """Make the sandbox of a sample."""
        read = _read(config)
        task = await cls._task(task_name, read)
        spec = Spec(
            image=read.image,
            resources=Resources(read.cpus, read.memory_mib, read.disk_mib),
            network=Network(allow_internet=read.internet),
            env=dict(read.env),
            metadata={"task": task_name[:200]},
            timeout_s=None,
        )
        return {"default": cls(await task.host.create(spec))}

    @classmethod
    async def sample_cleanup(
        cls, task_name: str, config: Any, environments: dict[str, SandboxEnvironment], interrupted: bool
    ) -> None:
        """End the sandbox of a sample, also when the sample was broken off."""
        for environment in environments.values():
            await asyncio.shield(environment.as_type(cls).sandbox.kill())

    @classmethod
    async def task_cleanup(cls, task_name: str, config: Any, cleanup: bool) -> None:
        """Give up the folder of a task; its sandboxes are ended."""
        task = cls.tasks.pop((task_name, _read(config)), None)
        if task is not None:
            await task.close()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command to its end.

        A limit that is met is a `TimeoutError`, a sandbox that failed `SandboxUnavailableError`: neither is the
        command's own result. A command is not tried again after its limit, since it may have done half of its work.
        """
        try:
            result = await self.sandbox.exec(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input or b"",
                cwd=cwd,
                env=env,
                user=user,
                timeout_s=None if timeout is None else float(timeout),
                output_limit=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE,
            )
        except SandboxError as problem:
            raise _raised(problem, user) from problem
        return self._answer(result, cmd)

    def _answer(self, result: Result, cmd: list[str]) -> ExecResult[str]:
        stdout, stderr = (stream.decode(errors="replace") for stream in (result.stdout, result.stderr))
        if result.outcome == "timeout":
            raise TimeoutError(result.detail or f"{cmd[0]} was ended at its limit")
        if result.outcome in ("infrastructure", "refused"):
            raise SandboxUnavailableError(result.detail)
        if result.truncated:
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR, truncated_output=stdout
            )
        if result.outcome == "out_of_memory":
            stderr += f"{result.detail or 'out of memory'}\n"
        if result.exit_code == 126 and "ermission denied" in stderr:
            raise PermissionError(stderr.strip())
        code = result.exit_code if result.exit_code is not None else 128 + (result.signal or signal.SIGKILL)
        return ExecResult(code == 0, code, stdout, stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, and make its folders."""
        try:
            await self.sandbox.write(file, contents.encode() if isinstance(contents, str) else contents)
        except SandboxError as problem:
            await self._explain(problem, file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file, whole."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        try:
            data = await self.sandbox.read(file, 0, limit + 1)
        except SandboxError as problem:
            await self._explain(problem, file)
            raise
        if len(data) > limit:
            raise OutputLimitExceededError(
                limit_str=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, truncated_output=None
            )
        return data.decode() if text else data

    async def _explain(self, problem: SandboxError, file: str) -> None:
        """Raise what Inspect expects for a file that cannot be read or written."""
        if problem.status == 404:
            raise FileNotFoundError(str(problem)) from problem
        if problem.status == 403:
            raise PermissionError(str(problem)) from problem
        if problem.status in (400, 409):
            with contextlib.suppress(SandboxError):
                if (await self.sandbox.stat(file)).kind == "directory":
                    raise IsADirectoryError(f"{file} is a directory: {problem}") from problem
        raise _raised(problem, None) from problem


def _read(config: Any) -> TriaxConfig:
    if config is None:
        return TriaxConfig()
    if isinstance(config, TriaxConfig):
        return config
    raise ValueError(f"sandbox triax: takes a TriaxConfig; found `{type(config).__name__}`")


def _raised(problem: SandboxError, user: str | None) -> Exception:
    if problem.kind == "infrastructure":
        return SandboxUnavailableError(str(problem))
    if user is not None and "user" in str(problem):
        return SandboxUserUnsupportedError(str(problem))
    return ValueError(str(problem))
