"""Bodies of files over plain HTTP: `GET /files` gives one, `POST /files` puts some."""

import contextlib
import posixpath
import re
import tempfile
import zlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import IO

from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from triax.sandbox.server.connect import Fault
from triax.sandbox.server.files import checked
from triax.sandbox.server.session import Session

_RANGE = re.compile(r"bytes=(\d{1,18})-(\d{1,18})?")
CHUNK_BYTES = 2**20
LARGEST_FILE_BYTES = 256 * 2**20
"""A file goes through this process's memory; larger ones are refused."""


async def download(request: Request, session: Session) -> Response:
    """Answer with the bytes of the file that `path` names, all or those of one range."""
    path = checked(request.query_params.get("path", ""))
    entry = await session.sandbox.stat(path)
    if entry.kind == "directory":
        raise Fault("invalid_argument", f"{path} is a folder; list it instead")
    begin, end = _range(request.headers.get("range"))
    first = await session.sandbox.read(path, begin, _piece(begin, end))

    async def rest() -> AsyncGenerator[bytes, None]:
        chunk, offset = first, begin
        while chunk:
            yield chunk
            offset += len(chunk)
            if len(chunk) < CHUNK_BYTES or offset == end:
                return
            chunk = await session.sandbox.read(path, offset, _piece(offset, end))

    status = 200 if begin == 0 and end is None else 206
    return StreamingResponse(rest(), status_code=status, media_type="application/octet-stream")


def _range(header: str | None) -> tuple[int, int | None]:
    """Return where a range begins and ends, the end left out; headers of other forms ask for everything."""
    found = _RANGE.fullmatch(header or "")
    if found is None:
        return 0, None
    begin, last = int(found[1]), found[2]
    if last and int(last) < begin:
        raise Fault("invalid_argument", f"range ends before it begins; found `{header}`")
    return begin, int(last) + 1 if last else None


def _piece(offset: int, end: int | None) -> int:
    return CHUNK_BYTES if end is None else min(CHUNK_BYTES, end - offset)


async def upload(request: Request, session: Session) -> Response:
    """Write the files of the body, one that is named by `path` or a form with a name each."""
    headers = request.headers
    if any(name.startswith("x-metadata-") for name in headers):
        raise Fault(
            "invalid_argument", "metadata of files is not kept here; found headers X-Metadata-*; leave them out"
        )
    kind = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    given = request.query_params.get("path")
    written = []
    if kind == "multipart/form-data":
        async with _form(request) as files:
            if len(files) > 1 and given is not None:
                raise Fault("invalid_argument", f"path names one file; found {len(files)} of them in the form")
            for file in files:
                written.append(await _write(session, given or file.filename or "", file.file))
    elif kind in ("application/octet-stream", ""):
        if given is None:
            raise Fault("invalid_argument", "path must name the file; found none")
        with tempfile.SpooledTemporaryFile(max_size=CHUNK_BYTES) as spool:
            await _receive(request, spool)
            written.append(await _write(session, given, spool))
    else:
        raise Fault("invalid_argument", f"body must be a form or application/octet-stream; found `{kind[:80]}`")
    return JSONResponse(written)


@asynccontextmanager
async def _form(request: Request) -> AsyncGenerator[list[UploadFile], None]:
    try:
        form = await request.form(max_files=1000, max_fields=0)
    except (HTTPException, MultiPartException) as problem:
        why = problem.detail if isinstance(problem, HTTPException) else problem.message
        raise Fault("invalid_argument", f"body is no form, or a name in it is too long: {why}") from None
    try:
        files = [file for _, file in form.multi_items() if isinstance(file, UploadFile)]
        if not files:
            raise Fault("invalid_argument", "the form holds no file")
        yield files
    finally:
        await form.close()


async def _receive(request: Request, spool: IO[bytes]) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding not in ("identity", "gzip"):
        raise Fault("invalid_argument", f"compression `{encoding[:40]}` is not known; use gzip or none")
    unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if encoding == "gzip" else None
    size = 0
    async for chunk in request.stream():
        while chunk:
            try:
                plain = unpack.decompress(chunk, CHUNK_BYTES) if unpack else chunk
            except zlib.error as problem:
                raise Fault("invalid_argument", f"body is no gzip: {problem}") from None
            chunk = unpack.unconsumed_tail if unpack else b""
            size += len(plain)
            _check_size(size)
            spool.write(plain)
    if unpack is not None and not unpack.eof:
        raise Fault("invalid_argument", "body ends in the middle of its gzip")


def _check_size(size: int) -> None:
    if size > LARGEST_FILE_BYTES:
        raise Fault("resource_exhausted", f"a file may have {LARGEST_FILE_BYTES} bytes here; found more; split it")


async def _write(session: Session, path: str, file: IO[bytes]) -> dict[str, str]:
    target, size = checked(path), file.seek(0, 2)
    _check_size(size)
    file.seek(0)
    async with session.writing if size > CHUNK_BYTES else contextlib.nullcontext():
        await session.sandbox.write(target, file.read())
    written = (await session.sandbox.stat(target)).path
    return {"name": posixpath.basename(written), "type": "file", "path": written}
