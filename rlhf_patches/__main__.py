"""``python -m rlhf_patches`` runs ``rlhf-patches``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
