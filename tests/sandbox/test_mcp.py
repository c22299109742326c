"""The MCP server of a sandbox, spoken to by the official client."""

import asyncio
import base64
from contextlib import asynccontextmanager

import pytest
from mcp import Client

from triax.sandbox.adapter.mcp import server
from triax.sandbox.alone import alone
from triax.sandbox.protocol import Spec


def spoken(tmp_path, talk):
    async def run():
        held = []

        @asynccontextmanager
        async def opened():
            async with alone(Spec(), "process", tmp_path, unsafe=True) as sandbox:
                held.append(sandbox)
                yield sandbox

        async with Client(server(opened)) as client:
            answer = await talk(client, held[0])
        assert held[0].status == "dead"  # it ends with its client
        assert list(tmp_path.iterdir()) == []
        return answer

    return asyncio.run(asyncio.wait_for(run(), 250))


def test_an_agent_works_in_a_sandbox_through_its_tools(tmp_path):
    async def talk(client, sandbox):
        names = {tool.name for tool in (await client.list_tools()).tools}
        assert names == {"shell", "python", "read_file", "write_file", "list_files"}
        await client.call_tool("write_file", {"path": "notes/a.txt", "content": "one\ntwo\n"})
        counted = await client.call_tool("shell", {"command": "wc -l < notes/a.txt; exit 3"})
        assert counted.structured_content["stdout"].strip() == "2"
        assert counted.structured_content["exit_code"] == 3
        assert counted.structured_content["outcome"] == "ok"
        ran = await client.call_tool("python", {"code": "print(6 * 7)"})
        assert ran.structured_content["stdout"] == "42\n"
        data = base64.b64encode(bytes(range(256))).decode()
        await client.call_tool("write_file", {"path": "bytes", "content": data, "encoding": "base64"})
        listed = await client.call_tool("list_files", {})
        found = {entry["path"].rsplit("/", 1)[1]: entry for entry in listed.structured_content["result"]}
        assert found["bytes"]["size"] == 256
        assert found["notes"]["kind"] == "directory"
        read = await client.call_tool("read_file", {"path": "notes/a.txt", "offset": 4})
        assert read.structured_content["result"] == "two\n"

    spoken(tmp_path, talk)


def test_f32_a_name_that_is_no_text_is_escaped_and_the_others_are_listed_with_it(tmp_path):
    async def talk(client, sandbox):
        await client.call_tool("shell", {"command": "mkdir odd; cd odd; : > plain; : > $(printf 'b\\377d')"})
        listed = await client.call_tool("list_files", {"path": "odd"})
        assert [entry["path"].rsplit("/", 1)[1] for entry in listed.structured_content["result"]] == [
            "b\\xffd",
            "plain",
        ]

    spoken(tmp_path, talk)


def test_a_command_over_its_limit_is_told_as_such_and_the_sandbox_lives_on(tmp_path):
    async def talk(client, sandbox):
        late = await client.call_tool("shell", {"command": "sleep 1000", "timeout_s": 0.3})
        assert late.structured_content["outcome"] == "timeout"
        assert late.structured_content["exit_code"] is None
        assert (await client.call_tool("shell", {"command": "echo on"})).structured_content["stdout"] == "on\n"

    spoken(tmp_path, talk)


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("read_file", {"path": "no/such"}, "no such file"),
        ("read_file", {"path": "a\0b"}, "NUL"),
        ("write_file", {"path": "a", "content": "&&&", "encoding": "base64"}, "base64"),
        ("shell", {"command": "x" * 2**20}, "Linux takes at most"),
        ("shell", {"command": "true", "timeout_s": -1}, "greater than 0"),
        ("shell", {}, "command"),
    ],
)
def test_what_cannot_be_is_told_to_the_agent(tmp_path, tool, arguments, words):
    async def talk(client, sandbox):
        answer = await client.call_tool(tool, arguments)
        assert answer.is_error
        assert words in answer.content[0].text

    spoken(tmp_path, talk)


def test_a_sandbox_that_failed_is_no_result_of_the_command(tmp_path):
    async def talk(client, sandbox):
        await sandbox.kill()
        answer = await client.call_tool("shell", {"command": "true"})
        assert answer.is_error
        assert "it is `dead`" in answer.content[0].text

    spoken(tmp_path, talk)
