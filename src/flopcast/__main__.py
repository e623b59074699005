"""`python -m flopcast` is the `flopcast` command."""

from flopcast.roofline.cli.app import main

main()
