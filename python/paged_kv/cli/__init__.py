"""The command ``paged-kv``; it needs the extra ``paged-kv[cli]``, and says so where that is missing."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its status: 0, 1 for a failure, 2 for wrong usage."""
    try:
        from paged_kv.cli.app import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        print(
            "paged-kv: the command line needs typer, which is not installed.\n"
            "Install it with: pip install 'paged-kv[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    app(prog_name="paged-kv")
