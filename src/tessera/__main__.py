"""`python -m tessera` is the command `tessera`."""

from .launch.cli import main

if __name__ == "__main__":
    main()
