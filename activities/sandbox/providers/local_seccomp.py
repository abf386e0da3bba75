"""The system call filter of local sandboxes: what an agent's programs never need of the kernel is refused.

A deny list, as programs of every kind must work; the namespaces and the missing capabilities are the first line, and this
takes away what has been the way through them: new namespaces, mounts, bpf, io_uring, keys, other families of sockets.
bubblewrap installs it before init starts, so every process of the sandbox has it from its first instruction, and no
process can take it off (seccomp(2)).

Built by libseccomp, which comes with every Debian since apt needs it, and knows the numbers of each architecture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import termios
from functools import cache

from activities.sandbox.port import BadSandboxSpec

MISSING = (
    "provider: local needs libseccomp for the system call filter of its sandboxes, and libseccomp.so.2 was not found: install "
    "it (Debian and Ubuntu: apt-get install libseccomp2; Fedora: dnf install libseccomp)"
)
ARCHITECTURES = ("x86_64", "aarch64")
"""Where the arguments of `clone` are in the order that the rules below expect, and which the tests ran on."""

ALLOW, KILL_PROCESS, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
ATTRIBUTE_BAD_ARCHITECTURE, ATTRIBUTE_OPTIMIZE = 2, 8
NOT_EQUAL, EQUAL, GREATER_EQUAL, MASKED_EQUAL = 1, 4, 5, 7
"""From seccomp.h."""
INT = 0xFFFFFFFF
"""The bits that the kernel looks at where it takes an int: a rule on all 64 could be passed by with bits above them."""

NO_PERMISSION = (
    # mounts and roots
    *("mount", "umount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsconfig", "fsmount"),
    *("fspick", "mount_setattr", "setns", "swapon", "swapoff", "quotactl", "quotactl_fd", "acct", "fanotify_init"),
    *("fanotify_mark", "open_by_handle_at", "name_to_handle_at", "sysfs", "ustat", "nfsservctl", "lookup_dcookie", "uselib"),
    # other processes
    *("ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "pidfd_getfd", "kcmp", "move_pages", "migrate_pages"),
    # the kernel and the machine
    *("bpf", "perf_event_open", "userfaultfd", "keyctl", "add_key", "request_key", "init_module", "finit_module"),
    *("delete_module", "create_module", "query_module", "get_kernel_syms", "kexec_load", "kexec_file_load", "reboot", "syslog"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "stime", "sethostname", "setdomainname", "vhangup"),
    *("iopl", "ioperm", "modify_ldt", "vm86", "vm86old", "_sysctl", "afs_syscall", "tuxcall", "vserver", "security"),
)
NOT_THERE = ("clone3", "io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret")
"""Refused as by a kernel that does not know them, so that programs fall back; the flags of clone3 lie where no filter can see."""
NUMBERS = {"quotactl_fd": 443, "memfd_secret": 447, "process_madvise": 440, "mount_setattr": 442}
"""Of calls that an older libseccomp does not know; from 424 on they are the same on every architecture."""
NEWEST = 462
"""The newest call that was looked at (mseal, Linux 6.10). Later ones are refused as by a kernel that does not know them."""

NAMESPACES = (0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
NEW_TIME = 0x80
"""CLONE_NEWTIME, only for unshare: in the flags of clone this bit belongs to the signal."""
FAMILIES = {1, 2, 10, 16}
"""AF_UNIX, INET, INET6 and NETLINK; the last for listing interfaces only, which is its protocol 0."""
NETLINK, LAST_FAMILY = 16, 45
KIND, CHARACTER_DEVICE, BLOCK_DEVICE = 0o170000, 0o020000, 0o060000
PUNCH_HOLE = 2
QUERY = 1 << 31
PERSONAS = [1 << bit for bit in range(31) if 1 << bit not in (0x8, 0x20000, 0x40000)]
"""All bits of personality(2) but PER_LINUX32, UNAME26 and ADDR_NO_RANDOMIZE, which builds and sanitizers use."""


class Comparison(ctypes.Structure):
    """struct scmp_arg_cmp."""

    _fields_ = (("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64), ("b", ctypes.c_uint64))


Check = tuple[int, int, int, int]
"""(argument, operator, value, second value), as in struct scmp_arg_cmp."""


def has(argument: int, bits: int, mask: int = 0) -> Check:
    """Return the check that an argument, within `mask`, has exactly these bits."""
    return (argument, MASKED_EQUAL, mask or bits, bits)


def rules() -> list[tuple[str, int, tuple[Check, ...]]]:
    """Return (system call, errno, checks that must all hold) for everything that is refused."""
    refused: list[tuple[str, int, tuple[Check, ...]]] = []
    refused += [(name, errno.EPERM, ()) for name in NO_PERMISSION]
    refused += [(name, errno.ENOSYS, ()) for name in NOT_THERE]
    refused += [(name, errno.EPERM, (has(0, flag),)) for name in ("clone", "unshare") for flag in NAMESPACES]
    refused.append(("unshare", errno.EPERM, (has(0, NEW_TIME),)))
    for name in ("socket", "socketpair"):
        others = [family for family in range(LAST_FAMILY + 1) if family not in FAMILIES]
        refused += [(name, errno.EAFNOSUPPORT, (has(0, family, INT),)) for family in others]
        refused.append((name, errno.EAFNOSUPPORT, ((0, GREATER_EQUAL, LAST_FAMILY + 1, 0),)))
    refused.append(("socket", errno.EPROTONOSUPPORT, ((0, EQUAL, NETLINK, 0), (2, NOT_EQUAL, 0, 0))))
    # Both would type into a terminal as if its owner had.
    refused += [("ioctl", errno.EPERM, (has(1, request, INT),)) for request in (termios.TIOCSTI, termios.TIOCLINUX)]
    for name, argument in (("mknod", 1), ("mknodat", 2)):
        refused += [(name, errno.EPERM, (has(argument, kind, KIND),)) for kind in (CHARACTER_DEVICE, BLOCK_DEVICE)]
    # To set the limits of another process, such as init's.
    refused.append(("prlimit64", errno.EPERM, ((0, NOT_EQUAL, 0, 0), (2, NOT_EQUAL, 0, 0))))
    # Room on the disk that nobody has written is taken faster than a watcher can look.
    refused += [("fallocate", errno.EOPNOTSUPP, (has(1, 0, PUNCH_HOLE),))]
    # 0xFFFFFFFF asks and sets nothing.
    refused += [("personality", errno.EPERM, (has(0, bit, bit | QUERY),)) for bit in PERSONAS]
    refused += [("personality", errno.EPERM, (has(0, QUERY, QUERY | 1 << bit),)) for bit in range(31)]
    return refused


def library() -> ctypes.CDLL:
    """Load libseccomp. Raises BadSandboxSpec with a remedy."""
    if platform.machine() not in ARCHITECTURES:
        raise BadSandboxSpec(
            f"provider: local has no system call filter for {platform.machine()}, only for {' and '.join(ARCHITECTURES)}; "
            "use another provider, such as docker"
        )
    try:
        found = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise BadSandboxSpec(MISSING) from error
    found.seccomp_init.restype = ctypes.c_void_p
    found.seccomp_init.argtypes = [ctypes.c_uint32]
    found.seccomp_attr_set.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32]
    found.seccomp_rule_add_array.argtypes = [
        *(ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint, ctypes.POINTER(Comparison))
    ]
    found.seccomp_export_bpf.argtypes = [ctypes.c_void_p, ctypes.c_int]
    found.seccomp_release.argtypes = [ctypes.c_void_p]
    return found


@cache
def system_call_filter() -> bytes:
    """Return the filter as BPF instructions for this machine. Raises BadSandboxSpec when it cannot be made."""
    seccomp = library()
    context = seccomp.seccomp_init(ALLOW)
    target = os.memfd_create("seccomp", os.MFD_CLOEXEC)
    try:
        # Programs of a foreign architecture, whose calls have other numbers, end at their first call.
        checked(seccomp.seccomp_attr_set(context, ATTRIBUTE_BAD_ARCHITECTURE, KILL_PROCESS), "the architecture")
        seccomp.seccomp_attr_set(context, ATTRIBUTE_OPTIMIZE, 2)  # only speed, and only from version 2.5 on
        for name, code, checks in rules():
            number = seccomp.seccomp_syscall_resolve_name(name.encode())
            if number < 0:  # not on this architecture, or not known to this libseccomp
                number = NUMBERS.get(name, -1)
            if number >= 0:
                array = (Comparison * len(checks))(*(Comparison(*check) for check in checks))
                checked(seccomp.seccomp_rule_add_array(context, ERRNO | code, number, len(checks), array), name)
        checked(seccomp.seccomp_export_bpf(context, target), "the whole")
        program = os.pread(target, os.fstat(target).st_size, 0)
    finally:
        os.close(target)
        seccomp.seccomp_release(context)
    return refuse_from(NEWEST + 1) + program


def refuse_from(number: int) -> bytes:
    """Return the instructions that answer every call from `number` on with ENOSYS, and go on for the others.

    On x86_64 that includes the x32 ABI, whose numbers begin at 2^30. Format: struct sock_filter of linux/filter.h.
    """
    load, jump_unless_reached, answer = 0x20, 0x35, 0x06  # BPF_LD|W|ABS, BPF_JMP|JGE|K, BPF_RET|K
    instructions = ((load, 0, 0, 0), (jump_unless_reached, 0, 1, number), (answer, 0, 0, ERRNO | errno.ENOSYS))
    return b"".join(struct.pack("=HBBI", *each) for each in instructions)


def checked(result: int, what: str) -> None:
    """Raise BadSandboxSpec when libseccomp could not do it."""
    if result != 0:
        raise BadSandboxSpec(
            f"provider: local cannot make its system call filter: libseccomp refused {what}: {os.strerror(-result)}"
        )
