"""Every error number of Linux, and whose fault it is."""

import asyncio
import errno
import os

import pytest

from triax.errors import SandboxError
from triax.sandbox.errnos import FAULTS, REFUSED, exit_code, file_refusal, folder_refusal, start_refusal

NO_FILES = {
    # of networks, keys, terminals' line disciplines and the like: no file gives them
    *range(errno.ECHRNG, errno.EBADSLT + 1), errno.EBFONT, errno.ENOSTR, errno.ETIME, errno.ENOSR, errno.ENONET,
    errno.ENOPKG, errno.EREMOTE, errno.ENOLINK, errno.EADV, errno.ESRMNT, errno.ECOMM, errno.EPROTO, errno.EMULTIHOP,
    errno.EDOTDOT, errno.EBADMSG, errno.ENOTUNIQ, errno.EBADFD, errno.EREMCHG, errno.ELIBACC, errno.ELIBBAD,
    errno.ELIBSCN, errno.ELIBMAX, errno.ELIBEXEC, errno.ENOTSOCK, errno.EDESTADDRREQ, errno.EMSGSIZE,
    errno.EPROTOTYPE, errno.ENOPROTOOPT, errno.EPROTONOSUPPORT, errno.ESOCKTNOSUPPORT, errno.EPFNOSUPPORT,
    errno.EAFNOSUPPORT, errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET,
    errno.ECONNABORTED, errno.ECONNRESET, errno.ENOBUFS, errno.EISCONN, errno.ETOOMANYREFS, errno.ECONNREFUSED,
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.EALREADY, errno.EINPROGRESS, errno.ENOTNAM, errno.ENAVAIL,
    errno.EISNAM, errno.ENOKEY, errno.EKEYEXPIRED, errno.EKEYREVOKED, errno.EKEYREJECTED, errno.ENOMSG, errno.EIDRM,
}  # fmt: skip


def test_f33_every_error_number_is_the_callers_or_the_sandboxs_or_of_no_file():
    every = set(errno.errorcode) - {errno.ENOMEM}
    sets = set(REFUSED), set(FAULTS), NO_FILES
    assert every - set().union(*sets) == set(), "not classified"
    assert sum(len(each & every) for each in sets) == len(every), "classified twice"


@pytest.mark.parametrize("code", sorted(errno.errorcode), ids=errno.errorcode.get)
def test_f33_a_file_that_cannot_be_had_is_told_by_whose_fault_it_is(code):
    told = file_refusal(OSError(code, os.strerror(code)), "a")
    kind = "refused" if code in REFUSED else "out_of_memory" if code == errno.ENOMEM else "infrastructure"
    assert told.kind == kind
    assert str(told).startswith("file 'a': ")
    assert (400 <= told.status < 500) == (kind == "refused" and code not in (errno.ENOSPC, errno.EDQUOT))


def test_f33_what_kept_a_command_from_starting_is_told_by_whose_fault_it_is():
    assert [exit_code(code) for code in (errno.ENOENT, errno.ENOTDIR)] == [127, 127]
    assert {exit_code(code) for code in (errno.EACCES, errno.ENOEXEC, errno.E2BIG, errno.ETXTBSY)} == {126}
    statuses = {errno.ENOENT: 404, errno.ENOTDIR: 400, errno.EACCES: 403, errno.ELOOP: 400, errno.ENAMETOOLONG: 400}
    for code, status in statuses.items():
        told = folder_refusal(code, "x")
        assert (told.kind, told.status) == ("refused", status)
        assert "cwd 'x'" in str(told)
    assert folder_refusal(errno.EIO, "x").kind == "infrastructure"
    assert {start_refusal(code).status for code in (errno.EAGAIN, errno.EMFILE, errno.ENFILE)} == {429}
    assert start_refusal(errno.ENOMEM).kind == "out_of_memory"
    assert start_refusal(errno.EINVAL).kind == "infrastructure"


async def refused(deed, status):
    with pytest.raises(SandboxError) as caught:
        await deed
    assert (caught.value.kind, caught.value.status) == ("refused", status), caught.value


def test_f33_what_a_command_or_its_caller_did_is_no_failed_sandbox(light, hosting, started, until, tmp_path):
    async def run():
        async with hosting(light, tmp_path) as host:
            sandbox = await started(host)
            shell = "/bin/sh" if light == "process" else "$(readlink -f /bin/sh)"
            await sandbox.exec(f"mkdir -p a/b full; : > full/x; cp {shell} copy; ln -s loop loop")
            process = await sandbox.start(["./copy", "-c", "read x"])
            if light != "gvisor":  # its files lie on a disk that the host writes to, whoever runs from it

                async def busy():
                    return (await sandbox.exec(": >> copy")).exit_code != 0

                await until(busy)
                await refused(sandbox.write("copy", b"x"), 409)
            await process.kill()
            await process.wait()
            await refused(sandbox.rename("a", "a/b/c"), 400)
            await refused(sandbox.rename("a", "full"), 409)
            await refused(sandbox.read("a"), 400)
            await refused(sandbox.read("loop"), 400)
            await refused(sandbox.read("nothing"), 404)
            await refused(sandbox.read("full/x/y"), 400)
            await refused(sandbox.write("n" * 300, b""), 400)
            await refused(sandbox.read("full/x", 2**70), 400)
            await refused(sandbox.read("lone \ud800"), 400)
            await refused(sandbox.exec("echo \ud800"), 400)
            await refused(sandbox.exec("true", cwd="full/x"), 400 if light != "process" else 404)
            assert sandbox.status == "running"
            assert (await sandbox.exec("echo fine")).stdout == b"fine\n"

    asyncio.run(run())
