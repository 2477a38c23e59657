"""`python -m harness`: the command without its script."""

from harness.cli import main

if __name__ == "__main__":
    main()
