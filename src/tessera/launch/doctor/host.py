"""Checks of this host that need no engine: versions, switches, drivers, memory, limits, network.

Each check takes the facts as arguments, so that its verdict can be tested.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

from ...core import environment as switches
from ...core.context import settings
from ...core.errors import TesseraError
from ...core.limits import limits
from ...core.machine.visible import NAMES, visible_count
from ...core.version import DISTRIBUTION, VERSION
from .report import Check

MIB = 2**20
LEAST_SHARED, LEAST_FILES = 64 * MIB, 1024
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
Environment = Mapping[str, str]


def host_checks(environment: Environment = os.environ) -> list[Check]:
    """Returns all checks of this host and this process."""
    gpus = sorted(map(str, Path("/dev").glob("nvidia[0-9]*")))
    fabric = Path("/sys/class/infiniband")
    return [
        check_versions(*versions()),
        check_switches(environment),
        check_driver(gpus, *driver()),
        check_chips(sorted(map(str, Path("/dev/tenstorrent").glob("*")))),
        check_shared_memory(*shared_memory()),
        check_limits(
            resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            sorted(p.name for p in fabric.iterdir()) if fabric.is_dir() else [],
        ),
        check_interfaces(interfaces(), environment),
        check_name(socket.gethostname(), _address),
        check_hangs(),
    ]


# ---- versions ----------------------------------------------------------------------------------
def versions() -> tuple[list[str], dict[str, str]]:
    """Returns the requirements of Tessera, and the installed versions by name."""
    try:
        needed = [r for r in requires(DISTRIBUTION) or [] if "extra ==" not in r]
    except PackageNotFoundError:
        needed = []
    plugins = [f"jax-cuda{n}-{part}" for n in (12, 13) for part in ("plugin", "pjrt")]
    names = ["jaxlib", *(Requirement(r).name for r in needed), *plugins]
    found = {"tessera": VERSION}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return needed, found


def check_versions(needed: Sequence[str], installed: Mapping[str, str]) -> Check:
    """Checks that each library is installed in a fitting version, and jax's parts in one
    version."""
    bad = []
    for text in needed:
        r = Requirement(text)
        versions_text = installed.get(r.name)
        if versions_text is None or not r.specifier.contains(versions_text, prereleases=True):
            bad.append((f"{r.name} {versions_text or 'is missing'}", f'"{r.name}{r.specifier}"'))
    jaxlib = installed.get("jaxlib")
    for name in ("jax", *(n for n in installed if n.startswith("jax-cuda"))):
        if jaxlib and name in installed and installed[name] != jaxlib:
            bad.append((f"{name} {installed[name]} with jaxlib {jaxlib}", f'"{name}=={jaxlib}"'))
    shown = (
        "tessera",
        "jax",
        "jaxlib",
        "numpy",
        *(n for n in installed if n.startswith("jax-cuda")),
    )
    versions_text = ", ".join(f"{n} {installed[n]}" for n in shown if n in installed)
    return Check(
        "versions",
        "fix" if bad else "ok",
        "; ".join(what for what, _ in bad)
        or f"python {platform.python_version()}, {versions_text}",
        f"pip install {' '.join(dict.fromkeys(how for _, how in bad))}" if bad else "",
        facts={"python": platform.python_version(), **installed},
    )


# ---- switches ----------------------------------------------------------------------------------
def check_switches(environment: Environment) -> Check:
    """Checks that each environment variable of Tessera is known and has a valid value."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        switches.warn_of_unknown(environment)
    messages = [str(w.message) for w in said]
    fixes = ["correct the name, or unset it"] if messages else []
    for ask in (settings, limits, lambda: visible_count(2**20, environment)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ask()
        except TesseraError as error:
            messages.append(first_line(error))
            fixes.append(fix_of(error))
    given = {k: v for k, v in environment.items() if k in (*switches.ALL_VARIABLES, *NAMES)}
    given.pop(switches.TOKEN, None)  # a secret of the run's processes
    if messages:
        return Check("switches", "fix", "\n".join(messages), "; ".join(dict.fromkeys(fixes)))
    text = ", ".join(f"{k}={v}" for k, v in sorted(given.items()))
    return Check("switches", "ok", text or "none is set", facts={"set": given})


def first_line(error: BaseException) -> str:
    """Returns the first line of an error."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def fix_of(error: BaseException) -> str:
    """Returns the fix of one of Tessera's errors; "" for others."""
    for line in str(error).splitlines():
        name, _, fix = line.strip().partition(" : ")
        if name.strip() == "fix":
            return fix
    return ""


# ---- drivers -----------------------------------------------------------------------------------
def driver() -> tuple[str, bool]:
    """Returns the version of NVIDIA's driver ("" without one), and whether jax's plugin for it is
    installed."""
    plugin = False
    for n in (12, 13):
        try:
            version(f"jax-cuda{n}-plugin")
            plugin = True
        except PackageNotFoundError:
            continue
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "", plugin
    ask = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
        return out.split("\n")[0].strip(), plugin
    except (OSError, subprocess.SubprocessError):
        return "", plugin


def check_driver(gpus: Sequence[str], driver: str, plugin: bool) -> Check:
    """Checks that GPUs, their driver and jax's plugin fit together."""
    facts = {"gpus": len(gpus), "driver": driver, "plugin": plugin}
    many = f"{len(gpus)} NVIDIA GPU{'s' * (len(gpus) != 1)}"
    if not gpus:
        return Check("driver", "ok", "no NVIDIA GPU: the devices are CPUs", facts=facts)
    if not driver:
        fix = "install NVIDIA's driver, and see that nvidia-smi lists the GPUs"
        return Check("driver", "fix", f"{many}, and no driver answers", fix, facts=facts)
    if not plugin:
        fix = 'pip install "jax[cuda12]" (or cuda13), which brings the plugin for this jax'
        found = f"{many}, driver {driver}; jax has no plugin for them and uses the CPU"
        return Check("driver", "fix", found, fix, facts=facts)
    return Check("driver", "ok", f"{many}, driver {driver}", facts=facts)


def check_chips(chips: Sequence[str]) -> Check:
    """Reports Tenstorrent chips, which jax cannot use."""
    if not chips:
        return Check("chips", "ok", "no Tenstorrent chip", facts={"chips": 0})
    return Check(
        "chips", "note",
        f"{len(chips)} Tenstorrent chips: jax has no backend for them, programs run on the CPU",
        facts={"chips": len(chips)},
    )  # fmt: skip


# ---- memory, limits ----------------------------------------------------------------------------
def shared_memory() -> tuple[int, int]:
    """Returns the total and free bytes of /dev/shm; 0 if there is none."""
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def check_shared_memory(total: int, free: int) -> Check:
    """Checks that /dev/shm has room for the buffers between processes of one host."""
    facts = {"total_bytes": total, "free_bytes": free}
    text = f"/dev/shm: {free / MIB:,.0f} of {total / MIB:,.0f} MiB free"
    if free >= LEAST_SHARED:
        return Check("shared memory", "ok", text, facts=facts)
    fix = f"free at least {LEAST_SHARED // MIB} MiB; in a container start it with --shm-size=1g"
    return Check("shared memory", "fix", text, fix, facts=facts)


def check_limits(files: int, locked: int, fabric: Sequence[str]) -> Check:
    """Checks the limits of open files, and of locked memory for RDMA."""
    locks = "any" if locked in (-1, resource.RLIM_INFINITY) else f"{locked // 1024:,} KiB"
    found = f"{files:,} open files, {locks} locked memory"
    facts = {"open_files": files, "locked_bytes": locked, "rdma": list(fabric)}
    fixes = []
    if 0 <= files < LEAST_FILES:
        fixes.append(f"ulimit -n {LEAST_FILES * 16}")
    if fabric and locks != "any" and locked < 2**30:
        fixes.append("ulimit -l unlimited, which RDMA needs")
    if not fixes:
        return Check("limits", "ok", found, facts=facts)
    return Check("limits", "fix", found, "; ".join(fixes), facts=facts)


# ---- network -----------------------------------------------------------------------------------
def interfaces() -> dict[str, str]:
    """Returns the state of each network interface by its name ("up", "down", "unknown")."""
    found = {}
    for _, name in socket.if_nameindex():
        try:
            found[name] = Path(f"/sys/class/net/{name}/operstate").read_text().strip()
        except OSError:
            found[name] = "unknown"
    return found


def check_interfaces(interfaces: Mapping[str, str], environment: Environment) -> Check:
    """Checks that the interfaces named in variables exist, and that one to other hosts is up."""
    bad, fixes = [], []
    for name in INTERFACES:
        given = environment.get(name, "").strip().lstrip("^=")
        for one in filter(None, given.split(",")):
            if not any(i.startswith(one) for i in interfaces):
                bad.append(f"{name}={one}: there is no such interface")
                fixes.append(f"name one of {', '.join(interfaces)}, or unset {name}")
    others = [i for i, state in interfaces.items() if i != "lo" and state != "down"]
    text = ", ".join(f"{i} {state}" for i, state in interfaces.items()) or "none"
    facts = {"interfaces": dict(interfaces)}
    if bad:
        return Check("interfaces", "fix", "; ".join(bad), "; ".join(fixes), facts=facts)
    if not others:
        alone = f"{text}: other hosts cannot be reached"
        return Check("interfaces", "note", alone, facts=facts)
    return Check("interfaces", "ok", text, facts=facts)


def _address(name: str) -> str:
    return socket.gethostbyname(name)


def check_name(name: str, address: Callable[[str], str]) -> Check:
    """Checks that this host's name resolves to an address: processes of CPUs connect by it."""
    try:
        at = address(name)
    except OSError:
        fix = f"add the line '127.0.1.1 {name}' (or this host's address) to /etc/hosts"
        found = f"{name} has no address"
        return Check("host name", "fix", found, fix)
    if at.startswith("127."):
        return Check(
            "host name", "note", f"{name} is {at}, which other hosts cannot reach",
            "of several hosts: give the name its address in /etc/hosts, or name an interface with "
            "GLOO_SOCKET_IFNAME", facts={"address": at},
        )  # fmt: skip
    return Check("host name", "ok", f"{name} is {at}", facts={"address": at})


# ---- what ends a program that hangs -------------------------------------------------------------
def check_hangs() -> Check:
    """Checks the time limit of collectives, and that the flight recorder can write its record."""
    try:
        limit_s, folder = limits().collective_s, switches.folder(switches.FLIGHT_DIR)
    except TesseraError as error:
        return Check("hangs", "fix", first_line(error), fix_of(error))
    facts = {"limit_s": limit_s, "folder": folder}
    place = Path(folder)
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError:
        fix = f"set {switches.FLIGHT_DIR} to a folder that can be written"
        return Check("hangs", "fix", f"{folder} cannot be written", fix, facts=facts)
    found = (
        f"after {limit_s:g} s the program ends and names the rank that is missing; its records come"
        f" to {folder}: tessera flight FILE"
    )
    return Check("hangs", "ok", found, facts=facts)
