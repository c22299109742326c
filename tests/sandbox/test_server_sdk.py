"""The stock `e2b` SDK, pointed at our server."""

import asyncio
import io
import time

import httpx
import pytest
from e2b import (
    AsyncSandbox,
    AuthenticationException,
    CommandExitException,
    FileNotFoundException,
    FileType,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    SandboxNotFoundException,
    SandboxQuery,
    SandboxState,
    TimeoutException,
)

web = httpx.Client(timeout=120, limits=httpx.Limits(max_keepalive_connections=0))


def until(look):
    deadline = time.monotonic() + 120  # it ends what hangs, and claims no speed
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


@pytest.fixture
def sandbox(server):
    made = Sandbox.create(timeout=120, **server.options)
    yield made
    made.kill()


def test_a_sandbox_is_made_found_listed_and_ended(server):
    sandbox = Sandbox.create(metadata={"task": "a b&c"}, timeout=77, **server.options)
    info = sandbox.get_info()
    assert info.state == SandboxState.RUNNING
    assert info.metadata == {"task": "a b&c"}
    assert 70 < (info.end_at - info.started_at).total_seconds() < 200
    query = SandboxQuery(metadata={"task": "a b&c"})
    assert [one.sandbox_id for one in Sandbox.list(query, **server.options).next_items()] == [sandbox.sandbox_id]
    assert Sandbox.list(SandboxQuery(metadata={"task": "a"}), **server.options).next_items() == []
    assert sandbox.kill()
    assert not sandbox.kill()
    assert not sandbox.is_running()


def test_lists_come_in_pages(server):
    made = [Sandbox.create(metadata={"page": "1"}, **server.options) for _ in range(5)]
    pages = Sandbox.list(SandboxQuery(metadata={"page": "1"}), limit=2, order="asc", **server.options)
    seen = []
    while pages.has_next:
        seen.append([one.sandbox_id for one in pages.next_items()])
    assert [len(page) for page in seen] == [2, 2, 1]
    assert [id for page in seen for id in page] == [one.sandbox_id for one in made]
    for one in made:
        one.kill()


def test_a_command_tells_what_it_wrote_and_how_it_ended(sandbox):
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)
    with pytest.raises(CommandExitException) as failed:
        sandbox.commands.run("echo before; exit 3")
    assert failed.value.exit_code == 3
    assert failed.value.stdout == "before\n"


def test_output_comes_as_it_is_written(sandbox):
    seen = []

    def hear(text):
        seen.append(text)
        sandbox.files.write(f"heard{len(seen)}", "")

    patient = "for i in 1 2 3; do echo $i; until [ -e heard$i ]; do sleep 0.02; done; done"
    sandbox.commands.run(patient, on_stdout=hear, timeout=120)
    assert seen == ["1\n", "2\n", "3\n"]


def test_a_command_has_the_variables_and_the_folder_it_was_given(server):
    sandbox = Sandbox.create(envs={"WHERE": "sandbox", "BOTH": "sandbox"}, **server.options)
    sandbox.files.make_dir("sub")
    told = sandbox.commands.run('echo "$WHERE $BOTH"; basename "$PWD"', envs={"BOTH": "command"}, cwd="sub")
    assert told.stdout == "sandbox command\nsub\n"
    sandbox.kill()


def test_a_command_in_the_background_reads_what_it_is_sent(sandbox):
    handle = sandbox.commands.run("cat; echo done", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "one\n")
    sandbox.commands.send_stdin(handle.pid, "two\n")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout == "one\ntwo\ndone\n"


def test_a_command_without_input_meets_its_end_at_once(sandbox):
    assert sandbox.commands.run("cat; echo $?", timeout=60).stdout == "0\n"


def test_running_commands_are_listed_and_killed(sandbox):
    handle = sandbox.commands.run("sleep 60 & sleep 60", background=True)
    assert handle.pid in [one.pid for one in sandbox.commands.list()]
    assert handle.kill()
    with pytest.raises(CommandExitException) as ended:
        handle.wait()
    assert ended.value.error == "signal: killed"
    assert not sandbox.commands.kill(handle.pid)
    assert handle.pid not in [one.pid for one in sandbox.commands.list()]


def test_a_command_can_be_left_and_met_again(sandbox):
    handle = sandbox.commands.run("until [ -e met ]; do sleep 0.02; done; echo late", background=True)
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid)
    sandbox.files.write("met", "")
    assert again.wait().stdout == "late\n"


def test_a_command_over_its_limit_is_ended_alone(sandbox):
    sandbox.files.write("kept", "20 minutes of set-up")
    with pytest.raises(TimeoutException):
        sandbox.commands.run("sleep 1000", timeout=0.5)
    until(lambda: not sandbox.commands.list())
    assert sandbox.files.read("kept") == "20 minutes of set-up"


def test_a_terminal_has_a_size_that_can_change(server):
    async def talk():
        sandbox = await AsyncSandbox.create(**server.options)
        told = bytearray()
        terminal = await sandbox.pty.create(PtySize(rows=31, cols=97), on_data=lambda data: told.extend(data))
        await sandbox.pty.send_stdin(terminal.pid, b"stty size\n")
        while b"31 97" not in told:
            await asyncio.sleep(0.02)
        await sandbox.pty.resize(terminal.pid, PtySize(rows=11, cols=44))
        await sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 0\n")
        await terminal.wait()
        await sandbox.kill()
        return bytes(told)

    assert b"11 44" in asyncio.run(asyncio.wait_for(talk(), 200))


def test_input_can_be_streamed_in_order(server):
    async def talk():
        sandbox = await AsyncSandbox.create(**server.options)
        handle = await sandbox.commands.run("cat", background=True, stdin=True)
        async with sandbox.commands.stream_input(handle.pid) as stream:
            for number in range(50):
                await stream.send(f"{number} ")
        await handle.close_stdin()
        result = await handle.wait()
        await sandbox.kill()
        return result.stdout

    assert asyncio.run(asyncio.wait_for(talk(), 200)) == "".join(f"{number} " for number in range(50))


def test_files_are_written_read_and_described(sandbox):
    written = sandbox.files.write("deep/in/note.txt", "grüße")
    assert written.name == "note.txt"
    assert written.path.endswith("/deep/in/note.txt")
    assert sandbox.files.read("deep/in/note.txt") == "grüße"
    info = sandbox.files.get_info("deep/in/note.txt")
    assert (info.type, info.size, info.permissions) == (FileType.FILE, len("grüße".encode()), "-rw-r--r--")
    sandbox.commands.run("ln -s note.txt deep/in/link")
    link = sandbox.files.get_info("deep/in/link")
    assert (link.type, link.symlink_target) == (FileType.SYMLINK, "note.txt")


@pytest.mark.parametrize("how", [{}, {"use_octet_stream": True}, {"gzip": True}])
def test_bytes_survive_every_way_to_send_them(sandbox, how):
    data = bytes(range(256)) * 9000
    sandbox.files.write("data", data, **how)
    assert sandbox.files.read("data", format="bytes") == data
    sandbox.files.write("data", io.BytesIO(data[::-1]), **how)
    assert b"".join(sandbox.files.read("data", format="stream")) == data[::-1]


def test_many_files_go_in_one_request(sandbox):
    written = sandbox.files.write_files([{"path": f"many/{n}", "data": str(n)} for n in range(7)])
    assert [one.name for one in written] == [str(n) for n in range(7)]
    assert sorted(one.name for one in sandbox.files.list("many")) == [str(n) for n in range(7)]


def test_folders_are_made_once_listed_deeply_moved_and_removed(sandbox):
    assert sandbox.files.make_dir("top/mid")
    assert not sandbox.files.make_dir("top/mid")
    sandbox.files.write("top/mid/leaf", "x")
    assert [one.name for one in sandbox.files.list("top")] == ["mid"]
    assert [one.name for one in sandbox.files.list("top", depth=2)] == ["mid", "leaf"]
    assert sandbox.files.rename("top/mid/leaf", "top/moved").name == "moved"
    assert not sandbox.files.exists("top/mid/leaf")
    sandbox.files.remove("top")
    assert not sandbox.files.exists("top")


def test_f32_a_name_that_is_no_text_is_escaped_and_the_others_are_listed_with_it(sandbox):
    sandbox.commands.run("mkdir odd; cd odd; : > plain; : > $(printf 'b\\377d'); ln -s $(printf '\\376') link; : > é")
    listed = {entry.name: entry for entry in sandbox.files.list("odd")}
    assert set(listed) == {"plain", "b\\xffd", "link", "é"}
    assert listed["b\\xffd"].path.endswith("/odd/b\\xffd")
    assert listed["link"].symlink_target == "\\xfe"
    watch = sandbox.files.watch_dir("odd", include_entry=True)
    sandbox.commands.run("cd odd; : > $(printf '\\200'); rm $(printf 'b\\377d')")
    seen = set()
    until(lambda: (seen.update(event.name for event in watch.get_new_events()), {"\\x80", "b\\xffd"} <= seen)[1])
    watch.stop()
    sandbox.files.remove("odd")
    assert not sandbox.files.exists("odd")


def test_changes_below_a_watched_folder_are_told(server):
    async def watch():
        sandbox = await AsyncSandbox.create(**server.options)
        await sandbox.files.make_dir("seen/below")
        events = []
        handle = await sandbox.files.watch_dir("seen", on_event=events.append, recursive=True, include_entry=True)
        await sandbox.files.write("seen/below/new", "abc")
        while not events:
            await asyncio.sleep(0.05)
        await sandbox.files.remove("seen/below/new")
        while events[-1].type.value != "remove":
            await asyncio.sleep(0.05)
        await handle.stop()
        await sandbox.kill()
        return events

    events = asyncio.run(asyncio.wait_for(watch(), 200))
    assert [(event.name, event.type.value) for event in events] == [
        ("below/new", "create"),
        ("below/new", "write"),
        ("below/new", "remove"),
    ]
    assert events[0].entry.size == 3


def test_a_watch_can_be_asked_for_news(sandbox):
    sandbox.files.make_dir("polled")
    watch = sandbox.files.watch_dir("polled")
    sandbox.files.write("polled/a", "1")
    assert until(watch.get_new_events)[0].name == "a"
    watch.stop()


def test_a_signed_address_opens_one_file_until_it_expires(sandbox):
    sandbox.files.write("public", "for all")
    address = sandbox.download_url("public", use_signature_expiration=60)
    assert web.get(address).text == "for all"
    assert web.get(address.replace("path=public", "path=other")).status_code == 401
    assert web.get(sandbox.download_url("public", use_signature_expiration=-5)).status_code == 401
    upload = web.post(sandbox.upload_url("sent"), files={"file": ("sent", b"by form")})
    assert upload.status_code == 200
    assert sandbox.files.read("sent") == "by form"


def test_a_paused_sandbox_comes_back_by_its_id(server):
    sandbox = Sandbox.create(timeout=100, metadata={"kept": "yes"}, **server.options)
    for cycle in range(5):
        sandbox.files.write(f"cycle-{cycle}", str(cycle))
        assert sandbox.pause()
        assert not sandbox.pause()
        assert not sandbox.is_running()
        assert sandbox.get_info().state == SandboxState.PAUSED
        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=100, **server.options)
        assert sandbox.is_running()
    assert [sandbox.files.read(f"cycle-{cycle}") for cycle in range(5)] == list("01234")
    sandbox.kill()


def test_connecting_only_prolongs_a_life(server):
    sandbox = Sandbox.create(timeout=600, **server.options)
    before = sandbox.get_info().end_at
    sandbox.connect(timeout=60)
    assert sandbox.get_info().end_at == before
    sandbox.connect(timeout=1000)
    assert (sandbox.get_info().end_at - before).total_seconds() > 300
    sandbox.set_timeout(30)
    assert (before - sandbox.get_info().end_at).total_seconds() > 300
    sandbox.kill()


def test_a_sandbox_whose_time_is_over_is_put_away_with_its_files(server):
    sandbox = Sandbox.create(timeout=600, **server.options)
    sandbox.files.write("kept", "here")
    sandbox.set_timeout(1)
    until(lambda: sandbox.get_info().state == SandboxState.PAUSED)
    assert Sandbox.connect(sandbox.sandbox_id, timeout=60, **server.options).files.read("kept") == "here"
    sandbox.kill()


def test_a_sandbox_may_end_with_its_time_if_its_client_says_so(server):
    sandbox = Sandbox.create(timeout=1, lifecycle={"on_timeout": "kill"}, **server.options)
    until(lambda: not sandbox.is_running())
    with pytest.raises(SandboxNotFoundException):
        sandbox.get_info()


def test_traffic_wakes_a_sandbox_that_asked_for_it(server):
    sandbox = Sandbox.create(lifecycle={"on_timeout": "pause", "auto_resume": True}, **server.options)
    sandbox.files.write("a", "1")
    sandbox.pause()
    assert sandbox.files.read("a") == "1"
    assert sandbox.get_info().state == SandboxState.RUNNING
    sandbox.kill()


def test_copies_have_the_files_and_go_their_own_ways(server):
    source = Sandbox.create(timeout=100, **server.options)
    source.files.write("shared", "before")
    copies = source.fork(count=3, timeout=60)
    source.files.write("shared", "after")
    assert {copy.files.read("shared") for copy in copies} == {"before"}
    assert len({source.sandbox_id, *(copy.sandbox_id for copy in copies)}) == 4
    copies[0].files.write("own", "x")
    assert not copies[1].files.exists("own")
    grandchild = copies[0].fork()[0]
    assert grandchild.files.read("own") == "x"
    for one in [source, *copies, grandchild]:
        one.kill()


def test_a_snapshot_starts_new_sandboxes_after_its_source_is_gone(server):
    source = Sandbox.create(**server.options)
    source.files.write("model", "weights")
    taken = source.create_snapshot("checkpoint-1")
    source.kill()
    listed = Sandbox.list_snapshots(**server.options).next_items()
    assert [(one.snapshot_id, one.names) for one in listed] == [(taken.snapshot_id, ["checkpoint-1"])]
    for name in ("checkpoint-1", "checkpoint-1:latest", taken.snapshot_id):
        made = Sandbox.create(name, **server.options)
        assert made.files.read("model") == "weights"
        made.kill()
    assert Sandbox.delete_snapshot(taken.snapshot_id, **server.options)
    assert not Sandbox.delete_snapshot(taken.snapshot_id, **server.options)
    with pytest.raises(SandboxException, match="404"):
        Sandbox.create("checkpoint-1", **server.options)


def test_what_a_sandbox_uses_is_told(sandbox):
    (now,) = sandbox.get_metrics()
    assert now.mem_total == 128 * 2**20
    assert now.cpu_count == 1


def test_unknown_things_are_said_to_be_unknown(server, sandbox):
    with pytest.raises(SandboxNotFoundException):
        Sandbox.connect("nobody", **server.options)
    with pytest.raises(SandboxNotFoundException):
        Sandbox.get_info("no-such-sandbox", **server.options)
    assert not Sandbox.kill("nobody", **server.options)
    with pytest.raises(FileNotFoundException):
        sandbox.files.read("no/such/file")
    with pytest.raises(NotFoundException):
        sandbox.commands.send_stdin(999_999, "x")
    with pytest.raises(FileNotFoundException):
        sandbox.files.list("no/such/folder")


def test_what_no_system_takes_is_refused_as_the_callers_mistake(sandbox):
    with pytest.raises(InvalidArgumentException, match="Linux takes at most"):
        sandbox.commands.run("echo " + "x" * 2**20)
    with pytest.raises(InvalidArgumentException, match="NUL"):
        sandbox.commands.run("echo \0")
    with pytest.raises(InvalidArgumentException, match="NUL"):
        sandbox.files.write("a\0b", "x")
    with pytest.raises(InvalidArgumentException, match="folder"):
        sandbox.files.read(".")
    with pytest.raises(InvalidArgumentException, match="X-Metadata"):
        sandbox.files.write("a", "x", metadata={"who": "me"})
    assert sandbox.commands.run("echo still here").stdout == "still here\n"


def test_another_sandboxes_token_opens_nothing(server, sandbox):
    other = Sandbox.create(**server.options)
    thief = {"E2b-Sandbox-Id": sandbox.sandbox_id, "X-Access-Token": other._envd_access_token}
    answer = web.get(f"{server.url}/files", params={"path": "a"}, headers=thief)
    assert answer.status_code == 401
    other.kill()


def test_a_key_is_asked_for_where_the_server_has_some(serve, tmp_path):
    from triax.config.sandbox import Server
    from triax.sandbox.backend.process import ProcessBackend

    (tmp_path / "keys").write_text("# ours\nopen sesame\n")
    settings = Server(folder=tmp_path / "s", port=0, backend="process", unsafe=True, keys=tmp_path / "keys")
    with serve(settings, ProcessBackend(tmp_path / "m", unsafe=True)) as guarded:
        with pytest.raises(AuthenticationException):
            Sandbox.create(**guarded.options)
        Sandbox.create(**guarded.options | {"api_key": "open sesame"}).kill()


def test_many_clients_share_one_server(server):
    async def one(number):
        async with await AsyncSandbox.create(**server.options) as sandbox:
            await sandbox.files.write("n", str(number))
            result = await sandbox.commands.run("cat n; sleep 0.1; echo; echo $((6 * 7))")
            return result.stdout

    async def all_of_them():
        return await asyncio.gather(*(one(number) for number in range(12)))

    assert asyncio.run(asyncio.wait_for(all_of_them(), 200)) == [f"{number}\n42\n" for number in range(12)]
