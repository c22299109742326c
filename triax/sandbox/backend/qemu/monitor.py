"""The control connection of one emulator (QMP): commands in, answers and events out."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any

from triax.errors import SandboxError

LINE_LIMIT = 2**22


class Monitor:
    """One connection; `await Monitor.open(socket)` makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._order = asyncio.Lock()
        self._number = 0

    @classmethod
    async def open(cls, end: socket.socket, within_s: float = 30.0) -> "Monitor":
        """Take over a connected socket and agree on the protocol.

        Raises:
            SandboxError: The emulator ended or said nothing.
        """
        end.setblocking(False)
        monitor = cls(*await asyncio.open_connection(sock=end, limit=LINE_LIMIT))
        try:
            await asyncio.wait_for(monitor._line(), within_s)
            await monitor.run("qmp_capabilities", within_s=within_s)
        except BaseException as problem:
            await monitor.close()
            if not isinstance(problem, TimeoutError):
                raise
            raise SandboxError(f"qemu: its monitor did not answer in {within_s:g} s; the host is overloaded") from None
        return monitor

    async def run(self, command: str, /, within_s: float = 30.0, **arguments: Any) -> Any:
        """Run a command and return its answer.

        Raises:
            SandboxError: The emulator refused, ended, or gave no answer in time.
        """
        async with self._order:
            self._number += 1
            wanted = {"execute": command, "arguments": arguments, "id": self._number}
            try:
                self._writer.write(json.dumps(wanted).encode() + b"\n")
                while True:
                    answer = await asyncio.wait_for(self._line(), within_s)
                    if answer.get("id") != self._number:
                        continue  # an event, or what a caller who gave up had asked for
                    if "return" in answer:
                        return answer["return"]
                    if "error" in answer:
                        raise SandboxError(f"qemu: refused `{command}`; it said: {answer['error'].get('desc', '')}")
            except TimeoutError:
                await self.close()  # a late answer would be taken for that of the next command
                raise SandboxError(f"qemu: gave no answer to `{command}` in {within_s:g} s") from None
            except (ConnectionError, OSError) as problem:
                raise SandboxError(f"qemu: its monitor is gone; {problem}") from None

    async def _line(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
        except (ConnectionError, ValueError) as problem:
            raise SandboxError(f"qemu: its monitor broke off; {problem}") from None
        if not line:
            raise SandboxError("qemu: its monitor is gone; the emulator ended")
        return json.loads(line)

    async def close(self) -> None:
        """Close the connection; may be called again."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
