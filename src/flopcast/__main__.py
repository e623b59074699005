"""`python -m flopcast` is the `flopcast` command."""

from flopcast.roofline.cli import main

main()
