"""What is sent to commands: more than a pipe holds, to those that do not read, and from several at once."""

import asyncio

import pytest

from triax.errors import SandboxError

MUCH = b"0123456789abcdef" * 2**17  # 2 MiB, more than all pipes on the way hold together
PATIENCE_S = 120.0


@pytest.fixture(params=["process", "namespace", "gvisor", "qemu"])
def backend(request, available):
    """Name each backend that this machine can run."""
    if reason := available(request.param):
        pytest.skip(reason)
    return request.param


def test_input_and_output_that_no_pipe_holds_pass_each_other(backend, hosting, started, tmp_path):
    async def run():
        async with hosting(backend, tmp_path) as host:
            sandbox = await started(host)
            result = await sandbox.exec("cat; echo end >&2", stdin=MUCH, timeout_s=PATIENCE_S)
            assert result.outcome == "ok"
            assert result.stdout == MUCH
            deaf = await sandbox.exec("sleep 0.2; echo unread", stdin=MUCH, timeout_s=PATIENCE_S)
            assert (deaf.outcome, deaf.stdout) == ("ok", b"unread\n")

    asyncio.run(run())


def test_closing_input_that_is_stuck_ends_the_write_and_harms_no_other_command(backend, hosting, started, tmp_path):
    async def run():
        async with hosting(backend, tmp_path) as host:
            sandbox = await started(host)
            deaf = await sandbox.start(["sleep", "1000"])
            writing = asyncio.ensure_future(deaf.write(MUCH))
            await asyncio.sleep(0.2)
            assert not writing.done()
            await deaf.close_stdin()
            with pytest.raises(SandboxError, match="closed its standard input"):
                await asyncio.wait_for(writing, PATIENCE_S)
            with pytest.raises(SandboxError, match="closed its standard input"):
                await deaf.write(b"more")
            for _ in range(3):  # descriptors of the one are numbers of the next
                result = await sandbox.exec("cat", stdin=MUCH, timeout_s=PATIENCE_S)
                assert (result.outcome, len(result.stdout)) == ("ok", len(MUCH))
            await deaf.kill()
            await asyncio.wait_for(deaf.wait(), PATIENCE_S)

    asyncio.run(run())


def test_what_two_send_at_once_arrives_whole_and_one_after_the_other(backend, hosting, started, tmp_path):
    async def run():
        async with hosting(backend, tmp_path) as host:
            sandbox = await started(host)
            process = await sandbox.start("sleep 0.2; cat")
            sent = [letter * 2**19 for letter in (b"a", b"b", b"c")]

            async def speak():
                await asyncio.gather(*(process.write(data) for data in sent))
                await process.close_stdin()

            speaking = asyncio.ensure_future(speak())
            heard = b"".join([data async for _, data in process.output()])
            await speaking
            assert heard == b"".join(sent)

    asyncio.run(run())


def test_a_signal_that_comes_with_the_start_arrives_and_one_that_cannot_be_is_refused(
    backend, hosting, started, tmp_path
):
    async def run():
        async with hosting(backend, tmp_path) as host:
            sandbox = await started(host)
            for _ in range(4):
                process = await sandbox.start(["sleep", "1000"])
                for number in (0, -9, 65):
                    with pytest.raises(SandboxError, match="signal: is 1 to 64"):
                        await process.kill(number)
                await process.kill(9)
                ended = await asyncio.wait_for(process.wait(), PATIENCE_S)
                assert ended.signal == 9 or ended.exit_code == 137

    asyncio.run(run())


@pytest.mark.parametrize("backend", ["process", "namespace", "qemu"], indirect=True)
def test_a_terminal_reads_on_after_its_end_of_file_key_and_has_no_size_that_none_can_have(
    backend, hosting, started, tmp_path
):
    async def run():
        async with hosting(backend, tmp_path) as host:
            sandbox = await started(host)
            with pytest.raises(SandboxError, match="rows and columns are 0 to 65535"):
                await sandbox.start(["sh"], terminal=(24, 70_000))
            shell = await sandbox.start(["sh"], terminal=(24, 80))
            with pytest.raises(SandboxError, match="rows and columns are 0 to 65535"):
                await shell.resize(24, 70_000)
            output = shell.output()

            async def until(text):
                heard = b""
                async with asyncio.timeout(PATIENCE_S):
                    while text not in heard:
                        heard += (await anext(output))[1]

            await shell.write(b"stty -echo; echo re''ady; cat; echo af''ter\n")
            await until(b"ready")  # before that its keys mean other things to the shell
            await shell.write(b"line\n")
            await until(b"line\r\n")
            await shell.close_stdin()
            await until(b"after")
            await shell.write(b"exit 3\n")
            assert (await asyncio.wait_for(shell.wait(), PATIENCE_S)).exit_code == 3
            await output.aclose()

    asyncio.run(run())
