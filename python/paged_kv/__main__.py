"""``python -m paged_kv`` is the command ``paged-kv``."""

from paged_kv.cli import main

if __name__ == "__main__":
    main()
