"""``python -m paged_kv.ascend``: build the kernels, or say what there is to run them on."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paged_kv.ascend.build import build_kernels
from paged_kv.ascend.errors import DeviceError
from paged_kv.ascend.inspect import Info, info, is_available


def main(arguments: list[str] | None = None) -> int:
    """Run a command line.

    Parameters
    ----------
    arguments : list of str, optional
        ``sys.argv`` without it.

    Returns
    -------
    int
        0, or 1 where something is missing; what, is on the standard error.
    """
    parser = argparse.ArgumentParser(prog="python -m paged_kv.ascend", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    build = commands.add_parser("build", help="compile the kernels with CANN's bisheng")
    build.add_argument(
        "--output", type=Path, help="the library to write, instead of the one in the user's cache"
    )
    show = commands.add_parser("info", help="say which device, runtime and kernels there are")
    show.add_argument("--device", type=int, default=0, help="the device's number")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "build":
            print(f"built {build_kernels(chosen.output)}")
            return 0
        print(described(info(chosen.device)))
    except (DeviceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    ready = is_available()
    if not ready:
        print(ready.reason, file=sys.stderr)
    return int(not ready)


def described(one: Info) -> str:
    """Write a device's description, a line for each thing."""

    def size(nbytes: int | None) -> str:
        return "unknown" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"

    lines = {
        "device": f"ascend:{one.index} of {one.num_devices}, {one.soc}",
        "vector cores": one.vector_cores or "unknown",
        "cube cores": one.cube_cores or "unknown",
        "memory": f"{size(one.memory.free)} free of {size(one.memory.total)}",
        "L2 cache": size(one.l2_bytes),
        "runtime": f"{one.runtime_version or 'unknown version'}, {one.runtime_path}",
        "kernels": one.kernels or "none",
        "lacks": ", ".join(one.lacks) or "nothing",
    }
    return "\n".join(f"{name:<14}{value}" for name, value in lines.items())


if __name__ == "__main__":
    sys.exit(main())
