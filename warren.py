"""The entry point of ``warren`` and of ``python warren.py``."""

from cli.standard_streams import prepare


def main() -> None:
    """Run the command line."""
    prepare()
    from cli.main import main as run

    run()


if __name__ == "__main__":
    main()
