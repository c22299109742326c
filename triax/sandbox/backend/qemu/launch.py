"""The emulator's process: its command line, its connections and its end."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triax.errors import SandboxError
from triax.sandbox.backend.owned import LABEL
from triax.sandbox.backend.qemu.monitor import Monitor
from triax.sandbox.guest.channel import Channel

PROGRAM = "qemu-system-x86_64"
MACHINE = "microvm,pit=off,pic=off,rtc=on,isa-serial=on,acpi=on,ioapic2=off,memory-backend=ram,suppress-vmdesc=on"
TRANSLATED_MIB = 128  # of guest code; a bound for a busy guest's host memory. With 32 a start took half as long again
PROCESSOR = "Nehalem-v1,+arat"  # the least that today's wheels run on; its timer lets an idle guest sleep

# what the kernel does around every command for machines of many users; each is code that an emulator translates anew
PLAIN = (
    "psi=0",
    "transparent_hugepage=never",
    "cgroup_disable=cpuset,cpu,cpuacct,io,blkio,devices,freezer,net_cls,net_prio,perf_event,hugetlb,rdma,misc",
    "hardened_usercopy=off",
    "randomize_kstack_offset=off",
    "nowatchdog",
    "deferred_probe_timeout=0",
    "init_on_alloc=0",
    "rodata=off",
    "noreplace-smp",
)
# what a guest without devices, probes, keys and hardware bugs can leave out of its start; each costs emulated time
SKIPPED = (
    "cmos_init,add_rtc_cmos,add_pcspkr,i8042_init,vga_arb_device_init,hwrng_modinit,msr_init,cacheinfo_sysfs_init,"
    "pnpacpi_init,ged_driver_init,acpi_thermal_init,pcie_portdrv_init,nvme_core_init,nvme_init,cxl_core_init,"
    "cxl_port_driver_init,perf_event_sysfs_init,ksm_init,hugetlb_init,memory_tier_init,slab_sysfs_init,kcompactd_init,"
    "proc_kcore_init,init_kprobe_trace,init_blk_tracer,init_trace_printk_function_export,init_graph_tracefs,"
    "tracer_init_tracefs,trace_eval_init,ftrace_check_for_weak_functions,latency_fsnotify_init,btf_module_init,"
    "bpf_rstat_kfunc_init,bpf_key_sig_kfuncs_init,kfunc_init,bpf_prog_test_run_init,bpf_tcp_ca_kfunc_init,"
    "cubictcp_register,load_system_certificate_list,load_uefi_certs,digsig_init,init_ima,init_evm,init_encrypted,"
    "crypto_kdf108_init,crc_t10dif_mod_init,crc64_rocksoft_mod_init"
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a machine is made of; a snapshot only fits the same.

    Args:
        accelerator: `kvm`, or `tcg` where no guest boots on it.
        memory_mib: Its memory.
        cpus: Its processors.
        clock_khz: Rate of the time stamp counter that the guest was told.
        kernel: The kernel.
        initramfs: What the kernel unpacks first.
    """

    accelerator: str
    memory_mib: int
    cpus: int
    clock_khz: int
    kernel: Path
    initramfs: Path

    def arguments(self, memory: Path) -> list[str]:
        """Return the part of the command line that the guest can see."""
        accelerator = (
            "kvm"
            if self.accelerator == "kvm"
            else f"tcg,tb-size={TRANSLATED_MIB},thread={'multi' if self.cpus > 1 else 'single'}"
        )
        backing = f"size={self.memory_mib}M,mem-path={memory},share=off,prealloc=off,dump=off,merge=off"
        return [
            *("-M", MACHINE, "-accel", accelerator, "-m", str(self.memory_mib), "-smp", str(self.cpus)),
            *("-cpu", "host" if self.accelerator == "kvm" else PROCESSOR),
            *("-object", f"memory-backend-file,id=ram,{backing}"),
        ]

    def booting(self) -> list[str]:
        """Return the part that a guest's first start needs; one that goes on has it all in memory."""
        return ["-kernel", str(self.kernel), "-initrd", str(self.initramfs), "-append", self.words()]

    def words(self) -> str:
        """Return the kernel's command line."""
        # without `reboot=t` a guest that panics or reboots asks firmware that this machine does not have, for ever
        timing = f" tsc_early_khz={self.clock_khz} tsc=reliable no_timer_check lpj=4000000"
        return (
            "console=ttyS0 quiet panic=-1 reboot=t cryptomgr.notests mitigations=off lsm= audit=0 "
            f"{' '.join(PLAIN)} initcall_blacklist={SKIPPED}" + ("" if self.accelerator == "kvm" else timing)
        )


class Emulator:
    """A running emulator with its monitor and the channel to the agent; `await Emulator.start(...)` makes it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, console: Path | None) -> None:
        self.process = process
        self.log = log
        self.console = console
        self._monitor: Monitor | None = None
        self._channel: Channel | None = None

    @property
    def monitor(self) -> Monitor:
        """Its control connection."""
        assert self._monitor is not None
        return self._monitor

    @property
    def channel(self) -> Channel:
        """The channel to its agent."""
        assert self._channel is not None
        return self._channel

    @classmethod
    async def start(
        cls,
        hardware: Hardware,
        *,
        memory: Path,
        disk: dict[str, Any],
        folder: Path,
        label: str,
        channel: Channel,
        state: int | None = None,
        console: bool = False,
    ) -> "Emulator":
        """Start a process and connect to it.

        Args:
            hardware: What the guest sees.
            memory: File that its memory is mapped from.
            disk: Its disk, as the emulator wants it described.
            folder: Where its log lies.
            label: What marks it as ours.
            channel: Takes the connection to the agent.
            state: Descriptor from which it reads the state of its devices, to go on; none to boot.
            console: Whether to keep what the kernel prints; only while no command can write there.

        Raises:
            SandboxError: It did not start.
        """
        program = shutil.which(PROGRAM)
        if program is None:
            raise SandboxError(f"qemu: found no `{PROGRAM}`; run `apt-get install qemu-system-x86 qemu-utils`")
        ours_q, theirs_q = socket.socketpair()
        ours_c, theirs_c = socket.socketpair()
        log, printed = folder / "qemu.log", folder / "console.log" if console else None
        # a descriptor per connection instead of a path: nobody else can connect, and nothing is left behind
        command = [
            *(program, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", *hardware.arguments(memory)),
            *("-chardev", f"socket,id=monitor,fd={theirs_q.fileno()}", "-mon", "chardev=monitor,mode=control"),
            *("-global", "virtio-mmio.force-legacy=false", "-blockdev", json.dumps(disk)),
            *("-device", f"virtio-blk-device,drive={disk['node-name']}"),
            *("-device", "virtio-serial-device,max_ports=2"),
            *("-chardev", f"socket,id=agent,fd={theirs_c.fileno()}", "-device", "virtserialport,chardev=agent"),
            *(
                "-chardev",
                f"file,id=console,path={printed}" if printed else "null,id=console",
                "-serial",
                "chardev:console",
            ),
        ]
        kept = [theirs_q.fileno(), theirs_c.fileno()]
        if state is not None:
            command += ["-incoming", f"fd:{state}", "-global", "migration.send-configuration=off"]
            kept.append(state)
        else:
            command += hardware.booting()
        guard = shutil.which("setpriv")
        if guard is not None:
            command = [guard, "--pdeathsig", "KILL", "--", *command]
        try:
            with log.open("wb") as errors:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    pass_fds=kept,
                    cwd=folder,
                    start_new_session=True,
                    env={"PATH": os.defpath, "MALLOC_ARENA_MAX": "1", LABEL: label},
                )
        except OSError as problem:
            for end in (ours_q, ours_c):
                end.close()
            raise SandboxError(f"qemu: the host could not start it; {problem.strerror}") from None
        finally:
            theirs_q.close()
            theirs_c.close()
        emulator = cls(process, log, printed)
        try:
            ours_c.setblocking(False)
            await asyncio.get_running_loop().create_connection(lambda: channel, sock=ours_c)
            emulator._channel = channel
            emulator._monitor = await Monitor.open(ours_q)
        except BaseException as problem:
            await emulator.end()
            if isinstance(problem, SandboxError):
                raise SandboxError(f"{problem}; {emulator.last_words()}") from None
            raise
        return emulator

    async def runs(self, within_s: float = 30.0) -> None:
        """Wait until it took the state it was given and its processors run.

        Raises:
            SandboxError: It could not take it.
        """
        give_up = time.monotonic() + within_s
        while (await self.monitor.run("query-status"))["status"] != "running":
            if time.monotonic() > give_up:
                raise SandboxError(f"qemu: did not go on in {within_s:g} s; the host is overloaded")
            await asyncio.sleep(0.001)

    def last_words(self) -> str:
        """Return what the emulator and the kernel said last, for an error message."""
        said = []
        for name, path in (("it", self.log), ("the kernel", self.console)):
            with suppress(OSError):
                if path is not None and (words := path.read_bytes()[-600:].decode(errors="replace").strip()):
                    said.append(f"{name} said: {words}")
        return "; ".join(said) or "it said nothing"

    def is_running(self) -> bool:
        """Tell whether the process lives."""
        return self.process.poll() is None

    def cpu_s(self) -> float:
        """Return processor time that it used, in seconds; 0 once it ended."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def end(self) -> None:
        """Kill the process and wait for its end; may be called again."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGKILL)
            give_up = time.monotonic() + 10
            while self.process.poll() is None and time.monotonic() < give_up:
                await asyncio.sleep(0.002)
        if self._monitor is not None:
            await self._monitor.close()
        if self._channel is not None:
            self._channel.end("the machine was ended")


def state_pipe(state: bytes) -> tuple[int, int]:
    """Return a pipe that holds a machine's state, or as much as fits: read end and write end.

    Raises:
        SandboxError: The state is larger than a pipe can be.
    """
    read_end, write_end = os.pipe()
    try:
        fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, max(2**20, len(state)))
    except OSError as problem:
        os.close(read_end)
        os.close(write_end)
        raise SandboxError(f"qemu: a pipe for {len(state)} bytes of state was refused; {problem.strerror}") from None
    return read_end, write_end
