"""The `flopcast` command, also as `python -m flopcast`."""


def main() -> None:
    """Runs the command line. Ctrl-C ends it in a line, also in the half second in which modules load."""
    try:
        from flopcast.roofline.cli.app import main as command_line

        command_line()
    except KeyboardInterrupt:
        import sys

        from flopcast.errors import INTERRUPTED

        print("flopcast: stopped", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None


if __name__ == "__main__":
    main()
