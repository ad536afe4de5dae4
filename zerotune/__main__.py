"""`python -m zerotune` is the command `zerotune`."""

from zerotune.flows.cli import main

if __name__ == "__main__":
    main()
