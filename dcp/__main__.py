"""`python -m dcp` is the command `dcp`."""

from dcp.cli import main

if __name__ == "__main__":
    main()
