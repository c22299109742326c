import pytest
from e2b.envd.filesystem import filesystem_pb
from e2b.envd.process import process_pb
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from triax.sandbox.server.messages import (
    FILESYSTEM,
    FILESYSTEM_ENUMS,
    PROCESS,
    PROCESS_ENUMS,
    describe,
    message,
    message_class,
)


def fields(file):
    """Everything that decides what goes over the wire, by message."""

    def walk(messages, prefix=""):
        for one in messages:
            yield (
                prefix + one.name,
                [
                    (f.name, f.number, f.type, f.label, f.type_name, f.proto3_optional, f.HasField("oneof_index"))
                    for f in one.field
                ],
                [choice.name for choice in one.oneof_decl],
            )
            yield from walk(one.nested_type, f"{prefix}{one.name}.")

    return sorted(walk(file.message_type)), sorted(
        (enum.name, sorted((value.name, value.number) for value in enum.value)) for enum in file.enum_type
    )


@pytest.mark.parametrize(
    ("stock", "package", "table", "enums"),
    [
        (process_pb, "process", PROCESS, PROCESS_ENUMS),
        (filesystem_pb, "filesystem", FILESYSTEM, FILESYSTEM_ENUMS),
    ],
)
def test_our_tables_say_what_the_stock_client_was_built_from(stock, package, table, enums):
    theirs = FileDescriptorProto.FromString(stock.desc().proto.to_binary())
    assert fields(describe(package, table, enums)) == fields(theirs)


def test_a_field_called_name_can_be_set():
    assert message("filesystem.EntryInfo", name="a").name == "a"


def test_bytes_survive_the_binary_form():
    sent = message("process.ProcessInput", stdin=bytes(range(256))).SerializeToString()
    read = message_class("process.ProcessInput")()
    read.ParseFromString(sent)
    assert read.WhichOneof("input") == "stdin"
    assert read.stdin == bytes(range(256))
