#!/bin/sh
# Runs all tests of the emulator: prints a line for each, then the counts; exit code 1 if one failed.
exec python3 "$(dirname "$0")/run.py" "$@"
