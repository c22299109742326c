"""The filter of system calls, interpreted as the kernel does."""

import errno
import struct

import pytest

from triax.sandbox.backend.seccomp import ALLOW, CLONE_NEW, KILL, NUMBERS, REFUSE, program

STEP = struct.Struct("<HBBI")


def verdict(filter, number, architecture, *arguments):
    """Run a classic BPF program over one call, as `struct seccomp_data` lays it out."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *(*arguments, *[0] * (6 - len(arguments))))
    steps = [STEP.unpack_from(filter, at) for at in range(0, len(filter), STEP.size)]
    held, at = 0, 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == 0x06:
            return value
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif code in (0x15, 0x35, 0x45):
            hit = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            at += yes if hit else no
        else:
            raise AssertionError(f"step {code:#x} is not interpreted here")


EPERM, ENOSYS = REFUSE | errno.EPERM, REFUSE | errno.ENOSYS


@pytest.mark.parametrize("machine", list(NUMBERS))
def test_calls_that_reach_into_the_kernel_are_refused_and_no_others(machine):
    numbers, filter = NUMBERS[machine], program(machine)
    assert filter is not None
    refused = set(numbers.refused) | {428, 429, 430, 431, 432, 433, 442}
    unknown = {425, 426, 427, 435}
    for number in range(512):
        wanted = EPERM if number in refused else ENOSYS if number in unknown else ALLOW
        assert verdict(filter, number, numbers.architecture) == wanted, number
    assert verdict(filter, 0, numbers.architecture ^ 1) == KILL


@pytest.mark.parametrize("machine", list(NUMBERS))
def test_no_new_namespace_is_made_by_either_call(machine):
    numbers, filter = NUMBERS[machine], program(machine)
    for number in (numbers.clone, numbers.unshare):
        for bit in range(32):
            wanted = EPERM if CLONE_NEW >> bit & 1 else ALLOW
            assert verdict(filter, number, numbers.architecture, 1 << bit) == wanted, (number, bit)
        assert verdict(filter, number, numbers.architecture, 0x10000000 | 0x11) == EPERM
        assert verdict(filter, number, numbers.architecture, 0, CLONE_NEW) == ALLOW, "only the first argument counts"
    assert CLONE_NEW == 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000


def test_the_x32_face_of_every_call_is_refused():
    numbers, filter = NUMBERS["x86_64"], program("x86_64")
    for number in (0, 1, 56, 59, 165, 511, 520, 547):
        assert verdict(filter, 0x40000000 | number, numbers.architecture) == EPERM, number
    for number in (0x40000000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF):
        assert verdict(filter, number, numbers.architecture) == EPERM
    assert verdict(filter, 0x3FFFFFFF, numbers.architecture) == ALLOW
    arm = NUMBERS["aarch64"]
    assert verdict(program("aarch64"), 0, arm.architecture) == ALLOW


def test_a_processor_whose_numbers_are_not_known_has_no_filter():
    assert program("riscv64") is None
