"""The entry point of ``warren`` and of ``python warren.py``."""

from cli.main import main

if __name__ == "__main__":
    main()
