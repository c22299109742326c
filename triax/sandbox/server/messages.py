"""Messages of a sandbox's data plane: what a client and `envd` say to each other about processes and files.

The two services are public protocol buffers; the tables below give their fields, from which the message classes are
built when this module loads. A field reads `[label] type name number`; `name:` before it puts it into that one-of.

Source: e2b-dev/infra, packages/envd/spec (process.proto, filesystem.proto).
"""

import re
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, timestamp_pb2
from google.protobuf.message import Message

PROCESS: dict[str, tuple[str, ...]] = {
    "PTY": ("PTY.Size size 1",),
    "PTY.Size": ("uint32 cols 1", "uint32 rows 2"),
    "ProcessConfig": ("string cmd 1", "repeated string args 2", "map string envs 3", "optional string cwd 4"),
    "ListRequest": (),
    "ProcessInfo": ("ProcessConfig config 1", "uint32 pid 2", "optional string tag 3"),
    "ListResponse": ("repeated ProcessInfo processes 1",),
    "StartRequest": ("ProcessConfig process 1", "optional PTY pty 2", "optional string tag 3", "optional bool stdin 4"),
    "UpdateRequest": ("ProcessSelector process 1", "optional PTY pty 2"),
    "UpdateResponse": (),
    "ProcessEvent": (
        "event: ProcessEvent.StartEvent start 1",
        "event: ProcessEvent.DataEvent data 2",
        "event: ProcessEvent.EndEvent end 3",
        "event: ProcessEvent.KeepAlive keepalive 4",
    ),
    "ProcessEvent.StartEvent": ("uint32 pid 1",),
    "ProcessEvent.DataEvent": ("output: bytes stdout 1", "output: bytes stderr 2", "output: bytes pty 3"),
    "ProcessEvent.EndEvent": ("sint32 exit_code 1", "bool exited 2", "string status 3", "optional string error 4"),
    "ProcessEvent.KeepAlive": (),
    "StartResponse": ("ProcessEvent event 1",),
    "ConnectResponse": ("ProcessEvent event 1",),
    "SendInputRequest": ("ProcessSelector process 1", "ProcessInput input 2"),
    "SendInputResponse": (),
    "ProcessInput": ("input: bytes stdin 1", "input: bytes pty 2"),
    "StreamInputRequest": (
        "event: StreamInputRequest.StartEvent start 1",
        "event: StreamInputRequest.DataEvent data 2",
        "event: StreamInputRequest.KeepAlive keepalive 3",
    ),
    "StreamInputRequest.StartEvent": ("ProcessSelector process 1",),
    "StreamInputRequest.DataEvent": ("ProcessInput input 2",),
    "StreamInputRequest.KeepAlive": (),
    "StreamInputResponse": (),
    "SendSignalRequest": ("ProcessSelector process 1", "Signal signal 2"),
    "SendSignalResponse": (),
    "CloseStdinRequest": ("ProcessSelector process 1",),
    "CloseStdinResponse": (),
    "ConnectRequest": ("ProcessSelector process 1",),
    "ProcessSelector": ("selector: uint32 pid 1", "selector: string tag 2"),
}
PROCESS_ENUMS = {"Signal": {"SIGNAL_UNSPECIFIED": 0, "SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9}}

FILESYSTEM: dict[str, tuple[str, ...]] = {
    "MoveRequest": ("string source 1", "string destination 2"),
    "MoveResponse": ("EntryInfo entry 1",),
    "MakeDirRequest": ("string path 1",),
    "MakeDirResponse": ("EntryInfo entry 1",),
    "RemoveRequest": ("string path 1",),
    "RemoveResponse": (),
    "StatRequest": ("string path 1",),
    "StatResponse": ("EntryInfo entry 1",),
    "EntryInfo": (
        "string name 1",
        "FileType type 2",
        "string path 3",
        "int64 size 4",
        "uint32 mode 5",
        "string permissions 6",
        "string owner 7",
        "string group 8",
        "google.protobuf.Timestamp modified_time 9",
        "optional string symlink_target 10",
        "map string metadata 11",
        "bool is_symlink 12",
    ),
    "ListDirRequest": ("string path 1", "uint32 depth 2"),
    "ListDirResponse": ("repeated EntryInfo entries 1",),
    "WatchDirRequest": ("string path 1", "bool recursive 2", "bool include_entry 3", "bool allow_network_mounts 4"),
    "FilesystemEvent": ("string name 1", "EventType type 2", "optional EntryInfo entry 3"),
    "WatchDirResponse": (
        "event: WatchDirResponse.StartEvent start 1",
        "event: FilesystemEvent filesystem 2",
        "event: WatchDirResponse.KeepAlive keepalive 3",
    ),
    "WatchDirResponse.StartEvent": (),
    "WatchDirResponse.KeepAlive": (),
    "CreateWatcherRequest": (
        "string path 1",
        "bool recursive 2",
        "bool include_entry 3",
        "bool allow_network_mounts 4",
    ),
    "CreateWatcherResponse": ("string watcher_id 1",),
    "GetWatcherEventsRequest": ("string watcher_id 1",),
    "GetWatcherEventsResponse": ("repeated FilesystemEvent events 1",),
    "RemoveWatcherRequest": ("string watcher_id 1",),
    "RemoveWatcherResponse": (),
}
FILESYSTEM_ENUMS = {
    "FileType": {"FILE_TYPE_UNSPECIFIED": 0, "FILE_TYPE_FILE": 1, "FILE_TYPE_DIRECTORY": 2, "FILE_TYPE_SYMLINK": 3},
    "EventType": {
        "EVENT_TYPE_UNSPECIFIED": 0,
        "EVENT_TYPE_CREATE": 1,
        "EVENT_TYPE_WRITE": 2,
        "EVENT_TYPE_REMOVE": 3,
        "EVENT_TYPE_RENAME": 4,
        "EVENT_TYPE_CHMOD": 5,
    },
}

_FIELD = re.compile(r"(?:(\w+): )?(?:(repeated|optional|map) )?([\w.]+) (\w+) (\d+)")
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "uint32": _Field.TYPE_UINT32,
    "sint32": _Field.TYPE_SINT32,
    "int64": _Field.TYPE_INT64,
}


def describe(
    package: str, messages: dict[str, tuple[str, ...]], enums: dict[str, dict[str, int]]
) -> descriptor_pb2.FileDescriptorProto:
    """Return the descriptor of a proto3 file from its table of fields.

    Args:
        package: Name of the package, also the folder and stem of the file.
        messages: Fields of each message; `A.B` is declared inside `A`.
        enums: Numbers of each enumeration's values.
    """
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}/{package}.proto", package=package, syntax="proto3")
    file.dependency.append("google/protobuf/timestamp.proto")
    for name, values in enums.items():
        enum = file.enum_type.add(name=name)
        for value, number in values.items():
            enum.value.add(name=value, number=number)
    declared: dict[str, descriptor_pb2.DescriptorProto] = {}
    for name in messages:
        outer, _, inner = name.rpartition(".")
        declared[name] = declared[outer].nested_type.add(name=inner) if outer else file.message_type.add(name=name)
    for name, fields in messages.items():
        for text in fields:
            _declare(declared[name], f".{package}.{name}", text, package, enums)
    return file


def _declare(message: Any, full_name: str, text: str, package: str, enums: dict[str, dict[str, int]]) -> None:
    parsed = _FIELD.fullmatch(text)
    assert parsed, text
    choice, label, kind, name, number = parsed.groups()
    field = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
    if label in ("repeated", "map"):
        field.label = _Field.LABEL_REPEATED
    if label == "map":
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        entry.field.add(name="value", number=2, type=_SCALARS[kind], label=_Field.LABEL_OPTIONAL)
        field.type, field.type_name = _Field.TYPE_MESSAGE, f"{full_name}.{entry.name}"
    elif kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type = _Field.TYPE_ENUM if kind in enums else _Field.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind.startswith("google.") else f".{package}.{kind}"
    if choice is None and label != "optional":
        return
    one_of = choice or f"_{name}"
    names = [declared.name for declared in message.oneof_decl]
    if one_of not in names:
        message.oneof_decl.add(name=one_of)
        names.append(one_of)
    field.oneof_index = names.index(one_of)
    field.proto3_optional = choice is None


def _classes() -> dict[str, type[Message]]:
    # a pool of our own: another library in this process may have registered the same two files
    pool = descriptor_pool.DescriptorPool()
    timestamp = descriptor_pb2.FileDescriptorProto()
    timestamp_pb2.DESCRIPTOR.CopyToProto(timestamp)
    pool.Add(timestamp)
    pool.Add(describe("process", PROCESS, PROCESS_ENUMS))
    pool.Add(describe("filesystem", FILESYSTEM, FILESYSTEM_ENUMS))
    return {
        f"{package}.{name}": message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for package, table in (("process", PROCESS), ("filesystem", FILESYSTEM))
        for name in table
    }


_CLASSES = _classes()


def message(kind: str, /, **fields: Any) -> Any:
    """Return a message of a type such as `process.StartResponse`, with these fields set."""
    return _CLASSES[kind](**fields)


def message_class(name: str) -> type[Message]:
    """Return the class of a message type, such as `filesystem.StatRequest`."""
    return _CLASSES[name]
