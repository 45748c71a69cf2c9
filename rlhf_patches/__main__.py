"""``python -m rlhf_patches`` is ``rlhf-patches``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
