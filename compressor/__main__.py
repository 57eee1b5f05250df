"""`python -m compressor`."""

from compressor.cli import main

main()
