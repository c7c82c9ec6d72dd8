"""`python -m tessera`, the same as the command `tessera`."""

from .launch.cli import main

if __name__ == "__main__":
    main()
