"""A sandbox as a server of the Model Context Protocol: a shell, files and Python for any agent that speaks it.

Source: modelcontextprotocol.io; the server is the official SDK's.
"""

import base64
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated, Any, Literal

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import BaseModel, Field

import triax
from triax.errors import SandboxError
from triax.sandbox.command import shown
from triax.sandbox.protocol import Outcome, Result
from triax.sandbox.sandbox import Sandbox

LONGEST_S = 3600.0
SHOWN_BYTES = 100_000
"""Bytes of each stream that an answer shows: a model reads them."""
LARGEST_READ_BYTES = 2**20

Path = Annotated[str, Field(description="Path in the sandbox; a relative one begins at the home folder.")]
Seconds = Annotated[float, Field(gt=0, le=LONGEST_S, description="Seconds after which the command is ended.")]


class Told(BaseModel):
    """What a command left behind."""

    outcome: Outcome
    """`ok` if it ran to its end, whatever its exit code."""
    exit_code: int | None
    """None if a signal or a limit ended it."""
    stdout: str
    """What it wrote."""
    stderr: str
    """What it wrote to its second stream."""
    truncated: bool
    """Whether output was left out."""
    detail: str
    """What happened, for an outcome other than `ok`."""


class File(BaseModel):
    """One entry of a folder."""

    path: str
    """Absolute path."""
    kind: Literal["file", "directory", "symlink", "other"]
    """What it is."""
    size: int
    """Bytes."""


def told(result: Result) -> Told:
    """Return a result as an agent reads it."""
    return Told(
        outcome=result.outcome,
        exit_code=result.exit_code,
        stdout=result.stdout.decode(errors="replace"),
        stderr=result.stderr.decode(errors="replace"),
        truncated=result.truncated,
        detail=result.detail or (f"ended by signal {result.signal}" if result.signal is not None else ""),
    )


def server(opened: Callable[[], AbstractAsyncContextManager[Sandbox]]) -> MCPServer[Any]:
    """Return a server whose tools act on one sandbox.

    Args:
        opened: Gives the sandbox when the server starts, and ends it with the server.
    """
    held: list[Sandbox] = []

    @asynccontextmanager
    async def lifespan(_: MCPServer[Any]) -> AsyncGenerator[None, None]:
        async with opened() as sandbox:
            held.append(sandbox)
            yield

    mcp: MCPServer[Any] = MCPServer(
        "triax sandbox",
        version=triax.__version__,
        instructions="A Linux computer of its own. Files and installed programs stay between calls; nothing else does.",
        lifespan=lifespan,
    )

    def sandbox() -> Sandbox:
        return held[-1]

    @mcp.tool()
    async def shell(command: str, timeout_s: Seconds = 120.0) -> Told:
        """Run a command in the sandbox's shell and return what it wrote and its exit code."""
        return told(await _asked(sandbox().exec(command, timeout_s=float(timeout_s), output_limit=SHOWN_BYTES)))

    @mcp.tool()
    async def python(code: str, timeout_s: Seconds = 120.0) -> Told:
        """Run a Python program in the sandbox and return what it wrote; print what you want to see."""
        ran = sandbox().exec(
            ["python3", "-"], stdin=code.encode(), timeout_s=float(timeout_s), output_limit=SHOWN_BYTES
        )
        return told(await _asked(ran))

    @mcp.tool()
    async def read_file(path: Path, offset: Annotated[int, Field(ge=0)] = 0) -> str:
        """Read a file as text, up to a megabyte from `offset` on; bytes that are no text are replaced."""
        return (await _asked(sandbox().read(path, offset, LARGEST_READ_BYTES))).decode(errors="replace")

    @mcp.tool()
    async def write_file(path: Path, content: str, encoding: Literal["text", "base64"] = "text") -> str:
        """Replace a file, making its folders, with text or with the bytes that base64 stands for."""
        try:
            data = content.encode() if encoding == "text" else base64.b64decode(content, validate=True)
        except ValueError as problem:
            raise ToolError(f"content: is no base64; {problem}") from None
        await _asked(sandbox().write(path, data))
        return f"wrote {len(data)} bytes to {path}"

    @mcp.tool()
    async def list_files(path: Path = ".") -> list[File]:
        """List what a folder holds."""
        entries = await _asked(sandbox().list(path))
        return [File(path=shown(entry.path), kind=entry.kind, size=entry.size) for entry in entries]

    return mcp


async def _asked(answer: Awaitable[Any]) -> Any:
    """Wait for the sandbox; what it refuses is told to the agent, which can do better."""
    try:
        return await answer
    except SandboxError as problem:
        raise ToolError(f"{problem.kind}: {problem}") from problem
